import json
import os

import pytest
from tests.records import Exchange, trajectory_of

from shoal.core.data import encode_trajectory, read_trajectories, write_trajectories
from shoal.core.errors import DataError
from shoal.viewer.index import COLUMNS, ORDERS, EpisodeIndex, Filter


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
def index(run):
    return EpisodeIndex(run).refresh()


def test_what_is_said_where_a_text_is_found_or_else_last(run, index):
    first = index.find("train-000001:0")
    assert index.said(first) == (2, "Up")
    assert index.said(first, "LAKE") == (1, "a lake")
    assert index.said(first, "nowhere") == (2, "Up")
    assert index.said(index.find("train-000001:3")) == (0, "")  # it has no turns
    long = trajectory_of(
        "Lake", 0, 0, 0, 1, (turn(), turn(response="x" * 50 + "<b>Cod" + "y" * 50)), True, True, False
    )
    write_trajectories(run / "trajectories" / "train-000002.jsonl", [long])
    index.refresh()
    assert index.said(index.find("train-000002:0"), "<b>cod") == (2, "x" * 30 + "<b>Cod" + "y" * 30)
    (run / "trajectories" / "train-000002.jsonl").unlink()
    assert index.said(index.episodes(Filter(file="train-000002.jsonl"))[0]) == (0, "")


def test_the_newest_come_first_and_of_them_those_that_are_not_solved(run):
    names = {"train-000001": (True, False, True), "train-000002": (True, True, False, False)}
    for name, ends in names.items():
        made = [episode((float(k),), member=k, success=end) for k, end in enumerate(ends)]
        write_trajectories(run / "trajectories" / f"{name}.jsonl", made)
    index = EpisodeIndex(run).refresh()
    found = [e.name for e in index.episodes(order="newest")]
    assert set(found[:2]) == {"train-000002:2", "train-000002:3"}
    assert set(found[2:4]) == {"train-000002:0", "train-000002:1"}
    assert found[4] == "train-000001:1"


def test_it_knows_of_each_episode_what_reading_all_of_them_tells(run, index):
    for file in sorted((run / "trajectories").iterdir()):
        found = index.episodes(Filter(file=file.name))
        for row, (known, whole) in enumerate(zip(found, read_trajectories(file), strict=True)):
            assert index.read(known) == whole
            assert (known.row, known.env) == (row, whole.env)
            assert (known.group, known.member) == (whole.group, whole.member)
            assert known.reward == whole.reward
            assert (known.turns, known.tokens) == (len(whole.turns), whole.n_tokens)
            assert (known.status, known.error) == (whole.status, whole.error)
            assert index.find(known.name) == known


def test_ends_causes_and_rewards_are_counted(index):
    assert index.outcomes() == {"success": 1, "failed": 2, "truncated": 1, "error": 1}
    assert index.causes() == [("env_error: boom\nat line 3", 1)]
    assert index.rewards() == [(0.0, 0.0, 2, 0), (0.5, 0.5, 2, 0), (1.0, 1.0, 1, 1)]
    assert [n for _, _, n, _ in index.rewards(bins=2)] == [2, 3]  # [0, 0.5) and [0.5, 1]
    assert index.rewards(Filter(group=99)) == []


@pytest.mark.parametrize("order", [*ORDERS, *COLUMNS, *(f"-{column}" for column in COLUMNS)])
def test_pages_of_any_order_together_are_all_episodes_once(index, order):
    pages = [index.episodes(order=order, limit=2, offset=k) for k in (0, 2, 4, 6)]
    assert sorted(e.name for page in pages for e in page) == sorted(e.name for e in index.episodes())
    assert len(pages[0]) == 2
    assert pages[3] == []


@pytest.mark.parametrize("column", sorted(set(COLUMNS) - {"group", "outcome"}))
def test_a_column_sorts_the_episodes_by_its_values(index, column):
    values = [getattr(episode, column) for episode in index.episodes(order=column)]
    assert values == sorted(values)
    assert [getattr(episode, column) for episode in index.episodes(order=f"-{column}")] == values[::-1]


def test_an_iteration_is_that_of_the_file_and_of_its_curve(run, index):
    """A held-out episode says 0, whichever weights it judged; a training one is one less than its file."""
    write_trajectories(run / "trajectories" / "heldout-000025.jsonl", [episode(iteration=0)])
    write_trajectories(run / "trajectories" / "rollout.jsonl", [episode(iteration=3)])
    index.refresh()
    assert [(e.file, e.iteration) for e in index.episodes(order="newest")][:2] == [
        ("heldout-000025.jsonl", 25),
        ("rollout.jsonl", 3),
    ]
    assert [e.file for e in index.episodes(Filter(iteration=1))] == ["train-000001.jsonl"] * 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hidden cave", ["train-000003:1"]),  # in an observation, of any case
        ("GO LEFT", ["train-000003:2"]),  # in a response
        ("action-7", ["train-000003:3"]),  # in an action
        ('"quoted" \\ text', ["train-000003:2"]),  # as JSON writes it in another way
        ("größe", ["train-000003:2"]),
        ("logprobs", []),  # the name of a field
        ("1, 2", []),  # tokens
        ("8765", []),
    ],
)
def test_a_text_is_found_in_what_was_seen_said_and_done(run, index, text, found):
    seen = turn()._replace(observation="a Hidden Cave", response_ids=(8765, 2, 3))
    said = turn(response='Go left, "quoted" \\ text\nof some größe')
    did = turn()._replace(action="action-7")
    made = [
        trajectory_of("Lake", 0, 0, k, 1, (turn(), t), False, True, False)
        for k, t in enumerate((seen, said, did))
    ]
    write_trajectories(run / "trajectories" / "train-000003.jsonl", [episode(), *made])
    index.refresh()
    assert [e.name for e in index.episodes(Filter(text=text))] == found
    assert index.count(Filter(text=text, file="train-000001.jsonl")) == 0
    assert index.count(Filter(text="a lake")) == 8 - 1 + 1  # the one without a turn has no text


def test_a_place_in_a_list_has_its_neighbours(index):
    order = [e.name for e in index.episodes(order="worst")]
    for k, name in enumerate(order):
        place = index.place_of(index.find(name), Filter(), "worst")
        assert (place.at, place.total) == (k, 5)
        assert place.before is None if k == 0 else place.before.name == order[k - 1]
        assert place.behind is None if k == 4 else place.behind.name == order[k + 1]
    # a member that the list leaves out stands where its group does
    assert index.place_of(index.find("train-000001:0"), Filter(outcome="truncated"), "file").at == 0
    assert index.place_of(index.find("train-000001:0"), Filter(env="Other"), "file").at is None


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


def test_a_line_that_is_no_whole_trajectory_is_not_told_as_a_change(run):
    file = run / "trajectories" / "train-000001.jsonl"
    line = json.loads(encode_trajectory(episode((0.5,))))
    del line["terminated"]
    file.write_text(json.dumps(line) + "\n")
    index = EpisodeIndex(run).refresh()
    with pytest.raises(DataError, match=r"train-000001.jsonl, episode 0: not a trajectory: .*`terminated`"):
        index.read(index.find("train-000001:0"))


def test_numbers_that_no_index_holds_are_a_broken_line_and_no_end_of_the_reading(run):
    with (run / "trajectories" / "train-000001.jsonl").open("ab") as file:
        file.write(encode_trajectory(episode(group=7)).replace(b'"group":7', b'"group":%d' % 2**63))
        file.write(encode_trajectory(episode(group=8)))
    index = EpisodeIndex(run).refresh()
    assert index.count(Filter(group=8)) == 1
    assert [file["broken"] for file in index.summary()] == [0, 1]
