"""Supervised warm-up of a fresh model: on random valid actions it learns the format and nothing else.

Where the config says so, a share of the actions is the env's expert's, and the model starts as its imitator.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, DivergedError, EnvError
from shoal.core.seeding import derive_seed
from shoal.envs import TextEnv
from shoal.maths.updates import decayed
from shoal.rollout.coach import Coach, CoachedEnv
from shoal.rollout.collector import TrajectoryCollector
from shoal.rollout.episode import EpisodeId, Role
from shoal.rollout.factory import VectorConfig, make_pool
from shoal.rollout.failures import FailureLog
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.sampler import Sampling
from shoal.train.agent.batch import Batching, Sample, make_samples, micro_batches
from shoal.train.agent.config import Warmup
from shoal.train.agent.policy import Policy, score, trained_parameters
from shoal.train.agent.update import refuse_diverged
from shoal.train.optimizers import MasterAdamW

PLAIN = Sampling()
ANY_LENGTH = Sampling(2**20)
"""An answer of the env's expert may be longer than those that the model may write."""
ABREAST = 32
"""Episodes that are played at once."""
MOST_HUNG = 8
"""Episodes whose env did not answer in time, with which it is given up: each costs the whole limit."""
MOST_LOST = 16
"""Episodes of an env left out one after another, with which it is given up."""


def warm_up(
    policy: Policy,
    makers: Mapping[str, Callable[[], TextEnv[Any]]],
    roles: Mapping[str, Role],
    prompter: Prompter,
    config: Warmup,
    micro_batch_tokens: int,
    seed: int,
    share: float = 1.0,
    vector: VectorConfig | None = None,
    failures: FailureLog | None = None,
    sampling: Sampling = PLAIN,
) -> Iterator[float]:
    """Train `policy` on random or expert play of the envs; yields the loss of each step (nats a token).

    `share` is this process's part of a gradient that several compute alike and sum; `vector` says where the envs
    live, worker processes if not given; `failures` warns of episodes that fail; `sampling` says how answers end.
    """
    steps = config.steps
    if steps == "auto":
        raise ConfigError("warmup.steps=auto must be a number by now: see shoal.train.agent.probe")
    plays_of = warmup_samples(policy, makers, roles, prompter, config, seed, vector, failures, sampling)
    with plays_of as plays:
        parameters = trained_parameters(policy.module)
        optimizer = MasterAdamW([{"params": parameters, "lr": config.learning_rate}])
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = decayed(config.learning_rate, config.lr_schedule, step / steps)
            samples = [next(plays[(step + i) % len(plays)]) for i in range(config.batch_size)]
            total = imitation_gradient(policy, optimizer, samples, micro_batch_tokens, share)
            if not math.isfinite(total):
                raise DivergedError(
                    f"the loss of warm-up step {step + 1} is {total}: lower warmup.learning_rate"
                )
            longest = math.inf if config.max_grad_norm is None else config.max_grad_norm
            norm = nn.utils.clip_grad_norm_(optimizer.stepped[0], longest)
            refuse_diverged(norm, f"policy in warm-up step {step + 1}")
            optimizer.step()
            yield total


def imitation_gradient(
    policy: Policy, optimizer: MasterAdamW, samples: Sequence[Sample], micro_batch_tokens: int, scale: float
) -> float:
    """Put the gradient of the cross-entropy times `scale` in place of any other; gives the mean in nats a token."""
    device = str(next(policy.module.parameters()).device)
    n_tokens = sum(len(sample.places) for sample in samples)
    how: Batching = "auto" if policy.merges_equals else "bucketed"
    sharing = (True, True, policy.costs)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for micro in micro_batches(samples, micro_batch_tokens, policy.pad_id, device, how, *sharing):
        loss = -score(policy, micro, 1.0).logprobs.sum() / n_tokens
        (scale * loss).backward()  # type: ignore[no-untyped-call]
        optimizer.take_gradients()
        total += float(loss.detach())
    return total


@contextmanager
def warmup_samples(
    policy: Policy,
    makers: Mapping[str, Callable[[], TextEnv[Any]]],
    roles: Mapping[str, Role],
    prompter: Prompter,
    config: Warmup,
    seed: int,
    vector: VectorConfig | None = None,
    failures: FailureLog | None = None,
    sampling: Sampling = PLAIN,
) -> Iterator[list[Iterator[Sample]]]:
    """For each kind of env, by the alphabet, what is learned from: samples without end, of one episode after another.

    An episode whose env fails is played once more, and then left out.

    Raises:
        EnvError: an env always fails.
    """
    tags, each = sorted(makers), max(1, ABREAST // len(makers))
    expert = config.expert, config.only_expert
    coached = [partial(CoachedEnv, makers[tag], seed, tag, *expert) for tag in tags for _ in range(each)]
    pool = make_pool(coached, vector or VectorConfig())
    coach = Coach(pool, roles, prompter, sampling, policy.context)
    collector = TrajectoryCollector(coach, tags, roles, each, coach, prompter.config, seed, failures=failures)
    try:
        yield [
            _play(collector, coach, roles[tag], range(k * each, (k + 1) * each), seed, policy)
            for k, tag in enumerate(tags)
        ]
    finally:
        coach.close()


def _play(
    collector: TrajectoryCollector,
    coach: Coach,
    role: Role,
    envs: range,
    seed: int,
    policy: Policy,
) -> Iterator[Sample]:
    """Samples of the episodes of one kind, which these envs play a few at a time."""
    tag, lost, hung = role.tag, 0, 0
    for first in itertools.count(step=len(envs)):
        places = {}
        for i, number in enumerate(range(first, first + len(envs)), start=envs.start):
            env_seed = derive_seed(seed, "warmup-env", tag, number)
            places[i] = EpisodeId(seed, 0, number, envs.start, env_seed), tag
        coach.expect(places)
        played = dict(zip(envs, collector.play(places, ANY_LENGTH), strict=True))
        for i, trajectory in played.items():
            lost = 0 if trajectory.status == "ok" else lost + 1
            if lost == MOST_LOST:
                raise EnvError(
                    f"{lost} episodes of the warm-up on {tag!r} failed one after another; the last: {trajectory.error}"
                )
            hung += trajectory.status == "timeout"
            if hung == MOST_HUNG:
                raise EnvError(
                    f"{hung} episodes of the warm-up on {tag!r} hung; the last: {trajectory.error}"
                )
            if lost == 0:
                yield from _learned(trajectory, coach.learned[i], coach.rng[i], policy)


def _learned(trajectory: Trajectory, learned: list[bool], rng: bytes, policy: Policy) -> list[Sample]:
    """What is learned of one episode, in random order."""
    if not trajectory.turns:
        raise ConfigError(
            f"the first prompt of {trajectory.env!r} and an action do not fit the model's context of "
            f"{policy.context} tokens: shorten the prompt, or raise engine.context"
        )
    turns = tuple(itertools.compress(trajectory.turns, learned))
    samples = make_samples(replace(trajectory, turns=turns))
    return [samples[i] for i in pickle.loads(rng).permutation(len(samples))]
