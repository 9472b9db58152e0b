"""Playing whole groups of episodes with one engine: the lockstep schedule, and the roles it hands out.

Group g of an iteration starts its members from one env seed; members differ in their sampling noise alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.core.data import Trajectory
from shoal.core.seeding import derive_seed
from shoal.envs import TextEnv
from shoal.rollout.engine import Engine, Sampling
from shoal.rollout.episode import Episode, Place, Role
from shoal.rollout.prompts import PromptConfig, Prompter

Reset = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


class EnvPool(Protocol):
    """Envs that can be reset and stepped a few at a time; `shoal.vector` provides them."""

    def reset_some(self, indices: Sequence[int], seeds: Sequence[int], /) -> Sequence[Reset]:
        """Reset these envs, each from its seed."""
        ...

    def step_some(self, indices: Sequence[int], actions: Sequence[Any], /) -> Sequence[Step]:
        """Step these envs; the others are left alone."""
        ...

    def close(self) -> None:
        """End the envs and their workers."""
        ...


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
    ) -> None:
        self.envs = envs
        self.tags = tuple(tags)
        self.roles = dict(roles)
        self.group_size = group_size
        self.engine = engine
        self.seed = seed
        self.prompter = Prompter(prompt, engine.tokenizer)

    def collect(self, iteration: int, sampling: Sampling, *, first_group: int = 0) -> list[Trajectory]:
        """Play every group once, in lockstep; trajectories come group by group, member by member.

        Args:
            iteration: names the env seeds and the sampling noise.
            sampling: how tokens are picked.
            first_group: the number of the first group, for further batches of groups in one iteration.
        """
        episodes = [
            Episode(
                self._place(iteration, first_group + group, member), self.roles[tag], self.prompter, sampling
            )
            for group, tag in enumerate(self.tags)
            for member in range(self.group_size)
        ]
        everyone = range(len(episodes))
        seeds = [episode.place.env_seed for episode in episodes]
        for episode, (observation, info) in zip(episodes, self.envs.reset_some(everyone, seeds), strict=True):
            episode.begin(observation, info)
        live = list(everyone)
        while live:
            completions = self.engine.generate([episodes[i].request() for i in live])
            self._act({i: episodes[i].respond(c) for i, c in zip(live, completions, strict=True)}, episodes)
            live = [i for i in live if not episodes[i].over]
        return [episode.trajectory() for episode in episodes]

    def _act(self, actions: Mapping[int, list[int | str]], episodes: Sequence[Episode]) -> None:
        """Step each env through the actions of its turn, all envs abreast."""
        pending = {i: list(todo) for i, todo in actions.items()}
        while pending:
            indices = list(pending)
            results = self.envs.step_some(indices, [pending[i].pop(0) for i in indices])
            for i, (observation, reward, terminated, truncated, info) in zip(indices, results, strict=True):
                episodes[i].observe(observation, reward, terminated, truncated, info)
                if terminated or truncated or not pending[i]:
                    del pending[i]
        for i in actions:
            episodes[i].end_turn()

    def _place(self, iteration: int, group: int, member: int) -> Place:
        env_seed = derive_seed(self.seed, "env", iteration, group)
        return Place(self.seed, iteration, group, member, env_seed)


def role_of(tag: str, env: TextEnv[Any], max_turns: int) -> Role:
    """What an agent is told of `env`."""
    return Role(tag, env.instructions, env.projection, max_turns)
