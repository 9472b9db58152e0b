"""Training on recorded samples, images included: imitate them, or weigh them by their rewards (clipped, in groups).

A sample is what `shoal.splitting` makes: prompt and response ids, the mask of what is trained, positions, and what
the model needs of its images. It is learned from as any other, see `shoal.train.agent.update`. Minibatches depend on
(seed, epoch) alone, so a run that was killed goes on from its checkpoint as if it had not been.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from shoal.core.configuration import check_fields, first_change
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json, verify_folder, write_folder, write_json
from shoal.core.seeding import stream
from shoal.samplers.models import looks_back
from shoal.samplers.sampler import ROUNDING
from shoal.train.agent.algorithms.advantages import group_relative
from shoal.train.agent.algorithms.losses import Aggregation, unread_bounds
from shoal.train.agent.batch.packing import Batching, MicroBatch, token_values
from shoal.train.agent.batch.samples import Column, Floats, Sample
from shoal.train.agent.config import AgentProxy, Algorithm, KLPenalty, check_ranges
from shoal.train.agent.optimizer import MasterAdamW, trained_parameters
from shoal.train.agent.policies.huggingface import HuggingFacePolicy, safe_batching
from shoal.train.agent.processes.weights import fill_optimizer, optimizer_tensors
from shoal.train.agent.update import Learner, Totals, gradient_step, minibatches

Objective = Literal["supervised", "grpo"]


@dataclass(frozen=True)
class RecordedTraining:
    """How to learn from recorded samples."""

    objective: Objective = "supervised"
    """`supervised` raises the likelihood of every trained token; `grpo` that of tokens of episodes that beat their
    group (recordings of one task), with ratios against the recorded log-probabilities, clipped."""
    epochs: int = 1
    minibatch_size: int = 8
    """Samples of a gradient step."""
    micro_batch_tokens: int = 8192
    """Tokens that go through the network at a time, padding included."""
    batching: Batching = "packed"
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Longer gradients are shortened to this length; 0 or null leaves them as they are."""
    loss_aggregation: Aggregation = "token_mean"
    """As `algorithm.loss_aggregation`; `sequence_mean` is that of GRPO."""
    policy_loss: str = "clip"
    """A registered loss, for `grpo`."""
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    checkpoint_every: int = 50
    """Gradient steps; 0 for none before the end."""

    def __post_init__(self) -> None:
        check_ranges(self, minibatch_size="[1, inf)", learning_rate="(0, inf)", checkpoint_every="[0, inf)")
        check_ranges(self, epochs="[1, inf)", weight_decay="[0, inf)")
        algorithm = self.algorithm()
        check_fields(self)
        if self.objective == "grpo":
            for conflict in unread_bounds(algorithm):
                raise ConfigError(conflict.replace("algorithm.", ""))
            return
        for name in ("policy_loss", "clip_ratio_low", "clip_ratio_high"):
            if getattr(self, name) != getattr(Algorithm(), name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect with objective=supervised: leave it out, or set "
                    f"objective to grpo"
                )

    def algorithm(self) -> Algorithm:
        """The settings that a gradient step reads."""
        loss = self.policy_loss if self.objective == "grpo" else "likelihood"
        names = (
            "loss_aggregation", "clip_ratio_low", "clip_ratio_high", "micro_batch_tokens", "batching", "max_grad_norm",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        return Algorithm(policy_loss=loss, kl=KLPenalty(0.0), **given)

    def comparable(self) -> dict[str, Any]:
        """What must be equal for a run to go on: all that can change its results."""
        ignored = ("micro_batch_tokens", "batching", "checkpoint_every")
        return {name: value for name, value in asdict(self).items() if name not in ignored}


def recorded_samples(samples: Sequence[Any], objective: Objective) -> list[Sample]:
    """What a step reads, from samples of `shoal.splitting` (`Batch.samples()`).

    Raises:
        DataError: `grpo` without recorded log-probabilities, or with some that are none, or without a group whose
            rewards differ.
    """
    advantages = np.ones(len(samples))
    if objective == "grpo":
        advantages = _advantages(samples)
        if any(sample.logprobs is None for sample in samples):
            raise DataError(
                "objective=grpo needs the log-probabilities that were recorded: split step by step with use_vllm_logp"
            )
        for sample in samples:
            logprobs = np.asarray(sample.logprobs)
            finite = (logprobs <= ROUNDING).all() and not np.isinf(logprobs).any()
            if len(logprobs) != len(sample.response_mask) or not finite:
                raise DataError(
                    f"objective=grpo needs a finite log-probability of at most 0 for each token, trajectory "
                    f"{sample.traj_index} (task {sample.uid}) has others: leave it out"
                )
    made = []
    for sample, advantage in zip(samples, advantages, strict=True):
        border, mask = len(sample.prompt_ids), np.array(sample.response_mask, bool)
        mask[:1] &= border > 0  # nothing comes before the first token of a sample without a prompt
        places = np.flatnonzero(mask) + border
        if not len(places):
            continue
        # supervised does not read them
        old = np.zeros(len(mask)) if sample.logprobs is None else sample.logprobs
        columns: dict[Column, Floats] = {
            "advantages": np.full(len(places), advantage, np.float32),
            "old_logprobs": old[mask].astype(np.float32),
            "rollout_logprobs": old[mask].astype(np.float32),
        }
        made.append(_laid(sample, places, columns))
    if not made:
        raise DataError("no sample has a token to train")
    return made


def _laid(sample: Any, places: np.ndarray, columns: dict[Column, Floats]) -> Sample:
    """A sample of `shoal.splitting` as networks read it, with what is trained or asked at these places."""
    counted = np.asarray(sample.position_ids, np.int64)
    plain = len(counted) == 1 and not sample.inputs and (counted == np.arange(counted.shape[1])).all()
    ids = tuple(np.asarray(sample.input_ids).tolist())
    return Sample(ids, places, columns, None if plain else counted, sample.inputs or {})


def _advantages(samples: Sequence[Any]) -> np.ndarray:
    """Of each sample: how its trajectory's reward compares with those of its task, each trajectory once."""
    rewards: dict[int, float] = {}
    tasks: dict[int, str] = {}
    for sample in samples:
        paid = sample.reward if sample.reward is not None else float(np.sum(sample.rewards))
        if not math.isfinite(paid):  # all of its task would count nothing
            raise DataError(
                f"objective=grpo needs rewards that are finite, trajectory {sample.traj_index} (task {sample.uid}) has "
                f"{paid}: leave it out, or give it another"
            )
        rewards[sample.traj_index], tasks[sample.traj_index] = paid, sample.uid
    names = {uid: number for number, uid in enumerate(dict.fromkeys(tasks.values()))}
    order = list(rewards)
    groups = [names[tasks[index]] for index in order]
    relative = dict(zip(order, group_relative([rewards[i] for i in order], groups).tolist(), strict=True))
    if not any(relative.values()):
        raise DataError(
            "objective=grpo compares recordings of one task, and no task has two with different rewards: record "
            "several tries of each task, and give their rewards"
        )
    return np.array([relative[sample.traj_index] for sample in samples])


# --- the loop
class RecordedTrainer:
    """Trains a causal language model of transformers on `recorded_samples`, step by step.

    `pad_id` fills rows up; the `seed` is that of the order of samples.

    Raises:
        DataError: the samples have tokens that the model does not know.
        ConfigError: the model cannot read them as training lays them out.
    """

    def __init__(
        self, model: Any, samples: Sequence[Sample], config: RecordedTraining, pad_id: int, seed: int = 0
    ) -> None:
        self.model, self.samples, self.config, self.seed = model, list(samples), config, seed
        known = model.get_input_embeddings().weight.shape[0]
        ends = [end for sample in self.samples for end in (min(sample.ids), max(sample.ids))]
        if ends and not 0 <= min(ends) <= max(ends) < known:
            raise DataError(
                f"the recordings have token ids from {min(ends)} to {max(ends)}, and the model knows those below "
                f"{known}: split them with the model's own tokenizer"
            )
        placed = [sample for sample in self.samples if sample.positions is not None]
        longest = max((len(sample.ids) for sample in placed), default=0)
        if 0 < (window := looks_back(model)) < longest:
            raise ConfigError(
                f"a sample has {longest} tokens, and this model has layers that look back at {window:.0f}, which "
                f"training on images does not: split them shorter, or take another model"
            )
        policy, algorithm = HuggingFacePolicy(model, None, pad_id), config.algorithm()
        rows = len(placed[0].positions) if placed else 0  # type: ignore[arg-type]
        algorithm = replace(algorithm, batching=safe_batching(policy, algorithm.batching, rows=rows))
        self.step = 0
        group = {"params": trained_parameters(model), "lr": config.learning_rate}
        self.optimizer = MasterAdamW([group], config.weight_decay)
        self._learner = Learner(
            policy, self.optimizer, algorithm, AgentProxy(temperature=1.0), seed=seed, log_entropy=False
        )

    @property
    def steps(self) -> int:
        """Gradient steps in all."""
        return self.config.epochs * math.ceil(len(self.samples) / self.config.minibatch_size)

    def train(self) -> Iterator[dict[str, float]]:
        """The steps that are left; yields what each was like."""
        a_pass = math.ceil(len(self.samples) / self.config.minibatch_size)
        while self.step < self.steps:
            epoch, place = divmod(self.step, a_pass)
            order = stream(self.seed, "recorded", epoch).permutation(len(self.samples))
            part = minibatches(order, self.config.minibatch_size)[place]
            row = self.gradient_step([self.samples[i] for i in part])
            self.step += 1
            yield {"iteration": self.step, "epoch": epoch + 1, **row}

    def gradient_step(self, minibatch: Sequence[Sample]) -> dict[str, float]:
        """One step of the optimizer; the weights of the minibatch's tokens sum to 1, however it is cut."""
        totals = Totals()
        gradient_step(self._learner, minibatch, totals)
        return {
            "loss": totals.loss,
            "logprob": totals.logprob / totals.tokens,
            "clip_fraction": totals.clipped / totals.tokens,
            "grad_norm": totals.grad_norm,
            "trained_tokens": totals.tokens,
        }

    def save(self, folder: Path) -> None:
        """Write all that comes after this step; the folder appears whole or not at all."""
        with write_folder(folder) as new:
            self.model.save_pretrained(new / "model")
            save_file(optimizer_tensors(self.optimizer), new / "optimizer.safetensors")
            write_json(new / "state.json", {"step": self.step, "run": self._described()})

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            DataError: it is of another run.
        """
        state = read_json(verify_folder(folder) / "state.json")
        if difference := first_change(state["run"], json.loads(json.dumps(self._described()))):
            raise DataError(
                f"{folder} is of another run: {difference}; resume with the same settings, recordings and split"
            )
        kept = type(self.model).from_pretrained(folder / "model")
        self.model.load_state_dict(kept.state_dict())
        self.step = int(state["step"])
        fill_optimizer(self.optimizer, load_file(folder / "optimizer.safetensors"))

    def _described(self) -> dict[str, Any]:
        """What must be equal for a run to go on; of the samples a sum, in their order, but for their images."""
        found = hashlib.sha256()
        for sample in self.samples:
            for array in (np.array(sample.ids), sample.trained, sample.positions, *sample.columns.values()):
                found.update(b"-" if array is None else repr(array.shape).encode() + array.tobytes())
        return {**self.config.comparable(), "seed": self.seed, "samples": found.hexdigest()}


# --- answers
def likeliest(model: Any, samples: Sequence[Any], pad_id: int, micro_batch_tokens: int) -> list[bool]:
    """Of each sample of `shoal.splitting`: whether the model, always taking the likeliest token, writes its response.

    The response is read and not written: a token is right if it is the likeliest one after those before it.
    """
    policy, device = HuggingFacePolicy(model, None, pad_id), str(next(model.parameters()).device)
    read = [_laid(one, np.arange(max(1, len(one.prompt_ids)), len(one.input_ids)), {}) for one in samples]

    def right(micro: MicroBatch) -> torch.Tensor:
        return micro.by_token(policy.logits(*micro.read).argmax(-1)) == micro.targets

    found = token_values(read, right, micro_batch_tokens, pad_id, device, "padded")
    return [bool(tokens.all()) for tokens in found]
