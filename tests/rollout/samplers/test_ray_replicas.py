"""What an engine of replicas does when they die, with a stand-in for a cluster."""

import sys
from types import SimpleNamespace

import pytest

from shoal.core.errors import EngineError
from shoal.rollout.samplers.sampler import Key, Request, Sampling
from shoal.rollout.samplers.scripted import RandomEngine

ASKED = [Request((3, 4), Key(0, (0, 0, member, 0)), Sampling(8)) for member in range(4)]


class Actor:
    made = 0

    def __init__(self, kind, made, death):
        Actor.made += 1
        self.death, self.dead = death, False
        try:
            self.replica = kind(*made)
        except RuntimeError:
            self.dead = True

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
        is_initialized=lambda: cluster.lives,
        lives=True,
        remote=lambda **options: lambda kind: SimpleNamespace(remote=lambda *made: Actor(kind, made, death)),
        wait=lambda calls, timeout: (calls, []),
        cluster_resources=dict,
        available_resources=dict,
        get=lambda call, timeout=None: call(),
        put=lambda value: value,
        kill=lambda actor: setattr(actor, "dead", True),
    )
    monkeypatch.setattr(module, "ray", cluster)
    return lambda engine=lambda: RandomEngine(["Up"]), **options: module.RayEngine(engine, 2, **options)


@pytest.mark.parametrize("death", ["RayActorError", "OutOfMemoryError"])
@pytest.mark.parametrize("retries", [0, 1])
def test_a_replica_that_died_is_made_anew_however_often_a_batch_is_asked_again(make, retries, death):
    """What Ray's own monitor of memory ends does not die as an actor's error says."""
    engine = make(retries=retries)
    expected = engine.generate(ASKED)
    engine._actors[1].death = getattr(sys.modules[type(engine).__module__], death)("gone")
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


def test_an_engine_whose_ray_was_shut_down_says_so_and_starts_no_other(make):
    engine = make()
    replicas = list(engine._actors)
    ray = engine.generate.__func__.__globals__["ray"]
    ray.lives = False
    for act in (lambda: engine.generate(ASKED), lambda: engine.load_weights({}, 1), engine.restart):
        with pytest.raises(EngineError, match="their session of Ray was shut down"):
            act()
    assert engine._actors == replicas
    ray.kill = None
    engine.close()


@pytest.mark.parametrize("over", [True, False])
def test_who_waits_when_ray_is_shut_down_hears_of_it_and_is_not_ended(make, monkeypatch, over):
    engine = make()
    ray = engine.generate.__func__.__globals__["ray"]

    def get(answer, timeout):
        ray.lives = not over
        raise SystemExit(0)

    monkeypatch.setattr(ray, "get", get)
    error, said = (EngineError, "their session of Ray was shut down") if over else (SystemExit, "0")
    with pytest.raises(error, match=said):
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


class Weighty(RandomEngine):
    """Says which weights it has; there may be no memory for them."""

    room = True

    def load_weights(self, weights, version):
        if not self.room:
            raise RuntimeError("out of memory")
        self.weights_version = version


def test_a_replica_that_cannot_take_the_last_weights_answers_with_no_others(make, monkeypatch):
    engine = make(lambda: Weighty(["Up"]), retries=1)
    engine.load_weights({}, 5)
    engine._actors[1].dead = True
    monkeypatch.setattr(Weighty, "room", False)
    for _ in range(2):
        with pytest.raises(EngineError, match="replica 1 failed 2 times"):
            engine.generate(ASKED)
    monkeypatch.setattr(Weighty, "room", True)
    assert [c.weights_version for c in engine.generate(ASKED)] == [5, 5, 5, 5]


@pytest.mark.parametrize("rejected", [True, False], ids=["rejected", "Ctrl-C"])
@pytest.mark.parametrize("lost", [True, False], ids=["one lost", "none lost"])
def test_weights_that_one_replica_does_not_take_are_answered_with_by_none(make, rejected, lost):
    engine = make(lambda: Weighty(["Up"]))
    engine.load_weights({}, 5)

    def refuses(*arguments):
        if not rejected:
            raise KeyboardInterrupt
        raise sys.modules[type(engine).__module__].RayTaskError("call", "", ValueError("other shapes"))

    engine._actors[1].replica.call = refuses
    engine._actors[0].dead = lost
    error, told = (
        (EngineError, "replica 1 does not take .* other shapes") if rejected else (KeyboardInterrupt, None)
    )
    with pytest.raises(error, match=told):
        engine.load_weights({}, 6)
    assert [c.weights_version for c in engine.generate(ASKED)] == [5, 5, 5, 5]
    assert engine.weights_version == 5
    engine.load_weights({}, 7)
    assert [c.weights_version for c in engine.generate(ASKED)] == [7, 7, 7, 7]


def test_replicas_that_are_made_anew_while_they_are_told_new_weights_have_them(make):
    engine = make(lambda: Weighty(["Up"]))

    def hangs(*arguments):
        engine.restart()  # another thread's
        raise engine_death(engine)

    engine._actors[0].replica.call = hangs
    engine.load_weights({}, 5)
    assert [c.weights_version for c in engine.generate(ASKED)] == [5, 5, 5, 5]


def test_a_call_that_was_left_behind_leaves_the_replicas_alone_that_were_made_since(make):
    engine = make()
    expected, made = engine.generate(ASKED), Actor.made

    def hangs(*arguments):
        engine.restart()
        raise engine_death(engine)

    engine._actors[0].replica.call = hangs
    with pytest.raises(EngineError, match="made anew before the answer came"):
        engine.generate(ASKED)
    assert engine.generate(ASKED) == expected
    assert Actor.made == made + 2


def test_of_two_calls_that_lost_one_replica_only_one_makes_it_anew(make):
    engine, made = make(), Actor.made
    expected = engine.generate(ASKED)

    def dies(*arguments):
        engine._actors[0].dead = True
        assert engine.generate(ASKED) == expected  # another thread's
        raise engine_death(engine)

    engine._actors[0].replica.call = dies
    assert engine.generate(ASKED) == expected
    assert Actor.made == made + 1


def test_an_answer_that_cannot_be_read_is_an_engine_error_of_one_line(make):
    engine = make()
    module = sys.modules[type(engine).__module__]

    def call(*arguments):
        raise module.RayError("System error: no such class\ntraceback: of many lines")

    engine._actors[1].replica.call = call
    with pytest.raises(EngineError, match="replica 1: its answer cannot be read: .*no such class$"):
        engine.generate(ASKED)


def test_who_waits_for_a_replica_without_room_is_told_so(make, monkeypatch, caplog):
    engine = make()
    module, full = sys.modules[type(engine).__module__], [1, 1]
    monkeypatch.setattr(module.ray, "wait", lambda calls, timeout: ([] if full and full.pop() else calls, []))
    engine.generate(ASKED)
    assert "still waiting" not in caplog.text
    engine._actors[1].dead = True
    engine.generate(ASKED)
    assert [r.message for r in caplog.records].count(
        "still waiting for replica 1 to start: the cluster has {}, of which {} are free"
    ) == 2


def test_a_replica_made_anew_has_the_adapter_and_the_weights_under_it(make):
    class Adapted(Weighty):
        adapter = None

        def load_weights(self, weights, version):
            self.weights, self.adapter, self.weights_version = weights, None, version

        def load_adapter(self, folder, version):
            self.adapter, self.weights_version = str(folder), version

    def has():
        engine._actors[1].dead = True
        assert {c.weights_version for c in engine.generate(ASKED)} == {engine.weights_version}
        inner = engine._actors[1].replica.engine
        return getattr(inner, "weights", None), inner.adapter

    engine = make(lambda: Adapted(["Up"]))
    engine.load_adapter("a", 1)
    assert has() == (None, "a")
    engine.load_weights({"w": 1}, 2)
    assert has() == ({"w": 1}, None)
    for version, adapter in ((3, "b"), (4, "c")):
        engine.load_adapter(adapter, version)
        assert has() == ({"w": 1}, adapter)
