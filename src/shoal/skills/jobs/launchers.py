"""Where trainings run: local processes, tmux sessions to watch, Ray. None goes through a shell.

A launcher starts a command and later says that it ended. Local and tmux trainings outlive the scheduler; a new
one adopts them by process id and start time. The exit status is a hint only: what counts is `DONE.json`.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import ConfigError, did_you_mean, missing_extra
from shoal.core.executors import available_cpus

Handle = dict[str, Any]
Ended = Callable[[str], None]  # called with how it ended, in words, from another thread


class Launcher(Protocol):
    """Starts trainings."""

    name: str

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start `command`, its output going to `log`; returns plain data that finds it again."""

    def watch(self, handle: Handle, ended: Ended) -> bool:
        """Call `ended` when it is over; False if it is not running any more."""

    def kill(self, handle: Handle) -> None:
        """End it and all it started."""


LAUNCHERS = ("local", "tmux", "ray")


def make_launcher(name: str, *, gpus: float = 0.0, slots: int = 1) -> Launcher:
    """A launcher by name; `gpus` per training and `slots` are for Ray."""
    if name == "local":
        return LocalLauncher()
    if name == "tmux":
        return TmuxLauncher()
    if name == "ray":
        return RayLauncher(gpus=gpus, slots=slots)
    raise ConfigError(f"no launcher named {name!r}.{did_you_mean(name, LAUNCHERS)}")


def training_environment(slots: int) -> dict[str, str]:
    """Variables that keep `slots` trainings side by side from fighting for cores and GPU memory.

    One thread each, however many run: the nets are small, and sums must not depend on the number of slots.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    share = f"{0.9 / slots:.2f}"
    return {
        **dict.fromkeys(names, "1"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": share,
        "PYTHONUNBUFFERED": "1",
        **compilation_cache(),
        # The child must find this very package, installed or not.
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *_path_entries()]),
    }


def compilation_cache() -> dict[str, str]:
    """Variables that let JAX programs compiled by one process serve the next."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(home / "shoal" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    return {key: os.environ.get(key, value) for key, value in wanted.items()}


def _path_entries() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def training_command(run_folder: Path, attempt: int) -> list[str]:
    """What a launcher runs for one attempt."""
    return [
        sys.executable,
        "-m",
        "shoal.skills.learning.run",
        str(run_folder.resolve()),
        "--attempt",
        str(attempt),
    ]


class LocalLauncher:
    """Each training a process of its own session, so that signals to the scheduler do not reach it."""

    name = "local"

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start a process."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        self._children[process.pid] = process
        return {"pid": process.pid, "began": start_time(process.pid)}

    def watch(self, handle: Handle, ended: Ended) -> bool:
        """Wait in a thread, for a child or for an adopted process."""
        child = self._children.get(int(handle["pid"]))
        if child is None:
            return watch_process(handle, ended)

        def wait() -> None:
            code = child.wait()
            self._children.pop(child.pid, None)
            ended(exit_words(code))

        threading.Thread(target=wait, name=f"wait-{child.pid}", daemon=True).start()
        return True

    def kill(self, handle: Handle) -> None:
        """Kill the training's process group."""
        kill_group(handle)


class TmuxLauncher:
    """Each training in a tmux session of its own, to attach and watch."""

    name = "tmux"

    def __init__(self, server: str = "shoal") -> None:
        self.server = server
        if shutil.which("tmux") is None:
            raise ConfigError("the tmux launcher needs the program tmux; install it or use --launcher local")

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start a session; the output is also written to `log`."""
        name = session.replace(".", "~2e").replace(":", "~3a")  # both mean something else in a tmux target
        variables = [part for key, value in env.items() for part in ("-e", f"{key}={value}")]
        teed = [sys.executable, "-m", "shoal.skills.jobs.launchers", str(log), *command]
        self._tmux("kill-session", "-t", f"={name}", check=False)
        pid = self._tmux(
            "new-session", "-d", "-P", "-F", "#{pane_pid}", "-s", name, "-x", "180", "-y", "50", *variables, "--",
            *teed,
        )  # fmt: skip
        return {"pid": int(pid), "began": start_time(int(pid)), "session": name, "server": self.server}

    def watch(self, handle: Handle, ended: Ended) -> bool:
        """Wait for the process of the session's pane."""
        return watch_process(handle, ended)

    def kill(self, handle: Handle) -> None:
        """End the session."""
        kill_group(handle)
        self._tmux("kill-session", "-t", f"={handle['session']}", check=False)

    def _tmux(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            ["tmux", "-L", self.server, *arguments], capture_output=True, text=True, timeout=30, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"tmux {arguments[0]} failed: {done.stderr.strip() or done.returncode}")
        return done.stdout.strip()


class RayLauncher:
    """Each training a Ray task; the folder must be reachable from every node. They end with the driver."""

    name = "ray"

    def __init__(self, gpus: float = 0.0, cpus: float | None = None, slots: int = 1) -> None:
        try:
            import ray
        except ImportError as error:
            raise missing_extra("the Ray launcher", "parallel") from error
        self._ray = ray
        self._gpus = gpus
        self._cpus = cpus if cpus is not None else max(1, available_cpus() // slots)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._tasks: dict[str, Any] = {}
        self._count = 0

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Submit a task that runs the command on some node."""
        # Workers start elsewhere, and must find this very package too.
        found = {"env_vars": {"PYTHONPATH": env.get("PYTHONPATH", "")}}
        remote = self._ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0, runtime_env=found)(
            _run_command
        )
        self._count += 1
        key = f"{session}-{self._count}"
        self._tasks[key] = remote.remote(list(command), dict(env), str(log.resolve()))
        return {"task": key, "driver": os.getpid()}

    def watch(self, handle: Handle, ended: Ended) -> bool:
        """Wait for the task in a thread; tasks of another driver are gone."""
        task = self._tasks.get(str(handle.get("task")))
        if task is None or handle.get("driver") != os.getpid():
            return False

        def wait() -> None:
            try:
                words = exit_words(int(self._ray.get(task)))
            except Exception as error:  # whatever Ray says, the training is over
                lines = [line for line in str(error).splitlines() if line.strip()]
                words = f"{type(error).__name__}: {lines[-1] if lines else ''}"
            ended(words)

        threading.Thread(target=wait, name=f"wait-{handle['task']}", daemon=True).start()
        return True

    def kill(self, handle: Handle) -> None:
        """Cancel the task."""
        task = self._tasks.get(str(handle.get("task")))
        if task is not None:
            self._ray.cancel(task, force=True)


def _run_command(command: list[str], env: dict[str, str], log: str) -> int:
    """Run on a Ray worker: the process dies with the task."""
    with Path(log).open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, *command[1:]], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **env},
        )  # fmt: skip
        try:
            return child.wait()
        except BaseException:
            child.kill()
            raise


def start_time(pid: int) -> str | None:
    """When a process began, in words that another process with the same id would not share; None if gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # no /proc on this system: the id must do
        os.kill(pid, 0)
    except OSError:
        return None
    return "unknown"


def watch_process(handle: Handle, ended: Ended) -> bool:
    """Wait in a thread for a process that is not ours to reap; False if it is gone already."""
    pid, began = int(handle["pid"]), handle.get("began")
    if began is None or start_time(pid) != began:
        return False

    def wait() -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            descriptor = -1
        if descriptor >= 0 and start_time(pid) == began:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        while start_time(pid) == began:  # only where the system cannot tell us
            time.sleep(0.05)
        if descriptor >= 0:
            os.close(descriptor)
        ended("ended")

    threading.Thread(target=wait, name=f"wait-{pid}", daemon=True).start()
    return True


def kill_group(handle: Handle) -> None:
    """SIGKILL to a training's process group, if it is still that training."""
    pid = int(handle["pid"])
    if handle.get("began") is not None and start_time(pid) == handle["began"]:
        try:
            os.killpg(os.getpgid(pid), 9)
        except ProcessLookupError:
            return


def exit_words(code: int) -> str:
    """An exit status for people."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


FIRST_GUESS = 256 << 20  # bytes, before any training has been measured
RESERVE = 0.1  # share of the available memory left alone


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        return None
    return None


def resident_memory(pid: int) -> int:
    """Bytes a process holds now; 0 if it cannot be seen."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0


def fits(expected: int, running: Iterable[int], available: int | None) -> bool:
    """Whether a training that will need `expected` bytes can start.

    Args:
        expected: its measured or guessed peak.
        running: bytes that each running training holds now; they may still grow to `expected`.
        available: what the system can give; None: unknown, so yes.
    """
    if available is None:
        return True
    growth = sum(max(0, expected - held) for held in running)
    return expected + growth <= available * (1 - RESERVE)


def tee(log: str, command: Sequence[str]) -> int:
    """Run a command, its output both here and at the end of a file; returns its exit status."""
    with Path(log).open("ab", buffering=0) as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
        assert process.stdout is not None
        while chunk := process.stdout.read(65536):
            file.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        return process.wait()


if __name__ == "__main__":
    sys.exit(tee(sys.argv[1], sys.argv[2:]))
