"""Calls of tools in text, and typed functions as tools."""

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.tools import functions

from shoal.core.errors import ConfigError
from shoal.envs.actions import Projected, Projection, ToolCall
from shoal.envs.calls import MOST_CALLS, read_calls, written_call
from shoal.envs.tools import function_tool
from shoal.rollout.tools.chat import ToolChat, tool_words
from shoal.rollout.tools.functions import run_functions
from shoal.samplers.tokenizers import TinyTokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text("abc<>/_", max_size=6), inside, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(st.tuples(st.text("abc", min_size=1), st.dictionaries(st.text("xyz"), JSON)), max_size=4))
def test_calls_are_read_as_they_are_written(pairs):
    calls = [ToolCall(name, arguments) for name, arguments in pairs]
    if any("tool_call>" in json.dumps(call.arguments) for call in calls):
        return
    assert read_calls("so: " + " and ".join(map(written_call, calls)), "tags") == calls
    bare = ";".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)
    assert read_calls(f"<think>hm</think>\n{bare}", "json") == calls
    listed = json.dumps([{"name": c.name, "arguments": json.dumps(c.arguments)} for c in calls])
    assert read_calls(listed, "json") == calls


@pytest.mark.parametrize("grammar", ["tags", "json", "xml"])
@given(
    text=st.text('<>/tool_cathinkr{}[]",:0 \ud800')
    | st.text("<>/=\n ab")
    | st.text("<tool_call><function=a><parameter=b></parameter></function></tool_call>")
)
def test_any_text_can_be_read(grammar, text):
    for call in [
        *read_calls(text, grammar),
        *read_calls(f"<tool_call><function={text}</tool_call>{text}", grammar),
    ]:
        assert call.error or isinstance(call.arguments, dict)
        json.dumps(dataclasses.asdict(call), ensure_ascii=False).encode()


BROKEN = {
    '<tool_call>{"name": "add", "arguments": }</tool_call>': "must be JSON",
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': "must be a JSON object",
    "<tool_call>[1]</tool_call>": "must be such as",
    '<tool_call>{"name": "rm"}</tool_call>': "no tool 'rm'; there are: add, look",
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>': "out of range",
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>': "must be JSON",
    '<tool_call>{"name": "add", "arguments": {"a": 99999999999999999999}}</tool_call>': "64 bits",
    '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}</tool_call>": "nested",
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>': "must be JSON",
    f"<tool_call>{'[' * 30_000}{']' * 30_000}</tool_call>": "nested too deep",
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>': "missing required field `a`",
    '<tool_call>{"name": "add", "arguments": {"a": "one"}}</tool_call>': "Expected `int`, got `str`",
    "<tool_call><function=add><parameter=a>1</parameter></tool_call>": "must be <function=NAME>",
    "<tool_call><function=>1</function></tool_call>": "must be <function=NAME>",
    f"<tool_call><function={'a' * 65}></function></tool_call>": "must be <function=NAME>",
    "<tool_call><function=add>a=1</function></tool_call>": "must be <parameter=NAME>",
    "<tool_call><function=add><parameter=a>1</function></tool_call>": "a must end with </parameter>",
    f"<tool_call><function=add>{'<parameter=a>1</parameter>' * 2}</function></tool_call>": "each parameter once",
    f"<tool_call><function=add>{''.join(f'<parameter={n}>1</parameter>' for n in range(65))}"
    "</function></tool_call>": "at most 64",
    "<tool_call><function=rm></function></tool_call>": "no tool 'rm'; there are: add, look",
    "<tool_call><function=add></function></tool_call>": "missing required field `a`",
    "<tool_call>\n<function=add>\n<parameter=a>\n1": "must end with </tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": 1, "c": 1}}</tool_call>': "unknown field `c`",
    '<tool_call>{"name": "add"': "must end with </tool_call>",
}  # fmt: skip


@pytest.fixture
def chat():
    tools = [function_tool(function, 1.0, 100) for function in (functions.add, functions.look)]
    return ToolChat(TinyTokenizer(tool_words(tools)), tools)


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_wrong_with_a_call_is_said_in_its_error(chat, text):
    [call] = chat.read(text, Projection()).calls
    assert BROKEN[text] in call.error
    own = BROKEN[text].startswith(
        ("missing required", "Expected", "unknown field")
    )  # which a program finds itself
    assert own or chat.split(text) == (text, ())


def test_one_protocol_reads_actions_calls_and_what_is_neither(chat):
    projection = Projection(lookup={"up": 1})
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert chat.read("<action>up</action>", projection) == Projected((1,), True)
    assert chat.read("up", projection) == Projected((0,), False)
    asks = Projected((), True, (ToolCall("add", {"a": 1}),))
    assert chat.read(f"{call}<action>up</action>", projection) == asks  # it waits for the result
    assert chat.read(f"<think>{call}</think><action>up</action>", projection) == Projected((1,), True)
    inside = chat.read(
        '<tool_call>{"name": "look", "arguments": {"city": "</think>"}}</tool_call>', projection
    )
    assert inside.calls[0].arguments == {"city": "</think>"}


def test_calls_beyond_the_most_are_refused(chat):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    calls = chat.read(call * 100, Projection()).calls
    assert len(calls) <= 2 * MOST_CALLS
    assert [c.error is None for c in calls] == [place < MOST_CALLS for place in range(len(calls))]


def test_the_tiny_model_writes_a_call_of_listed_words_in_a_few_tokens(chat):
    written = chat.written(ToolCall("look", {"city": "oslo"}))
    assert len(chat.tokenizer.encode(written)) == 4  # opening, name of the parameter, value, end
    assert chat.read(written, Projection()).calls == (ToolCall("look", {"city": "oslo"}),)


def test_signature_and_docstring_are_the_schema():
    @dataclasses.dataclass
    class Point:
        x: int
        y: float = 0.0

    def draw(
        point: Point, color: Literal["red", "blue"] = "red", size: float | None = None
    ) -> dict[str, float]:
        """Draw a point,
        in a color.

        Args:
            point: where.
            color: how it
                looks.

        Returns:
            what was drawn.
        """
        return {"x": point.x + 1, "y": point.y, "size": size or 0}

    tool = function_tool(draw, 1.0, 20)
    assert (tool.name, tool.description) == ("draw", "Draw a point, in a color.")
    properties = tool.parameters["properties"]
    assert tool.parameters["required"] == ["point"]
    assert properties["color"] == {"enum": ["blue", "red"], "default": "red", "description": "how it looks."}
    assert properties["size"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert tool.parameters["$defs"]["Point"]["required"] == ["x"]
    [[use], left] = run_functions({"draw": tool}, [ToolCall("draw", {"point": {"x": 1}, "size": 2})])
    assert not left
    assert use.result == '{"x":2,"y":0.0,"size… (cut: 26 characters)'


def untyped(a):
    """Nothing is known of a."""


def starred(*numbers: int):
    """It takes what comes."""


@pytest.mark.parametrize(("function", "said"), [(untyped, "a has no type"), (starred, "list the parameters")])
def test_a_function_without_types_is_refused_by_name(function, said):
    with pytest.raises(ConfigError, match=f"{function.__name__}: .*{said}"):
        function_tool(function, 1.0, 100)


def test_a_function_that_raises_or_hangs_is_an_error_for_the_model():
    tools = {f.__name__: function_tool(f, 0.2, 100) for f in (functions.fail, functions.hang, functions.add)}
    calls = [ToolCall("fail", {"text": "x"}), ToolCall("hang", {}), ToolCall("add", {"a": 1})]
    uses, left = run_functions(tools, calls)
    assert not left
    assert [use.error for use in uses] == [
        "RuntimeError: no x here",
        "hang did not answer within 0.2 s",
        None,
    ]
    assert uses[2].result == "2"
