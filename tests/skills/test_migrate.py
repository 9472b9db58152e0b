from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.skills.experts import decode
from shoal.skills.migrate import amount_of, migrate_folder, read_arrays
from shoal.skills.store import Store


def tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    layer = {"kernel": rng.normal(size=(3, 4)).astype(np.float32), "bias": np.zeros(4, np.float32)}
    return {"actor_network": {"Dense_0": layer}, "critic_network": {"Dense_0": dict(layer)}}


def original(root: Path) -> Path:
    """A folder as the original writes it."""
    skills = {
        "Collect Wood": (0, {"requirements": {}, "consumption": {}, "gain": {"wood": "lambda n: n"}}, 50_000),
        "Make Pickaxe": (2, {"requirements": {"table": "lambda n: 1"}, "consumption": {"wood": "lambda n: 2*n + 1"},
                             "gain": {"wood_pickaxe": 1}}, 7_000),
    }  # fmt: skip
    known = {}
    for name, (expert, amounts, frames) in skills.items():
        path = f"skills/{expert}_{name.replace(' ', '_')}"
        policy = root / path / f"expert_{expert}_policy"
        policy.mkdir(parents=True)
        (policy / "params.pkl").write_bytes(pickle.dumps(tree(expert)))
        (policy / "metadata.json").write_text(
            json.dumps({"skill_name": name, "global_expert_idx": expert, "total_frames": frames})
        )
        known[name] = {
            "expert_idx": expert, "skill_with_consumption": amounts, "path": path, "total_frames": frames,
            "metrics": {"success_rate": 0.5},
        }  # fmt: skip
    (root / "checkpoints").mkdir()
    (root / "checkpoints" / "global_latest.pkl").write_bytes(pickle.dumps({"skills": known, "db": {}}))
    return root


def test_an_original_folder_becomes_completed_skills_with_their_arrays(tmp_path: Path) -> None:
    lines = migrate_folder(original(tmp_path / "old"), tmp_path / "new")
    assert lines == [
        "Collect Wood: expert 0, 50,000 frames, 4 arrays",
        "Make Pickaxe: expert 2, 7,000 frames, 4 arrays",
    ]
    store = Store(tmp_path / "new")
    pickaxe = store.skill("Make Pickaxe")
    assert (pickaxe.status, pickaxe.expert, pickaxe.dependencies) == ("completed", 2, ("Collect Wood",))
    assert pickaxe.spec.consumption == {"wood": 3}
    assert pickaxe.spec.requirements == {"table": 1, "wood": 3}
    assert pickaxe.result == {"success_rate": 0.5}
    head = store.head(2)
    assert head is not None
    assert (head.frames, head.kind) == (7_000, "import")
    arrays, _ = decode(store.get_blob(head.sha256), "x")
    assert (arrays["actor_network/Dense_0/kernel"] == tree(2)["actor_network"]["Dense_0"]["kernel"]).all()
    state = json.loads((tmp_path / "new" / "scheduler_state.json").read_text())
    assert state["next_expert_idx"] == 3


def test_without_the_global_file_the_folders_speak_for_themselves(tmp_path: Path) -> None:
    old = original(tmp_path / "old")
    (old / "checkpoints" / "global_latest.pkl").unlink()
    migrate_folder(old, tmp_path / "new")
    assert [row.expert for row in Store(tmp_path / "new").skills()] == [0, 2]


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


class EvilEval(Evil):
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return eval, (f"open({str(self.marker)!r}, 'w')",)


@pytest.mark.parametrize("evil", [Evil, EvilEval])
def test_a_pickle_with_code_is_refused_and_its_code_does_not_run(tmp_path: Path, evil: type[Evil]) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "params.pkl"
    path.write_bytes(pickle.dumps({"actor_network": evil(marker)}))
    with pytest.raises(DataError, match="not part of an array"):
        read_arrays(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [
        np.array([{"a": 1}, None], dtype=object),
        {"a": np.array([object()])},
        np.array(["text"]),
        {"a": b"bytes"},
        {1, 2},
    ],
)
def test_what_is_not_plain_numbers_is_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(DataError, match="not a pickle of arrays"):
        read_arrays(path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_every_protocol_come_back_exactly(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.pkl"
    value = {
        "a": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "b": [np.float32(1.5), 3, "s", None],
    }
    path.write_bytes(pickle.dumps(value, protocol))
    back = read_arrays(path)
    assert (back["a"] == value["a"]).all()
    assert back["b"] == value["b"]


def test_a_torn_pickle_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(tree(0))
    path = tmp_path / "x.pkl"
    for cut in range(0, len(whole) - 1, 17):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="x.pkl"):
            read_arrays(path)


def test_a_path_or_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    old = original(tmp_path / "old")
    path = old / "checkpoints" / "global_latest.pkl"
    data = pickle.loads(path.read_bytes())
    data["skills"]["Collect Wood"]["path"] = "../../etc"
    path.write_bytes(pickle.dumps(data))
    with pytest.raises(DataError, match="leaves it"):
        migrate_folder(old, tmp_path / "new")
    data["skills"] = {"../evil": data["skills"]["Make Pickaxe"]}
    path.write_bytes(pickle.dumps(data))
    with pytest.raises(DataError, match="name that cannot be kept"):
        migrate_folder(old, tmp_path / "newer")


@pytest.mark.parametrize(
    ("text", "amount"),
    [(3, 3), ("lambda n: n", 1), ("lambda n: 2*n + 1", 3), ("lambda k: 5", 5), ("lambda n: n*3-1", 2)],
)
def test_amounts_are_read_as_linear_texts(text: Any, amount: int) -> None:
    assert amount_of(text) == amount


@pytest.mark.parametrize(
    "text",
    ["lambda n: __import__('os')", "lambda n: n**9", "lambda n: [n][0]", "lambda n: x", "n", "lambda: 1", None, True,
     "lambda n: " + "(" * 60 + "n", "lambda n: 10**9", "lambda n: 99999"],
)  # fmt: skip
def test_anything_else_is_no_amount(text: Any) -> None:
    with pytest.raises(ConfigError, match="an amount must be"):
        amount_of(text)


def test_an_empty_folder_and_a_full_target_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no skills"):
        migrate_folder(tmp_path, tmp_path / "new")
    old = original(tmp_path / "old")
    migrate_folder(old, tmp_path / "full")
    with pytest.raises(ConfigError, match="holds skills already"):
        migrate_folder(old, tmp_path / "full")


def test_jax_arrays_are_read_without_jax(tmp_path: Path) -> None:
    # What JAX writes for an array: a call of its own function on NumPy's own reduction.
    array = np.arange(4, dtype=np.float32)
    function, arguments, state = array.__reduce__()  # type: ignore[misc]

    path = tmp_path / "x.pkl"
    path.write_bytes(pickle_of_jax(function, arguments, state))
    assert (read_arrays(path)["a"] == array).all()


def pickle_of_jax(function: Any, arguments: Any, state: Any) -> bytes:
    """The bytes of `{"a": jax array}`, made without JAX: opcode by opcode around NumPy's own parts."""
    inner = pickle.dumps((function, arguments, state, {"weak_type": False}), 2)[2:-1]
    return b"\x80\x02}X\x01\x00\x00\x00acjax._src.array\n_reconstruct_array\n" + inner + b"Rs."
