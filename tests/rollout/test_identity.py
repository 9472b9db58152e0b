"""One hash of trajectories wherever episodes are played, also when workers are killed in the middle."""

import hashlib
import json
import logging

import pytest
from tests.records import exchanges
from tests.rollout.doubles import WORDS, World, fast_tokenizer, llama_engine

from shoal import ParallelRolloutManager, TrajectoryCollector, derive_seed, envs, make_environments
from shoal.core.data import encode_trajectory
from shoal.rollout.prompts import PromptConfig
from shoal.rollout.samplers.huggingface import HuggingFaceEngine
from shoal.rollout.samplers.sampler import Sampling
from shoal.rollout.samplers.tiny import TinyEngine

SEED, ITERATION, GROUPS, MEMBERS, TURNS, TOKENS = 11, 2, 16, 4, 3, 6
PLACES = [
    ("threads", 1),
    ("threads", 3),
    ("threads", 8),
    ("processes", 1),
    ("processes", 2),
    ("processes", 3),
    ("loky", 2),
]
FEW = [("threads", 3), ("processes", 2)]
FORGED = "{observation}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "window": {"mode": "window", "history": 1, "first": FORGED, "later": "{history}\n" + FORGED},
    "append": {"mode": "append", "first": FORGED, "later": FORGED},
}
"""What the env shows looks as if it ended the user's turn."""


@pytest.fixture(autouse=True, scope="module")
def _world():
    envs.register("test_world", World, replace=True)


def config(n_jobs, mode, faults=None, folder="", **parallel):
    env = {"max_steps": TURNS, "faults": faults or {}, "folder": str(folder)}
    side = {"env_groups": GROUPS, "group_size": MEMBERS, "env_configs": {"tags": ["World"]}}
    return {
        "seed": SEED,
        "custom_envs": {"World": {"env_type": "test_world", "env_config": env}},
        "es_manager": {"train": side, "val": side},
        "agent_proxy": {
            "max_tokens": TOKENS,
            "parallel_n_jobs": n_jobs,
            "parallel": parallel,
            "prompt": PROMPTS[mode],
        },
    }


def play(engine, backend, n_jobs=1, mode="window", **changes):
    settings = config(n_jobs, mode, **changes)
    with ParallelRolloutManager(settings, engine, backend=backend) as manager:
        return manager.collect(ITERATION), manager.report


def whole(trajectories):
    """One hash of everything: prompts, tokens, log-probabilities, rewards, ends."""
    assert len(trajectories) == GROUPS * MEMBERS
    assert all(t.status == "ok" and len(t.turns) == TURNS for t in trajectories)
    return hashlib.sha256(b"".join(map(encode_trajectory, trajectories))).hexdigest()


def tokens(trajectories):
    """One hash of all tokens, read and written."""
    assert len(trajectories) == GROUPS * MEMBERS
    assert all(t.status == "ok" and len(t.turns) == TURNS for t in trajectories)
    written = [[(turn.prompt_ids, turn.response_ids) for turn in exchanges(t)] for t in trajectories]
    return hashlib.sha256(json.dumps(written).encode()).hexdigest()


def deaths(n):
    """Envs of so many groups that kill their worker once, at the second turn."""
    seeds = [derive_seed(SEED, "env", ITERATION, group) for group in range(0, GROUPS, GROUPS // n)]
    return {str(seed): "kill once 1" for seed in seeds}


@pytest.fixture(scope="module")
def tiny():
    return TinyEngine(WORDS, seed=1)


@pytest.fixture(scope="module", params=["window", pytest.param("append", marks=pytest.mark.slow)])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def tiny_hash(_world, tiny, mode):
    played, _ = play(tiny, "serial", mode=mode)
    assert len({call.response_ids for t in played for call in t.calls}) > 100  # they are not all alike
    return whole(played)


def test_episodes_played_one_env_step_abreast_are_those_of_the_serial_rollout(tiny, mode, tiny_hash):
    train, _ = make_environments(config(1, mode) | {"vector": {"backend": "serial"}})
    prompt = PromptConfig(**PROMPTS[mode])
    collector = TrajectoryCollector(train.pool, train.tags, train.roles, MEMBERS, tiny, prompt, SEED)
    try:
        assert whole(collector.collect(ITERATION, Sampling(TOKENS, 1.0, ("</action>",)))) == tiny_hash
    finally:
        collector.close()


@pytest.mark.parametrize(("backend", "n_jobs"), [*FEW, ("loky", 2)])
def test_the_tiny_engine_writes_the_same_everywhere(tiny, mode, tiny_hash, backend, n_jobs):
    assert whole(play(tiny, backend, n_jobs, mode)[0]) == tiny_hash


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["adaptive", "greedy", "barrier"])
@pytest.mark.parametrize(("backend", "n_jobs"), PLACES)
def test_the_tiny_engine_writes_the_same_on_every_schedule(tiny, mode, tiny_hash, backend, n_jobs, schedule):
    assert whole(play(tiny, backend, n_jobs, mode, schedule=schedule)[0]) == tiny_hash


@pytest.mark.parametrize(("backend", "n_jobs", "n_deaths"), [("processes", 2, 4)])
def test_workers_that_are_killed_change_no_byte(tiny, mode, tiny_hash, backend, n_jobs, n_deaths, tmp_path):
    killed_workers_change_no_byte(tiny, mode, tiny_hash, backend, n_jobs, n_deaths, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "n_jobs", "n_deaths"), [("processes", 1, 8), ("processes", 3, 16), ("loky", 2, 4)]
)
def test_many_workers_that_are_killed_change_no_byte(
    tiny, mode, tiny_hash, backend, n_jobs, n_deaths, tmp_path
):
    killed_workers_change_no_byte(tiny, mode, tiny_hash, backend, n_jobs, n_deaths, tmp_path)


def killed_workers_change_no_byte(tiny, mode, tiny_hash, backend, n_jobs, n_deaths, tmp_path):
    changes = {"faults": deaths(n_deaths), "folder": tmp_path, "max_deaths": 1000}
    played, report = play(tiny, backend, n_jobs, mode, **changes)
    assert whole(played) == tiny_hash
    assert report.worker_deaths >= 1
    assert len(list(tmp_path.iterdir())) == n_deaths


@pytest.fixture(scope="module")
def ray_cluster(ray_finds_shoal):
    ray = pytest.importorskip("ray")
    ray.shutdown()  # what a test before left running
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def ray_changes_nothing(engine, mode, digest, right, folder):
    """Neither where workers are Ray's, nor when two of them are killed."""
    assert digest(play(engine, "ray", 2, mode)[0]) == right
    changes = {"faults": deaths(2), "folder": folder, "max_deaths": 1000}
    played, report = play(engine, "ray", 2, mode, **changes)
    assert digest(played) == right
    assert report.worker_deaths >= 1


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_tiny_engine_writes_the_same_on_ray_also_when_a_worker_is_killed(
    ray_cluster, tiny, mode, tiny_hash, tmp_path
):
    ray_changes_nothing(tiny, mode, whole, tiny_hash, tmp_path)


# --- models of transformers: their tokens
@pytest.fixture(scope="module")
def llama():
    """Random weights, and a fast tokenizer of byte pairs as models have them."""
    return llama_engine(fast_tokenizer(), context=512)


@pytest.fixture(scope="module")
def llama_hash(_world, llama, mode):
    played, _ = play(llama, "serial", mode=mode)
    start, end = llama.tokenizer.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    for trajectory in played:
        first = exchanges(trajectory)[0].prompt_ids
        assert (first.count(start), first.count(end)) == (2, 1)  # those of the template: nothing is forged
    return tokens(played)


@pytest.mark.parametrize(("backend", "n_jobs"), FEW)
def test_a_model_of_transformers_reads_and_writes_the_same_tokens(llama, mode, llama_hash, backend, n_jobs):
    assert tokens(play(llama, backend, n_jobs, mode)[0]) == llama_hash


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "n_jobs"), PLACES)
def test_a_model_of_transformers_reads_and_writes_the_same_tokens_everywhere(
    llama, mode, llama_hash, backend, n_jobs, tmp_path
):
    for _ in range(3):
        assert tokens(play(llama, backend, n_jobs, mode)[0]) == llama_hash
    if backend != "threads":
        changes = {"faults": deaths(4), "folder": tmp_path, "max_deaths": 1000}
        assert tokens(play(llama, backend, n_jobs, mode, **changes)[0]) == llama_hash


@pytest.fixture(scope="module")
def smollm2():
    from shoal.core.errors import EngineError
    from shoal.rollout.samplers.models import get_model

    try:
        return HuggingFaceEngine.load(get_model("smollm2"))
    except EngineError as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def smollm2_hash(_world, smollm2):
    return tokens(play(smollm2, "serial")[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("backend", "n_jobs"), PLACES)
def test_smollm2_reads_and_writes_the_same_tokens_everywhere(
    smollm2, smollm2_hash, backend, n_jobs, tmp_path
):
    assert tokens(play(smollm2, backend, n_jobs)[0]) == smollm2_hash
    if backend != "threads":
        changes = {"faults": deaths(2), "folder": tmp_path, "max_deaths": 1000}
        played, report = play(smollm2, backend, n_jobs, **changes)
        assert tokens(played) == smollm2_hash
        assert report.worker_deaths >= 1


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_smollm2_writes_the_same_tokens_on_ray_also_when_a_worker_is_killed(
    ray_cluster, smollm2, smollm2_hash, tmp_path
):
    ray_changes_nothing(smollm2, "window", tokens, smollm2_hash, tmp_path)
