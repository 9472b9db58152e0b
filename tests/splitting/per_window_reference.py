"""The plain way to split a recording: every window is rendered, encoded and pictured anew by the processor.

Written from the description of the original's semantics, for comparison; it shares no code with
`shoal.splitting` and makes no attempt to be fast.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from PIL import Image


def load_messages(folder):
    """Messages with every `image_url` called `image`, as the chat template wants it."""

    def renamed(value):
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if not isinstance(value, dict):
            return value
        out = {}
        for key, item in value.items():
            key = "image" if key == "image_url" else key
            out[key] = "image" if key == "type" and item == "image_url" else renamed(item)
        return out

    return renamed(json.loads((Path(folder) / "final_messages.json").read_text()))


def window_chats(messages, window=5, stride=5, limit_messages=35):
    """Chats of the windowed splitter."""
    chats, instruction = [], copy.deepcopy(messages[1])
    start = 1
    while start < len(messages):
        assert messages[start]["role"] == "user"
        end = min(start + 2 * window, len(messages))
        if len(messages[start]["content"]) == 1:
            instruction["content"] = instruction["content"][:1]
        chat = [messages[0], copy.deepcopy(instruction)]
        for index in range(max(0, end - 2 * limit_messages - 1), start):
            if messages[index]["role"] == "assistant":
                chat.append(messages[index])
        chat += messages[2:end] if start == 1 else messages[start:end]
        chats.append(chat)
        start += 2 * stride
    return chats


def step_chats(messages, limit_images=5, limit_messages=35):
    """Chats of the stepwise splitter; the last message is the response."""
    chats = []
    for end in range(3, len(messages), 2):
        first = max(0, end - 2 * limit_messages - 1)
        recent = copy.deepcopy(messages[first:end])
        left = limit_images
        for message in reversed(recent):
            kept = []
            for part in reversed(message["content"]):
                if part["type"] == "image":
                    if left <= 0:
                        continue
                    left -= 1
                kept.insert(0, part)
            message["content"] = kept
        chat = [message for message in recent if message["content"]]
        if first > 0:
            chat = [messages[0], {**messages[1], "content": messages[1]["content"][:1]}, *chat]
        chats.append(chat)
    return chats


def pictures(chat, folder):
    images = []
    for message in chat:
        for part in message["content"]:
            if part["type"] == "image":
                name = part["image"] if ".png" in part["image"] else part["image"] + ".png"
                images.append(Image.open(Path(folder) / name).convert("RGB"))
    return images


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


def find(row, wanted):
    wanted = torch.tensor(wanted)
    return torch.nonzero((row.unfold(0, len(wanted), 1) == wanted).all(1))[:, 0].tolist()


def padded(row, left, right, value):
    return torch.cat([torch.full((*row.shape[:-1], left), value, dtype=row.dtype), row,
                      torch.full((*row.shape[:-1], right), value, dtype=row.dtype)], dim=-1)  # fmt: skip


def encode(processor, chat, images):
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    out = processor(text=[text], images=images or None, return_tensors="pt")
    ids = out["input_ids"][0]
    inputs = {name: out[name] for name in ("pixel_values", "image_grid_thw") if name in out}
    token = processor.image_token_id
    return ids, rope(ids.tolist(), inputs.get("image_grid_thw", []), token), inputs


def step_row(processor, chat, folder, reward, prompt_length, response_length):
    tokenizer = processor.tokenizer
    ids, positions, inputs = encode(processor, chat[:-1], pictures(chat[:-1], folder))
    assert len(ids) <= prompt_length
    text = processor.apply_chat_template(chat[-1:], tokenize=False, add_generation_prompt=False)
    text = text.replace("<|im_start|>system\nYou are a helpful assistant.<|im_end|>", "").strip()
    text = text.replace("<|im_start|>assistant\n", "").strip()
    answer = processor(text=[text], images=None, return_tensors="pt")["input_ids"][0]
    assert len(answer) <= response_length
    prompt = padded(ids, prompt_length - len(ids), 0, tokenizer.pad_token_id)
    response = padded(answer, 0, response_length - len(answer), tokenizer.pad_token_id)
    ends = (response == tokenizer.eos_token_id).long()
    valid = (ends.cumsum(0) - ends) == 0
    attention = torch.cat([padded(torch.ones_like(ids), prompt_length - len(ids), 0, 0), valid.long()])
    before = padded(positions, prompt_length - len(ids), 0, 1)
    after = before[:, -1:] + torch.arange(1, response_length + 1)
    rewards = torch.zeros(response_length)
    rewards[int(valid.sum()) - 1] = reward
    mask = torch.cat([torch.zeros_like(prompt), valid.long()])
    return finished(prompt, response, attention, torch.cat([before, after], 1), rewards, mask, inputs, chat)


def window_row(processor, chat, folder, reward, prompt_length, response_length):
    tokenizer = processor.tokenizer
    context = 0
    while not (
        chat[context]["role"] == "user" and any(p["type"] == "image" for p in chat[context]["content"])
    ):
        context += 1
    ids, positions, _ = encode(processor, chat[: context + 1], pictures(chat[: context + 1], folder))
    whole, whole_positions, inputs = encode(processor, chat, pictures(chat, folder))
    assert len(whole) <= prompt_length
    screen_end = tokenizer.encode("<|vision_end|><|im_end|>")
    start = find(whole, screen_end)[0] + len(screen_end)
    left, right = prompt_length - len(ids), response_length - len(whole) + start
    prompt = padded(ids, left, 0, tokenizer.pad_token_id)
    response = padded(whole[start:], 0, right, tokenizer.pad_token_id)
    attention = torch.cat(
        [padded(torch.ones_like(ids), left, 0, 0), padded(torch.ones_like(whole[start:]), 0, right, 0)]
    )
    places = torch.cat([padded(positions, left, 0, 1), padded(whole_positions[:, start:], 0, right, 1)], 1)
    rewards = torch.zeros(response_length)
    rewards[len(whole) - start - 1] = reward
    row = torch.cat([prompt, response])
    after = find(row, screen_end)[0]
    begins = [at for at in find(row, tokenizer.encode("<|im_start|>assistant")) if at > after]
    ends = [at for at in find(row, tokenizer.encode("<|im_end|>")) if at > after + len(screen_end)]
    mask = torch.zeros_like(row)
    for begin, end in zip(begins, ends[::2], strict=False):
        assert begin < end
        mask[begin : end + 1] = 1
    return finished(prompt, response, attention, places, rewards, mask, inputs, chat)


def finished(prompt, response, attention, positions, rewards, mask, inputs, chat):
    return {
        "prompts": prompt,
        "responses": response,
        "input_ids": torch.cat([prompt, response]),
        "attention_mask": attention,
        "position_ids": positions,
        "reward_tensor": rewards,
        "loss_mask": mask,
        "response_mask": mask[len(prompt) :],
        "multi_modal_inputs": inputs,
        "raw_messages": chat,
    }


def reference_split(
    processor, root, ids, rewards, kind, prompt_length=32048, response_length=32000, **limits
):
    """Rows of all trajectories, stacked; what is not a tensor stays a list."""
    rows = []
    for name, reward in zip(ids, rewards, strict=True):
        folder = Path(root) / name
        chats, row = (step_chats, step_row) if kind == "stepwise" else (window_chats, window_row)
        uid = json.loads((folder / "task_config.json").read_text())["id"]
        for chat in chats(load_messages(folder), **limits):
            made = row(processor, chat, folder, reward, prompt_length, response_length)
            rows.append({**made, "dataset_ids": name, "uid": uid})
    return {
        key: torch.stack([row[key] for row in rows]) if isinstance(rows[0][key], torch.Tensor)
        else [row[key] for row in rows]
        for key in rows[0]
    }  # fmt: skip
