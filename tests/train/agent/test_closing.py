"""A trainer ends what it began: envs, rollout workers and engines, also when it cannot begin."""

import pytest
from tests.train.agent.run.test_crash_points import SMALL

from shoal.core.errors import ConfigError
from shoal.samplers.tiny import TinyEngine
from shoal.train.agent import trainer as agent
from shoal.train.agent.config import compose_config
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.trainer import AgentTrainer


class Sampler(TinyEngine):
    """A sampler that can be ended."""

    def close(self):
        ENDED.append(self)


ENDED: list = []


@pytest.fixture
def pools(monkeypatch):
    """Pools of envs that were made, and those that were closed."""
    made, closed = [], []
    make = agent.make_environments

    def counted(*arguments, **settings):
        sides = make(*arguments, **settings)
        for side in sides:
            made.append(side.pool)
            close = side.pool.close
            side.pool.close = lambda close=close, pool=side.pool: (closed.append(pool), close())
        return sides

    monkeypatch.setattr(agent, "make_environments", counted)
    ENDED.clear()
    return made, closed


def apart(config, words, seed, held):
    return policy_of(TinyEngine(words, seed=seed)), Sampler(words, seed=seed)


@pytest.mark.parametrize("parallel", ["false", "true"])
def test_a_closed_trainer_has_ended_its_engine_and_its_envs(tmp_path, monkeypatch, pools, parallel):
    monkeypatch.setattr("shoal.train.agent.policies.loading.make_policy", apart)
    settings = [f"run_dir={tmp_path}", f"agent_proxy.use_parallel_rollout={parallel}"]
    trainer = AgentTrainer(compose_config("demo", [*SMALL, *settings]))
    assert not ENDED
    trainer.close()
    trainer.close()  # as often as one likes
    assert len(ENDED) == 1
    made, closed = pools
    assert set(map(id, made)) <= set(map(id, closed)) or parallel == "true"


@pytest.mark.parametrize("part", ["safe_batching", "make_networks", "Records", "TrajectoryCollector"])
def test_a_trainer_that_cannot_begin_leaves_nothing_behind(tmp_path, monkeypatch, pools, part):
    monkeypatch.setattr("shoal.train.agent.policies.loading.make_policy", apart)

    def failing(*_, **__):
        raise ConfigError("not today")

    monkeypatch.setattr(agent, part, failing)
    with pytest.raises(ConfigError, match="not today"):
        AgentTrainer(compose_config("demo", [*SMALL, f"run_dir={tmp_path}"]))
    made, closed = pools
    assert made
    assert set(map(id, made)) <= set(map(id, closed))
    assert len(ENDED) == 1


def test_gradient_checkpointing_that_a_model_cannot_do_is_refused_and_its_engine_ended(
    tmp_path, monkeypatch, pools
):
    def simple(config, words, seed, held):
        policy, sampler = apart(config, words, seed, held)
        for block in policy.module.blocks:
            del block.gradient_checkpointing
        return policy, sampler

    monkeypatch.setattr("shoal.train.agent.policies.loading.make_policy", simple)
    settings = ["algorithm.gradient_checkpointing=true", f"run_dir={tmp_path}"]
    with pytest.raises(ConfigError, match="gradient_checkpointing=true has no effect on this model"):
        AgentTrainer(compose_config("demo", [*SMALL, *settings]))
    assert len(ENDED) == 1
