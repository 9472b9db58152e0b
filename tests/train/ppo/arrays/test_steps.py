"""Collectors of array policies: the rows are what a plain loop over the environments would give."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.train.ppo.ppo_envs import BrokenEnv, CountingEnv, DictEnv, IdentityEnv, TargetEnv
from tests.vector.test_multi_agent import Race

from shoal.core.errors import ConfigError, EnvError
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows, picture_of
from shoal.train.ppo.arrays.steps import EnvSlice, SeededEpisodes, VectorSteps
from shoal.vector import PettingZooVectorEnv, make_vec


class NoisePolicy:
    """Acts by the noise alone."""

    def __init__(self, actions: ActionRows) -> None:
        self.actions = actions

    def act(self, obs, masks, noise, actions, logprobs):
        if not self.actions.is_discrete:
            actions[:] = noise
        elif masks.size:
            actions[:] = masks.argmax(axis=1)[:, None]
        else:
            actions[:] = (noise * np.array(self.actions.groups)).astype(np.int64)
        logprobs[:] = noise.sum(axis=1)


def make(kind: str):
    return {
        "counting": lambda: CountingEnv(5),
        "ending": lambda: CountingEnv(4, terminates=True),
        "target": TargetEnv,
        "identity": lambda: IdentityEnv(masked=True),
        "dict": DictEnv,
        "binary": lambda: DictEnv(binary=True),
    }[kind]


KINDS = ("counting", "ending", "target", "identity", "dict", "binary")


def collect(collector, n_steps, n_rollouts=1, seed=0):
    rng = np.random.default_rng(seed)
    policy = NoisePolicy(collector.action_rows)
    collector.reset()
    n_envs = len(collector.now)
    shape = (n_steps, n_envs, collector.action_rows.size)
    return [collector.collect(policy, rng.random(shape, dtype=np.float32)) for _ in range(n_rollouts)]


def slice_of(kind: str, n_envs: int = 3) -> EnvSlice:
    return EnvSlice([SeededEpisodes(make(kind)(), 0, i) for i in range(n_envs)], masked=kind == "identity")


def vector_of(kind: str, mode: AutoresetMode, n_envs: int = 3) -> VectorSteps:
    fns = [lambda i=i: SeededEpisodes(make(kind)(), 0, i) for i in range(n_envs)]
    return VectorSteps(SyncVectorEnv(fns, autoreset_mode=mode), masked=kind == "identity")


ROWS = ("obs", "actions", "logprobs", "rewards", "terminated", "truncated", "final_obs", "masks")


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for name in ROWS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_vector_env_gives_the_rows_of_a_plain_loop(kind, mode):
    assert_same(collect(vector_of(kind, mode), 11, 3), collect(slice_of(kind), 11, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_with_next_step_autoreset_the_wasted_rows_are_marked_and_the_rest_is_real(kind):
    """Every valid row is one accepted action; a done row's successor is the true final observation."""
    rollouts = collect(vector_of(kind, AutoresetMode.NEXT_STEP), 12, 3)
    done = np.concatenate([r.done for r in rollouts])
    valid = np.concatenate([r.valid for r in rollouts])
    assert (~valid[1:] == done[:-1]).all()  # a reset row follows each end, and nothing else
    assert not done[~valid].any()
    for rollout in rollouts:
        places = np.argwhere(rollout.truncated)
        assert len(places) == len(rollout.final_obs)
        for (t, i), final in zip(places, rollout.final_obs, strict=True):
            np.testing.assert_array_equal(rollout.obs[t + 1, i], final)


class OnceBroken(CountingEnv):
    """Raises once: in its second `reset`, or in its second `step`."""

    def __init__(self, breaks: list[str]) -> None:
        super().__init__(3)
        self.breaks = breaks

    def reset(self, **how):
        if self.breaks == ["reset"] and self.episode == 0:
            raise RuntimeError(self.breaks.pop())
        return super().reset(**how)

    def step(self, action):
        if self.breaks == ["step"] and self.t == 1:
            raise RuntimeError(self.breaks.pop())
        return super().step(action)


@pytest.mark.parametrize("breaks", ["reset", "step"])
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_what_a_broken_env_shows_is_no_experience_and_joins_no_episodes(mode, breaks):
    """Valid rows of the counting env go up by one, the last to the final observation."""
    broken = [breaks]
    fns = [lambda: OnceBroken(broken), lambda: CountingEnv(3)]
    envs = make_vec(fns, 2, backend="serial", autoreset=mode, on_failure="restart")
    collector = VectorSteps(envs)
    for rollout in collect(collector, 7, 2):
        valid = np.ones((7, 2), bool) if rollout.valid is None else rollout.valid
        after, final = rollout.obs[1:, :, 0].copy(), iter(rollout.final_obs)
        for t, i in np.argwhere(rollout.truncated):
            after[t, i] = next(final)[0]
        rises = after - rollout.obs[:-1, :, 0]
        assert (rises[valid & (rollout.rewards > 0)] == 1).all()
        assert (rollout.truncated | (rollout.rewards > 0))[valid].all()
        assert not rollout.done[~valid].any()
    assert not broken
    assert valid[:, 0].any()  # of the second rollout


class Walks:
    """Every first agent of three takes steps of 3, the second of 1, the third stays."""

    def act(self, obs, masks, noise, actions, logprobs):
        actions[:, 0] = [3, 1, 0] * (len(actions) // 3)


def test_a_slot_without_an_agent_gives_no_experience():
    """Ann walks to her goal in two steps, the others until all are cut off in the fifth."""
    envs = PettingZooVectorEnv(Race, 2, backend="serial")
    collector = VectorSteps(envs, seed=list(range(6)))
    collector.reset()
    rollout = collector.collect(Walks(), np.zeros((12, 6, 1), np.float32))
    ann = [True, True, False, False, False, True, True, False, False, False, True, True]
    assert rollout.valid.tolist() == [[here, True, True] * 2 for here in ann]
    ends = np.isin(np.arange(12), [4, 9])
    assert rollout.done.T.tolist() == [np.isin(np.arange(12), [1, 6, 11]).tolist(), *[ends.tolist()] * 2] * 2
    assert not rollout.rewards[~rollout.valid].any()
    assert rollout.obs[0, ::3, 0].tolist() == [
        np.float32(np.random.default_rng(seed).random()) for seed in (0, 3)
    ]


@pytest.mark.parametrize("terminates", [False, True])
def test_no_row_of_a_reset_pretends_to_be_experience(terminates):
    """The counting env shows how many actions it took: row t of an episode must show exactly t."""
    envs = [SeededEpisodes(CountingEnv(5, terminates), 0, i) for i in range(2)]
    (rollout,) = collect(EnvSlice(envs), 23)
    expected = np.arange(23) % 5
    for i in range(2):
        assert rollout.obs[:23, i, 0].tolist() == expected.tolist()
        assert rollout.obs[:23, i, 1].tolist() == (np.arange(23) // 5).tolist()
    assert (rollout.terminated if terminates else rollout.truncated)[:, 0].tolist() == (
        expected == 4
    ).tolist()
    assert rollout.final_obs[:, 0].tolist() == ([] if terminates else [5.0] * 8)  # not the reset's 0


def test_termination_and_truncation_at_once_is_termination():
    (rollout,) = collect(slice_of("target", 1), 36)
    t = np.arange(1, 37)
    # TargetEnv counts on across its flags only within an episode; the first episode ends at 5 by truncation
    assert rollout.truncated[4, 0]
    assert not (rollout.truncated & rollout.terminated).any()
    envs = [SeededEpisodes(_Both(), 0, 0)]
    (both,) = collect(EnvSlice(envs), 6)
    assert both.terminated[:, 0].tolist() == [x % 3 == 0 for x in t[:6]]
    assert not both.truncated.any()
    assert len(both.final_obs) == 0
    (vector,) = collect(VectorSteps(SyncVectorEnv(
        [lambda: SeededEpisodes(_Both(), 0, 0)], autoreset_mode=AutoresetMode.SAME_STEP)), 6)  # fmt: skip
    assert_same([vector], [both])


class _Both(CountingEnv):
    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        over = self.t % 3 == 0
        return observation, reward, over, over, info


def under_way(kind):
    """Some rollouts of `slice_of(kind)`: their last row, the episodes begun, and the actions since."""
    envs = slice_of(kind)
    rollouts = collect(envs, 13, 2)
    actions = np.concatenate([r.actions for r in rollouts])
    done = np.concatenate([r.done for r in rollouts])
    histories = []
    for i in range(3):
        ends = np.flatnonzero(done[:, i])
        rows = actions[ends[-1] + 1 if len(ends) else 0 :, i]
        histories.append(envs.action_rows.to_env(rows) if len(rows) else [])
    return rollouts[-1].obs[-1], [env.episode for env in envs.envs], histories


def test_a_vector_env_plays_episodes_again_and_breaks_them_off_as_a_plain_loop_does():
    for kind in ("target", "identity"):
        last, started, histories = under_way(kind)
        vector, plain = vector_of(kind, AutoresetMode.SAME_STEP), slice_of(kind)
        noise = np.random.default_rng(1).random((6, 3, plain.action_rows.size), dtype=np.float32)
        for again in (vector, plain):
            again.reset()
            np.testing.assert_array_equal(again.resume(started, histories), last)
            again.restart([0, 2])
        assert (plain.now != last).any()
        assert_same(*([one.collect(NoisePolicy(one.action_rows), noise)] for one in (vector, plain)))
        vector.envs.close()


def test_an_all_false_action_mask_is_an_error_that_names_env_and_step():
    envs = EnvSlice([SeededEpisodes(BrokenEnv("mask"), 0, i) for i in range(2)], first_index=6, masked=True)
    with pytest.raises(EnvError, match="env 6, step 12 of the rollout: the action mask allows no action"):
        collect(envs, 20)


def test_an_env_that_raises_is_named_with_its_action():
    envs = EnvSlice([SeededEpisodes(CountingEnv(50), 0, 0), SeededEpisodes(BrokenEnv("error"), 0, 1)])
    with pytest.raises(
        EnvError, match=r"env 1 failed at step 11 of the rollout, action \[.\]: .*plug was pulled"
    ):
        collect(envs, 20)


def test_masks_come_from_a_method_too():
    class Method(CountingEnv):
        def action_masks(self):
            return [self.t % 2 == 0, True]

    env = SeededEpisodes(Method(), 0, 0)
    _, info = env.reset()
    assert info["action_mask"].tolist() == [True, True]
    assert env.step(0)[4]["action_mask"].tolist() == [False, True]


def test_a_vector_env_without_final_observations_is_refused():
    class Bad(SyncVectorEnv):
        def step(self, actions):
            observations, rewards, terminated, truncated, infos = super().step(actions)
            infos.pop("final_obs", None)
            return observations, rewards, terminated, truncated, infos

    bad = Bad([lambda: CountingEnv(5)], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(EnvError, match="final_obs"):
        collect(VectorSteps(bad), 10)


def test_observations_become_rows():
    space = spaces.Dict(
        {"a": spaces.Discrete(3, start=1),
         "b": spaces.Dict({"c": spaces.MultiDiscrete([2, 3], start=[0, 5])}),
         "d": spaces.Box(-1, 1, (2, 2)), "e": spaces.MultiBinary(2)}
    )  # fmt: skip
    rows = ObservationRows(space)
    one = {
        "a": 2,
        "b": {"c": np.array([1, 7])},
        "d": np.array([[0.1, 0.2], [0.3, 0.4]]),
        "e": np.array([0, 1]),
    }
    row = np.zeros(rows.size, np.float32)
    rows.encode_one(one, row)
    expected = [0, 1, 0, 0, 1, 0, 0, 1, 0.1, 0.2, 0.3, 0.4, 0, 1]
    np.testing.assert_allclose(row, expected, atol=1e-7)
    batch = {
        "a": np.array([2, 2]),
        "b": {"c": np.array([[1, 7]] * 2)},
        "d": np.stack([one["d"]] * 2),
        "e": np.array([[0, 1]] * 2),
    }
    both = np.zeros((2, rows.size), np.float32)
    rows.encode(batch, both)
    np.testing.assert_allclose(both, [expected, expected], atol=1e-7)


@pytest.mark.parametrize(
    ("space", "rows", "expected"),
    [
        (spaces.Discrete(3, start=4), [[0], [2]], [4, 6]),
        (spaces.MultiDiscrete([2, 2], start=[1, 0]), [[0, 1]], [[1, 1]]),
        (spaces.MultiBinary((2, 2)), [[0, 1, 1, 0]], [[[0, 1], [1, 0]]]),
        (spaces.Box(-1, np.array([1, 2]), dtype=np.float64), [[-3.0, 3.0]], [[-1.0, 2.0]]),
    ],
)
def test_rows_become_actions_of_the_space(space, rows, expected):
    actions = ActionRows(space)
    got = actions.to_env(np.array(rows, actions.dtype))
    np.testing.assert_array_equal(np.array(got), expected)
    assert all(space.contains(action) for action in got)
    np.testing.assert_array_equal(actions.to_batch(np.array(rows, actions.dtype)), expected)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5, charset="ab\n"),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Dict({"a": spaces.Text(3)}),
    ],
)
def test_observation_spaces_that_are_not_supported_say_so(space):
    with pytest.raises(ConfigError, match="PPO reads Box, Discrete") as told:
        ObservationRows(space)
    assert "\n" not in str(told.value)
    assert ("observation=grid" in str(told.value)) == ("Text" in str(space))


@pytest.mark.parametrize(
    "space", [spaces.Text(5), spaces.Box(0, 255, (2,), np.uint8), spaces.Tuple((spaces.Discrete(2),))]
)
def test_action_spaces_that_are_not_supported_say_so(space):
    with pytest.raises(ConfigError, match="PPO acts in Discrete"):
        ActionRows(space)


def test_seeded_episodes_leave_other_wrappers_their_time_limit():
    env = SeededEpisodes(gym.make("CartPole-v1", max_episode_steps=3), 0, 0)
    env.reset()
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


def test_no_two_envs_or_episodes_start_alike_and_each_can_be_started_again():
    def starts(seed: int) -> list[float]:
        envs = [SeededEpisodes(TargetEnv(), seed, index) for index in range(4)]
        return [float(env.reset()[0][0]) for _ in range(3) for env in envs]

    assert len(set(starts(0))) == 12
    assert starts(0) == starts(0)
    assert not set(starts(0)) & set(starts(1))


class RewardEnv(gym.Env):
    """Pays one thing, always, and shows another."""

    action_space = spaces.Discrete(2)

    def __init__(self, reward=1.0, shown=None, ends=(False, False)):
        self.reward, self.ends = reward, ends
        self.shown = np.zeros(2, np.float32) if shown is None else shown
        low, high, kind = (0, 255, np.uint8) if self.shown.ndim > 1 else (-1, 1, np.float32)
        self.observation_space = spaces.Box(low, high, self.shown.shape, kind)

    def reset(self, *, seed=None, options=None):
        return self.shown, {}

    def step(self, action):
        return self.shown, self.reward, *self.ends, {}


@pytest.mark.parametrize(
    "reward", [None, float("nan"), float("inf"), "1.5", np.str_("1.5"), np.array([1.0, 2.0]), {}, 10**400]
)
def test_a_reward_that_is_no_finite_number_names_its_env(reward):
    envs = EnvSlice([RewardEnv(), RewardEnv(reward)], first_index=4)
    with pytest.raises(EnvError, match="env 5, step 0 of the rollout: reward must be finite, got "):
        collect(envs, 3)


@pytest.mark.parametrize("reward", [2, True, np.float32(2), np.array([2.0]), np.array(2)])
def test_a_reward_may_be_any_number(reward):
    (rollout,) = collect(EnvSlice([RewardEnv(), RewardEnv(reward)]), 3)
    assert rollout.rewards.tolist() == [[1.0, float(np.ravel(reward)[0])]] * 3


class SameArrayEnv(RewardEnv):
    """Pays 1, 2, 3 … by an array that it writes again each time."""

    def step(self, action):
        self.reward += 1
        return super().step(action)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_reward_is_what_it_was_though_the_env_writes_the_next_one_in_its_place(shape):
    (rollout,) = collect(EnvSlice([SameArrayEnv(np.zeros(shape)), SameArrayEnv(np.ones(shape))]), 3)
    assert rollout.rewards.tolist() == [[1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize(("ends", "name"), [(("False", False), "terminated"), ((False, "no"), "truncated")])
def test_an_end_in_words_names_its_env(ends, name):
    envs = EnvSlice([RewardEnv(), RewardEnv(ends=ends)], first_index=4)
    with pytest.raises(EnvError, match=f"env 5, .*{name} must be True or False, got"):
        collect(envs, 3)


def test_a_vector_env_whose_rewards_are_no_numbers_is_refused():
    envs = SyncVectorEnv([RewardEnv, lambda: RewardEnv(float("nan"))], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(EnvError, match="env 1, step 0 of the rollout: reward must be finite, got nan"):
        collect(VectorSteps(envs), 2)


@pytest.mark.parametrize("value", [0.5, 300, -1, float("nan")])
def test_a_picture_of_what_is_no_byte_is_refused(value):
    shown = np.full((8, 8, 3), value, np.float32 if isinstance(value, float) else np.int64)
    with pytest.raises(EnvError, match="an observation must be of Box"):
        EnvSlice([RewardEnv(shown=shown)]).reset()


def test_a_picture_of_whole_numbers_will_do():
    assert (EnvSlice([RewardEnv(shown=np.full((8, 8, 3), 7.0))]).reset() == 7).all()


@pytest.mark.parametrize("terminates", [False, True])
def test_an_episode_that_is_played_again_goes_no_further_than_its_end(terminates):
    env = SeededEpisodes(CountingEnv(5, terminates), 0, 1)
    observation, _ = env.resume_episode([9, 3], [[], [0] * 8])
    assert observation.tolist() == [5.0, 0.0]
    assert env.episode == 3
    assert env.restart_episode([0, 2]) is None
    assert env.restart_episode([1])[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "picture"),
    [
        ((8, 9), ((0, 1), 1, 8, 9)),
        ((7, 9), None),
        ((9, 7), None),
        ((3, 9, 8), ((0, 1, 2), 3, 9, 8)),
        ((9, 8, 3), ((2, 0, 1), 3, 9, 8)),
        ((4, 9, 4), ((2, 0, 1), 4, 4, 9)),  # of equals the last axis is the channels
        ((2, 9, 8, 3), ((0, 3, 1, 2), 6, 9, 8)),
        ((2, 3, 9, 8), ((0, 1, 2, 3), 6, 9, 8)),
        ((9,), None),
        ((2, 2, 2, 9, 9), None),
    ],
)
def test_bytes_of_these_shapes_are_pictures_and_others_are_numbers(shape, picture):
    found = picture_of(spaces.Box(0, 255, shape, np.uint8))
    assert (found and (found.order, found.channels, found.height, found.width)) == picture
    assert picture_of(spaces.Box(0, 255, shape, np.int64)) is None
    rows = ObservationRows(spaces.Box(0, 255, shape, np.uint8))
    assert rows.dtype == (np.float32 if picture is None else np.uint8)


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (spaces.Discrete(3, start=1), 0),
        (spaces.Discrete(3, start=1), 4),
        (spaces.MultiDiscrete([2, 3], start=[0, 5]), [2, 5]),
        (spaces.MultiDiscrete([2, 3], start=[0, 5]), [0, 4]),
        (spaces.MultiDiscrete([2, 3]), [1]),
        (spaces.Box(-1, 1, (3,)), [0.5]),
        (spaces.Box(-1, 1, (2, 2)), [0.5, 0.5]),
        (spaces.Box(-1, 1, (4,)), np.ones(1, np.float32)),
        (spaces.MultiBinary(2), [1]),
        (spaces.Discrete(3), "1"),
        (spaces.Discrete(3), 1.5),
        (spaces.MultiDiscrete([2, 3]), [1, 0.5]),
        (spaces.Box(-1, 1, (2,)), ["0.5", "1"]),
        (spaces.Box(-1, 1, (2,)), np.array(["0.5", "1"], object)),
        (spaces.Box(-1, 1, (2,)), np.array([0.5j, 1])),
        (spaces.Box(-1, 1, (2,)), np.array([1, 2], "M8[D]")),
        (spaces.Box(-1, 1, (2,)), np.zeros(3)),
        (spaces.Box(-1, 1, (2,)), [[0.5], [0.5, 1]]),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2)), {"a": 0}),
        (spaces.Dict(a=spaces.Discrete(2)), None),
    ],
)
def test_an_observation_of_another_space_is_refused(space, wrong):
    rows = ObservationRows(space)
    with pytest.raises(EnvError, match="an observation must be of "):
        rows.encode_one(wrong, np.zeros(rows.size, np.float32))


@pytest.mark.parametrize(
    ("read", "space"),
    [
        (ObservationRows, spaces.Dict({})),
        (ObservationRows, spaces.Box(0, 1, (0,))),
        (ActionRows, spaces.Box(-1, 1, (2, 0))),
        (ActionRows, spaces.MultiDiscrete(np.zeros(0, int))),
    ],
)
def test_a_space_of_nothing_is_refused(read, space):
    with pytest.raises(ConfigError, match="the (observation|action) space .* is empty"):
        read(space)


def test_choices_that_are_left_without_any_option_are_named():
    actions = ActionRows(spaces.MultiDiscrete([2, 3]))
    assert (actions.groups, actions.size, actions.n_parameters, actions.is_discrete) == ((2, 3), 2, 5, True)
    masks = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 1, 0, 0]], bool)
    assert list(actions.forbidden(masks)) == [(2, 0), (0, 1)]
    box = ActionRows(spaces.Box(-1, 1, (2, 3)))
    assert (box.groups, box.size, box.n_parameters, box.is_discrete) == ((), 6, 6, False)
    assert list(box.forbidden(masks)) == []
