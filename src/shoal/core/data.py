"""What crosses rooms: calls, turns, trajectories, and how these and advantages look on disk (a JSON value a line)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from shoal.core.errors import DataError, EnvError, safe_repr
from shoal.core.files import write_bytes

Status = Literal["ok", "env_error", "engine_error", "timeout", "reward_error"]
Ending = Literal["env", "turns", "context", "tokens", "calls", "time", "fault"]
"""Why an episode ended; a fault may be the program's own, which counts."""
ENDINGS: dict[Ending, str] = {
    "env": "its environment or program ended it",
    "turns": "its turns were used up",
    "context": "the prompt filled the context",
    "tokens": "its tokens were used up",
    "calls": "its calls were used up",
    "time": "it took too long",
    "fault": "it failed",
}
MOST_REWARD = 3.4028235e38
"""Of an episode, taken absolutely: what float32, in which it is learned from, has room for."""


def ending_of(status: Status) -> Ending | None:
    """Why an episode ended that was not played to its end; None of others.

    >>> ending_of("timeout"), ending_of("env_error")
    ('time', 'fault')
    """
    return None if status == "ok" else "time" if status == "timeout" else "fault"


NO_NUMBER = (str, bytes, np.complexfloating, np.datetime64, np.timedelta64)
"""Types that would be made a number all the same."""


def reward_of(value: Any) -> float:
    """What an env paid, as a number; an array of one number too, but no text: an `EnvError` says so."""
    number = value
    if isinstance(value, np.ndarray):
        number = value.item() if value.size == 1 else None
    if isinstance(number, NO_NUMBER) or not hasattr(number, "__float__"):
        raise EnvError(f"the reward must be a number, got {safe_repr(value)!s:.80}")
    try:
        return float(number)
    except OverflowError as error:
        raise EnvError("the reward must fit into a float, got a whole number too large for one") from error
    except Exception as error:  # a tensor of several numbers
        raise EnvError(f"the reward must be a number, got {safe_repr(value)!s:.80}") from error


def info_of(info: Any) -> Any:
    """The info that an env returned; an `EnvError` if it is no dict."""
    if isinstance(info, dict | Mapping):
        return info
    raise EnvError(f"the info must be a dict, got {type(info).__name__}")


PARTS = {"reset": "observation, info", "step": "observation, reward, terminated, truncated, info"}


def check_step_result(given: Any, call: str) -> Any:
    """What an env's `reset` or `step` (the `call`) returned; an `EnvError` if it lacks parts that Gymnasium names."""
    parts = PARTS[call]
    if isinstance(given, tuple | list) and len(given) == parts.count(",") + 1:
        return given
    came = f"{len(given)} values" if isinstance(given, tuple | list) else type(given).__name__
    if call == "step" and came == "4 values":
        came += " as in the old Gym API: split `done` into terminated and truncated"
    raise EnvError(f"{call} must return ({parts}), as Gymnasium has it; got {came}")


def refuse_no_text(observation: Any) -> None:
    """An `EnvError` where an env whose space of observations is `Text` gives something else."""
    if not isinstance(observation, str):
        raise EnvError(f"the observation must be str in a Text space, got {type(observation).__name__}")


def check_flags(terminated: Any, truncated: Any, where: str = "", **more: Any) -> None:
    """An `EnvError` where the end of an episode, or `more` by name, is given as a value that is no truth value.

    Python takes "False" for true, and so NaN, `[False]` and `{"__all__": False}`.
    """
    for name, value in (("terminated", terminated), ("truncated", truncated), *more.items()):
        known = type(value) in (bool, np.bool_)
        if not known and (isinstance(value, Sequence | Mapping | Set) or value != value):
            raise EnvError(f"{where}{name} must be True or False, got {value!r:.80}")


NUMBERS = {np.dtype(code).type for code in "bBhHiIlLqQefdgFD"} | {int, float, bool}
UNCHANGING = frozenset({str, bytes, type(None), np.bool_} | NUMBERS)


def deep_copy(value: Any) -> Any:
    """A copy that later changes to the original do not reach: of arrays, tensors and Python's own containers.

    Other objects are shared, as a copy of them could cost much.

    Raises:
        RecursionError: it is too deep, or holds itself.
    """
    kind, still = type(value), UNCHANGING
    if kind in still:
        return value
    if kind is dict:
        if still.issuperset(map(type, value.values())):
            return dict(value)
        return {key: item if type(item) in still else deep_copy(item) for key, item in value.items()}
    if kind is list:
        return list(value) if still.issuperset(map(type, value)) else list(map(deep_copy, value))
    if isinstance(value, np.ndarray):
        twin = value.copy()
        for place, item in np.ndenumerate(value) if value.dtype == object and value.ndim else ():
            twin[place] = deep_copy(item)
        return twin
    if kind is tuple or kind is set:
        return kind(map(deep_copy, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(deep_copy, value))
    if isinstance(value, dict | list | deque):  # OrderedDict, defaultdict, …
        kept = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            kept[key] = deep_copy(item)
        return kept
    if isinstance(value, bytearray):
        return value[:]
    return value.detach().clone() if hasattr(kind, "detach") and hasattr(kind, "clone") else value  # a tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a model and its response.

    The calls of an episode are a tree: a prompt is all that `parent` was asked and said, then `new_prompt_ids`.
    """

    new_prompt_ids: tuple[int, ...]
    parent: int | None  # the number of a call before this one; None where the prompt begins anew
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of `response_ids`, under the weights that sampled them
    weights_version: int = 0  # of these weights
    finish: str | None = None  # how the response ended ("stop" or "length"); None where it was not noted


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call of a tool in a response, and what came of it."""

    name: str
    arguments: Any  # a mapping of names to JSON values; what the model wrote, where that was none
    result: str = ""
    error: str | None = None  # what the model was told instead of a result

    @property
    def shown(self) -> str:
        """What the model was shown."""
        return self.result if self.error is None else f"Error: {self.error}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn with the env: observation, actions, reward; or with tools, where the env is not stepped."""

    observation: str
    call: int  # the number of the episode's call whose response this is
    response: str
    action: str | None  # the env's word(s) for what the response said; None when nothing usable came
    action_is_valid: bool
    reward: float
    anchor: str  # equal for equal env states within a group (GiGPO)
    image: str | None = None  # what the agent saw beside the text: a data URL or the path of a file
    tools: tuple[ToolUse, ...] = ()  # calls in the response, in order; the next turn observes their results


@dataclass(frozen=True, slots=True)
class Score:
    """What one of the `rewards` of a run says of an episode."""

    name: str
    weight: float
    value: float | None  # None where it gave none: it abstains, or the episode has failed
    prompt: str | None = None  # what a model was asked that judged it
    answer: str | None = None  # and what it answered


@dataclass(frozen=True, slots=True)
class Judged:
    """What the `rewards` of a run say of an episode; their weighted sum is in the rewards of its turns."""

    env_rewards: tuple[float, ...]  # what the env itself paid in each turn
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """Something that happened, and how often."""

    what: str
    count: int


INVALID_JSON = "invalid_json"
"""Counts answers that are no JSON, where JSON was asked for."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Where the requests of an agent program were not answered as it asked."""

    refused: tuple[Counted, ...] = ()  # requests, by status and reason
    overridden: tuple[Counted, ...] = ()  # settings such as "temperature=0.7": the run's own value was used
    unenforced: tuple[Counted, ...] = ()  # what the model was told of in words, or has no effect

    def lines(self) -> list[str]:
        """In words, a line each."""
        refused = [f"the gateway refused {one.count} of its requests: {one.what}" for one in self.refused]
        overridden = [
            f"the run's own value was used {one.count} times instead of {one.what}" for one in self.overridden
        ]
        return (
            refused + overridden + [f"not enforced, {one.count} times: {one.what}" for one in self.unenforced]
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of an episode; `status` says why one is incomplete."""

    env: str  # the tag under which the env was configured
    iteration: int
    group: int  # trajectories of a group share `env_seed`
    member: int  # position in the group; members differ in their sampling stream
    env_seed: int
    calls: tuple[Call, ...]
    turns: tuple[Turn, ...]
    success: bool
    terminated: bool
    truncated: bool
    status: Status = "ok"
    error: str | None = None  # the cause when `status` is not "ok"; see `program_failed` too
    ended: Ending | None = None  # why it ended; None where that was not noted
    # What its env showed at its end; of programs no part of the JSON.
    last: str | msgspec.UnsetType = msgspec.UNSET
    judged: Judged | msgspec.UnsetType = msgspec.UNSET  # by `rewards`; without them no part of the JSON
    requests: Requests | msgspec.UnsetType = msgspec.UNSET  # of an agent program; left out if it is empty

    def __post_init__(self) -> None:
        for number, call in enumerate(self.calls):
            if call.parent is not None and not 0 <= call.parent < number:
                raise ValueError(f"the parent of call {number} must be a call before it, got {call.parent}")
        for turn in self.turns:
            if not 0 <= turn.call < len(self.calls):
                raise ValueError(f"a turn must be of one of {len(self.calls)} calls, got number {turn.call}")

    @property
    def reward(self) -> float:
        """The undiscounted sum of rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def program_failed(self) -> bool:
        """Whether an agent program failed after the model had answered it: the episode counts, and `error` says how."""
        return self.status == "ok" and bool(self.error)

    @property
    def scores(self) -> tuple[Score, ...]:
        """What the `rewards` of the run say of it; empty without such."""
        return self.judged.scores if self.judged else ()

    @property
    def as_played(self) -> Trajectory:
        """The episode before it was judged: with the rewards that the env paid."""
        if not self.judged:
            return self
        turns = (replace(t, reward=r) for t, r in zip(self.turns, self.judged.env_rewards, strict=True))
        known = self if self.status != "reward_error" else replace(self, status="ok", error=None)
        return replace(known, turns=tuple(turns), judged=msgspec.UNSET)

    @property
    def n_tokens(self) -> int:
        """Tokens the model wrote in this episode."""
        return sum(len(call.response_ids) for call in self.calls)

    @property
    def response_lengths(self) -> list[int]:
        """Tokens that the model wrote in each turn."""
        return [len(self.calls[turn.call].response_ids) for turn in self.turns]

    def call_of(self, turn: Turn) -> Call:
        """The call of a turn."""
        return self.calls[turn.call]

    def prompt_ids(self, call: int) -> tuple[int, ...]:
        """The whole context that a call, by its number, was sampled from."""
        parts: list[tuple[int, ...]] = []
        number: int | None = call
        while number is not None:
            one = self.calls[number]
            parts.append(one.new_prompt_ids)
            number = one.parent
            if number is not None:
                parts.append(self.calls[number].response_ids)
        return tuple(token for part in reversed(parts) for token in part)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """One line of JSON, newline included; floats survive the round trip exactly."""
    return msgspec.json.encode(trajectory) + b"\n"


def decode_trajectory(line: bytes) -> Trajectory:
    """The trajectory in one line of JSON; a `DataError` says what is wrong with a line that has none."""
    try:
        return msgspec.json.decode(line, type=Trajectory)
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter of what is nested without end
        raise DataError(f"not a trajectory: {error}") from error


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a JSONL file in one atomic replacement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, b"".join(map(encode_trajectory, trajectories)))


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a JSONL file, in order; a broken line is a `DataError` with file and line."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decode_trajectory(line)
            except DataError as error:
                raise DataError(f"{path}, line {number}: {error}") from error


# --- advantages, which an update computes after the episodes are played
Advantages = list[list[float]]
"""Of an episode: for each turn one number a token of its response."""


def write_advantages(path: Path, episodes: Iterable[Sequence[Sequence[float]] | None]) -> None:
    """Write the advantages of a file of trajectories, line by line as the episodes stand there, in one replacement.

    Args:
        path: `advantages/NAME.jsonl` beside `trajectories/NAME.jsonl`.
        episodes: for each turn one number a token; None for an episode that was not learned from. A turn whose tokens
            all have the same is written as that one number.
    """
    lines = []
    for turns in episodes:
        short = [turn[0] if len(set(turn)) == 1 else list(turn) for turn in turns or ()]
        lines.append(msgspec.json.encode(None if turns is None else short) + b"\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, b"".join(lines))


def read_advantages(path: Path, trajectories: Mapping[int, Trajectory]) -> dict[int, Advantages | None]:
    """What an update computed for some episodes of a file, None for those that it did not learn from.

    Args:
        path: as `write_advantages` wrote it; {} if there is no such file yet.
        trajectories: the episodes by their line, from 0.

    Raises:
        DataError: a line is broken, or was written for another episode.
    """
    found: dict[int, Advantages | None] = {}
    if not path.exists():
        return found
    for row, line in enumerate(path.read_bytes().splitlines()):
        if row not in trajectories:
            continue
        try:
            values = msgspec.json.decode(line, type=list[float | list[float]] | None)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DataError(f"{path}, line {row + 1}: no advantages: {error}") from error
        if values is None:
            found[row] = None
            continue
        counts = trajectories[row].response_lengths
        whole = [one if isinstance(one, list) else [one] * n for one, n in zip(values, counts, strict=False)]
        if len(values) != len(counts) or [len(turn) for turn in whole] != counts:
            raise DataError(f"{path}, line {row + 1}: these are not the advantages of this episode's tokens")
        found[row] = whole
    return found
