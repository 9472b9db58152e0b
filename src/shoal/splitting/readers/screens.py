"""Recordings of GUI agents: OSWorld results, AgentNet (OpenCUA), LiteSample rows (cua-lite).

Coordinates stay as they were recorded (pixels, parts of 1, parts of 1000): which of them a model writes is its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, did_you_mean
from shoal.splitting.readers.recordings import (
    ImageLocator,
    Message,
    Recording,
    encodable,
    finite_reward,
    json_lines,
    parse_messages,
    read_json_file,
    read_text,
    safe_id,
)
from shoal.splitting.readers.records import Record, RecordReader, first_known, from_json, row_images


class OSWorldReader:
    """OSWorld results: folders with `traj.jsonl`, the screenshots it names and `result.txt`, at any depth.

    A line's screenshot shows what its action led to, so it is the observation of the next turn; the first
    turn shows `step_0*.png` or `initial*.png` where there is one. Lines of one `step_num` are one turn.

    Args:
        root: a folder above the results.
        instructions: what each task asks, by id; otherwise `instruction` from a `task_config.json`,
            `task.json` or `instruction.txt` in its folder.
        system: a system prompt to put before each trajectory.
    """

    def __init__(
        self, root: Path | str, *, instructions: Mapping[str, str] | None = None, system: str | None = None
    ) -> None:
        self.root = Path(root)
        self.instructions = dict(instructions or {})
        self.system = system
        self._folders: dict[str, Path] | None = None

    def ids(self) -> list[str]:
        """Names of the folders that hold a `traj.jsonl`, sorted."""
        if self._folders is None:
            folders: dict[str, Path] = {}
            for file in sorted(self.root.rglob("traj.jsonl")):
                name = safe_id(file.parent.name)
                if name in folders:
                    raise DataError(
                        f"{file.parent} and {folders[name]} have one id; choose a root above only one"
                    )
                folders[name] = file.parent
            self._folders = folders
        return sorted(self._folders)

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The results in the folder of this name, or in `path`."""
        folder = path
        if folder is None:
            known = self.ids()
            if dataset_id not in known:
                raise DataError(
                    f"{self.root}: no trajectory {dataset_id!r}.{did_you_mean(dataset_id, known)}"
                )
            folder = (self._folders or {})[dataset_id]
        source, locate = folder / "traj.jsonl", ImageLocator(folder)
        messages = [Message("system", self.system)] if self.system else []
        first: list[dict[str, str]] = [{"type": "text", "text": self._instruction(dataset_id, folder)}]
        start = sorted([*folder.glob("step_0*.png"), *folder.glob("initial*.png")])
        first += [{"type": "image", "image": start[0].name}] if start else []
        messages.append(
            Message("user", tuple(first), tuple(locate(p["image"], str(source)) for p in first[1:]))
        )
        for number, step in enumerate(_osworld_steps(source)):
            messages.append(Message("assistant", step["text"]))
            if step["screenshot"]:
                where = f"{source}, step {number + 1}"
                part = {"type": "image", "image": step["screenshot"]}
                messages.append(Message("user", (part,), (locate(step["screenshot"], where),)))
            else:
                messages.append(Message("user", "(no screenshot)"))
        result = folder / "result.txt"
        reward = finite_reward(read_text(result).strip(), str(result)) if result.is_file() else None
        return Recording(
            dataset_id, dataset_id, tuple(messages), str(source), reward=reward, folder=str(folder)
        )

    def _instruction(self, dataset_id: str, folder: Path) -> str:
        if dataset_id in self.instructions:
            return self.instructions[dataset_id]
        for name in ("task_config.json", "task.json"):
            if (folder / name).is_file():
                value = read_json_file(folder / name)
                if isinstance(value, dict) and isinstance(value.get("instruction"), str):
                    return str(value["instruction"])
        if (folder / "instruction.txt").is_file():
            return read_text(folder / "instruction.txt").strip()
        raise DataError(
            f"{folder}: nothing says what the task was; write instruction.txt there or pass instructions="
        )


def _osworld_steps(source: Path) -> list[dict[str, Any]]:
    steps: dict[Any, dict[str, Any]] = {}
    for line, value in json_lines(source):
        if not isinstance(value, dict):
            raise DataError(f"{source}, line {line}: expected an object")
        if "Error" in value and "action" not in value:
            continue  # what OSWorld's runner adds when a task fails: nobody said anything
        action = value.get("action", "")
        action = action if isinstance(action, str) else json.dumps(action, ensure_ascii=False)
        step = steps.setdefault(value.get("step_num", line), {"response": None, "actions": []})
        step["actions"].append(action)
        if isinstance(value.get("response"), str):
            step["response"] = value["response"]
        step["screenshot"] = value.get("screenshot_file") or step.get("screenshot")
    if not steps:
        raise DataError(f"{source} is empty; remove the trajectory")
    for step in steps.values():
        step["text"] = step["response"] if step["response"] is not None else "\n".join(step["actions"])
    return list(steps.values())


class AgentNetReader(RecordReader):
    """AgentNet of OpenCUA: a JSON line is a task with its `traj` of screenshots, thoughts and PyAutoGUI code.

    Args:
        path: the `.jsonl`, or a folder of such files; `meta_data_merged.jsonl` beside them is left out.
        images: where the screenshots are; otherwise `images` or a `*_images` folder beside the file, or its own.
        parts: what an answer holds, of `observation`, `thought`, `action` and `code`.
        system: a system prompt to put before each trajectory.
        train_mistakes: whether steps that were judged wrong (`last_step_correct` false) are trained.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        images: Path | str | None = None,
        parts: Sequence[str] = ("thought", "action", "code"),
        system: str | None = None,
        train_mistakes: bool = True,
    ) -> None:
        super().__init__(path)
        unknown = set(parts) - {"observation", "thought", "action", "code"}
        if unknown or not parts:
            raise ValueError(f"parts must be of observation, thought, action and code, got {list(parts)}")
        self.images = None if images is None else Path(images)
        self.parts, self.system, self.train_mistakes = tuple(parts), system, train_mistakes

    def name_of(self, value: Any) -> Any:
        """The task's id."""
        return value.get("task_id") if isinstance(value, dict) else None

    def files(self) -> Iterator[Path]:
        """Files of trajectories."""
        yield from (file for file in super().files() if not file.name.startswith("meta_data"))

    def recording(self, record: Record) -> Recording:
        """The trajectory of a task."""
        task = record.object()
        if not isinstance(task.get("instruction"), str) or not isinstance(task.get("traj"), list):
            raise DataError(f"{record.source}: a task needs instruction and traj")
        folders = [self.images] if self.images is not None else [
            *sorted(record.file.parent.glob("*images")), record.file.parent]  # fmt: skip
        messages = [Message("system", self.system)] if self.system else []
        for number, step in enumerate(task["traj"]):
            where = f"{record.source}, step {number}"
            if not isinstance(step, dict) or not isinstance(step.get("value"), dict):
                raise DataError(f"{where}: expected an object with image and value")
            shot = encodable(str(step.get("image") or ""), where)
            if not shot:
                raise DataError(f"{where}: no image")
            folder = next((each for each in folders if (each / shot).is_file()), folders[0])
            place = ImageLocator(folder)(shot, where)
            parts = [{"type": "image", "image": shot}]
            if number == 0:
                parts.insert(0, {"type": "text", "text": encodable(task["instruction"], where)})
            messages.append(Message("user", tuple(parts), (place,)))
            trained = self.train_mistakes or step["value"].get("last_step_correct") is not False
            messages.append(Message("assistant", self._answer(step["value"], where), trained=trained))
        done = task.get("task_completed")
        return record.recording(
            messages,
            uid=first_known(task.get("task_id"), record.id),
            reward=float(done) if isinstance(done, bool) else None,
        )

    def _answer(self, value: dict[str, Any], where: str) -> str:
        texts = []
        for part in self.parts:
            text = value.get(part)
            if not isinstance(text, str) or not text:
                if part == "code":
                    raise DataError(f"{where}: no code")
                continue
            text = encodable(text, where)
            texts.append(
                f"## {part.capitalize()}:\n" + (f"```python\n{text}\n```" if part == "code" else text)
            )
        return "\n\n".join(texts)


class LiteSampleReader(RecordReader):
    """LiteSample rows of cua-lite: `images`, `messages` with parts and `tool_calls`, `metadata`.

    Messages and metadata are JSON text or nested columns; an image part names its image by `index`. Of an answer,
    text, inline reasoning and action descriptions are joined line by line, then tool calls follow; metadata parts are
    notes and left out.
    """

    columns = ("id", "metadata")
    _TEXTS = ("text", "inline_reasoning", "action_description")

    def name_of(self, value: Any) -> Any:
        """The sample's id among its metadata."""
        others = (
            _metadata(value.get("metadata"), "metadata").get("others") if isinstance(value, dict) else None
        )
        others = others if isinstance(others, dict) else {}
        names = (others.get("id"), others.get("task_id"), super().name_of(value))
        return next((name for name in names if name is not None and name != ""), None)

    def recording(self, record: Record) -> Recording:
        """The chat of a row."""
        row = record.object()
        metadata = _metadata(row.get("metadata"), record.source)
        others = _metadata(metadata.get("others"), record.source)
        images, record = row_images(record, row.get("images") or [])
        raw = row.get("messages")
        raw = from_json(raw, record.source) if isinstance(raw, str) else raw
        if not isinstance(raw, list):
            raise DataError(f"{record.source}: messages must be a list")
        messages = [
            self._message(item, images, f"{record.source}, message {n}") for n, item in enumerate(raw)
        ]
        returned, done = others.get("episode_return"), others.get("task_completed")
        reward = done if returned is None else returned
        return record.recording(
            parse_messages(messages, record.source, record.locate),
            uid=first_known(others.get("task_id"), others.get("source_id"), record.id),
            reward=None if reward is None else float(reward) if isinstance(reward, bool) else reward,
        )

    def _message(self, item: Any, images: Sequence[str], where: str) -> dict[str, Any]:
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected an object with role and content")
        parts = item.get("content") or []
        if not isinstance(parts, list):
            return item
        kept: list[dict[str, Any]] = []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image":
                index = part.get("index")
                if not isinstance(index, int | float) or not 0 <= int(index) < len(images):
                    raise DataError(f"{where}: image index must be in [0, {len(images) - 1}], got {index!r}")
                kept.append({"type": "image", "image": images[int(index)]})
            elif kind in self._TEXTS:
                kept.append({"type": "text", "text": part.get("text")})
            elif kind != "metadata":
                raise DataError(f"{where}: expected a text, image or metadata part, got {kind!r}")
        message = {key: value for key, value in item.items() if value is not None}
        if item.get("role") == "assistant":
            return message | {
                "content": "\n".join(str(part["text"]) for part in kept if part["type"] == "text")
            }
        return message | {"content": kept}


def _metadata(value: Any, where: str) -> dict[str, Any]:
    value = from_json(value, where) if isinstance(value, str) else value
    return value if isinstance(value, dict) else {}
