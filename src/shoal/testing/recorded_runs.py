"""What run folders recorded, compared: the episodes of a run in their order, its weights, and where two runs part.

Only the files of a run folder are read, so runs made serially, by processes, on Ray or with a server compare alike.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.configuration import read_settings
from shoal.core.data import Trajectory, encode_trajectory, read_trajectories
from shoal.core.errors import ConfigError, DataError
from shoal.core.run_folder import command_of
from shoal.testing.verify import Difference, difference_of

if TYPE_CHECKING:
    from shoal.train.agent.config import AgentConfig

_NUMBERED = re.compile(r"(heldout|train)-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of episodes of a run."""

    file: Path
    kind: str  # "train", "heldout", or the name of a file that a training did not write
    weights: int  # the iteration whose checkpoint wrote the episodes; 0 where there is none

    @property
    def name(self) -> str:
        """How the command line calls it."""
        return self.file.stem

    @property
    def held_out(self) -> bool:
        """Whether its episodes are those of an evaluation: greedy, with seeds of their own."""
        return self.kind == "heldout"


def settings_of(run: Path) -> dict[str, Any]:
    """The settings in a run's `config.yaml`; {} if it has none. A `ConfigError` tells of one that cannot be read."""
    path = run / "config.yaml"
    return read_settings(path) if path.is_file() else {}


def agent_config_of(run: Path) -> AgentConfig:
    """The settings of a run that played agents, without its `rewards`: what it says of its scores is in its records.

    Raises:
        ConfigError: they are not those of this version of shoal, or as in `settings_of`.
        DataError: it is a run of something else.
    """
    from shoal.train.agent.config import AgentConfig

    values = settings_of(run)
    if "custom_envs" not in values:
        made = command_of(run)
        by = f"; it was made by shoal {made}" if made != "train" else ""
        raise DataError(f"{run} is no run of agents: it has no config.yaml that names envs{by}")
    try:
        return AgentConfig.read({**values, "rewards": []})  # whose functions a script may have registered
    except ConfigError as error:
        raise ConfigError(f"{run / 'config.yaml'} does not fit this version of shoal: {error}") from error


def recordings_of(run: Path) -> list[Recording]:
    """The files of episodes in a run folder, in the order in which they were played."""
    found = []
    for file in sorted((run / "trajectories").glob("*.jsonl")):
        named = _NUMBERED.fullmatch(file.stem)
        if named is None:
            found.append((0, 0, Recording(file, file.stem, 0)))
            continue
        held_out, number = named[1] == "heldout", int(named[2])
        weights = number if held_out else number - 1  # those before the update that the episodes are for
        found.append((weights, int(not held_out), Recording(file, named[1], weights)))
    return [recording for *_, recording in sorted(found, key=lambda item: item[:2])]


def episodes_digest(run: Path, *, tokens_only: bool = False) -> str:
    """The sha256 of all recorded episodes of a run.

    Args:
        run: its folder.
        tokens_only: leave log-probabilities out, which a batch of another shape may round otherwise.
    """
    digest = hashlib.sha256()
    for recording in recordings_of(run):
        digest.update(recording.name.encode())
        for trajectory in read_trajectories(recording.file):
            told = replace(trajectory, error=None)  # words of a failure tell who played it
            digest.update(encode_trajectory(_without_logprobs(told) if tokens_only else told))
    return digest.hexdigest()


def _without_logprobs(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, calls=tuple(replace(call, logprobs=()) for call in trajectory.calls))


def weights_digest(folder: Path) -> str:
    """The sha256 of all tensors in the safetensors files under a folder: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no tensors to compare")
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode())
        data = file.read_bytes()
        # the format: a length, a JSON header, then the bytes of tensors
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, about in sorted(header.items()):
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in about["data_offsets"])
                digest.update(f"{name} {about['dtype']} {about['shape']}".encode())
                digest.update(data[begin:end])
    return digest.hexdigest()


def first_difference(one: Path, other: Path, *, tokens_only: bool = False) -> Difference | None:
    """Where the recorded episodes of two runs first differ, in the order in which they were played.

    Raises:
        DataError: the runs have no files of episodes of the same name.
    """
    left = {recording.name: recording for recording in recordings_of(one)}
    right = {recording.name: recording for recording in recordings_of(other)}
    if not left.keys() & right.keys():
        have = [f"{run}: {', '.join(names) or 'none'}" for run, names in ((one, left), (other, right))]
        raise DataError(f"no file of episodes is in both runs ({'; '.join(have)})")
    for name, recording in left.items():
        if name in right:
            found = first_in_files(recording.file, right[name].file, tokens_only=tokens_only)
            if found is not None:
                return found
    for name in sorted(left.keys() ^ right.keys()):
        here, there = ("there" if name in side else "missing" for side in (left, right))
        return Difference("the file", here, there, name)
    return None


def first_in_files(one: Path, other: Path, *, tokens_only: bool = False) -> Difference | None:
    """Where two files of episodes first differ."""
    for a, b in zip_longest(read_trajectories(one), read_trajectories(other)):
        if a is None or b is None:
            place = a or b
            here, there = ("missing" if side is None else "there" for side in (a, b))
            assert place is not None
            return Difference(
                "the episode", here, there, one.stem, place.iteration, place.group, place.member
            )
        found = difference_of(a, b, tokens_only=tokens_only)
        if found is not None:
            return replace(found, file=one.stem)
    return None
