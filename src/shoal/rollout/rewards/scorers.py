"""What scores the episodes of a group: a function, a command, or a model that is asked about each.

A scorer never raises for what a user's code or a server does: a score that is missing says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.core.data import Trajectory, reward_of
from shoal.core.errors import ConfigError, EngineError, EnvError, whole_characters, with_frames
from shoal.core.executors import in_own_thread
from shoal.core.files import append_line, whole_lines
from shoal.core.workers import describe_exit
from shoal.envs.actions import last_tag
from shoal.envs.catalogue import function_named
from shoal.rollout.functions import FunctionProcesses, ProgramFailedError, serve_command
from shoal.rollout.prompts import fill
from shoal.rollout.rewards.settings import PROMPT, REWARDS, JudgeConfig, RewardConfig
from shoal.samplers.asking import RetryPolicy
from shoal.samplers.servers.http import HttpClient

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)


class Scored(NamedTuple):
    """What a reward says of one episode; without a value, why: it failed, or it abstains."""

    value: float | None
    why: str = ""
    prompt: str | None = None
    answer: str | None = None
    abstains: bool = False  # the task is not its own


class Answers:
    """What models and commands answered, by a digest of what they were asked: who has the file need not ask again.

    Args:
        folder: of the run, with `answers.jsonl`; None keeps them in memory.
        rank: of the process, where several play one run: each writes a file of its own, and reads all.
        hold: called before each line to check that no other process writes the folder.
    """

    def __init__(
        self, folder: Path | None = None, rank: int = 0, hold: Callable[[], object] = lambda: None
    ) -> None:
        self._known: dict[str, str] = {}
        name = f"answers-{rank}.jsonl" if rank else "answers.jsonl"
        self._path, self._hold = None if folder is None else folder / name, hold
        for path in sorted(folder.glob("answers*.jsonl")) if folder is not None else ():
            self._known |= whole_lines(path, tuple[str, str])

    def get(self, key: str) -> str | None:
        """The answer, if it is known."""
        return self._known.get(key)

    def add(self, key: str, answer: str) -> None:
        """Record an answer."""
        self._known[key] = answer
        if self._path is not None:
            self._hold()
            append_line(self._path, msgspec.json.encode([key, answer]) + b"\n")


def scorer_of(config: RewardConfig, answers: Answers) -> Scorer:
    """The scorer of a reward; not to be called in the loop of the process."""
    if config.model is not None:
        return ModelScorer(config, config.model, answers)
    return CommandScorer(config, answers) if config.command else FunctionScorer(config)


def numbers_of(given: Any, count: int) -> list[Scored]:
    """The scores that a function or a command gave for so many episodes; None abstains.

    >>> [scored.value for scored in numbers_of([1, 0.5, None], 3)]
    [1.0, 0.5, None]
    """
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    values = list(given) if listed else []
    if not listed or len(values) != count:
        why = f"it must give a list of {count} numbers (or None), one an episode, got {given!r:.200}"
        return [Scored(None, why)] * count
    return [_number(value) for value in values]


def _number(value: Any) -> Scored:
    if value is None:
        return Scored(None, abstains=True)
    with contextlib.suppress(EnvError):
        if math.isfinite(number := reward_of(value)):
            return Scored(number)
    return Scored(None, f"it must give finite numbers, got {value!r:.200}")


# --- functions
def function_of(config: RewardConfig) -> Any:
    """The function of a reward that is one; a `ConfigError` if there is no such function."""
    if config.function is None:
        return REWARDS[config.name]
    return function_named(config.function, "a reward's function")


class FunctionScorer:
    """Calls a Python function, for one group after another, each time in a thread of its own."""

    def __init__(self, config: RewardConfig) -> None:
        self._function, self._seconds = function_of(config), config.timeout
        self._takes_task = "task" in inspect.signature(self._function).parameters
        self._free = asyncio.Lock()

    async def score(self, episodes: Sequence[Trajectory], task: Any) -> list[Scored]:
        """What the function gives; one that does not return is left behind in its thread."""
        async with self._free:
            called = in_own_thread(partial(self._call, episodes, task), "shoal-reward")
            if (await asyncio.wait([asyncio.wrap_future(called)], timeout=self._seconds))[0]:
                return called.result()
        return [Scored(None, f"it did not return within {self._seconds:g} s (timeout)")] * len(episodes)

    def _call(self, episodes: Sequence[Trajectory], task: Any) -> list[Scored]:
        try:
            given = self._function(list(episodes), **({"task": task} if self._takes_task else {}))
            return numbers_of(given, len(episodes))
        except BaseException as error:  # the user's code may raise anything, `SystemExit` too
            return [Scored(None, with_frames(error))] * len(episodes)

    def close(self) -> None:
        """Its threads end with their calls."""


# --- commands
class CommandScorer:
    """Runs a command for each group, as the child of a worker process, which ends it if this process ends."""

    def __init__(self, config: RewardConfig, answers: Answers) -> None:
        self._config, self._answers = config, answers
        self._processes = FunctionProcesses(serve_command, (config.command,))
        self._free = asyncio.Semaphore(config.concurrency)

    async def score(self, episodes: Sequence[Trajectory], task: Any) -> list[Scored]:
        """What the last line of its output says."""
        given = json.dumps({"task": task, "episodes": [as_json(episode) for episode in episodes]})
        key = digest_of([self._config.command, given])
        if (output := self._answers.get(key)) is not None:
            return numbers_of(json.loads(output), len(episodes))
        scores = list[Scored]()
        for _ in range(self._config.retries + 1):
            try:
                async with self._free:
                    status, output, errors = await self._processes.ask([given, {}], self._config.timeout)
                if status:
                    last = errors or "nothing on standard error"
                    raise ProgramFailedError(f"the command {describe_exit(status)}: {last[:300]}")
                scores = numbers_of(json.loads(output), len(episodes))
                if all(scored.value is not None or scored.abstains for scored in scores):
                    self._answers.add(key, output)
                    break
            except (ValueError, RecursionError):
                scores = numbers_of(output, len(episodes))
            except ProgramFailedError as error:
                scores = [Scored(None, str(error))] * len(episodes)
            except TimeoutError:
                why = f"the command did not end within {self._config.timeout:g} s (timeout)"
                scores = [Scored(None, why)] * len(episodes)
        return scores

    def close(self) -> None:
        """End the worker processes."""
        self._processes.end()


def as_json(episode: Trajectory) -> dict[str, Any]:
    """What a command is given of an episode: its text, and not its tokens."""
    turns = ("observation", "response", "action", "action_is_valid", "reward", "image")
    return {
        **{name: getattr(episode, name) for name in ("env", "env_seed", "success", "truncated", "reward")},
        "turns": [{name: getattr(turn, name) for name in turns} for turn in episode.turns],
    }


# --- models
def key_of(model: JudgeConfig) -> str | None:
    """The key of a judge's server; a `ConfigError` if it should have one and there is none."""
    key = os.environ.get(model.api_key_env) if model.api_key_env else None
    if model.api_key_env and not key:
        raise ConfigError(f"the key of judge {model.model} is missing: set {model.api_key_env} (api_key_env)")
    return key


class ModelScorer:
    """Asks a model about each episode; one prompt has one answer, however often it comes."""

    def __init__(self, config: RewardConfig, model: JudgeConfig, answers: Answers) -> None:
        self._config, self._model, self._answers = config, model, answers
        policy = RetryPolicy(config.timeout, backoff=0.5, max_backoff=30.0, patience=model.patience)
        self._client = HttpClient(model.base_url, policy, key_of(model))
        self._free = asyncio.Semaphore(config.concurrency)
        self._asked: dict[str, asyncio.Task[str]] = {}
        self._last_answer = -math.inf  # when it last answered

    async def score(self, episodes: Sequence[Trajectory], task: Any) -> list[Scored]:
        """What the model answers about each."""
        return list(await asyncio.gather(*(self._judge(episode, task) for episode in episodes)))

    async def _judge(self, episode: Trajectory, task: Any) -> Scored:
        model = self._model
        prompt = filled(self._config.prompt or PROMPT, episode, task, model)
        body = {
            "model": model.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": model.temperature,
            "max_tokens": model.max_tokens,
        }
        key = digest_of(body)
        if (answer := self._answers.get(key)) is None:
            if (asked := self._asked.get(key)) is None:
                asked = self._asked[key] = self._client.loop.spawn(self._ask(key, body))
                asked.add_done_callback(lambda _: self._asked.pop(key, None))
            try:
                answer = await asked
            except EngineError as error:
                return Scored(None, str(error), prompt)
        value = self._score_in(answer)
        wanted = f"the answer must hold <score>number</score> from {model.lowest:g} to {model.highest:g}"
        why = "" if value is not None else f"{wanted}, got {answer[-200:]!r}"
        return Scored(value, why, prompt, answer)

    async def _ask(self, key: str, body: Mapping[str, Any]) -> str:
        """An answer with a score, or the last one without."""
        began, patience = time.monotonic(), self._model.patience
        for _ in range(self._config.retries + 1):
            async with self._free:
                # while this one waited, others may have asked in vain
                if time.monotonic() - max(began, self._last_answer) > patience:
                    why = f"{self._client.url} has answered nothing for {patience:g} s (patience)"
                    raise EngineError(why)
                reply = await self._client.request("POST", "/chat/completions", body, key)
                self._last_answer = time.monotonic()
            try:
                answer = whole_characters(reply["choices"][0]["message"]["content"] or "")
            except (AttributeError, LookupError, TypeError) as error:
                raise EngineError(f"the reply is no chat completion: {reply!s:.200}") from error
            if self._score_in(answer) is not None:
                break
        self._answers.add(key, answer)
        return answer

    def _score_in(self, answer: str) -> float | None:
        value = score_of(answer)
        return value if value is not None and self._model.lowest <= value <= self._model.highest else None

    def close(self) -> None:
        """Give up what is asked, and end its connections."""
        self._client.close()


Scorer = FunctionScorer | CommandScorer | ModelScorer


def filled(template: str, episode: Trajectory, task: Any, model: JudgeConfig) -> str:
    """A prompt about an episode."""
    parts = [f"[observation]\n{turn.observation}\n[answer]\n{turn.response}" for turn in episode.turns]
    values = {
        "transcript": "\n".join(parts),
        "question": episode.turns[0].observation,
        "answer": episode.turns[-1].response,
        "task": task if isinstance(task, str) else json.dumps(task, ensure_ascii=False),
        "lowest": f"{model.lowest:g}",
        "highest": f"{model.highest:g}",
    }
    return whole_characters(fill(template, values))


def score_of(answer: str) -> float | None:
    """The number in the last `<score>` tag outside thoughts, or the number that is all of an answer.

    >>> score_of("<think><score>1</score></think>Good. <score> 0.5 </score>"), score_of(" 7 "), score_of("7 of 10")
    (0.5, 7.0, None)
    """
    content = last_tag(answer, ("score",))
    text = (answer.rpartition("</think>")[2] if content is None else content).strip()
    return float(text) if len(text) <= 40 and _NUMBER.fullmatch(text) else None


def digest_of(value: Any) -> str:
    """A key of JSON values, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
