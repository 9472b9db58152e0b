"""PPO, splitting and skills, proved through their commands: what each leaves in its folder must be the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.errors import WorkerError
from shoal.core.files import read_json
from shoal.core.workers import command_lines
from shoal.testing.proof import (
    Case,
    Part,
    Toll,
    kill,
    kill_session,
    kill_when,
    last_line,
    ray_is_here,
    rows_of,
    run_shoal,
    shoal_command,
    while_running,
    workers_of,
)
from shoal.testing.recorded_runs import weights_digest

TIMED = ("seconds", "per_second", "time", "busy")
"""Parts of the names of metrics that tell the clock, which is never the same."""


def _fresh(run: Path) -> Path:
    """The file beside a run that gets what its commands say; it is not there yet."""
    log = run.with_name(f"{run.name}.log")
    log.unlink(missing_ok=True)
    return log


def _calm(words: Callable[..., list[str]], named: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Cases without a fault: for each name, what the words of its command are made of besides the run."""

    def case(name: str, how: tuple[Any, ...]) -> Case:
        return Case(name, lambda run: run_shoal(words(run, *how), _fresh(run)))

    return [case(name, how) for name, how in named.items()]


def _untimed(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without those that tell the clock."""
    return [{key: row[key] for key in row if not any(part in key for part in TIMED)} for row in rows_of(run)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# --- PPO
ROLLOUT = 16 * 64
"""Env steps of one rollout of the proof: 16 envs, 64 steps of each."""


def ppo(*, quick: bool = False, faults: bool = True, ray: bool | None = None, seed: int = 0) -> Part:
    """CartPole: in this process, on 3 and 16 workers; a worker and the trainer killed."""
    steps = 16 * ROLLOUT if quick else 128 * ROLLOUT
    common = [
        "train-ppo", "--preset", "none", "--n-envs", "16", "--n-steps", "64", "--seed", str(seed), "--log-every", "1",
        "--total-timesteps", str(steps), "--checkpoint-every", str(steps // 4), "--eval-episodes", "2",
        "--tensorboard", "False",
    ]  # fmt: skip

    def words(run: Path, backend: str, workers: int | None) -> list[str]:
        told = [] if workers is None else ["--num-workers", str(workers)]
        return [*common, "--backend", backend, *told, "--run-dir", str(run)]

    def killed(victim: Callable[[int], int | None]) -> Callable[[Path], Toll]:
        """Kill what `victim` names of a process once steps are unsaved; go on from the newest checkpoint."""

        def make(run: Path) -> Toll:
            log = _fresh(run)
            process = shoal_command(words(run, "process", 3), log)
            kills = 0
            for _ in while_running(process):
                if not kills and _steps_played(run) > _steps_saved(run) > 0:
                    pid = victim(process.pid)
                    kills += pid is not None and kill(pid)
            kill_session(process)
            lost = max(0, _steps_played(run) - _steps_saved(run))
            if not kills:
                return Toll()
            if process.returncode:
                run_shoal(["train-ppo", "--resume-from", str(run)], log)
                return Toll(kills, lost)
            # a worker's death is no end of the run: the rollout that it broke off is played again at once
            return Toll(kills, ROLLOUT * log.read_text(errors="replace").count("a worker failed"))

        return make

    cases = _calm(words, {
        "in this process": ("serial", None), "3 workers": ("process", 3), "16 workers": ("process", 16),
    })  # fmt: skip
    if faults:
        first_worker = killed(lambda pid: next(iter(workers_of(pid)), None))
        cases.append(Case("a worker killed", first_worker, fault=True))
        cases.append(Case("trainer killed", killed(lambda pid: pid), fault=True))

    def digests(run: Path) -> dict[str, str]:
        kept = sorted((run / "checkpoints").iterdir())
        return {"metrics": _digest(_untimed(run)), "weights": weights_digest(kept[-1])}

    return Part("ppo", "env steps", cases, digests, _first_row, "3 workers", seed)


def _steps_played(run: Path) -> int:
    return max((int(row.get("steps", 0)) for row in rows_of(run)), default=0)


def _steps_saved(run: Path) -> int:
    found = (run / "checkpoints").glob("step_*") if (run / "checkpoints").is_dir() else ()
    return max((int(path.name.removeprefix("step_")) for path in found), default=0)


def _first_row(one: Path, other: Path) -> str:
    """The first metric that differs."""
    left, right = _untimed(one), _untimed(other)
    for number, (a, b) in enumerate(zip(left, right, strict=False), 1):
        for key in [*a, *(key for key in b if key not in a)]:
            if a.get(key) != b.get(key):
                where = f"iteration {a.get('iteration', number)}, step {a.get('steps', a.get('step'))}"
                return f"{where}: {key} is {a.get(key)!r} and {b.get(key)!r}"
    return "" if len(left) == len(right) else f"{len(left)} rows of metrics and {len(right)}"


# --- splitting
def split(*, quick: bool = False, faults: bool = True, ray: bool | None = None, seed: int = 0) -> Part:
    """Recordings made from a seed: serially, on threads, on Ray; the command killed on the way."""
    count = 24 if quick else 96
    shared: dict[str, Path] = {}

    def words(run: Path, cpus: int, backend: str) -> list[str]:
        from shoal.splitting.processors import build_qwen_processor
        from shoal.splitting.synthetic import write_gui_recordings

        if not shared:
            root = run.parent / "recordings"
            write_gui_recordings(root, count, steps=(3, 6), seed=seed)
            shared.update(
                root=root, processor=Path(build_qwen_processor(run.parent / "processor", vocabulary=20_000))
            )
        told = ["--num-cpus", str(cpus), "--backend", backend, "--processor", str(shared["processor"])]
        return ["split", str(shared["root"]), *told, "--out", str(run)]

    def killed(run: Path) -> Toll:
        log = _fresh(run)
        asked = words(run, 1, "thread")
        if not kill_when(shoal_command(asked, log), lambda: log.exists() and b" of " in log.read_bytes()):
            return Toll()
        done = [line for line in log.read_text().splitlines() if " of " in line]
        if (run / "batch").exists():
            raise WorkerError(f"a killed command left a batch: {last_line(log)}")
        run_shoal(asked, log)
        numbers = [int(word) for word in done[-1].split() if word.isdecimal()]
        return Toll(1, numbers[0])

    told: dict[str, tuple[Any, ...]] = {"one at a time": (1, "thread"), "3 threads": (3, "thread")}
    told["16 threads"] = (16, "thread")
    if not quick and ray_is_here(ray):
        told["3 on Ray"] = (3, "ray")
    cases = _calm(words, told)
    if faults:
        cases.append(Case("command killed", killed, fault=True))

    def digests(run: Path) -> dict[str, str]:
        return {"batch": _digest(read_json(run / "batch" / "manifest.json"))}

    def difference(one: Path, other: Path) -> str:
        left, right = (read_json(run / "batch" / "manifest.json")["sha256"] for run in (one, other))
        parted = [name for name in sorted({*left, *right}) if left.get(name) != right.get(name)]
        return f"file {parted[0]} of the batch" if parted else ""

    return Part("split", "trajectories", cases, digests, difference, "one at a time", seed)


# --- skills
def skills(*, quick: bool = False, faults: bool = True, ray: bool | None = None, seed: int = 0) -> Part:
    """A chain of skills of the crafting world: one and three at a time; a training and the scheduler killed."""
    nodes, steps = (3, "30000") if quick else (6, "200000")
    common = [
        "skills", "train", "--max_nodes", str(nodes), "--total-timesteps", steps, "--seed", str(seed),
        "--evaluation-worlds", "0", "--no-film",
    ]  # fmt: skip

    def words(run: Path, at_once: int, launcher: str = "local") -> list[str]:
        told = ["--max_parallel_skills", str(at_once), "--launcher", launcher]
        return [*common, *told, "--graph-path", str(run)]

    def training_killed(run: Path) -> Toll:
        """One training is killed; the scheduler launches it again from its last checkpoint."""
        log = _fresh(run)
        process = shoal_command(words(run, 3), log)
        kills = 0
        for _ in while_running(process):
            kills += sum(kill(pid) for pid in (() if kills else _trainings(run, process.pid)))
        kill_session(process)
        if process.returncode:
            raise WorkerError(f"shoal skills train ended with {process.returncode}: {last_line(log)}")
        again = log.read_text(errors="replace").count("launch again")
        return Toll(kills, again)

    def scheduler_killed(run: Path) -> Toll:
        """The scheduler and what it trains are killed together, as when a machine goes down; then it goes on."""
        log = _fresh(run)
        process = shoal_command(words(run, 3), log)
        seen: list[int] = []

        def ready() -> bool:
            seen[:] = _trainings(run, process.pid)
            return bool(seen)

        if not kill_when(process, ready):
            return Toll()
        again = sum(kill(pid) for pid in seen)
        run_shoal([*words(run, 3), "--resume"], log)
        return Toll(1 + again, again)

    told: dict[str, tuple[Any, ...]] = {"one at a time": (1,), "3 at a time": (3,)}
    if not quick and shutil.which("tmux"):
        told["3 in tmux"] = (3, "tmux")
    if not quick and ray_is_here(ray):
        told["3 on Ray"] = (3, "ray")
    cases = _calm(words, told)
    if faults:
        cases.append(Case("a training killed", training_killed, fault=True))
        cases.append(Case("scheduler killed", scheduler_killed, fault=True))

    def digests(run: Path) -> dict[str, str]:
        return {"experts": weights_digest(run / "skills")}

    return Part("skills", "trainings", cases, digests, _first_expert, "3 at a time", seed)


def _trainings(run: Path, but: int) -> list[int]:
    """Processes that train in a run folder."""
    mark = str(run.resolve() / "training_runs")
    return [pid for pid, words in command_lines() if pid != but and any(mark in word for word in words)]


def _first_expert(one: Path, other: Path) -> str:
    left, right = (
        sorted(path.relative_to(run) for path in (run / "skills").rglob("*.safetensors"))
        for run in (one, other)
    )
    if left != right:
        return f"{len(left)} experts and {len(right)}"
    return next((str(path) for path in left if (one / path).read_bytes() != (other / path).read_bytes()), "")
