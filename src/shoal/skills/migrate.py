"""Import a folder of the original project. Its pickles are read by a reader that knows arrays and nothing else."""

from __future__ import annotations

import ast
import io
import json
import operator
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import SAFE_NAME
from shoal.skills import experts as expert_files
from shoal.skills.records import NewVersion
from shoal.skills.spec import Predicate, Skill, slug
from shoal.skills.store import Store
from shoal.skills.views import export_state, export_views

MAX_PICKLE = 4 << 30
MAX_DEPTH = 32
_DTYPES = frozenset(
    [
        "float16",
        "float32",
        "float64",
        "bfloat16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
    ]
)


class _ArrayReader(pickle.Unpickler):
    """Unpickles plain containers, NumPy arrays and JAX arrays; any other name in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The few callables that arrays are made of."""
        if (module, name) in (("numpy", "dtype"), ("numpy", "ndarray")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            if name == "_reconstruct":
                return _empty_array
            if name == "scalar":
                return _scalar
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return _from_buffer
        if (module, name) == ("jax._src.array", "_reconstruct_array"):
            return _jax_array
        if (module, name) == ("flax.core.frozen_dict", "FrozenDict"):
            return dict
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("_codecs", "encode"):  # how protocols before 3 write bytes
            return _latin_bytes
        if module == "ml_dtypes" and name == "bfloat16":
            raise pickle.UnpicklingError("bfloat16 arrays are not read; save them as float32")
        raise pickle.UnpicklingError(f"the file names {module}.{name}, which is not part of an array")


def _latin_bytes(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes must be written as latin1")
    return text.encode("latin1")


def _empty_array(kind: Any, shape: Any, code: Any) -> NDArray:
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("only plain arrays are read")
    return np.ndarray.__new__(np.ndarray, (0,), np.uint8)


def _scalar(dtype: np.dtype, data: bytes) -> Any:
    _check_dtype(dtype)
    return np.frombuffer(data, dtype)[0]


def _from_buffer(data: Any, dtype: np.dtype, shape: Any, order: str) -> NDArray:
    _check_dtype(dtype)
    return np.frombuffer(bytes(data), dtype).reshape(shape, order="F" if order == "F" else "C")


def _jax_array(function: Any, arguments: Any, state: Any, extra: Any) -> NDArray:
    array = function(*arguments)
    array.__setstate__(state)
    return np.asarray(array)


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, np.dtype) or dtype.name not in _DTYPES:
        raise pickle.UnpicklingError(f"arrays of {dtype} are not read")


def read_arrays(path: Path) -> Any:
    """What a pickle of arrays, numbers, strings and plain containers holds.

    Raises:
        DataError: the file is broken, or names anything that is not part of an array.
    """
    if path.stat().st_size > MAX_PICKLE:
        raise DataError(f"{path} is larger than {MAX_PICKLE} bytes")
    try:
        value = _ArrayReader(io.BytesIO(path.read_bytes())).load()
        _check(value, 0)
    except Exception as error:
        raise DataError(f"{path} is not a pickle of arrays: {error}") from error
    return value


def _check(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        for item in value.values():
            _check(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, np.ndarray):
        _check_dtype(value.dtype)
    elif not isinstance(value, str | int | float | bool | np.generic | None):
        raise TypeError(f"holds a {type(value).__name__}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, NDArray]]:
    """The arrays of nested dicts under `a/b/c`; sorted."""
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif isinstance(value, np.ndarray | np.generic):
            yield f"{prefix}{key}", np.asarray(value)


def amount_of(value: Any) -> int:
    """An amount per application: a number, or the original's text `lambda n: 2*n + 1`, read at n = 1.

    >>> amount_of("lambda n: 2*n + 1")
    3
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value)
    match = re.fullmatch(r"\s*lambda\s+([A-Za-z_]\w*)\s*:(.{1,80})", str(value))
    if not match:
        raise ConfigError(f"an amount must be a number or 'lambda n: a*n + b', got {str(value)[:80]!r}")
    try:
        return int(_linear(ast.parse(match[2].strip(), mode="eval").body, match[1]))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"an amount must be 'lambda n: a*n + b', got {str(value)[:80]!r}") from error


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def _linear(node: ast.expr, variable: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= 1000:
        return node.value
    if isinstance(node, ast.Name) and node.id == variable:
        return 1
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_linear(node.left, variable), _linear(node.right, variable))
    raise ValueError("only numbers, n, +, - and *")


def migrate_folder(source: Path, target: Path) -> list[str]:
    """Import every skill with an expert of an original folder into a new store; returns what was done, in lines.

    Skills become completed ones: their experts are the first versions, their spec is requirements, consumption
    and gain, done when the first gain is there. Code in the folder is neither read nor run.
    """
    source = Path(source)
    known = _metadata(source)
    if not known:
        raise DataError(
            f"{source} holds no skills: neither checkpoints/global_latest.pkl nor skills/ lists any"
        )
    store = Store(target)
    if store.skills():
        raise ConfigError(f"{target} holds skills already; migrate into a new folder")
    lines = []
    with store.transaction() as db:
        store.set_setting("world", "imported")
        names = sorted(known, key=lambda name: int(known[name]["expert_idx"]))
        gains = {name: _amounts(known[name], "gain") for name in names}
        for name in names:
            data = known[name]
            expert = int(data["expert_idx"])
            skill = _skill(name, data, gains[name])
            needed = _providers(skill, names, gains)
            folder = _inside(source, str(data.get("path") or f"skills/{expert}_{name.replace(' ', '_')}"))
            policy = folder / f"expert_{expert}_policy"
            arrays = dict(flatten(read_arrays(policy / "params.pkl")))
            if not arrays:
                raise DataError(f"{policy / 'params.pkl'} holds no arrays")
            frames = int(data.get("total_frames") or 0)
            sha256 = store.put_blob(
                expert_files.encode(arrays, {"skill": name, "expert": expert, "kind": "import"})
            )
            store.add_skill(skill, needed, frames)
            db.execute("update skill set expert=? where name=?", (expert, name))
            store.add_version(NewVersion(expert, sha256, None, frames, 0, "import", True))
            metrics = {
                k: v for k, v in dict(data.get("metrics") or {}).items() if isinstance(v, int | float | str)
            }
            store.update_skill(name, status="completed", result=metrics, budget_used=frames)
            lines.append(f"{name}: expert {expert}, {frames:,} frames, {len(arrays)} arrays")
    export_views(store)
    export_state(store, 0)
    store.close()
    return lines


def _metadata(source: Path) -> dict[str, Any]:
    """What is known of each skill: from the global checkpoint, else from the folders themselves."""
    path = source / "checkpoints" / "global_latest.pkl"
    if path.exists():
        data = read_arrays(path)
        skills = data.get("skills", {}) if isinstance(data, dict) else {}
        return {str(name): dict(value) for name, value in skills.items()}
    found: dict[str, Any] = {}
    for file in sorted(source.glob("skills/*/expert_*_policy/metadata.json")):
        data = json.loads(file.read_bytes())
        found[str(data["skill_name"])] = {
            "expert_idx": data["global_expert_idx"],
            "total_frames": data.get("total_frames", 0),
            "path": str(file.parent.parent.relative_to(source)),
        }
    return found


def _skill(name: str, data: Mapping[str, Any], gain: dict[str, int]) -> Skill:
    if not SAFE_NAME.fullmatch(name):
        raise DataError(f"a skill in the folder has a name that cannot be kept: {name[:80]!r}")
    slug(name)
    gain = gain or {"unknown": 1}
    first = next(iter(gain))
    consumption = _amounts(data, "consumption")
    requirements = _amounts(data, "requirements")
    for item, amount in consumption.items():
        requirements[item] = max(requirements.get(item, 0), amount)
    return Skill(
        name,
        Predicate(first, max(1, gain[first])),
        requirements=requirements,
        consumption=consumption,
        gain=gain,
    )


def _amounts(data: Mapping[str, Any], key: str) -> dict[str, int]:
    amounts = dict((data.get("skill_with_consumption") or {}).get(key) or {})
    return {str(item): amount for item, value in amounts.items() if (amount := amount_of(value)) > 0}


def _providers(skill: Skill, names: list[str], gains: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The skills that gain what this one requires; items nobody gains are left out."""
    wanted = [
        next((n for n in names if item in gains[n] and n != skill.name), None) for item in skill.requirements
    ]
    return list(dict.fromkeys(name for name in wanted if name is not None))


def _inside(root: Path, relative: str) -> Path:
    path = (root / relative).resolve()
    if not path.is_relative_to(root.resolve()):
        raise DataError(f"the folder names {relative!r}, which leaves it")
    return path
