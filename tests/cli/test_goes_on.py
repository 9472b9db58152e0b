"""`shoal eval` and `shoal rollout` that are ended anywhere go on to the result they would have had."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tests.rollout.doubles import FakeServer, HashEngine

from shoal.cli.main import main
from shoal.rollout.journal import Journal
from shoal.samplers.registry import SAMPLERS
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.records.evaluation import PANELS

PANEL = {"frozen_lake": {"size": 3, "max_steps": 4}, "bandit": {}}
ROLLOUT = [
    "rollout",
    "es_manager.train.env_groups=4",
    "es_manager.train.group_size=2",
    "agent_proxy.max_turn=4",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two checkpoints."""
    folder = tmp_path_factory.mktemp("goes_on") / "run"
    words = [
        "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=3", "trainer.iterations=1",
        "trainer.save_every=1", "trainer.eval_every=1", "trainer.tensorboard=false", "use_parallel_envs=false",
        "es_manager.train.env_groups=2", "es_manager.train.group_size=2", "es_manager.val.env_groups=2",
        "agent_proxy.format_penalty=0.5", f"run_dir={folder}",
    ]  # fmt: skip
    with AgentTrainer(compose_config("demo", words)) as trainer:
        list(trainer.train())
    return folder


@pytest.fixture(autouse=True)
def _small_panel(monkeypatch):
    monkeypatch.setitem(PANELS, "core", PANEL)


def broken_off(monkeypatch, words, after, error=KeyboardInterrupt):
    """The code of a command that ends so, when so many episodes have been written down."""
    add, left = Journal.add, [after]

    def adds(self, trajectory):
        if trajectory.status == "ok":
            if not left[0]:
                raise error
            left[0] -= 1
        add(self, trajectory)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", adds)
        return main(words)


def contents(folder):
    """The files of a folder, but for its lock."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: files[name].read_bytes() for name in sorted(files) if name != ".lock"}


def left_by(folder):
    """What a command left, but for times."""
    found = contents(folder)
    for name in ("log.txt", "config.yaml", "metrics.jsonl"):
        found.pop(name, None)
    summary = json.loads(found["summary.json"])
    times = ("seconds_rollout", "tokens_per_second", "engine_busy", "rollout_batches")
    metrics = {key: value for key, value in summary["metrics"].items() if key not in times}
    return {**found, "summary.json": (summary["command"], summary["seed"], summary["status"], metrics)}


def commands(run, folder):
    """Each of the commands that play, by its name."""
    evaluate = ["eval", str(run), "--temperature", "1", "--out", str(folder)]
    play = [*ROLLOUT, f"run_dir={folder}", "--iteration", "3"]
    return {
        "eval": [*evaluate, "--episodes", "9"],
        "panel": [*evaluate, "--episodes", "5", "--panel", "core"],
        "rollout": [*play, "--backend", "serial"],
        "rollout threads": [*play, "--backend", "thread", "agent_proxy.parallel_n_jobs=2"],
        "rollout processes": [*play, "--backend", "process", "agent_proxy.parallel_n_jobs=3"],
        "rollout --from": [*play, "--backend", "thread", "--from", str(run)],
    }


@pytest.fixture
def counted(monkeypatch):
    """How many episodes were written down, from now on."""
    add, count = Journal.add, []

    def adds(self, trajectory):
        count.append(trajectory)
        add(self, trajectory)

    monkeypatch.setattr(Journal, "add", adds)
    return count


@pytest.mark.parametrize("name", ["eval", "panel", "rollout threads"])
def test_a_command_that_is_broken_off_twice_goes_on_to_the_end_it_would_have_had(
    run, tmp_path, monkeypatch, capsys, counted, name
):
    assert main(commands(run, tmp_path / "calm")[name]) == 0
    table = capsys.readouterr().out.replace(str(tmp_path / "calm"), str(tmp_path / "broken"))
    total = len(counted)
    folder = tmp_path / "broken"
    words = commands(run, folder)[name]
    for after in (3, 2):
        assert broken_off(monkeypatch, words, after) == 130
        assert not (folder / "summary.json").exists()
    told = capsys.readouterr()
    assert "3 episodes of " in told.err
    counted.clear()
    assert main(words) == 0
    told = capsys.readouterr()
    assert f"5 episodes of {folder} were played before and are kept" in told.err
    assert len(counted) == total - 5
    if name.startswith("rollout"):  # whose table has times
        table, told = (text.rpartition("episodes:")[2] for text in (table, told.out))
        assert told == table
    else:
        assert told.out == table
    assert left_by(folder) == left_by(tmp_path / "calm")


def test_a_rollout_does_not_go_on_with_another_version_of_a_samplers_own_weights(
    tmp_path, monkeypatch, capsys
):
    engine = HashEngine()
    monkeypatch.setitem(SAMPLERS._items, "own", lambda *_: engine)
    words = [*ROLLOUT, f"run_dir={tmp_path / 'run'}", "--backend", "serial", "engine.name=own"]
    words += ["agent_proxy.max_tokens=16", "agent_proxy.prompt.prefill=''", "agent_proxy.prompt.closing=''"]
    assert broken_off(monkeypatch, words, 3) == 130
    engine.weights_version += 1
    assert main(words) == 2
    assert "weights was ' version 3' and is ' version 4'" in capsys.readouterr().err
    engine.weights_version -= 1
    assert main(words) == 0


def test_a_rollout_goes_on_with_another_number_and_kind_of_workers(run, tmp_path, monkeypatch, capsys):
    assert main(commands(run, tmp_path / "calm")["rollout"]) == 0
    broken = commands(run, tmp_path / "broken")
    assert broken_off(monkeypatch, broken["rollout"], 3) == 130
    assert broken_off(monkeypatch, broken["rollout threads"], 2) == 130
    assert main(broken["rollout processes"]) == 0
    files = [tmp_path / name / "trajectories" / "rollout.jsonl" for name in ("calm", "broken")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "5 episodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "others", "why"),
    [
        ("eval", ["--seed", "1"], "plays.eval.seed was 0 and is 1"),
        ("eval", ["--episodes", "10"], "episodes was 9 and is 10"),
        ("eval", ["--checkpoint", "0"], "weights was 'sha256 "),
        ("eval", ["--panel", "core"], "plays.bandit was None"),
        ("rollout", ["--iteration", "4"], "iteration was 3 and is 4"),
        ("rollout", ["engine.width=16"], "settings.engine.width was"),
        ("rollout", ["--compare"], "holds a rollout that is not finished: go on with it without --compare"),
    ],
)
def test_other_episodes_than_those_of_an_unfinished_command_are_refused(
    run, tmp_path, monkeypatch, capsys, name, others, why
):
    words = commands(run, tmp_path)[name]
    assert broken_off(monkeypatch, words, 3) == 130
    before = contents(tmp_path)
    capsys.readouterr()
    if others[0] in ("--iteration", "--episodes"):
        words[words.index(others[0]) + 1] = others[1]
    else:
        words = [*words, *others]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert why in told
    assert str(tmp_path) in told
    assert contents(tmp_path) == before


def test_a_finished_evaluation_is_there_until_another_one_in_its_folder_has_ended(run, tmp_path, monkeypatch):
    words = commands(run, tmp_path)["eval"]
    assert main(words) == 0
    before = left_by(tmp_path)
    other = [*words, "--seed", "1"]
    assert broken_off(monkeypatch, other, 3) == 130
    after = left_by(tmp_path)
    assert after.pop("unfinished.jsonl")
    assert after == before
    assert main(other) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["seed"] == 1


def test_a_full_disk_is_told_with_the_way_to_go_on(run, tmp_path, monkeypatch, capsys):
    words = commands(run, tmp_path / "full")["eval"]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")
    assert broken_off(monkeypatch, words, 4, full) == 1
    told = "No space left on device (the file); what was saved before is whole: make room and run the same command"
    assert told in capsys.readouterr().err
    assert main(words) == 0


def test_a_server_that_was_out_of_order_is_asked_again_for_what_failed(tmp_path, monkeypatch, capsys):
    with FakeServer("openai") as server:
        words = ["eval", "openai:", "--base-url", f"{server.url}/v1", "--env", "bandit", "--episodes", "6",
                 "--retries", "0", "--concurrency", "1", "--out", str(tmp_path)]  # fmt: skip
        server.faults = [400, 400]
        assert broken_off(monkeypatch, words, 3) == 130  # two have failed, three are written down
        assert main([*words, "--seed", "1"]) == 2
        server.seen.clear()
        assert main(words) == 0
        assert "6 whole, 0 failed" in capsys.readouterr().out
        assert len([path for path, _, _ in server.seen if path == "/v1/chat/completions"]) == 3


# --- kill -9
@pytest.fixture(scope="module", params=["eval", "rollout"])
def many(request, run, tmp_path_factory):
    """A command that plays 120 episodes into a folder, and the folder of a run of it that nobody ended."""

    def words(folder):
        if request.param == "eval":
            return ["eval", str(run), "--temperature", "1", "--episodes", "120", "--out", str(folder)]
        more = ["agent_proxy.parallel_n_jobs=2", "es_manager.train.env_groups=60", f"run_dir={folder}"]
        return ["rollout", *more, *ROLLOUT[2:]]

    calm = tmp_path_factory.mktemp("many") / "calm"
    assert ended(words(calm)) == 0
    return words, calm


def ended(words, folder=None, number=0, at=0):
    """The exit code of a command that gets a signal when so many episodes are written down."""
    process = subprocess.Popen([sys.executable, "-m", "shoal", *words])
    while folder is not None and process.poll() is None and episodes_in(folder) < at:
        time.sleep(0.001)
    if folder is not None:
        process.send_signal(number)
    return process.wait()


def episodes_in(folder):
    path = folder / "unfinished.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_a_command_killed_at_random_moments_goes_on_and_counts_each_episode_once(many, tmp_path, seed):
    (words, calm), rng = many, random.Random(seed)
    folder, before = tmp_path / "killed", 0
    numbers = rng.choice([(signal.SIGKILL, signal.SIGKILL), (signal.SIGINT, signal.SIGKILL)])
    for number in numbers:
        code = ended(words(folder), folder, number, rng.randint(before + 1, 110))
        assert code in (-number, 130)
        assert (
            before < episodes_in(folder) <= 128 or not (folder / "unfinished.jsonl").exists()
        )  # eval: 64 at once
        before = min(100, episodes_in(folder))
    assert ended(words(folder)) == 0
    assert left_by(folder) == left_by(calm)
    (file,) = (folder / "trajectories").iterdir()
    places = [
        (t["iteration"], t["group"], t["member"]) for t in map(json.loads, file.read_bytes().splitlines())
    ]
    assert len(places) == len(set(places)) == 120


@pytest.mark.parametrize("name", ["eval", "rollout", "rollout threads"])
def test_a_command_that_ended_when_all_was_played_plays_nothing_again(run, tmp_path, monkeypatch, name):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = commands(run, tmp_path / "out")[name]
    module = "evaluation" if name == "eval" else "rollouts"
    with monkeypatch.context() as disk:
        disk.setattr(f"shoal.train.records.{module}.write_trajectories", full)
        assert main(words) == 1
    played = []
    monkeypatch.setattr(Journal, "add", lambda self, trajectory: played.append(trajectory))
    assert main(words) == 0
    assert played == []
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "completed"
