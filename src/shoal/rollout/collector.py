"""Playing whole groups of episodes with one engine: the lockstep schedule, and the roles it hands out.

Group g of an iteration starts its members from one env seed; members differ in their sampling noise alone.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from shoal.core.data import Status, Trajectory
from shoal.core.errors import (
    EngineError,
    EnvError,
    WorkerError,
    WorkerTimeoutError,
    format_error,
    with_frames,
)
from shoal.core.seeding import derive_seed
from shoal.rollout.episode import Episode, EpisodeId, Role
from shoal.rollout.filters import FilterReport, filter_groups, next_refill
from shoal.rollout.journal import Journal
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.samplers.sampler import Engine, Request, Sampling, generate_each

logger = logging.getLogger(__name__)
Reset = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


class EnvPool(Protocol):
    """Envs that can be reset and stepped a few at a time; `shoal.vector` provides them."""

    def reset_some(self, indices: Sequence[int], seeds: Sequence[int], /) -> Sequence[Reset]:
        """Reset these envs, each from its seed."""

    def step_some(self, indices: Sequence[int], actions: Sequence[Any], /) -> Sequence[Step]:
        """Step these envs; the others are left alone."""

    def close(self) -> None:
        """End the envs and their workers."""


class Failed(NamedTuple):
    """Why an episode ends before its time."""

    status: Status
    error: str
    own: bool = True
    """Whether its own env failed, and not one that another episode played in the same worker."""


class FailureLog:
    """Warns of episodes that fail: the first failures in full, later ones as a count that comes ever more rarely."""

    def __init__(self) -> None:
        self._causes = set[str]()
        self._failures = self._left_out = self._untold = 0
        self._enough = 1

    def add(self, what: str, why: str, then: str) -> None:
        """An episode failed, or a worker with its episodes; `then` says what is done about it."""
        self._failures += 1
        self._left_out += then == LEFT_OUT
        cause = re.sub(r"\d+", "", why.partition(" failed: ")[2] or why)
        if cause in self._causes or len(self._causes) == MOST_CAUSES:
            self._untold += 1
            return
        self._causes.add(cause)
        logger.warning("%s: %s; %s", what, why, then)

    def sum_up(self) -> None:
        """At the end of a rollout: how many more failed, if there are four times as many as when it was last told."""
        if self._untold and self._failures >= 4 * self._enough:
            told = "%d more times an episode failed the same way; %d episodes are left out so far"
            logger.warning(told, self._untold, self._left_out)
            self._untold, self._enough = 0, self._failures


MOST_CAUSES = 3
"""Failures of different causes that are told in full."""
PLAYED_AGAIN, LEFT_OUT = "it is played again", "it is left out"


class TrajectoryCollector:
    """Plays groups of episodes and returns their trajectories.

    Args:
        envs: the pool; env `group * group_size + member` is of the kind `tags[group]`.
        tags: the kind of each group.
        roles: what the agent knows of each kind.
        group_size: episodes that share a start state.
        engine: writes the responses.
        prompt: how prompts are made.
        seed: of the run; episodes are named under it by iteration, group and member.
        env_retries: times an episode starts again after its env failed.
        journal: where episodes are written down as they end; those that are there are not played again.
        failures: warns of episodes that fail.
    """

    def __init__(
        self,
        envs: EnvPool,
        tags: Sequence[str],
        roles: Mapping[str, Role],
        group_size: int,
        engine: Engine,
        prompt: PromptConfig,
        seed: int,
        *,
        env_retries: int = 1,
        journal: Journal | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self.envs = envs
        self.tags = tuple(tags)
        self.roles = dict(roles)
        self.group_size = group_size
        self.engine = engine
        self.seed, self.env_retries = seed, env_retries
        self.journal = journal or Journal()
        self.failures = failures or FailureLog()
        self.prompter = Prompter(prompt, engine.tokenizer)
        self._playing = threading.Lock()  # its envs play one rollout at a time, whoever asks
        self.counts = 0, 0  # episodes of the latest rollout that have ended, and all of it

    def close(self) -> None:
        """End the envs and their workers."""
        self.envs.close()

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once, in lockstep; trajectories come group by group, member by member.

        Args:
            iteration: names the env seeds and the sampling noise.
            sampling: how tokens are picked.
            first_group: the number of the first group, for further batches of groups in one iteration.
            n_groups: how many groups, at most as many as there are tags; all if not given.
        """
        groups, n = group_numbers(first_group, n_groups, len(self.tags)), len(self.tags)
        if groups.start < n < groups.stop:  # from n on slots are in another order: two groups may want one
            first = self.collect(iteration, sampling, first_group=groups.start, n_groups=n - groups.start)
            return first + self.collect(iteration, sampling, first_group=n, n_groups=groups.stop - n)
        places: dict[int, tuple[EpisodeId, Role]] = {}
        for g in groups:
            slot = slot_of(g, self.tags)
            for member in range(self.group_size):
                place = place_of(self.seed, iteration, g, member)
                places[slot * self.group_size + member] = place, self.roles[self.tags[slot]]
        return self.play(places, sampling)

    def play(self, places: Mapping[int, tuple[EpisodeId, Role]], sampling: Sampling) -> list[Trajectory]:
        """Play these episodes, each in the env of that number, in lockstep."""
        with self._playing:
            played = self._play(places, sampling)
        self.failures.sum_up()
        return [played[i] for i in places]

    def _play(
        self, places: Mapping[int, tuple[EpisodeId, Role]], sampling: Sampling
    ) -> dict[int, Trajectory]:
        played: dict[int, Trajectory] = {}
        for i, (place, role) in places.items():
            if (before := self.journal.find(role.tag, place)) is not None:
                played[i] = before
        todo = {i: who for i, who in places.items() if i not in played}
        attempts, again = Counter[int](), set[int]()

        def note(i: int, why: Failed) -> None:
            attempts[i] += why.own
            if not why.own or (why.status == "env_error" and attempts[i] <= self.env_retries):
                again.add(i)
            if why.own:
                then = PLAYED_AGAIN if i in again else LEFT_OUT
                self.failures.add(f"episode {i} of {places[i][1].tag}", why.error, then)

        self.counts = len(played), len(places)
        while todo:
            again.clear()
            episodes = {i: Episode(*who, self.prompter, sampling) for i, who in todo.items()}
            failed = self._play_once(episodes, played, note)
            todo = {i: who for i, who in todo.items() if i in again}
            played |= {i: episodes[i].trajectory(*why[:2]) for i, why in failed.items() if i not in todo}
        return played

    def _play_once(
        self,
        episodes: Mapping[int, Episode],
        played: dict[int, Trajectory],
        note: Callable[[int, Failed], None],
    ) -> dict[int, Failed]:
        """Play these episodes to their ends, abreast, and add them to `played`; which of them failed.

        Each failure is noted at once: others may take long.
        """
        failed: dict[int, Failed] = {}
        noted = set[int]()

        def note_new() -> None:
            for i in [i for i in failed if i not in noted]:
                noted.add(i)
                note(i, failed[i])

        self._begin(episodes, failed)
        note_new()
        live = [i for i in episodes if i not in failed]
        while live:
            asked: dict[int, Request] = {}
            for i in live:
                with _told(i, failed):
                    asked[i] = episodes[i].request()
            answers = generate_each(self.engine, list(asked.values())) if asked else []
            actions: dict[int, list[int | str]] = {}
            for i, answer in zip(asked, answers, strict=True):
                with _told(i, failed):
                    if isinstance(answer, Exception):
                        raise answer
                    todo = episodes[i].respond(answer)
                    if not episodes[i].over:
                        actions[i] = todo
            self._act(actions, episodes, failed)
            note_new()
            live = [i for i in live if i not in failed]
            for i in (i for i in live if episodes[i].over):
                played[i] = episodes[i].trajectory()
                self.journal.add(played[i])
            live = [i for i in live if not episodes[i].over]
            self.counts = self.counts[1] - len(live), self.counts[1]
        return failed

    def _begin(self, episodes: Mapping[int, Episode], failed: dict[int, Failed]) -> None:
        """Reset all envs; where one fails, each alone."""
        try:
            resets = self._reset(list(episodes), episodes)
        except (WorkerError, EnvError):
            resets = []
            for i in episodes:
                try:
                    resets += self._reset([i], episodes)
                except (WorkerError, EnvError) as error:
                    plain = {
                        "worker_error": str(error),
                        "worker_timeout": isinstance(error, WorkerTimeoutError),
                    }
                    failed[i] = _failure(i, "reset", getattr(error, "told", None) or plain, episodes)
        for i, (observation, info) in resets:
            if info.get("worker_env") == i and info.get("worker_restarted"):
                tag, why = episodes[i].role.tag, f"reset failed: {info.get('worker_summary')}"
                self.failures.add(f"episode {i} of {tag}", why, "its env was made anew")
            with _told(i, failed, "reset"):
                episodes[i].begin(observation, info)

    def _reset(self, indices: list[int], episodes: Mapping[int, Episode]) -> list[tuple[int, Reset]]:
        seeds = [episodes[i].place.env_seed for i in indices]
        return list(zip(indices, self.envs.reset_some(indices, seeds), strict=True))

    def _act(
        self,
        actions: Mapping[int, list[int | str]],
        episodes: Mapping[int, Episode],
        failed: dict[int, Failed],
    ) -> None:
        """Step each env through the actions of its turn, all envs abreast."""
        pending = {i: list(todo) for i, todo in actions.items() if todo}
        while pending:
            now = {i: todo.pop(0) for i, todo in pending.items()}
            try:
                results = self.envs.step_some(list(now), list(now.values()))
            except WorkerError as error:  # an env failed for which there is no other
                if not error.told:
                    raise
                failed |= {i: _failure(i, f"step({now[i]!r})", error.told, episodes) for i in now}
                break
            for i, (observation, reward, terminated, truncated, info) in zip(now, results, strict=True):
                doing = f"step({now[i]!r})"
                if info.get("worker_restarted"):
                    failed[i] = _failure(i, doing, info, episodes)
                else:
                    with _told(i, failed, doing):
                        episodes[i].observe(observation, reward, terminated, truncated, info)
                if terminated or truncated or i in failed or not pending[i]:
                    del pending[i]
        for i in actions:
            if i not in failed:
                episodes[i].end_turn()


def _failure(i: int, doing: str, told: Mapping[str, Any], episodes: Collection[int]) -> Failed:
    """What an episode ends with when an env failed, its own or one of the same worker."""
    env, summary = told.get("worker_env"), told.get("worker_summary")
    words = f"{doing} failed: {summary}" if env == i else told.get("worker_error", "its env was replaced")
    status: Status = "env_error"
    if told.get("worker_timeout"):
        status, words = "timeout", f"{words} (vector.step_timeout); its process was replaced"
    return Failed(status, str(words), env == i or env not in episodes)


@contextlib.contextmanager
def _told(i: int, failed: dict[int, Failed], doing: str | None = None) -> Iterator[None]:
    """An env that answers what it must not to `doing`, or a prompt that cannot be made, ends its own episode."""
    try:
        yield
    except Exception as error:
        if doing is not None:
            failed[i] = Failed("env_error", f"{doing} failed: {with_frames(error)}")
        else:
            status: Status = "timeout" if isinstance(error, TimeoutError) else "engine_error"
            plain = isinstance(error, TimeoutError | EngineError)
            failed[i] = Failed(status, str(error) if plain else format_error(error))


class Collector(Protocol):
    """What plays groups of episodes: in lockstep here, or on parallel workers."""

    tags: tuple[str, ...]

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member."""

    def close(self) -> None:
        """End envs and workers."""


def collect_with_signal(
    collector: Collector, iteration: int, sampling: Sampling, *, max_batches: int, gamma: float = 1.0
) -> tuple[list[Trajectory], list[Trajectory], FilterReport]:
    """Dynamic sampling: play whole groups until as many have different rewards as the collector has tags.

    Args:
        collector: plays the groups; further batches are new groups with seeds of their own.
        iteration: names the seeds.
        sampling: how tokens are picked.
        max_batches: of groups, at most.
        gamma: discount a turn, see `filter_groups`.

    Returns:
        All trajectories played, those to learn from (whole episodes of at most that many groups), and the report.
    """
    wanted = len(collector.tags)
    played: list[Trajectory] = []
    n_groups = wanted
    first, batch = 0, 0
    while True:
        played += collector.collect(iteration, sampling, first_group=first, n_groups=n_groups)
        first, batch = first + n_groups, batch + 1
        kept, report = filter_groups(played, wanted, batch, gamma)
        if report.with_signal >= wanted or batch >= max_batches:
            return played, kept, report
        n_groups = next_refill(wanted, report.with_signal, report.played)


def group_numbers(first_group: int, n_groups: int | None, n_tags: int) -> range:
    """The numbers of the groups to play; group g is of the kind `tags[slot_of(g, tags)]`."""
    count = n_tags if n_groups is None else n_groups
    if not 1 <= count <= n_tags:
        raise ValueError(f"n_groups must be in [1, {n_tags}], the number of tags, got {count}")
    if first_group < 0:
        raise ValueError(f"first_group must be at least 0, got {first_group}")
    return range(first_group, first_group + count)


def slot_of(group: int, tags: Sequence[str]) -> int:
    """Whose tag a group has: its own number in the first batch; further groups take the kinds in turn, mixed evenly.

    So a refill of a few groups has the proportions of the whole, as nearly as its size allows.
    """
    n = len(tags)
    return group if group < n else _mixed(tuple(tags))[group % n]


@lru_cache(maxsize=64)
def _mixed(tags: tuple[str, ...]) -> tuple[int, ...]:
    """All slots, those of each kind spread evenly over the order."""
    count, seen = Counter(tags), Counter[str]()
    keys = []
    for slot, tag in enumerate(tags):
        keys.append(((seen[tag] + 0.5) / count[tag], slot))
        seen[tag] += 1
    return tuple(slot for _, slot in sorted(keys))


def place_of(seed: int, iteration: int, group: int, member: int) -> EpisodeId:
    """Where an episode stands in the run; the members of a group share their env seed."""
    env_seed = derive_seed(seed, "env", iteration, group)  # which refuses what is no whole number
    return EpisodeId(int(seed), int(iteration), group, member, env_seed)  # NumPy's cannot be recorded
