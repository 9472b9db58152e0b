"""What is wrong with recordings, rewards or settings is an error that names it."""

import errno
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch
from chats import folder_of
from PIL import Image

from shoal.core.errors import DataError
from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.readers.recordings import FolderReader


def test_bad_trajectories_are_named_with_file_and_remedy(processor, damaged):
    root, ids = damaged
    batch = StepwiseTrajectorySplitter(processor, root, on_error="skip", padding="longest").split(ids)
    assert ids[2] in batch.skipped[0].reason
    assert "final_messages.json is not valid JSON" in batch.skipped[0].reason
    assert "image_0001.png is missing; restore it" in batch.skipped[1].reason


def text(role, words):
    return {"role": role, "content": [{"type": "text", "text": words}]}


def picture(reference):
    parts = [{"type": "text", "text": "go"}, {"type": "image_url", "image_url": reference}]
    return {"role": "user", "content": parts}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({}, "must hold a list of messages, got an object"),
        ([text("system", "s"), {"role": "robot", "content": "x"}], "role must be one of"),
        ([text("system", "s"), {"role": "user"}], "content must be text or a list"),
        ([text("system", "s"), text("user", "u")], "no assistant message"),
        ([text("system", "s"), text("assistant", "a")], "before the first user"),
        ([text("user", "u"), text("assistant", "a"), text("assistant", "b")], "merge them"),
        ([text("user", "u"), text("assistant", "a"), text("system", "b"), text("assistant", "b")], "move it"),
        ([picture("../../etc/passwd"), text("assistant", "a")], "leaves"),
        ([picture("/etc/passwd"), text("assistant", "a")], "leaves"),
        ([picture("https://example.org/x.png"), text("assistant", "a")], "download it"),
        ([picture("nothing"), text("assistant", "a")], "nothing.png is missing"),
        ([picture("data:image/png;base64,!!!"), text("assistant", "a")], "not valid base64"),
        ([picture("data:text/html,x"), text("assistant", "a")], "must look like data:image"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "x"}]}, text("assistant", "a")],
            "text or image part",
        ),
        ([text("user", "half \ud800"), text("assistant", "a")], "not valid Unicode"),
        ([text("user", "break \ufdd0"), text("assistant", "a")], "noncharacters"),
        ([text("user", "u"), picture("image_0000") | {"role": "assistant"}], "cannot hold an image"),
    ],
)
def test_bad_messages_are_refused_with_a_reason(processor, make_root, messages, message):
    root, ids = make_root(2, steps=1, size=(60, 60))
    folder_of(root / ids[0], messages)
    batch = StepwiseTrajectorySplitter(processor, root, on_error="skip", padding="longest").split(ids)
    assert batch["dataset_ids"].tolist() == [ids[1]]
    assert message in batch.skipped[0].reason
    assert ids[0] in batch.skipped[0].reason


def test_missing_files_and_odd_names_are_refused(processor, make_root):
    root, _ = make_root(1, steps=1, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root)
    for name, message in (("nobody", "final_messages.json is missing"), ("../x", "dataset name must be")):
        with pytest.raises(DataError, match=message):
            splitter.split([name])


def test_symbolic_links_do_not_lead_out_of_the_folder(processor, make_root, tmp_path):
    root, ids = make_root(1, steps=1, size=(60, 60))
    shutil.move(root / ids[0] / "image_0000.png", tmp_path / "elsewhere.png")
    (root / ids[0] / "image_0000.png").symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(DataError, match="leaves"):
        StepwiseTrajectorySplitter(processor, root).split(ids)


def bomb(path, width, height):
    """A PNG of a few bytes whose header promises more pixels than it has."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (5000, 5000, "more than 16,000,000 pixels"),
        (15000, 15000, "too large|more than"),
        (40000, 40000, "too large"),
        (4000, 10, "too long"),
        (64, 64, "broken|cannot be read"),
    ],
)
def test_image_bombs_and_broken_images_are_refused_before_they_cost(
    processor, make_root, width, height, message
):
    root, ids = make_root(1, steps=1, size=(60, 60))
    bomb(root / ids[0] / "image_0000.png", width, height)
    with pytest.raises(DataError, match=message):
        StepwiseTrajectorySplitter(processor, root).split(ids)


def test_rewards_must_match_and_be_finite(processor, make_root):
    root, ids = make_root(3, steps=1, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
    with pytest.raises(ValueError, match="3 dataset_ids, got 2"):
        splitter.split(ids, [1.0, 2.0])
    batch = splitter.split(ids, torch.tensor([1.0, float("nan"), 3.0]))
    assert "must be finite, got nan" in batch.skipped[0].reason
    assert ids[1] in batch.skipped[0].reason
    assert batch["reward_tensor"].sum(1).tolist() == [1.0, 3.0]
    # float32, as rewards are kept, would make infinity of them
    batch = splitter.split(ids, [1e39, 10**400, 3.0])
    assert ["got 1e+39, for which float32 has no room" in s.reason for s in batch.skipped] == [True, False]
    assert "must be finite, got inf" in batch.skipped[1].reason
    with pytest.raises(DataError, match="process rewards must be in"):
        StepwiseTrajectorySplitter(processor, root).split(ids, process_reward_tensor=[[0.5], [2.0], [0.5]])
    with pytest.raises(DataError, match="all 3 trajectories were skipped"):
        splitter.split(ids, [float("inf")] * 3)


def test_bad_arguments_say_what_was_expected(processor, tmp_path):
    for options, message in (
        ({"stride_size": 6}, "so no turn is skipped"),
        ({"window_size": 0}, "window_size must be at least 1"),
        ({"truncation": "top"}, "truncation must be one of"),
        ({"store": "u16"}, "store must be one of"),
        ({"on_error": "ignore"}, "on_error must be one of"),
        ({"padding": "min"}, "padding must be one of"),
        ({"compat": "seed"}, "compat must be 'fixed', the only way samples are made, got 'seed'"),
        ({"position_rows": 1}, "3 rows"),
        ({"reward": "first"}, "reward must be one of"),
        ({"position_rows": 2}, "position_rows must be one of None, 1, 3, 4"),
        ({"window_size": 2.5, "stride_size": 2}, "window_size must be a whole number, got 2.5"),
        ({"stride_size": 1.5}, "stride_size must be a whole number, got 1.5"),
        ({"max_prompt_length": 1e4}, "max_prompt_length must be a whole number"),
        ({"limit_images": float("nan")}, "limit_images must be a whole number"),
        ({"stride_size": "2"}, "stride_size must be a whole number, got '2'"),
        ({"traj_filter": "no"}, "traj_filter must be one of False, True, got 'no'"),
        ({"model_text": "<|box_start|>"}, "model_text must be a list of special tokens"),
        ({"reader": "chat"}, r"reader must have ids\(\) and read\(\), got 'chat'"),
    ):
        with pytest.raises(ValueError, match=message):
            TrajectorySplitter(processor, tmp_path, **options)
    with pytest.raises(ValueError, match="dataset_ids is empty"):
        TrajectorySplitter(processor, tmp_path).split([])
    for given, message in (
        (("abc",), "must be a list of ids, got the text 'abc'"),
        ((None,), "must be a list of ids, got None"),
        ((["1", "2"], 5), "one entry per trajectory: 2 dataset_ids, got 1"),
        ((["1", "2"], {"1": 0.5, "2": 1.0}), "one entry per trajectory, in order, got dict"),
    ):
        with pytest.raises(ValueError, match=message):
            TrajectorySplitter(processor, tmp_path).split(*given)
    with pytest.raises(ValueError, match="executor must be one, got 'thread'; make_executor makes one"):
        TrajectorySplitter(processor, tmp_path).split(["a"], executor="thread")
    with pytest.raises(ValueError, match="a row of scores per trajectory, got 0.5"):
        TrajectorySplitter(processor, tmp_path).split(["a", "b"], process_reward_tensor=[0.5, 0.5])


@pytest.mark.parametrize("given", [float("nan"), float("inf"), None, "much"])
def test_a_reward_function_that_gives_no_finite_number_is_an_error(processor, make_root, given):
    root, ids = make_root(1, steps=1, size=(60, 60))
    splitter = TrajectorySplitter(processor, root, reward=lambda reward, index, count: given)
    with pytest.raises(DataError, match="the function given as reward: reward must be"):
        splitter.split(ids, [1.0])


def test_a_recording_that_its_reader_stumbles_over_is_left_out_under_traj_filter_too(processor, make_root):
    root, ids = make_root(3, steps=2, size=(60, 60))

    class Mine(FolderReader):
        def read(self, dataset_id, path=None):
            if dataset_id == ids[1]:
                raise KeyError("turns")
            return super().read(dataset_id, path)

    splitter = StepwiseTrajectorySplitter(
        processor, root, reader=Mine(root), traj_filter=True, on_error="skip", padding="longest"
    )
    batch = splitter.split(ids, [1.0, 1.0, 1.0])
    assert [item.dataset_id for item in batch.skipped] == [ids[1]]
    assert batch["dataset_ids"].tolist() == [ids[0]] * 2 + [ids[2]] * 2


@pytest.mark.parametrize("filtered", [False, True])
def test_what_the_machine_ran_short_of_is_no_fault_of_a_recording(
    processor, make_root, monkeypatch, filtered
):
    """It would be left out for good: a shard that is there is not split again."""
    root, ids = make_root(2, steps=1, size=(60, 60))

    def none_left(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    splitter = StepwiseTrajectorySplitter(processor, root, on_error="skip", traj_filter=filtered)
    if filtered:
        monkeypatch.setattr(Path, "read_bytes", none_left)
    else:
        monkeypatch.setattr(Image, "open", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        splitter.split(ids, [1.0, 1.0])
