"""A program that knows nothing of shoal asks the gateway; its tokens are kept exactly."""

import asyncio
import itertools
import json
import random
import socket
import urllib.error
import urllib.request

import msgspec
import openai
import pytest

from shoal.core.data import Call
from shoal.gateway.chats import read_answer
from shoal.gateway.server import MOST_BODY, Gateway, GatewayServer
from shoal.gateway.sessions import Recorded
from shoal.rollout.samplers.batching import as_sampler
from shoal.rollout.samplers.sampler import Completion
from shoal.rollout.samplers.tiny import TinyEngine, TinyShape

CHAT = {"model": "m"}


class Scripted:
    """Says texts in order of the prompts' last words; counts how often it was asked."""

    def __init__(self, tokenizer, texts, seconds=0.0):
        self.tokenizer, self.texts, self.seconds, self.requests = tokenizer, texts, seconds, []

    async def sample(self, request):
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        prompt = self.tokenizer.decode(request.prompt_ids)
        text = next(text for word, text in self.texts.items() if prompt.endswith(word))
        ids = self.tokenizer.encode(text)
        return Completion(ids, (-0.5,) * len(ids), "stop", 7)


@pytest.fixture(scope="module")
def engine():
    return TinyEngine(["Up", "Down"], TinyShape(32, 1, 2, 2000), seed=3)


@pytest.fixture
def serve():
    servers = []

    def start(sampler, tokenizer, **more):
        servers.append(GatewayServer(Gateway(sampler, tokenizer, **more)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def client(server, session="a", **more):
    return openai.OpenAI(
        base_url=server.variables(session)["OPENAI_BASE_URL"], api_key="x", max_retries=0, **more
    )


def post(server, body, path="a/v1/chat/completions", headers=(), secret=None):
    address = f"{server.base}/{server.gateway.secret if secret is None else secret}/{path}"
    request = urllib.request.Request(address, body, {"content-type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_conversation_reuses_the_exact_tokens_of_the_turns_before(serve, engine):
    server = serve(as_sampler(engine), engine.tokenizer, max_tokens=12)
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": "begin"}]
    for turn in range(4):
        answer = client(server).chat.completions.create(messages=messages, temperature=1.0, **CHAT)
        messages += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": f"go {turn}"},
        ]
    session = server.gateway.sessions["a"]
    calls = [call for _, call in session.close()]
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert (session.roots, session.branches) == (1, 0)
    context = engine.tokenizer.start(
        [{"role": "system", "content": "Play."}, {"role": "user", "content": "begin"}]
    )
    for turn, call in enumerate(calls):  # as a rollout of shoal's own in append mode
        assert call.new_prompt_ids == context
        user = {"role": "user", "content": f"go {turn}"}
        context = engine.tokenizer.extend(call.response_ids, user)
        assert len(call.logprobs) == len(call.response_ids)


def test_sub_agents_in_parallel_say_the_same_in_any_order_of_arrival(serve, engine):
    """Fifty orders: two of them with the same prompt, and one goes on."""
    prompts = ["left", "right", "left", "deep"]

    async def play(gateway, order):
        async def one(prompt):
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 6}
            _, answer = await gateway.handle("chat/completions", "a", json.dumps(body).encode(), False)
            message = answer["choices"][0]["message"]
            body["messages"] += [
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": "on"},
            ]
            await gateway.handle("chat/completions", "a", json.dumps(body).encode(), False)

        await asyncio.gather(*(one(prompts[i]) for i in order))
        return tuple(call for _, call in gateway.sessions["a"].close())

    found = set()
    orders = list(itertools.permutations(range(4)))
    for order in random.Random(0).choices(orders, k=50):
        gateway = Gateway(as_sampler(engine), engine.tokenizer, seed=5)
        found.add(asyncio.run(play(gateway, order)))
    assert len(found) == 1
    (calls,) = found
    assert len(calls) == 8


def test_a_message_that_means_the_same_is_recognised_whatever_its_spelling(serve, engine):
    """Keys in another order, arguments as text or not, None for nothing, thoughts that were dropped."""
    said = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
    sampler = Scripted(engine.tokenizer, {"begin": said, "</tool_response>": "3"})
    server = serve(sampler, engine.tokenizer)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    first = client(server).chat.completions.create(
        messages=[{"role": "user", "content": "begin"}], tools=tools, **CHAT
    )
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    for content, arguments in ((None, '{"a": 1, "b": 2}'), ("", ' {"b":2,"a":1}')):
        function = {"name": "add", "arguments": arguments}
        back = {"role": "assistant", "content": content, "reasoning_content": "hm",
                "tool_calls": [{"id": call.id, "type": "function", "function": function}]}  # fmt: skip
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        messages = [{"role": "user", "content": "begin"}, back, result]
        client(server).chat.completions.create(messages=messages, tools=tools, **CHAT)
    session = server.gateway.sessions["a"]
    assert session.roots == 1
    assert [call.parent for _, call in session.close()] == [None, 0, 0]


def test_a_rewritten_history_begins_a_new_root_and_is_counted(serve, engine):
    server = serve(Scripted(engine.tokenizer, {"begin": "one", "next": "two"}), engine.tokenizer)
    for answer in ("one", "other"):
        messages = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": answer}]
        if answer == "one":
            client(server).chat.completions.create(messages=messages[:1], **CHAT)
        client(server).chat.completions.create(
            messages=[*messages, {"role": "user", "content": "next"}], **CHAT
        )
    session = server.gateway.sessions["a"]
    assert (session.roots, session.branches, len(session.calls)) == (2, 0, 3)


def test_several_choices_are_calls_of_their_own(serve, engine):
    server = serve(as_sampler(engine), engine.tokenizer, max_tokens=8)
    answer = client(server).chat.completions.create(messages=[{"role": "user", "content": "go"}], n=5, **CHAT)
    calls = [call for _, call in server.gateway.sessions["a"].close()]
    assert len(answer.choices) == len(calls) == 5
    assert len({call.response_ids for call in calls}) == 5  # each has noise of its own


def test_a_retry_of_an_sdk_gets_the_recorded_answer(serve, engine):
    sampler = Scripted(engine.tokenizer, {"go": "yes"}, seconds=0.2)
    server = serve(sampler, engine.tokenizer)
    body = json.dumps({"messages": [{"role": "user", "content": "go"}]}).encode()
    first = post(server, body)
    again = post(server, body, headers={"x-stainless-retry-count": "1"})
    assert again[1]["id"] == first[1]["id"]
    assert len(sampler.requests) == len(server.gateway.sessions["a"].calls) == 1
    assert post(server, body)[1]["id"] != first[1]["id"]  # the program asked the same again


def test_a_call_after_the_end_is_refused(serve, engine):
    server = serve(as_sampler(engine), engine.tokenizer, max_tokens=4)
    client(server).chat.completions.create(messages=[{"role": "user", "content": "go"}], **CHAT)
    server.gateway.sessions["a"].close()
    with pytest.raises(openai.ConflictError, match="session 'a' has ended"):
        client(server).chat.completions.create(messages=[{"role": "user", "content": "go"}], **CHAT)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"seed": 3}, "seed"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(serve, engine, more, name):
    server = serve(as_sampler(engine), engine.tokenizer, max_tokens=4)
    body = {"messages": [{"role": "user", "content": "go"}], **more}
    status, answer = post(server, json.dumps(body).encode())
    assert status == 400
    assert name in answer["error"]["message"]
    assert "a" not in server.gateway.sessions


def test_each_call_is_on_disk_before_it_is_answered(serve, engine, tmp_path):
    server = serve(as_sampler(engine), engine.tokenizer, max_tokens=6, journal=tmp_path / "calls.jsonl")
    for n in range(3):
        client(server).chat.completions.create(messages=[{"role": "user", "content": f"go {n}"}], **CHAT)
        lines = (tmp_path / "calls.jsonl").read_bytes().splitlines()
        recorded = [msgspec.json.decode(line, type=Recorded) for line in lines]
        assert [one.call for one in recorded] == [one.call for one in server.gateway.sessions["a"].calls]
        assert len(recorded) == n + 1
        assert isinstance(recorded[-1].call, Call)


def test_calls_at_once_are_written_together_and_a_disk_that_is_full_refuses_them(serve, engine, tmp_path):
    journal = tmp_path / "calls.jsonl"
    server = serve(as_sampler(engine), engine.tokenizer, max_tokens=6, journal=journal)
    body = json.dumps({"messages": [{"role": "user", "content": "go"}]}).encode()

    async def ask_many():
        ask = server.gateway.handle
        return await asyncio.gather(*(ask("chat/completions", f"s{n}", body, False) for n in range(100)))

    assert [status for status, _ in server.run(ask_many())] == [200] * 100
    names = [msgspec.json.decode(line, type=Recorded).session for line in journal.read_bytes().splitlines()]
    assert sorted(names) == sorted(f"s{n}" for n in range(100))
    journal.unlink()
    journal.mkdir()
    status, answer = post(server, body)
    assert status == 503
    assert "calls.jsonl" in answer["error"]["message"]


def test_strangers_are_refused(serve, engine):
    server = serve(as_sampler(engine), engine.tokenizer, max_tokens=4)
    body = json.dumps({"messages": [{"role": "user", "content": "go"}]}).encode()
    assert post(server, body)[0] == 200
    assert post(server, body, secret="guessed")[0] == 404
    assert post(server, body, headers={"host": "evil.example"})[0] == 403
    assert post(server, body, headers={"origin": "http://evil.example"})[0] == 403
    assert post(server, body, path="../a/v1/chat/completions")[0] == 404
    assert post(server, body, path="a/v1/embeddings")[0] == 404
    for broken in (b"", b"{", b"[]", b"[" * 100_000, b"\xff"):
        status, answer = post(server, broken)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    with socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2]))) as raw:
        head = f"POST /{server.gateway.secret}/a/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        raw.sendall(f"{head}Content-Length: {MOST_BODY + 1}\r\n\r\n".encode())
        assert b" 413 " in raw.recv(1000)
    assert post(server, body)[0] == 200


def test_a_sampler_that_fails_costs_time_and_no_session(serve, engine):
    class Fails(Scripted):
        async def sample(self, request):
            if not self.requests:
                self.requests.append(request)
                raise TimeoutError("the sampler hangs")
            return await super().sample(request)

    server = serve(Fails(engine.tokenizer, {"go": "yes"}), engine.tokenizer)
    with_retries = openai.OpenAI(
        base_url=server.variables("a")["OPENAI_BASE_URL"], api_key="x", max_retries=2
    )
    answer = with_retries.chat.completions.create(messages=[{"role": "user", "content": "go"}], **CHAT)
    assert answer.choices[0].message.content == "yes"
    assert len(server.gateway.sessions["a"].calls) == 1


def test_streams_and_responses_say_what_the_plain_answer_says(serve, engine):
    server = serve(Scripted(engine.tokenizer, {"go": "Up we go"}), engine.tokenizer)
    ask = client(server)
    messages = [{"role": "user", "content": "go"}]
    chunks = ask.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **CHAT
    )
    parts = list(chunks)
    assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == "Up we go"
    assert parts[-1].usage.completion_tokens == len(engine.tokenizer.encode("Up we go"))
    assert ask.responses.create(input="go", **CHAT).output_text == "Up we go"
    with ask.responses.stream(input="go", **CHAT) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == "Up we go"
        assert stream.get_final_response().output_text == "Up we go"
    calls = [call for _, call in server.gateway.sessions["a"].close()]
    assert len({call.new_prompt_ids for call in calls}) == 1  # one prompt, whatever the wire


def test_a_call_that_is_broken_or_of_no_offered_tool_stays_text():
    for text in (
        '<tool_call>{"name": "add", "arguments": }</tool_call>',
        '<tool_call>{"name": "rm"}</tool_call>',
        "<tool_call>[1]</tool_call>",
        f"<tool_call>{'[' * 100_000}</tool_call>",
    ):
        said = read_answer(text, ["add"])
        assert (said.text, said.calls) == (text, ())
