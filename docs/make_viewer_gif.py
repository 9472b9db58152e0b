"""Makes images/viewer.gif from a run: `PYTHONPATH=.:src python docs/make_viewer_gif.py runs/demo`, with Chromium."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from tests.viewer.browser import Browser

from shoal.viewer.export import export
from shoal.viewer.runs import Run


def main() -> None:
    """Four pages of the static file, two seconds each."""
    run = Run(sys.argv[1])
    run.index.refresh()
    frames = []
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "run.html"
        page.write_text(export([run], 40))
        browser.size(1100, 700)
        browser.open(page.as_uri() + "#run-0")
        files = browser.run("[...document.querySelectorAll('.page')].map(e => e.id)")
        wanted = [
            "run-0",
            *(
                next(i for i in files if kind in i)
                for kind in ("-episodes-file-train", "-group-", "-episode-")
            ),
        ]
        for name in wanted:
            browser.run(f"location.hash = '{name}'")
            browser.until(f"document.querySelector('.page.shown').id === '{name}'")
            shot = Path(folder) / "shot.png"
            browser.picture(shot, 700)
            image = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB").crop((0, 0, 1085, 700))
            frames.append(
                image.resize((870, 561), Image.Resampling.LANCZOS).quantize(64, dither=Image.Dither.NONE)
            )
    out = Path(__file__).parent / "images" / "viewer.gif"
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=2200, loop=0, optimize=True)


if __name__ == "__main__":
    main()
