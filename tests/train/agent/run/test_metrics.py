"""The numbers of a run: shares that add up, filters that drop what they should, and a definition of every one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.records import Exchange, trajectory_of

from shoal.core.data import Call, ToolUse, read_advantages, read_trajectories
from shoal.rollout.factory import EnvTag
from shoal.rollout.play import ParallelRolloutManager
from shoal.rollout.report import RolloutReport
from shoal.samplers.sampler import Sampling
from shoal.train.agent.config import AgentConfig, AgentProxy, Algorithm, compose_config
from shoal.train.agent.processes.distributed import Processes
from shoal.train.agent.run.metrics import iteration_times, rollout_metrics, signal_metrics
from shoal.train.agent.run.playing import SharedCollector
from shoal.train.agent.run.records import PANELS, write_curves
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.boards import draw_curves
from shoal.train.ppo.run import write_ppo_curves, write_video

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"
SMALL = [
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=30", "warmup.learning_rate=0.01",
    "agent_proxy.max_turn=5",
    "es_manager.train.env_groups=6", "es_manager.train.group_size=4", "es_manager.val.env_groups=4",
    "algorithm.entropy_coef=0.05", "agent_proxy.format_penalty=0.1", "trainer.iterations=2",
    "trainer.eval_every=2", "trainer.save_trajectories_every=1", "trainer.tensorboard=false",
    "use_parallel_envs=false", "algorithm.filter_groups.enable=false",
]  # fmt: skip


def run(folder, name, *overrides):
    with AgentTrainer(compose_config(name, [*SMALL, f"run_dir={folder}", *overrides])) as trainer:
        return list(trainer.train())


def defined():
    """Metric names of the first column of the page; `<tag>` stands for any."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [
        re.escape(n).replace("<tag>", ".+").replace("<name>", ".+")
        for cell in cells
        for n in re.findall(r"`([^`]+)`", cell)
    ]


RUNS = {
    "group-relative, filtered, with a reference and corrections": (
        "bandit", "algorithm.rollout_filter_ratio=0.5", "algorithm.kl.coef=0.01",
        "algorithm.rollout_correction.method=mask",
    ),
    "critic, on parallel workers": (
        "demo", "algorithm.adv_estimator=gae", "agent_proxy.use_parallel_rollout=true",
        "agent_proxy.parallel.backend=thread",
    ),
    "several envs": ("mixed", "es_manager.train.env_groups=5", "es_manager.val.env_groups=3",
                     "algorithm.filter_groups.enable=false"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_every_number_of_a_run_is_defined_and_its_times_add_up(kind, tmp_path):
    name, *overrides = RUNS[kind]
    rows = run(tmp_path / "run", name, *overrides)
    patterns = defined()
    for key in {key for row in rows for key in row}:
        assert any(re.fullmatch(pattern, key) for pattern in patterns), (
            f"docs/metrics.md does not define {key}"
        )
    assert rows == [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for row in rows[1:]:
        assert row["share_rollout"] + row["share_update"] == pytest.approx(1, abs=2e-4)
        assert 0 < row["engine_busy"] <= 1
        assert row["share_idle"] == pytest.approx(row["share_rollout"] * (1 - row["engine_busy"]), abs=2e-4)
        assert row["update_tokens_per_second"] == pytest.approx(
            row["trained_tokens"] / row["seconds_update"], rel=0.02
        )
        assert row["trained_tokens"] > 0


def test_the_loss_of_the_warm_up_is_that_of_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.train.agent.trainer.warm_up", lambda *_, **__: iter([3.0, 2.0, 1.0]))
    rows = run(tmp_path / "run", "demo", "trainer.iterations=1")
    assert [row.get("warmup_loss") for row in rows] == [1.0, None]


def test_every_curve_is_drawn():
    every = {name: 0.5 for _, lines in PANELS for name, _ in lines}
    _, axes = draw_curves([{"iteration": i, **every} for i in range(3)], PANELS, "iteration", "iteration")
    drawn = [[line.get_label() for line in axis.lines] for axis in axes]
    assert drawn == [[label for _, label in lines] for _, lines in PANELS]


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: write_curves([{"iteration": 1}], path),
        lambda path: write_ppo_curves([{"steps": 1}], path, "PPO"),
        lambda path: write_video(path, [np.zeros((2, 2, 3), np.uint8)]),
    ],
)
def test_a_picture_that_is_broken_off_leaves_the_one_before(draw, tmp_path, monkeypatch):
    def half(self, path, **_):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    path = tmp_path / "picture"
    path.write_bytes(b"whole")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    monkeypatch.setattr("PIL.Image.Image.save", half)
    with pytest.raises(KeyboardInterrupt):
        draw(path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("picture", b"whole")]


def test_where_the_time_went_by_hand():
    row = {"engine_busy": 0.75, "trained_tokens": 301}
    assert iteration_times(row, rollout_seconds=6.0, update_seconds=3.0, tokens=1201) == {
        "seconds_rollout": 6.0,
        "seconds_update": 3.0,
        "tokens_per_second": 200.2,
        "update_tokens_per_second": 100.3,
        "share_rollout": 0.6667,
        "share_update": 0.3333,
        "share_idle": 0.1667,  # a quarter of two thirds
    }
    assert iteration_times({"engine_busy": 1.0}, 1.0, 1.0, 10)["update_tokens_per_second"] == 0.0


def test_the_groups_with_signal_are_those_whose_whole_episodes_earned_differently():
    def episode(group, rewards, valid=True, status="ok"):
        turns = tuple(
            Exchange("", (1,), (2,), (-1.0,), "", None, valid, r, "", finish="length") for r in rewards
        )
        return trajectory_of("e", 0, group, 0, 0, turns, False, True, False, status)

    played = [
        episode(0, [1.0]), episode(0, [0.0]),  # differs
        episode(1, [0.0, 1.0]), episode(1, [0.5]),  # differs undiscounted: 1 and 0.5
        episode(2, [0.0], valid=False), episode(2, [0.0]),  # by its format alone
        episode(3, [0.0]), episode(3, [1.0], status="timeout"),  # what failed says nothing
        episode(4, [0.0], valid=False, status="timeout"),
    ]  # fmt: skip
    for gamma, penalty, signal, shaping in (
        (1.0, 0.1, 0.5, 0.25),
        (0.5, 0.1, 0.25, 0.25),
        (1.0, 0.0, 0.5, 0),
    ):
        config = AgentConfig(
            algorithm=Algorithm(gamma=gamma, overlong_filter=True),
            agent_proxy=AgentProxy(format_penalty=penalty),
        )
        assert signal_metrics(played, played[:4], config) == {
            "groups_with_signal": signal, "groups_shaping_only": shaping, "groups_trained": 2.0,
            "overlong_episodes": 1.0,
        }  # fmt: skip
        # of all that were played, whether or not their groups teach anything
        assert signal_metrics(played, [], config)["overlong_episodes"] == 1.0
    assert signal_metrics([], [], AgentConfig()) == {
        "groups_with_signal": 0.0, "groups_shaping_only": 0.0, "groups_trained": 0.0
    }  # fmt: skip


def test_prompts_of_programs_that_begin_anew_and_branches_are_counted():
    """One conversation; and one answer that three calls go on from, beside a prompt of its own."""
    trees = [(None, 0, 1), (None, 0, 0, 0, None)]
    played = [
        replace(
            trajectory_of("Agent", 0, 0, member, 0, (), True, True, False),
            calls=tuple(Call((1,), parent, (2,), (0.0,)) for parent in tree),
        )
        for member, tree in enumerate(trees)
    ]
    found = signal_metrics(played, [], AgentConfig(custom_envs={"Agent": EnvTag("program")}))
    assert (found["roots"], found["branches"]) == (1.5, 1.0)


def test_the_groups_that_differ_most_are_learned_from_and_the_others_dropped(tmp_path):
    """Rewards are set by hand: in one of six groups one member wins, in one half of them, and so on."""
    wins = {  # of each member, and the best less the mean
        0: [0, 0, 0, 1],  # .75
        1: [0, 0, 1, 1],  # .5
        2: [0, 0, 2, 2],  # 1
        3: [5, 5, 5, 5],  # 0
        4: [0, 1, 1, 1],  # .25
        5: [1, 1, 1, 3],  # 1.5
    }
    scores = [0.75, 0.5, 1.0, 0.0, 0.25, 1.5]

    def by_hand(episodes):
        return [float(wins[episode.group][episode.member]) for episode in episodes]

    plain = ["algorithm.gamma=1", "agent_proxy.format_penalty=0", "trainer.iterations=1"]
    best = ["algorithm.rollout_filter_ratio=0.5", "algorithm.rollout_filter_type=max_mean"]
    config = compose_config("demo", [*SMALL, *plain, *best, f"run_dir={tmp_path / 'run'}"])
    with AgentTrainer(config, rewards=[by_hand]) as trainer:
        _, row = trainer.train()
    assert (row["groups_played"], row["groups_trained"], row["rollout_filter_dropped"]) == (6, 3, 3)
    assert row["rollout_filter_score"] == pytest.approx(np.mean(scores))
    assert row["rollout_filter_score_kept"] == pytest.approx(np.mean([0.75, 1.0, 1.5]))
    # what was dropped is on disk all the same
    played = dict(enumerate(read_trajectories(tmp_path / "run" / "trajectories" / "train-000001.jsonl")))
    taught = read_advantages(tmp_path / "run" / "advantages" / "train-000001.jsonl", played)
    assert len(played) == 24
    assert {played[row].group for row, turns in taught.items() if turns is not None} == {0, 2, 5}


def test_failures_are_counted_by_their_kind():
    whole = trajectory_of("Lake", 0, 0, 0, 1, (), success=True, terminated=True, truncated=False)
    row = rollout_metrics(
        [whole, *(replace(whole, status=status) for status in ("timeout", "env_error", "timeout"))]
    )
    assert row["failed_episodes"] == 3
    assert (row["failed/timeout"], row["failed/env_error"]) == (2, 1)
    assert "failed/engine_error" not in row
    assert row["success"] == 1.0


def test_calls_of_tools_and_their_errors_are_counted_where_there_are_some():
    seen = Exchange("s", (7,), (1,), (-0.1,), "said", "call", True, 0.0, "s", None, "stop")
    plain = trajectory_of("Lake", 0, 0, 0, 1, (seen, seen), success=True, terminated=True, truncated=False)
    assert not [key for key in rollout_metrics([plain]) if "tool" in key]
    good, bad = ToolUse("add", {}, "5"), ToolUse("add", {}, error="no number")
    first, second = plain.turns
    called = replace(plain, turns=(replace(first, tools=(good, bad)), replace(second, tools=(good,))))
    row = rollout_metrics([plain, called, replace(called, status="timeout")])
    assert (row["tool_calls"], row["tool_errors"]) == (1.5, pytest.approx(1 / 3))


def test_a_parallel_rollout_is_reported_whole_with_its_refills_and_from_all_processes(monkeypatch):
    """Two batches on two processes, of which the second batch has work for one alone."""

    class Manager(ParallelRolloutManager):
        def __init__(self):
            self.tags, self.group_size = ("a", "b"), 0

        def collect(self, iteration, sampling, *, first_group, n_groups):
            self.report = RolloutReport(
                seconds=2.0, workers=3, engine_seconds=1.5, batches=4, worker_deaths=1
            )
            return []

    class Two(Processes):
        """The other one plays for 2 seconds when it has a share, of which its engine works 0.5."""

        def all_gather(self, work):
            other = RolloutReport(2.0, 3, 0.5, 6, 0, 2)
            return [work(), ([], None if refill else other)]

    collector, refill = SharedCollector(Manager(), Two(0, 2)), False
    collector.collect(0, Sampling())
    refill = True
    monkeypatch.setattr(collector._processes, "rank", 1)  # of one group, the second process plays it
    collector.collect(0, Sampling(), first_group=2, n_groups=1)
    assert collector.take_metrics() == {
        "rollout_workers": 6.0,
        "rollout_batches": 14.0,
        "engine_busy": round(3.5 / 6, 4),
        "worker_deaths": 2.0,
        "replayed_episodes": 2.0,
    }
    assert collector.take_metrics() == {}


@pytest.mark.parametrize("size", [1.0, 0.00075, -0.00025, -123_456.0, 98_765_432.1])
def test_the_numbers_of_a_picture_of_curves_are_whole_and_beside_their_own_panel(size):
    every = {name: size for _, lines in PANELS for name, _ in lines}
    rows = [{"iteration": i} | {name: value * (1 + i / 7) for name, value in every.items()} for i in range(3)]
    figure, axes = draw_curves(rows, PANELS, "iteration", "iteration")
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    for left, right in (axes[:2], axes[2:]):
        assert left.yaxis.get_tightbbox(renderer).x0 >= 0
        assert right.yaxis.get_tightbbox(renderer).x0 >= left.get_window_extent(renderer).x1
