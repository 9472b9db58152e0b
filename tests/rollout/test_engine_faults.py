"""What an engine and a tokenizer may do wrong: it ends the episode that asked, and no other."""

import pytest
from tests.rollout.doubles import HashEngine, SpeechlessError, config, in_lockstep

from shoal.core.errors import WorkerTimeoutError
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.sampler import Sampling

BACKENDS = ("serial", "thread", "process")


def play(backend, engine=None):
    if backend == "lockstep":
        with in_lockstep(config(), engine) as collector:
            return collector.collect(4, Sampling(16, 1.0, ("</action>",)))
    with ParallelRolloutManager(config(), engine or HashEngine(), backend=backend) as manager:
        return manager.collect(4)


@pytest.fixture(scope="module")
def calm():
    return play("serial")


def check(calm, played, status, word):
    """The episodes of group 1 have ended so at their third turn, and no other differs."""
    for usual, now in zip(calm, played, strict=True):
        if now.group == 1:
            assert (now.status, now.turns) == (status, usual.turns[:2])
            assert word in now.error
        else:
            assert now == usual


def asked_at_its_third_turn(request):
    return (request.key.path[1], request.key.path[3]) == (1, 2)


class Refusing(HashEngine):
    """One that is asked for each request by itself, and raises at some."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    async def sample(self, request):
        if asked_at_its_third_turn(request):
            raise self.error
        return self._answer(request)


@pytest.mark.parametrize("backend", [*BACKENDS, "lockstep"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConnectionError("caf\udce9"), "engine_error"),
        (WorkerTimeoutError("its replica is late: ConnectionError"), "timeout"),
    ],
)
def test_an_exception_in_answer_to_one_request_ends_its_episode_alone(calm, backend, error, status):
    check(calm, play(backend, Refusing(error)), status, "ConnectionError")


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("error", [SpeechlessError, KeyboardInterrupt])
def test_whatever_an_engine_raises_of_itself_ends_the_episode_alone_that_it_is_about(calm, backend, error):
    def before(requests):
        if any(map(asked_at_its_third_turn, requests)):
            raise error

    check(calm, play(backend, HashEngine(before)), "engine_error", error.__name__)
