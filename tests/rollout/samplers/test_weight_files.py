"""Weights of transformers models go to files and come back, whatever they are called there."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from shoal.rollout.samplers.huggingface import as_in_files, read_weights

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
