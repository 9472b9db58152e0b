"""The same batch from every executor, bad trajectories included."""

import errno
import json
import os
import pickle
import shutil
import signal
import sys
import types
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from shoal.core import executors
from shoal.core.errors import DataError
from shoal.core.executors import ProcessExecutor, make_executor
from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.readers.recordings import FolderReader
from shoal.splitting.splitters import _start_ray


def assert_same_batches(left, right):
    assert list(left) == list(right)
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[name].dtype
            assert torch.equal(value, right[name]), name
        elif name == "multi_modal_inputs":
            for got, want in zip(value, right[name], strict=True):
                assert set(got) == set(want)
                assert all(torch.equal(got[key], want[key]) for key in want)
        else:
            assert value.tolist() == right[name].tolist(), name
    assert left.skipped == right.skipped


@pytest.fixture
def damaged(make_root):
    """Seven trajectories of which the third has broken JSON and the sixth misses an image."""
    root, ids = make_root(7, steps=(2, 4), size=(90, 70))
    (root / ids[2] / "final_messages.json").write_text("[{")
    (root / ids[5] / "image_0001.png").unlink()
    return root, ids


@pytest.mark.parametrize("store", ["u8", "float32", "bfloat16", "path"])
def test_threads_give_the_serial_batch(processor, damaged, store):
    root, ids = damaged
    splitter = StepwiseTrajectorySplitter(processor, root, store=store, padding="longest", on_error="skip")
    serial = splitter.split(ids, torch.arange(7.0))
    assert [item.dataset_id for item in serial.skipped] == [ids[2], ids[5]]
    assert serial["traj_index"].unique().tolist() == [0, 1, 3, 4, 6]
    with ThreadPoolExecutor(3) as executor:
        assert_same_batches(splitter.split(ids, torch.arange(7.0), executor=executor), serial)
    threaded = StepwiseTrajectorySplitter(
        processor, root, store=store, padding="longest", on_error="skip", image_threads=2
    )
    assert_same_batches(threaded.split(ids, torch.arange(7.0)), serial)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])  # each imports for 7 s
def test_processes_give_the_serial_batch(processor, damaged, workers):
    root, ids = damaged
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        for store in ("u8", "float32", "path"):
            splitter = TrajectorySplitter(
                processor, root, 2, 2, store=store, padding="longest", on_error="skip"
            )
            serial = splitter.split(ids, torch.arange(7.0))
            assert_same_batches(splitter.split(ids, torch.arange(7.0), executor=executor), serial)
        strict = TrajectorySplitter(processor, root)
        with pytest.raises(DataError, match=ids[2]):
            strict.split(ids, executor=executor)
        pids = list(executor._processes)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_running_ray_is_joined_with_the_cpus_it_has(monkeypatch):
    joined = []

    def init(address, num_cpus=None, **rest):
        if num_cpus is not None:
            raise ValueError("When connecting to an existing cluster, num_cpus must not be provided.")
        joined.append(rest)

    running = types.SimpleNamespace(
        is_initialized=lambda: False, init=init, cluster_resources=lambda: {"CPU": 8.0}
    )
    monkeypatch.setitem(sys.modules, "ray", running)
    monkeypatch.setattr(executors, "ray_address", lambda: "10.0.0.1:6379")
    assert _start_ray(2) == 2
    assert len(joined) == 1


def test_ray_workers_of_other_machines_get_the_processor_through_ray(processor, make_root, monkeypatch):
    """Also where the caller made the executor: a file of this machine would not be there."""
    from concurrent.futures import Future

    from shoal.core.executors import RayExecutor
    from shoal.core.sharing import Shared
    from shoal.splitting import splitters

    class Elsewhere(RayExecutor):
        def __init__(self):
            pass

        def submit(self, function, /, *args):
            future = Future()
            future.set_result(function(*args))
            return future

    shared, places, spill_folder = [], [], splitters.spill_folder
    monkeypatch.setattr(splitters, "shared_by_ray", lambda plan: shared.append(plan) or Shared(plan))
    monkeypatch.setattr(splitters, "spill_folder", lambda: places.append(0) or spill_folder())
    root, ids = make_root(1, steps=1, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root)
    for other in ({"Alive": True}, {"Alive": False}):
        nodes = [{"Alive": True}, other]
        monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(nodes=lambda nodes=nodes: nodes))
        splitter.split(ids, executor=Elsewhere())
        assert len(places) == (
            not other["Alive"]
        )  # a machine that is gone is no other one: pixels go by file
    assert shared == [splitter.plan] * 2


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_serial_batch(processor, damaged):
    ray = pytest.importorskip("ray")
    root, ids = damaged
    ray.shutdown()  # what a test before left running
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # not somebody else's
    try:
        for cls in (StepwiseTrajectorySplitter, TrajectorySplitter):
            splitter = cls(processor, root, store="float32", padding="longest", on_error="skip")
            serial = splitter.split(ids, torch.arange(7.0))
            assert_same_batches(splitter.split_parallel(ids, torch.arange(7.0), num_cpus=2), serial)
            # the reference promises equal results without rewards too
            assert_same_batches(splitter.split_parallel(ids, num_cpus=2), splitter.split(ids))
        with pytest.raises(DataError, match=ids[2]):
            TrajectorySplitter(processor, root).split_parallel(ids, num_cpus=2)
        assert ray.is_initialized()  # stays, for the caller's next call
    finally:
        ray.shutdown()


def test_a_stream_yields_the_samples_of_one_split_in_order(processor, damaged):
    root, ids = damaged
    limits = {"max_prompt_length": 4000, "max_response_length": 300}
    splitter = StepwiseTrajectorySplitter(processor, root, on_error="skip", **limits)
    whole = splitter.split(ids, torch.arange(7.0))
    with ThreadPoolExecutor(2) as executor:
        parts = list(splitter.stream(ids, torch.arange(7.0), batch_size=4, executor=executor))
    assert [len(part["uid"]) for part in parts[:-1]] == [4] * (len(parts) - 1)
    for name in ("input_ids", "position_ids", "reward_tensor", "traj_index"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    assert sum((part.skipped for part in parts), ()) == whole.skipped
    assert len(parts[0].pixels) <= 3  # only trajectories of its own samples are held


def test_a_stream_reads_no_further_than_it_must(processor, make_root):
    root, ids = make_root(6, steps=2, size=(60, 60))
    shutil.rmtree(root / ids[4])
    stream = StepwiseTrajectorySplitter(processor, root, padding="longest").stream(ids, batch_size=2)
    assert next(stream)["dataset_ids"].tolist() == [ids[0]] * 2
    with pytest.raises(DataError, match=ids[4]):
        list(stream)


def test_progress_counts_every_trajectory(processor, damaged):
    root, ids = damaged
    seen = []
    splitter = StepwiseTrajectorySplitter(processor, root, on_error="skip", padding="longest")
    splitter.split(ids, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 7) for n in range(1, 8)]


def test_the_processor_is_packed_once_for_many_tasks(processor, make_root):
    from shoal.core.sharing import Shared

    root, _ = make_root(1, steps=1, size=(60, 60))
    plan = StepwiseTrajectorySplitter(processor, root).plan
    shared = Shared(plan)
    first, second = pickle.dumps(shared), pickle.dumps(shared)
    assert len(first) < 1000
    assert first == second
    copies = [pickle.loads(first).get(), pickle.loads(second).get()]
    assert copies[0] is copies[1]
    assert copies[0].limits == plan.limits
    path = shared._packed[1].__self__
    assert os.path.exists(path)
    del shared
    assert not os.path.exists(path)


def test_bad_trajectories_are_named_with_file_and_remedy(processor, damaged):
    root, ids = damaged
    batch = StepwiseTrajectorySplitter(processor, root, on_error="skip", padding="longest").split(ids)
    assert ids[2] in batch.skipped[0].reason
    assert "final_messages.json is not valid JSON" in batch.skipped[0].reason
    assert "image_0001.png is missing; restore it" in batch.skipped[1].reason


def write(root, name, **files):
    for file, content in files.items():
        (root / name / f"{file}.json").write_text(json.dumps(content))


def text(role, words):
    return {"role": role, "content": [{"type": "text", "text": words}]}


def picture(reference):
    return {
        "role": "user",
        "content": [{"type": "text", "text": "go"}, {"type": "image_url", "image_url": reference}],
    }


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
    write(root, ids[0], final_messages=messages)
    with pytest.raises(DataError, match=message) as caught:
        StepwiseTrajectorySplitter(processor, root).split(ids)
    assert ids[0] in str(caught.value)
    batch = StepwiseTrajectorySplitter(processor, root, on_error="skip", padding="longest").split(ids)
    assert batch["dataset_ids"].tolist() == [ids[1]]


def test_missing_files_and_odd_names_are_refused(processor, make_root):
    root, ids = make_root(1, steps=1, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root)
    for name, message in (("nobody", "final_messages.json is missing"), ("../x", "dataset name must be")):
        with pytest.raises(DataError, match=message):
            splitter.split([name])
    (root / ids[0] / "task_config.json").unlink()
    with pytest.raises(DataError, match=r"task_config\.json is missing"):
        splitter.split(ids)


def test_symbolic_links_do_not_lead_out_of_the_folder(processor, make_root, tmp_path):
    root, ids = make_root(1, steps=1, size=(60, 60))
    shutil.move(root / ids[0] / "image_0000.png", tmp_path / "elsewhere.png")
    (root / ids[0] / "image_0000.png").symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(DataError, match="leaves"):
        StepwiseTrajectorySplitter(processor, root).split(ids)


def bomb(path, width, height):
    """A PNG of a few bytes whose header promises more pixels than it has."""
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


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
    batch = splitter.split(
        ids, [1e39, 10**400, 3.0]
    )  # float32, as rewards are kept, would make infinity of them
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
    """It would be left out for good: a lot that is there is not split again."""
    from PIL import Image

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


class Killed(FolderReader):
    def read(self, dataset_id, path=None):
        if dataset_id == "gui_001_run0" and not (self.root / "killed").exists():
            (self.root / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(dataset_id, path)


@pytest.mark.slow
def test_a_process_that_was_killed_costs_time_and_no_trajectory(processor, make_root):
    root, ids = make_root(3, steps=1, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root, reader=Killed(root), padding="longest")
    with make_executor("process", 1) as executor:
        batch = splitter.split(ids, executor=executor)
    assert (root / "killed").exists()
    assert_same_batches(batch, StepwiseTrajectorySplitter(processor, root, padding="longest").split(ids))


class Doomed(ProcessExecutor):
    """Runs tasks in this process; those that `kills` names break the pool, as a bad image may."""

    def __init__(self, kills):
        super().__init__(1)
        self.kills, self.broken = kills, False

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.broken = self.broken or self.kills(*args)
        if self.broken:
            future.set_exception(BrokenProcessPool("terminated abruptly"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future

    def renew(self):
        self.broken = False


def test_a_recording_that_ends_each_worker_is_refused_and_no_other_blamed(processor, make_root):
    root, ids = make_root(4, steps=1, size=(60, 60))
    splitter = StepwiseTrajectorySplitter(processor, root, on_error="skip", padding="longest")
    deadly = Doomed(lambda *items: any(job.dataset_id == ids[2] for _, job, _ in items))
    batch = splitter.split(ids, executor=deadly)
    assert batch["dataset_ids"].tolist() == [ids[0], ids[1], ids[3]]
    assert [item.dataset_id for item in batch.skipped] == [ids[2]]
    assert (
        "ended its worker each time that it was split alone (terminated abruptly)" in batch.skipped[0].reason
    )
    with pytest.raises(BrokenProcessPool):  # where no process can live, no recording is blamed
        splitter.split(ids, executor=Doomed(lambda *items: True))
