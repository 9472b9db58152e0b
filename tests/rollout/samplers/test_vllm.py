"""vLLM in process, run by the Python that `SHOAL_TEST_VLLM` names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.rollout.samplers.vllm_in_process import SCALE, questions

PYTHON = os.environ.get("SHOAL_TEST_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="SHOAL_TEST_VLLM names no Python with vLLM"),
]


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


def test_vllm_in_process_follows_adapters_new_weights_and_a_restart_and_ends(tmp_path):
    from shoal.rollout.samplers.huggingface import HuggingFaceEngine
    from shoal.rollout.samplers.models import resolve_model

    model = resolve_model("smollm2")
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(sys.modules["shoal"].__file__).parent.parent),
    }
    save_adapter(tmp_path / "adapter", HuggingFaceEngine.load(model).model)
    script = Path(__file__).parent / "vllm_in_process.py"
    done = subprocess.run(
        [PYTHON, script, model, tmp_path / "said", tmp_path / "adapter"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "said").read_text())

    assert said.pop("unknown") == [], "the stand-in of the other tests is like the real one"
    assert said.pop("order") == ["short", "long"]

    here = HuggingFaceEngine.load(model)
    expected = {
        "first": here.generate(questions(here.tokenizer)),
        "stop": here.generate(questions(here.tokenizer, (",",))),
    }
    adapted = HuggingFaceEngine.load(model)
    adapted.load_adapter(tmp_path / "adapter", 2)
    expected["adapter"] = adapted.generate(questions(here.tokenizer))
    assert [c.token_ids for c in expected["adapter"]] != [c.token_ids for c in expected["first"]]
    here.load_weights({name: tensor * SCALE for name, tensor in here.model.state_dict().items()}, 3)
    expected["weights"] = expected["restarted"] = here.generate(questions(here.tokenizer))
    assert [c.token_ids for c in expected["weights"]] != [c.token_ids for c in expected["first"]] or any(
        not np.allclose(a.logprobs, b.logprobs, atol=1e-2)
        for a, b in zip(expected["weights"], expected["first"], strict=True)
    )
    for stage, completions in expected.items():
        for found, wanted in zip(said[stage], completions, strict=True):
            assert tuple(found["token_ids"]) == wanted.token_ids, stage
            np.testing.assert_allclose(found["logprobs"], wanted.logprobs, atol=1e-3, err_msg=stage)
            assert found["finish"] == wanted.finish
            assert found["weights_version"] == wanted.weights_version
