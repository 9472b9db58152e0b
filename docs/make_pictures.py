"""Makes the pictures of the pages: `PYTHONPATH=.:src python docs/make_pictures.py [RUN]` (needs pillow).

Without RUN the pictures of environments. With a run of the demo, such as runs/demo, those of the viewer, by Chromium.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from shoal.envs import make
from shoal.envs.pictures import TILE, picture_of

DOCS = Path(__file__).parent
FOLDER = DOCS / "pictures"
SIZE = 940, 660
"""Of the window of the viewer."""
VIEWS = {
    "viewer-run.png": "run/0",
    "viewer-episodes.png": "run/0/episodes?file=train-000010.jsonl&order=best",
    "viewer-group.png": "table.episodes a[href*='/group']",
    "viewer-episode.png": "table.group thead a",
}
"""Pictures of the viewer, in the order in which one goes to them: an address, or a link of the page before."""


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


def viewer(run: str) -> None:
    """Pages of a run as `shoal view` shows them, and all of them as an animation."""
    from tests.viewer.browser import Browser

    frames = []
    # A command shown has the run's full path, which is that of this machine.
    shorter = f"code.textContent = code.textContent.replace({str(Path(run).resolve())!r}, 'runs/demo')"
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        shot = Path(folder) / "shot.png"
        words = [sys.executable, "-m", "shoal", "view", run]
        env = os.environ | {"XDG_STATE_HOME": folder}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as server:
            assert server.stdout is not None
            home = server.stdout.readline().split()[-1]
            browser.size(*SIZE)
            browser.send("Emulation.setScrollbarsHidden", hidden=True)
            for name, place in VIEWS.items():
                if place.startswith("run/"):
                    browser.open(home + place)
                else:
                    before = browser.run("location.href")
                    browser.click(place)
                    browser.until(f"location.href !== {before!r} && document.readyState === 'complete'")
                browser.run("window.scrollTo(0, 0)")
                browser.run(f"document.querySelectorAll('code').forEach(code => {{ {shorter} }})")
                browser.picture(shot, SIZE[1])
                image = Image.open(shot).convert("RGB").quantize(64, dither=Image.Dither.NONE)
                image.save(FOLDER / name, optimize=True)
                frames.append(image.convert("RGB").quantize(32, dither=Image.Dither.NONE))
            server.send_signal(signal.SIGINT)
    film = DOCS / "images" / "viewer.gif"
    frames[0].save(film, save_all=True, append_images=frames[1:], duration=2200, loop=0, optimize=True)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if len(sys.argv) > 1:
        viewer(sys.argv[1])
    else:
        environments()
