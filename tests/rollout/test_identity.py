"""One hash of trajectories wherever episodes are played, also when workers are killed in the middle."""

import hashlib
import json

import pytest
from tests.records import exchanges
from tests.rollout.doubles import WORDS, in_lockstep

from shoal import ParallelRolloutManager, derive_seed
from shoal.core.data import encode_trajectory
from shoal.core.errors import EngineError
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.models import get_model
from shoal.samplers.sampler import Sampling
from shoal.samplers.tiny import TinyEngine

SEED, ITERATION, GROUPS, MEMBERS, TURNS, TOKENS = 11, 2, 16, 4, 3, 6
FEWER_GROUPS = 6
"""Of a pretrained model, which is slow."""
PROMPTS = {
    "window": {"mode": "window", "history": 1, "first": "{observation}", "later": "{history}\n{observation}"},
    "append": {"mode": "append", "first": "{observation}", "later": "{observation}"},
}


def config(n_jobs, mode, faults=None, folder="", groups=GROUPS, **parallel):
    env = {"max_steps": TURNS, "faults": faults or {}, "folder": str(folder)}
    side = {"env_groups": groups, "group_size": MEMBERS, "env_configs": {"tags": ["World"]}}
    return {
        "seed": SEED,
        "custom_envs": {"World": {"env_type": "tests.rollout.doubles:World", "env_config": env}},
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
    assert len(trajectories) == FEWER_GROUPS * MEMBERS
    assert all(t.status == "ok" and len(t.turns) == TURNS for t in trajectories)
    written = [[(turn.prompt_ids, turn.response_ids) for turn in exchanges(t)] for t in trajectories]
    return hashlib.sha256(json.dumps(written).encode()).hexdigest()


def deaths(n, groups=GROUPS):
    """Envs of so many groups that kill their worker once, at the second turn."""
    seeds = [derive_seed(SEED, "env", ITERATION, group) for group in range(0, groups, groups // n)]
    return {str(seed): "kill once 1" for seed in seeds}


@pytest.fixture(scope="module")
def tiny():
    return TinyEngine(WORDS, seed=1)


@pytest.fixture(scope="module", params=["window", pytest.param("append", marks=pytest.mark.slow)])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def tiny_hash(tiny, mode):
    played, _ = play(tiny, "serial", mode=mode)
    assert len({call.response_ids for t in played for call in t.calls}) > 100  # they are not all alike
    return whole(played)


def test_episodes_played_one_env_step_abreast_are_those_of_the_serial_rollout(tiny, mode, tiny_hash):
    with in_lockstep(config(1, mode), tiny) as collector:
        assert whole(collector.collect(ITERATION, Sampling(TOKENS, 1.0, ("</action>",)))) == tiny_hash


@pytest.mark.parametrize(
    ("backend", "n_jobs", "n_deaths"),
    [
        ("process", 2, 4),
        pytest.param("process", 3, 16, marks=pytest.mark.slow),
        pytest.param("loky", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_killed_change_no_byte(tiny, mode, tiny_hash, backend, n_jobs, n_deaths, tmp_path):
    changes = {"faults": deaths(n_deaths), "folder": tmp_path, "max_deaths": 1000}
    played, report = play(tiny, backend, n_jobs, mode, **changes)
    assert whole(played) == tiny_hash
    assert report.worker_deaths >= 1
    assert len(list(tmp_path.iterdir())) == n_deaths


# --- a model of transformers: its tokens
@pytest.fixture(scope="module")
def smollm2():
    try:
        return HuggingFaceEngine.load(get_model("smollm2"))
    except EngineError as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def smollm2_hash(smollm2):
    return tokens(play(smollm2, "serial", groups=FEWER_GROUPS)[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("backend", "n_jobs"), [("thread", 3), ("process", 2), ("loky", 2)])
def test_smollm2_reads_and_writes_the_same_tokens_everywhere(
    smollm2, smollm2_hash, backend, n_jobs, tmp_path
):
    assert tokens(play(smollm2, backend, n_jobs, groups=FEWER_GROUPS)[0]) == smollm2_hash
    if backend != "thread":
        changes = {
            "groups": FEWER_GROUPS,
            "faults": deaths(2, FEWER_GROUPS),
            "folder": tmp_path,
            "max_deaths": 1000,
        }
        played, report = play(smollm2, backend, n_jobs, **changes)
        assert tokens(played) == smollm2_hash
        assert report.worker_deaths >= 1
