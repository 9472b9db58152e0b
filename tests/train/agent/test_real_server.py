"""Training by a real vLLM server: it has each version, and writes by it, also after it was killed."""

import signal

import pytest
from tests.samplers.vllm.serving import needs_vllm, real_server
from tests.samplers.vllm.test_vllm import save_model
from tests.train.agent.test_server import LORA, config_of

from shoal.core.data import read_trajectories
from shoal.train.agent.trainer import AgentTrainer

pytestmark = needs_vllm
ITERATIONS = 4
GAP = 1e-4
"""Nats in float32, between the log-probabilities of the server and those of the policy."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, tied=False)
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    adapters = "--enable-lora", "--max-lora-rank", "8"
    with real_server(model, tmp_path_factory.mktemp("vllm") / "log", *adapters) as running:
        yield running


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
@pytest.mark.parametrize(
    ("more", "lag"), [([], 0), (["trainer.lag=1"], 1), (LORA, 0)], ids=["weights", "lag", "adapters"]
)
def test_what_a_server_writes_is_by_the_weights_that_are_trained(server, model, tmp_path, more, lag, killed):
    named = ["engine.name=openai", f"engine.server.url={server.url}", f"engine.server.tolerance={GAP}"]
    config = config_of(
        tmp_path / "run", model, *named, "engine.server.retries=30", f"trainer.iterations={ITERATIONS}", *more
    )
    rows = []
    with AgentTrainer(config) as trainer:
        for row in trainer.train():
            rows.append(row)
            if killed and len(rows) == 2:  # it comes back with its own weights
                server.stop(signal.SIGKILL)
                server.start()
    learned = [row for row in rows if "logprob_gap_max" in row]
    assert len(learned) == ITERATIONS
    for k, row in enumerate(learned):
        played = list(read_trajectories(tmp_path / "run" / "trajectories" / f"train-{k + 1:06d}.jsonl"))
        assert [t.status for t in played] == ["ok"] * 6
        assert {call.weights_version for t in played for call in t.calls} == {max(0, k - lag)}
        if not lag or not k:  # else it measures the lag
            assert row["logprob_gap_max"] < GAP
