"""What all commands promise alike: help, one writer a folder, one line for what goes wrong, the right exit status."""

import contextlib
import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.cli.recorded import trajectory, turn

from shoal.cli import grammar
from shoal.cli.main import COMMANDS, main
from shoal.cli.output import program
from shoal.cli.skills import resume_command
from shoal.core.data import write_trajectories
from shoal.core.errors import ConfigError
from shoal.core.run_folder import FolderLock

QUICK = [
    "--config-name", "demo-bandit", "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=2",
    "trainer.iterations=2", "trainer.save_every=1", "trainer.tensorboard=false", "es_manager.train.env_groups=2",
    "es_manager.val.env_groups=2", "use_parallel_envs=false",
]  # fmt: skip


# --- JSON for programs
TALKATIVE = """
import os, subprocess, sys
import gymnasium
from shoal.envs.bandit import BanditEnv

def talk():
    print("an env talks", flush=True)
    sys.__stdout__.write("past sys.stdout")
    sys.__stdout__.flush()
    os.write(1, b"past Python")
    subprocess.run(["echo", "a program talks"])

class Talkative(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
    def reset(self, **more):
        talk()
        return super().reset(**more)

class TalkativeBandit(BanditEnv):
    def _start(self, rng):
        talk()
        super()._start(rng)
"""
PPO_WORDS = (
    "train-ppo --env talkative:Talkative --preset none --n-envs 2 --n-steps 32 --total-timesteps 64 "
    "--no-tensorboard"
)


@pytest.mark.parametrize(
    ("name", "given", "count"),
    [(None, "", "1000"), ("GOMP_SPINCOUNT", "7", "7"), ("OMP_WAIT_POLICY", "active", None)],
)
def test_threads_of_torch_do_not_spin_for_long_in_commands_unless_the_user_says_so(
    monkeypatch, name, given, count
):
    for other in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(other, given)  # to be as it was afterwards
        if other != name:
            monkeypatch.delenv(other)
    assert main(["--version"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == count


def test_what_envs_print_stays_out_of_the_json(tmp_path):
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    words = f"{PPO_WORDS} --backend process --num-workers 1 --json-events --json".split()
    path = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-m", "shoal", *words], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr
    for told in ("an env talks", "past sys.stdout", "past Python", "a program talks"):
        assert told in done.stderr
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 4


def test_without_json_what_an_env_prints_stands_where_it_printed_it(tmp_path):
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    call = [sys.executable, "-m", "shoal", "envs", "show", "talkative:TalkativeBandit"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert "an env talks" in done.stdout


# --- mistakes in the call
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "train demo",
            "key=value (such as seed=1), got 'demo'; a config is named by --config-name: --config-name demo",
        ),
        ("train algorithm.adv_estimator=ppoo", "algorithm: no advantage named 'ppoo'"),
        ("train engine.name=vllm", "for engine.name=vllm, got none"),
        (
            "train custom_envs.FrozenLakeEnv.env_config.sise=3",
            "has no setting 'sise'. Did you mean 'size'",
        ),
        ("train --device gpu", "torch can use cpu"),
        ("train-ppo --device nonsense", "torch can use cpu"),
        ("train seed=1 --seed 2", "seed is given twice"),
        ("train run_dir=a --run-dir b", "run_dir is given twice"),
        ("train-recorded recordings=x --config-name recordd", 'Did you mean "recorded"'),
        ("show RUN --best --worst", "each choose an episode"),
        ("train --config-name recorded recordings=x --config-dir .", "--config-dir does nothing"),
        ("train trainer.iterations==3", "'trainer.iterations==3': expected key=value"),
        ("train agent_proxy.prompt.turn={actoin}", "the value of agent_proxy.prompt.turn, {actoin}: "),
        ("train algorithm.adv_estimator=ppo", "PPO with a critic is adv_estimator=gae"),
        ("skills train mine.yaml", "not take 'mine.yaml': did you mean --skills mine.yaml?"),
        ("train-ppo CartPole-v1 --n-envs 8", "not take 'CartPole-v1': did you mean --env CartPole-v1?"),
        ("train trainer.iteration=3", "'trainer.iteration'. Did you mean 'trainer.iterations'?"),
        ("train --trainer.iterations=3", "Settings are given without dashes: trainer.iterations=VALUE"),
        ("skills train --dry-run --launcher nosuch", "no launcher named 'nosuch'"),
        (
            "skills train --dry-run --max-parallel-skills 0",
            "max_parallel must be a whole number and at least 1",
        ),
        ("view --port 0 nosuch", "nosuch is not a folder"),
        ("split RUN --shard-size -1", "--shard-size must be at least 0, got -1"),
        ("envs list all", "shoal envs list does not take 'all'"),
        ("envs shw", "Did you mean 'show'"),
        ("envs play sokobn", "Did you mean 'sokoban'"),
        ("envs show sokoban num_boxs=1", "Did you mean 'num_boxes'"),
        ("envs play bandit --seed=-1", "--seed must be at least 0, got -1"),
        ("envs show sokoban num_boxes", "settings must be key=value"),
        ("envs show sokoban num_boxes=many", "Expected `int`"),
        ("envs check nowhere:Env", "module:Class"),
        ("envs serve tests.rollout.tools.vault:Vault --port 0", "acts by tools, which are not served"),
        ("envs check bandit --episodes 0", "--episodes must be at least 1, got 0"),
        (
            "envs check shoal.envs.bandit:Nothing",
            "was imported and has no Nothing; it has TextEnv, BanditEnv",
        ),
        (
            "bench CartPole-v1 --wrapper gymnasium.wrappers:Nope",
            "Expected module:Name of what gymnasium.wrappers",
        ),
        ("train --config-dir nosuch --config-name x", "must be a folder"),
        ("eval nosuch", "there is no run folder and no model folder nosuch"),
        ("eval FILE", "is neither a run folder"),
        ("train run_dir=FILE", "a run folder must be a folder"),
        ("train-ppo --run-dir FILE --total-timesteps 1000", "a run folder must be a folder"),
        ("skills train --graph-path FILE", "a run folder must be a folder"),
        ("split nosuch", "nosuch does not exist"),
        ("show nosuch", "is not a run folder: there is nothing of that name"),
        ("show FILE", "is not a run folder but a file"),
        ("runs nosuch", "is not a folder"),
        ("show loop", "is not a run folder"),
        ("train --resume --run-dir nosuch", "there is no run nosuch"),
        ("train-ppo --resume", "there is no run"),
        ("train 'run_dir=${oc.env:MY_API_KEY}'", "name the variable instead"),
        ("bench CartPole-v1 --seed=-1", "--seed must be at least 0, got -1"),
        ("bench CartPole-v1 --num-workers 0", "--num-workers must be at least 1, got 0"),
        ("skills train --max-nodes 0", "--max-nodes must be at least 1, got 0"),
        ("envs serve bandit --port 70000", "port must be a whole number from 0 to 65535"),
        ("view RUN --port 70000", "port must be a whole number from 0 to 65535"),
        ("replay RUN --diff RUN --turn 2", "--turn does nothing with --diff"),
        ("replay RUN 3 --diff RUN", "EPISODE does nothing with --diff"),
        ("replay RUN --base-url http://x", "--base-url does nothing without --sampler openai:MODEL"),
        ("view RUN --episodes 3", "--episodes does nothing without --export"),
        ("eval RUN --env bandit --retries 1", "--retries does nothing without openai:MODEL"),
        ("eval smollm2 --env bandit --checkpoint best", "--checkpoint does nothing with a model"),
        ("split RUN --stride-size 2", "--stride-size does nothing with --splitter stepwise"),
        ("skills train --llm-url http://x", "--llm-url does nothing without --llm-name"),
    ],
)
def test_a_mistake_in_the_call_is_one_line_and_leaves_nothing(
    tmp_path, tmp_path_factory, monkeypatch, capsys, words, why
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_API_KEY", "sesame")
    monkeypatch.setattr(sys, "path", [*sys.path])  # `envs` adds the working directory
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    before = sorted(tmp_path.rglob("*"))
    code = main([word.replace("FILE", "file").replace("RUN", "run") for word in shlex.split(words)])
    told = capsys.readouterr().err
    assert why in told
    assert "sesame" not in told
    assert code == (1 if "there is no run" in why and code == 1 else 2)
    assert len([line for line in told.splitlines() if line.startswith("shoal:")]) == 1
    assert "Traceback" not in told
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []


def test_a_folder_that_cannot_be_written_is_one_line(capsys):
    code = main(["train", *QUICK, "run_dir=/sys/kernel/shoal"])
    told = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert told[-1].startswith("shoal: ")
    assert "--out" in told[-1]


def test_an_environment_is_shown_within_the_width_of_the_terminal(prints, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = prints("envs", "show", "countdown")
    settings = text[text.index("Settings") : text.index("The first observation")]
    assert max(map(len, settings.splitlines())) <= 60


@pytest.mark.parametrize(
    ("words", "boards", "project"),
    [
        ("", True, None), ("--tracker none", False, None), ("--wandb mine", True, "mine"),
        ("--tracker wandb", False, "shoal"),
        ("--tracker none --wandb mine", False, None),
    ],
)  # fmt: skip
def test_trackers_are_chosen_alike_in_every_training(prints, monkeypatch, tmp_path, words, boards, project):
    from shoal.cli import train_ppo

    trainer = yaml.safe_load(prints("train", *words.split(), "--cfg"))["trainer"]
    assert (trainer["tensorboard"], trainer["wandb"]) == (boards, project is not None)
    assert project is None or trainer["wandb_project"] == project
    made = []

    def record(options, *_):
        made.append(options)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_ppo, "PPORun", record)
    assert main(["train-ppo", *words.split()]) == 130
    assert (made[0].tensorboard, made[0].wandb) == (boards, project)


# --- one writer
WRITERS = {
    "train": lambda folder: ["train", *QUICK, f"run_dir={folder}"],
    "rollout": lambda folder: ["rollout", *QUICK[:2], f"run_dir={folder}"],
    "train-ppo": lambda folder: ["train-ppo", "--total-timesteps", "2048", "--run-dir", folder],
    "prove": lambda folder: ["prove", "--run-dir", folder],
    "skills train": lambda folder: ["skills", "train", "--run-dir", folder],
    "bench": lambda folder: ["bench", "CartPole-v1", "--run-dir", folder, "--seconds", "0.01"],
    "eval": lambda folder: ["eval", "nosuch", "--out", folder],
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_second_writer_of_a_folder_is_refused(writer, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = FolderLock(folder / ".lock")
    lock.take()
    try:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert main(WRITERS[writer](str(folder))) == 1
        assert "is running on" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    finally:
        lock.release()


# --- ends that were not wished for
def broken(write, at):
    """`write`, which finds the disk full the `at`-th time that it writes a metrics row's curves or a checkpoint."""
    calls = 0

    def writes(path, data):
        nonlocal calls
        calls += path.name == "manifest.json"
        if calls == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    return writes


@pytest.mark.parametrize(
    ("much", "told"),
    [
        (["--n-steps", str(2**31 - 1), "--n-envs", "64"], "Unable to allocate"),
        (["--hidden", "2000000", "2000000"], r".*you tried to allocate \d+ bytes"),  # as torch says it
    ],
)
def test_too_little_memory_is_one_line(tmp_path, prints, much, told):
    words = ["--total-timesteps", "64", "--backend", "serial", "--run-dir", str(tmp_path / "run")]
    told_of = prints("train-ppo", "--preset", "none", *words, *much, code=1)
    (line,) = [line for line in told_of.splitlines() if "Progress" not in line]
    assert re.match(f"shoal: not enough memory: {told}", line)


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path, monkeypatch, capsys):
    from shoal.core import files

    calm, full = tmp_path / "calm", tmp_path / "full"
    assert main(["train", *QUICK, "--run-dir", str(calm)]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_bytes", broken(files.write_bytes, 4))
        assert main(["train", *QUICK, "--run-dir", str(full)]) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shoal:")]
    assert len(told) == 1
    assert told[0].startswith("shoal: No space left on device (")
    assert "make room and run the same command again (with --resume" in told[0]
    assert main(["train", *QUICK, "--run-dir", str(full), "--resume"]) == 0
    for name in ("heldout-000002", "train-000001"):
        file = f"trajectories/{name}.jsonl"
        if (calm / file).exists():
            assert (calm / file).read_bytes() == (full / file).read_bytes()
    rows = [
        [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (calm, full)
    ]
    assert rows[0] == rows[1] == [0, 1, 2]


@pytest.fixture
def signals_of_before():
    """A command that was asked to end leaves its handlers to the end of its process, which here goes on."""
    was = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in was.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("signals_of_before")
def test_a_request_to_end_and_a_closed_terminal_are_like_ctrl_c(tmp_path, monkeypatch, capsys, number, code):
    from shoal.cli import train

    def killed(rows, *_):
        next(rows)
        os.kill(os.getpid(), number)
        time.sleep(5)

    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore hang-ups
    with monkeypatch.context() as patch:
        patch.setattr(train, "_watch", killed)
        assert main(["train", *QUICK, "--run-dir", str(tmp_path / "run")]) == code
    assert "go on with:\n  shoal train" in capsys.readouterr().out
    assert not FolderLock(tmp_path / "run" / ".lock").is_taken()


def test_who_ignores_a_hangup_goes_on_ignoring_it(monkeypatch):
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        monkeypatch.setitem(COMMANDS, "runs", ("tests.cli.hangs_up", ""))
        assert main(["runs"]) == 7
    finally:
        signal.signal(signal.SIGHUP, was)


def shoal(words, **options):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-m", "shoal", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=environ, **options)  # fmt: skip


def test_looking_ends_without_a_word_when_its_reader_has_enough(tmp_path):
    many = [trajectory(turns=tuple(turn(observation="room " * 400) for _ in range(30)))]
    write_trajectories(tmp_path / "trajectories" / "heldout-000001.jsonl", many)
    process = shoal(["show", str(tmp_path)])
    process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), told) == (1, "")


@pytest.mark.parametrize("name", ["--iteration", "--seed"])
def test_a_rollout_that_cannot_be_named_leaves_no_folder(tmp_path, prints, name):
    assert "must be in [-2**63, 2**64) to name seeds, got 100000000000000000000" in prints(
        "rollout", name, "1e20", "--run-dir", tmp_path / "run", code=2
    )
    assert not (tmp_path / "run").exists()


# --- runs, results as JSON
@pytest.fixture(scope="module")
def run_and_said(tmp_path_factory):
    """A run, and what it printed with `--json` on standard output and on standard error."""
    folder, out, err = tmp_path_factory.mktemp("runs") / "one", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["train", *QUICK, "--seed", "3", "--run-dir", str(folder), "--json"]) == 0
    return folder, out.getvalue(), err.getvalue()


@pytest.fixture
def run(run_and_said):
    return run_and_said[0]


def test_the_result_of_a_training_for_a_program_is_its_summary(run_and_said):
    run, out, err = run_and_said
    summary = json.loads(out)
    assert summary == json.loads((run / "summary.json").read_text())
    assert summary["seed"] == 3
    assert "held-out success" in err
    assert "after 2 iterations" in err


def test_a_finished_run_that_is_asked_for_less_is_left_alone(run, capsys, prints):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for iterations in (1, 2):
        words = [*QUICK[:6], *QUICK[7:], f"trainer.iterations={iterations}", "--seed", "3"]
        assert main(["train", *words, "--run-dir", str(run), "--resume", "--json"]) == 0
        out, told = capsys.readouterr()
        assert "there is nothing to do" in told
        assert json.loads(out) == json.loads(before[run / "summary.json"])
    words = [*QUICK, "--seed", "4", "--run-dir", str(run), "--resume"]
    assert "come to its end: seed was 3 and is 4; use another run_dir" in prints("train", *words, code=2)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_show_has_prompts_and_readable_numbers(run, tmp_path, prints):
    text = prints("show", run, "--prompt")
    assert re.search(r"turn 1  prompt of \d+ tokens", text)
    assert "1 turn\n" in text
    assert "1 turns" not in text
    assert re.search(r"…\s*│\s*\d+ more metrics: --all", text)
    assert len(prints("show", run, "--all")) > len(prints("show", run))
    assert json.loads(prints("show", run, "--json"))["command"] == "train"
    skills = tmp_path / "skills"
    skills.mkdir()
    chain = {"plan": [{"skill": "Collect Wood"}]}
    metrics = {"chain_success": 0.5, "skill_success": {"Collect Wood": 0.976}, "chain": chain}
    summary = {"command": "skills train", "status": "completed", "metrics": metrics}
    (skills / "summary.json").write_text(json.dumps(summary))
    shown = prints("show", skills, "--all")
    assert "skill_success/Collect Wood" in shown
    assert "{" not in shown
    assert "1 entry" in shown


def test_runs_are_listed_with_what_they_are_and_how_they_did(run, tmp_path, prints):
    listed = json.loads(prints("runs", run.parent, "--json"))
    assert [(one["command"], one["status"], one["seed"], one["metric"]) for one in listed] == [
        ("train", "completed", 3, "heldout_success"),
    ]  # fmt: skip
    text = prints("runs", run.parent)
    assert "heldout_success" in text
    assert text.endswith(f"1 run in {run.parent}\n")
    broken_run = tmp_path / "broken"
    broken_run.mkdir()
    (broken_run / "summary.json").write_text("{")
    (broken_run / "metrics.jsonl").write_text('{"iteration": 0}\n')
    lock = FolderLock(broken_run / ".lock")
    assert json.loads(prints("runs", tmp_path, "--json"))[0]["status"] == "unfinished"
    lock.take()
    assert json.loads(prints("runs", tmp_path, "--status", "running", "--json"))[0]["rows"] == 1
    lock.release()
    assert json.loads(prints("runs", tmp_path, "--status", "running", "--json")) == []


def test_what_eval_plays_can_be_replayed(run, tmp_path, prints):
    out = tmp_path / "played"
    result = json.loads(prints("eval", run, "--episodes", "3", "--run-dir", out, "--json"))
    assert result["episodes"] == 3
    assert "the same" in prints("replay", out, "eval:2")


BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("seed: [1", "cannot be read"),
        ("seed: !!python/object/apply:os.getcwd []", "cannot be read"),
        (BOMB, "at most 20000 values"),
    ],
)
def test_a_broken_or_hostile_config_of_a_run_is_one_line(tmp_path, prints, text, why):
    write_trajectories(tmp_path / "trajectories" / "heldout-000001.jsonl", [trajectory()])
    (tmp_path / "config.yaml").write_text(text)
    for words in (["replay", tmp_path], ["show", tmp_path, "--prompt"]):
        assert why in prints(*words, code=2)


def test_settings_that_another_version_wrote_are_told_with_their_file(run, tmp_path, prints):
    shutil.copytree(run, tmp_path / "run")
    with (tmp_path / "run" / "config.yaml").open("a") as file:
        file.write("zebra: 1\n")
    for words in (["eval", tmp_path / "run"], ["replay", tmp_path / "run"]):
        why = prints(*words, code=2)
        assert (
            f"{tmp_path / 'run' / 'config.yaml'} does not fit this version of shoal: unknown key 'zebra'"
            in why
        )


def test_a_run_of_something_else_than_agents_is_told_by_what_made_it(tmp_path, prints):
    write_trajectories(tmp_path / "trajectories" / "heldout-000001.jsonl", [trajectory()])
    (tmp_path / "config.yaml").write_text("env: CartPole-v1")
    (tmp_path / "checkpoints" / "step_000000000100").mkdir(parents=True)
    why = prints("replay", tmp_path, code=2)
    assert "is no run of agents" in why
    assert "made by shoal train-ppo" in why
    assert "has no manifest.json: it was never committed" in prints("eval", tmp_path, code=2)


def test_going_on_without_a_folder_takes_no_run_of_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(("demo", "demo-2", "demo-2-kept", "demo-bandit", "demo-3x")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        os.utime(tmp_path / "runs" / name, (at, at))
    assert grammar.newest_folder("demo").name == "demo-2"
    assert grammar.newest_folder("demo-bandit").name == "demo-bandit"
    for name in ("dem", "de*", "nosuch"):
        with pytest.raises(ConfigError, match="there is no run"):
            grammar.newest_folder(name)


def test_a_number_that_json_has_no_word_for_is_null_in_results_for_programs(capsys):
    grammar.print_json({"half_width": float("inf"), "n": np.int64(1), "rows": [{"a": float("nan")}]})
    assert json.loads(capsys.readouterr().out) == {"half_width": None, "n": 1, "rows": [{"a": None}]}


@pytest.mark.parametrize(
    ("encoding", "errors"),
    [("utf-8", "strict"), ("ascii", "surrogateescape")],
)
def test_what_a_terminal_has_no_letter_for_is_written_by_its_number(tmp_path, monkeypatch, encoding, errors):
    for name in (b"na\xefve\xff", "ünï→".encode()):
        (tmp_path / os.fsdecode(name)).mkdir()
        (tmp_path / os.fsdecode(name) / "metrics.jsonl").write_text("")
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", out)
    for words in (["runs", str(tmp_path)], ["envs", "list"]):
        assert main(words) == 0
    out.flush()
    told = out.buffer.getvalue().decode(encoding)
    assert "2 runs in" in told
    assert "\\udcff" in told


@pytest.mark.parametrize(
    ("called", "on_path", "told"),
    [
        ("bin/shoal", "bin", "shoal"),
        ("bin/shoal", "else", "bin/shoal"),
        ("my bin/shoal", None, "'my bin/shoal'"),
        ("site-packages/shoal/__main__.py", "bin", "my-python -m shoal"),
        ("pytest/__main__.py", None, "shoal"),
    ],
)
def test_commands_to_go_on_with_name_the_program_as_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str, on_path: str | None, told: str
) -> None:
    for folder in ("bin", "else"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shoal").write_text("#!/bin/sh\n")
        (tmp_path / folder / "shoal").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / on_path) if on_path else "")
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setattr(sys, "orig_argv", ["my-python", "-m", "shoal"])
    assert program() == told
    assert resume_command(Path("a b"), "skills train") == f"{told} skills train --resume --out 'a b'"
