"""Train one skill: PPO from a bank of start states; the expert of each plan step learns from its own steps.

A training is a function of (plan, experts, config, seed): killed and resumed from a checkpoint it ends with the
same bytes, because every update draws from a stream named by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from shoal.core.configuration import check_fields
from shoal.core.errors import ConfigError, DivergedError
from shoal.core.seeding import stream
from shoal.maths.distributions import sample
from shoal.maths.updates import gae
from shoal.skills.learning.network import Adam, Network, Shape, check_expert
from shoal.skills.plan import Step
from shoal.skills.spec import MAX_HORIZON, Skill
from shoal.skills.worlds.course import Course, walk
from shoal.skills.worlds.registry import fresh_worlds, make_world, world_class
from shoal.skills.worlds.world import Bank, Floats, Ints, World

STROLLERS, TURN = 0.75, 0.1
"""Share of start states that are left by a random walk, and the probability per step that it turns."""
_ARRAYS = ("at", "elapsed", "start", "acted", "best_acted")
_NUMBERS = ("update", "frames", "walked", "best_at", "best_success", "pace")
"""Attributes of a `Trainer` that its `state` holds, arrays and plain data."""
Report = Callable[[dict[str, Any]], None]
Count = Annotated[int, msgspec.Meta(ge=1)]
Frames = Annotated[float, msgspec.Meta(ge=1)]
Size = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How an expert is trained; the defaults are tuned for the crafting world on one core."""

    total_timesteps: Frames = 5e7
    """maximum env steps of one training; it stops earlier when the skill is learned"""
    num_envs: Count = 128
    """parallel worlds"""
    num_steps: Count = 32
    """env steps per world between updates"""
    update_epochs: Count = 3
    """passes over each rollout"""
    num_minibatches: Count = 4
    """minibatches per pass"""
    lr: Size = 1.5e-3
    """learning rate of Adam"""
    anneal_lr: bool = True
    """decay the learning rate to a tenth over `anneal_frames`"""
    anneal_frames: Frames = 8e5
    """env steps of the decay"""
    gamma: Share = 0.97
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    clip_eps: Size = 0.2
    """clip range of the probability ratio"""
    ent_coef: Size = 0.01
    """weight of the entropy bonus"""
    vf_coef: Size = 0.5
    """weight of the value loss"""
    max_grad_norm: Size = 0.5
    """maximum norm of the gradient"""
    layer_size: Count = 64
    """width of both hidden layers"""
    success_state_rate: Size = 0.995
    """stop when this share of evaluation episodes succeeds"""
    patience_frames: Size = 1.2e5
    """stop when the evaluation has not improved for this many env steps and `min_success` is reached"""
    min_success: Size = 0.3
    """minimum success rate of a training that has not failed"""
    evaluation_episodes: Count = 512
    """episodes of an evaluation, in unseen worlds"""
    bank_worlds: Count = 2048
    """new worlds in which the earlier plan steps are played to get start states"""
    evaluate_every: Count = 8
    """updates between evaluations, once training episodes succeed often enough"""
    evaluate_from: Size = 0.5
    """training success from which every evaluation is made; below it, down to `min_success`, every fifth"""
    checkpoint_every: Count = 8
    """updates between checkpoints"""
    train_deps: Literal["off", "on"] = "off"
    """keep training the experts of earlier plan steps; half of the worlds then start from their reset"""
    stroll: Annotated[int, msgspec.Meta(ge=0)] = 32
    """maximum random steps before practice starts"""
    practice_horizon: Count = MAX_HORIZON
    """maximum env steps of one application during training; plans allow all of the skill's horizon"""

    def __post_init__(self) -> None:
        """Refuse what no training can be made with."""
        check_fields(self)
        if self.num_envs * self.num_steps < 2 * self.num_minibatches:
            raise ConfigError(
                f"nothing can be learned from parts of fewer than 2 steps: {self.num_envs} num_envs x {self.num_steps} "
                f"num_steps are in {self.num_minibatches} num_minibatches"
            )


def default_config(world: str) -> TrainingConfig:
    """Training settings that suit a world."""
    return TrainingConfig(**getattr(world_class(world), "training", {}))


@dataclass(frozen=True)
class Task:
    """What to train: the plan up to the skill, and the experts its steps use, by local index."""

    world: str
    skill: str
    skills: Mapping[str, Skill]
    plan: tuple[Step, ...]  # ends with the skill to train
    experts: tuple[Network | None, ...]  # by local index; None for one to be made
    route: tuple[int, ...]  # local expert of each plan step
    seed: int
    config: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass
class Result:
    """What a training gave."""

    experts: list[Network]  # by local index; the best ones by evaluation
    acted_frames: list[int]  # env steps in which each acted while learning
    success: float  # of the best, on evaluation episodes
    frames: int
    walked: int  # env steps beside those: ways to start states, and evaluations
    stopped: str  # "learned" | "plateau" | "budget"
    pace: float | None
    """env steps per successful application when evaluated, failures included; None if all failed"""


@dataclass
class Rollout:
    """Experience of one update; all but observations are `[T, N]`."""

    observations: Floats  # [T, N, inputs]
    actions: Ints
    experts: Ints
    logprobs: Floats
    values: Floats
    next_values: Floats
    rewards: Floats
    terminal: Floats
    ends: Floats
    ended: int = 0
    succeeded: int = 0


class Trainer:
    """One training; `state` and `restore` carry it across processes."""

    def __init__(self, task: Task) -> None:
        self.task, config = task, task.config
        self.world = make_world(task.world, config.num_envs)
        shape = Shape(self.world.obs_size, config.layer_size, self.world.n_actions)
        for index, net in enumerate(task.experts):
            if net is not None:
                check_expert(self.world, net, self._skill_of(index))
        self.nets = [
            net.copy() if net is not None else self._new_expert(shape, index)
            for index, net in enumerate(task.experts)
        ]
        self.course = self._course(task.plan, task.route)
        self.target = len(task.plan) - 1
        self.own = task.route[self.target]
        self.deps_learn = config.train_deps == "on"
        # 1 where each expert may learn, 0 for inputs that its skill does not name: practice never varies them.
        self.masks = []
        for index, net in enumerate(self.nets):
            known = self.task.skills[self._skill_of(index)].speaks_of()
            unknown = [c for f, c in self.world.feature_columns.items() if f not in known]
            self.masks.append(net.mask_inputs(unknown))
        self.adams = [Adam(net.flat.size) for net in self.nets]
        self.update = self.frames = self.walked = self.best_at = 0
        self.acted = np.zeros(len(self.nets), np.int64)
        self.best, self.best_success = [net.copy() for net in self.nets], -1.0
        self.best_acted = self.acted.copy()
        self.recent: deque[tuple[int, int]] = deque(maxlen=6)
        self.at = np.full(config.num_envs, self.target)
        self.elapsed = np.zeros(config.num_envs, np.int64)
        self.begun = False
        self.pace: float | None = None
        self.losses = (0.0, 0.0, 0.0)  # until the expert has acted

    def _new_expert(self, shape: Shape, index: int) -> Network:
        """A new expert, which takes only the actions of its skill."""
        net = Network.initial(shape, self._stream("init"))
        if allowed := self.task.skills[self._skill_of(index)].actions:
            names = list(self.world.action_names)
            if unknown := set(allowed) - set(names):
                raise ConfigError(
                    f"skill {self._skill_of(index)!r}: {self.task.world} has no actions {sorted(unknown)}, only {names}"
                )
            net.exclude_actions([action for action, name in enumerate(names) if name not in allowed])
        return net

    def _skill_of(self, index: int) -> str:
        """The skill of a local expert."""
        pairs = zip(self.task.plan, self.task.route, strict=True)
        return next(step.skill for step, local in pairs if local == index)

    def _stream(self, *names: str | int) -> np.random.Generator:
        return stream(self.task.seed, "skill", self.task.skill, *names)

    def _course(self, plan: Sequence[Step], route: Sequence[int]) -> Course:
        return Course(plan, self.task.skills, self.world.features, route, self.task.config.practice_horizon)

    def prepare(self) -> None:
        """Make the banks: start states for practice, and others for evaluation that practice never sees."""
        config = self.task.config
        self.bank = self._starts(config.bank_worlds, "practice")
        # A prefix that mostly fails leaves few states; play more new worlds rather than evaluate on a handful.
        self.test_bank = self._starts(config.evaluation_episodes, "evaluation")
        for name, bank in (("practice", self.bank), ("evaluation", self.test_bank)):
            if not len(bank):
                raise RuntimeError(
                    f"no start state for {self.task.skill!r} ({name}): the experts before it never reach it, or "
                    f"it is already done wherever they do"
                )

    def _starts(self, worlds: int, name: str) -> Bank:
        prefix = self.task.plan[: self.target]
        fixed = None if self.world.fresh_is_cheap else self.world
        new = fresh_worlds(self.world, worlds, self.task.seed, self.task.skill, name)
        if prefix:
            course = self._course(prefix, self.task.route[: self.target])
            way = walk(self.task.world, new, course, self.nets, self._stream("bank", name), fixed)
            self.walked += int(way.acted.sum())
            new = way.ends
        if not len(new):
            return new
        return self._stroll(new, self._stream("stroll", name))

    def _stroll(self, bank: Bank, rng: np.random.Generator) -> Bank:
        """Walk at random from most states, since in a longer plan other skills come before and end anywhere."""
        parts, lanes, most = [], self.world.lanes, self.task.config.stroll
        for first in range(0, len(bank), lanes):
            rows = np.arange(first, min(first + lanes, len(bank)))
            self.world.load(bank, np.minimum(np.arange(lanes) + first, rows[-1]), np.ones(lanes, np.bool_))
            left = rng.integers(0, most + 1, lanes) * (rng.random(lanes) < STROLLERS)
            self.walked += int(left[: len(rows)].sum())
            alive = np.ones(lanes, np.bool_)
            moves = rng.choice(self.world.moves, lanes)
            for t in range(most):
                moves = np.where(rng.random(lanes) < TURN, rng.choice(self.world.moves, lanes), moves)
                alive &= ~self.world.step(np.where(t < left, moves, self.world.wait), rng)
            # A state in which the skill is done already teaches nothing.
            alive &= self.course.skip(np.full(lanes, self.target), self.world.values()) == self.target
            parts.append(self.world.save().take(np.flatnonzero(alive[: len(rows)])))
        return Bank.join(parts)

    def train(self, report: Report, checkpoint: Callable[[Trainer], None]) -> Result:
        """Train until learned, or out of patience or budget; `checkpoint(self)` is called between updates."""
        config = self.task.config
        stopped = "budget"
        while self.frames < config.total_timesteps:
            metrics = self.step()
            if self.update % config.evaluate_every == 0 and metrics["success"] >= self._worth_evaluating():
                metrics["evaluated_success"] = self.evaluate()
            report(metrics)
            if self.best_success >= config.success_state_rate:
                stopped = "learned"
                break
            waited = self.frames - self.best_at
            if self.best_success >= config.min_success and waited >= config.patience_frames:
                stopped = "plateau"
                break
            if self.update % config.checkpoint_every == 0:
                checkpoint(self)
        if stopped == "budget":
            self.evaluate()
        acted = [int(frames) for frames in self.best_acted]
        return Result(self.best, acted, self.best_success, self.frames, self.walked, stopped, self.pace)

    def _worth_evaluating(self) -> float:
        """The training success below which no evaluation is made now."""
        if self.update // self.task.config.evaluate_every % 5 == 0:
            return self.task.config.min_success
        return max(
            self.task.config.evaluate_from, min(self.best_success, self.task.config.success_state_rate) - 0.05
        )

    def step(self) -> dict[str, Any]:
        """One rollout and its update."""
        config = self.task.config
        rng = self._stream("update", self.update)
        fresh = fresh_worlds(self.world, config.num_envs, self.task.seed, self.task.skill, "fresh", self.update) if (
            self.world.fresh_is_cheap and (self.target == 0 or self.deps_learn)
        ) else None  # fmt: skip
        rollout = self._collect(rng, fresh)
        self._learn(rollout, rng)
        self.update += 1
        if not all(np.isfinite(net.flat).all() for net in self.nets):
            for name in ("rewards", "observations"):
                if not np.isfinite(getattr(rollout, name)).all():
                    raise DivergedError(
                        f"update {self.update}: the world gave {name} that are no numbers (NaN or infinity): mend the "
                        "world or the skill, and begin anew"
                    )
            raise DivergedError(
                f"update {self.update} made weights that are no numbers: begin anew with a lower --lr, "
                f"which is {config.lr:g}"
            )
        size = config.num_envs * config.num_steps
        self.frames += size
        self.recent.append((rollout.ended, rollout.succeeded))
        ended, succeeded = (sum(column) for column in zip(*self.recent, strict=True))
        return {
            "step": self.frames,
            "update": self.update,
            "success": succeeded / max(ended, 1),
            "episodes": rollout.ended,
            "reward": float(rollout.rewards.mean()),
            "entropy": self.losses[2],
        }

    def _restart(self, mask: np.ndarray, rng: np.random.Generator, fresh: Bank | None) -> None:
        """Begin new episodes in the lanes of `mask`."""
        lanes = len(mask)
        from_reset = self.deps_learn if self.target else fresh is not None
        whole = mask & (np.arange(lanes) % 2 == 0) if from_reset else mask & False
        self.world.load(self.bank, rng.integers(0, len(self.bank), lanes), mask & ~whole)
        self.at[mask] = self.target
        if whole.any():
            worlds = fresh if fresh is not None else self._whole_worlds
            self.world.load(worlds, rng.integers(0, len(worlds), lanes), whole)
            self.at[whole] = 0
        values = self.world.values()
        if whole.any():
            self.at[whole] = np.minimum(self.course.skip(self.at[whole], values[whole]), self.target)
        self.elapsed[mask] = 0
        self.start[mask] = values[mask]

    @cached_property
    def _whole_worlds(self) -> Bank:
        return fresh_worlds(self.world, 256, self.task.seed, self.task.skill, "whole")

    def _collect(self, rng: np.random.Generator, fresh: Bank | None) -> Rollout:
        config, world, course = self.task.config, self.world, self.course
        steps, lanes = config.num_steps, config.num_envs
        if not self.begun:
            self.start = np.zeros((lanes, len(world.features.names)), np.float32)
            self._restart(np.ones(lanes, np.bool_), rng, fresh)
            self.begun = True
        out = Rollout(
            np.empty((steps, lanes, world.obs_size), np.float32),
            *np.zeros((2, steps, lanes), np.int64),
            *np.zeros((6, steps, lanes), np.float32),
        )
        observations, values = world.observe(), world.values()
        for t in range(steps):
            expert = course.expert[self.at]
            uniforms = rng.random(lanes, np.float32)
            logprobs, out.values[t] = self._forward(observations, expert)
            actions = sample(logprobs, uniforms)
            out.observations[t], out.actions[t], out.experts[t] = observations, actions, expert
            out.logprobs[t] = logprobs[np.arange(lanes), actions]
            died = world.step(actions, rng)
            after = world.values()
            self.elapsed += 1
            done = course.satisfied(self.at, after, self.start) & ~died
            late = ~done & ~died & (self.elapsed >= course.horizon[self.at])
            out.rewards[t] = ((after - values) * course.weights[self.at]).sum(1)
            out.rewards[t] += course.bonus[self.at] * done - course.step_cost[self.at]
            out.terminal[t], out.ends[t] = done | died, done | died | late
            own = self.at == self.target
            out.ended += int((own & (done | died | late)).sum())
            out.succeeded += int((own & done).sum())
            if late.any():  # we stopped watching: the value of where it stands is still to come
                stopped = np.flatnonzero(late)
                out.next_values[t, stopped] = self._forward(world.observe()[stopped], expert[stopped])[1]
            values = after
            on = done & ~own
            if on.any():
                self.at[on] = np.minimum(course.skip(self.at[on] + 1, after[on]), self.target)
                self.elapsed[on], self.start[on] = 0, after[on]
            over = (done & own) | died | late
            if over.any():
                self._restart(over, rng, fresh)
                values = world.values()
            observations = world.observe()
        going = out.ends == 0
        out.next_values[:-1] = np.where(going[:-1], out.values[1:], out.next_values[:-1])
        last = self._forward(observations, course.expert[self.at])[1]
        out.next_values[-1] = np.where(going[-1], last, out.next_values[-1])
        return out

    def _forward(self, observations: Floats, expert: Ints) -> tuple[Floats, Floats]:
        first = int(expert[0])
        if (expert == first).all():
            return self.nets[first].forward(observations)
        logprobs = np.empty((len(observations), self.world.n_actions), np.float32)
        values = np.empty(len(observations), np.float32)
        for index in np.unique(expert):
            lanes = expert == index
            logprobs[lanes], values[lanes] = self.nets[index].forward(observations[lanes])
        return logprobs, values

    def _learn(self, rollout: Rollout, rng: np.random.Generator) -> None:
        """Update each expert that may learn from the steps in which it acted itself."""
        config = self.task.config
        advantages = gae(
            rollout.rewards, rollout.values, rollout.next_values, rollout.terminal, rollout.ends,
            gamma=config.gamma, gae_lambda=config.gae_lambda, dtype=np.float32,
        )  # fmt: skip
        lr = config.lr
        if config.anneal_lr:
            lr *= 1 - 0.9 * min(self.frames / min(config.anneal_frames, config.total_timesteps), 1.0)
        flat = [
            array.reshape(-1, *array.shape[2:])
            for array in (
                rollout.observations, rollout.actions, rollout.logprobs, advantages, advantages + rollout.values,
            )
        ]  # fmt: skip
        owner = rollout.experts.reshape(-1)
        for index in range(len(self.nets)):
            mine = np.flatnonzero(owner == index)
            if not len(mine) or (index != self.own and not self.deps_learn):
                continue
            self.acted[index] += len(mine)
            data, mirrors = flat, getattr(self.world, "mirrors", ())
            if mirrors:
                data = _mirrored(self.nets[index], mirrors, [array[mine] for array in flat])
                mine = np.arange(len(mine))
            for _ in range(config.update_epochs):
                order = rng.permutation(mine)
                if mirrors:  # each step once in each pass, as it was or mirrored
                    order += len(mine) * rng.integers(0, 1 + len(mirrors), len(mine))
                for chunk in np.array_split(order, config.num_minibatches):
                    if len(chunk) < 2:
                        continue
                    seen, acts, old, gain, returns = (array[chunk] for array in data)
                    gain = (gain - gain.mean()) / (gain.std() + np.float32(1e-8))
                    gradient, losses = self.nets[index].gradient(
                        seen, acts, old, gain, returns,
                        clip=config.clip_eps, entropy_coef=config.ent_coef, value_coef=config.vf_coef,
                    )  # fmt: skip
                    gradient *= self.masks[index]
                    self.adams[index].step(self.nets[index].flat, gradient, lr, config.max_grad_norm)
                    if index == self.own:
                        self.losses = losses

    def evaluate(self) -> float:
        """Success of the skill from states that practice never sees; the best experts so far are kept."""
        last = self.course.plan[self.target]
        course = self._course([last], [self.own])
        fixed = None if self.world.fresh_is_cheap else self._spare
        rows = np.arange(self.task.config.evaluation_episodes) % len(self.test_bank)
        outcome = walk(
            self.task.world, self.test_bank.take(rows), course, self.nets, self._stream("evaluate"), fixed
        )
        self.walked += int(outcome.acted.sum())
        if outcome.success > self.best_success:
            self.best = [net.copy() for net in self.nets]
            self.best_success, self.best_at, self.best_acted = outcome.success, self.frames, self.acted.copy()
            done = last.count * int(outcome.finished.sum())
            self.pace = round(float(outcome.length.sum()) / done, 1) if done else None
        return outcome.success

    @cached_property
    def _spare(self) -> World:
        """A second world of the same size, so that evaluating leaves the practising one alone."""
        return make_world(self.task.world, self.task.config.num_envs)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """All that `restore` needs, as arrays and plain data."""
        arrays = {f"world/{key}": array for key, array in self.world.save().arrays.items()}
        for index, (net, adam, best) in enumerate(zip(self.nets, self.adams, self.best, strict=True)):
            arrays |= {
                f"net/{index}": net.flat, f"adam/mean/{index}": adam.mean, f"adam/square/{index}": adam.square,
                f"best/{index}": best.flat,
            }  # fmt: skip
        arrays |= {name: getattr(self, name) for name in _ARRAYS}
        plain = {name: getattr(self, name) for name in _NUMBERS}
        plain |= {"recent": [list(pair) for pair in self.recent], "adam": [adam.count for adam in self.adams]}
        return arrays, plain

    def restore(self, arrays: Mapping[str, np.ndarray], plain: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, after `prepare`."""
        lanes = self.task.config.num_envs
        world = {key.removeprefix("world/"): arrays[key] for key in arrays if key.startswith("world/")}
        self.world.load(Bank(world), np.arange(lanes), np.ones(lanes, np.bool_))
        for index, (net, adam, best) in enumerate(zip(self.nets, self.adams, self.best, strict=True)):
            net.flat[:], best.flat[:] = arrays[f"net/{index}"], arrays[f"best/{index}"]
            adam.mean[:], adam.square[:] = arrays[f"adam/mean/{index}"], arrays[f"adam/square/{index}"]
            adam.count = int(plain["adam"][index])
        for name in _ARRAYS:
            setattr(self, name, arrays[name].copy())
        for name in _NUMBERS:
            setattr(self, name, plain[name])
        self.recent.extend((int(ended), int(won)) for ended, won in plain["recent"])
        self.begun = True


def _mirrored(net: Network, mirrors: Sequence[tuple[Ints, Ints]], steps: Sequence[Any]) -> list[Any]:
    """Observations, actions, log-probabilities, advantages and returns; then those of each mirrored world."""
    seen, acts, old, *rest = steps
    parts = [(seen, acts, old)]
    for columns, actions in mirrors:
        there, then = seen[:, columns], actions[acts]
        parts.append((there, then, net.forward(there)[0][np.arange(len(then)), then]))
    return [
        *(np.concatenate(column) for column in zip(*parts, strict=True)),
        *(np.tile(array, len(parts)) for array in rest),
    ]
