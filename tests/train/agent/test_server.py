"""A server samples for a training run as the model here would: by its weights, through restarts, or not at all."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.samplers.servers.model_server import ModelServer, keyed
from tests.train.agent.tiny_model import write_tiny_model

from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError, EngineError
from shoal.samplers.servers import openai
from shoal.train.agent.config import compose_config
from shoal.train.agent.processes.distributed import Processes
from shoal.train.agent.trainer import AgentTrainer

pytest.importorskip("transformers")
SETTINGS = [
    "custom_envs.FrozenLakeEnv=null", "+custom_envs.Words={env_type: 'tests.train.agent.lag_env:Words'}",
    "es_manager.train.env_configs.tags=[Words]", "es_manager.val.env_configs.tags=[Words]",
    "es_manager.train.env_groups=2", "es_manager.train.group_size=3", "es_manager.val.env_groups=1",
    "warmup.steps=0", "warmup.rehearsal=0", "agent_proxy.max_tokens=2", "agent_proxy.use_parallel_rollout=true",
    "agent_proxy.parallel_n_jobs=2", "agent_proxy.parallel.backend=thread", "algorithm=grpo", "algorithm.kl.coef=0",
    "trainer.tensorboard=false", "trainer.stop_at_success=null", "trainer.stop_on_collapse=false",
    "trainer.eval_every=9", "trainer.save_trajectories_every=1", "trainer.iterations=3",
    "algorithm.learning_rate=0.003", "use_parallel_envs=false",
]  # fmt: skip
LORA = ["model.lora.rank=2", "algorithm.learning_rate=0.03"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        write_tiny_model(folder, unused=12)  # which are said, and learned from
    return folder


@pytest.fixture
def serve(model, monkeypatch):
    for kind in ("vllm", "sglang"):
        monkeypatch.setitem(openai.DIALECTS, kind, keyed(openai.DIALECTS[kind]))
    opened = []

    def start(kind):
        opened.append(ModelServer(model, kind))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


def config_of(folder, model, *more):
    return compose_config("base", [*SETTINGS, f"engine.model={model}", f"run_dir={folder}", *more])


def trained(config):
    """What was played, and the weights in the end."""
    folder = Path(config.run_dir)
    with AgentTrainer(config) as trainer:
        rows = list(trainer.train())
        weights = {name: value.clone() for name, value in trainer.policy.module.state_dict().items()}
    played = [list(read_trajectories(file)) for file in sorted(folder.glob("trajectories/train-*.jsonl"))]
    assert len(rows) in (2, 4)  # one that goes on yields rows of its own
    return played, weights


@pytest.fixture(scope="module")
def here(model, tmp_path_factory):
    """The same runs by the model in process."""
    runs = {}

    def run(*more):
        if more not in runs:
            folder = tmp_path_factory.mktemp("here") / "run"
            runs[more] = trained(config_of(folder, model, "engine.name=huggingface", *more))
        return runs[more]

    return run


def settings(server, folder, model, *more):
    named = ["engine.name=openai", f"engine.server.url={server.url}", "engine.server.tolerance=0.001"]
    return config_of(folder, model, *named, "engine.server.retries=8", *more)


def there(*where):
    return trained(settings(*where))


def check_equal(one, other):
    (played, weights), (again, others) = one, other
    assert [len(episodes) for episodes in played] == [6, 6, 6]
    for a, b in zip(chain(*played), chain(*again), strict=True):
        assert (a.status, b.status) == ("ok", "ok")
        for call, called in zip(a.calls, b.calls, strict=True):
            assert call.response_ids == called.response_ids
            assert call.weights_version == called.weights_version
            assert call.logprobs == pytest.approx(called.logprobs, abs=1e-4)
    for name, value in weights.items():
        assert torch.allclose(value, others[name], atol=1e-4), name


@pytest.mark.parametrize("more", [(), LORA], ids=["weights", "adapters"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_run_on_a_server_is_the_run_in_process(serve, here, model, tmp_path, kind, more):
    server = serve(kind)
    check_equal(there(server, tmp_path / "run", model, *more), here(*more))
    assert server.answered["loaded"] > 0
    assert server.answered["stale"] == server.answered["base"] == server.mixed == 0
    assert not list((tmp_path / "run").glob("server*"))  # what was written for it is gone


LOADS = "/collective_rpc", "/load_lora_adapter"
SECOND = [None] * 22
"""Requests before the middle of the second iteration: the server has weights that are not its own by then."""


@pytest.mark.parametrize(
    ("fault", "kind", "more"),
    [("restart", "vllm", ()), ("quiet", "sglang", ()), ("restart", "sglang", LORA), ("quiet", "vllm", LORA)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple | list) else value,
)
def test_a_server_that_comes_back_with_its_own_weights_costs_time_alone(
    serve, here, model, tmp_path, caplog, fault, kind, more
):
    """One that was away loads them again in any case, also those that differ too little to be noticed."""
    server = serve(kind)
    server.faults = [*SECOND, fault]
    unseen = ["engine.server.tolerance=9"] if fault == "restart" else []
    check_equal(there(server, tmp_path / "run", model, *more, *unseen), here(*more))
    assert not server.faults
    assert "the server may have lost version 1: it is loaded again" in caplog.text
    assert not server.mixed


def test_passing_faults_are_retried_by_the_one_policy_and_cost_no_episode(serve, here, model, tmp_path):
    server = serve("vllm")
    server.faults = [*SECOND, 500, 503, 502, 504, 429, 500, 500, "hang up"]
    broken = [503, 500]
    server.breaks = lambda path: broken.pop() if broken and path == "/collective_rpc" else None
    check_equal(there(server, tmp_path / "run", model), here())
    assert not server.faults
    assert not broken
    reloads = [path for path, _ in server.calls if path == "/collective_rpc"]
    assert len(reloads) == 2 + 4  # two that were broken, and one a version: a new connection alone costs none


@pytest.mark.parametrize(("kind", "more"), [("vllm", ()), ("sglang", LORA)], ids=["weights", "adapters"])
def test_a_server_that_ignores_what_it_is_told_to_load_ends_the_run(serve, model, tmp_path, kind, more):
    server = serve(kind)
    server.ignores = True
    told = (
        "does not have version 1 of the weights: .* differ by .* after a second load of .*engine.server.tol"
    )
    with pytest.raises(EngineError, match=told):
        there(server, tmp_path / "run", model, *more)
    told = [path for path, _ in server.calls if path in LOADS]
    assert len(told) == 3  # version 0, and twice version 1


def test_a_server_without_its_routes_for_training_is_refused_with_what_to_do(serve, model, tmp_path):
    server = serve("vllm")
    server.breaks = lambda path: 404
    with pytest.raises(EngineError, match="HTTP 404.*Start it as docs/servers.md says"):
        there(server, tmp_path / "run", model)


@pytest.mark.parametrize("more", [(), ("trainer.lag=1",)], ids=["", "lag"])
def test_a_run_goes_on_by_a_server(serve, here, model, tmp_path, more):
    server = serve("vllm")
    run = tmp_path / "run"
    with AgentTrainer(settings(server, run, model, "trainer.save_every=1", *more)) as trainer:
        for row in trainer.train():
            if row["iteration"] == 2:
                break
    server.restart(0)
    check_equal(there(server, run, model, "trainer.save_every=1", "resume=true", *more), here(*more))


@pytest.mark.parametrize(
    "more", [(), pytest.param(LORA, marks=pytest.mark.slow)], ids=["weights", "adapters"]
)
def test_a_server_plays_by_older_weights_too(serve, here, model, tmp_path, more):
    """It has one copy of them, which changes when an evaluation wants the newest, and is lost once."""
    lagged = [*more, "trainer.lag=2", "trainer.eval_every=1"]
    server = serve("vllm")
    server.faults = [*SECOND, "restart"]
    check_equal(there(server, tmp_path / "run", model, *lagged), here(*lagged))
    assert not server.faults
    assert server.answered["stale"] == server.mixed == 0


def test_several_processes_cannot_want_versions_of_one_server(serve, model, tmp_path, monkeypatch):
    two = Processes(0, 2)
    monkeypatch.setattr("shoal.train.agent.trainer.Processes.join", lambda *args, **named: two)
    with pytest.raises(ConfigError, match="each of 2 processes want other weights of one server"):
        AgentTrainer(settings(serve("vllm"), tmp_path / "run", model, "trainer.lag=1"))
