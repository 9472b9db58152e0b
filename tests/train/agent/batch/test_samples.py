"""Samples hold the tokens of an episode's turns, and values go from one to the other and back."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.records import Exchange, trajectory_of

from shoal.core.data import Call
from shoal.train.agent.batch.samples import by_sample, by_turn, make_samples


def episode(lengths, parents, number):
    """An episode of calls with these numbers of tokens, no id twice; each goes on from nothing or a call before."""
    ids, calls, exchanges = itertools.count(1000 * number), [], []
    for k, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        prompt, response = (next(ids), next(ids)), tuple(itertools.islice(ids, length))
        parent = None if parent > k else k - parent if parent else None
        calls.append(Call(prompt, parent, response, (-1.0,) * length))
        exchanges.append(Exchange("", prompt, response, (-1.0,) * length, "", "a", True, 0.0, ""))
    whole = trajectory_of("e", 0, number, 0, 0, tuple(exchanges), False, True, False)
    return replace(whole, calls=tuple(calls))


turns = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=6)


@given(st.lists(turns, min_size=1, max_size=4))
def test_the_value_of_a_token_is_its_own_by_sample_and_by_turn(played):
    trajectories = [episode(*zip(*one, strict=True), number) for number, one in enumerate(played, start=1)]
    samples = [sample for t in trajectories for sample in make_samples(t)]
    written = [[t.call_of(turn).response_ids for turn in t.turns] for t in trajectories]
    assert sorted(i for s in samples for i in np.array(s.ids)[s.trained]) == sorted(
        i for of_turns in written for ids in of_turns for i in ids
    )
    if not samples:
        return
    values = [np.float32(np.array(s.ids)[s.trained]) for s in samples]  # the value of each token is its id
    found = by_turn(trajectories, values)
    assert [[tuple(ids) for ids in of_turns] for of_turns in found] == written
    back = by_sample(trajectories, samples, written)
    assert all(map(np.array_equal, back, values))
    firsts = [[float(k) for k, _ in enumerate(of_turns)] for of_turns in written]  # one number a turn
    of_tokens = by_turn(trajectories, by_sample(trajectories, samples, firsts))
    assert all(set(ids) <= {float(k)} for of_turns in of_tokens for k, ids in enumerate(of_turns))
