"""Made-up recordings of a GUI agent, drawn from a seed: for examples, tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.seeding import stream

WORDS = (
    "open", "save", "close", "file", "edit", "view", "insert", "format", "data", "window", "help",
    "settings", "network", "display", "sound", "report", "budget", "quarter", "revenue", "total",
    "average", "select", "cell", "column", "row", "chart", "filter", "sort", "search", "cancel",
    "apply", "download", "folder",
)  # fmt: skip
SYSTEM = (
    "You operate a desktop. Each turn you see a screenshot; think, then act.\n"
    "Actions: click(point='<|box_start|>(x,y)<|box_end|>'), type(text='...'), scroll(direction='...'), "
    "finished()"
)


def write_gui_recordings(
    root: Path | str,
    count: int,
    *,
    steps: int | tuple[int, int] = 6,
    size: tuple[int, int] = (320, 200),
    seed: int = 0,
    ends_on_user: bool = False,
    words: tuple[int, int] = (10, 40),
) -> list[str]:
    """Write `count` trajectories in the splitters' own layout; returns their ids.

    Args:
        root: folder to write to.
        count: how many.
        steps: turns of each, or a range to draw from (both ends included).
        size: width and height of the screenshots.
        seed: the same seed gives the same bytes of JSON and the same pixels.
        ends_on_user: a last screenshot follows the last answer.
        words: range of the length of a thought.
    """
    ids = []
    low, high = (steps, steps) if isinstance(steps, int) else steps
    for number in range(count):
        rng = stream(seed, "gui", number)
        name = f"gui_{number:03d}_run0"
        folder = Path(root) / name
        folder.mkdir(parents=True, exist_ok=True)
        turns = int(rng.integers(low, high + 1))
        screens = _screens(rng, size)
        messages: list[dict[str, Any]] = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}]
        for turn in range(turns + ends_on_user):
            file = f"image_{turn:04d}"
            screen, (x, y) = next(screens)
            screen.save(folder / f"{file}.png")
            parts: list[dict[str, str]] = [{"type": "image_url", "image_url": file}]
            if turn == 0:
                parts.insert(0, {"type": "text", "text": f"Task: {_sentence(rng, 12)}"})
            messages.append({"role": "user", "content": parts})
            if turn < turns:
                thought = _sentence(rng, int(rng.integers(words[0], words[1] + 1)))
                act = (
                    f"click(point='<|box_start|>({x},{y})<|box_end|>')" if turn < turns - 1 else "finished()"
                )
                text = f"Thought: {thought}\nAction: {act}"
                messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        _write(folder, messages, f"task-{number // 4}")
        ids.append(name)
    return ids


def _write(folder: Path, messages: list[Any], task: str) -> None:
    (folder / "final_messages.json").write_text(json.dumps(messages))
    (folder / "task_config.json").write_text(json.dumps({"id": task}))


def _screens(rng: np.random.Generator, size: tuple[int, int]) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Screenshots of a wallpaper, and where the pointer is: each has one more window full of text."""
    from PIL import Image, ImageDraw

    width, height = size
    down, right = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = np.stack([right / width, down / height, np.sin((down + right) / 90)], axis=-1)
    coarse = rng.normal(0, 9, (height // 4 + 1, width // 4 + 1, 3)).repeat(4, 0).repeat(4, 1)
    fine = rng.normal(0, 2, (height, width, 3))  # without it, files are smaller than real ones
    paper = 90 + 70 * waves + coarse[:height, :width] + fine
    canvas = Image.fromarray(np.clip(paper, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(canvas)
    while True:
        left, top = int(rng.integers(0, width // 2)), int(rng.integers(0, height // 2))
        right, bottom = left + width // 2, top + height // 2
        pen.rectangle([left, top, right, bottom], fill=(248, 248, 248), outline=(110, 110, 110))
        pen.rectangle([left, top, right, top + 16], fill=tuple(int(c) for c in rng.integers(30, 160, 3)))
        for line in range(top + 22, bottom - 12, 13):
            pen.text((left + 6, line), _sentence(rng, 12)[: max(4, (right - left) // 7)], fill=(25, 25, 35))
        shot = canvas.copy()
        x, y = int(rng.integers(0, width - 12)), int(rng.integers(0, height - 18))
        ImageDraw.Draw(shot).polygon([(x, y), (x, y + 16), (x + 11, y + 11)], fill=(0, 0, 0))
        yield shot, (x, y)


def _sentence(rng: np.random.Generator, length: int) -> str:
    return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), length))


def write_button_recordings(
    root: Path | str, count: int, *, seed: int = 0, cells: int = 3, side: int = 28
) -> list[str]:
    """Write `count` recordings of one turn: a screen with a button somewhere, and the click on it; returns their ids.

    Small enough that a tiny model learns from the pixels where the button is. The answer is `click(column,row)` of
    the cell that the button is in, of `cells x cells` cells of `side` pixels.

    Args:
        root: folder to write to.
        count: how many screens, each a task of its own.
        seed: the same seed draws the same screens.
        cells: along each side of the screen.
        side: of a cell; twice the patch of the model makes each cell a token.
    """
    from PIL import Image, ImageDraw

    ids = []
    for number in range(count):
        rng = stream(seed, "button", number)
        down, right = np.mgrid[0 : cells * side, 0 : cells * side] / (cells * side)
        paper = np.stack([60 + 120 * right, 60 + 120 * down, np.full_like(right, 90)], axis=-1)
        paper += rng.normal(0, 4, paper.shape)
        screen = Image.fromarray(np.clip(paper, 0, 255).astype(np.uint8))
        row, column = (int(place) for place in rng.integers(0, cells, 2))
        left, top = (int(place) * side + int(rng.integers(3, side // 2 - 6)) for place in (column, row))
        ImageDraw.Draw(screen).rectangle([left, top, left + side // 2, top + side // 2], fill=(220, 30, 30))
        name = f"screen_{seed}_{number:05d}"
        folder = Path(root) / name
        folder.mkdir(parents=True)
        screen.save(folder / "screen.png")
        messages = [
            {"role": "user", "content": [{"type": "image", "image": "screen.png"}]},
            {"role": "assistant", "content": f"click({column},{row})"},
        ]
        _write(folder, messages, name)
        ids.append(name)
    return ids
