import contextlib
import json
import os
import sqlite3

import pytest
from tests.records import Exchange, trajectory_of

from shoal.cli.main import main
from shoal.core.data import encode_trajectory, read_trajectories, write_trajectories
from shoal.core.errors import DataError
from shoal.viewer.index import ORDERS, EpisodeIndex, Filter


def turn(reward=0.0, response="<action>Up</action>", ids=(1, 2, 3), valid=True, finish="stop"):
    action, logprobs = "Up" if valid else None, (-0.1,) * len(ids)
    return Exchange("a lake", (7, 8), ids, logprobs, response, action, valid, reward, "s", None, finish)


def episode(
    rewards=(0.0,), *, iteration=0, group=0, member=0, env="Lake", success=False, truncated=False, **more
):
    turns = tuple(turn(reward) for reward in rewards)
    status, error = more.get("status", "ok"), more.get("error")
    return trajectory_of(
        env, iteration, group, member, 2**63 + group, turns, success, not truncated, truncated, status, error
    )


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run" / "trajectories"
    write_trajectories(
        folder / "train-000001.jsonl",
        [
            episode((0.0, 1.0), member=0, success=True),
            episode((0.0, 0.0, 0.0), member=1, truncated=True),
            episode((0.5,), group=1),
            episode((), group=1, member=1, status="env_error", error="boom\nat line 3"),
        ],
    )
    write_trajectories(folder / "heldout-000000.jsonl", [episode((0.25, 0.25), env="Other")])
    return tmp_path / "run"


@pytest.fixture
def index(run, tmp_path):
    with contextlib.closing(EpisodeIndex(run, tmp_path / "cache")) as index:
        yield index.refresh()


def test_it_knows_of_each_episode_what_reading_all_of_them_tells(run, index):
    for file in sorted((run / "trajectories").iterdir()):
        found = index.episodes(Filter(file=file.name))
        for row, (known, whole) in enumerate(zip(found, read_trajectories(file), strict=True)):
            assert index.read(known) == whole
            assert (known.row, known.env, known.iteration) == (row, whole.env, whole.iteration)
            assert (known.group, known.member) == (whole.group, whole.member)
            assert (known.env_seed, known.reward) == (str(whole.env_seed), whole.reward)
            assert (known.turns, known.tokens) == (len(whole.turns), whole.n_tokens)
            assert (known.status, known.error) == (whole.status, whole.error)
            assert index.find(known.name) == known


def test_ends_causes_and_rewards_are_counted(index):
    assert index.outcomes() == {"success": 1, "failed": 2, "truncated": 1, "error": 1}
    assert index.causes() == [("env_error: boom\nat line 3", 1)]
    assert index.rewards() == [(0.0, 0.0, 2, 0), (0.5, 0.5, 2, 0), (1.0, 1.0, 1, 1)]
    assert [n for _, _, n, _ in index.rewards(bins=2)] == [2, 3]  # [0, 0.5) and [0.5, 1]
    assert index.rewards(Filter(group=99)) == []


@pytest.mark.parametrize("order", ORDERS)
def test_pages_of_any_order_together_are_all_episodes_once(index, order):
    pages = [index.episodes(order=order, limit=2, offset=k) for k in (0, 2, 4, 6)]
    assert sorted(e.name for page in pages for e in page) == sorted(e.name for e in index.episodes())
    assert len(pages[0]) == 2
    assert pages[3] == []


def test_worst_is_best_from_behind(index):
    best = [e.name for e in index.episodes(order="best")]
    assert best[0] == "train-000001:0"
    assert [e.name for e in index.episodes(order="worst")] == best[::-1]


def test_filters_leave_what_they_say(index):
    assert [e.member for e in index.episodes(Filter(outcome="truncated"))] == [1]
    assert index.count(Filter(cause="env_error: boom\nat line 3")) == 1
    assert index.count(Filter(reward_from=0.5, reward_to=0.5)) == 2
    assert index.count(Filter(env="Other", outcome="failed")) == 1
    assert index.count(Filter(env="' or 1 --")) == 0


def test_a_group_is_those_of_one_start_in_one_rollout(index):
    group = index.group_of(index.find("train-000001:1"))
    assert [e.member for e in group] == [0, 1]


def test_a_line_that_is_still_being_written_waits(run, index):
    file = run / "trajectories" / "live.jsonl"
    line = encode_trajectory(episode((1.0,)))
    file.write_bytes(line + line[:30])
    assert index.refresh().count(Filter(file="live.jsonl")) == 1
    with file.open("ab") as handle:
        handle.write(line[30:] + line)
    assert index.refresh().count(Filter(file="live.jsonl")) == 3
    assert all(index.read(e).reward == 1.0 for e in index.episodes(Filter(file="live.jsonl")))


def test_a_file_that_grew_is_not_read_again(run, index, monkeypatch):
    file = run / "trajectories" / "train-000001.jsonl"
    with file.open("ab") as handle:
        handle.write(encode_trajectory(episode((2.0,))))
    told = []
    index.refresh(progress=lambda done, todo: told.append((done, todo)))
    grown = len(encode_trajectory(episode((2.0,))))
    assert told[-1] == (grown, grown)
    assert index.count(Filter(file=file.name)) == 5


def test_a_file_that_was_replaced_or_cut_or_removed_is_read_anew(run, index):
    file = run / "trajectories" / "train-000001.jsonl"
    write_trajectories(file, [episode((9.0,)) for _ in range(6)])
    assert [e.reward for e in index.refresh().episodes(Filter(file=file.name))] == [9.0] * 6
    file.write_bytes(encode_trajectory(episode((3.0,))))
    assert [e.reward for e in index.refresh().episodes(Filter(file=file.name))] == [3.0]
    size = file.stat().st_size
    file.write_bytes(encode_trajectory(episode((4.0,))))  # the same inode and size
    os.utime(file, ns=(1, 1))
    assert file.stat().st_size == size
    assert [e.reward for e in index.refresh().episodes(Filter(file=file.name))] == [4.0]
    file.unlink()
    assert index.refresh().files() == ["heldout-000000.jsonl"]
    assert index.count() == 1


def test_lines_that_are_no_trajectories_are_counted_and_passed_over(run, index):
    file = run / "trajectories" / "odd.jsonl"
    good = encode_trajectory(episode((1.0,)))
    file.write_bytes(b"{}\n\n" + good + b"\xff\xfe\n[" + b"[" * 5000 + b"\n" + good)
    summary = {row["file"]: row for row in index.refresh().summary()}
    assert (summary["odd.jsonl"]["episodes"], summary["odd.jsonl"]["broken"]) == (2, 3)
    assert [index.read(e).reward for e in index.episodes(Filter(file="odd.jsonl"))] == [1.0, 1.0]


@pytest.mark.parametrize("junk", [b"no database at all" * 100, b""])
def test_a_damaged_index_is_made_again(run, index, junk, tmp_path):
    for extra in index.path.parent.glob("*"):
        extra.write_bytes(junk)
    with contextlib.closing(EpisodeIndex(run, tmp_path / "cache")) as again:
        assert again.refresh().count() == 5


def test_an_index_of_another_format_is_made_again(run, index, tmp_path):
    with contextlib.closing(sqlite3.connect(index.path)) as db:
        db.execute("pragma user_version = 999")
    with contextlib.closing(EpisodeIndex(run, tmp_path / "cache")) as again:
        assert again.refresh().count() == 5


def test_nothing_is_written_into_the_run(run, tmp_path):
    before = sorted(run.rglob("*"))
    with contextlib.closing(EpisodeIndex(run, tmp_path / "cache")) as index:
        index.refresh()
    assert sorted(run.rglob("*")) == before


def test_a_cache_that_cannot_be_written_is_replaced_by_a_passing_one(run, tmp_path):
    (tmp_path / "file").write_text("")
    with contextlib.closing(EpisodeIndex(run, tmp_path / "file")) as index:
        assert index.refresh().count() == 5
        place = index.path
    assert not place.exists()


@pytest.mark.parametrize(
    "name", ["", "train-000001", "train-000001:4", "../x:0", ":0", "train-000001:-1", "a:²"]
)
def test_an_episode_that_is_not_there_is_named(index, name):
    with pytest.raises(DataError, match="there is no episode"):
        index.find(name)


def test_a_file_changed_since_is_told(run, index):
    known = index.find("train-000001:1")
    write_trajectories(run / "trajectories" / "train-000001.jsonl", [episode((9.0, 9.0, 9.0, 9.0, 9.0))])
    with pytest.raises(DataError, match="changed while it was read"):
        index.read(known)


def test_a_line_that_is_no_whole_trajectory_is_not_told_as_a_change(run, tmp_path):
    file = run / "trajectories" / "train-000001.jsonl"
    line = json.loads(encode_trajectory(episode((0.5,))))
    del line["terminated"]
    file.write_text(json.dumps(line) + "\n")
    index = EpisodeIndex(run, tmp_path / "other").refresh()
    with pytest.raises(DataError, match=r"train-000001.jsonl, episode 0: not a trajectory: .*`terminated`"):
        index.read(index.find("train-000001:0"))


def test_a_damaged_index_is_made_again_whoever_meets_it(run, tmp_path):
    folder = run / "trajectories"
    write_trajectories(folder / "train-000002.jsonl", [episode(group=k, env="E" * 400) for k in range(500)])
    with contextlib.closing(EpisodeIndex(run, tmp_path / "cache").refresh()) as index:
        for look in (
            lambda: index.count(),
            lambda: index.episodes(limit=1000),
            lambda: index.refresh().count(),
        ):
            before = index.episodes(limit=1000)
            data = bytearray(index.path.read_bytes())
            for page in range(4096, len(data), 4096):  # all but the head, which says that it is an index
                data[page : page + 300] = b"\xee" * 300
            index.path.write_bytes(data)
            look()
            assert index.episodes(limit=1000) == before


def test_an_index_that_cannot_be_opened_or_written_is_told_in_a_line(run, tmp_path, monkeypatch, capsys):
    """As on a network disk without locks, or a full one: a traceback of SQLite."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with contextlib.closing(EpisodeIndex(run)) as index:
        index.path.mkdir()
        assert main(["show", str(run)]) == 2
        assert main(["view", str(run), "--export", str(tmp_path / "x.html")]) == 2
        index.path.rmdir()
        assert "db cannot be used (unable to open database file); set XDG_CACHE" in capsys.readouterr().err
        index.refresh()
        with sqlite3.connect(index.path) as other:
            other.execute("create trigger full before insert on file begin select raise(fail, 'full'); end")
        write_trajectories(run / "trajectories" / "train-000009.jsonl", [episode()])
        with pytest.raises(DataError, match=r"cannot be used \(full\)"):
            index.refresh()


def test_numbers_that_no_index_holds_are_a_broken_line_and_no_end_of_the_reading(run, tmp_path):
    with (run / "trajectories" / "train-000001.jsonl").open("ab") as file:
        file.write(encode_trajectory(episode(group=7)).replace(b'"group":7', b'"group":%d' % 2**63))
        file.write(encode_trajectory(episode(group=8)))
    with contextlib.closing(EpisodeIndex(run, tmp_path / "cache").refresh()) as index:
        assert index.count(Filter(group=8)) == 1
        assert [file["broken"] for file in index.summary()] == [0, 1]
