"""What an engine and a tokenizer may do wrong: it ends the episode that asked, and no other."""

import numpy as np
import pytest
from tests.rollout.doubles import CounterEnv, HashEngine, with_env

from shoal.core.errors import WorkerTimeoutError
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.sampler import Completion
from shoal.samplers.tokenizers import TinyTokenizer

BACKENDS = ("serial", "thread", "process")


def play(backend, engine=None, env=CounterEnv, **changes):
    with ParallelRolloutManager(with_env(env, **changes), engine or HashEngine(), backend=backend) as manager:
        return manager.collect(4)


@pytest.fixture(scope="module")
def calm():
    return play("serial")


class NumpyEngine(HashEngine):
    def _answer(self, request):
        plain = super()._answer(request)
        ids, logprobs = np.array(plain.token_ids), np.array(plain.logprobs)
        if request.key.path[2]:
            ids, logprobs = tuple(ids), list(logprobs)
        return Completion(ids, logprobs, plain.finish, np.int64(plain.weights_version))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_may_answer_in_numbers_of_numpy(calm, backend):
    assert play(backend, NumpyEngine()) == calm


class Refusing(HashEngine):
    """One that is asked for each request by itself, and may raise."""

    async def sample(self, request):
        if (request.key.path[1], request.key.path[3]) == (1, 2):
            raise ConnectionError("caf\udce9")
        return self._answer(request)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_answer_to_one_request_ends_its_episode_alone(calm, backend):
    for before, now in zip(calm, play(backend, Refusing()), strict=True):
        if now.group == 1:
            assert (now.status, now.turns) == ("engine_error", before.turns[:2])
            assert "ConnectionError" in now.error
        else:
            assert now == before


class SpeechlessError(Exception):
    def __str__(self):
        raise SystemExit(5)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("error", [SpeechlessError, KeyboardInterrupt])
def test_whatever_an_engine_raises_of_itself_ends_the_episode_alone_that_it_is_about(calm, backend, error):
    def before(requests):
        if any((r.key.path[1], r.key.path[3]) == (1, 2) for r in requests):
            raise error

    for usual, now in zip(calm, play(backend, HashEngine(before)), strict=True):
        if now.group == 1:
            assert (now.status, now.turns) == ("engine_error", usual.turns[:2])
            assert error.__name__ in now.error
        else:
            assert now == usual


class Fussy(TinyTokenizer):
    def decode(self, ids):
        text = super().decode(ids)
        if "three" in text:
            raise KeyError(f"no such token in {text}")
        return text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tokenizer_that_cannot_decode_ends_its_episode_alone(calm, backend):
    engine = HashEngine()
    engine.tokenizer = Fussy(("one", "two", "three"))
    played = play(backend, engine)
    for before, now in zip(calm, played, strict=True):
        first = next((n for n, turn in enumerate(before.turns) if "three" in turn.response), None)
        if first is None:
            assert now == before
        else:
            assert (now.status, now.turns) == ("engine_error", before.turns[:first])
            assert "no such token" in now.error


class OddPicture(CounterEnv):
    """Names its picture by half a character, which no file can hold."""

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, ({**info, "image": "\ud800"} if self._faulty else info)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_episode_whose_record_cannot_be_written_is_still_counted(backend):
    played = play(backend, env=OddPicture)
    lost = [t for t in played if t.env_seed % 4 == 0]
    assert 0 < len(lost) < len(played) == 16
    assert all(t.status == "env_error" and "UnicodeEncodeError" in t.error for t in lost)
    assert all(t.status == "ok" for t in played if t.env_seed % 4)


# --- waits have an end
def test_an_engine_whose_own_worker_is_late_ends_episodes_and_not_the_rollout(calm):
    class Late(HashEngine):
        async def sample(self, request):
            if request.key.path[1] == 2:
                raise WorkerTimeoutError("its replica is late")
            return self._answer(request)

    for backend in BACKENDS:
        for before, now in zip(calm, play(backend, Late()), strict=True):
            if now.group == 2:
                assert (now.status, now.turns) == ("timeout", ())
            else:
                assert now == before
