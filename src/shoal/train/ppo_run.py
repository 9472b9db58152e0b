"""A PPO run with its folder: metrics, evaluations, checkpoints, curves, summary, and resuming."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DivergedError, EnvError, WorkerError
from shoal.core.files import remove_leftovers, write_text
from shoal.core.run_folder import RunFolder
from shoal.envs.catalogue import parse_env_kwargs
from shoal.train.ppo import PPO, Metrics
from shoal.train.ppo_checkpoints import (
    checkpoint_folder,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from shoal.train.ppo_config import PPOConfig
from shoal.train.ppo_curves import write_ppo_curves
from shoal.train.ppo_evaluation import write_video
from shoal.train.ppo_options import RunOptions, safe_name
from shoal.train.tensorboard import TensorBoard
from shoal.train.wandb_log import WandB

logger = logging.getLogger(__name__)


@dataclass
class PPORun:
    """One run in its folder. Iterate over `rows()`, then look at `summary`."""

    options: RunOptions
    config: PPOConfig
    on_event: Callable[[dict[str, Any]], None] | None = None
    summary: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        options = self.options
        if options.total_timesteps is None and options.num_episodes is None:
            raise ConfigError("say how long to train: --total-timesteps or --num-episodes")
        for name, least in (("log_every", 1), ("eval_episodes", 1), ("keep_checkpoints", 1)):
            if getattr(options, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(options, name)}")
        self.path = Path(options.run_dir or f"runs/ppo-{safe_name(options.env)}")
        self.checkpoints = Path(options.checkpoint_dir or self.path / "checkpoints")
        self.ppo = self._make()
        try:
            self.folder = RunFolder(self.path, "train-ppo", options.seed, self.on_event)
        except BaseException:
            self.ppo.close()
            raise
        self._best = self._best_so_far()
        self._last_eval: Metrics = {}
        self._boards = (
            TensorBoard(self.path / "tensorboard", options.tensorboard),
            WandB(
                self.path, options.wandb or "", dataclasses.asdict(options), bool(options.wandb), "--wandb"
            ),
        )

    def rows(self) -> Iterator[Metrics]:
        """Train; yields the metrics of every update, with evaluations where there were any.

        On NaN or a failed environment an emergency checkpoint of the last good weights is saved, then the error
        goes on.
        """
        ppo, options = self.ppo, self.options
        self._sweep()
        self._write_settings()
        steps = ppo.log.n_steps
        self.folder.keep_metrics(lambda row: row["steps"] <= steps)
        share = (options.total_timesteps or 0) // 10
        every_eval = share if options.eval_every is None else options.eval_every
        every_save = share if options.checkpoint_every is None else options.checkpoint_every
        status = "completed"
        row: Metrics = {}
        try:
            for row in ppo.updates(options.total_timesteps, num_episodes=options.num_episodes):
                now = int(row["steps"])
                if _passed(every_eval, steps, now):
                    row |= self._evaluate()
                if _passed(every_save, steps, now):
                    self._save()
                steps = now
                self._report(row)
                yield row
                if self._reached(row):
                    break
        except (EnvError, DivergedError, WorkerError) as error:
            self._emergency(error)
            raise
        except (KeyboardInterrupt, GeneratorExit):
            status = "interrupted"
            raise
        finally:
            if status == "interrupted":
                self._save()
                self._finish(row, status)
        if not row:
            row = {"steps": ppo.log.n_steps, "episodes": ppo.log.n_episodes}
        self._save()
        if "eval_return_mean" not in row:
            row |= self._evaluate()
            self._report(row)
        if options.record_video:
            self._record()
        self._finish(row, status)

    def close(self) -> None:
        """End workers and writers."""
        self.ppo.close()
        for board in self._boards:
            board.close()
        self.folder.close()

    def _make(self) -> PPO:
        options = self.options
        places: dict[str, Any] = {
            "backend": options.backend, "num_workers": options.num_workers,
            "start_method": options.parallel_start_method, "device": options.device,
            "env_kwargs": parse_env_kwargs(options.env_kwargs), "wrappers": options.wrapper,
        }  # fmt: skip
        if options.resume_from is None:
            return PPO(
                options.env, n_envs=options.n_envs, seed=options.seed, config=self.config, path=options.path,
                **places,
            )  # fmt: skip
        ppo = PPO.load(options.resume_from, options.env, path=options.path, **places)
        if (ppo.seed, ppo.n_envs) != (options.seed, options.n_envs):
            raise ConfigError(
                f"the checkpoint was made with --seed {ppo.seed} --n-envs {ppo.n_envs}, got "
                f"--seed {options.seed} --n-envs {options.n_envs}; leave them out to continue"
            )
        saved = load_checkpoint(options.resume_from).policy["env_kwargs"]
        if places["env_kwargs"] != saved:
            raise ConfigError(
                f"the checkpoint was made with --env-kwargs {saved}, got {places['env_kwargs']}; leave them out "
                f"to continue"
            )
        if ppo.config != self.config:
            changed = [
                f.name for f in dataclasses.fields(PPOConfig)
                if getattr(ppo.config, f.name) != getattr(self.config, f.name)
            ]  # fmt: skip
            logger.warning(
                "continuing with changed %s: no longer the same run bit for bit", ", ".join(changed)
            )
            ppo.config = ppo.agent.config = self.config
        return ppo

    def _best_so_far(self) -> float:
        if self.options.resume_from is None:
            return -math.inf
        best = load_checkpoint(self.options.resume_from).training.get("best")
        return -math.inf if best is None else float(best)

    def _evaluate(self) -> Metrics:
        result = self.ppo.evaluate(self.options.eval_episodes)
        self._last_eval = {"eval_return_mean": result.mean, "eval_return_std": result.std}
        if result.mean > self._best:
            self._best = result.mean
            folder = checkpoint_folder(self.path / "best", self.ppo.log.n_steps)
            save_checkpoint(folder, self.ppo.checkpoint(eval_return_mean=result.mean))
            prune_checkpoints(self.path / "best", 1)
        return dict(self._last_eval)

    def _save(self) -> Path:
        folder = self.ppo.save(
            self.checkpoints, options=dataclasses.asdict(self.options), best=_finite(self._best)
        )
        prune_checkpoints(self.checkpoints, self.options.keep_checkpoints)
        self.folder.event("checkpoint", step=self.ppo.log.n_steps, path=str(folder))
        return folder

    def _emergency(self, error: Exception) -> None:
        """Keep the last good weights, where no later checkpoint overwrites or prunes them."""
        folder = self.ppo.save(self.path / "emergency", error=str(error))
        self.folder.event("emergency", step=self.ppo.log.n_steps, path=str(folder))
        logger.error("training stopped; the last good weights are in %s", folder)
        self._finish({}, "failed")

    def _report(self, row: Metrics) -> None:
        if "eval_return_mean" in row or self.ppo.agent.iteration % self.options.log_every == 0:
            self.folder.append_metrics(row)
            numbers = {f"ppo/{key}": value for key, value in row.items() if math.isfinite(value)}
            for board in self._boards:
                board.add(numbers, int(row["steps"]))

    def _reached(self, row: Metrics) -> bool:
        goal = self.options.stop_at_reward
        return goal is not None and len(self.ppo.log.recent) == 100 and row["reward_mean"] >= goal

    def _record(self) -> None:
        frames: list[Any] = []
        self.ppo.evaluate(1, frames=frames)
        write_video(self.path / "video.gif", frames)

    def _finish(self, row: Metrics, status: str) -> None:
        rows = self.folder.read_metrics()
        if rows:
            write_ppo_curves(
                rows, self.path / "curves.png", f"PPO on {self.options.env}, seed {self.options.seed}"
            )
        wanted = ("steps", "episodes", "iteration", "steps_per_second", "reward_mean", "length_mean")
        metrics: dict[str, Any] = {key: row[key] for key in wanted if key in row}
        metrics |= self._last_eval
        metrics |= {"n_envs": self.ppo.n_envs, "workers": self.ppo.workers, "path": self.ppo.path}
        self.summary = self.folder.finish(metrics, status)

    def _sweep(self) -> None:
        """Remove what killed writers left, in the folders that this run alone writes."""
        remove_leftovers(self.path)
        remove_leftovers(self.path / "best")
        if self.checkpoints.resolve().is_relative_to(self.path.resolve()):
            remove_leftovers(self.checkpoints)

    def _write_settings(self) -> None:
        from omegaconf import OmegaConf

        settings = {**dataclasses.asdict(self.options), "ppo": dataclasses.asdict(self.ppo.config)}
        settings["ppo"]["hidden"] = list(settings["ppo"]["hidden"])
        settings |= {key: list(value) for key, value in settings.items() if isinstance(value, tuple)}
        write_text(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(settings)))


def _passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]; it depends on steps only."""
    return every > 0 and now // every > before // every


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
