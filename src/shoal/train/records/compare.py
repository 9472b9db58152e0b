"""Where two records of an episode part, how exactly one set of episodes repeats another, and where two runs part.

Only the files of run folders are read, so runs made serially, by processes, on Ray or with a server compare alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shoal.core.data import Trajectory, encode_trajectory, read_trajectories
from shoal.core.errors import DataError
from shoal.samplers import tokenizers
from shoal.samplers.sampler import Level
from shoal.train.records.read import recordings_of

_PLACES = ("iteration", "group", "member", "turn", "token")
_OF_TOKENS = ("prompt token", "response token", "log-probability")
_OF_THE_END = ("terminated", "truncated", "success", "status", "error", "ended", "last", "judged", "requests")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which two records differ, and where it stands."""

    what: str  # "seed", "prompt token", "response token", "observation", "reward", "end", …
    one: Any
    other: Any
    file: str = ""
    iteration: int | None = None
    group: int | None = None
    member: int | None = None
    turn: int | None = None  # from 1, as `shoal show` counts them
    token: int | None = None  # from 0, of the prompt or the response

    def __str__(self) -> str:
        place = [f"{name} {getattr(self, name)}" for name in _PLACES if getattr(self, name) is not None]
        where = ", ".join([*([self.file] if self.file else []), *place])
        return f"{where}: {self.what} is {_short(self.one)} and {_short(self.other)}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        places = {name: getattr(self, name) for name in ("what", "file", *_PLACES)}
        return {**places, "one": _short(self.one), "other": _short(self.other)}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:120] + f"… ({len(text)} characters)"


def difference_of(one: Trajectory, other: Trajectory, *, tokens_only: bool = False) -> Difference | None:
    """Where two records of an episode first differ: its seeds, then turn by turn in the order of events."""
    for what, left, right, turn in _side_by_side(one, other, tokens_only):
        if left == right:
            continue
        at = tokenizers.first_difference(left, right) if what in _OF_TOKENS else None
        if at is not None:
            left, right = (values[at] if at < len(values) else "no token" for values in (left, right))
        return Difference(what, left, right, "", one.iteration, one.group, one.member, turn, at)
    return None


def _side_by_side(
    one: Trajectory, other: Trajectory, tokens_only: bool
) -> Iterator[tuple[str, Any, Any, int | None]]:
    """What two records say of the same thing, and of which turn; turns that are alike in all are passed over."""
    for name in ("env", "iteration", "group", "member"):
        yield name, getattr(one, name), getattr(other, name), None
    yield "seed", one.env_seed, other.env_seed, None
    for number, (left, right) in enumerate(zip(one.turns, other.turns, strict=False), 1):
        if same_turn(one, other, number - 1, logprobs=True):
            continue
        said, answered = one.call_of(left), other.call_of(right)
        yield "observation", left.observation, right.observation, number
        yield "picture", left.image, right.image, number
        yield "prompt token", one.prompt_ids(left.call), other.prompt_ids(right.call), number
        yield "response token", said.response_ids, answered.response_ids, number
        if not tokens_only:
            yield "log-probability", said.logprobs, answered.logprobs, number
        yield "finish", said.finish, answered.finish, number
        for name in ("response", "action", "action_is_valid", "tools", "reward", "anchor"):
            yield name, getattr(left, name), getattr(right, name), number
        yield "weights_version", said.weights_version, answered.weights_version, number
    yield "the number of turns", len(one.turns), len(other.turns), None
    for name in _OF_THE_END:
        yield name, getattr(one, name), getattr(other, name), None


def same_turn(one: Trajectory, other: Trajectory, number: int, *, logprobs: bool = False) -> bool:
    """Whether two records agree on a turn (from 0): on all of it, or on all but log-probabilities and weights."""
    left, right = one.turns[number], other.turns[number]
    said, answered = one.call_of(left), other.call_of(right)
    if not logprobs:
        said, answered = (replace(call, logprobs=(), weights_version=0) for call in (said, answered))
    return left == right and said == answered


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found."""

    level: Level  # L2: everything equal; L1: all but log-probs; L0: something else differs
    episodes: int
    same_episodes: int  # equal in everything but log-probs
    turns: int
    same_logprobs: int  # turns whose log-probs are bit-equal
    largest_difference: float  # of two log-probs of one token, where the tokens are the same
    first: str | None  # where the first difference that matters is

    def __str__(self) -> str:
        text = (
            f"{self.level}: {self.same_episodes} of {self.episodes} episodes have the same tokens, rewards and "
            f"ends; log-probs are bit-equal in {self.same_logprobs} of {self.turns} turns "
            f"(largest difference {self.largest_difference:.2g})"
        )
        return f"{text}\nfirst difference: {self.first}" if self.first else text


def compare(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> Verdict:
    """The level at which `other` repeats `one`, episode by episode in order."""
    turns = same_logprobs = same_episodes = 0
    largest, first = 0.0, None
    if len(one) != len(other):
        first = f"{len(one)} episodes against {len(other)}"
    for a, b in zip(one, other, strict=False):
        difference = difference_of(a, b, tokens_only=True)
        same_episodes += difference is None
        first = first or (str(difference) if difference else None)
        for left, right in zip(map(a.call_of, a.turns), map(b.call_of, b.turns), strict=False):
            if left.response_ids != right.response_ids:
                break
            turns += 1
            same_logprobs += left.logprobs == right.logprobs
            pairs = zip(left.logprobs, right.logprobs, strict=False)  # messages have none
            largest = max([largest, *(abs(x - y) for x, y in pairs)])
    exact = first is None
    level: Level = "L2" if exact and same_logprobs == turns else "L1" if exact else "L0"
    n_turns = max(turns, sum(len(t.turns) for t in one))
    return Verdict(level, max(len(one), len(other)), same_episodes, n_turns, same_logprobs, largest, first)


# --- whole runs
def episodes_digest(run: Path, *, tokens_only: bool = False) -> str:
    """The sha256 of all recorded episodes of a run.

    With `tokens_only` log-probabilities are left out, which a batch of another shape may round otherwise.
    """
    digest = hashlib.sha256()
    for recording in recordings_of(run):
        digest.update(recording.name.encode())
        for trajectory in read_trajectories(recording.file):
            told = replace(trajectory, error=None)  # words of a failure tell who played it
            digest.update(encode_trajectory(with_calls(told, logprobs=()) if tokens_only else told))
    return digest.hexdigest()


def with_calls(trajectory: Trajectory, **changes: Any) -> Trajectory:
    """The trajectory with these changes in each of its calls."""
    return replace(trajectory, calls=tuple(replace(call, **changes) for call in trajectory.calls))


def weights_digest(folder: Path) -> str:
    """The sha256 of all tensors in the safetensors files under a folder: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no tensors to compare")
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode())
        data = file.read_bytes()
        # the format: a length, a JSON header, then the bytes of tensors
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, about in sorted(header.items()):
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in about["data_offsets"])
                digest.update(f"{name} {about['dtype']} {about['shape']}".encode())
                digest.update(data[begin:end])
    return digest.hexdigest()


def first_difference(one: Path, other: Path, *, tokens_only: bool = False) -> Difference | None:
    """Where the recorded episodes of two runs first differ, in the order in which they were played.

    Raises:
        DataError: the runs have no files of episodes of the same name.
    """
    left = {recording.name: recording for recording in recordings_of(one)}
    right = {recording.name: recording for recording in recordings_of(other)}
    if not left.keys() & right.keys():
        have = [f"{run}: {', '.join(names) or 'none'}" for run, names in ((one, left), (other, right))]
        raise DataError(f"no file of episodes is in both runs ({'; '.join(have)})")
    for name, recording in left.items():
        if name in right:
            found = first_in_files(recording.file, right[name].file, tokens_only=tokens_only)
            if found is not None:
                return found
    for name in sorted(left.keys() ^ right.keys()):
        here, there = ("there" if name in side else "missing" for side in (left, right))
        return Difference("the file", here, there, name)
    return None


def first_in_files(one: Path, other: Path, *, tokens_only: bool = False) -> Difference | None:
    """Where two files of episodes first differ."""
    for a, b in zip_longest(read_trajectories(one), read_trajectories(other)):
        if a is None or b is None:
            place = a or b
            here, there = ("missing" if side is None else "there" for side in (a, b))
            assert place is not None
            return Difference(
                "the episode", here, there, one.stem, place.iteration, place.group, place.member
            )
        found = difference_of(a, b, tokens_only=tokens_only)
        if found is not None:
            return replace(found, file=one.stem)
    return None
