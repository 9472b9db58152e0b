"""Where jobs run: local processes, tmux sessions to watch, Ray, SLURM. None gets its command by a shell's parsing.

A launcher starts a command and later says that it ended. All but Ray's outlive the scheduler; a new one adopts them
by process id and start time, or by the number that SLURM gave. The exit status is a hint only: what counts is the
mark that a job leaves in its folder.
"""

from __future__ import annotations

import hashlib
import os
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.executors import available_cpus, connect_ray

Handle = dict[str, Any]
Ended = Callable[[str], None]  # called with how it ended, in words, from another thread


class Launcher(Protocol):
    """Starts jobs. One with a method `room(running, slots)` says itself how many more it has resources for."""

    name: str

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start `command`, its output going to `log`; returns plain data that finds it again."""

    def watch(self, handle: Handle, ended: Ended) -> bool:
        """Call `ended` when it is over; False if it is not running any more."""

    def kill(self, handle: Handle) -> None:
        """End it and all it started."""


LAUNCHERS = ("local", "tmux", "ray", "slurm")


def make_launcher(
    name: str,
    *,
    gpus: float = 0.0,
    slots: int = 1,
    folder: Path | str = ".",
    sbatch: Sequence[str] = (),
) -> Launcher:
    """A launcher by name.

    Args:
        name: one of `LAUNCHERS`.
        gpus: per job, for Ray.
        slots: jobs at a time, by which Ray's CPUs are shared out.
        folder: of the graph; its tmux server is named after it.
        sbatch: options for SLURM, such as `--partition=gpu`.
    """
    if name == "local":
        return LocalLauncher()
    if name == "tmux":
        return TmuxLauncher(server_of(folder))
    if name == "ray":
        return RayLauncher(gpus=gpus, slots=slots)
    if name == "slurm":
        return SlurmLauncher(sbatch)
    raise ConfigError(f"no launcher named {name!r}.{did_you_mean(name, LAUNCHERS)}")


def adopting_launcher(name: str | None, handle: Handle) -> Launcher:
    """What can watch and end a launch of an earlier scheduler, by what is known of it."""
    if "slurm" in handle:
        return SlurmLauncher()
    if "session" in handle and shutil.which("tmux"):
        return TmuxLauncher(str(handle["server"]))
    if "pid" in handle or name != "ray":
        return LocalLauncher()
    return _Gone()


class _Gone:
    """What a launch of another driver is to Ray: over."""

    name = "gone"

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Nothing is launched here."""
        raise NotImplementedError

    def watch(self, handle: Handle, ended: Ended) -> bool:
        """It is gone."""
        return False

    def kill(self, handle: Handle) -> None:
        """Nothing is left to end."""


def alive(name: str | None, handle: Handle | None) -> bool:
    """Whether what a launch left in the store still runs, as far as this process can see."""
    if not handle:
        return False
    if "slurm" in handle:
        return SlurmLauncher().state(handle) is not None
    if "pid" in handle:
        return handle.get("began") is not None and start_time(int(handle["pid"])) == handle["began"]
    return name == "ray" and start_time(int(handle.get("driver", 0))) is not None


def job_environment(slots: int, gpu_ids: str | None = None) -> dict[str, str]:
    """Variables that keep `slots` jobs side by side from fighting for cores and GPU memory.

    One thread each, however many run: sums must not depend on the number of slots.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    share = f"{0.9 / slots:.2f}"
    return {
        **dict.fromkeys(names, "1"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": share,
        "PYTHONUNBUFFERED": "1",
        **compilation_cache(),
        **({"CUDA_VISIBLE_DEVICES": gpu_ids} if gpu_ids else {}),
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


class LocalLauncher:
    """Each job a process of its own session, so that signals to the scheduler do not reach it."""

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
        """Kill the job's process group."""
        kill_group(handle)


def server_of(folder: Path | str) -> str:
    """The name of the tmux server of a folder, so that graphs in different folders cannot meet."""
    return f"shoal-{hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:10]}"


class TmuxLauncher:
    """Each job in a tmux session of its own, to attach and watch."""

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
        self._tmux("kill-session", "-t", f"={handle['session']}", check=False, server=str(handle["server"]))

    def _tmux(self, *arguments: str, check: bool = True, server: str | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", server or self.server, *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"tmux {arguments[0]} failed: {done.stderr.strip() or done.returncode}")
        return done.stdout.strip()


class RayLauncher:
    """Each job a Ray task; the folder must be reachable from every node. They end with the driver."""

    name = "ray"

    def __init__(self, gpus: float = 0.0, cpus: float | None = None, slots: int = 1) -> None:
        ray, _ = connect_ray(wanted_by="the Ray launcher")
        self._ray = ray
        self._gpus = gpus
        cluster = float(ray.cluster_resources().get("CPU", available_cpus()))
        self._cpus = cpus if cpus is not None else max(1.0, cluster // slots)
        self._tasks: dict[str, Any] = {}
        self._count = 0

    def room(self, running: int, slots: int) -> int:
        """How many more jobs the whole cluster has CPUs and GPUs for, whatever this machine has."""
        have = self._ray.cluster_resources()
        fit = [int(float(have.get("CPU", 0)) // self._cpus)] if self._cpus else []
        fit += [int(float(have.get("GPU", 0)) // self._gpus)] if self._gpus else []
        return min([slots, *fit]) - running

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
            except Exception as error:  # whatever Ray says, the job is over
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


class SlurmLauncher:
    """Each job a batch job of SLURM, in a folder that all nodes share; they outlive the scheduler.

    Args:
        sbatch: options for `sbatch`, such as `--partition=gpu` or `--time=2:00:00`.
        every: seconds between looks at the queue.
    """

    name = "slurm"

    def __init__(self, sbatch: Sequence[str] = (), every: float = 5.0) -> None:
        self.options, self.every = list(sbatch), every
        if shutil.which("sbatch") is None:
            raise ConfigError("the slurm launcher needs the program sbatch: run it where jobs are submitted")

    def room(self, running: int, slots: int) -> int:
        """As many as there are slots: SLURM's queue knows what there is."""
        return slots - running

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Submit a script; every word of it is quoted."""
        script = log.with_suffix(".sh")
        lines = [f"export {key}={shlex.quote(value)}" for key, value in env.items()]
        script.write_text("\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(command)}"]) + "\n")
        done = self._run(
            "sbatch", "--parsable", f"--job-name={session}", f"--output={log}", "--open-mode=append",
            *self.options, str(script),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"sbatch failed: {done.stderr.strip() or done.returncode}")
        return {"slurm": done.stdout.strip().split(";")[0]}

    def state(self, handle: Handle) -> str | None:
        """What SLURM calls its state while it waits or runs, None when it is over."""
        done = self._run("squeue", "--noheader", "--format=%T", f"--jobs={handle['slurm']}")
        if done.returncode and "Invalid job id" not in done.stderr:
            return "UNKNOWN"  # the controller does not answer: what it would say is not known to be the end
        return done.stdout.strip() or None

    def watch(self, handle: Handle, ended: Ended) -> bool:
        """Look at the queue now and then, in a thread."""
        if self.state(handle) is None:
            return False

        def wait() -> None:
            while self.state(handle) is not None:
                time.sleep(self.every)
            ended("ended")

        threading.Thread(target=wait, name=f"wait-{handle['slurm']}", daemon=True).start()
        return True

    def kill(self, handle: Handle) -> None:
        """Cancel the batch job."""
        self._run("scancel", str(handle["slurm"]))

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))


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
    """SIGKILL to a job's process group, if it is still that job."""
    pid = int(handle["pid"])
    if handle.get("began") is not None and start_time(pid) == handle["began"]:
        try:
            os.killpg(os.getpgid(pid), 9)
        except ProcessLookupError:
            return


def exit_words(code: int) -> str:
    """An exit status for people."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


FIRST_GUESS = 256 << 20  # bytes, before any launch has been measured
RESERVE = 0.1  # share of the available memory left alone


def resident_memory(pid: int) -> int:
    """Bytes a process holds now; 0 if it cannot be seen."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0


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
