"""vLLM in process, run by the Python that `SHOAL_TEST_VLLM` names, with a small model of random weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.rollout.doubles import fast_tokenizer
from tests.samplers.vllm.serving import PYTHON, SETTINGS, needs_vllm
from tests.samplers.vllm.vllm_in_process import SCALE, questions

pytestmark = needs_vllm


def save_model(folder, tied):
    """A small Llama."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = fast_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_adapter(folder, model):
    """An adapter of rank 8 whose weights are not zero."""
    import peft
    import torch

    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model.add_adapter(settings)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.05, generator=draw)
    model.save_pretrained(folder)


@pytest.mark.parametrize("tied", [False, True], ids=["in place", "by a restart"])
def test_vllm_in_process_answers_like_transformers_with_adapters_and_new_weights(tmp_path, tied):
    from shoal.samplers.huggingface.engine import HuggingFaceEngine

    model, adapter = tmp_path / "model", tmp_path / "adapter"
    save_model(model, tied)
    save_adapter(adapter, HuggingFaceEngine.load(model).model)
    settings = SETTINGS | {"PYTHONPATH": str(Path(sys.modules["shoal"].__file__).parent.parent)}
    script = Path(__file__).parent / "vllm_in_process.py"
    done = subprocess.run(
        [PYTHON, script, model, tmp_path / "said", adapter],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "said").read_text())

    assert said.pop("unknown") == [], "the stand-in of the other tests is unlike the real one"
    assert said.pop("order") == ["short", "long"]
    assert "LoRA rank 64 is greater than max_lora_rank 8" in said.pop("too large")
    here = HuggingFaceEngine.load(model)
    asked = questions(here.tokenizer)
    expected = {"first": here.generate(asked), "stop": here.generate(questions(here.tokenizer, ("a",)))}
    here.load_adapter(adapter, 2)
    expected["adapter"] = here.generate(asked)
    plain = HuggingFaceEngine.load(model).model.state_dict()
    here.load_weights({name: tensor * SCALE for name, tensor in plain.items()}, 3)
    expected["weights"] = expected["died"] = here.generate(asked)
    for version, scale in ((4, 1.0), (5, SCALE)):
        here.load_weights({name: tensor * scale for name, tensor in plain.items()}, version)
        expected[f"version {version}"] = here.generate(asked)
    assert len({tuple(answers[0].logprobs) for answers in expected.values()}) >= 3, "nothing would show"
    assert said.keys() == expected.keys()
    for stage, completions in expected.items():
        for found, wanted in zip(said[stage], completions, strict=True):
            assert tuple(found["token_ids"]) == wanted.token_ids, stage
            np.testing.assert_allclose(found["logprobs"], wanted.logprobs, atol=1e-3, err_msg=stage)
            assert found["finish"] == wanted.finish
            assert found["weights_version"] == wanted.weights_version
