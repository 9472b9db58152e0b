"""Calls in tags, as Qwen3-Coder and Qwen 3.5 write them, and arguments by the schema of their tool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.tools.test_calls import JSON

from shoal.envs.actions import Projection, ToolCall
from shoal.envs.calls import read_calls, written_in_xml
from shoal.envs.schemas import fitted
from shoal.envs.tools import Tool
from shoal.rollout.tools.chat import ToolChat
from shoal.samplers.tokenizers import ChatCodec

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "scale": {"type": "number"},
        "wind": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "place": {"$ref": "#/$defs/Place"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {
        "Place": {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string"}}}
    },
}
TOOLS = [
    Tool("forecast", "The weather.", PARAMETERS),
    Tool("write_file", "Write.", {"properties": {"path": {"type": "string"}, "content": {"type": "string"}}}),
]
# as the models write them: thoughts and text before, values on lines of their own or on that of their tag
ANSWER = """I will look at both.

<tool_call>
<function=forecast>
<parameter=city>
3
</parameter>
<parameter=days>
3
</parameter>
<parameter=scale>
0.5
</parameter>
<parameter=wind>
True
</parameter>
<parameter=hours>
[6, 18]
</parameter>
<parameter=place>
{"x": "1", "name": "2"}
</parameter>
<parameter=limit>
None
</parameter>
</function>
</tool_call>
<tool_call>
<function=write_file>
<parameter=path>src/a.py</parameter>
<parameter=content>
def f(x):
    return "<b>" if x < 3 else '</function>'

</parameter>
</function>
</tool_call>"""
CALLS = (
    ToolCall(
        "forecast",
        {
            "city": "3", "days": 3, "scale": 0.5, "wind": True, "hours": [6, 18], "place": {"x": 1, "name": "2"},
            "limit": None,
        },
    ),
    ToolCall(
        "write_file",
        {"path": "src/a.py", "content": "def f(x):\n    return \"<b>\" if x < 3 else '</function>'\n"},
    ),
)  # fmt: skip


@pytest.fixture
def chat():
    return ToolChat(ChatCodec(), TOOLS)


def test_calls_in_tags_are_read_and_typed_by_the_schema(chat):
    projected = chat.read(ANSWER, Projection())
    assert projected.valid
    assert projected.calls == CALLS
    assert chat.read(f"<think>{ANSWER}</think>no", Projection()).calls == ()


def test_the_gateway_splits_the_same_calls_off(chat):
    assert chat.split(ANSWER) == ("I will look at both.", CALLS)


@given(st.dictionaries(st.text("xyz", min_size=1), JSON))
def test_calls_in_tags_are_read_as_they_are_written(arguments):
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    schema = {"properties": {n: {"type": kinds.get(type(value), "null")} for n, value in arguments.items()}}
    text = written_in_xml(ToolCall("t", arguments))
    if any(tag in str(arguments) for tag in ("tool_call>", "</parameter>", "think>")):
        return
    [call] = read_calls(text, "xml")
    assert ToolCall("t", fitted(call.arguments, schema)) == ToolCall("t", arguments)


INTEGER, NUMBER, TEXT, NOTHING = ({"type": kind} for kind in ("integer", "number", "string", "null"))


@pytest.mark.parametrize(
    ("value", "schema", "taken"),
    [
        ("3", INTEGER, 3),
        (" -3\n", INTEGER, -3),
        ("3.0", INTEGER, 3),  # an integer in JSON Schema
        ("3.5", INTEGER, "3.5"),
        ("03", INTEGER, "03"),
        ("three", INTEGER, "three"),
        ("", INTEGER, ""),
        ("true", INTEGER, "true"),
        ("99999999999999999999", INTEGER, "99999999999999999999"),
        ("3", NUMBER, 3),
        ("1e3", NUMBER, 1000.0),
        ("NaN", NUMBER, "NaN"),
        ("1e999", NUMBER, "1e999"),
        ("3", TEXT, "3"),
        (3, TEXT, 3),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("null", {"type": ["integer", "null"]}, None),
        ("null", {"type": ["string", "null"]}, "null"),  # it may be the word
        ("3", {"anyOf": [TEXT, INTEGER]}, "3"),
        ("3", {"anyOf": [INTEGER, NOTHING]}, 3),
        ("3", {"anyOf": [INTEGER, {}]}, "3"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("[1]", {"type": "array"}, [1]),
        ("[" * 33 + "]" * 33, {"type": "array"}, "[" * 33 + "]" * 33),
        (["1", "x"], {"type": "array", "items": INTEGER}, [1, "x"]),
        ({"a": "1"}, {"additionalProperties": INTEGER}, {"a": 1}),
        ({"a": "1"}, {"additionalProperties": False}, {"a": "1"}),
        ("3", {"$ref": "#/$defs/none"}, "3"),
        ("3", {}, "3"),
        ("3", True, "3"),
        ("3", None, "3"),
    ],
)
def test_text_is_taken_as_what_the_schema_allows_where_there_is_one_reading(value, schema, taken):
    found = fitted(value, schema)
    assert (found, type(found)) == (taken, type(taken))


def test_a_schema_that_refers_to_itself_ends():
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert fitted("3", loop) == "3"
    tree = {"anyOf": [{"$ref": "#/$defs/t"}], "$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}]}}}
    assert fitted("3", tree) == "3"


def test_a_schema_of_any_form_is_read():
    for schema in (
        {"$defs": [], "$ref": "#/$defs/a"},
        {"properties": [], "type": 7},
        {"enum": [{1}]},
        {"anyOf": [None]},
        {"definitions": {"N": INTEGER}, "$ref": "#/properties/a/b"},
    ):
        assert fitted({"a": "3"}, {"properties": {"a": schema}}) == {"a": "3"}
    old = {"definitions": {"N": INTEGER}, "properties": {"a": {"$ref": "#/definitions/N"}}}
    assert fitted({"a": "3"}, old) == {"a": 3}
