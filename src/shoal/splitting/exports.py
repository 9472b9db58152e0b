"""Write recordings as the files that fine-tuning tools read: ShareGPT, or chats with their images."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.core.errors import needs_extra, reading
from shoal.core.files import replacing, write_bytes
from shoal.splitting.images import data_url_bytes
from shoal.splitting.readers.recordings import Message, Recording

SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
IMAGE = "<image>"


def write_sharegpt(path: Path | str, recordings: Iterable[Recording]) -> int:
    """Write a JSON list of `{"conversations", "images", "id"}`; returns how many.

    Each image is `<image>` in the text and a path (or data URL) in `images`; an `<image>` in recorded text is
    spelled `< image>`, since readers count them. `"loss": false` marks an answer that is mere context, as
    ms-swift reads it, and `tools` is JSON text.
    """
    rows = [
        {
            "id": recording.dataset_id,
            "conversations": [
                {"from": SPEAKERS[message.role], "value": _marked(message)} | _mark(message)
                for message in recording.messages
            ],
            "images": [place for message in recording.messages for place in message.images],
        }
        | _tools(recording)
        for recording in recordings
    ]
    write_bytes(Path(path), json.dumps(rows, ensure_ascii=False, indent=1).encode("utf-8") + b"\n")
    return len(rows)


def write_chats(path: Path | str, recordings: Iterable[Recording], *, parts: bool = False) -> int:
    """Write rows of `messages` and `images` as `.jsonl` or `.parquet`; returns how many.

    ms-swift and LLaMA-Factory (its `sharegpt` format with tags `role` and `content`) read text with `<image>` where
    an image stands, as it is written here; TRL takes parts. In `.jsonl` an image is a path or data URL; in `.parquet`
    it is `{"bytes", "path"}` as Hugging Face datasets keep images. `id`, `task_id` and `reward` go along, `tools` as
    JSON text, and `"loss": false` with answers that are mere context: ms-swift reads that mark, TRL does not.

    Args:
        path: the file; its suffix says which kind.
        recordings: what to write, one at a time.
        parts: write contents as lists of `{"type": "text", "text"}` and `{"type": "image"}`.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return _write_parquet(path, recordings, parts)
    if path.suffix != ".jsonl":
        raise ValueError(f"path must end in .jsonl or .parquet, got {path.name!r}")
    count = 0
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for count, recording in enumerate(recordings, 1):  # noqa: B007
            file.write(json.dumps(_row(recording, parts), ensure_ascii=False) + "\n")
    return count


def _row(recording: Recording, parts: bool) -> dict[str, Any]:
    messages = [
        {
            "role": message.role,
            "content": [{"type": "image"} if part["type"] == "image" else part for part in message.parts]
            if parts
            else _marked(message),
        }
        | _mark(message)
        for message in recording.messages
    ]
    return {
        "id": recording.dataset_id,
        "task_id": recording.uid,
        "reward": recording.reward,
        "messages": messages,
        "images": [place for message in recording.messages for place in message.images],
    } | _tools(recording)


def _mark(message: Message) -> dict[str, bool]:
    return {} if message.trained else {"loss": False}


def _tools(recording: Recording) -> dict[str, str]:
    return {"tools": json.dumps(recording.tools, ensure_ascii=False)} if recording.tools else {}


def _marked(message: Message) -> str:
    return "".join(
        IMAGE if part["type"] == "image" else part["text"].replace(IMAGE, "< image>")
        for part in message.parts
    )


def _write_parquet(path: Path, recordings: Iterable[Recording], parts: bool) -> int:
    with needs_extra("writing parquet", "data"):
        import pyarrow
        import pyarrow.parquet
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    part = pyarrow.struct([("type", pyarrow.string()), ("text", pyarrow.string())])
    content = pyarrow.list_(part) if parts else pyarrow.string()
    message = pyarrow.struct([("role", pyarrow.string()), ("content", content), ("loss", pyarrow.bool_())])
    schema = pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("task_id", pyarrow.string()),
            ("reward", pyarrow.float64()),
            ("messages", pyarrow.list_(message)),
            ("images", pyarrow.list_(image)),
            ("tools", pyarrow.string()),
        ]
    )
    count = 0
    with replacing(path) as unfinished, pyarrow.parquet.ParquetWriter(unfinished, schema) as writer:
        for count, recording in enumerate(recordings, 1):  # noqa: B007
            row = _row(recording, parts)
            row["images"] = [_image(place) for place in row["images"]]
            writer.write_batch(pyarrow.RecordBatch.from_pylist([row], schema=schema))
    return count


def _image(place: str) -> dict[str, Any]:
    if place.startswith("data:"):
        return {"bytes": data_url_bytes(place), "path": None}
    with reading(f"image {place}", "cannot be read"):
        return {"bytes": Path(place).read_bytes(), "path": Path(place).name}
