"""The script of `make bench-gpu`, tried on a CPU; what needs a GPU is marked."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rollout.doubles import byte_tokenizer
from tests.rollout.doubles import llama_engine as make_engine
from tests.rollout.doubles import llama_requests as requests

from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.noise import key_words, words
from shoal.samplers.sampler import Key

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def bench(out, *more):
    command = [sys.executable, SCRIPT, "--out", out, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is used up" not in done.stdout, done.stdout
    return {(row["case"], row["subject"]): row["value"] for row in json.loads(out.read_text())["rows"]}


@pytest.mark.slow
def test_the_script_of_the_gpu_benchmark_runs_and_what_it_checks_holds_on_a_cpu(tmp_path):
    found = bench(tmp_path / "out.json", "--device", "cpu", "--small")
    assert found["noise", "words equal; noise apart"] <= 8
    assert found["the same tokens alone", "in a batch of 8, float32"] == 1
    for case in ("same update twice", "same run twice", "resumed = not interrupted"):
        assert found[case, "metrics are equal"] == found[case, "weights are equal"] == 1, case
    assert found["log-probs, greatest gap", "rollout to update, float32"] < 1e-4
    for subject in ("shoal", "model.generate", "generate_batch"):
        assert found["generation, 16 at once", subject] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("cache_tokens", [0, 2**16])
@pytest.mark.parametrize("n", [8, 64, 256])
def test_a_gpu_writes_what_a_cpu_writes_alone_and_in_any_batch(n, cache_tokens):
    here = make_engine(max_batch=n)
    model = make_engine().model.to("cuda")
    there = HuggingFaceEngine(model, byte_tokenizer(), max_batch=n, cache_tokens=cache_tokens)
    assert hasattr(there, "sample") == bool(cache_tokens)
    asked = requests(here, n)
    together = there.generate(asked)
    for request, a, b in zip(asked, here.generate(asked), together, strict=True):
        there.prefixes.clear()
        assert a.token_ids == b.token_ids == there.generate([request])[0].token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)


@pytest.mark.gpu
def test_words_of_noise_are_the_same_on_a_gpu():
    keys = torch.from_numpy(key_words(Key(1, (2,))).astype(np.int64))[None]
    there = words(keys.cuda(), torch.tensor([2]).cuda(), 49_152)
    assert torch.equal(there.cpu(), words(keys, torch.tensor([2]), 49_152))


@pytest.mark.gpu
def test_the_gpu_benchmark_runs_on_a_gpu(tmp_path):
    assert torch.cuda.is_available()
    found = bench(tmp_path / "out.json", "--device", "cuda", "--small")
    assert found["noise", "words equal; noise apart"] <= 8
    assert found["resumed = not interrupted", "weights are equal"] == 1
