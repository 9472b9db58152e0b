"""`shoal train` on the command line."""

import json
import re
import shlex
import subprocess
import sys

from shoal.cli import main as shoal
from shoal.cli import train, train_ppo
from shoal.core.errors import EngineError
from shoal.core.run_folder import read_summary
from shoal.envs.frozen_lake import FrozenLakeEnv
from shoal.envs.text import Outcome

QUICK = [
    "trainer.iterations=2", "warmup.steps=2", "es_manager.train.env_groups=2", "es_manager.val.env_groups=2",
    "trainer.save_every=1", "trainer.tensorboard=false", "use_parallel_envs=false", "algorithm.learning_rate=0.002",
]  # fmt: skip


def test_an_interrupted_run_goes_on_with_the_command_that_it_prints(tmp_path, monkeypatch, capsys, prints):
    def interrupted(rows, *_):
        next(rows)
        next(rows)
        raise KeyboardInterrupt

    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr(train, "_watch", interrupted)
        assert shoal.main(["train", "--config-name", "demo-bandit", *QUICK, f"run_dir={folder}"]) == 130
    assert read_summary(folder)["status"] == "interrupted"
    printed = capsys.readouterr().out
    told = prints("show", folder)
    for row in (r"status *│ interrupted", r"heldout_success *│ \d", r"iteration *│ 1 "):
        assert re.search(row, told)
    shown = told.split("go on with:\n")[1].splitlines()[0]
    assert printed.endswith(f"interrupted; go on with:\n{shown}\n")
    again = shlex.split(shown)[1:]
    assert shoal.main([*again, "trainer.iterations=1"]) == 0  # which is done: it goes on nevertheless
    capsys.readouterr()
    command = shlex.split(shown)
    assert command[0] == "shoal"
    assert command.count(f"run_dir={folder}") == 1
    assert shoal.main(command[1:]) == 0
    iterations = [
        json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert iterations == [0, 1, 2]
    assert read_summary(folder)["status"] == "completed"
    told = capsys.readouterr().out
    assert f"\n  shoal view {shlex.quote(str(folder))}\n" in told
    assert f"\n  shoal show {shlex.quote(str(folder))}\n" in told
    assert "\ntry next (many turns: cross a frozen lake):\n  shoal train --config-name demo\n" in told


def test_the_lines_of_a_run_say_which_share_of_its_episodes_was_truncated(tmp_path, capsys):
    words = [
        "train",
        "--config-name",
        "demo",
        *QUICK,
        "agent_proxy.max_turn=1",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert shoal.main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r" +\d/2 ", line)]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["heldout_truncated"] for row in rows if "heldout_truncated" in row] == [1.0, 1.0]
    for row, line in zip(rows, lines, strict=True):
        shares = [row[name] for name in ("truncated", "heldout_truncated") if name in row]
        assert re.findall(r"truncated (\d\.\d\d)", line) == [
            f"{share:.2f}" for share in shares if share >= 0.005
        ]


def test_an_interrupted_ppo_goes_on_from_where_its_checkpoints_are(tmp_path, monkeypatch, capsys, prints):
    def interrupted(rows, *_):
        for row in rows:
            if row["steps"] >= 128:
                raise KeyboardInterrupt

    folder, elsewhere = tmp_path / "run", tmp_path / "on a disk"
    words = ["--n-steps", "16", "--preset", "none", "--no-tensorboard", "--eval-episodes", "1"]
    words += ["--checkpoint-every", "64", "--checkpoint-dir", str(elsewhere), "--out", str(folder)]
    with monkeypatch.context() as patch:
        patch.setattr(train_ppo, "_watch", interrupted)
        assert shoal.main(["train-ppo", "--total-timesteps", "4096", *words]) == 130
    printed = capsys.readouterr().out
    shown = prints("show", folder).split("go on with:\n")[1].splitlines()[0]
    assert printed.endswith(f"interrupted; go on with:\n{shown}\n")
    again = shlex.split(shown)[1:]
    assert shoal.main([*again, "--total-timesteps", "256"]) == 0
    assert read_summary(folder)["metrics"]["steps"] >= 256


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


def test_a_run_that_was_done_and_lost_its_metrics_says_what_is_left_of_it(tmp_path, prints):
    command = ["train", "--config-name", "demo-bandit", *QUICK, f"run_dir={tmp_path / 'run'}"]
    assert shoal.main(command) == 0
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / "run" / name).unlink()
    assert "held-out success unknown after 2 iterations" in prints(*command, "resume=true")


DEAD = [
    "trainer.iterations=4", "es_manager.train.env_groups=2", "es_manager.train.group_size=2", "use_parallel_envs=false",
    "es_manager.val.env_groups=2", "trainer.tensorboard=false",
]  # fmt: skip


def test_a_run_that_learns_nothing_warns_of_each_cause_once_and_again_at_its_end(tmp_path, capsys, caplog):
    # an episode of one turn cannot reach the goal: all rewards are equal
    impossible = [
        "custom_envs.FrozenLakeEnv.env_config.max_steps=1",
        "warmup.steps=60",
        "warmup.learning_rate=0.006",
        "trainer.stop_at_success=1",
    ]
    command = ["train", "--config-name", "demo", *DEAD, *impossible, f"run_dir={tmp_path / 'run'}"]
    assert shoal.main(command) == 0
    said = [record.message for record in caplog.records if "Groups have equal rewards" in record.message]
    assert len(said) == 1
    assert said[0].startswith("iteration 3: ")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("(")[-1][:7] for line in lines if " 2/4 " in line] == ["at most"]
    last = lines[-1]
    assert last.startswith("WARNING: Groups have equal rewards. In 4 of 4 iterations")
    [advice] = read_summary(tmp_path / "run")["advice"]
    assert (advice["level"], advice["metric"]) == ("bad", "groups_with_signal")
    assert last.endswith(advice["text"])


class EveryMoveWins(FrozenLakeEnv):
    """A lake that is crossed by one move, whichever."""

    def _advance(self, action):
        return Outcome(1.0, terminated=True, success=True)


def test_a_run_that_succeeds_before_its_last_iteration_says_that_it_ended_early_and_why(tmp_path, prints):
    won = [
        "custom_envs.FrozenLakeEnv.env_type=tests.cli.test_train:EveryMoveWins", "warmup.steps=60",
        "warmup.learning_rate=0.006",
    ]  # fmt: skip

    ends = ["trainer.stop_at_success=0.5", f"run_dir={tmp_path / 'run'}"]
    early = prints("train", "--config-name", "demo", *DEAD, *won, *ends)
    assert "after 0 iterations" in early
    assert "(ended early by trainer.stop_at_success=0.5)" in early


def test_a_model_that_does_not_know_the_format_is_told_with_an_answer_of_its_own(tmp_path, capsys, caplog):
    command = ["train", "--config-name", "demo", *DEAD, "warmup.steps=0", f"run_dir={tmp_path / 'run'}"]
    assert shoal.main(command) == 0
    [said] = [record.message for record in caplog.records if "Hardly any answer" in record.message]
    assert "The model wrote '" in said
    assert "allowed: Left, Down, Right, Up" in said
    assert "raise warmup.steps, which is 0" in said
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("WARNING: Hardly any answer is a valid action.")
    )


def test_a_resumed_run_says_where_it_goes_on_and_shows_no_row_twice(tmp_path, capsys, prints):
    command = ["train", "--config-name", "demo-bandit", *QUICK, f"run_dir={tmp_path / 'run'}"]
    assert shoal.main(command) == 0
    before = read_summary(tmp_path / "run")
    first = [line for line in capsys.readouterr().out.splitlines() if "/2 " in line]
    assert len(first) == 3
    assert "lr 0.002" in first[-1]
    said = prints(*command, "trainer.iterations=3", "resume=true")
    assert f"resumed at 2 of 3 (held-out {before['metrics']['heldout_success']:.2f})" in said.splitlines()
    assert [line.split("/")[0].strip() for line in said.splitlines() if "/3 " in line] == ["3"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    *_, last, added = rows
    assert added["seconds"] > last["seconds"]  # of both sessions together
    assert added["cpu_seconds"] > last["cpu_seconds"]


class BrokenOnSomeSeeds(FrozenLakeEnv):
    """Raises in the first step of a third of its seeds."""

    def reset(self, *, seed=None, options=None):
        self._is_broken = seed is not None and seed % 3 == 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self._is_broken:
            raise KeyError("garden")
        return super().step(action)


def test_failed_episodes_are_counted_in_the_line_of_their_iteration_and_at_the_end(tmp_path, prints):
    broken = "custom_envs.FrozenLakeEnv.env_type=tests.cli.test_train:BrokenOnSomeSeeds"
    sizes = ["es_manager.train.env_groups=6", "es_manager.val.env_groups=6", "trainer.iterations=2"]
    more = [*sizes, broken, "warmup.steps=0", "trainer.check_envs=false", f"run_dir={tmp_path / 'run'}"]
    said = prints("train", "--config-name", "demo", *DEAD, *more)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert sum(row["failed_episodes"] for row in rows) > 0
    for row, line in zip(rows, [line for line in said.splitlines() if "/2 " in line][1:], strict=True):
        assert (f"failed {row['failed_episodes']:.0f}/12" in line) == (row["failed_episodes"] > 0)
    assert f"{sum(row['failed_episodes'] for row in rows):.0f} of 24 training episodes failed" in said


OWN_ENV = '''
from shoal.envs.actions import Projection
from shoal.envs.text import Outcome, TextEnv


class Coin(TextEnv):
    """Say heads."""

    instructions = "Say heads."
    projection = Projection(lookup={"heads": 1, "tails": 2})
    max_steps = 1

    def _start(self, rng):
        pass

    def _advance(self, action):
        return Outcome(float(action == 1), True, action == 1)

    def observe(self):
        return "?"
'''


def test_an_env_may_lie_beside_its_config_in_another_folder(tmp_path, monkeypatch, prints):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "coin_of_a_test.py").write_text(OWN_ENV)
    (folder / "coin.yaml").write_text(
        "defaults: [base, _self_]\ncustom_envs: {FrozenLakeEnv: null, Coin: {env_type: 'coin_of_a_test:Coin'}}\n"
        "es_manager:\n  train: {env_configs: {tags: [Coin]}}\n  val: {env_configs: {tags: [Coin]}}\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    small = [
        "trainer.iterations=1",
        "warmup.steps=2",
        "trainer.tensorboard=false",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert "held-out success" in prints("train", "--config-dir", folder, "--config-name", "coin", *small)
    model = str(tmp_path / "model")
    assert shoal.main(["export", str(tmp_path / "run"), model, "--to", "shoal"]) == 0
    # from any folder, in a process of its own
    words = [sys.executable, "-m", "shoal", "eval", model, "--episodes", "2"]
    ran = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_what_a_config_advises_next_is_not_told_of_one_that_builds_on_it(tmp_path, prints):
    (tmp_path / "mine.yaml").write_text("defaults: [demo-bandit, _self_]\n")
    words = ["train", "--config-dir", str(tmp_path), "--config-name", "mine", *QUICK]
    assert "try next" not in prints(*words, f"run_dir={tmp_path}/run", "trainer.iterations=1")
    (tmp_path / "mine.yaml").write_text("defaults: [demo-bandit, _self_]\nnext_step: shoal doctor\n")
    assert "try next:\n  shoal doctor\n" in prints(
        *words, f"run_dir={tmp_path}/again", "trainer.iterations=1"
    )
