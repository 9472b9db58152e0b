"""Scores the groups of a rollout while others are played, and puts the weighted sum into their rewards.

It has an event loop in a thread of its own. Results have the order of the plan, whoever answers first.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from shoal.core.data import MOST_REWARD, Judged, Score, Trajectory
from shoal.core.executors import Closing
from shoal.rollout.failures import LEFT_OUT, FailureLog
from shoal.rollout.loops import LoopThread
from shoal.rollout.plan import Assignment
from shoal.rollout.rewards.answers import Answers
from shoal.rollout.rewards.scorers import Scored, Scorer, function_of, scorer_of
from shoal.rollout.rewards.settings import Given, RewardConfig, reward_list

WAIT_SECONDS = 0.5
"""Between two looks whether the rollout was ended by another thread."""


class Judge(Closing):
    """Gives groups of episodes the rewards of a list, as the setting `rewards` of the YAML has it.

    Args:
        rewards: settings, names, or functions.
        answers: what models and commands answered before, and where it is kept.

    Use it as a context manager, or call `close`, so that processes end.

    Raises:
        ConfigError: an unknown name or key, a function that cannot be imported, or two rewards of one name.
    """

    def __init__(self, rewards: Iterable[Given], answers: Answers | None = None) -> None:
        self.rewards = reward_list(rewards)
        self._answers = answers or Answers()
        for config in self.rewards:
            if not (config.command or config.model):
                function_of(config)
        self._loop: LoopThread | None = None
        self._scorers: list[Scorer] = []

    def judge(
        self, episodes: Sequence[Trajectory], task: Any = None
    ) -> concurrent.futures.Future[list[Trajectory]]:
        """The episodes of one group with their scores, as soon as all rewards have answered.

        Those that are not whole stay as they are. One that a reward gives no score has `status` "reward_error".
        """
        if self._loop is None:
            self._loop = loop = LoopThread("shoal-judge")
            self._scorers = [scorer_of(config, loop, self._answers) for config in self.rewards]
        return self._loop.submit(self._judge(episodes, task))

    async def _judge(self, episodes: Sequence[Trajectory], task: Any) -> list[Trajectory]:
        whole = [episode for episode in episodes if episode.status == "ok" and episode.turns]
        if not whole:
            return list(episodes)
        columns = await asyncio.gather(*(scorer.score(whole, task) for scorer in self._scorers))
        scores = iter(zip(*columns, strict=True))
        return [
            judged(e, self.rewards, next(scores)) if e.status == "ok" and e.turns else e for e in episodes
        ]

    def close(self) -> None:
        """End what runs, with all processes; may be called twice, and it begins anew when it is asked again."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        while self._scorers:
            self._scorers.pop().close()


def judged(episode: Trajectory, rewards: Sequence[RewardConfig], scored: Sequence[Scored]) -> Trajectory:
    """An episode with its scores: the env's rewards times the weight of `env`, and all others at the last turn."""
    scores = tuple(
        Score(config.name, config.weight, one.value, one.prompt, one.answer)
        for config, one in zip(rewards, scored, strict=True)
    )
    kept = tuple(turn.reward for turn in episode.turns)
    episode = replace(episode, judged=Judged(kept, scores))
    for score, one in zip(scores, scored, strict=True):
        if score.value is None:
            return replace(episode, status="reward_error", error=f"reward {score.name!r}: {one.why}")
    of_env = sum(config.weight for config in rewards if config.is_env)
    others = [s for s, config in zip(scores, rewards, strict=True) if not config.is_env]
    paid = [reward * of_env for reward in kept]
    paid[-1] += sum(s.weight * s.value for s in others if s.value is not None)
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
        self._groups: dict[tuple[int, ...], list[Assignment]] = {}
        self._asked: dict[tuple[int, ...], concurrent.futures.Future[list[Trajectory]]] = {}
        for assignment in assignments if judge is not None else ():
            self._groups.setdefault(_group(assignment), []).append(assignment)
        for members in self._groups.values():
            self._ask(members)

    def ended(self, assignment: Assignment) -> None:
        """An episode is among the results now."""
        if self._judge is not None:
            self._ask(self._groups[_group(assignment)])

    def _ask(self, members: Sequence[Assignment]) -> None:
        if self._judge is not None and all(member.index in self._results for member in members):
            episodes = [self._results[member.index] for member in members]
            self._asked[_group(members[0])] = self._judge.judge(episodes, self._task_of(members[0]))

    def judged(self, failures: FailureLog, check: Callable[[], None] = lambda: None) -> dict[int, Trajectory]:
        """The episodes of all groups with their scores; `check` is called now and then, and may raise."""
        found: dict[int, Trajectory] = {}
        for group, members in self._groups.items():
            while not concurrent.futures.wait([self._asked[group]], WAIT_SECONDS).done:
                check()
            check()
            for member, episode in zip(members, self._asked[group].result(), strict=True):
                found[member.index] = episode
                if episode.status == "reward_error":
                    failures.add(f"episode {member.index} of {episode.env}", str(episode.error), LEFT_OUT)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for asked in self._asked.values():
            asked.cancel()


def _group(assignment: Assignment) -> tuple[int, ...]:
    place = assignment.place
    return place.iteration, place.group, place.env_seed
