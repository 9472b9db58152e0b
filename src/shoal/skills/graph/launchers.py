"""Where trainings run: local processes, tmux sessions to watch, Ray tasks, SLURM jobs (by submitit).

A launcher starts a command and is asked now and then whether it still runs. Local, tmux and SLURM trainings outlive the
scheduler, and a new one adopts them. The exit status is a hint only: what counts is the mark that a training leaves in
its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from shoal.core.errors import ConfigError, did_you_mean, needs_extra
from shoal.core.executors import connect_ray
from shoal.core.files import cache_folder

Handle = dict[str, Any]
LOST = "its machine is gone"
"""What `poll` says of a training that ended with its machine, which is no fault of its own."""


class Launcher(Protocol):
    """Starts trainings."""

    name: str

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start `command`, its output going to `log`; returns plain data that finds it again."""

    def poll(self, handle: Handle) -> str | None:
        """None while it runs; once it is over, how it ended, in words."""

    def kill(self, handle: Handle) -> None:
        """End it and all it started."""


LAUNCHERS = ("local", "tmux", "ray", "slurm")


def make_launcher(
    name: str,
    *,
    gpus: float = 0.0,
    folder: Path | str = ".",
    sbatch: Sequence[str] = (),
    every: float = 30.0,
) -> Launcher:
    """A launcher by name.

    Args:
        name: one of `LAUNCHERS`.
        gpus: per training, for Ray.
        folder: of the run; its tmux server is named after it, and submitit keeps its files there.
        sbatch: options for SLURM, such as `--partition=gpu`.
        every: seconds between looks at a batch job of SLURM.
    """
    if name == "local":
        return LocalLauncher()
    if name == "tmux":
        return TmuxLauncher(server_of(folder))
    if name == "ray":
        return RayLauncher(gpus)
    if name == "slurm":
        return SlurmLauncher(folder, sbatch, every)
    raise ConfigError(f"no launcher named {name!r}.{did_you_mean(name, LAUNCHERS)}")


def adopting_launcher(handle: Handle, folder: Path) -> Launcher | None:
    """What can poll and end a launch of an earlier scheduler; None if it ended with that one."""
    if "slurm" in handle:
        return SlurmLauncher(folder, cluster=handle["cluster"])
    if "session" in handle and shutil.which("tmux"):
        return TmuxLauncher(str(handle["server"]))
    return LocalLauncher() if "pid" in handle else None


def job_environment(slots: int, gpu_ids: str | None = None) -> dict[str, str]:
    """Variables that keep `slots` trainings side by side from fighting for cores and GPU memory.

    One thread each, however many run: sums must not depend on the number of slots.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    paths = [str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **dict.fromkeys(names, "1"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / slots:.2f}",
        "PYTHONUNBUFFERED": "1",
        **compilation_cache(),
        **({"CUDA_VISIBLE_DEVICES": gpu_ids} if gpu_ids else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),  # this very package, installed or not
    }


def compilation_cache() -> dict[str, str]:
    """Variables that let JAX programs compiled by one process serve the next."""
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder() / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    return {key: os.environ.get(key, value) for key, value in wanted.items()}


_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}
"""Trainings that this process started and whose end it has not seen, whichever launcher did it."""


class LocalLauncher:
    """Each training a process of its own session, so that signals to the scheduler do not reach it."""

    name = "local"

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start a process."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        _CHILDREN[process.pid] = process
        return process_handle(process.pid)

    def poll(self, handle: Handle) -> str | None:
        """How a child ended, or that an adopted process is gone."""
        child = _CHILDREN.get(int(handle["pid"]))
        if child is None:
            return None if is_alive(handle) else "ended"
        if (code := child.poll()) is None:
            return None
        del _CHILDREN[child.pid]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, 9)  # what it left of its process group: the next launch is alone
        return exit_words(code)

    def kill(self, handle: Handle) -> None:
        """Kill the process group of the training, if it is still that training."""
        if is_alive(handle):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(int(handle["pid"])), 9)


def server_of(folder: Path | str) -> str:
    """The name of the tmux server of a folder, so that runs in different folders cannot meet."""
    return f"shoal-{hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:10]}"


WITH_VARIABLES = (
    "import json, os, sys; path, *words = sys.argv[1:]; variables = json.load(open(path)); os.remove(path); "
    "os.execvpe(words[0], words, variables)"
)
"""Takes its environment from a file that nobody else can read: a tmux server keeps that of its first user."""
TEE = '"$@" 2>&1 | tee -a "$0"'  # the words of the command are arguments: no shell parses them
TMUX_TRIES = 20  # while its server, whose last session has ended, is on its way out


class TmuxLauncher(LocalLauncher):
    """Each training in a tmux session of its own, to attach and watch."""

    name = "tmux"

    def __init__(self, server: str = "shoal") -> None:
        self.server = server
        if shutil.which("tmux") is None:
            raise ConfigError("the tmux launcher needs the program tmux; install it or use --launcher local")

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Start a session; the output is also written to `log`."""
        name = session.replace(".", "~2e").replace(":", "~3a")  # both mean something else in a tmux target
        variables = log.with_name(f".{log.name}.env")  # the words of a process can be seen by other users
        with open(os.open(variables, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({**os.environ, **env}, file)
        begun = [sys.executable, "-c", WITH_VARIABLES, str(variables.resolve()), *command]
        pid = self._tmux(
            "new-session", "-d", "-P", "-F", "#{pane_pid}", "-s", name, "-x", "180", "-y", "50", "--",
            "sh", "-c", TEE, str(log), *begun,
        )  # fmt: skip
        return {**process_handle(int(pid)), "session": name, "server": self.server}

    def kill(self, handle: Handle) -> None:
        """End the session."""
        super().kill(handle)
        self._tmux("kill-session", "-t", f"={handle['session']}", check=False, server=handle["server"])

    def _tmux(self, *arguments: str, check: bool = True, server: str | None = None) -> str:
        for _ in range(TMUX_TRIES):
            words = ["tmux", "-L", server or self.server, *arguments]
            done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
            if "server exited" not in done.stderr:
                break
        if check and done.returncode:
            raise RuntimeError(f"tmux {arguments[0]} failed: {done.stderr.strip() or done.returncode}")
        return done.stdout.strip()


class RayLauncher:
    """Each training a Ray task; the folder must be reachable from every node. They end with the scheduler."""

    name = "ray"

    def __init__(self, gpus: float = 0.0) -> None:
        self._ray = connect_ray(wanted_by="the Ray launcher")
        self._needs = {"num_gpus": gpus, "num_cpus": 1, "max_retries": 0}  # a training has one thread
        self._tasks: dict[str, Any] = {}

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Submit a task that runs the command on some node."""
        # Workers start elsewhere, and must find this very package too.
        found = {"env_vars": {"PYTHONPATH": env.get("PYTHONPATH", "")}}
        remote = self._ray.remote(**self._needs, runtime_env=found)(run_command)
        self._tasks[session] = remote.remote(list(command), dict(env), str(log.resolve()))
        return {"task": session}

    def poll(self, handle: Handle) -> str | None:
        """Whether the task is done."""
        if (task := self._tasks.get(handle["task"])) is None:
            return "ended with the scheduler that launched it"
        try:
            if not self._ray.wait([task], timeout=0)[0]:
                return None
            return exit_words(self._ray.get(task))
        except self._ray.exceptions.NodeDiedError:
            return LOST
        except Exception as error:  # whatever Ray says, the training is over
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[-1]}"

    def kill(self, handle: Handle) -> None:
        """Cancel the task."""
        if handle["task"] in self._tasks:
            self._ray.cancel(self._tasks[handle["task"]], force=True)


class SlurmLauncher:
    """Each training a batch job of SLURM, in a folder that all nodes share; they outlive the scheduler.

    Args:
        folder: of the run; submitit keeps its files in `slurm/` there.
        sbatch: options for `sbatch`, such as `--partition=gpu`; a job may take a day if they say nothing else.
        every: seconds between looks at a job.
        cluster: "slurm", or "local" to try it without a cluster.
    """

    name = "slurm"

    def __init__(
        self, folder: Path | str, sbatch: Sequence[str] = (), every: float = 30.0, cluster: str = "slurm"
    ) -> None:
        with needs_extra("the SLURM launcher", "slurm"):
            import submitit
        kinds: dict[str, Any] = {"slurm": submitit.SlurmExecutor, "local": submitit.LocalExecutor}
        try:
            self._executor = kinds[cluster](Path(folder).resolve() / "slurm")
        except RuntimeError as error:
            raise ConfigError(f"the slurm launcher: {error}; run it where batch jobs are submitted") from None
        if cluster == "slurm":
            options = [option.lstrip("-").partition("=") for option in sbatch]
            more = {key: value if equals else True for key, equals, value in options}
            self._executor.update_parameters(time=24 * 60, additional_parameters=more)
        self._cluster, self._every = cluster, every
        self._killed: set[str] = set()
        self._next: dict[str, float] = {}  # when each job is looked at again, on the monotonic clock
        self._jobs: dict[str, Any] = {}

    def launch(self, command: Sequence[str], session: str, env: Mapping[str, str], log: Path) -> Handle:
        """Submit a batch job."""
        job = self._executor.submit(run_command, list(command), dict(env), str(log.resolve()))
        self._jobs[job.job_id] = job
        return {"slurm": job.job_id, "cluster": self._cluster}

    def _job(self, handle: Handle) -> Any:
        """The job, also one of an earlier scheduler."""
        number = handle["slurm"]
        if number not in self._jobs:
            self._jobs[number] = self._executor.job_class(self._executor.folder, number)
        return self._jobs[number]

    def poll(self, handle: Handle) -> str | None:
        """What submitit knows: it looks for the result, asks SLURM once a minute, and at once of a killed job."""
        number = handle["slurm"]
        if time.monotonic() < self._next.get(number, 0.0):
            return None
        killed = number in self._killed
        self._next[number] = time.monotonic() + (1.0 if killed else self._every)
        return f"batch job {number} ended" if self._job(handle).done(force_check=killed) else None

    def kill(self, handle: Handle) -> None:
        """Cancel the batch job."""
        self._job(handle).cancel(check=False)
        self._killed.add(handle["slurm"])
        self._next.clear()


def run_command(command: list[str], env: dict[str, str], log: str) -> int:
    """Run a training on a node of a cluster; it dies with the process that runs this."""
    if not (folder := Path(log).parent).is_dir():
        raise ConfigError(
            f"{folder} is not on {platform.node()}, where Ray placed this training: the run folder must be one that "
            "all nodes share"
        )
    python, option, module, *rest = command
    command = [python, option, module, "--parent", str(os.getpid()), *rest]
    with Path(log).open("ab") as output:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env},
            check=False,
        ).returncode  # fmt: skip


def process_handle(pid: int) -> Handle:
    """A process id, and when it began: another process with the same id began at another time."""
    return {"pid": pid, "began": start_time(pid)}


def start_time(pid: int) -> str | None:
    """When a process began, in words that do not change with the clock; None if it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    with contextlib.suppress(psutil.Error):  # where there is no /proc
        return str(psutil.Process(pid).create_time())
    return None


def is_alive(handle: Handle) -> bool:
    """Whether that very process still runs."""
    return handle["began"] is not None and start_time(int(handle["pid"])) == handle["began"]


def exit_words(code: int) -> str:
    """An exit status for people."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
