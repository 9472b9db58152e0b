"""What an engine of replicas does when they die, with a stand-in for a cluster."""

from types import SimpleNamespace

import pytest

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Key, Request, Sampling
from shoal.rollout.samplers.scripted import RandomEngine

ASKED = [Request((3, 4), Key(0, 0, 0, member, 0), Sampling(8)) for member in range(4)]


class Actor:
    def __init__(self, replica, death):
        self.replica, self.death, self.dead = replica, death, False

    def __getattr__(self, name):
        def call(*arguments):
            if self.dead:
                raise self.death
            return getattr(self.replica, name)(*arguments)

        return SimpleNamespace(remote=lambda *arguments: lambda: call(*arguments))


@pytest.fixture
def make(monkeypatch):
    module = pytest.importorskip("shoal.rollout.samplers.ray", exc_type=ImportError)
    death = module.RayActorError()
    cluster = SimpleNamespace(
        is_initialized=lambda: True,
        remote=lambda **options: lambda kind: SimpleNamespace(remote=lambda *made: Actor(kind(*made), death)),
        wait=lambda calls, timeout: (calls, []),
        get=lambda call, timeout=None: call(),
        kill=lambda actor: setattr(actor, "dead", True),
    )
    monkeypatch.setattr(module, "ray", cluster)
    return lambda **options: module.RayEngine(lambda: RandomEngine(["Up"]), 2, **options)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_replica_that_died_is_made_anew_however_often_a_batch_is_asked_again(make, retries):
    engine = make(retries=retries)
    expected = engine.generate(ASKED)
    engine._actors[1].dead = True
    if not retries:
        with pytest.raises(EngineError, match="replica 1 failed 1 times"):
            engine.generate(ASKED)
    assert engine.generate(ASKED) == expected


def test_a_closed_engine_says_so(make):
    engine = make()
    engine.close()
    with pytest.raises(EngineError, match="this engine was closed"):
        engine.generate(ASKED)
