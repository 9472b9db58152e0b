"""Files that survive `kill -9`: written beside their place, synced, then renamed into it.

A folder is committed as a whole by its manifest: `write_folder` builds it under a temporary name, lists the
sha256 of every file in `manifest.json`, renames the old folder aside and the new one into its place. After a crash
between the two, the next reader or clean-up puts the old one back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import DataError, ShoalError, reading

MANIFEST = "manifest.json"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[a-z0-9_]{8}\.(?P<kind>tmp|old)", re.DOTALL)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def cache_folder() -> Path:
    """Where what can be made again is kept between processes: `$XDG_CACHE_HOME/shoal`, by default `~/.cache/shoal`."""
    return _of_the_user("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """Where what a user keeps between processes is: `$XDG_STATE_HOME/shoal`, by default `~/.local/state/shoal`."""
    return _of_the_user("XDG_STATE_HOME", ".local/state")


def _of_the_user(variable: str, default: str) -> Path:
    try:
        return Path(os.environ.get(variable) or f"~/{default}").expanduser() / "shoal"
    except RuntimeError:  # no HOME, and no account either
        return Path("/", default, "shoal")


def fsync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable (a rename is only on disk once its folder is)."""
    if os.name == "nt":  # where folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Replace `path` by `data` so that a reader, or a crash, sees the old bytes or the new, never a mix.

    A new file has the mode that `open` gives it; one that is replaced keeps its mode.
    """
    path = Path(path)
    with replacing(path) as temporary, open(temporary, "xb") as file:
        _take_mode(path, temporary)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write a file under, which takes the place of `path` on a clean exit; nothing stays otherwise."""
    temporary = _beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        _name(error, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_folder(path.parent)


def _name(error: BaseException, path: Path | str) -> None:
    """Add the name of the file to an error of the disk that lacks it, as after a write to an open file."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _DISK:
        error.filename = str(path)


def _beside(path: Path, kind: str = "tmp") -> Path:
    """An unused name beside `path`, for its replacement."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")


def _mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _take_mode(path: Path, new: Path) -> None:
    """Give `new` the mode of what it replaces, if there is anything."""
    with contextlib.suppress(FileNotFoundError):
        if (mode := _mode_of(path)) != _mode_of(new):
            new.chmod(mode)


def write_text(path: Path | str, text: str) -> None:
    """`write_bytes` for UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))


def append_line(path: Path | str, line: bytes, *, durable: bool = False) -> None:
    """Add `line`, which ends with a newline, to a file; what was half written before stays a line of its own."""
    try:
        with open(path, "a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            while line:
                line = line[file.write(line) :]
            if durable:
                os.fsync(file.fileno())
    except OSError as error:
        _name(error, path)
        raise


def whole_lines(path: Path, kind: Any) -> Iterator[Any]:
    """The values in a file of JSON lines, each of type `kind`, without those that a kill cut off."""
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(line, type=kind)


def write_json(path: Path | str, value: Any) -> None:
    """`write_bytes` for JSON; NaN and infinity are refused: JSON cannot represent them.

    Half a surrogate pair, which UTF-8 has no bytes for, is written as its escape.
    """
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text))


def read_json(path: Path | str) -> Any:
    """The value in a JSON file, or a `DataError` that names the file and the place where it breaks."""
    return from_json(Path(path).read_bytes(), str(path), "; restore it or remove it")


def from_json(text: str | bytes, where: str, advice: str = "") -> Any:
    """The value that JSON text spells, or a `DataError` that names `where` it stands and the place where it breaks."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON ({error}){advice}") from error


def sha256_of(path: Path) -> str:
    """The hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_folder(folder: Path) -> str:
    """The hex sha256 of the names and the bytes of all files in a folder and those inside; hidden ones are left out."""
    digest = hashlib.sha256()
    for path in _files_in(folder):
        inside = path.relative_to(folder)
        if not any(part.startswith(".") for part in inside.parts):
            digest.update(f"{sha256_of(path)} {inside.as_posix()}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def write_folder(folder: Path | str) -> Iterator[Path]:
    """Yield a temporary folder to fill; on a clean exit it becomes `folder` at once, with a manifest.

    If `folder` exists it is replaced, and its mode kept. On an exception the temporary folder is removed and `folder`
    stays; an error of the disk in the message of safetensors or shutil is raised as an `OSError`. Several may write
    the same folder at a time: the last one's stays, whole. A file that a library wrote for its owner alone, as
    safetensors does, gets the mode that the umask allows.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(folder)
    temporary.mkdir()
    readable = _mode_of(temporary) & 0o666
    try:
        yield temporary
        sums = {}
        for file in _files_in(temporary):
            if _mode_of(file) == 0o600 != readable:
                file.chmod(readable)
            sums[file.relative_to(temporary).as_posix()] = sha256_of(file)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        write_json(temporary / MANIFEST, {"sha256": sums})
        _take_mode(folder, temporary)
        for inside, _, _ in os.walk(temporary):
            fsync_folder(Path(inside))
        _commit(temporary, folder)
    except BaseException as error:
        _name(error, folder)
        restore_folder(folder)
        _remove(temporary)
        # A full disk, in Rust and in shutil.
        code = re.search(r"(?:\(os error|\[Errno) (\d+)[)\]]", str(error))
        if code and not isinstance(error, ShoalError) and getattr(error, "errno", None) is None:
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
        raise


def _commit(temporary: Path, folder: Path) -> None:
    """Give `temporary` the name `folder`; what had it before is renamed aside first, and removed at the end."""
    aside = _beside(folder, "old")
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, aside)
        try:
            os.replace(temporary, folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _remove(aside)  # another writer was quicker: its folder is replaced
    fsync_folder(folder.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    """Remove a folder, file or link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def restore_folder(folder: Path | str) -> None:
    """Put back what a writer had renamed aside when it was killed before its own was in place."""
    folder = Path(folder)
    if os.path.lexists(folder) or not folder.parent.is_dir():
        return
    aside = [path for path, name, kind in _leftovers(folder.parent) if (name, kind) == (folder.name, "old")]
    if aside:
        os.replace(max(aside, key=lambda path: path.lstat().st_ctime_ns), folder)
        fsync_folder(folder.parent)


def restore_folders(parent: Path | str) -> None:
    """`restore_folder` for all folders in `parent`, before looking which there are."""
    for _, name, kind in _leftovers(Path(parent)):
        if kind == "old":
            with contextlib.suppress(OSError):  # only reading is allowed here, or another reader was quicker
                restore_folder(Path(parent) / name)


def remove_leftovers(folder: Path | str) -> None:
    """Remove what killed writers left in `folder`, and put back what they had renamed aside.

    No other may be writing there.
    """
    folder = Path(folder)
    for path, name, kind in _leftovers(folder):
        if kind == "old":
            restore_folder(folder / name)
        _remove(path)


def _leftovers(folder: Path) -> list[tuple[Path, str, str]]:
    """Path, name and kind of what writers work with: `.<name>.<random>.tmp` and `.old`."""
    found = [(path, _LEFTOVER.fullmatch(path.name)) for path in folder.glob(".*")]
    return [(path, match["name"], match["kind"]) for path, match in found if match]


def _files_in(folder: Path) -> list[Path]:
    """Every file in a folder and the folders inside, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def verify_folder(folder: Path | str) -> Path:
    """Return `folder` if its files are those of its manifest, else raise a `DataError` that names the file.

    Every file must be listed; hidden ones need not be, since file browsers and network file systems leave some.
    """
    folder = Path(folder)
    with contextlib.suppress(OSError):  # only reading is allowed here: it counts as missing
        restore_folder(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist or is not a folder")
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{folder} has no {MANIFEST}: it was never committed, or is not a shoal folder")
    manifest = read_json(folder / MANIFEST)
    sums = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(sums, dict):
        raise DataError(
            f"{folder / MANIFEST} must hold an object with 'sha256', which holds one of name: sum"
        )
    for name, expected in sums.items():
        path = folder / name
        # NUL, a name too long, a loop of links, no permission
        with reading(folder / MANIFEST, f"names {name!r}, which cannot be read"):
            if not path.resolve().is_relative_to(folder.resolve()):
                raise DataError(f"{folder / MANIFEST} names {name!r}, which leaves the folder")
            if not path.is_file():
                raise DataError(f"{folder / MANIFEST} lists {path}, which is missing")
            if sha256_of(path) != expected:
                raise DataError(
                    f"{path} was altered or truncated: its sha256 is not that of {folder / MANIFEST}"
                )
    for path in _files_in(folder):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if inside.as_posix() not in (MANIFEST, *sums) and not hidden:
            raise DataError(f"{path} is not listed in {MANIFEST}: it was added, or the manifest was altered")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether `verify_folder` accepts it: it is neither altered nor removed in part."""
    try:
        verify_folder(folder)
    except DataError:
        return False
    return True
