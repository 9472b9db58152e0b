"""A run that ends anywhere, in the midst of its beginning or of a checkpoint, goes on to the end it would have had."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save

import shoal.train.agent.trainer as trainer_module
from shoal.core import files
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json, verify_folder
from shoal.envs import make
from shoal.train.agent.config import AgentConfig, compose_config
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.run.records import Records
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.records.compare import episodes_digest
from shoal.train.records.read import settings_of

SMALL = [
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=3", "algorithm.entropy_coef=0.05",
    "es_manager.train.env_groups=2", "es_manager.train.group_size=3", "es_manager.val.env_groups=2",
    "algorithm.filter_groups.enable=false", "agent_proxy.max_turn=2", "use_parallel_envs=false",
    "trainer.iterations=4", "trainer.eval_every=1", "trainer.save_every=2", "trainer.keep_checkpoints=1",
    "trainer.tensorboard=false", "algorithm.entropy_target=100",  # the bonus makes a step in each iteration
]  # fmt: skip
SCORES = [0.2, 0.1, 0.5, 0.5, 0.3]
"""Held-out success by iteration, made up so that there is a best one in the middle."""


class Killed(BaseException):
    """As abrupt as a test can be without ending itself."""


def train(folder, *overrides, rewards=None):
    """The rows of a small run."""
    config = compose_config("demo", [*SMALL, f"run_dir={folder}", *overrides])
    with AgentTrainer(config, rewards=rewards) as trainer:
        return list(trainer.train())


@pytest.fixture
def scored(monkeypatch):
    def validate(self):
        return {"heldout_success": SCORES[self.progress.iteration]}

    monkeypatch.setattr(AgentTrainer, "_validate", validate)


def state_of(folder):
    """Which checkpoints there are, and the weights in each."""
    found = {}
    for path in [*list_checkpoints(folder / "checkpoints"), folder / "checkpoints" / "best"]:
        verify_folder(path)
        weights = load_file(path / "engine" / "model.safetensors")
        found[path.name] = (
            read_json(path / "state.json")["iteration"],
            {k: v.tobytes() for k, v in weights.items()},
        )
    return found


@pytest.mark.parametrize("scores", [[0.4, 0.1, 0.2, 0.3, 0.3], [0.0] * 5])
def test_the_start_counts_among_the_best_also_where_nothing_ever_succeeds(
    tmp_path, scored, monkeypatch, scores
):
    monkeypatch.setattr("tests.train.agent.run.test_crash_points.SCORES", scores)
    train(tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert (metrics["heldout_success"], metrics["best_heldout_success"]) == (scores[-1], scores[0])
    assert state_of(tmp_path / "run")["best"][0] == 0


class CountedLake(type(make("frozen_lake"))):
    """Counts its episodes and steps, and at one of them somebody presses Ctrl-C."""

    episodes = steps = 0
    ends_at = None

    def reset(self, **options):
        CountedLake.episodes += 1
        return super().reset(**options)

    def step(self, action):
        CountedLake.steps += 1
        if CountedLake.steps == CountedLake.ends_at:
            raise KeyboardInterrupt
        return super().step(action)

    @classmethod
    def count(cls, ends_at=None):
        """Count anew up to the last step; what was counted before."""
        before = cls.episodes, cls.steps
        cls.episodes, cls.steps, cls.ends_at = 0, 0, ends_at
        return before


@pytest.mark.parametrize(("share", "parallel"), [(0.5, "true"), (0.8, "false")])
def test_episodes_that_ended_before_the_run_did_are_not_played_again(tmp_path, share, parallel):
    lake = [
        "custom_envs.FrozenLakeEnv.env_type=tests.train.agent.run.test_crash_points:CountedLake",
        "vector.backend=serial",
        "trainer.check_envs=false", "warmup.steps=0", "trainer.save_every=9", "algorithm.entropy_coef=0.05",
        f"agent_proxy.use_parallel_rollout={parallel}", "agent_proxy.parallel.backend=serial",
    ]  # fmt: skip
    CountedLake.count()
    train(tmp_path / "calm", *lake)
    episodes, _ = CountedLake.count(ends_at=int(share * CountedLake.steps))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", *lake)
    first, _ = CountedLake.count()
    written = (tmp_path / "run" / "unfinished.jsonl").read_text().splitlines()
    assert len(written) > 8  # more than an iteration, since the checkpoint of the start
    rows = train(tmp_path / "run", *lake, "resume=true")
    speed_of_kept, *_, speed_of_played = [row["tokens_per_second"] for row in rows if row["iteration"]]
    assert speed_of_kept == 0  # all of this iteration was written down
    assert speed_of_played > 0
    again, _ = CountedLake.count()
    # but those of the start and those that were written down
    assert again == episodes - 2 - (len(written) - 1)
    assert first + again < episodes + 6 + 2
    assert not (tmp_path / "run" / "unfinished.jsonl").exists()
    assert episodes_digest(tmp_path / "run") == episodes_digest(tmp_path / "calm")
    assert state_of(tmp_path / "run") == state_of(tmp_path / "calm")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_ends_at_any_rename_of_its_checkpoints_resumes_to_the_same_end(
    tmp_path, scored, monkeypatch, every
):
    train(tmp_path / "calm")
    calm = state_of(tmp_path / "calm")
    assert {name: iteration for name, (iteration, _) in calm.items()} == {"step-000004": 4, "best": 2}
    replace, crashes = files.os.replace, 0
    while True:
        folder, seen = tmp_path / f"run-{crashes}", 0

        def counted(source, target, folder=folder, at=crashes):
            nonlocal seen
            if str(target).startswith(str(folder / "checkpoints")):
                seen += 1
                if seen == at + 1:
                    raise Killed
            replace(source, target)

        monkeypatch.setattr(files.os, "replace", counted)
        try:
            train(folder)
            break  # it had fewer renames than that
        except Killed:
            crashes += every
        finally:
            monkeypatch.setattr(files.os, "replace", replace)
        train(folder, "resume=true")
        assert state_of(folder) == calm, f"after a crash at rename {crashes - every + 1}"
        shutil.rmtree(folder)
    assert crashes >= 5


@pytest.mark.parametrize(("owner", "name"), [(Records, "begin"), (trainer_module, "save_checkpoint")])
def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path, scored, monkeypatch, owner, name):
    train(tmp_path / "calm")
    with monkeypatch.context() as patched:
        whole = getattr(owner, name)

        def dying(*arguments, **settings):
            if owner is Records:
                whole(*arguments, **settings)
            raise Killed

        patched.setattr(owner, name, dying)
        with pytest.raises(Killed):
            train(tmp_path / "run")
    rows = train(tmp_path / "run", "resume=true")
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in written] == [0, 1, 2, 3, 4]
    assert state_of(tmp_path / "run") == state_of(tmp_path / "calm")


@pytest.mark.parametrize("text", ["${x", "${seed}", "{observation} # \u2028 1e3: &a *a\n\n"])
def test_the_config_of_a_run_is_read_again_as_it_was(tmp_path, text):
    config = compose_config("demo", [*SMALL, f"run_dir={tmp_path}"])
    proxy = replace(config.agent_proxy, prompt=replace(config.agent_proxy.prompt, system=text))
    records = Records(replace(config, agent_proxy=proxy, next_step="1e3"), None)
    records.begin()
    records.close()
    again = AgentConfig.read(settings_of(tmp_path))
    assert again == replace(config, agent_proxy=proxy, next_step="1e3")


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path, scored):
    folder = tmp_path / "run"
    train(folder)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(DataError, match="no checkpoint in"):
        train(folder, "resume=true")
    with pytest.raises(ConfigError, match="holds a run already"):
        train(folder)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path):
    with pytest.raises(DataError, match="no checkpoint in .*: the run ended before it wrote one"):
        train(tmp_path, "resume=true")
    with pytest.raises(DataError, match="there is no run .*nosuch to go on with: start without resume"):
        train(tmp_path / "nosuch", "resume=true")
    assert not (tmp_path / "nosuch").exists()


def test_a_checkpoint_of_another_program_or_version_is_named_though_its_files_are_whole(tmp_path, scored):
    def said(**changed):
        with files.write_folder(run / "checkpoints" / "step-000001") as folder:
            shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
            for name, data in changed.items():
                (folder / name.replace("_", ".")).write_bytes(data)
        with pytest.raises(DataError) as refused:
            train(run, "trainer.iterations=2", "resume=true")
        return str(refused.value)

    run = tmp_path / "run"
    train(run, "trainer.iterations=1")
    whole = shutil.copytree(run / "checkpoints" / "step-000001", tmp_path / "whole")
    state = read_json(whole / "state.json")
    other = {name: value for name, value in state.items() if name != "tokens"}
    begin = (
        f"{run / 'checkpoints' / 'step-000001'} is no checkpoint that this version of shoal can go on from ("
    )
    for changed in (
        {"state_json": b"[1]"},
        {"state_json": json.dumps(other).encode()},
        {"state_json": json.dumps(state | {"iteration": "1"}).encode()},
        {"optimizer_safetensors": b"\x80\x04pickled"},
        {"optimizer_safetensors": save({"a": np.zeros(3, np.float32)})},
    ):
        assert said(**changed).startswith(begin)
    assert (run / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("left", ["all", "torn"])
def test_a_run_that_has_succeeded_does_not_go_on_though_its_metrics_are_lost(tmp_path, scored, left):
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert [row["iteration"] for row in train(tmp_path / "run", "trainer.stop_at_success=0.5")] == [0, 1, 2]
    if left == "torn":
        metrics.write_bytes(metrics.read_bytes()[:-9])
    train(tmp_path / "run", "trainer.stop_at_success=0.5", "resume=true")
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000002"]
    assert read_json(tmp_path / "run" / "summary.json")["metrics"]["iterations"] == 2
    assert train(tmp_path / "run", "trainer.stop_at_success=0.6", "resume=true")[-1]["iteration"] == 4


def test_what_killed_runs_wrote_or_removed_by_half_does_not_pile_up(tmp_path):
    folder = tmp_path / "run"
    writer = (
        "import os, signal, sys\n"
        "from shoal.core.files import write_folder\n"
        "with write_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'weights').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    train(folder, "trainer.iterations=1")
    before = {path for path in folder.rglob("*") if path.name != ".lock"}
    for target in (folder / "checkpoints" / "step-000002", folder / "reference"):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        subprocess.run([sys.executable, "-c", writer, str(target)], env=env, check=False)
    assert {path.suffix for path in folder.rglob(".*") if path.name != ".lock"} == {".tmp"}
    for name in ("trajectories", "advantages"):
        (folder / name / ".train-000001.jsonl.1a2b3c4d.tmp").write_text("half")
    (folder / "checkpoints" / "step-000000" / "engine").mkdir(parents=True)  # an old one, on its way out
    train(folder, "trainer.iterations=1", "resume=true")
    assert {path for path in folder.rglob("*") if path.name != ".lock"} == before
