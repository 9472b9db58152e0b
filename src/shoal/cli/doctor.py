"""`shoal doctor`: what this machine has, what it lacks, what that means for shoal, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from shoal.cli.command import Command, Flag
from shoal.cli.grammar import print_json
from shoal.core.errors import PACKAGES, ConfigError
from shoal.core.executors import available_cpus, ray_address

Status = Literal["ok", "missing", "warning", "failed"]
FILES_OF_OUR_OWN, FILES_A_WORKER = 24, 6
"""Open files of a command without workers, and what each worker adds."""
SMALL_SHM = 256 * 2**20
MORE = """\
Each line is ok, missing (an optional part), warning (it works, with less) or failed.
Exit status: 0 if nothing failed (with --strict: and there is no warning), 1 otherwise.

examples:
  shoal doctor                  look, and run the self-test of about ten seconds
  shoal doctor --no-self-test   only look
  shoal doctor --json           for a bug report or a script
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    status: Status
    found: str
    advice: str = ""
    name: str = ""


@dataclass(frozen=True)
class DoctorOptions:
    """Say what this machine has and lacks for shoal, and what to do about it."""

    no_self_test: Flag = False
    """start nothing, only look"""
    strict: Flag = False
    """a warning is a failure"""
    json: Flag = False
    """print the findings as JSON"""


def doctor(options: DoctorOptions) -> int:
    """Look, test, tell."""
    findings = []
    for finding in examine(self_test=not options.no_self_test):
        findings.append(finding)
        if not options.json:
            print(f"{finding.status:<8} {finding.name:<12} {finding.found}", flush=True)
            if finding.advice:
                print(f"{'':<21} → {finding.advice}", flush=True)
    bad = ("failed", "warning") if options.strict else ("failed",)
    wrong = [finding.name for finding in findings if finding.status in bad]
    if options.json:
        print_json({"findings": [asdict(finding) for finding in findings], "failed": wrong})
    else:
        print(f"\n{'wrong: ' + ', '.join(wrong) if wrong else 'shoal works here'}")
    return int(bool(wrong))


COMMAND = Command(DoctorOptions, doctor, MORE)


def examine(*, self_test: bool = True) -> Iterator[Finding]:
    """All findings, one after another."""
    for name, look in LOOKS.items():
        try:
            found = look()
        except Exception as error:  # a border: what cannot even be looked at is the finding
            found = Finding("failed", _in_a_line(error), ADVICE.get(name, ""))
        yield replace(found, name=name)
    for extra, modules in PACKAGES.items():
        missing = ", ".join(module for module in modules if not _has(module))
        found = Finding("ok", ", ".join(modules))
        if missing:
            found = Finding("missing", f"without {missing}", f'pip install "shoal[{extra}]"')
        yield replace(found, name=f"[{extra}]")
    if self_test:
        told = "environments in two worker processes equal a plain loop"
        yield replace(_tried(_try_vector, told), name="vector")
        if _has("torch"):
            told = "episodes of two workers equal those played one by one"
            yield replace(_tried(_try_rollout, told), name="rollout")
            told = "the same update twice gives the same weights"
            yield replace(_tried(_try_update, told), name="update")


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _has(module: str) -> bool:
    """Whether a module is installed; a folder of its name without code in it is none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None
    return False


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "?"


def _python() -> Finding:
    from shoal import __version__

    found = (
        f"shoal {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    if sys.platform == "win32":
        return Finding("warning", found, "shoal is not tested on Windows: a container with Linux is")
    return Finding("ok", found)


def _cores() -> Finding:
    usable = available_cpus()
    quota = _cpu_quota()
    found = f"{usable} usable of {os.cpu_count()}" + (
        "" if quota is None else f", {quota:g} by the container's limit"
    )
    if quota is not None and quota < usable:
        return Finding("warning", found, f"more than {max(1, round(quota))} busy workers wait for each other")
    return Finding("ok", found)


def _cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the control group may use, if it is limited."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((root / "cpu/cpu.cfs_period_us").read_text())
    return None


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = min(int((Path("/sys/fs/cgroup") / name).read_text()), total)
            break
    found = f"{total / 2**30:.1f} GiB" + (
        "" if limit is None else f", {limit / 2**30:.1f} GiB by the container's limit"
    )
    if min(total, limit or total) < 2 * 2**30:
        return Finding("warning", found, "torch with a few workers wants 2 GiB: use fewer workers")
    return Finding("ok", found)


def _shared_memory(folder: str = "/dev/shm") -> Finding:
    try:
        about = os.statvfs(folder)
    except OSError as error:
        return Finding("warning", f"{folder}: {error.strerror}", "Ray needs it; shoal's own workers do not")
    if not os.access(folder, os.W_OK):
        return Finding("warning", f"{folder} cannot be written", "Ray needs it; shoal's own workers do not")
    size = about.f_frsize * about.f_blocks
    found = f"{folder} has {size / 2**20:,.0f} MiB, {about.f_frsize * about.f_bavail / 2**20:,.0f} free"
    if size < SMALL_SHM:
        advice = "too small for Ray and for torch's data loaders (docker run --shm-size=2g); shoal's workers need none"
        return Finding("warning", found, advice)
    return Finding("ok", found)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    workers = max(0, (soft - FILES_OF_OUR_OWN) // FILES_A_WORKER) if soft != resource.RLIM_INFINITY else 10**6
    found = f"{soft} open files allowed (up to {hard}): enough for about {workers:,} workers"
    if workers < 64:
        return Finding(
            "warning", found, f"raise the limit: ulimit -n {min(hard, 4096) if hard > 0 else 4096}"
        )
    return Finding("ok", found)


def _processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [] if soft == resource.RLIM_INFINITY else [soft]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/pids.max").read_text()))
    if not limits:
        return Finding("ok", "no limit")
    found = f"at most {min(limits):,} processes and threads"
    if min(limits) < 256:
        return Finding("warning", found, "raise it (ulimit -u, docker --pids-limit), or use few workers")
    return Finding("ok", found)


def _folder() -> Finding:
    """Whether runs can be written here, and locked."""
    from shoal.core.run_folder import FolderLock

    here = Path("runs") if Path("runs").is_dir() else Path.cwd()
    free = shutil.disk_usage(here).free
    try:
        with tempfile.TemporaryDirectory(prefix=".shoal-doctor-", dir=here) as folder:
            lock, second = FolderLock(Path(folder) / ".lock"), FolderLock(Path(folder) / ".lock")
            lock.take()
            locks = second.is_taken()
            lock.release()
    except OSError as error:
        return Finding("failed", f"{here} cannot be written: {error.strerror}", "run elsewhere, or --run-dir")
    found = f"{here.absolute()} can be written, {free / 2**30:.1f} GiB free"
    if not locks:
        return Finding("warning", f"{found}, no locks", "two runs in one folder are not noticed here")
    if free < 2**30:
        return Finding("warning", found, "make room: a checkpoint of a small language model has 0.5 GiB")
    return Finding("ok", found)


def _gpu() -> Finding:
    if not _has("torch"):
        return Finding("missing", "torch is not installed", 'pip install "shoal[train]"')
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
        return Finding("ok", f"{torch.cuda.device_count()} by CUDA {torch.version.cuda}: {', '.join(names)}")
    if torch.backends.mps.is_available():
        return Finding("ok", "Apple's, by device=mps")
    seen = shutil.which("nvidia-smi") is not None
    advice = (
        "there is a driver: install a torch built for CUDA" if seen else "the tiny model and PPO need none"
    )
    return Finding("warning" if seen else "missing", f"none that torch {torch.__version__} can use", advice)


def _ray() -> Finding:
    if not _has("ray"):
        return Finding("missing", "not installed", 'for several machines: pip install "shoal[parallel]"')
    try:
        address = ray_address()
    except ConfigError as error:
        return Finding("failed", str(error), "until then no run on Ray can start")
    return Finding(
        "ok", f"{_version('ray')}, " + (f"cluster at {address}" if address else "started here on use")
    )


def _tmux() -> Finding:
    path = shutil.which("tmux")
    if path is None:
        return Finding("missing", "not installed", "skills train in plain processes: --launcher local")
    return Finding("ok", path)


LOOKS: dict[str, Callable[[], Finding]] = {
    "system": _python, "cores": _cores, "memory": _memory, "shm": _shared_memory, "files": _files,
    "processes": _processes, "folder": _folder, "gpu": _gpu, "ray": _ray, "tmux": _tmux,
}  # fmt: skip
ADVICE = {
    "gpu": "torch is here and cannot be imported: install it again, for this Python and driver",
    "ray": "Ray is here and cannot be used: install it again, or unset RAY_ADDRESS",
    "folder": "go to a folder that is there and can be written",
}
"""Where a look itself fails."""


# --- the self-test
def _tried(test: Callable[[], str], promise: str) -> Finding:
    began = time.monotonic()
    try:
        wrong = test()
    except Exception as error:  # a border: whatever fails here is the finding
        wrong = _in_a_line(error)
    seconds = f"{time.monotonic() - began:.1f} s"
    if wrong:
        return Finding("failed", f"{wrong} ({seconds})", "please report it with `shoal doctor --json`")
    return Finding("ok", f"{promise} ({seconds})")


def _try_vector() -> str:
    """Forty steps of four environments, in this process and in two workers."""
    import numpy as np

    from shoal.vector import make_vec

    seen = []
    for backend, workers in (("serial", None), ("process", 2)):
        envs = make_vec("CartPole-v1", 4, backend=backend, num_workers=workers)
        try:
            shown = [envs.reset(seed=7)[0].copy()]
            for step in range(40):
                observations, rewards, *_ = envs.step(np.array([(step + env) % 2 for env in range(4)]))
                shown += [observations.copy(), rewards.copy()]
        finally:
            envs.close()
        seen.append(shown)
    same = all(np.array_equal(a, b) for a, b in zip(*seen, strict=True))
    return "" if same else "the results of two workers differ from those of a plain loop"


def _try_rollout() -> str:
    """A dozen episodes by the tiny model, one by one and on two workers."""
    import torch

    from shoal.rollout.factory import words_of
    from shoal.rollout.rollouts import ParallelRolloutManager
    from shoal.rollout.samplers.registry import make_engine
    from shoal.rollout.verify import compare
    from shoal.train.agent.config import compose_config

    config = compose_config(
        "demo-bandit", ["es_manager.train.env_groups=3", "agent_proxy.parallel_n_jobs=2"], None
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine = make_engine(config.engine, words_of(config), 0)
        played = []
        for backend in ("serial", "processes"):
            with ParallelRolloutManager(config, engine, backend=backend) as manager:  # type: ignore[arg-type]
                played.append(manager.collect(0))
    finally:
        torch.set_num_threads(threads)
    verdict = compare(*played)
    return "" if verdict.level == "L2" else f"episodes differ: {verdict.first}"


def _try_update() -> str:
    """Two updates of a tiny model and the same once more, on the GPU if there is one."""
    import torch

    from shoal.train.agent.determinism import updated_twice

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gap = max(float((one - other).abs().max()) for one, other in zip(*updated_twice(device), strict=True))
    return "" if gap == 0 else f"on {device} weights differ by {gap:.1e} after the same update"
