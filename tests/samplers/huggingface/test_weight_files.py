"""Weights of transformers models go to files and come back, whatever they are called there."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.rollout.doubles import fast_tokenizer

from shoal.core.errors import DataError
from shoal.samplers.huggingface.engine import HuggingFaceEngine, as_in_files, read_weights
from shoal.samplers.registry import load_tokenizer
from shoal.train.agent.policies.loading import load_policy

PLAIN = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
KINDS = {
    "Llama": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 1},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_by_the_names_of_the_network(tmp_path, kind):
    config = getattr(transformers, f"{kind}Config")(**PLAIN, **KINDS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    known = model.state_dict()
    in_files = load_file(tmp_path / "model.safetensors")
    assert (in_files.keys() == known.keys()) == (kind == "Llama")  # or this test would show nothing
    read = read_weights(tmp_path, model)
    assert read.keys() == known.keys()
    assert all(torch.equal(read[name], known[name]) for name in known)
    # and the other way: what a server is told is what it would read
    told = as_in_files(tmp_path, known)
    assert told.keys() == in_files.keys()
    assert all(torch.equal(told[name], in_files[name]) for name in in_files)


def test_a_large_model_lies_in_several_files(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**PLAIN))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    known = model.state_dict()
    read = read_weights(tmp_path, model)
    assert read.keys() == known.keys()
    assert all(torch.equal(read[name], known[name]) for name in known)


WEIGHTS, ONE = "model.safetensors", "model.layers.1.mlp.up_proj.weight"


def change(file, how):
    weights = load_file(file)
    how(weights)
    save_file(weights, file, {"format": "pt"})


BROKEN = {
    "a weight is not there": (
        lambda folder: change(folder / WEIGHTS, lambda weights: weights.pop(ONE)),
        f"1 of its weights are not there.*{ONE}.*copy all its files",
    ),
    "a weight has another shape": (
        lambda folder: change(folder / WEIGHTS, lambda weights: weights.update({ONE: weights[ONE][:3]})),
        f"of another shape than config.json says.*{ONE}",
    ),
    "weights cut off": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]),
        r"does not load as a model \(SafetensorError",
    ),
    "an unknown kind of number": (
        lambda folder: (folder / "engine.json").write_text(json.dumps({"dtype": "float99"})),
        "does not load as a model .*float99",
    ),
    "no mapping": (
        lambda folder: (folder / "engine.json").write_text("[]"),
        "engine.json must be a mapping.*got \\[\\]",
    ),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "has no tokenizer that loads",
    ),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "the tokenizer in .* knows no text: copy its files",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_is_no_whole_model_is_refused_and_no_weights_are_drawn_by_lot(tmp_path, what):
    tokenizer = fast_tokenizer()
    config = transformers.Qwen2Config(**{**PLAIN, "vocab_size": len(tokenizer)})
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    load_policy(tmp_path)
    spoil, told = BROKEN[what]
    spoil(tmp_path)
    with pytest.raises(DataError, match=told):
        load_policy(tmp_path)
    if "tokenizer" in what:
        with pytest.raises(DataError, match=told):
            load_tokenizer(str(tmp_path))
    elif "weight" in what:
        with pytest.raises(DataError, match=told):
            HuggingFaceEngine.load(tmp_path)
