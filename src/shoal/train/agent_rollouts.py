"""The episodes of an iteration: groups played, filtered, and those of them to learn from."""

from __future__ import annotations

import logging

from shoal.core.data import Trajectory
from shoal.rollout.collector import collect_with_signal
from shoal.train.agent_config import AgentConfig
from shoal.train.rollout_filter import filter_rollouts
from shoal.train.shared_collector import SharedCollector, refuse_all_failed

logger = logging.getLogger(__name__)


def play_groups(
    collector: SharedCollector, iteration: int, config: AgentConfig
) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
    """Groups of this iteration (with dynamic sampling, until enough have signal), those to learn from, and metrics."""
    algorithm, settings = config.algorithm, config.algorithm.filter_groups
    collector.lap()
    played, kept, report = collect_with_signal(
        collector,
        iteration,
        config.agent_proxy.sampling(),
        max_batches=settings.max_num_gen_batches if settings.enable else 1,
    )
    refuse_all_failed(played, f"iteration {iteration + 1}")
    if settings.max_num_gen_batches > 1 and report.with_signal < len(collector.tags):
        logger.info("iteration %d: %s", iteration + 1, report)
    row = report.metrics() | collector.lap()
    learned = kept if settings.enable else [t for t in played if t.status == "ok"]
    if algorithm.rollout_filter_ratio < 1:
        learned, filtered = filter_rollouts(
            played, learned, algorithm.rollout_filter_ratio, algorithm.rollout_filter_type
        )
        row |= filtered
    return played, learned, row
