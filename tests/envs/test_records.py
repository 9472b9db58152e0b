import json
import sys

import pytest

from shoal.core.errors import ConfigError, DataError, MissingExtraError
from shoal.envs.records import field, load_records, take_split

ROWS = [{"question": "1+1?", "answer": "#### 2"}, {"question": "é?", "answer": "#### 3"}]


def test_json_and_json_lines_hold_the_same_records(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    assert list(load_records(tmp_path / "a.json")) == list(load_records(tmp_path / "a.jsonl")) == ROWS


def test_parquet_holds_the_same_records(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert list(load_records(tmp_path / "a.parquet")) == ROWS
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing of use")
    with pytest.raises(DataError, match=r"b\.parquet"):
        load_records(tmp_path / "b.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r'pip install "shoal\[data\]"'):
        load_records(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"a": 1}', "list of objects"),
        ("a.json", "[1]", "list of objects"),
        ("a.json", "[]", "no records"),
        ("a.json", "[", "not valid JSON"),
        ("a.json", "[" * 200_000, "not valid JSON"),
        ("a.jsonl", '{"a": 1}\n{"a":\n', "line 2"),
        ("a.csv", "a,b\n", "got '.csv'"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_records(tmp_path / name)


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}]')
    assert load_records(path) == ({"a": 1},)
    path.write_text('[{"a": 1}, {"a": 2}]')
    assert load_records(path) == ({"a": 1}, {"a": 2})


def test_splits_part_the_items():
    items = list(range(57))
    train, test = take_split(items, "train"), take_split(items, "test")
    assert sorted([*train, *test]) == items
    assert test == [9, 19, 29, 39, 49]
    with pytest.raises(ConfigError, match="no item"):
        take_split([1, 2], "test")
    with pytest.raises(ConfigError, match="split must be"):
        take_split(items, "dev")


def test_a_missing_field_is_told_with_those_there_are():
    assert field({"b": 2}, ("a", "b"), "here") == 2
    with pytest.raises(DataError, match=r"here: expected one of the fields \['a'\], got \['b'\]"):
        field({"b": 2}, ("a",), "here")
