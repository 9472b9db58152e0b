"""The same tokens as at the commit that wrote `same_tokens.json`, and the same wherever episodes are played.

`python -m tests.rollout.test_same_tokens` writes the file anew. Digests of a network hold for one kind of machine, and
those of engines whose answers are hashes (`counter`, `tools`, `program`) everywhere.
"""

import contextlib
import hashlib
import json
import platform
from pathlib import Path

import pytest
import torch
from tests.records import exchanges
from tests.rollout.doubles import WORDS, HashEngine, llama_engine
from tests.rollout.doubles import config as counter
from tests.rollout.tools import functions

from shoal import ParallelRolloutManager, TrajectoryCollector, make_environments
from shoal.core.data import encode_trajectory, read_trajectories
from shoal.gateway.programs import sessions_of
from shoal.rollout.factory import words_of
from shoal.rollout.prompts import PromptConfig
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.registry import make_engine
from shoal.samplers.sampler import Sampling
from shoal.samplers.scripted import ScriptedEngine
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
PLACES = [
    ("threads", 2),
    ("processes", 3),
    ("loky", 2),
    ("threading", 2),
    pytest.param("multiprocessing", 2, marks=pytest.mark.slow),
    pytest.param("processes", 4, marks=pytest.mark.slow),
    pytest.param("ray", 2, marks=[pytest.mark.slow, pytest.mark.ray]),
]
VECTORS = [("vector serial", 1), ("vector process", 2)]
FUNCTIONS = Path(__file__).parents[1] / "gateway"
CALL = '<tool_call>{"name": "%s", "arguments": {"%s": %s}}</tool_call>'
CALLS = CALL % ("add", "a", 2) + CALL % ("look", "city", '"oslo"') + CALL % ("fail", "text", '"x"')


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


def of_llama(backend, n_jobs):
    """Tokens and rewards alone: log-probabilities of a transformer differ in the last digits between batches."""
    config = compose_config("base-parallel", [*LLAMA, "agent_proxy.prompt.mode=append"])
    with ParallelRolloutManager(config, llama_engine(context=400), n_jobs, backend=backend) as manager:
        return digest(manager.collect(0), digits=None)


def of_counter(backend, n_jobs, tools=()):
    """Whole records of an engine whose answers are hashes; with `tools`, of one that calls them each other turn."""
    settings, engine, sampling = counter(), HashEngine(), Sampling(16, 1.0, ("</action>",))
    if tools:
        engine = ScriptedEngine(
            lambda text, key: f"<action>{WORDS[0]}</action>" if key.path[-1] % 2 else CALLS
        )
        sampling = Sampling(999, 1.0, ("</action>",))
    if not backend.startswith("vector"):
        with ParallelRolloutManager(settings, engine, n_jobs, backend=backend, tools=tools) as manager:
            return whole(manager.collect(4, sampling))
    vector = {"backend": backend.split()[1]} | ({"num_workers": n_jobs} if n_jobs > 1 else {})
    train, _ = make_environments(settings | {"vector": vector})
    prompt = PromptConfig(**settings["agent_proxy"]["prompt"])
    parts = train.pool, train.tags, train.roles, train.group_size, engine, prompt, 7
    with (
        Toolbox(tools) as toolbox,
        contextlib.closing(TrajectoryCollector(*parts, toolbox=toolbox)) as playing,
    ):
        return whole(playing.collect(4, sampling))


def of_tools(backend, n_jobs):
    return of_counter(backend, n_jobs, [functions.add, functions.look, functions.fail])


def of_program(backend, n_jobs):
    settings = counter(groups=3)
    program = {"function": "agent_functions:play", "folder": str(FUNCTIONS)}
    settings["custom_envs"]["Counter"] = {"env_type": "program", "env_config": program}
    with ParallelRolloutManager(
        settings, HashEngine(), n_jobs, backend=backend, sessions=sessions_of
    ) as manager:
        return whole(manager.collect(4))


def whole(trajectories):
    """One hash of every word, token, log-probability, reward and end."""
    records = [json.loads(encode_trajectory(trajectory)) for trajectory in trajectories]
    assert all(record["status"] == "ok" for record in records)
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def known(name, found):
    """Whether this is the digest of that name, where digests of this kind of machine are known."""
    told = json.loads(KNOWN.read_text())
    return (name not in EXACT and told["machine"] != MACHINE) or told[name] == found


EXACT = {"counter": of_counter, "tools": of_tools, "program": of_program}


@pytest.fixture(scope="module")
def serial():
    torch.set_num_threads(1)
    return {"base-parallel": of_base_parallel("serial", 1), "llama": of_llama("serial", 1)}


@pytest.mark.parametrize(("backend", "n_jobs"), PLACES)
def test_base_parallel_plays_the_known_tokens_everywhere(serial, backend, n_jobs):
    found = of_base_parallel(backend, n_jobs)
    assert found == serial["base-parallel"]
    assert known("base-parallel", found)


@pytest.mark.parametrize(("backend", "n_jobs"), [("threads", 2), ("processes", 3)])
def test_a_transformer_writes_the_known_tokens_everywhere(serial, backend, n_jobs):
    found = of_llama(backend, n_jobs)
    assert found == serial["llama"]
    assert known("llama", found)


@pytest.mark.parametrize(("backend", "n_jobs"), [("serial", 1), *PLACES, *VECTORS])
@pytest.mark.parametrize("name", ["counter", "tools"])
def test_hashes_and_tools_leave_the_known_records_everywhere(name, backend, n_jobs):
    assert known(name, EXACT[name](backend, n_jobs))


@pytest.mark.parametrize(("backend", "n_jobs"), [("serial", 1), ("processes", 3)])
def test_programs_leave_the_known_records(backend, n_jobs):
    assert known("program", of_program(backend, n_jobs))


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
            **{name: digest_of("serial", 1) for name, digest_of in EXACT.items()},
        }
    KNOWN.write_text(json.dumps(found, indent=1) + "\n")
