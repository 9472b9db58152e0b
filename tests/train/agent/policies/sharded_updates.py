"""Run by `torchrun` in `test_sharding.py`: three updates of a network in shards, and of its twin that is whole here.

    python -m torch.distributed.run --nproc-per-node 2 sharded_updates.py FOLDER CASE...

Every process trains a twin of its own. The first writes `FOLDER/told.json`: for each process, what it saw of each case.
"""

import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from tests.records import Exchange, trajectory_of
from tests.rollout.doubles import byte_tokenizer
from tests.rollout.doubles import llama_engine as make_llama
from tests.train.agent.checkpoints import tensors_of

from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.config import AgentProxy, Algorithm, Critic, KLPenalty, Lora, RolloutCorrection
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.lora import LoraPolicy
from shoal.train.agent.policies.reference import make_networks
from shoal.train.agent.policies.sync import WeightSync
from shoal.train.agent.processes.distributed import ALONE, Processes
from shoal.train.agent.processes.weights import gather, optimizer_tensors, whole
from shoal.train.agent.run.checkpoint import Progress, load_checkpoint, save_checkpoint
from shoal.train.agent.update import Learner, prepare_samples, update

PLAIN = Algorithm(
    adv_estimator="grpo", minibatch_size=4, micro_batch_tokens=40, weight_decay=0.01, kl=KLPenalty(0.05),
    rollout_correction=RolloutCorrection("truncate"), batching="padded", learning_rate=1e-3,
    critic=Critic(learning_rate=1e-3),
)  # fmt: skip
STRAIGHT = replace(PLAIN, rollout_correction=RolloutCorrection("none"))
"""The first pass of the policy after it generated is one of the update."""
WITH_CRITIC = replace(PLAIN, adv_estimator="gae")


def both(sampler):
    """A policy, and the sampler that shares its network."""
    return policy_of(sampler), sampler


def llama():
    return both(make_llama())


def tiny():
    return both(TinyEngine(["Up"], TinyShape(width=16, layers=2, heads=2, context=64), seed=1))


def experts(kind, **settings):
    """A mixture-of-experts model: with 6 experts for a handful of tokens, each process misses some."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 200}
        config = getattr(transformers, f"{kind}Config")(**plain, **heads, eos_token_id=None, **settings)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return both(HuggingFaceEngine(model, byte_tokenizer()))


def frozen():
    policy, sampler = llama()
    policy.freeze_all_but_last(1)
    return policy, sampler


def bfloat16():
    policy, sampler = llama()
    policy.module.to(torch.bfloat16)
    return policy, sampler


def lora(kind=torch.float32):
    policy, sampler = llama()
    policy.module.to(kind)
    return LoraPolicy(policy, Lora(rank=4), "base", 0), sampler


CASES = {
    "tiny": (tiny, replace(WITH_CRITIC, batching="packed", micro_batch_tokens=12)),
    "llama": (llama, STRAIGHT),
    "llama-critic": (llama, replace(WITH_CRITIC, batching="packed", micro_batch_tokens=12, epochs=2)),
    "llama-checkpointing": (llama, replace(PLAIN, gradient_checkpointing=True)),
    "llama-autocast": (llama, replace(PLAIN, precision="bfloat16")),
    "llama-bfloat16": (bfloat16, WITH_CRITIC),
    "llama-last-layer": (frozen, PLAIN),
    "paired": (lambda: (policy_of(make_llama()), make_llama()), STRAIGHT),
    "mixtral": (partial(experts, "Mixtral", num_local_experts=6, num_experts_per_tok=1), STRAIGHT),
    "qwen3-moe": (
        partial(
            experts, "Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8
        ),
        PLAIN,
    ),
    "lora": (lora, PLAIN),
    "lora-bfloat16": (lambda: lora(torch.bfloat16), WITH_CRITIC),
}


def played(iteration):
    """Nine episodes of one or two turns in three groups, in minibatches of three samples for two processes."""
    rng = np.random.default_rng(iteration)
    found = []
    for i in range(9):
        turns, context = [], tuple(rng.integers(6, 10, 3).tolist())
        for _ in range(1 + i % 2):
            answer = tuple(rng.integers(6, 60, int(rng.integers(1, 6))).tolist())
            logprobs = tuple(rng.normal(-4, 0.2, len(answer)).tolist())
            turns.append(Exchange("", context, answer, logprobs, "", "x", True, float(rng.normal()), "a"))
            context = (*context, *answer, *rng.integers(6, 60, 2).tolist())
        found.append(trajectory_of("env", iteration, i // 3, i % 3, 0, tuple(turns), True, True, False))
    return found


def bytes_of(tensors):
    """Of the memory behind tensors, each counted once."""
    local = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in local if storage.nbytes()}.values())


class Trained:
    """An engine with its critic, reference and optimizer."""

    def __init__(self, case, processes, folder):
        make, self.algorithm = CASES[case]
        settings = SimpleNamespace(
            algorithm=self.algorithm, model=SimpleNamespace(lora=Lora(rank=4 if "lora" in case else 0))
        )
        self.processes = processes
        policy, self.sampler = make()
        self.engine, self.critic, self.reference = make_networks(settings, policy, folder, processes)
        self.sync = WeightSync(self.engine, self.sampler)
        rates = (*self.algorithm.rates, self.algorithm.weight_decay)
        self.optimizer = split_optimizer(trained_parameters(self.engine.module), self.critic, *rates)
        self.held = self.between = 0
        self.optimizer.register_step_pre_hook(self._weigh)
        self._logits, self.engine.logits = self.engine.logits, self._scores

    def _weigh(self, *_):
        networks = [self.engine.module, *([self.critic] if self.critic else [])]
        parameters = [p for network in networks for p in network.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        moments = [
            v for values in self.optimizer.state.values() for v in values.values() if v.numel() > 1 or v.ndim
        ]
        self.held = bytes_of([*parameters, *gradients, *moments])

    def _scores(self, *arguments):
        scores = self._logits(*arguments)
        if scores.requires_grad:
            self.between = max(self.between, bytes_of(self.engine.module.parameters()))
        return scores

    def train(self, iteration):
        learner = Learner(
            self.engine, self.optimizer, self.algorithm, AgentProxy(temperature=1.0), self.critic,
            self.reference.policy, processes=self.processes,
        )  # fmt: skip
        return update(learner, prepare_samples(played(iteration), learner), iteration)

    def state(self):
        critic = {} if self.critic is None else gather(self.critic.state_dict(keep_vars=True))
        return {
            **{
                f"engine.{n}": value
                for n, value in gather(self.engine.module.state_dict(keep_vars=True)).items()
            },
            **{f"critic.{n}": value for n, value in critic.items()},
        }

    def moments(self):
        return {name: whole(value) for name, value in optimizer_tensors(self.optimizer).items()}

    def save(self, folder, iteration):
        networks = (self.engine, self.critic, self.optimizer)
        save_checkpoint(folder, *networks, Progress(iteration, 0.0, 0, 0), {}, 2, processes=self.processes)

    def load(self, folder):
        load_checkpoint(folder, self.engine, self.critic, self.optimizer, {})


def gap(one, two):
    assert one.keys() == two.keys()
    return max(float((one[name].float() - two[name].float()).abs().max()) for name in one)


def answers(engine):
    wanted = Sampling(max_tokens=6, temperature=1.0)
    asked = [Request((7, 8, 9, 6 + i), Key(0, (0, 0, i, 0)), wanted) for i in range(5)]
    return [(done.token_ids, done.logprobs) for done in engine.generate(asked)]


def alone(cut, twin):
    """What the first process generates with whole weights, while the others do something else, and its twin."""
    with cut.engine.whole() if cut.sync.shared else nullcontext():
        for one in (cut, twin):
            one.sync.carry()
        return [answers(one.sampler) for one in (cut, twin)] if cut.processes.first else None


def watch(case, processes, folder):
    idle = [0]
    even_out = Processes.even_out.__get__(processes)

    def counted(items):
        for item in even_out(items):
            idle[0] += item is None
            yield item

    processes.even_out = counted
    cut = Trained(case, processes, folder / case / "reference")
    twin = Trained(case, ALONE, folder / f"{case}-{processes.rank}" / "reference")
    for one in (cut, twin):
        one.reference.keep(one.engine)
    start = {name: tensor.clone() for name, tensor in twin.state().items()}
    told = {"answers": [alone(cut, twin)]}
    rows, other_rows = zip(*[(cut.train(i), twin.train(i)) for i in range(3)], strict=True)
    told |= {"gap": gap(cut.state(), twin.state()), "moved": gap(start, twin.state())}
    told["metrics"] = [rows, other_rows]
    told["held"] = [[cut.held, twin.held], [cut.between, twin.between]]
    told["idle"] = idle[0]
    told["state_gap"] = gap(cut.moments(), twin.moments())

    for one in (cut, twin):  # as the trainer does after an update
        one.engine.weights_version = 3
    told["answers"] += [alone(cut, twin)]

    cut.save(folder / case, 1)
    twin.save(folder / f"{case}-{processes.rank}", 1)
    processes.all_gather(lambda: None)
    saved, other = folder / case / "step-000001", folder / f"{case}-0" / "step-000001"
    told["file_gap"] = gap(tensors_of(saved), tensors_of(other))
    told["files"] = [sorted(str(file.relative_to(of)) for file in of.rglob("*")) for of in (saved, other)]
    cut.load(other)  # each goes on from the checkpoint of the other
    twin.load(saved)
    cut.reference.load()
    cut.train(3), twin.train(3)
    told["resumed_gap"] = gap(cut.state(), twin.state())
    for one in (cut, twin):  # as after a warm-up: other weights, and the version is what it was
        one.sync.changed()
    told["answers"] += [alone(cut, twin)]
    return told


def main():
    signal.alarm(400)  # processes that wait for each other for ever end too
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    processes = Processes.join("cpu", sharded=True)
    told = {case: watch(case, processes, folder) for case in sys.argv[2:]}
    everyone = processes.all_gather(lambda: told)
    if processes.first:
        (folder / "told.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
