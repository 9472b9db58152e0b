import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.data import Trajectory, Turn
from shoal.core.errors import ConfigError
from shoal.integrations.rows import bridge_config, require_whole_episodes, token_rows

tokens = st.lists(st.integers(0, 50), min_size=1, max_size=4).map(tuple)


def make_trajectory(parts, grows, status="ok"):
    """`parts`: (told, written, reward) per turn; with `grows` each prompt extends the tokens before it."""
    context, turns = (), []
    for told, written, reward in parts:
        context = context + told if grows else (99, len(turns), *told)
        logprobs = tuple(-0.5 - i for i in range(len(written)))
        turns.append(Turn("", context, written, logprobs, "", "a", True, reward, ""))
        context += written
    return Trajectory("lake", 0, 2, 1, 7, tuple(turns), False, True, False, status)


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
        pair for t in trajectory.turns for pair in zip(t.response_ids, t.logprobs, strict=True)
    ]
    assert rows[0].prompt_ids == list(trajectory.turns[0].prompt_ids)
    for row in rows:
        last = trajectory.turns[row.first_turn + row.n_turns - 1]
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


def test_a_config_that_is_not_one_row_an_episode_is_refused():
    kinds = {"lake": {"env_type": "frozen_lake"}}
    assert bridge_config({"custom_envs": kinds}).es_manager.train.env_configs.tags == ("lake",)
    with pytest.raises(ConfigError, match=r"prompt\.mode=append"):
        require_whole_episodes(bridge_config({"custom_envs": kinds}))
    with pytest.raises(ConfigError, match="at least one kind of env"):
        bridge_config({"custom_envs": {}})
