"""What a sampler of replicas does when they die, with a stand-in for a cluster."""

import asyncio
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.rollout.doubles import HashEngine, config

from shoal import ParallelRolloutManager
from shoal.core.errors import EngineError
from shoal.gateway.chats import ChatRequest, Part, Turn
from shoal.gateway.sessions import Session, Tokens
from shoal.samplers.asking import SamplerClient
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.samplers.scripted import RandomEngine

ASKED = [Request((3, 4), Key(0, (0, 0, member, 0)), Sampling(8)) for member in range(4)]


class Call:
    """What an actor was asked: `ray.get` calls it, and a coroutine awaits it."""

    def __init__(self, call):
        self.call = call

    def __await__(self):
        given = self.call()
        return (yield from given.__await__()) if hasattr(given, "__await__") else given


class Actor:
    made = 0
    dying = 0  # so many of the next ones die before they have started

    def __init__(self, kind, made, module):
        Actor.made += 1
        self.death, self.dead = module.RayActorError(), Actor.dying > 0
        Actor.dying -= self.dead
        try:
            self.replica = kind(*made)
        except RuntimeError as error:
            self.death, self.dead = module.RayActorError("", str(error), actor_init_failed=True), True

    def __getattr__(self, name):
        def call(*arguments):
            if self.dead:
                raise self.death
            return getattr(self.replica, name)(*arguments)

        return SimpleNamespace(remote=lambda *arguments: Call(lambda: call(*arguments)))


@pytest.fixture
def make(monkeypatch):
    module = pytest.importorskip("shoal.samplers.ray", exc_type=ImportError)
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(Actor, "dying", 0)

    def get(what, timeout=None):
        if isinstance(what, list):
            return [get(one) for one in what]
        return what.call() if isinstance(what, Call) else what

    cluster = SimpleNamespace(
        is_initialized=lambda: cluster.lives,
        lives=True,
        remote=lambda **options: lambda kind: SimpleNamespace(remote=lambda *made: Actor(kind, made, module)),
        wait=lambda calls, num_returns, timeout: (calls, []),
        cluster_resources=dict,
        available_resources=dict,
        get=get,
        put=lambda value: value,
        kill=lambda actor: setattr(actor, "dead", True),
    )
    monkeypatch.setattr(module, "ray", cluster)
    made = []

    def engine(inner=lambda: RandomEngine(["Up"]), replicas=2, **options):
        made.append(module.RayEngine(inner, replicas, **options))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.mark.parametrize(("retries", "death"), [(0, "RayActorError"), (1, "OutOfMemoryError")])
def test_a_replica_that_died_is_made_anew_however_often_a_batch_is_asked_again(make, retries, death):
    """What Ray's own monitor of memory ends does not die as an actor's error says."""
    engine = make(retries=retries)
    expected = engine.generate(ASKED)
    engine._actors[1].death = getattr(sys.modules[type(engine).__module__], death)("gone")
    engine._actors[1].dead, made = True, Actor.made
    if not retries:
        with pytest.raises(EngineError, match="replica 1 failed: RayActorError"):
            engine.generate(ASKED)
    assert engine.generate(ASKED) == expected
    assert Actor.made == made + 1, "the two requests of one replica lost it, and it was replaced once"


def test_a_machine_that_is_missed_late_costs_no_attempt(make, monkeypatch):
    """Ray puts replicas on it that never start; a request fails only where none starts in time."""
    engine = make(retries=1)
    expected = engine.generate(ASKED)
    engine._actors[1].dead, Actor.dying = True, 5
    assert engine.generate(ASKED) == expected
    engine._actors[1].dead, Actor.dying = True, 10**6
    monkeypatch.setattr(sys.modules[type(engine).__module__], "PATIENCE", 0.1)
    with pytest.raises(EngineError, match="replica 1 does not start again"):
        engine.generate(ASKED)
    Actor.dying = 0
    assert engine.generate(ASKED) == expected


class Counting(RandomEngine):
    """Says the one word it knows, and counts what it was asked."""

    asked = 0

    def generate(self, requests):
        self.asked += len(requests)
        return super().generate(requests)


def replicas_of(engine, chats, turns):
    """How many calls each replica answered of chats of so many turns that a program has through a gateway."""

    async def play():
        session = Session("x", Key(0, (3, 1, 2)), Tokens(engine.tokenizer), client)
        for number in range(chats):
            said = ()
            for turn in range(turns):
                said = (*said, Turn("user", (Part("user", f"chat {number}, turn {turn}"),)))
                (answer,) = await session.answer(ChatRequest(said, Sampling()))
                said = (*said, Turn("assistant", (Part("assistant", answer.text),)))

    with SamplerClient(engine) as client:
        asyncio.run(play())
    return sorted(actor.replica.inner.asked for actor in engine._actors)


def test_all_turns_of_a_chat_ask_the_replica_that_keeps_its_prefix_also_through_a_gateway(make):
    """Eight turns visited the replicas 3 3 0 1 3 1 0 0: the digest of the prompt chose."""
    four = {"inner": lambda: Counting(["Up"]), "replicas": 4}
    assert replicas_of(make(**four), chats=1, turns=8) == [0, 0, 0, 8]
    spread = replicas_of(make(**four), chats=12, turns=2)
    assert all(count % 2 == 0 for count in spread)
    assert spread[-1] < 24


class Remembering(HashEngine):
    """Remembers whose turns it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def _answer(self, request):
        self.asked[request.key.path[:-1]] += 1
        return super()._answer(request)


def test_all_turns_of_an_episode_ask_the_replica_that_keeps_its_prefix(make):
    engine = make(Remembering, replicas=3)
    with ParallelRolloutManager(config(groups=4, members=2), engine, 2, backend="thread") as manager:
        played = manager.collect(0)
    assert all(len(episode.turns) > 1 for episode in played)
    asked = [actor.replica.inner.asked for actor in engine._actors]
    turns = {(t.iteration, t.group, t.member): len(t.turns) for t in played}
    assert sum(asked, Counter()) == turns
    assert sorted(episode for one in asked for episode in one) == sorted(turns), "one replica an episode"
    assert all(asked), "and episodes are spread over them"


def test_a_closed_engine_says_so(make):
    engine = make()
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.generate(ASKED)


def test_an_engine_whose_ray_was_shut_down_says_so_and_starts_no_other(make):
    engine = make()
    replicas = list(engine._actors)
    ray = sys.modules[type(engine).__module__].ray
    ray.lives = False
    for act in (lambda: engine.generate(ASKED), lambda: engine.load_weights({}, 1), engine.restart):
        with pytest.raises(EngineError, match="their session of Ray was shut down"):
            act()
    assert engine._actors == replicas
    ray.kill = None
    engine.close()


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
        with pytest.raises(
            EngineError, match="no answer in 2 attempts .* replica 1 does not start again: .*out of memory"
        ):
            engine.generate(ASKED)
    monkeypatch.setattr(Weighty, "room", True)
    assert [c.weights_version for c in engine.generate(ASKED)] == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("rejected", "lost"), [(True, True), (False, False)], ids=["rejected and one lost", "Ctrl-C"]
)
def test_weights_that_one_replica_does_not_take_are_answered_with_by_none(make, rejected, lost):
    engine = make(lambda: Weighty(["Up"]))
    engine.load_weights({}, 5)

    def refuses(*arguments):
        if not rejected:
            raise KeyboardInterrupt
        raise sys.modules[type(engine).__module__].RayTaskError("call", "", ValueError("other shapes"))

    engine._actors[1].replica.load = refuses
    engine._actors[0].dead = lost
    error, told = (
        (EngineError, "a replica does not take .* other shapes") if rejected else (KeyboardInterrupt, None)
    )
    with pytest.raises(error, match=told):
        engine.load_weights({}, 6)
    assert [c.weights_version for c in engine.generate(ASKED)] == [5, 5, 5, 5]
    assert engine.weights_version == 5
    engine.load_weights({}, 7)
    assert [c.weights_version for c in engine.generate(ASKED)] == [7, 7, 7, 7]


def test_who_waits_for_replicas_without_room_is_told_so(make, monkeypatch, caplog):
    module, full = sys.modules["shoal.samplers.ray"], [1]
    monkeypatch.setattr(
        module.ray,
        "wait",
        lambda calls, num_returns, timeout: ([], calls) if full and full.pop() else (calls, []),
    )
    make()
    told = "2 of 2 replicas have not started within 30 s: the cluster has {}, of which {} are free; still waiting"
    assert [record.message for record in caplog.records] == [told]
    full.append(1)
    with pytest.raises(EngineError, match="2 of 2 replicas have not started within 5 s"):
        make(timeout=5)


class Adapted(Weighty):
    adapter = None

    def load_weights(self, weights, version):
        self.weights, self.adapter, self.weights_version = weights, None, version

    def load_adapter(self, folder, version):
        self.adapter, self.weights_version = (folder / "adapter").read_text(), version


def test_a_replaced_replica_has_the_adapter_and_the_weights_under_it(make, tmp_path):
    def has():
        engine._actors[1].dead = True
        assert {c.weights_version for c in engine.generate(ASKED)} == {engine.weights_version}
        inner = engine._actors[1].replica.inner
        return getattr(inner, "weights", None), inner.adapter

    def load_adapter(words, version):
        (tmp_path / "adapter").write_text(words)
        engine.load_adapter(tmp_path, version)
        (tmp_path / "adapter").unlink()  # a replica may be on another machine, or come later

    engine = make(lambda: Adapted(["Up"]))
    load_adapter("a", 1)
    assert has() == (None, "a")
    engine.load_weights({"w": 1}, 2)
    assert has() == ({"w": 1}, None)
    for version, adapter in ((3, "b"), (4, "c")):
        load_adapter(adapter, version)
        assert has() == ({"w": 1}, adapter)
