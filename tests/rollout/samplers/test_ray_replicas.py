"""What an engine of replicas does when they die, with a stand-in for a cluster."""

import sys
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
        put=lambda value: value,
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


@pytest.mark.parametrize("method", ["generate", "load_weights"])
def test_an_engine_that_is_closed_at_work_says_so_and_makes_no_replica_anew(make, method):
    engine = make()
    replica = engine._actors[0].replica

    def call(*arguments):
        engine.close()
        raise engine_death(engine)

    actors = list(engine._actors)
    replica.call = call
    with pytest.raises(EngineError, match="this engine was closed"):
        engine.generate(ASKED) if method == "generate" else engine.load_weights({}, 3)
    assert [actor.dead for actor in actors] == [True, True]
    assert engine._actors == []
    assert engine.weights_version == 0


def engine_death(engine):
    """What Ray raises of an actor that was killed."""
    return sys.modules[type(engine).__module__].RayActorError()
