"""What a run folder holds: the settings that a run was made with, and its files of episodes in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.configuration import read_settings
from shoal.core.errors import ConfigError, DataError
from shoal.core.run_folder import command_of

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
