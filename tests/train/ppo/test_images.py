"""Any observation: pictures of every layout, pictures beside numbers, Atari's screen, and presets that set them."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.train.ppo.ppo_envs import SMALL_RUN, DictEnv, Screen
from torch import nn

from shoal.cli.main import main
from shoal.core.errors import ConfigError
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows, picture_of
from shoal.train.ppo.checkpoint import load_checkpoint
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.envs import AtariScreen, EnvFactory, _area
from shoal.train.ppo.networks import CNNActorCritic, OwnNetwork
from shoal.train.ppo.policy import load_policy
from shoal.train.ppo.ppo import PPO

TINY = {"n_envs": 2, "n_steps": 8, "batch_size": 8, "n_epochs": 1, "backend": "serial"}


# --- what is a picture
@pytest.mark.parametrize("shape", [(9, 8), (9, 8, 3), (3, 9, 8), (2, 9, 8, 3), (2, 3, 9, 8)])
def test_every_pixel_reaches_the_network_at_its_place(shape):
    """Against a loop that puts each byte where the shape says it belongs."""
    from shoal.train.ppo.networks import _pixels

    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    (leaf,) = ObservationRows(spaces.Box(0, 255, shape, np.uint8)).leaves
    got = _pixels(torch.from_numpy(image.reshape(1, -1)), leaf.picture)[0].numpy()
    stack = image.reshape(-1, *shape[-3:]) if len(shape) > 2 else image.reshape(1, 9, 8, 1)
    expected = []
    for one in stack:
        last = one.shape[2] <= one.shape[0]
        for channel in range(one.shape[2] if last else one.shape[0]):
            expected.append(
                [[(one[y, x, channel] if last else one[channel, y, x]) for x in range(8)] for y in range(9)]
            )
    np.testing.assert_array_equal(got, np.array(expected, np.float32) / np.float32(255))


def test_a_large_table_that_is_no_picture_is_told_of(caplog):
    with caplog.at_level(logging.WARNING), PPO(Screen, env_kwargs={"dtype": np.float32}, **TINY):
        assert "go through a perceptron: if they are pictures, give them as uint8" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), PPO(Screen, **TINY) as ppo:
        assert "perceptron" not in caplog.text
        assert type(ppo.network) is CNNActorCritic


@pytest.mark.parametrize(("shape", "cnn", "first"), [
    ((84, 84), "auto", (32, 1, 8, 8)), ((4, 40, 36), "nature", (32, 4, 8, 8)), ((9, 9), "auto", (32, 1, 3, 3)),
    ((2, 40, 36, 3), "impala", (16, 6, 3, 3)), ((9, 9, 3), "impala", (16, 3, 3, 3)), ((40, 40), "small", (32, 1, 3, 3)),
])  # fmt: skip
def test_pictures_train_by_the_convolutions_asked_for_and_stay_bytes(shape, cnn, first, tmp_path):
    with PPO(Screen, env_kwargs={"shape": shape}, cnn=cnn, **TINY) as ppo:
        before = {name: value.clone() for name, value in ppo.network.state_dict().items()}
        (metrics,) = list(ppo.updates(16))
        assert abs(metrics["first_kl"]) < 1e-6
        assert ppo.obs_rows.dtype == np.uint8
        after = ppo.network.state_dict()
        assert after["towers.0.0.weight"].shape == first
        assert [name for name in after if torch.equal(after[name], before[name])] == []
        ppo.save(tmp_path)
        picture = np.full(shape, 7, np.uint8)
        policy = load_policy(tmp_path)
        rows = torch.full((1, picture.size), 7, dtype=torch.uint8)
        np.testing.assert_allclose(
            policy.parameters(rows.numpy()), ppo.network.policy(rows).detach(), atol=1e-6
        )
        assert policy(picture) in (0, 1)


def test_convolutions_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="need pictures of at least 36 x 36 pixels, got 20 x 84"):
        PPO(Screen, env_kwargs={"shape": (20, 84)}, cnn="nature", **TINY)


@pytest.mark.slow
def test_half_precision_trains_float32_weights_nearly_as_whole_precision_and_goes_on_exactly(tmp_path):
    trained = {}
    for precision in ("float32", "bfloat16"):
        with PPO(Screen, precision=precision, seed=3, **TINY) as ppo:
            rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (16, 84 * 84), np.uint8))
            with torch.inference_mode():
                first = [part.clone() for part in ppo.network(rows)]
            ppo.learn(16).save(tmp_path / precision)
            assert {value.dtype for value in ppo.network.state_dict().values()} == {torch.float32}
            trained[precision] = (*first, *ppo.learn(32).agent.state()[0].values())
    gaps = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(trained["float32"], trained["bfloat16"], strict=True)
    ]
    assert max(gaps[:2]) < 0.02
    assert min(gaps[:2]) > 1e-6
    assert max(gaps) < 0.02
    with PPO.load(tmp_path / "bfloat16", Screen, backend="process", num_workers=2) as ppo:
        again = ppo.learn(32).agent.state()[0]
    for value, other in zip(trained["bfloat16"][2:], again.values(), strict=True):
        assert value.tobytes() == other.tobytes()


def test_a_policy_of_half_precision_acts_so_and_is_exported_whole(tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    with PPO(Screen, precision="bfloat16", **TINY) as ppo:
        ppo.learn(16).save(tmp_path)
        rows = np.random.default_rng(0).integers(0, 256, (4, 84 * 84), np.uint8)
        with torch.inference_mode():
            wanted = ppo.network.policy(torch.from_numpy(rows)).numpy()
    policy = load_policy(tmp_path)
    assert np.array_equal(policy.parameters(rows), wanted)
    session = runtime.InferenceSession(str(policy.export_onnx(tmp_path / "policy.onnx")))
    (got,) = session.run(None, {"observation": rows.astype(np.float32)})
    np.testing.assert_allclose(got, wanted, atol=5e-3)
    assert not np.array_equal(got, wanted)


class OwnConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.actor, self.critic = (
            nn.Conv2d(1, 4, 8, 8),
            nn.Linear(400, 2),
            nn.Linear(400, 1),
        )

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.convolution(pictures[:, None]).flatten(1)
        return self.actor(seen), self.critic(seen).squeeze(1)


@pytest.mark.parametrize("network", [None, OwnConvolutions])
def test_a_policy_that_sees_pictures_is_exported_for_batches_of_any_size(network, tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    own = network and network()
    with PPO(Screen, network=own, **TINY) as ppo:
        ppo.learn(16).save(tmp_path)
    policy = load_policy(tmp_path, own)
    session = runtime.InferenceSession(str(policy.export_onnx(tmp_path / "policy.onnx")))
    for size in (1, 5):
        rows = np.random.default_rng(size).integers(0, 256, (size, 84 * 84), np.uint8)
        (got,) = session.run(None, {"observation": rows.astype(np.float32)})
        np.testing.assert_allclose(got, policy.parameters(rows), atol=1e-5)


@pytest.mark.parametrize("setting", [{"precision": "bfloat16"}, {"cnn": "impala"}])
def test_settings_of_convolutions_without_images_are_refused(setting):
    with pytest.raises(ConfigError, match="is of the convolutions that are built for images"):
        PPO("CartPole-v1", **setting, **TINY)


# --- pictures beside numbers
def test_numbers_beside_pictures_are_the_first_bytes_of_a_row():
    env = DictEnv()
    rows, (seen, _) = ObservationRows(env.observation_space), env.reset(seed=0)
    row = np.zeros((1, rows.size), rows.dtype)
    rows.encode_one(seen, row[0])
    assert rows.dtype == np.uint8
    assert rows.size == 4 * 5 + 8 * 8 * 3
    speed, mode = seen["speed"].astype(np.float32), np.eye(3, dtype=np.float32)[seen["mode"] - 5]
    both = {"camera": seen["camera"].reshape(-1), "numbers": np.concatenate([mode, speed])}
    order = [key for key in env.observation_space.spaces if key != "camera"]
    assert order == ["mode", "speed"]
    np.testing.assert_array_equal(rows.numbers(row)[0], both["numbers"])
    np.testing.assert_array_equal(row[0, 20:], both["camera"])
    other = rows.with_numbers(row, np.arange(5, dtype=np.float32)[None])
    np.testing.assert_array_equal(rows.numbers(other)[0], np.arange(5))
    np.testing.assert_array_equal(other[0, 20:], both["camera"])


def test_beside_pictures_the_numbers_alone_are_normalised(tmp_path):
    with PPO(DictEnv, normalize_obs=True, **TINY) as ppo:
        ppo.learn(64)
        assert ppo.agent.obs_norm.moments.mean.shape == (5,)
        row = np.random.default_rng(0).integers(0, 200, (3, ppo.obs_rows.size), np.uint8)
        row = ppo.obs_rows.with_numbers(row, np.full((3, 5), 2.0))
        seen = ppo.agent._seen(row)
        np.testing.assert_array_equal(seen[:, 20:], row[:, 20:])
        np.testing.assert_allclose(
            ppo.obs_rows.numbers(seen), ppo.agent.obs_norm(np.full((3, 5), 2.0)), rtol=1e-6
        )
        ppo.save(tmp_path)
        policy = load_policy(tmp_path)
        mine = ppo.network.policy(torch.from_numpy(seen)).detach()
        np.testing.assert_allclose(policy.parameters(row), mine, atol=1e-6)


def test_a_nan_among_numbers_beside_pictures_is_named():
    class Broken(DictEnv):
        def step(self, action):
            observation, *rest = super().step(action)
            if self.t == 3:
                observation["speed"][:] = np.nan
            return observation, *rest

    with (
        PPO(Broken, **{**TINY, "n_steps": 4}) as ppo,
        pytest.raises(Exception, match="env 0, step 3 .*finite"),
    ):
        ppo.learn(64)


class Beside(gym.Env):
    """Numbers of some kind beside a picture of some shape, as `Dict`."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...], number: gym.Space) -> None:
        picture = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = spaces.Dict({"number": number, "picture": picture})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t >= 5, False, {}


NUMBERS = st.one_of(
    st.builds(
        lambda size, dtype: spaces.Box(-1, 1, (size,), dtype),
        st.integers(1, 5),
        st.sampled_from([np.float32, np.float64, np.int8, np.int64]),
    ),
    st.builds(spaces.Discrete, st.integers(1, 5)),
    st.builds(spaces.MultiBinary, st.integers(1, 5)),
)
SHAPES = st.tuples(st.integers(8, 41), st.integers(8, 41)).flatmap(
    lambda size: st.sampled_from([size, (*size, 3), (3, *size), (2, *size)])
)


@given(shape=SHAPES, number=NUMBERS, first=st.integers(0, 3), size=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_a_picture_of_any_width_beside_numbers_is_read_alike_in_batches_of_any_size(
    shape, number, first, size, seed
):
    env = Beside(shape, number)
    assume(picture_of(env.observation_space["picture"]) is not None)
    rows, actions = ObservationRows(env.observation_space), ActionRows(env.action_space)
    seen = [env.reset(seed=seed + k)[0] for k in range(6)]
    packed = np.zeros((6, rows.size), rows.dtype)
    for one, row in zip(seen, packed, strict=True):
        rows.encode_one(one, row)
    own = OwnNetwork(Parts(), rows, actions, 0.0)
    some = slice(first, first + size)
    with torch.inference_mode():
        for network in (CNNActorCritic(rows, actions, PPOConfig()), own):
            whole, part = network(torch.from_numpy(packed)), network(torch.from_numpy(packed)[some])
            for a, b in zip(whole, part, strict=True):
                torch.testing.assert_close(a[some], b, rtol=1e-4, atol=1e-5)
    flat = [
        np.concatenate([spaces.flatten(number, one["number"]), one["picture"].ravel() / 255]) for one in seen
    ]
    np.testing.assert_allclose(own(torch.from_numpy(packed))[1], [one.sum() for one in flat], rtol=1e-4)


class Parts(nn.Module):
    """A network of one's own, whose value is the sum of all that it sees."""

    def forward(self, seen: Any) -> Any:
        values = sum(part.flatten(1).sum(1) for part in seen.values())
        return torch.zeros(len(values), 2), values


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_a_picture_whose_bytes_do_not_divide_by_four_trains_and_acts_alone(recurrent, tmp_path):
    env = functools.partial(Beside, (37, 37), spaces.Box(-1, 1, (1,), np.float32))
    with PPO(env, **{**TINY, "n_envs": 1}, recurrent=recurrent, normalize_obs=True) as ppo:
        ppo.learn(16)
        assert ppo.evaluate(1).mean == 5.0
        ppo.save(tmp_path)
    seen = env().reset(seed=0)[0]
    assert load_policy(tmp_path)(seen) in (0, 1)


# --- Atari
def pong(stream: str = "env", **more: Any) -> Any:
    pytest.importorskip("ale_py")
    return EnvFactory(
        "ale_py:ALE/Pong-v5", 3, {"repeat_action_probability": 0.0}, atari=True, stream=stream, **more
    )()


def test_an_atari_screen_is_the_average_of_areas_of_the_brighter_of_two_frames():
    """Against a loop over fine pixels: 84 and 210, 84 and 160 have common multiples 420 and 3360."""
    env = pong()
    shown, _ = env.reset()
    screen = env.env
    assert isinstance(screen, AtariScreen)
    frames = []
    raw = screen.env
    step = raw.step
    raw.step = lambda action: frames.append(step(action)) or frames[-1]
    shown, *_ = env.step(2)
    assert len(frames) == 4
    bright = np.maximum(frames[2][0], frames[3][0]).astype(np.float64)
    fine = np.repeat(np.repeat(bright, 2, axis=0), 21, axis=1)  # [420, 3360]: blocks of 5 x 40 are one pixel
    expected = fine.reshape(84, 5, 84, 40).mean(axis=(1, 3))
    assert shown.shape == (84, 84)
    np.testing.assert_array_equal(shown, np.rint(expected))
    env.close()


def test_the_areas_of_any_picture_are_even_and_cover_it_once():
    for pixels in (84, 100, 160, 210, 250, 400):
        places, parts = _area(pixels, 84)
        taken = np.zeros(pixels, np.int64)
        np.add.at(taken, places, parts)
        assert set(parts.sum(axis=0).tolist()) == {math.lcm(pixels, 84) // 84}
        assert set(taken.tolist()) == {math.lcm(pixels, 84) // pixels}


def test_a_game_begins_by_fire_and_rewards_are_clipped_for_learning_and_not_for_evaluation():
    class Points(gym.Wrapper):
        def step(self, action):
            taken.append(action)
            observation, _, *rest = self.env.step(action)
            return observation, 3.0, *rest

    for stream, expected in (("env", 1.0), ("eval", 12.0)):
        env, taken = pong(stream, wrappers=(Points,)), []
        env.reset()
        assert (set(taken[:-1]), taken[-1]) == ({0}, 1)
        assert env.step(0)[1] == expected
        env.close()


def test_an_env_that_is_no_atari_game_is_told_so():
    pytest.importorskip("ale_py")
    with pytest.raises(Exception, match="takes a game of ale_py|takes no argument 'frameskip'"):
        PPO("CartPole-v1", atari=True, **TINY)


def test_atari_with_stacked_frames_trains_and_goes_on_exactly(tmp_path):
    pytest.importorskip("ale_py")
    settings = {**TINY, "preset": "auto", "n_steps": 4}
    with PPO("ale_py:ALE/Pong-v5", **settings) as ppo:
        assert ppo.preset == "ALE/Pong-v5"
        assert (ppo.factory.atari, ppo.factory.frame_stack, ppo.config.clip_range) == (True, 4, 0.1)
        assert ppo.network.state_dict()["towers.0.0.weight"].shape == (32, 4, 8, 8)
        ppo.learn(16).save(tmp_path)
        whole = ppo.learn(32).agent.state()[0]
    with PPO.load(tmp_path, backend="serial") as ppo:
        again = ppo.learn(32).agent.state()[0]
    assert {name: value.tobytes() for name, value in whole.items()} == {
        name: value.tobytes() for name, value in again.items()
    }


# --- presets
def test_the_class_takes_the_preset_that_the_command_takes(tmp_path, caplog):
    with caplog.at_level(logging.INFO), PPO("CartPole-v1", seed=3, backend="serial") as ppo:
        assert "CartPole-v1 with the settings of its preset (zoo)" in caplog.text
        assert ppo.preset == "CartPole-v1"
        weights = ppo.learn(1024).agent.state()[0]
    arguments = ["train-ppo", "--seed", "3", "--backend", "serial", "--total-timesteps", "1024", "--eval-every", "0",
                 "--no-tensorboard", "--eval-episodes", "1", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    assert main(arguments) == 0
    saved = load_checkpoint(tmp_path / "run").weights
    assert {name: value.tobytes() for name, value in saved.items()} == {
        name: value.tobytes() for name, value in weights.items()
    }


def test_a_config_or_none_leaves_the_preset_out_and_keywords_go_on_top_of_it():
    with PPO("Pendulum-v1", backend="serial") as ppo:
        assert (ppo.n_envs, ppo.config.gamma, ppo.config.n_epochs) == (4, 0.9, 10)
    with PPO("Pendulum-v1", backend="serial", gamma=0.5, n_envs=3) as ppo:
        assert (ppo.n_envs, ppo.config.gamma, ppo.config.n_epochs) == (3, 0.5, 10)
    with PPO("Pendulum-v1", backend="serial", preset="none") as ppo:
        assert (ppo.n_envs, ppo.config, ppo.preset) == (8, PPOConfig(), None)
    with PPO("Pendulum-v1", backend="serial", config=PPOConfig(gamma=0.7)) as ppo:
        assert (ppo.config, ppo.preset) == (PPOConfig(gamma=0.7), None)


def test_what_a_function_makes_has_the_defaults_and_a_line_names_its_preset(caplog):
    caplog.set_level(logging.INFO, "shoal.train.ppo.ppo")
    with PPO(gym.spec("Pendulum-v1"), backend="serial") as ppo, PPO("Pendulum-v1", backend="serial") as other:
        assert (ppo.n_envs, ppo.config, ppo.preset) == (other.n_envs, other.config, "Pendulum-v1")
    caplog.clear()
    with PPO(lambda: gym.make("Pendulum-v1"), backend="serial") as ppo:
        assert (ppo.n_envs, ppo.config, ppo.preset) == (8, PPOConfig(), None)
    assert "preset='Pendulum-v1'" in caplog.text
    caplog.clear()
    with PPO(lambda: gym.make("Pendulum-v1"), backend="serial", preset="Pendulum-v1") as ppo:
        assert (ppo.config, ppo.preset) == (other.config, "Pendulum-v1")
    assert "has the default settings" not in caplog.text


def test_stacked_observations_are_a_flag_that_a_resumed_run_keeps(tmp_path, capsys):
    stacked = ["--frame-stack", "3", "--eval-episodes", "1", "--total-timesteps", "64"]
    assert main(["train-ppo", *SMALL_RUN, *stacked, "--run-dir", str(tmp_path / "run")]) == 0
    assert load_policy(tmp_path / "run").observation_space.shape == (3, 4)
    resumed = ["train-ppo", "--resume-from", str(tmp_path / "run"), "--total-timesteps"]
    assert main([*resumed, "128"]) == 0
    assert main([*resumed, "256", "--frame-stack", "2"]) == 2
    assert "made with --frame-stack 3, got 2" in capsys.readouterr().err
