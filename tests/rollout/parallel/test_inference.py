import contextlib
import gc
import os
import pickle
import queue
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest
from tests.rollout.doubles import HashEngine

from shoal.core.errors import EngineError
from shoal.rollout.parallel import server, transport
from shoal.rollout.parallel.server import SharedLLMInferenceManager
from shoal.rollout.parallel.transport import (
    BRIEF,
    HEADER,
    READ,
    Address,
    Ask,
    Connections,
    Frames,
    Hello,
    LinkLostError,
    SocketLink,
    decode_request,
    frame,
)
from shoal.rollout.samplers.sampler import Completion, Key, Request, Sampling


def request(member=0, turn=0, length=20):
    return Request(tuple(range(length)), Key(1, 0, 0, member, turn), Sampling(16, 1.0, ("</action>",)))


@pytest.fixture
def shared():
    with SharedLLMInferenceManager(HashEngine()) as manager:
        yield manager


def test_many_askers_over_one_socket_each_get_their_own_answers(shared):
    expected = {m: HashEngine().generate([request(m, t) for t in range(30)]) for m in range(8)}
    link = SocketLink(shared.serve())
    found = {}

    def ask(member):
        found[member] = [link.generate([request(member, turn)])[0] for turn in range(30)]

    threads = [threading.Thread(target=ask, args=(m,)) for m in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    link.close()
    assert found == expected
    assert shared.statistics.requests == 240


def test_several_requests_are_answered_in_order(shared):
    link = SocketLink(shared.serve())
    requests = [request(m, length=1 + 500 * m) for m in range(20)]
    assert link.generate(requests) == HashEngine().generate(requests) == shared.generate(requests)
    assert link.generate([]) == []
    link.close()


def test_requests_leave_nothing_to_the_garbage_collector(shared):
    link = SocketLink(shared.serve())
    link.generate([request()])
    gc.collect()
    gc.disable()  # what is part of a cycle stays until somebody collects
    try:
        for turn in range(100):
            link.generate([request(turn=turn)])
            shared.generate([request(turn=turn)])
        assert gc.collect() < 100
    finally:
        gc.enable()
        link.close()


def test_the_socket_is_for_this_user_alone(shared):
    path = shared.serve().path
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    shared.close()
    assert not os.path.exists(os.path.dirname(path))


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/shoal-evil-marker", "w"))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        HEADER.pack(2**32 - 1) + b"x",
        HEADER.pack(5) + b"\x00\x01\x02\x03\x04",
        HEADER.pack(len(pickle.dumps(Evil()))) + pickle.dumps(Evil()),
        frame(Hello(b"guess", 0)),
        frame(Ask(0, request())),  # without an introduction
    ],
    ids=["garbage", "4 GiB", "nonsense", "pickle", "wrong secret", "no secret"],
)
def test_a_forged_client_is_cut_off_and_others_go_on(shared, data):
    address = shared.serve()
    good = SocketLink(address)
    with socket.socket(socket.AF_UNIX) as forged:
        forged.connect(address.path)
        forged.sendall(data)
        forged.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert forged.recv(100) == b""
    assert good.generate([request()]) == HashEngine().generate([request()])
    good.close()
    assert not os.path.exists("/tmp/shoal-evil-marker")


def test_whoever_has_its_answer_lets_another_one_read():
    gate, found, threads = threading.Semaphore(0), {}, []
    with SharedLLMInferenceManager(HashEngine(lambda _: gate.acquire()), max_batch=1) as manager:
        link = SocketLink(manager.serve())

        def ask(member):
            found[member] = link.generate([request(member)], timeout=60)

        for member in range(3):  # the first one reads, the others sleep
            threads.append(threading.Thread(target=ask, args=(member,), daemon=True))
            threads[-1].start()
            while (
                not link._reading.locked()
                or sum(c.bell is not None for c in [*link._calls.values()]) < member
            ):
                time.sleep(0.001)
        for thread in threads:
            gate.release()
            thread.join()
        link.close()
    assert found == {member: HashEngine().generate([request(member)]) for member in range(3)}


def test_half_a_frame_holds_up_nobody(shared):
    address = shared.serve()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(address.path)
        slow.sendall(frame(Hello(address.token, 1)) + frame(Ask(0, request()))[:-3])
        good = SocketLink(address)
        assert good.generate([request()], timeout=60)
        good.close()


@pytest.mark.parametrize("part", ["nothing", "half an introduction", "half a request"])
def test_a_connection_that_does_not_end_its_message_is_ended_and_one_that_is_silent_is_not(
    shared, monkeypatch, part
):
    address = shared.serve()
    hello = frame(Hello(address.token, 1))
    begun = {"half an introduction": hello[:-3], "half a request": hello + frame(Ask(0, request()))[:-3]}
    good = SocketLink(address)
    assert good.generate([request()]) == HashEngine().generate([request()])
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(60)
        slow.connect(address.path)
        slow.sendall(begun.get(part, b""))
        monkeypatch.setattr(transport, "MESSAGE_SECONDS", 0.1)
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(100) == b""
    assert good.generate([request(1)]) == HashEngine().generate([request(1)])
    good.close()


def test_thousands_of_connections_are_refused_beyond_the_limit(shared, monkeypatch):
    monkeypatch.setattr("shoal.rollout.parallel.transport.MAX_CONNECTIONS", 20)
    address = shared.serve()
    good = SocketLink(address)
    good.generate([request()])
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for sock in crowd:
        sock.connect(address.path)
    assert good.generate([request()], timeout=60)
    assert shared.statistics.refused_connections >= 80
    for sock in crowd:
        sock.close()
    good.close()


SILENT = """
import sys, time
from shoal.rollout.parallel.transport import Address, SocketLink
link = SocketLink(Address(sys.argv[1], bytes.fromhex(sys.argv[2]), float(sys.argv[3]) or None))
print("connected", flush=True)
time.sleep(60)
"""


@pytest.mark.flaky(reruns=2)
def test_a_worker_without_signs_of_life_is_killed_and_one_with_them_is_not():
    with SharedLLMInferenceManager(HashEngine(), silence=2.0) as manager:
        address = manager.serve()
        assert address.beat == 0.5
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", SILENT, address.path, address.token.hex(), str(beat)],
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for beat in (0, 0.5)
        ]
        for worker in workers:
            assert worker.stdout.readline() == b"connected\n"
        assert workers[0].wait(60) == -signal.SIGKILL
        time.sleep(2.5)
        assert workers[1].poll() is None
        workers[1].kill()
        for worker in workers:
            worker.communicate()


def test_frames_may_come_in_any_pieces():
    data = b"".join(frame(Ask(n, request(n, length=n))) for n in range(1, 40))
    whole = list(Frames(decode_request).feed(data))
    frames = Frames(decode_request)
    piecewise = [m for k in range(0, len(data), 7) for m in frames.feed(data[k : k + 7])]
    assert piecewise == whole
    assert len(whole) == 39
    assert not frames.partial
    assert isinstance(frames, Frames)


def test_a_connection_that_floods_is_read_no_further(shared):
    gate = threading.Semaphore(0)
    engine = HashEngine(lambda _: gate.acquire(timeout=60))
    with SharedLLMInferenceManager(engine, max_pending=8, max_batch=4, schedule="greedy") as manager:
        flood, other = SocketLink(manager.serve(), 1), SocketLink(manager.serve(), 2)
        done = threading.Event()

        def ask():
            many = tuple(range(2**33, 2**33 + 1000))  # of nine bytes each
            flood.generate([Request(many, Key(1, 0, 0, 0, turn)) for turn in range(80)])
            done.set()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        while all(c.events & READ for c in list(manager._connections._by_descriptor.values())):
            time.sleep(0.01)
        gate.release(3)
        other.generate([request(5)], timeout=50)
        assert not done.is_set()  # its turn came although eighty were there before it
        gate.release(100)
        assert done.wait(200)
        thread.join()
        flood.close()
        other.close()


def test_a_long_answer_is_sent_as_fast_as_it_is_read():
    class Wordy(HashEngine):
        vocabulary = 1_000_000

        def generate(self, requests):
            return [Completion(tuple(range(1_000_000)), (0.0,) * 1_000_000, "stop", 0) for _ in requests]

    with SharedLLMInferenceManager(Wordy()) as manager:
        link = SocketLink(manager.serve())
        # A second for each buffer's worth would take longer:
        asked = [Request((1, 2, 3), Key(1, 0, 0, member, 0), Sampling(1_000_000)) for member in range(6)]
        answers = link.generate(asked, timeout=200)
        assert [len(answer.token_ids) for answer in answers] == [1_000_000] * 6
        link.close()


def test_a_hung_engine_is_left_behind_and_restarted():
    release = threading.Event()

    with SharedLLMInferenceManager(
        HashEngine(lambda _: release.wait(60)), engine_timeout=1.0, restart=HashEngine
    ) as manager:
        assert manager.generate([request()]) == HashEngine().generate([request()])
        assert manager.statistics.restarts == 1
        release.set()
        time.sleep(0.1)  # the late answer of the old one must not be delivered
        assert manager.generate([request(1)]) == HashEngine().generate([request(1)])


def test_a_hung_engine_without_a_spare_refuses_everybody():
    release = threading.Event()

    with SharedLLMInferenceManager(
        HashEngine(lambda _: release.wait(60)), engine_timeout=0.3, retries=0
    ) as manager:
        with pytest.raises(TimeoutError, match="did not answer within 0.3 s"):
            manager.generate([request()])
        with pytest.raises(EngineError, match="the engine hangs"):
            manager.generate([request()])
        release.set()


def test_a_crashed_engine_is_replaced():
    def crash(_):
        raise MemoryError("out of it")

    with SharedLLMInferenceManager(HashEngine(crash), restart=HashEngine) as manager:
        assert manager.generate([request()]) == HashEngine().generate([request()])
    with (
        SharedLLMInferenceManager(HashEngine(crash), retries=0) as manager,
        pytest.raises(EngineError, match="the engine failed: MemoryError: out of it"),
    ):
        manager.generate([request()])


def test_one_request_that_cannot_be_answered_fails_alone():
    def pick(requests):
        if any(r.key.member == 5 for r in requests):
            raise EngineError("not this one")

    with SharedLLMInferenceManager(HashEngine(pick)) as manager:
        results = manager.generate_each([request(m) for m in range(16)])
    assert [isinstance(r, EngineError) for r in results] == [m == 5 for m in range(16)]


def test_a_request_that_waits_too_long_is_refused():
    release = threading.Event()
    engine = HashEngine(lambda requests: requests[0].key.member and release.wait(60))
    with SharedLLMInferenceManager(engine, max_batch=1, request_timeout=1.2) as manager:
        results = manager.generate_each([request(m) for m in range(12)])
        release.set()
    assert not isinstance(results[0], Exception)
    assert [type(result) for result in results[1:]] == [TimeoutError] * 11


@pytest.mark.parametrize("n", [1, 2])
def test_an_asker_of_an_engine_that_hangs_waits_no_longer_than_it_said(n):
    released = threading.Event()
    with SharedLLMInferenceManager(HashEngine(lambda _: released.wait())) as shared:
        link = SocketLink(shared.serve())
        for _ in range(2):
            with pytest.raises(TimeoutError, match="did not answer in time"):
                link.generate([request(m) for m in range(n)], timeout=0.05)
        released.set()
        assert link.generate([request(5)] * n) == HashEngine().generate([request(5)] * n)
        link.close()


def test_an_asker_notices_that_the_engine_is_gone(shared):
    link = SocketLink(shared.serve())
    link.generate([request()])
    shared.close()
    with pytest.raises(EngineError, match="gone|ended"):
        link.generate([request()])
    link.close()
    with pytest.raises(EngineError, match="closed"):
        shared.generate([request()])
    with pytest.raises(OSError, match="No such file"):
        SocketLink(Address("/nowhere/engine", b""))
    with pytest.raises(
        LinkLostError, match="gone .*No such file"
    ):  # a worker that comes too late is no failure
        Address("/nowhere/engine", b"").connect(0)


def test_uid_of_the_peer_is_checked(shared, monkeypatch):
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(shared.serve().path)
        stranger.settimeout(60)
        assert stranger.recv(10) == b""
    assert struct.calcsize("3i") == 12


def test_answers_are_sent_before_it_is_decided_whether_it_pays_to_wait(monkeypatch):
    class Slow(HashEngine):
        def generate(self, requests):
            time.sleep(0.01 + 0.001 * len(requests))
            return super().generate(requests)

    launched, launch = [], SharedLLMInferenceManager._launch

    def seen(self, batch, now):
        launched.append((self._batcher.pace.pays, len(self._done)))
        launch(self, batch, now)

    monkeypatch.setattr(SharedLLMInferenceManager, "_launch", seen)
    with SharedLLMInferenceManager(Slow(), schedule="adaptive") as shared:

        def ask(member):
            for turn in range(20):
                time.sleep(0.002 * (member * (turn + 1) % 5))
                shared.generate([request(member, turn)])

        threads = [threading.Thread(target=ask, args=(member,)) for member in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(pays for pays, _ in launched) > 10
    assert {unsent for pays, unsent in launched if pays} == {0}


def test_what_came_too_late_is_told_over_the_socket_as_soon_as_it_is(monkeypatch):
    monkeypatch.setattr(server, "SWEEP_SECONDS", 1000)  # nothing else wakes who sends
    go = threading.Event()
    engine = HashEngine(lambda _: go.wait(60))
    with SharedLLMInferenceManager(engine, request_timeout=0.3) as manager:
        link = SocketLink(manager.serve())
        told = queue.SimpleQueue()

        def ask():
            try:
                told.put(link.generate([request()]))
            except Exception as error:
                told.put(error)

        threading.Thread(target=ask, daemon=True).start()
        try:
            error = told.get(timeout=60)
        finally:
            go.set()
        assert isinstance(error, TimeoutError)
        assert "no answer within 0.3 s" in str(error)
        link.close()


class Scripted:
    """In the place of an epoll and of the clock: (seconds that a poll lasts, what it finds)."""

    def __init__(self):
        self.now, self.waits, self.script = 0.0, [], []

    def perf_counter(self):
        return self.now

    def poll(self, wait):
        self.waits.append(wait)
        seconds, found = self.script.pop(0)
        self.now += seconds
        return found


def test_a_wait_after_a_brief_one_begins_without_sleep(monkeypatch):
    connections = Connections(print, print, bool)
    stranger, bell = [(10**6, READ)], [(connections._bell, READ)]
    scripted = Scripted()
    monkeypatch.setattr(transport, "time", scripted)
    epoll, connections._epoll = connections._epoll, scripted

    def waits(wait, awake, *script):
        scripted.waits, scripted.script = [], list(script)
        connections.look(wait, awake)
        assert not scripted.script
        return scripted.waits

    assert waits(None, True, (0, stranger)) == [None]  # nothing is known yet
    assert waits(None, True, (0, []), (0, stranger)) == [0, 0]
    assert waits(None, True, (2 * BRIEF, []), (0, stranger)) == [0, None]  # in vain: it was not brief
    assert waits(None, True, (0, stranger)) == [None]
    assert waits(2 * BRIEF, True, (0, stranger)) == [0]
    assert waits(BRIEF, True, (0, stranger)) == [BRIEF]  # it ends as soon
    assert waits(0, True, (0, [])) == [0]
    assert waits(None, True, (0, stranger)) == [None]  # nothing came in the last one
    assert waits(None, False, (0, stranger)) == [None]
    assert waits(None, True, (0, bell)) == [0]
    assert waits(None, True, (0, stranger)) == [None]  # a thread of this process rang
    monkeypatch.setattr(connections, "_by_descriptor", dict.fromkeys((-1, -2)))
    assert waits(None, True, (0, stranger)) == [None]  # it was brief, but several are connected
    monkeypatch.undo()
    connections._epoll = epoll
    connections.close()


@pytest.mark.parametrize(
    ("pause", "timeout", "awake"), [(0.0, None, True), (0.0, 60, True), (0.002, None, False)]
)
def test_only_an_engine_that_answers_at_once_is_waited_for_awake(monkeypatch, pause, timeout, awake):
    class Engine(HashEngine):
        def generate(self, requests):
            time.sleep(pause)
            return super().generate(requests)

    monkeypatch.setattr(server, "QUICK", 0.001 if pause else 1.0)
    with SharedLLMInferenceManager(Engine(), engine_timeout=timeout) as manager:
        looks, look = [], manager._connections.look
        manager._connections.look = lambda wait, awake: (
            looks.append((awake, manager._running)),
            look(wait, awake),
        )
        link = SocketLink(manager.serve())
        for turn in range(40):
            link.generate([request(turn=turn)])
        link.close()
    assert any(stays for stays, _ in looks) == awake
    assert not any(stays for stays, running in looks if running is not None)
