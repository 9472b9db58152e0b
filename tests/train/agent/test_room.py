"""How far one reads to follow what an iteration learns: the files that it passes."""

from tests.trace import Tracer
from tests.train.agent.test_names import QUICK

from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

ROOM = {
    "trainer.py", "update.py", "optimizer.py", "algorithms/advantages.py", "algorithms/losses.py", "batch/samples.py",
    "batch/packing.py", "policies/policy.py", "policies/attention.py", "processes/distributed.py",
}  # fmt: skip


def test_the_learning_half_of_an_iteration_passes_ten_files_of_the_room_and_the_network(
    tmp_path, monkeypatch
):
    settings = ["algorithm=grpo", "algorithm.filter_groups.enable=false", "warmup.rehearsal=0"]
    overrides = [*QUICK, *settings, "use_parallel_envs=false", f"run_dir={tmp_path / 'run'}"]
    with AgentTrainer(compose_config("demo", overrides)) as trainer, Tracer("shoal", tmp_path) as tracer:
        next(iter(trainer.train()))
        learn, seen = trainer._learn, []

        def traced(*arguments):
            with tracer.piece() as passed:
                row, samples = learn(*arguments)
            # the latter counts the steps of every optimizer, once another test has imported it
            seen.append(passed.files(leave_out=("core/", "samplers/huggingface/engine.py")))
            return row, samples

        monkeypatch.setattr(trainer, "_learn", traced)
        row = trainer.train_iteration()
    assert row["gradient_steps"] >= 1
    assert seen == [{f"train/agent/{file}" for file in ROOM} | {"samplers/tiny.py"}]
