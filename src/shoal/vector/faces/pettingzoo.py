"""PettingZoo's parallel environments as one vector env: each agent is a slot, stepped by `make_vec`."""
# ruff: noqa: D102 (the other methods are documented in `VectorEnv` and `Env`)

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from shoal.core.data import check_flags, check_step_result, info_of, reward_of
from shoal.core.errors import ConfigError, EnvError
from shoal.vector.make import make_vec
from shoal.vector.spaces import Layout, check_options


class PettingZooVectorEnv(VectorEnv[Any, Any, Any]):
    """Copies of a parallel environment; agent a of copy c is slot `c * n_agents + a`.

    A copy begins its next episode in the step in which its last agent ends. Until then agents that ended are
    out: their end is reported once, then they have reward 0, their actions are ignored and their observations are
    zeros. So are those who have not joined yet. `active`, and `infos["active"]` beside each observation, say which
    slots are in play, so a step is experience of a slot where it was active before the step.

    Args:
        make: makes one environment of PettingZoo's parallel interface (`mpe2.simple_spread_v3.parallel_env`).
        num_copies: how many of them.
        env_kwargs: passed to `make`.
        **options: of `make_vec`: `backend`, `num_workers`, `on_failure`, `step_timeout`, …

    Raises:
        ConfigError: when the agents do not share one observation space and one action space.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        num_copies: int = 1,
        *,
        env_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        make = getattr(make, "parallel_env", make)
        if not callable(make):
            raise TypeError(f"expected a function that makes a parallel environment, got {make!r}")
        if options.get("autoreset", "same_step") not in ("same_step", AutoresetMode.SAME_STEP):
            raise ConfigError(f"PettingZooVectorEnv has autoreset='same_step', got {options['autoreset']!r}")
        options["autoreset"] = "same_step"
        self.pool = make_vec(functools.partial(TeamEnv, make, env_kwargs or {}), num_copies, **options)
        self.agents, single, act = self.pool.call("team")[0]
        self.num_copies, self.n_agents = num_copies, len(self.agents)
        self.num_envs = num_copies * self.n_agents
        self.single_observation_space, self.single_action_space = single, act
        self._layout = Layout.of(single)
        self.observation_space = batch_space(single, self.num_envs)
        self.action_space = batch_space(act, self.num_envs)
        self.metadata = {**self.pool.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode, self.spec = self.pool.render_mode, None
        self.active = np.zeros(self.num_envs, dtype=np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all copies: copy c with `seed + c`, or with its own of a list of `num_copies` seeds.

        Of a list with one for each slot a copy takes that of its first agent.
        """
        if "reset_mask" in (check_options(options) or {}):
            raise ConfigError("PettingZooVectorEnv resets all copies; leave options['reset_mask'] out")
        if isinstance(seed, Sequence | np.ndarray) and len(seed) == self.num_envs:
            seed = seed[:: self.n_agents]
        seen, copy_infos = self.pool.reset(seed=seed, options=options)
        infos: dict[str, Any] = {}
        self._spread(infos, copy_infos)
        return self._slots(seen, infos), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every copy with the actions of its slots."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step; `step_wait` returns its result."""

        def by_copy(leaf: Any) -> Any:
            shape = np.shape(leaf)
            if shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"expected an action for each of {self.num_envs} slots ({self.num_copies} copies of "
                    f"{self.n_agents} agents), got {leaf!r:.80} of shape {shape}"
                )
            return np.asarray(leaf).reshape(self.num_copies, self.n_agents, *shape[1:])

        self.pool.step_async(Layout.of(self.single_action_space).map(by_copy, actions))

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observations, rewards, terminations, truncations and infos of every slot."""
        # lost: copies whose worker was replaced
        seen, _, over, lost, copy_infos = self.pool.step_wait(timeout)
        before, infos = self.active.reshape(self.num_copies, self.n_agents), dict[str, Any]()
        rewards, terminated, truncated = (
            np.array(seen[key], dtype=kind) for key, kind in (("reward", float), ("end", bool), ("cut", bool))
        )
        for c in np.flatnonzero(over).tolist():
            last = copy_infos["final_obs"][c]
            rewards[c], terminated[c], truncated[c] = last["reward"], last["end"], last["cut"]
        for c in np.flatnonzero(lost).tolist():
            rewards[c], terminated[c], truncated[c] = 0.0, False, before[c]
        ended = (terminated | truncated).reshape(-1)
        for slot in np.flatnonzero(ended).tolist():
            c, a = divmod(slot, self.n_agents)
            obs, at = (copy_infos["final_obs"][c]["obs"], a) if over[c] or lost[c] else (seen["obs"], (c, a))
            final = self._layout.map(lambda leaf, at=at: np.array(leaf[at]), obs)  # type: ignore[misc]
            self._add_info(infos, {"final_obs": final}, slot)
        self._spread(infos, copy_infos.get("final_info", {}), ended)
        self._spread(infos, copy_infos, ended & ~np.repeat(over | lost, self.n_agents))
        obs = self._slots(seen, infos)
        return obs, rewards.reshape(-1), terminated.reshape(-1), truncated.reshape(-1), infos

    def stats(self) -> dict[str, Any]:
        return self.pool.stats()

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close(**kwargs)

    def _slots(self, seen: Any, infos: dict[str, Any]) -> Any:
        """The observation of every slot; `active` is updated and added to the infos."""
        self.active = seen["active"].astype(np.bool_).reshape(-1)
        infos["active"] = self.active.copy()
        return self._layout.map(lambda leaf: leaf.reshape(self.num_envs, *leaf.shape[2:]), seen["obs"])

    def _spread(self, infos: dict[str, Any], copy_infos: dict[str, Any], ended: Any = None) -> None:
        """Add the infos of the copies by slot; those of agents that ended as `final_info`."""
        for c in np.flatnonzero(copy_infos.get("_agent_infos", ())).tolist():
            for a, info in enumerate(copy_infos["agent_infos"][c]):
                slot = c * self.n_agents + a
                final = ended is not None and ended[slot]
                self._add_info(infos, {"final_info": info} if final else info, slot)
        for key, value in copy_infos.items():
            if key.removeprefix("_") not in ("agent_infos", "final_obs", "final_info"):
                infos[key] = self._by_slot(value)

    def _by_slot(self, column: Any) -> Any:
        """The info of each copy, or each of nested infos, repeated for each of its agents."""
        if isinstance(column, dict):
            return {key: self._by_slot(value) for key, value in column.items()}
        return np.repeat(column, self.n_agents, axis=0)


class TeamEnv(gymnasium.Env[Any, Any]):
    """One parallel environment as a Gymnasium env; rewards and flags of the agents are parts of the observation."""

    def __init__(self, make: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.env = make(**kwargs)
        self.agents = list(getattr(self.env, "possible_agents", ()))
        if not self.agents or hasattr(self.env, "agent_iter"):
            raise ConfigError(
                "expected an environment of PettingZoo's parallel interface with possible_agents, got "
                f"{type(self.env).__name__}; where agents take turns, pettingzoo.utils.aec_to_parallel makes one of it"
            )
        seen = [self.env.observation_space(agent) for agent in self.agents]
        acts = [self.env.action_space(agent) for agent in self.agents]
        odd = [a for a, s, t in zip(self.agents, seen, acts, strict=True) if s != seen[0] or t != acts[0]]
        if odd:
            raise ConfigError(
                f"expected the spaces of {self.agents[0]!r} for all agents ({seen[0]}, {acts[0]}), got others for "
                f"{odd}; pad them, for example with supersuit's pad_observations_v0 and pad_action_space_v0"
            )
        self.single, self.act, n = seen[0], acts[0], len(self.agents)
        flags: dict[str, Any] = {key: spaces.MultiBinary(n) for key in ("end", "cut", "active")}
        paid = spaces.Box(-np.inf, np.inf, (n,), np.float64)
        self.observation_space = spaces.Dict({"obs": batch_space(self.single, n), "reward": paid, **flags})
        self.action_space = batch_space(self.act, n)
        self.render_mode = getattr(self.env, "render_mode", None)

    def team(self) -> tuple[list[Any], Any, Any]:
        """Names of the agents, and the spaces of one."""
        return self.agents, self.single, self.act

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = check_step_result(self.env.reset(seed=seed, options=options), "reset")
        self.active = self._left()
        if not self.active.any():
            raise EnvError("expected agents in play after reset, got none")
        self.over = np.zeros_like(self.active)  # agents that ended in this episode; none comes back in it
        return self._answer(obs, {}, {}, {}), self._agent_infos(obs, infos)

    def step(self, actions: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the agents in play; over when none is left."""
        each = zip(self.agents, iterate(self.action_space, actions), self.active, strict=True)
        acts = {agent: action for agent, action, here in each if here}
        obs, paid, ends, cuts, infos = check_step_result(self.env.step(acts), "step")
        answer, left = self._answer(obs, paid, ends, cuts), self._left()
        ended = (answer["end"] | answer["cut"]).astype(np.bool_)
        gone = [agent for agent, lost in zip(self.agents, self.active & ~left & ~ended, strict=True) if lost]
        if gone:
            raise EnvError(f"expected agents that leave to be terminated or truncated, {gone} left without")
        self.over |= ended
        self.active = answer["active"] = left & ~self.over
        return answer, sum(answer["reward"]), not self.active.any(), False, self._agent_infos(obs, infos)

    def _left(self) -> Any:
        """Which agents the environment has in play, as it says itself."""
        return np.array([agent in self.env.agents for agent in self.agents])

    def _answer(self, obs: Any, paid: Any, ends: Any, cuts: Any) -> dict[str, Any]:
        (none,) = iterate(batch_space(self.single), create_empty_array(self.single))
        here = [a for a, active in zip(self.agents, self.active, strict=True) if active]
        seeing = self.active | self._left() & ~self.over  # those who join are first seen now
        rows = [obs[a] if sees and a in obs else none for a, sees in zip(self.agents, seeing, strict=True)]
        room: Any = create_empty_array(self.single, len(rows))
        seen = concatenate(self.single, rows, room)
        for a in here:
            check_flags(ends.get(a, False), cuts.get(a, False), f"agent {a!r}: ")
        flags = {
            name: np.array([a in here and bool(flags.get(a, False)) for a in self.agents], np.int8)
            for name, flags in (("end", ends), ("cut", cuts))
        }
        return {
            "obs": seen,
            "reward": np.array([reward_of(paid.get(a, 0.0)) if a in here else 0.0 for a in self.agents]),
            **flags,
            "active": self.active.astype(np.int8),
        }

    def _agent_infos(self, obs: Any, infos: Any) -> dict[str, Any]:
        """The infos of all agents; an agent in play without an observation, or unknown, is an error."""
        unseen = [
            agent for agent, here in zip(self.agents, self.active, strict=True) if here and agent not in obs
        ]
        strangers = [agent for agent in self.env.agents if agent not in self.agents]
        if unseen or strangers:
            raise EnvError(
                f"expected an observation of each agent in play, all among possible_agents; {unseen} have none, "
                f"{strangers} are not among them"
            )
        each = tuple(dict(info_of(info_of(infos).get(agent, {}))) for agent in self.agents)
        return {"agent_infos": each} if any(each) else {}

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()
