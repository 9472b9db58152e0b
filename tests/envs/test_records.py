"""Files of the user: what they may hold, and that each is in memory once."""

import gc
import json
import os
import pickle
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

import shoal.envs
from shoal.core.errors import ConfigError, DataError, MissingExtraError
from shoal.envs import records
from shoal.envs.records import load_records, take_split

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
    with pytest.raises(MissingExtraError, match=r'pip install "\.\[data\]"'):
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


def test_splits_part_the_items():
    items = list(range(57))
    train, test = take_split(items, "train"), take_split(items, "test")
    assert sorted([*train, *test]) == items
    assert test == [9, 19, 29, 39, 49]
    with pytest.raises(ConfigError, match="no item"):
        take_split([1, 2], "test")
    with pytest.raises(ConfigError, match="split must be"):
        take_split(items, "dev")


def write_questions(path, n, start=0):
    rows = [
        {"question": f"What is {i} + {i}? {'x' * 80}", "answer": f"It is #### {2 * i}"}
        for i in range(start, start + n)
    ]
    path.write_text(json.dumps(rows))


def write_puzzles(path, n, start=0):
    path.write_text(
        "".join(json.dumps({"nums": [i + 1, 2, 3], "target": 7}) + "\n" for i in range(start, start + n))
    )


FILES = {"metamathqa": write_questions, "countdown": write_puzzles}


@pytest.mark.parametrize(("name", "split"), [("metamathqa", "all"), ("countdown", "train")])
def test_envs_of_one_file_hold_it_in_memory_once(tmp_path, name, split):
    path = tmp_path / "many.jsonl" if name == "countdown" else tmp_path / "many.json"
    FILES[name](path, 8_000)
    tracemalloc.start()
    try:
        first = shoal.envs.make(name, source=str(path), split=split)
        gc.collect()
        alone = tracemalloc.get_traced_memory()[0]
        others = [shoal.envs.make(name, source=str(path), split=split) for _ in range(20)]
        sent = [pickle.loads(pickle.dumps(first)) for _ in range(5)]
        gc.collect()
        more = tracemalloc.get_traced_memory()[0] - alone
    finally:
        tracemalloc.stop()
    assert more < 25 * 20_000  # an env of its own is some kilobytes; the file is megabytes
    assert alone > 1_000_000
    assert len(pickle.dumps(first)) < 20_000
    shown = first.reset(seed=3)[0]
    assert all(env.reset(seed=3)[0] == shown for env in [*others, *sent])


def test_threads_that_make_envs_together_read_the_file_once(tmp_path, monkeypatch):
    path = tmp_path / "together.jsonl"
    write_puzzles(path, 500)
    reads, read = [], records._json_lines
    monkeypatch.setattr(records, "_json_lines", lambda place: (reads.append(place), read(place))[1])
    with ThreadPoolExecutor(8) as threads:
        shown = set(
            threads.map(lambda _: shoal.envs.make("countdown", source=str(path)).reset(seed=1)[0], range(24))
        )
    assert len(shown) == 1
    assert reads == [path]


def test_a_changed_file_is_a_new_file_for_new_envs_only(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write_puzzles(path, 1)
    before = shoal.envs.make("countdown", source=str(path))
    write_puzzles(path, 1, start=40)
    after = shoal.envs.make("countdown", source=str(path))
    assert before.reset(seed=0)[0].startswith("Numbers: 1 2 3")
    assert after.reset(seed=0)[0].startswith("Numbers: 41 2 3")
    stat = path.stat()  # the same length and time, another file: as a copy that keeps times leaves it
    (tmp_path / "b.jsonl").write_text(path.read_text().replace("41", "62"))
    os.utime(tmp_path / "b.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(tmp_path / "b.jsonl", path)
    assert shoal.envs.make("countdown", source=str(path)).reset(seed=0)[0].startswith("Numbers: 62 2 3")


def test_a_relative_name_is_the_file_it_named_also_from_another_folder(tmp_path, monkeypatch):
    for name, start in (("one", 10), ("two", 20)):
        (tmp_path / name).mkdir()
        write_puzzles(tmp_path / name / "a.jsonl", 1, start=start)
        os.utime(tmp_path / name / "a.jsonl", ns=(10**18, 10**18))
    monkeypatch.chdir(tmp_path / "one")
    one = shoal.envs.make("countdown", source="a.jsonl")
    sent = pickle.dumps(one)
    monkeypatch.chdir(tmp_path / "two")
    assert shoal.envs.make("countdown", source="a.jsonl").reset(seed=0)[0].startswith("Numbers: 21")
    assert pickle.loads(sent).reset(seed=0)[0].startswith("Numbers: 11")


def test_what_fails_is_tried_again(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("[")
    for _ in range(2):
        with pytest.raises(DataError, match="line 1"):
            shoal.envs.make("countdown", source=str(path))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        shoal.envs.make("countdown", source=str(tmp_path / "nowhere.jsonl"))


def test_sokobans_levels_are_read_again_when_their_file_changes(tmp_path):
    path = tmp_path / "levels.xsb"
    path.write_text("#####\n#@$.#\n#####\n")
    one, two = (shoal.envs.make("sokoban", levels=str(path)) for _ in range(2))
    assert one._levels is two._levels
    path.write_text("######\n#@ $.#\n######\n")
    assert shoal.envs.make("sokoban", levels=str(path)).reset(seed=0)[0].split("\n")[1] == "#P_XO#"
    (tmp_path / "more.xsb").write_text("#######\n#@  $.#\n#######\n")
    whole = shoal.envs.make("sokoban", levels=str(tmp_path))
    assert len({whole.reset(seed=seed)[0] for seed in range(20)}) == 2
    (tmp_path / "more.xsb").unlink()
    whole = shoal.envs.make("sokoban", levels=str(tmp_path))
    assert len({whole.reset(seed=seed)[0] for seed in range(20)}) == 1
