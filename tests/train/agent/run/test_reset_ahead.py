"""While an iteration's update runs, the hosts reset the envs of the next one: the run is the same to the last bit."""

import os
import time

import pytest
from tests.train.agent.supervised.lakes import NotingLake
from tests.train.agent.test_trainer import SMALL, results

from shoal import derive_seed, envs
from shoal.rollout.rollouts import ParallelRolloutManager
from shoal.train.agent.algorithms.losses import LOSSES, policy_loss
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

PATIENCE = 60
SEED, ITERATIONS, GROUPS = 5, 3, 4
SHAPE = [
    *SMALL, f"seed={SEED}", f"trainer.iterations={ITERATIONS}", f"es_manager.train.env_groups={GROUPS}",
    "agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel_n_jobs=2",
    "use_parallel_envs=false",
    "algorithm.filter_groups.max_num_gen_batches=2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _lake():
    envs.register("noting_lake", NotingLake, replace=True)


def settings(folder, *overrides):
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    lake = ["custom_envs.FrozenLakeEnv.env_type=noting_lake",
            f"custom_envs.FrozenLakeEnv.env_config.folder={folder / 'notes'}"]  # fmt: skip
    return compose_config("demo", [*SHAPE, *lake, f"run_dir={folder / 'run'}", *overrides])


def run(folder, *overrides):
    with AgentTrainer(settings(folder, *overrides)) as trainer:
        list(trainer.train())
    return results(folder / "run")


def notes(folder, what):
    """What was noted, without resets of the warm-up's and the evaluations' envs."""
    names = [name.rpartition(" ")[0] for name in os.listdir(folder / "notes") if name.startswith(what)]
    training = {
        f"reset {derive_seed(SEED, 'env', i, group)}" for i in range(ITERATIONS + 1) for group in range(64)
    }
    return sorted(name for name in names if what != "reset" or name in training)


def wait_for(happened):
    end = time.monotonic() + PATIENCE
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)
    assert happened()


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A run that resets nothing ahead, and what it noted."""
    envs.register("noting_lake", NotingLake, replace=True)
    folder = tmp_path_factory.mktemp("apart")
    found = run(folder, "agent_proxy.parallel.reset_ahead=false", "agent_proxy.parallel.backend=threads")
    return found, notes(folder, "reset")


@pytest.fixture
def waiting():
    """An update that lasts until the next iteration has begun; `then` is called with the number of that one."""
    told = {"then": lambda following: None}
    clip = LOSSES["clip"].compute

    @policy_loss("clip", replace=True)
    def loss(tokens, config):
        following = told["trainer"].progress.iteration + 1
        if following < ITERATIONS:
            wanted = {f"reset {derive_seed(SEED, 'env', following, group)}" for group in range(GROUPS)}
            wait_for(lambda: wanted <= set(notes(told["folder"], "reset")))
        told["then"](following)
        return clip(tokens, config)

    yield told
    policy_loss("clip", replace=True)(clip)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_run_that_resets_ahead_is_the_same_and_resets_nothing_in_vain(apart, tmp_path, waiting, backend):
    waiting["folder"] = tmp_path
    with AgentTrainer(settings(tmp_path, f"agent_proxy.parallel.backend={backend}")) as trainer:
        waiting["trainer"] = trainer
        list(trainer.train())
    assert results(tmp_path / "run") == apart[0]
    assert notes(tmp_path, "reset") == apart[1]
    assert len(apart[1]) > ITERATIONS * GROUPS * 8  # dynamic sampling played further groups
    assert notes(tmp_path, "made") == ["made"] * len(notes(tmp_path, "closed"))


@pytest.mark.parametrize(("stop", "begun"), [("null", [1, 2]), ("1.0", [1])])
def test_nothing_begins_after_the_last_iteration_or_where_an_evaluation_may_end_the_run(
    tmp_path, monkeypatch, stop, begun
):
    asked = []
    monkeypatch.setattr(ParallelRolloutManager, "prepare", lambda _, number, *a, **k: asked.append(number))
    short = ["agent_proxy.parallel.backend=threads", "agent_proxy.max_turn=2", "warmup.steps=1"]
    run(tmp_path, f"trainer.stop_at_success={stop}", *short)
    assert asked == begun


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ctrl_c_in_an_update_leaves_nothing_open_and_the_run_goes_on(apart, tmp_path, waiting, backend):
    def interrupt(following):
        if following == 2:
            raise KeyboardInterrupt

    waiting |= {"folder": tmp_path, "then": interrupt}
    overrides = [f"agent_proxy.parallel.backend={backend}"]
    with AgentTrainer(settings(tmp_path, *overrides)) as trainer:
        waiting["trainer"] = trainer
        with pytest.raises(KeyboardInterrupt):
            list(trainer.train())
    assert trainer.worker_pids() == []
    wait_for(lambda: len(notes(tmp_path, "made")) == len(notes(tmp_path, "closed")))
    waiting["then"] = lambda following: None
    with AgentTrainer(settings(tmp_path, *overrides, "resume=true")) as trainer:
        waiting["trainer"] = trainer
        list(trainer.train())
    assert results(tmp_path / "run") == apart[0]
