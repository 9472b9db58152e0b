import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from shoal.cli import split
from shoal.cli.main import main
from shoal.core.run_folder import FolderLock
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


@pytest.fixture
def chats(tmp_path):
    """A file with a good conversation and one without an answer."""
    ask = {"role": "user", "content": "a"}
    good = {"id": "good", "messages": [ask, {"role": "assistant", "content": "b"}]}
    lines = map(json.dumps, [good, {"id": "bad", "messages": [ask]}])
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "chats.jsonl")


def test_split_writes_a_batch_a_summary_and_a_page(folders, tmp_path, capsys):
    base, ids = folders
    (tmp_path / "rewards.csv").write_text(
        "id,reward\n" + "".join(f"{name},{n}\n" for n, name in enumerate(ids))
    )
    rewards = ("--rewards", str(tmp_path / "rewards.csv"))
    assert main(command(base, tmp_path / "run", *rewards, "--num-cpus", "2", "--html")) == 0
    batch = Batch.load(tmp_path / "run" / "batch")
    assert batch["reward_tensor"].sum(1).tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["metrics"]["samples"] == summary["metrics"]["images"] == 9
    out, err = capsys.readouterr()
    assert "samples        9" in out
    assert "split 3 of 3" in err
    page = (tmp_path / "run" / "samples.html").read_text()
    assert page.count('data-title="Sample ') == 9
    assert "Action" in page


def test_json_events_keep_standard_output_for_scripts(folders, tmp_path, capsys):
    base, ids = folders
    (tmp_path / "rewards.json").write_text(json.dumps(dict.fromkeys(ids, 1.0)))
    more = ("--rewards", str(tmp_path / "rewards.json"), "--splitter", "window", "--window-size", "2")
    main(command(base, tmp_path / "run", *more, "--json-events"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["batch", "summary"]
    assert len(Batch.load(lines[0]["path"])["uid"]) == 6


def test_a_bad_trajectory_stops_the_command_or_is_named(folders, chats, tmp_path, caplog, prints):
    base, _ = folders
    chatty = ["split", chats, "--processor", str(base / "processor"), "--out"]
    assert "trajectory 'bad'" in prints(*chatty, tmp_path / "a", code=2)
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "failed"
    assert main([*chatty, str(tmp_path / "b"), "--on-error", "skip"]) == 0
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["metrics"]["skipped_ids"] == ["bad"]
    assert "skipped: trajectory 'bad'" in caplog.text


def test_a_refused_call_leaves_no_folder(folders, tmp_path, capsys):
    base, ids = folders
    (tmp_path / "rewards.json").write_text("[1, 2]")
    (tmp_path / "empty").mkdir()
    for wrong in (
        ["--ids", "nosuch", "--rewards", str(tmp_path / "rewards.json")],
        ["--ids", ids[0], ids[0]],
        ["--shard-size", "1", "--resume"],
        ["--processor", str(tmp_path)],
        ["--rewards", str(tmp_path / "no.json")],
        ["--reader", "nosuch"],
        ["--num-cpus", "0"],
        ["--resume"],
    ):
        assert main(command(base, tmp_path / "run", *wrong)) == 2, wrong
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("of somebody")
    assert main(command(base, mine)) == 2
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
    for root in ("nowhere", "empty"):
        assert main(["split", str(tmp_path / root), "--out", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()


def test_a_batch_is_not_written_over_and_runs_without_a_name_are_numbered(
    folders, tmp_path, capsys, prints, monkeypatch
):
    base, _ = folders
    monkeypatch.chdir(tmp_path)
    again = ["split", str(base / "recordings"), "--processor", str(base / "processor")]
    assert main([*again, "--html"]) == main([*again, "--splitter", "last-n"]) == 0
    assert [len(Batch.load(f"runs/{name}").samples()) for name in ("split", "split-2")] == [9, 3]
    assert not (tmp_path / "runs" / "split-2" / "samples.html").exists()
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    capsys.readouterr()
    for more in ([], ["--shard-size", "1"], ["--shard-size", "1", "--resume"]):
        assert "runs/split/batch exists: choose another --out, or remove it" in prints(
            *again, *more, "--out", "runs/split", code=2
        )
    assert before == {path: path.read_bytes() for path in before}


def test_a_folder_that_another_run_writes_is_refused(folders, tmp_path, capsys):
    base, _ = folders
    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run" / ".lock")
    lock.take()
    assert main(command(base, tmp_path / "run")) == 1
    assert "is running on" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    lock.release()


def test_shards_without_a_name_are_resumed_in_the_newest_folder(folders, tmp_path, capsys, monkeypatch):
    base, _ = folders
    monkeypatch.chdir(tmp_path)
    again = ["split", str(base / "recordings"), "--processor", str(base / "processor"), "--shard-size", "2"]
    assert main(again) == main([*again, "--resume", "--html"]) == 0
    assert "2 (0 written now)" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["split"]
    assert (tmp_path / "runs" / "split" / "samples.html").read_text().count('data-title="Sample ') == 6


def test_a_run_in_shards_names_what_it_skipped_and_may_skip_more_when_resumed(
    folders, chats, tmp_path, capsys, caplog, prints
):
    base, _ = folders
    chatty = ["split", chats, "--processor", str(base / "processor")]
    chatty += ["--out", str(tmp_path / "run"), "--shard-size", "1"]
    assert main(chatty) == 2
    assert "trajectory 'bad'" in capsys.readouterr().err
    out = prints(*chatty, "--resume", "--on-error", "skip")
    assert "skipped: trajectory 'bad'" in caplog.text
    assert "2 (1 written now)" in out
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert (told["shards"], told["new_shards"], told["samples"], told["skipped_ids"]) == (2, 1, 1, ["bad"])


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
    for stride in ("3", "0"):
        assert main(command(base, tmp_path / "run", *windows, "--stride-size", stride)) == 2
        why = f"stride_size must be in [1, window_size=2] so no turn is skipped, got {stride}"
        assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
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
    assert main(command(base, tmp_path / "run", "--rewards", str(tmp_path / "rewards.json"))) == 2
    assert message in capsys.readouterr().err


def pictures(page):
    """The images of each sample on a page of `--html`."""
    pages = page.split('data-title="Sample ')[1:]
    urls = [re.findall(r"src=['\"]data:image/jpeg;base64,([^'\"]+)", text) for text in pages]
    return [
        [np.asarray(Image.open(io.BytesIO(base64.b64decode(url)))).astype(int) for url in each]
        for each in urls
    ]


def red(picture):
    return np.argwhere((picture[..., 0] - picture[..., 1] > 60) & (picture[..., 0] > 150))


def test_no_point_is_drawn_on_the_screen_of_another_answer_where_truncation_removed_one(folders, tmp_path):
    base, _ = folders
    chat = []
    Image.new("RGB", (400, 200), (128, 128, 128)).save(tmp_path / "screen.png")
    for said in ("click(100,50)", "I wait.", "I wait."):
        chat += [{"role": "user", "content": [{"type": "image", "image": "screen.png"}]},
                 {"role": "assistant", "content": said}]  # fmt: skip
    (tmp_path / "chat.json").write_text(json.dumps([chat]))
    words = ["split", str(tmp_path / "chat.json"), "--processor", str(base / "processor"), "--html"]
    words += ["--truncation", "left", "--max-prompt-length", "290"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    last = pictures((tmp_path / "run" / "samples.html").read_text())[-1]
    assert [len(red(picture)) for picture in last] == [0, 0]


def test_minus_one_is_a_worker_for_each_core(folders, tmp_path, monkeypatch):
    asked = []
    made = split.make_executor
    monkeypatch.setattr(split, "make_executor", lambda *how: asked.append(how) or made(*how))
    base, _ = folders
    for cpus in ("-1", "1"):
        assert main(command(base, tmp_path / cpus, "--num-cpus", cpus)) == 0
    assert asked == [("thread", -1), ("serial", 1)]
