"""PPO checkpoints: folders committed at once, verified on reading, and never a pickle.

`weights.safetensors` (named as torch names them), `optimizer.safetensors`, `statistics.safetensors`,
`episodes.safetensors`, `policy.json` (what `load_policy` needs) and `training.json` (what a resumed run
needs).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal.core.errors import OTHER_CHECKPOINT, ConfigError, DataError, reading
from shoal.core.files import is_whole, read_json, restore_folders, verify_folder, write_folder, write_json
from shoal.core.run_folder import command_of
from shoal.train.ppo.config import PPOConfig

Array = np.ndarray
Arrays = dict[str, Array]
FORMAT = 1
POLICY = {"env": str, "env_kwargs": dict, "observation_space": dict, "action_space": dict, "network": str}
TRAINING = {"config": dict, "seed": int, "n_envs": int, "n_steps": int, "n_episodes": int, "recent": list}
"""What the two files of JSON say at least."""
ARRAYS = ("weights", "optimizer", "statistics", "episodes")
_FOLDER = re.compile(r"step_(\d{12})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All of a run at one moment."""

    policy: dict[str, Any]  # spaces, network, normalisation: the meaning of the weights
    training: dict[str, Any]  # config, counters, recent episodes
    weights: Arrays
    optimizer: Arrays
    statistics: Arrays
    episodes: Arrays


def checkpoint_folder(root: Path | str, step: int) -> Path:
    """Where the checkpoint after `step` env steps belongs; names sort by step."""
    return Path(root) / f"step_{step:012d}"


def checkpoint_step(folder: Path) -> int:
    """The env steps after which a checkpoint was made, by its name; 0 for a folder of another name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else 0


def save_checkpoint(folder: Path | str, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint so that it exists whole or not at all, and return its folder."""
    from safetensors.numpy import save_file

    with write_folder(folder) as temporary:
        for name in ARRAYS:
            arrays = {key: np.asarray(value, order="C") for key, value in getattr(checkpoint, name).items()}
            save_file(arrays, temporary / f"{name}.safetensors")
        write_json(temporary / "policy.json", {"format": FORMAT, **checkpoint.policy})
        write_json(temporary / "training.json", checkpoint.training)
    return Path(folder)


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint folder, or the newest one in a folder of them.

    Raises:
        DataError: it is missing, truncated or altered; names the file, and the newest intact checkpoint
        beside.
    """
    folder = find_checkpoint(path)
    try:
        verify_folder(folder)
        policy = read_json(folder / "policy.json")
        found = policy.get("format") if isinstance(policy, dict) else None
        if found != FORMAT:
            raise DataError(f"{folder} has checkpoint format {found!r}, this shoal reads {FORMAT}")
        arrays = [_read(folder / f"{name}.safetensors") for name in ARRAYS]
        saved = Checkpoint(policy, read_json(folder / "training.json"), *arrays)
        with reading(folder, OTHER_CHECKPOINT):
            for told, known in ((saved.policy, POLICY), (saved.training, TRAINING)):
                for name, kind in known.items():
                    if type(told[name]) is not kind:
                        raise TypeError(f"{name} must be of {kind.__name__}, got {told[name]!r:.60}")
        return saved
    except DataError as error:
        others = (other for other in reversed(list_checkpoints(folder.parent)) if other != folder)
        other = next(filter(is_whole, others), None)
        hint = f"an intact one is {other}: resume from that" if other else "there is no intact one beside it"
        raise DataError(f"{error}; {hint}") from error


def load_run(path: Path | str) -> Checkpoint:
    """The same of a run of `PPO`, which can go on."""
    saved = load_checkpoint(path)
    if "begun" not in saved.training:
        raise ConfigError(
            f"{path} is of a PPOTrainer, which steps its caller's envs: load it by PPOTrainer.load"
        )
    return saved


def find_checkpoint(path: Path | str) -> Path:
    """`path` if it is a checkpoint, else the newest one in it or in its `checkpoints` folder."""
    path = Path(path)
    if (path / "policy.json").exists() or _FOLDER.fullmatch(path.name):
        return path
    for root in (path, path / "checkpoints"):
        restore_folders(root)
        found = list_checkpoints(root)
        if found:
            return found[-1]
    raise DataError(
        f"{path} holds no checkpoint of PPO: expected a run folder of shoal train-ppo, a folder that PPO.save wrote, "
        f"or a folder step_… in one; got {_what_is(path)}; shoal runs FOLDER lists the runs of a folder"
    )


def checkpoint_named(run: Path, wanted: str) -> Path:
    """The checkpoint of a run that is asked for: "newest", "best", or the env steps after which it was made."""
    if wanted in ("newest", "best"):
        return find_checkpoint(run if wanted == "newest" else run / "best")
    there = {str(checkpoint_step(folder)): folder for folder in list_checkpoints(run / "checkpoints")}
    if wanted not in there:
        raise DataError(
            f"{run} has no checkpoint after {wanted} steps; it has newest, best, {', '.join(there) or 'no other'}"
        )
    return there[wanted]


def _what_is(path: Path) -> str:
    """What is at a place where no checkpoint is."""
    if not path.is_dir():
        return "a file" if path.exists() else "nothing: there is no such folder"
    if not (names := sorted(entry.name for entry in path.iterdir())):
        return "an empty folder"
    if (path / "summary.json").is_file():
        return f"a run of shoal {command_of(path)}"
    return f"a folder with {', '.join(names[:3])}{', …' if names[3:] else ''}"


def holds_policy(path: Path | str) -> bool:
    """Whether a folder is a checkpoint of PPO, or a run or folder with some."""
    path = Path(path)
    found = [path, *list_checkpoints(path), *list_checkpoints(path / "checkpoints")]
    return any((folder / "policy.json").is_file() for folder in found)


def list_checkpoints(root: Path | str) -> list[Path]:
    """The checkpoint folders in `root`, oldest first."""
    root = Path(root)
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir())


def prune_checkpoints(root: Path | str, keep: int) -> None:
    """Remove the oldest checkpoints beyond `keep`."""
    for folder in list_checkpoints(root)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> Arrays:
    from safetensors.numpy import load_file

    with reading(path, "is not a readable safetensors file"):
        return dict(load_file(path))


def describe_policy(
    observation_space: spaces.Space, action_space: spaces.Space, network: Any, config: PPOConfig,
    normalize_obs: bool, env: str = "", env_kwargs: Mapping[str, Any] | None = None, **around: Any,
) -> dict[str, Any]:  # fmt: skip
    """What weights mean, as JSON: the `policy` of a checkpoint.

    Args:
        observation_space: of the env, with all that is `around` it.
        action_space: of the env itself, if actions are squashed into it.
        network: whose weights they are.
        config: with which it was built.
        normalize_obs: whether it sees normalised numbers.
        env: its name.
        env_kwargs: with which it is made.
        around: `native` (whether it is a native batch), `wrappers`, `atari`, `frame_stack`, and `masked`: whether the
            env gives action masks; what is false is left out.
    """
    own = getattr(network, "module", None)
    told = {
        "env": env,
        "env_kwargs": dict(env_kwargs or {}),
        "observation_space": describe_space(observation_space),
        "action_space": describe_space(action_space),
        "network": type(own if own is not None else network).__name__,
        "hidden": list(config.hidden),
        "activation": config.activation,
        "normalize_obs": normalize_obs,
    }
    plain = {"cnn": "auto", "precision": "float32", "squash": False, "recurrent": "none"}
    told |= {name: getattr(config, name) for name, usual in plain.items() if getattr(config, name) != usual}
    if config.recurrent != "none":
        told["memory_units"] = config.memory_units
    return {**told, **{key: value for key, value in around.items() if value}}


SAME = (
    "env", "native", "wrappers", "atari", "frame_stack", "squash", "observation_space", "action_space", "network",
)  # fmt: skip


def check_same(saved: Checkpoint, mine: Checkpoint) -> None:
    """Raise a `ConfigError` that lists the differences if a checkpoint is of another env or network."""
    wrong = [
        f"{key}: the checkpoint has {saved.policy.get(key)!r}, this run {mine.policy.get(key)!r}"
        for key in SAME
        if saved.policy.get(key) != mine.policy.get(key)
    ]
    if wrong := wrong + other_shapes(saved.weights, mine.weights):
        raise ConfigError("the checkpoint belongs to another run:\n  " + "\n  ".join(wrong))


def other_shapes(saved: Arrays, mine: Arrays) -> list[str]:
    """What differs between the weights of a checkpoint and those of a network."""
    shapes = {name: [getattr(w.get(name), "shape", None) for w in (saved, mine)] for name in {*saved, *mine}}
    return [
        f"weight {name}: the checkpoint has shape {theirs}, this network {ours}"
        for name, (theirs, ours) in sorted(shapes.items())
        if theirs != ours
    ]


def describe_space(space: spaces.Space) -> dict[str, Any]:
    """A space as JSON."""
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "spaces": {key: describe_space(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        return {
            "kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype),
            "low": _bounds(space.low), "high": _bounds(space.high),
        }  # fmt: skip
    whole = {} if space.dtype == np.int64 else {"dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), **whole}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), **whole}
    if isinstance(space, spaces.MultiBinary):
        n = list(space.shape) if len(space.shape) != 1 else int(space.shape[0])
        return {"kind": "MultiBinary", "n": n}
    raise DataError(f"cannot describe the space {space}")


def read_space(value: dict[str, Any]) -> spaces.Space:
    """What `describe_space` described."""
    kind = value["kind"]
    if kind == "Dict":
        parts = value["spaces"].items()
        return spaces.Dict([(key, read_space(part)) for key, part in parts])  # a plain dict would be sorted
    if kind == "Box":
        dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
        low, high = (np.empty(shape, dtype) for _ in range(2))
        for bound, told in ((low, value["low"]), (high, value["high"])):
            told = told if isinstance(told, list) else [told]
            bound.reshape(-1)[:] = [float(number) if isinstance(number, str) else number for number in told]
        return spaces.Box(low, high, shape, dtype.type)
    whole: dict[str, Any] = {"dtype": np.dtype(value["dtype"])} if "dtype" in value else {}
    if kind == "Discrete":
        return spaces.Discrete(value["n"], start=value["start"], **whole)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(value["nvec"]), start=np.array(value["start"]), **whole)
    if kind == "MultiBinary":
        return spaces.MultiBinary(value["n"])
    raise DataError(f"unknown kind of space {kind!r}")


def _bounds(bound: Array) -> Any:
    """A bound, as one number when all are equal; infinities as text, for JSON."""
    flat = bound.reshape(-1)
    same = flat.size > 0 and (flat == flat[0]).all()
    numbers = [n if not isinstance(n, float) or np.isfinite(n) else repr(n) for n in flat.tolist()]
    return numbers[0] if same else numbers
