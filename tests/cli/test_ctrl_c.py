"""Ctrl-C in a command, as a terminal sends it to the whole process group: code 130, no traceback, how to go on last."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
from tests.train.agent.tiny_model import write_tiny_model

from shoal.splitting import build_qwen_processor
from shoal.splitting.synthetic import write_gui_recordings

NOISE = re.compile(
    r"Traceback|never retrieved|Exception in|terminate called|KeyboardInterrupt|CancelledError|Error:"
)
FILES = {
    "lake.py": """
from shoal.envs.frozen_lake import FrozenLakeEnv


class Lake(FrozenLakeEnv):
    steps = 0

    def step(self, action):
        Lake.steps += 1
        if Lake.steps == 10:
            print("now", flush=True)
        return super().step(action)
""",
    "agent.py": """
import json
import os
import sys
import urllib.request


def play(base_url):
    for turn in range(40):
        body = json.dumps({"messages": [{"role": "user", "content": f"turn {turn}"}], "max_tokens": 200}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
        urllib.request.urlopen(request).read()
        if turn == 0:
            with open(os.environ["SAID"], "a") as said:
                said.write("now\\n")
    return {"reward": 0.0}


if __name__ == "__main__":
    print(json.dumps(play(os.environ["OPENAI_BASE_URL"])))
""",
    "lake.yaml": """
defaults: [base, _self_]
custom_envs: {FrozenLakeEnv: null, Lake: {env_type: "lake:Lake", env_config: {max_steps: 8}}}
es_manager: {train: {env_configs: {tags: [Lake]}}, val: {env_groups: 8, env_configs: {tags: [Lake]}}}
warmup: {steps: 0}
agent_proxy: {max_tokens: 200}
trainer: {tensorboard: false, check_envs: false, stop_at_success: null}
""",
    "agent.yaml": """
defaults: [base, _self_]
custom_envs: {FrozenLakeEnv: null, Agent: {env_type: program, env_config: {max_steps: 40}}}
es_manager: {train: {env_configs: {tags: [Agent]}}, val: {env_groups: 12, env_configs: {tags: [Agent]}}}
agent_proxy: {use_parallel_rollout: true, parallel_n_jobs: 6, max_tokens: 200}
warmup: {steps: 0}
trainer: {tensorboard: false, stop_at_success: null}
engine: {context: 1024}
""",
}
LAKE = ("train", "--config-dir", ".", "--config-name", "lake")
AGENT = ("train", "--config-dir", ".", "--config-name", "agent")
PARALLEL = "agent_proxy.use_parallel_rollout=true"
OF_AGENT = "+custom_envs.Agent.env_config"
SLOW_MODEL = (
    "engine.width=128",
    "engine.layers=2",
)  # in whose calls the process is for nearly all of its time
COMMAND = f"{OF_AGENT}.command=['{{python}}',{{here}}/agent.py]"
FUNCTION = (f"{OF_AGENT}.function=agent:play", f"{OF_AGENT}.folder=.", *SLOW_MODEL)


@contextlib.contextmanager
def begun(where, *words):
    """A command in a process group of its own, as a shell starts it, and the lines that it prints."""
    for name, text in FILES.items():
        (where / name).write_text(text)
    said = where / "said"
    os.mkfifo(said)  # what a program starts may write into it too
    reader = os.open(said, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(said, os.O_WRONLY)
    os.set_blocking(reader, True)
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", *words], stdout=writer, stderr=writer, cwd=where,
        env={**os.environ, "SAID": str(said)}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell may have ignored
    )  # fmt: skip
    os.close(writer)
    with process, open(reader, encoding="utf-8", errors="replace") as lines:
        try:
            yield process, lines
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def interrupted(where, *words, marker="now", impatient=False):
    """The exit code of a command that was interrupted after a line with the marker, and the lines that followed."""
    with begun(where, *words) as (process, lines):
        before = []
        for line in lines:
            before.append(line)
            if re.search(marker, line):
                break
        else:
            pytest.fail("".join(before))
        os.killpg(process.pid, signal.SIGINT)
        while impatient:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                break
            os.killpg(process.pid, signal.SIGINT)
        said = [line for line in lines if line.strip() and line != "now\n"]
        return process.wait(60), said


def check(code, said):
    """What is promised of every command."""
    assert code == 130, "".join(said)
    assert not NOISE.search("".join(said)), "".join(said)


@pytest.mark.parametrize(
    "words",
    [
        (*LAKE, *SLOW_MODEL),
        (*AGENT, *FUNCTION),
        pytest.param((*AGENT, COMMAND, *SLOW_MODEL), marks=pytest.mark.slow),
        pytest.param((*LAKE, PARALLEL, "agent_proxy.parallel.backend=thread", *SLOW_MODEL), marks=pytest.mark.slow),
        pytest.param((*LAKE, PARALLEL, "agent_proxy.parallel.backend=serial", *SLOW_MODEL), marks=pytest.mark.slow),
        pytest.param((*LAKE, "engine.name=huggingface", "engine.model={here}/model"), marks=pytest.mark.slow),
        pytest.param((*LAKE, "engine.name=huggingface", "engine.model={here}/model", PARALLEL,
                      "agent_proxy.parallel.backend=thread"), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_training_of_agents_ends_and_says_last_how_to_go_on(tmp_path, words):
    if "engine.name=huggingface" in words:
        write_tiny_model(tmp_path / "model")
    code, said = interrupted(tmp_path, *(word.replace("{here}", str(tmp_path)) for word in words))
    check(code, said)
    assert "go on with:" in said[-2]
    assert "resume=true" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "marker", "last"),
    [
        (("train-ppo", "--total-timesteps", "100000000"), "steps/s", r"go on with:\s+.* train-ppo --resume-from"),
        (("train-ppo", "--total-timesteps", "100000000", "--env", "Acrobot-v1", "--preset", "none", "--backend",
          "process", "--n-steps", "32"), "steps/s", r"go on with:\s+.* train-ppo --resume-from|start again"),
        (("train-recorded", "recordings=recordings", "train.epochs=1000"), "run folder",
         r"go on with:\s+.* train-recorded .*resume=true"),
        (("skills", "train", "--max-parallel-skills", "1"), "running", r"go on with:\s+.* skills train .*--resume"),
        (("split", "recordings", "--processor", "processor", "--num-cpus", "2"), "split 30 of", "again"),
        (("rollout", "--config-dir", ".", "--config-name", "lake", *SLOW_MODEL), "now",
         r"\d+ of \d+ episodes are kept in runs/rollout: the same command with --out runs/rollout goes on"),
        (("prove",), "trainings of", "again"),
        (("bench", "lake:Lake", "--seconds", "60"), "now", "again"),
    ],
)  # fmt: skip
def test_any_command_ends_and_says_last_how_to_go_on(tmp_path, words, marker, last):
    if "recordings" in " ".join(words):
        write_gui_recordings(tmp_path / "recordings", 300, steps=4, size=(200, 100))
        build_qwen_processor(tmp_path / "processor", vocabulary=5000)
    code, said = interrupted(tmp_path, *words, marker=marker)
    if words[0] == "skills":
        subprocess.run([sys.executable, "-m", "shoal", "skills", "stop"], cwd=tmp_path, check=True)
    check(code, said)
    assert re.search(last, " ".join(said[-2:]))


@pytest.mark.slow
@pytest.mark.parametrize("words", [(*LAKE, *SLOW_MODEL), (*AGENT, *FUNCTION)])
def test_pressing_ctrl_c_again_ends_at_once(tmp_path, words):
    check(*interrupted(tmp_path, *words, impatient=True))
