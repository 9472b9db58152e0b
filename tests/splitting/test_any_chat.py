"""Samples of any chat, told by a plain program: tools, Unicode, several images a turn, every window setting.

The program below writes ChatML by hand and asks the processor for tokens and pixels of each sample anew.
"""

import json

import numpy as np
import pytest
import torch
from per_window_reference import rope
from PIL import Image

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


def parts_of(message):
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def with_newest_images(messages, limit):
    """The messages less all but their newest images; one that had nothing else goes."""
    kept = []
    for message in reversed(messages):
        parts = []
        for part in reversed(parts_of(message)):
            if part["type"] == "image":
                limit -= 1
            if part["type"] != "image" or limit >= 0:
                parts.insert(0, part)
        if parts or not parts_of(message):
            kept.insert(0, {**message, "content": parts})
    return kept


def told_samples(chat, kind, window, stride, images, look_back):
    """(messages, which of them are trained) of each sample."""
    answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    instruction = next(i for i, message in enumerate(chat) if message["role"] == "user")
    texts = [part for part in parts_of(chat[instruction]) if part["type"] == "text"]
    head = [*chat[:instruction], *([{**chat[instruction], "content": texts}] if texts else [])]
    marked = [{**message, "turn": i} for i, message in enumerate(chat)]
    if kind == "stepwise":
        for turn, at in enumerate(answers):
            before = marked[:at] if turn < look_back else [*head, *marked[answers[turn - look_back] : at]]
            shown = with_newest_images(before, images) if turn < look_back else (
                [*head, *with_newest_images(before[len(head) :], images)])  # fmt: skip
            yield [*shown, marked[at]], {at}
        return
    firsts = range(0, len(answers), stride) if kind == "window" else [max(0, len(answers) - window)]
    for first in firsts:
        last = min(first + window, len(answers)) - 1
        start = answers[first - 1] + 1 if first else 0
        body = marked[start : answers[last] + 1]
        older = [marked[answers[turn]] for turn in range(max(0, last - look_back), first)]
        before = [*head, *older] if first else []
        yield with_newest_images([*before, *body], images), set(answers[first : last + 1])


def chatml(chat, grouping):
    """Stretches of text, and whether each is an answer that is trained (its end token goes with it)."""
    stretches, context = [], ""
    messages = [message for message, _ in chat]
    if not grouping and messages[0]["role"] != "system":
        context = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    for place, (message, on) in enumerate(chat):
        text = "".join("<|vision_start|><|image_pad|><|vision_end|>" if part["type"] == "image" else part["text"]
                       for part in parts_of(message))  # fmt: skip
        role, closing = message["role"], "<|im_end|>\n"
        if grouping and role == "tool":
            opening = "\n<tool_response>\n"
            if not place or messages[place - 1]["role"] != "tool":
                opening = "<|im_start|>user" + opening
            goes_on = place + 1 < len(messages) and messages[place + 1]["role"] == "tool"
            context += opening + text + "\n</tool_response>" + ("" if goes_on else closing)
        elif on:
            stretches += [(context + "<|im_start|>assistant\n", False), (text + "<|im_end|>", True)]
            context = "\n"
        else:
            context += f"<|im_start|>{role}\n{text}{closing}"
    return stretches


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
    told = list(told_samples(chat, kind, window, stride, images, look_back))
    samples = made.samples()
    where = f"case {number}: {kind} {window}/{stride}, {images} images, {look_back} turns back"
    assert len(samples) == len(told), where
    for row, ((messages, trained), sample) in enumerate(zip(told, samples, strict=True)):
        shown = [p["image"] for m in messages for p in parts_of(m) if p["type"] == "image"]
        pixels = {}
        if shown:
            pictures = [Image.open(folder / name).convert("RGB") for name in shown]
            pixels = processor.image_processor(images=pictures, return_tensors="pt")
        sizes = iter([int(grid.prod()) // 4 for grid in pixels.get("image_grid_thw", [])])
        ids, mask, border = [], [], 0
        for text, on in chatml([(m, m.get("turn") in trained) for m in messages], grouping):
            for token in processor.tokenizer.encode(text, add_special_tokens=False):
                ids += [token] * (next(sizes) if token == processor.image_token_id else 1)
            mask += [on] * (len(ids) - len(mask))
            border = border or len(ids)
        assert next(sizes, None) is None, where
        assert sample.input_ids.tolist() == ids, where
        assert len(sample.prompt_ids) == border, where
        assert sample.response_mask.tolist() == mask[border:], where
        wanted = rope(ids, pixels.get("image_grid_thw", []), processor.image_token_id)
        assert sample.position_ids.tolist() == wanted.tolist(), where
        inputs = made["multi_modal_inputs"][row]
        assert set(inputs) == set(pixels), where
        assert all(torch.equal(inputs[key], pixels[key]) for key in pixels), where
        assert sample.rewards.nonzero()[0].tolist() == [len(mask) - border - 1], where


@pytest.mark.parametrize("grouping", [False, True], ids=["plain", "tools in one message"])
@pytest.mark.parametrize(
    ("first", "count"),
    [(30, 12), pytest.param(0, 500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_samples_are_those_that_a_plain_program_writes(processor, tmp_path, first, count, grouping):
    if grouping:
        import copy

        processor = copy.copy(processor)
        processor.chat_template = GROUPING
    for number in range(first, first + count):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(processor, folder, number, grouping)
