"""One episode as a state machine without I/O: it returns requests and actions, and is given the results.

Every schedule (lockstep, asynchronous, in workers) drives the same machine, so all give the same trajectory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from shoal.core.data import (
    MOST_REWARD,
    Call,
    Ending,
    Status,
    ToolUse,
    Trajectory,
    Turn,
    check_flags,
    ending_of,
    info_of,
    reward_of,
)
from shoal.core.errors import EngineError, EnvError, format_error, whole_characters
from shoal.envs.actions import Projected, Projection, ToolCall
from shoal.envs.tools import Tool, tools_of
from shoal.rollout.images import picture_url
from shoal.rollout.prompts import PastTurn, Prompter, Scene
from shoal.samplers.sampler import Completion, Key, Message, Request, Sampling
from shoal.samplers.tokenizers import first_difference


@dataclass(frozen=True, slots=True)
class Role:
    """Instructions, words and limits of one kind of env."""

    tag: str
    instructions: str
    projection: Projection
    max_turns: int
    prompt: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `PromptConfig` that this kind of env has of its own."""
    draws_actions: bool = True
    """Whether the env can name a valid action at random; it cannot where actions are free text without a rule."""
    has_expert: bool = True
    """Whether the env can name an expert's action."""
    tools: tuple[Tool, ...] | None = None
    """Of an env that acts by tools: those of its episode with seed 0, others may have others; None of other envs."""

    def word(self, action: int | str) -> str:
        """The env's word for an action."""
        return next((word for word, known in self.projection.lookup.items() if known == action), str(action))

    def project(self, text: str, words: Sequence[str]) -> Projected:
        """The actions in a response to an env that accepts `words` now, if it lists them."""
        return self.projection(text)


@dataclass(frozen=True, slots=True)
class EpisodeId:
    """Identifies an episode of a run; all its seeds are derived from it."""

    seed: int  # of the run, or of its evaluation
    iteration: int
    group: int
    member: int
    env_seed: int

    def key(self, turn: int = 0) -> Key:
        """The key of a turn's sampling noise."""
        return Key(self.seed, (self.iteration, self.group, self.member, turn))

    def record(
        self, tag: str, status: Status, error: str | None, ended: Ending | None = None,
        calls: Sequence[Call] = (), turns: Sequence[Turn] = (), *,
        success: bool = False, terminated: bool = False, truncated: bool = False, **more: Any,
    ) -> Trajectory:  # fmt: skip
        """The trajectory of this episode; `ended` says why it ended, unless its status does."""
        return Trajectory(
            tag, self.iteration, self.group, self.member, self.env_seed, tuple(calls), tuple(turns),
            success=success, terminated=terminated, truncated=truncated, status=status, error=error,
            ended=ending_of(status) or ended, **more,
        )  # fmt: skip


class Episode:
    """From reset to the end; `begin`, then `request`/`respond`/`observe` in turn until `over`.

    Where `respond` leaves `calls` there are no actions: `use` takes what came of them, and `end_turn` ends the turn.
    """

    def __init__(self, place: EpisodeId, role: Role, prompter: Prompter, sampling: Sampling) -> None:
        self.place = place
        self.role = role
        self.over = False
        self._prompter = prompter.variant(role.prompt)
        self._sampling = sampling
        self._calls: list[Call] = []
        self._turns: list[Turn] = []
        self._past: list[PastTurn] = []
        self._used: tuple[ToolUse, ...] = ()  # of the turn before
        self._prompt: tuple[int, ...] = ()
        self.known = 0
        """Tokens of the last request that the turn before had."""
        self._completion = Completion((), (), "stop")  # of what is given as text
        self._before: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._chat: list[Message] = []
        self._images: tuple[str, ...] = ()
        self._paid = 0.0
        self._success = self._terminated = self._truncated = False
        self._ended: Ending = "env"

    def begin(self, observation: Any, info: Any) -> None:
        """Record the reset of the env.

        Raises:
            TypeError, ValueError: what was observed is no text or picture.
            EnvError: the info is no dict, its actions are no list, or it lacks the tools of an env that acts by them.
        """
        info = info_of(info)
        if self.role.tools is not None:
            self._prompter = self._prompter.offering(tools_of(info))
        self._see(observation, info)

    @property
    def scene(self) -> Scene:
        """The fields of the next prompt."""
        role, shown = self.role, self._image is not None
        words = self.words or role.projection.words()
        return Scene(role.instructions, self._text, words, self._past, role.max_turns, int(shown))

    def request(self) -> Request:
        """The next request to the engine."""
        role, prompter, scene = self.role, self._prompter, self.scene
        before = () if self._before is None else self._before[0] + self._before[1]
        tools = prompter.tools
        if self._used and tools is not None and self._before is not None:
            self._prompt = before + tools.extend_results(self._before[1], self._used)
        else:
            self._prompt = prompter.prompt(scene, self._before)
        self.known = len(before) if before and self._prompt[: len(before)] == before else 0
        if prompter.config.mode == "append" or tools is not None:
            said: Message = {"role": "user", "content": prompter.message(scene)}
            if prompter.config.mode == "window" and not self._used:
                self._chat = [said]
            else:
                self._check_append(tools.messages(self._used) if tools is not None and self._used else [said])
        if self._used:
            pass  # the pictures are those of the turn before
        elif prompter.shows_images:
            shown_before = self._images if prompter.config.mode == "append" else ()
            self._images = shown_before if self._image is None else (*shown_before, self._image)
        elif self._image is not None and not self._text:
            raise EngineError(
                f"{role.tag} shows pictures only, and this engine takes none: use an engine for images, or an "
                f"env that observes text"
            )
        key = self.place.key(len(self._turns))
        return Request(self._prompt, key, self._sampling, self._images)

    def respond(self, completion: Completion) -> list[int | str]:
        """Record the engine's response; returns the env actions of this turn, to be stepped one by one.

        There are none where the prompt has filled the context: the episode is truncated, without another turn, and
        `ended` is "context".

        Raises:
            EngineError: the tokenizer cannot decode the answer.
        """
        if completion.finish == "context":
            self._truncated = self.over = True
            self._ended = "context"
            self._projected = Projected((), False)
            return []
        self._completion = completion
        try:
            written = _text(self._prompter.tokenizer.decode(completion.token_ids))
        except Exception as error:
            raise EngineError(
                f"the tokenizer cannot decode the engine's answer ({format_error(error)}): "
                f"{str(completion.token_ids)[:200]}"
            ) from error
        response = self._prompter.config.response(written)
        read, tools = partial(self.role.project, words=self.words), self._prompter.tools
        if self.role.tools is not None and tools is not None:
            return self.say(response, tools.act(response))
        return self.say(response, read(response) if tools is None else tools.read(response, read))

    def say(self, response: str, projected: Projected) -> list[int | str]:
        """Record a response as text, with what was found in it; returns the env actions of this turn."""
        self._response, self._projected = response, projected
        self._reward, self._valid = 0.0, projected.valid
        self._shown = self._text_before = self._text
        self._anchor_before, self._image_before = self.anchor, self._image
        if self._used:
            self._shown = "\n".join(use.shown for use in self._used)
            self._anchor_before = _key((self.anchor, self._shown))
        self._used = ()
        return list(projected.actions)

    @property
    def turn(self) -> int:
        """The number of the present turn."""
        return len(self._turns)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools in the last response, but for those that are the env's action."""
        return self._projected.calls if self.role.tools is None else ()

    def use(self, uses: Sequence[ToolUse]) -> None:
        """Record what came of the calls of this turn, in their order."""
        self._used = tuple(uses)

    def observe(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """Record the result of one action of this turn.

        Raises:
            TypeError, ValueError: the reward is not finite, or too large with those before; or what was observed is no
                text or picture.
            EnvError: reward, info, or its actions are no number, dict or list, or a flag is no truth value.
        """
        if not math.isfinite(number := reward_of(reward)):
            raise ValueError(f"the reward must be a finite number, got {reward!r}")
        info = info_of(info)
        self._paid += abs(number)
        if not self._paid <= MOST_REWARD:
            raise ValueError(
                f"the absolute rewards of an episode must sum to at most {MOST_REWARD:.3g} (float32), "
                f"got {self._paid:.3g} with a reward of {number}"
            )
        valid, success = info.get("action_is_valid", True), info.get("success", info.get("won", False))
        check_flags(terminated, truncated, action_is_valid=valid, success=success)
        self._reward += number
        self._valid, self._success = self._valid and bool(valid), bool(success)
        self._terminated, self._truncated = bool(terminated), bool(truncated)
        if self.role.tools is not None:
            self._used = results_of(self._projected.calls, info)
        self._see(observation, info)

    def end_turn(self) -> Turn | None:
        """Record the turn, and check whether the episode is over; None where there was no room for another turn."""
        if self._ended == "context":
            return None
        completion, actions, used = self._completion, self._projected.actions, self._used
        words = ", ".join(self.role.word(action) for action in actions) if self._projected.valid else "(none)"
        if used and self._projected.valid:
            words = ", ".join(f"call {use.name}" for use in used)
        parent = len(self._calls) - 1 if self.known else None
        self._calls.append(
            Call(
                self._prompt[self.known :],
                parent,
                completion.token_ids,
                completion.logprobs,
                completion.weights_version,
                completion.finish,
            )
        )
        turn = Turn(
            observation=self._shown,
            call=len(self._calls) - 1,
            response=self._response,
            action=words if self._projected.valid else None,
            action_is_valid=self._valid,
            reward=self._reward,
            anchor=self._anchor_before,
            image=self._image_before,
            tools=used,
        )
        self._turns.append(turn)
        self._chat.append({"role": "assistant", "content": self._response})
        self._before = (self._prompt, completion.token_ids)
        if used and self.role.tools is None and self._prompter.tools is not None:
            cut = len(self._turns) - len(self._past) >= self._prompter.tools.max_turns
        else:
            self._past.append(PastTurn(self._text_before, self._response, words, self._reward))
            cut = not (self._terminated or self._truncated) and len(self._past) >= self.role.max_turns
        if cut:
            self._truncated, self._ended = True, "turns"
        self.over = self._terminated or self._truncated
        return turn

    def trajectory(
        self, status: Status = "ok", error: str | None = None, ended: Ending | None = None
    ) -> Trajectory:
        """The record so far; a `status` other than "ok" says why it ends here, or `ended`."""
        return self.place.record(
            self.role.tag, status, None if error is None else whole_characters(error),
            ended or (self._ended if self.over else None), self._calls, self._turns,
            success=self._success and status == "ok", terminated=self._terminated, truncated=self._truncated,
            last=self._text if self.over and self._turns else msgspec.UNSET,
        )  # fmt: skip

    def _check_append(self, messages: Sequence[Message]) -> None:
        """The prompt must begin with every token of the turn before, and with nothing else."""
        self._chat += messages
        if self._before is None:
            return
        known = self._before[0] + self._before[1]
        if self._prompt[: len(known)] != known:
            at = first_difference(known, self._prompt)
            part = "prompt" if at < len(self._before[0]) else "response"
            decode = self._prompter.tokenizer.decode
            raise EngineError(
                f"the prompt of turn {len(self._turns)} does not extend the one before: at token {at}, in its "
                f"{part}, it has {decode(self._prompt[at : at + 8])!r} instead of {decode(known[at : at + 8])!r}"
            )
        self._prompter.check_drift(self._chat, self._prompt)

    def _see(self, observation: Any, info: Mapping[str, Any]) -> None:
        if isinstance(observation, str):
            self._text, picture = str.__str__(observation), info.get("image")  # plain text, be it NumPy's
        else:
            if observation is None and "text" not in info:
                raise TypeError("the observation must be text or a picture, got None")
            self._text, picture = str(info.get("text", "")), observation
        self._image = None if picture is None else picture_url(picture)
        self.words = words_of(info)
        self.anchor = anchor_of(info, self._text or self._image)
        for text in (self._text, self.anchor, *self.words, self._image or ""):
            _text(text)


def results_of(calls: Sequence[ToolCall], info: Mapping[str, Any]) -> tuple[ToolUse, ...]:
    """What an env that acts by tools says came of the calls of a step.

    Raises:
        EnvError: it does not have a text, or `{"error": text}`, for each call.
    """
    given = info.get("tool_results")
    if not isinstance(given, list | tuple) or len(given) != len(calls):
        raise EnvError(f"info['tool_results'] must list what came of {len(calls)} calls, got {given!r:.80}")
    uses = []
    for call, said in zip(calls, given, strict=True):
        parts = {"result": said} if isinstance(said, str) else said
        if not isinstance(parts, Mapping) or not isinstance(parts.get("error", parts.get("result")), str):
            raise EnvError(
                f"each of info['tool_results'] must be text or {{'error': text}}, got {said!r:.80}"
            )
        uses.append(ToolUse(call.name, call.arguments, parts.get("result", ""), parts.get("error")))
    return tuple(uses)


def words_of(info: Mapping[str, Any]) -> list[str]:
    """The actions that an env lists in its info; those of a set in alphabetical order.

    Raises:
        EnvError: they are one text, whose letters are no actions.
    """
    listed = info.get("available_actions")
    if isinstance(listed, str | bytes):
        raise EnvError(f"available_actions must be a list of words, got {listed!r:.80}")
    words = list(map(str, () if listed is None else listed))
    return sorted(words) if isinstance(listed, set | frozenset) else words


def anchor_of(info: Mapping[str, Any], shown: Any) -> str:
    """A key of the state, equal only for equal states: from the env's `anchor`, else from its observation."""
    anchor = info.get("anchor")
    return _key(shown if anchor is None else anchor)


def _key(value: Any, text: Callable[[str], str] = str.__str__) -> str:
    """A value as `text`; arrays, of which `str` leaves out what is long or beyond eight digits, as a digest."""
    if isinstance(value, str):
        return text(value)
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            return _key(array.tolist())
        head = f"{array.dtype} {array.shape} ".encode()
        return hashlib.blake2b(head + array.tobytes(), digest_size=16).hexdigest()
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_key(name, repr)}: {_key(item, repr)}' for name, item in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_key(item, repr) for item in value))}}}"
    if isinstance(value, tuple | list):
        inside = ", ".join(_key(item, repr) for item in value)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return str(value)


def _text(text: str) -> str:
    """The text, if it is one: half a character (a lone surrogate) can neither be tokenized nor recorded."""
    if not text.isascii():
        text.encode()
    return text
