"""`learn` called several times: each call trains so many steps more, under schedules that run over the whole."""

from __future__ import annotations

import pytest
from tests.train.ppo.ppo_envs import IdentityEnv

from shoal.core.errors import ConfigError
from shoal.train.ppo.ppo import PPO

SMALL = {"n_envs": 2, "n_steps": 16, "batch_size": 32, "n_epochs": 1, "backend": "serial", "hidden": (8,)}
DECAYING = {**SMALL, "learning_rate": 1e-3, "lr_schedule": "linear"}


def rates(ppo: PPO, *calls: int) -> list[float]:
    rows: list[dict[str, float]] = []
    for steps in calls:
        ppo.learn(steps, callback=rows.append)
    return [row["learning_rate"] for row in rows]


def test_each_call_of_learn_trains_so_many_steps_or_episodes_more():
    with PPO(IdentityEnv, **SMALL) as ppo:
        assert [ppo.learn(64).log.n_steps for _ in range(3)] == [64, 128, 192]
        assert ppo.learn(num_episodes=4).log.n_episodes == 16  # 12 of 16 steps before
        assert len(list(ppo.updates(64))) == 2


def test_a_run_of_stated_length_decays_once_however_it_is_cut(tmp_path):
    with PPO(IdentityEnv, total_timesteps=192, **DECAYING) as whole:
        expected = rates(whole, 192)
    assert expected == pytest.approx([1e-3 * (1 - k / 6) for k in range(6)])
    with PPO(IdentityEnv, total_timesteps=192, **DECAYING) as ppo:
        found = rates(ppo, 64, 32)
        ppo.save(tmp_path)
    with PPO.load(tmp_path, IdentityEnv, backend="serial") as ppo:
        found += rates(ppo, 96)
        assert found == expected
        assert [value.tobytes() for value in ppo.agent.state()[0].values()] == [
            value.tobytes() for value in whole.agent.state()[0].values()
        ]


def test_without_a_length_one_call_decays_over_its_own_and_no_later_one_raises_the_rate(caplog):
    with PPO(IdentityEnv, **DECAYING) as ppo:
        found = rates(ppo, 128)
        assert found == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
        assert not caplog.records
        found += rates(ppo, 128)
        assert found == sorted(found, reverse=True)
        assert "schedules (lr_schedule) that an earlier one has run to 75% of their way" in caplog.text
        assert f"the learning rate starts at {found[4]:.3g}." in caplog.text


def test_a_loaded_run_is_given_another_length(tmp_path, caplog):
    with PPO(IdentityEnv, **DECAYING) as ppo:
        ppo.learn(64).save(tmp_path)
    with PPO.load(tmp_path, IdentityEnv, backend="serial", total_timesteps=128) as ppo:
        assert rates(ppo, 64) == pytest.approx([0.5e-3, 0.25e-3])
    assert not caplog.records


def test_a_length_of_no_steps_is_refused():
    with pytest.raises(ConfigError, match="total_timesteps must be at least 1, got 0"):
        PPO(IdentityEnv, total_timesteps=0, **SMALL)
