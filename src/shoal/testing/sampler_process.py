"""A sampler in a process of its own, which may be killed at any moment: it begins anew with the last weights."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import WorkerDiedError
from shoal.core.processes import Channel, ChannelClosedError, WorkerProcess, dumps
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Level, Request
from shoal.rollout.samplers.settings import EngineConfig

ATTEMPTS = 3
"""To begin anew, should the new process be killed as well."""


class SamplerProcess:
    """What `make_engine` makes of the same arguments, in another process; any thread may ask, one at a time does.

    Args:
        config: the `engine` part of a run's settings.
        words: action words that are one token each (tiny engine).
        seed: of fresh weights (tiny engine).
    """

    def __init__(self, config: EngineConfig, words: Sequence[str] = (), seed: int = 0) -> None:
        self._made_of = (config, tuple(words), seed)
        self._lock = threading.Lock()
        self._process = WorkerProcess("shoal.testing.sampler_process:serve")
        self._weights: tuple[bytes, int] | None = None
        self.asking = 0
        """Requests that it is answering now."""
        self.answered = 0
        """Batches that it has answered."""
        self.lost_requests = 0
        """Requests that were asked for again, since the process died over them."""
        self.lost_seconds = 0.0
        """From a death until the next process was ready."""
        self.tokenizer: ChatTokenizer
        self.level: Level
        self._start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def weights_version(self) -> int:
        """Of the last weights."""
        return self._version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.

        Raises:
            WorkerDiedError: the process died over these requests.
        """
        with self._lock:
            self.asking = len(requests)
            try:
                answer: list[Completion] = self._ask("generate", list(requests))
            except (WorkerDiedError, ChannelClosedError) as error:
                self.lost_requests += len(requests)
                raise WorkerDiedError(f"the sampler's process {self.pid} is gone") from error
            finally:
                self.asking = 0
            self.answered += 1
            return answer

    def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Take over weights by name; `version` marks the completions they produce."""
        from safetensors.torch import save

        with self._lock:
            self._weights = (
                save({name: tensor.contiguous().clone() for name, tensor in weights.items()}),
                version,
            )
            self._version = version
            try:
                self._ask("weights", self._weights)
            except (
                WorkerDiedError,
                ChannelClosedError,
            ):  # killed just now: the next one gets them as it starts
                self._begin_anew()

    def restart(self) -> None:
        """Begin anew with the last weights, in a fresh process."""
        with self._lock:
            self._begin_anew()

    def close(self) -> None:
        """End the process; may be called twice."""
        with self._lock:
            if self._process.pid > 0:
                self._process.kill()
                self._process.release()
                self._process.pid = -1

    def _begin_anew(self) -> None:
        began = time.monotonic()
        for attempt in range(ATTEMPTS):
            self._process.kill()
            self._process.release()
            try:
                self._start()
                if self._weights is not None:
                    self._ask("weights", self._weights)
                break
            except (WorkerDiedError, ChannelClosedError):  # killed again before it was ready
                if attempt == ATTEMPTS - 1:
                    raise
        self.lost_seconds += time.monotonic() - began

    def _start(self) -> None:
        self._process.start()
        self.tokenizer, self.level, version = self._ask("make", self._made_of)
        if self._weights is None:
            self._version = version

    def _ask(self, what: str, value: Any) -> Any:
        channel, check = self._process.channel, self._process.check
        channel.send(dumps((what, value))[0], check)
        answer = channel.receive(check)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def serve(descriptor: int, log: int) -> int:
    """What the process runs: make a sampler, then answer until the other side is gone."""
    from shoal.core.processes import settle
    from shoal.rollout.samplers.registry import make_engine

    os.close(log)
    channel = Channel(socket.socket(fileno=descriptor))
    sampler: Any = None
    try:
        settle(channel.receive())
        while True:
            what, value = pickle.loads(channel.receive_bytes())
            answer: Any = None
            try:
                if what == "make":
                    import torch

                    config, words, seed = value
                    torch.set_num_threads(config.threads)
                    sampler = make_engine(config, words, seed)
                    answer = (sampler.tokenizer, sampler.level, sampler.weights_version)
                elif what == "weights":
                    from safetensors.torch import load

                    sampler.load_weights(load(value[0]), value[1])
                else:
                    answer = sampler.generate(value)
            except Exception as error:
                answer = error
            channel.send(dumps(answer)[0])
    except ChannelClosedError:
        return 0
