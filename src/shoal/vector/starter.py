"""The caller's end of the small process that starts its workers."""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import WorkerDiedError
from shoal.vector.failures import describe_exit


class Zygote:
    """The process of this one that forks its workers; started when first needed, shared by all pools."""

    _current: Zygote | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Reentrant, with numbered answers: a garbage collection inside `ask` may close another pool.
        self.lock = threading.RLock()
        self._asked = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from shoal.vector.zygote import main; main({number})"
        )
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,  # a Ctrl-C in the terminal is the caller's to handle
            )
        except OSError:
            self.link.close()
            raise
        finally:
            theirs.close()
        # Finalizers run newest first at exit, so the pools, which need this process to end theirs, go before.
        weakref.finalize(self, _end_zygote, self.link, self.process, self.owner)
        self.link.settimeout(60.0)
        if self.link.recv(64) != b"ready":
            raise WorkerDiedError(
                f"the process that starts workers {describe_exit(self.process.wait())}; its message is on stderr"
            )

    @classmethod
    def running(cls) -> Zygote:
        """The zygote of this process, alive."""
        with cls._lock:
            current = cls._current
            if current is None or current.owner != os.getpid() or current.process.poll() is not None:
                if current is not None:
                    current.link.close()
                current = cls._current = Zygote()
            return current

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send one request and return its answer."""
        with self.lock:
            self._asked += 1
            number = self._asked
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                data = json.dumps({**request, "number": number}).encode()
                self.link.sendmsg([data], rights if descriptors else [])
                while number not in self._answers:
                    data = self.link.recv(4096)
                    if not data:
                        raise WorkerDiedError("the process that starts workers is gone")
                    answer = json.loads(data)
                    self._answers[answer["number"]] = answer
            except OSError as error:
                raise WorkerDiedError(f"the process that starts workers is gone ({error})") from error
            answer = self._answers.pop(number)
            if "error" in answer:
                raise WorkerDiedError(f"a worker process could not be started: {answer['error']}")
            return answer


def _end_zygote(link: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        link.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
