"""Recorded results of parallel calls stand in the order of their calls, whichever came first."""

import itertools
import json

import pytest
from chats import atif, lines

from shoal.core.errors import DataError
from shoal.splitting import ChatReader
from shoal.splitting.readers.formats import AtifReader, LiteSampleReader

NAMES = ("a", "b", "c")
SAID = {"a": "1", "b": "2", "c": "3"}


def chat(results, ids=NAMES):
    calls = [{"id": name, "type": "function", "function": {"name": "get", "arguments": "{}"}} for name in ids]
    came = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    return {"id": "x", "messages": [*said, *came, {"role": "assistant", "content": "done"}]}


def lite(results, ids=NAMES):
    messages = chat(results, ids)["messages"]
    for message in messages:
        message["content"] = [{"type": "text", "text": message["content"] or ""}]
    return {"id": "x", "images": [], "metadata": "{}", "messages": json.dumps(messages)}


def harbor(results, ids=NAMES):
    calls = [{"tool_call_id": name, "function_name": "get", "arguments": {}} for name in ids]
    came = [{"source_call_id": name, "content": text} for name, text in results]
    acted = {"source": "agent", "message": "", "tool_calls": calls, "observation": {"results": came}}
    return atif([{"source": "user", "message": "go"}, acted, {"source": "agent", "message": "done"}])


formats = pytest.mark.parametrize(
    ("reader", "record"), [(ChatReader, chat), (LiteSampleReader, lite), (AtifReader, harbor)]
)


@pytest.fixture
def results_of(tmp_path):
    def read(reader, record):
        found = reader(lines(tmp_path / "a.jsonl", record))
        return [message.text for message in found.read(found.ids()[0]).messages if message.role == "tool"]

    return read


@formats
def test_results_stand_in_the_order_of_their_calls(reader, record, results_of):
    for order in itertools.permutations(NAMES):
        assert results_of(reader, record([(name, SAID[name]) for name in order])) == ["1", "2", "3"]
        swapped = results_of(reader, record([(name, SAID[name]) for name in NAMES], ids=order))
        assert swapped == [SAID[name] for name in order]


@formats
@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        (("a", "b", "x"), "'x', which was not made"),
        (("a", "b"), "the call 'c' has no result"),
        (("a", "a", "b", "c"), "two results have the id 'a'"),
    ],
)
def test_a_recording_whose_results_belong_to_no_call_is_an_error_of_its_own(
    reader, record, ids, wrong, results_of
):
    with pytest.raises(DataError, match=wrong):
        results_of(reader, record([(name, SAID.get(name, "?")) for name in ids]))


def test_results_stay_as_they_came_where_there_are_no_ids(results_of):
    swapped = [("b", "2"), ("a", "1"), ("c", "3")]
    assert results_of(ChatReader, chat(swapped, ids=(None, None, None))) == ["2", "1", "3"]
    assert results_of(ChatReader, chat([(None, text) for _, text in swapped])) == ["2", "1", "3"]
    assert results_of(AtifReader, harbor(swapped, ids=(None, None, None))) == ["2", "1", "3"]


def test_results_stand_in_order_with_messages_of_the_user_between_them(results_of):
    record = chat([("b", "2"), ("a", "1"), ("c", "3")])
    record["messages"].insert(3, {"role": "user", "content": "a picture"})
    assert results_of(ChatReader, record) == ["1", "2", "3"]


def test_an_answer_at_the_end_needs_no_results(results_of):
    record = chat([])
    del record["messages"][2:]
    assert results_of(ChatReader, record) == []
