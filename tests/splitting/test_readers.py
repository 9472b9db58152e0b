import base64
import errno
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from chats import atif, lines, read_row, rewrite, rows_in, split_all, talk, tar_of
from tests.records import Exchange, exchanges, trajectory_of

from shoal.core.data import write_trajectories
from shoal.core.errors import DataError
from shoal.splitting import ChatReader, StepwiseTrajectorySplitter, TrajectorySplitter, find_reader
from shoal.splitting.exports import write_sharegpt
from shoal.splitting.readers.formats import OSWorldReader, ShoalReader
from shoal.splitting.readers.recordings import FolderReader


@pytest.fixture
def recorded(make_root):
    return make_root(2, steps=3, size=(90, 70))


def as_chat(root, name, reference):
    """The recording as an OpenAI chat whose images are given by `reference(file)`."""
    messages = json.loads((root / name / "final_messages.json").read_text())
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image_url":
                part["image_url"] = {"url": reference(root / name / f"{part['image_url']}.png")}
    return messages


def inline(path):
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize(
    ("container", "kind"),
    [
        ("jsonl", "file"),
        ("jsonl", "scheme"),
        ("jsonl", "data"),
        ("json", "file"),
        ("single", "file"),
        ("folder", "data"),
    ],
)
def test_openai_chats_split_like_the_folders_they_came_from(processor, recorded, kind, container):
    root, ids = recorded
    reference = {
        "file": lambda path: str(path.relative_to(root)),
        "scheme": lambda path: "file://" + str(path),
        "data": inline,
    }[kind]
    chats = [{"id": name, "task_id": "task-0", "messages": as_chat(root, name, reference)} for name in ids]
    target = root / "chats.jsonl"
    if container == "jsonl":
        target.write_text("\n".join(map(json.dumps, chats)) + "\n\n")
    elif container == "json":
        target = root / "chats.json"
        target.write_text(json.dumps(chats))
    else:
        ids = ids[:1]
        (root / "one.json").write_text(json.dumps(chats[0]))
        target = root / "one.json" if container == "single" else root
    reader = ChatReader(target)
    assert reader.ids() == ids
    got = split_all(processor, reader)
    want = StepwiseTrajectorySplitter(processor, root, padding="longest").split(ids)
    for name in ("input_ids", "position_ids", "loss_mask"):
        assert torch.equal(got[name], want[name])
    for one, other in zip(got["multi_modal_inputs"], want["multi_modal_inputs"], strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    assert got["uid"].tolist() == want["uid"].tolist()


def test_chats_bring_their_rewards_and_unnamed_ones_get_a_number(processor, tmp_path):
    rows = [{"messages": talk(), "reward": 0.5}, talk(), {"messages": talk(), "reward": -2, "id": "last"}]
    reader = find_reader(lines(tmp_path / "log.jsonl", *rows))
    assert reader.ids() == ["log-000000", "log-000001", "last"]
    splitter = StepwiseTrajectorySplitter(processor, tmp_path, reader=reader, padding="longest")
    assert splitter.split(reader.ids())["reward_tensor"].sum(1).tolist() == [0.5, 0.0, -2.0]
    assert splitter.split(reader.ids(), [1, 1, 1])["reward_tensor"].sum(1).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("none", [None, ""])
def test_chats_whose_task_is_left_empty_are_tasks_of_their_own(tmp_path, none):
    rows = [{"id": name, "task_id": none, "messages": talk()} for name in "ab"]
    reader = ChatReader(lines(tmp_path / "log.jsonl", *rows, {**rows[0], "id": "c", "task_id": 0}))
    assert [reader.read(name).uid for name in "abc"] == ["a", "b", "0"]


def test_chat_files_that_are_broken_say_where(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"messages": []}\n{"messages":\n')
    reader = ChatReader(tmp_path / "log.jsonl")
    assert reader.ids() == ["log-000000", "log-000001"]
    with pytest.raises(DataError, match="log.jsonl, record 1 is not valid JSON"):
        reader.read("log-000001")
    (tmp_path / "log.jsonl").write_text('{"id": "abc", "messages": []}\n')
    with pytest.raises(DataError, match="Did you mean 'abc'"):
        ChatReader(tmp_path / "log.jsonl").read("abd")


@pytest.mark.parametrize("odd", ["coco/train2017/33471", "任务1", "x" * 70, "vqa#12", "../a"])
def test_one_odd_id_costs_no_other_chat(processor, tmp_path, odd):
    rows = [{"id": name, "messages": talk()} for name in (odd, "b", "c")]
    reader = ChatReader(lines(tmp_path / "log.jsonl", *rows))
    names = reader.ids()
    batch = split_all(processor, reader)
    assert len(batch["uid"]) == len(set(names)) == 3
    assert all("/" not in name for name in names)


@pytest.mark.parametrize("name", ["screen.png", "my screen.png", "Übersicht 1.png", "100%.png", "a%20b.png"])
def test_an_image_is_found_by_its_path_and_by_its_uri(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    for reference in (name, (tmp_path / name).as_uri()):
        chat = talk(question=[{"type": "image_url", "image_url": {"url": reference}}])
        assert read_row(tmp_path, chat).messages[0].images == (str(tmp_path / name),)


def test_the_folder_of_one_recording_can_be_split_and_names_its_task(processor, recorded):
    root, ids = recorded
    (root / ids[0] / "task_config.json").write_text('{"reward": 0.5}')
    reader = find_reader(root / ids[0])
    assert reader.ids() == ids[:1]
    one = split_all(processor, reader)
    assert one["uid"].tolist() == ids[:1] * 3
    assert one["reward_tensor"].sum(1).tolist() == [0.5] * 3
    both = StepwiseTrajectorySplitter(processor, root, padding="longest").split(ids)
    assert [sample.input_ids.tolist() for sample in one.samples()] == [
        sample.input_ids.tolist() for sample in both.samples()[:3]
    ]
    (root / ids[0] / "task_config.json").write_text('{"id": []}')
    with pytest.raises(
        DataError, match="task_config.json must be an object; its 'id' is the name of the task"
    ):
        reader.read(ids[0])


@pytest.fixture
def osworld(recorded, tmp_path):
    """Results of one task: a first screenshot, three steps of which the second has two actions, a score."""
    root, ids = recorded
    folder = tmp_path / "results" / "pyautogui" / "chrome" / "bb5e4c0d-f964-439c"
    folder.mkdir(parents=True)
    shots = sorted((root / ids[0]).glob("*.png"))
    for name, source in zip(("step_0", "step_1", "step_2"), shots, strict=True):
        (folder / f"{name}.png").write_bytes(source.read_bytes())
    steps = [
        {"step_num": 1, "action": "click(1, 2)", "response": "I click.", "screenshot_file": "step_1.png"},
        {"step_num": 2, "action": "type('a')", "screenshot_file": "step_1.png", "reward": 0, "done": False},
        {"step_num": 2, "action": "press('enter')", "screenshot_file": "step_2.png", "done": False},
        {"step_num": 3, "action": "DONE", "done": True},
    ]
    (folder / "traj.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (folder / "result.txt").write_text("0.75\n")
    (folder / "instruction.txt").write_text("Turn on the light.")
    return tmp_path / "results"


def test_osworld_results_become_chats(processor, osworld):
    reader = find_reader(osworld)
    assert isinstance(reader, OSWorldReader)
    (name,) = reader.ids()
    recording = reader.read(name)
    assert [message.role[0] for message in recording.messages] == list("uauauau")
    assert [len(message.images) for message in recording.messages] == [1, 0, 1, 0, 1, 0, 0]
    assert [m.text for m in recording.messages if m.role == "assistant"] == [
        "I click.",
        "type('a')\npress('enter')",
        "DONE",
    ]
    assert recording.messages[0].text == "Turn on the light."
    assert recording.messages[4].images[0].endswith("step_2.png")
    batch = split_all(processor, reader)
    assert batch["reward_tensor"].sum(1).tolist() == [0.75] * 3
    assert len(batch["multi_modal_inputs"][2]["image_grid_thw"]) == 3


def test_the_note_of_a_failed_task_is_no_answer(osworld):
    (file,) = osworld.rglob("traj.jsonl")
    reader = OSWorldReader(osworld)
    before = reader.read(reader.ids()[0]).messages
    file.write_text(file.read_text().rstrip("\n") + '\n{"Error": "Time limit exceeded in os/1"}')
    assert reader.read(reader.ids()[0]).messages == before


def test_osworld_results_without_an_instruction_say_what_to_write(osworld):
    next(osworld.rglob("instruction.txt")).unlink()
    reader = OSWorldReader(osworld)
    with pytest.raises(DataError, match=r"instruction\.txt"):
        reader.read(reader.ids()[0])
    told = OSWorldReader(osworld, instructions={reader.ids()[0]: "Do it."}, system="You act.")
    assert [message.text for message in told.read(reader.ids()[0]).messages[:2]] == ["You act.", "Do it."]


def trajectory(processor, member=0, status="ok", image=None):
    encode = processor.tokenizer.encode
    turns = []
    prompt = []
    for number in range(3):
        prompt = prompt + encode(f"<|im_start|>user\nstate {number}<|im_end|>\n<|im_start|>assistant\n")
        answer = encode(f"go {number}<|im_end|>")
        logprobs = tuple(-0.5 for _ in answer)
        seen, said = f"state {number}", f"go {number}"
        turn = Exchange(
            seen, tuple(prompt), tuple(answer), logprobs, said, "go", True, 0.5, seen, image=image
        )
        turns.append(turn)
        prompt = prompt + answer + encode("\n")
    return trajectory_of("grid/x", 4, 2, member, 7, tuple(turns), True, True, False, status)


def test_own_trajectories_train_on_the_very_tokens_that_were_sampled(processor, tmp_path):
    played = [trajectory(processor), trajectory(processor, 1, "env_error"), trajectory(processor, 2)]
    write_trajectories(tmp_path / "trajectories" / "000.jsonl", played)
    reader = find_reader(tmp_path)
    assert isinstance(reader, ShoalReader)
    assert reader.ids() == ["grid_x-4-2-0", "grid_x-4-2-2"]
    batch = split_all(processor, reader, use_vllm_logp=True)
    assert batch["uid"].tolist() == ["grid/x-4-2"] * 6
    for sample, turn in zip(batch.samples()[:3], exchanges(played[0]), strict=True):
        assert sample.prompt_ids.tolist() == list(turn.prompt_ids)
        assert sample.response_ids.tolist() == list(turn.response_ids)
        assert sample.logprobs.tolist() == list(turn.logprobs)
    assert batch["reward_tensor"].sum(1).tolist() == [1.5] * 6
    assert torch.equal(batch["rollout_log_probs"] != 0, batch["response_mask"].bool())
    assert split_all(processor, reader, TrajectorySplitter)["n_steps"].tolist() == [1, 1]


def test_no_episode_of_a_run_is_lost_to_another_of_its_number(processor, tmp_path, caplog):
    folder = tmp_path / "trajectories"
    for name in ("heldout-000000", "heldout-000004"):  # each holds iteration 4, group 2
        write_trajectories(folder / f"{name}.jsonl", [trajectory(processor)])
    reader = ShoalReader(tmp_path)
    assert reader.ids() == ["heldout-000000-grid_x-4-2-0", "heldout-000004-grid_x-4-2-0"]
    assert [Path(reader.read(name).source.split(",")[0]).stem for name in reader.ids()] == [
        "heldout-000000", "heldout-000004"
    ]  # fmt: skip
    assert reader.read(reader.ids()[0]).uid == "heldout-grid/x-4-2"  # in training they begin in other states
    for name in ("train-000005", "other"):
        write_trajectories(folder / f"{name}.jsonl", [trajectory(processor)])
    assert not caplog.records
    reader = ShoalReader(tmp_path)
    assert [Path(reader.read(reader.ids()[0]).source.split(",")[0]).stem, len(reader.ids())] == ["other", 2]
    [record] = caplog.records  # what was held out is not trained on unasked
    assert record.getMessage() == (
        f"{folder}: not read: held-out episodes; give a file, such as heldout-000000.jsonl, to read them"
    )
    assert ShoalReader(folder / "heldout-000000.jsonl").ids() == ["heldout-000000-grid_x-4-2-0"]
    _, second = ShoalReader(tmp_path).ids()
    with pytest.raises(DataError, match=r"train-000005.jsonl.*: id 'grid_x-4-2-0' is taken by .*other.jsonl"):
        ShoalReader(tmp_path).read(second)


@pytest.mark.parametrize("torn", ["amid", "first"])
def test_a_broken_line_of_a_run_is_named_and_takes_no_other_with_it(processor, tmp_path, torn):
    file = tmp_path / "trajectories" / "train-000004.jsonl"
    write_trajectories(file, [trajectory(processor, member) for member in range(3)])
    written = file.read_bytes().splitlines()
    written[torn == "amid"] = written[torn == "amid"][:-90] + b"\xff"
    file.write_bytes(b"\n\n".join(written))
    number = int(torn == "amid")
    for place in (tmp_path, file):
        reader = find_reader(place)
        assert isinstance(reader, ShoalReader)
        broken = f"train-000004-{number:06d}"
        whole = [name for name in reader.ids() if name != broken]
        assert whole == [f"grid_x-4-2-{member}" for member in range(3) if member != (torn == "amid")]
        batch = split_all(processor, reader, on_error="skip")
        assert list(dict.fromkeys(batch["dataset_ids"].tolist())) == whole
        assert [item.dataset_id for item in batch.skipped] == [broken]
        assert f"{file}, record {number}: not a trajectory" in batch.skipped[0].reason
        with pytest.raises(DataError, match=rf"record {number}: not a trajectory"):
            reader.read(broken)


def test_own_trajectories_may_show_images(processor, recorded, tmp_path):
    root, ids = recorded
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes((root / ids[0] / "image_0000.png").read_bytes())
    write_trajectories(tmp_path / "trajectories" / "000.jsonl", [trajectory(processor, image="shots/a.png")])
    reader = ShoalReader(tmp_path)
    batch = split_all(processor, reader)
    assert [len(item["image_grid_thw"]) for item in batch["multi_modal_inputs"]] == [1, 2, 3]
    assert batch.summary()["images"] == 1  # one file, read once


def test_readers_are_found_by_what_a_folder_holds(recorded, tmp_path):
    root, _ = recorded
    assert isinstance(find_reader(root), FolderReader)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no recordings"):
        find_reader(tmp_path / "empty")
    with pytest.raises(DataError, match="does not exist"):
        find_reader(tmp_path / "nowhere")


def test_sharegpt_counts_one_mark_per_image(recorded, tmp_path):
    root, ids = recorded
    reader = FolderReader(root)
    rewrite(root / ids[1], lambda messages: messages[2]["content"][0].update(text="I see an <image> tag"))
    assert write_sharegpt(tmp_path / "sft.json", map(reader.read, ids)) == 2
    rows = json.loads((tmp_path / "sft.json").read_text())
    assert [row["id"] for row in rows] == ids
    for row in rows:
        assert [turn["from"] for turn in row["conversations"]] == ["system", *["human", "gpt"] * 3]
        assert sum(turn["value"].count("<image>") for turn in row["conversations"]) == len(row["images"]) == 3
    assert rows[1]["conversations"][2]["value"] == "I see an < image> tag"


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "tar"])
def test_threads_read_the_same_file_without_mixing_its_recordings(tmp_path, kind):
    words = [f"w{number}" for number in range(24)]
    write_chats_as(kind, tmp_path / f"all.{kind}", words)
    reader = ChatReader(tmp_path / f"all.{kind}")
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            said = [found.messages[1].content for found in pool.map(reader.read, reader.ids())]
            assert said == words


def test_lines_of_json_may_hold_every_separator_of_unicode(processor, tmp_path):
    said = "one\u2028two\u2029three\x85four\x0bfive\x1c"
    chats = [{"id": f"c{i}", "messages": talk(question=said)} for i in range(2)]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(chat, ensure_ascii=False) for chat in chats) + "\n", "utf-8")
    reader = ChatReader(file)
    assert reader.ids() == ["c0", "c1"]
    assert reader.read("c1").messages[0].content == said


def test_calls_as_openai_had_them_before_are_part_of_the_answer(tmp_path):
    chat = [
        *talk("Let me see.", function_call={"name": "look", "arguments": '{"at": "sky"}'}),
        {"role": "function", "name": "look", "content": "Rain."},
        {"role": "assistant", "content": "It rains."},
    ]
    messages = read_row(tmp_path, chat).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    assert messages[1].text == f"Let me see.\n{call}"


def test_images_beside_a_chat_that_are_no_list_are_refused(tmp_path):
    with pytest.raises(DataError, match="images must be a list, got str"):
        read_row(tmp_path, {"messages": talk(question="<image>What?"), "images": "a.png"})


def write_chats_as(kind, file, words):
    """A file of chats, one for each word, which have names in a table, and in a tar by their files."""
    if kind == "tar":
        tar_of(file, {f"{word}.json": json.dumps(talk(word)).encode() for word in words})
    else:
        named = kind == "parquet"
        rows_in(file, [{"id": word, "messages": talk(word)} if named else talk(word) for word in words])


@pytest.mark.parametrize("kind", ["jsonl", "json", "tar", "parquet"])
def test_a_file_that_was_written_anew_is_read_anew(tmp_path, kind):
    file = tmp_path / f"all.{kind}"
    reader = ChatReader(file)
    for words in (["one", "two", "six"], ["new", "one", "two", "six"], ["two", "one"]):
        write_chats_as(kind, file, words)
        said = [reader.read(name).messages[1].content for name in reader.ids()]
        assert said == words
        reader = pickle.loads(pickle.dumps(reader))  # as another process gets it


def test_chats_that_are_added_to_a_file_keep_no_other_from_being_read(tmp_path):
    file = tmp_path / "all.jsonl"
    write_chats_as("jsonl", file, ["one", "two"])
    file.write_text(file.read_text().rstrip("\n"))  # its writer is not done with the line
    reader = ChatReader(file)
    names = reader.ids()
    with file.open("a") as more:
        more.write(f"\n{json.dumps(talk('six'))}\n")
    assert [reader.read(name).messages[1].content for name in names] == ["one", "two"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "tar", "parquet", "atif"])
@pytest.mark.parametrize("torn", [0, 1])
def test_one_torn_record_takes_no_other_with_it(processor, tmp_path, kind, torn):
    """One of three is torn: the others are split, and it is skipped by a name and with a reason."""
    steps = [
        {"step_id": 1, "source": "user", "message": "hi"},
        {"step_id": 2, "source": "agent", "message": "ho"},
    ]
    root = tmp_path / "all"
    root.mkdir()
    for number in range(3):
        row = {"id": f"r{number}", "messages": talk()}
        chat = json.dumps(row)
        if kind == "jsonl":
            with (root / "all.jsonl").open("a") as file:
                file.write((chat if number != torn else chat[:-9]) + "\n")
        elif kind == "json":
            (root / f"r{number}.json").write_text(chat if number != torn else chat[:-9])
        elif kind == "tar":
            tar_of(root / f"{number}.tar", {f"r{number}.json": chat.encode()})
            if number == torn:
                (root / f"{torn}.tar").write_bytes(b"\xff" * 300)
        elif kind == "parquet":
            rows_in(root / f"{number}.parquet", [row])
            if number == torn:
                (root / f"{torn}.parquet").write_bytes(b"PAR1")
        else:
            place = root / f"r{number}" / "agent" / "trajectory.json"
            place.parent.mkdir(parents=True)
            told = json.dumps(atif(steps))
            place.write_text(told if number != torn else told[:-9])
    reader = find_reader(root)
    names = reader.ids()
    assert len(names) == 3
    splitter = StepwiseTrajectorySplitter(processor, root, reader=reader, on_error="skip", padding="longest")
    batch = splitter.split(names, [1.0, 2.0, 3.0])
    whole = [number for number in range(3) if number != torn]
    assert batch["dataset_ids"].tolist() == [f"r{number}" for number in whole]
    assert batch["reward_tensor"].sum(1).tolist() == [1.0 + number for number in whole]
    assert [item.dataset_id for item in batch.skipped] == [names[torn]]
    assert str(root) in batch.skipped[0].reason


def test_a_screen_with_a_padded_number_is_no_first_screen(osworld):
    folder = next(osworld.rglob("traj.jsonl")).parent
    for name in ("step_0", "step_1", "step_2"):
        (folder / f"{name}.png").rename(folder / f"{name.replace('_', '_0')}.png")
    steps = (folder / "traj.jsonl").read_text()
    for n in (1, 2):
        steps = steps.replace(f"step_{n}.png", f"step_0{n}.png")
    (folder / "traj.jsonl").write_text(steps)

    def shown():
        messages = OSWorldReader(osworld).read(folder.name).messages
        return [Path(place).name for message in messages for place in message.images]

    assert shown() == ["step_00.png", "step_01.png", "step_02.png"]
    (folder / "step_00.png").unlink()
    assert shown() == ["step_01.png", "step_02.png"]


def test_a_torn_or_empty_file_does_not_hide_of_what_kind_the_others_are(tmp_path):
    steps = [{"source": "user", "message": "hi"}, {"source": "agent", "message": "ho"}]
    told = json.dumps(atif(steps))
    (tmp_path / "a.json").write_text(told[:-9])
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl").write_text(told[:-9] + "\n" + told)
    reader = find_reader(tmp_path)
    assert type(reader).__name__ == "AtifReader"
    assert [message.text for message in reader.read("s").messages] == ["hi", "ho"]


def test_a_file_that_cannot_be_opened_now_is_not_taken_for_a_torn_one(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("[]")

    def none_left(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        ChatReader(tmp_path).ids()
