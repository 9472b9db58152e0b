"""Samples of any chat equal those of a plain program: tools, Unicode, several images a turn, every window setting."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from plain_program import plain_samples

from shoal.core.seeding import stream
from shoal.splitting import (
    ChatReader,
    LastNTrajectorySplitter,
    StepwiseTrajectorySplitter,
    TrajectorySplitter,
)

KINDS = {
    "stepwise": StepwiseTrajectorySplitter,
    "window": TrajectorySplitter,
    "last-n": LastNTrajectorySplitter,
}
WORDS = (
    "go", " ", "\n", "\n\n", "é", "e\u0301", "水", "👩‍👩‍👧", "\u2028", "\ufeff", "\x00", "ﷺ", "1234", "a\tb", "'s",
    "<|box_start|>", "<think>", "</think>", "<tool_call>", '{"x": 1}', "İ", "\u200b", "  ", "\r\n", "🏴", "ß",
    "\U0010ffff", "assistant\n",
)  # fmt: skip
SIZES = ((56, 56), (28, 84), (90, 61), (130, 40), (27, 29))

GROUPING = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' -}}{%- endif -%}
{%- if m.content is string -%}{{- m.content -}}
{%- else -%}{%- for p in m.content -%}
{%- if p.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- p.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- if m.role == 'tool' -%}{{- '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def drawn_chat(rng, folder):
    """Any order of roles that has turns; contents as text or parts, up to three images in a message."""

    def words(low=0):
        return "".join(WORDS[i] for i in rng.integers(0, len(WORDS), int(rng.integers(low, 7))))

    def said(role):
        if role == "assistant":
            one = words(1)
            return one if rng.random() < 0.7 else [{"type": "text", "text": t} for t in (one, words())]
        if rng.random() < 0.3:
            return words()
        parts = [{"type": "text", "text": words()} for _ in range(int(rng.integers(0, 3)))]
        parts += [
            {"type": "image", "image": names[i]} for i in rng.integers(0, len(names), int(rng.integers(0, 4)))
        ]
        rng.shuffle(parts)
        return parts or words()

    names = [f"{i}.png" for i in range(5)]
    roles = ["system"] * int(rng.integers(0, 2)) + ["user"] * int(rng.integers(1, 3))
    for _ in range(int(rng.integers(1, 9))):
        roles += ["assistant", *rng.choice(["user", "tool"], int(rng.integers(1, 5)))]
    roles = roles if rng.random() < 0.5 else roles[: len(roles) - roles[::-1].index("assistant")]
    for name, (width, height) in zip(names, SIZES, strict=True):
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / name)
    return [{"role": str(role), "content": said(role)} for role in roles]


def check(processor, folder, number, grouping):
    rng = stream(number, "any chat")
    chat = drawn_chat(rng, folder)
    (folder / "chat.json").write_text(json.dumps([chat]))
    reader = ChatReader(folder / "chat.json")
    kind = str(rng.choice(list(KINDS)))
    window = int(rng.integers(1, 7))
    stride = int(rng.integers(1, window + 1))
    images, look_back = int(rng.integers(0, 6)), int(rng.integers(1, 8))
    made = KINDS[kind](
        processor, folder, window, stride, limit_images=images, limit_messages=look_back, reader=reader,
        padding="longest",
    ).split(reader.ids(), [1.0])  # fmt: skip
    wanted = list(plain_samples(processor, folder, chat, kind, window, stride, images, look_back, grouping))
    samples = made.samples()
    where = f"case {number}: {kind} {window}/{stride}, {images} images, {look_back} turns back"
    assert len(samples) == len(wanted), where
    for row, (sample, (ids, border, mask, positions, pixels)) in enumerate(zip(samples, wanted, strict=True)):
        assert sample.input_ids.tolist() == ids, where
        assert len(sample.prompt_ids) == border, where
        assert sample.response_mask.tolist() == mask[border:], where
        assert sample.position_ids.tolist() == positions.tolist(), where
        inputs = made["multi_modal_inputs"][row]
        assert set(inputs) == set(pixels), where
        assert all(torch.equal(inputs[key], pixels[key]) for key in pixels), where
        assert sample.rewards.nonzero()[0].tolist() == [len(mask) - border - 1], where


@pytest.mark.parametrize("grouping", [False, True], ids=["plain", "tools in one message"])
@pytest.mark.parametrize(
    ("first", "count"),
    [(30, 20), pytest.param(0, 500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_samples_are_those_that_a_plain_program_writes(processor, tmp_path, first, count, grouping):
    if grouping:
        processor = copy.copy(processor)
        processor.chat_template = GROUPING
    for number in range(first, first + count):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(processor, folder, number, grouping)
