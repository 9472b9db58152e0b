import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import Exchange, exchanges, trajectory_of

from shoal.core.errors import ConfigError
from shoal.integrations.rows import bridge_config, require_whole_episodes, token_rows
from shoal.integrations.trl import TRLRollout
from shoal.integrations.verl import to_dataproto

tokens = st.lists(st.integers(0, 50), min_size=1, max_size=4).map(tuple)


def make_trajectory(parts, grows, status="ok"):
    """`parts`: (told, written, reward) per turn; with `grows` each prompt extends the tokens before it."""
    context, turns = (), []
    for told, written, reward in parts:
        context = context + told if grows else (99, len(turns), *told)
        logprobs = tuple(-0.5 - i for i in range(len(written)))
        turns.append(Exchange("", context, written, logprobs, "", "a", True, reward, ""))
        context += written
    return trajectory_of("lake", 0, 2, 1, 7, tuple(turns), False, True, False, status)


episodes = st.lists(st.tuples(tokens, tokens, st.integers(-3, 3).map(float)), min_size=1, max_size=5)


@given(episodes, st.booleans())
def test_every_written_token_is_in_one_row_with_its_log_prob(parts, grows):
    trajectory = make_trajectory(parts, grows)
    rows = list(token_rows(trajectory))
    assert len(rows) == (1 if grows else len(parts))
    written = [
        (token, logprob)
        for row in rows
        for token, logprob, mask in zip(row.response_ids, row.logprobs, row.mask, strict=True)
        if mask
    ]
    assert written == [
        pair for t in exchanges(trajectory) for pair in zip(t.response_ids, t.logprobs, strict=True)
    ]
    assert rows[0].prompt_ids == list(exchanges(trajectory)[0].prompt_ids)
    for row in rows:
        last = exchanges(trajectory)[row.first_turn + row.n_turns - 1]
        assert tuple(row.prompt_ids + row.response_ids) == last.prompt_ids + last.response_ids
        assert sum(row.turn_lengths) == sum(row.mask)
    assert sum(sum(row.rewards) for row in rows) == trajectory.reward


def test_rewards_stand_at_the_last_token_of_their_turn():
    (row,) = token_rows(make_trajectory([((1, 2), (3, 4), 0.5), ((5,), (6, 7, 8), 2.0)], grows=True))
    assert row.prompt_ids == [1, 2]
    assert row.response_ids == [3, 4, 5, 6, 7, 8]
    assert row.mask == [1, 1, 0, 1, 1, 1]
    assert row.rewards == [0, 0.5, 0, 0, 0, 2.0]
    assert (row.first_turn, row.turn_lengths) == (0, (2, 3))


@given(
    st.lists(
        st.tuples(tokens, st.lists(st.integers(0, 50), max_size=3).map(tuple), st.integers(-3, 3).map(float)),
        min_size=1, max_size=6,
    ),
    st.booleans(),
)  # fmt: skip
def test_no_reward_of_a_turn_without_tokens_is_lost(parts, grows):
    trajectory = make_trajectory(parts, grows)
    rows = list(token_rows(trajectory))
    if rows:
        assert sum(sum(row.rewards) for row in rows) == trajectory.reward
    for row in rows:
        assert all(mask for reward, mask in zip(row.rewards, row.mask, strict=True) if reward)
    assert sum(row.n_turns for row in rows) == (len(parts) if rows else 0)
    assert [row.first_turn for row in rows] == [sum(r.n_turns for r in rows[:i]) for i in range(len(rows))]


@pytest.fixture
def verl(monkeypatch):
    """What `to_dataproto` needs of verl, where it is not installed."""
    made = types.SimpleNamespace(from_single_dict=lambda fields, meta_info: fields)
    monkeypatch.setitem(sys.modules, "verl", types.SimpleNamespace(DataProto=made))


@pytest.mark.parametrize("numbers", [[1.0], [1.0, 2.0, 3.0], [[1.0], [2.0]], 1.0])
def test_advantages_that_are_not_one_a_turn_are_refused(verl, numbers):
    trajectory = make_trajectory([((1, 2), (3, 4), 0.5), ((5,), (6, 7, 8), 2.0)], grows=True)
    spread = to_dataproto([trajectory], 0, advantages=[[1.0, 2.0]])["advantages"]
    assert spread.tolist() == [[1, 1, 0, 2, 2, 2]]
    with pytest.raises(ValueError, match="one number a turn: the episode of group 2, member 1 has 2 turns"):
        to_dataproto([trajectory], 0, advantages=[numbers])
    failed = make_trajectory([((1, 2), (3, 4), 0.5)], grows=True, status="env_error")
    to_dataproto([failed, trajectory], 0, advantages=[[], [1.0, 2.0]])  # what is left out needs none


def test_a_kind_of_env_that_is_called_like_held_out_rows_of_another_is_refused():
    kinds = {"lake": {"env_type": "frozen_lake"}, "lake held-out": {"env_type": "sokoban"}}
    settings = {"agent_proxy": {"prompt": {"mode": "append"}}}
    with pytest.raises(ConfigError, match="'lake' and 'lake held-out': .*another name"):
        TRLRollout({"custom_envs": kinds, **settings})
    TRLRollout({"custom_envs": {"lake held-out": kinds["lake held-out"]}, **settings}).close()


def test_a_config_that_is_not_one_row_an_episode_is_refused():
    kinds = {"lake": {"env_type": "frozen_lake"}}
    assert bridge_config({"custom_envs": kinds}).es_manager.train.env_configs.tags == ("lake",)
    with pytest.raises(ConfigError, match=r"prompt\.mode=append"):
        require_whole_episodes(bridge_config({"custom_envs": kinds}))
    with pytest.raises(ConfigError, match="at least one kind of env"):
        bridge_config({"custom_envs": {}})
