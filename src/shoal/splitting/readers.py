"""Readers of recordings: the original's folders and OpenAI chats here, and the choice among all.

Each is one small class behind the `Reader` protocol, picklable, and reads nothing until it is asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, did_you_mean
from shoal.splitting.image_files import ImageLocator
from shoal.splitting.osworld import OSWorldReader
from shoal.splitting.own_runs import ShoalReader, looks_like_own_run
from shoal.splitting.recorded_files import json_lines, read_json_file, safe_id
from shoal.splitting.recordings import Reader, Recording, finite_reward, parse_messages
from shoal.splitting.rollouts import read_rollout


class FolderReader:
    """`<root>/<id>/final_messages.json` with `task_config.json` and the images beside them.

    Args:
        root: the folder of trajectory folders.
        rollout_tokens: also read `data_for_step_<k>` files (see `shoal.splitting.rollouts`).
    """

    def __init__(self, root: Path | str, *, rollout_tokens: bool = False) -> None:
        self.root = Path(root)
        self.rollout_tokens = rollout_tokens

    def ids(self) -> list[str]:
        """Names of the folders that hold messages, sorted."""
        return sorted(path.parent.name for path in self.root.glob("*/final_messages.json"))

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The recording in its folder, or in `path` if that is given."""
        folder = path if path is not None else self.root / safe_id(dataset_id)
        source = folder / "final_messages.json"
        messages = parse_messages(read_json_file(source), str(source), ImageLocator(folder))
        config = read_json_file(folder / "task_config.json")
        if not isinstance(config, dict) or not isinstance(config.get("id"), str | int):
            raise DataError(
                f"{folder / 'task_config.json'} must be an object with 'id', the name of the task"
            )
        steps = read_rollout(folder) if self.rollout_tokens else None
        return Recording(
            dataset_id, str(config["id"]), messages, str(source), steps=steps, folder=str(folder)
        )


class ChatReader:
    """OpenAI chats: `.jsonl` (one a line), `.json` (one or a list), or a folder of such files.

    A chat is a list of messages or an object with `messages` and, where known, `id`, `task_id` and `reward`.
    Images are files inside the folder of the chat's file, or data URLs.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[Path, int]] | None = None
        self._open: tuple[Path, list[Any]] | None = None

    def ids(self) -> list[str]:
        """Each chat's own `id`, or its file's name with its number."""
        return list(self._index())

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The chat with this id; `path` names another file that holds it."""
        places = self._index() if path is None else ChatReader(path)._index()
        if dataset_id not in places:
            raise DataError(f"{path or self.path}: no chat {dataset_id!r}.{did_you_mean(dataset_id, places)}")
        file, number = places[dataset_id]
        chat = self._chats(file)[number]
        source = f"{file}, chat {number}"
        fields: dict[str, Any] = chat if isinstance(chat, dict) else {"messages": chat}
        reward = fields.get("reward")
        return Recording(
            dataset_id=dataset_id,
            uid=str(fields.get("task_id", fields.get("uid", dataset_id))),
            messages=parse_messages(fields.get("messages"), source, ImageLocator(file.parent)),
            source=source,
            reward=None if reward is None else finite_reward(reward, source),
            folder=str(file.parent),
        )

    def _index(self) -> dict[str, tuple[Path, int]]:
        if self._places is None:
            places: dict[str, tuple[Path, int]] = {}
            for file in self._files():
                for number, chat in enumerate(self._chats(file)):
                    own = chat.get("id") if isinstance(chat, dict) else None
                    name = str(own) if isinstance(own, str | int) else f"{file.stem[:50]}-{number:06d}"
                    if name in places:
                        raise DataError(f"{file}, chat {number}: id {name!r} is taken by {places[name][0]}")
                    places[safe_id(name)] = (file, number)
            self._places = places
        return self._places

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(path for path in self.path.iterdir() if path.suffix in (".json", ".jsonl"))
        if not self.path.is_file():
            raise DataError(
                f"{self.path} does not exist; expected a .json or .jsonl file of chats, or a folder"
            )
        return [self.path]

    def _chats(self, file: Path) -> list[Any]:
        if self._open is None or self._open[0] != file:
            if file.suffix == ".jsonl":
                chats = [value for _, value in json_lines(file)]
            else:
                value = read_json_file(file)
                many = isinstance(value, list) and not (
                    value and isinstance(value[0], dict) and "role" in value[0]
                )
                chats = value if many else [value]
            self._open = (file, chats)
        return self._open[1]


READERS: dict[str, Any] = {
    "folder": FolderReader,
    "chat": ChatReader,
    "osworld": OSWorldReader,
    "shoal": ShoalReader,
}


def find_reader(path: Path | str) -> Reader:
    """The reader for what `path` holds, by looking at its files."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give the folder or file that holds the recordings")
    if path.is_dir() and next(path.glob("*/final_messages.json"), None):
        return FolderReader(path)
    if path.is_dir() and (next(path.glob("trajectories/*.jsonl"), None) or path.name == "trajectories"):
        return ShoalReader(path)
    if path.is_dir() and next(path.rglob("traj.jsonl"), None):
        return OSWorldReader(path)
    if path.is_file() and path.suffix == ".jsonl" and looks_like_own_run(path):
        return ShoalReader(path)
    if path.is_file() or next(path.glob("*.json*"), None):
        return ChatReader(path)
    raise DataError(
        f"{path} holds no recordings: expected <id>/final_messages.json, trajectories/*.jsonl, traj.jsonl of "
        "OSWorld, or .json/.jsonl files of chats"
    )
