"""Write recordings as ShareGPT, the form that supervised fine-tuning tools read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.core.files import write_bytes
from shoal.splitting.readers.recordings import Recording

SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
IMAGE = "<image>"


def write_sharegpt(path: Path | str, recordings: Iterable[Recording]) -> int:
    """Write a JSON list of `{"conversations", "images", "id"}`; returns how many.

    Each image is `<image>` in the text and a path (or data URL) in `images`; an `<image>` in recorded text is
    spelled `< image>`, since readers count them.
    """
    rows = [_row(recording) for recording in recordings]
    write_bytes(Path(path), json.dumps(rows, ensure_ascii=False, indent=1).encode("utf-8") + b"\n")
    return len(rows)


def _row(recording: Recording) -> dict[str, Any]:
    conversations: list[dict[str, str]] = []
    images: list[str] = []
    for message in recording.messages:
        value = "".join(
            IMAGE if part["type"] == "image" else part["text"].replace(IMAGE, "< image>")
            for part in message.parts
        )
        conversations.append({"from": SPEAKERS[message.role], "value": value})
        images += message.images
    return {"id": recording.dataset_id, "conversations": conversations, "images": images}
