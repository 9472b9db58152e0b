"""A program that knows nothing of shoal asks the gateway; its tokens are kept exactly."""

import asyncio
import itertools
import json
import random
import socket
import urllib.error
import urllib.request
from collections import Counter

import msgspec
import pytest

from shoal.core.data import Call
from shoal.core.errors import EngineError
from shoal.gateway.server import MOST_BODY, Gateway
from shoal.gateway.sessions import Recorded
from shoal.samplers.asking import SamplerClient
from shoal.samplers.sampler import Completion
from tests.gateway.asking import CHAT, GO, Says, by_end, chat_of, client, handled, post

TOOL = {"type": "function", "function": {"name": "add"}}


def test_a_conversation_reuses_the_exact_tokens_of_the_turns_before(serve, engine):
    server = serve(SamplerClient(engine), max_tokens=12)
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
            _, answer = await handled(gateway, "a", chat_of(prompt, max_tokens=6))
            said = answer["choices"][0]["message"]["content"]
            await handled(gateway, "a", chat_of(prompt, said, "on", max_tokens=6))

        await asyncio.gather(*(one(prompts[i]) for i in order))
        return tuple(call for _, call in gateway.sessions["a"].close())

    found = set()
    orders = list(itertools.permutations(range(4)))
    for order in random.Random(0).choices(orders, k=50):
        gateway = Gateway(SamplerClient(engine), engine.tokenizer, seed=5)
        found.add(asyncio.run(play(gateway, order)))
    assert len(found) == 1
    (calls,) = found
    assert len(calls) == 8


def test_a_message_that_means_the_same_is_recognised_whatever_its_spelling(serve, engine):
    """Keys in another order, arguments as text or not, None for nothing, thoughts that were dropped."""
    said = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
    server = serve(Says(by_end({"begin": said, "</tool_response>": "3"})))
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
    assert [call.parent for _, call in server.gateway.sessions["a"].close()] == [None, 0, 0]


def test_a_rewritten_history_begins_a_new_root(serve, engine):
    server = serve(Says(by_end({"begin": "one", "next": "two"})))
    for answer in ("one", "other"):
        messages = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": answer}]
        if answer == "one":
            client(server).chat.completions.create(messages=messages[:1], **CHAT)
        client(server).chat.completions.create(
            messages=[*messages, {"role": "user", "content": "next"}], **CHAT
        )
    calls = server.gateway.sessions["a"].calls
    assert [recorded.call.parent for recorded in calls] == [None, 0, None]


def test_several_choices_are_calls_of_their_own(serve, engine):
    server = serve(SamplerClient(engine), max_tokens=8)
    answer = client(server).chat.completions.create(messages=[{"role": "user", "content": "go"}], n=5, **CHAT)
    calls = [call for _, call in server.gateway.sessions["a"].close()]
    assert len(answer.choices) == len(calls) == 5
    assert len({call.response_ids for call in calls}) == 5  # each has noise of its own


def test_a_retry_of_an_sdk_gets_the_recorded_answer(serve, engine):
    sampler = Says("yes")
    server, body = serve(sampler), chat_of("go")
    first = post(server, body)
    again = post(server, body, headers={"x-stainless-retry-count": "1"})
    assert again[1]["id"] == first[1]["id"]
    assert len(sampler.requests) == len(server.gateway.sessions["a"].calls) == 1
    assert post(server, body)[1]["id"] != first[1]["id"]  # the program asked the same again


REFUSED = [
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"response_format": {"type": "grammar"}}, "response_format: a format of 'grammar'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format: the schema",
    ),
    ({"tool_choice": "required"}, "tool_choice='required': there are no tools"),
    ({"tool_choice": "perhaps", "tools": [TOOL]}, "tool_choice='perhaps' is not served here"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": [TOOL]},
        "tool_choice: no tool is named 'fly'",
    ),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"temperature": "hot"}, "temperature"),
    ({"n": 0}, "n"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": [*GO, {"role": "assistant", "tool_calls": 5}, *GO]}, "tool_calls"),
    (
        {
            "messages": [
                *GO,
                {"role": "assistant", "tool_calls": [{"function": {"arguments": "9" * 5000}}]},
                *GO,
            ]
        },
        "messages[1]",
    ),
    ({"messages": [{"role": "user", "content": "half a pair: \ud800"}]}, "the request is no JSON"),
    ({"messages": [{"role": "user", "content": "go", "weight": float("nan")}]}, "JSON"),
    ({"tools": 5}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"logprobs": 1}, "logprobs"),
    ({"stream": True, "stream_options": "usage"}, "stream_options"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "messages[0] must be"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({**chat_of("go", "a"), "add_generation_prompt": True}, "messages: the last message"),
    (
        {**chat_of("go", "a"), "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
    ),
]
"""What a chat completion may not hold, and what is said of it."""
REFUSED_ELSEWHERE = [
    ("responses", {"input": "go", "text": {"format": {"type": "grammar"}}}, "text.format"),
    ("completions", {"prompt": ["a", "b"]}, "prompt must be one text, or a list of token ids"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix='b' is not served here"),
    ("responses", {"input": "go", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"input": "go", "tools": [{"type": "web_search"}]}, "web_search"),
    ("responses", {"input": "go", "include": ["message.output_text.logprobs"]}, "include"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ("messages", {"messages": GO, "output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
    ("messages", {"messages": GO, "tool_choice": {"type": "any"}}, "there are no tools"),
    ("messages", {"messages": GO, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "input_schema"),
    ("messages", {"messages": GO, "tools": 5}, "tools"),
    ("messages", {"messages": GO, "stop_sequences": "end"}, "stop_sequences"),
    ("messages", {"messages": GO, "stop_sequences": [7]}, "stop_sequences"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
]


def test_what_is_not_honoured_is_refused_by_name(serve, engine):
    server = serve(SamplerClient(engine), max_tokens=4)
    asked = [("chat/completions", {"messages": GO, **more}, name) for more, name in REFUSED]
    for path, body, name in asked + REFUSED_ELSEWHERE:
        status, answer = post(server, body, f"a/v1/{path}")
        assert (status, name in answer["error"]["message"]) == (400, True), (body, answer)
    assert "a" not in server.gateway.sessions


def test_each_call_is_on_disk_before_it_is_answered(serve, engine, tmp_path):
    server = serve(SamplerClient(engine), max_tokens=6, journal=tmp_path / "calls.jsonl")
    for n in range(3):
        client(server).chat.completions.create(messages=[{"role": "user", "content": f"go {n}"}], **CHAT)
        lines = (tmp_path / "calls.jsonl").read_bytes().splitlines()
        recorded = [msgspec.json.decode(line, type=Recorded) for line in lines]
        assert [one.call for one in recorded] == [one.call for one in server.gateway.sessions["a"].calls]
        assert len(recorded) == n + 1
        assert isinstance(recorded[-1].call, Call)


def test_calls_at_once_are_written_together(engine, tmp_path):
    journal = tmp_path / "calls.jsonl"
    gateway = Gateway(SamplerClient(engine), engine.tokenizer, max_tokens=6, journal=journal)

    async def ask_many():
        return await asyncio.gather(*(handled(gateway, f"s{n}", chat_of("go")) for n in range(100)))

    assert [status for status, _ in asyncio.run(ask_many())] == [200] * 100
    names = [msgspec.json.decode(line, type=Recorded).session for line in journal.read_bytes().splitlines()]
    assert sorted(names) == sorted(f"s{n}" for n in range(100))


def test_strangers_are_refused_and_each_refusal_is_counted_in_its_session(serve, engine):
    server = serve(SamplerClient(engine), max_tokens=4)
    body = chat_of("go")
    assert post(server, body)[0] == 200
    assert post(server, body, secret="guessed")[0] == 404
    assert post(server, body, headers={"host": "evil.example"})[0] == 403
    assert post(server, body, headers={"origin": "http://evil.example"})[0] == 403
    assert post(server, body, path="../a/v1/chat/completions")[0] == 404
    assert post(server, body, path="a/v1/embeddings")[0] == 404
    with pytest.raises(urllib.error.HTTPError) as got:
        urllib.request.urlopen(server.variables("a")["OPENAI_BASE_URL"])
    assert "POST to /SECRET/SESSION/v1/chat/completions" in got.value.read().decode()
    for broken in (b"", b"{", b"[]", b"[" * 100_000, b"\xff"):
        status, answer = post(server, broken)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    with socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2]))) as raw:
        head = f"POST /{server.gateway.secret}/a/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        raw.sendall(f"{head}Content-Length: {MOST_BODY + 1}\r\n\r\n".encode())
        assert b" 413 " in raw.recv(1000)
    refused = {403: 2, 404: 2, 400: 5, 413: 1}  # with the secret, for this session: the others are none of it
    assert post(server, body)[0] == 200
    found = Counter[int]()
    for one in server.gateway.sessions["a"].requests.refused:
        found[int(one.what.partition(":")[0])] += one.count
    assert found == refused


def test_a_text_that_ends_an_answer_is_no_part_of_it_but_of_its_tokens(serve, engine):
    server = serve(Says(by_end({"go": "Act: up\nObservation:", "seen": "done"}), engine.tokenizer))
    first = client(server).chat.completions.create(messages=GO, stop=["\nObservation:", "?"], **CHAT)
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("Act: up", "stop")
    back = [*GO, {"role": "assistant", "content": "Act: up"}, {"role": "user", "content": "seen"}]
    client(server).chat.completions.create(messages=back, **CHAT)
    one, two = (call for _, call in server.gateway.sessions["a"].close())
    assert engine.tokenizer.decode(one.response_ids) == "Act: up\nObservation:"
    assert two.parent == 0
    status, answer = post(server, {"messages": GO, "stop_sequences": ["\nObs"]}, "b/v1/messages")
    assert status == 200
    assert answer["content"] == [{"type": "text", "text": "Act: up"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\nObs")


def test_answers_that_differ_in_blanks_alone_are_not_mistaken_for_each_other(serve, engine):
    """Whichever of two answers to one prompt comes first, and whether a program drops the blanks or not."""

    class Blanks:
        async def sample(self, request):
            text = ("yes", "yes ", " yes")[request.key.path[-1]]
            ids = engine.tokenizer.encode(text)
            return Completion(ids, (-0.5,) * len(ids), "stop", 7)

    server = serve(Blanks(), engine.tokenizer)
    client(server).chat.completions.create(messages=GO, n=3, **CHAT)
    for said in (" yes", "yes", "yes ", "\nyes\n"):
        back = [*GO, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        client(server).chat.completions.create(messages=back, **CHAT)
    session = server.gateway.sessions["a"]
    said = [recorded.answer for recorded in session.calls[:3]]
    least = min(range(3), key=lambda nth: (session.calls[nth].digest, nth))
    assert [said[recorded.call.parent] for recorded in session.calls[3:]] == [
        " yes",
        "yes",
        "yes ",
        said[least],
    ]


def test_a_failure_of_the_sampler_changes_no_noise_and_is_not_forgotten(serve, engine):
    """What is asked again is answered as if nothing had been; what is not leaves its session failed."""

    class FailsOnce:
        def __init__(self):
            self.inner, self.seen = SamplerClient(engine), set()

        async def sample(self, request):
            if request.key not in self.seen:
                self.seen.add(request.key)
                raise EngineError("the engine is away")
            return await self.inner.sample(request)

    bodies = [chat_of(text, n=2) for text in "ab"]
    plain, failing = (serve(s, engine.tokenizer, max_tokens=4) for s in (SamplerClient(engine), FailsOnce()))
    assert [post(plain, body)[0] for body in bodies] == [200, 200]
    assert [post(failing, body)[0] for body in bodies] == [503, 503]
    session = failing.gateway.sessions["a"]
    assert session.calls == []
    assert post(failing, bodies[0])[0] == 200
    assert str(session.failed) == "the engine is away"  # the other prompt was never answered
    assert post(failing, bodies[1])[0] == 200
    assert session.failed is None
    found = [[call for _, call in s.gateway.sessions["a"].close()] for s in (plain, failing)]
    assert found[0] == found[1]


def test_streams_and_responses_say_what_the_plain_answer_says(serve, engine):
    server = serve(Says("Up we go", engine.tokenizer))
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
    chunks = ask.chat.completions.create(messages=messages, stream=True, n=2, logprobs=True, **CHAT)
    texts, counts = Counter(), Counter()
    for choice in itertools.chain.from_iterable(chunk.choices for chunk in chunks):
        texts[choice.index, choice.delta.content or ""] += 1
        counts[choice.index] += len(choice.logprobs.content if choice.logprobs else ())
    assert {(0, "Up we go"), (1, "Up we go")} <= set(texts)
    assert counts == {place: len(engine.tokenizer.encode("Up we go")) for place in (0, 1)}
    calls = [call for _, call in server.gateway.sessions["a"].close()]
    assert len({call.new_prompt_ids for call in calls}) == 1  # one prompt, whatever the wire


def test_an_answer_that_was_cut_says_so_on_every_wire(serve, engine):
    server = serve(Says("Up we", finish="length"))
    ask = client(server)
    assert ask.chat.completions.create(messages=GO, **CHAT).choices[0].finish_reason == "length"
    assert ask.responses.create(input="go", **CHAT).incomplete_details.reason == "max_output_tokens"
    last = list(ask.responses.create(input="go", stream=True, **CHAT))[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", "Up we")
    _, answer = post(server, chat_of("go"), "a/v1/messages")
    assert answer["stop_reason"] == "max_tokens"


def test_an_answer_that_is_gone_on_with_ends_the_prompt_and_is_a_turn_of_what_follows(serve, engine):
    tokenizer = engine.tokenizer
    model = Says(by_end({"<a>": "Up</a>", "more": "no"}), tokenizer)
    server = serve(model)
    begun = [*GO, {"role": "assistant", "content": "<a>"}]
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    with client(server) as asking:
        said = asking.chat.completions.create(messages=begun, extra_body=go_on, **CHAT)
    assert said.choices[0].message.content == "Up</a>"
    prompt = tokenizer.start(GO) + tokenizer.encode("<a>")
    assert model.requests[0].prompt_ids == prompt

    later = [*GO, {"role": "assistant", "content": "<a>Up</a>"}, {"role": "user", "content": "more"}]
    with client(server) as asking:
        answer = asking.chat.completions.create(messages=later, **CHAT)
    answered = prompt + tokenizer.encode("Up</a>")
    assert model.requests[1].prompt_ids[: len(answered)] == answered
    assert answer.usage.prompt_tokens_details.cached_tokens == len(answered)
