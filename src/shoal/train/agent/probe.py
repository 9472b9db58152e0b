"""Whether a model needs a warm-up: a few episodes played as in training, before anything is learned."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shoal.rollout.episode import Role
from shoal.train.agent.config import AgentConfig
from shoal.train.agent.playing import SharedCollector, refuse_all_failed

logger = logging.getLogger(__name__)
PROBE_TURNS = 64
ENOUGH = 0.5
"""Share of answers that hold an action from which on there is no warm-up."""
AUTO_STEPS = 20


def warmup_steps(
    config: AgentConfig, collector: SharedCollector, roles: Mapping[str, Role]
) -> tuple[int, dict[str, float]]:
    """How many steps of warm-up there are, and what is reported of the probe where one was needed to know it."""
    if config.warmup.steps != "auto":
        return config.warmup.steps, {}
    valid, turns = probe(config, collector)
    found = {"probe_valid_actions": valid / max(1, turns)}
    told = f"probe: {valid} of {turns} answers held an action"
    if valid >= ENOUGH * turns:
        return 0, found
    free = (
        [] if config.warmup.expert else sorted(tag for tag, role in roles.items() if not role.draws_actions)
    )
    if free:
        logger.warning(
            "%s, and there is no warm-up: the actions of %s are free text, of which none can be drawn. Show the form "
            "of an answer in agent_proxy.prompt, or give the env a random_action()",
            told,
            ", ".join(free),
        )
        return 0, found
    logger.warning("%s; warming up %d steps on valid ones; warmup.steps=0 switches it off", told, AUTO_STEPS)
    return AUTO_STEPS, found


def probe(config: AgentConfig, collector: SharedCollector) -> tuple[int, int]:
    """How many answers held an action, of how many: whole groups, all kinds of envs in turn, until there are enough."""
    n, played = len(collector.tags), []
    for group in range(n, 2 * n):  # from n on the kinds of envs take turns
        played += collector.collect(0, config.agent_proxy.sampling(), first_group=group, n_groups=1)
        turns = [turn for trajectory in played for turn in trajectory.turns]
        if len(turns) >= PROBE_TURNS:
            break
    refuse_all_failed(played, "the probe before the warm-up")
    return sum(turn.action is not None for turn in turns), len(turns)
