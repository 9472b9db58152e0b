"""Training a language-model agent: play groups, compare within them, update, and keep everything on disk.

The loop is a straight line: rollouts, groups with signal, advantages, update, evaluation, checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from shoal import envs
from shoal.core.configuration import from_mapping, to_mapping
from shoal.core.data import Trajectory, write_trajectories
from shoal.core.errors import ConfigError
from shoal.core.run_folder import Event, RunFolder
from shoal.core.seeding import derive_seed
from shoal.rollout.collector import TrajectoryCollector, collect_with_signal
from shoal.rollout.factory import make_environments, make_roles
from shoal.rollout.parallel import ParallelRolloutManager
from shoal.train.agent_checkpoints import (
    Progress,
    keep_best,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from shoal.train.agent_config import AgentConfig
from shoal.train.agent_metrics import rollout_metrics
from shoal.train.critic import Critic, split_optimizer
from shoal.train.engine_clock import EngineClock
from shoal.train.group_advantages import has_signal
from shoal.train.packing_check import safe_batching
from shoal.train.policy import TrainableEngine, make_engine
from shoal.train.preparation import prepare_samples
from shoal.train.reference import BaseReference, Reference
from shoal.train.rollout_filter import filter_rollouts
from shoal.train.schedules import decayed
from shoal.train.tensorboard import TensorBoard
from shoal.train.update import trained_parameters, update
from shoal.train.wandb_log import WandB
from shoal.train.warmup import warm_up

logger = logging.getLogger(__name__)


class AgentTrainer:
    """Trains one engine on the envs of a config.

    Args:
        config: an `AgentConfig`, or a mapping (or OmegaConf config) with its keys.
        on_event: called at durable moments (checkpoint, evaluation, summary).

    Use it as a context manager, or call `close`, so that env workers end.
    """

    def __init__(self, config: AgentConfig | Mapping[str, Any], on_event: Event | None = None) -> None:
        if not isinstance(config, AgentConfig):
            plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
            config = from_mapping(AgentConfig, plain)  # type: ignore[arg-type]
        self.config = config
        parallel = config.agent_proxy.use_parallel_rollout
        self.train_envs, self.val_envs = make_environments(config, with_pools=not parallel)
        self.engine: TrainableEngine = make_engine(config.engine, self._action_words(), config.seed)
        lora = config.model.lora
        if lora.rank:
            from shoal.train.lora import add_lora

            self.engine = add_lora(self.engine, lora, config.engine.model, config.seed)
        batching = safe_batching(self.engine, config.algorithm.batching)
        algorithm = replace(config.algorithm, batching=batching)
        self.config = replace(config, algorithm=algorithm)
        self.critic = Critic(self.engine) if algorithm.needs_critic else None
        self.optimizer = split_optimizer(
            trained_parameters(self.engine.model),
            self.critic,
            algorithm.learning_rate,
            algorithm.critic.learning_rate,
            algorithm.weight_decay,
        )
        self.folder = RunFolder(config.run_dir or "runs/agent", "train", config.seed, on_event)
        self.progress = Progress(0, 0.0, 0, 0)
        self._clock = EngineClock()
        self._collector = self._make_collector("train", config.seed)
        self._val_collector = self._make_collector("val", derive_seed(config.seed, "held-out"))
        self._reference: Reference | BaseReference | None = None
        if algorithm.kl.coef:
            self._reference = (
                BaseReference(self.engine)  # type: ignore[arg-type]
                if lora.rank
                else Reference(self.folder.path / "reference")
            )
        self._board = TensorBoard(self.folder.path / "tensorboard", config.trainer.tensorboard)
        self._wandb = WandB(
            self.folder.path, config.trainer.wandb_project, to_mapping(config), config.trainer.wandb
        )
        self._warned = False

    def __enter__(self) -> AgentTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the env workers; may be called twice."""
        self._board.close()
        self._wandb.close()
        self._collector.close()
        self._val_collector.close()

    def describe(self) -> str:
        """One line: what is trained, on what."""
        size = sum(parameter.numel() for parameter in self.engine.model.parameters())
        groups, algorithm = self.config.es_manager.train, self.config.algorithm.adv_estimator
        return (
            f"{self.config.engine.name} engine with {size / 1e6:.2f}M parameters, {algorithm}, "
            f"{groups.env_groups} groups of {groups.group_size} on {', '.join(self.train_envs.roles)}"
        )

    # --- the loop
    def train(self) -> Iterator[dict[str, Any]]:
        """Run to the end, yielding one row of metrics an iteration (row 0 is the start); resumes if asked to."""
        if self.config.resume:
            yield from self._resume()
        else:
            yield self._start()
        settings = self.config.trainer
        enough = np.inf if settings.stop_at_success is None else settings.stop_at_success
        while self.progress.iteration < settings.iterations and self._success_now() < enough:
            row = self.train_iteration()
            last = self.progress.iteration >= settings.iterations
            improved = False
            if last or self.progress.iteration % settings.eval_every == 0:
                row |= self._validate()
                improved = row["heldout_success"] > self.progress.best_success
                if improved:
                    self.progress = replace(self.progress, best_success=row["heldout_success"])
                last = last or row["heldout_success"] >= enough
            self._report(row)
            if last or improved or self.progress.iteration % settings.save_every == 0:
                self._save(best=improved)
            yield row
        self._finish()

    def _success_now(self) -> float:
        """Held-out success at this iteration, if it was measured."""
        rows = self.folder.read_metrics()
        return float(rows[-1].get("heldout_success", 0.0)) if rows else 0.0

    def train_iteration(self) -> dict[str, Any]:
        """One round of rollouts and one update; returns its metrics."""
        config, iteration = self.config, self.progress.iteration
        self._clock.lap()
        clock = time.perf_counter()
        trajectories, learned, rollouts = self._rollouts(iteration)
        rollout_seconds = time.perf_counter() - clock
        if "engine_busy" not in rollouts:
            rollouts["engine_busy"] = round(self._clock.lap() / rollout_seconds, 4)
        row: dict[str, Any] = {"iteration": iteration + 1, **rollout_metrics(trajectories), **rollouts}
        row |= self._learn(trajectories, learned, iteration)
        tokens = sum(t.n_tokens for t in trajectories)
        self.progress = Progress(
            iteration + 1,
            self.progress.best_success,
            self.progress.episodes + len(trajectories),
            self.progress.tokens + tokens,
        )
        row |= {"episodes": self.progress.episodes, "tokens": self.progress.tokens}
        row["seconds_rollout"] = round(rollout_seconds, 4)
        seconds = time.perf_counter() - clock
        update_seconds = seconds - rollout_seconds
        row["seconds_update"] = round(update_seconds, 4)
        row["tokens_per_second"] = round(tokens / rollout_seconds, 1)
        row["update_tokens_per_second"] = round(row.get("trained_tokens", 0) / update_seconds, 1)
        row["share_rollout"] = round(rollout_seconds / seconds, 4)
        row["share_update"] = round(update_seconds / seconds, 4)
        row["share_idle"] = round(row["share_rollout"] * max(0.0, 1 - row["engine_busy"]), 4)
        if (iteration + 1) % config.trainer.save_trajectories_every == 0 or iteration == 0:
            write_trajectories(
                self.folder.path / "trajectories" / f"train-{iteration + 1:06d}.jsonl", trajectories
            )
        return row

    def evaluate(self, *, greedy: bool = True) -> list[Trajectory]:
        """Play the held-out episodes; the same ones every time."""
        return self._val_collector.collect(0, self.config.agent_proxy.sampling(greedy=greedy))

    # --- parts of an iteration
    def _rollouts(self, iteration: int) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        """Groups of this iteration (with dynamic sampling, until enough have signal), and those to learn from."""
        settings = self.config.algorithm.filter_groups
        played, kept, report = collect_with_signal(
            self._collector,
            iteration,
            self.config.agent_proxy.sampling(),
            max_batches=settings.max_num_gen_batches if settings.enable else 1,
        )
        if settings.max_num_gen_batches > 1 and report.with_signal < len(self._collector.tags):
            logger.info("iteration %d: %s", iteration + 1, report)
        row = report.metrics()
        learned = kept if settings.enable else [t for t in played if t.status == "ok"]
        algorithm = self.config.algorithm
        if algorithm.rollout_filter_ratio < 1:
            learned, filtered = filter_rollouts(
                played, learned, algorithm.rollout_filter_ratio, algorithm.rollout_filter_type
            )
            row |= filtered
        if isinstance(self._collector, ParallelRolloutManager):
            row |= self._collector.report.metrics()
        return played, learned, row

    def _learn(
        self, trajectories: list[Trajectory], learned: list[Trajectory], iteration: int
    ) -> dict[str, float]:
        """Advantages of the groups to learn from, and one update from them."""
        config = self.config
        whole = [t for t in trajectories if t.status == "ok"]
        rewards, groups = [t.reward for t in whole], [t.group for t in whole]
        signal = has_signal(rewards, groups)
        with_signal = {g for g, kept in zip(groups, signal, strict=True) if kept}
        row = {"groups_with_signal": len(with_signal) / max(1, len(set(groups)))}
        row["groups_shaping_only"] = self._shaping_only(whole, with_signal)
        row["groups_trained"] = float(len({t.group for t in learned}))
        if not learned:
            return row
        self._set_rates(iteration)
        reference = self._reference.engine if self._reference else None
        samples = prepare_samples(
            learned, self.engine, self.critic, reference, config.algorithm, config.agent_proxy
        )
        return row | update(
            self.engine,
            self.critic,
            self.optimizer,
            samples,
            config.algorithm,
            config.agent_proxy.temperature,
            config.seed,
            iteration,
        )

    def _set_rates(self, iteration: int) -> None:
        """Learning rates by the schedule, from the number of the iteration alone."""
        algorithm = self.config.algorithm
        progress = iteration / self.config.trainer.iterations
        rates = (algorithm.learning_rate, algorithm.critic.learning_rate)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = decayed(rate, algorithm.lr_schedule, progress)

    def _shaping_only(self, trajectories: list[Trajectory], with_signal: set[int]) -> float:
        """Share of groups whose members differ by format penalty alone; warns once when it is most of them."""
        if self.config.agent_proxy.format_penalty == 0 or not trajectories:
            return 0.0
        invalid = [sum(not turn.action_is_valid for turn in t.turns) for t in trajectories]
        groups = [t.group for t in trajectories]
        shaped = {
            g for g, kept in zip(groups, has_signal(invalid, groups), strict=True) if kept
        } - with_signal
        share = len(shaped) / len(set(groups))
        if share > 0.5 and not self._warned:
            self._warned = True
            logger.warning(
                "%.0f%% of groups differ by the format penalty alone: they teach the format and nothing of the "
                "task. Lower agent_proxy.format_penalty or add warm-up steps.",
                100 * share,
            )
        return share

    # --- beginnings and ends
    def _start(self) -> dict[str, Any]:
        if self.folder.metrics_path.exists():
            raise ConfigError(
                f"{self.folder.path} holds a run already: pass resume=true to go on with it, or another run_dir"
            )
        OmegaConf.save(OmegaConf.create(to_mapping(self.config)), self.folder.path / "config.yaml")
        row: dict[str, Any] = {"iteration": 0}
        losses = list(self._warm_up())
        if losses:
            row["warmup_loss"] = losses[-1]
        if self.critic is not None:
            self.critic.model.load_state_dict(self.engine.model.state_dict())
        if self._reference is not None:
            self._reference.keep(self.engine)
        row |= self._validate()
        self._report(row)
        self._save()
        return row

    def _resume(self) -> Iterator[dict[str, Any]]:
        path = newest_checkpoint(self.folder.path / "checkpoints")
        self.progress = load_checkpoint(
            path, self.engine, self.critic, self.optimizer, self.config.comparable()
        )
        if self._reference is not None:
            self._reference.load(self.config.engine.device)
        self.folder.keep_metrics(lambda row: row["iteration"] <= self.progress.iteration)
        yield from self.folder.read_metrics()

    def _warm_up(self) -> Iterator[float]:
        config = self.config
        if not config.warmup.steps:
            return
        kinds = {tag: config.custom_envs[tag] for tag in self.train_envs.roles}
        makers = {
            tag: (lambda kind=kind: envs.make(kind.env_type, **kind.env_config))
            for tag, kind in kinds.items()
        }
        yield from warm_up(
            self.engine,
            makers,
            self.train_envs.roles,
            self._collector.prompter,
            config.warmup,
            config.algorithm.micro_batch_tokens,
            config.seed,
        )

    def _validate(self) -> dict[str, float]:
        trajectories = self.evaluate()
        name = f"heldout-{self.progress.iteration:06d}.jsonl"
        write_trajectories(self.folder.path / "trajectories" / name, trajectories)
        metrics = rollout_metrics(trajectories)
        kinds = [key for key in metrics if key.startswith("success/")]
        wanted = ("success", "reward", "turns", "valid_actions", *kinds)
        return {f"heldout_{key}": metrics[key] for key in wanted}

    def _report(self, row: dict[str, Any]) -> None:
        self.folder.append_metrics(row)
        self._board.add(row, row["iteration"])
        self._wandb.add(row, row["iteration"])
        if "heldout_success" in row:
            self._draw()

    def _save(self, *, best: bool = False) -> None:
        path = save_checkpoint(
            self.folder.path / "checkpoints",
            self.engine,
            self.critic,
            self.optimizer,
            self.progress,
            self.config.comparable(),
            self.config.trainer.keep_checkpoints,
        )
        if best:
            keep_best(path)
        self.folder.event("checkpoint", step=self.progress.iteration, path=str(path))

    def _finish(self) -> None:
        rows = self.folder.read_metrics()
        held_out = [row for row in rows if "heldout_success" in row]
        final = {key: value for key, value in held_out[-1].items() if key != "iteration"}
        final |= {"best_heldout_success": self.progress.best_success, "iterations": self.progress.iteration}
        self.folder.finish(final)

    def _draw(self) -> None:
        from shoal.train.curves import write_curves

        write_curves(self.folder.read_metrics(), self.folder.path / "curves.png")

    def _make_collector(self, which: str, seed: int) -> TrajectoryCollector | ParallelRolloutManager:
        if self.config.agent_proxy.use_parallel_rollout:
            return ParallelRolloutManager(self.config, self.engine, side=which, seed=seed)
        side = self.train_envs if which == "train" else self.val_envs
        roles = make_roles(self.config.custom_envs, side.tags, self.config.agent_proxy.max_turn)
        return TrajectoryCollector(
            side.pool,
            side.tags,
            roles,
            side.group_size,
            self._clock.around(self.engine),
            self.config.agent_proxy.prompt,
            seed,
        )

    def _action_words(self) -> list[str]:
        roles = {**self.train_envs.roles, **self.val_envs.roles}
        return sorted({word for role in roles.values() for word in role.projection.words()})
