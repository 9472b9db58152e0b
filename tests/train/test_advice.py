"""What the metrics of a run say about how it goes."""

import pytest

from shoal.train.advice import Rejected, advise, has_collapsed
from shoal.train.agent.algorithms.advantages import advantage


def rows(n=8, **columns):
    return [
        {"iteration": k, **{name: f(k) if callable(f) else f for name, f in columns.items()}}
        for k in range(n)
    ]


GOOD = {
    "groups_with_signal": 0.8,
    "entropy": lambda k: 1 - k / 20,
    "success": 0.5,
    "truncated": 0.1,
    "logprob_gap_max": 1e-5,
    "share_idle": 0.1,
    "valid_actions": 0.9,
    "clip_fraction": 0.1,
    "failed_episodes": 0,
    "loss": 0.1,
    "grad_norm": 1.0,
}


def test_a_run_that_goes_well_gets_no_advice():
    assert advise(rows(**GOOD)) == []
    assert (
        titles(rows(**{**GOOD, "groups_with_signal": 0.0, "groups_all_solved": 0.95, "success": 0.95})) == []
    )
    assert advise([]) == []
    assert advise([{"iteration": 0, "success": None, "entropy": "x", "grad_norm": True}]) == []


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"groups_with_signal": 0.0, "groups_none_solved": 0.9}, "Groups have equal rewards"),
        ({"entropy": lambda k: 1 / 100**k}, "Entropy has collapsed"),
        ({"entropy": lambda k: 1 + k}, "Entropy grows"),
        ({"truncated": 0.8}, "Most episodes are cut off"),
        ({"logprob_gap_max": 0.7}, "Trainer and engine disagree"),
        ({"failed_episodes": 3, "episodes": 64}, "Episodes failed"),
        ({"tool_errors": 0.6}, "Calls of tools fail"),
        ({"overlong_episodes": 0.6}, "Most episodes are left out"),
        ({"program_errors": 0.6}, "Programs raise"),
        ({"valid_actions": 0.3}, "Few valid actions"),
        ({"valid_actions": 0.1}, "Hardly any answer is a valid action"),
        ({"success": lambda k: 0.9 if k < 4 else 0.5}, "Success collapsed"),
        ({"clip_fraction": 0.6}, "Steps are too large"),
        ({"grad_norm": None}, "Training diverged"),
        ({"heldout_success": 0.1}, "Held-out episodes lag behind"),
        ({"approx_kl": 0.5}, "The policy moves fast"),
    ],
)
def test_each_trouble_is_told_by_its_name_and_nothing_else_is(change, title):
    assert [advice.title for advice in advise(rows(**{**GOOD, **change}))] == [title]


def titles(*given):
    return [advice.title for advice in advise(*given)]


def noise(k):
    return 0.01 * (k % 3 - 1)


def test_a_run_that_stays_where_it_began_is_told_so_with_what_to_change():
    for name in ("success", "reward"):  # of agents, and of PPO
        still = {
            **GOOD,
            "entropy": 0.5,
            "success": None,
            name: lambda k: 0.3 + noise(k),
            "learning_rate": 1e-7,
        }
        (told,) = advise(rows(40, **still, approx_kl=1e-6))
        assert (told.level, told.metric, told.title) == ("warn", name, "Nothing has been learned so far")
        assert f"{name} is 0.3 in 40 rows, the first and the last no more than chance apart" in told.text
        assert "raise the learning rate (it is 1e-07) tenfold" in told.text
        for kl in ({"kl_to_rollout": 1e-6, "gradient_steps": 4}, {"approx_kl": 1e-6, "n_minibatches": 8}):
            (told,) = advise(rows(40, **still, **kl))
            assert f"{next(iter(kl))} is 1e-06 an update" in told.text
        (told,) = advise(rows(40, **still, kl_to_rollout=0.0, gradient_steps=1))  # 0 by its definition
        assert "The policy moves" in told.text
        (told,) = advise(rows(40, **still, approx_kl=0.01), None, None, "runs/a")
        assert "shoal view runs/a" in told.text
        assert titles(rows(16, **still)) == []  # too short to tell


@pytest.mark.parametrize(
    "success",
    [
        lambda k: 0.3 + 0.01 * k + noise(k),  # rises
        lambda k: (0.1 if k < 10 else 0.5) + noise(k),  # has risen
        lambda k: 0.95 + noise(k),  # was solved from the beginning
    ],
)
def test_a_run_that_learned_or_has_nothing_to_learn_is_not_called_flat(success):
    assert titles(rows(40, **{**GOOD, "entropy": 0.5, "success": success})) == []


@pytest.mark.parametrize("success", [0.1, 0.0])
def test_a_reward_that_rises_is_learning_though_success_stays(success):
    still = {**GOOD, "entropy": 0.5, "success": lambda k: success + bool(success) * noise(k)}
    assert titles(rows(25, **still, reward=lambda k: 0.06 + 0.03 * k)) == []
    assert titles(rows(25, **still, reward=lambda k: 0.3 + noise(k))) != []
    assert titles(rows(25, **still, reward=lambda k: 0.9 - 0.03 * k)) != []


CUT = {**GOOD, "success": 0.0, "truncated": 1.0, "turns": 2.0}


def test_a_limit_of_turns_behind_which_success_may_lie_is_named():
    few = {"agent_proxy": {"max_turn": 2}}
    [found] = advise(rows(**CUT), few)
    assert (found.level, found.title) == ("bad", "Every episode is cut off")
    assert "agent_proxy.max_turn=2, raise that" in found.text
    [own] = advise(rows(**CUT), {"agent_proxy": {"max_turn": 9}})
    assert "max_steps of the env" in own.text
    assert titles(rows(**{**CUT, "success": 0.1}), few) == ["Most episodes are cut off"]
    assert titles(rows(**{**CUT, "groups_with_signal": 0.0}), few) == ["Every episode is cut off"]


REAL = {"engine": {"name": "huggingface"}, "algorithm": {"learning_rate": 3e-5, "kl": {"coef": 0.03}}}


def test_a_collapse_of_the_entropy_names_what_can_act_and_comes_before_what_follows_from_it():
    silent = {
        **GOOD, "success": 0.0, "reward": 0.2, "entropy": lambda k: 0.36 - 0.04 * min(k, 8),
        "groups_with_signal": lambda k: 0.6 if k < 5 else 0.0,
    }  # fmt: skip
    [found] = advise(rows(16, **silent, gradient_steps=1), REAL)
    assert found.title == "Entropy has collapsed"
    assert "algorithm.learning_rate to a third (it is 3e-05)" in found.text
    assert "Set algorithm.kl.coef=0.3 (it is 0.03) and algorithm.kl.target=0.3" in found.text
    order = [found.text.index(name) for name in ("kl.coef", "learning_rate", "more groups")]
    assert order == sorted(order)  # as measured
    assert "clip_ratio_high" not in found.text  # with one step an update no ratio leaves 1
    [tiny] = advise(rows(16, **silent), {"engine": {"name": "tiny"}})
    assert "kl.coef" not in tiny.text  # a fresh model has nothing to hold on to
    never = {**silent, "groups_with_signal": 0.0}  # it is no wonder that the policy stopped trying
    assert titles(rows(16, **never), REAL) == ["Groups have equal rewards", "Entropy has collapsed"]


def test_an_update_that_halves_the_entropy_is_told_at_once_unless_success_rose_with_it():
    # a kiosk of five days, SmolLM2 with a learning rate of 0.00003
    fell = {**GOOD, "success": 0.0, "entropy": lambda k: [0.36, 0.18, 0.12, 0.09][k]}
    [found] = advise(rows(2, **fell), REAL)
    assert (found.level, found.title) == ("bad", "One update halved the entropy")
    assert (
        "The update of iteration 0 took it from 0.36 to 0.18 nats a token while success is 0%" in found.text
    )
    assert "algorithm.learning_rate to a third (it is 3e-05)" in found.text
    assert titles(rows(4, **fell), REAL) == ["One update halved the entropy"]
    assert titles(rows(2, **{**fell, "success": lambda k: 0.6 * k}), REAL) == []
    assert titles(rows(2, **{**fell, "entropy": lambda k: 0.36 - 0.17 * k}), REAL) == []
    late = {**fell, "entropy": lambda k: [0.36, 0.2, 0.15, 0.07][k]}  # a policy that learns becomes sure
    assert titles(rows(4, **late), REAL) == []
    assert titles(rows(4, **{**fell, "success": None}), REAL) == []  # PPO
    recovered = {**fell, "entropy": lambda k: [0.36, 0.18, 0.3, 0.35][k]}
    assert titles(rows(4, **recovered), REAL) == []
    # as SmolLM2 was at a safe, which it then opened
    held = {"algorithm": {**REAL["algorithm"], "kl": {"coef": 0.3}}}
    assert titles(rows(4, **fell), held) == []
    assert titles(rows(16, **{**fell, "entropy": lambda k: 0.36 if k < 2 else 0.02}), held)[:1] == [
        "Entropy has collapsed"
    ]


# --- a policy that has collapsed for good
GONE = {
    "groups_with_signal": lambda k: 0.6 if k < 3 else 0.0,
    "entropy": lambda k: [0.38, 0.2, 0.06][k] if k < 3 else 0.02,
    "success": lambda k: 0.06 if k < 2 else 0.0,
}


def test_a_policy_without_entropy_signal_and_success_has_collapsed_after_ten_iterations():
    assert not has_collapsed(rows(12, **GONE))
    assert has_collapsed(rows(13, **GONE))
    assert has_collapsed(rows(13, **{**GONE, "groups_with_signal": lambda k: 0.3 if k in (0, 1, 7) else 0.0}))
    # all left out
    assert has_collapsed(rows(13, **{**GONE, "entropy": lambda k: [0.38, 0.02][k] if k < 2 else None}))


@pytest.mark.parametrize(
    "change",
    [
        {"success": lambda k: 1.0 if k else 0.1},  # solved: nothing is left to learn from
        {"success": lambda k: 0.06, "heldout_success": 1.0},
        {"groups_with_signal": 0.2},
        {"entropy": 0.3},  # a hard task, at which the policy keeps trying
        {"success": 0.0},  # an env that reports no success may have been solved
    ],
)
def test_a_run_that_may_still_learn_or_has_solved_its_task_has_not_collapsed(change):
    assert not has_collapsed(rows(40, **{**GONE, **change}))


def test_estimators_that_compare_across_groups_do_not_collapse_by_equal_groups():
    assert has_collapsed(rows(13, **GONE), {"algorithm": {"adv_estimator": "rloo"}})
    assert not has_collapsed(rows(13, **GONE), {"algorithm": {"adv_estimator": "reinforce"}})
    assert not has_collapsed(rows(13, **GONE), {"algorithm": {"adv_estimator": "gae"}})
    assert not has_collapsed(
        rows(13, **GONE), {"agent_proxy": {"reward_normalization": {"grouping": "batch"}}}
    )


def test_held_out_success_that_stands_still_is_told_and_worse_where_the_run_waits_for_more():
    told = rows(50, **{**GOOD, "success": lambda k: 0.8 + k / 500, "entropy": 0.5})
    for at in range(0, 50, 10):
        told[at]["heldout_success"] = 0.95
    [found] = advise(told, run="runs/a")
    assert (found.level, found.title) == ("note", "Held-out success stands still")
    assert "in each of the last 5 evaluations" in found.text
    assert "shoal show runs/a --worst" in found.text
    [waits] = advise(told, {"trainer": {"stop_at_success": 1.0}})
    assert waits.level == "bad"
    assert titles(told[:40]) == []


def test_groups_without_different_rewards_are_no_trouble_where_episodes_teach_alone():
    alone = {**GOOD, "groups_with_signal": 0.0}
    assert titles(rows(**alone), {"algorithm": {"adv_estimator": "gae"}}) == []
    assert titles(rows(**alone), {"algorithm": {"adv_estimator": "reinforce_pp"}}) == []
    across = {"agent_proxy": {"reward_normalization": {"grouping": "inductive"}}}
    assert titles(rows(**alone), across) == []
    assert titles(rows(**alone), {"algorithm": {"adv_estimator": "rloo"}}) == ["Groups have equal rewards"]
    # an estimator of the user's own, known here or not
    mine, grouped = (
        {"algorithm": {"adv_estimator": name}} for name in ("test-advice-mine", "test-advice-grouped")
    )
    assert titles(rows(**alone), mine) == []
    advantage("test-advice-mine", replace=True)(lambda played: played.episode_returns)
    advantage("test-advice-grouped", replace=True, grouped=True)(lambda played: played.episode_returns)
    assert titles(rows(**alone), mine) == []
    assert titles(rows(**alone), grouped) == ["Groups have equal rewards"]


def test_a_run_that_mostly_had_no_groups_to_learn_from_is_told_until_it_succeeds():
    now_and_then = {**GOOD, "groups_with_signal": lambda k: 0.5 if k % 3 == 2 else 0.0, "success": 0.1}
    [found] = advise(rows(12, **now_and_then))
    assert (found.level, found.title) == ("bad", "Groups have equal rewards")
    assert "In 8 of 12 iterations all members of each group got the same reward" in found.text
    assert titles(rows(12, **{**now_and_then, "success": 0.9})) == []


def test_groups_that_differ_by_the_format_alone_still_teach_where_no_filter_leaves_them_out():
    shaped = {**GOOD, "groups_with_signal": 0.0, "groups_shaping_only": 0.5}
    assert titles(rows(**shaped)) == []
    assert titles(rows(**shaped, groups_trained=0.0)) == ["Groups have equal rewards"]


def test_a_task_that_is_never_solved_is_told_unless_the_reward_rises():
    dead = {**GOOD, "success": 0.0, "heldout_success": 0.0, "reward": -1.0}
    assert titles(rows(9, **dead)) == []
    assert titles(rows(10, **dead)) == ["Nothing is ever solved"]
    assert titles(rows(10, **{**dead, "reward": lambda k: k / 10})) == []


def test_a_reward_that_rises_while_success_falls_is_told():
    falls = {**GOOD, "success": lambda k: 0.1 if k < 5 else 0.01, "reward": lambda k: k / 10}
    assert titles(rows(10, **falls)) == ["The reward rises while success falls"]
    assert titles(rows(10, **{**falls, "success": 0.1})) == []
    assert titles(rows(10, **{**falls, "reward": lambda k: -k / 10})) == []


# --- answers without a valid action
DEAD = {**GOOD, "valid_actions": 0.02, "groups_with_signal": 0.0, "grad_norm": 0.0, "success": 0.0}
SEEN = {"first": "{observation}", "later": "{observation}"}
NAMED = {"first": "{observation} {actions}", "later": "{observation} {actions}"}
ALLOWED = ("up", "down")


def test_a_run_whose_answers_are_invalid_gets_that_one_cause_and_one_of_the_answers():
    [found] = advise(rows(**DEAD), {}, Rejected("go up!\n", "stop", ALLOWED))
    assert (
        "2% of the answers held a valid action. The model wrote 'go up!\\n'; allowed: up, down." in found.text
    )


def test_an_answer_is_shortened_and_commands_no_terminal():
    [found] = advise(rows(**DEAD), {}, Rejected("\x1b[2J\u202e" + 500 * "x", "stop", ALLOWED))
    assert "'\\x1b[2J\\u202exxx" in found.text
    assert found.text.isprintable()
    assert len(found.text) < 400


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"agent_proxy": {"prompt": SEEN}}, "put {actions} into agent_proxy.prompt.first"),
        ({"agent_proxy": {"prompt": NAMED}, "warmup": {"steps": 0}}, "set warmup.steps=20"),
        (
            {"agent_proxy": {"prompt": SEEN}, "engine": {"name": "tiny"}, "warmup": {"steps": 9}},
            "raise warmup.steps, which is 9",
        ),
        ({"agent_proxy": {"prompt": NAMED}, "warmup": {"steps": 9}}, "Show an answer in the prompt"),
        (
            {"agent_proxy": {"prompt": SEEN}, "custom_envs": {"A": {"prompt": NAMED}}},
            "Show an answer in the prompt",
        ),
    ],
)
def test_the_remedy_for_invalid_answers_follows_from_the_settings(config, remedy):
    [found] = advise(rows(**DEAD), config, Rejected("x", "stop", ALLOWED))
    assert remedy in found.text


def test_free_text_has_no_words_to_name():
    [found] = advise(rows(**DEAD), {"agent_proxy": {"prompt": SEEN}}, Rejected("x", "stop"))
    assert "{actions}" not in found.text
    assert "takes free text" in found.text


LIMIT = {"turns": 2.0, "response_tokens": 19.5}


@pytest.mark.parametrize("valid", [0.02, 0.6])
def test_answers_at_the_limit_of_tokens_need_a_higher_one_or_with_a_closing_a_lower_one(valid):
    told = rows(**{**DEAD, "groups_with_signal": 0.8, "grad_norm": 1.0, "valid_actions": valid, **LIMIT})
    [raised] = advise(told, {"agent_proxy": {"max_tokens": 10}})
    assert "raise agent_proxy.max_tokens" in raised.text
    [lowered] = advise(told, {"agent_proxy": {"max_tokens": 10, "prompt": {"closing": "</a>"}}})
    assert "Lower agent_proxy.max_tokens" in lowered.text
    assert "raise agent_proxy.max_tokens" not in lowered.text
    tiny = advise(told, {"agent_proxy": {"max_tokens": 10}, "engine": {"name": "tiny"}})
    assert not any("max_tokens" in one.text for one in tiny)


def test_a_limit_of_one_token_before_a_closing_is_not_to_be_lowered():
    told = rows(**{**DEAD, "turns": 2.0, "response_tokens": 2.0})
    [found] = advise(told, {"agent_proxy": {"max_tokens": 1, "prompt": {"closing": "</a>"}}})
    assert "max_tokens" not in found.text


def test_one_row_with_few_valid_answers_is_too_little_to_judge_by_but_none_at_all_is_enough():
    assert titles(rows(1, **{**GOOD, "valid_actions": 0.05})) == []
    assert titles(rows(1, **{**GOOD, "valid_actions": 0.0})) == ["Hardly any answer is a valid action"]


def test_answers_that_were_valid_before_are_no_matter_of_the_prompt():
    told = rows(**{**GOOD, "valid_actions": lambda k: 0.95 if k < 4 else 0.0})
    [found] = advise(told, {"agent_proxy": {"prompt": SEEN}}, Rejected("x", "stop", ALLOWED))
    assert "It was 95% before" in found.text
    assert "{actions}" not in found.text


def test_a_prompt_without_the_observation_is_the_cause_of_the_rest():
    config = {"agent_proxy": {"prompt": {"first": "Where now?", "later": "Where now?"}}}
    assert titles(rows(**DEAD), config) == ["The prompt does not show the observation"]
    assert titles(rows(**DEAD), {"agent_proxy": {"prompt": NAMED}}) == ["Hardly any answer is a valid action"]


# --- a collapse
def test_a_collapse_names_the_iteration_of_the_fall_and_the_best_checkpoint():
    told = rows(12, **{**GOOD, "success": lambda k: 0.2 + 0.1 * k if k < 8 else 0.1})
    for at, held_out in ((0, 0.2), (5, 0.8), (10, 0.8)):
        told[at]["heldout_success"] = held_out
    [found] = [one for one in advise(told, run="runs/x") if one.title == "Success collapsed"]
    # the best mean of three is (0.7 + 0.8 + 0.9) / 3
    assert "success fell from 0.80 to 0.10; it was first that low at iteration 8." in found.text
    assert "The best checkpoint is that of iteration 5 (held-out success 0.80)" in found.text
    assert "shoal eval runs/x --checkpoint best, shoal export runs/x OUT --checkpoint best" in found.text


def test_a_collapse_of_held_out_episodes_alone_is_one_too():
    told = rows(12, **{**GOOD, "success": 0.7})
    for at, held_out in ((0, 0.9), (5, 0.9), (10, 0.2)):
        told[at]["heldout_success"] = held_out
    [found] = [one for one in advise(told) if one.title == "Success collapsed"]
    # means of two: 0.9, then (0.9 + 0.2) / 2
    assert "heldout_success fell from 0.90 to 0.55; it was first that low at iteration 10" in found.text
    four = {"es_manager": {"val": {"env_groups": 4, "group_size": 1}}}
    assert "Success collapsed" not in titles(told, four)  # they may fall by chance


def test_of_two_things_to_say_about_one_curve_the_worse_is_said():
    told = rows(40, **{**GOOD, "entropy": 0.5, "success": lambda k: 0.1 + 0.6 * (8 < k < 20)})
    assert titles(told) == ["Success collapsed"]
    assert titles(told[:9] + told[20:]) == ["Nothing has been learned so far"]


def test_one_bad_iteration_is_no_collapse_and_a_run_that_recovered_has_none():
    once = [0.5, 0.6, 0.7, 0.5, 0.7, 0.7, 0.7]
    assert titles(rows(7, **{**GOOD, "success": lambda k: once[k]})) == []
    again = [0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9]
    assert titles(rows(9, **{**GOOD, "success": lambda k: again[k]})) == []


def test_episodes_that_failed_are_told_before_what_may_follow_from_them():
    rows = [
        {"iteration": k, "failed_episodes": 100, "episodes": 200 * k, "valid_actions": 0.1}
        for k in range(1, 9)
    ]
    first, second = advise(rows)[:2]
    assert (first.title, second.title) == ("Episodes failed", "Hardly any answer is a valid action")
