"""The files for people: what they say of each skill, and that nobody reads them."""

from __future__ import annotations

from pathlib import Path

from tests.skills.test_scheduler import PICKAXE, TABLE, WATER, WOOD, scheduler

from shoal.skills.graph.store import NewVersion, Store
from shoal.skills.graph.views import export_views, scheduler_state
from shoal.skills.learning.network import Network, Shape, encode


def planned(folder: Path) -> Store:
    """A folder with four skills: one completed, one in training, one that waits for both, one alone."""
    store = Store(folder, create=True)
    store.set_setting("world", "crafting")
    for one, needs in (
        (WOOD, []),
        (TABLE, ["Collect Wood"]),
        (PICKAXE, ["Collect Wood", "Place Table"]),
        (WATER, []),
    ):
        store.add_skill(one, needs, 1000)
    made = store.begin_attempt("Collect Wood", folder / "training_runs" / "one")
    sha = store.put_blob(encode(Network(Shape(3, 2, 2)).params()))
    store.commit_training(
        made, [NewVersion(store.assign_expert("Collect Wood"), sha, None, 300, 300, True)],
        result={"success": 0.75}, frames=300,
    )  # fmt: skip
    store.assign_expert("Place Table")
    number = store.begin_attempt("Place Table", folder / "training_runs" / "two")
    store.set_handle(
        number, "tmux", {"pid": 7, "began": None, "session": "s_2", "server": "s"}, folder / "log"
    )
    return store


def test_the_state_for_people_says_of_each_skill_where_it_is_and_what_is_left(tmp_path: Path) -> None:
    store = planned(tmp_path)
    state = scheduler_state(store, 3)
    assert list(state["skills"]) == ["Collect_Wood", "Place_Table", "Make_Wood_Pickaxe", "Drink_Water"]
    wood, table, pickaxe, water = state["skills"].values()
    assert (wood["status"], wood["expert_idx"], wood["budget_total"], wood["budget_remaining"]) == (
        "completed", 0, 1000, 700,
    )  # fmt: skip
    assert (wood["run_folder"], wood["skill_folder"]) == ("training_runs/one", "skills/0_Collect_Wood")
    assert wood["processing_results"] == {"success": 0.75}
    assert wood["completed_at"] >= wood["started_at"]
    assert (table["status"], table["tmux_session"], table["pid"], table["condition"]) == (
        "running", "s_2", 7, "interrupted",
    )  # fmt: skip
    assert (pickaxe["dependencies"], pickaxe["expert_idx"], pickaxe["skill_folder"]) == (
        ["Collect Wood", "Place Table"], None, None,
    )  # fmt: skip
    assert (water["run_folder"], water["tmux_session"], water["started_at"]) == (None, None, None)
    assert pickaxe["skill_data"]["skill_with_consumption"] == {
        "requirements": {"wood": 1, "table": 1}, "consumption": {"wood": 1}, "gain": {"wood_pickaxe": 1},
    }  # fmt: skip
    assert (state["max_parallel"], state["currently_running"]) == (3, ["Place_Table"])
    assert state["expert_assignments"] == {"Collect Wood": 0, "Place Table": 1}
    assert state["next_expert_idx"] == 2
    assert scheduler_state(Store(tmp_path / "empty", create=True), 1)["next_expert_idx"] == 0
    store.close()


def test_what_people_do_to_the_files_they_are_shown_does_not_reach_the_store(
    tmp_path: Path, scripted
) -> None:
    s = scheduler(tmp_path, scripted(), WOOD)
    assert s.run()
    shown = tmp_path / "skills/0_Collect_Wood/expert_0_policy/params.safetensors"
    head = s.store.head(0)
    assert head is not None
    with shown.open("r+b") as file:
        file.write(b"\0" * 100)
    assert s.store.get_blob(head.sha256)
    export_views(s.store)
    assert shown.read_bytes() == s.store.get_blob(head.sha256)
