"""Lots of recordings: killed at any moment, a run goes on and does nothing twice; pixels come back by file."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from shoal.core.errors import ConfigError, DataError, WorkerError
from shoal.core.sharing import spill, spill_folder
from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.processors import load_processor
from shoal.splitting.shards import count_shards, read_shards, split_shards

READER = """
import os
from pathlib import Path
from shoal.splitting.readers import reader
from shoal.splitting.readers.recordings import FolderReader

@reader("logged")
class Logged(FolderReader):
    def read(self, dataset_id, path=None):
        with open(os.environ["READ_LOG"], "a") as log:
            log.write(dataset_id + "\\n")
        return super().read(dataset_id, path)
"""


def command(root, processor, mine, out, *more):
    words = ["split", str(root), "--processor", str(processor), "--reader", "logged", "--imports", str(mine)]
    words += ["--shard-size", "2", "--out", str(out), "--json-events", *more]
    return [
        sys.executable,
        "-c",
        "import sys; from shoal.cli.main import main; sys.exit(main(sys.argv[1:]))",
        *words,
    ]


def rows(folder):
    return [
        (sample.dataset_id, sample.input_ids.tolist(), sample.response_mask.tolist())
        for batch in read_shards(folder)
        for sample in batch.samples()
    ]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_does_nothing_twice(processor_folder, make_root, tmp_path):
    root, ids = make_root(9, steps=2, size=(60, 60))
    (tmp_path / "mine.py").write_text(READER)
    log = tmp_path / "log"
    env = {**os.environ, "READ_LOG": str(log)}
    line = command(root, processor_folder, tmp_path / "mine.py", tmp_path / "out")
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        made = [json.loads(run.stdout.readline()) for _ in range(2)]
        run.send_signal(signal.SIGKILL)
    assert [event["event"] for event in made] == ["batch", "batch"]
    before = log.read_text().split()
    done = len(list((tmp_path / "out" / "shards").glob("0*")))
    assert 2 <= done < 5
    assert before[: 2 * done] == ids[: 2 * done]
    log.unlink()
    again = subprocess.run([*line, "--resume"], env=env, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert log.read_text().split() == ids[2 * done :]  # nothing that was done is read again
    told = json.loads((tmp_path / "out" / "summary.json").read_text())["metrics"]
    assert (told["lots"], told["new_lots"], told["samples"]) == (5, 5 - done, 18)
    with pytest.raises(DataError, match="not done; resume it"):
        list(read_shards(_less_one(tmp_path / "out" / "shards")))
    calm = subprocess.run(
        command(root, processor_folder, tmp_path / "mine.py", tmp_path / "calm"),
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert calm.returncode == 0, calm.stderr
    assert len(rows(tmp_path / "calm" / "shards")) == 18
    calm_told = json.loads((tmp_path / "calm" / "summary.json").read_text())["metrics"]
    assert told == calm_told | {"new_lots": 5 - done}
    other = subprocess.run(
        [*line, "--resume", "--limit-messages", "3"], env=env, capture_output=True, text=True, timeout=200
    )
    assert other.returncode != 0
    assert "begun with other recordings or settings" in other.stderr


def _less_one(folder):
    copy = folder.with_name("less")
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "000003")
    return copy


def test_lots_hold_what_one_split_holds_and_reasons_where_all_was_skipped(processor, make_root, tmp_path):
    root, ids = make_root(5, steps=(1, 3), size=(60, 60))
    for name in ids[2:4]:
        (root / name / "final_messages.json").write_text("[")
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
    whole = splitter.split(ids, [0.0, 1.0, 2.0, 3.0, 4.0]).samples()
    seen = []
    made = list(split_shards(splitter, ids, [0.0, 1.0, 2.0, 3.0, 4.0], tmp_path / "lots", size=2,
                             progress=lambda done, total: seen.append((done, total))))  # fmt: skip
    assert [counts["skipped"] for _, counts in made] == [0, 2, 0]
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert set(json.loads((tmp_path / "lots" / "000001" / "skipped.json").read_text())) == set(ids[2:4])
    got = [sample for batch in read_shards(tmp_path / "lots") for sample in batch.samples()]
    assert [s.dataset_id for s in got] == [s.dataset_id for s in whole]
    for left, right in zip(got, whole, strict=True):
        assert left.input_ids.tolist() == right.input_ids.tolist()
        assert left.rewards.tolist() == right.rewards.tolist()
        assert torch.equal(left.inputs["pixel_values"], right.inputs["pixel_values"])
    assert list(split_shards(splitter, ids, [0.0, 1.0, 2.0, 3.0, 4.0], tmp_path / "lots", size=2)) == []
    with pytest.raises(ConfigError, match="begun with other"):
        list(split_shards(splitter, ids, None, tmp_path / "lots", size=2))


def test_lots_of_all_runs_are_counted_also_one_that_a_kill_left_uncounted(processor, make_root, tmp_path):
    root, ids = make_root(5, steps=2, size=(60, 60))
    (root / ids[3] / "final_messages.json").write_text("[")
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
    lots = tmp_path / "lots"
    made = split_shards(splitter, ids, None, lots, size=1)
    for _ in range(4):
        next(made)
    made.close()
    whole = count_shards(lots)
    assert (whole["lots"], whole["samples"], whole["skipped"]) == (4, 6, 1)
    told = [line for line in (lots / "counts.jsonl").read_text().split("\n") if line]
    (lots / "counts.jsonl").write_text(told[0] + "\n" + told[1][:-20])  # of the second only what a kill left
    assert [place.name for place, _ in split_shards(splitter, ids, None, lots, size=1)] == ["000004"]
    again = count_shards(lots)
    assert (again["lots"], again["samples"], again["skipped"]) == (5, 8, 1)
    assert list(again["reasons"]) == [ids[3]]
    with pytest.raises(DataError, match=r"has no plan\.json"):
        next(read_shards(root))


def test_a_second_split_into_a_folder_is_refused_while_the_first_writes_there(processor, make_root, tmp_path):
    root, ids = make_root(2, steps=1, size=(60, 60))
    lots, splitter = tmp_path / "lots", StepwiseTrajectorySplitter(processor, root, padding="longest")
    first = split_shards(splitter, ids, None, lots, size=1)
    next(first)
    (lots / ".000001.01234567.tmp").mkdir()  # what the first is writing
    with pytest.raises(WorkerError, match=rf"another split \(process {os.getpid()}\) is running on"):
        next(split_shards(splitter, ids, None, lots, size=1))
    assert (lots / ".000001.01234567.tmp").exists()
    first.close()
    assert [place.name for place, _ in split_shards(splitter, ids, None, lots, size=1)] == ["000001"]
    assert not (lots / ".000001.01234567.tmp").exists()


def test_a_folder_of_lots_is_not_mixed_with_other_settings_though_nobody_said_them(
    processor, make_root, tmp_path
):
    root, ids = make_root(2, steps=3, size=(60, 60))

    def lots(folder="lots", cls=StepwiseTrajectorySplitter, rewards=None, **options):
        splitter = cls(processor, root, **({"padding": "longest"} | options))
        return list(split_shards(splitter, ids, rewards, tmp_path / folder, size=1))

    assert len(lots()) == 2
    assert lots(on_error="skip") == lots(image_threads=2) == []
    for other in (
        {"limit_images": 1}, {"cls": TrajectorySplitter}, {"padding": "max"}, {"store": "float32"}, {"reward": "all"},
        {"max_response_length": 900}, {"reward": lambda reward, index, count: reward},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="begun with other recordings or settings"):
            lots(**other)
    assert len(lots("other", rewards=torch.tensor([0.5, 1.0]))) == 2
    with pytest.raises(ValueError, match="2 dataset_ids, got 1"):
        lots("third", rewards=[1.0])
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("changed", ["images", "template", "merges"])
def test_a_folder_of_lots_is_not_mixed_with_another_processor(processor_folder, make_root, tmp_path, changed):
    root, ids = make_root(2, steps=2, size=(60, 60))

    def lots(folder, lots):
        splitter = StepwiseTrajectorySplitter(load_processor(folder), root, padding="longest")
        return [place.name for place, _ in split_shards(splitter, ids, None, tmp_path / lots, size=1)]

    assert lots(processor_folder, "lots") == ["000000", "000001"]
    assert lots(shutil.copytree(processor_folder, tmp_path / "same"), "lots") == []
    other = Path(shutil.copytree(processor_folder, tmp_path / "other"))
    if changed == "template":
        path = other / "chat_template.jinja"
        path.write_text(path.read_text().replace("message.role", "message['role']"))
    else:
        path = other / ("preprocessor_config.json" if changed == "images" else "tokenizer.json")
        told = json.loads(path.read_text())
        told |= {"image_mean": [0.1, 0.1, 0.1]} if changed == "images" else {}
        if changed == "merges":
            told["model"]["merges"].pop()
        path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="begun with another tokenizer, image processor or chat template"):
        lots(other, "lots")
    plan = json.loads((tmp_path / "lots" / "plan.json").read_text())
    del plan["processor"]  # as it was written before processors were noted
    (tmp_path / "lots" / "plan.json").write_text(json.dumps(plan))
    assert lots(processor_folder, "lots") == []


def test_a_lot_in_which_nothing_is_trained_does_not_end_the_run(processor, make_root, tmp_path):
    root, ids = make_root(3, steps=1, size=(60, 60))
    path = root / ids[1] / "final_messages.json"
    messages = json.loads(path.read_text())
    for message in messages:
        message["trained"] = False
    path.write_text(json.dumps(messages))
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest")
    made = list(split_shards(splitter, ids, None, tmp_path / "lots", size=1))
    assert [counts["samples"] for _, counts in made] == [1, 0, 1]
    assert [name for name, *_ in rows(tmp_path / "lots")] == [ids[0], ids[2]]
    with pytest.raises(DataError, match="nothing in these trajectories is to be trained"):
        splitter.split(ids[1:2])


def test_lots_do_not_each_filter_by_their_own_average(processor, make_root, tmp_path):
    root, ids = make_root(3, steps=2, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", traj_filter=True)
    with pytest.raises(ConfigError, match=r"one lot of all \(3 recordings\), got lots of 2"):
        list(split_shards(splitter, ids, [1.0, 0.0, 0.0], tmp_path / "lots", size=2))
    ((_, counts),) = split_shards(splitter, ids, [1.0, 0.0, 0.0], tmp_path / "lots", size=3)
    assert counts["samples"] == len(splitter.split(ids, [1.0, 0.0, 0.0])["uid"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_recordings_are_split_once_though_the_run_is_killed(processor_folder, tmp_path):
    chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Gone."}]
    many, out = tmp_path / "many", tmp_path / "out"
    for number in range(10_000):
        folder = many / f"r{number:05d}"
        folder.mkdir(parents=True)
        (folder / "final_messages.json").write_text(json.dumps(chat))
        (folder / "task_config.json").write_text('{"id": "t"}')
    words = [
        "split",
        str(many),
        "--processor",
        str(processor_folder),
        "--shard-size",
        "500",
        "--out",
        str(out),
    ]
    line = [sys.executable, "-m", "shoal", *words, "--json-events"]
    made: list[dict[Path, int]] = []
    for kills in (3, 7):  # lots that are safe when the run is killed
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
            events = [run.stdout.readline() for _ in range(kills)]
            run.send_signal(signal.SIGKILL)
        assert [json.loads(event)["event"] for event in events] == ["batch"] * kills
        whole = sorted((out / "shards").glob("[0-9]*"))
        made.append({place: (place / "manifest.json").stat().st_mtime_ns for place in whole})
        line = [*line, "--resume"]
    assert 3 <= len(made[0]) < 10 <= len(made[1]) < 20
    last = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert last.returncode == 0, last.stderr
    events = [json.loads(event)["event"] for event in last.stdout.splitlines() if event.startswith("{")]
    assert events.count("batch") == 20 - len(made[1])  # nothing is done twice
    for before in made:
        assert {place: (place / "manifest.json").stat().st_mtime_ns for place in before} == before
    names = [sample.dataset_id for batch in read_shards(out / "shards") for sample in batch.samples()]
    assert names == [f"r{number:05d}" for number in range(10_000)]


# --- pixels by file
def places():
    return {path.name for path in Path("/dev/shm").glob(f"shoal-spilled-{os.getpid()}-*")}


@pytest.mark.slow
def test_pixels_come_back_through_files_that_do_not_stay(processor, make_root):
    root, ids = make_root(3, steps=2, size=(360, 240))
    serial = StepwiseTrajectorySplitter(processor, root, padding="longest").split(ids)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        splitter = StepwiseTrajectorySplitter(processor, root, padding="longest")
        results = splitter.results(ids, executor=executor)
        first = next(results)
        assert not first.pixels.rows.flags.owndata
        assert first.pixels.rows.flags.writeable
        assert len(places()) == 1
        results.close()  # left half way
        assert places() == set()
        batch = splitter.split(ids, executor=executor)
    assert places() == set()
    for got, want in zip(batch["multi_modal_inputs"], serial["multi_modal_inputs"], strict=True):
        assert torch.equal(got["pixel_values"], want["pixel_values"])


def test_pixels_are_sent_as_they_are_where_there_is_no_room_for_a_file(
    processor, make_root, monkeypatch, caplog
):
    root, ids = make_root(1, steps=1, size=(240, 240))
    pixels = next(StepwiseTrajectorySplitter(processor, root).results(ids)).pixels
    with spill_folder() as place:
        spilled = spill(pixels, place)
        assert torch.equal(spilled.fetched().values([0]), pixels.values([0]))
        assert not list(Path(place).iterdir())

        class Full:
            def __enter__(self):
                raise OSError(28, "No space left on device")

            def __exit__(self, *_):
                return None

        monkeypatch.setattr(os, "fdopen", lambda descriptor, *_, **__: os.close(descriptor) or Full())
        assert spill(pixels, place) is pixels
        assert not list(Path(place).iterdir())
    assert spill(pixels, place) is pixels  # nor where the folder is gone
    assert "no room" in caplog.text


def test_what_a_killed_run_left_of_its_pixels_is_swept(tmp_path):
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    left = base / f"shoal-spilled-{gone.stdout.strip()}-abc"
    left.mkdir()
    with spill_folder():
        assert not left.exists()
