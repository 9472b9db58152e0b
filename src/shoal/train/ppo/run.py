"""A PPO run with its folder: options, metrics, evaluations, checkpoints, curves, summary, and resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from shoal.core.configuration import as_yaml, check_fields
from shoal.core.errors import ConfigError, DivergedError, EnvError, WorkerError, needs_extra
from shoal.core.files import is_whole, read_json, remove_leftovers, replacing, write_text
from shoal.core.run_folder import FolderLock, RunFolder
from shoal.core.workers import StartMethod
from shoal.envs.catalogue import parse_env_kwargs
from shoal.train.boards import TensorBoard, WandB, draw_curves
from shoal.train.ppo.checkpoint import (
    checkpoint_folder,
    checkpoint_step,
    find_checkpoint,
    list_checkpoints,
    load_run,
    prune_checkpoints,
    save_checkpoint,
)
from shoal.train.ppo.config import BUILT_IN, LARGEST, PPOConfig, read_config
from shoal.train.ppo.ctrl_c import CtrlCWaits

if TYPE_CHECKING:
    from shoal.train.ppo.ppo import PPO, Metrics


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `shoal train-ppo` besides the settings of PPO."""

    env: str = "CartPole-v1"
    """A Gymnasium id, module:Id-v0, or module:Class or module:function of your own environment; or a batch that steps
    its environments itself: ale:ID of ale_py, envpool:ID, jax:ID of gymnax."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment as key=value; values are JSON or plain text."""
    wrapper: tuple[str, ...] = ()
    """Wrapper of the environment; repeatable, the first is innermost."""
    atari: bool = False
    """Standard Atari preprocessing: grey, 84 x 84, four frames an action."""
    frame_stack: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    """Stack this many observations; 0 for no stacking."""
    preset: str = "auto"
    """Tuned settings: "auto" takes those of the env if there are any, "none" takes none, or a name."""
    n_envs: int = 8
    """Environments stepped in parallel."""
    num_workers: int | None = None
    """Worker processes for them; 0 for none, None for the backend's choice."""
    backend: str = "auto"
    """"serial" in this process, "process" in workers, "native" in the environment's own batch, "auto" measures the
    environment and chooses."""
    parallel_start_method: StartMethod | None = None
    """How workers start (default: forkserver)."""
    total_timesteps: Annotated[int, Meta(ge=1)] | None = None
    """Stop after this many env steps of all envs together."""
    num_episodes: Annotated[int, Meta(ge=1)] | None = None
    """Stop after this many finished episodes."""
    stop_at_reward: float | None = None
    """Stop when the mean reward of the last 100 episodes reaches this."""
    seed: int = 0
    """Random seed of the run."""
    device: str = "cpu"
    """cpu, cuda, mps, or auto."""
    path: str = "auto"
    """"compiled" kernels, "torch" autograd, or "auto": kernels for perceptrons on the CPU."""
    run_dir: str | None = None
    """Folder of the run (default: runs/ppo-<env>, numbered when taken)."""
    checkpoint_dir: str | None = None
    """Folder of its checkpoints; None for <run_dir>/checkpoints."""
    checkpoint_every: Annotated[int, Meta(ge=0)] | None = None
    """Env steps between checkpoints; None for a tenth of the run, 0 for only one at the end."""
    keep_checkpoints: Annotated[int, Meta(ge=1)] = 3
    """How many of them stay."""
    resume_from: str | None = None
    """Continue exactly from this checkpoint, or the newest one in this folder or run folder (native batches begin new
    episodes)."""
    eval_every: Annotated[int, Meta(ge=0)] | None = None
    """Env steps between evaluations; None for a tenth of the run, 0 for only one at the end."""
    eval_episodes: Annotated[int, Meta(ge=1)] = 10
    """Episodes of an evaluation, on a single environment of its own."""
    eval_deterministic: bool = True
    """An evaluation takes the likeliest actions; False draws them, as presets of Atari and MiniGrid do."""
    record_video: bool = False
    """Record one episode of the trained policy as video.gif (the environment must render)."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: str | None = None
    """Log to this Weights & Biases project (needs the package wandb)."""
    log_every: Annotated[int, Meta(ge=1)] = 10
    """Updates between rows of metrics.jsonl."""


def saved_options(path: str) -> tuple[RunOptions, PPOConfig]:
    """The options and settings of the run that a checkpoint belongs to, for continuing it."""
    folder = find_checkpoint(path)
    saved = load_run(folder)
    known = {f.name for f in dataclasses.fields(RunOptions)}
    options = {key: value for key, value in saved.training.get("options", {}).items() if key in known}
    options |= {
        "env": saved.policy["env"],
        "seed": saved.training["seed"],
        "n_envs": saved.training["n_envs"],
        "env_kwargs": tuple(f"{k}={json.dumps(v)}" for k, v in saved.policy["env_kwargs"].items()),
        "wrapper": tuple(saved.policy.get("wrappers", ())),
        "atari": saved.policy.get("atari", False),
        "frame_stack": saved.policy.get("frame_stack", 0),
    }
    options |= _places_of(folder, apart=options.get("checkpoint_dir") is not None)
    return RunOptions(**{**options, "resume_from": str(folder)}), read_config(saved.training["config"])


def _places_of(checkpoint: Path, *, apart: bool) -> dict[str, str]:
    """Where the run of a checkpoint lies now: it may have been moved or copied, or named from another folder.

    Args:
        checkpoint: of the run.
        apart: whether the run keeps its checkpoints outside its folder.
    """
    kept = Path(os.path.abspath(checkpoint.parent))
    told = str if checkpoint.is_absolute() else os.path.relpath
    if apart and kept.name not in ("best", "emergency"):
        return {"checkpoint_dir": told(kept)}
    if kept.name not in ("checkpoints", "best", "emergency") or not (kept.parent / "config.yaml").exists():
        return {}  # a checkpoint that stands alone: the run is where it was
    return {"run_dir": told(kept.parent)}


def safe_name(env: str) -> str:
    """An environment's name as a part of a folder's name."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in env)[:48].strip("-.") or "env"


logger = logging.getLogger(__name__)


@dataclass
class PPORun:
    """One run in its folder. Iterate over `rows()`, then look at `summary`."""

    options: RunOptions
    config: PPOConfig
    on_event: Callable[[dict[str, Any]], None] | None = None
    ppo: PPO = field(init=False)
    summary: dict[str, Any] = field(default_factory=dict, init=False)
    trained: bool = field(default=False, init=False)
    """Whether this call made any update; a run that is resumed at its end makes none."""

    def __post_init__(self) -> None:
        options = self.options
        if options.total_timesteps is None and options.num_episodes is None:
            raise ConfigError("say how long to train: --total-timesteps or --num-episodes")
        check_fields(options)
        self.path = Path(options.run_dir or f"runs/ppo-{safe_name(options.env)}")
        self.checkpoints = Path(options.checkpoint_dir or self.path / "checkpoints")
        self._open_things = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Hold the folder, then read what is in it; a folder that is not there is made last, if all is well."""
        made = self.path.exists()
        if made:
            self._hold()
        self._check_room()
        self.ppo = self._make()
        self._open_things.callback(self.ppo.close)
        if self.options.record_video:
            dataclasses.replace(self.ppo.factory, stream="eval").check_rendering()
        if not made:
            self._hold()
        options = self.options
        best, kept = self._resumed.get("best"), self.path / "best"
        if best is not None and not any(map(is_whole, list_checkpoints(kept))):
            logger.warning("%s holds no whole checkpoint: that of the next evaluation is kept there", kept)
            best = None
        self._best = -math.inf if best is None else float(best)
        self._last_eval: Metrics = {}
        told, project = dataclasses.asdict(options), options.wandb or ""
        wandb = WandB(self.path, project, told, bool(project), "--wandb")
        self._boards = TensorBoard(self.path / "tensorboard", options.tensorboard), wandb
        for board in self._boards:
            self._open_things.callback(board.close)

    def _hold(self) -> None:
        self.folder = RunFolder(self.path, "train-ppo", self.options.seed, self.on_event)
        self._open_things.callback(self.folder.close)
        if not self.checkpoints.resolve().is_relative_to(self.path.resolve()):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.checkpoints / ".lock", "another train-ppo")
            lock.take()
            self._open_things.callback(lock.release)

    def _check_room(self) -> None:
        """Refuse a folder whose checkpoints are later than what is to be written: they would be taken for newer.

        Broken ones are put aside under another name.
        """
        there = list_checkpoints(self.checkpoints)
        if self.options.resume_from is None:
            if there:
                raise ConfigError(
                    f"{self.checkpoints} holds a run of {checkpoint_step(there[-1])} steps: go on with it by "
                    f"--resume-from {self.path}, or take another --run-dir"
                )
            return
        found = find_checkpoint(self.options.resume_from)
        for other in there:
            if checkpoint_step(other) <= checkpoint_step(found):
                continue
            if not is_whole(other):
                aside = other.with_name(f"broken-{other.name}")
                logger.warning("%s is broken and is put aside as %s", other, aside)
                shutil.rmtree(aside, ignore_errors=True)
                other.rename(aside)
                continue
            raise ConfigError(
                f"{other.name} is later than {found}, from which to go on: give the branch a --run-dir of its own, "
                f"or leave the earlier one out: --resume-from {self.path}"
            )

    def rows(self) -> Iterator[Metrics]:
        """Train; yields the metrics of every update, with evaluations where there were any.

        Ctrl-C waits for the update in progress and its evaluation, then a checkpoint is saved; a second one ends at
        once. On NaN or a failed environment an emergency checkpoint of the last good weights is saved, then the error
        goes on.
        """
        ppo, options = self.ppo, self.options
        if self.is_done:
            return
        for folder in (self.path, self.path / "best", self.path / "emergency", self.checkpoints):
            remove_leftovers(folder)  # of killed writers: this run alone writes there now
        settings = {**dataclasses.asdict(options), "ppo": dataclasses.asdict(ppo.config)}
        write_text(self.path / "config.yaml", as_yaml(settings))
        steps = ppo.log.n_steps
        self.folder.keep_metrics("steps", steps)
        episodes = ppo.log.n_episodes
        row: Metrics = {}
        try:
            with CtrlCWaits() as ctrl_c:
                updates = ppo.updates_until(options.total_timesteps, options.num_episodes)
                for row in () if self._ended else updates:
                    self.trained = True
                    last = self._ended
                    if last or self._is_due(options.eval_every, steps, episodes):
                        row |= self._evaluate()
                    self._report(row)
                    if self._is_due(options.checkpoint_every, steps, episodes):
                        self._save()
                    steps, episodes = ppo.log.n_steps, ppo.log.n_episodes
                    yield row
                    if last:
                        break
                    if ctrl_c.came:
                        self._save()
                        self._finish(row, "interrupted")
                        ctrl_c.pass_on()
        except (EnvError, DivergedError, WorkerError) as error:
            self._emergency(error)
            raise
        if self.trained or not checkpoint_folder(self.checkpoints, ppo.log.n_steps).exists():
            self._save()
        if not self.trained:
            self._evaluate()
        if options.record_video:
            frames: list[Any] = []
            ppo.evaluate(1, deterministic=options.eval_deterministic, frames=frames)
            write_video(self.path / "video.gif", frames)
        self._finish(row, "completed")

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train or to write: the run was resumed at its end."""
        if not self._ended or self.options.resume_from is None:
            return False
        before = self._resumed.get("options", {})
        now = self.options.eval_episodes, self.options.eval_deterministic
        if (before.get("eval_episodes"), before.get("eval_deterministic", True)) != now:
            return False
        if self.options.record_video and not (self.path / "video.gif").exists():
            return False
        path = self.path / "summary.json"
        summary = read_json(path) if path.exists() else {}
        if not isinstance(summary, dict):
            return False
        same = summary.get("metrics", {}).get("steps") == self.ppo.log.n_steps
        if summary.get("status") != "completed" or not same:
            return False
        self.summary = summary
        return True

    @property
    def _ended(self) -> bool:
        """Whether the run has all it was to have: steps or episodes, or the reward."""
        goal, log = self.options.stop_at_reward, self.ppo.log
        reached = goal is not None and len(log.recent) == 100 and log.mean_reward >= goal
        return reached or self.ppo.progress(self.options.total_timesteps, self.options.num_episodes) >= 1.0

    def _is_due(self, every: int | None, steps: int, episodes: int) -> bool:
        """Whether a multiple of `every` steps, or of a tenth of the run, was passed since `steps` and `episodes`."""
        options, log = self.options, self.ppo.log
        if every is not None:
            return _passed(every, steps, log.n_steps)
        tenth, of_episodes = (options.total_timesteps or 0) // 10, (options.num_episodes or 0) // 10
        return _passed(tenth, steps, log.n_steps) or _passed(of_episodes, episodes, log.n_episodes)

    def close(self) -> None:
        """End workers and writers."""
        self._open_things.close()

    def _make(self) -> PPO:
        from shoal.train.ppo.ppo import PPO

        options = self.options
        self._resumed: dict[str, Any] = {}
        """What the checkpoint says of the training, of a run that goes on."""
        places: dict[str, Any] = {
            "backend": options.backend, "num_workers": options.num_workers,
            "start_method": options.parallel_start_method, "device": options.device,
            "env_kwargs": parse_env_kwargs(options.env_kwargs), "wrappers": options.wrapper,
        }  # fmt: skip
        if options.resume_from is None:
            return PPO(
                options.env, n_envs=options.n_envs, seed=options.seed, config=self.config, path=options.path,
                preset="none", atari=options.atari, frame_stack=options.frame_stack, **places,
            )  # fmt: skip
        ppo = PPO.load(options.resume_from, options.env, path=options.path, **places)
        if (ppo.seed, ppo.n_envs) != (options.seed, options.n_envs):
            raise ConfigError(
                f"the checkpoint was made with --seed {ppo.seed} --n-envs {ppo.n_envs}, got "
                f"--seed {options.seed} --n-envs {options.n_envs}; leave them out to continue"
            )
        checkpoint = load_run(options.resume_from)
        saved, self._resumed = checkpoint.policy, checkpoint.training
        changed = [
            f.name for f in dataclasses.fields(PPOConfig)
            if getattr(ppo.config, f.name) != getattr(self.config, f.name)
        ]  # fmt: skip
        for flag, was, now in (
            ("preset", self._resumed.get("options", {}).get("preset", options.preset), options.preset),
            ("env-kwargs", saved["env_kwargs"], places["env_kwargs"]),
            ("atari", saved.get("atari", False), options.atari),
            ("frame-stack", saved.get("frame_stack", 0), options.frame_stack),
            *((name, getattr(ppo.config, name), getattr(self.config, name)) for name in BUILT_IN),
        ):
            if was != now:
                raise ConfigError(
                    f"the checkpoint was made with --{flag.replace('_', '-')} {was}, got {now}; leave it out to "
                    "continue"
                )
        if changed:
            names = ", ".join(changed)
            logger.warning("continuing with changed %s: no longer the same run bit for bit", names)
            ppo.config = self.config
            ppo.agent.go_on_with(self.config)
        return ppo

    def _evaluate(self) -> Metrics:
        result = self.ppo.evaluate(self.options.eval_episodes, deterministic=self.options.eval_deterministic)
        self._last_eval = {"eval_return_mean": result.mean, "eval_return_std": result.std}
        if result.mean > self._best:
            folder = checkpoint_folder(self.path / "best", self.ppo.log.n_steps)
            told = {**self._told(), "best": result.mean}
            save_checkpoint(folder, self.ppo.checkpoint(eval_return_mean=result.mean, **told))
            self._best = result.mean
            for other in list_checkpoints(folder.parent):  # a later one is of a future that a killed run lost
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        return dict(self._last_eval)

    def _told(self) -> dict[str, Any]:
        """What a checkpoint has to say for its run to go on as it was."""
        best = self._best if math.isfinite(self._best) else None
        return {"options": dataclasses.asdict(self.options), "best": best}

    def _save(self) -> Path:
        folder = self.ppo.save(self.checkpoints, **self._told())
        prune_checkpoints(self.checkpoints, self.options.keep_checkpoints)
        self.folder.event("checkpoint", step=self.ppo.log.n_steps, path=str(folder))
        return folder

    def _emergency(self, error: Exception) -> None:
        """Keep the last good weights, where no later checkpoint overwrites or prunes them.

        A full disk does not hide `error`.
        """
        try:
            folder = self.ppo.save(self.path / "emergency", error=str(error), **self._told())
            self.folder.event("emergency", step=self.ppo.log.n_steps, path=str(folder))
            logger.error("training stopped; the last good weights are in %s", folder)
            self._finish({}, "failed")
        except OSError as other:
            logger.error("training stopped, and the last good weights could not be saved: %s", other)

    def _report(self, row: Metrics) -> None:
        """Add the row of an update if it is wanted."""
        if "eval_return_mean" in row or self.ppo.agent.iteration % self.options.log_every == 0:
            self.folder.append_metrics(row)
            numbers = {f"ppo/{key}": value for key, value in row.items() if math.isfinite(value)}
            for board in self._boards:
                board.add(numbers, int(row["steps"]))

    def _finish(self, row: Metrics, status: str) -> None:
        if rows := self.folder.read_metrics():
            title = f"PPO on {self.options.env}, seed {self.options.seed}"
            write_ppo_curves(rows, self.path / "curves.png", title)
        ppo, log = self.ppo, self.ppo.log
        metrics: dict[str, Any] = {
            "steps": log.n_steps, "episodes": log.n_episodes, "iteration": ppo.agent.iteration,
            **({"steps_per_second": row["steps_per_second"]} if row else {}),
            "reward_mean": log.mean_reward, "length_mean": log.mean_length, **self._last_eval,
            "n_envs": ppo.n_envs, "workers": ppo.workers, "path": ppo.path,
        }  # fmt: skip
        self.summary = self.folder.finish(metrics, status)


def _passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]; it depends on steps, or episodes, only."""
    return every > 0 and now // every > before // every


PANELS = (
    ("reward per episode", (("reward", "finished in the rollout"), ("reward_mean", "mean of the last 100"),
                            ("eval_return_mean", "evaluation"))),
    ("episode length", (("length_mean", "mean of the last 100"),)),
    ("entropy, explained variance",
     (("entropy", "entropy (nats)"), ("explained_variance", "explained variance"))),
    ("size of the updates", (("approx_kl", "KL"), ("clip_fraction", "clipped fraction"))),
)  # fmt: skip


def write_ppo_curves(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the metrics of a run over its env steps into a PNG."""
    figure, axes = draw_curves(rows, PANELS, "steps", "environment steps", title, faint="reward")
    axes[2].set_ylim(bottom=max(-1.05, axes[2].get_ylim()[0]))
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", pil_kwargs={"compress_level": 1})


def write_video(path: Path, frames: list[Any]) -> None:
    """Write frames `[H, W, 3]` as an animated GIF of 30 a second; every second one is kept when there are many."""
    with needs_extra("recording video", "vision"):
        from PIL import Image
    stride = max(1, len(frames) // 300)
    pictures = [Image.fromarray(np.asarray(frame, np.uint8)) for frame in frames[::stride]]
    if not pictures:
        raise EnvError("the environment rendered no frames")
    path.parent.mkdir(parents=True, exist_ok=True)
    duration = int(1000 * stride / 30)
    with replacing(path) as temporary:
        film = {"save_all": True, "append_images": pictures[1:], "duration": duration, "loop": 0}
        pictures[0].save(temporary, format="GIF", **film)
