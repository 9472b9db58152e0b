import multiprocessing
import sys
import threading
import weakref

import pytest
from tests.rooms.trace import Tracer

FILES = {
    "__init__.py": "",
    "entry.py": "from toytraced.middle import step\n\ndef begin(n):\n    return step(n)\n",
    "middle.py": "from toytraced.inner import add\n\ndef step(n):\n    return add(n)\n",
    "inner.py": "def add(n):\n    return n + 1\n\ndef unused():\n    pass\n",
    "other.py": "def other(n):\n    return n\n",
    "worker.py": (
        "import threading\nfrom toytraced.other import other\nfrom toytraced.inner import add\n\n"
        "def serve(pipe, install):\n"
        "    install()\n"
        "    while (n := pipe.recv()) is not None:\n"
        "        if n < 0:\n"
        "            thread = threading.Thread(target=add, args=(n,))\n"
        "            thread.start()\n            thread.join()\n"
        "        pipe.send(other(n))\n"
    ),
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    folder = tmp_path / "toytraced"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("toytraced")]:
        del sys.modules[name]


def test_only_what_is_passed_inside_the_piece_counts(toy, tmp_path):
    from toytraced.entry import begin
    from toytraced.other import other

    with Tracer("toytraced", tmp_path) as tracer:
        other(1)
        with tracer.piece() as first:
            begin(1)
        begin(1)
        with tracer.piece() as second:
            other(1)
            thread = threading.Thread(target=begin, args=(1,))
            thread.start()
            thread.join()
        with tracer.piece() as third:
            pass
    assert first.files() == {"entry.py", "middle.py", "inner.py"}
    assert first.files(leave_out=("entry", "mid")) == {"inner.py"}
    assert second.files() == {"entry.py", "middle.py", "inner.py", "other.py"}
    assert third.files() == set()
    assert {functions for functions in map(tuple, first.calls.values())} == {("begin",), ("step",), ("add",)}
    assert sys.getprofile() is None


def test_what_was_left_behind_before_a_piece_is_no_part_of_it(toy, tmp_path):
    from toytraced.entry import begin
    from toytraced.other import other

    class Left:
        def __init__(self):
            self.circle = self

    weakref.finalize(Left(), other, 1)
    with Tracer("toytraced", tmp_path) as tracer, tracer.piece() as passed:
        begin(1)
        kept = [[] for _ in range(10_000)]  # so many that garbage is looked for
    assert kept
    assert passed.files() == {"entry.py", "middle.py", "inner.py"}


def test_a_worker_that_installs_it_is_watched_with_its_threads_and_its_waiting_loop(toy, tmp_path):
    from toytraced.worker import serve

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with Tracer("toytraced", tmp_path) as tracer:
        process = context.Process(target=serve, args=(there, tracer.install))
        process.start()

        def ask(n):
            here.send(n)
            return here.recv()

        assert ask(1) == 1
        with tracer.piece() as quiet:
            ask(1)
        with tracer.piece() as threaded:
            ask(-1)
        here.send(None)
        process.join()
    assert quiet.processes() == {process.pid: {"worker.py", "other.py"}}
    assert threaded.processes() == {process.pid: {"worker.py", "other.py", "inner.py"}}


def test_what_is_given_to_a_worker_may_install_it_on_the_way(toy, tmp_path):
    from toytraced.other import other

    tracer = Tracer("toytraced", tmp_path)
    try:
        assert tracer.installed(other, n=3) == 3
        with tracer.piece() as passed:
            other(1)
    finally:
        tracer.__exit__()
    assert passed.files() == {"other.py"}
    with pytest.raises(ValueError, match="must be a package that can be imported, got 'nobody_has_it'"):
        Tracer("nobody_has_it", tmp_path)
