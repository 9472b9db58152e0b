"""Readers of recordings: the original's folders, OpenAI chats, OSWorld results, shoal's own trajectories.

Each is one small class behind the `Reader` protocol, picklable, and reads nothing until it is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.core.data import Trajectory, decode_trajectory
from shoal.core.errors import DataError, did_you_mean
from shoal.core.files import read_json
from shoal.core.registry import check_name
from shoal.splitting.image_files import ImageLocator
from shoal.splitting.recordings import (
    Message,
    Reader,
    Recording,
    RolloutTokens,
    finite_reward,
    parse_messages,
)
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
        folder = path if path is not None else self.root / _safe(dataset_id)
        source = folder / "final_messages.json"
        messages = parse_messages(_json(source), str(source), ImageLocator(folder))
        config = _json(folder / "task_config.json")
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
                    places[_safe(name)] = (file, number)
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
                chats = [value for _, value in _lines(file)]
            else:
                value = _json(file)
                many = isinstance(value, list) and not (
                    value and isinstance(value[0], dict) and "role" in value[0]
                )
                chats = value if many else [value]
            self._open = (file, chats)
        return self._open[1]


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
                name = _safe(file.parent.name)
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
        reward = finite_reward(_text(result).strip(), str(result)) if result.is_file() else None
        return Recording(
            dataset_id, dataset_id, tuple(messages), str(source), reward=reward, folder=str(folder)
        )

    def _instruction(self, dataset_id: str, folder: Path) -> str:
        if dataset_id in self.instructions:
            return self.instructions[dataset_id]
        for name in ("task_config.json", "task.json"):
            if (folder / name).is_file():
                value = _json(folder / name)
                if isinstance(value, dict) and isinstance(value.get("instruction"), str):
                    return str(value["instruction"])
        if (folder / "instruction.txt").is_file():
            return _text(folder / "instruction.txt").strip()
        raise DataError(
            f"{folder}: nothing says what the task was; write instruction.txt there or pass instructions="
        )


class ShoalReader:
    """shoal's own `trajectories/*.jsonl`: a run folder, its `trajectories` folder, or one file.

    Episodes that did not end well (`status` other than "ok") have no id here. Tokens and log-probabilities of
    each turn come along, so `StepwiseTrajectorySplitter(use_vllm_logp=True)` trains on exactly those.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[Path, int]] | None = None

    def ids(self) -> list[str]:
        """`<env>-<iteration>-<group>-<member>` of each finished trajectory."""
        return list(self._index())

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The trajectory with this id; `path` names another file or folder that holds it."""
        reader = self if path is None else ShoalReader(path)
        places = reader._index()
        if dataset_id not in places:
            raise DataError(f"{reader.path}: no trajectory {dataset_id!r}.{did_you_mean(dataset_id, places)}")
        file, offset = places[dataset_id]
        with file.open("rb") as handle:
            handle.seek(offset)
            trajectory = decode_trajectory(handle.readline())
        source = f"{file}, {dataset_id}"
        base = file.parent.parent if file.parent.name == "trajectories" else file.parent
        locate = ImageLocator(base)
        messages: list[Message] = []
        for turn in trajectory.turns:
            if turn.image is None:
                messages.append(Message("user", turn.observation))
            else:
                parts = ({"type": "text", "text": turn.observation}, {"type": "image", "image": turn.image})
                messages.append(Message("user", parts, (locate(turn.image, source),)))
            messages.append(Message("assistant", turn.response))
        steps = tuple(
            RolloutTokens(turn.prompt_ids, turn.response_ids, turn.logprobs, source)
            for turn in trajectory.turns
        )
        return Recording(
            dataset_id=dataset_id,
            uid=f"{trajectory.env}-{trajectory.iteration}-{trajectory.group}",
            messages=tuple(messages),
            source=source,
            reward=finite_reward(trajectory.reward, source),
            steps=steps,
            folder=str(base),
        )

    def _index(self) -> dict[str, tuple[Path, int]]:
        if self._places is None:
            self._places = {}
            for file in self._files():
                for offset, trajectory in _trajectories(file):
                    if trajectory.status == "ok" and trajectory.turns:
                        tag = re.sub(r"[^A-Za-z0-9._()-]", "_", trajectory.env)[:40]
                        name = f"{tag}-{trajectory.iteration}-{trajectory.group}-{trajectory.member}"
                        self._places[_safe(name)] = (file, offset)
        return self._places

    def _files(self) -> list[Path]:
        folder = self.path / "trajectories" if (self.path / "trajectories").is_dir() else self.path
        files = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
        if not files:
            raise DataError(f"{self.path} holds no trajectories/*.jsonl; give a run folder or a .jsonl file")
        return files


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
    if path.is_file() and path.suffix == ".jsonl" and _looks_like_shoal(path):
        return ShoalReader(path)
    if path.is_file() or next(path.glob("*.json*"), None):
        return ChatReader(path)
    raise DataError(
        f"{path} holds no recordings: expected <id>/final_messages.json, trajectories/*.jsonl, traj.jsonl of "
        "OSWorld, or .json/.jsonl files of chats"
    )


def _osworld_steps(source: Path) -> list[dict[str, Any]]:
    steps: dict[Any, dict[str, Any]] = {}
    for line, value in _lines(source):
        if not isinstance(value, dict):
            raise DataError(f"{source}, line {line}: expected an object")
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


def _trajectories(file: Path) -> Iterator[tuple[int, Trajectory]]:
    with file.open("rb") as handle:
        offset = 0
        for number, line in enumerate(handle, 1):
            try:
                yield offset, decode_trajectory(line)
            except DataError as error:
                raise DataError(f"{file}, line {number}: {error}") from error
            offset += len(line)


def _looks_like_shoal(file: Path) -> bool:
    try:
        next(_trajectories(file))
    except (DataError, StopIteration):
        return False
    return True


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_text(file).splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number} is not valid JSON ({error})") from error


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        raise DataError(f"{file} is missing; restore it or remove the trajectory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error})") from error


def _json(file: Path) -> Any:
    try:
        return read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{file} is missing; restore it or remove the trajectory") from None


def _safe(name: str) -> str:
    try:
        return check_name("dataset", name)
    except ValueError as error:
        raise DataError(str(error)) from error
