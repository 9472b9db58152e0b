"""Programs as environments: each is a process that asks the model by itself."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from shoal import ParallelRolloutManager
from shoal.core.errors import ConfigError
from shoal.envs.catalogue import make
from shoal.gateway.programs import sessions_of
from shoal.rollout.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.batch import make_samples
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

PROGRAM = Path(__file__).with_name("agent_program.py")


def config(where, *overrides, fault="", **settings):
    """A config of a file of its own, as a user has it."""
    command = ["{python}", str(PROGRAM), *([fault] if fault else [])]
    kind = {"env_type": "program", "env_config": {"command": command, **settings}}
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


def left_behind():
    return [p for p in psutil.process_iter(["cmdline"]) if str(PROGRAM) in " ".join(p.info["cmdline"] or ())]


def test_programs_are_played_in_groups_and_leave_exact_records(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('"walk"\n"run"\n')
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
        assert sum(sample.places >= 0) == trajectory.n_tokens
    tasks = {(t.group, t.turns[0].observation.split()[0]) for t in played}
    assert len(tasks) == 2  # a group has one task
    assert not left_behind()


@pytest.mark.parametrize("n_jobs", [1, 4])
def test_the_same_seed_gives_the_same_record_however_many_play_at_once(tmp_path, n_jobs):
    assert play(config(tmp_path), n_jobs) == play(config(tmp_path), 2)


@pytest.mark.parametrize(
    ("fault", "settings", "status", "why"),
    [
        ("dies", {}, "env_error", "ended with status -9"),
        ("fails", {}, "env_error", "ended with status 1: RuntimeError: the data set is missing"),
        ("hangs", {"timeout": 1.5}, "timeout", r"did not end within 1\.5 s"),
        ("loud", {}, "env_error", "printed more than 1048576 bytes"),
        ("nonsense", {}, "env_error", "the last line must be JSON"),
        ("silent", {}, "env_error", "ended without asking the model"),
        ("", {"max_steps": 2}, "env_error", "HTTP Error 403"),
        pytest.param("memory", {"memory": 512}, "env_error", "MemoryError",
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


def test_programs_need_a_parallel_rollout_and_company_of_their_kind(tmp_path):
    with pytest.raises(ConfigError, match=r"set agent_proxy\.use_parallel_rollout=true"):
        AgentTrainer(
            config(tmp_path, "agent_proxy.use_parallel_rollout=false", f"run_dir={tmp_path / 'run'}")
        )
    lake = "+custom_envs.Lake={env_type: frozen_lake}"
    with pytest.raises(ConfigError, match="plays either programs or envs"):
        play(config(tmp_path, "es_manager.train.env_configs.tags=[Agent,Lake]", lake))
    with pytest.raises(ConfigError, match="ProgramConfig.command: Expected `array`, got 'ls'"):
        make("program", command="ls")


def test_a_training_on_a_program_learns_what_it_pays_and_resumes_equal(tmp_path):
    overrides = [
        "trainer.iterations=3",
        "trainer.save_every=1",
        "algorithm.learning_rate=0.01",
        "trainer.eval_every=9",
    ]

    def train(name, *more):
        with AgentTrainer(config(tmp_path, *overrides, f"run_dir={tmp_path / name}", *more)) as trainer:
            rows = list(trainer.train())
            return rows, [p.detach().clone() for p in trainer.policy.module.parameters()]

    rows, weights = train("whole")
    assert rows[-1]["iteration"] == 3
    assert sum(row.get("gradient_steps", 0) for row in rows) >= 1
    assert (
        max(row.get("logprob_gap_max", 0.0) for row in rows) < 1e-4
    )  # the tokens are those that were sampled
    train("half", "trainer.iterations=2")
    _, resumed = train("half", "resume=true")
    assert all((a == b).all() for a, b in zip(weights, resumed, strict=True))
    assert not left_behind()
