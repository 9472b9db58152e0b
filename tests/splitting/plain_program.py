"""The plain way to split a chat: every sample is written, encoded and pictured anew by the processor.

It shares no code with `shoal.splitting` and is not fast; tests compare with it, and the benchmark times it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image


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
    head = []
    for message in chat[: answers[0]]:
        texts = [part for part in parts_of(message) if part["type"] == "text"]
        if message["role"] == "system" or texts:
            head.append(message if message["role"] == "system" else {**message, "content": texts})
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


def rope(ids, grids, image_token, merge=2):
    """Positions of Qwen2-VL's rotary embedding for one unpadded row: `[3, n]`."""
    columns, place, row, at = [], 0, 0, 0
    while at < len(ids):
        if ids[at] != image_token:
            stop = at
            while stop < len(ids) and ids[stop] != image_token:
                stop += 1
            columns.append(torch.arange(place, place + stop - at).repeat(3, 1))
            place += stop - at
            at = stop
            continue
        frames, height, width = (int(side) for side in grids[row])
        height, width = height // merge, width // merge
        grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width)).T
        columns.append(grid + place)
        place += max(height, width)
        at += frames * height * width
        row += 1
    return torch.cat(columns, dim=1)


def plain_samples(processor, folder, chat, kind, window, stride, images, look_back, grouping=False):
    """(ids, how many of them are the prompt, mask, positions, pixels) of each sample; images are files in `folder`."""
    for messages, trained in told_samples(chat, kind, window, stride, images, look_back):
        names = [p["image"] for m in messages for p in parts_of(m) if p["type"] == "image"]
        pixels = {}
        if names:
            pictures = [Image.open(Path(folder) / name).convert("RGB") for name in names]
            pixels = dict(processor.image_processor(images=pictures, return_tensors="pt"))
        grids = pixels.get("image_grid_thw", [])
        sizes = iter([int(grid.prod()) // 4 for grid in grids])
        ids, mask, border = [], [], 0
        for text, on in chatml([(m, m.get("turn") in trained) for m in messages], grouping):
            for token in processor.tokenizer.encode(text, add_special_tokens=False):
                ids += [token] * (next(sizes) if token == processor.image_token_id else 1)
            mask += [on] * (len(ids) - len(mask))
            border = border or len(ids)
        assert next(sizes, None) is None
        yield ids, border, mask, rope(ids, grids, processor.image_token_id), pixels
