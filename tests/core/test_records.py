import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import trajectory_of

from shoal.core.data import (
    Call,
    Trajectory,
    Turn,
    decode_trajectory,
    encode_trajectory,
    read_trajectories,
    write_trajectories,
)
from shoal.core.errors import DataError
from shoal.core.registry import check_name

TEXT = st.text(max_size=20)
TOKENS = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(Call, TOKENS, st.none(), TOKENS, st.lists(FLOATS, max_size=3).map(tuple), st.integers(0, 9))
TURNS = st.builds(Turn, TEXT, st.integers(0, 1), TEXT, st.none() | TEXT, st.booleans(), FLOATS, TEXT)
TRAJECTORIES = st.builds(
    Trajectory,
    TEXT,
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 2**63 - 1),
    st.tuples(CALLS, CALLS, CALLS.map(lambda call: dataclasses.replace(call, parent=1))),
    st.lists(TURNS, max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(TRAJECTORIES)
@settings(max_examples=30)
def test_a_trajectory_survives_the_disk_exactly(trajectory):
    line = encode_trajectory(trajectory)
    assert line.count(b"\n") == 1
    assert decode_trajectory(line) == trajectory


def test_the_prompt_of_a_call_is_all_that_its_parents_were_asked_and_said():
    calls = (
        Call((1, 2), None, (3,), (-0.5,)),
        Call((4,), 0, (5, 6), (-0.5, -0.5)),
        Call((9,), None, (8,), (-0.5,)),
        Call((7,), 1, (), ()),
        Call((10,), 0, (11,), (-0.5,)),
    )
    tree = Trajectory("e", 0, 0, 0, 0, calls, (), True, True, False)
    prompts = [tree.prompt_ids(number) for number in range(5)]
    assert prompts == [(1, 2), (1, 2, 3, 4), (9,), (1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 10)]
    assert tree.n_tokens == 5


@pytest.mark.parametrize(("name", "value"), [("parent", 1), ("parent", -1), ("call", 2), ("call", -1)])
def test_a_call_without_its_parent_and_a_turn_without_its_call_are_no_record(name, value):
    calls = [Call((1,), None, (2,), (-0.5,)), Call((3,), 0, (4,), (-0.5,))]
    turn = Turn("see", 1, "say", None, True, 0.0, "")
    if name == "parent":
        calls[1] = dataclasses.replace(calls[1], parent=value)
    else:
        turn = dataclasses.replace(turn, call=value)
    with pytest.raises(ValueError, match=f"call.* {value}"):
        Trajectory("e", 0, 0, 0, 0, tuple(calls), (turn,), True, True, False)
    good = encode_trajectory(Trajectory("e", 0, 0, 0, 0, tuple(calls[:1]), (), True, True, False))
    with pytest.raises(DataError, match="parent of call 0"):
        decode_trajectory(good.replace(b'"parent":null', b'"parent":0'))


WHOLE = trajectory_of("e", 0, 0, 0, 0, (), True, True, False)
DEEP = b',"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (b'{"env": 3}\n', ""),
        (encode_trajectory(WHOLE).removesuffix(b"}\n") + DEEP, ": maximum recursion"),
    ],
    ids=["other parts", "nested without end"],
)
def test_a_broken_line_is_named_with_file_and_line(tmp_path, broken, why):
    path = tmp_path / "t.jsonl"
    write_trajectories(path, [WHOLE, dataclasses.replace(WHOLE, group=1)])
    path.write_bytes(path.read_bytes() + broken)
    read = read_trajectories(path)
    assert [next(read).group, next(read).group] == [0, 1]
    with pytest.raises(DataError, match=rf"t\.jsonl, line 3: not a trajectory{why}"):
        next(read)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-a", ".a", "a" * 65, "a\n", "a;b", "ä", "a ", "con."])
def test_names_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(ValueError, match="name must be"):
        check_name("skill", name)
