"""With `engine.batch_invariant` the sampler and the trainer say the same of a token, to the last bit, in any batch."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from tests.rollout.doubles import byte_tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from shoal.core.errors import ConfigError
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.huggingface.invariant import attention, make_invariant
from shoal.samplers.registry import EngineConfig, ReplicaConfig
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.train.agent.batch.packing import micro_batches
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.config import Lora, compose_config
from shoal.train.agent.policies.loading import load_policy, policy_of
from shoal.train.agent.policies.lora import add_lora
from shoal.train.agent.policies.policy import score, training_mode
from shoal.train.agent.trainer import AgentTrainer

KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = list(product(KINDS, DTYPES))
CUTS = [("packed", 4096), ("packed", 700), ("padded", 500), ("padded", 1)]
"""Ways to lay samples out in rows, and tokens of a micro-batch."""
BATCHES = [1, 3, 16]


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


in_threads = pytest.mark.parametrize(
    ("kind", "dtype", "threads"),
    [("llama", "float32", 1), ("qwen2", "bfloat16", 1), ("llama", "bfloat16", 2)],
    indirect=["threads"],
)


def make_model(kind="llama", dtype="float32", device="cpu"):
    """Two layers, of sizes that are no multiples of anything, and weights that are far from even."""
    config, model = KINDS[kind]
    shape = {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6, "num_key_value_heads": 2}
    shape |= {"vocab_size": len(byte_tokenizer()), "num_hidden_layers": 2, "initializer_range": 0.3}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return model(config(**shape, max_position_embeddings=1000)).to(device, DTYPES[dtype]).eval()


def make_engine(kind="llama", dtype="float32", device="cpu", invariant=True, **settings):
    model = make_model(kind, dtype, device)
    if invariant:
        make_invariant(model)
    return HuggingFaceEngine(model, byte_tokenizer(), **settings)


def requests(engine, n, most=8):
    """Three members of a group each, prompts of 30 to 190 tokens."""
    chats = [[{"role": "user", "content": "look! " * (i * 7 % 30)}] for i in range(n // 3 + 1)]
    prompts = [engine.tokenizer.start(chat) for chat in chats]
    return [
        Request(prompts[i // 3], Key(0, (0, i // 3, i % 3, 0)), Sampling(1 + i % most, 1.0)) for i in range(n)
    ]


def samples_of(asked, answers):
    samples = []
    for request, answer in zip(asked, answers, strict=True):
        ids = request.prompt_ids + answer.token_ids
        places = np.arange(len(request.prompt_ids), len(ids))
        samples.append(Sample(ids, places, {"rollout_logprobs": np.float32(answer.logprobs)}))
    return samples


def gap(engine, samples, cut, temperature=1.0, grad=False):
    """The largest difference between what the sampler said of a token and what the policy says."""
    policy, (batching, size) = policy_of(engine), cut
    device = str(next(engine.model.parameters()).device)
    sharing = (policy.sharing,)
    gaps = []
    with torch.set_grad_enabled(grad):
        for micro in micro_batches(samples, size, policy.pad_id, device, batching, *sharing):
            logprobs = score(policy, micro, temperature).logprobs.detach()
            gaps.append(float((logprobs - micro.columns["rollout_logprobs"]).abs().max()))
    return max(gaps)


@in_threads
def test_the_policy_says_what_the_sampler_said_to_the_last_bit(kind, dtype, threads):
    engine = make_engine(kind, dtype)
    for batch in BATCHES:
        asked = requests(engine, batch)
        samples = samples_of(asked, engine.generate(asked))
        assert {cut: gap(engine, samples, cut) for cut in CUTS} == dict.fromkeys(CUTS, 0.0)
    assert gap(engine, samples, ("packed", 1000), grad=True) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_setting_they_differ(dtype):
    engine = make_engine(dtype=dtype, invariant=False)
    asked = requests(engine, 32)
    assert gap(engine, samples_of(asked, engine.generate(asked)), CUTS[0]) > 0


@in_threads
def test_tokens_and_log_probs_alone_are_those_of_a_batch(kind, dtype, threads):
    together, alone = make_engine(kind, dtype), make_engine(kind, dtype, max_batch=1, prefix_tokens=0)
    asked = requests(together, 15)
    expected = [alone.generate([request])[0] for request in asked]
    assert together.generate(asked) == expected
    assert together.level == "L2"
    small = make_engine(kind, dtype, max_batch=5, prefix_tokens=300)
    assert small.generate(asked[::-1])[::-1] == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_later_turns_go_on_from_kept_prefixes_with_the_same_bits(dtype):
    engine, forgetful = make_engine(dtype=dtype), make_engine(dtype=dtype, prefix_tokens=0)
    prompts = [request.prompt_ids for request in requests(engine, 9)]
    for turn in range(3):
        asked = [Request(p, Key(0, (0, i, turn, 0)), Sampling(9, 0.7)) for i, p in enumerate(prompts)]
        computed, answers = engine.computed_tokens, engine.generate(asked)
        assert answers == forgetful.generate(asked)
        assert gap(engine, samples_of(asked, answers), ("packed", 900), temperature=0.7) == 0.0
        assert turn == 0 or engine.computed_tokens - computed < sum(map(len, prompts)) / 2
        extend = {"role": "user", "content": "and then?"}
        prompts = [
            p + c.token_ids + engine.tokenizer.extend(c.token_ids, extend)
            for p, c in zip(prompts, answers, strict=True)
        ]


@pytest.mark.parametrize(("kind", "checkpointing"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_gradients_are_those_of_the_plain_network(kind, checkpointing):
    asked = requests(make_engine(), 12)
    samples = samples_of(asked, make_engine().generate(asked))
    found = []
    for invariant in (False, True):
        policy = policy_of(make_engine(kind, invariant=invariant))
        sharing = (policy.sharing,)
        with training_mode(policy.module, checkpointing, 0):
            for micro in micro_batches(samples, 900, policy.pad_id, "cpu", "packed", *sharing):
                score(policy, micro, 1.0).logprobs.sum().backward()
        found.append({name: parameter.grad for name, parameter in policy.module.named_parameters()})
    plain, ours = found
    assert plain.keys() == ours.keys()
    for name, gradient in plain.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_adapters_are_batch_invariant_too():
    engine = make_engine()
    policy = add_lora(policy_of(engine), Lora(rank=3), "base", seed=0)
    with torch.no_grad():
        for parameter in policy.saved_weights().values():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) / 9)
    asked = requests(engine, 12)
    answers = engine.generate(asked)
    assert answers != make_engine().generate(asked)
    sharing = (policy.sharing,)
    for micro in micro_batches(samples_of(asked, answers), 900, policy.pad_id, "cpu", "packed", *sharing):
        assert torch.equal(score(policy, micro, 1.0).logprobs.detach(), micro.columns["rollout_logprobs"])


# --- attention
def attend(query, key, value, mask):
    return attention(torch.nn.Module(), query, key, value, mask, scaling=0.5)[0]


@pytest.mark.parametrize("queries", [1, 7])
def test_columns_that_nobody_sees_change_no_bit(queries):
    rng = torch.Generator().manual_seed(queries)
    length, heads = 150, 2
    query = torch.randn(3, 4, queries, 8, generator=rng)
    key, value = (torch.randn(3, heads, length, 8, generator=rng) for _ in range(2))
    causal = torch.ones(queries, length, dtype=torch.bool).tril(length - queries).expand(3, 1, -1, -1)
    alone = torch.cat([attend(query[i : i + 1], key[i : i + 1], value[i : i + 1], None) for i in range(3)])
    assert torch.equal(attend(query, key, value, causal), alone)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), causal, scale=0.5
    )
    torch.testing.assert_close(alone, plain.transpose(1, 2))
    wider = [torch.randn(3, heads, 333, 8, generator=rng) * 50 for _ in range(2)]
    mask = torch.zeros(3, 1, queries, 333, dtype=torch.bool)
    for row in range(3):  # in front, behind and in between
        columns = torch.randperm(333, generator=rng)[:length].sort().values
        for new, old in zip(wider, (key, value), strict=True):
            new[row][:, columns] = old[row]
        mask[row, 0][:, columns] = causal[row, 0]
    assert torch.equal(attend(query, *wider, mask), alone)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert torch.equal(attend(query, *wider, added), alone)


def test_attention_refuses_what_is_no_sequence():
    query = key = value = torch.ones(1, 2, 2, 8)
    ahead = torch.tensor([[True, False, True], [True, True, True]])[None, None]
    with pytest.raises(ValueError, match="must be the beginning"):
        attend(query, *(each[:, :, [0, 0, 1]] for each in (key, value)), ahead)
    with pytest.raises(ValueError, match="dropout"):
        attention(torch.nn.Module(), query, key, value, None, dropout=0.1)


# --- settings
def test_models_with_windows_are_refused():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MistralForCausalLM(MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=8, **shape))
    with pytest.raises(ConfigError, match="batch_invariant=true needs full attention"):
        make_invariant(model)


def test_a_network_that_looks_at_its_batch_is_found_by_trial():
    class Looking(LlamaForCausalLM):
        def forward(self, input_ids=None, **read):
            out = super().forward(input_ids=input_ids, **read)
            out.logits = out.logits + 1e-3 * len(out.logits)
            return out

    model = Looking(make_model().config)
    with pytest.raises(ConfigError, match="does not hold for Looking: its scores differ in a batch"):
        make_invariant(model)


def test_other_engines_refuse_the_setting():
    for config in ({"name": "tiny"}, {"name": "openai"}, {"name": "ray", "replicas": ReplicaConfig("tiny")}):
        with pytest.raises(ConfigError, match="batch_invariant=true is of huggingface and vllm"):
            EngineConfig(**config, batch_invariant=True)
    for config in ({"name": "huggingface"}, {"name": "vllm"}, {"name": "ray"}):
        assert EngineConfig(**config, batch_invariant=True).batch_invariant


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_saved_network_is_a_plain_one_and_loaded_as_the_config_says(folder, tmp_path):
    engine = HuggingFaceEngine.load(folder, batch_invariant=True)
    policy_of(engine).save(tmp_path)
    assert "shoal" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    for invariant, level in ((True, "L2"), (False, "L1")):
        config = EngineConfig("huggingface", str(folder), batch_invariant=invariant)
        assert load_policy(tmp_path, config=config)[1].level == level


SETTINGS = [
    "engine.name=huggingface", "custom_envs.FrozenLakeEnv=null", "+custom_envs.BanditEnv={env_type: bandit}",
    "es_manager.train.env_configs.tags=[BanditEnv]", "es_manager.val.env_configs.tags=[BanditEnv]",
    "es_manager.train.env_groups=2", "es_manager.train.group_size=4", "es_manager.val.env_groups=2",
    "agent_proxy.max_tokens=auto", "warmup.steps=0", "algorithm.filter_groups.enable=false",
    "agent_proxy.format_penalty=0.5", "agent_proxy.reward_normalization.grouping=batch",
    "algorithm.learning_rate=0.01", "algorithm.entropy_coef=0.1", "algorithm.entropy_target=100",
    "trainer.iterations=2", "trainer.eval_every=2",
    "use_parallel_envs=false", "trainer.tensorboard=false", "agent_proxy.prompt.first='{observation}'",
    "algorithm.rollout_correction.method=truncate",
]  # fmt: skip


def test_a_config_with_other_arithmetic_in_the_update_is_refused(folder):
    with pytest.raises(ConfigError, match="set engine.dtype=bfloat16"):
        compose_config(
            "base",
            [
                *SETTINGS,
                f"engine.model={folder}",
                "engine.batch_invariant=true",
                "algorithm.precision=bfloat16",
            ],
        )


def test_training_is_on_policy_to_the_last_bit_however_a_minibatch_is_cut(folder, tmp_path):
    told = {}
    for size in (10_000, 400):
        run = tmp_path / str(size)
        own = [
            f"engine.model={folder}",
            f"run_dir={run}",
            "engine.dtype=bfloat16",
            "engine.batch_invariant=true",
        ]
        config = compose_config("base", [*SETTINGS, *own, f"algorithm.micro_batch_tokens={size}"])
        with AgentTrainer(config) as trainer:
            rows = [row for row in trainer.train() if "logprob_gap_max" in row]
        assert len(rows) == 2
        assert [row["logprob_gap_max"] for row in rows] == [0.0, 0.0]
        assert [row["rollout_correction_mean"] for row in rows] == [1.0, 1.0]
        assert [row["kl_to_rollout"] for row in rows] == [0.0, 0.0]
        names = ("reward", "trained_tokens", "entropy")
        told[size] = {name: rows[0][name] for name in names}
    assert told[400] == pytest.approx(told[10_000], rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_on_a_gpu_sampler_and_policy_say_the_same_in_any_batch(kind, dtype):
    engine = make_engine(kind, dtype, "cuda", max_batch=64)
    alone = make_engine(kind, dtype, "cuda", max_batch=1, prefix_tokens=0)
    asked = requests(engine, 64)
    answers = engine.generate(asked)
    assert answers == [alone.generate([request])[0] for request in asked]
    samples = samples_of(asked, answers)
    assert {cut: gap(engine, samples, cut) for cut in CUTS} == dict.fromkeys(CUTS, 0.0)
    assert gap(engine, samples, ("packed", 1000), grad=True) == 0.0
