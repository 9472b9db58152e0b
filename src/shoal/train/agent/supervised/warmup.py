"""Supervised warm-up of a fresh model: on random valid actions it learns the format and nothing else.

Where the config says so, a share of the actions is the env's expert's, and the model starts as its imitator. Whether a
model needs a warm-up is seen in a few episodes played as in training (`warmup.steps: auto`).
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, EnvError
from shoal.core.seeding import derive_seed
from shoal.envs import TextEnv
from shoal.maths.updates import decayed
from shoal.rollout.episode import EpisodeId, Role
from shoal.rollout.factory import VectorConfig, make_pool
from shoal.rollout.plan import Assignment
from shoal.rollout.play import TrajectoryCollector
from shoal.rollout.prompts import Prompter
from shoal.rollout.report import FailureLog
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.sampler import Sampling
from shoal.train.agent.batch.packing import Batching
from shoal.train.agent.batch.samples import Sample, make_samples
from shoal.train.agent.config import AgentConfig, AgentProxy, Algorithm, KLPenalty, Warmup
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.policy import Policy
from shoal.train.agent.processes.distributed import ALONE, Processes
from shoal.train.agent.run.playing import SharedCollector, refuse_all_failed
from shoal.train.agent.supervised.coach import Coach, CoachedEnv, no_random_action
from shoal.train.agent.update import Learner, Totals, gradient_step

logger = logging.getLogger(__name__)
PLAIN = Sampling()
ANY_LENGTH = Sampling(2**20)
"""An answer of the env's expert may be longer than those that the model may write."""
ABREAST = 32
"""Episodes that are played at once."""
PROBE_TURNS = 64
ENOUGH = 0.5
"""Share of answers that hold an action from which on there is no warm-up."""
AUTO_STEPS = 20
MOST_LOST = 16
"""Episodes of an env left out one after another, with which it is given up."""


# --- whether there is one
def refuse_without_actions(config: Warmup, roles: Mapping[str, Role]) -> None:
    """Check that there are actions to learn from: random ones, or an expert's.

    Raises:
        ConfigError: names the env without.
    """
    if config.steps and config.expert and not any(role.has_expert for role in roles.values()):
        raise ConfigError(
            f"warmup.expert={config.expert:g} needs an env with an expert, and {', '.join(sorted(roles))} has no "
            "expert_action(): give it one, or leave out warmup.expert"
        )
    if config.steps in (0, "auto") or config.expert == 1:
        return
    for tag, role in sorted(roles.items()):
        if not role.draws_actions:
            raise no_random_action(tag)


def warmup_steps(
    config: AgentConfig, collector: SharedCollector, roles: Mapping[str, Role]
) -> tuple[int, dict[str, float]]:
    """How many steps of warm-up there are, and what is reported of the probe where one was needed to know it."""
    if config.warmup.steps != "auto":
        return config.warmup.steps, {}
    valid, turns = probe(config, collector)
    found = {"probe_valid_actions": valid / max(1, turns)}
    summary = f"probe: {valid} of {turns} answers held an action"
    if valid >= ENOUGH * turns:
        return 0, found
    free = sorted(tag for tag, role in roles.items() if not role.draws_actions)
    if free and not config.warmup.expert:
        logger.warning(
            "%s, and there is no warm-up: the actions of %s are free text, of which none can be drawn. Show the form "
            "of an answer in agent_proxy.prompt, or give the env a random_action(rng) that returns one",
            summary,
            ", ".join(free),
        )
        return 0, found
    logger.warning(
        "%s; warming up %d steps on valid ones; warmup.steps=0 switches it off", summary, AUTO_STEPS
    )
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


# --- the steps
def warm_up(
    policy: Policy,
    makers: Mapping[str, Callable[[], TextEnv[Any]]],
    roles: Mapping[str, Role],
    prompter: Prompter,
    config: Warmup,
    micro_batch_tokens: int,
    seed: int,
    *,
    batching: Batching = "padded",
    processes: Processes = ALONE,
    **playing: Any,
) -> Iterator[float]:
    """Train `policy` on random or expert play of the envs; yields the loss of each step (nats a token).

    All `processes` play the same episodes; `playing` are further arguments of `warmup_samples`.
    """
    steps = config.steps
    if steps == "auto":
        raise ConfigError("warmup.steps=auto must be a number by now: see warmup_steps")
    optimizer = split_optimizer(trained_parameters(policy.module), None, config.learning_rate, 0.0, 0.0)
    algorithm = Algorithm(
        micro_batch_tokens=micro_batch_tokens, batching=batching, max_grad_norm=config.max_grad_norm
    )
    learner = Learner(policy, optimizer, algorithm, AgentProxy(), processes=processes)
    with warmup_samples(policy, makers, roles, prompter, config, seed, **playing) as plays:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = decayed(config.learning_rate, config.lr_schedule, step / steps)
            samples = [next(plays[(step + i) % len(plays)]) for i in range(config.batch_size)]
            yield imitate(learner, samples, f" in warm-up step {step + 1}")


def imitate(learner: Learner, samples: Sequence[Sample], what: str, weight: float = 1.0) -> float:
    """One step of a learner's optimizer on the cross-entropy times a weight; gives its mean, in nats a token.

    Of the learner's settings those of memory and the length of gradients hold.
    """
    given, totals, weighted = learner.algorithm, Totals(), []
    algorithm = Algorithm(
        policy_loss="likelihood", loss_aggregation="token_mean", kl=KLPenalty(0.0), batching=given.batching,
        micro_batch_tokens=given.micro_batch_tokens, max_grad_norm=given.max_grad_norm,
    )  # fmt: skip
    plain = AgentProxy(temperature=1.0)
    imitating = Learner(
        learner.policy, learner.optimizer, algorithm, plain, processes=learner.processes, log_entropy=False
    )
    for sample in samples:
        known = sample.columns["rollout_logprobs"]
        weighted.append(
            sample.with_column("advantages", np.full_like(known, weight)).with_column("old_logprobs", known)
        )
    gradient_step(imitating, weighted, totals, what=what)
    summed = totals.over(learner.processes)
    return -summed.logprob / summed.tokens


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
    toolbox: Toolbox | None = None,
) -> Iterator[list[Iterator[Sample]]]:
    """For each kind of env, by the alphabet, what is learned from: samples without end, of one episode after another.

    An episode whose env fails is played once more, and then left out.

    `vector` says where the envs live, worker processes if not given; `failures` warns of episodes that fail; `sampling`
    says how answers end; `toolbox` has the tools that the envs' answers call.

    Raises:
        EnvError: an env always fails.
    """
    tags, each = sorted(makers), max(1, ABREAST // len(makers))
    expert = config.expert, config.only_expert
    coached = [partial(CoachedEnv, makers[tag], seed, tag, *expert) for tag in tags for _ in range(each)]
    pool = make_pool(coached, vector or VectorConfig())
    coach = Coach(pool, roles, prompter, sampling, policy.context)
    collector = TrajectoryCollector(
        coach, tags, roles, each, coach, prompter.config, seed, failures=failures, toolbox=toolbox
    )
    try:
        yield [
            _play(collector, coach, roles[tag], range(k * each, (k + 1) * each), seed, policy)
            for k, tag in enumerate(tags)
        ]
    finally:
        coach.close()


def _play(
    collector: TrajectoryCollector, coach: Coach, role: Role, envs: range, seed: int, policy: Policy
) -> Iterator[Sample]:
    """Samples of the episodes of one kind, which these envs play a few at a time."""
    tag, lost = role.tag, 0
    for first in itertools.count(step=len(envs)):
        places = {}
        for i, number in enumerate(range(first, first + len(envs)), start=envs.start):
            env_seed = derive_seed(seed, "warmup-env", tag, number)
            places[i] = EpisodeId(seed, 0, number, envs.start, env_seed), tag
        coach.expect(places)
        assignments = [Assignment(i, place, tag) for i, (place, tag) in places.items()]
        played = dict(zip(envs, collector.play(assignments, ANY_LENGTH), strict=True))
        for i, trajectory in played.items():
            lost = 0 if trajectory.status == "ok" else lost + 1
            if lost == MOST_LOST:
                raise EnvError(
                    f"{lost} episodes of the warm-up on {tag!r} failed one after another; the last: {trajectory.error}"
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
    samples = make_samples(trajectory, [turn.call for turn in itertools.compress(trajectory.turns, learned)])
    return [samples[i] for i in pickle.loads(rng).permutation(len(samples))]
