"""The same batch from every executor, bad trajectories included."""

import pickle
import shutil
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter


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


@pytest.mark.parametrize("store", ["u8", "float32"])
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


class Elsewhere(Executor):
    """Any executor: a task and its result are packed as on their way to another process and back."""

    def __init__(self):
        self.tasks = 0

    def submit(self, fn, /, *args, **kwargs):
        self.tasks += 1
        fn, args = pickle.loads(pickle.dumps((fn, args)))
        future = Future()
        future.set_result(pickle.loads(pickle.dumps(fn(*args, **kwargs))))
        return future


def test_any_executor_gives_the_serial_batch_and_tells_of_progress(processor, make_root):
    root, ids = make_root(20, steps=1, size=(60, 60))
    shutil.rmtree(root / ids[13])
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
    seen, executor = [], Elsewhere()
    batch = splitter.split(ids, executor=executor, progress=lambda *counts: seen.append(counts))
    assert_same_batches(batch, splitter.split(ids))
    assert executor.tasks < len(ids)  # the processor travels with each task
    assert seen == [(n, 20) for n in range(1, 21)]


class OnAnotherMachine(Elsewhere):
    """Runs tasks where this folder is not."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def submit(self, fn, /, *args, **kwargs):
        away = self.folder.with_name("away")
        self.folder.rename(away)
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            away.rename(self.folder)


def test_recordings_that_are_here_alone_are_no_bad_recordings(processor, damaged):
    root, ids = damaged
    splitter = StepwiseTrajectorySplitter(processor, root, padding="longest", on_error="skip")
    with pytest.raises(ConfigError, match=f"{ids[0]}.*here it can be read.*must lie in a folder"):
        splitter.split(ids, executor=OnAnotherMachine(root))
    batch = splitter.split(ids, executor=Elsewhere())  # what is broken here too is left out
    assert [item.dataset_id for item in batch.skipped] == [ids[2], ids[5]]


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
