from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.skills.conftest import skill, some_net

from shoal import prepare_training_run, process_completed_training
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json, write_json
from shoal.skills.graph.store import NewVersion, Store
from shoal.skills.learning.network import Network, decode, encode
from shoal.skills.learning.training import Run, finish_training, skill_of
from shoal.skills.worlds.crafting import CRAFTING

MILLION = 1_000_000


def amounts(**gain: int) -> dict[str, Any]:
    return {"skill_with_consumption": {"requirements": {}, "consumption": {}, "gain": gain}}


def add_skill(store: Store, name: str, expert: int, gain: str, needs: Iterable[str] = ()) -> None:
    store.add_skill(skill(name, gain), list(needs), 10**9)
    store.update_skill(name, expert=expert)


def add_expert(base: Path, name: str, expert: int, net: Network, frames: int) -> None:
    """A completed skill with a first version, as a training would have left it."""
    with contextlib.closing(Store(base, create=True)) as store:
        add_skill(store, name, expert, {0: "wood", 1: "stone", 2: "iron"}.get(expert, "drink"))
        sha256 = store.put_blob(encode(net.params()))
        store.add_version(NewVersion(expert, sha256, None, frames, frames, True))
        store.update_skill(name, status="completed")


def prepare(base: Path, name: str, expert: int, deps: dict[str, int], gain: str) -> Path:
    with contextlib.closing(Store(base, create=True)) as store:
        add_skill(store, name, expert, gain, deps)
    done = {dep: {"expert_idx": index} for dep, index in deps.items()}
    return prepare_training_run(name, amounts(**{gain: 1}), expert, list(deps), done, base)[0]


def trained_side_by_side(base: Path, net: Callable[..., Network], frames: int) -> tuple[Path, Path]:
    """Expert 0 has 50M frames. Skill A trained it by `frames`, skill B by 100M (150M); both began at 50M."""
    add_expert(base, "Collect Wood", 0, net("base"), 50 * MILLION)
    a = prepare(base, "Skill A", 1, {"Collect Wood": 0}, "stone")
    b = prepare(base, "Skill B", 2, {"Collect Wood": 0}, "iron")
    for folder, acted, own in ((a, frames, 1), (b, 100 * MILLION, 2)):
        experts = {0: net("wood", own).params(), 1: net("own", own).params()}
        finish_training(folder, experts, {0: acted, 1: acted})
    return a, b


def test_the_reference_conflict_keeps_150_million_frames(tmp_path: Path, net: Callable[..., Network]) -> None:
    a, b = trained_side_by_side(tmp_path, net, 80 * MILLION)
    one = process_completed_training(a, "Skill A", 1, tmp_path)
    assert one["expert_updates"] == {0: {"action": "updated", "frames": 130 * MILLION}}
    assert one["new_expert"] == {"global_idx": 1, "frames": 80 * MILLION}
    two = process_completed_training(b, "Skill B", 2, tmp_path)
    assert two["expert_updates"] == {0: {"action": "updated", "frames": 150 * MILLION}}
    head = Store(tmp_path).head(0)
    assert head is not None
    assert head.frames == 150 * MILLION
    kept = decode(Store(tmp_path).get_blob(head.sha256), "head")[0]
    assert (kept["actor/weight"] == net("wood", 2).params()["actor/weight"]).all()


@pytest.mark.parametrize("late", [80, 100])
def test_in_the_other_order_or_with_as_many_frames_the_loser_is_kept_as_a_version(
    tmp_path: Path, net: Callable[..., Network], late: int
) -> None:
    a, b = trained_side_by_side(tmp_path, net, late * MILLION)
    process_completed_training(b, "Skill B", 2, tmp_path)
    result = process_completed_training(a, "Skill A", 1, tmp_path)
    assert result["expert_updates"] == {0: {"action": "kept", "frames": 150 * MILLION}}
    store = Store(tmp_path)
    frames = [(row.frames, row.accepted) for row in store.versions(0)]
    assert frames == [(50 * MILLION, True), (150 * MILLION, True), ((50 + late) * MILLION, False)]
    loser = decode(store.get_blob(store.versions(0)[-1].sha256), "loser")[0]
    assert (loser["actor/weight"] == net("wood", 1).params()["actor/weight"]).all()


def test_four_sparse_experts_become_four_networks_not_fifty_one(
    tmp_path: Path, net: Callable[..., Network]
) -> None:
    names = {"Zero": 0, "Five": 5, "Ten": 10}
    for name, expert in names.items():
        add_expert(tmp_path, name, expert, net("expert", expert), expert + 1)
    folder = prepare(tmp_path, "Fifty", 50, names, "plant")
    run = Run.open(folder)
    assert run.local_to_global == {0: 0, 1: 5, 2: 10, 3: 50}
    task = run.task()
    assert len(task.experts) == 4
    for local, expert in ((0, 0), (1, 5), (2, 10)):
        loaded = task.experts[local]
        assert loaded is not None
        assert (loaded.flat == net("expert", expert).flat).all()
    assert task.experts[3] is None  # the new one is made by the training
    remapping = json.loads((folder / "50_policies" / "remap.json").read_text())
    assert remapping["global_to_local"] == {"0": 0, "5": 1, "10": 2, "50": 3}
    assert remapping["initial_frame_counts"] == {"0": 1, "5": 6, "10": 11, "50": 0}


def test_an_expert_that_only_made_start_states_gets_no_frames(
    tmp_path: Path, net: Callable[..., Network]
) -> None:
    add_expert(tmp_path, "Collect Wood", 0, net("base"), 50)
    folder = prepare(tmp_path, "Skill A", 1, {"Collect Wood": 0}, "stone")
    finish_training(folder, {0: net("base").params(), 1: net("own").params()}, {0: 0, 1: 70})
    result = process_completed_training(folder, "Skill A", 1, tmp_path)
    assert result["expert_updates"] == {}
    assert result["new_expert"] == {"global_idx": 1, "frames": 70}
    assert [row.frames for row in Store(tmp_path).versions(0)] == [50]


def test_total_timesteps_credits_every_expert_as_the_reference_did(
    tmp_path: Path, net: Callable[..., Network]
) -> None:
    add_expert(tmp_path, "Collect Wood", 0, net("base"), 50)
    folder = prepare(tmp_path, "Skill A", 1, {"Collect Wood": 0}, "stone")
    finish_training(folder, {0: net("wood").params(), 1: net("own").params()}, {0: 1, 1: 1})
    result = process_completed_training(folder, "Skill A", 1, tmp_path, total_timesteps=100)
    assert result["expert_updates"][0]["frames"] == 150
    assert result["new_expert"]["frames"] == 100


def test_the_folders_of_the_reference_are_there_and_the_run_folder_is_gone(
    tmp_path: Path, net: Callable[..., Network]
) -> None:
    folder = prepare(tmp_path, "Collect Wood", 0, {}, "wood")
    assert folder == tmp_path / "training_runs" / "skill_0_Collect_Wood"
    assert (folder / "0.json").exists()
    assert (folder / "0_policies").is_dir()
    finish_training(folder, {0: net("own").params()}, {0: 1234}, success=0.75)
    process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert not folder.exists()
    policy = tmp_path / "skills" / "0_Collect_Wood" / "expert_0_policy"
    metadata = json.loads((policy / "metadata.json").read_text())
    assert (metadata["skill_name"], metadata["global_expert_idx"], metadata["total_frames"]) == (
        "Collect Wood",
        0,
        1234,
    )
    arrays, _ = decode((policy / "params.safetensors").read_bytes(), "x")
    assert (Network.from_params(arrays).flat == net("own").flat).all()
    latest = json.loads((tmp_path / "checkpoints" / "global_latest.json").read_text())
    assert latest["skills"]["Collect Wood"]["total_frames"] == 1234
    assert latest["skills"]["Collect Wood"]["path"] == "skills/0_Collect_Wood"


def test_a_result_counts_once_however_often_it_is_processed(
    tmp_path: Path, net: Callable[..., Network]
) -> None:
    folder = prepare(tmp_path, "Collect Wood", 0, {}, "wood")
    finish_training(folder, {0: net("own").params()}, {0: 10})
    results = [
        process_completed_training(folder, "Collect Wood", 0, tmp_path, keep_run=True) for _ in range(2)
    ]
    assert [result.get("already_merged", False) for result in results] == [False, True]
    with contextlib.closing(Store(tmp_path)) as store:
        assert len(store.versions()) == 1
        assert store.skill("Collect Wood").budget_used == 10
        finish_training(folder, {0: net("own").params()}, {0: 10})  # another result, though of the same bytes
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
        assert store.skill("Collect Wood").budget_used == 20
    assert process_completed_training(folder, "Collect Wood", 0, tmp_path)["already_merged"]


GOOD = some_net("own").params()


@pytest.mark.parametrize(
    ("experts", "acted", "message"),
    [
        ({}, {}, "has no parameters of the expert that was trained, local 0"),
        (
            {0: {**GOOD, "critic/bias": np.array([np.nan], np.float32)}},
            {0: 10},
            "expert 0: 'critic/bias' has numbers that are not finite",
        ),
        (
            {0: {**GOOD, "critic/bias": np.array([1e300])}},
            {0: 10},
            "'critic/bias' has numbers that are not finite",
        ),
        (
            {0: {**GOOD, "critic/bias": np.array([1])}},
            {0: 10},
            "must hold numbers as float32 does, got int64",
        ),
        (
            {0: {**GOOD, "critic/bias": np.ones(2, np.float32)}},
            {0: 10},
            r"must have shape \(1,\), got \(2,\)",
        ),
        (
            {0: {"only": np.ones(2)}},
            {0: 10},
            "expert 0 must have exactly the arrays torso/0/weight, .*wrong: .*only",
        ),
        ({0: GOOD, 1: GOOD}, {0: 10}, r"numbered \[0\] here, got 1"),
        ({0: GOOD}, {7: 10}, r"numbered \[0\] here, got 7"),
        ({0: GOOD}, {0: -3}, "acted_frames of expert 0 must be a whole number of steps, at least 0"),
    ],
)
def test_a_result_of_no_use_is_refused_before_it_is_anybodys_expert(
    tmp_path: Path, experts, acted, message
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", amounts(wood=1), 0, [], {}, tmp_path)
    with pytest.raises(DataError, match=message):
        finish_training(folder, experts, acted)
    with pytest.raises(DataError, match="is not done"):
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert not Store(tmp_path, create=True).versions()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"success": "good"}, r"Expected `float \| null`, got `str` - at `\$.success`"),
        ({"frames": -1}, r"Expected `int` >= 0 - at `\$.frames`"),
        ({"acted_frames": {"own": 5}}, r"Expected `int`, got `str`"),
        ({"numbers": {"seconds": "12 s"}}, r"Expected `float \| null`, got `str` - at `\$.numbers.seconds`"),
    ],
)
def test_a_mark_of_another_trainer_that_says_something_else_is_refused_by_name(
    tmp_path: Path, change, message: str
) -> None:
    folder, _, _ = prepare_training_run("Collect Wood", amounts(wood=1), 0, [], {}, tmp_path)
    done = finish_training(folder, {0: GOOD}, {0: 10})
    write_json(done, {**read_json(done), **change})
    with pytest.raises(DataError, match=f"DONE.json is no mark of a training .*{message}"):
        process_completed_training(folder, "Collect Wood", 0, tmp_path)
    assert not Store(tmp_path, create=True).versions()


def test_a_broken_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    run = Run.open(prepare(tmp_path, "Collect Wood", 0, {}, "wood"))
    assert run.load_checkpoint() is None
    for update in (1, 2, 3):
        run.save_checkpoint(update, {"x": np.full(8, update)}, {"update": update})
    assert len(run.checkpoints()) == 2
    newest = run.checkpoints()[-1]
    for broken in (newest.read_bytes()[:50], b"", bytes([255]) + newest.read_bytes()[1:]):
        newest.write_bytes(broken)
        loaded = run.load_checkpoint()
        assert loaded is not None
        assert loaded[1] == {"update": 2}


def test_a_training_may_use_as_many_steps_as_it_is_allowed_last_and_at_least_one(tmp_path: Path) -> None:
    folder = prepare_training_run("Wood", amounts(wood=1), 0, [], {}, tmp_path)[0]
    for steps, found in ((500, 500.0), (0, 1.0), (7.5, 7.5)):
        Run.open(folder).allow(steps)
        assert Run.open(folder).task().config.total_timesteps == found
    written = (folder / "0.json").stat().st_mtime_ns
    Run.open(folder).allow(7.5)  # nothing changes
    assert (folder / "0.json").stat().st_mtime_ns == written


def test_what_the_reference_says_of_a_skill_becomes_its_spec() -> None:
    told = {"requirements": {"wood": 1}, "consumption": {"wood": 1}, "gain": {"stone": 2}}
    skill = skill_of("Dig", {"skill_with_consumption": told, "code": "x", "skill_name": "Dig"}, CRAFTING)
    assert (skill.done.feature, skill.done.count, skill.gain) == ("stone", 2, {"stone": 2})
    assert (skill.requirements, skill.consumption) == ({"wood": 1}, {"wood": 1})
    with pytest.raises(ConfigError, match="skill_with_consumption must have a gain, got"):
        skill_of("Dig", {"skill_with_consumption": {"requirements": {}}}, CRAFTING)
    with pytest.raises(ConfigError, match="skill 'Dug': its data names it 'Dig'"):
        skill_of("Dug", skill, CRAFTING)
    with pytest.raises(ConfigError, match="skill 'Dig': horizon must be at least 1, got 0"):
        skill_of("Dig", replace(skill, horizon=0), CRAFTING)


def test_a_folder_of_another_skill_or_expert_is_refused(tmp_path: Path, net: Callable[..., Network]) -> None:
    folder = prepare_training_run("Wood", amounts(wood=1), 0, [], {}, tmp_path)[0]
    finish_training(folder, {0: net("own").params()}, {0: 5})
    for name, expert in (("Stone", 0), ("Wood", 1)):
        with pytest.raises(
            ConfigError, match=f"the training of 'Wood' as expert 0, not of '{name}' as expert {expert}"
        ):
            process_completed_training(folder, name, expert, tmp_path)
    add_expert(tmp_path, "Other", 0, net("other"), 3)
    with pytest.raises(ConfigError, match="expert 0 belongs to 'Other' in .*, not to 'Wood'"):
        process_completed_training(folder, "Wood", 0, tmp_path)
    with pytest.raises(DataError, match="is not the folder of a training: it must hold one <expert>.json"):
        Run.open(tmp_path)


def test_a_training_that_is_laid_out_anew_keeps_nothing_of_another_one(tmp_path: Path, net) -> None:
    def lay_out(**more: Any) -> Run:
        return Run.open(prepare_training_run("Dig", amounts(stone=1), 0, [], {}, tmp_path, **more)[0])

    run = lay_out(seed=1)
    run.save_checkpoint(1, {"a": np.zeros(1)}, {})
    finish_training(run.folder, {0: net("own").params()}, {0: 10})
    lay_out(seed=2)
    with pytest.raises(DataError, match="is not done"):  # it was merged as the training of seed 2
        process_completed_training(run.folder, "Dig", 0, tmp_path)
    assert not run.checkpoints()
