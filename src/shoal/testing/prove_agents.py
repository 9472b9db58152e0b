"""Agent training, proved: one after another, in lockstep, on workers, on Ray, and with each of its processes killed."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.rollout.verify import Difference
from shoal.testing.proof import (
    Case,
    Part,
    Toll,
    bytes_read_by,
    kill,
    kill_when,
    meanwhile,
    rows_of,
    run_shoal,
    shoal_command,
    workers_of,
)
from shoal.testing.recorded_runs import episodes_digest, first_difference, weights_digest

KEPT = ("trainer.save_trajectories_every=1", "trainer.tensorboard=false", "trainer.wandb=false")
"""Every episode of a proof is recorded."""


def agents(
    config_name: str = "demo",
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    *,
    quick: bool = False,
    faults: bool = True,
    ray: bool | None = None,
) -> Part:
    """The proof of a config.

    Args:
        config_name: of shoal's own configs, or of those in `config_dir`.
        overrides: settings to change, `key=value`.
        config_dir: folder with YAML configs.
        quick: two iterations of a few small groups instead of the whole run.
        faults: also kill workers, sampler and trainer.
        ray: also play on Ray; where it is installed, if not given.
    """
    training = _Training(config_name, [*overrides, *KEPT], config_dir, quick)
    cases = [
        training.case("one by one", "agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=serial"),
        training.case("lockstep", "agent_proxy.use_parallel_rollout=false", "use_parallel_envs=false",
                      "vector.step_timeout=null"),
        training.case("lockstep, envs in 3 workers", "agent_proxy.use_parallel_rollout=false",
                      "use_parallel_envs=true", "vector.backend=process", "vector.num_workers=3"),
    ]  # fmt: skip
    for workers in (3, 16):
        for name, schedule in (("greedy", "adaptive"), ("lockstep", "barrier")):
            cases.append(training.case(f"{workers} workers, {name}", *_workers(workers, schedule)))
    if importlib.util.find_spec("ray") is not None if ray is None else ray:
        on_ray = [*_workers(3, "adaptive")[:-1], "agent_proxy.parallel.backend=ray"]
        cases.append(training.case("3 workers on Ray", *on_ray))
    if faults:
        cases.append(Case("workers killed", training.with_workers_killed, fault=True))
        if training.own_sampler:
            cases.append(Case("sampler killed", training.with_sampler_killed, fault=True))
        cases.append(Case("trainer killed", training.with_trainer_killed, fault=True))
    calm = "3 workers, greedy"
    return Part("agents", "episodes", cases, training.digests, training.difference, calm, training.seed)


def _workers(count: int, schedule: str) -> tuple[str, ...]:
    return (
        "agent_proxy.use_parallel_rollout=true", f"agent_proxy.parallel_n_jobs={count}",
        f"agent_proxy.parallel.schedule={schedule}", "agent_proxy.parallel.backend=processes",
    )  # fmt: skip


class _Training:
    """A config that is trained again and again."""

    def __init__(self, name: str, overrides: Sequence[str], folder: Path | None, quick: bool) -> None:
        self.name, self.folder = name, folder
        self.overrides = list(overrides)
        if quick:
            self.overrides += _smaller(
                self.config([]), [word.partition("=")[0].lstrip("+~") for word in overrides]
            )
        config = self.config([])
        self.own_sampler = config.engine.name in ("tiny", "huggingface") and not config.model.lora.rank
        self.seed = config.seed
        self.exact = (
            config.engine.name == "tiny" and config.engine.device == "cpu" and config.engine.threads == 1
        )

    def config(self, changes: Sequence[str], run: Path | None = None) -> Any:
        """The settings of a run."""
        from shoal.train.agent.config import compose_config

        where = [] if run is None else [f"run_dir={run}"]
        return compose_config(self.name, [*self.overrides, *changes, *where], self.folder)

    def case(self, name: str, *changes: str) -> Case:
        """The run, played in this process with these settings."""
        return Case(name, lambda run: self.train(run, changes))

    def train(self, run: Path, changes: Sequence[str], sampler: Any = None, policy: Any = None) -> None:
        """The whole run, in this process."""
        import torch

        from shoal.train.agent.trainer import AgentTrainer

        config = self.config(changes, run)
        threads = torch.get_num_threads()
        torch.set_num_threads(config.engine.threads)
        try:
            with AgentTrainer(config, policy=policy, sampler=sampler) as trainer:
                for _ in trainer.train():
                    pass
        finally:
            torch.set_num_threads(threads)

    # --- what is compared
    def digests(self, run: Path) -> dict[str, str]:
        """Of the recorded episodes and, where the engine is exact to the bit, of the weights."""
        found = {"episodes": episodes_digest(run, tokens_only=not self.exact)}
        if self.exact:
            newest = max(
                (run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))
            )
            found["weights"] = weights_digest(newest)
        return found

    def difference(self, one: Path, other: Path) -> str:
        """The first token, seed or answer of an env in which two runs differ."""
        found: Difference | None = first_difference(one, other, tokens_only=not self.exact)
        return "" if found is None else str(found)

    # --- faults
    def with_workers_killed(self, run: Path) -> Toll:
        """Three workers; one that has just been answered, and so is at play, is killed until episodes were lost."""
        toll = Toll()

        def killing(done: threading.Event) -> None:
            heard: dict[int, int] = {}
            while not done.wait(0.002):
                rows = rows_of(run)
                if sum(row.get("replayed_episodes", 0) for row in rows) and toll.kills >= 2:
                    return
                for pid in workers_of(os.getpid()):
                    before, heard[pid] = heard.get(pid), bytes_read_by(pid)
                    if rows and before is not None and heard[pid] != before:  # the run has begun
                        toll.kills += kill(pid)
                        done.wait(0.1)
                        break

        with meanwhile(killing):
            self.train(run, _workers(3, "adaptive"))
        toll.again = int(sum(row.get("replayed_episodes", 0) for row in rows_of(run)))
        return toll

    def with_sampler_killed(self, run: Path) -> Toll:
        """The sampler in a process of its own, killed over the requests that it is answering."""
        from shoal.rollout.factory import make_roles
        from shoal.testing.sampler_process import SamplerProcess
        from shoal.train.agent.policy import make_policy

        config = self.config(_workers(3, "adaptive"), run)
        tags = {*config.es_manager.train.group_tags(), *config.es_manager.val.group_tags()}
        roles = make_roles(config.custom_envs, sorted(tags), config.agent_proxy.max_turn)
        words = sorted({word for role in roles.values() for word in role.projection.words()})
        policy, _ = make_policy(config.engine, words, config.seed)
        sampler = SamplerProcess(config.engine, words, config.seed)
        toll = Toll()

        def killing(done: threading.Event) -> None:
            answered = -1  # a request that is lost twice is not asked a third time: it has to be another one
            while toll.kills < 2 and not done.wait(0.002):
                if sampler.asking and sampler.answered > answered and rows_of(run) and kill(sampler.pid):
                    toll.kills += 1
                    answered = sampler.answered + 1

        try:
            with meanwhile(killing):
                self.train(run, _workers(3, "adaptive"), sampler, policy)
        finally:
            sampler.close()
        toll.again, toll.seconds = sampler.lost_requests, sampler.lost_seconds
        return toll

    def with_trainer_killed(self, run: Path) -> Toll:
        """`shoal train` killed when episodes are played that no checkpoint has learned from; then resumed."""
        words = ["train", "--config-name", self.name]
        words += [] if self.folder is None else ["--config-dir", str(self.folder)]
        words += [*self.overrides, *_workers(3, "adaptive"), f"run_dir={run}"]
        log = run.with_name(f"{run.name}.log")
        log.unlink(missing_ok=True)
        process = shoal_command(words, log)
        if not kill_when(process, lambda: bool(_unsafe(run))):
            return Toll()
        lost = _unsafe(run)
        episodes = sum(len(path.read_bytes().splitlines()) for path in lost)
        when, stamps = time.time(), {path: path.stat().st_mtime for path in lost}
        run_shoal([*words, "resume=true"], log)
        again = [path for path in lost if path.stat().st_mtime > stamps[path]]
        back = max((path.stat().st_mtime for path in again), default=when)
        return Toll(1, episodes if len(again) == len(lost) else 0, back - when)


def _unsafe(run: Path) -> list[Path]:
    """Files of training episodes that no checkpoint has learned from yet."""
    newest = max((_number(path) for path in (run / "checkpoints").glob("step-*")), default=-1)
    if newest < 0:
        return []
    return [path for path in sorted((run / "trajectories").glob("train-*.jsonl")) if _number(path) > newest]


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _smaller(config: Any, given: Sequence[str]) -> list[str]:
    """Two iterations of small groups: settings that make the run short, but for those that were given."""
    train, val = config.es_manager.train, config.es_manager.val
    wanted = {
        "trainer.iterations": 2,
        "trainer.eval_every": 2,
        "trainer.save_every": 2,
        "warmup.steps": min(config.warmup.steps, 20),
        "agent_proxy.max_turn": min(config.agent_proxy.max_turn or 6, 6),
        "es_manager.train.env_groups": _groups(train, 3),
        "es_manager.train.group_size": min(train.group_size, 4),
        "es_manager.val.env_groups": _groups(val, 4),
    }
    return [f"{key}={value}" for key, value in wanted.items() if key not in given]


def _groups(side: Any, wanted: int) -> int:
    """About so many groups, of every kind as many as its share."""
    shares = sum(side.env_configs.n_groups) if side.env_configs.n_groups else len(side.env_configs.tags)
    return min(int(side.env_groups), shares * max(1, wanted // shares))
