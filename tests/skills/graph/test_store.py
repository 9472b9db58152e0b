from __future__ import annotations

import errno
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.skills.conftest import skill

from shoal.core.errors import ConfigError, DataError
from shoal.skills.graph.process import (
    NotLearnedError,
    clear_marks,
    read_failure,
    write_failure,
)
from shoal.skills.graph.store import NewVersion, Store

WOOD = skill("Collect Wood", "wood")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, create=True)


def trained(store: Store, name: str = "Collect Wood") -> int:
    store.add_skill(replace(WOOD, name=name), [], 1000)
    store.assign_expert(name)
    return store.begin_attempt(name, store.root / "training_runs" / name, 1000)


def version(store: Store, expert: int, data: bytes, frames: int = 10, accepted: bool = True) -> NewVersion:
    return NewVersion(expert, store.put_blob(data), None, frames, frames, accepted)


def test_a_folder_without_skills_is_said_to_be_one_and_nothing_is_made_in_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="typo holds no skills"):
        Store(tmp_path / "typo")
    assert list(tmp_path.iterdir()) == []


def test_a_commit_brings_version_head_state_and_event_together(store: Store) -> None:
    attempt = trained(store)
    store.update_skill("Collect Wood", allotment=100)
    store.commit_training(attempt, [version(store, 0, b"one")], result={"success": 0.9}, frames=10, mark="m")
    store.close()
    again = Store(store.root)
    head = again.head(0)
    assert head is not None
    assert again.get_blob(head.sha256) == b"one"
    row = again.skill("Collect Wood")
    assert (row.status, row.budget_used, row.result, row.left) == ("completed", 10, {"success": 0.9}, 990)
    launch = again.merged("m")
    assert launch is not None
    assert (launch.id, launch.outcome, launch.frames) == (attempt, "merged", 10)
    assert [event["kind"] for event in again.events()][-2:] == ["completed", "merge"]
    assert again.events()[-1]["detail"] == {"attempt": attempt, "heads": {"0": {"version": 1, "frames": 10}}}


def test_an_error_in_a_transaction_takes_all_of_it_back(store: Store) -> None:
    trained(store)

    def half_way() -> None:
        with store.transaction():
            store.update_skill("Collect Wood", status="failed")
            store.event("something")
            raise RuntimeError("now")

    with pytest.raises(RuntimeError, match="now"):
        half_way()
    assert store.skill("Collect Wood").status == "running"
    assert "something" not in [event["kind"] for event in store.events()]


def test_a_skill_that_was_cancelled_is_skipped_however_its_training_ends(store: Store) -> None:
    attempt = trained(store)
    store.update_skill("Collect Wood", cancel=1)
    assert store.finish(attempt, "failed", "nan", max_retries=5).status == "skipped"
    assert store.attempt(attempt).outcome == "cancelled"


def test_a_training_that_another_process_merged_meanwhile_stays_merged(store: Store) -> None:
    attempt = trained(store)
    store.commit_training(attempt, [version(store, 0, b"one")], result={}, frames=10)
    assert store.finish(attempt, "failed", "its folder is gone").status == "completed"
    assert store.attempt(attempt).outcome == "merged"


def test_a_full_disk_is_an_error_of_files_and_the_store_goes_on_when_there_is_room(store: Store) -> None:
    pages = store._query("pragma page_count")[0][0]
    store._db.execute(f"pragma max_page_count={pages}")
    with pytest.raises(OSError, match="disk is full") as caught:
        store.set_setting("much", "x" * 100_000)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(store.root / "state.db"))
    store._db.execute("pragma max_page_count=100000")
    store.set_setting("much", "x" * 100_000)
    assert Store(store.root).setting("much") == "x" * 100_000


@pytest.mark.parametrize(
    ("altered", "said"),
    [
        (b"weightz", "was altered or truncated"),
        (b"weight", "was altered or truncated"),
        (None, "is missing or empty; put it back from a copy"),
    ],
)
def test_an_altered_expert_file_is_noticed_and_whole_again_when_the_same_is_stored_again(
    store: Store, altered: bytes | None, said: str
) -> None:
    name = store.put_blob(b"weights")
    if altered is None:
        store.blob_path(name).unlink()
    else:
        store.blob_path(name).write_bytes(altered)
    with pytest.raises(DataError, match=said):
        store.get_blob(name)
    assert store.put_blob(b"weights") == name  # the same training, made again
    assert store.get_blob(name) == b"weights"


def test_a_version_without_its_file_is_refused(store: Store) -> None:
    with pytest.raises(DataError, match="must be written before"):
        store.add_version(NewVersion(0, "0" * 64, None, 1, 1, True))


def test_the_same_skill_may_be_added_again_but_not_another_of_its_name(store: Store) -> None:
    store.add_skill(WOOD, [], 10)
    store.add_skill(WOOD, [], 10)
    assert len(store.skills()) == 1
    with pytest.raises(ValueError, match="another skill named 'Collect Wood'"):
        store.add_skill(replace(WOOD, horizon=5), [], 10)


def test_a_skill_is_found_by_name_and_slug_and_guessed_otherwise(store: Store) -> None:
    for name in ("Collect Wood", "Collect_Wood"):  # the second is the slug of the first
        store.add_skill(replace(WOOD, name=name), [], 10)
    assert store.skill("Collect_Wood").name == "Collect_Wood"
    assert store.skill("Collect~5fWood").name == "Collect_Wood"
    with pytest.raises(ValueError, match="Did you mean 'Collect Wood'") as caught:
        store.skill("Collect Wod")
    assert not isinstance(caught.value, ConfigError)


def test_experts_are_numbered_once_and_never_twice(store: Store) -> None:
    stores = [store, *(Store(store.root) for _ in range(3))]
    names = [f"Skill {i}" for i in range(20)]
    for name in names:
        store.add_skill(replace(WOOD, name=name), [], 10)
    store.add_version(version(store, 4, b"of no skill"))
    with ThreadPoolExecutor(4) as pool:  # four connections, each asking for every skill
        asked = list(pool.map(lambda at: stores[at % 4].assign_expert(names[at // 4]), range(80)))
    assert sorted(set(asked)) == list(range(5, 25))
    assert all(len(set(asked[i * 4 : i * 4 + 4])) == 1 for i in range(20))


def test_rolling_back_changes_the_head_and_loses_nothing(store: Store) -> None:
    one = store.add_version(version(store, 0, b"one", 10))
    two = store.add_version(version(store, 0, b"two", 20))
    store.rollback(0, one)
    head = store.head(0)
    assert head is not None
    assert (head.id, head.frames) == (one, 10)
    assert [row.id for row in store.versions(0)] == [one, two]
    with pytest.raises(ValueError, match="version 2 is one of expert 0, and expert 1 has none"):
        store.rollback(1, two)
    store.blob_path(store.version(two).sha256).write_bytes(b"half")
    with pytest.raises(DataError, match="was altered or truncated"):
        store.rollback(0, two)
    assert store.head(0) == head


def test_commits_are_synced_to_disk(store: Store) -> None:
    assert store._query("pragma synchronous")[0][0] == 2  # FULL
    assert store._query("pragma journal_mode")[0][0] == "wal"
    assert store._query("pragma integrity_check")[0][0] == "ok"


def test_changes_are_seen_across_connections(store: Store) -> None:
    before = store.changes()
    Store(store.root).event("hello")
    assert store.changes() != before


def test_a_store_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")
    threading.Timer(0.1, other.rollback).start()
    Store(tmp_path, create=True).close()
    other.close()


def test_a_process_that_is_stopped_while_it_writes_does_not_keep_others_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.skills.graph.store.PATIENCE", 0.01)
    stopped, store = Store(tmp_path, create=True), Store(tmp_path, create=True)
    with stopped.transaction(), pytest.raises(OSError, match="database is locked"):
        store.event("hello")
    store.event("hello")


@pytest.mark.parametrize("layout", [3, 99])
def test_a_database_of_another_version_is_refused_and_left_as_it_is(store: Store, layout: int) -> None:
    store._db.execute(f"pragma user_version={layout}")
    store.close()
    before = (store.root / "state.db").read_bytes()
    with pytest.raises(DataError, match=f"made by another version of shoal .layout {layout}"):
        Store(store.root)
    assert (store.root / "state.db").read_bytes() == before


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"not a database, " * 99)
    with pytest.raises(DataError, match=r"state.db cannot be read or written: file is not a database"):
        Store(tmp_path)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("skill set retries = 'two'", r"skill 'Collect Wood' is damaged .*got `str` - at `\$.retries`"),
        ("skill set spec = '{'", "skill 'Collect Wood' is damaged"),
        ("skill set spec = '{}'", "skill 'Collect Wood' is damaged"),
        ("attempt set handle = '{'", "launch 1 is damaged"),
        ("version set sha256 = x'00'", "version 1 is damaged .*Expected `str`, got `bytes`"),
        ("event set detail = null", "event 1 is damaged .*Expected `object`, got `null`"),
        ("setting set value = '{'", "setting 'world' is damaged"),
    ],
)
def test_a_damaged_value_is_told_with_its_row(store: Store, cell: str, message: str) -> None:
    attempt = trained(store)
    store.add_version(version(store, 0, b"one"), attempt)
    store.set_setting("world", "crafting")
    store._db.execute(f"update {cell}")

    def read() -> None:
        for one in (store.skills, store.attempts, store.versions, store.events):
            one()
        store.setting("world")

    with pytest.raises(DataError, match=f"state.db cannot be read: {message}.*; restore it"):
        read()


def test_events_and_settings_are_kept(store: Store) -> None:
    assert [store.event("a"), store.event("b", "one", x=1)] == [1, 2]
    (event,) = store.events(1)
    assert (event["seq"], event["kind"], event["skill"], event["detail"]) == (2, "b", "one", {"x": 1})
    for value in ({"a": [1, 2.5]}, 0, "text"):
        store.set_setting("x", value)
        assert Store(store.root).setting("x") == value
    store.set_setting("x", None)
    assert store.setting("x") is None


def test_a_launch_is_on_record_with_what_it_was_given(store: Store) -> None:
    number = trained(store)
    store.set_handle(number, "local", {"pid": 3}, store.root / "logs" / "one.log")
    row = store.attempt(number)
    assert (row.run_folder, row.launcher, row.handle, row.log, row.outcome, row.budget) == (
        "training_runs/Collect Wood", "local", {"pid": 3}, "logs/one.log", None, 1000,
    )  # fmt: skip
    skill = store.skill("Collect Wood")
    assert (skill.status, skill.fresh, skill.reason, skill.ended) == ("running", False, None, None)
    assert store.attempts("Collect Wood", running=True) == [row]
    assert store.attempts("Place Table") == []
    with pytest.raises(ValueError, match="there is no launch 7"):
        store.attempt(7)
    with pytest.raises(ValueError, match="there is no version 8"):
        store.version(8)


def test_a_failure_is_told_to_its_own_launch(tmp_path: Path) -> None:
    assert read_failure(tmp_path, 3) == (None, False, False)
    for error, told in ((ValueError("no"), ("ValueError: no", False, False)), ("words", ("words", False, False)),
                        (NotLearnedError("spent"), ("NotLearnedError: spent", True, False))):  # fmt: skip
        write_failure(tmp_path, 3, error)
        assert read_failure(tmp_path, 3) == told
        assert read_failure(tmp_path, 4) == (None, False, False)
    clear_marks(tmp_path)
    clear_marks(tmp_path)
    assert list(tmp_path.iterdir()) == []
