import json

import pytest

from shoal.cli import split
from shoal.cli.main import main
from shoal.splitting import Batch, build_qwen_processor
from shoal.splitting.synthetic import write_gui_recordings


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("split")
    ids = write_gui_recordings(base / "recordings", 3, steps=3, size=(90, 60))
    build_qwen_processor(base / "processor", vocabulary=5000)
    return base, ids


def command(base, out, *more):
    start = ["split", str(base / "recordings"), "--processor", str(base / "processor"), "--out", str(out)]
    return start + list(more)


def test_split_writes_a_batch_a_summary_and_a_page(folders, tmp_path, capsys):
    base, ids = folders
    (tmp_path / "rewards.csv").write_text(
        "id,reward\n" + "".join(f"{name},{n}\n" for n, name in enumerate(ids))
    )
    rewards = ("--rewards", str(tmp_path / "rewards.csv"))
    assert main(command(base, tmp_path / "run", *rewards, "--num-cpus", "2", "--html", "--sample", "-1")) == 0
    batch = Batch.load(tmp_path / "run" / "batch")
    assert batch["reward_tensor"].sum(1).tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["metrics"]["samples"] == summary["metrics"]["images"] == 9
    out, err = capsys.readouterr()
    assert "samples        9" in out
    assert "split 3 of 3" in err
    assert "reward 2 on response token" in (tmp_path / "run" / "sample.html").read_text()


def test_json_events_keep_standard_output_for_scripts(folders, tmp_path, capsys):
    base, ids = folders
    (tmp_path / "rewards.json").write_text(json.dumps(dict.fromkeys(ids, 1.0)))
    more = ("--rewards", str(tmp_path / "rewards.json"), "--splitter", "window", "--window-size", "2")
    main(command(base, tmp_path / "run", *more, "--json-events"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["batch", "summary"]
    assert len(Batch.load(lines[0]["path"])["uid"]) == 6


def test_a_bad_trajectory_stops_the_command_or_is_named(folders, tmp_path, capsys):
    base, _ = folders
    chats = [
        {"id": "good", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"id": "bad", "messages": [{"role": "user", "content": "a"}]},
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    chatty = ["split", str(tmp_path / "chats.jsonl"), "--processor", str(base / "processor"), "--out"]
    assert main([*chatty, str(tmp_path / "a")]) == 2
    assert "trajectory 'bad'" in capsys.readouterr().err
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "failed"
    assert main([*chatty, str(tmp_path / "b"), "--on-error", "skip"]) == 0
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["metrics"]["skipped_ids"] == ["bad"]
    assert "skipped trajectory 'bad'" in capsys.readouterr().out


def test_a_mistake_in_a_further_call_leaves_a_finished_batch_and_its_summary(folders, tmp_path, capsys):
    base, _ = folders
    assert main(command(base, tmp_path)) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    for wrong in (
        ["--ids", "nosuch"],
        ["--processor", str(tmp_path)],
        ["--rewards", str(tmp_path / "no.json")],
    ):
        assert main(command(base, tmp_path, *wrong)) == 2
    assert before == {path: path.read_bytes() for path in before}


def test_a_run_in_lots_names_what_it_skipped_and_may_skip_more_when_resumed(folders, tmp_path, capsys):
    base, _ = folders
    chats = [
        {"id": "good", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"id": "bad", "messages": [{"role": "user", "content": "a"}]},
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    chatty = ["split", str(tmp_path / "chats.jsonl"), "--processor", str(base / "processor")]
    chatty += ["--out", str(tmp_path / "run"), "--shard-size", "1"]
    assert main(chatty) == 2
    assert "trajectory 'bad'" in capsys.readouterr().err
    assert main([*chatty, "--resume", "--on-error", "skip"]) == 0
    out = capsys.readouterr().out
    assert "skipped trajectory 'bad'" in out
    assert "2 (1 of them made now)" in out
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert (told["lots"], told["new_lots"], told["samples"], told["skipped_ids"]) == (2, 1, 1, ["bad"])


def test_a_page_of_lots_that_hold_no_sample_says_so(folders, tmp_path, capsys):
    base, _ = folders
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"id": "bad", "messages": [{"role": "user", "content": "a"}]})
    )
    chatty = ["split", str(tmp_path / "chats.jsonl"), "--processor", str(base / "processor"), "--out"]
    assert main([*chatty, str(tmp_path / "run"), "--shard-size", "1", "--on-error", "skip", "--html"]) == 2
    assert "holds no sample that --html could show" in capsys.readouterr().err


def test_rewards_of_a_spreadsheet_begin_with_its_mark_and_are_one_each(folders, tmp_path, capsys):
    base, ids = folders
    rewards = tmp_path / "rewards.csv"
    rewards.write_text("".join(f"{name},{n}\n" for n, name in enumerate(ids)), encoding="utf-8-sig")
    assert main(command(base, tmp_path / "run", "--rewards", str(rewards), "--splitter", "last-n")) == 0
    assert Batch.load(tmp_path / "run" / "batch")["reward_tensor"].sum(1).tolist() == [0.0, 1.0, 2.0]
    rewards.write_text(rewards.read_text() + f"{ids[1]},5\n")
    assert main(command(base, tmp_path / "other", "--rewards", str(rewards))) == 2
    assert f"{ids[1]!r} more than once" in capsys.readouterr().err


def test_a_stride_that_would_skip_turns_is_refused_and_the_default_fits_any_window(folders, tmp_path, capsys):
    base, _ = folders
    windows = ("--splitter", "window", "--window-size", "2")
    assert main(command(base, tmp_path / "run", *windows, "--stride-size", "3")) == 2
    assert "stride_size must be in [1, window_size=2]" in capsys.readouterr().err
    assert main(command(base, tmp_path / "run", *windows)) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "2 rewards for 3"),
        ('{"x": 1}', "no reward for"),
        ("3", "object of id"),
        ("{", "not valid JSON"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(folders, tmp_path, capsys, content, message):
    base, _ = folders
    (tmp_path / "rewards.json").write_text(content)
    assert main(command(base, tmp_path, "--rewards", str(tmp_path / "rewards.json"))) == 2
    assert message in capsys.readouterr().err


def test_a_sample_that_is_not_there_costs_only_the_page(folders, tmp_path, capsys):
    base, _ = folders
    assert main(command(base, tmp_path / "run", "--html", "--sample", "99")) == 2
    assert "sample must be in [0, 8], got 99" in capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["metrics"]["samples"]) == ("completed", 9)


def test_minus_one_is_a_worker_for_each_core(folders, tmp_path, monkeypatch):
    asked = []
    made = split.make_executor
    monkeypatch.setattr(split, "make_executor", lambda *how: asked.append(how) or made(*how))
    base, _ = folders
    for cpus in ("-1", "1"):
        assert main(command(base, tmp_path / cpus, "--num-cpus", cpus)) == 0
    assert asked == [("thread", -1), ("serial", 1)]
