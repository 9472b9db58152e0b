"""Doubles for rollout tests: an integer engine whose answers are hashes, and envs that fail on purpose."""

import ctypes
import os
import signal
import threading
import time
from dataclasses import dataclass

from gymnasium.spaces import Discrete, Text

from shoal.core.seeding import derive_seed
from shoal.envs.actions import Projection
from shoal.envs.text import Outcome, TextEnv
from shoal.rollout.samplers.sampler import Completion
from shoal.rollout.samplers.tokenizers import TinyTokenizer

WORDS = ("one", "two", "three")


class HashEngine:
    """Exact at any batch: each token and its log-probability is an integer hash of prompt, key and position."""

    level = "L2"

    def __init__(self):
        self.tokenizer = TinyTokenizer(WORDS)
        self.weights_version = 3
        self.batches = []

    def generate(self, requests):
        self.batches.append(len(requests))
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        key = request.key
        names = [key.iteration, key.group, key.member, key.turn, *request.prompt_ids]
        word = WORDS[derive_seed(key.seed, "word", *names) % 3]
        ids = self.tokenizer.encode(f"<action>{word}</action>")
        logprobs = tuple(-float(derive_seed(key.seed, "lp", i, *names) % 997) / 997 for i in range(len(ids)))
        return Completion(ids, logprobs, "stop", self.weights_version)


class InterruptingEngine(HashEngine):
    """Somebody presses Ctrl-C at its fourth batch (by another signal: a shell may have SIGINT ignored)."""

    def __init__(self):
        super().__init__()
        signal.signal(signal.SIGUSR1, signal.default_int_handler)

    def generate(self, requests):
        if len(self.batches) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return super().generate(requests)


@dataclass(frozen=True)
class CounterConfig:
    """Settings of `CounterEnv`."""

    max_steps: int = 6
    fault: str = ""
    """What some episodes do: "raise", "exit", "nan", "hang", "freeze", "kill", "make"."""
    every: int = 4
    """Episodes whose seed is divisible by it fail."""
    once: str = ""
    """A file: a fault happens only while it is absent, and makes it."""
    nap: float = 0.0


class CounterEnv(TextEnv[CounterConfig]):
    """Counts; the world moves by its own random numbers, so a wrong seed or a lost step shows."""

    Config = CounterConfig
    projection = Projection(lookup={"one": 1, "two": 2, "three": 3})
    action_space = Discrete(3, start=1)
    observation_space = Text(64)
    instructions = "Count."

    def __init__(self, config=None, **settings):
        super().__init__(config, **settings)
        if self.config.fault == "make":
            raise OSError("no such world")

    def _start(self, rng):
        self._own, self._total = rng, int(rng.integers(1000))
        self._faulty = self._seed % self.config.every == 0

    def _advance(self, action):
        config = self.config
        time.sleep(config.nap)
        self._total += int(action) * int(self._own.integers(10))
        if self._faulty and self._steps == 2 and not (config.once and os.path.exists(config.once)):
            if config.once:
                open(config.once, "w").close()
            self._fail(config.fault)
            if config.fault == "nan":
                return Outcome(float("nan"))
        return Outcome(float(self._total % 7), success=self._total % 2 == 0)

    def _fail(self, fault):
        if fault == "raise":
            raise KeyError("lost")
        if fault == "exit":
            raise SystemExit(3)
        if fault == "hang":
            time.sleep(60)
        if fault == "freeze":
            ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock, as a stuck C extension does
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def observe(self):
        return f"{self._total}"


WHERE = f"{__name__}:CounterEnv"


def config(groups=8, members=2, n_jobs=2, fault="", parallel=None, **env):
    side = {"env_groups": groups, "group_size": members, "env_configs": {"tags": ["Counter"]}}
    return {
        "seed": 7,
        "custom_envs": {"Counter": {"env_type": "test_counter", "env_config": {"fault": fault, **env}}},
        "es_manager": {"train": side, "val": side},
        "agent_proxy": {
            "max_tokens": 16,
            "parallel_n_jobs": n_jobs,
            "parallel": parallel or {},
            "prompt": {"history": 1, "first": "{observation}", "later": "{history}{observation}"},
        },
    }
