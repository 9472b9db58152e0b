"""The trap that a format penalty inside the compared reward is, and that shoal's arithmetic keeps out of it."""

import numpy as np
import pytest

from shoal.train import preparation
from shoal.train.agent import AgentTrainer
from shoal.train.composition import compose_config
from shoal.train.group_advantages import group_relative

SETTINGS = [
    "seed=0", "agent_proxy.format_penalty=0.1", "algorithm.entropy_coef=0.003", "trainer.iterations=40",
    "trainer.eval_every=40", "trainer.save_every=40", "trainer.tensorboard=false", "use_parallel_envs=false",
]  # fmt: skip


def run(folder, *overrides):
    with AgentTrainer(compose_config("demo", [*SETTINGS, *overrides, f"run_dir={folder}"])) as trainer:
        return list(trainer.train())


def penalty_in_the_reward(trajectories, algorithm, proxy):
    """What many trainers do: the penalty is part of the reward, and groups are scaled by its spread."""
    invalid = [sum(not turn.action_is_valid for turn in t.turns) for t in trajectories]
    rewards = [t.reward - proxy.format_penalty * n for t, n in zip(trajectories, invalid, strict=True)]
    advantages = group_relative(rewards, [t.group for t in trajectories], scale=True)
    return [np.full(len(t.turns), value) for t, value in zip(trajectories, advantages, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_penalty_in_the_reward_teaches_the_format_alone_and_shoals_defaults_learn_the_task(
    tmp_path, monkeypatch
):
    kept = run(tmp_path / "shoal")
    assert kept[-1]["heldout_success"] >= 0.95
    monkeypatch.setattr(preparation, "turn_advantages", penalty_in_the_reward)
    naive = run(
        tmp_path / "naive",
        "algorithm.filter_groups.enable=false",
        "algorithm.gamma=1",
        "es_manager.train.group_size=8",
    )
    assert naive[-1]["valid_actions"] >= 0.95
    assert np.mean([row["success"] for row in naive[-5:]]) <= 0.1
    assert naive[-1]["heldout_success"] == 0
    assert naive[-1]["entropy"] < kept[1].get("entropy", 9.9)
