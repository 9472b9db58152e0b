from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.cli.command import parse
from shoal.cli.main import main
from shoal.cli.skills_train import COMMAND
from shoal.core.errors import MissingExtraError
from shoal.skills.graph.store import NewVersion, Store
from shoal.skills.scheduler import SkillScheduler

QUICK = [
    "--num_envs", "32", "--num-steps", "16", "--layer_size", "8", "--bank-worlds", "64", "--evaluation_episodes", "32",
    "--min-success", "0", "--total_timesteps", "4e3", "--patience_frames", "1e9", "--evaluation-worlds", "16",
]  # fmt: skip


def training(words):
    return parse(COMMAND, "skills train", words)


def skills(*arguments: str) -> int:
    return main(["skills", *arguments])


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that is over, and the lines that it printed."""
    path, said = tmp_path_factory.mktemp("trained") / "run", io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.cli.grammar.FIRST_HEARTBEAT", 0.01)
        assert skills("train", "--max_nodes", "1", "--graph-path", str(path), *QUICK) == 0
    return path, said.getvalue().splitlines()


@pytest.fixture
def trained(trained_once: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A run that is over, in a folder that a test may change."""
    return shutil.copytree(trained_once[0], tmp_path / "run")


def test_a_run_leaves_a_summary_pictures_state_and_config(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert (summary["command"], summary["status"], summary["seed"]) == ("skills train", "completed", 0)
    assert summary["metrics"]["skills_completed"] == 1
    assert 0 <= summary["metrics"]["chain_success"] <= 1
    assert set(summary["metrics"]["skill_success"]) == {"Collect Wood"}
    assert (trained / "chain.gif").read_bytes()[:3] == b"GIF"
    assert (
        json.loads((trained / "scheduler_state.json").read_text())["skills"]["Collect_Wood"]["status"]
        == "completed"
    )
    assert "max_nodes: 1" in (trained / "config.yaml").read_text()
    assert json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])["skill"] == "Collect Wood"


@pytest.mark.slow
def test_a_folder_in_use_is_only_continued_when_asked(
    trained: Path, capsys: pytest.CaptureFixture[str], prints
) -> None:
    again = ["train", "--max_nodes", "2", "--graph-path", str(trained), *QUICK]
    assert "pass --resume" in prints("skills", *again, code=2)
    assert skills(*again, "--resume") in (0, 1)  # a table may not be learned from so poor a wood expert
    told = capsys.readouterr().out
    assert "Place Table: running" in told
    assert "Collect Wood: " not in told  # was told by the run before
    assert [len(Store(trained).attempts(name)) for name in ("Collect Wood",)] == [1]
    assert len(Store(trained).skills()) == 2


def test_a_run_that_an_error_ends_says_so_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints
) -> None:
    def fail(self: SkillScheduler, *arguments: object) -> bool:
        raise OSError(errno.ENOSPC, "database or disk is full", "state.db")

    monkeypatch.setattr(SkillScheduler, "run", fail)
    assert "database or disk is full (state.db); what was saved before is whole" in prints(
        "skills", "train", "--graph-path", tmp_path, *QUICK, code=1
    )
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_status_history_eval_and_rollback_tell_of_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ["--graph-path", str(trained)]
    monkeypatch.setenv("COLUMNS", "30")  # of the terminal, which does not break lines in a pipe
    assert skills("status", *at) == 0
    frames_seconds_launches = r" [\d,]+ +\d+\.\d +1\b"
    assert re.search("Collect Wood .*" + frames_seconds_launches, capsys.readouterr().out)
    with contextlib.closing(Store(trained)) as store:
        store.set_handle(
            1, "tmux", {"pid": 1, "began": None, "session": "s_1", "server": "shoal-x"}, trained / "log"
        )
        store._db.execute("update attempt set outcome = null")
        assert skills("status", *at) == 0
        store._db.execute("update attempt set outcome = 'merged'")
    assert "watch Collect Wood: tmux -L shoal-x attach -t '=s_1'" in capsys.readouterr().out
    assert json.loads(prints("skills", "status", "--json", *at))["skills"]["Collect_Wood"]["expert_idx"] == 0
    assert "-> " in prints("skills", "history", "Collect Wood", *at)
    assert "whole chain, 16 unseen worlds" in prints("skills", "eval", "--episodes", "16", *at)
    assert (trained / "evaluations" / "seed-12345" / "summary.json").exists()
    before = sorted(trained.rglob("*"))
    assert skills("eval", "--episodes", "0", *at) == 2
    assert sorted(trained.rglob("*")) == before
    assert "version 1 is the head of expert 0 already" in prints("skills", "rollback", "0", "1", *at)
    for words, told in (
        (("rollback", "0", "7"), "there is no version 7 of any expert: name one that shoal skills history"),
        (("rollback", "5", "1"), "has no expert 5; it has 0"),
        (("history", "5"), "has no expert 5; it has 0"),
    ):
        assert told in prints("skills", *words, *at, code=2)
    with contextlib.closing(Store(trained)) as store:
        older = store.version(1)
        newer = store.add_version(NewVersion(0, older.sha256, 1, older.frames, 0, accepted=True))
    out = prints("skills", "rollback", "0", "1", *at)
    assert "version 1 is the head of expert 0 again" in out
    assert f"skills rollback 0 {newer} --out {trained}" in out


def test_status_summary_and_pages_tell_the_same_seconds(trained: Path, tmp_path: Path, prints) -> None:
    rows = re.findall(r" [\d,]+ +(\d+\.\d) +1\b", prints("skills", "status", "--graph-path", trained))
    total = json.loads((trained / "summary.json").read_text())["metrics"]["training_seconds"]
    assert sum(map(float, rows)) == pytest.approx(total, abs=0.1 * len(rows))
    assert main(["view", str(trained), "--export", str(tmp_path / "page.html")]) == 0
    shown = re.search(r"training in all\D+([\d.]+) s<", (tmp_path / "page.html").read_text())
    assert float(shown[1]) == pytest.approx(
        total, abs=0.1 if total < 10 else 0.5
    )  # from 10 s on in whole ones


def test_logs_print_what_the_training_wrote(trained: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert skills("logs", "Collect_Wood", "--graph-path", str(trained)) == 0
    assert b'"event": "trained"' in capfdbinary.readouterr().out


def test_a_launch_without_output_is_told(trained: Path, prints) -> None:
    store = Store(trained)
    number = store.begin_attempt("Collect Wood", trained / "training_runs" / "x")
    store.finish(number, "failed", "could not be launched: RuntimeError: sbatch failed")
    store.close()
    told = prints("skills", "logs", "Collect Wood", "--graph-path", trained, code=2)
    assert f"launch {number} of 'Collect Wood' wrote nothing: could not be launched: RuntimeError" in told


def test_logs_follow_a_skill_that_is_launched_again_while_they_are_printed(
    trained: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, runs = Store(trained), trained / "training_runs"

    def launch() -> int:
        return store.begin_attempt("Collect Wood", runs / "x")

    def log(number: int) -> Path:
        return runs / "x" / f"training-{number}.log"

    (runs / "x").mkdir(parents=True)
    first = launch()

    def again() -> None:
        log(first).write_text("first ends\n")
        store.finish(first, "failed", "killed by signal 9")
        assert launch() == first + 1

    happens = iter(
        [
            lambda: log(first).write_text("first "),
            again,
            lambda: log(first + 1).write_text("second "),
            lambda: log(first + 1).write_text("second ends\n"),
            lambda: store.finish(first + 1, "failed", "killed by signal 9"),
        ]
    )
    monkeypatch.setattr("shoal.cli.skills.time.sleep", lambda seconds: next(happens)())
    assert skills("logs", "Collect Wood", "--follow", "--graph-path", str(trained)) == 0
    assert capfdbinary.readouterr().out == b"first ends\nsecond ends\n"
    assert next(happens, None) is None
    store.close()


def test_events_are_json_lines_and_a_merge_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        skills(
            "train", "--json-events", "--max_nodes", "1", "--graph-path", str(tmp_path), "--no-film", *QUICK
        )
        == 0
    )
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["added", "running", "completed", "merge", "summary"]
    assert events[3]["heads"] == {"0": {"version": 1, "frames": events[3]["heads"]["0"]["frames"]}}


def test_what_is_in_training_is_told_in_between(trained_once: tuple[Path, list[str]]) -> None:
    lines = trained_once[1]
    states = [re.sub(r"^ +\d+\.\d s  ", "", line) for line in lines if "Collect Wood:" in line]
    states = [line for line in states if not line.startswith("…")]
    assert states == ["Collect Wood: running", "Collect Wood: completed"]
    assert any(re.fullmatch(r"… in training: Collect Wood: \d+(\.\d)? s so far", line) for line in lines)


def test_a_run_with_a_failed_skill_ends_non_zero_and_names_it(tmp_path: Path, prints) -> None:
    arguments = ["train", "--max_nodes", "2", "--max_retries", "0", "--graph-path", str(tmp_path), *QUICK]
    err = prints("skills", *arguments, "--min-success", "1.1", code=1)
    assert "Collect Wood: failed: NotLearnedError: not learned" in err
    assert "Place Table: blocked: Collect Wood failed" in err
    assert f"another chance with: shoal skills retry 'Collect Wood' --out {tmp_path} --fresh" in err
    assert skills("retry", "Collect Wood", "--out", str(tmp_path), "--fresh") == 0  # as it is printed
    prints("skills", "train", "--resume", "--graph-path", tmp_path, code=1)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert "there is nothing to cancel" in prints(
        "skills", "cancel", "Collect Wood", "--graph-path", tmp_path, code=2
    )
    assert skills("cancel", "Place Table", "--graph-path", str(tmp_path)) == 0
    assert Store(tmp_path).skill("Place Table").status == "skipped"


def test_the_flags_of_the_reference_are_understood_with_dashes_and_underscores() -> None:
    words = (
        "--max_nodes 3 --max_parallel_skills 2 --scheduler_poll_interval 30 --max_retries 2 --total_timesteps 5e7"
        " --num_envs 64 --lr 2e-4 --num_steps 16 --update_epochs 4 --num_minibatches 8 --gamma 0.99 --gae_lambda 0.9"
        " --clip_eps 0.1 --ent_coef 0.02 --vf_coef 0.4 --max_grad_norm 1.0 --no-anneal_lr --layer_size 32 --seed 7"
        " --graph-path x --success_state_rate 0.9 --llm_name m --skill_timesteps_budget 1e6 --target_skill T"
        " --gpu_ids 0 --no-use_wandb --env_name Craftax-Symbolic-v1".split()
    )
    old = training(words)
    new = training([word.replace("_", "-") if word.startswith("--") else word for word in words])
    assert replace(old, said=()) == replace(new, said=())
    assert (old.config.lr, old.config.num_envs, old.max_nodes, old.use_wandb) == (2e-4, 64, 3, False)
    assert old.config.bank_worlds == 256  # what suits Craftax, since --env_name says so
    assert training([]).config.bank_worlds == 2048


def test_help_names_every_verb_and_a_wrong_one_is_guessed(prints) -> None:
    out = prints("skills", "--help")
    for verb in "train status stop retry cancel logs eval history rollback".split():
        assert verb in out
        assert "--graph-path" in prints("skills", verb, "--help")
    assert "Did you mean 'train'" in prints("skills", "trian", code=2)


def test_a_dry_run_prints_the_graph_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prints
) -> None:
    assert skills("train", "--dry-run", "--max_nodes", "2", "--graph-path", str(tmp_path / "x")) == 0
    assert (
        "Place Table: needs Collect Wood; plan Collect Wood x2 -> Place Table x1" in capsys.readouterr().out
    )
    assert not (tmp_path / "x").exists()
    rows = json.loads(prints("skills", "train", "--dry-run", "--json", "--max_nodes", "2"))["skills"]
    assert rows[1]["needs"] == ["Collect Wood"]
    assert rows[1]["plan"] == [{"skill": "Collect Wood", "count": 2}, {"skill": "Place Table", "count": 1}]


def test_a_dry_run_prints_the_plans_that_are_trained_with_where_places_are_left_on_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stone is not found at the table, so another is placed for the pickaxe."""
    code = skills(
        "train", "--dry-run", "--env_name", "craftax-classic", "--target-skill", "Make Stone Pickaxe"
    )
    assert code == (0 if find_spec("craftax") else 1)  # as of the training itself
    assert (
        "plan Collect Wood x6 -> Place Table x1 -> Make Wood Pickaxe x1 -> Collect Stone x1 -> Place Table x1 -> "
        "Make Stone Pickaxe x1"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("package", "what", "extra"),
    [("safetensors", "training skills", "train"), ("craftax", "the world 'craftax'", "craftax")],
)
def test_what_is_not_installed_is_told_before_anything_is_made_or_launched(
    tmp_path: Path, prints, monkeypatch: pytest.MonkeyPatch, package: str, what: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    told = prints("skills", "train", "--env-name", "craftax", "--graph-path", tmp_path / "x", code=1)
    assert f'{what} needs an extra: in the clone of shoal, run pip install ".[{extra}]"' in told
    assert not (tmp_path / "x").exists()


def test_a_scheduler_of_a_world_whose_package_is_not_installed_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "craftax", None)
    scheduler = SkillScheduler(tmp_path / "y", world="craftax-classic")
    with pytest.raises(MissingExtraError, match="the world 'craftax-classic' needs an extra"):
        scheduler.run()
    scheduler.close()


def test_numbers_that_cannot_be_are_refused_before_anything_is_trained_or_changed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    for words, message in (
        (
            ("train", "--graph-path", str(new), "--evaluation-worlds", "-1"),
            "--evaluation-worlds must be at least 0",
        ),
        (
            ("train", "--graph-path", str(new), "--evaluate-every", "0"),
            "evaluate_every must be at least 1, got 0",
        ),
        (
            ("train", "--graph-path", str(new), "--max-parallel-skills", "0"),
            "max_parallel must be a whole number and at least 1, got 0",
        ),
        (("train", "--graph-path", str(new), "--launcher", "slrm"), "no launcher named 'slrm'"),
        (("status", "--graph-path", str(new)), "new holds no skills"),
        (("eval", "--graph-path", str(trained), "--episodes", "0"), "episodes must be at least 1, got 0"),
        (
            ("retry", "Collect Wood", "--graph-path", str(trained), "--budget", "inf"),
            "must be a number of env steps",
        ),
    ):
        with contextlib.suppress(SystemExit):
            assert skills(*words) == 2
        told = capsys.readouterr()
        assert message in told.out + told.err
    assert not new.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus-per-skill", "0.5"], "--gpus-per-skill is for --launcher ray and does nothing with local"),
        (["--gpus_per_skill=0.5", "--launcher", "tmux"], "does nothing with tmux"),
        (["--sbatch=--partition=gpu"], "--sbatch is for --launcher slurm and does nothing with local"),
        (["--target-skill", "Collect Wood", "--llm-name", "m"], "--llm-name has skills proposed"),
        (["--target-skill", "Collect Wood", "--replay", "proposals.jsonl"], "--replay has skills proposed"),
        (["--llm-name", "m", "--replay", "proposals.jsonl"], "both say what proposes skills"),
    ],
)
def test_options_that_would_be_ignored_are_refused_by_name(
    tmp_path: Path, prints, words: list[str], message: str
) -> None:
    (tmp_path / "proposals.jsonl").write_text("")
    words = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in words]
    quick = [*QUICK, "--max-nodes", "1", "--llm-url", "http://127.0.0.1:9/v1"]
    assert message in prints("skills", "train", "--graph-path", tmp_path / "run", *quick, *words, code=2)
    assert not (tmp_path / "run").exists()


def test_a_target_that_max_nodes_would_leave_out_is_refused(prints) -> None:
    target = ["train", "--dry-run", "--target-skill", "Place Table", "--max-nodes"]
    assert "raise max_nodes to 2" in prints("skills", *target, "1", code=2)
    assert "Place Table: needs" in prints("skills", *target, "2")


@pytest.mark.parametrize("text", ["", "- a", "config: 5", "config: {}\nskills: 5", "config: {}\nsbatch: 5"])
def test_a_folder_whose_options_cannot_be_read_is_told_so(tmp_path: Path, prints, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert "config.yaml" in prints("skills", "train", "--resume", "--graph-path", tmp_path, code=2)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_training_whose_weights_are_no_numbers_ends_at_once_and_says_so(tmp_path, capfd):
    words = ("train", "--max_nodes", "1", "--graph-path", str(tmp_path / "run"), *QUICK, "--lr", "1e30")
    assert skills(*words) == 1
    told = capfd.readouterr().err
    assert "weights that are no numbers" in told
    assert "lower --lr" in told
    assert len(Store(tmp_path / "run").attempts("Collect Wood")) == 1  # another launch would end the same


def test_a_run_that_is_not_there_is_not_gone_on_with(tmp_path, prints):
    told = prints("skills", "train", "--resume", "--out", tmp_path / "misspelt", code=2)
    assert "misspelt to go on with" in told
    assert not (tmp_path / "misspelt").exists()
