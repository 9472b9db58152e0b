"""Break a room in a hundred places, one at a time, and see whether its tests notice.

`python tests/rooms/mutate.py src/shoal/core --number 100 --seed 0 -- python -m pytest tests/core -x -q -p no:xdist`

The places are drawn from the seed alone: operators, integers and truth values, conditions, statements that do
something. Each is changed in a copy of the tree, never in the tree itself. The command must succeed on the copy as
it is; a change is noticed when it then fails or exceeds its time. Interrupt it to have the result so far.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import FrameType

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
ANNOTATIONS = ("annotation", "returns", "type_params")
LEAST_SECONDS = 60.0
"""A command has four times what it took on the unchanged copy, and at least this."""


@dataclass(frozen=True, order=True)
class Mutation:
    """One change of one file, by its bytes."""

    file: str
    line: int
    start: int
    stop: int
    kind: str
    before: str
    after: str
    outcome: str = ""
    seconds: float = 0.0

    def applied_to(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.after.encode() + source[self.stop :]


# --- places
def mutations_of(source: bytes, file: str) -> Iterator[Mutation]:
    """Every change that may be made in a file, but for those that `changes` refuses."""
    tree = ast.parse(source)
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def change(node: ast.expr | ast.stmt, kind: str, after: str) -> Iterator[Mutation]:
        start = begins[node.lineno - 1] + node.col_offset
        stop = begins[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield Mutation(file, node.lineno, start, stop, kind, source[start:stop].decode(), after)

    def visit(node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.expr | ast.stmt):
            for kind, after in changes_of(node):
                yield from change(node, kind, after)
        for field, value in ast.iter_fields(node):
            if field in ANNOTATIONS or isinstance(node, ast.JoinedStr):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_type_alias(node, child):
                    yield from visit(child)
            if field in ("test", "ifs"):
                for test in value if isinstance(value, list) else [value]:
                    yield from change(test, "condition", f"(not ({ast.unparse(test)}))")

    yield from visit(tree)


def changes(mutation: Mutation, source: bytes) -> bool:
    """Whether a mutation gives another program; a number inside an f-string, say, has no place of its own."""
    try:
        return ast.dump(ast.parse(mutation.applied_to(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def changes_of(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """Kind and text of what an expression or statement can be replaced by."""
    match node:
        case ast.Compare():
            for at, op in enumerate(node.ops):
                ops = [*node.ops[:at], SWAPS[type(op)](), *node.ops[at + 1 :]]
                yield "comparison", _text(ast.Compare(node.left, ops, node.comparators))
        case ast.BinOp() if type(node.op) in SWAPS and not isinstance(
            node.left, ast.Constant | ast.JoinedStr
        ):
            yield "arithmetic", _text(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))
        case ast.AugAssign() if type(node.op) in SWAPS:
            yield "arithmetic", ast.unparse(ast.AugAssign(node.target, SWAPS[type(node.op)](), node.value))
            yield "statement", "pass"
        case ast.BoolOp():
            yield "boolean", _text(ast.BoolOp(SWAPS[type(node.op)](), node.values))
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "boolean", _text(node.operand)
        case ast.Constant(value=bool()):
            yield "constant", str(not node.value)
        case ast.Constant(value=int()):
            yield "constant", f"({node.value + 1})"
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()):
            yield "statement", "pass"
        case ast.Raise() | ast.Delete() | ast.Break() | ast.Continue():
            yield "statement", "pass"
        case ast.Return(value=ast.expr()):
            yield "statement", "return None"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "statement", "pass"


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _is_type_alias(parent: ast.AST, node: ast.AST) -> bool:
    return isinstance(parent, ast.Assign) and isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def chosen(room: Path, root: Path, number: int, seed: int, without: Sequence[str] = ()) -> list[Mutation]:
    """`number` changes of the files of a room but for those named; the same for the same files and seed."""
    sources = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in (sorted(room.rglob("*.py")) if room.is_dir() else [room])
        if path.name not in without
    }
    places = sorted({place for file, source in sources.items() for place in mutations_of(source, file)})
    random.Random(seed).shuffle(places)
    taken = list(islice((place for place in places if changes(place, sources[place.file])), number))
    if not taken:
        raise SystemExit(f"{room} holds nothing that can be changed")
    return taken


# --- runs
class Trials:
    """Runs a command on changed copies of a tree, several at a time."""

    def __init__(self, root: Path, command: list[str], processes: int, timeout: float | None) -> None:
        self.root, self.command, self.timeout = root, command, timeout
        self._stop = threading.Event()
        self._running: set[int] = set()
        self._lock = threading.RLock()  # `stop` may come amid it
        self._place = tempfile.TemporaryDirectory(prefix="mutate-")
        self._copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        files = _files_of(root)
        for number in range(processes):
            copy = Path(self._place.name) / str(number) / root.name
            for file in files:
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, copy / file, follow_symlinks=False)
            self._copies.put(copy)
        self.processes = processes

    def close(self) -> None:
        """Remove the copies."""
        self._place.cleanup()

    def stop(self, *_: int | FrameType | None) -> None:
        """End what runs, and start nothing more."""
        self._stop.set()
        with self._lock:
            for group in list(self._running):
                with contextlib.suppress(ProcessLookupError):  # it ended by itself, just now
                    os.killpg(group, signal.SIGKILL)

    def prove_calm(self) -> None:
        """Run the command on a copy as it is, which must succeed; its duration sets the time limit."""
        began = time.monotonic()
        code, said = self._run(self.command, self.timeout)
        if self._stop.is_set():
            return
        if code != 0:
            raise SystemExit(
                f"{said}\nthe command must succeed before anything is changed, it ended with {code}"
            )
        self.timeout = self.timeout or max(LEAST_SECONDS, 4 * (time.monotonic() - began))

    def all(self, mutations: list[Mutation]) -> Iterator[Mutation]:
        """Each mutation with its outcome, in the order in which they end; those stopped are left out."""
        ended: queue.SimpleQueue[Mutation | None] = queue.SimpleQueue()
        with ThreadPoolExecutor(self.processes) as pool:
            for mutation in mutations:
                pool.submit(self._try, mutation).add_done_callback(lambda done: ended.put(done.result()))
            for _ in mutations:
                mutation_ended = ended.get()
                if mutation_ended is not None:
                    yield mutation_ended

    def _try(self, mutation: Mutation) -> Mutation | None:
        if self._stop.is_set():
            return None
        began = time.monotonic()
        code, _ = self._run(self.command, self.timeout, mutation)
        if self._stop.is_set():
            return None
        outcome = {0: "survived", None: "noticed: too slow"}.get(code, "noticed")
        return replace(mutation, outcome=outcome, seconds=round(time.monotonic() - began, 2))

    def _run(
        self, command: list[str], timeout: float | None, mutation: Mutation | None = None
    ) -> tuple[int | None, str]:
        """Exit code (None: out of time) and output of the command on a copy, with one change."""
        copy = self._copies.get()
        path = copy / mutation.file if mutation else None
        source = path.read_bytes() if path else b""
        try:
            if path and mutation:
                path.write_bytes(mutation.applied_to(source))
            return self._ended(command, copy, timeout)
        finally:
            if path:
                path.write_bytes(source)
            self._copies.put(copy)

    def _ended(self, command: list[str], copy: Path, timeout: float | None) -> tuple[int | None, str]:
        paths = [str(copy / "src"), str(copy)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        with self._lock:
            if self._stop.is_set():
                return None, ""
            process = subprocess.Popen(
                command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
            self._running.add(process.pid)
        try:
            said, _ = process.communicate(timeout=timeout)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        finally:
            with self._lock:
                self._running.discard(process.pid)


def _files_of(root: Path) -> list[str]:
    """What git knows or would add; without git all but hidden and cached files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (root / name).is_file()]
    inside = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return [
        str(path) for path in inside if not any(p.startswith(".") or p == "__pycache__" for p in path.parts)
    ]


def main(argv: list[str] | None = None) -> int:
    """Print every change with its outcome, the survivors once more, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", type=Path, help="a folder or file of the tree in this folder")
    parser.add_argument("--number", type=int, default=100, help="changes to make")
    parser.add_argument("--seed", type=int, default=0, help="chooses them")
    parser.add_argument(
        "--without", nargs="*", default=(), metavar="FILE", help="names of files to leave as they are"
    )
    parser.add_argument("--processes", type=int, default=1, help="commands at a time")
    parser.add_argument("--timeout", type=float, help="seconds a command has")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"), help="the result as JSON")
    parser.add_argument("command", nargs="+", help="the test command, after --")
    options = parser.parse_args(argv)
    root = Path.cwd()
    mutations = chosen(options.room.resolve(), root.resolve(), options.number, options.seed, options.without)
    trials = Trials(root.resolve(), options.command, options.processes, options.timeout)
    before = signal.signal(signal.SIGINT, trials.stop)
    ended: list[Mutation] = []
    try:
        trials.prove_calm()
        for mutation in trials.all(mutations):
            ended.append(mutation)
            _say(mutation)
    finally:
        signal.signal(signal.SIGINT, before)
        trials.close()
    survivors = sorted(mutation for mutation in ended if mutation.outcome == "survived")
    sys.stdout.write(f"\nnoticed {len(ended) - len(survivors)} of {len(ended)}; survived:\n")
    for mutation in survivors:
        _say(mutation)
    result = {
        "room": str(options.room), "seed": options.seed, "command": options.command,
        "complete": len(ended) == len(mutations), "noticed": len(ended) - len(survivors),
        "survived": len(survivors), "mutations": [asdict(mutation) for mutation in sorted(ended)],
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _say(mutation: Mutation) -> None:
    before, after = (" ".join(text.split())[:60] for text in (mutation.before, mutation.after))
    sys.stdout.write(
        f"{mutation.outcome:<9} {mutation.file}:{mutation.line} {mutation.kind}: {before} -> {after}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
