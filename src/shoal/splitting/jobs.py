"""Jobs from what the caller gives: ids, rewards, scores and paths, checked one trajectory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.splitting.pixels import Store
from shoal.splitting.plans import Job
from shoal.splitting.recordings import Reader, finite_reward
from shoal.splitting.windows import count_turns


@dataclass(frozen=True, slots=True)
class Refused:
    """A trajectory that cannot be started because of what the caller gave with it."""

    dataset_id: str
    error: DataError


def make_jobs(
    ids: list[str],
    rewards: Any,
    scores: Any,
    paths: Mapping[str, Path | str] | Sequence[Path | str] | None,
    store: Store,
) -> list[Job | Refused]:
    """One job per trajectory, in order; `Refused` where what came with a trajectory is wrong."""
    if not ids:
        raise ValueError("dataset_ids is empty; give at least one trajectory")
    reward_of = _rows("reward_tensor", rewards, len(ids))
    scores_of = _rows("process_reward_tensor", scores, len(ids))
    path_of = _paths(paths, ids)
    jobs: list[Job | Refused] = []
    for index, name in enumerate(ids):
        where = f"trajectory {name!r}"
        try:
            jobs.append(
                Job(
                    index=index,
                    dataset_id=name,
                    path=path_of[index],
                    reward=None if reward_of is None else finite_reward(reward_of[index], where),
                    scores=() if scores_of is None else _checked_scores(scores_of[index], where),
                    store=store,
                )
            )
        except DataError as error:
            jobs.append(Refused(name, error))
    return jobs


def without_first_turns(reader: Reader, jobs: list[Job | Refused]) -> list[Job | Refused]:
    """The jobs, those of failed trajectories told from which turn on to train (`traj_filter`)."""
    lengths, rewards = {}, {}
    for job in jobs:
        if isinstance(job, Job):
            try:
                recording = reader.read(job.dataset_id, job.path)
            except DataError:
                continue  # splitting it will say the same, where it is handled
            lengths[job.index] = count_turns(recording.messages)
            rewards[job.index] = job.reward if job.reward is not None else recording.reward
    if any(reward is None for reward in rewards.values()):
        raise ValueError("traj_filter needs rewards: pass reward_tensor")
    good = [lengths[index] for index, reward in rewards.items() if reward is not None and reward > 0]
    if not good:
        return jobs
    first = int(sum(good) / len(good))
    return [
        replace(job, first_turn=first) if isinstance(job, Job) and rewards.get(job.index) == 0 else job
        for job in jobs
    ]


def _rows(name: str, values: Any, count: int) -> list[Any] | None:
    """`values` as a list with one item per trajectory."""
    if values is None:
        return None
    rows = values.tolist() if hasattr(values, "tolist") else list(values)
    if not isinstance(rows, list) or len(rows) != count:
        got = len(rows) if isinstance(rows, list) else 1
        raise ValueError(f"{name} must have one entry per trajectory: {count} dataset_ids, got {got}")
    return [
        row[0] if name == "reward_tensor" and isinstance(row, list) and len(row) == 1 else row for row in rows
    ]


def _checked_scores(row: Any, where: str) -> tuple[float, ...]:
    scores = tuple(finite_reward(value, f"{where}: process_reward_tensor") for value in row)
    wrong = [score for score in scores if score != -1 and not 0 <= score <= 1]
    if wrong:
        raise DataError(f"{where}: process rewards must be in [0, 1], or -1 for none; got {wrong[0]}")
    return scores


def _paths(
    paths: Mapping[str, Path | str] | Sequence[Path | str] | None, ids: list[str]
) -> list[Path | None]:
    if paths is None:
        return [None] * len(ids)
    if isinstance(paths, Mapping):
        return [Path(paths[name]) if name in paths else None for name in ids]
    if isinstance(paths, str | Path) or len(paths) != len(ids):
        raise ValueError(
            f"dataset_paths must map ids to folders or have one entry for each of {len(ids)} ids"
        )
    return [Path(path) for path in paths]
