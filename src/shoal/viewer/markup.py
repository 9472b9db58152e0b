"""HTML and SVG from Python. Whatever is not `Html` already is escaped: text of a model or an environment stays text.

Charts are SVG without scripts: histograms, small curves in a line of text, a graph of skills and its time line.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NONE = "\N{EN DASH}"
"""What stands where there is no value."""
ACTION = re.compile(r"<(action|answer)>.*?</\1>", re.DOTALL)
"""What is marked in a response."""
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "source"})
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if chr(code) not in "\t\n\r"}
_CONTROL |= dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")
_CONTROL |= {
    code: f"\N{LEFT-POINTING ANGLE BRACKET}U+{code:04X}\N{RIGHT-POINTING ANGLE BRACKET}"
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""What is shown instead of control characters, lone surrogates and marks that turn the direction of text around."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(value: object) -> Html:
    """A value as markup that shows it, safe in text and in attributes; `Html` stays as it is."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(str(value).translate(_CONTROL)))


def tag(element: str, *children: Any, **attributes: Any) -> Html:
    """One element. Children that are None or False are left out, lists are opened; `class_` means `class`.

    An attribute of None or False is left out, one of True stands without value; `data_x` means `data-x`.
    """
    written = [element]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        if not _NAME.fullmatch(name) or name.startswith("on"):
            raise ValueError(f"{key!r} is no attribute that may be written")
        if name in ("href", "src") and not _is_safe(str(value)):
            raise ValueError(f"{str(value)[:40]!r} is no address that may be linked")
        written.append(name if value is True else f'{name}="{escape(value)}"')
    opened = f"<{' '.join(written)}>"
    return Html(opened if element in _VOID else f"{opened}{join(*children)}</{element}>")


def join(*children: Any) -> Html:
    """Children one behind the other."""
    parts: list[str] = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, str) or not isinstance(child, Iterable):
            parts.append(escape(child))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def fold(title: Any, *inside: Any, **attributes: Any) -> Html:
    """What is seen once its title is clicked."""
    return tag("details", tag("summary", title), *inside, **attributes)


def wide(inside: Html, label: str, class_: str = "wide") -> Html:
    """What may be wider than the window, and is then scrolled, by the keyboard too."""
    return tag("div", inside, class_=class_, tabindex=0, role="region", aria_label=label)


def _is_safe(address: str) -> bool:
    """Whether an address is of this page, this site, or a picture."""
    pictures = tuple(f"data:image/{kind};" for kind in ("png", "jpeg", "gif", "webp", "bmp"))
    return address.startswith(("/", "#", "?", *pictures)) and not address.startswith(("//", "/\\"))


def number(value: Any, digits: int = 4) -> str:
    """A value of a metric, as short as it can be read.

    >>> [number(v) for v in (3, 0.123456, 9999.7, 1.5e-7, True)], number(123.4, 2)
    (['3', '0.1235', '10,000', '1.5e-07', 'yes'], '123')
    """
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.0f}" if 10**digits - 0.5 <= abs(value) < 1e15 else f"{value:.{digits}g}"
    return str(value)


def share(value: float | None) -> str:
    """`12.5%`."""
    return NONE if value is None else f"{value:.1%}"


def counted(n: int, noun: str, nouns: str = "") -> str:
    """`1 turn`, `2 turns`, `2 entries`."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that is read best.

    >>> [duration(s) for s in (None, 7.484, 75.0, 7500.0)]
    ['–', '7.5 s', '1 min 15 s', '2 h 5 min']
    """
    if seconds is None:
        return NONE
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


# --- charts
MOST_POINTS = 600
"""Of a curve; of longer ones the lowest and the highest of each stretch are drawn."""


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> ticks(0.0, 1.0)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    raw = (high - low) / about
    if not raw > 1e-305:  # nothing between them that can be told apart
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((s * power for s in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, first + about * 3) if k * step <= high + step * 1e-9]


def thinned(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Which points are drawn: all, or of each stretch its lowest and highest, and both ends."""
    if len(x) <= most:
        return list(range(len(x)))
    stretch = math.ceil(2 * len(x) / (most - 2))
    kept = {0, len(x) - 1}
    for begin in range(0, len(x), stretch):
        part = range(begin, min(begin + stretch, len(x)))
        kept |= {min(part, key=y.__getitem__), max(part, key=y.__getitem__)}
    return sorted(kept)


def _picture(kind: str, box: str, label: str, *children: Any, **attributes: Any) -> Html:
    role = "img" if kind == "timeline" else "group"  # of links
    return tag("svg", *children, class_=kind, viewBox=box, **attributes, role=role, aria_label=label)


def _rect(x: float, y: float, width: float, height: float, *inside: Any, **attributes: Any) -> Html:
    place = {"x": round(x, 1), "y": round(y, 1), "width": round(width, 1), "height": round(height, 1)}
    return tag("rect", *inside, **place, **attributes)


def _words(text: str, x: float, y: float, anchor: str = "middle", class_: str | None = None) -> Html:
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=class_)


def histogram(
    bars: Sequence[tuple[float, float, int, int]],
    links: Sequence[str | None],
    chosen: tuple[float, float] | None = None,
) -> Html:
    """Bars of episodes by reward, the part that succeeded in another colour; each bar is a link to its episodes."""
    if not bars:
        return tag("p", "no episodes", class_="empty")
    left, right, top, bottom = 46, 408, 10, 158
    most = max(n for _, _, n, _ in bars)
    step, unit = (right - left) / len(bars), (bottom - top) / most
    drawn = []
    for k, ((low, high, n, won), link) in enumerate(zip(bars, links, strict=True)):
        reach = number(low) if low == high else f"{number(low)} to {number(high)}"
        said = f"reward {reach}: {n:,} episodes, {won:,} solved"
        thick = max(min(step - 2, 48), 1)
        x = left + k * step + (step - thick) / 2
        rects = [
            _rect(left + k * step, top, step, bottom - top, class_="hit"),
            _rect(x, bottom - n * unit, thick, (n - won) * unit, class_="other"),
            _rect(x, bottom - won * unit, thick, won * unit, class_="won"),
        ]
        bar = tag("g", tag("title", said), rects, class_="bar chosen" if chosen == (low, high) else "bar")
        drawn.append(tag("a", bar, href=link, aria_label=said) if link else bar)
    lines = []
    for count in ticks(0, most, 3):
        y = round(bottom - count * unit, 1)
        line = tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid")
        lines.append(join(line, _words(number(count, 3), left - 6, y + 3.5, "end")))
    labelled = range(0, len(bars), math.ceil(len(bars) / 6))
    words = [_words(number(bars[k][0], 3), round(left + (k + 0.5) * step, 1), bottom + 14) for k in labelled]
    name = _words("reward of an episode", (left + right) / 2, bottom + 28)
    axes = tag("g", lines, words, name, class_="axes")
    return _picture("chart histogram", "0 0 416 190", "histogram of rewards", axes, drawn)


def spark(values: Sequence[float], limits: tuple[float, float] | None = None) -> Html:
    """A small curve to stand in a line of text, between `limits`; without them from 0, or what lies beyond."""
    if len(values) < 2:
        return Html("")
    kept = thinned(range(len(values)), values, 60)
    low, high = limits or (min(0.0, *values), max(0.0, *values))
    points = " ".join(
        f"{i / (len(values) - 1) * 96 + 2:.1f},{20 - (values[i] - low) / ((high - low) or 1) * 16:.1f}"
        for i in kept
    )
    said = tag("title", f"from {number(low)} at the bottom to {number(high)} at the top")
    line = tag("polyline", points=points, class_="line")
    return tag("svg", said, line, class_="spark s0", viewBox="0 0 100 24", aria_hidden="true")


def graph(needs: Mapping[str, Sequence[str]], states: Mapping[str, str], links: Mapping[str, str]) -> Html:
    """Boxes from left to right, each right of all it needs, with an arrow from each of those.

    Args:
        needs: names of each box's dependencies; unknown ones and circles are left out.
        states: a class for each box, shown under its name.
        links: where a click leads.
    """
    at, width, height = _laid_out(needs)
    arrows = [
        _arrow(at[other], (x, y))
        for name, (x, y) in at.items()
        for other in needs[name]
        if other in at and at[other][0] < x
    ]
    boxes = []
    for name, place in at.items():
        box = _box(name, states.get(name, ""), *place)
        boxes.append(tag("a", box, href=links[name]) if links.get(name) else box)
    size = f"0 0 {width} {height}"
    drawn = _picture("graph", size, "graph of skills", _TIP, arrows, boxes, width=width, height=height)
    return wide(drawn, "graph of skills")


_WIDE, _HIGH, _GAP_X, _GAP_Y = 180, 42, 46, 18
_HEAD = tag("path", d="M0 0 L8 4 L0 8 z", class_="head")
_SIZES = {"viewBox": "0 0 8 8", "refX": 1, "refY": 4, "markerWidth": 7, "markerHeight": 7, "orient": "auto"}
_TIP = tag("defs", tag("marker", _HEAD, id="tip", **_SIZES))


def _laid_out(needs: Mapping[str, Sequence[str]]) -> tuple[dict[str, tuple[float, float]], int, int]:
    """Where the upper left corner of each box stands, and the width and height of all."""
    depth: dict[str, int] = {}

    def place(name: str, path: tuple[str, ...] = ()) -> int:
        if name not in depth:
            before = [
                place(other, (*path, name))
                for other in needs[name]
                if other in needs and other not in (*path, name)
            ]
            depth[name] = 1 + max(before, default=-1)
        return depth[name]

    columns: dict[int, list[str]] = {}
    for name in needs:
        columns.setdefault(place(name), []).append(name)
    step = _HIGH + _GAP_Y
    height = max(map(len, columns.values()), default=0) * step + _GAP_Y
    at: dict[str, tuple[float, float]] = {
        name: (10 + column * (_WIDE + _GAP_X), (height - len(names) * step) / 2 + _GAP_Y / 2 + k * step)
        for column, names in columns.items()
        for k, name in enumerate(names)
    }
    return at, len(columns) * (_WIDE + _GAP_X) - _GAP_X + 20, height


def _arrow(before: tuple[float, float], behind: tuple[float, float]) -> Html:
    """From the right side of one box to the left side of another."""
    x0, y0 = before[0] + _WIDE, before[1] + _HIGH / 2
    x1, y1 = behind[0] - 7, behind[1] + _HIGH / 2
    bend = min((x1 - x0) / 2, 40)
    path = f"M{x0} {y0} C{x0 + bend} {y0} {x1 - bend} {y1} {x1} {y1}"
    return tag("path", d=path, class_="arrow", marker_end="url(#tip)")


def _box(name: str, state: str, x: float, y: float) -> Html:
    return tag(
        "g",
        tag("title", f"{name}: {state}"),
        tag("rect", x=x, y=y, width=_WIDE, height=_HIGH, rx=6),
        _words(_short(name), x + _WIDE / 2, y + 18, class_="name"),
        _words(state, x + _WIDE / 2, y + 33),
        class_=f"box {state_class(state)}",
    )


def _short(name: str) -> str:
    return name if len(name) < 22 else name[:20] + "…"


def timeline(bars: Sequence[tuple[str, float, float, str]]) -> Html:
    """One line a name with its bars `(name, from, to, state)`, in seconds since the first."""
    if not bars:
        return tag("p", "nothing has run yet", class_="empty")
    names = list(dict.fromkeys(name for name, *_ in bars))
    begin, end = min(bar[1] for bar in bars), max(bar[2] for bar in bars)
    left, second = 150, 470 / max(end - begin, 1e-9)
    high = 24
    bottom = len(names) * high + 8
    drawn = [_words(_short(name), 142, k * high + 20, "end", "name") for k, name in enumerate(names)]
    lines = []
    for t in ticks(0, end - begin, 5):
        x = round(left + t * second, 1)
        line = tag("line", x1=x, x2=x, y1=4, y2=bottom, class_="grid")
        lines.append(join(line, _words(f"{number(t, 3)} s", x, bottom + 13)))
    for name, start, stop, state in bars:
        x, y = left + (start - begin) * second, names.index(name) * high + 8
        said = tag("title", f"{name}: {state}, {number(stop - start, 3)} s")
        style = f"span {state_class(state)}"
        drawn.append(_rect(x, y, max((stop - start) * second, 2), high - 8, said, rx=3, class_=style))
    axes = tag("g", lines, class_="axes")
    return wide(_picture("timeline", f"0 0 640 {bottom + 20}", "time line", axes, drawn), "time line")


def state_class(text: str) -> str:
    """The class of what is in a state, which is the first word."""
    return "is-" + re.split(r"[^a-z]", text)[0]
