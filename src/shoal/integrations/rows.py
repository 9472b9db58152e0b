"""What other trainers train on: prompt, response and a mask of what the model wrote, as plain numbers.

A row is a stretch of context in which every prompt extends the tokens before it (`shoal.train.agent.batch.samples`): a
whole episode when prompts grow (`prompt.mode: append`), a turn when each is a fresh chat (`window`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError
from shoal.rollout.settings import RolloutConfig, rollout_config
from shoal.train.agent.batch.samples import make_samples


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One stretch of context: the prompt up to the first token the model wrote, and all that follows."""

    prompt_ids: list[int]
    response_ids: list[int]  # what the model wrote and what it was told in between
    mask: list[int]  # 1 where the model wrote
    logprobs: list[float]  # of the written tokens as sampled, 0 elsewhere
    # what a turn was paid, at its last token or, if it has none, at the one before; else 0
    rewards: list[float]
    first_turn: int
    turn_lengths: tuple[int, ...]  # tokens that the model wrote in each turn of the row

    @property
    def n_turns(self) -> int:
        """Turns of the row."""
        return len(self.turn_lengths)


def token_rows(trajectory: Trajectory) -> Iterator[TokenRow]:
    """The rows of a trajectory; every token that the model wrote is in exactly one of them."""
    taken = 0
    for sample in make_samples(trajectory):
        start = int(sample.trained[0])
        rest = len(sample.ids) - start
        mask, logprobs, rewards = [0] * rest, [0.0] * rest, [0.0] * rest
        for place, logprob in zip(sample.trained, sample.columns["rollout_logprobs"], strict=True):
            mask[place - start], logprobs[place - start] = 1, float(logprob)
        first, written = taken, 0
        for turn in trajectory.turns[first:]:
            length = len(trajectory.call_of(turn).response_ids)
            if written == len(sample.trained) and length:
                break
            written += length
            rewards[int(sample.trained[max(written - 1, 0)]) - start] += turn.reward
            taken += 1
        lengths = tuple(trajectory.response_lengths[first:taken])
        ids = list(sample.ids)
        yield TokenRow(ids[:start], ids[start:], mask, logprobs, rewards, first, lengths)


def row_of_nothing(end: int) -> TokenRow:
    """An end token of which nothing is learned, for an episode in which the model wrote nothing."""
    return TokenRow([end], [end], [0], [0.0], [0.0], 0, ())


def bridge_config(config: Any) -> RolloutConfig:
    """The rollout's settings for a trainer that picks the episodes itself: `custom_envs` may stand alone."""
    if isinstance(config, Mapping) and "es_manager" not in config:
        tags = list(config.get("custom_envs") or {})
        groups = {"env_groups": max(1, len(tags)), "group_size": 1, "env_configs": {"tags": tags}}
        config = {**config, "es_manager": {"train": groups, "val": groups}}
    checked = rollout_config(config)
    if not checked.custom_envs:
        raise ConfigError("custom_envs must name at least one kind of env, got none")
    return checked


def require_whole_episodes(config: RolloutConfig) -> None:
    """Raise a `ConfigError` unless each episode of this config is one row."""
    if config.agent_proxy.prompt.mode != "append":
        raise ConfigError(
            "this trainer takes one row of tokens an episode: set agent_proxy.prompt.mode=append, "
            f"got {config.agent_proxy.prompt.mode!r}"
        )
