"""The shipped configs learn, from their first weights to held-out success; minutes, so marked slow."""

import pytest

from shoal.core.files import read_json
from shoal.maths.statistics import wilson
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

pytestmark = pytest.mark.slow


def success_rate(trajectories):
    whole = [t for t in trajectories if t.status == "ok"]
    return wilson(sum(t.success for t in whole), len(whole))


@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "rloo", "reinforce_pp", "gae"])
def test_the_demo_crosses_the_lake_from_random_play(tmp_path, estimator):
    overrides = [f"algorithm.adv_estimator={estimator}", "es_manager.val.env_groups=100"]
    with AgentTrainer(compose_config("demo", [*overrides, f"run_dir={tmp_path / 'run'}"])) as trainer:
        rows = list(trainer.train())
        sampled = success_rate(trainer.evaluate(greedy=False))
    assert rows[0]["heldout_success"] <= 0.2
    assert read_json(tmp_path / "run" / "summary.json")["metrics"]["heldout_success"] >= 0.95
    assert sampled.value >= 0.9


@pytest.mark.timeout(3600)  # the imitation alone takes a slow machine more than the usual half an hour
def test_sokoban_keeps_what_imitation_taught_it(tmp_path):
    # What reinforcement adds is within chance (docs/learning.md), so half of the config's iterations will do.
    overrides = ["trainer.iterations=20", "trainer.eval_every=80", "es_manager.val.env_groups=400"]
    with AgentTrainer(compose_config("sokoban", [*overrides, f"run_dir={tmp_path / 'run'}"])) as trainer:
        run = trainer.train()
        next(run)
        start = success_rate(trainer.evaluate(greedy=False))
        for _ in run:
            pass
        end = success_rate(trainer.evaluate(greedy=False))
    assert start.low > 0.7
    assert end.value > start.low
