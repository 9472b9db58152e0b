"""Questions from the user's own files: JSON, JSON lines or parquet; what envs make of a file is in memory once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import ConfigError, DataError, needs_extra
from shoal.core.files import from_json, read_json

T = TypeVar("T")
Record = Mapping[str, Any]

SPLITS = ("all", "train", "test")
TEST_EVERY = 10
"""Of a file's questions every tenth belongs to `split="test"`, the others to `split="train"`."""


MOST_MADE = 16
_made: OrderedDict[Hashable, Any] = OrderedDict()
_making = threading.RLock()  # what is made from a file may be made from something that is kept


def made_once(key: Hashable, files: Sequence[Path], make: Callable[[], T]) -> T:
    """What `make()` gives, for all who ask in this process; of all things made the last 16 asked for are kept.

    A file is known by its place, time, length and inode: of a changed one it is made again. Safe to share between
    threads; those that ask for the same wait for the first.
    """
    stats = [(path, path.stat()) for path in files]
    state = [(str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in stats]
    full_key = (key, *state)
    with _making:
        if full_key not in _made:
            _made[full_key] = make()
        _made.move_to_end(full_key)
        while len(_made) > MOST_MADE:
            _made.popitem(last=False)
        return _made[full_key]  # type: ignore[no-any-return]


class Shared(tuple[T, ...]):
    """Items that envs share: copied or pickled they are the call that gives them, and not their content."""

    call: tuple[Callable[..., Any], tuple[Any, ...]]

    @classmethod
    def of(cls, items: Sequence[T], call: Callable[..., Any], *args: Any) -> Shared[T]:
        """The items, which `call(*args)` would give again."""
        shared = cls(items)
        shared.call = call, args
        return shared

    def __reduce__(self) -> Any:
        return self.call


def shared_items(load: Callable[[str], Sequence[T]], source: str, split: str) -> Shared[T]:
    """The items of a split of a file as `load` reads them, in memory once for all envs of this process."""
    path = Path(source).expanduser().resolve()

    def chosen() -> Shared[T]:
        items = load(source) if split == "all" else take_split(shared_items(load, source, "all"), split)
        return Shared.of(items, shared_items, load, str(path), split)

    return made_once((load, split), [path], chosen)


def load_records(path: Path | str) -> tuple[Record, ...]:
    """The objects in a `.json` (a list), `.jsonl` or `.parquet` file, in order.

    Raises:
        DataError: when the file breaks; the message has the file and, for JSON lines, the line.
        MissingExtraError: for parquet without pyarrow.
    """
    path = Path(path).expanduser()
    kind = path.suffix.lower()
    if kind == ".json":
        records = read_json(path)
    elif kind in (".jsonl", ".ndjson"):
        records = _json_lines(path)
    elif kind == ".parquet":
        records = _parquet(path)
    else:
        raise DataError(f"{path}: expected a .json, .jsonl or .parquet file, got {kind or 'no suffix'!r}")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path} must hold a list of objects")
    if not records:
        raise DataError(f"{path} holds no records")
    return tuple(records)


def _json_lines(path: Path) -> list[Any]:
    with path.open("rb") as file:
        lines = enumerate(file, 1)
        return [from_json(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _parquet(path: Path) -> list[Any]:
    with needs_extra(f"reading {path.name} (parquet)", "data"):
        import pyarrow
        import pyarrow.parquet
    try:
        rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file ({error})") from error
    return rows


def field(record: Record, names: Sequence[str], where: str) -> Any:
    """The value under the first of `names` that the record has."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise DataError(f"{where}: expected one of the fields {list(names)}, got {sorted(record)}")


def take_split(items: Sequence[T], split: str) -> Sequence[T]:
    """The items of a split, by position, so that it does not depend on any seed."""
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {SPLITS}, got {split!r}")
    if split == "all":
        return items
    wanted = split == "test"
    chosen = [item for i, item in enumerate(items) if (i % TEST_EVERY == TEST_EVERY - 1) == wanted]
    if not chosen:
        raise ConfigError(f"split={split!r} has no item: there are only {len(items)} in all")
    return chosen
