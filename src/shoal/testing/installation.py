"""The versions, extras and hardware that shoal finds, and what to do about what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from packaging.requirements import Requirement

from shoal.core.errors import PACKAGES, ConfigError, MissingExtraError, pip_line
from shoal.core.executors import available_cpus, ray_address

Status = Literal["ok", "optional", "warning", "failed"]
SMALL_SHM = 256 * 2**20
SHM_USERS = "on Linux, vector environments in worker processes and Ray need it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    status: Status  # optional: a part that is not here; warning: it works, with less
    found: str
    advice: str = ""
    name: str = ""


def examine() -> Iterator[Finding]:
    """Look at the installation and the machine; `shoal doctor` in Python.

    Returns:
        A finding of the system, cores, shared memory, GPU, Ray, determinism of an update, and of each extra, as it is
        made. Nothing is raised: what cannot be looked at is a finding too.
    """
    for name, look in LOOKS.items():
        try:
            found = look()
        except Exception as error:  # a border: what cannot even be looked at is the finding
            found = Finding("failed", _in_a_line(error), ADVICE.get(name, ""))
        yield replace(found, name=name)
    for extra, modules in PACKAGES.items():
        missing = ", ".join(module for module in modules if not _has(module))
        found = Finding("ok", ", ".join(modules))
        if unfit := _unfit(extra):
            found = Finding("failed", "; ".join(unfit), pip_line(extra))
        elif missing:
            found = Finding("optional", f"without {missing}", pip_line(extra))
        yield replace(found, name=f"[{extra}]")


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _has(module: str) -> bool:
    """Whether a module is installed; a folder of its name without code in it is none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None
    return False


def _unfit(extra: str) -> list[str]:
    """Which packages of an extra are installed in a version that shoal, or one of the others, does not work with."""
    problems = []
    for asked in _requirements():
        here = _version(asked.name)
        of_it = asked.marker is not None and asked.marker.evaluate({"extra": extra})
        if of_it and here != "?" and not asked.specifier.contains(here, prereleases=True):
            problems.append(f"{asked.name} is {here}, and shoal needs {asked.name}{asked.specifier}")
    if extra == "llm" and not problems and all(map(_has, ("torch", "transformers", "peft"))):
        from shoal.train.agent.policies.lora import refuse_unfit_peft

        try:
            refuse_unfit_peft()
        except MissingExtraError as error:
            problems.append(str(error).partition(":")[0])
    return problems


def _requirements() -> list[Requirement]:
    """Of shoal and its extras; none are known of a checkout that was not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return [Requirement(line) for line in importlib.metadata.requires("shoal") or ()]
    return []


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
    return Finding("ok", f"{available_cpus()} usable of {os.cpu_count()}")


def _shared_memory(folder: str = "/dev/shm") -> Finding:
    try:
        about = os.statvfs(folder)
    except OSError as error:
        return Finding("warning", f"{folder}: {error.strerror}", SHM_USERS)
    if not os.access(folder, os.W_OK):
        return Finding("warning", f"{folder} cannot be written", SHM_USERS)
    size = about.f_frsize * about.f_blocks
    found = f"{folder} has {size / 2**20:,.0f} MiB, {about.f_frsize * about.f_bavail / 2**20:,.0f} free"
    if size < SMALL_SHM:
        advice = "too small for Ray and for many worker processes (docker run --shm-size=2g)"
        return Finding("warning", found, advice)
    return Finding("ok", found)


def _gpu() -> Finding:
    if not _has("torch"):
        return Finding("optional", "torch is not installed", pip_line("train"))
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
    return Finding("warning" if seen else "optional", f"none that torch {torch.__version__} can use", advice)


def _ray() -> Finding:
    if not _has("ray"):
        return Finding("optional", "not installed", f"for several machines: {pip_line('parallel')}")
    try:
        address = ray_address()
    except ConfigError as error:
        return Finding("failed", str(error), "until then no run on Ray can start")
    where = "started here on use" if address == "local" else f"cluster at {address}"
    return Finding("ok", f"{_version('ray')}, {where}")


def _update() -> Finding:
    """Two updates of a tiny model and the same once more, on the GPU if there is one."""
    if not _has("torch"):
        return Finding("optional", "torch is not installed", pip_line("train"))
    import torch

    from shoal.testing.determinism import updated_twice

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gap = max(float((one - other).abs().max()) for one, other in zip(*updated_twice(device), strict=True))
    if gap:
        advice = "runs of one seed will differ; please report it with `shoal doctor --json`"
        return Finding("failed", f"on {device} weights differ by {gap:.1e} after the same update", advice)
    return Finding("ok", f"the same update twice gives the same weights on {device}")


LOOKS: dict[str, Callable[[], Finding]] = {
    "system": _python, "cores": _cores, "shm": _shared_memory, "gpu": _gpu, "ray": _ray, "update": _update,
}  # fmt: skip
ADVICE = {
    "gpu": "torch is here and cannot be imported: install it again, for this Python and driver",
    "ray": "Ray is here and cannot be used: install it again, or unset RAY_ADDRESS",
}
"""Where a look itself fails."""
