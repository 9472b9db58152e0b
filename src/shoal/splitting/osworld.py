"""OSWorld results as recordings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, did_you_mean
from shoal.splitting.image_files import ImageLocator
from shoal.splitting.recorded_files import json_lines, read_json_file, read_text, safe_id
from shoal.splitting.recordings import Message, Recording, finite_reward


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
