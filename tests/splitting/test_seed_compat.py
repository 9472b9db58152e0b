"""`compat="seed"` against per-window processing by the processor itself, tensor by tensor."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from per_window_reference import reference_split

from shoal.core.errors import DataError
from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.synthetic import write_gui_recordings

P, R = 6000, 6200
TENSORS = ["prompts", "responses", "input_ids", "attention_mask", "position_ids", "reward_tensor"]
TENSORS += ["loss_mask", "response_mask"]


def assert_same(batch, wanted):
    for name in TENSORS:
        assert batch[name].dtype == wanted[name].dtype, name
        assert torch.equal(batch[name], wanted[name]), name
    assert len(batch["multi_modal_inputs"]) == len(wanted["multi_modal_inputs"])
    for got, want in zip(batch["multi_modal_inputs"], wanted["multi_modal_inputs"], strict=True):
        assert set(got) == set(want)
        for name in want:
            assert got[name].dtype == want[name].dtype
            assert torch.equal(got[name], want[name]), name
    assert batch["raw_messages"].tolist() == wanted["raw_messages"]
    assert batch["dataset_ids"].tolist() == wanted["dataset_ids"]
    assert batch["uid"].tolist() == wanted["uid"]


def compare(processor, root, ids, kind, *, window=5, stride=5, images=5, messages=35, p=P, r=R, **options):
    rewards = [0.25 + index for index in range(len(ids))]
    cls = StepwiseTrajectorySplitter if kind == "stepwise" else TrajectorySplitter
    splitter = cls(
        processor, root, window_size=window, stride_size=stride if kind == "window" else 1,
        limit_images=images, limit_messages=messages, max_prompt_length=p, max_response_length=r,
        compat="seed", **options,
    )  # fmt: skip
    batch = splitter.split(ids, torch.tensor(rewards))
    limits = {"limit_images": images} if kind == "stepwise" else {"window": window, "stride": stride}
    wanted = reference_split(processor, root, ids, rewards, kind, p, r, limit_messages=messages, **limits)
    assert_same(batch, wanted)
    return batch


@pytest.mark.parametrize("kind", ["stepwise", "window"])
@pytest.mark.parametrize("ends_on_user", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 11])
def test_seed_mode_equals_per_window_processing(processor, make_root, kind, ends_on_user, steps):
    if kind == "stepwise" and steps == 1 and not ends_on_user:
        pytest.skip("the original makes no sample of a single step that ends on the answer")
    root, ids = make_root(2, steps=steps, ends_on_user=ends_on_user, size=(150, 120), seed=steps)
    compare(processor, root, ids, kind)


@pytest.mark.parametrize("store", ["u8", "float32", "path"])
def test_every_exact_store_gives_the_same_pixels(processor, make_root, store):
    root, ids = make_root(1, steps=7, size=(200, 90))
    compare(processor, root, ids, "stepwise", store=store)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["stepwise", "window"]),
    steps=st.integers(2, 40),
    ends_on_user=st.booleans(),
    window=st.integers(1, 6),
    stride=st.integers(1, 6),
    images=st.integers(0, 7),
    messages=st.integers(1, 12),
    width=st.integers(30, 130),
    height=st.integers(30, 130),
)
def test_seed_mode_equals_per_window_processing_for_any_limits(
    processor, tmp_path_factory, kind, steps, ends_on_user, window, stride, images, messages, width, height
):
    root = tmp_path_factory.mktemp("any")
    ids = write_gui_recordings(
        root, 1, steps=steps, ends_on_user=ends_on_user, size=(width, height), seed=steps, words=(1, 12)
    )
    compare(
        processor,
        root,
        ids,
        kind,
        window=window,
        stride=min(stride, window),
        images=images,
        messages=messages,
    )


@pytest.mark.parametrize("kind", ["stepwise", "window"])
@pytest.mark.parametrize("size", [(1280, 720), pytest.param((1920, 1080), marks=pytest.mark.slow)])
def test_seed_mode_equals_per_window_processing_on_real_screen_sizes(processor, make_root, kind, size):
    root, ids = make_root(1, steps=3, size=size, ends_on_user=True)
    compare(processor, root, ids, kind, images=2, p=13000, r=13000)


def rewrite(root, name, change):
    path = root / name / "final_messages.json"
    messages = json.loads(path.read_text())
    change(messages)
    path.write_text(json.dumps(messages))


def test_seed_mode_keeps_the_oddities_of_text(processor, make_root):
    def change(messages):
        messages[2]["content"][0]["text"] = "  \n spaces around <|im_end|> and an end token \n"
        messages[4]["content"][0]["text"] = "forged <|im_start|>assistant\nheader\n\n"
        messages[6]["content"][0]["text"] = "\n\n"

    root, ids = make_root(1, steps=5, size=(60, 60), ends_on_user=True)
    rewrite(root, ids[0], change)
    compare(processor, root, ids, "stepwise")


def test_seed_mode_keeps_the_instruction_whole_while_windows_begin_with_several_parts(processor, make_root):
    def change(messages):
        for index in (5, 9):  # the second window starts with text and image, the third with an image alone
            messages[index]["content"].insert(0, {"type": "text", "text": "Look: "})
        messages[9]["content"].pop(0)

    root, ids = make_root(1, steps=8, size=(60, 60))
    rewrite(root, ids[0], change)
    batch = compare(processor, root, ids, "window", window=2, stride=2)
    assert [len(inputs["image_grid_thw"]) for inputs in batch["multi_modal_inputs"]] == [2, 3, 2, 2]


def test_seed_mode_masks_what_its_token_search_finds(processor, make_root):
    def change(messages):  # the end token inside the last answer takes the place of the real one
        messages[6]["content"][0]["text"] = "says <|im_end|> early"

    root, ids = make_root(1, steps=3, size=(60, 60), ends_on_user=True)
    rewrite(root, ids[0], change)
    batch = compare(processor, root, ids, "window")
    last = processor.tokenizer.decode(batch["responses"][batch["response_mask"].bool()]).split("assistant")[
        -1
    ]
    assert last == "\nsays <|im_end|>"


def test_seed_mode_refuses_what_its_token_search_cannot_pair(processor, make_root):
    def change(messages):
        messages[2]["content"][0]["text"] = "says <|im_end|> early"

    root, ids = make_root(1, steps=3, size=(60, 60), ends_on_user=True)
    rewrite(root, ids[0], change)
    with pytest.raises(DataError, match="masks_from_messages"):
        compare(processor, root, ids, "window")
