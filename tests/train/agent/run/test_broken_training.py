"""Training that cannot go on ends with its reason and keeps what was sound; it never runs on as if all were well."""

import math

import pytest
from tests.train.agent.run.test_crash_points import train

from shoal.core.errors import DivergedError, EngineError, EnvError
from shoal.envs import make
from shoal.samplers.sampler import Completion
from shoal.samplers.tiny import TinyEngine
from shoal.train.agent import update
from shoal.train.agent.run.checkpoint import list_checkpoints, newest_checkpoint


@pytest.mark.parametrize("parallel", ["false", "true"])
def test_an_engine_that_answers_nothing_ends_the_run(tmp_path, monkeypatch, parallel):
    def broken(self, requests):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(TinyEngine, "generate", broken)
    workers = [f"agent_proxy.use_parallel_rollout={parallel}", "agent_proxy.parallel.backend=thread"]
    with pytest.raises(
        EngineError, match=r"all 2 episodes of the evaluation failed; the first: .*the device is lost"
    ):
        train(tmp_path / "run", *workers, "agent_proxy.parallel_n_jobs=1")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_engine_that_is_lost_in_training_ends_the_run_at_its_last_checkpoint(tmp_path, monkeypatch):
    generate, calls = TinyEngine.generate, []

    def breaking(self, requests):
        calls.append(1)
        if len(calls) > 8:
            raise RuntimeError("the device is lost")
        return generate(self, requests)

    monkeypatch.setattr(TinyEngine, "generate", breaking)
    with pytest.raises(EngineError, match=r"all \d episodes of .* failed; the first: .*the device is lost"):
        train(tmp_path / "run", "trainer.save_every=1", "trainer.iterations=9")
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name >= "step-000001"
    monkeypatch.setattr(TinyEngine, "generate", generate)
    assert train(tmp_path / "run", "resume=true")[-1]["iteration"] == 4


Lake = type(make("frozen_lake"))


class NoDisplay(Lake):
    """Cannot be stepped."""

    def step(self, action):
        raise RuntimeError("no display")


def lake(kind):
    return f"custom_envs.FrozenLakeEnv.env_type=tests.train.agent.run.test_broken_training:{kind}"


HERE = ("vector.backend=serial", "trainer.check_envs=false", "warmup.steps=0")


def test_envs_that_all_fail_end_the_run(tmp_path):
    with pytest.raises(EnvError, match="all 2 episodes of the evaluation failed; the first: .*no display"):
        train(tmp_path / "run", lake("NoDisplay"), *HERE)


def test_a_gradient_that_is_no_number_changes_no_weights_and_ends_the_run(tmp_path, monkeypatch):
    loss, steps = update.token_loss, []

    def poisoned(*arguments):
        steps.append(1)
        return loss(*arguments) * (math.nan if len(steps) > 3 else 1.0)

    monkeypatch.setattr(update, "token_loss", poisoned)
    with pytest.raises(
        DivergedError, match=r"gradient .* is nan .*those from before it\. Go on from the last checkpoint"
    ):
        train(tmp_path / "run", "trainer.save_every=1", "trainer.iterations=9")
    newest_checkpoint(tmp_path / "run" / "checkpoints")
    monkeypatch.setattr(update, "token_loss", loss)
    assert train(tmp_path / "run", "resume=true")[-1]["iteration"] == 4


def test_weights_that_give_no_numbers_are_named_as_the_reason(tmp_path, monkeypatch):
    generate = TinyEngine.generate

    def silly(self, requests):
        return [
            Completion(c.token_ids, (math.nan,) * len(c.logprobs), c.finish) for c in generate(self, requests)
        ]

    monkeypatch.setattr(TinyEngine, "generate", silly)
    with pytest.raises(
        DivergedError,
        match=r"log-probabilities that are no numbers.*Go on from the last checkpoint.*resume=true algorithm",
    ):
        train(tmp_path / "run")
