import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from shoal.core import sharing
from shoal.core.sharing import Shared


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


def test_references_can_be_passed_on_and_only_a_few_values_are_kept():
    kept = [Shared(number) for number in range(sharing.KEPT + 3)]
    copies = [pickle.loads(pickle.dumps(shared)) for shared in kept]
    assert [copy.get() for copy in copies] == list(range(len(kept)))
    assert [pickle.loads(pickle.dumps(copy)).get() for copy in copies] == list(range(len(kept)))
    assert len(sharing._resolved) == sharing.KEPT


def test_no_file_is_left_when_the_process_ends():
    code = (
        "import pickle\nfrom shoal.core.sharing import Shared\n"
        "kept = Shared([1])\npickle.dumps(kept)\nprint(kept._load.path)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip()
    assert not os.path.exists(out.stdout.strip())
