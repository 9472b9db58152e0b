"""Curves of metrics: the numbers that a page holds, and the panels in which `static/curves.js` draws them.

All panels of a section share their range of x and their settings. What a metric means is a sentence of the docs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from shoal.core.run_folder import is_number
from shoal.viewer.markup import Html, counted, fold, number, tag, thinned

Rows = Sequence[Mapping[str, Any]]
Links = Mapping[str, Mapping[int, str]]
PANELS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "agent": (
        ("Success", ("success", "heldout_success")),
        ("Reward of an episode", ("reward", "heldout_reward")),
        ("Valid actions, groups with different rewards", ("valid_actions", "groups_with_signal")),
        ("Entropy (nats a token)", ("entropy",)),
        ("Turns", ("turns", "heldout_turns")),
        ("Truncated", ("truncated",)),
    ),
    "ppo": (
        ("Return in training and evaluation", ("reward_mean", "reward", "eval_return_mean")),
        ("Length of an episode", ("length_mean",)),
        ("Entropy", ("entropy",)),
        ("Approximate KL", ("approx_kl",)),
        ("Explained variance", ("explained_variance",)),
        ("Steps per second", ("steps_per_second",)),
    ),
}
AXES = {"agent": ("iteration", "tokens", "seconds"), "ppo": ("steps", "iteration", "seconds")}
"""What can be on the x axis."""
SHARES = (
    "success", "heldout_success", "valid_actions", "heldout_valid_actions", "groups_with_signal", "truncated",
)  # fmt: skip
"""Metrics whose panels reach from 0 to 1."""


class Line(NamedTuple):
    """One curve of a panel."""

    name: str  # of the metric
    label: str  # in the legend
    colour: int = 0
    table: int = 0  # which of the section's tables holds it


def table(
    rows: Rows, axes: Sequence[str], names: Sequence[str], name: str = "", links: Links | None = None
) -> dict[str, Any]:
    """The numbers of a run as a page holds them: of each metric the rows that are drawn, of the x axes those rows.

    Args:
        rows: where `x low` and `x high` stand beside a metric `x`, the range between them is shaded.
        axes: the first orders the rows.
        names: of metrics.
        name: of the run, for several of them.
        links: where the points of training and of held-out metrics lead, by the number of their row.
    """
    curves: dict[str, dict[str, Any]] = {}
    for metric in names:
        there = [i for i, row in enumerate(rows) if metric in row and is_number(row[metric])]
        kept = [there[k] for k in thinned(there, [rows[i][metric] for i in there])]
        if kept:
            curves[metric] = {"i": kept} | {
                key: [_short(rows[i][column]) for i in kept]
                for key, column in (("y", metric), ("low", f"{metric} low"), ("high", f"{metric} high"))
                if column in rows[kept[0]]
            }
    at = sorted({i for curve in curves.values() for i in curve["i"]})
    place = {i: k for k, i in enumerate(at)}
    for curve in curves.values():
        curve["i"] = [place[i] for i in curve["i"]]
    columns = {axis: [_short(rows[i].get(axis)) for i in at] for axis in axes}
    led = {
        part: {place[i]: link for i, link in of.items() if i in place} for part, of in (links or {}).items()
    }
    return {"name": name, "axes": columns, "rows": at, "curves": curves, "links": led or None}


def _short(value: Any) -> Any:
    if not is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.7g}")


def style_of(colour: int, table: int) -> str:
    """The classes of a curve: one of eight colours; of several runs every other has dashes, seen over an equal one."""
    return f"s{colour % 8} d{table % 2 + table // 8 % 2 * 2}"


def spoken(name: str) -> str:
    """A metric as people call it."""
    return name.replace("heldout", "held-out").replace("_", " ")


TOOLS = Html(
    '<label>smoothing <input type="range" min="0" max="0.95" step="0.05" value="0" data-set="smooth"></label>'
    '<label><input type="checkbox" data-set="log"> log scale</label>'
    '<button type="button" data-do="unzoom" hidden>whole range</button>'
    '<button type="button" data-do="csv" title="download the points of all curves">CSV</button>'
    "<small>Drag across a panel to zoom; a double click ends it. A click on a name hides its curve.</small>"
)


def section(
    title: str, name: str, tables: Sequence[Mapping[str, Any]], *parts: Any, said: str | None = None
) -> Html:
    """A section of panels over `tables`, with what changes them all; `name` is that of the section in links."""
    axes = [axis for axis in tables[0]["axes"] if any(set(one["axes"][axis]) - {None} for one in tables)]
    options = [tag("option", axis.replace("seconds", "time (seconds)"), value=axis) for axis in axes]
    choice = tag("label", "x axis ", tag("select", options, data_set="axis")) if len(axes) > 1 else None
    hint = tag("p", said, class_="hint") if said else None
    inside = (tag("h2", title), hint, tag("div", choice, TOOLS, class_="tools"), *parts)
    held = msgspec.json.encode(tables).decode()
    return tag("section", *inside, id=name, class_="curves", data_tables=held)


def figure(title: str, lines: Sequence[Line], kind: str = "", *, shares: bool = False) -> Html:
    """One panel: its title, what its metrics mean, a legend whose names hide their curves."""
    told = {line.name: said for line in lines if (said := meaning(kind, line.name))}
    words = [tag("p", tag("b", name), ": ", text) for name, text in told.items()]
    legend = [
        tag(
            "button",
            one.label,
            type="button",
            data_curve=one.label,
            title=one.name,
            class_=f"key {style_of(one.colour, one.table)}",
        )
        for one in lines
        if len(lines) > 1 or one.table
    ]
    png = tag("button", "PNG", type="button", data_do="png", title="download this panel as a picture")
    meant = fold("?", words, class_="meaning") if words else None
    large = tag(
        "button", "⤢", type="button", data_do="large", title="larger, or as it was", aria_label="larger"
    )
    caption = tag("figcaption", tag("b", title), meant, large, png, tag("span", legend, class_="legend"))
    drawn = msgspec.json.encode([line._asdict() for line in lines]).decode()
    return tag("figure", caption, data_lines=drawn, data_title=title, data_share=shares)


def of_a_run(kind: str, rows: Rows, x: str, links: Links, said: str | None) -> Html:
    """The panels of the kind, then every other metric by the heading under which the docs define it."""
    names = [key for key in dict.fromkeys(key for row in rows for key in row) if key != x]
    held = table(rows, AXES.get(kind, (x,)), names, links=links)
    names = list(held["curves"])
    if not names:
        return tag("section", tag("h2", "Curves"), tag("p", "no metrics", class_="empty"), id="curves")
    panels, first = [], set()
    for title, shown in PANELS.get(kind, ()):
        first |= set(shown)
        lines = [Line(name, spoken(name), colour) for colour, name in enumerate(shown) if name in names]
        panels += [figure(title, lines, kind, shares=set(shown) <= set(SHARES))] if lines else []
    groups: dict[str, list[str]] = {heading: [] for heading in _sentences().get(kind, {})}
    constants = []
    for name in names:
        values = set(held["curves"][name]["y"])
        if name in first:
            continue
        if len(values) == 1:
            said_of_it = tag("dd", tag("b", number(values.pop())), " ", meaning(kind, name))
            constants.append(tag("div", tag("dt", name), said_of_it))
        else:
            groups.setdefault(_told_of(kind, name)[0], []).append(name)
    more = []
    for heading, inside in groups.items():
        drawn = [figure(name, [Line(name, name)], kind) for name in inside]
        title = f"{heading}: {counted(len(inside), 'further metric')}"
        more += [fold(title, tag("div", drawn, class_="panels small"))] if inside else []
    if constants:
        title = f"{counted(len(constants), 'constant')} or single values"
        more.append(fold(title, tag("dl", constants, class_="constants")))
    return section("Curves", "curves", [held], tag("div", panels, class_="panels"), more, said=said)


@functools.cache
def _sentences() -> dict[str, dict[str, dict[str, str]]]:
    """By kind of run, heading and metric; made from the docs by docs/make_metrics.py."""
    data = (resources.files("shoal.viewer") / "static" / "metrics.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, dict[str, dict[str, str]]])


def _told_of(kind: str, name: str) -> tuple[str, str | None]:
    """The heading under which the docs define a metric, and its sentence; `success/Lake` is one of `success/<tag>`."""
    first, slash, _ = name.partition("/")
    for heading, told in _sentences().get(kind, {}).items():
        for key, said in told.items():
            if key == name or (slash and key.startswith(f"{first}/<")):
                return heading, said
    return "Others", None


def meaning(kind: str, name: str) -> str | None:
    """What a metric is, in the words of the docs."""
    return _told_of(kind, name)[1]
