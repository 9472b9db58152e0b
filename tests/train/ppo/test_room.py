"""How far one reads to follow an update: the files that it passes."""

from __future__ import annotations

import pytest
from tests.trace import Tracer

from shoal.train.ppo.ppo import PPO

SMALL = {"n_envs": 2, "n_steps": 8, "batch_size": 8, "hidden": (4,), "backend": "serial", "preset": "none"}


@pytest.mark.parametrize(
    ("settings", "most"),
    [({"path": "compiled"}, 6), ({"path": "torch"}, 6), ({"recurrent": "lstm"}, 6)],
)
def test_an_update_passes_few_files(tmp_path, settings, most):
    with PPO("CartPole-v1", **SMALL, **settings) as ppo:
        ppo.learn(16)
        rollout = ppo._experience.collect(None)
        with Tracer("shoal", tmp_path) as tracer, tracer.piece() as passed:
            metrics = ppo.agent.improve(rollout, 0.5)
    assert metrics["n_minibatches"] >= 1
    # the last counts the steps of every optimizer, once another test has imported it
    files = passed.files(leave_out=("core/", "train/ppo/agent.py", "samplers/huggingface/engine.py"))
    assert {"maths/updates.py", "train/ppo/arrays/steps.py"} <= files
    assert len(files) <= most, sorted(files)
