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


def test_vllm_in_process_follows_new_weights_and_a_restart_and_ends(tmp_path):
    from shoal.rollout.samplers.huggingface import HuggingFaceEngine
    from shoal.rollout.samplers.models import resolve_model

    model = resolve_model("smollm2")
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(sys.modules["shoal"].__file__).parent.parent),
    }
    script = Path(__file__).parent / "vllm_in_process.py"
    done = subprocess.run(
        [PYTHON, script, model, tmp_path / "said"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "said").read_text())

    here = HuggingFaceEngine.load(model)
    expected = {
        "first": here.generate(questions(here.tokenizer)),
        "stop": here.generate(questions(here.tokenizer, (",",))),
    }
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
