"""What a worker process of `WorkerExecutor` runs: one task after another, with signs of life meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback

import cloudpickle

from shoal.core.errors import WorkerError
from shoal.core.processes import Channel, ChannelClosedError
from shoal.rollout.parallel.env_calls import close_all
from shoal.rollout.parallel.env_shelf import KEPT

BEAT = 0.5
"""Seconds between a busy worker's signs of life."""


def main(descriptor: int, log: int) -> int:
    """Run tasks until the other side is gone; returns the exit code."""
    del log
    channel = Channel(socket.socket(fileno=descriptor))
    sys.setswitchinterval(5e-4)  # many short turns of many threads: none may hold the others up for 5 ms
    lock = threading.Lock()
    busy = threading.Event()
    threading.Thread(target=_beat, args=(channel, lock, busy), daemon=True).start()
    try:
        path, argv, environ, folder = channel.receive()
        sys.path[:], sys.argv[:] = path, argv
        os.environ.clear()
        os.environ.update(environ)
        with contextlib.suppress(OSError):
            os.chdir(folder)
        while True:
            task = channel.receive_bytes()
            busy.set()
            answer = _answer(task)
            busy.clear()
            with lock:
                channel.send(answer)
    except ChannelClosedError:
        return 0
    finally:
        close_all(KEPT.clear())


def _answer(task: bytes | bytearray) -> bytes:
    """The outcome of a task as bytes, whatever it is."""
    try:
        fn, args, kwargs = cloudpickle.loads(task)
        value = fn(*args, **kwargs)
        recycle = bool(getattr(value, "hung", 0))
        whole: bytes = cloudpickle.dumps((True, value, "", recycle), protocol=5)
        return whole
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        try:
            data: bytes = cloudpickle.dumps((False, error, trace, False), protocol=5)
            cloudpickle.loads(data)
        except BaseException:
            told = WorkerError(f"{type(error).__name__}: {error}")
            data = cloudpickle.dumps((False, told, trace, False), protocol=5)
        return data


def _beat(channel: Channel, lock: threading.Lock, busy: threading.Event) -> None:
    sign = cloudpickle.dumps(None)
    while True:
        busy.wait()
        time.sleep(BEAT)
        with lock:
            if busy.is_set():
                try:
                    channel.send(sign)
                except ChannelClosedError:
                    os._exit(0)
