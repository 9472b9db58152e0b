"""Write `interface.json`: what the references name, as the installed shoal has it.

Names with their signatures, commands with their flags, keys of the YAML of agent training. `test_interface.py` compares
every later shoal with it. Where something is meant to change, change its entry in the commit that changes it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from shoal.cli.command import every, flags_of
from shoal.cli.main import COMMANDS

RECORD = Path(__file__).with_name("interface.json")
NAMES = {
    "shoal": """
        MultiProcessEnvironmentContainer ParallelEnv make_vec EnvironmentManager SokobanEnvironmentManager
        WebShopEnvironmentManager CountdownEnvironmentManager MetaMathQAEnvironmentManager FrozenLakeEnvironmentManager
        BanditEnvironmentManager create_projection_function TrajectoryCollector make_environments
        validate_environment_config ParallelRolloutManager SharedLLMInferenceManager TrajectorySplitter
        StepwiseTrajectorySplitter LastNTrajectorySplitter PPOTrainer AgentTrainer SkillScheduler build_remapping
        prepare_training_run process_completed_training""",
    "shoal.testing": "check_vector_env",
}
METHODS = {
    "MultiProcessEnvironmentContainer": "reset step render get_available_actions close",
    "ParallelEnv": "reset step close",
    "TrajectorySplitter": "split split_parallel",
    "StepwiseTrajectorySplitter": "split split_parallel",
    "LastNTrajectorySplitter": "split split_parallel",
    "PPOTrainer": "train_episode train_episode_vectorized",
    "SkillScheduler": "add_skill run get_status get_running_skills get_completed_skills",
}


@functools.cache
def names() -> dict[str, list[str]]:
    """The parameters of each name, and of the methods that the references call."""
    found = {}
    for room, listed in NAMES.items():
        module = importlib.import_module(room)
        for name in listed.split():
            thing = getattr(module, name)
            found[f"{room}.{name}"] = parameters(thing)
            for method in METHODS.get(name, "").split():
                found[f"{room}.{name}.{method}"] = parameters(getattr(thing, method))
    return found


def parameters(function: Any) -> list[str]:
    """`name`, or `name = default`; `*` before those by keyword only, and before `*args` and `**kwargs` as in Python."""
    kinds = inspect.Parameter
    marks = {kinds.KEYWORD_ONLY: "*, ", kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    return [
        marks.get(p.kind, "") + p.name + ("" if p.default is p.empty else f" = {default_of(p.default)}")
        for p in inspect.signature(function).parameters.values()
    ]


def default_of(value: Any) -> str:
    """A default as text; of an object its class."""
    plain = isinstance(value, bool | int | float | str | tuple | None)
    return repr(value) if plain else f"<{type(value).__name__}>"


@functools.cache
def commands() -> dict[str, list[str]]:
    """The flags of every command."""
    found = {
        name: flags_of(one, name) for first, entry in COMMANDS.items() for name, one in every(entry, first)
    }
    return {
        name: sorted(flag for flag in flags if flag.replace("--no-", "--", 1) not in {*flags} - {flag})
        for name, flags in found.items()
    }


@functools.cache
def keys() -> list[str]:
    """Every key of agent training."""
    from shoal.core.configuration import to_mapping
    from shoal.train.agent.config import AgentConfig

    return sorted(flat(to_mapping(AgentConfig())))


def flat(values: Any, path: str = "") -> list[str]:
    """`{"a": {"b": 1}}` as `["a.b"]`; lists and empty mappings are values."""
    if not isinstance(values, dict) or not values:
        return [path]
    return [
        key for name, item in values.items() for key in flat(item, f"{path}.{name}" if path else str(name))
    ]


def record() -> dict[str, Any]:
    """All that is compared."""
    return {"names": names(), "commands": commands(), "keys": keys()}


def as_text(found: dict[str, Any]) -> str:
    """The record as JSON, a line an entry."""
    parts = []
    for part, values in found.items():
        items = [json.dumps(v) for v in values]
        if isinstance(values, dict):
            items = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
        begin, end = "{}" if isinstance(values, dict) else "[]"
        parts.append(f' "{part}": {begin}\n  ' + ",\n  ".join(items) + f"\n {end}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    RECORD.write_text(as_text(record()), encoding="utf-8")
