"""The small models of `examples/gateway/weather_start.py` and `examples/tools/weather_model.py`, and who is paid."""

import json
import sys
from pathlib import Path

import pytest

from shoal.envs.actions import ToolCall

REPO = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def module(monkeypatch):
    """Imports a module of a folder, and forgets it."""
    made = []

    def load(folder, name):
        monkeypatch.syspath_prepend(str(REPO / folder))
        made.append(name)
        return __import__(name)

    yield load
    for name in made:
        sys.modules.pop(name, None)


def test_a_small_model_writes_each_answer_in_two_pieces_and_the_question_in_one(module):
    start = module("examples/gateway", "weather_start")
    tokenizer = start.small_tokenizer()
    for tool in (None, *start.TOOLS):
        said = start.answers(tool)
        assert len(set(said.values())) == 16
        for text in said.values():
            ids = tokenizer.encode(text)
            assert len(ids) == 2
            assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(start.call("weather"))) == 1
    assert json.loads(start.answers(None)["sun", "coat"]) == {"weather": "sun", "bring": "coat"}


@pytest.mark.parametrize("package", ["openai-agents", "pydantic-ai-slim", "smolagents"])
def test_an_answer_is_valid_if_it_is_json_of_the_output_type(module, package):
    start = module("examples/gateway", "weather_start")
    from benchmarks.agents_learn import PACKAGES, is_valid

    answers = start.answers(PACKAGES[package][1] or None)
    assert all(is_valid(package, text) for text in answers.values())
    right = answers["rain", "hat"]
    for wrong in (right.replace("hat", "tie"), right.replace("bring", "take"), right[:-14], "hat", "[]", ""):
        assert not is_valid(package, wrong), wrong


def test_a_model_writes_calls_of_the_tool_env_in_whole_pieces(module):
    model = module("examples/tools", "weather_model")
    tokenizer = model.small_tokenizer(TEMPLATE)
    said = model.SKY.format("wind") + model.THING.format("coat")
    ids = tokenizer.encode(said)
    assert len(ids) == 2
    assert tokenizer.decode(ids) == said
    assert len(tokenizer.encode(model.WEATHER)) == 1


@pytest.mark.parametrize(
    ("said", "thing", "paid"), [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.0)], ids=["right", "thing", "weather"]
)
def test_the_tool_env_pays_what_fits_the_weather_that_its_tool_told(module, said, thing, paid):
    env_module = module("examples/tools", "weather_env")
    env = env_module.Weather()
    _, info = env.reset(seed=3)
    assert [tool["name"] for tool in info["tools"]] == ["weather", "bring"]
    _, reward, over, _, info = env.step(ToolCall("weather", {}))
    assert (reward, over) == (0.0, False)
    sky = info["tool_results"][0]
    skies, things = list(env_module.NEEDED), list(env_module.NEEDED.values())
    at = skies.index(sky)
    call = ToolCall("bring", {"weather": skies[(at + said) % 4], "item": things[(at + thing) % 4]})
    _, reward, over, _, info = env.step(call)
    assert (reward, over, info["success"]) == (paid, True, bool(paid))


def test_what_the_tool_envs_expert_shows_tells_nothing_of_what_is_paid(module):
    env_module = module("examples/tools", "weather_env")
    paid = 0.0
    for seed in range(200):
        env = env_module.Weather()
        env.reset(seed=seed)
        env.step(env.expert_action())
        paid += env.step(env.expert_action())[1]
    assert 30 <= paid <= 70  # a quarter, of 200
