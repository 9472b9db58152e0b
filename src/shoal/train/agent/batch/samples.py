"""From trajectories to what a gradient step sees: samples of tokens, and micro-batches of them.

A sample is a walk of an episode's tree of calls, in which every prompt extends the tokens before it: one turn in
`window` mode, a whole episode in `append` mode. What is known of its trained tokens stands in columns, one number each.
How samples share rows decides speed and memory, never results: attention stays within a sample, and every token's
weight in the loss is fixed before.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.data import Call, Trajectory

Column = Literal[
    "rollout_logprobs",  # under the weights and the arithmetic of the engine that sampled
    "old_logprobs",  # under the same weights in the trainer's arithmetic
    "reference_logprobs",  # under the weights that a KL penalty holds on to
    "advantages",
    "weights",  # of the token in the loss; they sum to 1 over a minibatch
    "correction",  # importance weight of trainer against engine
    "values",  # of a critic, before the update
    "returns",  # what the critic shall learn
]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """Context and responses as one row of tokens."""

    ids: tuple[int, ...]
    places: NDArray[np.int64]  # [K] where the tokens stand that the model wrote, ascending
    columns: Mapping[Column, Floats]  # [K] each
    positions: NDArray[np.int64] | None = None  # [rows, T] of each token, where they are not simply counted
    inputs: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # what the network reads of images, by its names

    def with_column(self, name: Column, values: Floats) -> Sample:
        """This sample with one more column."""
        return replace(self, columns={**self.columns, name: values.astype(np.float32)})


def make_samples(trajectory: Trajectory, learned: Container[int] | None = None) -> list[Sample]:
    """The samples of a trajectory, with the column `rollout_logprobs`.

    Args:
        trajectory: the episode.
        learned: the numbers of the calls whose responses are trained; all if not given.
    """
    samples: list[Sample] = []
    for walk in walks(trajectory.calls):
        ids, places, logprobs = list(trajectory.prompt_ids(walk[0])), list[int](), list[float]()
        for number in walk:
            call = trajectory.calls[number]
            if number != walk[0]:
                ids += call.new_prompt_ids
            if learned is None or number in learned:
                places += range(len(ids), len(ids) + len(call.response_ids))
                logprobs += call.logprobs
            ids += call.response_ids
        if places:
            samples.append(_sample(tuple(ids[: places[-1] + 1]), places, logprobs))
    return samples


def walks(calls: Sequence[Call]) -> list[list[int]]:
    """The calls that make each sample, by number: a call goes on from its parent unless another one does already.

    >>> first, answer, other = Call((1,), None, (2,), (0.0,)), Call((3,), 0, (4,), (0.0,)), Call((5,), 0, (6,), (0.0,))
    >>> walks([first, answer, other])
    [[0, 1], [2]]
    """
    found: list[list[int]] = []
    ends: dict[int | None, list[int]] = {}  # a walk by its last call
    for number, call in enumerate(calls):
        walk = ends.pop(call.parent, None)
        if walk is None:
            found.append(walk := [])
        walk.append(number)
        ends[number] = walk
    return found


def turns_in_samples(trajectory: Trajectory) -> list[int]:
    """The turns, by number, in the order in which samples hold the tokens of their calls."""
    of_call = {turn.call: number for number, turn in enumerate(trajectory.turns)}
    return [of_call[call] for walk in walks(trajectory.calls) for call in walk]


def was_cut(trajectory: Trajectory) -> bool:
    """Whether a response of this episode ended because its tokens were used up, or the episode with the context."""
    return trajectory.finish == "context" or any(call.finish == "length" for call in trajectory.calls)


def _sample(ids: tuple[int, ...], places: list[int], logprobs: list[float]) -> Sample:
    return Sample(ids, np.array(places), {"rollout_logprobs": np.array(logprobs, dtype=np.float32)})


def split_tokens(samples: Sequence[Sample], flat: NDArray[np.floating]) -> list[Floats]:
    """Cut `[tokens]` values of the trained tokens of `samples`, in order, into one array a sample."""
    cuts = np.cumsum([len(sample.places) for sample in samples])[:-1]
    return np.split(np.asarray(flat, dtype=np.float32), cuts)
