"""Readers of files in which each record is one recording: `.json`, `.jsonl`, `.parquet` and `.tar`.

A reader says only how a record becomes a recording. Files are read one record at a time: an index of names and
places is made once for each size and time of its files, and what is kept of a file is the record (of parquet: the row
group) that was read last.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import logging
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.errors import DataError, did_you_mean, needs_extra, reading
from shoal.core.files import from_json
from shoal.splitting.readers.keys import (
    CHAT,
    Shape,
    is_there,
    is_trained,
    refuse_unread,
    tools_of,
    unread_keys,
)
from shoal.splitting.readers.recordings import (
    ImageLocator,
    Message,
    Recording,
    finite_reward,
    parse_messages,
    plain_file,
    safe_id,
    short_id,
    shortage,
)
from shoal.splitting.readers.rows import messages_of

logger = logging.getLogger(__name__)
KINDS: dict[bytes, str] = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpeg",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"GIF8": "gif",
}
BOM = b"\xef\xbb\xbf"
"""What editors and spreadsheets of Windows put before a text: no part of it."""
MOST_OF_RECORD = 256 * 2**20
"""Bytes of one record in a `.jsonl` or `.tar`; more is a mistake or an attack."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".tar")
PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".7z")


@dataclass(frozen=True)
class Record:
    """One record of a file."""

    id: str
    value: Any  # what JSON or the row held
    source: str  # file and number, for messages
    file: Path  # images that it names lie in the folder of this file
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # that came with it, by name
    outer: Record | None = None  # the record that this one is a part of

    def locate(self, reference: str, where: str) -> str:
        """The place of an image that the record names: one that came with it, or a file in its folder."""
        for name in (reference, f"{reference}.png"):
            if name in self.images:
                return image_url(self.images[name], where)
        return ImageLocator(self.file.parent)(reference, where)

    def object(self) -> dict[str, Any]:
        """The record if it is an object."""
        if not isinstance(self.value, dict):
            raise DataError(f"{self.source}: expected an object, got {type(self.value).__name__}")
        return self.value

    def recording(self, messages: Sequence[Message], **about: Any) -> Recording:
        """A recording of this record; `about` are `uid`, `reward`, `steps`, `tools` of `Recording`."""
        about = {"uid": self.id} | about
        reward = about.pop("reward", None)
        return Recording(
            dataset_id=self.id,
            messages=tuple(messages),
            source=self.source,
            folder=str(self.file.parent),
            reward=None if reward is None else finite_reward(reward, self.source),
            **about,
        )


class RecordReader:
    """A reader of records; a subclass says how one becomes a recording.

    Args:
        path: a file (`.json` with one record or a list, `.jsonl`, `.parquet`, `.tar` as WebDataset writes it), or a
            folder of such files.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that `name_of` and `parts_of` need of a parquet file; () for those that are short."""
    shape: ClassVar[Shape | None] = None
    """The keys of a record that are read, or known not to matter; others are named once a file. None names none."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._places: dict[str, Place] = {}
        self._labels: dict[Path, str] = {}
        self._told: set[Path] = set()
        self._open: tuple[Any, Any] = (None, None)

    def recording(self, record: Record) -> Recording:
        """What the record says, as a recording."""
        raise NotImplementedError

    def name_of(self, value: Any) -> Any:
        """What the record calls itself, or None."""
        return value.get("id") if isinstance(value, dict) else None

    def parts_of(self, value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Recordings inside a record, as (its numbers from the outermost on, value)."""
        yield from ()

    @staticmethod
    def parsed(line: bytes, where: str) -> Any:
        """The value that a line of a `.jsonl` holds, or a `DataError` that begins with `where`."""
        if len(line) > MOST_OF_RECORD:
            raise DataError(
                f"{where} is longer than {MOST_OF_RECORD:,} bytes; keep images in files beside it"
            )
        return from_json(line, where)

    def is_recording(self, value: Any) -> bool:
        """Whether a record is to be split; one that is not has no id."""
        return True

    def files(self) -> Iterator[Path]:
        """The files that hold records, in a fixed order."""
        if self.path.is_dir():
            if more := ", ".join(_left_out(self.path)):
                self._tell(self.path, f"{more}; give it by itself, or unpack it into this folder")
            yield from sorted(path for path in self.path.iterdir() if path.suffix.lower() in SUFFIXES)
        elif self.path.is_file():
            yield self.path
        else:
            raise DataError(
                f"{self.path} does not exist; expected a file of records, or a folder of such files"
            )

    def sources(self) -> Iterator[Path]:
        """The files that recordings are made of, apart from images."""
        yield from self.files()

    def ids(self) -> list[str]:
        """The name of each record, or its file's name with its number."""
        return list(self._index())

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The recording with this id; `path` names another file that holds it."""
        reader = self
        if path is not None:
            reader = copy.copy(self)
            reader.path, reader._stamps, reader._places = path, {}, {}
        found = reader._place(dataset_id)
        value, images = reader._value(found.file, found.place)
        record = Record(
            found.outer or dataset_id, value, f"{found.file}, record {found.place[0]}", found.file, images
        )
        if found.part:
            number = "-".join(map(str, found.part))
            source, inner = f"{record.source}, part {number}", dict(reader.parts_of(value))[found.part]
            record = replace(record, id=dataset_id, value=inner, source=source, outer=record)
        return reader.recording(record)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": (None, None)}

    def _index(self) -> dict[str, Place]:
        stamps = {file: stamp_of(file) for file in self.files()}
        if self._stamps != stamps:
            self._labels = self._labels_of(list(stamps))
            found = [each for file in stamps for each in self._records_of(file)]
            self._places, self._stamps = self._by_id(found), stamps  # whole: other threads ask meanwhile
        return self._places

    def _records_of(self, file: Path) -> Iterator[Found]:
        """The records of a file that are recordings; keys of theirs that are not read are named in one line."""
        unread: Counter[str] = Counter()
        for number, (place, named, value) in enumerate(_places(file, self.columns, self.parsed)):
            if not self.is_recording(named):
                continue
            try:
                own = self.name_of(named)
            except DataError:  # reading it raises the same
                own = None
            own = self.named(own, file, number) if isinstance(own, str | int) and own != "" else None
            yield Found(file, number, own, place, tuple(part for part, _ in self.parts_of(value)))
            if self.shape is not None:
                unread.update(set(unread_keys(_with_messages(value), self.shape)))
        if self.shape is not None and file.suffix.lower() == ".parquet":
            unread.update(_unread_columns(file, self.shape))
        if unread:
            counted = (f"{key} ({count} row{'s' * (count > 1)})" for key, count in sorted(unread.items()))
            self._tell(file, ", ".join(counted))

    def _tell(self, place: Path, unread: str) -> None:
        """Name what is not read of a file or a folder, once."""
        if place not in self._told:
            self._told.add(place)
            logger.warning("%s: not read: %s", place, unread)

    def _by_id(self, found: Sequence[Found]) -> dict[str, Place]:
        """Where each recording is. No id is taken twice: the first record keeps it, reading another says so."""
        first: dict[str, Found] = {}
        for each in found:
            if each.own is not None:
                first.setdefault(each.own, each)
        places: dict[str, Place] = {}

        def free(name: str, each: Found) -> str:
            tries = 0
            while name in places or first.get(name, each) is not each:
                name, tries = f"{name[:50]}-{self._digest(each.file, each.number, tries)}", tries + 1
            return name

        for each in found:
            name, place = each.own, each.place
            if name is not None and first[name] is not each:
                place = DataError(
                    f"{each.file}, record {each.number}: id {name!r} is taken by {first[name].file}"
                )
                name = None
            name = free(name or self.named(None, each.file, each.number), each)
            places[name] = Place(each.file, place)
            for part in each.parts:
                inner = free(short_id(f"{name}-{'-'.join(map(str, part))}"), each)
                places[inner] = Place(each.file, each.place, part, name)
        return places

    def _place(self, dataset_id: str) -> Place:
        """Where a recording is."""
        found = self._places.get(dataset_id)
        if found is None or stamp_of(found.file) != self._stamps.get(found.file):
            found = self._index().get(dataset_id)
        if found is None:
            raise DataError(
                f"{self.path}: no recording {dataset_id!r}.{did_you_mean(dataset_id, self._places)}"
            )
        return found

    def named(self, own: Any, file: Path, number: int) -> str:
        """An id from what a record calls itself: as it is where it is safe in a path, else what is left of it."""
        if not isinstance(own, str | int):
            return safe_id(f"{self._labels[file]}-{number:06d}")
        return short_id(str(own))

    def label(self, file: Path) -> str:
        """What the ids of records without a name of their own begin with."""
        letters = re.sub(r"[^A-Za-z0-9._()-]", "_", file.stem).lstrip("._(-") or "x"
        return letters if len(letters) <= 50 else f"{letters[:41]}-{self._digest(file)}"

    def _labels_of(self, files: Sequence[Path]) -> dict[Path, str]:
        """The label of each file; where those of several meet, each has a digest of its name."""
        labels = {file: self.label(file) for file in files}
        times = Counter(labels.values())
        return {
            file: label if times[label] == 1 else f"{label[:41]}-{self._digest(file)}"
            for file, label in labels.items()
        }

    def _digest(self, file: Path, *more: int) -> str:
        """Eight letters that stand for the name of a file, wherever the folder lies."""
        name = file.relative_to(self.path).as_posix() if file != self.path else file.name
        return hashlib.sha256(
            "/".join([name, *map(str, more)]).encode("utf-8", "surrogateescape")
        ).hexdigest()[:8]

    def _value(self, file: Path, place: Any) -> tuple[Any, Mapping[str, bytes]]:
        kind = file.suffix.lower()
        if isinstance(place, DataError):
            raise place
        if kind == ".tar":
            return _tar_record(file, place[1])
        if kind == ".parquet":
            _, group, inside = place
            row = self._held(file, group, _row_group).slice(inside, 1).to_pylist()[0]
            return {name: _without_nulls(value) for name, value in row.items()}, {}
        if kind == ".json":
            return self._held(file, 0, lambda file, _: _json_records(file))[place[0]], {}
        number, offset = place
        return _line(file, number, offset, self.parsed), {}

    def _held(self, file: Path, part: int, load: Callable[[Path, int], Any]) -> Any:
        """A part of a file, kept until another is asked for; other threads ask for others meanwhile."""
        key, held = (file, stamp_of(file), part), self._open
        if held[0] != key:
            held = self._open = (key, load(file, part))
        return held[1]


class ChatReader(RecordReader):
    """OpenAI chats: a record is a list of messages, or an object with `messages`.

    Instead of these an object may have `conversations` (ShareGPT: turns of `from` and `value`), or a `prompt` and a
    `completion`, both lists of messages (TRL), of which answers in the prompt are context. Where known, `id`, `task_id`
    and `reward` stand beside the messages, and:

    - `system`, a system prompt to put before them;
    - `tools` (`tool_defs` of verifiers, `functions`), what the model could call, as a list or its JSON text;
    - `weight`, `loss`, `trainable` or `trained`: 0 or false makes all of the chat context, as it does on an answer;
    - `images`: each image part without a reference, and each `<image>` in text, is the next of them (as TRL, ms-swift
      and LLaMA-Factory write it). Other images are files inside the folder of the record's file, or data URLs.
    """

    columns = ("id", "task_id")
    shape = CHAT

    def recording(self, record: Record) -> Recording:
        """The chat of a record."""
        fields = record.value if isinstance(record.value, dict) else {"messages": record.value}
        refuse_unread(fields, record.source)
        messages = messages_of(fields, record.source)
        if fields.get("images") is not None:
            references, record = row_images(record, fields["images"])
            messages = _with_listed_images(messages, references, record.source)
        uid = first_known(fields.get("task_id"), fields.get("uid"), record.id)
        return chat_of(record, fields, messages, uid=uid, reward=fields.get("reward"))


def chat_of(record: Record, row: Mapping[str, Any], messages: Any, **about: Any) -> Recording:
    """The recording of a row's messages, with the system prompt, the tools and the marks that stand beside them."""
    trained = is_trained(row, record.source)
    said = (
        *_system_prompt(row.get("system"), messages, record),
        *parse_messages(messages, record.source, record.locate, trained=trained),
    )
    return record.recording(said, tools=tools_of(row, record.source), **about)


def _system_prompt(content: Any, messages: Any, record: Record) -> tuple[Message, ...]:
    """The system prompt that stands beside messages, as a message to put before them."""
    where = f"{record.source}, system"
    if not is_there(content):
        return ()
    first = messages[0] if isinstance(messages, list) and messages else None
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        if first.get("content") != content:
            raise DataError(f"{where}: message 0 is another system prompt; keep one of them")
        return ()
    return parse_messages([{"role": "system", "content": content}], where, record.locate)


@dataclass(frozen=True, slots=True)
class Found:
    """A record of a file, before its id is settled."""

    file: Path
    number: int
    own: str | None  # the id it gives itself
    place: Any  # where in the file, or the `DataError` that reading it raises
    parts: tuple[tuple[int, ...], ...]  # recordings inside it


@dataclass(frozen=True, slots=True)
class Place:
    """Where a recording is."""

    file: Path
    place: Any
    part: tuple[int, ...] = ()  # which of the recordings inside the record
    outer: str | None = None  # the id of the record, for a part of it


def stamp_of(file: Path) -> tuple[int, int]:
    """Size and time of a file, which is indexed again when one of them has changed; a `DataError` if it is missing."""
    with reading(file, "cannot be read"):
        about = file.stat()
    return about.st_size, about.st_mtime_ns


def first_known(*names: Any) -> str:
    """The first name that is there: JSON and columns of a table spell one that is not as null, or leave it empty."""
    return next(str(name) for name in names if name is not None and name != "")


def image_url(data: bytes, where: str) -> str:
    """A data URL of an image file's bytes."""
    kind = next((kind for magic, kind in KINDS.items() if data.startswith(magic)), None)
    if kind is None:
        raise DataError(f"{where}: an image of {len(data)} bytes is none of {', '.join(KINDS.values())}")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def row_images(record: Record, images: Any) -> tuple[list[str], Record]:
    """References to the images of a row, and the record with those that came as bytes.

    Images are paths or URLs as text, bytes, or `{"bytes", "path"}` as Hugging Face datasets keep them.
    """
    if not isinstance(images, list):
        raise DataError(f"{record.source}: images must be a list, got {type(images).__name__}")
    references, held = [], dict(record.images)
    for number, image in enumerate(images):
        data, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, image)
        if isinstance(data, bytes):
            held[f"image_{number}"] = data
            references.append(f"image_{number}")
        elif isinstance(path, str):
            references.append(path)
        else:
            raise DataError(f"{record.source}: an image must be a path or bytes, got {type(image).__name__}")
    return references, replace(record, images=held)


def _with_listed_images(messages: Any, images: list[str], where: str) -> Any:
    """The messages with the images of their list put where `<image>` and empty image parts stand."""
    if not isinstance(messages, list):
        return messages
    left = iter(images)

    def filled(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "image" or part.get("image"):
            return part
        try:
            return {"type": "image", "image": next(left)}
        except StopIteration:
            raise DataError(f"{where}: more image marks than the {len(images)} images") from None

    placed = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str) and "<image>" in content and message.get("role") != "assistant":
            content = [
                {"type": "image"} if text == "<image>" else {"type": "text", "text": text}
                for text in re.split("(<image>)", content)
                if text
            ]
        if isinstance(content, list):
            message = message | {"content": [filled(part) for part in content]}
        placed.append(message)
    if (over := sum(1 for _ in left)) > 0:
        raise DataError(f"{where}: {over} of {len(images)} images are shown nowhere")
    return placed


# --- files
def _left_out(folder: Path) -> Iterator[str]:
    """The names in a folder of records that hold more of them, where nobody looks: folders, and packed files."""
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in PACKED or (
            path.is_dir() and any(inside.suffix.lower() in SUFFIXES for inside in path.rglob("*"))
        ):
            yield path.name


Parse = Callable[[bytes, str], Any]
"""Makes a value of a line; the text says where it stands, for errors."""


def _places(file: Path, columns: tuple[str, ...], parse: Parse) -> Iterator[tuple[Any, Any, Any]]:
    """(place, what names it, the record) of each record of a file; of a table only some columns are read.

    Where the file cannot be read on, the reason is the place of a last one.
    """
    kind = file.suffix.lower()
    try:
        if kind == ".json":
            yield from (((number,), value, value) for number, value in enumerate(_json_records(file)))
        elif kind == ".parquet":
            yield from ((place, row, row) for place, row in _rows(file, columns))
        elif kind == ".tar":
            yield from _tar_places(file)
        else:
            yield from ((place, value, value) for place, value in lines_of(file, parse))
    except DataError as error:
        if fault := shortage(error):
            raise fault from None
        yield error, None, None


def _json_records(file: Path) -> list[Any]:
    value = from_json(plain_file(file).read_bytes(), str(file))
    one_chat = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    return value if isinstance(value, list) and not one_chat else [value]


def lines_of(file: Path, parse: Parse) -> Iterator[tuple[tuple[int, int], Any]]:
    """((number, offset), value) of each line that is not empty; None for a broken one."""
    with _opened(file) as handle:
        offset = number = 0
        for at, line in enumerate(iter(lambda: handle.readline(MOST_OF_RECORD + 1), b""), 1):
            if (said := line.removeprefix(BOM)).strip():
                try:
                    value = parse(said, f"{file}, line {at}")
                except DataError:
                    if len(line) > MOST_OF_RECORD:
                        raise
                    value = None  # reading it says what is wrong; the lines behind it are whole
                yield (number, offset), value
                number += 1
            offset += len(line)


def _line(file: Path, number: int, offset: int, parse: Parse) -> Any:
    with _opened(file) as handle:
        handle.seek(offset)
        return parse(handle.readline(MOST_OF_RECORD + 1).removeprefix(BOM), f"{file}, record {number}")


def _opened(file: Path) -> Any:
    try:
        return plain_file(file, most=None).open("rb")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error}); restore it or remove it") from error


def _parquet(file: Path) -> Any:
    with needs_extra(f"reading {file.name} (parquet)", "data"):
        import pyarrow
        import pyarrow.parquet
    with reading(file, "is not a readable parquet file"):
        return pyarrow.parquet.ParquetFile(plain_file(file, most=None))


def _row_group(file: Path, group: int) -> Any:
    with _parquet(file) as table:
        return table.read_row_group(group)


def _rows(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[tuple[int, int, int], Any]]:
    """((number, row group, row in it), the named columns and messages that are JSON text) of each row."""
    with _parquet(file) as table:
        names = table.schema_arrow.names
        there = [name for name in columns if name in names]
        if "messages" in names and not hasattr(table.schema_arrow.field("messages").type, "value_field"):
            there.append("messages")
        number = 0
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            named = table.read_row_group(group, columns=there).to_pylist() if there else [{}] * count
            for inside in range(count):
                yield (number, group, inside), named[inside]
                number += 1


def _unread_columns(file: Path, shape: Shape) -> dict[str, int]:
    """The keys of a table that are not read, by its columns, and the number of rows; empty columns say nothing."""
    with contextlib.suppress(DataError), _parquet(file) as table:  # reading it raises the same
        about = table.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        empty = (
            all(
                (told := group.column(column).statistics) is not None
                and told.has_null_count
                and told.null_count == group.column(column).num_values
                for group in groups
            )
            for column in range(about.num_columns)
        )
        row = {field.name: _filled(field.type, empty) for field in table.schema_arrow}
        return dict.fromkeys(unread_keys(row, shape), about.num_rows)
    return {}


def _filled(kind: Any, empty: Iterator[bool]) -> Any:
    """A value of an Arrow type in which each column that is not empty holds `True`; `empty` tells it of each leaf."""
    if hasattr(kind, "item_field"):
        return [inner for each in (kind.key_type, kind.item_type) if is_there(inner := _filled(each, empty))]
    if hasattr(kind, "value_field"):
        return [inner] if is_there(inner := _filled(kind.value_type, empty)) else None
    if hasattr(kind, "get_field_index"):
        inside = {kind.field(n).name: _filled(kind.field(n).type, empty) for n in range(kind.num_fields)}
        return {name: inner for name, inner in inside.items() if is_there(inner)}
    return None if next(empty, False) or str(kind) == "null" else True


def _without_nulls(value: Any) -> Any:
    """A column's value without the fields that are null: a table has every field in every row."""
    if isinstance(value, dict):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    return [_without_nulls(inside) for inside in value] if isinstance(value, list) else value


def _with_messages(value: Any) -> Any:
    """A record as an object, with messages that are JSON text as what they spell, to look at its keys."""
    if isinstance(value, list):
        return {"messages": value}
    if isinstance(value, dict) and isinstance(value.get("messages"), str):
        with contextlib.suppress(DataError):  # reading it raises the same
            return value | {"messages": from_json(value["messages"], "messages")}
    return value


def _tar_places(file: Path) -> Iterator[tuple[tuple[str, tuple[tuple[str, int, int], ...]], Any, Any]]:
    """((key, its files), {"id": key}, its JSON): files whose names are equal up to the first dot are one record.

    A file is (its name behind the key, offset, size); links and devices are no files.
    """
    try:
        with tarfile.open(plain_file(file, most=None), "r:") as archive:
            key, members, value = None, [], None
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, rest = name.partition(".")
                at = f"{folder}/{stem}" if folder else stem
                if at != key and key is not None:
                    yield (key, tuple(members)), {"id": key}, value
                    members, value = [], None
                key = at
                members.append((rest, member.offset_data, member.size))
                if rest == "json" and member.size <= MOST_OF_RECORD and (said := archive.extractfile(member)):
                    with contextlib.suppress(DataError):  # reading it raises the same
                        value = from_json(said.read(), name)
            if key is not None:
                yield (key, tuple(members)), {"id": key}, value
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"{file} is not a readable .tar ({error}); compressed ones must be unpacked"
        ) from error


def _tar_record(file: Path, members: Sequence[tuple[str, int, int]]) -> tuple[Any, Mapping[str, bytes]]:
    """The JSON of a record, and its other files by name."""
    value, images = None, {}
    if sum(size for _, _, size in members) > MOST_OF_RECORD:
        raise DataError(f"{file}: a record is larger than {MOST_OF_RECORD:,} bytes")
    with _opened(file) as handle:
        for name, offset, size in members:
            handle.seek(offset)
            data = handle.read(size)
            if len(data) != size:
                raise DataError(f"{file} ends inside {name}; copy it again")
            if name == "json":
                value = RecordReader.parsed(data, f"{file}, {name}")
            else:
                images[name] = data
    if value is None:
        raise DataError(f"{file}: a record has no .json, only {', '.join(name for name, *_ in members)}")
    return value, images


def first_record(files: Sequence[Path]) -> Any:
    """The first record of files that can be read, or None where there is none."""
    for file in files:
        for _, _, value in _places(file, (), RecordReader.parsed):
            if value is None:
                continue
            if file.suffix.lower() == ".parquet":
                with _parquet(file) as table:
                    return dict.fromkeys(table.schema_arrow.names)
            return value
    return None
