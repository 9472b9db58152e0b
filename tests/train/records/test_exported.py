import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.records import exchanges
from tests.train.agent.tiny_model import write_tiny_model
from transformers import AutoTokenizer

from shoal.cli.main import main
from shoal.core.data import read_trajectories
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

ROOT = Path(__file__).parents[3]
LETTERS = '''
from gymnasium.spaces import Discrete
from dataclasses import dataclass
from shoal.envs.actions import Projection
from shoal.envs.spaces import FreeText
from shoal.envs.text import Outcome, TextEnv


@dataclass(frozen=True)
class Rules:
    max_steps: int = 9
    goal: int = 3


class Letters(TextEnv[Rules]):
    """Any word scores; the prompt changes from turn to turn."""

    Config = Rules
    instructions = "Name letters."
    projection = Projection(lookup={chr(code): code - 32 for code in range(33, 127) if not chr(code).isupper()})
    action_space, observation_space = Discrete(95, start=0), FreeText(64)

    def _start(self, rng):
        self.total = int(rng.integers(100))
        self.turns = 0

    def _advance(self, action):
        valid = action != self.invalid_action
        self.total += action
        self.turns += 1
        won = self.total % self.config.goal == 0
        return Outcome(float(action % 3), won, won, valid=valid)

    def observe(self):
        return f"{self.turns}: {self.total}"
'''
SETTINGS = [
    "engine.name=huggingface", "+custom_envs.Letters={env_type: 'letters:Letters', env_config: {goal: 7}}",
    "+custom_envs.Letters.prompt={later: '{history} {observation} of {max_turns}?'}", "custom_envs.FrozenLakeEnv=null",
    "es_manager.train.env_configs.tags=[Letters]", "es_manager.val.env_configs.tags=[Letters]",
    "es_manager.train.env_groups=2", "es_manager.train.group_size=2", "es_manager.val.env_groups=2",
    "agent_proxy.prompt.system=Play.", "agent_proxy.prompt.first='{instructions} {observation} {step}'",
    "agent_proxy.prompt.history=2", "agent_proxy.prompt.prefill='<action>'", "agent_proxy.prompt.closing='</action>'",
    "agent_proxy.max_tokens=1", "agent_proxy.max_turn=4", "warmup.steps=0", "trainer.iterations=1",
    "use_parallel_envs=false", "trainer.tensorboard=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    (folder / "letters.py").write_text(LETTERS)
    return folder


@pytest.fixture(autouse=True)
def own_env(model, monkeypatch):
    monkeypatch.syspath_prepend(str(model))


def trained(model, folder, *more):
    config = compose_config("base", [*SETTINGS, f"engine.model={model}", f"run_dir={folder}", *more])
    with AgentTrainer(config) as trainer:
        list(trainer.train())
    return folder


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(model))
        return trained(model, tmp_path_factory.mktemp("runs") / "run")


def played(model, out, *words):
    """The episodes of an evaluation."""
    assert main(["eval", str(model), "--episodes", "6", "--seed", "3", "--out", str(out), *words]) == 0
    return list(read_trajectories(out / "trajectories" / "eval.jsonl"))


@pytest.mark.parametrize("to", ["hf", "shoal"])
def test_an_exported_model_is_evaluated_as_its_run_is(run, to, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out"), "--to", to]) == 0
    of_the_run = played(run, tmp_path / "one")
    assert played(tmp_path / "out", tmp_path / "two") == of_the_run
    turns = [turn for episode in of_the_run for turn in episode.turns]
    assert max(len(episode.turns) for episode in of_the_run) == 4
    assert {turn.action_is_valid for turn in turns} == {True}


def test_a_kind_of_env_that_is_named_keeps_the_templates_that_the_run_had_for_it(model, run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    [episode, *_] = played(
        tmp_path / "out", tmp_path / "eval", "--env", "letters:Letters", "--env-config", "goal=99"
    )
    shown = AutoTokenizer.from_pretrained(model).decode(exchanges(episode)[-1].prompt_ids)
    assert "of9?" in shown.replace(" ", "")  # its own limit of turns, not that of the run


def test_adapters_are_exported_with_the_same_file_merged_or_alone(model, run, tmp_path, capsys):
    lora = trained(model, tmp_path / "lora", "model.lora.rank=2")
    for name, words in (("merged", []), ("whole", ["--to", "shoal"]), ("alone", ["--adapter"])):
        assert main(["export", str(lora), str(tmp_path / name), *words]) == 0
    said = [(tmp_path / name / "shoal.json").read_text() for name in ("merged", "whole", "alone")]
    assert said[0] == said[1] == said[2]
    tokens = [
        [[call.response_ids for call in episode.calls] for episode in played(folder, tmp_path / f"{folder.name}-eval")]
        for folder in (lora, tmp_path / "merged", tmp_path / "whole")
    ]  # fmt: skip
    assert tokens[0] == tokens[1] == tokens[2]
    assert main(["eval", str(tmp_path / "alone")]) == 2
    assert "is an adapter alone" in capsys.readouterr().err


def test_the_file_tells_another_program_all_that_it_needs(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    play = json.loads((tmp_path / "out" / "shoal.json").read_text())
    proxy, kind, role = play["agent_proxy"], play["custom_envs"]["Letters"], play["roles"]["Letters"]
    assert (proxy["max_tokens"], proxy["stop"], proxy["prompt"]["prefill"]) == (1, ["</action>"], "<action>")
    assert (kind["env_type"], kind["env_config"]) == ("letters:Letters", {"goal": 7})
    assert kind["prompt"] == {"later": "{history} {observation} of {max_turns}?"}
    assert list(play["custom_envs"]) == ["Letters"]
    assert (role["max_turns"], role["tags"], role["words"]["a"], role["invalid"]) == (4, ["action"], 65, 95)


def test_the_program_of_the_page_plays_an_exported_model_as_eval_does(run, model, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    page = (ROOT / "docs" / "how-to" / "exported.md").read_text()
    [program] = re.findall(r"^```python\n(# play.py\n.*?)^```", page, re.S | re.M)
    (tmp_path / "play.py").write_text(program)
    path = os.pathsep.join([str(ROOT / "src"), str(model)])
    longest = max(played(run, tmp_path / "eval"), key=lambda episode: len(episode.turns))
    words = [sys.executable, "play.py", "out", str(longest.env_seed)]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *lines, outcome = done.stdout.splitlines()
    assert lines == [f"{turn.response!r} {turn.reward}" for turn in longest.turns]
    assert outcome == ("success" if longest.success else "no success")
    assert len(lines) > 2, "no past turns were shown"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 7, "must be an object of format 1, got 7: export the run again"),
        ("algorithm", {}, "has an unknown key 'algorithm'"),
        ("agent_prox", {}, "Did you mean 'agent_proxy'"),
        ("agent_proxy", {"prompt": {"frist": ""}}, "Did you mean 'agent_proxy.prompt.first'"),
        ("agent_proxy", {"max_tokens": "many"}, "agent_proxy.max_tokens"),
        ("custom_envs", {}, "export the run again"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_with_a_remedy(run, tmp_path, capsys, key, value, message):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "shoal.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert main(["eval", str(tmp_path / "out"), "--episodes", "2"]) in (1, 2)
    told = capsys.readouterr().err
    assert message in told
    assert "export the run again" in told


def test_a_model_without_the_file_shows_its_prompt_and_a_bad_answer(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "shoal.json").unlink()
    ask = ["eval", str(tmp_path / "out"), "--env", "bandit", "--episodes", "2", "--json", "--max-tokens", "3"]
    assert main(ask) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["valid_actions"] == 0
    assert "no shoal.json" in shown.err
    assert "Possibleactions:" in shown.err.replace(" ", "")
    assert "0% of the answers held an action" in shown.err
    assert "inside <action>…</action>:" in shown.err
    assert "shoal export RUN OUT" in shown.err


def test_answers_that_end_too_early_are_told_with_the_setting_that_helps(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "shoal.json"
    play = json.loads(file.read_text())
    play["agent_proxy"]["prompt"] |= {"closing": "", "first": "{actions}"}
    file.write_text(json.dumps(play))
    assert main(["eval", str(tmp_path / "out"), "--episodes", "2"]) == 0
    told = capsys.readouterr().err
    assert "cut off at 1 tokens: --max-tokens 4" in told
    assert "no shoal.json" not in told


def test_a_run_whose_env_is_gone_is_exported_without_its_words(run, tmp_path, capsys, caplog):
    copy = shutil.copytree(run, tmp_path / "run")
    settings = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(settings.replace("letters:Letters", "nowhere:Letters"))
    assert main(["export", str(copy), str(tmp_path / "out")]) == 0
    assert "an env of the run cannot be made here" in caplog.text + capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "shoal.json").read_text())["roles"] == {}
