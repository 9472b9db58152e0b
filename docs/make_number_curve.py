"""Makes images/number.svg from the run of tutorials/environment.md: `python docs/make_number_curve.py runs/number`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

IMAGE = Path(__file__).parent / "images" / "number.svg"
LEFT, TOP, WIDTH, HEIGHT = 40, 16, 520, 200
TEXT, GRID = "#808890", "#c8ccd0"
COLOURS = {"success": "#8fb3d9", "heldout_success": "#d1661f"}
NAMES = {"success": "training", "heldout_success": "held out"}


def main() -> None:
    """Success in training and held out, over iterations."""
    rows = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
    IMAGE.write_text(picture(rows), "utf-8")


def picture(rows: list[dict[str, float | None]]) -> str:
    """The curves of a run as SVG."""
    last = int(rows[-1]["iteration"] or 1)
    parts = [tick for share in (0.0, 0.5, 1.0) for tick in horizontal(share)]
    for at in range(0, last + 1, 10):
        parts.append(text(x_of(at, last), TOP + HEIGHT + 16, str(at), "middle"))
    parts.append(text(LEFT + WIDTH, TOP + HEIGHT + 32, "iteration", "end"))
    for number, (name, colour) in enumerate(COLOURS.items()):
        known = [
            (x_of(row["iteration"] or 0, last), y_of(row[name])) for row in rows if row.get(name) is not None
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in known)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if name == "heldout_success":
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in known]
        parts.append(text(LEFT + WIDTH, TOP + HEIGHT - 30 + 18 * number, NAMES[name], "end", colour))
    inside = "\n".join(parts)
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 16} {TOP + HEIGHT + 40}"'
    return f'<svg {head} font-family="sans-serif" font-size="12">\n{inside}\n</svg>\n'


def horizontal(share: float) -> Iterable[str]:
    """A line across the picture, and its number."""
    y = y_of(share)
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}" stroke-width="0.7"/>'
    yield text(LEFT - 8, y + 4, f"{share:.1f}", "end")


def text(x: float, y: float, words: str, anchor: str, colour: str = TEXT) -> str:
    """Words in the picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def x_of(iteration: float, last: int) -> float:
    """Where an iteration stands."""
    return LEFT + WIDTH * iteration / last


def y_of(share: float | None) -> float:
    """Where a rate of success stands."""
    return TOP + HEIGHT * (1 - (share or 0.0))


if __name__ == "__main__":
    main()
