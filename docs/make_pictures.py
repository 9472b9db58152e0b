"""Makes the pictures of the pages: `PYTHONPATH=.:src python docs/make_pictures.py …` (needs pillow).

Without a word those of environments. By Chromium: with a run of the demo (`runs/demo`) those of the viewer, with `film`
its animation, with `sheets FOLDER RUN RUN …` six pages in both themes and two widths.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from tests.viewer.browser import Browser

from shoal.envs import make
from shoal.envs.pictures import TILE, picture_of

DOCS = Path(__file__).parent
FOLDER = DOCS / "pictures"
SIZE = 940, 660
"""Of the window of the viewer."""
EPISODE = "name=train-000010:3"
VIEWS = {
    "viewer-run": "run/0",
    "viewer-group": f"run/0/group?{EPISODE}",
}
"""Pictures of the viewer, and what they show."""
SHEETS = {
    "home": "", "run": "run/0", "episodes": "run/0/episodes", "episode": f"run/0/episode?{EPISODE}",
    "group": f"run/0/group?{EPISODE}", "compare": "compare",
}  # fmt: skip


def beside(pictures: list[np.ndarray]) -> Image.Image:
    """Pictures in a row, bottoms aligned, with a gap between them."""
    height = max(picture.shape[0] for picture in pictures)
    gap = np.full((height, TILE // 2, 3), 255, np.uint8)
    row = []
    for picture in pictures:
        above = np.full((height - picture.shape[0], picture.shape[1], 3), 255, np.uint8)
        row += [np.vstack([above, picture]), gap]
    return Image.fromarray(np.hstack(row[:-1]))


def environments() -> None:
    """Sokoban rooms of rising difficulty, a solution as an animation, and three lakes."""
    kinds = [
        {"min_pushes": 3},
        {"num_boxes": 2, "min_pushes": 6},
        {"dim_room": (8, 8), "num_boxes": 3, "min_pushes": 14},
        {"dim_room": (10, 10), "num_boxes": 4, "min_pushes": 24, "search_depth": 60},
    ]
    rooms = []
    for kind in kinds:
        env = make("sokoban", **kind)
        rooms.append(picture_of(env.reset(seed=3)[0], "sokoban"))
    beside(rooms).save(FOLDER / "sokoban.png", optimize=True)

    env = make("sokoban", dim_room=(7, 7), num_boxes=2, min_pushes=8)
    frames = [picture_of(env.reset(seed=5)[0], "sokoban")]
    for action in env.solution("moves").actions:
        frames.append(picture_of(env.step(action)[0], "sokoban"))
    images = [Image.fromarray(frame).quantize(32) for frame in [*frames, *[frames[-1]] * 4]]
    images[0].save(FOLDER / "sokoban.gif", save_all=True, append_images=images[1:], duration=300, loop=0)

    lakes = [
        make("frozen_lake", desc="4x4"),
        make("frozen_lake", size=5, p=0.7),
        make("frozen_lake", desc="8x8"),
    ]
    shown = []
    for env in lakes:
        text, _ = env.reset(seed=2)
        shown.append(picture_of(text, "frozen_lake"))
    beside(shown).save(FOLDER / "frozen_lake.png", optimize=True)


@contextlib.contextmanager
def opened(*runs: str) -> Iterator[tuple[Browser, str]]:
    """A browser, and the address at which `shoal view` serves the runs."""
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        words = [sys.executable, "-m", "shoal", "view", *runs]
        env = os.environ | {"XDG_STATE_HOME": folder}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as server:
            assert server.stdout is not None
            home = server.stdout.readline().split()[-1]
            time.sleep(3)  # the episodes are read
            browser.send("Emulation.setScrollbarsHidden", hidden=True)
            yield browser, home
            server.send_signal(signal.SIGINT)


def shot(browser: Browser, height: int) -> Image.Image:
    """The upper part of the page, without the folders of this machine."""
    shorter = f"code.textContent = code.textContent.replaceAll({str(Path.cwd())!r} + '/', '')"
    browser.run(f"document.querySelectorAll('code').forEach(code => {{ {shorter} }})")
    with tempfile.TemporaryDirectory() as folder:
        browser.picture(Path(folder) / "shot.png", height)
        return Image.open(Path(folder) / "shot.png").convert("RGB")


def save(image: Image.Image, path: Path, colours: int = 128) -> None:
    """Write a PNG of that many colours."""
    image.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)


def viewer(run: str) -> None:
    """Pages of a run as `shoal view` shows them, light and dark."""
    with opened(run) as (browser, home):
        for name, place in VIEWS.items():
            for theme in ("light", "dark"):
                browser.size(*SIZE, dark=theme == "dark")
                browser.open(home + place)
                save(shot(browser, SIZE[1]), FOLDER / f"{name}-{theme}.png", 64)


def sheets(folder: Path, *runs: str) -> None:
    """Six pages, each light and dark, wide and narrow, on one sheet a page."""
    with opened(*runs) as (browser, home):
        for name, place in SHEETS.items():
            sheet = Image.new("RGB", (2 * (700 + 200) + 3 * 10, 450), "white")
            at = 0
            for width in (1400, 400):
                for dark in (False, True):
                    browser.size(width, dark=dark)
                    browser.open(home + place)
                    image = Image.new("RGB", (width, 900))
                    image.paste(shot(browser, 900), (0, 0))
                    sheet.paste(image.resize((width // 2, 450), Image.Resampling.LANCZOS), (at, 0))
                    at += width // 2 + 10
            save(sheet, folder / f"viewer-{name}.png")


def film(seconds: int = 12) -> None:
    """The page of a run of the demo while it learns."""
    frames: list[Image.Image] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        rows = Path("runs", "demo", "metrics.jsonl")
        words = [str(Path(sys.executable).with_name("shoal")), "train", "--config-name", "demo"]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
            while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
                time.sleep(0.2)
            with opened("runs/demo") as (browser, home):
                browser.size(1000, 720)
                browser.open(f"{home}run/0")
                known = 0
                while training.poll() is None or known < rows.read_bytes().count(b"\n"):
                    time.sleep(0.2)
                    if (written := rows.read_bytes().count(b"\n")) > known:
                        known = written
                        time.sleep(1.7)  # the page asks every 1.5 s
                        frames.append(shot(browser, 720))
    both = Image.new("RGB", (1000, 1440))
    both.paste(frames[0], (0, 0))
    both.paste(frames[-1], (0, 720))
    colours = both.quantize(256, dither=Image.Dither.NONE)
    small = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    each = 800 * seconds // len(small)  # the rest of the time shows the end
    times = [*[each] * (len(small) - 1), each + 200 * seconds]
    small[0].save(
        DOCS / "images" / "viewer.gif",
        save_all=True, append_images=small[1:], duration=times, loop=0, optimize=True,
    )  # fmt: skip


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    match sys.argv[1:]:
        case []:
            environments()
        case ["film"]:
            film()
        case ["sheets", folder, *runs]:
            sheets(Path(folder), *runs)
        case [run]:
            viewer(run)
