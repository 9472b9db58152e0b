"""shoal's own trajectories as recordings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shoal.core.data import Trajectory, decode_trajectory
from shoal.core.errors import DataError, did_you_mean
from shoal.splitting.image_files import ImageLocator
from shoal.splitting.recorded_files import safe_id
from shoal.splitting.recordings import Message, Recording, RolloutTokens, finite_reward


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
                        self._places[safe_id(name)] = (file, offset)
        return self._places

    def _files(self) -> list[Path]:
        folder = self.path / "trajectories" if (self.path / "trajectories").is_dir() else self.path
        files = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
        if not files:
            raise DataError(f"{self.path} holds no trajectories/*.jsonl; give a run folder or a .jsonl file")
        return files


def _trajectories(file: Path) -> Iterator[tuple[int, Trajectory]]:
    with file.open("rb") as handle:
        offset = 0
        for number, line in enumerate(handle, 1):
            try:
                yield offset, decode_trajectory(line)
            except DataError as error:
                raise DataError(f"{file}, line {number}: {error}") from error
            offset += len(line)


def looks_like_own_run(file: Path) -> bool:
    """Whether the first line of a file is one of shoal's trajectories."""
    try:
        next(_trajectories(file))
    except (DataError, StopIteration):
        return False
    return True
