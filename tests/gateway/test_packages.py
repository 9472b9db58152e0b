"""Programs with packages of others, unchanged, where they are installed."""

import asyncio
import importlib
import inspect
import json
import random
import re
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from shoal.envs.program import ProgramConfig
from shoal.rollout.functions import FunctionProcesses, Result, serve_command
from shoal.rollout.programs import command_result
from shoal.train.agent.config import compose_config
from tests.gateway.asking import Says

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "gateway"
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


def adds(prompt):
    """Calls the tool `add`, and then says what came of it."""
    return "It is 3." if "<tool_response>\n3\n" in prompt else CALL


@pytest.fixture
def server(serve):
    return serve(Says(adds))


def parents(server):
    return [call.parent for _, call in server.gateway.sessions["a"].close()]


def test_the_anthropic_package_calls_tools_and_streams(server):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.variables("a")["ANTHROPIC_BASE_URL"], api_key="x")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    settings = {
        "model": "shoal",
        "max_tokens": 200,
        "system": "Add.",
        "tools": [{"name": "add", "input_schema": schema}],
    }
    messages = [{"role": "user", "content": "1 and 2"}]
    answer = client.messages.create(messages=messages, **settings)
    assert answer.stop_reason == "tool_use"
    (used,) = [block for block in answer.content if block.type == "tool_use"]
    assert (used.name, used.input) == ("add", {"a": 1, "b": 2})
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "3"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **settings) as stream:
        assert "".join(stream.text_stream) == "It is 3."
        assert stream.get_final_message().stop_reason == "end_turn"
    assert parents(server) == [None, 0]
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(messages=messages[:1], tool_choice={"type": "any"}, **settings)


@pytest.mark.parametrize("wire", ["chat_completions", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_agents_sdk_of_openai_runs_an_agent_with_a_tool(server, monkeypatch, wire, streamed):
    agents = pytest.importorskip("agents")
    for name, value in server.variables("a").items():
        monkeypatch.setenv(name, value)
    agents.set_default_openai_api(wire)
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    agent = agents.Agent(name="Adder", instructions="Add.", tools=[add], model="shoal")

    async def run():
        async with agents.AsyncOpenAI() as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            if not streamed:
                return await agents.Runner.run(agent, "1 and 2")
            result = agents.Runner.run_streamed(agent, "1 and 2")
            async for _ in result.stream_events():
                pass
            return result

    assert asyncio.run(run()).final_output == "It is 3."
    assert parents(server) == [None, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "versions", "prompt"),
    [
        ("words_verifiers.py", "verifiers", "0.4", (("user", "Say b."),)),
        ("words_verifiers_01.py", "verifiers", "0.1", (("user", "Say b."),)),
        ("words_inspect.py", "inspect_ai", "0.", (("system", "One word."), ("user", "Say b."))),
    ],
)
def test_an_environment_of_others_plays_through_the_gateway_and_its_own_score_is_the_reward(
    serve, name, package, versions, prompt
):
    """As commands, whose packages need not agree with shoal's."""
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"the package {package} is not installed")
    if not installed.startswith(versions):
        pytest.skip(f"{package} {installed} is installed, and this is an example of {versions}")
    processes = FunctionProcesses(serve_command, (("{python}", name), str(EXAMPLES)))

    async def played(variables):
        try:
            return command_result(*await processes.ask(['{"seed": 1}', dict(variables)], 300))
        finally:
            processes.end()

    for text, reward in (("b!", 1.0), ("a!", 0.0)):
        server = serve(Says(text))
        result = asyncio.run(played(server.variables("a")))
        (call,) = server.gateway.sessions["a"].calls
        assert (result, call.turns, call.answer) == (Result(reward, reward == 1), prompt, text)


def advises(tool, field, prompt):
    """Asks the tool for the weather, and answers in the form of a package, with the thing for rain."""
    told = re.search(r"(?:<tool_response>|Observation:)\s+(\w+)", prompt.rpartition("I go out.")[2])
    if told is None:
        said = {"name": "weather", "arguments": {}}
    else:
        advice = {"weather": told[1], "bring": "umbrella"}
        said = {field: advice} if field else advice
        if tool:
            said = {"name": tool, "arguments": said}
    text = json.dumps(said)
    return f"<tool_call>\n{text}\n</tool_call>" if "name" in said else text


WEATHER = [
    ("agents", "", ""),
    ("pydantic_ai", "final_result", ""),
    ("smolagents", "final_answer", "answer"),
]


@pytest.mark.parametrize(("package", "tool", "field"), WEATHER)
def test_an_agent_that_asks_for_the_weather_is_paid_for_the_thing_that_fits_it(
    serve, monkeypatch, package, tool, field
):
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module(f"weather_{package}")
    rewards, server = [], serve(Says(partial(advises, tool, field)))
    for seed in range(8):
        address = server.variables(str(seed))["OPENAI_BASE_URL"]
        came = example.play({"seed": seed}, address)
        rewards.append(asyncio.run(came) if inspect.iscoroutine(came) else came)
        sky = random.Random(seed).choice(["rain", "snow", "sun", "wind"])
        assert rewards[-1] == (sky == "rain")
        assert len(server.gateway.sessions[str(seed)].close()) == 2
    assert set(rewards) == {0.0, 1.0}


@pytest.mark.parametrize(("package", "tool", "field"), WEATHER)
def test_the_config_of_the_weather_names_each_program(package, tool, field):
    override = f"custom_envs.Weather.env_config.function=weather_{package}:play"
    config = compose_config("weather", [override, "engine.model=smollm2"], EXAMPLES)
    program = ProgramConfig(**config.custom_envs["Weather"].env_config)
    module, _, function = program.function.partition(":")
    text = (EXAMPLES / f"{module}.py").read_text()
    assert re.search(rf"^(async )?def {function}\(task, base_url\)", text, re.MULTILINE)
