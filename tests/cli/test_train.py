"""`shoal train` on the command line."""

import json
import shlex

from shoal.cli import main as shoal
from shoal.cli import train
from shoal.core.errors import EngineError
from shoal.core.run_folder import read_summary

QUICK = [
    "trainer.iterations=2", "warmup.steps=2", "es_manager.train.env_groups=2", "es_manager.val.env_groups=2",
    "trainer.save_every=1", "trainer.tensorboard=false", "use_parallel_envs=false", "algorithm.learning_rate=0.002",
]  # fmt: skip


def test_an_interrupted_run_goes_on_with_the_command_that_it_prints(tmp_path, monkeypatch, capsys):
    def interrupted(rows, *_):
        next(rows)
        next(rows)
        raise KeyboardInterrupt

    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr(train, "_watch", interrupted)
        assert shoal.main(["train", "--config-name", "demo-bandit", *QUICK, f"run_dir={folder}"]) == 130
    assert read_summary(folder)["status"] == "interrupted"
    command = shlex.split(capsys.readouterr().out.split("go on with: ")[1])
    assert command[0] == "shoal"
    assert command.count(f"run_dir={folder}") == 1
    assert shoal.main(command[1:]) == 0
    iterations = [
        json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert iterations == [0, 1, 2]
    assert read_summary(folder)["status"] == "completed"
    assert f"shoal show {shlex.quote(str(folder))}" in capsys.readouterr().out


def test_a_run_that_an_error_ends_is_told_as_failed_and_goes_on(tmp_path, monkeypatch, capsys):
    def broken(rows, *_):
        next(rows)
        next(rows)
        raise EngineError("the engine is gone")

    command = ["train", "--config-name", "demo-bandit", *QUICK, f"run_dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "_watch", broken)
        assert shoal.main(command) == 1
    assert read_summary(tmp_path / "run")["status"] == "failed"
    assert shoal.main([*command, "resume=true"]) == 0
    assert read_summary(tmp_path / "run")["metrics"]["iterations"] == 2


def test_a_run_that_was_done_and_lost_its_metrics_says_what_is_left_of_it(tmp_path, capsys):
    command = ["train", "--config-name", "demo-bandit", *QUICK, f"run_dir={tmp_path / 'run'}"]
    assert shoal.main(command) == 0
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / "run" / name).unlink()
    assert shoal.main([*command, "resume=true"]) == 0
    assert "held-out success unknown after 2 iterations" in capsys.readouterr().out
