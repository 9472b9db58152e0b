"""Scores the groups of a rollout while others are played, and puts the weighted sum into their rewards.

It runs in the event loop of the process. Results have the order of the plan, whoever answers first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, Self

from shoal.core.data import MOST_REWARD, Judged, Score, Trajectory
from shoal.core.errors import WorkerError
from shoal.core.executors import Closing
from shoal.rollout.plan import Assignment
from shoal.rollout.report import LEFT_OUT, FailureLog
from shoal.rollout.rewards.scorers import Answers, Scored, Scorer, function_of, key_of, scorer_of
from shoal.rollout.rewards.settings import ENV, FORMAT, Given, RewardConfig, reward_list
from shoal.samplers.asking import Loop, RejectedError


class Judge(Closing):
    """Gives groups of episodes the rewards of a list, as the setting `rewards` of the YAML has it.

    Args:
        rewards: settings, names, or functions.
        answers: what models and commands answered before, and where it is kept.

    Use it as a context manager, or call `close`, so that processes end.

    Raises:
        ConfigError: an unknown name or setting, a function that cannot be imported, a server's key that is missing, or
            two rewards of one name.
    """

    def __init__(self, rewards: Iterable[Given], answers: Answers | None = None) -> None:
        self.rewards = reward_list(rewards)
        self._answers = answers or Answers()
        for config in self.rewards:
            if config.model is not None:
                key_of(config.model)
            elif not config.command:
                function_of(config)
        self._loop: Loop | None = None
        self._scorers: list[Scorer] = []

    def judge(self, episodes: Sequence[Trajectory], task: Any = None) -> Future[list[Trajectory]]:
        """The episodes of one group with their scores, as soon as all rewards have answered.

        Those that are not whole stay as they are. One that a reward gives no score has `status` "reward_error".
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = Loop()
            self._scorers = [scorer_of(config, self._answers) for config in self.rewards]
        try:
            return loop.submit(self._judge(episodes, task))
        except RejectedError as error:  # another thread closes it now
            raise WorkerError("the rollout was ended: its judge was closed") from error

    async def _judge(self, episodes: Sequence[Trajectory], task: Any) -> list[Trajectory]:
        whole = [n for n, episode in enumerate(episodes) if episode.status == "ok" and episode.turns]
        found = list(episodes)
        if whole:
            given = [episodes[n] for n in whole]
            columns = await asyncio.gather(*(scorer.score(given, task) for scorer in self._scorers))
            for n, scored in zip(whole, zip(*columns, strict=True), strict=True):
                found[n] = judged(episodes[n], self.rewards, scored)
        return found

    def close(self) -> None:
        """End what runs, with all processes; may be called twice, and it begins anew when it is asked again."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        while self._scorers:
            self._scorers.pop().close()


def judged(episode: Trajectory, rewards: Sequence[RewardConfig], scored: Sequence[Scored]) -> Trajectory:
    """An episode with its scores: those of `env` and `format` in the turns that earned them, others at the last turn.

    A reward that abstains is left out of the sum; where all do, the episode has none.
    """
    paid, scores = [0.0] * len(episode.turns), []
    for config, one in zip(rewards, scored, strict=True):
        scores.append(Score(config.name, config.weight, one.value, one.prompt, one.answer))
        if config.registered == ENV:
            paid = [p + config.weight * turn.reward for p, turn in zip(paid, episode.turns, strict=True)]
        elif config.registered == FORMAT:
            valid = [turn.action_is_valid for turn in episode.turns]
            paid = [p - config.weight * (not known) for p, known in zip(paid, valid, strict=True)]
        else:
            paid[-1] += config.weight * (one.value or 0.0)
    env_rewards = tuple(turn.reward for turn in episode.turns)
    episode = replace(episode, judged=Judged(env_rewards, tuple(scores)))
    if all(one.abstains for one in scored):
        return replace(
            episode, status="reward_error", error="all rewards abstained (None): none is of its task"
        )
    for config, one in zip(rewards, scored, strict=True):
        if one.value is None and not one.abstains:
            return replace(episode, status="reward_error", error=f"reward {config.name!r}: {one.why}")
    if not sum(map(abs, paid)) <= MOST_REWARD:
        why = f"the weighted scores must sum to at most {MOST_REWARD:.3g} (float32), got {paid[-1]:.3g}"
        return replace(episode, status="reward_error", error=why)
    turns = (replace(turn, reward=reward) for turn, reward in zip(episode.turns, paid, strict=True))
    return replace(episode, turns=tuple(turns))


class Judging:
    """The groups of one rollout, each judged when the last of its episodes has ended.

    Args:
        judge: scores them; None leaves all as they are.
        assignments: the episodes of the rollout.
        results: the episodes that have ended, by index; they grow while the rollout lasts.
        task_of: the task of an episode, where it has one.
    """

    def __init__(
        self,
        judge: Judge | None,
        assignments: Iterable[Assignment],
        results: Mapping[int, Trajectory],
        task_of: Callable[[Assignment], Any] = lambda assignment: None,
    ) -> None:
        self._judge, self._results, self._task_of = judge, results, task_of
        self._groups: dict[int, list[Assignment]] = {}  # by the index of each member
        self._pending: dict[int, Future[list[Trajectory]]] = {}  # by that of the first one
        groups: dict[tuple[int, ...], list[Assignment]] = {}
        for one in assignments if judge is not None else ():
            group = one.place.iteration, one.place.group, one.place.env_seed
            groups.setdefault(group, []).append(one)
        for members in groups.values():
            self._groups |= dict.fromkeys((member.index for member in members), members)
            self.ended(members[0].index)

    def ended(self, index: int) -> None:
        """An episode may be among the results now; with the last one its group is judged."""
        members = self._groups.get(index, [])
        if self._judge is not None and all(member.index in self._results for member in members):
            episodes = [self._results[member.index] for member in members]
            self._pending[members[0].index] = self._judge.judge(episodes, self._task_of(members[0]))

    def judged(self, failures: FailureLog) -> dict[int, Trajectory]:
        """The episodes of all groups with their scores."""
        found: dict[int, Trajectory] = {}
        for first, pending in sorted(self._pending.items()):
            try:
                episodes = pending.result()
            except CancelledError as error:
                raise WorkerError("the rollout was ended: its judge was closed") from error
            for member, episode in zip(self._groups[first], episodes, strict=True):
                found[member.index] = episode
                if episode.status == "reward_error":
                    failures.add(f"episode {member.index} of {episode.env}", str(episode.error), LEFT_OUT)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pending in self._pending.values():
            pending.cancel()
