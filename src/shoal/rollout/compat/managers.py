"""Managers: vector environments that take model responses and return the next prompts.

Each env has an `Episode`, which keeps its turns and makes its prompts, as in any rollout; a manager only steps all envs
at once. `multi_turn_loop` plays the envs of a manager to the end, as older agent projects do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypedDict

import numpy as np

from shoal.core.configuration import from_mapping
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, unknown_name
from shoal.core.executors import Closing
from shoal.envs.actions import Projected, Projection
from shoal.rollout.compat.projections import ActionSpace, as_actions, create_projection_function, takes_two
from shoal.rollout.episode import Episode, EpisodeId, Role, anchor_of
from shoal.rollout.play import TrajectoryCollector
from shoal.rollout.prompts import PromptConfig, Prompter, compose
from shoal.samplers.sampler import Sampler, Sampling
from shoal.vector import MultiProcessEnvironmentContainer

IMAGE = "<image>"
"""Stands in the text where an env shows a picture and no text."""

Results = tuple[list[Any], list[float], list[bool], list[dict[str, Any]]]


class Observations(TypedDict):
    """The observations of a batch of agents."""

    text: list[str]  # prompts
    image: list[Any] | None  # `[rows, columns, 3]` uint8 each, for envs that show pictures
    anchor: list[str]  # equal for equal states


class Container(Protocol):
    """Envs as lists: `MultiProcessEnvironmentContainer`, or anything with the same methods."""

    def __len__(self) -> int: ...

    def reset(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """New episodes: observations and infos."""

    def step(self, actions: Sequence[Any], /) -> Results:
        """One action an env, None to leave it alone: observations, rewards, dones, infos."""

    def close(self) -> None:
        """End the envs."""


class EnvironmentManager(Closing):
    """Steps a batch of envs with the responses of a model.

    Args:
        envs: a container of envs.
        projection_f: `(texts)` or `(texts, action_spaces)` to `(actions, valids)`.
        config: the name of the env; or settings of `PromptConfig`, as such or as a mapping that may hold
            `env_type` and `max_turns` too.
    """

    env_type: ClassVar[str | None] = None
    scores: ClassVar[tuple[str, ...]] = ()
    """Keys of the last info that `success_evaluator` reports beside success."""

    def __init__(
        self,
        envs: Container,
        projection_f: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
        config: str | PromptConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self.envs, self.projection_f = envs, projection_f
        self.env_name = self.env_type or ""
        self.max_turns: int | None = None
        if isinstance(config, PromptConfig):
            self.prompt = config
        else:
            settings: dict[str, Any] = {"env_type": config} if isinstance(config, str) else dict(config or {})
            self.env_name = str(settings.pop("env_type", self.env_name))
            self.max_turns = settings.pop("max_turns", None)
            self.prompt = template_of(self.env_type or self.env_name, settings)
        if self.prompt.mode != "window":
            raise ConfigError(
                f"managers make a fresh prompt each turn: mode must be window, got {self.prompt.mode}"
            )
        self._wants_spaces = takes_two(projection_f)
        self._playing = threading.RLock()  # one step, reset or loop at a time
        self._lookups: list[
            Mapping[str, Any]
        ] = []  # of each env, the actions of its words; empty until they are needed
        self._episodes: list[Episode] = []
        self._done: list[bool] = []

    # --- the batch interface
    def reset(self, kwargs: Any = None) -> tuple[Observations, list[dict[str, Any]]]:
        """New episodes everywhere. `kwargs` is there for callers that pass one, and not read."""
        with self._playing:
            observations, infos = self.envs.reset()
            self._shown, self._infos = list(observations), list(infos)
            self._lookups, self._done = [], [False] * len(observations)
            if any(self._ask("calls_tools", False)):
                raise ConfigError(
                    f"{self.env_name or 'this env'} acts by tools, which managers do not show: use "
                    "ParallelRolloutManager"
                )
            prompter = Prompter(self.prompt, None)  # type: ignore[arg-type]  # nothing becomes tokens
            facts = zip(self._ask("instructions", ""), self._ask("max_steps", 0), strict=True)
            self._episodes = []
            for i, (instructions, limit) in enumerate(facts):
                turns = self.max_turns or limit
                role = _ManagersRole(
                    self.env_name, str(instructions), Projection(), turns, manager=self, env=i
                )
                self._episodes.append(Episode(EpisodeId(0, 0, i, 0, 0), role, prompter, Sampling()))
                self._episodes[i].begin(*_as_text(observations[i], infos[i]))
            return self._observations(), infos

    def step(
        self, text_actions: Sequence[str | None]
    ) -> tuple[Observations, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """One response for each env; episodes that are over ignore theirs.

        Returns:
            Observations, rewards `[N]` float64, dones `[N]` bool, and infos with `is_action_valid` (both the
            response held an action and the env could do it) and `is_active` (the env was stepped).
        """
        with self._playing:
            if isinstance(text_actions, str) or len(text_actions) != len(self._done):
                got = "one text" if isinstance(text_actions, str) else len(text_actions)
                raise ValueError(f"expected {len(self._done)} responses after reset(), got {got}")
            words = [episode.words for episode in self._episodes]
            actions, valids = self._project([text or "" for text in text_actions], words, range(len(words)))
            queues: list[list[Any]] = [[] for _ in words]
            active = [
                not over and text is not None for over, text in zip(self._done, text_actions, strict=True)
            ]
            playing = [i for i, on in enumerate(active) if on]
            for i in playing:
                projected = Projected(tuple(as_actions(actions[i])), bool(valids[i]))
                queues[i] = self._episodes[i].say(text_actions[i] or "", projected)
            self._infos = list(self._infos)
            self._play(queues)
            turns = {i: turn for i in playing if (turn := self._episodes[i].end_turn())}
            rewards = np.array([turns[i].reward if on else 0.0 for i, on in enumerate(active)])
            infos = self._infos = [
                {**info, "is_active": on, "is_action_valid": on and turns[i].action_is_valid}
                for i, (info, on) in enumerate(zip(self._infos, active, strict=True))
            ]
            return self._observations(), rewards, np.array(self._done, dtype=np.bool_), infos

    def success_evaluator(
        self,
        total_infos: Sequence[Sequence[Mapping[str, Any]]],
        total_batch_list: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        **_: Any,
    ) -> dict[str, np.ndarray]:
        """Whether each episode succeeded, by the info of its last active step.

        Args:
            total_infos: for each episode, the infos of its steps.
            total_batch_list: for each episode, entries with `active_masks`; `is_active` of the infos otherwise.
        """
        last: list[Mapping[str, Any]] = []
        for number, infos in enumerate(total_infos):
            if total_batch_list is None:
                active = [bool(info.get("is_active", True)) for info in infos]
            else:
                active = [bool(entry.get("active_masks", True)) for entry in total_batch_list[number]]
            played = [info for info, on in zip(infos, active, strict=False) if on]
            last.append(played[-1] if played else {})
        result = {"success_rate": np.array([_success(info) for info in last])}
        for key in self.scores:
            result[f"{self.env_name}_{key}"] = np.array([float(info.get(key, 0.0)) for info in last])
        return result

    def get_available_actions(self) -> list[list[str]]:
        """The words that each env accepts now."""
        return [list(episode.words) for episode in self._episodes]

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()

    def __len__(self) -> int:
        return len(self.envs)

    # --- inside
    def _project(
        self, texts: Sequence[str], words: Sequence[Sequence[str]], envs: Iterable[int]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Actions and whether they are valid, of responses to these envs, which accept these words now."""
        if not self._wants_spaces:
            return self.projection_f(texts)
        spaces = [self._space(some, self._lookup(i)) for some, i in zip(words, envs, strict=True)]
        return self.projection_f(texts, spaces)

    def _space(self, words: Sequence[str], lookup: Mapping[str, Any]) -> ActionSpace:
        """The valid words for the projection; an env that lists none accepts all of its words."""
        del lookup
        return list(words) or None

    def _lookup(self, i: int) -> Mapping[str, Any]:
        """The words of env `i` and their actions, in its present episode."""
        self._lookups = self._lookups or self._ask("action_words", {})
        return self._lookups[i]

    def _play(self, queues: Sequence[list[Any]]) -> None:
        """Step all envs through the actions of their responses, together, until the actions or the episodes end."""
        while any(queues):
            acting = [i for i, queue in enumerate(queues) if queue]
            observations, rewards, dones, infos = self.envs.step([q.pop(0) if q else None for q in queues])
            for i in acting:
                self._shown[i], self._infos[i], self._done[i] = observations[i], infos[i], bool(dones[i])
                text, info = _as_text(observations[i], infos[i])
                self._episodes[i].observe(text, rewards[i], dones[i], False, info)
                if dones[i]:
                    queues[i].clear()

    def _observations(self) -> Observations:
        return {
            "text": [self.build_text(i) for i in range(len(self._episodes))],
            "image": self._pictures(),
            "anchor": [episode.anchor for episode in self._episodes],
        }

    def build_text(self, i: int) -> str:
        """The prompt of env `i` in its present state."""
        return compose(self.prompt, self._episodes[i].scene)

    def _pictures(self) -> list[Any] | None:
        if not all(isinstance(observation, str) for observation in self._shown):
            return list(self._shown)
        pool: Any = getattr(self.envs, "envs", None)
        return list(pool.render()) if getattr(pool, "render_mode", None) == "rgb_array" else None

    def _ask(self, name: str, default: Any) -> list[Any]:
        """An attribute of every env; the default for containers and envs that have no such thing."""
        pool: Any = getattr(self.envs, "envs", None)
        try:
            return list(pool.get_attr(name))
        except AttributeError:
            return [default] * len(self.envs)


# --- by kind of env
class SokobanEnvironmentManager(EnvironmentManager):
    """Push boxes: moves up, down, left, right."""

    env_type = "sokoban"


class FrozenLakeEnvironmentManager(EnvironmentManager):
    """Cross the ice: moves left, down, right, up."""

    env_type = "frozen_lake"


class BanditEnvironmentManager(EnvironmentManager):
    """Pull an arm, by its number or by its name in that env."""

    env_type = "bandit"

    def _space(self, words: Sequence[str], lookup: Mapping[str, Any]) -> ActionSpace:
        """The arms of that env, by number and name."""
        del words
        return lookup or None


class CountdownEnvironmentManager(EnvironmentManager):
    """Make a number from numbers."""

    env_type = "countdown"


class MetaMathQAEnvironmentManager(EnvironmentManager):
    """Answer a mathematical question, with several tries."""

    env_type = "metamathqa"


class WebShopEnvironmentManager(EnvironmentManager):
    """Search, look and buy; the published score is reported as `webshop_task_score`."""

    env_type = "webshop"
    scores = ("task_score",)


MANAGERS: dict[str, type[EnvironmentManager]] = {
    str(manager.env_type): manager for manager in EnvironmentManager.__subclasses__()
}


def make_manager(
    env_type: str,
    env_num: int = 1,
    group_n: int = 1,
    seed: int = 0,
    env_kwargs: dict[str, Any] | None = None,
    *,
    prompt: Mapping[str, Any] | None = None,
    projection: Mapping[str, Any] | None = None,
    **options: Any,
) -> EnvironmentManager:
    """A manager with its envs: `env_num` groups of `group_n`.

    Args:
        env_type: a registered env.
        env_num: number of groups.
        group_n: envs per group; those of a group start alike.
        seed: the run seed.
        env_kwargs: settings of the env.
        prompt: settings of `PromptConfig` to replace.
        projection: passed to `create_projection_function` (`separator`, `max_actions`, `lenient`, `tags`).
        **options: of `MultiProcessEnvironmentContainer` and `make_vec` (`backend`, `num_workers`, …).
    """
    if not env_type:
        raise unknown_name("env", env_type, MANAGERS)
    function = create_projection_function(env_type, **(projection or {}))
    envs = MultiProcessEnvironmentContainer(env_type, env_num, group_n, seed, env_kwargs, **options)
    return MANAGERS.get(env_type, EnvironmentManager)(
        envs, function, {"env_type": env_type, **(prompt or {})}
    )


# --- whole episodes
def multi_turn_loop(
    envs: EnvironmentManager,
    engine: Sampler,
    sampling: Sampling | None = None,
    *,
    max_turns: int | None = None,
) -> list[Trajectory]:
    """One episode in every env of a manager, with its prompts and projection, group by group, member by member.

    The seed and the number of the iteration are the container's: this is its next `reset()`.

    Args:
        envs: a manager whose envs are a `MultiProcessEnvironmentContainer`.
        engine: writes the responses.
        sampling: how tokens are picked.
        max_turns: turns after which an episode is truncated; the env's own limit if None.
    """
    container = envs.envs
    if not isinstance(container, MultiProcessEnvironmentContainer):
        raise ConfigError(
            f"multi_turn_loop needs the envs in a MultiProcessEnvironmentContainer, got {type(container).__name__}"
        )
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, or None, got {max_turns}")
    with envs._playing:
        limits = (max_turns, envs.max_turns, envs._ask("max_steps", None)[0])
        if not any(limits):
            raise ConfigError("these envs have no max_steps of their own: give max_turns")
        tag, size, turns = envs.env_name or "env", container.group_n, min(limit for limit in limits if limit)
        role = _ManagersRole(tag, str(envs._ask("instructions", "")[0]), Projection(), turns, manager=envs)
        roles = {str(group): replace(role, env=group * size) for group in range(container.env_num)}
        container.iteration += 1
        envs._lookups = []
        collector = TrajectoryCollector(
            container.envs, list(roles), roles, size, engine, envs.prompt, container.seed
        )
        return collector.collect(container.iteration, sampling or Sampling())


@dataclass(frozen=True, slots=True)
class _ManagersRole(Role):
    """A role whose responses a manager reads."""

    manager: Any = None
    env: int = 0  # whose words it has; the envs of a group, which start alike, have the same ones

    def word(self, action: Any) -> str:
        """The env's word for an action."""
        lookup = self.manager._lookup(self.env)
        return next((word for word, known in lookup.items() if known == action), str(action))

    def project(self, text: str, words: Sequence[str]) -> Projected:
        actions, valids = self.manager._project([text], [words], [self.env])
        return Projected(tuple(as_actions(actions[0])), bool(valids[0]))


def _as_text(observation: Any, info: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What the episode of a manager records: a text, and the state's key, which a picture has as well."""
    text = observation if isinstance(observation, str) else str(info.get("text", IMAGE))
    return text, {**info, "anchor": anchor_of(info, observation), "image": None}


def _success(info: Mapping[str, Any]) -> float:
    return float(info.get("success", info.get("won", 0.0)))


# --- prompts by kind of env: data, each setting of which can be replaced
_MOVE = "Think first, then give one move as <action>move</action>. The moves are: {actions}."
_ANSWER = "Reason as long as you need, then give the final answer as <answer>answer</answer>."

_ANSWERS = {
    "first": "{instructions}\n\n{observation}\n\n" + _ANSWER,
    "later": "{instructions}\n\nSo far:\n{history}\n\n{observation}\n\n" + _ANSWER,
    "turn": "Try {step}: {action}",
}


def _moves(place: str, there: str) -> dict[str, str]:
    return {
        "first": f"{{instructions}}\n\nThe {place}:\n{{observation}}\n\n{_MOVE}",
        "later": f"{{instructions}}\n\nYour last moves:\n{{history}}\n\nThe {place} now, after {{step}} of "
        f"{{max_turns}} moves:\n{{observation}}\n\n{_MOVE}",
        "turn": f"{{step}}. {there}\n{{observation}}\nyou chose {{action}}.",
    }


TEMPLATES: dict[str, dict[str, str]] = {
    "sokoban": _moves("room", "In"),
    "frozen_lake": _moves("lake", "On"),
    "bandit": {
        "first": "{instructions}\n\n{observation}\n\nChoose with <action>number</action>; numbers: {actions}.",
        "later": "{instructions}\n\n{history}\n\n{observation}\n\nChoose with <action>number</action>; "
        "numbers: {actions}.",
        "turn": "Pull {step}: {action}, paid {reward}.",
    },
    "countdown": _ANSWERS,
    "metamathqa": _ANSWERS,
    "webshop": {
        "first": "{instructions}\n\nThe page:\n{observation}\n\nYou can do: {actions}\n\n"
        "Think first, then give one of them as <action>…</action>.",
        "later": "{instructions}\n\nYou have done {step} steps, the last of them:\n{history}\n\nThe page now:\n"
        "{observation}\n\nYou can do: {actions}\n\nThink first, then give one of them as <action>…</action>.",
        "turn": "{step}. On the page\n{observation}\nyou did {action}.",
    },
}


def template_of(env_type: str | None, settings: Mapping[str, Any] | None = None) -> PromptConfig:
    """The prompts of a kind of env (a general one for kinds without their own), with `settings` replaced.

    >>> template_of("sokoban", {"history": 5}).history
    5
    """
    return from_mapping(PromptConfig, {**TEMPLATES.get(env_type or "", {}), **(settings or {})}, "prompt.")
