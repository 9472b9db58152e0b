from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.skills.jobs.store import (
    ExhaustedError,
    HeadMovedError,
    clear_marks,
    mark_of,
    read_done,
    read_failure,
    write_done,
    write_failure,
)
from shoal.skills.learning.spec import Store, new_version, parse_skill

WOOD = parse_skill({"name": "Collect Wood", "gain": {"wood": 1}, "done": {"feature": "wood"}})


def trained(store: Store, name: str = "Collect Wood") -> int:
    store.add_skill(parse_skill({**WOOD.as_dict(), "name": name}), [], 1000)
    store.assign_expert(name)
    return store.begin_attempt(name, store.root / "training_runs" / name)


def version(store: Store, expert: int, data: bytes, frames: int = 10, accepted: bool = True) -> object:
    return new_version(expert, store.put_blob(data), None, frames, frames, "run", accepted)


def test_a_commit_brings_version_head_state_and_event_together(tmp_path: Path) -> None:
    store = Store(tmp_path)
    attempt = trained(store)
    assert store.commit_training(
        attempt, [version(store, 0, b"one")], {0: None}, result={"success": 0.9}, frames=10
    )
    store.close()
    again = Store(tmp_path)
    head = again.head(0)
    assert head is not None
    assert again.get_blob(head.sha256) == b"one"
    row = again.skill("Collect Wood")
    assert (row.status, row.budget_used, row.result) == ("completed", 10, {"success": 0.9})
    assert [event["kind"] for event in again.events()][-2:] == ["completed", "merge"]


def test_committing_twice_counts_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    attempt = trained(store)
    made = [version(store, 0, b"one")]
    assert store.commit_training(attempt, made, {0: None}, result={}, frames=10)
    assert not store.commit_training(attempt, made, {0: None}, result={}, frames=10)
    assert len(store.versions()) == 1
    assert store.skill("Collect Wood").budget_used == 10


def test_a_head_that_moved_refuses_the_commit_and_writes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = trained(store), trained(store, "Place Table")
    store.commit_training(first, [version(store, 0, b"one")], {0: None}, result={}, frames=1)
    events = len(store.events())
    with pytest.raises(HeadMovedError, match="artifact 0: head is 1, expected None"):
        store.commit_training(second, [version(store, 0, b"two")], {0: None}, result={}, frames=1)
    assert len(store.versions()) == 1
    assert len(store.events()) == events
    assert store.skill("Place Table").status == "running"


def test_an_error_in_a_transaction_takes_all_of_it_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
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


def test_an_interrupt_while_another_process_writes_leaves_no_transaction_open(tmp_path: Path) -> None:
    store = Store(tmp_path)
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")

    def interrupt() -> None:
        while sys._current_frames()[this].f_code.co_name != "transaction":
            time.sleep(0.01)
        time.sleep(0.1)  # in which it comes to wait for the other
        os.kill(os.getpid(), signal.SIGINT)
        other.execute("commit")

    this, interrupts = threading.get_ident(), threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.set_setting("one", 1)
    finally:
        signal.signal(signal.SIGINT, before)
        interrupts.join()
        other.close()
    store.set_setting("two", 2)  # it would have joined the open one, and been lost with it
    assert Store(tmp_path).setting("two") == 2


def test_a_full_disk_is_an_error_of_files_and_the_store_goes_on_when_there_is_room(tmp_path: Path) -> None:
    store = Store(tmp_path)
    pages = store._query("pragma page_count")[0][0]
    store._db.execute(f"pragma max_page_count={pages}")
    with pytest.raises(OSError, match="No space left on device") as caught:
        store.set_setting("much", "x" * 100_000)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "state.db"))
    store._db.execute("pragma max_page_count=100000")
    store.set_setting("much", "x" * 100_000)
    assert Store(tmp_path).setting("much") == "x" * 100_000


@pytest.mark.parametrize("code", ["SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"])  # the second of a full tmpfs
def test_a_disk_that_is_full_when_a_store_is_opened_is_an_error_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def fail(store: Store) -> int:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = getattr(sqlite3, code)
        raise error

    monkeypatch.setattr(Store, "_layout", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        Store(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "state.db"))


def test_a_number_that_no_database_holds_is_told_as_such(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_skill(WOOD, [], 10)
    for ask in (store.version, store.head, lambda n: store.update_skill("Collect Wood", budget_total=n)):
        with pytest.raises(DataError, match="a number is larger than .*state.db can hold"):
            ask(10**30)


@pytest.mark.parametrize("altered", [b"weightz", b"weight"])
def test_an_altered_expert_file_is_noticed_and_whole_again_when_the_same_is_stored_again(
    tmp_path: Path, altered: bytes
) -> None:
    store = Store(tmp_path)
    name = store.put_blob(b"weights")
    store.blob_path(name).write_bytes(altered)
    with pytest.raises(DataError, match="altered or truncated"):
        store.get_blob(name)
    assert store.put_blob(b"weights") == name  # the same training, made again
    assert store.get_blob(name) == b"weights"


def test_a_version_without_its_file_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(DataError, match="must be written before"):
        store.add_version(new_version(0, "0" * 64, None, 1, 1, "run", True))


def test_the_same_skill_may_be_added_again_but_not_another_of_its_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_skill(WOOD, [], 10)
    store.add_skill(WOOD, [], 10)
    assert len(store.skills()) == 1
    with pytest.raises(ValueError, match="another skill named 'Collect Wood'"):
        store.add_skill(parse_skill({**WOOD.as_dict(), "horizon": 5}), [], 10)


def test_a_skill_is_found_by_name_and_slug_and_guessed_otherwise(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_skill(WOOD, [], 10)
    assert store.skill("Collect_Wood").name == store.skill("Collect Wood").name == "Collect Wood"
    with pytest.raises(ValueError, match="Did you mean 'Collect Wood'"):
        store.skill("Collect Wod")


def test_experts_are_numbered_once_and_never_twice(tmp_path: Path) -> None:
    stores = [Store(tmp_path) for _ in range(4)]
    names = [f"Skill {i}" for i in range(20)]
    for name in names:
        stores[0].add_skill(parse_skill({**WOOD.as_dict(), "name": name}), [], 10)
    with ThreadPoolExecutor(4) as pool:  # four connections, each asking for every skill
        asked = list(pool.map(lambda at: stores[at % 4].assign_expert(names[at // 4]), range(80)))
    assert sorted(set(asked)) == list(range(20))
    assert all(len(set(asked[i * 4 : i * 4 + 4])) == 1 for i in range(20))


def test_rolling_back_changes_the_head_and_loses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = store.add_version(version(store, 0, b"one", 10))
    two = store.add_version(version(store, 0, b"two", 20))
    store.rollback(0, one)
    head = store.head(0)
    assert head is not None
    assert (head.id, head.frames) == (one, 10)
    assert [row.id for row in store.versions(0)] == [one, two]
    with pytest.raises(ValueError, match="belongs to 0, not 1"):
        store.rollback(1, two)


def test_the_sweep_leaves_what_is_stored_again_though_a_killed_run_had_left_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    left = store.blob_path(store.put_blob(b"expert"))
    os.utime(left, (0, 0))
    again = store.put_blob(b"expert")  # by somebody who is about to commit it
    assert Store(tmp_path).sweep() == []
    assert store.get_blob(again) == b"expert"
    os.utime(left, (0, 0))
    assert store.sweep() == [left]


def test_nothing_is_committed_while_a_sweep_removes_what_nothing_refers_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    left = store.blob_path(store.put_blob(b"expert"))
    os.utime(left, (0, 0))
    unlink = Path.unlink

    def late(path: Path) -> None:  # somebody has the same bytes to commit at this very moment
        with (
            contextlib.closing(sqlite3.connect(tmp_path / "state.db", timeout=0)) as other,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            other.execute("begin immediate")
        unlink(path)

    monkeypatch.setattr(Path, "unlink", late)
    assert store.sweep() == [left]


def test_the_sweep_removes_only_what_nothing_refers_to(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_version(version(store, 0, b"kept"))
    orphan = store.put_blob(b"orphan")
    (store.blobs / ".half.tmp").write_bytes(b"x")
    assert store.sweep(older_than=3600) == []
    assert {path.name for path in store.sweep(older_than=-1)} == {f"{orphan}.safetensors", ".half.tmp"}
    assert len(list(store.blobs.iterdir())) == 1


def test_a_folder_without_skills_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no skills"):
        Store(tmp_path, create=False)


def test_commits_are_synced_to_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store._query("pragma synchronous")[0][0] == 2  # FULL
    assert store._query("pragma journal_mode")[0][0] == "wal"
    assert store._query("pragma foreign_keys")[0][0] == 1
    with sqlite3.connect(tmp_path / "state.db") as other:
        assert other.execute("pragma integrity_check").fetchone() == ("ok",)
    other.close()


def test_changes_are_seen_across_connections(tmp_path: Path) -> None:
    one, other = Store(tmp_path), Store(tmp_path)
    before = one.changes()
    other.event("hello")
    assert one.changes() != before


def test_a_name_that_is_the_slug_of_another_finds_its_own_job_whatever_sqlite_reads_first(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    store.add("a b", {})
    store.add("a_b", {})
    store._db.execute("analyze")  # after which it reads so few rows one by one
    assert [store.job(name).name for name in ("a b", "a_b")] == ["a b", "a_b"]
    assert [store.number(name) for name in ("a b", "a_b")] == [0, 1]


def test_a_store_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")
    threading.Timer(0.1, other.rollback).start()
    Store(tmp_path).close()
    other.close()


def test_a_process_that_is_stopped_while_it_writes_is_told_to_those_who_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.skills.jobs.store.PATIENCE", 0.01)
    stopped, store = Store(tmp_path), Store(tmp_path)
    with (
        stopped.transaction(),
        pytest.raises(OSError, match="another process has been writing for 0.01 s; it may be"),
    ):
        store.event("hello")
    store.event("hello")


def test_an_unknown_skill_error_is_not_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Known: \\(none\\)") as caught:
        Store(tmp_path).skill("x")
    assert not isinstance(caught.value, ConfigError)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"not a database, " * 99)
    with pytest.raises(DataError, match=r"state.db cannot be read: file is not a database"):
        Store(tmp_path)


@pytest.mark.parametrize("payload", [b"\xff", b"{"], ids=["bytes", "words"])
def test_a_row_that_was_damaged_is_told_as_a_fault_of_the_file(tmp_path: Path, payload: bytes) -> None:
    store = Store(tmp_path)
    trained(store)
    store._db.execute("update job set payload = cast(? as text)", (payload,))
    with pytest.raises(DataError, match=r"state.db cannot be read"):
        store.skills()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "job set retries = 'two'",
            r"skill 'Collect Wood' is damaged .*Expected `int`, got `str` - at `\$.retries`",
        ),
        (
            "job set status = 'done'",
            r"skill 'Collect Wood' is damaged .*Invalid enum value 'done' - at `\$.status`",
        ),
        ("job set result = '[1]'", r"skill 'Collect Wood' is damaged .*Expected `object`, got `array`"),
        ("job set submitted = x'ff'", r"skill 'Collect Wood' is damaged"),
        ("attempt set peak_memory = '3 GB'", r"launch 1 is damaged .*Expected `int \| null`, got `str`"),
        ("attempt set handle = '{'", r"launch 1 is damaged"),
        ("version set sha256 = x'00'", r"version 1 is damaged .*Expected `str`, got `bytes`"),
        ("event set detail = null", r"event 1 is damaged .*Expected `object`, got `null`"),
        ("setting set value = '{'", r"setting 'world' is damaged"),
    ],
)
def test_a_value_of_another_type_is_told_with_its_row_its_column_and_what_is_expected(
    tmp_path: Path, cell: str, message: str
) -> None:
    store = Store(tmp_path)
    attempt = trained(store)
    store.add_version(version(store, 0, b"one"), attempt)
    store.set_setting("world", "crafting")
    store._db.execute(f"update {cell}")

    def read() -> None:
        for one in (store.skills, store.attempts, store.versions, store.events):
            one()
        store.setting("world")
        store.add_skill(WOOD, [], 1000)

    with pytest.raises(DataError, match=f"state.db cannot be read: {message}.*; restore it"):
        read()


def test_why_a_launch_is_ended_is_what_was_said_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    attempt = trained(store)
    store.set_ending(attempt, "cancel")
    store.set_ending(attempt, "limit")
    assert store.attempt(attempt).ending == "cancel"


def test_what_a_launch_was_allotted_is_used_up_when_it_is_committed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    attempt = trained(store)
    store.update_skill("Collect Wood", allotment=100)
    store.commit_training(attempt, [version(store, 0, b"one")], {0: None}, result={}, frames=100)
    row = store.skill("Collect Wood")
    assert (row.allotment, row.left) == (None, 900)


def test_a_version_whose_file_is_damaged_cannot_be_gone_back_to(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = store.add_version(version(store, 0, b"one"))
    two = store.add_version(version(store, 0, b"two"))
    store.blob_path(store.version(one).sha256).write_bytes(b"half")
    with pytest.raises(DataError, match="was altered or truncated"):
        store.rollback(0, one)
    assert store.head(0).id == two  # type: ignore[union-attr]


def test_events_are_numbered_from_one_and_those_after_a_number_can_be_had(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.last_event() == 0
    assert [store.event("a"), store.event("b", "one", x=1)] == [1, 2]
    assert store.last_event() == 2
    (event,) = store.events(1)
    assert (event["seq"], event["kind"], event["skill"], event["detail"]) == (2, "b", "one", {"x": 1})
    assert len(store.events()) == 2
    assert store.events(2) == []


def test_a_setting_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.setting("x") is None
    for value in ({"a": [1, 2.5]}, 0, "text"):
        store.set_setting("x", value)
        assert Store(tmp_path).setting("x") == value
    store.set_setting("x", None)
    assert store._query("select * from setting") == []


def test_ancestors_are_a_version_and_all_before_it_in_its_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made: list[int | None] = [None]
    for data, parent in ((b"one", 0), (b"two", 1), (b"three", 2), (b"side", 1)):
        sha = store.put_blob(data)
        made.append(store.add_version(new_version(0, sha, made[parent], 1, 1, "run", data != b"side")))
    assert store.ancestors(made[3]) == {made[1], made[2], made[3]}
    assert store.ancestors(made[4]) == {made[1], made[4]}
    assert store.ancestors(None) == set()
    assert store.head(0).id == made[3]  # type: ignore[union-attr]
    assert [row.accepted for row in store.versions(0)] == [True, True, True, False]
    assert store.versions(1) == []


def test_numbers_that_nothing_has_are_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="there is no launch 7"):
        store.attempt(7)
    with pytest.raises(ValueError, match="there is no version 8"):
        store.version(8)
    assert store.head(0) is None
    assert store.merged("mark") is None


def test_a_launch_is_on_record_with_what_it_was_given_and_how_it_ended(tmp_path: Path) -> None:
    store = Store(tmp_path)
    number = trained(store)
    store.set_handle(number, "local", {"pid": 3}, tmp_path / "logs" / "one.log")
    row = store.attempt(number)
    assert (row.state, row.run_folder, row.launcher, row.handle, row.log, row.outcome, row.ended) == (
        "running", "training_runs/Collect Wood", "local", {"pid": 3}, "logs/one.log", None, None,
    )  # fmt: skip
    job = store.job("Collect Wood")
    assert (job.status, job.fresh, job.reason, job.ended) == ("running", False, None, None)
    assert job.started >= job.created
    store.end_attempt(number, "failed", "nan", peak_memory=5)
    row = store.attempt(number)
    assert (row.state, row.outcome, row.reason, row.peak_memory) == ("ended", "failed", "nan", 5)
    assert row.ended >= row.started
    assert (store.attempts(state="running"), len(store.attempts("Collect Wood", "ended"))) == ([], 1)
    assert store.attempts("Place Table") == []
    with pytest.raises(ValueError, match="what 'x' needs must be a list of names, got 'Collect Wood'"):
        store.add("x", {}, "Collect Wood")


def test_a_new_job_waits_with_its_whole_budget_in_the_order_of_its_coming(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("b", "a", "c"):
        store.add(name, {}, ["x"] if name == "c" else [], budget=9)
    assert [row.name for row in store.jobs()] == ["b", "a", "c"]
    row = store.job("c")
    assert (row.status, row.needs, row.budget_total, row.budget_used, row.left, row.allotment) == (
        "waiting", ("x",), 9, 0, 9, None,
    )  # fmt: skip
    assert (row.retries, row.rounds, row.cancel, row.fresh, row.artifact, row.result) == (
        0,
        0,
        False,
        True,
        None,
        {},
    )
    assert [event["kind"] for event in store.events()] == ["added"] * 3
    store.update("a", status="failed", reason="no")
    store.update("a", reason="still")  # no new status, no event
    assert [(event["kind"], event["detail"]) for event in store.events(3)] == [("failed", {"reason": "no"})]
    assert [row.name for row in store.jobs("waiting")] == ["b", "c"]
    store.update("a", allotment=4)
    assert store.job("a").left == 4


def test_numbers_of_artifacts_go_on_after_those_of_versions_without_a_job(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("a", {})
    store.add_version(version(store, 4, b"one"))
    assert (store.number("a"), store.number("a")) == (5, 5)


def test_the_mark_of_a_result_names_its_launch_and_a_failure_is_told_to_its_own(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not done: it has no DONE.json"):
        read_done(tmp_path)
    write_done(tmp_path, 3, {"x": 1})
    mark = mark_of(tmp_path)
    assert len(mark) == 16
    assert read_done(tmp_path)["x"] == read_done(tmp_path, 3)["x"] == 1
    with pytest.raises(DataError, match="is the mark of launch 3, not of launch 4"):
        read_done(tmp_path, 4)
    write_done(tmp_path, 3, {"x": 1})
    assert mark_of(tmp_path) != mark  # alike, and yet another
    assert read_failure(tmp_path, 3) == (None, False)
    for error, told in ((ValueError("no"), ("ValueError: no", False)), ("words", ("words", False)),
                        (ExhaustedError("spent"), ("ExhaustedError: spent", True))):  # fmt: skip
        write_failure(tmp_path, 3, error)
        assert read_failure(tmp_path, 3) == told
        assert read_failure(tmp_path, 4) == (None, False)
    clear_marks(tmp_path)
    clear_marks(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_result_of_one_mark_is_committed_once_whatever_its_launch(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = trained(store), store.begin_attempt("Collect Wood", tmp_path / "again")
    made = [version(store, 0, b"one")]
    assert store.commit_training(first, made, {0: None}, result={}, frames=5, mark="m", peak_memory=77)
    assert not store.commit_training(second, made, {0: 1}, result={}, frames=5, mark="m")
    assert store.merged("m").id == first  # type: ignore[union-attr]
    row = store.attempt(first)
    assert (row.steps, row.peak_memory, row.mark) == (5, 77, "m")
    assert store.events()[-1]["detail"] == {"attempt": first, "heads": {"0": {"version": 1, "frames": 10}}}


def test_a_store_that_is_closed_answers_no_more(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        store.jobs()


def test_a_store_that_nobody_closes_leaves_no_open_database(tmp_path: Path) -> None:
    store = Store(tmp_path)
    db = store._db
    del store
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        db.execute("select 1")
