"""Files that survive `kill -9`: written beside their place, synced, then renamed into it.

A folder is committed as a whole by its manifest: `write_folder` builds it under a temporary name, lists the
sha256 of every file in `manifest.json`, and renames the folder last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError

MANIFEST = "manifest.json"


def fsync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable (a rename is only on disk once its folder is)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Replace `path` by `data` so that a reader, or a crash, sees the old bytes or the new, never a mix."""
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_folder(path.parent)


def write_text(path: Path | str, text: str) -> None:
    """`write_bytes` for UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, value: Any) -> None:
    """`write_bytes` for JSON; NaN and infinity are refused, since JSON has no word for them."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """The value in a JSON file, or a `DataError` that names the file and the place where it breaks."""
    path = Path(path)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); restore it or remove it") from error


def sha256_of(path: Path) -> str:
    """The hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def write_folder(folder: Path | str) -> Iterator[Path]:
    """Yield a temporary folder to fill; on a clean exit it becomes `folder` at once, with a manifest.

    If `folder` exists it is replaced. On an exception the temporary folder is removed and `folder` stays.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        yield temporary
        sums = {}
        for file in sorted(path for path in temporary.rglob("*") if path.is_file()):
            sums[file.relative_to(temporary).as_posix()] = sha256_of(file)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        write_json(temporary / MANIFEST, {"sha256": sums})
        os.chmod(temporary, 0o755)
        if folder.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
            os.replace(folder, retired / "was")
            os.replace(temporary, folder)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)


def remove_leftovers(folder: Path | str) -> None:
    """Remove what writers that were killed amid `write_folder` left in `folder`; no other may be writing there."""
    for path in Path(folder).glob(".*"):
        if path.is_dir() and path.suffix in (".tmp", ".old"):
            shutil.rmtree(path, ignore_errors=True)


def verify_folder(folder: Path | str) -> Path:
    """Return `folder` if every file matches its manifest, else raise a `DataError` that names the file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist or is not a folder")
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{folder} has no {MANIFEST}: it was never committed, or is not a shoal folder")
    manifest = read_json(folder / MANIFEST)
    sums = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(sums, dict):
        raise DataError(f"{folder / MANIFEST} must hold an object with 'sha256'")
    for name, expected in sums.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{folder / MANIFEST} names {name!r}, which leaves the folder")
        if not path.is_file():
            raise DataError(f"{path} is listed in {MANIFEST} but missing")
        if sha256_of(path) != expected:
            raise DataError(f"{path} was altered or truncated: its sha256 is not the one in {MANIFEST}")
    return folder
