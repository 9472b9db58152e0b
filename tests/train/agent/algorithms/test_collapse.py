"""A bandit whose settings make the policy collapse onto the arm that was lucky first; the shipped ones do not."""

import numpy as np
import pytest

from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

SETTINGS = [
    "trainer.iterations=40", "trainer.eval_every=40", "trainer.save_every=40", "trainer.tensorboard=false",
    "use_parallel_envs=false",
]  # fmt: skip
NAIVE = [
    "algorithm.learning_rate=0.01", "algorithm.entropy_coef=0", "algorithm.max_grad_norm=1000",
    "agent_proxy.reward_normalization.grouping=state",
]  # fmt: skip


def rows_of(folder, *overrides):
    with AgentTrainer(compose_config("demo-bandit", [*SETTINGS, *overrides, f"run_dir={folder}"])) as trainer:
        return list(trainer.train())


def mean(rows, name):
    """Over the last eight rows that have it: without a group with signal nothing is learned, and no entropy told."""
    return np.mean([row[name] for row in rows if name in row][-8:])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_naive_settings_collapse_onto_luck_and_the_shipped_ones_learn(tmp_path):
    naive, shipped = rows_of(tmp_path / "naive", *NAIVE), rows_of(tmp_path / "shipped")
    # every member of a group says the same, so groups say nothing any more, and nothing can be unlearned
    assert mean(naive, "entropy") < 0.2
    assert mean(naive, "groups_with_signal") < 0.15
    assert mean(naive, "success") < 0.7
    assert mean(shipped, "success") > 0.9
    assert shipped[-1]["heldout_success"] >= 0.95
    assert mean(shipped, "success") > mean(naive, "success") + 0.25
