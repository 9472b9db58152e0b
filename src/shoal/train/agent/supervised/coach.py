"""Play without a model: envs that name the next answer, and an engine that returns it.

The warm-up learns from it. Envs choose where they live, so this imports nothing heavy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium
from numpy.random import Generator

from shoal.core.data import check_step_result, info_of
from shoal.core.errors import ConfigError, EnvError
from shoal.core.seeding import stream
from shoal.envs import TextEnv
from shoal.envs.actions import ToolCall
from shoal.envs.tools import tools_of
from shoal.rollout.episode import EpisodeId, Role
from shoal.rollout.prompts import Prompter
from shoal.samplers.sampler import Completion, Level, Request, Sampling
from shoal.train.agent.run.answers import answer_ids
from shoal.vector.vector_env import VectorPool

MAX_EPISODE_TURNS = 32
"""Random play is cut here: later states of an env with few endings add nothing to the format."""
NUMBERS, ANSWER = "warmup_numbers", "warmup_answer"
"""Keys of the options and the infos of a `CoachedEnv`."""


class CoachedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env that names the next answer in its infos: a random action, or its expert's in a share of the turns.

    Both are asked for where the env is, so that one that hangs or ends its process can do so.
    """

    def __init__(
        self, make: Callable[[], TextEnv[Any]], seed: int, tag: str, expert: float, only_expert: bool
    ) -> None:
        super().__init__(make())
        self._text, self._seed, self._tag = cast(TextEnv[Any], self.env), seed, tag
        self._share, self._wants_only_expert = expert, only_expert
        self._rng: Generator | None = None
        self._only_expert = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin the episode whose number `options` have for this seed."""
        observation, info = check_step_result(self._text.reset(seed=seed), "reset")
        number = (options or {}).get(NUMBERS, {}).get(seed)
        self._rng = None if number is None else stream(self._seed, "warmup", self._tag, number)
        self._only_expert = self._wants_only_expert and self._text.expert_action() is not None
        return observation, self._with_answer(info)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """The env's step."""
        observation, reward, terminated, truncated, info = check_step_result(self._text.step(action), "step")
        over = terminated or truncated
        return observation, reward, terminated, truncated, info if over else self._with_answer(info)

    def _with_answer(self, info: Any) -> Any:
        """The info with the next answer, whether it is learned from, and the generator after it."""
        rng = self._rng
        if rng is None:  # an env that took the place of another: its episode is over
            return info
        ask = self._share and rng.random() < self._share
        word, source = self._text.expert_action() if ask else None, "expert_action"
        learned = word is not None or not self._only_expert
        if word is None:
            word, source = self._text.random_action(rng), "random_action"
        parts = word if isinstance(word, tuple | list) else () if word is None else (word,)
        if not all(isinstance(part, str | ToolCall) for part in parts):
            raise EnvError(
                f"{type(self._text).__name__}.{source}() must return the action as text, or a tuple of ToolCalls "
                f"and the action as text, got {word!r:.120}"
            )
        return {**info_of(info), ANSWER: (word, learned, pickle.dumps(rng))}


def no_random_action(tag: str) -> ConfigError:
    """The error for an env of which the warm-up on random play gets no action."""
    return ConfigError(
        f"the warm-up plays random actions, and {tag!r} takes free text, of which none can be drawn: give the env a "
        f"random_action(rng) that returns a valid one, or set warmup.steps=0, or warmup.expert=1 where the env has an "
        f"expert"
    )


class Coach:
    """Returns the answers of coached envs: a pool and an engine at once."""

    def __init__(
        self,
        pool: VectorPool,
        roles: Mapping[str, Role],
        prompter: Prompter,
        sampling: Sampling,
        context: int | None,
    ) -> None:
        self._pool, self._prompter, self._sampling, self._context = pool, prompter, sampling, context
        self.tokenizer = prompter.tokenizer
        self.level: Level = "L0"
        self.weights_version = 0
        self._roles = dict(roles)
        self._at: dict[int, tuple[EpisodeId, str]] = {}
        self._infos: dict[int, Mapping[str, Any]] = {}  # of each env's reset
        self._answers: dict[int, tuple[list[str | ToolCall], bool, bytes]] = {}
        self.learned: dict[int, list[bool]] = {}
        """Of each env, which turns of its episode are learned from."""
        self.rng: dict[int, bytes] = {}
        """Of each env, the generator after its episode."""

    def expect(self, places: Mapping[int, tuple[EpisodeId, str]]) -> None:
        """The episodes that these envs play next."""
        self._at = dict(places)

    def reset_some(self, indices: Sequence[int], seeds: Sequence[int], /) -> Any:
        """The pool's reset, with the numbers of the episodes."""
        numbers = {place.env_seed: place.group for place, _ in self._at.values()}
        results = self._pool.reset_some(indices, seeds, {NUMBERS: numbers})
        for i, (_, info) in zip(indices, results, strict=True):
            self.learned[i] = []
            if ANSWER not in info:  # of an env that took the place of one that failed
                raise EnvError(f"reset failed: {info.get('worker_summary')}")
            self._infos[i] = info
            self._hear(i, info)
        return results

    def step_some(self, indices: Sequence[int], actions: Sequence[Any], /) -> Any:
        """The pool's."""
        results = self._pool.step_some(indices, actions)
        for i, result in zip(indices, results, strict=True):
            self._hear(i, result[4])
        return results

    def close(self) -> None:
        """Close the pool."""
        self._pool.close()

    def _chat_of(self, i: int) -> Any:
        """How an env's episode is shown tools: its own, or those of the run; None where there are none."""
        role = self._roles[self._at[i][1]]
        prompter = self._prompter.variant(role.prompt)
        return (prompter if role.tools is None else prompter.offering(tools_of(self._infos[i]))).tools

    def _hear(self, i: int, info: Mapping[str, Any]) -> None:
        if ANSWER not in info:
            return
        word, learned, rng = info[ANSWER]
        words = list(word) if isinstance(word, tuple | list) else [word]
        called = [part.name for part in words if isinstance(part, ToolCall)]
        if called and self._chat_of(i) is None:
            raise ConfigError(
                f"the warm-up of {self._at[i][1]!r} calls the tool {called[0]!r}, and there are no tools: "
                f"name them in agent_proxy.tools, or set warmup.steps=0"
            )
        self._answers[i] = words, learned, rng
        if word is None:
            raise no_random_action(self._at[i][1])

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The envs' answers, as completions of a model."""
        asked = {(place.group, place.member): i for i, (place, _) in self._at.items()}
        answers = []
        for request in requests:
            _, group, member, _ = request.key.path
            answers.append(self._answer(asked[group, member], request))
        return answers

    def _answer(self, i: int, request: Request) -> Completion:
        nothing = Completion((), (), "context")  # the episode ends here
        if request.key.path[-1] == MAX_EPISODE_TURNS:
            return nothing
        words, learned, self.rng[i] = self._answers[i]
        role, tools = self._roles[self._at[i][1]], self._chat_of(i)
        if role.tools is None:
            words = [words.pop(0) if len(words) > 1 else words[0]]
        prompt = self._prompter.variant(role.prompt).config
        word = words[0]
        if isinstance(word, ToolCall):
            calls = "".join(tools.written(call) for call in words if isinstance(call, ToolCall))
            answer = self.tokenizer.encode(calls) + tools.tokenizer.end_ids[:1]
        else:
            answer = answer_ids(word, role, prompt, self._sampling, self.tokenizer)
        context = self._context
        if context is not None and len(request.prompt_ids) + len(answer) > context:
            return nothing  # later turns do not fit either
        self.learned[i].append(learned)
        return Completion(answer, (0.0,) * len(answer), "stop")
