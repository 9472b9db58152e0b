"""Rewards that score groups after they were played: functions, commands and models."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
from tests.rollout.doubles import CounterEnv, FakeServer, HashEngine, config, until

from shoal import envs
from shoal.core.data import decode_trajectory, encode_trajectory
from shoal.core.errors import ConfigError, WorkerError
from shoal.rollout.play import ParallelRolloutManager
from shoal.rollout.rewards.judge import Judge
from shoal.rollout.rewards.scorers import Answers
from shoal.rollout.rewards.settings import reward
from shoal.samplers.sampler import Sampling
from shoal.train.agent.run.metrics import rollout_metrics
from shoal.train.agent.run.playing import collect_with_signal

SAMPLING = Sampling(16, 1.0, ("</action>",))
COMMAND = """\
import json, os, sys, time
given = json.load(sys.stdin)
what = sys.argv[1]
if what == "marks":
    open(sys.argv[2], "a").write("x")
if what == "hangs":
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(600)
if what == "fails":
    sys.exit("the data are missing")
print("loading")
scores = [len(episode["turns"][-1]["response"]) / 100 for episode in given["episodes"]]
print({"nan": "[NaN, NaN]", "text": "very good"}.get(what, json.dumps(scores)))
"""


@pytest.fixture(autouse=True, scope="module")
def _counter():
    envs.register("test_counter", CounterEnv, replace=True)


@pytest.fixture
def server():
    with FakeServer("openai") as made:
        made.say = graded
        yield made


@pytest.fixture
def command(tmp_path):
    (tmp_path / "score.py").write_text(COMMAND)
    return lambda *words, **more: {
        "command": ["{python}", str(tmp_path / "score.py"), *map(str, words)],
        **more,
    }


def graded(prompt):
    """A grade that depends on all of the prompt."""
    return f"<think><score>9</score></think>So so. <score>{sum(map(ord, prompt)) % 101 / 100}</score>"


def model(server, **more):
    policy = {"base_url": f"{server.url}/v1", "model": "m", "patience": 5.0}
    return {"model": policy | more.pop("model", {}), **more}


def letters(episodes):
    """Half of how many letters the last response has."""
    return [len(episode.turns[-1].response) / 2 for episode in episodes]


def play(*rewards, backend="thread", answers=None, iteration=4, **changes):
    with (
        Judge(rewards, answers) as judge,
        ParallelRolloutManager(config(**changes), HashEngine(), backend=backend, judge=judge) as manager,
    ):
        return manager.collect(iteration)


@pytest.fixture(scope="module")
def calm(_counter):
    with ParallelRolloutManager(config(), HashEngine(), backend="serial") as manager:
        return manager.collect(4)


def without_scores(played):
    return [episode.as_played for episode in played]


def test_the_reward_is_the_weighted_sum_of_the_list_and_what_the_env_paid_is_kept(calm, server, command):
    judge = model(server, weight=0.5, prompt="How good is {answer} to {question}?")
    played = play({"name": "env", "weight": 2.0}, letters, command("", weight=-1.0), judge)
    assert without_scores(played) == calm
    for before, after in zip(calm, played, strict=True):
        assert [score.name for score in after.scores] == ["env", "letters", "program", "judge"]
        last, question = before.turns[-1].response, before.turns[0].observation
        prompt = f"How good is {last} to {question}?"
        judged = sum(map(ord, prompt)) % 101 / 100
        extra = len(last) / 2 - len(last) / 100 + 0.5 * judged
        paid = [2.0 * turn.reward for turn in before.turns]
        assert [turn.reward for turn in after.turns[:-1]] == paid[:-1]
        assert after.turns[-1].reward == pytest.approx(paid[-1] + extra)
        assert after.scores[0].value == before.reward
        assert (after.scores[3].prompt, after.scores[3].answer) == (prompt, graded(prompt))
        assert decode_trajectory(encode_trajectory(after)) == after
    alone = play({"function": "tests.rollout.rewards.test_judge:letters"})
    assert [episode.reward for episode in alone] == [len(t.turns[-1].response) / 2 for t in calm]


@pytest.mark.parametrize(("backend", "n_jobs"), [("serial", 1), ("process", 2)])
def test_scores_are_equal_on_every_backend(server, command, backend, n_jobs):
    rewards = letters, command(""), model(server)
    assert play(*rewards, backend=backend, n_jobs=n_jobs) == play(*rewards)


def test_the_default_prompt_shows_the_whole_episode(server):
    (episode, *_) = play(model(server, model={"lowest": -1.0, "highest": 2.5}))
    prompt = episode.scores[0].prompt
    for turn in episode.turns:
        assert turn.observation in prompt
        assert turn.response in prompt
    assert "from -1 (useless) to 2.5 (perfect)" in prompt
    assert "{" not in prompt


def test_dynamic_sampling_compares_the_judged_reward():
    @reward("by_group", replace=True)
    def by_group(episodes):
        """Members differ in every other group alone."""
        return [float(i * (episode.group % 2)) for i, episode in enumerate(episodes)]

    with (
        Judge(["by_group"]) as judge,
        ParallelRolloutManager(config(), HashEngine(), backend="thread", judge=judge) as manager,
    ):
        played, kept, report = collect_with_signal(manager, 0, SAMPLING, max_batches=3)
    assert {episode.group for episode in kept} == {1, 3, 5, 7, 9, 11, 13, 15}
    assert (report.with_signal, report.batches, len(played)) == (8, 2, 32)


def test_rewards_of_the_settings_are_used_by_a_manager_and_kept_beside_its_journal(server, tmp_path):
    from shoal.rollout.journal import Journal

    settings = {**config(), "rewards": [model(server)]}

    def collect():
        journal = Journal(tmp_path / "unfinished.jsonl", {})
        with ParallelRolloutManager(settings, HashEngine(), backend="thread", journal=journal) as manager:
            return manager.collect(4)

    first, asked = collect(), len(server.seen)
    server.shutdown()
    assert collect() == first
    assert len(server.seen) == asked


# --- faults
def raises(episodes):
    if episodes[0].group == 1:
        raise KeyError("garden")
    return [1.0] * len(episodes)


def returns(value):
    def bad(episodes):
        return value(episodes) if episodes[0].group == 1 else [1.0] * len(episodes)

    return bad


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raises, "reward 'raises': KeyError: 'garden' (test_judge.py:"),
        (returns(lambda e: sys.exit(3)), "reward 'bad': SystemExit: 3"),
        (returns(lambda e: [float("nan")] * len(e)), "reward 'bad': it must give finite numbers, got nan"),
        (
            returns(lambda e: [1.0]),
            "reward 'bad': it must give a list of 2 numbers (or None), one an episode, got [1.0]",
        ),
        (returns(lambda e: "12"), "it must give a list of 2 numbers (or None), one an episode, got '12'"),
        (returns(lambda e: [10**400] * len(e)), "it must give finite numbers"),
        (returns(lambda e: [1e39] * len(e)), "must sum to at most 3.4e+38"),
    ],
)
def test_a_function_that_misbehaves_costs_its_episodes_and_never_scores_0(calm, function, why):
    played = play("env", function)
    for before, after in zip(calm, played, strict=True):
        if after.group == 1:
            assert after.status == "reward_error"
            assert why in after.error
        else:
            assert after.status == "ok"
            assert after.reward == pytest.approx(before.reward + 1.0)
    assert without_scores(played) == calm


def test_one_member_without_a_number_is_left_out_alone():
    played = play(returns(lambda e: [0.5, float("inf")]))
    assert [episode.status for episode in played if episode.group == 1] == ["ok", "reward_error"]
    assert sum(episode.status == "ok" for episode in played) == len(played) - 1


def test_a_reward_that_abstains_is_left_out_of_the_sum_and_of_its_mean(calm, tmp_path):
    """None for a task that is not its own; where all abstain, the episode has no reward."""

    def of_group_1(episodes):
        return [2.0 if episode.group == 1 else None for episode in episodes]

    def of_others(episodes):
        return [None if episode.group == 1 else 3.0 for episode in episodes]

    played = play("env", of_group_1, of_others)
    for before, after in zip(calm, played, strict=True):
        assert after.status == "ok"
        assert after.reward == pytest.approx(before.reward + (2.0 if after.group == 1 else 3.0))
    n = sum(episode.group == 1 for episode in played)
    row = rollout_metrics(played)
    assert (row["score/of_group_1"], row["score/of_others"]) == (2.0, 3.0)
    assert row["score_abstained/of_group_1"] == len(played) - n
    assert row["score_abstained/of_others"] == n
    assert row["failed_episodes"] == 0
    alone = play(of_group_1)
    for episode in alone:
        assert episode.status == ("ok" if episode.group == 1 else "reward_error")
    assert "all rewards abstained" in next(e.error for e in alone if e.group == 0)
    assert rollout_metrics(alone)["failed/reward_error"] == len(played) - n


def test_a_command_may_abstain_too(tmp_path, calm):
    (tmp_path / "null.py").write_text("print('[null, null]')")
    played = play("env", {"command": ["{python}", str(tmp_path / "null.py")], "name": "null"}, groups=1)
    assert [episode.status for episode in played] == ["ok", "ok"]


def test_the_form_of_answers_is_a_reward_paid_in_the_turn_that_earned_it(calm):
    def answered(valid):
        turns = tuple(
            replace(turn, action_is_valid=ok) for turn, ok in zip(calm[0].turns, valid, strict=False)
        )
        return replace(calm[0], turns=turns)

    group = [answered([True] * 9), answered([False] * 9), answered([False, *[True] * 8])]
    with Judge(["env", {"name": "format", "weight": 0.25}]) as judge:
        judged = judge.judge(group).result()
    for before, after in zip(group, judged, strict=True):
        expected = [turn.reward - 0.25 * (not turn.action_is_valid) for turn in before.turns]
        assert [turn.reward for turn in after.turns] == pytest.approx(expected)
        assert after.scores[1].value == -sum(not turn.action_is_valid for turn in before.turns)
    assert len({episode.reward for episode in judged}) > 1


def test_a_function_that_hangs_is_left_behind():
    def sleeps(episodes):
        if episodes[0].group == 1:
            time.sleep(20)
        return [1.0] * len(episodes)

    reward("sleeps", replace=True)(sleeps)
    played = play({"name": "sleeps", "timeout": 1.0}, groups=2)
    assert [episode.status for episode in played] == ["ok", "ok", "reward_error", "reward_error"]
    assert "did not return within 1 s (timeout)" in played[-1].error


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("fails", "the command exited with code 1: the data are missing"),
        ("nan", "it must give finite numbers, got nan"),
        ("text", "it must give a list of 2 numbers (or None), one an episode, got 'very good'"),
    ],
)
def test_a_command_that_misbehaves_costs_its_episodes(command, what, why):
    for episode in play(command(what, name="mine"), groups=1):
        assert (episode.status, episode.error) == ("reward_error", f"reward 'mine': {why}")


def test_a_command_that_hangs_is_ended_with_all_that_it_started(command, tmp_path):
    played = play(command("hangs", tmp_path / "pid", timeout=3.0, retries=0), groups=1)
    assert "did not end within 3 s (timeout)" in played[0].error
    ends(int((tmp_path / "pid").read_text()))


JUDGING = """
import json, sys
from shoal.core.data import decode_trajectory
from shoal.rollout.rewards.judge import Judge
with Judge([json.loads(sys.argv[1])]) as judge:
    judge.judge([decode_trajectory(sys.stdin.buffer.read())]).result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_command_outlives_its_run(calm, command, tmp_path, number):
    mark, hanging = tmp_path / "pid", command("hangs", tmp_path / "pid")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    words = [sys.executable, "-c", JUDGING, json.dumps(hanging)]
    run = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        run.stdin.write(encode_trajectory(calm[0]))
        run.stdin.close()
        pid = int(until(lambda: mark.exists() and mark.read_text()))
        run.send_signal(number)
        assert run.wait(60)
        ends(pid)
    finally:
        run.kill()


def ends(pid):
    """A process that was killed is gone in a moment; until its status is read it may be a zombie."""

    def gone():
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(gone)


def test_a_command_runs_once_for_a_group_that_was_scored(command, tmp_path):
    marks, first = tmp_path / "marks", None
    for _ in range(2):
        played = play(command("marks", marks), answers=Answers(tmp_path), groups=2)
        first = first or played
        assert played == first
    assert marks.read_text() == "xx"


def test_429_and_5xx_cost_time_and_no_episode(server):
    server.faults = [429, 503, 500, "drop", 502, 429]
    played = play(model(server, model={"patience": 60.0}), groups=2)
    assert [episode.status for episode in played] == ["ok"] * 4
    assert not server.faults
    assert played == play(model(server), groups=2)


class Proxy(FakeServer):
    """A proxy that knows one server, as a company's knows those outside."""

    def reply_to(self, path, body):
        assert path == "http://judge.example/v1/chat/completions"
        return super().reply_to("/v1/chat/completions", body)


def test_a_judge_outside_is_asked_through_the_proxy_of_the_environment_and_one_here_is_not(
    server, monkeypatch
):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Proxy("openai") as proxy:
        proxy.say = graded
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url)
        outside = play(model(server, model={"base_url": "http://judge.example/v1"}), groups=1)
        assert [episode.status for episode in outside] == ["ok"] * len(outside)
        asked = len(proxy.seen)
        assert play(model(server), groups=1) == outside
        assert len(proxy.seen) == asked > 0


def test_a_judge_that_stays_away_longer_than_its_patience_costs_the_episodes(server):
    server.faults = [503] * 1000
    played = play(model(server, model={"patience": 1.0}, concurrency=1))
    assert [episode.status for episode in played] == ["reward_error"] * 16
    assert "HTTP 503" in "".join(episode.error for episode in played)
    assert "has answered nothing for 1 s" in "".join(episode.error for episode in played)
    assert len(server.seen) < 16  # those that waited behind the first ones do not wait again
    assert all(episode.scores[0].value is None and episode.scores[0].prompt for episode in played)


def test_a_refusal_is_not_asked_again(server):
    server.faults = [404] * 2
    played = play(model(server), groups=1)
    assert "refused the request: HTTP 404" in played[0].error
    assert len(server.seen) == 2


def test_an_answer_without_a_score_is_asked_for_again_and_then_left_out(server, tmp_path):
    answers = iter(["No idea.", "<score>0.5</score>"])
    server.say = lambda said: next(answers)
    one = model(server, concurrency=1)
    assert [episode.reward for episode in play(one, groups=1, members=1)] == [0.5]
    server.say = lambda said: "<score>7</score> of 10"
    for _ in range(2):  # of the second time the answers are known
        (episode,) = play(one, groups=1, members=1, answers=Answers(tmp_path))
        assert "from 0 to 1, got '<score>7</score> of 10'" in episode.error
        assert episode.scores[0].answer == "<score>7</score> of 10"
    assert len(server.seen) == 4
    server.say = lambda said: ["no text"]
    (episode,) = play(one, groups=1, members=1)
    assert "is no chat completion" in episode.error


def test_equal_prompts_have_one_answer_and_requests_are_limited(server):
    server.pause, server.say = 0.05, lambda said: f"{len(server.seen) / 100}"  # no two answers are alike
    played = play(model(server, prompt="How is it?", concurrency=3))
    assert len(server.seen) == 1
    assert len({episode.reward for episode in played}) == 1
    play(model(server, concurrency=3))
    assert server.most_busy == 3


def test_episodes_are_judged_while_others_are_played():
    judged = threading.Event()

    class Waiting(HashEngine):
        """Answers the last group's second turn after the first group was judged."""

        def __init__(self):
            super().__init__()
            self.in_time = True

        def generate(self, requests):
            if any(request.key.path[1] == 7 and request.key.path[3] == 1 for request in requests):
                self.in_time = judged.wait(30) and self.in_time
            return super().generate(requests)

    def scores(episodes):
        if episodes[0].group == 0:
            judged.set()
        return [1.0] * len(episodes)

    engine = Waiting()
    settings = config(n_jobs=1, parallel={"episodes_at_once": 1})
    with (
        Judge([scores]) as judge,
        ParallelRolloutManager(settings, engine, backend="thread", judge=judge) as manager,
    ):
        manager.collect(0)
    assert engine.in_time
    assert judged.is_set()


def test_a_manager_that_is_closed_ends_the_rollout_that_waits_for_its_judge():
    waits, go_on = threading.Event(), threading.Event()

    @reward("waits", replace=True)
    def waiting(episodes):
        waits.set()
        go_on.wait(30)
        return [1.0] * len(episodes)

    settings = {**config(), "rewards": [{"name": "waits"}]}
    manager = ParallelRolloutManager(settings, HashEngine(), backend="thread")
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(manager.collect, 0)
        assert waits.wait(30)
        manager.close()
        with pytest.raises(WorkerError, match="the rollout was ended"):
            playing.result(30)
        go_on.set()


# --- settings
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "exakt"}, "no reward named 'exakt'"),
        ({"name": "lettres"}, "Did you mean 'letters'"),
        (
            {"name": "env", "wieght": 1.0},
            r"unknown key 'rewards\.0\.wieght'\. Did you mean 'rewards\.0\.weight'",
        ),
        (
            {"model": {"base_url": "http://127.0.0.1:1/v1", "modle": "m"}},
            r"Did you mean 'rewards\.0\.model\.model'",
        ),
        ({"model": {"model": "m"}}, r"rewards\.0\.model\.base_url is missing"),
        ({"model": {"model": "m", "base_url": "127.0.0.1"}}, "must begin with http"),
        (
            {"command": ["ls"], "function": "a:b"},
            "one of function, command and model, got function and command",
        ),
        ({"name": "env", "prompt": "{answer}"}, "prompt is what a model is asked"),
        ({"model": {"base_url": "http://a", "model": "m"}, "prompt": "{anwser}"}, "Did you mean 'answer'"),
        ({"function": "no_such_module:score"}, "cannot import a reward's function"),
        ({"function": "json:nothing"}, "'json:nothing': its module holds nothing of that name"),
        ({"function": "math:pi"}, "must be a function, got 3.14"),
        ({"name": "env", "concurrency": 0}, "concurrency must be at least 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given, why):
    reward("letters", replace=True)(letters)
    with pytest.raises(ConfigError, match=why):
        Judge([given])


def test_the_key_of_a_server_comes_from_the_environment(server, monkeypatch):
    one = model(server, model={"api_key_env": "SHOAL_TEST_KEY"})
    with pytest.raises(ConfigError, match="set SHOAL_TEST_KEY"):
        Judge([one])
    monkeypatch.setenv("SHOAL_TEST_KEY", "secret")
    (episode,) = play(one, groups=1, members=1)
    assert server.seen[0][2]["Authorization"] == "Bearer secret"
    assert b"secret" not in encode_trajectory(episode)


def test_two_rewards_of_one_name_and_a_name_that_is_taken_are_refused():
    with pytest.raises(ConfigError, match="two of them are called 'env'"):
        Judge(["env", {"name": "env"}])
    reward("taken", replace=True)(letters)
    with pytest.raises(ValueError, match="registered already"):
        reward("taken")(raises)


def test_answers_survive_a_line_that_was_cut_off(tmp_path):
    Answers(tmp_path).add("a", "1")
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('["b", "tw')
    Answers(tmp_path, rank=1).add("c", "3")
    Answers(tmp_path).add("d", "4")
    known = Answers(tmp_path)
    assert [known.get(key) for key in "abcd"] == ["1", None, "3", "4"]
