"""Responses that were cut off: their episodes can be left out of the loss, and a budget divides what is left."""

import numpy as np
import pytest
import torch
from tests.records import Exchange, trajectory_of
from tests.train.agent.test_update import ENGINE, learner_of

from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.update import advantages_of, prepare_samples


def episode(member, reward, finishes, group=0):
    turns = [
        Exchange(
            "", (7, 8, 10 + member), (20 + i, 30 + i), (-1.0, -1.0), "", None, True, reward, "", finish=how
        )
        for i, how in enumerate(finishes)
    ]
    return trajectory_of("e", 0, group, member, 0, tuple(turns), reward > 0, True, False)


EPISODES = [
    episode(0, 1.0, ["stop"]),
    episode(1, 0.0, ["stop", "length", "stop"]),
    episode(2, 0.0, ["stop", "stop"]),
    episode(3, 0.0, ["length"]),
    episode(4, 0.0, [None]),  # of an older file, which did not note it
]


@pytest.mark.parametrize("filtered", [False, True])
def test_the_advantages_that_are_kept_are_those_of_the_samples_by_episode_and_turn(filtered):
    own = learner_of(ENGINE, overlong_filter=filtered)
    other = episode(9, 1.0, ["stop"], group=5)  # played, and not learned from
    found = advantages_of([other, *EPISODES], EPISODES, prepare_samples(EPISODES, own), own)
    # rewards 1, 0, 0, 0, 0: mean 0.2, variance (0.64 + 4 * 0.04) / 4 = 0.2
    high, low = 0.8 / 0.2**0.5, -0.2 / 0.2**0.5
    lengths = [1, 3, 2, 1, 1]
    expected = [[[value] * 2] * n for value, n in zip([high, low, low, low, low], lengths, strict=True)]
    if filtered:
        expected[1] = expected[3] = None
    assert found[0] is None
    for one, wanted in zip(found[1:], expected, strict=True):
        assert (one is None) == (wanted is None)
        assert one is None or np.allclose(np.concatenate(one), np.concatenate(wanted), atol=1e-4)
        assert one is None or [len(turn) for turn in one] == [len(turn) for turn in wanted]


def test_a_batch_in_which_all_were_cut_off_changes_nothing(tmp_path):
    overrides = [
        f"run_dir={tmp_path}", "use_parallel_envs=false", "trainer.iterations=2", "warmup.steps=0",
        "es_manager.train.env_groups=2",
        "es_manager.train.group_size=2", "es_manager.val.env_groups=1", "trainer.tensorboard=false",
        "agent_proxy.max_tokens=2", "algorithm.overlong_filter=true", "algorithm.filter_groups.enable=false",
        "agent_proxy.prompt.prefill='<action>'", "agent_proxy.prompt.closing=''",
    ]  # fmt: skip
    with AgentTrainer(compose_config("demo", overrides)) as trainer:
        before = [p.clone() for p in trainer.policy.module.parameters()]
        rows = list(trainer.train())
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.module.parameters(), strict=True))
    assert [row.get("gradient_steps", 0) for row in rows] == [0, 0, 0]
    assert rows[-1]["overlong_episodes"] == 1.0


def test_dapo_learns_from_answers_that_the_prompts_closing_makes_whole(tmp_path):
    overrides = [
        "algorithm=dapo", f"run_dir={tmp_path}", "use_parallel_envs=false", "trainer.iterations=1", "warmup.steps=60",
        "es_manager.val.env_groups=1", "es_manager.train.env_groups=16",
    ]  # fmt: skip
    with AgentTrainer(compose_config("demo", overrides)) as trainer:
        [_, row] = trainer.train()
    assert row["overlong_episodes"] == 0.0
    assert row["gradient_steps"] == 1


# --- the budget
@pytest.mark.parametrize(("mode", "turns"), [("window", 1), ("append", 3)])
def test_the_budget_is_that_of_a_response_or_of_a_whole_episode(tmp_path, mode, turns):
    overrides = [
        "agent_proxy.max_tokens=5", "agent_proxy.max_turn=3", f"agent_proxy.prompt.mode={mode}", f"run_dir={tmp_path}",
        "algorithm=dr_grpo", "es_manager.train.env_groups=1", "use_parallel_envs=false",
    ]  # fmt: skip
    with AgentTrainer(compose_config("demo", overrides)) as trainer:
        assert trainer._learner.token_budget == 5 * turns
