import json
import logging
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.records import Exchange, trajectory_of
from tests.viewer.test_index import episode

from shoal.cli.grammar import came_to_an_end, show_warnings
from shoal.cli.main import main
from shoal.cli.output import program
from shoal.core.data import Counted, Judged, Requests, Score, write_trajectories
from shoal.core.errors import EngineError
from shoal.core.run_folder import RunFolder
from shoal.viewer.runs import Run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "run" / "trajectories" / "heldout-000001.jsonl"
    write_trajectories(file, [episode((0.25,)), episode((1.0,)), episode((0.0, 0.0)), episode((0.0,))])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "episode 0 of 4"),
        (["--best"], "episode 1 of 4"),
        (["--worst"], "episode 2 of 4"),
        (["--episode", "3"], "episode 3 of 4"),
    ],
)
def test_the_episode_that_was_asked_for_is_shown(run, prints, asked, told):
    assert told in prints("show", run, *asked)


def test_an_episode_that_is_not_there_says_which_are(run, prints):
    assert "--episode must be in [0, 3], got 4" in prints("show", run, "--episode", "4", code=2)


def test_a_response_that_is_itself_the_action_is_shown_once(run, prints):
    said = Exchange("seen", (7,), (1,), (-0.1,), "higher", "higher", True, 1.0, "s", None, "stop")
    played = trajectory_of("Agent", 0, 0, 0, 1, (said,), True, True, False, "ok", "")
    write_trajectories(run / "trajectories" / "heldout-000002.jsonl", [played])
    assert "    seen\n  → higher   reward 1\n" in prints("show", run)


def test_what_a_program_failed_with_and_what_it_was_refused_are_shown(run, prints):
    asked = Requests((Counted("400: seed=3 is not served here", 2),), (Counted("temperature=0.7", 5),))
    failed = replace(episode((0.0,), error="KeyError: 'garden'"), requests=asked)
    write_trajectories(run / "trajectories" / "heldout-000002.jsonl", [failed])
    shown = " ".join(prints("show", run).split())
    assert "the program failed: KeyError: 'garden', reward 0" in shown
    assert "the gateway refused 2 of its requests: 400: seed=3 is not served here" in shown
    assert "the run's own value was used 5 times instead of temperature=0.7" in shown


def test_why_a_run_failed_is_shown(run, prints):
    (run / "summary.json").write_text(
        json.dumps({"command": "train", "status": "failed", "error": "EnvError: no lake", "metrics": {}})
    )
    assert "EnvError: no lake" in prints("show", run)


def test_scores_of_rewards_are_shown_with_their_weights(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    scores = (Score("env", 1.0, 0.25), Score("judge", 0.5, -1.0), Score("late", 2.0, None))
    judged = replace(episode((0.25,)), judged=Judged((0.25,), scores))
    write_trajectories(run / "trajectories" / "heldout-000002.jsonl", [judged])
    assert main(["show", str(run)]) == 0
    assert (
        "rewards: env 0.25 (weight 1), judge -1 (weight 0.5), late - (weight 2)\n" in capsys.readouterr().out
    )


def test_a_run_without_episodes_shows_its_summary_and_refuses_to_show_one(run, prints):
    (run / "summary.json").write_text(json.dumps({"command": "train-ppo", "metrics": {"steps": 8}}))
    (run / "trajectories" / "heldout-000001.jsonl").unlink()
    assert main(["show", str(run)]) == 0
    for asked in (["--episode", "0"], ["--best"], ["--worst"], ["--prompt"]):
        assert "recorded no episodes" in prints("show", run, *asked, code=2)


def test_what_a_run_says_is_shown_as_it_stands_there(run, prints):
    named = run.rename(run.with_name("[demo]"))
    metrics = {"success": 0.5, "note": "see [/x] and [bold]y :fire:"}
    (named / "summary.json").write_text(json.dumps({"command": "eval", "metrics": metrics}))
    out = prints("show", named, "--all")
    assert "see [/x] and [bold]y :fire:" in out
    assert "[demo]" in out.replace("\n", "")


def test_what_a_run_says_commands_no_terminal(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    hostile = "a\x1b]0;title\x07b\x1b[2Jc\x9b5nd\x00e\u202ef\x08g\x7f\rh\x1b[41mred\x1b[A\x1b[2Ki\x1b[?25l"
    seen = Exchange(hostile, (7,), (1,), (-0.1,), hostile, hostile, True, 1.0, "s", None, "stop")
    played = trajectory_of(hostile, 0, 0, 0, 1, (seen,), False, True, False, "env_error", hostile)
    write_trajectories(run / "trajectories" / "heldout-000002.jsonl", [played])
    told = {"command": hostile, "status": hostile, "metrics": {hostile: hostile}}
    (run / "summary.json").write_text(json.dumps(told))
    assert main(["show", str(run), "--all"]) == 0
    assert main(["runs", str(run.parent)]) == 0
    assert main(["show", f"no{hostile}".replace("\x00", "")]) == 2
    with pytest.raises(EngineError):
        came_to_an_end([played])
    came_to_an_end([played, replace(played, status="ok")])
    out, err = capsys.readouterr()
    named = re.sub(r"[^ -~]", lambda one: f"<U+{ord(one[0]):04X}>", hostile)
    assert out.count(named) >= 8
    assert f"no{named.replace('<U+0000>', '')}" in err
    assert f"the first: env_error: {named}" in err
    assert {c for c in out + err if not c.isprintable()} <= {"\n"}


def test_what_a_warning_quotes_commands_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_warnings()
    logging.getLogger("shoal.x").warning("it said %s", "\x1b[31mred\rover")
    assert capsys.readouterr().err == "WARNING shoal.x: it said <U+001B>[31mred<U+000D>over\n"


@pytest.mark.parametrize(
    ("command", "left", "told"),
    [
        ("eval", "", "shoal eval cannot go on with it: run it again"),
        ("eval", "unfinished.jsonl", "go on with: shoal eval as before, into"),
        ("train", "", "go on with: shoal train --config-name NAME"),
        ("train-ppo", "", "it ended before its first checkpoint: start again"),
        ("skills train", "", "go on with: shoal skills train --resume --out"),
        ("split", "shards", "go on with: shoal split ROOT --shard-size N --resume"),
    ],
)
def test_an_unfinished_run_is_told_by_the_command_that_made_it(run, prints, command, left, told):
    RunFolder(run, command, 0).close()
    (run / left).mkdir(exist_ok=True)
    assert told in " ".join(prints("show", run).split())
    (row,) = json.loads(prints("runs", run.parent, "--json"))
    assert (row["command"], row["status"]) == (command, "unfinished")


@pytest.mark.parametrize("command", ["train", "train-ppo"])
def test_a_run_that_failed_before_its_first_checkpoint_is_begun_anew(run, prints, command):
    with RunFolder(run, command, 0) as folder:
        folder.fail(ValueError("no such setting"))
    said = " ".join(prints("show", run).split())
    assert "begin it anew in another folder" in said
    assert "go on with" not in said


@pytest.mark.parametrize("columns", [20, 40, 110])
def test_a_command_to_go_on_is_copied_whole_from_a_terminal_of_any_width(run, prints, monkeypatch, columns):
    place = run.rename(run.with_name("it's a run-of-many-words"))
    RunFolder(place, "train", 0).close()
    (place / "config.yaml").write_text("seed: 0\n")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    told = re.sub(r"\x1b\[[0-9;]*m", "", prints("show", place)).split("go on with:\n")[1]
    copied = re.match(r"(?:.*\\\n)*.*\n", told)[0]
    script = f"shoal() {{ printf '%s\\n' \"$@\"; }}\n{copied}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "train", "--config-dir", str(place), "--config-name", "config", f"run_dir={place}", "resume=true",
    ]  # fmt: skip
    for line in copied.splitlines():
        assert len(line) <= columns or len(shlex.split(line.removesuffix("\\"))) == 1


@pytest.mark.parametrize(
    ("file", "command"), [("state.db", "skills train"), ("checkpoints/step_1", "train-ppo")]
)
def test_an_unfinished_run_of_an_older_version_is_told_by_its_files(run, prints, file, command):
    (run / ".lock").write_text("12345")
    (run / file).mkdir(parents=True)
    assert f"go on with: shoal {command}" in " ".join(prints("show", run).split())


def test_no_turns_can_be_shown_but_not_fewer(run, prints):
    assert "2 more turns (--max-turns 2 shows all)" in prints("show", run, "--worst", "--max-turns", "0")
    assert "--max-turns must be at least 0, got -1" in prints(
        "show", run, "--worst", "--max-turns=-1", code=2
    )


@pytest.mark.parametrize(
    "summary", [[], {"metrics": None}, "{torn", {"metrics": {"success": "NaN"}, "seconds": "long"}]
)
def test_a_broken_summary_hides_no_other_run(run, tmp_path, capsys, prints, summary):
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "summary.json").write_text(
        '{"command": "eval", "status": "completed", "metrics": {}}'
    )
    text = summary if isinstance(summary, str) else json.dumps(summary).replace('"NaN"', "NaN")
    (run / "summary.json").write_text(text)
    assert "2 runs in" in prints("runs", tmp_path)
    listed = {one["run"]: one for one in json.loads(prints("runs", tmp_path, "--json"))}
    assert (listed[str(run)]["seconds"], listed[str(run)]["value"]) == (None, None)
    assert main(["show", str(run)]) == (0 if "NaN" in text else 2)
    is_json = not isinstance(summary, str) and "NaN" not in text
    assert ("must hold an object with 'metrics'" in capsys.readouterr().err) == is_json


def test_a_state_that_no_run_can_have_is_no_empty_list(run, tmp_path, prints):
    assert "completed" in prints("runs", tmp_path, "--status", "complete", code=2)
    assert main(["runs", str(tmp_path), "--status", "unfinished"]) == 0


def test_rows_that_were_torn_are_not_counted(tmp_path, prints):
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 0}\n{"iteration": 1, "x": {"y"\n{"iteration": 2}\n{"it'
    )
    assert "2 rows of metrics so far" in " ".join(prints("show", tmp_path).split())


def test_a_folder_that_is_no_run_is_named_by_what_it_is(tmp_path, prints):
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no run")
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text("")
    for name, told in (
        ("empty", "it is empty"),
        ("other", "it holds no summary.json, metrics.jsonl or config.yaml"),
        ("runs", f"holds some: shoal show {tmp_path / 'runs' / 'one'}"),
    ):
        error = prints("show", tmp_path / name, code=2)
        assert told in error.replace(program(), "shoal")
        assert f"{program()} runs" in error


def test_what_cannot_go_on_as_it_is_is_told_no_command_that_fails(run, prints):
    with RunFolder(run, "train-ppo", 0) as folder:
        folder.fail(KeyboardInterrupt())
    assert "--resume-from" not in prints("show", run)
    (run / "checkpoints" / "step_64").mkdir(parents=True)
    assert "--resume-from" in prints("show", run)


def test_an_export_of_a_run_without_a_checkpoint_speaks_of_no_resume(run, prints, tmp_path):
    told = prints("export", run, tmp_path / "out", code=2)
    assert "has no checkpoint" in told
    assert "resume" not in told


def test_of_a_run_that_was_stopped_it_is_listed_how_far_it_came_and_how_well_it_did(tmp_path, prints):
    for name, error in (("killed", None), ("stopped", KeyboardInterrupt())):
        folder = RunFolder(tmp_path / name, "train", 7)
        (tmp_path / name / "config.yaml").write_text("seed: 7\ntrainer: {iterations: 200}\n")
        for iteration, success in ((0, 0.25), (95, 0.875), (97, None)):
            folder.append_metrics({"iteration": iteration, "heldout_success": success, "seconds": iteration})
        folder.close() if error is None else folder.fail(error)
    lines = prints("runs", tmp_path).splitlines()
    for name, word in (("killed", "unfinished"), ("stopped", "interrupted")):
        [line] = [line for line in lines if f"/{name} " in line]
        assert re.search(rf" train +{word} +7 .* 97 of 200, heldout_success 0\.875 *$", line)
        assert Run(tmp_path / name).status() == word, "the viewer's word"
    (row,) = json.loads(prints("runs", tmp_path, "--json", "--status", "unfinished"))
    assert (row["seed"], row["progress"], row["value"]) == (7, [97, 200], 0.875)


def test_curves_are_drawn_in_a_line_each_in_colour_on_a_terminal_alone(tmp_path, prints, monkeypatch):
    rows = [{"iteration": at, "success": at / 100, "entropy": 2.0 - at / 100} for at in range(100)]
    for row in rows[::25]:
        row["heldout_success"] = 0.0 if row["iteration"] < 50 else 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("COLUMNS", "80")
    plain = prints("show", tmp_path)
    lines = {line.split()[0]: line for line in plain.splitlines() if "▁" in line or "█" in line}
    assert [*lines] == ["success", "heldout_success", "entropy"]
    # 40 columns: two or three rows each, of which the mean is drawn
    assert lines["success"] == "success          " + "".join(b * 5 for b in "▁▂▃▄▅▆▇█") + "  0 → 0.99"
    assert lines["heldout_success"] == f"heldout_success  {'▁' * 20}{'█' * 20}  0 → 1"
    assert lines["entropy"].endswith("  2 → 1.01")
    assert "\x1b" not in plain
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert f"\x1b[36m{'▁' * 20}{'█' * 20}\x1b[0m" in prints("show", tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    assert f"heldout_success  {'▁' * 20}{'█' * 20}  0 → 1" in prints("show", tmp_path)
