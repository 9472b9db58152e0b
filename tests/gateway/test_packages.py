"""Programs with packages of others, unchanged: `anthropic` and OpenAI's Agents SDK, where they are installed."""

import asyncio

import pytest

from shoal.gateway.server import Gateway, GatewayServer
from shoal.rollout.samplers.sampler import Completion
from shoal.rollout.samplers.tiny import TinyEngine, TinyShape

CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


class Adds:
    """Calls the tool `add`, and then says what came of it."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def sample(self, request):
        prompt = self.tokenizer.decode(request.prompt_ids)
        ids = self.tokenizer.encode("It is 3." if "<tool_response>\n3\n" in prompt else CALL)
        return Completion(ids, (-0.5,) * len(ids), "stop", 7)


@pytest.fixture
def server():
    tokenizer = TinyEngine([], TinyShape(32, 1, 2, 2000)).tokenizer
    with GatewayServer(Gateway(Adds(tokenizer), tokenizer)) as server:
        yield server


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
