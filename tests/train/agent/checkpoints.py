"""What a checkpoint holds, however many processes wrote it."""

import json

import torch
from safetensors import safe_open


def tensors_of(checkpoint, parts=("engine", "critic", "optimizer")):
    """Whole tensors as `<part>.<name>`, of files and of folders of files; shards lie where their header says."""
    found = {}
    for part in parts:
        files = [*checkpoint.glob(f"{part}.safetensors"), *checkpoint.glob(f"{part}/*.safetensors")]
        for name, shards in _shards(files).items():
            found[f"{part}.{name}"] = _joined(shards)
    return found


def _shards(files):
    """Of each tensor, the pieces and where they begin."""
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            places = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118 (no dict)
                value = opened.get_tensor(name)
                begin = places[name]["saved_offsets"] if places else [0] * value.ndim
                found.setdefault(name, []).append((begin, value))
    return found


def _joined(shards):
    ends = [[b + n for b, n in zip(begin, value.shape, strict=True)] for begin, value in shards]
    whole = torch.zeros([max(end) for end in zip(*ends, strict=True)], dtype=shards[0][1].dtype)
    for begin, value in shards:
        whole[tuple(slice(b, b + n) for b, n in zip(begin, value.shape, strict=True))] = value
    assert sum(value.numel() for _, value in shards) == whole.numel()
    return whole
