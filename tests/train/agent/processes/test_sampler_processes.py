"""Several training processes, each with a sampler of its own: what they learn is what one process learns."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest
import torch
import transformers
from tests.train.agent.processes.test_processes import FINE, SETTINGS, launch, rows_of, same_run
from tests.train.agent.tiny_model import write_tiny_model

pytest.importorskip("accelerate")
PYTHON = os.environ.get("SHOAL_TEST_VLLM")
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_each_process_samples_with_replicas_of_its_own(alone, tmp_path, sharding):
    """Two clusters, since none is named; a tiny engine says the same bits wherever it runs."""
    pytest.importorskip("ray")
    settings = ["engine.name=ray", "engine.replicas.engine=tiny", f"trainer.sharding={sharding}"]
    done = launch(tmp_path / "run", 2, "trainer.iterations=3", *settings)
    assert done.returncode == 0, done.stderr
    assert "ray engine" in done.stdout
    same_run(alone, tmp_path / "run", FINE)


def test_one_cluster_takes_the_replicas_of_all_processes(alone, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    start = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--include-dashboard=false",
    ]
    port, short = free_port(), tempfile.mkdtemp(prefix="ray")  # sockets lie there, whose names must be short
    start += ["--num-cpus=2", f"--port={port}", f"--temp-dir={short}"]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = subprocess.Popen(start, stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        settings = ["engine.name=ray", "engine.replicas.engine=tiny", "trainer.iterations=3"]
        done = launch(tmp_path / "run", 2, *settings)
    finally:
        head.terminate()
        head.wait()
        shutil.rmtree(short, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    same_run(alone, tmp_path / "run", FINE)


@pytest.mark.skipif(not PYTHON, reason="SHOAL_TEST_VLLM names no Python with vLLM")
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_each_process_samples_with_a_vllm_of_its_own(tmp_path, monkeypatch, sharding):
    """Its Python may lack what trains: that is taken from this one."""
    write_tiny_model(tmp_path / "model")
    shape = transformers.Qwen2Config(
        vocab_size=98, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=1, pad_token_id=1, tie_word_embeddings=False,
        max_position_embeddings=1024,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Qwen2ForCausalLM(shape).save_pretrained(tmp_path / "model")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.append({packages!r})")
    own = [path for path in sys.path if path and path != packages and "python3" not in path]
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd(), *own]),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    settings = [
        *SETTINGS, f"run_dir={tmp_path / 'run'}", "engine.name=vllm", f"engine.model={tmp_path / 'model'}",
        "+engine.vllm.max_model_len=1024", "+engine.vllm.enforce_eager=true", f"trainer.sharding={sharding}",
        "agent_proxy.prompt.first='{observation}'", "warmup.steps=3", "trainer.iterations=3",
    ]  # fmt: skip
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start += [f"--log-dir={tmp_path / 'logs'}", "-m", "shoal", "train"]
    done = subprocess.run(
        [PYTHON, *start, "--config-name", "demo", *settings], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in rows_of(tmp_path / "run") if row.get("trained_tokens")]
    assert len(rows) == 3
    # each batch was sampled with the weights as they were then: the first steps move log-probabilities by 1e-2
    assert all(row["logprob_gap_max"] < 1e-4 for row in rows)
    assert rows[-1]["kl_to_reference"] > 1e-6


def free_port():
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def wait_for(port):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("Ray did not start")
