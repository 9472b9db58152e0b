import errno
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from shoal.core import sharing
from shoal.core.sharing import Shared, spill, spill_folder


def identity_in_worker(item):
    shared, number = item
    return os.getpid(), id(shared.get()), shared.get()["name"], number


def test_a_value_is_handed_over_by_reference_in_its_own_process():
    value = {"name": "x"}
    assert Shared(value).get() is value


def test_a_worker_unpacks_a_shared_value_once_for_all_tasks():
    shared = Shared({"name": "x"})
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        seen = list(executor.map(identity_in_worker, [(shared, number) for number in range(4)]))
    assert len({(pid, place) for pid, place, _, _ in seen}) == 1
    assert [number for *_, number in seen] == [0, 1, 2, 3]


def test_a_worker_does_not_load_again_what_equals_a_value_it_has():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        places = [
            executor.submit(identity_in_worker, (Shared({"name": name}), 0)).result()[1] for name in "xxyx"
        ]
    assert places[0] == places[1] == places[3] != places[2]


def test_references_can_be_passed_on_and_only_a_few_values_are_kept():
    kept = [Shared(number) for number in range(sharing.KEPT + 3)]
    copies = [pickle.loads(pickle.dumps(shared)) for shared in kept]
    assert [copy.get() for copy in copies] == list(range(len(kept)))
    assert [pickle.loads(pickle.dumps(copy)).get() for copy in copies] == list(range(len(kept)))
    assert len(sharing._resolved) == sharing.KEPT


def test_a_full_disk_keeps_no_part_of_a_value(tmp_path, monkeypatch):
    def full(descriptor, mode):
        os.write(descriptor, b"a part")
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    value = Shared("long")
    with monkeypatch.context() as patch:
        patch.setattr(sharing.os, "fdopen", full)
        with pytest.raises(OSError, match="no space left"):
            pickle.dumps(value)
    assert pickle.loads(pickle.dumps(value)).get() == "long"  # there is room again
    del value
    assert not list(tmp_path.iterdir())


def test_no_file_is_left_when_the_process_ends():
    code = (
        "import pickle\nfrom shoal.core.sharing import Shared\n"
        "kept = Shared([1])\npickle.dumps(kept)\nprint(kept._packed[1].__self__)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=200
    )
    assert out.stdout.strip()
    assert not os.path.exists(out.stdout.strip())


def test_arrays_that_were_spilled_come_back_equal_writable_and_leave_no_file(tmp_path):
    value = {
        "bytes": np.arange(100_001, dtype=np.uint8),
        "text": "as it is",
        "turned": np.arange(60_000, dtype=np.float64).reshape(300, 200).T,
        "empty": np.zeros((0, 3), np.int64),
        "strided": np.arange(1000)[::3],
    }
    spilled = spill(value, str(tmp_path))
    assert [path.stat().st_size >= 580_001 for path in tmp_path.iterdir()] == [True]
    back = pickle.loads(pickle.dumps(spilled)).fetched()
    assert list(tmp_path.iterdir()) == []
    assert back["text"] == "as it is"
    for name in ("bytes", "turned", "empty", "strided"):
        assert back[name].dtype == value[name].dtype
        assert np.array_equal(back[name], value[name])
    assert [back[name].ctypes.data % 64 for name in ("bytes", "turned")] == [0, 0]
    back["bytes"][0] = 7
    assert value["bytes"][0] == 0


def test_what_is_small_is_not_spilled(tmp_path):
    value = [np.zeros(10)]
    assert spill(value, str(tmp_path)) is value
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_in_the_spill_folder_is_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # no place in memory
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"shoal-spilled-{gone.pid}-x", f"shoal-spilled-{os.getpid()}-x", "shoal-spilled-mine-x"):
        (tmp_path / name).mkdir()
    (tmp_path / f"shoal-spilled-{gone.pid}-x" / "array").write_bytes(b"a part")
    with spill_folder() as folder:
        assert os.path.dirname(folder) == str(tmp_path)
        found = {*os.listdir(tmp_path)} - {os.path.basename(folder)}
        assert found == {f"shoal-spilled-{os.getpid()}-x", "shoal-spilled-mine-x"}
    assert {*os.listdir(tmp_path)} == found
