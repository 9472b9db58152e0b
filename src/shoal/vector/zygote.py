"""A small process that starts workers: it has one thread and the imports done, so forking it is safe and fast.

It dies with its parent whatever the signal, and takes the workers along. Run by `Zygote` of `starter.py`;
nothing of the user's main script is imported, so scripts need no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
LOOK = 0.5
"""Seconds between looks at whether the parent still lives."""


def main(descriptor: int) -> None:
    """Serve `start` and `reap` requests until the parent is gone."""
    import gymnasium
    import numpy

    import shoal.vector.worker  # noqa: F401  (imported here once, not in every worker)

    del gymnasium, numpy
    parent = os.getppid()
    link = socket.socket(fileno=descriptor)
    children: set[int] = set()
    try:
        link.send(b"ready")
        while os.getppid() == parent:
            if not select.select([link], [], [], LOOK)[0]:
                continue
            request, descriptors = _receive(link)
            if request is None:
                break
            if request["do"] == "start":
                answer: dict[str, Any] = {"number": request["number"]}
                try:
                    answer["pid"] = pid = _start(link, request, descriptors)
                    children.add(pid)
                except OSError as error:  # no more processes just now, say: those that run go on
                    answer["error"] = str(error)
                for item in descriptors:
                    os.close(item)
                link.send(json.dumps(answer).encode())
            else:
                code = _reap(int(request["pid"]), bool(request["wait"]))
                if code is not None:
                    children.discard(int(request["pid"]))
                link.send(json.dumps({"code": code, "number": request["number"]}).encode())
    finally:
        for pid in children:
            kill_group(pid)


def _receive(link: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    data, ancillary, _, _ = link.recvmsg(65536, socket.CMSG_SPACE(16 * 4))
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return (json.loads(data) if data else None), list(descriptors)


def _start(link: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    module, _, function = request.get("entry", "shoal.vector.worker:main").partition(":")
    if request["method"] != "spawn":
        work = getattr(importlib.import_module(module), function)  # before the fork: the next one has it too
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        link.close()
        os.setpgid(0, 0)
        die_with_parent()
        channel, log = descriptors
        if request["method"] == "spawn":
            for item in (channel, log):
                os.set_inheritable(item, True)
            program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function} as main; "
            program += f"main({channel}, {log})"
            os.execv(sys.executable, [sys.executable, "-c", program])
        code = work(channel, log)
    except BaseException:  # whatever it is must not go on as a second zygote
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reap(pid: int, wait: bool) -> int | None:
    try:
        found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if found else None


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends, even if it hangs in C code."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def kill_group(pid: int) -> None:
    """Kill a worker and the processes its environments started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
