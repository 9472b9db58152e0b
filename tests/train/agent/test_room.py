"""How far one reads to follow an update: the files that it passes."""

from tests.trace import Tracer
from tests.train.agent.test_names import QUICK

from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.update import prepare_samples, update


def test_an_update_passes_at_most_seven_files(tmp_path):
    settings = [
        "algorithm.adv_estimator=gae",
        "algorithm.filter_groups.enable=false",
        "use_parallel_envs=false",
    ]
    config = compose_config("demo", [*QUICK, *settings, f"run_dir={tmp_path / 'run'}"])
    with AgentTrainer(config) as trainer:
        next(iter(trainer.train()))
        episodes = trainer.evaluate(greedy=False)
        with Tracer("shoal", tmp_path) as tracer, tracer.piece() as passed:
            row = update(trainer._learner, prepare_samples(episodes, trainer._learner), 0)
    assert row["gradient_steps"] >= 1
    files = passed.files(leave_out=("core/",))
    assert {
        "train/agent/update.py",
        "train/agent/batch/samples.py",
        "train/agent/algorithms/losses.py",
    } <= files
    assert len(files) <= 7, sorted(files)
