"""Which files of a package a piece of code passes, in this process and in its workers.

    with Tracer("shoal", tmp_path) as tracer:
        envs = make_vec([partial(tracer.installed, make_env)] * 2, backend="process")
        envs.reset()
        with tracer.piece() as passed:
            envs.step(actions)
    passed.files()

A worker takes part once it has called `tracer.install()` in the thread that works, or anything through
`tracer.installed`. Threads begun before that are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import mmap
import os
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

R = TypeVar("R")


class Passed:
    """What was passed in a piece of code: files by process, each with the functions called there."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, str], set[str]] = defaultdict(set)

    def files(self, *, leave_out: tuple[str, ...] = ()) -> set[str]:
        """Paths inside the package, such as `vector/worker.py`, but those that begin with one of `leave_out`."""
        return {file for _, file in self.calls if not file.startswith(leave_out)}

    def processes(self) -> dict[int, set[str]]:
        """The files by the id of the process that passed them."""
        found: dict[int, set[str]] = defaultdict(set)
        for process, file in self.calls:
            found[process].add(file)
        return dict(found)


class Tracer:
    """Watches this process while it is entered, and every process that calls `install`; pickles to the workers.

    Args:
        package: the importable name of what is watched.
        folder: an existing folder where the processes meet.
    """

    def __init__(self, package: str, folder: Path | str) -> None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"package must be a package that can be imported, got {package!r}")
        self._root = os.path.realpath(spec.submodule_search_locations[0]) + os.sep
        self._log, self._switch = Path(folder) / "calls", Path(folder) / "switch"
        self._log.touch()
        self._switch.write_bytes(struct.pack("<q", 0))
        self._pieces = 0

    def __enter__(self) -> Tracer:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def install(self) -> None:
        """Watch the calling thread, and threads begun from now on."""
        watch = _Watch(self._root, self._log, self._switch)
        threading.setprofile(watch)
        sys.setprofile(watch)

    def installed(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Install, then call `function`: for what a worker is given to build its envs."""
        self.install()
        return function(*args, **kwargs)

    @contextlib.contextmanager
    def piece(self) -> Iterator[Passed]:
        """What is passed until the block ends; read it afterwards."""
        self._pieces += 1
        passed = Passed()
        gc.collect()
        gc.disable()  # what others left behind would be finalized amid the piece
        self._turn(self._pieces)
        try:
            yield passed
        finally:
            self._turn(0)
            gc.enable()
        for line in self._log.read_text().splitlines():
            piece, process, file, function = line.split("\t")
            if int(piece) == self._pieces:
                passed.calls[int(process), file].add(function)

    def _turn(self, piece: int) -> None:
        with self._switch.open("r+b") as file:
            file.write(struct.pack("<q", piece))


class _Watch:
    """The profile function of a process: writes down each place once a piece."""

    def __init__(self, root: str, log: Path, switch: Path) -> None:
        self._root = root
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        with switch.open("rb") as file:
            self._switch = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
        self._inside: dict[str, str] = {}  # the path in the package, or "" outside it
        self._seen: set[tuple[int, int, str, str]] = set()
        self._begun: set[tuple[int, int, int]] = set()

    def __call__(self, frame: FrameType | None, event: str, _: object) -> None:
        piece = struct.unpack("<q", self._switch[:8])[0]
        if piece == 0 or event not in ("call", "return"):
            return
        here = (piece, os.getpid(), threading.get_ident())
        begins = here not in self._begun
        self._begun.add(here)
        while frame is not None:  # at the first event also what was already running, since it called this
            self._note(piece, frame)
            frame = frame.f_back if begins else None

    def _note(self, piece: int, frame: FrameType) -> None:
        name = frame.f_code.co_filename
        file = self._inside.get(name)
        if file is None:
            path = os.path.realpath(name)
            file = path.removeprefix(self._root) if path.startswith(self._root) else ""
            self._inside[name] = file
        place = (piece, os.getpid(), file, frame.f_code.co_name)
        if file and place not in self._seen:
            self._seen.add(place)
            os.write(self._log, "\t".join(map(str, place)).encode() + b"\n")
