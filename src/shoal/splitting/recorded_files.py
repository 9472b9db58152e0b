"""Reading recorded files: what is wrong with one is a `DataError` with its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.core.files import read_json
from shoal.core.registry import check_name


def read_text(file: Path) -> str:
    """The file's text."""
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        raise DataError(f"{file} is missing; restore it or remove the trajectory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error})") from error


def read_json_file(file: Path) -> Any:
    """The value in a JSON file."""
    try:
        return read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{file} is missing; restore it or remove the trajectory") from None


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line that is not empty."""
    for number, line in enumerate(read_text(file).split("\n"), 1):  # not at U+2028, which JSON may hold
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number} is not valid JSON ({error})") from error


def safe_id(name: str) -> str:
    """`name` if it may be a trajectory's id and part of a path."""
    try:
        return check_name("dataset", name)
    except ValueError as error:
        raise DataError(str(error)) from error
