"""The example of registered estimators: GraphGPO, GAE over turns, and both levels at once."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.records import Exchange, trajectory_of
from tests.train.agent.run.test_crash_points import train

from shoal.core.extensions import import_extensions
from shoal.train.agent.algorithms.advantages import ESTIMATORS, turn_advantages
from shoal.train.agent.config import AgentProxy, Algorithm, Critic

EXAMPLE = Path(__file__).parents[4] / "examples" / "own_estimators.py"
NAMES = ("graphgpo", "turn_gae", "bi_level_gae")


@pytest.fixture(scope="module")
def example():
    import_extensions([str(EXAMPLE)])
    yield SimpleNamespace(**ESTIMATORS["graphgpo"].compute.__globals__)
    for name in NAMES:
        ESTIMATORS._items.pop(name)


def test_graphgpo_pays_a_good_turn_of_a_lost_episode_and_none_of_a_detour(example):
    """A -> B -> goal is the way; the first episode goes round by C, the second goes to B and is lost."""
    solved, lost = ["A", "C", "B"], ["A", "B"]
    first, second = example.graph_step_advantages([solved, lost], [True, False], [0, 0], discount=0.5)
    half = np.sqrt(0.5)  # two values, a mean between them, Bessel's correction
    # to C: 2 turns left; alone at C; from B to the goal
    np.testing.assert_allclose(first, [-half, 0.0, half])
    np.testing.assert_allclose(second, [half, -half])  # to B: 1 turn left; from B nowhere


def test_graphgpo_is_grpo_and_the_step_part_and_far_states_count_as_near_ones(example):
    long = [f"s{k}" for k in range(12)]
    turns = [tuple(Exchange("s", (1,), (2,), (), "", "x", True, float(name == "s11"), name) for name in names)
             for names in (long, [long[0], "x"])]  # fmt: skip
    episodes = [trajectory_of("e", 0, 0, k, 0, t, k == 0, True, False) for k, t in enumerate(turns)]
    settings = Algorithm(adv_estimator="graphgpo")
    first, second = turn_advantages(episodes, settings, AgentProxy())
    half = np.sqrt(0.5)  # eleven turns from the goal, 0.1 ** 11 against 0.1 ** 13
    np.testing.assert_allclose(first, [2 * half] + [half] * 11, atol=1e-12)
    np.testing.assert_allclose(second, [-2 * half, -half], atol=1e-12)


def bi_level_over_one_row(rewards, values, gamma, gae_lambda, token_lambda):
    """RAGEN's way: one row of tokens, ends of turns marked in it, two passes from its end, the second over the first.

    (RAGEN takes a token with a reward for the end of a turn; here every last token is one.)
    """
    row = [v for turn in values for v in turn]
    ends = np.cumsum([len(turn) for turn in values]) - 1
    paid, result = dict(zip(ends, rewards, strict=True)), [0.0] * len(row)
    carried = 0.0
    for i in reversed(range(len(ends))):
        ahead = row[ends[i + 1]] if i + 1 < len(ends) else 0.0
        carried = paid[ends[i]] + gamma * ahead - row[ends[i]] + gamma * gae_lambda * carried
        result[ends[i]] = carried
    scores = {end: result[end] + row[end] for end in ends}
    for t in reversed(range(len(row))):
        is_end = t in scores
        delta = scores[t] - row[t] if is_end else row[t + 1] - row[t]
        result[t] = delta + (0.0 if is_end else token_lambda * result[t + 1])
    return result


def test_bi_level_gae_is_what_two_passes_over_one_row_give(example):
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = [rng.normal(size=rng.integers(1, 5)) for _ in range(rng.integers(1, 6))]
        rewards, rates = rng.normal(size=len(values)).tolist(), rng.uniform(size=3)
        found, _ = example.bi_level_gae(rewards, values, *rates)
        np.testing.assert_allclose(
            np.concatenate(found), bi_level_over_one_row(rewards, values, *rates), atol=1e-9
        )


def test_critics_over_turns_read_the_settings_of_a_run(example):
    # The episode above with gamma 1/2, lambda 3/4: the last turn has 0.6; by turns, both tokens of turn 0 have
    # 0.5*0.4 - 0.1 + 0.375*0.6 = 0.325; by both, its last has 0.5*0.4 - 0.3 + 0.375*0.6 = 0.125, its first
    # 0.3 - 0.1 + 1*0.125 = 0.325.
    algorithm = Algorithm(gamma=0.5, critic=Critic(gae_lambda=0.75))
    for name, first in {"turn_gae": [0.325, 0.325], "bi_level_gae": [0.325, 0.125]}.items():
        values = [np.array([0.1, 0.3]), np.array([0.4])]
        advantages, _ = ESTIMATORS[name].compute([0.0, 1.0], values, algorithm)
        np.testing.assert_allclose(np.concatenate(advantages), [*first, 0.6])


@pytest.mark.parametrize(
    "words", [["algorithm.adv_estimator=graphgpo"], ["algorithm=ppo", "algorithm.adv_estimator=turn_gae"]]
)
def test_the_example_trains(example, tmp_path, words):
    assert len(train(tmp_path / "run", f"imports=[{EXAMPLE}]", *words, "trainer.iterations=1")) == 2
