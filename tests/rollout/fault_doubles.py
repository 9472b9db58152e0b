"""Doubles for faults and for identity: a world that shows everything said to it, and faults by name.

Which fault meets which episode is a plan that the test draws; the env finds its fault by its seed, the engine by
the episode of a request. So a fault is where it is on every backend, however often an episode is played again.
"""

import asyncio
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from gymnasium.spaces import Discrete, Text
from parallel_doubles import WORDS, Completion, HashEngine

from shoal import TextEnv, derive_seed
from shoal.core.errors import EngineError
from shoal.envs.actions import Projection
from shoal.envs.text import Outcome

TURNS = 5
SHORT = 1.0
"""Seconds after which what hangs is given up."""
ENV_ERRORS = {
    "raise": "KeyError: 'lost'",
    "cancel": "CancelledError",
    "leave": "GeneratorExit",
    "exit": "SystemExit",
    "nan reward": "the reward must be a finite number, got nan",
    "inf reward": "the reward must be a finite number, got inf",
    "text reward": "reward",
    "no reward": "",
    "no info": "the info must be a dict, got None",
    "half a character": "UnicodeEncodeError",
    "three values": "",
    "reset": "no such world",
}
"""What an env does at its turn, and what the record of its episode says of it."""
ENGINE_ERRORS = (
    "refuse",
    "crash",
    "exit",
    "leave",
    "nothing",
    "text",
    "words for ids",
    "half an id",
    "negative id",
    "id beyond the vocabulary",
    "id that cannot be decoded",
    "nan logprob",
    "inf logprob",
    "-inf logprob",
    "positive logprob",
    "fewer logprobs",
    "more logprobs",
    "no logprobs",
    "too many tokens",
    "odd finish",
    "no finish",
)
"""What an engine does to one request; each ends that episode alone."""
HARMLESS = ("env: raise once", "env: close", "engine: stumble")
"""Faults that are mended: their episodes are those of a calm run."""


def kinds(backend):
    """All faults that can be where `backend` plays."""
    found = [
        *(f"env: {kind}" for kind in (*ENV_ERRORS, "hang")),
        *(f"engine: {kind}" for kind in ENGINE_ERRORS),
    ]
    found += [*HARMLESS, "engine: context"]
    if backend != "serial":  # which asks the engine itself
        found.append("engine: hang")
    if backend == "processes":
        found += ["env: kill", "env: kill once"]
    return found


# --- envs
@dataclass(frozen=True)
class WorldConfig:
    """Settings of `World`."""

    max_steps: int = TURNS
    faults: dict[str, str] = field(default_factory=dict)
    """By seed: the fault, and the turn at which it happens."""
    folder: str = ""
    """Where faults that happen once leave a mark, and where "go" tells those that hang to go on."""


class World(TextEnv[WorldConfig]):
    """Shows a digest of its seed and of every word that was ever said to it; pays by the digest."""

    Config = WorldConfig
    projection = Projection(lookup={word: place for place, word in enumerate(WORDS, 1)})
    action_space = Discrete(len(WORDS), start=1)
    observation_space = Text(64)
    instructions = "Say."
    _kind, _at = "", 0

    def reset(self, *, seed=None, options=None):
        self._kind, _, at = self.config.faults.get(str(seed), "").rpartition(" ")
        self._at = int(at or 0)
        if self._kind == "reset":
            raise ValueError("no such world")
        return super().reset(seed=seed, options=options)

    def _start(self, rng):
        self._own, self._said = rng, int(rng.integers(10**6))

    def _advance(self, action):
        self._said = derive_seed(self._said, "said", int(action), int(self._own.integers(1000))) % 10**6
        return Outcome(float(self._said % 7) / 4, success=self._said % 2 == 0)

    def observe(self):
        return str(self._said)

    def step(self, action):
        answer = super().step(action)
        return self._disturbed(*answer) if self._steps == self._at + 1 else answer

    def _disturbed(self, observation, reward, *others):
        kind = self._kind
        if kind == "raise" or (kind == "raise once" and self._first()):
            raise KeyError("lost")
        if kind == "cancel":
            raise asyncio.CancelledError
        if kind == "leave":
            raise GeneratorExit
        if kind == "exit":
            raise SystemExit(3)
        if kind == "kill" or (kind == "kill once" and self._first()):
            os.kill(os.getpid(), signal.SIGKILL)
        while kind == "hang" and not (Path(self.config.folder) / "go").exists():
            time.sleep(0.02)
        reward = {
            "nan reward": float("nan"),
            "inf reward": float("inf"),
            "text reward": "5",
            "no reward": None,
        }.get(kind, reward)
        observation = "\ud800" if kind == "half a character" else observation
        if kind == "three values":
            return observation, reward, others[0]
        return observation, reward, *others[:2], None if kind == "no info" else others[2]

    def _first(self):
        """Whether this fault has not been met yet, by whatever process."""
        try:
            os.close(os.open(Path(self.config.folder) / f"met-{self._seed}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def close(self):
        if self._kind == "close":
            raise RuntimeError("no end")


# --- engines
TOKENIZER = type(HashEngine().tokenizer)
UNSPEAKABLE = len(TOKENIZER(WORDS).tokens) - 1


class Stammering(TOKENIZER):
    """Cannot say one of its tokens."""

    def decode(self, ids):
        if UNSPEAKABLE in tuple(ids):
            raise ValueError("cannot be said")
        return super().decode(ids)


class FaultyEngine(HashEngine):
    """Meets the requests of some episodes with a fault.

    Args:
        faults: by (group, member): the kind, and the turn at which it happens.
    """

    def __init__(self, faults=()):
        super().__init__()
        self.tokenizer = Stammering(WORDS)
        self.faults, self.met, self.go = dict(faults), set(), threading.Event()

    def restart(self):
        """Nothing is broken that would need it."""

    def generate(self, requests):
        for request in requests:
            self._meet(self._kind(request), request)
        return super().generate(requests)

    def _kind(self, request):
        kind, at = self.faults.get((request.key.group, request.key.member), ("", 0))
        return kind if request.key.turn == at else ""

    def _meet(self, kind, request):
        if kind == "refuse":
            raise EngineError("refused")
        if kind == "crash":
            raise ZeroDivisionError("crashed")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "leave":
            raise GeneratorExit
        if kind == "hang":
            self.go.wait()
        if kind == "stumble" and request.key not in self.met:
            self.met.add(request.key)
            raise EngineError("stumbled")

    def _answer(self, request):
        right, kind = super()._answer(request), self._kind(request)
        ids, logprobs, n = right.token_ids, right.logprobs, request.sampling.max_tokens
        if kind in ("nothing", "text"):
            return None if kind == "nothing" else "text"
        if kind == "context":
            return Completion((), (), "context", self.weights_version)
        if kind.endswith("finish"):
            return Completion(ids, logprobs, "banana" if kind == "odd finish" else None, self.weights_version)
        ids = {
            "words for ids": ("one", *ids[1:]),
            "half an id": (ids[0] + 0.5, *ids[1:]),
            "negative id": (-1, *ids[1:]),
            "id beyond the vocabulary": (*ids[1:], 10**6),
            "id that cannot be decoded": (*ids[1:], UNSPEAKABLE),
            "too many tokens": ids[:1] * (n + 1),
        }.get(kind, ids)
        logprobs = {
            "nan logprob": (*logprobs[1:], float("nan")),
            "inf logprob": (*logprobs[1:], float("inf")),
            "-inf logprob": (*logprobs[1:], float("-inf")),
            "positive logprob": (*logprobs[1:], 0.5),
            "fewer logprobs": logprobs[1:],
            "more logprobs": (*logprobs, -0.5),
            "no logprobs": (),
            "too many tokens": logprobs[:1] * (n + 1),
        }.get(kind, logprobs)
        return Completion(ids, logprobs, right.finish, self.weights_version)
