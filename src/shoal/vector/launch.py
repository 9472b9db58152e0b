"""Starting, watching and ending worker processes, from the caller's side."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from shoal.core.errors import ConfigError, WorkerDiedError
from shoal.vector import worker
from shoal.vector.channel import Channel, ChannelClosedError, dumps
from shoal.vector.failures import Failure, describe_exit
from shoal.vector.sending import pickled
from shoal.vector.share import EnvFn
from shoal.vector.starter import Zygote
from shoal.vector.waiting import SLICE
from shoal.vector.zygote import die_with_parent, kill_group

StartMethod = Literal["forkserver", "spawn", "fork"]
START_METHODS = ("forkserver", "spawn", "fork")
TOO_MANY_FILES = (
    "too many open files: each worker needs 4 descriptors and each lane 1; raise the limit (ulimit -n) or use "
    "fewer workers (num_workers=)"
)


class WorkerProcess:
    """One worker as its caller sees it.

    Args:
        lanes: for each lane its first env and the functions that make its envs.
        method: how the process comes to be.
    """

    def __init__(self, lanes: Sequence[tuple[int, Sequence[EnvFn]]], method: StartMethod) -> None:
        self.lanes, self.method = list(lanes), method
        self.owner = os.getpid()
        self.generation = 0
        self.pid = -1
        self.exit_code: int | None = None
        self.gone = True
        self._stack: list[int] = []

    def start(self) -> None:
        """Start the process and send it its environments; `describe` tells whether they could be made."""
        self.generation += 1
        self.exit_code, self.gone = None, False
        ours, theirs = socket_pair()
        self.channel = Channel(ours, SLICE)
        try:
            self.log = os.memfd_create("shoal-worker-log", os.MFD_CLOEXEC)
        except OSError as error:
            ours.close()
            theirs.close()
            raise _files(error) from error
        try:
            if self.method == "fork":
                self.pid = self._fork(theirs)
                self.zygote = None
            else:
                self.zygote = Zygote.running()
                request = {"do": "start", "method": self.method}
                self.pid = int(self.zygote.ask(request, [theirs.fileno(), self.log])["pid"])
            self.pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            self.gone = True
            ours.close()
            os.close(self.log)
            if self.pid > 0:
                kill_group(self.pid)
            raise _files(error) from error
        finally:
            theirs.close()
        self._poll = select.poll()
        self._poll.register(self.pidfd, select.POLLIN)
        setup = worker.Setup(
            list(sys.path),
            os.getcwd(),
            dict(os.environ),
            list(sys.argv),
            [(first, pickled(fns)) for first, fns in self.lanes],
            os.getpid(),
        )
        with contextlib.suppress(ChannelClosedError, WorkerDiedError):  # `describe` finds out and tells
            self.channel.send(dumps(setup), self.check)

    def _fork(self, theirs: socket.socket) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            if threading.current_thread() is threading.main_thread():
                die_with_parent()  # the kernel means the parent's thread, so only where that one stays
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            worker.watch_parent(parent)
            descriptor, log = os.dup(theirs.fileno()), os.dup(self.log)
            code = worker.main(descriptor, log)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def describe(self) -> list[worker.About]:
        """What the worker says of its environments; raises the failure when one could not be made."""
        answer = self.receive()
        if isinstance(answer, Failure):
            from shoal.vector.failures import error_of

            raise error_of(answer)
        abouts: list[worker.About] = answer
        return abouts

    def receive(self) -> Any:
        """The next message on the control channel."""
        try:
            return self.channel.receive(self.check)
        except ChannelClosedError:
            self.check_soon()
            raise WorkerDiedError(self.epitaph()) from None

    def attach(self, attach: worker.Attach, block: int, sockets: Sequence[socket.socket]) -> None:
        """Hand over the shared block and the sockets of its lanes."""
        try:
            self.channel.send(dumps(attach), self.check)
            self.channel.sock.settimeout(None)
            descriptors = [block, *[item.fileno() for item in sockets]]
            socket.send_fds(self.channel.sock, [b"f"], descriptors)
            self.channel.sock.settimeout(SLICE)
        except (ChannelClosedError, BrokenPipeError, ConnectionResetError):
            self.check_soon()
            raise WorkerDiedError(self.epitaph()) from None

    def alive(self) -> bool:
        """Whether the process runs."""
        return not self.gone and not self._poll.poll(0)

    def check(self) -> None:
        """Raise `WorkerDiedError` when the process is gone."""
        if not self.alive():
            raise WorkerDiedError(self.epitaph())

    def check_soon(self, seconds: float = 1.0) -> None:
        """Give a process that closed its channel a moment to be gone, then make sure that it is."""
        if not self.gone and not self._poll.poll(seconds * 1000):
            self.kill()

    def epitaph(self) -> str:
        """How the worker ended, in a line, with what it left in its log."""
        self.reap()
        envs = f"{self.lanes[0][0]}-{self.lanes[-1][0] + len(self.lanes[-1][1]) - 1}"
        return f"worker {self.pid} of environments {envs} {describe_exit(self.exit_code)}" + (
            f"\n{text}" if (text := self.log_text()) else ""
        )

    def log_text(self) -> str:
        """What faulthandler wrote: the stack at a crash, or on request."""
        if self.gone and self.log < 0:
            return ""
        size = os.fstat(self.log).st_size
        return os.pread(self.log, min(size, 65536), 0).decode("utf-8", "replace").strip()

    def stack(self) -> str:
        """Where its threads are now; works on a worker that hangs."""
        os.ftruncate(self.log, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, worker.STACK_SIGNAL)
        end = time.monotonic() + 0.3
        while time.monotonic() < end and not self.log_text():
            time.sleep(0.005)
        time.sleep(0.01)
        return self.log_text()

    def rss(self) -> int:
        """Its resident memory in bytes."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        """Kill it and what its environments started, and wait until it is gone."""
        if self.gone or os.getpid() != self.owner:
            return
        kill_group(self.pid)
        self.reap()

    def reap(self) -> None:
        """Wait for a process that is ending and take its exit code."""
        if self.gone and self.exit_code is not None:
            return
        if self.exit_code is None:
            try:
                if self.zygote is not None:
                    code = self.zygote.ask({"do": "reap", "pid": self.pid, "wait": True})["code"]
                else:
                    code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (WorkerDiedError, ChildProcessError):
                code = -signal.SIGKILL  # its parent is gone, and took it along
            self.exit_code = code
        self.gone = True

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so many seconds."""
        return self.gone or bool(self._poll.poll(max(0.0, seconds) * 1000))

    def release(self) -> None:
        """Give the descriptors back, once it is gone."""
        if self.pid > 0 and self.log >= 0:
            self.channel.close()
            os.close(self.log)
            os.close(self.pidfd)
            self.log = -1
            self.pid = -1


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets.

    Raises:
        ConfigError: when too many files are open.
    """
    try:
        return socket.socketpair()
    except OSError as error:
        raise _files(error) from error


def _files(error: OSError) -> Exception:
    return ConfigError(TOO_MANY_FILES) if error.errno in (errno.EMFILE, errno.ENFILE) else error
