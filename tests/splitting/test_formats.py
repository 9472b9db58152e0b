"""Recordings as other projects write them, in small samples that are true to their formats.

Where each field was taken from:
- ATIF: the specification `rfcs/0001-trajectory-format.md` of harbor-framework/harbor (v1.0 to 1.8) through the models
  of the `atif` package, which follow it field by field; the folders of a trial from Harbor's documentation.
- AgentNet: the dataset card of xlangai/AgentNet, and `CoTGenerator/merge_to_jsonl.py` of xlang-ai/OpenCUA; headings of
  answers as OpenCUA's agent in OSWorld writes them.
- LiteSample: `lite/data/preproc/opencua/AGENTS.md` of cua-lite/cua-lite and the rows of cua-lite/Lite.OSWorld.
- OSWorld: `lib_run_single.py` of xlang-ai/OSWorld.
- Chats with tool calls: OpenAI's chat completions; rows with `<image>`: data documentation of TRL, ms-swift and
  LLaMA-Factory.
"""

import json
import subprocess
import sys

import pytest
from chats import lines, png, read_row, rows_in, split_all, talk, tar_of

from shoal.core.errors import DataError
from shoal.splitting import ChatReader, StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.readers import READERS, find_reader, reader
from shoal.splitting.readers.formats import AgentNetReader, AtifReader, LiteSampleReader


def answers(batch, processor):
    return [
        processor.tokenizer.decode(sample.response_ids[sample.response_mask]) for sample in batch.samples()
    ]


# --- ATIF
ATIF = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s-1",
    "trajectory_id": "t-1",
    "agent": {"name": "terminus-2", "version": "2.0.0", "model_name": "some/model", "extra": {"parser": "json"}},
    "steps": [
        {"step_id": 1, "source": "system", "message": "You use a computer."},
        {"step_id": 2, "timestamp": "2025-10-16T14:30:00Z", "source": "user", "message": [
            {"type": "text", "text": "Say hello."},
            {"type": "image", "source": {"media_type": "image/png", "path": "images/start.png"}}]},
        {"step_id": 3, "source": "agent", "message": "I look.", "is_copied_context": True,
         "observation": {"results": [{"content": "copied"}]}},
        {"step_id": 4, "source": "agent", "model_name": "some/model", "message": "Let me write.",
         "reasoning_content": "A file is wanted.", "llm_call_count": 1,
         "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "echo hé"}},
                        {"tool_call_id": "c2", "function_name": "look", "arguments": {}}],
         "observation": {"results": [
             {"source_call_id": "c1", "content": "hé"},
             {"source_call_id": "c2", "content": [
                 {"type": "image", "source": {"media_type": "image/png", "path": "images/after.png"}}]}]},
         "metrics": {"prompt_tokens": 20, "completion_tokens": 8, "cost_usd": 0.1}},
        {"step_id": 5, "source": "agent", "message": "Done."},
    ],
    "final_metrics": {"total_steps": 5},
}  # fmt: skip


@pytest.fixture
def trial(tmp_path):
    folder = tmp_path / "job" / "say-hello__abc123"
    (folder / "agent" / "images").mkdir(parents=True)
    (folder / "agent" / "images" / "start.png").write_bytes(png(1))
    (folder / "agent" / "images" / "after.png").write_bytes(png(2))
    (folder / "agent" / "trajectory.json").write_text(json.dumps(ATIF))
    result = {"task_name": "say-hello", "verifier_result": {"rewards": {"reward": 0.5}}}
    (folder / "result.json").write_text(json.dumps(result))
    return tmp_path / "job"


def test_the_sample_of_atif_is_valid_where_its_models_are_installed():
    atif = pytest.importorskip("atif")
    atif.Trajectory.model_validate(ATIF)


def test_harbor_trials_become_recordings(processor, trial):
    found = find_reader(trial)
    assert isinstance(found, AtifReader)
    assert found.ids() == ["say-hello__abc123"]
    recording = found.read("say-hello__abc123")
    assert (recording.uid, recording.reward) == ("say-hello", 0.5)
    assert [m.role for m in recording.messages] == [
        "system", "user", "assistant", "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert [len(m.images) for m in recording.messages] == [0, 1, 0, 0, 0, 0, 1, 0]
    batch = split_all(processor, found)
    assert answers(batch, processor) == [
        "<think>\nA file is wanted.\n</think>\n\nLet me write.\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hé"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>',
        "Done.<|im_end|>",
    ]
    assert batch["n_steps"].tolist() == [2, 2]
    assert batch["step_index"].tolist() == [0, 1]
    window = split_all(processor, found, TrajectorySplitter)
    assert answers(window, processor) == ["".join(answers(batch, processor))]
    whole = processor.tokenizer.decode(window.samples()[0].input_ids)
    assert "<|im_start|>assistant\nI look.<|im_end|>\n<|im_start|>user\ncopied<|im_end|>" in whole


def test_steps_of_atif_bring_their_tokens(processor, tmp_path):
    encode = processor.tokenizer.encode
    ids = encode("Hi.<|im_end|>")
    steps = [
        {"step_id": 1, "source": "user", "message": "Hello."},
        {"step_id": 2, "source": "agent", "message": "Hi.",
         "metrics": {"completion_token_ids": ids, "logprobs": [-0.25] * len(ids)}},
    ]  # fmt: skip
    rows = [{**ATIF, "trajectory_id": f"t{n}", "steps": steps} for n in range(3)]
    place = lines(tmp_path / "all.jsonl", *rows)
    found = find_reader(place)
    assert isinstance(found, AtifReader)
    batch = split_all(processor, found, use_vllm_logp=True)
    assert batch["dataset_ids"].tolist() == ["t0", "t1", "t2"]
    assert batch.samples()[0].response_ids.tolist() == ids
    assert batch.samples()[0].logprobs.tolist() == [-0.25] * len(ids)
    steps[1]["metrics"]["logprobs"].append(-1.0)
    place.write_text(json.dumps({**ATIF, "steps": steps}))
    with pytest.raises(DataError, match="step 2.*completion_token_ids but"):
        AtifReader(place).read("t-1")


def test_agent_steps_in_a_row_are_one_answer_unless_one_of_them_is_copied(tmp_path):
    steps = [
        {"step_id": 1, "source": "user", "message": "Hello."},
        {"step_id": 2, "source": "agent", "message": "One."},
        {"step_id": 3, "source": "agent", "message": "", "tool_calls": [
            {"tool_call_id": "c", "function_name": "f", "arguments": {"x": 1}}]},
    ]  # fmt: skip

    def read():
        return AtifReader(lines(tmp_path / "trajectory.json", {**ATIF, "steps": steps})).read("t-1")

    said = read().messages[1].text
    assert said == 'One.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    steps[1]["is_copied_context"] = True
    with pytest.raises(DataError, match="step 3: an agent step follows another"):
        read()
    for odd in ({}, {"x": 1}, [1], "f"):
        steps[2]["tool_calls"] = odd
        with pytest.raises(DataError, match="step 3: tool_calls must be a list of objects"):
            read()


# --- AgentNet
def agentnet(folder, completed=True):
    (folder / "ubuntu_images").mkdir(parents=True)
    steps = []
    for number in range(3):
        (folder / "ubuntu_images" / f"shot-{number}.png").write_bytes(png(number))
        steps.append({"index": number, "image": f"shot-{number}.png", "value": {
            "thought": f"I think {number}.", "action": f"Click {number}.",
            "code": f"pyautogui.click(x=0.1{number}, y=0.508)", "observation": "A desktop.",
            "reflection": "It worked.", "last_step_correct": number != 1, "last_step_redundant": False}})  # fmt: skip
    task = {
        "task_id": "20240927235321_me@here.org_5855063d-3f37-47a4-ab45-5247adfdb6f7",
        "instruction": "Sort the table.", "task_completed": completed, "alignment_score": 7,
        "efficiency_score": 9, "task_difficulty": 3, "natural_language_task": "…", "actual_task": "…",
        "reason": "…", "domain": "Chrome", "traj": steps,
    }  # fmt: skip
    (folder / "agentnet_ubuntu_5k.jsonl").write_text(json.dumps(task) + "\n")
    (folder / "meta_data_merged.jsonl").write_text(json.dumps({"task_id": "x", "system": "Ubuntu"}) + "\n")
    return folder


def test_agentnet_tasks_become_recordings(processor, tmp_path):
    root = agentnet(tmp_path / "AgentNet")
    found = find_reader(root)
    assert isinstance(found, AgentNetReader)
    [name] = found.ids()
    assert name.startswith("20240927235321_me_here.org_5855063d")
    recording = found.read(name)
    assert recording.reward == 1.0
    assert recording.uid == "20240927235321_me@here.org_5855063d-3f37-47a4-ab45-5247adfdb6f7"
    assert [m.role[0] for m in recording.messages] == list("uauaua")
    assert recording.messages[0].text == "Sort the table."
    assert all(len(message.images) == 1 for message in recording.messages[::2])
    assert recording.messages[1].text == (
        "## Thought:\nI think 0.\n\n## Action:\nClick 0.\n\n"
        "## Code:\n```python\npyautogui.click(x=0.10, y=0.508)\n```"
    )
    batch = StepwiseTrajectorySplitter(processor, root, reader=found).split([name])
    assert [len(item["image_grid_thw"]) for item in batch["multi_modal_inputs"]] == [1, 2, 3]
    careful = AgentNetReader(root, parts=("action", "code"), train_mistakes=False)
    batch = StepwiseTrajectorySplitter(processor, root, reader=careful).split([name])
    assert [text.splitlines()[1] for text in answers(batch, processor)] == ["Click 0.", "Click 2."]


def test_a_step_of_agentnet_shows_a_file_or_the_image_itself(tmp_path):
    root = agentnet(tmp_path / "AgentNet")
    file = root / "agentnet_ubuntu_5k.jsonl"
    task = json.loads(file.read_text())

    def read(image):
        task["traj"][1]["image"] = image
        file.write_text(json.dumps(task) + "\n")
        reader = AgentNetReader(root)
        return reader.read(reader.ids()[0]).messages[2].images

    url = f"data:image/png;base64,{'A' * 5000}"
    assert read(url) == (url,)
    for image, message in (
        ("", "step 1: no image"),
        ("A" * 300, r"step 1: image 'A{80}' is no file \(.*too long\); name one, or write a data: URL"),
        ("A" * 60 + "/A" * 3000, "step 1: image '.{80}' is no file"),
        ("shot-9", "shot-9.png is missing"),
    ):
        with pytest.raises(DataError, match=message):
            read(image)


# --- LiteSample
def litesample():
    def call(number, **arguments):
        function = {"name": "computer", "arguments": {"actions": [arguments]}}
        return {"id": f"call_{number:04d}", "type": "function", "function": function}

    messages = [
        {"role": "user", "content": [{"type": "image", "index": 0}, {"type": "text", "text": "Open it."}]},
        {"role": "assistant", "content": [
            {"type": "inline_reasoning", "text": "I need the icon."},
            {"type": "action_description", "text": "Click the icon."},
            {"type": "metadata", "data": {"opencua_step": {"last_step_correct": True}}}],
         "tool_calls": [call(0, action="click", coordinate=[23, 442])]},
        {"role": "tool", "tool_call_id": "call_0000", "content": [{"type": "image", "index": 1}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
    ]  # fmt: skip
    metadata = {"metadata_kind": "cua", "dims": ["desktop", "use"], "extra_tool_schemas": [], "valid_actions": None,
                "others": {"id": "agentnet_ubuntu_0211fa90", "resolution": [1920, 1080], "os": "ubuntu",
                           "source": "xlangai/AgentNet", "source_id": "0211fa90", "task_completed": False}}  # fmt: skip
    return messages, metadata


LITE_ANSWERS = [
    "I need the icon.\nClick the icon.\n<tool_call>\n"
    '{"name": "computer", "arguments": {"actions": [{"action": "click", "coordinate": [23, 442]}]}}\n'
    "</tool_call><|im_end|>",
    "Done.<|im_end|>",
]


def test_litesample_rows_become_recordings(processor, tmp_path):
    messages, metadata = litesample()
    images = [{"bytes": png(n), "path": f"{n}.png"} for n in range(2)]
    rows = [{"images": images, "messages": json.dumps(messages), "metadata": json.dumps(
        metadata | {"others": metadata["others"] | {"id": f"row {n}"}})} for n in range(5)]  # fmt: skip
    (tmp_path / "train").mkdir()
    rows_in(tmp_path / "train" / "a.parquet", rows)
    found = find_reader(tmp_path / "train")
    assert isinstance(found, LiteSampleReader)
    assert found.ids() == [f"row {n}" for n in range(5)]
    recording = found.read("row 3")
    assert (recording.uid, recording.reward) == ("0211fa90", 0.0)
    assert "base64" not in json.dumps([m.content for m in recording.messages])
    batch = StepwiseTrajectorySplitter(processor, tmp_path, reader=found).split(["row 4", "row 0"])
    assert answers(batch, processor) == LITE_ANSWERS * 2
    assert [len(item["image_grid_thw"]) for item in batch["multi_modal_inputs"]] == [1, 2, 1, 2]


def test_litesample_may_be_lines_of_json_with_paths(processor, tmp_path):
    messages, metadata = litesample()
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    row = {"images": ["0.png", "1.png"], "messages": messages, "metadata": metadata}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    found = find_reader(tmp_path)
    assert isinstance(found, LiteSampleReader)
    batch = StepwiseTrajectorySplitter(processor, tmp_path, reader=found).split(found.ids())
    assert answers(batch, processor) == LITE_ANSWERS
    row["messages"][0]["content"][0]["index"] = 2
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"image index must be in \[0, 1\], got 2"):
        LiteSampleReader(tmp_path).read("agentnet_ubuntu_0211fa90")


def test_litesample_may_number_its_tasks_from_0_and_leave_columns_empty(tmp_path):
    messages, metadata = litesample()
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    others = {"id": 0, "task_id": 0, "source_id": "s", "episode_return": None, "task_completed": True}
    row = {"images": ["0.png", "1.png"], "messages": messages, "metadata": metadata | {"others": others}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    recording = LiteSampleReader(tmp_path).read("0")
    assert (recording.uid, recording.reward) == ("0", 1.0)


# --- OpenAI
def test_tool_calls_of_openai_are_what_the_models_template_would_write(processor, tmp_path):
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,  "b": "ü"}'}}]
    chat = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "Three.", "reasoning_content": "Sure."},
    ]
    found = ChatReader(lines(tmp_path / "a.jsonl", chat))
    batch = StepwiseTrajectorySplitter(processor, tmp_path, reader=found).split(found.ids())
    assert answers(batch, processor) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call><|im_end|>',
        "<think>\nSure.\n</think>\n\nThree.<|im_end|>",
    ]
    assert found.read(found.ids()[0]).messages[0].role == "system"


@pytest.mark.parametrize(
    ("forms", "written"),
    [
        (["", " ", None, "null", "{}", {}], "{}"),
        (['{"x": "K\\u00f6ln", "n": 1.0}', {"x": "Köln", "n": 1.0}, '{ "x":"Köln","n":1.0}'],
         '{"x": "Köln", "n": 1.0}'),
    ],
)  # fmt: skip
def test_arguments_of_a_call_are_one_text_however_they_were_recorded(tmp_path, forms, written):
    for arguments in forms:
        call = {"function": {"name": "look", "arguments": arguments}}
        said = read_row(tmp_path, talk(None, tool_calls=[call])).messages[1].text
        assert said == f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>', arguments


@pytest.mark.parametrize("arguments", ['"Paris"', "7", [1], "{broken"])
def test_arguments_that_are_no_object_are_refused(tmp_path, arguments):
    call = {"function": {"name": "look", "arguments": arguments}}
    with pytest.raises(DataError, match="message 1: arguments of 'look'"):
        read_row(tmp_path, talk(None, tool_calls=[call]))


def test_images_listed_beside_a_chat_stand_where_it_marks_them(processor, tmp_path):
    (tmp_path / "0.png").write_bytes(png(0))
    (tmp_path / "1.png").write_bytes(png(1))
    marks = talk("An <image>.", "<image>Look:<image>")
    parts = talk("An <image>.", [{"type": "image"}, {"type": "text", "text": "Look:"}, {"type": "image"}])
    rows = [{"messages": chat, "images": ["0.png", "1.png"]} for chat in (marks, parts)]
    found = ChatReader(lines(tmp_path / "a.jsonl", *rows))
    batch = StepwiseTrajectorySplitter(processor, tmp_path, reader=found).split(found.ids())
    first, second = batch.samples()
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert len(first.images) == 2
    with pytest.raises(DataError, match="more image marks than the 1 images"):
        read_row(tmp_path, {"messages": marks, "images": ["0.png"]})


# --- containers
def chat_with(image):
    return {"messages": talk(question=[{"type": "image", "image": image}]), "reward": 0.25}


def test_webdataset_archives_are_read_record_by_record(processor, tmp_path):
    chat = json.dumps(chat_with("screen.png")).encode()
    records = [(f"shard/{n:03d}.json", chat) for n in range(4)]
    screens = [(f"shard/{n:03d}.screen.png", png(n)) for n in range(4)]
    found = find_reader(tar_of(tmp_path / "a.tar", dict(sorted(records + screens))))
    batch = StepwiseTrajectorySplitter(processor, tmp_path, reader=found).split(found.ids())
    assert batch["reward_tensor"].sum(1).tolist() == [0.25] * 4
    for n, sample in enumerate(batch.samples()):
        assert (sample.inputs.pixels.picture(0) == n).all()


def test_links_in_an_archive_are_no_files(tmp_path):
    files = {"a.json": json.dumps(chat_with("x.png")).encode(), "a.x.png": "/etc/passwd"}
    found = ChatReader(tar_of(tmp_path / "a.tar", files))
    with pytest.raises(DataError, match=r"x\.png is missing"):
        found.read(found.ids()[0])


MEASURE = """
import json, sys, tracemalloc
import numpy
import shoal.splitting.readers.formats
try:
    import pyarrow.parquet
except ImportError:
    pass
from shoal.splitting.readers import find_reader
tracemalloc.start()
reader = find_reader(sys.argv[1])
names = reader.ids()
for name in names:
    reader.read(name)
print(len(names), tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.parametrize("kind", ["jsonl", "tar", "parquet"])
def test_a_large_file_is_read_in_bounded_memory(tmp_path, kind):
    count, filler = 150, "x" * 100_000
    place = tmp_path / f"large.{kind}"
    chat = json.dumps(talk(question=filler))
    rows_in(place, [{"id": f"c{n}", "messages": chat + " " * n} for n in range(count)])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(place)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    names, peak = map(int, done.stdout.split())
    assert names == count
    assert peak < 15 * len(filler)  # the file holds 150 of them


def test_a_reader_of_your_own_is_found_by_its_name():
    @reader("mine-of-tests")
    class Mine:
        def __init__(self, path):
            self.path = path

    assert READERS["mine-of-tests"] is Mine
    with pytest.raises(ValueError, match="registered already"):
        reader("mine-of-tests")(dict)
    with pytest.raises(KeyError, match=r"Did you mean 'osworld'"):
        READERS["osworl"]
