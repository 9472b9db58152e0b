"""What a training is given, what it collects and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shoal.skills.network import Network
from shoal.skills.plan import Step
from shoal.skills.spec import Skill
from shoal.skills.worlds import Floats, Ints


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
    success_state_rate: float = 0.98
    """stop when this share of evaluation episodes succeeds"""
    patience_frames: float = 1.6e5
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
    stopped: str  # "learned" | "plateau" | "budget"
    episodes: dict[str, Floats]  # "start", "before" (the last action), "end" [E, features], "success" [E]
    bank_size: int = 0


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
