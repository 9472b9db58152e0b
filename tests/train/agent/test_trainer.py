import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError, DataError
from shoal.envs.frozen_lake import FrozenLakeEnv
from shoal.envs.text import Outcome
from shoal.train.agent.config import AgentConfig, compose_config
from shoal.train.agent.run import records
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.supervised.warmup import warm_up
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.records.checkpoints import checkpoint_of

CLOCKS = (
    "seconds",
    "cpu_seconds",
    "seconds_rollout",
    "seconds_update",
    "tokens_per_second",
    "update_tokens_per_second",
    "share_rollout",
    "share_update",
    "share_idle",
)
WORKERS = ("rollout_workers", "rollout_batches", "engine_busy", "worker_deaths", "replayed_episodes")
SMALL = [
    "warmup.steps=20",
    "warmup.learning_rate=0.006",
    "trainer.iterations=4",
    "trainer.eval_every=2",
    "trainer.save_every=1",
    "trainer.save_trajectories_every=1",
    "es_manager.val.env_groups=3",
    "es_manager.train.env_groups=8",
    "es_manager.train.group_size=8",
    "engine.width=32",
]


def train(folder, *overrides, name="demo"):
    config = compose_config(name, [*SMALL, f"run_dir={folder}", *overrides])
    with AgentTrainer(config) as trainer:
        list(trainer.train())
    return results(folder)


def results(folder):
    """What must be equal between runs that promise to be: metrics without clocks, and the final weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for name in (*CLOCKS, *WORKERS):
            row.pop(name, None)
    newest = list_checkpoints(folder / "checkpoints")[-1]
    weights = {k: v.tobytes() for k, v in load_file(newest / "engine" / "model.safetensors").items()}
    return rows, weights


@pytest.fixture(scope="module")
def calm_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "run"
    train(folder, "use_parallel_envs=false")
    return folder


@pytest.fixture(scope="module")
def calm(calm_folder):
    rows, weights = results(calm_folder)
    assert sum(row.get("gradient_steps", 0) for row in rows) >= 3  # or the tests below would compare nothing
    return rows, weights


@pytest.mark.parametrize("parallel", [False, True])
def test_who_watches_a_training_is_told_what_it_is_at(tmp_path, parallel, monkeypatch):
    told = []

    def warming(*args, **settings):
        for loss in warm_up(*args, **settings):
            told.append(trainer.doing())
            yield loss

    monkeypatch.setattr("shoal.train.agent.trainer.warm_up", warming)

    class Watched(AgentTrainer):
        def _make_collector(self, which, seed):
            made = super()._make_collector(which, seed)
            playing = made.collector.collect

            def collect(*args, **kwargs):
                told.append(self.doing())
                played = playing(*args, **kwargs)
                told.append(self.doing())
                return played

            made.collector.collect = collect
            return made

        def _save(self, *, best=False):
            super()._save(best=best)
            told.append(self.doing())

    small = [*SMALL, "trainer.iterations=1", "es_manager.train.env_groups=2", "warmup.steps=3"]
    workers = (
        ["agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=serial"] if parallel else []
    )
    with Watched(compose_config("demo", [*small, *workers, f"run_dir={tmp_path}"])) as trainer:
        told.append(trainer.doing())
        rows = trainer.train()
        next(rows)
        list(rows)
    assert told == [
        "starting",
        *(f"warm-up, {done} of 3 steps" for done in range(3)),
        "evaluation, 0 of 0 episodes played",
        "evaluation, 3 of 3 episodes played",
        "writing a checkpoint",
        "iteration 1, 0 of 0 episodes played",
        "iteration 1, 16 of 16 episodes played",
        "evaluation, 3 of 3 episodes played",
        "evaluation, 3 of 3 episodes played",
        "writing a checkpoint",
    ]


@pytest.fixture
def finished(calm_folder, tmp_path):
    """A run that is over, in a folder that a test may spoil."""
    return shutil.copytree(calm_folder, tmp_path / "run")


@pytest.mark.parametrize(
    "vector",
    [
        ["use_parallel_envs=false"],
        *(
            pytest.param(["vector.backend=process", f"vector.num_workers={n}"], marks=pytest.mark.slow)
            for n in (1, 2, 4)
        ),
        ["agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel_n_jobs=3"],
        pytest.param(
            ["agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=thread"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_same_seed_gives_the_same_metrics_and_weights_with_any_workers(calm, tmp_path, vector):
    assert train(tmp_path / "run", *vector) == calm


@pytest.mark.slow
def test_another_seed_gives_another_run(calm, tmp_path):
    assert train(tmp_path / "run", "seed=1", "use_parallel_envs=false")[1] != calm[1]


KILLED = """
import os, signal, sys
from shoal.cli import train
from shoal.cli.main import main

tell, killed_at = train.print_json, int(sys.argv[1])

def print_json(event):
    tell(event)
    if (event["event"], event["step"]) == ("checkpoint", killed_at):
        os.kill(os.getpid(), signal.SIGKILL)

train.print_json = print_json
main(sys.argv[2:])
"""


@pytest.mark.parametrize("killed_at", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2)), 3])
def test_a_killed_run_resumes_to_the_same_end(calm, tmp_path, killed_at):
    command = [sys.executable, "-c", KILLED, str(killed_at), "train", "--json-events", *SMALL,
               f"run_dir={tmp_path / 'run'}", "use_parallel_envs=false"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
    rows, weights = train(tmp_path / "run", "resume=true", "use_parallel_envs=false")
    for row, expected in zip(rows, calm[0], strict=True):
        assert row == expected
    assert weights == calm[1]


def test_a_run_whose_metrics_were_emptied_goes_on(finished):
    (finished / "metrics.jsonl").write_bytes(b"")
    assert train(finished, "resume=true")[0] == []
    assert json.loads((finished / "summary.json").read_text())["metrics"]["iterations"] == 4


@pytest.mark.parametrize("row", ["{}", '{"iteration": "4"}', '{"iteration": 1e400}'])
def test_a_row_of_metrics_that_no_run_writes_is_named_and_nothing_is_dropped(finished, row):
    with (finished / "metrics.jsonl").open("a") as file:
        file.write(row + "\n")
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(
        DataError, match=r"metrics.jsonl must have a whole number as its iteration, got \{.*remove that"
    ):
        train(finished, "resume=true")
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_run_leaves_what_its_folder_promises(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["command"] == "train"
    assert summary["status"] == "completed"
    assert 0 <= summary["metrics"]["heldout_success"] <= 1
    assert {"config.yaml", "metrics.jsonl", "tensorboard"} <= set(os.listdir(finished))
    assert (finished / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert any((finished / "tensorboard").iterdir())
    played = list(read_trajectories(finished / "trajectories" / "heldout-000004.jsonl"))
    assert [t.group for t in played] == [0, 1, 2]


@pytest.mark.parametrize(("seconds", "rows_drawn"), [(0.0, [1, 3]), (1e9, [4])])
def test_curves_are_drawn_where_the_last_are_old_and_when_a_run_ends(
    tmp_path, monkeypatch, seconds, rows_drawn
):
    drawn = []
    monkeypatch.setattr(records, "write_curves", lambda rows, path: drawn.append(len(rows)))
    monkeypatch.setattr(records, "REDRAW", seconds)
    kept = records.Records(AgentConfig(run_dir=str(tmp_path / "run")), None)
    for row in ({"heldout_success": 0.0}, {}, {"heldout_success": 1.0}, {}):
        kept.report({"iteration": 0, **row})
    kept.close()
    kept.close()
    assert drawn == rows_drawn


def test_a_run_is_closed_also_where_its_last_curves_cannot_be_drawn(tmp_path, monkeypatch):
    def half_imported(rows, path):  # by Ctrl-C
        raise AttributeError("module 'matplotlib' has no attribute 'get_data_path'")

    monkeypatch.setattr(records, "write_curves", half_imported)
    config = AgentConfig(run_dir=str(tmp_path / "run"))
    kept = records.Records(config, None)
    kept.report({"iteration": 0, "heldout_success": 0.0})
    kept.close()
    records.Records(config, None).close()  # the folder is free again


def test_a_checkpoint_that_is_half_removed_is_not_the_way_out_of_a_damaged_one(finished):
    *_, whole, half, newest = list_checkpoints(finished / "checkpoints")
    (half / "state.json").unlink()  # by a run that was killed
    (newest / "state.json").write_text("{}")
    with pytest.raises(DataError, match=f"altered.*; remove what is newer to go on from {whole.name}$"):
        train(finished, "resume=true")
    shutil.rmtree(whole)
    with pytest.raises(DataError, match=r"altered or truncated: its sha256 is not that of .*manifest.json$"):
        train(finished, "resume=true")


@pytest.mark.parametrize(
    ("which", "name"), [("best", "best"), ("newest", "step-000004"), ("4", "step-000004")]
)
def test_a_checkpoint_that_a_killed_writer_had_put_aside_is_found(finished, which, name):
    place = finished / "checkpoints" / name
    aside = place.with_name(f".{name}.abcd0123.old")
    aside.mkdir()
    place.rename(aside / "was")
    assert checkpoint_of(finished, which) == place
    assert place.is_dir()


def test_dynamic_sampling_plays_until_enough_groups_have_signal(tmp_path):
    settings = ["algorithm.filter_groups.max_num_gen_batches=3", "es_manager.train.env_groups=8"]
    rows, _ = train(tmp_path / "run", *settings, "trainer.iterations=1")
    row = rows[-1]
    assert row["generated_batches"] > 1
    assert row["episodes"] == row["groups_played"] * 8  # whole groups
    assert 8 < row["groups_played"] <= 24
    assert row["groups_trained"] <= 8


def test_the_bandit_is_learned(tmp_path):
    rows, _ = train(
        tmp_path / "run", "warmup.steps=40", "warmup.batch_size=32", "warmup.learning_rate=0.003",
        "algorithm.learning_rate=0.003", "algorithm.minibatch_size=128", "trainer.iterations=12",
        "trainer.eval_every=12", "trainer.save_every=12", "trainer.save_trajectories_every=12",
        "trainer.tensorboard=false", "es_manager.train.env_groups=64", "es_manager.train.group_size=4",
        "es_manager.val.env_groups=32", "use_parallel_envs=false", name="demo-bandit",
    )  # fmt: skip
    assert rows[0]["heldout_success"] < 0.8
    assert rows[-1]["heldout_success"] >= 0.95


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.gama=1", "unknown key 'algorithm.gama'. Did you mean 'algorithm.gamma'"),
        ("algoritm.gamma=1", "unknown key 'algoritm'. Did you mean 'algorithm'"),
        ("algorithm.epochs=${sed}", "^Interpolation key 'sed' not found"),
    ],
)
def test_a_wrong_override_is_explained(override, message):
    with pytest.raises(ConfigError, match=message):
        compose_config("demo", [override])


def test_mappings_of_ones_own_keys_take_new_ones():
    engine = compose_config("demo", ["engine.vllm.enforce_eager=true", "+engine.vllm.seed=1"]).engine
    assert engine.vllm == {"enforce_eager": True, "seed": 1}


def test_a_users_config_builds_on_ours(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [demo, _self_]\ntrainer:\n  iterations: 7\n")
    config = compose_config("mine", ["seed=4"], tmp_path)
    assert (config.trainer.iterations, config.seed) == (7, 4)
    assert config.custom_envs["FrozenLakeEnv"].env_config["desc"] == "4x4"


class HalfHopeless(FrozenLakeEnv):
    """One move ends an episode; in half of the lakes no move wins."""

    def reset(self, *, seed=None, options=None):
        self._wins = seed is None or seed % 2 == 0
        return super().reset(seed=seed, options=options)

    def _advance(self, action):
        return Outcome(float(self._wins), terminated=True, success=self._wins)


def test_nothing_is_rehearsed_while_the_critic_learns_alone(tmp_path):
    rows, _ = train(
        tmp_path, "algorithm.adv_estimator=gae", "algorithm.critic.warmup=1", "trainer.iterations=2",
        "warmup.rehearsal=1", "agent_proxy.temperature=0.1", "use_parallel_envs=false",
        "custom_envs.FrozenLakeEnv.env_type=tests.train.agent.test_trainer:HalfHopeless",
    )  # fmt: skip
    assert ["rehearsal_loss" in row for row in rows] == [False, False, True]


def test_in_its_warm_up_the_critic_learns_alone(tmp_path):
    """The policy stands still for two iterations and moves in the third; the critic moves in each."""
    settings = ["algorithm.adv_estimator=gae", "algorithm.critic.warmup=2", "trainer.iterations=3"]
    settings += ["agent_proxy.reward_normalization.grouping=state", "es_manager.train.env_groups=16"]
    kept = ["trainer.save_every=1", "trainer.keep_checkpoints=9", "use_parallel_envs=false"]
    train(tmp_path, *settings, *kept, name="demo-bandit")
    folders = list_checkpoints(tmp_path / "checkpoints")
    assert len(folders) == 4
    policies = [load_file(folder / "engine" / "model.safetensors") for folder in folders]
    critics = [load_file(folder / "critic.safetensors") for folder in folders]

    def differ(one, other):
        return any((one[name] != other[name]).any() for name in one)

    assert [differ(*pair) for pair in itertools.pairwise(policies)] == [False, False, True]
    assert [differ(*pair) for pair in itertools.pairwise(critics)] == [True, True, True]
    states = [json.loads((folder / "state.json").read_text()) for folder in folders]
    assert [state["weights_version"] for state in states] == [0, 1, 2, 3]
    of_policy, moments = len(policies[0]), load_file(folders[2] / "optimizer.safetensors")
    assert moments  # of the critic, whose parameters stand behind the policy's
    assert all(int(name.split(".")[0]) >= of_policy for name in moments)


@pytest.mark.parametrize(("iterations", "told"), [(3, True), (4, False)])
def test_a_warm_up_of_the_critic_that_lasts_the_whole_run_is_told(tmp_path, caplog, iterations, told):
    settings = [
        "algorithm.adv_estimator=gae",
        "algorithm.critic.warmup=3",
        f"trainer.iterations={iterations}",
    ]
    with AgentTrainer(compose_config("demo", [*settings, f"run_dir={tmp_path / 'run'}"])):
        assert ("in all of the 3 iterations the critic learns alone" in caplog.text) == told
