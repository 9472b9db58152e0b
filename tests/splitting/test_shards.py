"""Lots of recordings: killed at any moment, a run goes on and does nothing twice; pixels come back by file."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chats import folder_of, rewrite, talk

from shoal.core.errors import ConfigError, DataError, WorkerError
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
    assert (told["shards"], told["new_shards"], told["samples"]) == (5, 5 - done, 18)
    with pytest.raises(DataError, match="not done; resume it"):
        list(read_shards(_less_one(tmp_path / "out" / "shards")))
    calm = subprocess.run(
        command(root, processor_folder, tmp_path / "mine.py", tmp_path / "calm"),
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert calm.returncode == 0, calm.stderr
    assert len(rows(tmp_path / "calm" / "shards")) == 18
    calm_told = json.loads((tmp_path / "calm" / "summary.json").read_text())["metrics"]
    assert told == calm_told | {"new_shards": 5 - done}
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


def test_shards_hold_what_one_split_holds_and_reasons_where_all_was_skipped(processor, make_root, tmp_path):
    root, ids = make_root(5, steps=(1, 3), size=(60, 60))
    for name in ids[2:4]:
        (root / name / "final_messages.json").write_text("[")
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
    whole = splitter.split(ids, [0.0, 1.0, 2.0, 3.0, 4.0]).samples()
    seen = []
    made = list(split_shards(splitter, ids, [0.0, 1.0, 2.0, 3.0, 4.0], tmp_path / "shards", size=2,
                             progress=lambda done, total: seen.append((done, total))))  # fmt: skip
    assert [counts["skipped"] for _, counts in made] == [0, 2, 0]
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert set(json.loads((tmp_path / "shards" / "000001" / "skipped.json").read_text())) == set(ids[2:4])
    got = [sample for batch in read_shards(tmp_path / "shards") for sample in batch.samples()]
    assert [s.dataset_id for s in got] == [s.dataset_id for s in whole]
    for left, right in zip(got, whole, strict=True):
        assert left.input_ids.tolist() == right.input_ids.tolist()
        assert left.rewards.tolist() == right.rewards.tolist()
        assert torch.equal(left.inputs["pixel_values"], right.inputs["pixel_values"])
    assert list(split_shards(splitter, ids, [0.0, 1.0, 2.0, 3.0, 4.0], tmp_path / "shards", size=2)) == []
    with pytest.raises(ConfigError, match="begun with other"):
        list(split_shards(splitter, ids, None, tmp_path / "shards", size=2))


def test_recordings_that_have_changed_and_shards_that_are_damaged_are_refused(processor, make_root, tmp_path):
    root, ids = make_root(3, steps=2, size=(60, 60))
    shards = tmp_path / "shards"

    def again():
        splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
        return [place.name for place, _ in split_shards(splitter, ids, None, shards, size=2)]

    assert again() == ["000000", "000001"]
    said = root / ids[0] / "final_messages.json"
    before = said.read_text()
    folder_of(root / ids[0], talk("other"))
    with pytest.raises(ConfigError, match="recordings that have changed since; give another folder"):
        again()
    said.write_text(before)
    os.utime(said, (0, 0))  # the same words are the same recording
    assert again() == []
    config = root / ids[0] / "task_config.json"
    before = config.read_text()
    config.write_text(json.dumps({"id": "t", "reward": 0.5}))
    with pytest.raises(ConfigError, match="recordings that have changed since"):
        again()
    config.write_text(before)
    tensors = shards / "000001" / "batch.safetensors"
    os.truncate(tensors, tensors.stat().st_size // 2)
    with pytest.raises(DataError, match=r"batch.safetensors .*; remove .*000001, and split again"):
        again()
    shutil.rmtree(shards / "000001")
    assert again() == ["000001"]


def test_shards_of_all_runs_are_counted(processor, make_root, tmp_path):
    root, ids = make_root(5, steps=2, size=(60, 60))
    (root / ids[3] / "final_messages.json").write_text("[")
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
    shards = tmp_path / "shards"
    made = split_shards(splitter, ids, None, shards, size=1)
    for _ in range(4):
        next(made)
    made.close()
    whole = count_shards(shards)
    assert (whole["shards"], whole["samples"], whole["skipped"]) == (4, 6, 1)
    assert [place.name for place, _ in split_shards(splitter, ids, None, shards, size=1)] == ["000004"]
    again = count_shards(shards)
    assert (again["shards"], again["samples"], again["skipped"]) == (5, 8, 1)
    assert list(again["reasons"]) == [ids[3]]
    with pytest.raises(DataError, match=r"has no plan\.json"):
        next(read_shards(root))


def test_a_second_split_into_a_folder_is_refused_while_the_first_writes_there(processor, make_root, tmp_path):
    root, ids = make_root(2, steps=1, size=(60, 60))
    shards, splitter = tmp_path / "shards", StepwiseTrajectorySplitter(processor, root, padding="longest")
    first = split_shards(splitter, ids, None, shards, size=1)
    next(first)
    (shards / ".000001.01234567.tmp").mkdir()  # what the first is writing
    with pytest.raises(WorkerError, match=rf"another split \(process {os.getpid()}\) is running on"):
        next(split_shards(splitter, ids, None, shards, size=1))
    assert (shards / ".000001.01234567.tmp").exists()
    first.close()
    assert [place.name for place, _ in split_shards(splitter, ids, None, shards, size=1)] == ["000001"]
    assert not (shards / ".000001.01234567.tmp").exists()


def test_a_folder_of_shards_is_not_mixed_with_other_settings_though_nobody_said_them(
    processor, make_root, tmp_path
):
    root, ids = make_root(2, steps=3, size=(60, 60))

    def shards(folder="shards", cls=StepwiseTrajectorySplitter, rewards=None, **options):
        splitter = cls(processor, root, **({"padding": "longest"} | options))
        return list(split_shards(splitter, ids, rewards, tmp_path / folder, size=1))

    assert len(shards()) == 2
    assert shards(on_error="skip") == shards(image_threads=2) == []
    for other in (
        {"limit_images": 1}, {"cls": TrajectorySplitter}, {"padding": "max"}, {"store": "float32"}, {"reward": "all"},
        {"max_response_length": 900}, {"reward": lambda reward, index, count: reward},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="begun with other recordings or settings"):
            shards(**other)
    assert len(shards("other", rewards=torch.tensor([0.5, 1.0]))) == 2
    with pytest.raises(ValueError, match="2 dataset_ids, got 1"):
        shards("third", rewards=[1.0])
    assert not (tmp_path / "third").exists()


def test_a_folder_of_shards_is_not_mixed_with_another_processor(processor_folder, make_root, tmp_path):
    root, ids = make_root(2, steps=2, size=(60, 60))

    def shards(folder, shards):
        splitter = StepwiseTrajectorySplitter(load_processor(folder), root, padding="longest")
        return [place.name for place, _ in split_shards(splitter, ids, None, tmp_path / shards, size=1)]

    assert shards(processor_folder, "shards") == ["000000", "000001"]
    assert shards(shutil.copytree(processor_folder, tmp_path / "same"), "shards") == []
    why = "begun with another tokenizer, image processor or chat template"
    for name, before, after in (
        ("chat_template.jinja", "message.role", "message['role']"),
        ("preprocessor_config.json", '"patch_size"', '"image_mean": [0.1, 0.1, 0.1], "patch_size"'),
        ("tokenizer.json", '"Isolated"', '"MergedWithNext"'),
    ):
        other = Path(shutil.copytree(processor_folder, tmp_path / name))
        text = (other / name).read_text()
        assert before in text
        (other / name).write_text(text.replace(before, after))
        with pytest.raises(ConfigError, match=why):
            shards(other, "shards")


def test_a_shard_in_which_nothing_is_trained_does_not_end_the_run(processor, make_root, tmp_path):
    root, ids = make_root(3, steps=1, size=(60, 60))
    rewrite(root / ids[1], lambda messages: [message.update(trained=False) for message in messages])
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest")
    made = list(split_shards(splitter, ids, None, tmp_path / "shards", size=1))
    assert [counts["samples"] for _, counts in made] == [1, 0, 1]
    assert [name for name, *_ in rows(tmp_path / "shards")] == [ids[0], ids[2]]
    with pytest.raises(DataError, match="nothing in these trajectories is to be trained"):
        splitter.split(ids[1:2])


def test_shards_do_not_each_filter_by_their_own_average(processor, make_root, tmp_path):
    root, ids = make_root(3, steps=2, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", traj_filter=True)
    with pytest.raises(ConfigError, match="one shard of all 3 recordings, got shards of 2"):
        list(split_shards(splitter, ids, [1.0, 0.0, 0.0], tmp_path / "shards", size=2))
    ((_, counts),) = split_shards(splitter, ids, [1.0, 0.0, 0.0], tmp_path / "shards", size=3)
    assert counts["samples"] == len(splitter.split(ids, [1.0, 0.0, 0.0])["uid"])
