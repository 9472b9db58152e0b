"""Worker processes on the standard library: started without a main guard, ended with their parent.

A worker needs nothing of the program that starts it: what it runs is sent to it, `__main__` is never imported again.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker, util
from pathlib import Path
from typing import Any, Literal, get_args

import cloudpickle
import psutil

from shoal.core.errors import ConfigError, WorkerDiedError

StartMethod = Literal["forkserver", "spawn", "fork"]
START_METHODS: tuple[str, ...] = get_args(StartMethod)
PRELOAD = ["numpy", "gymnasium"]
"""Modules that the fork server imports once, so that its workers need not; a room adds those that its workers run."""
_STARTING = threading.RLock()


def portable() -> bool:
    """Whether to use only what every platform has: not on Linux, or asked for by `SHOAL_PORTABLE=1`."""
    return not sys.platform.startswith("linux") or os.environ.get("SHOAL_PORTABLE") == "1"


def default_start_method() -> StartMethod:
    """`forkserver` on Linux, `spawn` elsewhere."""
    return "spawn" if portable() else "forkserver"


def dumps(value: Any) -> bytes:
    """A pickle that other processes can load: lambdas and what was defined in `__main__` go by value."""
    return cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


class RemoteTraceback(Exception):  # noqa: N818  (named like the standard library's, shown as a cause)
    """The traceback of a worker as text, chained as the cause of what the caller sees."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def describe_exit(code: int | None) -> str:
    """A description of an exit code.

    >>> describe_exit(3), describe_exit(-9)
    ('exited with code 3', 'was killed by SIGKILL')
    """
    if code is None:
        return "is gone"
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


@contextlib.contextmanager
def explain_file_limit() -> Iterator[None]:
    """A `ConfigError` that says what to do where too many files are open."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ConfigError(
                "too many open files: each worker process needs about 4; raise the limit (ulimit -n) or use fewer "
                "workers (num_workers=)"
            ) from error
        raise


# --- what a worker takes over from its caller
def process_state() -> dict[str, Any]:
    """The present search path, arguments, environment, folder, warning filters and logging of this process."""
    folder = None
    with contextlib.suppress(OSError):  # it was removed
        folder = os.getcwd()
    root = logging.getLogger()
    formatter = root.handlers[0].formatter if root.handlers else None
    return {
        "path": [item for item in sys.path if isinstance(item, str)],
        "arguments": list(sys.argv),
        "environ": dict(os.environ),
        "folder": folder,
        "warnings": [rule for rule in warnings.filters if not _of_a_package(rule[2])],
        "logging": (root.level, getattr(formatter, "_fmt", None)) if root.handlers else None,
    }


def _of_a_package(category: Any) -> bool:
    """Whether to know a kind of warnings a worker would have to import an installed package, such as torch.

    Such a package sets its filters again where it is imported.
    """
    name = category.__module__.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name not in PRELOAD and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def apply_process_state(state: dict[str, Any]) -> None:
    """Take over what `process_state` gave in another process."""
    sys.path[:], sys.argv[:] = state["path"], state["arguments"]
    os.environ.clear()
    os.environ.update(state["environ"])
    if state["folder"] is not None:
        with contextlib.suppress(OSError):
            os.chdir(state["folder"])
    warnings.filters[:] = state["warnings"]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    if state["logging"] is not None:
        level, form = state["logging"]
        logging.basicConfig(level=level, format=form, force=True)


# --- the caller's side
class WorkerProcess:
    """A process that runs `target(pipe, *args)`, and this side of the pipe.

    It ends with its parent, takes over the parent's present folder, environment and search path, and its Ctrl-C is
    the parent's to handle. Nothing but `kill` and `wait` is needed to end it.

    Args:
        target: an importable function; its first argument is the worker's side of the pipe.
        args: what else it gets; anything that `multiprocessing` can hand to a process.
        method: how the process is started; None for the platform's best.
        state: what it takes over, from `process_state`; the present one if None.

    Raises:
        ConfigError: when too many files are open.
        WorkerDiedError: when no process can be started.
    """

    def __init__(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        method: StartMethod | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        method = method or default_start_method()
        context: Any = multiprocessing.get_context(method)
        taken_over = dumps(process_state() if state is None else state)
        with explain_file_limit():
            # One tracker for all: that of a worker alone would remove shared memory at the worker's end.
            if os.name == "posix":
                resource_tracker.ensure_running()
            self.pipe, theirs = context.Pipe()
            self._stacks, log = context.Pipe(duplex=False)
            # Linux ends a process with the thread that started it, so only where that one stays.
            stays = method == "forkserver" or threading.current_thread() is threading.main_thread()
            self._process = context.Process(target=_main, args=(target, theirs, log, taken_over, stays, args))
            try:
                with _uninterrupted(), without_main():
                    if method == "forkserver":
                        _preload()
                    self._process.start()
                    self.pid: int = self._process.pid
                    self._end = util.Finalize(self, _end, (self._process, self.pid), exitpriority=10)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                raise WorkerDiedError(f"a worker process could not be started: {error}") from error
            finally:
                theirs.close()
                log.close()
        self.sentinel: int = self._process.sentinel
        self._log = b""
        self._code: int | None = None
        self._closed = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n if signal n killed it."""
        return self._code if self._closed else self._process.exitcode

    def alive(self) -> bool:
        """Whether it runs."""
        return not self._closed and bool(self._process.is_alive())

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ended within so many seconds."""
        if not self._closed:
            self._process.join(None if seconds is None else max(0.0, seconds))
        return not self.alive()

    def kill(self) -> None:
        """Kill it and the programs that it started, and wait for its end. Idempotent."""
        self._end()

    def close(self) -> None:
        """Kill it and close the pipes; may be called twice."""
        self.kill()
        self.pipe.close()
        self._stacks.close()
        if not self._closed:
            self._code, self._closed = self._process.exitcode, True
            self._process.close()

    def memory(self) -> int:
        """Its resident memory in bytes; 0 when it is gone."""
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0

    def ask_for_stack(self) -> None:
        """Have it write where its threads are, also when it hangs; `stack` reads it a moment later."""
        self.stack()
        self._log = b""
        if hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """The stacks of its threads at a crash, or when they were asked for."""
        with contextlib.suppress(OSError, EOFError):
            while self._stacks.poll(0) and (data := os.read(self._stacks.fileno(), 65536)):
                self._log += data
        return self._log.decode("utf-8", "replace").strip()


def ended_how(process: WorkerProcess | None) -> str:
    """How a process ended whose connection is gone."""
    if process is None or not process.wait(1.0):
        return "lost its connection"
    return describe_exit(process.exit_code)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Processes that are started meanwhile do not import the caller's main file."""
    main = sys.modules["__main__"]
    with _STARTING:
        file, spec = main.__dict__.pop("__file__", None), getattr(main, "__spec__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file


def _preload() -> None:
    """Name what the fork server shall import, unless the user did or it runs already."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._preload_modules == ["__main__"]:
        forkserver.set_forkserver_preload(PRELOAD)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: a process that has begun is known, and the fork server, which imports, does not see it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: Any, pid: int) -> None:
    with contextlib.suppress(ValueError):  # closed already
        if process.exitcode is None:
            kill_descendants(pid, itself=True)
        _kill_group(pid)
        process.join()


def kill_descendants(pid: int, *, itself: bool = False) -> None:
    """Kill all that a process started, also what is in a session of its own, and with `itself` the process first."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        doomed = [*([process] if itself else []), *process.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _kill_group(pid: int) -> None:
    """Kill what remains in the process group of a worker that ended by itself."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


# --- the worker's side
def _main(
    target: Callable[..., None], pipe: Any, log: Any, state: bytes, stays: bool, args: tuple[Any, ...]
) -> None:
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):
            os.setsid()  # Ctrl-C in the terminal is the caller's to handle
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # as its fork server has it
    faulthandler.enable(log.fileno(), all_threads=True)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, log.fileno(), all_threads=True, chain=False)
    _end_with_parent(stays)
    apply_process_state(pickle.loads(state))
    target(pipe, *args)


def _end_with_parent(stays: bool) -> None:
    """End when the process that started this one ends, whatever happened to it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    direct = os.getppid() == parent.pid  # else a fork server stands between
    linux = stays and not portable()
    if linux:  # also while it is stuck in C code
        die_with_parent()

    def watch() -> None:
        while not connection.wait([parent.sentinel], timeout=1.0):
            if direct and os.getppid() != parent.pid:
                break
        if linux:  # first what the environments started
            die_with_parent(0)
        kill_descendants(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="shoal-watch-parent").start()


def die_with_parent(number: int = 9) -> None:
    """Ask Linux to send this process a signal when the thread that started it ends; 0 for none."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, number)  # PR_SET_PDEATHSIG


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """The processes that can be looked at, each with the words of its command."""
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"]:
            yield process.pid, process.info["cmdline"]
