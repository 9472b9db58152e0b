"""One episode as a machine without I/O: it says what to ask the engine and the env, and is told the answers.

Every schedule (lockstep, asynchronous, in workers) drives the same machine, so all give the same trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.data import Status, Trajectory, Turn
from shoal.envs.actions import Projection
from shoal.rollout.engine import Completion, Key, Request, Sampling
from shoal.rollout.prompts import PastTurn, Prompter, Scene


@dataclass(frozen=True, slots=True)
class Role:
    """What an agent knows of one kind of env before it acts."""

    tag: str
    instructions: str
    projection: Projection
    max_turns: int

    def word(self, action: int | str) -> str:
        """The env's word for an action."""
        return next((word for word, known in self.projection.lookup.items() if known == action), str(action))


@dataclass(frozen=True, slots=True)
class Place:
    """Which episode of a run this is; all its randomness follows from it."""

    seed: int  # of the run, or of its evaluation
    iteration: int
    group: int
    member: int
    env_seed: int


class Episode:
    """From reset to the end; `begin`, then `request`/`respond`/`observe` in turn until `over`."""

    def __init__(self, place: Place, role: Role, prompter: Prompter, sampling: Sampling) -> None:
        self.place = place
        self.role = role
        self.over = False
        self._prompter = prompter
        self._sampling = sampling
        self._turns: list[Turn] = []
        self._past: list[PastTurn] = []
        self._before: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._version = 0
        self._success = self._terminated = self._truncated = False

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """The env was reset."""
        self._see(observation, info)

    def request(self) -> Request:
        """What to ask the engine now."""
        scene = Scene(self.role.instructions, self._text, self._words, self._past, self.role.max_turns)
        self._prompt = self._prompter.prompt(scene, self._before)
        place = self.place
        key = Key(place.seed, place.iteration, place.group, place.member, len(self._turns))
        return Request(self._prompt, key, self._sampling)

    def respond(self, completion: Completion) -> list[int | str]:
        """The engine answered; returns the env actions of this turn, to be stepped one by one until the end."""
        self._completion = completion
        config = self._prompter.config
        self._response = config.prefill + self._prompter.tokenizer.decode(completion.token_ids)
        self._projected = self.role.projection(self._response)
        self._reward, self._valid, self._shown = 0.0, self._projected.valid, self._text
        self._anchor_before = self._anchor
        self._version = completion.weights_version
        return list(self._projected.actions)

    def observe(
        self, observation: str, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> None:
        """The env took one of the actions of this turn."""
        self._reward += reward
        self._valid = self._valid and bool(info.get("action_is_valid", True))
        self._success = bool(info.get("success", False))
        self._terminated, self._truncated = terminated, truncated
        self._see(observation, info)

    def end_turn(self) -> None:
        """The actions of this turn are done: record it, and see whether the episode is over."""
        completion, actions = self._completion, self._projected.actions
        words = ", ".join(self.role.word(action) for action in actions) if self._projected.valid else "(none)"
        self._turns.append(
            Turn(
                observation=self._shown,
                prompt_ids=self._prompt,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                response=self._response,
                action=words if self._projected.valid else None,
                action_is_valid=self._valid,
                reward=self._reward,
                anchor=self._anchor_before,
            )
        )
        self._past.append(PastTurn(self._shown, self._response, words, self._reward))
        self._before = (self._prompt, completion.token_ids)
        if not (self._terminated or self._truncated) and len(self._turns) >= self.role.max_turns:
            self._truncated = True
        self.over = self._terminated or self._truncated

    def trajectory(self, status: Status = "ok", error: str | None = None) -> Trajectory:
        """The record so far; a `status` other than "ok" says why it ends here."""
        place = self.place
        return Trajectory(
            env=self.role.tag,
            iteration=place.iteration,
            group=place.group,
            member=place.member,
            env_seed=place.env_seed,
            turns=tuple(self._turns),
            success=self._success and status == "ok",
            terminated=self._terminated,
            truncated=self._truncated,
            status=status,
            error=error,
            weights_version=self._version,
        )

    def _see(self, observation: str, info: Mapping[str, Any]) -> None:
        self._text = observation
        self._words = list(info.get("available_actions", ()))
        self._anchor = str(info.get("anchor", observation))
