"""PettingZoo's parallel environments as slots of a vector env, against stepping them by hand."""

from __future__ import annotations

import functools
import os
import re
import signal
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from shoal.core.errors import ConfigError, EnvError
from shoal.vector import PettingZooVectorEnv, make_vec


class Race:
    """Agents walk by their action; who reaches `goal` is terminated; after `limit` steps the rest is truncated."""

    possible_agents = ("ann", "bob", "cleo")
    render_mode = None

    def __init__(self, goal: int = 6, limit: int = 5, fault: str | None = None) -> None:
        self.goal, self.limit, self.fault = goal, limit, fault

    def observation_space(self, agent: str) -> Any:
        wide = 3 if self.fault == "spaces" and agent == "bob" else 2
        return spaces.Box(-100, 100, (wide,), np.float64)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.t = list(self.possible_agents), 0
        self.x = {agent: self.random.random() for agent in self.agents}
        return self.see(), {agent: {"start": self.x[agent]} for agent in self.agents}

    def see(self) -> Any:
        return {agent: np.array([self.x[agent], self.t]) for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents), "only agents in play are stepped"
        self.t += 1
        if self.fault == "die" and self.t == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "nan" and self.t == 2:
            self.x["bob"] = np.nan
        for agent, action in actions.items():
            self.x[agent] += int(action)
        obs, rewards = self.see(), {agent: 10.0 * self.x[agent] for agent in self.agents}
        ends = {agent: self.x[agent] >= self.goal for agent in self.agents}
        cuts = {agent: self.t >= self.limit for agent in self.agents}
        infos = {agent: {"place": i} for i, agent in enumerate(self.agents)}
        self.agents = [agent for agent in self.agents if not (ends[agent] or cuts[agent])]
        if self.fault == "echo":  # as some environments do: everybody is told for ever
            self.told = {**getattr(self, "told", {}), **obs}
            rewards = {agent: 7.0 for agent in self.possible_agents}
            ends = {agent: self.x[agent] >= self.goal for agent in self.possible_agents}
            obs = self.told
        if self.fault == "vanish":
            self.agents = self.agents[1:]
        if self.fault == "unseen":
            del obs["bob"]
        if self.fault == "stranger":
            self.agents.append("dave")
        if self.fault == "no info":
            infos["cleo"] = None
        return obs, rewards, ends, cuts, infos

    def close(self) -> None:
        pass


def by_hand(envs: list[Any], actions: Any) -> Any:
    """What every slot should see: the definition, one copy and one agent after the other."""
    rows = []
    for c, env in enumerate(envs):
        team = env.possible_agents
        alive = list(env.agents)
        given = {a: actions[c * len(team) + k] for k, a in enumerate(team) if a in alive}
        obs, paid, ends, cuts, infos = env.step(given)
        fresh = None if env.agents else env.reset()
        for agent in team:
            row: dict[str, Any] = {"paid": 0.0, "end": False, "cut": False, "final": None, "info": {}}
            if agent in alive:
                row |= {"paid": paid[agent], "end": bool(ends[agent]), "cut": bool(cuts[agent])}
                row["final"] = obs[agent] if ends[agent] or cuts[agent] else None
                row["info"] = infos[agent]
            row["active"] = agent in env.agents
            shown = fresh[0] if fresh else obs
            zero = np.zeros(env.observation_space(agent).shape)
            there = fresh is not None or (agent in alive)
            row["obs"] = shown[agent] if there else zero
            row["over"] = fresh is not None
            row["fresh"] = fresh[1][agent] if fresh else {}
            rows.append(row)
    return rows


def check_against_hand(envs: PettingZooVectorEnv, hand: list[Any], seeds: list[int], steps: int) -> Any:
    obs, infos = envs.reset(seed=seeds[0])
    team = hand[0].possible_agents
    first = [env.reset(seed=s)[0] for env, s in zip(hand, seeds, strict=True)]
    assert np.array_equal(obs, np.array([seen[agent] for seen in first for agent in team]))
    random, ends, early = np.random.default_rng(1), 0, 0
    for t in range(steps):
        was_active = envs.active.copy()
        actions = random.integers(envs.single_action_space.n, size=envs.num_envs)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for slot, row in enumerate(by_hand(hand, actions)):
            where = f"step {t}, slot {slot}"
            assert np.array_equal(obs[slot], row["obs"]), where
            assert rewards[slot] == row["paid"], where
            assert (terminated[slot], truncated[slot]) == (row["end"], row["cut"]), where
            assert infos["active"][slot] == envs.active[slot] == row["active"], where
            over = row["final"] is not None
            assert ("_final_obs" in infos and infos["_final_obs"][slot]) == over, where
            if over:
                ends += 1
                early += not row["over"]  # the others of its copy go on
                assert was_active[slot], where
                assert np.array_equal(infos["final_obs"][slot], row["final"]), where
            told = infos.get("final_info", {}) if over else infos
            for key, value in row["info"].items():
                assert told[key][slot] == value, where
                assert told[f"_{key}"][slot], where
            for key, value in row["fresh"].items():
                assert infos[key][slot] == value, where
    return ends, early


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_slots_are_what_stepping_each_copy_by_hand_gives(backend: Any) -> None:
    envs = PettingZooVectorEnv(Race, 3, backend=backend, num_workers=None if backend == "serial" else 2)
    assert envs.agents == ["ann", "bob", "cleo"]
    assert envs.num_envs == 9
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.observation_space.shape == (9, 2)
    ends, early = check_against_hand(envs, [Race() for _ in range(3)], [4, 5, 6], 40)
    assert ends > early > 10
    envs.close()
    assert envs.pool.closed


def test_what_is_still_told_of_an_agent_that_ended_is_not_told_again() -> None:
    envs = PettingZooVectorEnv(Race, 1, env_kwargs={"goal": 2, "fault": "echo"}, backend="serial")
    envs.reset(seed=0)
    seen = [envs.step([2, 0, 0]) for _ in range(3)]
    assert [step[2].tolist() for step in seen] == [[True, False, False], [False] * 3, [False] * 3]
    assert [step[1].tolist() for step in seen] == [[7.0] * 3, [0.0, 7.0, 7.0], [0.0, 7.0, 7.0]]
    assert seen[1][0][0].tolist() == [0.0, 0.0]


class Shift(Race):
    """Bob joins in step 2; ann ends in step 3 and, with the fault "lingers", stays among the agents."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.agents = ["ann"]
        return {"ann": np.array([7.0, 0.0])}, {"ann": {}}

    def step(self, actions: Any) -> Any:
        self.t += 1
        if self.t == 2:
            self.agents = ["ann", "bob"]
        told = list(self.agents)
        obs = {agent: np.array([7.0 if agent == "ann" else 8.0, self.t]) for agent in told}
        ends = {agent: self.t >= (3 if agent == "ann" else 5) for agent in told}
        if self.t == 3 and self.fault != "lingers":
            self.agents = ["bob"]
        if self.t == 5:
            self.agents = []
        return obs, dict.fromkeys(told, 1.0), ends, dict.fromkeys(told, False), {agent: {} for agent in told}


@pytest.mark.parametrize("fault", [None, "lingers"])
def test_who_joins_is_seen_at_once_and_who_ended_does_not_come_back(fault: str | None) -> None:
    envs = PettingZooVectorEnv(functools.partial(Shift, fault=fault), backend="serial")
    seen, infos = envs.reset(seed=0)
    assert [seen[:2, 0].tolist(), infos["active"].tolist()] == [[7.0, 0.0], [True, False, False]]
    played = []
    for _ in range(5):
        seen, rewards, terminated, _, infos = envs.step(np.zeros(3, int))
        played.append(
            (
                seen[:2, 0].tolist(),
                rewards[:2].tolist(),
                terminated[:2].tolist(),
                infos["active"][:2].tolist(),
            )
        )
    envs.close()
    assert played == [
        ([7.0, 0.0], [1.0, 0.0], [False, False], [True, False]),
        ([7.0, 8.0], [1.0, 0.0], [False, False], [True, True]),
        ([7.0, 8.0], [1.0, 1.0], [True, False], [False, True]),
        ([0.0, 8.0], [0.0, 1.0], [False, False], [False, True]),
        ([7.0, 0.0], [0.0, 1.0], [False, True], [True, False]),
    ]


def test_what_a_wrapper_of_each_copy_tells_in_nested_infos_has_a_row_for_each_slot() -> None:
    envs = PettingZooVectorEnv(
        Race, 2, backend="serial", wrappers=["gymnasium.wrappers:RecordEpisodeStatistics"]
    )
    envs.reset(seed=0)
    for _ in range(5):
        _, _, _, truncated, infos = envs.step(np.zeros(6, int))
    envs.close()
    assert truncated.all()
    assert infos["episode"]["l"].tolist() == [5] * 6
    assert infos["_episode"].tolist() == infos["episode"]["_l"].tolist() == [True] * 6


def test_the_same_seeds_give_the_same_play_and_a_list_seeds_each_copy() -> None:
    envs = PettingZooVectorEnv(Race, 2, backend="serial")
    first, _ = envs.reset(seed=7)
    again, _ = envs.reset(seed=[7, 8])
    same, _ = envs.reset(seed=[7, 7])
    assert np.array_equal(first, again)
    assert not np.array_equal(first[:3], first[3:])
    assert np.array_equal(same[:3], same[3:])


def test_a_copy_whose_worker_dies_is_truncated_for_those_in_play_and_the_others_go_on() -> None:
    envs = PettingZooVectorEnv(
        sometimes_deadly, 2, env_kwargs={"goal": 2, "limit": 9}, backend="process", num_workers=2, on_failure="restart"
    )  # fmt: skip
    envs.reset(seed=[0, 1])
    before, *_ = envs.step([0, 3, 0, 0, 3, 0])  # bob ends in both
    _, rewards, terminated, truncated, infos = envs.step([1, 0, 0, 1, 0, 0])
    dead = [0, 1, 2] if infos["worker_restarted"][0] else [3, 4, 5]
    assert infos["worker_restarted"].sum() == 3
    assert truncated[dead].tolist() == [True, False, True]  # bob's end was told before
    assert not truncated[[i for i in range(6) if i not in dead]].any()
    assert not terminated.any()
    assert rewards[dead].tolist() == [0.0] * 3
    assert np.array_equal(infos["final_obs"][dead[0]], before[dead[0]])
    assert envs.active[dead].all()
    assert sum(envs.stats()["restarts"]) == 1
    envs.close()


@pytest.mark.parametrize("actions", [[0] * 5, 0, None, np.zeros((2, 3), int)])
def test_actions_that_are_not_one_for_each_slot_are_refused(actions: Any) -> None:
    envs = PettingZooVectorEnv(Race, 2, backend="serial")
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"an action for each of 6 slots \(2 copies of 3 agents\), got"):
        envs.step(actions)
    assert envs.step([0] * 6)[0][:, 1].tolist() == [1.0] * 6
    envs.close()


class Fated(Race):
    """A race that ends its process in its second step where the seed was even."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.fault = "die" if seed == 0 else None
        return super().reset(seed, options)


def sometimes_deadly(**kwargs: Any) -> Any:
    return Fated(**kwargs)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_agents_with_other_spaces_are_refused_by_name(backend: Any) -> None:
    with pytest.raises((ConfigError, RuntimeError), match=r"got others for \['bob'\]"):
        PettingZooVectorEnv(Race, 1, env_kwargs={"fault": "spaces"}, backend=backend)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("vanish", "'ann'.* left without"),
        ("nan", "NaN|nan"),
        ("unseen", r"an observation of each agent in play, .* \['bob'\] have none"),
        ("stranger", r"among possible_agents; .* \['dave'\] are not among them"),
        ("no info", "info must be a dict, got NoneType"),
    ],
)
def test_what_breaks_the_interface_is_named(fault: str, said: str) -> None:
    envs = PettingZooVectorEnv(Race, 1, env_kwargs={"fault": fault, "goal": 90}, backend="serial")
    envs.reset(seed=0)
    if fault == "nan":
        envs.step([0, 0, 0])  # it comes in the second step
    with pytest.raises(RuntimeError, match=said):
        envs.step([0, 0, 0])


class Nobody(Race):
    possible_agents = ()


class Asleep(Race):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        answer, self.agents = super().reset(seed), []
        return answer


def test_an_episode_that_begins_without_agents_is_none() -> None:
    with pytest.raises(EnvError, match="expected agents in play after reset, got none"):
        PettingZooVectorEnv(Asleep, 1, backend="serial").reset(seed=0)


class InTurns(Race):
    def agent_iter(self) -> Any:
        return iter(self.possible_agents)


@pytest.mark.parametrize("make", [Nobody, InTurns, dict, lambda: None])
def test_what_is_no_parallel_environment_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"parallel interface with possible_agents, got .*aec_to_parallel"):
        PettingZooVectorEnv(make, 1, backend="serial")


def test_make_vec_names_the_adapter_for_what_has_several_agents() -> None:
    rps = pytest.importorskip("pettingzoo.classic.rps_v2")
    for env in (Race(), Race, rps, rps.parallel_env):
        with pytest.raises(TypeError, match="PettingZooVectorEnv"):
            make_vec(env, 2)
    with pytest.raises(TypeError, match="a function that makes"):
        PettingZooVectorEnv(Race(), 2)
    with pytest.raises(ConfigError, match="same_step"):
        PettingZooVectorEnv(Race, 2, autoreset="next_step")


def test_slots_with_structured_actions_and_observations_keep_their_structure() -> None:
    envs = PettingZooVectorEnv(Structured, 2, backend="serial")
    obs, _ = envs.reset(seed=0)
    assert obs["far"].shape == (4, 1)
    actions = {"go": np.arange(4), "how": np.arange(8, dtype=np.float32).reshape(4, 2)}
    obs, rewards, *_ = envs.step(actions)
    assert obs["near"].tolist() == [0, 1, 2, 3]
    assert rewards.tolist() == [0 + 1, 2 + 3, 4 + 5, 6 + 7]  # the sum of its two numbers


class Structured:
    possible_agents = (0, 1)

    def observation_space(self, agent: int) -> Any:
        return spaces.Dict(near=spaces.Discrete(5), far=spaces.Box(0, 1, (1,), np.float32))

    def action_space(self, agent: int) -> Any:
        return spaces.Dict(go=spaces.Discrete(5), how=spaces.Box(0, 9, (2,), np.float32))

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents = [0, 1]
        return {agent: {"near": 0, "far": np.zeros(1, np.float32)} for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        obs = {a: {"near": actions[a]["go"], "far": np.ones(1, np.float32)} for a in (0, 1)}
        no = dict.fromkeys((0, 1), False)
        return obs, {a: float(actions[a]["how"].sum()) for a in (0, 1)}, no, no, {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "limit", "falls"),
    [("classic/rps-v2", 6, False), ("butterfly/knights_archers_zombies-v11", 400, True)],
)
def test_environments_of_pettingzoo_play_as_they_do_by_hand(name: str, limit: int, falls: bool) -> None:
    pettingzoo = pytest.importorskip("pettingzoo")
    make = functools.partial(pettingzoo.make, "parallel", name, max_cycles=limit)
    envs, hand = PettingZooVectorEnv(make, 2, backend="serial"), [make() for _ in range(2)]
    ends, early = check_against_hand(envs, hand, [3, 4], 200)
    assert ends > early
    assert (early > 0) == falls  # knights and archers fall one by one
    envs.close()


def test_all_copies_are_reset_together_and_each_shows_its_picture() -> None:
    class Drawn(Race):
        render_mode = "ansi"

        def render(self) -> str:
            return f"{self.t} steps"

    envs = PettingZooVectorEnv(Drawn, 2, backend="serial")
    with pytest.raises(ConfigError, match="resets all copies; leave options"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset(seed=0)
    envs.step(np.ones(6, int))
    assert envs.render_mode == "ansi"
    assert envs.pool.render() == ("1 steps", "1 steps")
    envs.close()
    assert envs.pool.closed


@pytest.mark.parametrize(
    ("reward", "end", "told"),
    [
        ("5", False, "the reward must be a number, got '5'"),
        (None, False, "the reward must be a number, got None"),
        (1.0, "1", "agent 'ann': terminated must be True or False, got '1'"),
        (1.0, [False], "agent 'ann': terminated must be True or False"),
        (np.array([5.0]), 0.5, None),
    ],
)
def test_what_agents_are_paid_and_how_they_end_is_read_as_of_single_envs(reward, end, told):
    class Told(Race):
        def step(self, actions):
            obs, rewards, _, cuts, infos = super().step(actions)
            return obs, dict.fromkeys(rewards, reward), dict.fromkeys(rewards, end), cuts, infos

    envs = PettingZooVectorEnv(Told, 1, backend="serial")
    envs.reset(seed=0)
    if told is None:
        _, rewards, terminated, _, _ = envs.step(np.zeros(3, np.int64))
        assert (rewards.tolist(), terminated.tolist()) == ([5.0] * 3, [True] * 3)
    else:
        with pytest.raises(EnvError, match=re.escape(told)):
            envs.step(np.zeros(3, np.int64))
