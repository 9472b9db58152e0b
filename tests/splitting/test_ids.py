"""Which recordings there are, and by which ids: none is lost, none takes the place of another."""

import json
import random

import pytest
from chats import folder_of, lines, osworld_of, rows_in, split_all, talk

from shoal.core.errors import DataError
from shoal.splitting import ChatReader, StepwiseTrajectorySplitter, TrajectorySplitter, find_reader
from shoal.splitting.readers.formats import AtifReader, OSWorldReader
from shoal.splitting.readers.recordings import FolderReader

BOM = b"\xef\xbb\xbf"


def answers(reader):
    """The last answer of each recording by its id, or why it cannot be read."""
    told = {}
    for name in reader.ids():
        try:
            told[name] = reader.read(name).messages[-1].text
        except DataError as error:
            told[name] = error
    return told


# --- files of records
def test_files_whose_names_meet_lose_no_recording(processor, tmp_path):
    (tmp_path / "chats.json").write_text(json.dumps(talk("one")))
    lines(tmp_path / "chats.jsonl", talk("two"), talk("three"))
    for number in range(3):
        name = f"gui-agent-trajectories-of-the-browser-benchmark-2025-{number:05d}-of-00003.jsonl"
        lines(tmp_path / name, talk(f"long {number} 0"), talk(f"long {number} 1"))
    lines(tmp_path / "plain.jsonl", talk("four"))
    reader = ChatReader(tmp_path)
    told = answers(reader)
    assert sorted(told.values()) == sorted(
        ["one", "two", "three", "four", *(f"long {number} {row}" for number in range(3) for row in range(2))]
    )
    assert "plain-000000" in told
    batch = split_all(processor, reader, on_error="skip")
    assert len(batch["dataset_ids"]) == 10
    assert not batch.skipped


def test_ids_do_not_depend_on_where_a_folder_lies_or_what_was_written_first(tmp_path):
    names = ["chats.json", "chats.jsonl", "chats.ndjson", *(f"{'x' * 60}{n}.jsonl" for n in range(3))]
    found = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        for name in random.Random(place).sample(names, len(names)):
            (tmp_path / place / name).write_text(json.dumps(talk(name)))
        found.append(answers(ChatReader(tmp_path / place)))
    assert found[0] == found[1]
    assert len(found[0]) == len(names)


def test_an_id_that_is_taken_is_refused_and_the_first_is_kept(processor, tmp_path):
    """The refused one takes no name of another: not of a record that has its number as its id."""
    rows = [("b", "one"), ("b", "two"), ("a-000001", "three"), ("", "four"), ("a-000003", "five")]
    lines(tmp_path / "a.jsonl", *({"id": own, "messages": talk(answer)} for own, answer in rows))
    lines(tmp_path / "z.jsonl", {"id": "b", "messages": talk("six")})
    reader = ChatReader(tmp_path)
    told = answers(reader)
    assert len(told) == 6
    assert (told["b"], told["a-000001"], told["a-000003"]) == ("one", "three", "five")
    errors = [str(each) for each in told.values() if isinstance(each, DataError)]
    assert errors == [
        f"{tmp_path / 'a.jsonl'}, record 1: id 'b' is taken by {tmp_path / 'a.jsonl'}",
        f"{tmp_path / 'z.jsonl'}, record 0: id 'b' is taken by {tmp_path / 'a.jsonl'}",
    ]
    batch = split_all(processor, reader, on_error="skip")
    assert (len(batch["dataset_ids"]), len(batch.skipped)) == (4, 2)


def test_trials_of_two_jobs_with_one_name_are_both_read(tmp_path):
    for job in ("first", "second"):
        place = tmp_path / job / "hello" / "agent" / "trajectory.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(atif(job)))
    assert sorted(answers(AtifReader(tmp_path)).values()) == ["first", "second"]
    assert list(answers(AtifReader(tmp_path / "first"))) == ["hello"]


# --- sub-agents
def atif(answer, *inside, **more):
    steps = [{"source": "user", "message": "hi"}, {"source": "agent", "message": answer}]
    more |= {"subagent_trajectories": list(inside)} if inside else {}
    return {"schema_version": "ATIF-v1.7", "agent": {"name": "x"}, "steps": steps, **more}


def nested():
    first = atif("sub 0", atif("sub 0 0"))
    del first["schema_version"]  # of the outer one
    return atif("main", first, atif("sub 1"), trajectory_id="t")


NESTED = {"t": "main", "t-0": "sub 0", "t-0-0": "sub 0 0", "t-1": "sub 1"}


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "tar"])
def test_each_trajectory_of_a_subagent_is_a_recording(processor, tmp_path, kind):
    file = tmp_path / f"t.{kind}"
    if kind == "json":
        file.write_text(json.dumps(nested()))
    else:
        rows_in(file, [nested()])
    reader = AtifReader(file)
    lead = "t-000000" if kind == "tar" else "t"
    wanted = {name.replace("t", lead, 1): said for name, said in NESTED.items()}
    assert answers(reader) == wanted
    assert {reader.read(name).uid for name in reader.ids()} == {lead}  # one task: held out together
    assert split_all(processor, reader)["dataset_ids"].tolist() == list(wanted)


def test_subagents_of_a_trial_have_its_task_and_its_reward(tmp_path):
    agent = tmp_path / "job" / "hello__1" / "agent"
    agent.mkdir(parents=True)
    (agent / "trajectory.json").write_text(json.dumps(nested()))
    (agent / "trajectory.cont-1.json").write_text(json.dumps(atif("more")))
    (agent / "trajectory_of_another_kind.json").write_text("{}")
    result = {"task_name": "hello", "verifier_result": {"rewards": {"reward": 0.5}}}
    (agent.parent / "result.json").write_text(json.dumps(result))
    reader = find_reader(tmp_path / "job")
    assert answers(reader) == {"hello__1-cont-1": "more"} | {
        name.replace("t", "hello__1", 1): said for name, said in NESTED.items()
    }
    assert {(reader.read(name).uid, reader.read(name).reward) for name in reader.ids()} == {("hello", 0.5)}


def test_a_broken_subagent_is_named_and_takes_no_other_with_it(tmp_path):
    row = nested()
    row["subagent_trajectories"][1] = 7
    told = answers(AtifReader(lines(tmp_path / "t.jsonl", row)))
    assert str(told.pop("t-1")).endswith("record 0, part 1: expected an object, got int")
    assert told == {name: said for name, said in NESTED.items() if name != "t-1"}


# --- folders
def test_a_folder_needs_no_task_config(processor, tmp_path):
    folder_of(tmp_path / "one", talk("yes"))
    recording = FolderReader(tmp_path).read("one")
    assert (recording.uid, recording.reward) == ("one", None)
    (tmp_path / "one" / "task_config.json").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"task_config\.json is missing"):
        FolderReader(tmp_path).read("one")


def test_folders_of_any_name_are_split(processor, tmp_path):
    names = ["user@host", "ü", "plain", "a b", "x" * 70, "user_host"]
    for name in names:
        folder_of(tmp_path / name, talk(name))
    reader = find_reader(tmp_path)
    assert sorted(answers(reader).values()) == sorted(names)
    assert {"plain", "a b", "user_host"} <= set(reader.ids())
    batch = StepwiseTrajectorySplitter(processor, tmp_path).split(reader.ids())
    assert sorted(batch["uid"].tolist()) == sorted(names)
    assert reader.read("user@host").messages == reader.read(reader.read("user@host").dataset_id).messages
    with pytest.raises(DataError, match="dataset name must be"):
        reader.read("../plain")


def test_osworld_results_of_any_name_are_read(tmp_path):
    osworld_of(tmp_path / "chrome" / "task@1", {"action": "click()"})
    [name] = OSWorldReader(tmp_path).ids()
    assert name.startswith("task_1-")
    assert OSWorldReader(tmp_path).read(name).messages[1].text == "click()"


# --- byte-order marks
def marked(place, text):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(BOM + text.encode())
    return place


def test_a_byte_order_mark_is_no_text_in_any_file(tmp_path):
    plain, other = (json.dumps({"id": name, "messages": talk("yes")}) for name in "ab")
    for name, text in (("one.json", plain), ("lines.jsonl", f"{plain}\n\ufeff{other}\n\ufeff\n")):
        told = answers(ChatReader(marked(tmp_path / name, text)))
        assert told == dict.fromkeys(["a"] if name == "one.json" else ["a", "b"], "yes")
    marked(tmp_path / "folder" / "one" / "final_messages.json", json.dumps(talk("yes")))
    marked(tmp_path / "folder" / "one" / "task_config.json", '{"id": "task", "reward": 1}')
    recording = find_reader(tmp_path / "folder").read("one")
    assert (recording.uid, recording.reward, recording.messages[1].text) == ("task", 1.0, "yes")


@pytest.mark.parametrize("where", ["instruction.txt", "task.json"])
def test_a_byte_order_mark_is_no_text_in_results_of_osworld(tmp_path, where):
    folder = tmp_path / "task"
    marked(folder / where, "Go." if where.endswith("txt") else '{"instruction": "Go."}')
    marked(folder / "traj.jsonl", '{"step_num": 1, "action": "click()"}\n')
    marked(folder / "result.txt", "0.5\n")
    recording = OSWorldReader(tmp_path).read("task")
    assert recording.reward == 0.5
    assert [message.text for message in recording.messages[:2]] == ["Go.", "click()"]


def test_a_byte_order_mark_is_no_text_in_trials(tmp_path):
    trial = tmp_path / "job" / "hello"
    marked(trial / "agent" / "trajectory.json", json.dumps(atif("yes")))
    marked(trial / "result.json", '{"task_name": "hi"}')
    marked(trial / "verifier" / "reward.txt", "1\n")
    recording = find_reader(tmp_path / "job").read("hello")
    assert (recording.uid, recording.reward, recording.messages[-1].text) == ("hi", 1.0, "yes")


# --- what later samples repeat
def test_a_later_window_keeps_all_that_stands_before_the_first_answer(processor, tmp_path):
    """Turns are (s, env, task, 1), (o, 2), (o, 3), (o, 4), (o, 5); windows of two begin at turns 0, 2 and 4."""
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "env info"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("the real ", "task")]},
        {"role": "tool", "content": "files"},
    ]
    for number in range(1, 6):
        messages += [{"role": "user", "content": "o"}] if number > 1 else []
        messages.append({"role": "assistant", "content": str(number)})
    reader = ChatReader(lines(tmp_path / "a.jsonl", {"messages": messages}))

    def said(cls, *sizes, **limits):
        batch = split_all(processor, reader, cls, *sizes, **limits)
        return [[text_of(message["content"]) for message in sample.messages] for sample in batch.samples()]

    head = ["s", "env info", "the real task", "files"]
    assert said(TrajectorySplitter, 2, 2) == [
        [*head, "1", "o", "2"],
        [*head, "1", "2", "o", "3", "o", "4"],
        [*head, "1", "2", "3", "4", "o", "5"],
    ]
    assert said(StepwiseTrajectorySplitter, limit_messages=1) == [
        [*head, "1"],  # nothing lies further back
        [*head, "1", "o", "2"],
        [*head, "2", "o", "3"],
        [*head, "3", "o", "4"],
        [*head, "4", "o", "5"],
    ]


def text_of(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
