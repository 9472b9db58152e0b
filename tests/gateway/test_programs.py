"""Programs as environments: each is a process that asks the model by itself."""

import json
import os
import sys
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from shoal import ParallelRolloutManager
from shoal.cli.main import main
from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError
from shoal.envs.catalogue import make
from shoal.envs.check import quick_check
from shoal.gateway.programs import sessions_of
from shoal.rollout.rewards.judge import Judge
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.algorithms.advantages import turn_advantages
from shoal.train.agent.batch.samples import make_samples
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.records.replay import Replay, find_episode

PROGRAM = Path(__file__).with_name("agent_program.py")


def config(where, *overrides, fault="", function="", **settings):
    """A config of a file of its own, as a user has it."""
    command = {"command": ["{python}", str(PROGRAM), *([fault] if fault else [])]}
    called = {"function": f"agent_functions:{function}", "folder": str(PROGRAM.parent)}
    kind = {"env_type": "program", "env_config": {**(called if function else command), **settings}}
    groups = {"env_groups": 2, "env_configs": {"tags": ["Agent"]}}
    values = {
        "defaults": ["base", "_self_"],
        "custom_envs": {"FrozenLakeEnv": None, "Agent": kind},
        "es_manager": {"train": {**groups, "group_size": 3}, "val": groups},
        "agent_proxy": {"use_parallel_rollout": True, "max_tokens": 6},
        "warmup": {"steps": 0},
        "trainer": {"tensorboard": False},
    }
    (where / "programs.yaml").write_text(json.dumps(values))
    return compose_config("programs", list(overrides), where)


def play(settings, n_jobs=2):
    engine = TinyEngine([], TinyShape(32, 1, 2, 1000), seed=1)
    with ParallelRolloutManager(settings, engine, n_jobs, sessions=sessions_of) as manager:
        return manager.collect(0)


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    monkeypatch.setenv("SHOAL_TEST_MARK", uuid.uuid4().hex)


def left_behind():
    """The programs of this test that live."""
    mark = os.environ["SHOAL_TEST_MARK"]
    return [
        p
        for p in psutil.process_iter(["cmdline", "environ"])
        if str(PROGRAM) in " ".join(p.info["cmdline"] or ())
        and (p.info["environ"] or {}).get("SHOAL_TEST_MARK") == mark
    ]


def test_programs_are_played_in_groups_and_leave_exact_records(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('\ufeff"walk"\n"run"\n')
    played = play(config(tmp_path, tasks="tasks.jsonl", folder=str(tmp_path)))
    assert [(t.group, t.member, t.status) for t in played] == [
        (g, m, "ok") for g in range(2) for m in range(3)
    ]
    for trajectory in played:
        assert [call.parent for call in trajectory.calls] == [None, 0, 1]
        assert [turn.reward for turn in trajectory.turns[:-1]] == [0.0, 0.0]
        said = sum("a" in turn.response for turn in trajectory.turns)
        assert trajectory.reward == pytest.approx(said / 3)
        (sample,) = make_samples(trajectory)  # one chain is one sample
        assert sum(sample.trained >= 0) == trajectory.n_tokens
    tasks = {(t.group, t.turns[0].observation.split()[0]) for t in played}
    assert len(tasks) == 2  # a group has one task
    assert not left_behind()


@pytest.mark.parametrize("function", ["", "play", "play_async"])
def test_the_same_seed_gives_the_same_record_however_many_play_at_once(tmp_path, function):
    settings = config(tmp_path, function=function, parallel=function == "play_async")
    played = play(settings, 1)
    assert played == play(settings, 4)
    assert all(trajectory.status == "ok" for trajectory in played)
    assert len({trajectory.reward for trajectory in played}) > 1
    if function != "play_async":
        assert played == play(config(tmp_path), 1)  # a command that plays likewise


@pytest.mark.parametrize(
    ("fault", "settings", "status", "why"),
    [
        ("dies", {}, "env_error", "ended with status -9"),
        ("hangs", {"timeout": 1.5}, "timeout", r"did not end within 1\.5 s"),
        ("loud", {}, "env_error", "printed more than 1048576 bytes"),
        ("nonsense", {}, "env_error", "the last line must be JSON"),
        pytest.param("memory", {"memory": 512}, "ok", "MemoryError",
                     marks=pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")),
    ],
)  # fmt: skip
def test_a_program_that_misbehaves_fails_its_episode_and_leaves_nothing(
    tmp_path, fault, settings, status, why
):
    played = play(
        config(
            tmp_path,
            "agent_proxy.parallel.env_retries=0",
            "es_manager.train.env_groups=1",
            fault=fault,
            **settings,
        )
    )
    for trajectory in played:
        assert trajectory.status == status
        assert why.replace("\\", "") in trajectory.error
    assert not left_behind()


def test_an_episode_ends_with_its_program_though_others_keep_its_output_open(tmp_path):
    settings = config(tmp_path, "es_manager.train.env_groups=1", fault="leaves", timeout=8.0)
    assert [trajectory.status for trajectory in play(settings, 3)] == ["ok"] * 3


@pytest.mark.parametrize("function", ["", "play"])
def test_a_program_finds_the_model_though_a_proxy_is_set(tmp_path, monkeypatch, function):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    played = play(config(tmp_path, "es_manager.train.env_groups=1", function=function))
    assert [trajectory.status for trajectory in played] == ["ok"] * 3


def test_a_worker_process_plays_many_episodes_of_a_function_and_ends_with_the_rollout(tmp_path):
    engine = TinyEngine([], TinyShape(32, 1, 2, 1000), seed=1)
    settings = config(tmp_path, function="counts")
    with ParallelRolloutManager(settings, engine, 2, sessions=sessions_of) as manager:
        rewards = [[t.reward for t in manager.collect(iteration)] for iteration in range(3)]
        pids = manager.worker_pids()
        assert len(pids) == 2
        assert sum(map(len, rewards)) == 18
        assert max(map(max, rewards)) >= 9  # two processes have played all of them
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("function", "status", "why"),
    [
        ("dies", "env_error", "the process of the function exited with code 4"),
        ("hangs", "timeout", "did not return within 4 s"),
        ("nonsense", "env_error", "the result must be a reward"),
        ("missing", "env_error", "its module holds nothing of that name"),
        ("no_function", "env_error", "'agent_functions:no_function' must be a function"),
        (
            "ask",
            "env_error",
            "missing a required argument: 'messages'; it may take task, base_url, variables",
        ),
    ],
)
def test_a_function_that_misbehaves_fails_its_episode_and_its_process_ends(tmp_path, function, status, why):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    overrides = "agent_proxy.parallel.env_retries=0", "es_manager.train.env_groups=1"
    played = play(config(tmp_path, *overrides, function=function, timeout=4.0))
    for trajectory in played:
        assert trajectory.status == status
        assert why in trajectory.error
    after = {process.pid: process for process in psutil.Process().children(recursive=True)}
    assert not [
        p for pid, p in after.items() if pid not in before and "multiprocessing" not in str(p.cmdline())
    ]


def test_calls_stand_in_the_order_in_which_they_were_asked_unless_they_were_at_once(tmp_path, caplog):
    """Four questions of which none goes on from another; only a program that asks them at once is warned about."""
    words = ["f", "b", "e", "a"]
    for function in ("asks_in_turn", "asks_at_once"):
        for trajectory in play(config(tmp_path, function=function)):
            asked = [turn.observation for turn in trajectory.turns]
            assert [turn.reward for turn in trajectory.turns] == [0.0] * 3 + [1.0]
            assert sorted(asked) == sorted(words)
            assert (asked == words) == (function == "asks_in_turn")
        assert ("set parallel: true" in caplog.text) == (function == "asks_at_once")
    caplog.clear()
    play(config(tmp_path, function="asks_at_once", parallel=True))
    assert "set parallel: true" not in caplog.text


def test_only_sub_agents_that_ask_the_same_depend_on_which_of_them_asks_first(tmp_path):
    def played(function, first):
        (tmp_path / "tasks.jsonl").write_text(f'"{first}"\n')
        tasks = str(tmp_path / "tasks.jsonl")
        episodes = play(config(tmp_path, function=function, tasks=tasks, parallel=True), 1)
        assert all(episode.status == "ok" and len(episode.calls) == 4 for episode in episodes)
        return episodes

    def answers(episode):
        """What was said to each prompt of one message, and how often."""
        roots = [n for n, call in enumerate(episode.calls) if call.parent is None]
        return Counter((episode.turns[n].observation, episode.turns[n].response) for n in roots)

    assert played("named", "AB") == played("named", "BA")
    one, other = played("alike", "AB"), played("alike", "BA")
    assert list(map(answers, one)) == list(map(answers, other))
    assert one != other  # which of them got which, and went on from it, is decided by who came first


def test_steps_of_a_group_are_compared_where_their_new_messages_are_equal(tmp_path):
    """GiGPO's step part, by hand: what a turn brought against the mean of the turns with the same new messages."""
    overrides = "es_manager.train.group_size=8", "algorithm.adv_estimator=gigpo", "algorithm.gamma=0.9"
    settings = config(tmp_path, *overrides, "agent_proxy.reward_normalization.method=mean", function="forks")
    played = play(settings)
    roots = ["system: Walk.\n\nuser: begin", "system: Swim.\n\nuser: begin"]
    for trajectory in played:
        assert [call.parent is None for call in trajectory.calls] == [True, False, True, False]
        assert [turn.anchor for turn in trajectory.turns[::2]] == roots  # the same question to two agents
        assert {turn.anchor for turn in trajectory.turns[1::2]} <= {"left", "right"}
    found = turn_advantages(played, settings.algorithm, settings.agent_proxy)
    for trajectory, advantages in zip(played, found, strict=True):
        group = [t for t in played if t.group == trajectory.group]
        whole = trajectory.reward - np.mean([t.reward for t in group])
        for place, turn in enumerate(trajectory.turns):
            alike = [
                t.reward * 0.9 ** (3 - n)
                for t in group
                for n, o in enumerate(t.turns)
                if o.anchor == turn.anchor
            ]
            own = trajectory.reward * 0.9 ** (3 - place) - np.mean(alike)
            assert advantages[place] == pytest.approx(whole + own)
    assert len({turn.anchor for t in played for turn in t.turns}) == 4
    assert any(abs(advantages).max() > 0.1 for advantages in found)


def test_an_episode_whose_function_died_is_played_again_as_if_it_had_not(tmp_path, monkeypatch):
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    settings = config(tmp_path, "es_manager.train.group_size=1", function="fails_once")
    first = play(settings)
    assert [(t.status, t.reward) for t in first] == [("ok", 1.0)] * 2
    assert len(list((tmp_path / "marks").iterdir())) == 2
    assert play(settings) == first


def test_calls_that_come_after_the_end_of_an_episode_are_refused_and_in_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("MARKS", str(tmp_path))
    later = play(config(tmp_path, function="asks_late"), 1)[1:]
    for trajectory in later:
        assert trajectory.status == "ok"
        assert [turn.observation for turn in trajectory.turns] == ["go"]
    assert (tmp_path / "late").read_text() == "409"


def test_rewards_get_the_task_of_a_program(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"question": "walk"}\n')
    seen = []

    def graded(episodes, task):
        seen.append(task)
        return [float(str(task) in episode.turns[0].observation) for episode in episodes]

    engine = TinyEngine([], TinyShape(32, 1, 2, 1000), seed=1)
    settings = config(tmp_path, function="play", tasks=str(tmp_path / "tasks.jsonl"))
    with (
        Judge([graded]) as judge,
        ParallelRolloutManager(settings, engine, 2, sessions=sessions_of, judge=judge) as manager,
    ):
        assert [episode.reward for episode in manager.collect(0)] == [1.0] * 6
    assert seen == [{"question": "walk"}] * 2


def test_programs_need_a_parallel_rollout_and_company_of_their_kind(tmp_path):
    with pytest.raises(ConfigError, match=r"set agent_proxy\.use_parallel_rollout=true"):
        AgentTrainer(
            config(tmp_path, "agent_proxy.use_parallel_rollout=false", f"run_dir={tmp_path / 'run'}")
        )
    lake = "+custom_envs.Lake={env_type: frozen_lake}"
    with pytest.raises(ConfigError, match="plays either programs or envs"):
        play(config(tmp_path, "es_manager.train.env_configs.tags=[Agent,Lake]", lake))
    with pytest.raises(ConfigError, match=r"leave agent_proxy\.tools out"):
        play(config(tmp_path, "+agent_proxy.tools=[agent_functions:play]"))
    with pytest.raises(ConfigError, match="ProgramConfig.command: Expected `array`, got 'ls'"):
        make("program", command="ls")
    with pytest.raises(ConfigError, match="give either function"):
        make("program", command=["ls"], function="a:b")
    for function in ("agent.py", "agent.py:play"):
        with pytest.raises(ConfigError, match="function must be such as"):
            make("program", function=function)


def test_the_check_before_a_training_reads_the_tasks_of_a_program(tmp_path):
    quick_check("program", {"function": "a:b"})
    with pytest.raises(ConfigError, match="tasks: .* must hold a JSON value in each line"):
        quick_check("program", {"function": "a:b", "tasks": str(tmp_path / "none.jsonl")})


def test_programs_that_are_played_ahead_teach_the_same_with_any_number_of_workers(tmp_path):
    """The gateway asks for the weights of the iteration's plan, while newer ones are learned."""
    lag = [
        "trainer.lag=2", "trainer.iterations=4", "trainer.eval_every=2", "algorithm.learning_rate=0.01",
        "trainer.save_trajectories_every=1",
    ]  # fmt: skip

    def train(jobs):
        more = f"agent_proxy.parallel_n_jobs={jobs}", f"run_dir={tmp_path / str(jobs)}"
        with AgentTrainer(config(tmp_path, *lag, *more)) as trainer:
            rows = list(trainer.train())
            return rows, [p.detach().clone() for p in trainer.policy.module.parameters()]

    rows, weights = train(1)
    assert [row.get("lag") for row in rows] == [None, 0, 1, 2, 2]
    assert sum(row.get("gradient_steps", 0) for row in rows) >= 2
    assert all((a == b).all() for a, b in zip(weights, train(3)[1], strict=True))
    for number in (1, 2, 3, 4):
        played = read_trajectories(tmp_path / "3" / "trajectories" / f"train-{number:06d}.jsonl")
        assert {call.weights_version for t in played for call in t.calls} == {max(0, number - 3)}


def test_a_rollout_from_the_command_line_plays_programs(tmp_path):
    config(tmp_path)
    out = tmp_path / "run"
    assert (
        main(["rollout", "--config-dir", str(tmp_path), "--config-name", "programs", "--out", str(out)]) == 0
    )
    played = list(read_trajectories(out / "trajectories" / "rollout.jsonl"))
    assert [trajectory.status for trajectory in played] == ["ok"] * 6


def test_a_training_on_a_program_learns_what_it_pays_and_resumes_equal(tmp_path, capsys):
    overrides = [
        "trainer.iterations=2",
        "trainer.save_every=1",
        "algorithm.learning_rate=0.01",
        "trainer.eval_every=9",
    ]

    def train(name, *more):
        with AgentTrainer(config(tmp_path, *overrides, f"run_dir={tmp_path / name}", *more)) as trainer:
            rows = list(trainer.train())
            return rows, [p.detach().clone() for p in trainer.policy.module.parameters()]

    rows, weights = train("whole")
    assert rows[-1]["iteration"] == 2
    assert (rows[-1]["roots"], rows[-1]["branches"]) == (1.0, 0.0)
    assert sum(row.get("gradient_steps", 0) for row in rows) >= 1
    assert (
        max(row.get("logprob_gap_max", 0.0) for row in rows) < 1e-4
    )  # the tokens are those that were sampled
    train("half", "trainer.iterations=1")
    _, resumed = train("half", "resume=true")
    assert all((a == b).all() for a, b in zip(weights, resumed, strict=True))
    assert not left_behind()
    with Replay(tmp_path / "whole") as replay, pytest.raises(ConfigError, match="was played by a program"):
        replay.play(find_episode(tmp_path / "whole", "train-000001:0"))
    results = []
    for name in ("one", "other"):
        out = tmp_path / name
        assert main(["eval", str(tmp_path / "whole"), "--episodes", "5", "--json", "--out", str(out)]) == 0
        results.append(json.loads(capsys.readouterr().out))
        assert results[-1]["episodes"] == 5
        assert read_trajectories(out / "trajectories" / "eval.jsonl")
    assert results[0]["reward"] == results[1]["reward"]
    assert not left_behind()
