"""Structured output, forced tools and the like: told to the model in words, counted, never enforced."""

import asyncio
import json
import urllib.request

import openai
import pytest

from shoal.samplers.asking import SamplerClient
from tests.gateway.asking import CHAT, GO, Says, chat_of, client, post

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
OTHER = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture
def ask(serve):
    """The JSON of an answer, the last prompt, and what is counted of the session."""

    def asked(path, body, text="ok", session="a"):
        model = asked.models.setdefault(text, Says(text))
        server = asked.servers.setdefault(text, serve(model, max_tokens=200))
        status, answer = post(server, body, f"{session}/v1/{path}")
        assert status == 200, answer
        counted = server.gateway.sessions[session].requests
        return (
            answer,
            model.prompts[-1],
            {} if counted is None else {c.what: c.count for c in counted.unenforced},
        )

    asked.models, asked.servers = {}, {}
    return asked


IN_JSON = "Answer with one JSON value and nothing else."
OF_SCHEMA = f"{IN_JSON} It must fit this JSON Schema: {json.dumps(SCHEMA, sort_keys=True)}"
FUNCTION = {"type": "function", "function": WEATHER}
CLAUDES = {"name": "weather", "input_schema": SCHEMA}
WISHES = [  # path, what is asked for, what the model is told, what is counted
    ("chat/completions", {"response_format": {"type": "json_object"}}, IN_JSON, "response_format"),
    (
        "chat/completions",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "P", "schema": SCHEMA, "strict": True},
            }
        },
        OF_SCHEMA,
        "response_format",
    ),
    ("chat/completions", {"tools": [FUNCTION], "tool_choice": "required"}, "Call a tool.", "tool_choice"),
    (
        "chat/completions",
        {"tools": [FUNCTION, OTHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        "Call the tool weather.",
        "tool_choice",
    ),
    (
        "chat/completions",
        {"tools": [FUNCTION], "parallel_tool_calls": False},
        "Call at most one tool.",
        "parallel_tool_calls",
    ),
    ("chat/completions", {"seed": 3}, None, "seed"),
    ("chat/completions", {"reasoning_effort": "low"}, None, "reasoning_effort"),
    ("chat/completions", {"verbosity": "low"}, None, "verbosity"),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "P", "schema": SCHEMA}}},
        OF_SCHEMA,
        "text.format",
    ),
    ("responses", {"reasoning": {"effort": "high", "summary": "auto"}}, None, "reasoning"),
    ("responses", {"text": {"verbosity": "low"}}, None, "verbosity"),
    (
        "responses",
        {"tools": [{"type": "function", **WEATHER}], "tool_choice": {"type": "function", "name": "weather"}},
        "Call the tool weather.",
        "tool_choice",
    ),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        OF_SCHEMA,
        "output_config.format",
    ),
    ("messages", {"tools": [CLAUDES], "tool_choice": {"type": "any"}}, "Call a tool.", "tool_choice"),
    (
        "messages",
        {"tools": [CLAUDES], "tool_choice": {"type": "tool", "name": "weather"}},
        "Call the tool weather.",
        "tool_choice",
    ),
    (
        "messages",
        {"tools": [CLAUDES], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "Call at most one tool.",
        "disable_parallel_tool_use",
    ),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, None, "thinking"),
    ("messages", {"output_config": {"effort": "low"}}, None, "effort"),
]
BODY = {
    "chat/completions": {"messages": GO},
    "responses": {"input": "go"},
    "messages": {"messages": GO, "max_tokens": 99},
}


@pytest.mark.parametrize(("path", "wish", "told", "counted"), WISHES)
def test_a_wish_is_told_in_the_system_message_and_counted(ask, path, wish, told, counted):
    answer, prompt, counts = ask(path, {**BODY[path], **wish}, text='{"city": "Oslo"}')
    assert counts == {counted: 1}
    assert answer
    plain = ask(path, BODY[path], text='{"city": "Oslo"}', session="b")[1]
    assert told is None or told in prompt
    assert (prompt == plain) == (told is None)
    if told is not None:
        assert prompt.index(told) < prompt.index("go")
    assert "clock" not in prompt, "only the tool that is named is offered"


@pytest.mark.parametrize("text", ["It is Oslo.", '{"city": '])
def test_answers_that_are_no_json_are_counted(ask, text):
    wish = {"response_format": {"type": "json_object"}}
    _, _, counts = ask("chat/completions", {"messages": GO, **wish}, text=text)
    assert counts == {"response_format": 1, "invalid_json": 1}
    assert ask("chat/completions", {"messages": GO}, text=text, session="b")[2] == {}


def test_what_asks_for_nothing_is_neither_told_nor_counted(ask):
    nothing = {
        "response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": True, "seed": None,
        "metadata": {"a": "b"}, "user": "me", "never_heard_of": None, "thinking": None,
    }  # fmt: skip
    _, prompt, counts = ask("chat/completions", {"messages": GO, **nothing})
    assert counts == {}
    assert prompt == ask("chat/completions", {"messages": GO}, session="b")[1]
    _, _, counts = ask("messages", {"messages": GO, "max_tokens": 5, "thinking": {"type": "disabled"}})
    assert counts == {}


def test_a_chat_goes_on_under_the_same_wish(ask):
    wish = {"response_format": {"type": "json_object"}}
    first, prompt, _ = ask("chat/completions", {"messages": GO, **wish}, text="{}")
    said = first["choices"][0]["message"]
    again, longer, _ = ask("chat/completions", {"messages": [*GO, said, *GO], **wish}, text="{}")
    assert longer.startswith(prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]


def test_a_system_message_behind_others_stands_in_the_users_turn(ask):
    late = [*GO, {"role": "assistant", "content": "ok"}, {"role": "system", "content": "be brief"}, *GO]
    _, prompt, _ = ask("chat/completions", {"messages": late})
    same = [*GO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "be brief"}, *GO]
    assert prompt == ask("chat/completions", {"messages": same}, session="b")[1]


def test_a_chat_may_begin_with_the_assistant(ask):
    greeted = [{"role": "assistant", "content": "Welcome."}, *GO]
    assert "Welcome." in ask("chat/completions", {"messages": greeted})[1]


def test_anthropics_last_message_of_the_assistant_is_gone_on_with(ask):
    begun = [*GO, {"role": "assistant", "content": "The city is"}]
    answer, prompt, _ = ask("messages", {"messages": begun, "max_tokens": 9})
    assert prompt.endswith("The city is")
    assert answer["content"][0]["text"] == "ok"


# --- tools that take one text
def test_a_tool_that_takes_one_text_is_called_with_it(ask):
    call = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    tool = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
    answer, _, _ = ask("responses", {"input": "go", "tools": [tool]}, text=call)
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** Begin")
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    sent = [{"role": "user", "content": "go"}, item, result]
    again, prompt, _ = ask("responses", {"input": sent, "tools": [tool]}, text=call)
    assert "done" in prompt
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == answer["usage"]["total_tokens"]
    chat = {"type": "custom", "custom": {"name": "patch"}}
    answer, _, _ = ask("chat/completions", {"messages": GO, "tools": [chat]}, text=call, session="b")
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": "*** Begin"})


def test_a_call_with_one_text_is_streamed(serve):
    call = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    agent = client(serve(Says(call)))
    events = list(
        agent.responses.create(input="go", tools=[{"type": "custom", "name": "patch"}], stream=True, **CHAT)
    )
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    (item,) = events[-1].response.output
    assert (done.input, item.type, item.input) == ("*** Begin", "custom_tool_call", "*** Begin")


# --- text and tokens without a template
def test_a_completion_is_the_text_as_it_is_and_tokens_go_on_from_a_call(serve, engine):
    server = serve(SamplerClient(engine), max_tokens=8)
    agent = client(server)
    more = {"extra_body": {"return_token_ids": True}}
    first = agent.completions.create(model="m", prompt="Once upon", max_tokens=4, logprobs=1, **more)
    choice = first.choices[0]
    assert choice.prompt_token_ids == list(engine.tokenizer.encode("Once upon"))
    assert len(choice.logprobs.token_logprobs) == len(choice.token_ids) == first.usage.completion_tokens
    going_on = [*choice.prompt_token_ids, *choice.token_ids, *engine.tokenizer.encode(" a")]
    second = agent.completions.create(model="m", prompt=going_on, max_tokens=4, **more)
    session = server.gateway.sessions["a"]
    assert [recorded.call.parent for recorded in session.calls] == [None, 0]
    assert session.calls[1].call.new_prompt_ids == engine.tokenizer.encode(" a")
    assert second.choices[0].text == engine.tokenizer.decode(session.calls[1].call.response_ids)
    assert "".join(choice.logprobs.tokens) == choice.text
    chat = agent.chat.completions.create(
        messages=[{"role": "user", "content": "Once upon"}], logprobs=True, **CHAT, **more
    )
    said = chat.choices[0].logprobs.content
    assert "".join(one.token for one in said) == chat.choices[0].message.content
    assert [bytes(one.bytes).decode() for one in said] == [one.token for one in said]
    assert session.calls[2].call.parent is None
    assert chat.choices[0].token_ids == list(session.calls[2].call.response_ids)
    assert chat.prompt_token_ids == list(session.calls[2].call.new_prompt_ids)
    parts = list(agent.completions.create(model="m", prompt="Once", max_tokens=3, n=2, stream=True))
    assert {part.choices[0].index for part in parts} == {0, 1}


def test_models_by_name_and_the_count_of_tokens(serve, engine):
    server = serve(SamplerClient(engine), max_tokens=8, model="mine")
    assert client(server).models.retrieve("gpt/5").id == "gpt/5"
    assert client(server).models.list().data[0].id == "mine"
    assert post(server, chat_of("go", model=None))[1]["model"] == "mine"
    asked = {"model": "m", "messages": GO, "system": "be brief"}
    status, counted = post(server, asked, "b/v1/messages/count_tokens")
    assert status == 200
    assert "b" not in server.gateway.sessions
    status, answer = post(server, {**asked, "max_tokens": 4}, "a/v1/messages")
    assert answer["usage"]["input_tokens"] == counted["input_tokens"]


# --- a full disk
def test_a_call_that_could_not_be_written_is_answered_alike_when_it_is_asked_again(serve, engine, tmp_path):
    journal = tmp_path / "calls.jsonl"
    journal.mkdir()  # nothing can be written there
    server = serve(SamplerClient(engine), max_tokens=8, journal=journal)
    body = chat_of("go", n=2)
    status, answer = post(server, body)
    assert (status, "calls.jsonl" in answer["error"]["message"]) == (503, True)
    session = server.gateway.sessions["a"]
    first = [recorded.call.response_ids for recorded in session.calls]
    assert post(server, body)[0] == 503
    journal.rmdir()
    status, answer = post(server, body)
    assert status == 200
    assert [recorded.call.response_ids for recorded in session.calls] == first
    assert answer["usage"]["completion_tokens"] == sum(map(len, first))
    assert len(journal.read_bytes().splitlines()) == 2
    assert len(session.close()) == 2


def test_a_call_that_was_never_written_or_answered_is_in_no_record(serve, engine, tmp_path):
    journal = tmp_path / "calls.jsonl"
    server = serve(SamplerClient(engine), max_tokens=8, journal=journal)
    assert post(server, chat_of("go"))[0] == 200
    journal.rename(tmp_path / "before")
    journal.mkdir()
    assert post(server, chat_of("lost"))[0] == 503
    session = server.gateway.sessions["a"]
    assert len(session.calls) == 2
    assert [recorded.number for recorded, _ in session.close()] == [0]


# --- the requests of two programs, in the shapes that they publish
CLAUDE_CODE = {
    "model": "claude-sonnet-4-5", "max_tokens": 64, "stream": True, "temperature": 1,
    "system": [
        {"type": "text", "text": "You are a command line tool.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be concise."},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Files: a.py</system-reminder>"},
            {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I list them.", "signature": "abc"},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.py"}],
             "is_error": False, "cache_control": {"type": "ephemeral"}},
        ]},
    ],
    "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": {
        "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}],
    "thinking": {"type": "enabled", "budget_tokens": 31999}, "metadata": {"user_id": "user_1"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
CODEX = {
    "model": "gpt-5-codex", "instructions": "You are Codex.", "stream": True, "store": False,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": {
            "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    ],
    "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "abc", "text": {"verbosity": "medium"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [("messages?beta=true", CLAUDE_CODE), ("responses", CODEX)],
    ids=["Claude Code", "Codex"],
)
def test_requests_of_coding_agents_are_answered(serve, path, body):
    model = Says("done")
    server = serve(model, max_tokens=200)
    request = urllib.request.Request(
        f"{server.base}/{server.gateway.secret}/a/v1/{path}", json.dumps(body).encode(),
        {"content-type": "application/json", "anthropic-beta": "claude-code-20250219"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as answer:
        events = answer.read().decode()
    assert "done" in events
    (prompt,) = model.prompts
    for text in ("List the files.", "a.py", "ls"):
        assert text in prompt


def test_the_packages_own_structured_output(serve):
    server = serve(Says('{"city": "Oslo"}'), max_tokens=200)
    pydantic = pytest.importorskip("pydantic")
    place = pydantic.create_model("Place", city=(str, ...))
    agent = client(server)
    parsed = agent.chat.completions.parse(messages=GO, response_format=place, **CHAT)
    assert parsed.choices[0].message.parsed.city == "Oslo"
    assert agent.responses.parse(model="m", input="go", text_format=place).output_parsed.city == "Oslo"
    assert asyncio.run(_streamed(server, place)) == "Oslo"


async def _streamed(server, place):
    address = server.variables("s")["OPENAI_BASE_URL"]
    async with (
        openai.AsyncOpenAI(base_url=address, api_key="x", max_retries=0) as agent,
        agent.chat.completions.stream(messages=GO, response_format=place, **CHAT) as stream,
    ):
        return (await stream.get_final_completion()).choices[0].message.parsed.city


def test_packages_of_anthropic_are_told_in_their_own_code_to_send_the_whole_conversation(serve):
    """`tool_runner` asks the server to keep the conversation, and goes on without if this is the refusal."""
    server = serve(Says("ok"), max_tokens=9)
    body = {"messages": GO, "max_tokens": 9, "thread": {"type": "create"}}
    status, answer = post(server, body, "a/v1/messages")
    assert status == 400
    assert answer["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    status, _ = post(server, {**body, "thread": None}, "a/v1/messages")
    assert status == 200
