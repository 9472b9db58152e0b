"""What a run of agent training leaves on disk: metrics, curves, trajectories, checkpoints and a summary."""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.configuration import as_yaml, first_change, read_settings, to_mapping
from shoal.core.data import Trajectory, write_advantages, write_trajectories
from shoal.core.errors import ConfigError
from shoal.core.files import remove_leftovers, replacing, write_text
from shoal.core.run_folder import UNFINISHED, Event, RunFolder, finite, read_summary, refuse_missing
from shoal.rollout.journal import Journal
from shoal.train.advice import Advice, Rejected, advise, has_collapsed
from shoal.train.agent.config import DEFAULT_FOLDER, AgentConfig
from shoal.train.agent.run.checkpoint import (
    Progress,
    drop_old,
    list_checkpoints,
    refuse_other_settings,
    with_tokens,
)
from shoal.train.boards import TensorBoard, WandB, draw_curves

logger = logging.getLogger(__name__)
COLLAPSED = (
    "the policy has collapsed: it is sure of answers that do not solve the task, and for 10 iterations hardly a group "
    "had different rewards to learn from; trainer.stop_on_collapse=false resume=true goes on"
)
"""Why a run ended with `trainer.stop_on_collapse`."""
REDRAW = 10.0
"""Seconds between two drawings of the curves: one takes 0.3, which short iterations would wait for."""


def refuse_taken(config: AgentConfig) -> None:
    """Check, before a model is loaded, that the run folder is free, or holds what is to be gone on with.

    Raises:
        ConfigError: the folder holds a run, and `resume` is off.
        DataError: there is no run to go on with, or its newest checkpoint was made with other settings.
    """
    run = Path(config.run_dir or DEFAULT_FOLDER)
    if not config.resume:
        if (run / "metrics.jsonl").exists():
            raise ConfigError(
                f"{run} holds a run already: pass resume=true to go on with it, or another run_dir"
            )
        return
    refuse_missing(run)
    if checkpoints := list_checkpoints(run / "checkpoints"):
        refuse_other_settings(checkpoints[-1], config)


def finished_iterations(config: AgentConfig) -> int:
    """The iterations of a run in this folder that has come to its end; 0 where there is none, or it goes on.

    Raises:
        ConfigError: it was made with other settings.
    """
    run = Path(config.run_dir or DEFAULT_FOLDER)
    if not (run / "summary.json").exists():
        return 0
    summary = read_summary(run)
    done = summary["metrics"].get("iterations")
    if summary.get("status") != "completed" or not isinstance(done, int | float):
        return 0
    begun = AgentConfig.read(read_settings(run / "config.yaml"))
    wanted = with_tokens(config, begun.agent_proxy.max_tokens)
    change = first_change(begun.comparable(), wanted.comparable())
    if change and done >= config.trainer.iterations:
        raise ConfigError(
            f"{run} is a run with other settings that has come to its end: {change}; use another run_dir"
        )
    return int(done)


class Records:
    """Writes the run folder; of several processes of a run the first `writes`, and the others do nothing here."""

    def __init__(self, config: AgentConfig, on_event: Event | None, writes: bool = True) -> None:
        self._config = config
        self._writes = writes
        self.folder = RunFolder(config.run_dir or DEFAULT_FOLDER, "train", config.seed, on_event, lock=writes)
        self.checkpoints = self.folder.path / "checkpoints"
        self._rows: list[dict[str, Any]] = []
        self._advice: list[Advice] = []  # of the rows so far
        self._warned: set[str] = set()  # titles of advice that was logged
        self._drawn, self._is_drawn = time.monotonic(), True
        settings = config.trainer
        self._board = TensorBoard(self.folder.path / "tensorboard", writes and settings.tensorboard)
        wandb, self._settings = writes and settings.wandb, to_mapping(config)
        self._wandb = WandB(self.folder.path, settings.wandb_project, self._settings, wandb)

    def only_begun(self) -> bool:
        """Whether the folder holds a run that ended before its first checkpoint: there is nothing to go on from."""
        if not (self.folder.path / "config.yaml").exists() or list_checkpoints(self.checkpoints):
            return False
        return all(row.get("iteration") == 0 for row in self.folder.read_metrics())

    def begin(self) -> None:
        """Write the config of a new run, or of one that was only begun and is asked to go on.

        Raises:
            ConfigError: the folder holds a run.
        """
        if not self._writes:
            return
        refuse_taken(self._config)
        if self._config.resume:
            self.go_on(-1)
        self._drop_episodes()
        write_text(self.folder.path / "config.yaml", as_yaml(to_mapping(self._config)))

    def go_on(self, iteration: int) -> list[dict[str, Any]]:
        """Drop what was reported after `iteration` and what was half written, and give the rows before."""
        if not self._writes:
            return []
        kept = self.folder.keep_metrics("iteration", iteration)
        for part in ("", "checkpoints", "trajectories", "advantages"):
            remove_leftovers(self.folder.path / part)
        drop_old(self.checkpoints, self._config.trainer.keep_checkpoints)
        self._rows = list(kept)
        self._judge()
        if kept:
            self.folder.add_clocks(kept[-1])
        return kept

    def report(self, row: dict[str, Any], rejected: Rejected | None = None) -> None:
        """Add a row of metrics, and warn of what it shows; at an evaluation, draw the curves if that is long ago.

        The clocks of the run are added to the row; `rejected` is an answer of its iteration without a valid action.
        """
        if not self._writes:
            return
        row |= self.folder.clocks()
        self.folder.append_metrics(row)
        self._rows.append(finite(row))
        self._judge(rejected)
        for advice in self._advice:  # each cause once
            if advice.title not in self._warned:
                self._warned.add(advice.title)
                logger.warning("iteration %d: %s. %s", row["iteration"], advice.title, advice.text)
        self._board.add(row, row["iteration"])
        self._wandb.add(row, row["iteration"])
        self._is_drawn = self._is_drawn and "heldout_success" not in row
        if time.monotonic() - self._drawn >= REDRAW:
            self._draw()

    def _judge(self, rejected: Rejected | None = None) -> None:
        """Find what keeps the run from learning."""
        run = shlex.quote(str(self._config.run_dir or DEFAULT_FOLDER))
        found = advise(self._rows, self._settings, rejected, run)
        self._advice = [advice for advice in found if advice.level == "bad"]

    def _draw(self) -> None:
        if not self._is_drawn:
            write_curves(self.folder.read_metrics(), self.folder.path / "curves.png")
            self._drawn, self._is_drawn = time.monotonic(), True

    def journal(self, settings: Mapping[str, Any], rank: int) -> Journal:
        """Where a process of the run writes episodes down as they end, until a checkpoint holds what they taught."""
        name = UNFINISHED if not rank else f"{UNFINISHED}-{rank}"
        return Journal(self.folder.path / name, settings, self.folder.hold)

    def keep_trajectories(
        self, name: str, trajectories: Sequence[Trajectory], advantages: Sequence[Any] | None = None
    ) -> None:
        """Write `trajectories/<name>.jsonl`, and before it `advantages/<name>.jsonl` if an update computed some."""
        if not self._writes:
            return
        self.folder.hold()
        if advantages is not None:
            write_advantages(self.folder.path / "advantages" / f"{name}.jsonl", advantages)
        write_trajectories(self.folder.path / "trajectories" / f"{name}.jsonl", trajectories)

    def saved(self, path: Path, iteration: int) -> None:
        """Report a checkpoint that was committed."""
        if self._writes:
            self.folder.event("checkpoint", step=iteration, path=str(path))

    def collapsed(self, row: Mapping[str, Any] | None = None) -> bool:
        """Whether the policy has collapsed by the rows so far, and `row`, and the run is to end with that."""
        rows = self._rows if row is None else [*self._rows, row]
        return self._config.trainer.stop_on_collapse and has_collapsed(rows, self._settings)

    def finish(self, progress: Progress) -> None:
        """Draw the last curves and write the summary; a run that was ended because it collapsed has failed."""
        if not self._writes:
            return
        self._draw()
        held_out = [row for row in self.folder.read_metrics() if "heldout_success" in row]
        last = held_out[-1] if held_out else {}  # somebody may have emptied the file
        final = {k: v for k, v in last.items() if k not in ("iteration", "seconds", "cpu_seconds")}
        final |= {"best_heldout_success": progress.best_success, "iterations": progress.iteration}
        advice = [advice._asdict() for advice in self._advice]
        if self.collapsed():
            logger.warning("iteration %d: %s", progress.iteration, COLLAPSED)
            self.folder.finish(final, "failed", error=COLLAPSED, advice=advice)
        else:
            self.folder.finish(final, advice=advice)
        self._drop_episodes()

    def _drop_episodes(self) -> None:
        """Remove what `journal` wrote, of all processes."""
        for path in self.folder.path.glob(f"{UNFINISHED}*"):
            path.unlink()

    def close(self) -> None:
        """Close what is open, the curves of a run that was cut short too; may be called twice."""
        with contextlib.suppress(Exception):  # of a full disk, or of matplotlib that Ctrl-C half imported
            self._draw()
        self._board.close()
        self._wandb.close()
        self.folder.close()


PANELS = (
    ("success rate", (("success", "training, sampled"), ("heldout_success", "held out, greedy"))),
    ("reward per episode", (("reward", "training, sampled"), ("heldout_reward", "held out, greedy"))),
    ("valid actions, groups with different rewards",
     (("valid_actions", "valid actions"), ("groups_with_signal", "groups with different rewards"))),
    ("entropy per token (nats)", (("entropy", "entropy"),)),
)  # fmt: skip


def write_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the metrics rows of a run into a PNG."""
    figure, axes = draw_curves(rows, PANELS, "iteration", "iteration")
    for shares in (axes[0], axes[2]):
        shares.set_ylim(-0.02, 1.02)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", pil_kwargs={"compress_level": 1})
