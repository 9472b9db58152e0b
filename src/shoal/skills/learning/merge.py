"""Merge a finished training: decide the head of each expert it changed, and commit all of it at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from shoal.core.errors import ConfigError, DataError
from shoal.skills.graph.process import DONE
from shoal.skills.graph.store import NewVersion, Store, VersionRow
from shoal.skills.graph.views import export_views, skill_folder
from shoal.skills.learning.network import encode
from shoal.skills.learning.training import Outcome, Run, read_outcome
from shoal.skills.spec import parse_skill


def process_completed_training(
    run_folder: Path | str,
    skill_name: str,
    global_expert_idx: int,
    base_dir: Path | str,
    total_timesteps: int | None = None,
    *,
    merge: Literal["most-frames"] = "most-frames",
    attempt: int | None = None,
    store: Store | None = None,
    keep_run: bool = False,
) -> dict[str, Any]:
    """Merge a finished training into the experts, commit, show it as files, remove the run folder.

    Of two versions of an expert the one with more env steps of its own becomes the head; the head keeps ties. Safe to
    repeat, and safe in several processes at once: each result counts once, and heads are read, decided and written in
    one transaction.

    Args:
        run_folder: the finished training.
        skill_name: its skill.
        global_expert_idx: that skill's expert.
        base_dir: the folder of the whole run.
        total_timesteps: credits every loaded expert with this many env steps instead of those it acted in.
        merge: the rule above; there is no other.
        attempt: the launch that is waited for; by default the latest of this skill.
        store: an open store of `base_dir`, if there is one.
        keep_run: leave the run folder in place; else its logs and metrics move to the skill's folder.

    Returns:
        `{"skill_name", "expert_updates": {index: {"action": "updated"|"kept", "frames"}},
        "new_expert": {"global_idx", "frames"}}`.

    Raises:
        DataError: the training is not finished, or its result is broken.
        ConfigError: the folder is that of another skill or expert.
    """
    if merge != "most-frames":
        raise ValueError(f"merge must be 'most-frames', the only rule, got {merge!r}")
    base_dir, run_folder = Path(base_dir), Path(run_folder)
    with (
        contextlib.nullcontext(store) if store else contextlib.closing(Store(base_dir, create=True)) as opened
    ):
        try:
            run, outcome = Run.open(run_folder), read_outcome(run_folder, attempt)
            mark = hashlib.sha256((run_folder / DONE).read_bytes()).hexdigest()
        except (DataError, OSError):
            past = opened.attempts(skill_name)
            if run_folder.exists() or not past or past[-1].outcome != "merged":
                raise
            result = None  # another process was faster, and has put it away
        else:
            if (run.spec["skill"], run.expert) != (skill_name, global_expert_idx):
                raise ConfigError(
                    f"{run.folder} is the training of {run.spec['skill']!r} as expert {run.expert}, not of "
                    f"{skill_name!r} as expert {global_expert_idx}"
                )
            if total_timesteps is not None:
                outcome.acted_frames.update(dict.fromkeys(outcome.experts, total_timesteps))
            result = _merge(opened, run, outcome, attempt, mark)
        export_views(opened)
        if not keep_run:
            put_away(run_folder, base_dir / skill_folder(opened.skill(skill_name)))
    if result is None:
        return {"skill_name": skill_name, "expert_updates": {}, "new_expert": {}, "already_merged": True}
    own = result.pop(global_expert_idx)
    return {
        "skill_name": skill_name,
        "expert_updates": result,
        "new_expert": {"global_idx": global_expert_idx, "frames": own["frames"]},
    }


def put_away(folder: Path, kept: Path) -> None:
    """Move the logs and metrics of a merged training to the folder of its skill, and remove its own; safe to repeat."""
    going = folder.with_name(f".{folder.name}")
    shutil.rmtree(going, ignore_errors=True)  # of one that was killed here
    with contextlib.suppress(FileNotFoundError):  # another may do the same
        os.replace(folder, going)  # at once, so that it is whole or gone
    kept.mkdir(parents=True, exist_ok=True)
    for path in [*going.glob("training-*.log"), *going.glob("metrics.jsonl")]:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, kept / path.name)
    shutil.rmtree(going, ignore_errors=True)


def _merge(
    store: Store, run: Run, outcome: Outcome, attempt: int | None, mark: str
) -> dict[int, dict[str, Any]] | None:
    """What was done with each expert; None if this very result was committed before."""
    changed = [
        index
        for index in outcome.experts
        if outcome.acted_frames.get(index) or str(index) not in run.spec["loaded"] or index == run.expert
    ]  # the others were only used, so there is nothing new to keep
    name, expert = run.spec["skill"], run.expert
    with store.transaction():
        if store.merged(mark) or (attempt is not None and store.attempt(attempt).outcome == "merged"):
            return None
        # A folder that was prepared by hand brings its skill, with the expert it was prepared for.
        owner = {row.expert: row.name for row in store.skills()}.get(expert)
        if owner not in (None, name):
            raise ConfigError(f"expert {expert} belongs to {owner!r} in {store.root}, not to {name!r}")
        if name not in {row.name for row in store.skills()}:
            skill = parse_skill(run.spec["skills"][name])
            store.add_skill(skill, [], int(run.spec["config"]["total_timesteps"]))
        if owner is None:
            store.update_skill(name, expert=expert)
        if store.setting("world") is None:
            store.set_setting("world", run.spec["world"])
        if attempt is None:  # finished by hand
            running = store.attempts(name, running=True)
            attempt = running[-1].id if running else store.begin_attempt(name, run.folder)
        heads = {index: store.head(index) for index in changed}
        versions = [_version(store, run, outcome, index, head) for index, head in heads.items()]
        store.commit_training(
            attempt, versions,
            result={**outcome.numbers, "success": outcome.success, "frames": outcome.frames},
            frames=outcome.frames, mark=mark,
        )  # fmt: skip
    return {
        made.expert: {"action": "updated", "frames": made.frames}
        if made.accepted or (head := heads[made.expert]) is None
        else {"action": "kept", "frames": head.frames}
        for made in versions
    }


def _version(store: Store, run: Run, outcome: Outcome, index: int, head: VersionRow | None) -> NewVersion:
    """What the training made of an expert, kept whether it becomes the head or not."""
    base, acted = run.spec["loaded"].get(str(index)), outcome.acted_frames.get(index, 0)
    frames = (base["frames"] if base else 0) + acted
    note = {"skill": run.spec["skill"], "expert": index, "world": run.spec["world"], "kind": "run"}
    blob = store.put_blob(encode(outcome.experts[index], note))
    better = head is None or frames > head.frames
    return NewVersion(index, blob, base["version"] if base else None, frames, acted, accepted=better)
