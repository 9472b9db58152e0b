"""Worker processes: forked from a small process without threads, talked to over sockets, ended with their parent.

Only shoal's own processes are at the ends of a `Channel`. Waiting goes on in slices with a look at the other side
between them, so nobody blocks for ever on a process that is gone. Needs Linux; importing this does not.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import itertools
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import cloudpickle

from shoal.core.errors import ConfigError, WorkerDiedError

StartMethod = Literal["forkserver", "spawn", "fork"]
START_METHODS = ("forkserver", "spawn", "fork")
SLICE = 0.1
"""Seconds between two looks whether the other side still lives."""
STANDSTILL = 1.0
"""Seconds that a wait lasts too long where the process itself stood still, as after Ctrl-Z; less is a busy machine."""
PARENT_LOOK = 0.5
"""Seconds between looks of a process without a better sign whether its parent lives."""
TOKEN = "SHOAL_WORKER"
"""Environment variable that every program started by a worker inherits: such programs end with the worker."""
PR_SET_PDEATHSIG = 1
MOST_DESCRIPTORS = 200
"""In one message; the kernel takes 253."""


def require_linux(feature: str) -> None:
    """Refuse what needs Linux where there is none.

    Raises:
        ConfigError: names what is missing and what to use instead.
    """
    needed = [(os, "memfd_create"), (os, "pidfd_open"), (os, "posix_fallocate"), (socket, "SOCK_SEQPACKET")]
    missing = [name for module, name in [*needed, (signal, "SIGRTMIN")] if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{feature} need Linux, and this is {sys.platform} without {', '.join(missing)}: use backend='serial' "
            f"or backend='thread'"
        )


def stack_signal() -> int:
    """Makes a worker write the stack of its threads into its log, whatever it is doing."""
    return signal.SIGRTMIN + 7


# --- messages
class ChannelClosedError(Exception):
    """The other side is gone."""


class Channel:
    """One end of a pair of sockets that carries frames with a length in front.

    Args:
        sock: the socket; it is owned from now on.
        slice_seconds: how long one system call may wait; None waits for ever (a worker's end: it is killed
            when its parent goes).
    """

    HEADER = struct.Struct("<Q")

    def __init__(self, sock: socket.socket, slice_seconds: float | None = None) -> None:
        sock.settimeout(slice_seconds)
        self.sock = sock
        self._header = bytearray(self.HEADER.size)
        self._frame: bytearray | None = None
        self._filled: list[int] = []
        self._going = memoryview(b"")
        self._gone: list[int] = []

    def send(self, data: bytes, check: Callable[[], None] | None = None) -> None:
        """Send one frame; `check` is called while waiting and may raise."""
        self._send(self._framed(data), [], check)

    def load(self, data: bytes) -> None:
        """Take the frame that `flush` sends."""
        self._going, self._gone = self._framed(data), []

    def flush(self, check: Callable[[], None] | None = None) -> None:
        """Send what is left of the frame; after an interrupt it goes on."""
        self._send(self._going, self._gone, check)
        self._going = memoryview(b"")  # its memory is free again

    def _framed(self, data: bytes) -> memoryview:
        return memoryview(self.HEADER.pack(len(data)) + data)

    def _send(self, frame: memoryview, gone: list[int], check: Callable[[], None] | None) -> None:
        while rest := frame[sum(gone) :]:
            _patiently(check, gone, self.sock.send, rest)

    def receive(self, check: Callable[[], None] | None = None) -> Any:
        """The next message; `check` is called while waiting and may raise."""
        return pickle.loads(self.receive_bytes(check))

    def receive_bytes(self, check: Callable[[], None] | None = None) -> bytearray:
        """The next message as it was sent. One that `check` or an interrupt broke off goes on with the next call."""
        if self._frame is None:
            self._fill(self._header, check)
            (length,) = self.HEADER.unpack(self._header)
            self._frame, self._filled = bytearray(length), []
        self._fill(self._frame, check)
        frame, self._frame, self._filled = self._frame, None, []
        return frame

    def _fill(self, data: bytearray, check: Callable[[], None] | None) -> None:
        view = memoryview(data)
        while (filled := sum(self._filled)) < len(data):
            _patiently(check, self._filled, self.sock.recv_into, view[filled:])
            if not self._filled[-1]:
                raise ChannelClosedError("closed by the other side")

    def send_descriptors(self, descriptors: Sequence[int], check: Callable[[], None] | None = None) -> None:
        """Hand over open files; the other side calls `receive_descriptors` with their number."""
        for start in range(0, len(descriptors), MOST_DESCRIPTORS):
            part = array.array("i", descriptors[start : start + MOST_DESCRIPTORS])
            _patiently(check, [], self.sock.sendmsg, [b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)])

    def receive_descriptors(self, count: int) -> list[int]:
        """That many open files."""
        found: list[int] = []
        while len(found) < count:
            wanted = min(count - len(found), MOST_DESCRIPTORS)
            data, ancillary, flags, _ = self.sock.recvmsg(1, socket.CMSG_SPACE(4 * wanted))
            if not data:
                raise ChannelClosedError("closed by the other side")
            found += _rights(ancillary)
            _whole(flags)
        return found

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


def _patiently(
    check: Callable[[], None] | None, done: list[int], call: Callable[..., int], *arguments: Any
) -> None:
    """Add to `done` what a call of a socket gives; `check` is called each time that it had to wait for too long."""
    while True:
        try:
            # No interrupt comes between the call and the list.
            done.extend(map(call, *([each] for each in arguments)))
            return
        except OSError as error:
            if is_of_handler(error):
                raise
            if not isinstance(error, TimeoutError):
                raise ChannelClosedError(str(error)) from error
            if check is not None:
                check()


def is_of_handler(error: BaseException) -> bool:
    """Whether the handler of a signal raised this, and not the system call, in C, that was broken off."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _whole(flags: int) -> None:
    """Descriptors that found no room in this process are gone, and nothing more would come."""
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _rights(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return list(descriptors)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets.

    Raises:
        ConfigError: when too many files are open.
    """
    with files_told():
        return socket.socketpair()


@contextlib.contextmanager
def files_told() -> Iterator[None]:
    """Where too many files may be open: that is told by a `ConfigError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ConfigError(
                "too many open files: each worker needs 5 descriptors and each group of environments 1; raise the "
                "limit (ulimit -n) or use fewer workers (num_workers=)"
            ) from error
        raise


# --- pickling
class _PlainPickler(pickle.Pickler):
    """Pickles what is made of Python's own types, NumPy's, Gymnasium's and shoal's; refuses everything else."""

    OURS = ("numpy", "shoal", "gymnasium", "enum")

    def reducer_override(self, item: Any) -> Any:
        """Called by pickle for whatever is not of Python's own simple types."""
        named = isinstance(item, type) or callable(item)
        module = getattr(item if named else type(item), "__module__", None)
        if isinstance(module, str) and module.partition(".")[0] in self.OURS:
            return NotImplemented
        raise pickle.PicklingError("the code of this is somebody else's")


def dumps(value: Any) -> tuple[bytes, bool]:
    """A message as bytes that any worker can load, and whether it is plain: made of well-known types alone.

    What another interpreter could not import (lambdas, what lives in `__main__` or in a module off its path) goes
    by value. Loading what is not plain runs code that came with it.
    """
    buffer = io.BytesIO()
    try:
        _PlainPickler(buffer, protocol=5).dump(value)
        return buffer.getvalue(), True
    except Exception:  # not plain, or no pickle at all: then the next line says why
        with by_value([value]):
            return cloudpickle.dumps(value, protocol=5), False


@contextlib.contextmanager
def by_value(items: Sequence[Any]) -> Iterator[None]:
    """Have cloudpickle send what these need and a fresh interpreter could not import."""
    names = {name for item in items for name in _modules_of(item)}
    modules = [sys.modules[name] for name in names if name in sys.modules and not _importable(name)]
    with _BY_VALUE:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


_BY_VALUE = threading.RLock()
"""cloudpickle's list of modules is one for all threads."""


def _modules_of(item: Any, depth: int = 0) -> set[str]:
    """The modules that functions, classes and instances inside `item` come from."""
    if depth > 4 or item is None or isinstance(item, str | bytes | int | float):
        return set()
    inner: list[Any] = []
    names: set[str] = set()
    if isinstance(item, dict):
        inner += [*item.keys(), *item.values()]
    elif isinstance(item, list | tuple | set | frozenset):
        inner += list(item)
    else:
        named = item if hasattr(item, "__qualname__") else type(item)
        if isinstance(getattr(named, "__module__", None), str):
            names.add(named.__module__)
        inner += [getattr(item, "func", None), getattr(item, "entry_point", None)]
        inner += [getattr(item, "args", None), getattr(item, "keywords", None)]
        for cell in getattr(item, "__closure__", None) or ():
            with contextlib.suppress(ValueError):
                inner.append(cell.cell_contents)
    for part in inner:
        names |= _modules_of(part, depth + 1)
    return names


def _importable(name: str) -> bool:
    if name == "__main__":
        return True  # cloudpickle sends it by value anyway
    module = sys.modules[name]
    origin = getattr(module, "__file__", None)
    top = name.partition(".")[0]
    try:
        # A lookup on the path, as a fresh interpreter does it, not in sys.modules.
        spec = importlib.machinery.PathFinder.find_spec(top) if top in sys.modules else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return top in sys.stdlib_module_names  # built in, or frozen
    if "." not in name:
        return spec.origin == origin or origin is None
    folders = list(spec.submodule_search_locations or ())
    parts = name.split(".")[1:]
    return origin is None or any(
        os.path.exists(os.path.join(folder, *parts) + ".py")
        or os.path.exists(os.path.join(folder, *parts, "__init__.py"))
        or os.path.dirname(origin) == os.path.join(folder, *parts[:-1])
        for folder in folders
    )


class RemoteTraceback(Exception):  # noqa: N818  (named like the standard library's, shown as a cause)
    """The traceback of a worker as text, chained as the cause of what the caller sees."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def describe_exit(code: int | None) -> str:
    """An exit code in words.

    >>> describe_exit(-9)
    'was killed by SIGKILL'
    >>> describe_exit(3)
    'exited with code 3'
    """
    if code is None:
        return "is gone"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


# --- the process that forks workers, which has one thread and the imports done, so that forking it is safe and fast
def zygote_main(descriptor: int, preload: Sequence[str] = (), mark: str = "") -> None:
    """Serve `start` and `reap` requests until the parent is gone, then take the workers along.

    Nothing of the user's main script is imported, so scripts need no `if __name__ == "__main__"` guard.

    Args:
        descriptor: of the socket to the parent.
        preload: modules that workers need; they are imported here once.
        mark: how the tokens of its workers begin.
    """
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no worker looks through all this again
    parent = os.getppid()
    link = socket.socket(fileno=descriptor)
    children: set[int] = set()
    try:
        link.send(b"ready")
        while os.getppid() == parent:
            if not select.select([link], [], [], PARENT_LOOK)[0]:
                continue
            data, ancillary, flags, _ = link.recvmsg(65536, socket.CMSG_SPACE(16 * 4))
            if not data:
                break
            request, descriptors = json.loads(data), _rights(ancillary)
            if request["do"] == "start":
                answer: dict[str, Any] = {"number": request["number"]}
                try:
                    _whole(flags)
                    answer["pid"] = pid = _start(link, request, descriptors)
                    children.add(pid)
                except Exception as error:  # no more processes just now, say: those that run go on
                    answer["error"] = str(error)
                for item in descriptors:
                    os.close(item)
                link.send(json.dumps(answer).encode())
            else:
                code = _reap(int(request["pid"]), bool(request["wait"]))
                if code is not None:
                    children.discard(int(request["pid"]))
                link.send(json.dumps({"code": code, "number": request["number"]}).encode())
    except (BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    finally:
        for pid in children:
            kill_group(pid)
        if mark:
            end_programs(lambda token: token.startswith(mark))


def _start(link: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    module, _, function = request["entry"].partition(":")
    if request["method"] != "spawn":
        work = getattr(importlib.import_module(module), function)  # before the fork: the next one has it too
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid

    def run() -> int:
        link.close()
        os.setpgid(0, 0)
        die_with_parent()
        os.environ[TOKEN] = str(request.get("token", ""))
        channel, log = descriptors
        if request["method"] == "spawn":
            for item in (channel, log):
                os.set_inheritable(item, True)
            os.execv(sys.executable, command_of(module, f"{function}({channel}, {log})"))
        if "numpy" in sys.modules:
            # or all workers would draw the same, as their zygote (`random` sees to itself)
            sys.modules["numpy"].random.seed()
        return int(work(channel, log))

    _end_with(run)


def _end_with(run: Callable[[], int]) -> NoReturn:
    """All that a fork does: whatever happens, it must not go on as a second one of whoever forked it."""
    code = 1
    try:
        code = run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None where this process was started without
            stream.flush()


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


def watch_parent(parent: int) -> None:
    """End this process when its parent is gone (for forked workers, whose parent is the caller itself)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()


def kill_group(pid: int) -> None:
    """Kill a worker and the processes its environments started, as far as they stayed in its group."""
    if pid <= 1:
        raise ValueError(f"{pid} is no worker: such numbers mean many processes at once")
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_programs(theirs: Callable[[str], bool]) -> None:
    """Kill the programs that workers with such tokens have started, whatever session they are in."""
    mark = f"{TOKEN}=".encode()
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                for variable in environment_of(Path(entry.path)).split(b"\0"):
                    if variable.startswith(mark) and theirs(variable[len(mark) :].decode("ascii", "replace")):
                        os.kill(int(entry.name), signal.SIGKILL)


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """The processes that can be looked at, each with the words of its command."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield int(entry.parent.name), entry.read_bytes().decode(errors="replace").split("\0")[:-1]


def environment_of(process: Path, patience: float = 1.0) -> bytes:
    """The variables of a process, each with a zero byte behind it, of its folder in `/proc`.

    One that has just become another program has none for a moment, though whoever started it already goes on: it is
    looked at again for so many seconds.
    """
    data, end = Path(process, "environ").read_bytes(), time.monotonic() + patience
    while not data and time.monotonic() < end:
        os.readlink(process / "exe")  # a thread of the kernel, or who is dead, has none: an OSError
        # the address where its variables end: 0 as long as they are not there
        settled = Path(process, "stat").read_text().rpartition(")")[2].split()[48] != "0"
        data = Path(process, "environ").read_bytes()
        if settled:
            break
        time.sleep(0.0 if data else 0.005)
    return data


class Zygote:
    """The caller's end of the process that forks its workers; started when first needed, shared by all."""

    PRELOAD = ("numpy", "gymnasium", "shoal.vector.worker_process")
    """Imported once there, if they can be, and not in every worker."""
    _current: Zygote | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        require_linux("worker processes")
        self.owner = os.getpid()
        # Reentrant, with numbered answers: a garbage collection inside `ask` may close another pool.
        self.lock = threading.RLock()
        self._asked = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.mark = f"{self.owner}-{os.urandom(6).hex()}."
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        try:
            self.process = subprocess.Popen(
                command_of(__name__, f"zygote_main({number}, {self.PRELOAD!r}, {self.mark!r})"),
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
                if is_of_handler(error):
                    raise
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


# --- one worker
def command_of(module: str, call: str) -> list[str]:
    """The command of a Python that behaves as this one does (`-O`, `-W error`, `-X utf8`) and calls a function."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    name = call.partition("(")[0]
    program = f"import sys; sys.path[:] = {module_path()!r}; from {module} import {name}; {call}"
    return [sys.executable, *flags, "-c", program]


def module_path() -> list[str]:
    """Where this Python looks for modules; it passes over what is no text, such as a `Path`."""
    return [item for item in sys.path if isinstance(item, str)]


def surroundings() -> tuple[list[str], list[str], dict[str, str], str]:
    """What a worker takes over from its caller: path, arguments, environment variables, folder."""
    folder = ""
    with contextlib.suppress(OSError):  # it was removed
        folder = os.getcwd()
    return module_path(), list(sys.argv), dict(os.environ), folder


def settle(around: tuple[list[str], list[str], dict[str, str], str]) -> None:
    """In a worker: take over the surroundings of the caller."""
    path, arguments, environ, folder = around
    token = os.environ.get(TOKEN)
    sys.path[:], sys.argv[:] = path, arguments
    os.environ.clear()
    os.environ.update(environ)
    if token is not None:
        os.environ[TOKEN] = token
    with contextlib.suppress(OSError):
        os.chdir(folder)


def write_stacks_on_request(log: int) -> None:
    """In a worker: crashes, and `WorkerProcess.ask_stack`, write the stacks of all threads into the log."""
    with contextlib.suppress(Exception):
        faulthandler.enable(log, all_threads=True)
        faulthandler.register(stack_signal(), log, all_threads=True, chain=False)


_NUMBERS = itertools.count()


class WorkerProcess:
    """One worker as its caller sees it.

    Args:
        entry: `module:function` that it runs, called with the descriptors of its channel and its log.
        method: how the process comes to be.
    """

    def __init__(self, entry: str, method: StartMethod = "forkserver") -> None:
        self.entry, self.method = entry, method
        self.owner = os.getpid()
        self.starts = 0
        self.pid = -1
        self.exit_code: int | None = None
        self.gone = True
        self._log = self._pidfd = -1
        self._around = b""

    @files_told()
    def start(self) -> None:
        """Start the process and tell it its surroundings; it may be started again once it was released.

        Then it has the surroundings of its first start: relative names of files mean what they meant.

        Raises:
            ConfigError: when too many files are open.
            WorkerDiedError: when no process can be started.
        """
        ours, theirs = socket_pair()
        self.channel = Channel(ours, SLICE)
        self.starts += 1
        self.exit_code, self.pid = None, -1
        try:
            self._log = os.memfd_create("shoal-worker-log", os.MFD_CLOEXEC)
            if self.method == "fork":
                self.zygote, self.token = None, f"{os.getpid()}-{os.urandom(6).hex()}"
                self.pid = self._fork(theirs)
            else:
                self.zygote = Zygote.running()
                self.token = f"{self.zygote.mark}{next(_NUMBERS)}"
                request = {"do": "start", "method": self.method, "entry": self.entry, "token": self.token}
                self.pid = int(self.zygote.ask(request, [theirs.fileno(), self._log])["pid"])
            self._pidfd = os.pidfd_open(self.pid)
            self.gone = False
        except BaseException:
            self.reap()
            self.release()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(ChannelClosedError, WorkerDiedError):
            # whoever waits for it finds out and tells
            self._around = self._around or dumps(surroundings())[0]
            self.channel.send(self._around, self.check)

    def _fork(self, theirs: socket.socket) -> int:
        parent, stays = os.getpid(), threading.current_thread() is threading.main_thread()
        _flush()
        pid = os.fork()
        if pid:
            return pid

        def run() -> int:
            os.setsid()
            if stays:
                die_with_parent()  # the kernel means the parent's thread, so only where that one stays
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.environ[TOKEN] = self.token
            watch_parent(parent)
            module, _, function = self.entry.partition(":")
            descriptors = os.dup(theirs.fileno()), os.dup(self._log)
            return int(getattr(importlib.import_module(module), function)(*descriptors))

        _end_with(run)

    def alive(self) -> bool:
        """Whether the process runs."""
        return not self.wait(0.0)

    def check(self) -> None:
        """Raise `WorkerDiedError` when the process is gone."""
        if not self.alive():
            self.reap()
            raise WorkerDiedError(f"worker {self.pid} {describe_exit(self.exit_code)}")

    def make_sure_it_is_gone(self, seconds: float = 1.0) -> None:
        """Give a process that closed its channel a moment to end, then kill it."""
        if not self.wait(seconds):
            self.kill()

    def log_text(self) -> str:
        """What it wrote into its log: the stack at a crash, or on request."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, min(size, 65536), 0).decode("utf-8", "replace").strip()

    def ask_stack(self) -> None:
        """Have it write where its threads are into its log; works on a worker that hangs."""
        if not self.gone:
            os.ftruncate(self._log, 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, stack_signal())

    def rss(self) -> int:
        """Its resident memory in bytes."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        """Kill it and what its environments started, and wait until it is gone."""
        if not self.gone and os.getpid() == self.owner:
            kill_group(self.pid)
        self.reap()

    def reap(self, *, sweep: bool = True) -> None:
        """Wait for a process that is ending and take its exit code; what it started ends too (`sweep`: anywhere)."""
        if self.exit_code is None and self.pid > 0 and os.getpid() == self.owner:
            # while its number is its own; if it ended by itself: what it left in its group
            kill_group(self.pid)
            try:
                if self.zygote is not None:
                    code = self.zygote.ask({"do": "reap", "pid": self.pid, "wait": True})["code"]
                else:
                    code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (WorkerDiedError, ChildProcessError):
                code = -signal.SIGKILL  # its parent is gone, and took it along
            self.exit_code = code
            if sweep:
                end_programs(self.token.__eq__)
        self.gone = True

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so many seconds."""
        if self.gone:
            return True
        poll = select.poll()  # one of its own: another thread may be waiting for the same process
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def release(self) -> None:
        """Give the descriptors back, once it is gone."""
        self.channel.close()
        theirs, self._log, self._pidfd = (self._log, self._pidfd), -1, -1  # first: none must be closed twice
        for descriptor in theirs:
            if descriptor >= 0:
                os.close(descriptor)


def end_all(workers: Sequence[WorkerProcess], seconds: float) -> None:
    """End workers that were told to: those still there after so many seconds are killed, with all they started."""
    mine = [worker for worker in workers if worker.owner == os.getpid() and worker.pid > 0]
    deadline = time.monotonic() + seconds
    for worker in mine:
        worker.wait(deadline - time.monotonic())
    for worker in mine:
        if worker.exit_code is None:
            kill_group(worker.pid)
    for worker in mine:
        worker.reap(sweep=False)
        worker.release()
        worker.pid = -1
    if mine:
        end_programs({worker.token for worker in mine}.__contains__)
