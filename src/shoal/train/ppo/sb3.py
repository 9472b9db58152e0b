"""Policies that Stable-Baselines3 saved, for evaluation: perceptrons, read without running any pickle."""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.core.errors import ConfigError, DataError, reading
from shoal.train.ppo.arrays.spaces import ActionRows, ObservationRows
from shoal.train.ppo.checkpoint import Checkpoint, describe_policy
from shoal.train.ppo.config import PPOConfig
from shoal.train.ppo.policy import Policy

Array = np.ndarray
LARGEST = 1 << 30
"""Bytes of a file in the archive."""
_LAYER = re.compile(r"mlp_extractor\.(policy|value)_net\.(\d+)\.(weight|bias)")
_HEADS = {"action_net": "actor", "value_net": "critic"}
_UNREADABLE = (
    zipfile.BadZipFile, AttributeError, KeyError, ValueError, TypeError, RuntimeError, RecursionError
)  # fmt: skip
_ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu"}


def load_sb3_policy(path: Path | str, env: gym.Env, *, statistics: Path | str | None = None) -> Policy:
    """The policy of a `PPO("MlpPolicy", …).save(path)`, or of A2C's, ready to act in shoal.

    Args:
        path: the archive (`model.zip`).
        env: an environment with the spaces that it was trained on; it is only looked at.
        statistics: of a `VecNormalize` that the policy was trained under, as npz with `mean` and `var` of its
            observations: `np.savez("statistics.npz", mean=venv.obs_rms.mean, var=venv.obs_rms.var)`.

    Raises:
        DataError: it is no such archive, or holds more than numbers.
        ConfigError: a policy of another kind, or trained under `VecNormalize` and no statistics are given.
    """
    data, tensors = _opened(Path(path))
    rows, actions = ObservationRows(env.observation_space), ActionRows(env.action_space)
    weights, hidden = _weights(tensors, rows, actions)
    config = PPOConfig(hidden=hidden, activation=_activation(data), normalize_obs=statistics is not None)  # type: ignore[arg-type]
    policy = describe_policy(
        env.observation_space, env.action_space, None, config, statistics is not None,
        env.spec.id if env.spec is not None else type(env.unwrapped).__name__,
    )  # fmt: skip
    if statistics is None and data.get("_last_original_obs") is not None:
        raise ConfigError(
            f"{path} was trained under VecNormalize: give its statistics, saved by np.savez('statistics.npz', "
            "mean=venv.obs_rms.mean, var=venv.obs_rms.var), as statistics='statistics.npz'"
        )
    moments = {} if statistics is None else _moments(Path(statistics), rows.n_numbers)
    return Policy(Checkpoint({**policy, "network": "MLPActorCritic"}, {}, weights, {}, moments, {}))


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """What is said of the model, and its tensors; nothing that is pickled is run."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            for name in ("data", "policy.pth"):
                if archive.getinfo(name).file_size > LARGEST:
                    raise DataError(f"{path}: {name} is larger than {LARGEST} bytes")
            data = json.loads(archive.read("data"))
            stored = io.BytesIO(archive.read("policy.pth"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other pickles than its own, which it then refuses
            tensors = torch.load(stored, map_location="cpu", weights_only=True)
        if not isinstance(data, dict) or not isinstance(tensors, dict):
            raise ValueError("its parts are not dicts")
        return data, {name: tensor.numpy().astype(np.float32) for name, tensor in tensors.items()}
    except _UNREADABLE as error:
        raise DataError(f"{path} is no model that Stable-Baselines3 saved: {error}") from error
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} holds more than tensors in policy.pth, which is not read: {error}"
        ) from error


def _weights(
    tensors: dict[str, Array], rows: ObservationRows, actions: ActionRows
) -> tuple[dict[str, Array], tuple[int, ...]]:
    """Arrays by shoal's names, and the units of the hidden layers."""
    found: dict[str, Array] = {}
    for name, array in tensors.items():
        if match := _LAYER.fullmatch(name):
            part = "actor" if match[1] == "policy" else "critic"
            found[f"{part}.{match[2]}.{match[3]}"] = array
        elif name == "log_std" and array.ndim == 1:
            found[name] = array
        elif name.partition(".")[0] not in _HEADS:
            raise ConfigError(f"only perceptrons without gSDE are read (MlpPolicy), this policy has {name}")
    layers = {part: _hidden(found, part) for part in ("actor", "critic")}
    if layers["actor"] != layers["critic"]:
        raise ConfigError(f"actor and critic must have layers of the same sizes, got {layers}")
    hidden = layers["actor"]
    for head, part in _HEADS.items():
        for leaf in ("weight", "bias"):
            if f"{head}.{leaf}" not in tensors:
                raise DataError(f"policy.pth has no {head}.{leaf}")
            found[f"{part}.{2 * len(hidden)}.{leaf}"] = tensors[f"{head}.{leaf}"]
    shapes = (found["actor.0.weight"].shape[1], len(found[f"actor.{2 * len(hidden)}.bias"]))
    if rows.dtype != np.float32 or shapes != (rows.size, actions.n_parameters):
        raise ConfigError(
            f"the policy reads {shapes[0]} numbers and gives {shapes[1]}; this environment shows {rows.size} and "
            f"takes {actions.n_parameters}"
        )
    return found, hidden


def _hidden(found: dict[str, Array], part: str) -> tuple[int, ...]:
    biases = {int(name.split(".")[1]): len(array) for name, array in found.items()
              if name.startswith(part) and name.endswith("bias")}  # fmt: skip
    if not biases or sorted(biases) != list(range(0, 2 * len(biases), 2)):
        raise ConfigError(
            f"the {part} must have hidden layers with an activation each, got layers {sorted(biases)}"
        )
    return tuple(biases[layer] for layer in sorted(biases))


def _activation(data: dict[str, Any]) -> str:
    """The activation as the archive tells it in words; Stable-Baselines3's own default is tanh."""
    told = data.get("policy_kwargs")
    name = str(told.get("activation_fn", "Tanh") if isinstance(told, dict) else "Tanh")
    for theirs, ours in _ACTIVATIONS.items():
        if re.search(rf"\b{theirs}\b", name):
            return ours
    raise ConfigError(f"activations must be one of {', '.join(_ACTIVATIONS)}, got {name}")


def _moments(path: Path, size: int) -> dict[str, Array]:
    """The statistics as a checkpoint has them: those of one row with this variance."""
    with reading(path, "must be an npz with mean and var"), np.load(path, allow_pickle=False) as file:
        mean, variance = (np.asarray(file[name], np.float64).reshape(-1) for name in ("mean", "var"))
    if mean.shape != (size,) or variance.shape != (size,):
        raise DataError(
            f"{path} must have {size} numbers in mean and var, got {mean.size} and {variance.size}"
        )
    return {"obs.count": np.array(1.0), "obs.mean": mean, "obs.square": variance}
