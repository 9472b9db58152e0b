"""Supervised warm-up of a fresh model: on random valid actions it learns the format and nothing else.

Where the config says so, a share of the actions is the env's expert's, and the model starts as its imitator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shoal.core.errors import ConfigError, DivergedError
from shoal.core.seeding import derive_seed, stream
from shoal.envs import TextEnv
from shoal.maths.updates import decayed
from shoal.rollout.episode import Episode, EpisodeId, Role
from shoal.rollout.factory import CLOSE_SECONDS
from shoal.rollout.parallel.worker import close_all
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.sampler import Completion, Sampling
from shoal.train.agent.batch import Batching, Sample, make_samples, micro_batches
from shoal.train.agent.config import Warmup
from shoal.train.agent.policy import MasterAdamW, Policy, score, trained_parameters
from shoal.train.agent.update import refuse_diverged

MAX_EPISODE_TURNS = 32
"""Random play is cut here: later states of an env with few endings add nothing to the format."""


def warm_up(
    policy: Policy,
    makers: Mapping[str, Callable[[], TextEnv[Any]]],
    roles: Mapping[str, Role],
    prompter: Prompter,
    config: Warmup,
    micro_batch_tokens: int,
    seed: int,
    share: float = 1.0,
) -> Iterator[float]:
    """Train `policy` on random or expert play of the envs; yields the loss of each step (nats a token).

    `share` is this process's part of a gradient that several compute alike and sum.
    """
    made: dict[str, TextEnv[Any]] = {}
    try:
        for tag, maker in sorted(makers.items()):
            made[tag] = maker()
        plays = [_play(policy, env, roles[tag], prompter, config, seed) for tag, env in made.items()]
        parameters = trained_parameters(policy.module)
        optimizer = MasterAdamW([{"params": parameters, "lr": config.learning_rate}])
        device = str(parameters[0].device)
        for step in range(config.steps):
            for group in optimizer.param_groups:
                group["lr"] = decayed(config.learning_rate, config.lr_schedule, step / config.steps)
            samples = [next(plays[(step + i) % len(plays)]) for i in range(config.batch_size)]
            n_tokens = sum(len(sample.places) for sample in samples)
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            how: Batching = "auto" if policy.merges_equals else "bucketed"
            sharing = (True, True, policy.costs)
            for micro in micro_batches(samples, micro_batch_tokens, policy.pad_id, device, how, *sharing):
                loss = -score(policy, micro, 1.0).logprobs.sum() / n_tokens
                (share * loss).backward()  # type: ignore[no-untyped-call]
                optimizer.take_gradients()
                total += float(loss.detach())
            if not math.isfinite(total):
                raise DivergedError(
                    f"the loss of warm-up step {step + 1} is {total}: lower warmup.learning_rate"
                )
            longest = math.inf if config.max_grad_norm is None else config.max_grad_norm
            norm = nn.utils.clip_grad_norm_(optimizer.stepped[0], longest)
            refuse_diverged(norm, f"policy in warm-up step {step + 1}")
            optimizer.step()
            yield total
    finally:
        close_all(list(made.values()), CLOSE_SECONDS)


def _play(
    policy: Policy, env: TextEnv[Any], role: Role, prompter: Prompter, config: Warmup, seed: int
) -> Iterator[Sample]:
    """Endless samples from episodes of an agent that asks the expert in a share of the turns."""
    expert = config.expert
    context, written = policy.context, prompter.variant(role.prompt).config.written
    for number in range(2**63):
        rng = stream(seed, "warmup", role.tag, number)
        place = EpisodeId(seed, 0, 0, 0, derive_seed(seed, "warmup-env", role.tag, number))
        episode = Episode(place, role, prompter, Sampling())
        episode.begin(*env.reset(seed=place.env_seed))
        only_expert = config.only_expert and env.expert_action() is not None
        learned: list[bool] = []
        while not episode.over and len(learned) < MAX_EPISODE_TURNS:
            prompt = episode.request().prompt_ids
            word = env.expert_action() if expert and rng.random() < expert else None
            asked = word is not None or not only_expert
            if word is None:
                word = env.random_action(rng)
            if word is None:
                raise ConfigError(
                    f"warm-up on random play needs an env that draws actions by lot, and {role.tag!r} takes free text: "
                    f"set warmup.steps=0, or warmup.expert=1 where the env has an expert"
                )
            answer = policy.tokenizer.encode(written(f"<action>{word}</action>"))
            if context is not None and len(prompt) + len(answer) > context:
                break  # later turns do not fit either
            learned.append(asked)
            for action in episode.respond(Completion(answer, (0.0,) * len(answer), "stop")):
                episode.observe(*env.step(action))
            episode.end_turn()
        trajectory = episode.trajectory()
        if not trajectory.turns:
            raise ConfigError(
                f"the first prompt of {role.tag!r} and an action do not fit the model's context of {context} tokens: "
                f"shorten the prompt, or raise engine.context"
            )
        turns = tuple(itertools.compress(trajectory.turns, learned))
        samples = make_samples(replace(trajectory, turns=turns))
        for i in rng.permutation(len(samples)):
            yield samples[i]
