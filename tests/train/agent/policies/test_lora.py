import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from tests.samplers.huggingface.test_huggingface import make_engine, requests
from tests.train.agent.test_update import random_samples
from transformers import AutoModelForCausalLM

from shoal.cli.main import main
from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError, DataError, MissingExtraError
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.registry import SAMPLERS
from shoal.samplers.sampler import Sampling
from shoal.samplers.tiny import TinyEngine
from shoal.train.agent.batch.packing import micro_batches
from shoal.train.agent.config import Lora, compose_config
from shoal.train.agent.policies import policy as policies
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.lora import LoraPolicy, add_lora, load_lora, merge_lora, weights_sha256
from shoal.train.agent.policies.policy import score
from shoal.train.agent.policies.reference import HeldAdapters
from shoal.train.agent.policies.sync import WeightSync
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.trainer import AgentTrainer

SETTINGS = [
    "engine.name=huggingface", "custom_envs.FrozenLakeEnv=null", "+custom_envs.BanditEnv={env_type: bandit}",
    "es_manager.train.env_configs.tags=[BanditEnv]", "es_manager.val.env_configs.tags=[BanditEnv]",
    "es_manager.train.env_groups=2", "es_manager.train.group_size=4", "es_manager.val.env_groups=2",
    "agent_proxy.max_tokens=auto", "warmup.steps=0", "algorithm.filter_groups.enable=false",
    "agent_proxy.format_penalty=0.5", "agent_proxy.reward_normalization.grouping=batch",
    "algorithm.learning_rate=0.01", "algorithm.kl.coef=0.01", "trainer.eval_every=2", "trainer.save_every=1",
    "use_parallel_envs=false", "trainer.tensorboard=false", "algorithm.entropy_coef=0.1",
    "agent_proxy.prompt.first='{observation}'", "model.lora.rank=2", "model.lora.dropout=0.1",
]  # fmt: skip


def run(base, folder, *overrides):
    config = compose_config(
        "base", [*SETTINGS, "seed=2", f"engine.model={base}", f"run_dir={folder}", *overrides]
    )
    with AgentTrainer(config) as trainer:
        before = {n: p.clone() for n, p in trainer.policy.module.named_parameters() if not p.requires_grad}
        rows = list(trainer.train())
        for name, parameter in trainer.policy.module.named_parameters():
            if name in before:
                assert torch.equal(parameter, before[name])  # the base is bit-unchanged
    adapter = list_checkpoints(folder / "checkpoints")[-1] / "engine"
    return rows, (adapter / "adapter_model.safetensors").read_bytes()


def test_adapters_alone_are_trained_resumed_and_exported(base, tmp_path, capsys):
    rows, whole = run(base, tmp_path / "whole", "trainer.iterations=3")
    assert rows[1]["kl_to_reference"] == pytest.approx(0, abs=1e-2)
    assert rows[-1]["gradient_steps"] >= 1
    # nothing drops out where log-probabilities are compared
    assert max(row.get("logprob_gap_max", 0.0) for row in rows) < 1e-4
    half = run(base, tmp_path / "half", "trainer.iterations=2")[1]
    assert half != whole
    assert run(base, tmp_path / "half", "trainer.iterations=3", "resume=true")[1] == whole
    checkpoint = list_checkpoints(tmp_path / "whole" / "checkpoints")[-1] / "engine"
    assert not (checkpoint / "model.safetensors").exists()
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert not (tmp_path / "adapter" / "engine.json").exists()
    (policy, adapted), merged = load_lora(checkpoint), HuggingFaceEngine.load(tmp_path / "merged")
    asked = [r for r in requests(adapted, 6)]
    greedy = [type(r)(r.prompt_ids, r.key, Sampling(8, 0.0)) for r in asked]
    for one, other in zip(adapted.generate(greedy), merged.generate(greedy), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    names = policy.saved_weights()
    assert sum(".lora_" in name for name in names) == len(names) == len(policy.read(checkpoint))
    plain = HuggingFaceEngine.load(base)
    prompt = torch.tensor([greedy[0].prompt_ids])
    with torch.no_grad():
        said = plain.model(prompt).logits
        assert not torch.allclose(adapted.model(prompt).logits, said, atol=1e-4)
        with policy.without_adapters():
            assert torch.equal(adapted.model(prompt).logits, said)
    with torch.no_grad():
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(prompt).logits.shape == said.shape


def test_a_sampler_elsewhere_gets_the_adapters_alone_and_writes_what_the_policy_would(
    base, tmp_path, monkeypatch
):
    rows, expected = run(base, tmp_path / "here", "trainer.iterations=2")
    made, loaded = [], []

    class Elsewhere(HuggingFaceEngine):
        """Has a network of its own, as vLLM has."""

        def load_weights(self, weights, version):
            raise AssertionError("whole weights were sent")

        def load_adapter(self, folder, version):
            loaded.append(sorted(path.name for path in folder.iterdir()))
            super().load_adapter(folder, version)

    def make(config, words, seed):
        made.append((config.vllm, Elsewhere.load(config.model)))
        return made[-1][1]

    monkeypatch.setitem(SAMPLERS._items, "vllm", make)
    other, found = run(base, tmp_path / "there", "trainer.iterations=2", "engine.name=vllm")
    [(options, sampler)] = made
    assert options == {"enable_lora": True, "max_lora_rank": 8}
    assert sampler.weights_version > 0
    assert len(loaded) == 3, "at the start, and after each update"
    assert all({"adapter_config.json", "adapter_model.safetensors"} <= set(names) for names in loaded)
    assert found == expected
    told = [
        [(row.get("reward"), row.get("loss"), row.get("tokens")) for row in each] for each in (rows, other)
    ]
    assert told[0] == told[1]


def test_with_a_lag_one_copy_elsewhere_swaps_the_adapters_that_episodes_want(base, tmp_path, monkeypatch):
    class OneAtATime(HuggingFaceEngine):
        """Is asked for each request by itself, as vLLM is."""

        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            self.swaps = []

        async def sample(self, request):
            return self.generate([request])[0]

        def load_adapter(self, folder, version):
            self.swaps.append(version)
            super().load_adapter(folder, version)

    made = []
    monkeypatch.setitem(
        SAMPLERS._items,
        "vllm",
        lambda config, words, seed: made.append(OneAtATime.load(config.model)) or made[-1],
    )
    lagged = [
        "trainer.iterations=3",
        "trainer.lag=1",
        "trainer.eval_every=1",
        "agent_proxy.parallel_n_jobs=2",
    ]
    lagged += ["agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=thread"]
    _, expected = run(base, tmp_path / "here", *lagged)
    _, found = run(base, tmp_path / "there", *lagged, "engine.name=vllm")
    [sampler] = made
    assert {0, 1, 2} < {*sampler.swaps}
    for name, tensor in load(found).items():
        np.testing.assert_allclose(tensor, load(expected)[name], atol=1e-5)


def test_a_sampler_that_takes_no_adapters_is_refused_for_lora(base):
    here, there = HuggingFaceEngine.load(base), TinyEngine(["Up"])
    with pytest.raises(ConfigError, match="TinyEngine takes no LoRA adapters"):
        WeightSync(add_lora(policy_of(here), Lora(2), str(base), 0), there)


def test_adapters_of_another_base_and_engines_without_one_are_refused(base, tmp_path):
    own = shutil.copytree(base, tmp_path / "base")
    run(own, tmp_path / "run", "trainer.iterations=1")
    folder = list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "engine"
    weights = load_file(own / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()}, own / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(DataError, match="trained on another model"):
        load_lora(folder)
    with pytest.raises(DataError, match="trained on another model"):
        run(own, tmp_path / "run", "trainer.iterations=2", "resume=true")
    for engine, model in ((TinyEngine(["Up"]), "a-model"), (HuggingFaceEngine.load(own), None)):
        with pytest.raises(ConfigError, match="needs engine.name: huggingface"):
            add_lora(policy_of(engine), Lora(2), model, 0)


@pytest.mark.parametrize(
    "load", [load_lora, lambda folder: merge_lora(folder, folder / "merged")], ids=["load", "merge"]
)
@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("adapter_config.json", None),
        ("adapter_config.json", "[]"),
        ("adapter_config.json", {"r": 4}),
        ("adapter_config.json", {"r": -1}),
        # peft would take some of them, by the kind of model
        (
            "adapter_config.json",
            {"target_modules": None},
        ),
        ("adapter_config.json", {"use_rslora": True}),  # the adapters would count less, or more
        ("adapter_config.json", {"alpha_pattern": {"q_proj": 99}}),
        ("adapter_config.json", {"use_nora": True}),  # of a later peft
        ("engine.json", {"base": None}),
        ("engine.json", {"base": "/nowhere"}),
        ("adapter_model.safetensors", None),
        ("adapter_model.safetensors", "{"),
    ],
)
def test_a_broken_folder_of_adapters_is_named(base, tmp_path, file, changed, load):
    add_lora(policy_of(HuggingFaceEngine.load(base)), Lora(rank=2), str(base), 0).save(tmp_path)
    path, says = tmp_path / file, ""
    if isinstance(changed, dict):
        says = next((f"says {name}=True, " for name, value in changed.items() if value is True), "")
        told = json.loads(path.read_text()) | changed
        changed = json.dumps(
            {key: value for key, value in told.items() if value is not None or key not in changed}
        )
    path.unlink()
    if changed is not None:
        path.write_text(changed)
    with pytest.raises(DataError, match=re.escape(f"{tmp_path} does not load as LoRA adapters (")) as refused:
        load(tmp_path)
    assert says in str(refused.value)
    assert not (tmp_path / "merged").exists()


def test_a_model_with_a_single_number_among_its_weights_has_a_hash_too():
    one = torch.nn.Linear(2, 2)
    one.register_buffer("scale", torch.tensor(2.0))
    before = weights_sha256(one)
    one.scale.add_(1)
    assert weights_sha256(one) != before


def test_adapters_begin_and_drop_out_by_their_seed():
    def drawn(seed):
        policy = LoraPolicy(policy_of(make_engine()), Lora(rank=2, dropout=0.5), "base", seed)
        (drop, *_) = policies.dropouts(policy.module)
        with policies.training_mode(policy.module, False, seed):
            return drop(torch.ones(50)).tolist(), [value.tolist() for value in policy.own_weights().values()]

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert one == again
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "lm_head"]])
def test_the_penalty_holds_on_to_the_base_also_where_scores_are_made_in_parts(monkeypatch, modules):
    policy = policy_of(make_engine())
    head = policy.module.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # adapters on a tied one are refused
    (micro,) = micro_batches(random_samples(9, 4), 10**6, policy.pad_id, "cpu")
    of_base = score(policy, micro, 1.0).logprobs.detach()
    adapted = add_lora(policy, Lora(2, target_modules=modules), "base", 0)
    held = HeldAdapters(adapted)
    with torch.no_grad():
        for parameter in adapted.own_weights().values():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    for scores in (policies.SCORES, 3 * policy.head.weight.shape[0]):
        monkeypatch.setattr(policies, "SCORES", scores)
        assert not torch.allclose(score(adapted, micro, 1.0).logprobs, of_base, atol=0.01)
        torch.testing.assert_close(score(held, micro, 1.0).logprobs.detach(), of_base)


def test_adapters_that_a_given_policy_lacks_are_refused(base, tmp_path):
    config = compose_config("base", [*SETTINGS, f"engine.model={base}", f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=2 has no effect on a policy that is given"):
        AgentTrainer(config, sampler=HuggingFaceEngine.load(base))
    assert not (tmp_path / "run").exists()


def test_the_base_of_a_given_policy_with_adapters_is_what_the_penalty_holds_on_to(base, tmp_path):
    config = compose_config(
        "base", [*SETTINGS, f"engine.model={base}", f"run_dir={tmp_path / 'run'}", "model.lora.rank=0"]
    )
    sampler = HuggingFaceEngine.load(base)
    policy = add_lora(policy_of(sampler), Lora(2), str(base), 0)
    with AgentTrainer(config, policy=policy, sampler=sampler) as trainer:
        assert isinstance(trainer._learner.reference, HeldAdapters)


@pytest.mark.slow
@pytest.mark.ray
def test_after_each_update_replicas_have_the_adapters_of_the_trainer(base, tmp_path):
    """Else they play the first policy for ever, and that looks like stale samples."""
    engine = ["engine.name=ray", "engine.replicas.engine=huggingface", "engine.replicas.count=2"]
    more = ["model.lora.rank=8", "trainer.iterations=3", "model.lora.dropout=0.0", *engine]
    rows = run(base, tmp_path / "run", *more)[0][1:]
    assert sum(row["gradient_steps"] for row in rows[:2]) >= 1
    assert max(row["logprob_gap_max"] for row in rows if row["gradient_steps"]) < 1e-4
    versions = {}
    for file in sorted((tmp_path / "run" / "trajectories").glob("*.jsonl")):
        for t in read_trajectories(file):
            versions.setdefault((file.name, t.iteration), set()).update(c.weights_version for c in t.calls)
    assert all(len(found) == 1 for found in versions.values())
    assert len(set().union(*versions.values())) >= 3


def test_a_peft_that_is_too_old_for_transformers_is_named_before_the_model_is_loaded(tmp_path, monkeypatch):
    about = tmp_path / "peft-0.19.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.19.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    no_model = tmp_path / "a-model-that-is-not-there"
    with pytest.raises(MissingExtraError, match=r"peft>=0\.2.*peft is 0\.19\.9.*pip install") as raised:
        run(no_model, tmp_path / "run")
    assert "does not fit this model" not in str(raised.value)
