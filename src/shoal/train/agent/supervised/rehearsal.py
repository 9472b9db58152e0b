"""Rehearsal: where groups are stuck, random valid actions are trained as in the warm-up, so that they are tried again.

A group is stuck if nobody in it succeeded and all were paid the same: its advantages are 0, and what other groups teach
makes the model sure of an answer there. Rehearsal (Robins 1995) keeps what was trained first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal.core.data import Call, Trajectory
from shoal.core.seeding import stream
from shoal.rollout.episode import Role
from shoal.rollout.prompts import Prompter
from shoal.samplers.sampler import Sampling
from shoal.train.agent.batch.samples import Sample, make_samples
from shoal.train.agent.run.answers import answer_ids
from shoal.train.agent.run.filters import filter_groups
from shoal.train.agent.supervised.warmup import imitate
from shoal.train.agent.update import Learner

RANDOM = 0.8
"""Share of the entropy of uniformly random actions at which a stuck group is tried enough as it is."""


def stuck_episodes(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The whole episodes of groups without a success and with equal rewards.

    There are none where no episode at all succeeded: nothing says then that the env tells successes.
    """
    if not any(t.success for t in trajectories):
        return []
    kept, _ = filter_groups(trajectories)
    others = {t.group for t in trajectories if t.success} | {t.group for t in kept}
    return [t for t in trajectories if t.status == "ok" and t.group not in others]


def rehearse(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    roles: Mapping[str, Role],
    prompter: Prompter,
    sampling: Sampling,
    weight: float,
    iteration: int,
) -> dict[str, float]:
    """One supervised step on random valid actions, in turns of stuck groups; envs of free text are left out.

    The `weight` is that of the loss where answers in stuck groups are deterministic; it falls evenly to 0 where they
    are `RANDOM`, and is multiplied by the share of the episodes that are stuck. The iteration names the turns and
    actions that are drawn, and `sampling` says how an answer ends.

    Returns:
        `rehearsal_loss`, in nats a token, and `episodes_stuck`, the share; nothing where there was no step.
    """
    stuck = [t for t in stuck_episodes(trajectories) if len(roles[t.env].projection.words()) > 1]
    turns = [(t, turn) for t in stuck for turn in t.turns]
    if not turns:
        return {}
    uniform = [math.log(len(roles[t.env].projection.words())) for t, _ in turns]
    found = [-math.fsum(t.call_of(turn).logprobs) for t, turn in turns]
    share = len(stuck) / len(trajectories)
    scale = weight * share * max(0.0, 1 - float(np.mean(np.divide(found, uniform))) / RANDOM)
    if not scale:
        return {}
    rng, size = stream(learner.seed, "rehearsal", iteration), learner.algorithm.minibatch_size or len(turns)
    samples: list[Sample] = []
    for i in rng.permutation(len(turns))[:size]:
        trajectory, turn = turns[i]
        role = roles[trajectory.env]
        words = role.projection.words()
        word = words[int(rng.integers(len(words)))]
        tokens = answer_ids(word, role, prompter.variant(role.prompt).config, sampling, prompter.tokenizer)
        answered = Call(trajectory.prompt_ids(turn.call), None, tokens, (0.0,) * len(tokens))
        samples += make_samples(replace(trajectory, calls=(answered,), turns=()))
    loss = imitate(learner, samples, " in its rehearsal", scale)
    return {"rehearsal_loss": loss, "episodes_stuck": share}
