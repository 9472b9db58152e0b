"""Supervised warm-up of a fresh model: on random valid actions it learns the format and nothing else.

Where the config says so, a share of the actions is the env's expert's, and the model starts as its imitator.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.random import Generator
from torch import nn

from shoal.core.errors import ConfigError, DivergedError, EnvError
from shoal.core.executors import OwnThread
from shoal.core.seeding import derive_seed, stream
from shoal.envs import TextEnv
from shoal.maths.updates import decayed
from shoal.rollout.answers import answer_ids
from shoal.rollout.episode import Episode, EpisodeId, Role
from shoal.rollout.factory import CLOSE_SECONDS
from shoal.rollout.parallel.worker import MAKE, EnvFailedError, Player, close_all
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.sampler import Completion, Sampling
from shoal.train.agent.batch import Batching, Sample, make_samples, micro_batches
from shoal.train.agent.config import Warmup
from shoal.train.agent.policy import MasterAdamW, Policy, score, trained_parameters
from shoal.train.agent.update import refuse_diverged

logger = logging.getLogger(__name__)
PLAIN = Sampling()
TRIES = 2
"""At an episode whose env fails, each in a fresh env; then it is left out."""
MOST_LOST = 16
"""Episodes of an env left out one after another, with which it is given up."""
MAX_EPISODE_TURNS = 32
"""Random play is cut here: later states of an env with few endings add nothing to the format."""


def unlimited(doing: str) -> None:
    """For envs that may take any time."""


class Home:
    """Where an env lives: with the caller or, where its calls have a time limit, in a thread of its own."""

    def __init__(
        self, make: Callable[[], TextEnv[Any]], seconds_for: Callable[[str], float | None] = unlimited
    ) -> None:
        self._make, self._seconds_for = make, seconds_for
        self._env: TextEnv[Any] | None = None
        self._thread: OwnThread | None = None
        self._hangs = False

    def begin(self) -> None:
        """Make the env; what its constructor raises is raised as it is."""
        try:
            self.ready()
        except EnvFailedError as error:
            raise error.__cause__ or EnvError(f"the warm-up cannot begin: {error}") from None

    def ready(self) -> TextEnv[Any]:
        """The env, a new one after `leave`."""
        if self._env is None:
            limited = (self._seconds_for(MAKE), self._seconds_for("step")) != (None, None)
            self._thread = OwnThread("shoal-warmup") if limited else None
            self._env = self.in_env(MAKE, self._make)
        return self._env

    def in_env(self, doing: str, call: Callable[[], Any]) -> Any:
        """See `Player.in_env`; a call that takes too long leaves env and thread behind."""
        if self._thread is None:
            return Player().in_env(doing, call)
        seconds = self._seconds_for(doing)
        try:
            return self._thread.submit(partial(Player().in_env, doing, call)).result(seconds)
        except TimeoutError:
            self._hangs = True
            raise EnvFailedError(f"{doing} did not answer within {seconds:g} s") from None

    def leave(self) -> None:
        """Close the env, for which one that does not hang already is waited for."""
        env, thread, hangs = self._env, self._thread, self._hangs
        self._env, self._thread, self._hangs = None, None, False
        envs = [] if env is None else [env]
        if thread is None:
            close_all(envs, CLOSE_SECONDS)
        else:
            closing = thread.submit(partial(close_all, envs))
            thread.end()
            wait([closing], 0 if hangs else CLOSE_SECONDS)


def warm_up(
    policy: Policy,
    makers: Mapping[str, Callable[[], TextEnv[Any]]],
    roles: Mapping[str, Role],
    prompter: Prompter,
    config: Warmup,
    micro_batch_tokens: int,
    seed: int,
    share: float = 1.0,
    seconds_for: Callable[[str], float | None] = unlimited,
    sampling: Sampling = PLAIN,
) -> Iterator[float]:
    """Train `policy` on random or expert play of the envs; yields the loss of each step (nats a token).

    `share` is this process's part of a gradient that several compute alike and sum; `seconds_for` says for how long an
    env may be at what it does; by `sampling` the answers end that are learned.
    """
    steps = config.steps
    if steps == "auto":
        raise ConfigError("warmup.steps=auto must be a number by now: see shoal.train.agent.probe")
    homes = {tag: Home(maker, seconds_for) for tag, maker in sorted(makers.items())}
    try:
        for home in homes.values():
            home.begin()
        plays = [
            _play(policy, home, roles[tag], prompter, config, seed, sampling) for tag, home in homes.items()
        ]
        parameters = trained_parameters(policy.module)
        optimizer = MasterAdamW([{"params": parameters, "lr": config.learning_rate}])
        device = str(parameters[0].device)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = decayed(config.learning_rate, config.lr_schedule, step / steps)
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
        for home in homes.values():
            home.leave()


def _play(
    policy: Policy,
    home: Home,
    role: Role,
    prompter: Prompter,
    config: Warmup,
    seed: int,
    sampling: Sampling = PLAIN,
) -> Iterator[Sample]:
    """Endless samples from episodes of an agent that asks the expert in a share of the turns.

    An episode whose env fails is played again in another one, and then left out.

    Raises:
        EnvError: the env always fails.
    """
    tag, lost, failure = role.tag, 0, None
    for number in range(2**63):
        for attempt in range(1, TRIES + 1):
            rng = stream(seed, "warmup", tag, number)
            try:
                samples = _episode(policy, home, role, prompter, config, seed, number, rng, sampling)
                break
            except EnvFailedError as error:
                failure = error
                logger.warning("episode %d of the warm-up on %s, attempt %d: %s", number, tag, attempt, error)
                home.leave()
        else:
            lost += 1
            if lost == MOST_LOST:
                raise EnvError(
                    f"{lost} episodes of the warm-up on {tag!r} failed one after another; the last: {failure}"
                ) from failure
            continue
        lost = 0
        for i in rng.permutation(len(samples)):
            yield samples[i]


def _episode(
    policy: Policy,
    home: Home,
    role: Role,
    prompter: Prompter,
    config: Warmup,
    seed: int,
    number: int,
    rng: Generator,
    sampling: Sampling,
) -> list[Sample]:
    """What is learned of one episode.

    Raises:
        EnvFailedError: the env raised, answered what it must not, or did not answer in time.
    """
    env, in_env = home.ready(), home.in_env

    def step(action: int | str) -> None:
        episode.observe(*env.step(action))

    context, prompt_config = policy.context, prompter.variant(role.prompt).config
    place = EpisodeId(seed, 0, 0, 0, derive_seed(seed, "warmup-env", role.tag, number))
    episode = Episode(place, role, prompter, sampling)
    in_env("reset", lambda: episode.begin(*env.reset(seed=place.env_seed)))
    only_expert = config.only_expert and in_env("expert_action", env.expert_action) is not None
    learned: list[bool] = []
    while not episode.over and len(learned) < MAX_EPISODE_TURNS:
        prompt = episode.request().prompt_ids
        ask = config.expert and rng.random() < config.expert
        word = in_env("expert_action", env.expert_action) if ask else None
        asked = word is not None or not only_expert
        if word is None:
            word = in_env("random_action", lambda: env.random_action(rng))
        if word is None:
            raise ConfigError(
                f"warm-up on random play needs an env that draws actions by lot, and {role.tag!r} takes free text: "
                f"set warmup.steps=0, or warmup.expert=1 where the env has an expert"
            )
        answer = answer_ids(word, role, prompt_config, sampling, policy.tokenizer)
        if context is not None and len(prompt) + len(answer) > context:
            break  # later turns do not fit either
        learned.append(asked)
        for action in episode.respond(Completion(answer, (0.0,) * len(answer), "stop")):
            in_env(f"step({action!r})", partial(step, action))
        episode.end_turn()
    trajectory = episode.trajectory()
    if not trajectory.turns:
        raise ConfigError(
            f"the first prompt of {role.tag!r} and an action do not fit the model's context of {context} tokens: "
            f"shorten the prompt, or raise engine.context"
        )
    turns = tuple(itertools.compress(trajectory.turns, learned))
    return make_samples(replace(trajectory, turns=turns))
