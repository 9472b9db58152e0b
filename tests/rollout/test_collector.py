import time
from dataclasses import asdict, replace

import pytest

from shoal import envs
from shoal.core.errors import ConfigError
from shoal.core.seeding import derive_seed
from shoal.envs.actions import Projected, Projection
from shoal.envs.frozen_lake import FrozenLakeEnv
from shoal.rollout.factory import make_environments, make_set, validate_environment_config
from shoal.rollout.play import ParallelRolloutManager, TrajectoryCollector
from shoal.rollout.prompts import PromptConfig
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.samplers.scripted import RandomEngine, ScriptedEngine

WORDS = ["Left", "Down", "Right", "Up"]
PROMPT = PromptConfig(history=0, first="{observation}", later="{observation}")
SAMPLING = Sampling(8)


def config(**vector):
    kinds = {
        "Lake": {"env_type": "frozen_lake", "max_actions_per_traj": 7, "env_config": {"size": 3}},
        "Fixed": {
            "env_type": "frozen_lake",
            "env_config": {"desc": "4x4", "is_slippery": False, "max_steps": 9},
        },
    }
    side = {"env_groups": 4, "group_size": 3, "env_configs": {"tags": ["Lake", "Fixed"], "n_groups": [3, 1]}}
    return {"custom_envs": kinds, "es_manager": {"train": side, "val": side}, "vector": vector}


def collector(engine, prompt=PROMPT, seed=5, **vector):
    train, _ = make_environments(config(backend="serial") | ({"vector": vector} if vector else {}))
    return TrajectoryCollector(train.pool, train.tags, train.roles, train.group_size, engine, prompt, seed)


def play_by_hand(engine, seed, iteration, group, member):
    """One episode as a plain loop over one env, from the definition of what an episode is."""
    tag = ["Lake", "Lake", "Lake", "Fixed"][group]
    kind = config()["custom_envs"][tag]
    env = envs.make(kind["env_type"], **kind["env_config"])
    limit = kind.get("max_actions_per_traj", 9)
    observation, _ = env.reset(seed=derive_seed(seed, "env", iteration, group))
    turns, success, over = [], False, False
    while not over and len(turns) < limit:
        prompt = engine.tokenizer.start([{"role": "user", "content": observation}])
        request = Request(prompt, Key(seed, (iteration, group, member, len(turns))), SAMPLING)
        completion = engine.generate([request])[0]
        text = engine.tokenizer.decode(completion.token_ids)
        action = env.projection(text).actions[0]
        after, reward, terminated, truncated, info = env.step(action)
        turns.append((observation, text, reward))
        observation, over, success = after, terminated or truncated, info["success"]
    return turns, success


@pytest.mark.parametrize("vector", [{"backend": "serial"}, {"backend": "process", "num_workers": 2}])
def test_every_trajectory_is_that_of_a_plain_loop_over_one_env(vector):
    engine = RandomEngine(WORDS)
    playing = collector(engine, **vector)
    trajectories = playing.collect(2, SAMPLING)
    playing.envs.close()
    assert len(trajectories) == 12
    for index, trajectory in enumerate(trajectories):
        group, member = divmod(index, 3)
        turns, success = play_by_hand(engine, 5, 2, group, member)
        assert [(t.observation, t.response, t.reward) for t in trajectory.turns] == turns
        assert (trajectory.group, trajectory.member, trajectory.success) == (group, member, success)
        assert trajectory.terminated or trajectory.truncated
        assert trajectory.status == "ok"


def test_further_batches_of_an_iteration_are_other_groups_wherever_they_begin():
    playing = collector(RandomEngine(WORDS))
    one, two = playing.collect(0, SAMPLING), playing.collect(0, SAMPLING, first_group=4)
    assert {t.group for t in one} == {0, 1, 2, 3}
    assert {t.group for t in two} == {4, 5, 6, 7}
    assert {t.env_seed for t in one}.isdisjoint(t.env_seed for t in two)
    for first in (1, 2, 3):
        groups = range(first, first + 4)
        assert playing.collect(0, SAMPLING, first_group=first) == [t for t in one + two if t.group in groups]


def test_responses_without_an_action_cost_turns_and_are_recorded_as_such():
    trajectories = collector(ScriptedEngine(lambda prompt, key: "I go up")).collect(0, Sampling(20))
    for trajectory in trajectories:
        assert trajectory.truncated
        assert len(trajectory.turns) == (9 if trajectory.env == "Fixed" else 7)
        assert all(turn.action is None and not turn.action_is_valid for turn in trajectory.turns)


class Picky(RandomEngine):
    """An engine whose tokenizer refuses some observations."""

    def __init__(self):
        super().__init__(WORDS)
        start = self.tokenizer.start
        self.tokenizer.start = lambda messages: start(messages) if self.takes(messages) else 1 / 0

    def takes(self, messages):
        return "P" not in messages[0]["content"].splitlines()[1]


class OnlyValid(Projection):
    """No action where there is none to be read: the env is left alone."""

    def __call__(self, text):
        found = super().__call__(text)
        return found if found.valid else Projected((), False)


@pytest.mark.parametrize("change", ["prompt", "projection"])
def test_what_cannot_be_asked_or_read_costs_its_own_episode_in_lockstep_as_on_workers(change):
    def of(roles):
        if change == "prompt":
            return roles
        return {t: replace(r, projection=OnlyValid(lookup=r.projection.lookup)) for t, r in roles.items()}

    engine = Picky() if change == "prompt" else ScriptedEngine(lambda p, k: "Up" * (k.path[-1] % 2), WORDS)
    settings = {"max_tokens": 8, "prompt": asdict(PROMPT)}
    playing = collector(engine)
    playing.roles = of(playing.roles)
    played = playing.collect(0, SAMPLING)
    with ParallelRolloutManager(
        config() | {"agent_proxy": settings}, engine, seed=5, backend="serial"
    ) as manager:
        manager.roles.update(of(manager.roles))
        assert manager.collect(0, SAMPLING) == played
    statuses = [trajectory.status for trajectory in played]
    assert "ok" in statuses
    assert set(statuses) == ({"ok", "engine_error"} if change == "prompt" else {"ok"})
    assert all("division by zero" in t.error for t in played if t.error)


class Stuck(FrozenLakeEnv):
    """One world does not answer."""

    def _advance(self, action):
        time.sleep(60 * (self._seed == derive_seed(5, "env", 0, 1)))
        return super()._advance(action)


@pytest.mark.flaky(reruns=2)
def test_an_env_that_is_late_is_told_as_a_timeout_in_lockstep_as_on_workers():
    envs.register("test_stuck", Stuck, replace=True)
    side = {"env_groups": 3, "group_size": 1, "env_configs": {"tags": ["Stuck"]}}
    kinds = {"custom_envs": {"Stuck": {"env_type": "test_stuck"}}, "es_manager": {"train": side, "val": side}}
    found = validate_environment_config(kinds | {"vector": {"backend": "process", "step_timeout": 1.0}})
    made = make_set(found, found.es_manager.train)
    playing = TrajectoryCollector(made.pool, made.tags, made.roles, 1, RandomEngine(WORDS), PROMPT, 5)
    try:
        played = playing.collect(0, SAMPLING)
    finally:
        playing.close()
    assert [trajectory.status for trajectory in played] == ["ok", "timeout", "ok"]


def test_a_kind_of_env_with_prefill_is_refused_in_append_mode_before_anything_is_played():
    kinds = {tag: kind | {"prompt": {"prefill": "<action>"}} for tag, kind in config()["custom_envs"].items()}
    appending = {"custom_envs": kinds, "agent_proxy": {"prompt": {"mode": "append"}}}
    with pytest.raises(
        ConfigError, match=r"custom_envs\.Lake\.prompt with agent_proxy\.prompt: prompt\.prefill"
    ):
        ParallelRolloutManager(config() | appending, RandomEngine(WORDS))
