from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import DataError
from shoal.skills.learning.network import build_remapping, decode, encode, join_mixture, split_mixture


def test_dependencies_and_the_new_expert_are_numbered_by_global_index() -> None:
    done = {
        "Collect Wood": {"expert_idx": 0},
        "Collect Stone": {"expert_idx": 2},
        "Unused": {"expert_idx": 9},
    }
    assert build_remapping(["Collect Wood", "Collect Stone"], 7, done) == (
        {0: 0, 2: 1, 7: 2},
        {0: 0, 1: 2, 2: 7},
    )
    assert build_remapping([], 4, done) == ({4: 0}, {0: 4})
    # Naming one twice, as several plan steps do, makes no second network.
    assert build_remapping(["Collect Wood", "Collect Wood"], 7, done)[0] == {0: 0, 7: 1}


def test_a_missing_dependency_is_named() -> None:
    with pytest.raises(
        ValueError, match="'Colect Wood' is not among the completed skills. Did you mean 'Collect Wood'"
    ):
        build_remapping(["Colect Wood"], 1, {"Collect Wood": {"expert_idx": 0}})


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_remapping_is_a_contiguous_order_preserving_bijection(indices: list[int]) -> None:
    done = {str(place): {"expert_idx": index} for place, index in enumerate(indices)}
    to_local, to_global = build_remapping(list(done), indices[-1], done)
    assert list(to_global) == list(range(len(set(indices))))
    assert list(to_global.values()) == sorted(set(indices))
    assert all(to_global[to_local[index]] == index for index in indices)


def test_twelve_experts_go_in_and_come_out_unmixed() -> None:
    # With prefixes instead of whole keys, expert 1 would come back as expert 11.
    experts = {i: {"actor/weight": np.full((2, 2), i, np.float32)} for i in range(12)}
    back = split_mixture(join_mixture(experts))
    assert list(back) == list(range(12))
    for i in range(12):
        assert (back[i]["actor/weight"] == i).all()


@pytest.mark.parametrize(
    "key", ["expert_01/x", "expert_/x", "xexpert_1/x", "expert_1", "expert_1x/y", "actor/weight"]
)
def test_a_key_that_is_not_an_experts_is_refused(key: str) -> None:
    with pytest.raises(DataError, match="not an expert's array"):
        split_mixture({key: np.zeros(1)})


def test_equal_experts_give_equal_bytes_and_survive_the_file() -> None:
    arrays = {f"k{i}": np.arange(6, dtype=np.float32).reshape(2, 3) * i for i in range(20)}
    note = {"skill": "Collect Wood", "expert": 3, "frames": 7}
    data = encode(arrays, note)
    assert data == encode(dict(reversed(arrays.items())), dict(reversed(note.items())))
    back, read = decode(data, "x")
    assert read == note
    assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in arrays.items()}


@given(st.binary(max_size=200))
def test_bytes_that_are_no_expert_are_a_data_error(data: bytes) -> None:
    with pytest.raises(DataError, match="broken.bin"):
        decode(data, "broken.bin")


def test_an_index_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expert indices must not be negative, got -2"):
        build_remapping(["a"], 3, {"a": {"expert_idx": -2}})
