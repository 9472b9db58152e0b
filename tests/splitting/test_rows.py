"""Rows of chats as other programs name them: ShareGPT's conversations, TRL's prompt and completion."""

import json
import logging

import pytest
from chats import lines

from shoal.core.errors import DataError
from shoal.splitting.readers import find_reader

PLAIN = [
    {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
]  # fmt: skip
SHARED = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "ho"},
]


def read(folder, *rows):
    reader = find_reader(lines(folder / "rows.jsonl", *rows))
    return [reader.read(name) for name in reader.ids()]


def said(recording):
    return [(message.role, message.content, message.trained) for message in recording.messages]


def test_the_same_chat_in_any_spelling_is_the_same_recording(tmp_path):
    rows = [
        {"id": "a", "messages": PLAIN},
        {"id": "b", "conversations": SHARED},
        {"id": "c", "conversations": PLAIN},
        {"id": "d", "conversations": SHARED[1:], "system": "be kind"},
        {"id": "e", "prompt": PLAIN[:2], "completion": PLAIN[2:]},
        {"id": "f", "conversations": json.dumps(SHARED), "messages": None},
    ]
    found = [said(one) for one in read(tmp_path, *rows)]
    assert found[0] == [("system", "be kind", True), ("user", "hi", True), ("assistant", "ho", True)]
    assert found[1:] == [found[0]] * 5


def test_calls_and_results_of_sharegpt_are_those_of_openai(tmp_path):
    call, tool = {"name": "add", "arguments": {"a": 2}}, {"name": "add", "parameters": {}}
    turns = [
        {"from": "human", "value": "sum"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "it is 3", "weight": 0},
    ]
    messages = [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "it is 3", "weight": 0},
    ]
    shared, plain = read(
        tmp_path,
        {"conversations": turns, "tools": json.dumps([tool])},
        {"messages": messages, "tools": [tool]},
    )
    assert said(shared) == said(plain)
    assert [message.trained for message in shared.messages if message.role == "assistant"] == [True, False]
    assert shared.tools == plain.tools


def test_answers_in_a_prompt_are_context_unless_they_are_marked(tmp_path):
    prompt = [*PLAIN, {"role": "user", "content": "and"}]
    for marked in ({}, {"trained": True}):
        row = {"prompt": [*PLAIN[:2], {**PLAIN[2], **marked}, prompt[-1]], "completion": PLAIN[2:]}
        (recording,) = read(tmp_path, row)
        learned = [message.trained for message in recording.messages if message.role == "assistant"]
        assert learned == [bool(marked), True]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "The sky is", "completion": " blue"}, "prompt must be a list of messages, got str"),
        ({"prompt": PLAIN[:2], "completion": "ho"}, "completion must be a list of messages, got str"),
        ({"completion": PLAIN[2:]}, "prompt must be a list of messages, got NoneType"),
        ({"prompt": PLAIN}, "'conversations', or 'prompt' and 'completion'"),
        ({"messages": PLAIN, "conversations": SHARED}, "messages and conversations hold a chat each"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "from must be one of system, human"),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, "JSON with name and arguments"),
        ({"conversations": {"from": "gpt"}}, "must hold a list of messages"),
    ],
)
def test_rows_that_are_no_chat_are_refused_with_the_remedy(tmp_path, row, why):
    with pytest.raises(DataError, match=why):
        read(tmp_path, row)


def test_a_key_that_is_not_read_is_named_in_every_spelling(tmp_path, caplog):
    odd = {"from": "gpt", "value": "ho", "mood": "good"}
    with caplog.at_level(logging.WARNING):
        read(tmp_path, {"conversations": [*SHARED[:2], odd], "source": "web"})
    assert "conversations.mood" in caplog.text
    assert "source" in caplog.text
