"""Train one skill: PPO from a bank of start states, the expert of each plan step learning from its own steps.

A training is a function of (plan, experts, config, seed): killed and resumed from a checkpoint it ends with the
same bytes, because every update draws from a stream named by its number. The networks stand below it.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError, did_you_mean, needs_extra, reading
from shoal.core.seeding import stream
from shoal.maths.distributions import log_softmax, sample
from shoal.maths.initial_weights import orthogonal
from shoal.maths.updates import clipped_surrogate, gae
from shoal.skills.learning.spec import MAX_HORIZON, Skill, Step
from shoal.skills.learning.worlds import (
    Bank,
    Course,
    Floats,
    Ints,
    World,
    check_expert,
    fresh_worlds,
    make_world,
    walk,
)

STROLLERS, TURN = 0.75, 0.1
"""Share of start states from which one strolls, and the chance a step that a stroll takes another direction."""
Report = Callable[[dict[str, Any]], None]
_COUNTS = (
    "total_timesteps", "num_envs", "num_steps", "update_epochs", "num_minibatches", "anneal_frames", "layer_size",
    "evaluation_episodes", "bank_worlds", "evaluate_every", "checkpoint_every", "practice_horizon",
)  # fmt: skip
_SIZES = (
    "lr", "gamma", "gae_lambda", "clip_eps", "ent_coef", "vf_coef", "max_grad_norm", "success_state_rate",
    "patience_frames", "min_success", "evaluate_from",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How an expert is trained; the defaults are tuned for the crafting world on one core."""

    total_timesteps: float = 5e7
    """most env steps of one training; it stops earlier when the skill is learned"""
    num_envs: int = 128
    """worlds stepped together"""
    num_steps: int = 32
    """env steps per world between updates"""
    update_epochs: int = 3
    """passes over what was collected"""
    num_minibatches: int = 4
    """parts of each pass, with a gradient step each"""
    lr: float = 1.5e-3
    """learning rate of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall to a tenth over `anneal_frames`"""
    anneal_frames: float = 8e5
    """env steps until the learning rate has fallen"""
    gamma: float = 0.97
    """discount of a reward per step"""
    gae_lambda: float = 0.95
    """of generalised advantage estimation"""
    clip_eps: float = 0.2
    """how far the probability ratio of an action may leave 1"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the critic's loss"""
    max_grad_norm: float = 0.5
    """the gradient's global norm is clipped to this"""
    layer_size: int = 64
    """width of both hidden layers"""
    success_state_rate: float = 0.995
    """stop when this share of evaluation episodes succeeds"""
    patience_frames: float = 1.2e5
    """stop when the evaluation has not improved for this many env steps and `min_success` is reached"""
    min_success: float = 0.3
    """a training that ends below this success rate has failed"""
    evaluation_episodes: int = 512
    """episodes of an evaluation, in worlds of their own"""
    bank_worlds: int = 2048
    """new worlds from which the plan's prefix is played to get start states"""
    evaluate_every: int = 8
    """updates between evaluations, once training episodes succeed often enough"""
    evaluate_from: float = 0.5
    """training success from which on every evaluation is made; below it, down to `min_success`, every fifth"""
    checkpoint_every: int = 8
    """updates between checkpoints"""
    train_deps: Literal["off", "on"] = "off"
    """let the experts of earlier plan steps go on learning; half of the worlds then start from nothing"""
    stroll: int = 32
    """most random steps between the end of a prefix, or a new world, and the start of practice"""
    practice_horizon: int = MAX_HORIZON
    """most env steps that one application may take while its expert learns; later it has all that its horizon says"""

    def __post_init__(self) -> None:
        """Refuse what no training can be made with."""
        for name in _COUNTS:
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _SIZES:
            most = 1.0 if name in ("gamma", "gae_lambda") else math.inf
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be in 0..{most:g}, got {getattr(self, name)}")
        if not math.isfinite(self.total_timesteps):
            raise ConfigError(f"total_timesteps must be finite, got {self.total_timesteps}")
        if self.stroll < 0:
            raise ConfigError(f"stroll must be at least 0, got {self.stroll}")
        if self.num_envs * self.num_steps < 2 * self.num_minibatches:
            raise ConfigError(
                f"nothing can be learned from parts of fewer than 2 steps: {self.num_envs} num_envs x {self.num_steps} "
                f"num_steps are in {self.num_minibatches} num_minibatches"
            )


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
    episodes: dict[str, Floats]
    """"start", "before" (the last action), "end" `[E, features]`, "success", "steps" `[E]`"""
    bank_size: int = 0

    def pace(self, count: int) -> float | None:
        """Env steps that each of `count` applications in a row took, those that failed included; None if all did."""
        done = count * float(self.episodes.get("success", np.zeros(1)).sum())
        steps = self.episodes.get("steps")  # absent in a training that was begun by an older edition
        return None if steps is None or not done else round(float(steps.sum()) / done, 1)


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

    @staticmethod
    def empty(steps: int, lanes: int, inputs: int) -> Rollout:
        """Room for `steps` steps of `lanes` lanes."""

        def zeros() -> Floats:
            return np.zeros((steps, lanes), np.float32)

        return Rollout(
            np.empty((steps, lanes, inputs), np.float32), np.zeros((steps, lanes), np.int64),
            np.zeros((steps, lanes), np.int64), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(),
        )  # fmt: skip


class Trainer:
    """One training; `state` and `restore` carry it across processes."""

    def __init__(self, task: Task) -> None:
        self.task, config = task, task.config
        self.world = make_world(task.world, config.num_envs)
        shape = Shape(self.world.obs_size, config.layer_size, self.world.n_actions)
        for index, net in enumerate(task.experts):
            if net is not None:
                check_expert(self.world, net.shape, self._skill_of(index))
        self.nets = [
            net.copy() if net is not None else self._beginner(shape, index)
            for index, net in enumerate(task.experts)
        ]
        self.course = self._course(task.plan, task.route)
        self.target = len(task.plan) - 1
        self.own = task.route[self.target]
        self.deps_learn = config.train_deps == "on"
        self.masks = self._masks()
        self.adams = [Adam(net.flat.size) for net in self.nets]
        self.update = self.frames = self.walked = self.best_at = 0
        self.acted = np.zeros(len(self.nets), np.int64)
        self.best, self.best_success = [net.copy() for net in self.nets], -1.0
        self.best_acted = self.acted.copy()
        self.recent: deque[tuple[int, int]] = deque(maxlen=6)
        self.at = np.full(config.num_envs, self.target)
        self.elapsed = np.zeros(config.num_envs, np.int64)
        self.begun = False
        self.episodes: dict[str, Floats] = {}
        self.losses = (0.0, 0.0, 0.0)  # until the expert has acted

    def _beginner(self, shape: Shape, index: int) -> Network:
        """A new expert, which takes none but the actions of its skill."""
        net = Network.initial(shape, self._stream("init"))
        if allowed := self.task.skills[self._skill_of(index)].actions:
            names = list(self.world.action_names)
            if unknown := set(allowed) - set(names):
                raise ConfigError(
                    f"skill {self._skill_of(index)!r}: {self.task.world} has no actions {sorted(unknown)}, only {names}"
                )
            net.never([action for action, name in enumerate(names) if name not in allowed])
        return net

    def _skill_of(self, index: int) -> str:
        """The skill of a local expert."""
        pairs = zip(self.task.plan, self.task.route, strict=True)
        return next(step.skill for step, local in pairs if local == index)

    def _stream(self, *names: str | int) -> np.random.Generator:
        return stream(self.task.seed, "skill", self.task.skill, *names)

    def _course(self, plan: Sequence[Step], route: Sequence[int]) -> Course:
        return Course(plan, self.task.skills, self.world.features, route, self.task.config.practice_horizon)

    def _masks(self) -> list[Floats]:
        """Where each expert may learn: not on what its skill does not speak of, so that other things in the
        hands, which it never met in practice, cannot confuse it later.
        """  # noqa: D205
        masks = []
        for index, net in enumerate(self.nets):
            known = self.task.skills[self._skill_of(index)].speaks_of()
            masks.append(net.listening([c for f, c in self.world.feature_columns.items() if f not in known]))
        return masks

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
        new = self._stroll(new, self._stream("stroll", name))
        # A state in which the skill is done already teaches nothing.
        values = self._values_of(new)
        target = np.full(len(new), self.target)
        return new.take(np.flatnonzero(self.course.skip(target, values) == self.target))

    def _stroll(self, bank: Bank, rng: np.random.Generator) -> Bank:
        """Walk at random from most states: in a longer plan other skills come before, and end anywhere."""
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
            parts.append(self.world.save().take(np.flatnonzero(alive[: len(rows)])))
        return Bank.join(parts) if parts else bank

    def _values_of(self, bank: Bank) -> Floats:
        out = []
        for first in range(0, len(bank), self.world.lanes):
            rows = np.arange(first, min(first + self.world.lanes, len(bank)))
            padded = np.concatenate([rows, np.full(self.world.lanes - len(rows), rows[-1])])
            self.world.load(bank, padded, np.ones(self.world.lanes, np.bool_))
            out.append(self.world.values()[: len(rows)])
        return np.concatenate(out)

    def train(self, report: Report, checkpoint: Callable[[Trainer], None]) -> Result:
        """Practice until learned, or out of patience or budget; `checkpoint(self)` is called between updates."""
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
            if (
                self.best_success >= config.min_success
                and self.frames - self.best_at >= config.patience_frames
            ):
                stopped = "plateau"
                break
            if self.update % config.checkpoint_every == 0:
                checkpoint(self)
        if stopped == "budget":
            self.evaluate()
        return Result(
            self.best, [int(frames) for frames in self.best_acted], self.best_success, self.frames,
            self.walked, stopped, self.episodes, len(self.bank),
        )  # fmt: skip

    def _worth_evaluating(self) -> float:
        """The training success below which an evaluation now would be wasted."""
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
        whole = mask & (np.arange(lanes) % 2 == 0) if self.deps_learn and self.target else mask & False
        new = mask & (np.arange(lanes) % 2 == 0) if fresh is not None and not self.target else mask & False
        self.world.load(self.bank, rng.integers(0, len(self.bank), lanes), mask & ~whole & ~new)
        if fresh is not None and new.any():
            self.world.load(fresh, rng.integers(0, len(fresh), lanes), new)
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
        out = Rollout.empty(steps, lanes, world.obs_size)
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
        fall = (
            min(self.frames / min(config.anneal_frames, config.total_timesteps), 1.0)
            if config.anneal_lr
            else 0
        )
        lr = config.lr * (1 - 0.9 * fall)
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
            self.episodes = {
                "start": outcome.last_start,
                "before": outcome.last_before,
                "end": outcome.last_values,
                "success": outcome.finished.astype(np.float32),
                "steps": outcome.length.astype(np.float32),
            }
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
        arrays |= {f"episodes/{key}": array for key, array in self.episodes.items()}
        arrays |= {
            "at": self.at, "elapsed": self.elapsed, "start": self.start, "acted": self.acted,
            "best_acted": self.best_acted,
        }  # fmt: skip
        plain = {
            "update": self.update, "frames": self.frames, "walked": self.walked, "best_at": self.best_at,
            "best_success": self.best_success, "recent": [list(pair) for pair in self.recent],
            "adam": [adam.count for adam in self.adams],
        }  # fmt: skip
        return arrays, plain

    def restore(self, arrays: Mapping[str, np.ndarray], plain: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, after `prepare`."""
        lanes = self.task.config.num_envs
        self.world.load(Bank(arrays_of("world", arrays)), np.arange(lanes), np.ones(lanes, np.bool_))
        for index, net in enumerate(self.nets):
            if (missing := net.flat.size - arrays[f"net/{index}"].size) != 0:
                # Begun where the world showed less: the expert goes on seeing that much.
                shape = replace(net.shape, inputs=net.shape.inputs - missing // net.shape.hidden)
                check_expert(self.world, shape, self._skill_of(index))
                self.nets[index], self.best[index] = Network(shape), Network(shape)
                self.adams[index] = Adam(self.nets[index].flat.size)
        self.masks = self._masks()
        for index in range(len(self.nets)):
            self.nets[index].flat[:] = arrays[f"net/{index}"]
            self.best[index].flat[:] = arrays[f"best/{index}"]
            self.adams[index].mean[:] = arrays[f"adam/mean/{index}"]
            self.adams[index].square[:] = arrays[f"adam/square/{index}"]
            self.adams[index].count = int(plain["adam"][index])
        self.episodes = arrays_of("episodes", arrays)
        self.at, self.elapsed = arrays["at"].copy(), arrays["elapsed"].copy()
        self.start, self.acted = arrays["start"].copy(), arrays["acted"].copy()
        self.best_acted = arrays["best_acted"].copy()
        self.update, self.frames = int(plain["update"]), int(plain["frames"])
        self.walked = int(plain.get("walked", self.walked))
        self.best_at, self.best_success = int(plain["best_at"]), float(plain["best_success"])
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


# The network of one expert and its PPO update, in NumPy: small nets on a CPU need no framework to be fast.
#
# All parameters live in one flat vector, with views for the layers, so that Adam and averaging are one line.

Params = dict[str, Floats]
KEYS = (
    "torso/0/weight", "torso/0/bias", "torso/1/weight", "torso/1/bias",
    "actor/weight", "actor/bias", "critic/weight", "critic/bias",
)  # fmt: skip


NEVER = -1e4
"""The logit of an action that is left out; in float32 its exponential is 0."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an expert's network."""

    inputs: int
    hidden: int
    actions: int

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in the order of the flat vector; the last head is actor and critic side by side."""
        head = self.actions + 1
        return (
            (self.inputs, self.hidden), (self.hidden,), (self.hidden, self.hidden), (self.hidden,),
            (self.hidden, head), (head,),
        )  # fmt: skip


class Losses(NamedTuple):
    """Means over a minibatch."""

    policy: float
    value: float
    entropy: float


class Network:
    """Two hidden ReLU layers shared by an actor and a critic head."""

    def __init__(self, shape: Shape, flat: Floats | None = None) -> None:
        self.shape = shape
        size = sum(int(np.prod(layer)) for layer in shape.layers)
        self.flat: Floats = np.zeros(size, np.float32) if flat is None else flat
        self.w0, self.b0, self.w1, self.b1, self.wh, self.bh = _views(self.flat, shape)

    @classmethod
    def initial(cls, shape: Shape, rng: np.random.Generator) -> Network:
        """Orthogonal weights; a nearly uniform policy."""
        net = cls(shape)
        net.w0[:] = orthogonal(net.w0.shape, 2**0.5, rng)
        net.w1[:] = orthogonal(net.w1.shape, 2**0.5, rng)
        net.wh[:, :-1] = orthogonal((shape.hidden, shape.actions), 0.01, rng)
        net.wh[:, -1:] = orthogonal((shape.hidden, 1), 1.0, rng)
        return net

    @classmethod
    def from_params(cls, params: Mapping[str, Floats], name: str = "an expert") -> Network:
        """The network of an expert, called `name`; a `DataError` says which array it has not as it should be."""
        if set(params) != set(KEYS):
            wrong = sorted(set(params) ^ set(KEYS))
            raise DataError(
                f"{name} must have exactly the arrays {', '.join(KEYS)}; wrong: {', '.join(wrong)}"
            )
        arrays = {key: np.asarray(array) for key, array in params.items()}
        first, last = arrays["torso/0/weight"].shape, arrays["actor/bias"].shape
        if (len(first), len(last)) != (2, 1):
            raise DataError(
                f"{name}: its first weight must be a matrix and its actor bias a vector, got shapes {first} and {last}"
            )
        net = cls(Shape(*first, *last))
        for key, view in net.views().items():
            if arrays[key].shape != view.shape:
                raise DataError(f"{name}: {key!r} must have shape {view.shape}, got {arrays[key].shape}")
            if arrays[key].dtype.kind != "f":
                raise DataError(f"{name}: {key!r} must hold numbers as float32 does, got {arrays[key].dtype}")
            with np.errstate(over="ignore"):
                view[...] = arrays[key]
            if not np.isfinite(view).all():
                raise DataError(
                    f"{name}: {key!r} has numbers that are not finite, so the training diverged; lower its "
                    "learning rate"
                )
        return net

    def views(self) -> Params:
        """The layers by name, sharing memory with the network."""
        arrays = (
            self.w0, self.b0, self.w1, self.b1,
            self.wh[:, :-1], self.bh[:-1], self.wh[:, -1:], self.bh[-1:],
        )  # fmt: skip
        return dict(zip(KEYS, arrays, strict=True))

    def params(self) -> Params:
        """The layers by name, copied."""
        return {key: np.ascontiguousarray(view) for key, view in self.views().items()}

    def listening(self, deaf: Sequence[int]) -> Floats:
        """A mask of `flat` that is 0 on the weights of the inputs in `deaf`; those weights are set to 0."""
        mask = np.ones_like(self.flat)
        _views(mask, self.shape)[0][list(deaf)] = 0
        self.flat *= mask
        return mask

    def never(self, actions: Sequence[int]) -> None:
        """Leave these actions out: their chance is exactly 0, and so is every gradient that could change it."""
        self.wh[:, list(actions)] = 0
        self.bh[list(actions)] = NEVER

    def copy(self) -> Network:
        """The same parameters in memory of their own."""
        return Network(self.shape, self.flat.copy())

    def forward(self, observations: Floats) -> tuple[Floats, Floats]:
        """`[B, actions]` log-probabilities and `[B]` values; what a world shows behind the inputs is not seen."""
        observations = observations[:, : self.shape.inputs]
        hidden = np.maximum(observations @ self.w0 + self.b0, 0)
        hidden = np.maximum(hidden @ self.w1 + self.b1, 0)
        heads = hidden @ self.wh + self.bh
        return log_softmax(heads[:, :-1]), heads[:, -1]

    def gradient(
        self,
        observations: Floats,  # [B, inputs]
        actions: Ints,  # [B]
        old_logprobs: Floats,  # [B]
        advantages: Floats,  # [B]
        returns: Floats,  # [B]
        *,
        clip: float,
        entropy_coef: float,
        value_coef: float,
    ) -> tuple[Floats, Losses]:
        """Gradient of the clipped PPO loss (arXiv:1707.06347, eq. 7 and 9) with respect to `flat`."""
        count = len(actions)
        every = np.arange(count)
        observations = observations[:, : self.shape.inputs]
        before0 = observations @ self.w0 + self.b0
        hidden0 = np.maximum(before0, 0)
        before1 = hidden0 @ self.w1 + self.b1
        hidden1 = np.maximum(before1, 0)
        heads = hidden1 @ self.wh + self.bh
        logprobs, values = log_softmax(heads[:, :-1]), heads[:, -1]
        probs = np.exp(logprobs)
        entropy = -(probs * logprobs).sum(1)
        surrogate, slope = clipped_surrogate(logprobs[every, actions], old_logprobs, advantages, clip)
        d_heads = np.empty_like(heads)
        d_logits = probs * (slope[:, None] + entropy_coef * (logprobs + entropy[:, None]))
        d_logits[every, actions] -= slope
        d_heads[:, :-1] = d_logits / count
        d_heads[:, -1] = 2 * value_coef / count * (values - returns)
        out = np.empty_like(self.flat)
        g_w0, g_b0, g_w1, g_b1, g_wh, g_bh = _views(out, self.shape)
        np.matmul(hidden1.T, d_heads, out=g_wh)
        g_bh[:] = d_heads.sum(0)
        d_hidden = (d_heads @ self.wh.T) * (before1 > 0)
        np.matmul(hidden0.T, d_hidden, out=g_w1)
        g_b1[:] = d_hidden.sum(0)
        d_hidden = (d_hidden @ self.w1.T) * (before0 > 0)
        np.matmul(observations.T, d_hidden, out=g_w0)
        g_b0[:] = d_hidden.sum(0)
        losses = Losses(
            float(-surrogate.mean()), float(((values - returns) ** 2).mean()), float(entropy.mean())
        )
        return out, losses


class Adam:
    """Adam (arXiv:1412.6980): moments of a flat vector of float32, and the step that they lead to."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size, np.float32)
        self.square = np.zeros(size, np.float32)
        self.count = 0

    def step(self, flat: Floats, gradient: Floats, lr: float, max_norm: float) -> None:
        """Move `flat` in place, by a gradient whose norm is clipped to `max_norm`."""
        norm = float(np.sqrt(np.dot(gradient, gradient)))
        if norm > max_norm:
            gradient = gradient * np.float32(max_norm / norm)
        self.count += 1
        self.mean += np.float32(0.1) * (gradient - self.mean)
        self.square += np.float32(0.001) * (gradient * gradient - self.square)
        rate = np.float32(lr / (1 - 0.9**self.count))
        spread = np.sqrt(self.square * np.float32(1 / (1 - 0.999**self.count)))
        flat -= rate * self.mean / (spread + np.float32(1e-5))


def _views(flat: Floats, shape: Shape) -> list[Floats]:
    views, at = [], 0
    for layer in shape.layers:
        size = int(np.prod(layer))
        views.append(flat[at : at + size].reshape(layer))
        at += size
    return views


Arrays = dict[str, NDArray]
_MIXTURE_KEY = re.compile(r"expert_(0|[1-9][0-9]*)/(.+)")
_NOTE = "shoal"  # all metadata under one key: with several, the order in the file, and its sha256, would vary


def remap(indices: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Global expert indices to contiguous local ones and back, in ascending order.

    >>> remap([50, 0, 10, 5])
    ({0: 0, 5: 1, 10: 2, 50: 3}, {0: 0, 1: 5, 2: 10, 3: 50})
    """
    chosen = sorted(set(indices))
    if chosen and chosen[0] < 0:
        raise ValueError(f"expert indices must not be negative, got {chosen[0]}")
    return {index: local for local, index in enumerate(chosen)}, dict(enumerate(chosen))


def build_remapping(
    dependency_skill_names: Sequence[str],
    new_skill_global_expert_idx: int,
    completed_skills: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[int, int], dict[int, int]]:
    """Global to local and local to global indices of the experts that a training loads.

    Args:
        dependency_skill_names: skills whose experts the training needs.
        new_skill_global_expert_idx: expert of the skill to train.
        completed_skills: `{name: {"expert_idx": …}}`.

    Raises:
        ValueError: a dependency that is not among the completed skills.

    >>> done = {"Collect Wood": {"expert_idx": 0}, "Collect Stone": {"expert_idx": 2}}
    >>> build_remapping(["Collect Wood", "Collect Stone"], 7, done)
    ({0: 0, 2: 1, 7: 2}, {0: 0, 1: 2, 2: 7})
    """
    for name in dependency_skill_names:
        if name not in completed_skills:
            raise ValueError(
                f"dependency {name!r} is not among the completed skills.{did_you_mean(name, completed_skills)}"
            )
    needed = [int(completed_skills[name]["expert_idx"]) for name in dependency_skill_names]
    return remap([*needed, new_skill_global_expert_idx])


def join_mixture(experts: Mapping[int, Mapping[str, NDArray]]) -> Arrays:
    """One flat set of arrays `expert_<local>/<key>` of several experts."""
    return {
        f"expert_{local}/{key}": array for local, params in experts.items() for key, array in params.items()
    }


def arrays_of(group: str, arrays: Mapping[str, NDArray]) -> Arrays:
    """The arrays whose names begin with `group/`, without that."""
    return {
        key.removeprefix(f"{group}/"): array for key, array in arrays.items() if key.startswith(f"{group}/")
    }


def split_mixture(arrays: Mapping[str, NDArray]) -> dict[int, Arrays]:
    """The experts in what `join_mixture` made, by local index."""
    experts: dict[int, Arrays] = {}
    for key, array in arrays.items():
        match = _MIXTURE_KEY.fullmatch(key)
        if not match:
            raise DataError(f"{key!r} is not an expert's array; expected expert_<number>/<name>")
        experts.setdefault(int(match[1]), {})[match[2]] = array
    return dict(sorted(experts.items()))


def average(one: Mapping[str, NDArray], other: Mapping[str, NDArray]) -> Arrays:
    """The mean of two experts of the same shape."""
    if {key: array.shape for key, array in one.items()} != {key: array.shape for key, array in other.items()}:
        raise ValueError("experts of different shapes cannot be averaged")
    return {key: ((array + other[key]) / 2).astype(array.dtype) for key, array in one.items()}


def compare(
    one: Mapping[str, NDArray], other: Mapping[str, NDArray]
) -> list[tuple[str, float, float, float]]:
    """How far each array of two experts lies apart: distance, share of the first's length, angle in degrees."""
    found = []
    for name in one:
        if name not in other or one[name].shape != other[name].shape:
            raise DataError(f"the two experts differ in shape: {name}")
        a, b = one[name].astype(np.float64).ravel(), other[name].astype(np.float64).ravel()
        lengths = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        cosine = float(a @ b) / (lengths[0] * lengths[1]) if all(lengths) else 1.0
        distance = float(np.linalg.norm(a - b))
        angle = math.degrees(math.acos(min(1.0, max(-1.0, cosine))))
        found.append((name, distance, distance / lengths[0] if lengths[0] else 0.0, angle))
    return found


def encode(arrays: Mapping[str, NDArray], note: Mapping[str, Any] | None = None) -> bytes:
    """A safetensors file; equal arrays and notes give equal bytes."""
    data: bytes = _safetensors().save(
        {key: np.ascontiguousarray(array) for key, array in arrays.items()},
        metadata={_NOTE: json.dumps(dict(note or {}), sort_keys=True)},
    )
    return data


def decode(data: bytes, name: str) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and note of a safetensors file; a `DataError` names the file that is broken."""
    with reading(name, "is not a safetensors file of shoal"):
        arrays = _safetensors().load(data)
        size = int.from_bytes(data[:8], "little")
        return arrays, json.loads(json.loads(data[8 : 8 + size]).get("__metadata__", {}).get(_NOTE, "{}"))


def _safetensors() -> Any:
    with needs_extra("training skills", "train"):
        import safetensors.numpy
    return safetensors.numpy
