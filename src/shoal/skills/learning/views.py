"""The store as folders and JSON for people, `jq` and older tools. Written from the store, never read back.

scheduler_state.json
checkpoints/global_latest.json
skills/0_Collect_Wood/{metadata.json, metrics.json, expert_0_policy/{params.safetensors, metadata.json}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, MissingExtraError, missing_extra
from shoal.core.files import write_bytes, write_json
from shoal.skills.jobs.runner import condition, is_held
from shoal.skills.learning.episodes import record_chain
from shoal.skills.learning.store import SkillRow, Store, VersionRow
from shoal.skills.learning.worlds import Bank, world_kind


def skill_folder(row: SkillRow) -> str:
    """Where a skill is shown, relative to the store."""
    return f"skills/{row.expert}_{row.slug}"


def migrate_folder(source: Path | str, target: Path | str) -> list[str]:
    """Refused: experts of the original project are networks of another shape, which nothing here can train on."""
    raise ConfigError(
        f"{source} is not imported: networks of the original project have another shape than experts here, so they "
        f"could be neither evaluated nor trained on; train its skills anew from their specs with --skills FILE"
    )


def export_views(store: Store) -> None:
    """Bring the folders and files up to date; what is right already is not touched."""
    completed: dict[str, Any] = {}
    for row in store.skills():
        head = store.head(row.expert) if row.expert is not None else None
        if head is not None:
            _export_skill(store, row, head)
            completed[row.name] = {
                "expert_idx": row.expert,
                "skill_with_consumption": amounts(row),
                "path": skill_folder(row),
                "total_frames": head.frames,
                "metrics": row.result,
            }
    folder = store.root / "checkpoints"
    folder.mkdir(exist_ok=True)
    _write_if_new(folder / "global_latest.json", {"skills": completed})


def amounts(row: SkillRow) -> dict[str, Any]:
    """Requirements, consumption and gain under the names of the reference."""
    spec = row.spec
    return {
        "requirements": dict(spec.requirements),
        "consumption": dict(spec.consumption),
        "gain": dict(spec.gain),
    }


def _export_skill(store: Store, row: SkillRow, head: VersionRow) -> None:
    folder = store.root / skill_folder(row)
    policy = folder / f"expert_{row.expert}_policy"
    policy.mkdir(parents=True, exist_ok=True)
    _copy(store.blob_path(head.sha256), policy / "params.safetensors")
    _write_if_new(
        policy / "metadata.json",
        {
            "skill_name": row.name,
            "global_expert_idx": row.expert,
            "total_frames": head.frames,
            "version": head.id,
            "sha256": head.sha256,
            "updated_at": head.created,
        },
    )
    _write_if_new(folder / "metadata.json", {"skill_name": row.name, "spec": row.spec.as_dict()})
    _write_if_new(folder / "metrics.json", row.result)


def _copy(source: Path, target: Path) -> None:
    """Make `target` a copy of `source`: what people do to it must not reach the store."""
    data = source.read_bytes()
    if not target.is_file() or target.samefile(source) or target.read_bytes() != data:
        write_bytes(target, data)


def _write_if_new(path: Path, value: Any) -> None:
    try:
        if json.loads(path.read_bytes()) == json.loads(json.dumps(value)):
            return
    except (OSError, ValueError):
        pass
    write_json(path, value)


def scheduler_state(store: Store, max_parallel: int) -> dict[str, Any]:
    """What `scheduler_state.json` holds: the layout of the reference, skills under their slug."""
    skills: dict[str, Any] = {}
    rows = store.skills()
    attempts = store.attempts()
    held = is_held(store.root)
    for row in rows:
        last = next((attempt for attempt in reversed(attempts) if attempt.job == row.name), None)
        handle: Mapping[str, Any] = (last.handle if last else None) or {}
        skills[row.slug] = {
            "skill_name": row.name,
            "skill_data": {
                "skill_name": row.name,
                "skill_with_consumption": amounts(row),
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
        "currently_running": [row.slug for row in rows if row.status in ("running", "merging")],
        "next_expert_idx": max((expert for expert in assignments.values() if expert is not None), default=-1)
        + 1,
        "expert_assignments": assignments,
    }


def export_state(store: Store, max_parallel: int) -> None:
    """Replace `scheduler_state.json` by the present state."""
    write_json(store.root / "scheduler_state.json", scheduler_state(store, max_parallel))


COLOURS = {
    "waiting": "#d0d7de", "blocked": "#e0c26a", "running": "#79b8ff", "merging": "#b392f0",
    "completed": "#8ddb8c", "failed": "#f28b82", "skipped": "#c9c9c9",
}  # fmt: skip
MOST_FRAMES = 400


def levels(rows: Sequence[SkillRow]) -> dict[str, int]:
    """How deep each skill lies: one more than the deepest it depends on; circles end at 0."""
    depth: dict[str, int] = {}
    by_name = {row.name: row for row in rows}

    def of(name: str, path: tuple[str, ...]) -> int:
        if name in path or name not in by_name:
            return -1
        if name not in depth:
            depth[name] = 1 + max((of(n, (*path, name)) for n in by_name[name].dependencies), default=-1)
        return depth[name]

    for row in rows:
        of(row.name, ())
    return depth


def draw_graph(store: Store, path: Path) -> None:
    """The graph of skills above a chart of when each was trained, as a PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("graph.png", "train") from error
    rows = store.skills()
    depth = levels(rows)
    columns = max(depth.values(), default=0) + 1
    figure = Figure(figsize=(max(7.0, 2.2 * columns), 4.5 + 0.28 * len(rows)), layout="constrained")
    graph, chart = figure.subplots(2, 1, height_ratios=[3, 1 + 0.25 * len(rows)])
    place: dict[str, tuple[float, float]] = {}
    for level in range(columns):
        here = [row for row in rows if depth[row.name] == level]
        for number, row in enumerate(here):
            place[row.name] = (float(level), (number + 1) / (len(here) + 1))
    for row in rows:
        direct = _direct(row, rows)
        for name in direct:
            graph.annotate(
                "", xy=place[row.name], xytext=place[name], zorder=1,
                arrowprops={"arrowstyle": "-|>", "color": "#888888", "shrinkA": 44, "shrinkB": 44},
            )  # fmt: skip
        success = row.result.get("success")
        label = row.name + (f"\n{success:.0%} in practice" if success is not None else f"\n{row.status}")
        box = {"boxstyle": "round,pad=0.4", "facecolor": COLOURS[row.status], "edgecolor": "#444444"}
        graph.text(*place[row.name], label, ha="center", va="center", fontsize=8, bbox=box, zorder=2)
    graph.set(xlim=(-0.6, columns - 0.4), ylim=(0, 1))
    graph.axis("off")
    graph.set_title(
        "Skills, each after what it needs; success in practice is from starts that its training made"
    )
    _draw_times(chart, store, rows)
    FigureCanvasAgg(figure)
    out = BytesIO()
    figure.savefig(out, format="png", dpi=110)
    write_bytes(path, out.getvalue())


def _direct(row: SkillRow, rows: Sequence[SkillRow]) -> list[str]:
    """Dependencies that are not reached through another one: fewer arrows, the same order."""
    by_name = {other.name: other for other in rows}
    names = [name for name in row.dependencies if name in by_name]
    return [n for n in names if not any(n in by_name[other].dependencies for other in names if other != n)]


def _draw_times(chart: Any, store: Store, rows: Sequence[SkillRow]) -> None:
    attempts = store.attempts()
    begin = min((attempt.started for attempt in attempts), default=0.0)
    for number, row in enumerate(rows):
        for attempt in attempts:
            if attempt.job == row.name:
                end = attempt.ended or attempt.started
                colour = COLOURS["completed" if attempt.outcome == "merged" else "failed"]
                chart.barh(
                    number,
                    end - attempt.started,
                    left=attempt.started - begin,
                    color=colour,
                    edgecolor="#444444",
                )
    chart.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    chart.invert_yaxis()
    chart.set_xlabel(
        "seconds since the first launch; each bar is one launch (green: merged, red: ended otherwise)"
    )


def draw_chain(store: Store, path: Path, seed: int = 0) -> bool:
    """A GIF of the whole plan played in one unseen world; True if the plan was finished in it."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise missing_extra("chain.gif", "vision") from error
    film, plan, steps, finished = record_chain(store, seed)
    world_name = str(store.setting("world"))
    every = max(1, -(-len(film) // MOST_FRAMES))
    images = []
    for bank, step in list(zip(film, steps, strict=True))[::every]:
        picture = Image.fromarray(picture_of(world_name, bank))
        canvas = Image.new("RGB", (picture.width, picture.height + 16), "white")
        canvas.paste(picture, (0, 16))
        ImageDraw.Draw(canvas).text((3, 2), f"{step + 1}/{len(plan)} {plan[step].skill}", fill="black")
        images.append(canvas)
    out = BytesIO()
    durations = [90] * (len(images) - 1) + [1500]
    images[0].save(out, format="GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    write_bytes(path, out.getvalue())
    return finished


def picture_of(world_name: str, bank: Bank) -> NDArray[np.uint8]:
    """`[height, width, 3]` of the first state of a bank."""
    paint = world_kind(world_name).picture
    if paint is None:
        raise MissingExtraError(f"the world {world_name!r} draws no pictures of itself")
    return paint(bank)
