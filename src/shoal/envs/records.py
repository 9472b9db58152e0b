"""Questions from the user's own files: JSON, JSON lines or parquet, read once per process and file."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import ConfigError, DataError, missing_extra
from shoal.core.files import read_json

T = TypeVar("T")
Record = Mapping[str, Any]

SPLITS = ("all", "train", "test")
TEST_EVERY = 10
"""Of a file's questions every tenth belongs to `split="test"`, the others to `split="train"`."""


def load_records(path: Path | str) -> tuple[Record, ...]:
    """The objects in a `.json` (a list), `.jsonl` or `.parquet` file, in order.

    Raises:
        DataError: when the file breaks; the message has the file and, for JSON lines, the line.
        MissingExtraError: for parquet without pyarrow.
    """
    path = Path(path).expanduser()
    stat = path.stat()
    return _load(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=8)
def _load(path: Path, modified: int, size: int) -> tuple[Record, ...]:
    """`load_records`, remembered until the file changes."""
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
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number} is not valid JSON ({error})") from error
    return records


def _parquet(path: Path) -> list[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra(f"reading {path.name} (parquet)", "data") from error
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
