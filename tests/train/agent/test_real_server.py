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


ADAPTERS = "--enable-lora", "--max-lora-rank", "8"
"""Not for the others: with them vLLM's CPU build 0.32 cannot score a prompt beside other requests."""


@pytest.mark.parametrize(
    ("more", "lag", "options"),
    [([], 0, ()), (["trainer.lag=1"], 1, ()), (LORA, 0, ADAPTERS)],
    ids=["weights", "lag", "adapters"],
)
def test_what_a_server_writes_is_by_the_weights_that_are_trained(model, tmp_path, more, lag, options):
    folder = tmp_path / "run"
    sizes = ["es_manager.train.env_groups=4", "es_manager.train.group_size=6", "engine.server.retries=30"]
    sizes.append(f"trainer.iterations={ITERATIONS}")
    with real_server(model, tmp_path / "log", *options) as server:
        named = ["engine.name=openai", f"engine.server.url={server.url}", f"engine.server.tolerance={GAP}"]
        config = config_of(folder, model, *named, *sizes, *more)
        rows = []
        with AgentTrainer(config) as trainer:
            for row in trainer.train():
                rows.append(row)
                if len(rows) == 2:  # it comes back with its own weights
                    server.stop(signal.SIGKILL)
                    server.start()
    gaps = {row["iteration"]: row["logprob_gap_max"] for row in rows if "logprob_gap_max" in row}
    assert len(gaps) > 1  # a group whose rewards are equal teaches nothing
    for k in range(ITERATIONS):
        played = list(read_trajectories(folder / "trajectories" / f"train-{k + 1:06d}.jsonl"))
        assert [t.status for t in played] == ["ok"] * 24
        assert {call.weights_version for t in played for call in t.calls} == {max(0, k - lag)}
        if not lag:  # else it measures the lag
            assert gaps.get(k + 1, 0.0) < GAP
