"""Training on recorded samples, images included: imitate them, or weigh them by their rewards (clipped, in groups).

A sample is what `shoal.splitting` makes: prompt and response ids, the mask of what is trained, positions, and what
the model needs of its images. Samples share rows as in `shoal.train.agent.batch`; attention stays within a sample,
so packing decides speed and memory, never results. Minibatches depend on (seed, epoch) alone, and a checkpoint holds
all that comes after it: a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.core.configuration import check_fields
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json, verify_folder, write_folder, write_json
from shoal.core.seeding import derive_seed, stream
from shoal.maths.noise import torch_noise
from shoal.rollout.samplers.models import looks_back
from shoal.rollout.samplers.sampler import ROUNDING
from shoal.train.agent.advantages import group_relative
from shoal.train.agent.batch import Batching, Row, plan_batches
from shoal.train.agent.config import Algorithm, refuse_negative, refuse_not_positive
from shoal.train.agent.losses import LOSSES, Aggregation, Tokens, aggregation_weights, policy_losses
from shoal.train.agent.policy import MasterAdamW, trained_parameters
from shoal.train.agent.update import minibatches, refuse_diverged
from shoal.train.agent.weights import fill_optimizer, optimizer_tensors

Objective = Literal["supervised", "grpo"]
_BY_NAME: Any = None
"""Left out: what the name of the loss sets."""


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
    batching: Batching = "auto"
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    loss_aggregation: Aggregation = _BY_NAME
    """As `algorithm.loss_aggregation`: what `policy_loss` sets if left out, else `token_mean`."""
    policy_loss: str = "clip"
    """A registered loss, for `grpo`."""
    clip_ratio_low: float = _BY_NAME
    clip_ratio_high: float = _BY_NAME
    checkpoint_every: int = 50
    """Gradient steps; 0 for none before the end."""

    def __post_init__(self) -> None:
        refuse_not_positive(
            self, "epochs", "minibatch_size", "micro_batch_tokens", "learning_rate", "max_grad_norm"
        )
        algorithm = self.algorithm()
        for name in ("loss_aggregation", "clip_ratio_low", "clip_ratio_high"):
            object.__setattr__(self, name, getattr(algorithm, name))
        check_fields(self)
        refuse_negative(self, "checkpoint_every")
        if self.objective == "grpo":
            conflicts = LOSSES[self.policy_loss].conflicts
            for conflict in () if conflicts is None else conflicts(algorithm):
                raise ConfigError(conflict.replace("algorithm.", ""))
            return
        for name in ("policy_loss", "clip_ratio_low", "clip_ratio_high"):
            if getattr(self, name) != getattr(Algorithm(), name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect with objective=supervised: leave it out, or set "
                    f"objective to grpo"
                )

    def algorithm(self) -> Algorithm:
        """The settings that policy losses read."""
        names = ("policy_loss", "loss_aggregation", "clip_ratio_low", "clip_ratio_high", "weight_decay")
        return Algorithm(**{name: getattr(self, name) for name in names})

    def comparable(self) -> dict[str, Any]:
        """What must be equal for a run to go on: all that can change its results."""
        ignored = ("micro_batch_tokens", "batching", "checkpoint_every")
        return {name: value for name, value in asdict(self).items() if name not in ignored}


@dataclass(frozen=True)
class Recorded:
    """One sample as it goes into a row."""

    ids: np.ndarray  # [n] int64, prompt and response
    positions: np.ndarray  # [rows, n] int64
    places: np.ndarray  # [k] where the trained tokens stand
    images: Mapping[str, Any] = field(repr=False)  # tensors by the model's names; made when they are read
    advantages: np.ndarray  # [k] float32
    old_logprobs: np.ndarray | None  # [k] float32, as recorded


def recorded_samples(samples: Sequence[Any], objective: Objective) -> list[Recorded]:
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
            told = np.asarray(sample.logprobs)
            if len(told) != len(sample.response_mask) or not (told <= ROUNDING).all() or np.isinf(told).any():
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
        made.append(
            Recorded(
                ids=np.asarray(sample.input_ids, np.int64),
                positions=np.asarray(sample.position_ids, np.int64),
                places=places,
                images=sample.inputs or {},
                advantages=np.full(len(places), advantage, np.float32),
                old_logprobs=None if sample.logprobs is None else sample.logprobs[mask].astype(np.float32),
            )
        )
    if not made:
        raise DataError("no sample has a token to train")
    return made


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


# --- rows
@dataclass(frozen=True)
class Rows:
    """Samples in rows of one length `T`; `N` tokens of them are trained, in row-major order."""

    inputs: dict[str, Tensor]  # of the network
    where: Tensor  # [B, T] bool, N of them true
    targets: Tensor  # [N]
    samples: Tensor  # [N] which sample of the minibatch each trained token is of


def rows_of(
    samples: Sequence[Recorded], plan: Sequence[Row], pad: int, device: str, dtype: torch.dtype
) -> Rows:
    """Lay samples out behind each other in rows; each sees itself alone."""
    width = max(sum(len(samples[i].ids) for i in row) for row in plan)
    ids = np.full((len(plan), width), pad, np.int64)
    own = np.tile(-1 - np.arange(width), (len(plan), 1))  # padding is of nobody, and sees itself alone
    positions = np.zeros((samples[0].positions.shape[0], len(plan), width), np.int64)
    where = np.zeros(ids.shape, bool)
    of, images = [], []
    for number, row in enumerate(plan):
        start = 0
        for i in row:
            sample, stop = samples[i], start + len(samples[i].ids)
            ids[number, start:stop], own[number, start:stop] = sample.ids, i
            positions[:, number, start:stop] = sample.positions
            where[number, start + sample.places] = True
            of.append(np.full(len(sample.places), i))
            images.append(dict(sample.images))
            start = stop
    seen = torch.from_numpy(own[:, :, None] == own[:, None, :]).to(device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
    inputs = {
        "input_ids": torch.from_numpy(ids).to(device),
        "attention_mask": mask[:, None],
        "position_ids": torch.from_numpy(positions if len(positions) > 1 else positions[0]).to(device),
    }
    for name in dict.fromkeys(name for each in images for name in each):
        value = torch.cat([each[name] for each in images if name in each]).to(device)
        inputs[name] = value.to(dtype) if value.is_floating_point() else value
    trained = (where, ids[where], np.concatenate(of))
    return Rows(inputs, *(torch.from_numpy(part).to(device) for part in trained))


def token_logprobs(model: nn.Module, rows: Rows) -> Tensor:
    """`[N]` log-probabilities of the trained tokens."""
    return scores_of(model, rows.inputs, rows.where).gather(1, rows.targets[:, None])[:, 0]


def scores_of(model: Any, inputs: Mapping[str, Tensor], where: Tensor, temperature: float = 1.0) -> Tensor:
    """`[N, V]` log-probabilities of every token at the true places of `where`; only those are worked out."""
    hidden = model.base_model(**inputs, use_cache=False)[0]
    chosen = hidden[:, :-1][where[:, 1:]]
    return (model.get_output_embeddings()(chosen).float() / temperature).log_softmax(-1)  # type: ignore[no-any-return]


@torch.no_grad()
def refuse_other_reading(model: Any, samples: Sequence[Recorded], batching: Batching) -> None:
    """Try whether rows of several samples say of a text what the model says of it alone.

    Raises:
        ConfigError: they do not, or would not for the longest of the samples.
    """
    parameter, longest = next(model.parameters()), max(len(sample.ids) for sample in samples)
    if 0 < (window := looks_back(model)) < longest:
        raise ConfigError(
            f"a sample has {longest} tokens, and this model has layers that look back at {window:.0f}, which training "
            f"on recordings does not: split them shorter, or take another model"
        )
    text = np.resize(samples[0].ids[samples[0].places], 12)
    positions, places = np.tile(np.arange(12), (len(samples[0].positions), 1)), np.arange(1, 12)
    trial = [Recorded(each, positions, places, {}, np.ones(11), None) for each in (text, text[::-1])]
    plan = [[0, 1]] if batching in ("auto", "packed") else [[0], [1]]
    rows = rows_of(trial, plan, int(text[0]), str(parameter.device), parameter.dtype)
    ids = torch.from_numpy(np.stack([each.ids for each in trial])).to(parameter.device)
    said = model(input_ids=ids, use_cache=False).logits
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    if not torch.equal(model.get_output_embeddings()(hidden), said):
        raise ConfigError(
            "this model scales or caps its scores, which training on recordings does not: take another model"
        )
    alone = said[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
    gap = float((token_logprobs(model, rows) - alone).abs().max())
    if not gap <= (1e-3 if parameter.dtype == torch.float32 else 0.05 * (1 - float(alone.min()))):
        raise ConfigError(
            f"log-probs in the rows of batching={batching} differ by {gap:.2g} from those that this model gives of a "
            f"text alone: set batching=padded if they share rows, or take another model"
        )


# --- the loop
class RecordedTrainer:
    """Trains a network on recorded samples, step by step.

    Args:
        model: a causal language model of transformers, with or without images.
        samples: see `recorded_samples`.
        config: how.
        pad_id: fills rows up.
        seed: of the order of samples.

    Raises:
        DataError: the samples have tokens that the model does not know.
        ConfigError: the model's own log-probabilities are others than those that a step would work out.
    """

    def __init__(
        self, model: Any, samples: Sequence[Recorded], config: RecordedTraining, pad_id: int, seed: int = 0
    ) -> None:
        self.model, self.samples, self.config = model, list(samples), config
        self.pad_id, self.seed = pad_id, seed
        known = model.get_input_embeddings().weight.shape[0]
        ends = [end for sample in self.samples for end in (sample.ids.min(), sample.ids.max())]
        if ends and not 0 <= min(ends) <= max(ends) < known:
            raise DataError(
                f"the recordings have token ids from {min(ends)} to {max(ends)}, and the model knows those below "
                f"{known}: split them with the model's own tokenizer"
            )
        if self.samples:
            refuse_other_reading(model, self.samples, config.batching)
        self.step = 0
        group = {"params": trained_parameters(model), "lr": config.learning_rate}
        self.optimizer = MasterAdamW([group], config.weight_decay)
        self._algorithm = config.algorithm()

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

    def gradient_step(self, minibatch: Sequence[Recorded]) -> dict[str, float]:
        """One step of the optimizer; the weights of the minibatch's tokens sum to 1, however it is cut."""
        config, parameters = self.config, trained_parameters(self.model)
        device, dtype = str(parameters[0].device), parameters[0].dtype
        weights = aggregation_weights([len(s.places) for s in minibatch], config.loss_aggregation)
        self.optimizer.zero_grad(set_to_none=True)
        totals = {"loss": 0.0, "logprob": 0.0, "clip_fraction": 0.0}
        plans = plan_batches([len(s.ids) for s in minibatch], config.micro_batch_tokens, config.batching)
        for plan in plans:
            rows = rows_of(minibatch, plan, self.pad_id, device, dtype)
            order = [i for row in plan for i in row]
            logprobs = token_logprobs(self.model, rows)
            weight = _joined([weights[i] for i in order], device)
            if config.objective == "supervised":
                losses, clipped = -logprobs, torch.zeros_like(logprobs, dtype=torch.bool)
            else:
                old = _joined([minibatch[i].old_logprobs for i in order], device)
                advantages = _joined([minibatch[i].advantages for i in order], device)
                tokens = Tokens(logprobs, old, advantages, rows.samples)
                losses, clipped = policy_losses(tokens, self._algorithm)
            loss = (losses * weight).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.take_gradients()
            totals["loss"] += float(loss.detach())
            totals["logprob"] += float(logprobs.detach().sum())
            totals["clip_fraction"] += float(clipped.sum())
        count = sum(len(s.places) for s in minibatch)
        gradient = nn.utils.clip_grad_norm_(self.optimizer.stepped[0], config.max_grad_norm)
        norm = refuse_diverged(gradient, "policy")
        self.optimizer.step()
        means = {name: totals[name] / count for name in ("logprob", "clip_fraction")}
        return {"loss": totals["loss"], **means, "grad_norm": norm, "trained_tokens": count}

    def save(self, folder: Path) -> None:
        """Write all that comes after this step; the folder appears whole or not at all."""
        with write_folder(folder) as new:
            self.model.save_pretrained(new / "model")
            save_file(optimizer_tensors(self.optimizer), new / "optimizer.safetensors")
            state = {"step": self.step, "steps": self.steps, "seed": self.seed, "samples": self._digest()}
            write_json(new / "state.json", {**state, "settings": self.config.comparable()})

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            DataError: it is of another run.
        """
        verify_folder(folder)
        state = read_json(folder / "state.json")
        if (state.get("steps"), state.get("seed")) != (self.steps, self.seed):
            raise DataError(f"{folder} is of a run with {state.get('steps')} steps and seed {state.get('seed')}, "
                            f"not {self.steps} and {self.seed}; resume with the same settings")  # fmt: skip
        for name, value in self.config.comparable().items():
            begun = state.get("settings", {}).get(name, value)  # older ones do not tell
            if begun != value:
                raise DataError(
                    f"{folder} is of a run with {name}={begun}, not {value}; resume with the same settings"
                )
        if state.get("samples", self._digest()) != self._digest():
            raise DataError(
                f"{folder} is of a run on other samples; resume with the same recordings and split"
            )
        kept = type(self.model).from_pretrained(folder / "model")
        self.model.load_state_dict(kept.state_dict())
        self.step = int(state["step"])
        fill_optimizer(self.optimizer, load_file(folder / "optimizer.safetensors"))

    def _digest(self) -> str:
        """Of the samples in their order, but for their images."""
        found = hashlib.sha256()
        for sample in self.samples:
            old = sample.old_logprobs if self.config.objective == "grpo" else None
            for array in (sample.ids, sample.positions, sample.places, sample.advantages, old):
                found.update(b"-" if array is None else repr(array.shape).encode() + array.tobytes())
        return found.hexdigest()


def _joined(arrays: Sequence[Any], device: str) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)


# --- answers
AT_A_TIME = 16
"""Prompts that are answered side by side."""


def answer(
    model: Any,
    prompts: Sequence[Any],
    pad_id: int,
    end_ids: Sequence[int],
    *,
    max_tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[tuple[list[int], list[float]]]:
    """What the model writes after the prompts of samples: token ids and their log-probabilities.

    Args:
        model: as for `RecordedTrainer`.
        prompts: samples of `shoal.splitting`, of which only the prompts are read.
        pad_id: fills rows up.
        end_ids: tokens that end an answer; they are part of it.
        max_tokens: of an answer.
        temperature: 0 takes the likeliest token.
        seed: of the tokens that are drawn, by the number of the prompt and of the token.
    """
    if max_tokens < 1 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"max_tokens must be at least 1 and temperature 0 or above, got {max_tokens} and {temperature}"
        )
    found: list[tuple[list[int], list[float]]] = []
    for first in range(0, len(prompts), AT_A_TIME):
        some = prompts[first : first + AT_A_TIME]
        noises = [stream(seed, "recorded answers", first + number) for number in range(len(some))]
        written: list[tuple[list[int], list[float]]] = [([], []) for _ in some]
        for chances in _next_tokens(model, some, pad_id, temperature, written):
            for (tokens, logprobs), chance, noise in zip(written, chances, noises, strict=True):
                if temperature:
                    gumbel = -np.log(-np.log(noise.uniform(1e-12, 1, len(chance))))
                    tokens.append(int((chance + gumbel).argmax()))
                else:
                    tokens.append(int(chance.argmax()))
                logprobs.append(float(chance[tokens[-1]]))
            ends = [min((tokens.index(end) for end in end_ids if end in tokens), default=None)
                    for tokens, _ in written]  # fmt: skip
            if None not in ends or len(written[0][0]) == max_tokens:
                break
        for (tokens, logprobs), end in zip(written, ends, strict=True):
            count = max_tokens if end is None else end + 1
            found.append((tokens[:count], logprobs[:count]))
    return found


@torch.no_grad()
def _next_tokens(
    model: Any, prompts: Sequence[Any], pad_id: int, temperature: float, written: Sequence[Any]
) -> Iterator[np.ndarray]:
    """`[B, V]` log-probabilities of what comes next, while the caller adds a token to each of `written`."""
    device, dtype = str(next(model.parameters()).device), next(model.parameters()).dtype
    shown = [
        Recorded(
            np.asarray(sample.prompt_ids, np.int64), np.asarray(sample.prompt_positions, np.int64),
            np.array([len(sample.prompt_ids) - 1]), sample.prompt_inputs, np.ones(1), None,
        )
        for sample in prompts
    ]  # fmt: skip
    inputs = rows_of(shown, [[row] for row in range(len(shown))], pad_id, device, dtype).inputs
    last = torch.tensor([len(each.ids) - 1 for each in shown], device=device)
    seen = torch.arange(inputs["input_ids"].shape[1], device=device) <= last[:, None]
    following = torch.tensor([int(each.positions.max()) + 1 for each in shown], device=device)
    several = len(shown[0].positions) > 1
    while True:
        made = model.base_model(**inputs, use_cache=True)
        hidden = made[0][torch.arange(len(shown), device=device), last]
        scores = model.get_output_embeddings()(hidden).float()
        yield (scores / (temperature or 1.0)).log_softmax(-1).cpu().numpy()
        last = torch.zeros_like(last)
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        places = following[:, None].expand(len(shown[0].positions), -1, -1) if several else following[:, None]
        inputs = {  # what stands before, and its images, are in the cache
            "input_ids": torch.tensor([[tokens[-1]] for tokens, _ in written], device=device),
            "attention_mask": mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None, None],
            "position_ids": places,
            "past_key_values": made.past_key_values,
        }
        following = following + 1


def tiny_model(vocabulary: int, image_token_id: int, seed: int, *, width: int = 64, layers: int = 2) -> Any:
    """A Qwen2.5-VL of random weights, small enough to train on two cores.

    Args:
        vocabulary: tokens that it knows.
        image_token_id: the one that stands for a part of an image.
        seed: of the weights.
        width: of the language part; the vision part has half.
        layers: of each part.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    head = width // 4
    text = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 4 * width, "vocab_size": vocabulary, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None,
        "rope_scaling": {"type": "default", "mrope_section": [head // 2 - 2 * (head // 6), head // 6, head // 6]},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0,
                            "mrope_section": [head // 2 - 2 * (head // 6), head // 6, head // 6]},
    }  # fmt: skip
    sight = {
        "hidden_size": width // 2, "depth": layers, "num_heads": 2, "intermediate_size": width, "patch_size": 14,
        "out_hidden_size": width, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [0],
        "window_size": 112,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=sight, image_token_id=image_token_id, tie_word_embeddings=True
    )
    with torch_noise(derive_seed(seed, "recorded model")):
        return Qwen2_5_VLForConditionalGeneration(config).eval()
