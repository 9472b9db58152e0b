"""The same tokens as at the commit that wrote `same_tokens.json`, and the same wherever episodes are played.

`python -m tests.rollout.test_same_tokens` writes the file anew; digests hold for one kind of machine alone.
"""

import hashlib
import json
import platform
from pathlib import Path

import pytest
import torch
from tests.records import exchanges
from tests.rollout.doubles import FakeServer, llama_engine

from shoal import ParallelRolloutManager
from shoal.core.data import read_trajectories
from shoal.rollout.factory import words_of
from shoal.samplers.registry import make_engine
from shoal.samplers.servers.openai import OpenAIEngine
from shoal.samplers.tokenizers import TinyTokenizer
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

KNOWN = Path(__file__).with_name("same_tokens.json")
MACHINE = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"
SMALL = ["es_manager.train.env_groups=3", "es_manager.train.group_size=2"]
DEMO = [
    "es_manager.train.env_groups=6",
    "es_manager.train.group_size=3",
    "es_manager.val.env_groups=4",
    "warmup.steps=6",
    "trainer.iterations=3",
    "trainer.eval_every=1",
    "trainer.tensorboard=false",
]
LLAMA = [*SMALL, "agent_proxy.max_tokens=6", "agent_proxy.prompt.prefill=''", "agent_proxy.prompt.closing=''"]
LIMITS = ["agent_proxy.top_p=0.9", "agent_proxy.top_k=40", "agent_proxy.min_p=0.001"]
"""Of tokens that may be sampled."""
SLOTS = {"cache_tokens": 8192, "max_batch": 4}


def digest(trajectories, digits=4):
    """One hash of all tokens, of their log-probabilities to so many digits (None: without them), and of all rewards."""
    told = [
        (
            *(t.env, t.iteration, t.group, t.member, t.env_seed, t.status, t.terminated, t.truncated),
            *(
                (
                    u.response_ids,
                    *([] if digits is None else [[round(p, digits) for p in u.logprobs]]),
                    u.reward,
                )
                for u in exchanges(t)
            ),
        )
        for t in trajectories
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_training(run, *changes):
    """What `demo` plays in three iterations, and in the evaluations between them."""
    played = []
    config = compose_config("demo", [*DEMO, f"run_dir={run}", *changes])
    with AgentTrainer(config) as trainer:
        for _ in trainer.train():
            pass
    for file in sorted((Path(run) / "trajectories").glob("*.jsonl")):
        played += read_trajectories(file)
    told = [
        [(u.response_ids, [round(p, 4) for p in u.logprobs], u.reward) for u in exchanges(t)] for t in played
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def of_base_parallel(backend, n_jobs):
    config = compose_config("base-parallel", SMALL)
    engine = make_engine(config.engine, words_of(config), config.seed)
    with ParallelRolloutManager(config, engine, n_jobs, backend=backend) as manager:
        return digest(manager.collect(0) + manager.collect(1))


def of_llama(backend, n_jobs, *changes, **settings):
    """Tokens and rewards alone: log-probabilities of a transformer differ in the last digits between batches."""
    config = compose_config("base-parallel", [*LLAMA, "agent_proxy.prompt.mode=append", *changes])
    engine = llama_engine(context=400, **settings)
    with ParallelRolloutManager(config, engine, n_jobs, backend=backend) as manager:
        return digest(manager.collect(0), digits=None)


def of_server(backend, n_jobs, kind="vllm"):
    """What a server wrote, with its log-probabilities."""
    config = compose_config("base-parallel", [*SMALL, "agent_proxy.max_tokens=6"])
    with (
        FakeServer(kind) as server,
        OpenAIEngine(server.url, tokenizer=TinyTokenizer()) as engine,
        ParallelRolloutManager(config, engine, n_jobs, backend=backend) as manager,
    ):
        return digest(manager.collect(0))


def known(name, found):
    """Whether this is the digest of that name, where digests of this kind of machine are known."""
    told = json.loads(KNOWN.read_text())
    return told["machine"] != MACHINE or told[name] == found


@pytest.mark.parametrize(("name", "play"), [("base-parallel", of_base_parallel), ("llama", of_llama)])
def test_the_known_tokens_are_played_by_one_process_and_by_several(name, play):
    found = play("process", 3)
    assert found == play("serial", 1)
    assert known(name, found)


@pytest.mark.parametrize("settings", [{}, SLOTS], ids=["rows", "slots"])
@pytest.mark.parametrize(("name", "changes"), [("llama", []), ("llama limited", LIMITS)])
def test_rows_and_slots_write_the_known_tokens(settings, name, changes):
    assert known(name, of_llama("thread", 2, *changes, **settings))


def test_a_server_writes_the_known_tokens():
    assert known("server", of_server("thread", 2))


@pytest.mark.parametrize(
    "changes",
    [
        (),
        pytest.param(
            ("agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=serial"),
            marks=pytest.mark.slow,  # one episode after the other
        ),
        ("agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel_n_jobs=2"),
    ],
)
def test_demo_trains_on_the_known_tokens(tmp_path, changes):
    assert known("demo", of_training(tmp_path / "run", *changes))


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": MACHINE,
            "demo": of_training(f"{folder}/run"),
            "base-parallel": of_base_parallel("serial", 1),
            "llama": of_llama("serial", 1),
            "llama limited": of_llama("serial", 1, *LIMITS),
            "server": of_server("serial", 1),
        }
    KNOWN.write_text(json.dumps(found, indent=1) + "\n")
