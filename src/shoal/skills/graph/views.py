"""The store as folders and JSON for people and `jq`: written from the store, never read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.files import write_bytes, write_json
from shoal.core.run_folder import whole_rows
from shoal.skills.graph.launchers import adopting_launcher
from shoal.skills.graph.process import DONE
from shoal.skills.graph.store import AttemptRow, SkillRow, Store


def skill_folder(row: SkillRow) -> str:
    """Where a skill is shown, relative to the store."""
    return f"skills/{row.expert}_{row.slug}"


def with_experts(store: Store) -> dict[str, dict[str, Any]]:
    """Skills whose expert has a version, as the reference describes completed skills."""
    found: dict[str, Any] = {}
    for row in store.skills():
        head = store.head(row.expert) if row.expert is not None else None
        if head is not None:
            found[row.name] = {
                "expert_idx": row.expert,
                "skill_with_consumption": row.spec.amounts(),
                "path": skill_folder(row),
                "total_frames": head.frames,
                "metrics": row.result,
            }
    return found


def export_views(store: Store) -> None:
    """Bring the folders and files up to date; what is right already is not touched."""
    for row in store.skills():
        head = store.head(row.expert) if row.expert is not None else None
        if head is None:
            continue
        folder = store.root / skill_folder(row)
        policy = folder / f"expert_{row.expert}_policy"
        policy.mkdir(parents=True, exist_ok=True)
        _show(policy / "params.safetensors", store.blob_path(head.sha256).read_bytes())
        metadata = {
            "skill_name": row.name,
            "global_expert_idx": row.expert,
            "total_frames": head.frames,
            "version": head.id,
            "sha256": head.sha256,
            "updated_at": head.created,
        }
        _show_json(policy / "metadata.json", metadata)
        _show_json(folder / "metadata.json", {"skill_name": row.name, "spec": row.spec.as_dict()})
        _show_json(folder / "metrics.json", row.result)
    checkpoints = store.root / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    _show_json(checkpoints / "global_latest.json", {"skills": with_experts(store)})


def _show(path: Path, data: bytes) -> None:
    """Write a file where it differs: people may have changed what they are shown."""
    if not path.is_file() or path.read_bytes() != data:
        write_bytes(path, data)


def _show_json(path: Path, value: Any) -> None:
    _show(path, f"{json.dumps(value, indent=2)}\n".encode())


def condition(store: Store, row: SkillRow, *, held: bool) -> str:
    """What is true of a skill now, where its status speaks of a process that may be gone."""
    if held or row.status != "running":
        return row.status
    last = store.attempts(row.name, running=True)[-1:]
    if last and last[0].handle:
        launcher = adopting_launcher(last[0].handle, store.root)
        if launcher is not None and launcher.poll(last[0].handle) is None:
            return "running, no scheduler"
    if last and (store.root / last[0].run_folder / DONE).exists():
        return "done, not merged"
    return "interrupted"


def training_seconds(launches: Sequence[AttemptRow], until: float | None = None) -> float:
    """How long launches took in all; one that runs, `until` a time, or not counted."""
    ends = [launch.ended or until or launch.started for launch in launches]
    return sum(max(0.0, end - launch.started) for launch, end in zip(launches, ends, strict=True))


LATEST = 1 << 16
"""Bytes of the metrics of a training that are read for its progress: some hundred updates."""


def progress_of(store: Store, row: SkillRow) -> tuple[float | None, int | None, float | None]:
    """Of a running training the success of its latest evaluation, and the env steps and time of its latest update."""
    attempts = store.attempts(row.name)
    if not attempts:
        return None, None, None
    path = store.root / attempts[-1].run_folder / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LATEST))
            rows = whole_rows(file.read())
        evaluated = [row["evaluated_success"] for row in rows if row.get("evaluated_success") is not None]
        return evaluated[-1] if evaluated else None, rows[-1]["step"], rows[-1]["time"]
    except (OSError, IndexError, KeyError):
        return None, None, None


def scheduler_state(store: Store, max_parallel: int) -> dict[str, Any]:
    """What `scheduler_state.json` holds: the layout of the reference, skills under their slug."""
    skills: dict[str, Any] = {}
    rows = store.skills()
    attempts = store.attempts()
    held = store.is_held()
    for row in rows:
        last = next((attempt for attempt in reversed(attempts) if attempt.skill == row.name), None)
        handle: Mapping[str, Any] = (last.handle if last else None) or {}
        skills[row.slug] = {
            "skill_name": row.name,
            "skill_data": {
                "skill_name": row.name,
                "skill_with_consumption": row.spec.amounts(),
                "spec": row.spec.as_dict(),
            },
            "status": row.status,
            "reason": row.reason,
            "dependencies": list(row.dependencies),
            "expert_idx": row.expert,
            "started_at": row.started,
            "completed_at": row.ended,
            "retry_count": row.retries,
            "run_folder": last.run_folder if last else None,
            "skill_folder": skill_folder(row) if row.expert is not None else None,
            "tmux_session": handle.get("session"),
            "pid": handle.get("pid"),
            "condition": condition(store, row, held=held),
            "budget_total": row.budget_total,
            "budget_remaining": row.budget_total - row.budget_used,
            "processing_results": row.result,
        }
    assignments = {row.name: row.expert for row in rows if row.expert is not None}
    return {
        "skills": skills,
        "max_parallel": max_parallel,
        "currently_running": [row.slug for row in rows if row.status == "running"],
        "next_expert_idx": max(assignments.values(), default=-1) + 1,
        "expert_assignments": assignments,
    }


def export_state(store: Store, max_parallel: int) -> None:
    """Replace `scheduler_state.json` by the present state."""
    write_json(store.root / "scheduler_state.json", scheduler_state(store, max_parallel))
