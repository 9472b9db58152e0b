"""Groups of episodes in a vector env, stepped together in the caller's thread; dynamic sampling."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from shoal.core.data import Trajectory
from shoal.rollout.driver import Driver, RolloutReport, report_failures
from shoal.rollout.episode import EpisodeId, Role
from shoal.rollout.failures import FailureLog
from shoal.rollout.filters import FilterReport, filter_groups, next_refill
from shoal.rollout.hosts.episodes import Ended
from shoal.rollout.hosts.host import LocalHosts
from shoal.rollout.hosts.pool import EnvPool, PoolHost
from shoal.rollout.journal import Journal
from shoal.rollout.plan import Assignment, assignments_of, group_numbers, slot_of
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.rewards.judge import Judge, Judging
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.asking import SamplerClient, run_here
from shoal.samplers.sampler import Sampler, Sampling


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
        judge: scores each group; the caller closes it.
        toolbox: the tools that the model may call; the caller closes it.
    """

    def __init__(
        self,
        envs: EnvPool,
        tags: Sequence[str],
        roles: Mapping[str, Role],
        group_size: int,
        engine: Sampler,
        prompt: PromptConfig,
        seed: int,
        *,
        env_retries: int = 1,
        journal: Journal | None = None,
        failures: FailureLog | None = None,
        judge: Judge | None = None,
        toolbox: Toolbox | None = None,
    ) -> None:
        self.envs = envs
        self._toolbox = toolbox or Toolbox(())
        self.tags = tuple(tags)
        self.roles = dict(roles)
        self.group_size = group_size
        self.engine = engine
        self.seed = seed
        self.journal = journal or Journal()
        self.failures = failures or FailureLog()
        self._judge = judge
        self.prompter = Prompter(prompt, self._toolbox.chat(engine.tokenizer))
        self.report = RolloutReport()
        self._host = PoolHost(envs, self._role_of, self.prompter, env_retries)
        self._playing = threading.Lock()  # its envs play one rollout at a time
        self.counts = 0, 0  # episodes of the latest rollout that have ended, and all of it

    def close(self) -> None:
        """End the envs and their workers."""
        self.envs.close()

    def collect(
        self, iteration: int, sampling: Sampling, *, first_group: int = 0, n_groups: int | None = None
    ) -> list[Trajectory]:
        """Play groups once; trajectories come group by group, member by member.

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
        episodes = assignments_of(self.seed, iteration, self.tags, self.group_size, first_group, len(groups))
        slots = [slot_of(e.place.group, self.tags) * self.group_size + e.place.member for e in episodes]
        return self.play({slot: (e.place, e.tag) for slot, e in zip(slots, episodes, strict=True)}, sampling)

    def play(self, places: Mapping[int, tuple[EpisodeId, str]], sampling: Sampling) -> list[Trajectory]:
        """Play these episodes, each of a kind and in the env of that number."""
        episodes = [Assignment(i, place, tag) for i, (place, tag) in places.items()]
        with self._playing:
            played = self._play(episodes, sampling)
        self.failures.sum_up()
        return [played[i] for i in places]

    def _play(self, episodes: Sequence[Assignment], sampling: Sampling) -> dict[int, Trajectory]:
        played = self.journal.known(episodes, self.engine.weights_version)
        todo = [episode for episode in episodes if episode.index not in played]
        self.counts = len(played), len(episodes)

        def finished(index: int, ended: Ended) -> None:
            played[index] = ended.trajectory
            self.counts = len(played), len(episodes)
            report_failures(self.failures, index, ended)
            self._toolbox.record(ended.trajectory)
            self.journal.add(ended.trajectory)
            judging.ended(index)

        sampler = SamplerClient(self.engine, retries=0, inline=True)
        hosts = LocalHosts(lambda: self._host)
        driver = Driver(hosts, sampler, sampling, finished, toolbox=self._toolbox, own_slots=True)
        with Judging(self._judge, episodes, played) as judging:
            if todo:
                run_here(driver.play(todo))
            played |= judging.judged(self.failures)
        self.report = replace(driver.report, workers=0)
        return played

    def _role_of(self, slot: int, tag: str) -> Role:
        """The role of the env of a slot, after its reset."""
        del slot
        return self.roles[tag]


class Collector(Protocol):
    """Plays groups of episodes, in a vector env here or on hosts."""

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
    """Dynamic sampling: play whole groups, in the order of the plan, until enough of them have different rewards.

    Args:
        collector: plays the groups; further batches are new groups with seeds of their own.
        iteration: names the seeds.
        sampling: how tokens are picked.
        max_batches: of groups, at most.
        gamma: discount a turn, see `filter_groups`.

    Returns:
        All trajectories played, those to learn from (whole episodes of at most as many groups as the collector has
        tags), and the report.
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
