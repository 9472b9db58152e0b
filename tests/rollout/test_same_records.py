"""The same records, to the last digit, as at the commit that wrote these digests, wherever episodes are played.

Engines whose answers are hashes say the same on every machine.
"""

import hashlib
import json
from pathlib import Path

import pytest
from tests.rollout.doubles import WORDS, HashEngine, config, in_lockstep
from tests.rollout.tools import functions

from shoal import ParallelRolloutManager
from shoal.core.data import encode_trajectory
from shoal.gateway.programs import sessions_of
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.sampler import Sampling
from shoal.samplers.scripted import ScriptedEngine

KNOWN = {
    "envs": "a9fccd889c1c9613cd33467a19af488f360751818ce36dc66c12e366bd0dcd8c",
    "tools": "286da81d638c46f42645ea7ea7aec4f0936c66d2051f15776e8f3cd8aec5704e",
    "program": "8f934a45670927cf7de5889f1fc1c5f5f64cc23d96b7315653ebabdca20c4a4f",
}
PLACES = [
    ("serial", 1),
    ("thread", 2),
    ("process", 3),
    ("loky", 2),
    ("threading", 2),
    ("vector serial", 1),
    ("vector process", 2),
    pytest.param("multiprocessing", 2, marks=pytest.mark.slow),
    pytest.param("ray", 2, marks=[pytest.mark.slow, pytest.mark.ray]),
]
PROGRAMS = Path(__file__).parents[1] / "gateway"
CALL = '<tool_call>{"name": "%s", "arguments": {"%s": %s}}</tool_call>'
CALLS = CALL % ("add", "a", 2) + CALL % ("look", "city", '"oslo"') + CALL % ("fail", "text", '"x"')


def digest(trajectories):
    """One hash of every word, token, log-probability, reward and end."""
    records = [json.loads(encode_trajectory(trajectory)) for trajectory in trajectories]
    assert all(record["status"] == "ok" for record in records)
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def play(backend, n_jobs, engine, sampling, tools=()):
    settings = config()
    if not backend.startswith("vector"):
        with ParallelRolloutManager(settings, engine, n_jobs, backend=backend, tools=tools) as manager:
            return digest(manager.collect(4, sampling))
    vector = {"backend": backend.split()[1]} | ({"num_workers": n_jobs} if n_jobs > 1 else {})
    with Toolbox(tools) as toolbox, in_lockstep(settings, engine, vector, toolbox=toolbox) as collector:
        return digest(collector.collect(4, sampling))


@pytest.mark.parametrize(("backend", "n_jobs"), PLACES)
def test_envs_leave_the_known_records_everywhere(backend, n_jobs):
    assert play(backend, n_jobs, HashEngine(), Sampling(16, 1.0, ("</action>",))) == KNOWN["envs"]


@pytest.mark.parametrize(("backend", "n_jobs"), PLACES)
def test_tools_leave_the_known_records_everywhere(backend, n_jobs):
    engine = ScriptedEngine(lambda text, key: f"<action>{WORDS[0]}</action>" if key.path[-1] % 2 else CALLS)
    tools = [functions.add, functions.look, functions.fail]
    assert play(backend, n_jobs, engine, Sampling(999, 1.0, ("</action>",)), tools) == KNOWN["tools"]


@pytest.mark.parametrize(("backend", "n_jobs"), [("serial", 1), ("process", 3)])
def test_programs_leave_the_known_records(backend, n_jobs):
    settings = config(groups=3)
    program = {"function": "agent_functions:play", "folder": str(PROGRAMS)}
    settings["custom_envs"]["Counter"] = {"env_type": "program", "env_config": program}
    with ParallelRolloutManager(
        settings, HashEngine(), n_jobs, backend=backend, sessions=sessions_of
    ) as manager:
        assert digest(manager.collect(4)) == KNOWN["program"]
