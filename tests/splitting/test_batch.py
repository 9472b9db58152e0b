import json
import pickle

import numpy as np
import pytest
import torch
from chats import lines, split_all, talk
from PIL import Image

from shoal.core.errors import DataError
from shoal.splitting import Batch, ChatReader, StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.exports import write_chats, write_sharegpt
from shoal.splitting.images import fitted_size
from shoal.splitting.readers.recordings import FolderReader

from test_executors import assert_same_batches  # isort: skip


@pytest.fixture
def make_batch(processor, make_root):
    def make(cls=StepwiseTrajectorySplitter, rewards=(1.0, 2.0), **options):
        root, ids = make_root(len(rewards), steps=3, size=(120, 80), seed=3)
        return cls(processor, root, padding="longest", **options).split(ids, rewards)

    return make


@pytest.mark.parametrize("store", ["u8", "float32"])
def test_a_batch_survives_the_disk(make_batch, tmp_path, store):
    batch = make_batch(store=store)
    folder = batch.save(tmp_path / "batch")
    assert_same_batches(Batch.load(folder), batch)
    assert_same_batches(Batch.load(batch.save(folder)), batch)  # and is replaced as a whole
    assert_same_batches(Batch.load(tmp_path), batch)  # of a run folder


def test_a_batch_survives_pickling(make_batch):
    batch = make_batch()
    data = pickle.dumps(batch)
    assert_same_batches(pickle.loads(data), batch)
    assert len(data) < 1.3 * (batch.summary()["pixel_bytes"] + batch.summary()["tensor_bytes"])


def test_an_altered_batch_is_refused(make_batch, tmp_path):
    folder = make_batch().save(tmp_path / "batch")
    data = bytearray((folder / "batch.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "batch.safetensors").write_bytes(data)
    with pytest.raises(DataError, match=r"batch\.safetensors was altered"):
        Batch.load(folder)


def test_pixels_of_a_trajectory_are_held_once(make_batch):
    small, large = make_batch(store="u8"), make_batch(store="float32")
    images = 2 * 3
    per_image = small.summary()["pixel_bytes"] / images
    assert small.summary()["image_references"] == 2 * (1 + 2 + 3)
    assert large.summary()["pixel_bytes"] == 8 * small.summary()["pixel_bytes"]
    naive = sum(item["pixel_values"].nbytes for item in small["multi_modal_inputs"])
    assert naive == 12 * 8 * per_image
    views = [item["pixel_values"].untyped_storage().data_ptr() for item in large["multi_modal_inputs"]]
    assert len(set(views)) == 2


def test_inputs_behave_as_a_mapping_of_tensors(make_batch):
    inputs = make_batch()["multi_modal_inputs"][0]
    assert sorted(inputs.keys()) == ["image_grid_thw", "pixel_values"]
    assert "pixel_values" in inputs
    assert inputs.get("video_grid_thw") is None
    assert {**inputs}["pixel_values"].dtype == torch.float32
    with pytest.raises(KeyError):
        inputs["pixels"]


def test_samples_are_the_rows_without_padding(make_batch):
    batch = make_batch(TrajectorySplitter)
    for row, sample in enumerate(batch.samples()):
        on = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, on].tolist() == sample.input_ids.tolist()
        assert torch.equal(batch["position_ids"][row][:, on], torch.from_numpy(sample.position_ids).long())
        assert batch["response_mask"][row].sum() == sample.response_mask.sum()


@pytest.mark.parametrize("rows", [3, 4])
def test_a_jagged_tensordict_holds_the_unpadded_rows(make_batch, rows):
    pytest.importorskip("tensordict")
    batch = make_batch(position_rows=rows)
    data = batch.to_tensordict(jagged=True)
    for row, sample in enumerate(batch.samples()):
        assert torch.equal(data["input_ids"][row], torch.from_numpy(sample.input_ids).long())
        assert torch.equal(data["responses"][row], torch.from_numpy(sample.response_ids).long())
        assert data["position_ids"][row].shape == (rows, sample.n_tokens)
        assert torch.equal(data["position_ids"][row][-3:], torch.from_numpy(sample.position_ids).long())
        assert data["reward_tensor"][row].sum() == sample.rewards.sum()
    assert data["uid"] == batch["uid"].tolist()
    padded = batch.to_tensordict(jagged=False)
    assert torch.equal(padded["input_ids"], batch["input_ids"])
    single = make_batch(TrajectorySplitter, rewards=(1.0,))
    assert (
        single.to_tensordict(jagged=True)["input_ids"][0].tolist() == single.samples()[0].input_ids.tolist()
    )


def test_verl_takes_the_batch(make_batch):
    pytest.importorskip("verl")
    batch = make_batch()
    data = batch.to_dataproto(meta_info={"step": 3})
    assert len(data) == len(batch["uid"])
    assert torch.equal(data.batch["position_ids"], batch["position_ids"])
    assert data.non_tensor_batch["uid"].tolist() == batch["uid"].tolist()
    assert data.meta_info["step"] == 3
    joined = type(data).concat(data.chunk(2))
    assert torch.equal(joined.batch["input_ids"], batch["input_ids"])
    pixels = torch.cat([item["pixel_values"] for item in joined.non_tensor_batch["multi_modal_inputs"]])
    assert torch.equal(pixels, torch.cat([item["pixel_values"] for item in batch["multi_modal_inputs"]]))
    plain = batch.to_dataproto(expand=True).non_tensor_batch["multi_modal_inputs"]
    assert type(plain[0]) is dict
    assert torch.equal(plain[0]["pixel_values"], batch["multi_modal_inputs"][0]["pixel_values"])


def test_verl_computes_advantages_that_see_the_reward(make_batch):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    batch = make_batch(TrajectorySplitter)
    values = torch.zeros_like(batch["reward_tensor"])
    _, returns = core_algos.compute_gae_advantage_return(
        batch["reward_tensor"], values, batch["response_mask"].float(), 1.0, 1.0
    )
    first = [int(mask.nonzero()[0]) for mask in batch["response_mask"]]
    assert [returns[row, at].item() for row, at in enumerate(first)] == [1.0, 2.0]


def test_a_picture_is_rebuilt_from_its_patches(make_batch, processor, tmp_path):
    shown = make_batch().pixels[0].picture(1)
    path = next((tmp_path / "recordings").glob("*000*/image_0001.png"))
    image = Image.open(path).convert("RGB")
    wanted = np.asarray(image.resize(fitted_size(*image.size, 28, 3136, 12845056), Image.Resampling.BICUBIC))
    assert np.array_equal(shown, wanted)
    with pytest.raises(ValueError, match="store='u8'"):
        make_batch(store="float32").pixels[0].picture(1)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_chats_are_written_as_fine_tuning_tools_read_them_and_read_back(
    processor, make_root, tmp_path, suffix, parts
):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    root, ids = make_root(2, steps=3, size=(60, 60))
    reader = FolderReader(root)
    place = root / f"chats.{suffix}"
    assert write_chats(place, map(reader.read, ids), parts=parts) == 2
    back = ChatReader(place)
    assert back.ids() == ids
    one, two = split_all(processor, reader), split_all(processor, back)
    assert torch.equal(one["input_ids"], two["input_ids"])
    for left, right in zip(one["multi_modal_inputs"], two["multi_modal_inputs"], strict=True):
        assert torch.equal(left["pixel_values"], right["pixel_values"])
    if suffix == "jsonl":
        row = json.loads(place.read_text().splitlines()[0])
        text = json.dumps(row["messages"])
        assert (text.count("<image>"), text.count('{"type": "image"}')) == ((0, 3) if parts else (3, 0))
        assert len(row["images"]) == 3


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_answers_that_are_context_and_tools_are_the_same_in_a_file_of_chats(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    said = [*talk(trained=False), *talk()]
    look = {"name": "look", "parameters": {"type": "object", "default": None}}
    tools = [{"type": "function", "function": look}]
    source = lines(tmp_path / "source.jsonl", {"id": "one", "messages": said, "tools": tools})
    first = ChatReader(source).read("one")
    place = tmp_path / f"chats.{suffix}"
    write_chats(place, [first])
    back = ChatReader(place).read("one")
    assert [message.trained for message in back.messages] == [True, False, True, True]
    assert (back.messages, back.tools) == (first.messages, tuple(tools))
    write_sharegpt(tmp_path / "sft.json", [first])
    [row] = json.loads((tmp_path / "sft.json").read_text())
    assert [turn.get("loss") for turn in row["conversations"]] == [None, False, None, None]
    assert json.loads(row["tools"]) == tools


def test_a_file_of_chats_that_could_not_be_written_leaves_nothing(make_root, tmp_path):
    pytest.importorskip("pyarrow")
    root, ids = make_root(2, steps=1, size=(60, 60))

    def recordings():
        yield FolderReader(root).read(ids[0])
        raise DataError("the second is broken")

    with pytest.raises(DataError, match="second is broken"):
        write_chats(tmp_path / "chats.parquet", recordings())
    assert not list(tmp_path.glob("*chats*")) + list(tmp_path.glob(".*chats*"))
