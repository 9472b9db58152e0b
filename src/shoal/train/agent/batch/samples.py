"""From trajectories to samples, in which every prompt extends the tokens before it.

A sample is one turn in `window` mode and a whole episode in `append` mode. What is known of its trained tokens stands
in columns, one number each.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
    trained: NDArray[np.int64]  # [K] the index of each token that the model wrote, ascending
    columns: Mapping[Column, Floats]  # [K] each
    positions: NDArray[np.int64] | None = None  # [rows, T] of each token, where they are not simply counted
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # what the network reads of images

    def with_column(self, name: Column, values: Floats) -> Sample:
        """This sample with one more column."""
        return replace(self, columns={**self.columns, name: values.astype(np.float32)})


def make_samples(trajectory: Trajectory, learned: Container[int] | None = None) -> list[Sample]:
    """The samples of a trajectory, with the column `rollout_logprobs`.

    Responses of the calls whose numbers are `learned` are trained; all if not given.
    """
    samples: list[Sample] = []
    for chain in call_chains(trajectory.calls):
        ids, trained, logprobs = list(trajectory.prompt_ids(chain[0])), list[int](), list[float]()
        for number in chain:
            call = trajectory.calls[number]
            if number != chain[0]:
                ids += call.new_prompt_ids
            if learned is None or number in learned:
                trained += range(len(ids), len(ids) + len(call.response_ids))
                logprobs += call.logprobs
            ids += call.response_ids
        if trained:
            column = np.array(logprobs, dtype=np.float32)
            read = tuple(ids[: trained[-1] + 1])
            samples.append(Sample(read, np.array(trained), {"rollout_logprobs": column}))
    return samples


def call_chains(calls: Sequence[Call]) -> list[list[int]]:
    """The calls that make each sample, by number: a call goes on from its parent unless another one does already.

    >>> first, answer, other = Call((1,), None, (2,), (0.0,)), Call((3,), 0, (4,), (0.0,)), Call((5,), 0, (6,), (0.0,))
    >>> call_chains([first, answer, other])
    [[0, 1], [2]]
    """
    found: list[list[int]] = []
    ends: dict[int | None, list[int]] = {}  # a chain by its last call
    for number, call in enumerate(calls):
        chain = ends.pop(call.parent, None)
        if chain is None:
            found.append(chain := [])
        chain.append(number)
        ends[number] = chain
    return found


def was_cut(trajectory: Trajectory, closing: str = "") -> bool:
    """Whether a response of this episode ended because its tokens were used up, or the episode with the context.

    What `agent_proxy.prompt.closing` is put behind is whole, however it ended.
    """
    used_up = not closing and any(call.finish == "length" for call in trajectory.calls)
    return used_up or trajectory.ended == "context"


# --- values of tokens, by sample and by turn
def split_tokens(samples: Sequence[Sample], flat: NDArray[np.floating]) -> list[Floats]:
    """Cut `[tokens]` values of the trained tokens of `samples`, in order, into one array a sample."""
    cuts = np.cumsum([len(sample.trained) for sample in samples])[:-1]
    return np.split(np.asarray(flat, dtype=np.float32), cuts)


def by_turn(
    trajectories: Sequence[Trajectory], of_samples: Sequence[Floats]
) -> list[list[NDArray[np.float64]]]:
    """Values of the tokens of samples, in the order of the trajectories, per trajectory and turn."""
    if not of_samples:
        return []
    orders = [_turns_in_samples(t) for t in trajectories]
    lengths = [
        t.response_lengths[turn] for t, order in zip(trajectories, orders, strict=True) for turn in order
    ]
    parts = iter(np.split(np.concatenate(of_samples).astype(np.float64), np.cumsum(lengths)[:-1]))
    found = [{turn: next(parts) for turn in order} for order in orders]
    return [[of_turns[turn] for turn in range(len(of_turns))] for of_turns in found]


def by_sample(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], nested: Sequence[Sequence[Any]]
) -> list[Floats]:
    """Values per trajectory and turn, one a token or one for all tokens of a turn, as one array a sample."""
    flat = [
        np.broadcast_to(of_turns[turn], (t.response_lengths[turn],))
        for t, of_turns in zip(trajectories, nested, strict=True)
        for turn in _turns_in_samples(t)
    ]
    return split_tokens(samples, np.concatenate(flat))


def _turns_in_samples(trajectory: Trajectory) -> list[int]:
    """The turns, by number, in the order in which samples hold the tokens of their calls."""
    of_call = {turn.call: number for number, turn in enumerate(trajectory.turns)}
    return [of_call[call] for chain in call_chains(trajectory.calls) for call in chain]
