"""The pages about whole runs: all of them, one, several compared; and what every page is made of.

A page is a function of the files at that moment. Links go through `Site.link`, so that the same pages make the server's
site and the one static file.
"""

from __future__ import annotations

import base64
import contextlib
import reprlib
import shlex
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from shoal.core.errors import DataError
from shoal.core.run_folder import is_number
from shoal.train.advice import Advice, advise
from shoal.viewer.markup import NONE, Html, Series, counted, join, line_chart, number, spark, tag
from shoal.viewer.runs import PICTURES, Run, metric_names, points

MOST_SETTINGS = 10_000
EMBEDDED = 4 * 2**20
"""Bytes up to which a static file holds a picture."""
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
SHARES = (
    "success",
    "heldout_success",
    "valid_actions",
    "heldout_valid_actions",
    "groups_with_signal",
    "truncated",
)
HEADLINES = ("heldout_success", "eval_return_mean", "success", "reward_mean", "reward")


@dataclass(frozen=True)
class Page:
    """What stands between the head and the foot of a page."""

    title: str
    body: Html
    trail: tuple[tuple[str, str | None], ...] = ()  # where one is: names and links
    previous: str | None = None
    next: str | None = None
    up: str | None = None


Ways = tuple[str | None, str | None, str | None]


def not_here(why: str, up: str | None) -> Page:
    """The page in place of one that cannot be shown."""
    body = tag("section", tag("h1", "Not here"), tag("p", why, class_="error"))
    return Page("Not here", body, (("runs", up),), up=up)


class Site:
    """All runs that are looked at, and how pages link to one another.

    Args:
        runs: in the order in which links number them.
        base: what links begin with.
        only: the addresses that exist, for a static file; None: all do.
        find: gives the run folders that are there now; None for those of `runs` alone.
    """

    def __init__(
        self,
        runs: Sequence[Run] = (),
        base: str = "/",
        only: Mapping[str, str] | None = None,
        find: Callable[[], Sequence[Path]] | None = None,
    ) -> None:
        self.known = list(runs)  # a run that went keeps its number, so that links stay right
        self.base = base
        self.only = only
        self.find = find
        self._gone: set[Path] = set()
        self._lock = threading.Lock()

    @property
    def runs(self) -> list[Run]:
        """Those that are there."""
        return [run for run in self.known if run.path not in self._gone]

    def look(self) -> None:
        """Take in the runs that began since, and leave out those that went."""
        if self.find is None:
            return
        with self._lock:
            there = list(self.find())
            paths = {run.path for run in self.known}
            for path in there:
                if path not in paths:
                    with contextlib.suppress(DataError):  # it went in this moment
                        self.known.append(Run(path))
            self._gone = {run.path for run in self.known} - set(there)

    def run(self, number: str) -> Run:
        """The run of that number in links."""
        if not number.isdecimal() or len(number) > 6 or int(number) >= len(self.known):
            raise DataError("there is no run of that number here")
        run = self.known[int(number)]
        if run.path in self._gone:
            raise DataError(f"{run.path} is not there any more")
        return run

    def link(self, path: str, **query: Any) -> str | None:
        """The address of a page; None if a static file does not hold it."""
        address = address_of(path, **query)
        return self.base + address if self.only is None else self.only.get(address)

    def place(self, run: Run) -> str:
        """The beginning of the paths of a run's pages."""
        return f"run/{self.known.index(run)}"

    def page(
        self,
        run: Run,
        title: str,
        body: Html,
        *behind: tuple[str, str | None],
        ways: Ways = (None, None, None),
    ) -> Page:
        """A page of a run: the trail goes on `behind` it, `ways` are to the page before, the next and up."""
        trail = (("runs", self.link("")), (run.name, self.link(self.place(run))), *behind)
        return Page(title, body, trail, *ways)

    def picture(self, run: Run, name: str) -> str | None:
        """The address of a picture or film of the run; a static file holds pictures that are not large."""
        if self.only is None:
            return self.link(f"{self.place(run)}/file", name=name)
        with contextlib.suppress(DataError, OSError):
            path, media = run.file(name, PICTURES)
            if path.stat().st_size < EMBEDDED:
                return f"data:{media};base64,{base64.b64encode(path.read_bytes()).decode()}"
        return None


def address_of(path: str, **query: Any) -> str:
    """Path and query of a page; `name_` means `name`, what is None or False is left out."""
    asked = {
        key.rstrip("_"): value for key, value in query.items() if value is not None and value is not False
    }
    return path + (f"?{urlencode(asked)}" if asked else "")


def anchor(site: Site, content: Any, path: str, class_: str | None = None, **query: Any) -> Html:
    """A link where there is something behind it, else its content alone."""
    address = site.link(path, **query)
    return tag("a", content, href=address, class_=class_) if address else tag("span", content, class_=class_)


def facts(pairs: Mapping[str, Any]) -> Html:
    """Names and values in a row."""
    shown = [(key, value) for key, value in pairs.items() if value is not None]
    return tag(
        "dl", [tag("div", tag("dt", key), tag("dd", _value(value))) for key, value in shown], class_="facts"
    )


def _value(value: Any) -> Any:
    return value if isinstance(value, str) else number(value)


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], class_: str = "") -> Html:
    """A table; the cells of numbers stand on the right."""
    lines = [
        tag(
            "tr",
            [tag("td", _value(cell), class_="n" if isinstance(cell, int | float) else None) for cell in row],
        )
        for row in rows
    ]
    right = [isinstance(cell, int | float) for cell in rows[0]] if rows else [False] * len(head)
    header = tag(
        "thead",
        tag("tr", [tag("th", c, class_="n" if n else None) for c, n in zip(head, right, strict=True)]),
    )
    return tag("div", tag("table", header, tag("tbody", lines), class_=class_ or None), class_="wide")


def command(words: Sequence[str]) -> Html:
    """A command line with a button that copies it."""
    text = shlex.join(words)
    return tag("p", tag("code", text), tag("button", "copy", type="button", data_copy=text), class_="command")


# --- all runs
def home(site: Site) -> Page:
    """Every run with its state, its newest number and its small curve."""
    rows = []
    for run in site.runs:
        rows_of = run.rows()
        name = next((n for n in HEADLINES if points(rows_of, run.x, n)[1]), None)
        values = points(rows_of, run.x, name)[1] if name else []
        worst = advise(rows_of, run.config())[:1]
        rows.append(
            (
                anchor(site, run.name, site.place(run), class_="row-link"),
                run.kind,
                state(run.status()),
                _value(run.seed()) if run.seed() is not None else NONE,
                join(f"{name} ", tag("b", number(values[-1]))) if name else NONE,
                spark(values),
                tag("span", worst[0].title, class_=f"advice-word {worst[0].level}") if worst else "",
            )
        )
    listed: Html | None = table(("run", "kind", "state", "seed", "newest", "", "advice"), rows, "runs")
    if not rows:
        listed = tag("p", "There are no runs yet. A run that begins in this folder appears here.")
    compare = anchor(site, "Compare them", "compare", class_="button") if len(site.runs) > 1 else None
    return Page("Runs", tag("section", tag("h1", "Runs"), listed, compare), (("runs", None),))


def state(text: str) -> Html:
    """A state as a coloured word."""
    word = "".join(c for c in text.split(":")[0] if c.isascii() and c.isalnum())
    return tag("span", text, class_=f"state is-{word}")


# --- one run
def overview(site: Site, run: Run) -> Page:
    """State, advice, curves; further parts by the kind of the run."""
    from shoal.viewer.skill_pages import skills_section
    from shoal.viewer.split_pages import samples_section

    rows, summary, config = run.rows(), run.summary(), run.config()
    versions = summary.get("versions")
    told = {
        "kind": run.kind,
        "seed": run.seed(),
        "env": _envs(config),
        "rows": len(rows) or None,
        "seconds": summary.get("seconds"),
        "shoal": versions.get("shoal") if isinstance(versions, dict) else None,
    }
    parts = [
        tag("header", tag("h1", run.name, " ", state(run.status())), facts(told)),
        advice_list(advise(rows, config)) if run.kind in ("agent", "ppo") else None,
    ]
    own = {"skills": skills_section, "split": samples_section}.get(run.kind)
    parts.append(own(site, run) if own else curves(site, run, rows))
    if run.kind == "ppo":
        parts += [evaluations(rows), media(site, run)]
    if run.index.files():
        parts.append(files_section(site, run))
    parts.append(_settings(run, summary))
    return Page(run.name, join(*parts), (("runs", site.link("")), (run.name, None)), up=site.link(""))


def _envs(config: Mapping[str, Any]) -> str | None:
    if isinstance(config.get("env"), str):
        return str(config["env"])
    try:
        return ", ".join(map(str, config["es_manager"]["train"]["env_configs"]["tags"]))
    except (KeyError, TypeError):
        return None


def advice_list(found: Sequence[Advice]) -> Html | None:
    """Advice as boxes, each with a link to its curve."""
    if not found:
        return None
    boxes = [
        tag("li", tag("b", item.title), tag("span", item.text), tag("code", item.metric), class_=item.level)
        for item in found
    ]
    return tag("section", tag("h2", "Advice"), tag("ul", boxes, class_="advice"))


def point_links(site: Site, run: Run, xs: Sequence[float], held_out: bool) -> list[str | None]:
    """Where a click on each point leads: to the episodes of that row, if they were kept."""
    if run.kind != "agent":
        return []
    kept, place = set(run.index.files()), f"{site.place(run)}/episodes"
    files = [f"{'heldout' if held_out else 'train'}-{int(x):06d}.jsonl" for x in xs]
    return [site.link(place, file=file) if file in kept else None for file in files]


def chart(
    site: Site, run: Run, rows: Sequence[Mapping[str, Any]], title: str, names: Sequence[str]
) -> Html | None:
    """One panel of curves; None if there is nothing to draw."""
    series = []
    for colour, name in enumerate(names):
        xs, ys = points(rows, run.x, name)
        if xs:
            held_out = name.startswith(("heldout", "eval"))
            links = point_links(site, run, xs, held_out)
            series.append(Series(name, xs, ys, links, dots=held_out, colour=colour))
    if not series:
        return None
    return _figure(series, title, run.x, shares=all(s.name in SHARES for s in series))


def _figure(series: Sequence[Series], title: str, x: str, *, shares: bool) -> Html:
    """Curves with a title and a legend; those of shares reach from 0 to 1."""
    legend = tag(
        "span", [tag("span", s.name, class_=f"key s{s.colour % 8}") for s in series], class_="legend"
    )
    drawn = line_chart(series, title, x, (0.0, 1.0) if shares else None)
    return tag("figure", tag("figcaption", tag("b", title), legend), drawn)


def curves(site: Site, run: Run, rows: Sequence[Mapping[str, Any]]) -> Html:
    """The panels of the kind, and behind a fold every other metric."""
    panels = PANELS.get(run.kind, ())
    drawn = [chart(site, run, rows, title, names) for title, names in panels]
    shown = {name for _, names in panels for name in names} | {run.x}
    others = [name for name in metric_names(rows) if name not in shown]
    more = [chart(site, run, rows, name, (name,)) for name in others]
    clicked = run.kind == "agent" and run.index.files()
    named = tag("summary", counted(len(others), "further metric"))
    return tag(
        "section",
        tag("h2", "Curves"),
        clicked and tag("p", "Click a point to see its episodes.", class_="hint"),
        tag("div", drawn, class_="panels") if any(drawn) else tag("p", "no metrics yet", class_="empty"),
        tag("details", named, tag("div", more, class_="panels small")) if others else None,
        id="curves",
    )


def evaluations(rows: Sequence[Mapping[str, Any]]) -> Html | None:
    """The evaluations of a PPO run as a table."""
    found = [row for row in rows if is_number(row.get("eval_return_mean"))]
    if not found:
        return None
    lines = [
        (row.get("steps"), float(row["eval_return_mean"]), row.get("eval_return_std"), row.get("seconds"))
        for row in found
    ]
    heads = ("steps", "mean return", "standard deviation", "seconds")
    return tag("section", tag("h2", "Evaluations"), table(heads, lines[-12:]))


def media(site: Site, run: Run) -> Html | None:
    """Pictures and films that the run made."""
    shown = []
    for name in run.media():
        address = site.picture(run, name)
        if address is None or name == "curves.png":
            continue
        if name.endswith((".mp4", ".webm")):
            seen = tag("video", src=address, controls=True, muted=True)
        else:
            seen = tag("img", src=address, alt=name, loading="lazy")
        shown.append(tag("figure", seen, tag("figcaption", name)))
    return tag("section", tag("h2", "Pictures"), tag("div", shown, class_="media")) if shown else None


def files_section(site: Site, run: Run) -> Html:
    """The files of episodes with their means, the newest first."""
    place = f"{site.place(run)}/episodes"
    done, todo = run.index.progress
    reading = tag("p", f"reading episodes: {done / max(todo, 1):.0%}", class_="hint") if todo else None
    summary = run.index.summary()
    rows = [
        (
            anchor(site, row["file"], place, class_="row-link", file=row["file"]),
            row["episodes"],
            float(row["reward"]) if row["reward"] is not None else NONE,
            f"{row['success']:.1%}" if row["success"] is not None else NONE,
            anchor(site, number(row["errors"]), place, file=row["file"], outcome="error")
            if row["errors"]
            else "0",
            row["broken"] or "",
        )
        for row in reversed(summary[-200:])
    ]
    heads = ("file", "episodes", "mean reward", "solved", "errors", "unreadable lines")
    every = anchor(site, "All episodes", place, class_="button")
    return tag("section", tag("h2", "Episodes"), reading, every, table(heads, rows), id="episodes")


def _settings(run: Run, summary: Mapping[str, Any]) -> Html:
    """The settings as they were written, and the numbers of the summary."""
    try:
        text = run.read("config.yaml")[:200_000].decode(errors="replace")
    except OSError:
        text = ""
    final = summary.get("metrics")
    numbers = [
        row
        for key, value in (final.items() if isinstance(final, dict) else ())
        for row in (sorted(flattened({key: value}).items()) if isinstance(value, dict) else [(key, value)])
    ]
    return tag(
        "section",
        tag("details", tag("summary", "Settings"), tag("pre", text)) if text else None,
        tag("details", tag("summary", "Summary"), table(("metric", "value"), numbers)) if numbers else None,
    )


# --- comparing
def compare(site: Site, query: Mapping[str, str]) -> Page:
    """Curves of several runs; those that differ by their seed alone are one curve with its range."""
    asked = [int(n) for n in query.get("runs", "").split(",") if n.isdecimal() and int(n) < len(site.known)]
    runs = [site.known[n] for n in asked if site.known[n] in site.runs] or site.runs
    parts = list(filter(None, (_compared([r for r in runs if r.kind == kind], kind) for kind in PANELS)))
    nothing = tag("p", "no curves to compare", class_="empty")
    body = join(tag("header", tag("h1", "Runs compared")), parts or nothing)
    return Page("Runs compared", body, (("runs", site.link("")), ("compared", None)), up=site.link(""))


def _compared(runs: Sequence[Run], kind: str) -> Html | None:
    """The last numbers, the curves and the differing settings of runs of one kind."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(_without_seed(run), []).append(run)
    teams = list(together.values())
    if not teams:
        return None
    panels = [_team_chart(teams, name) for _, names in PANELS[kind] for name in names]
    lasts = {name: [_last(team, name) for team in teams] for name in HEADLINES}
    shown = [name for name, values in lasts.items() if any(value != NONE for value in values)]
    rows = [
        (
            join(tag("span", _team_name(team), class_=f"key s{k % 8}"), ", ", counted(len(team), "seed")),
            *(lasts[name][k] for name in shown),
        )
        for k, team in enumerate(teams)
    ]
    differences = _differences([team[0] for team in teams])
    heads = ("setting", *[_team_name(team) for team in teams])
    return tag(
        "section",
        tag("h2", {"agent": "Agents", "ppo": "PPO"}[kind]),
        table(("runs", *shown), rows),
        tag(
            "p",
            "Runs that differ by their seed alone are one curve: their mean, and the range of all.",
            class_="hint",
        ),
        tag("div", panels, class_="panels"),
        join(tag("h2", "Settings that differ"), table(heads, differences)) if differences else None,
    )


def _last(team: Sequence[Run], name: str) -> str:
    """The mean of the last values of a metric, with their spread over seeds."""
    values = [ys[-1] for run in team if (ys := points(run.rows(), run.x, name)[1])]
    if not values:
        return NONE
    spread = f" ± {number(statistics.stdev(values), 2)}" if len(values) > 1 else ""
    return f"{number(statistics.fmean(values))}{spread}"


def _team_name(team: Sequence[Run]) -> str:
    return ", ".join(run.name for run in team[:3]) + (f" and {len(team) - 3} more" if len(team) > 3 else "")


def flattened(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings as dotted names; of a file whose aliases stand for more than settings are, the first of them."""
    found: dict[str, str] = {}
    todo = [(str(key), value, 0) for key, value in config.items()]
    while todo and len(found) < MOST_SETTINGS:
        name, value, depth = todo.pop()
        if isinstance(value, Mapping) and value and depth < 12:
            todo += [(f"{name}.{key}", inner, depth + 1) for key, inner in value.items()]
        else:
            value = NONE if value is None else value
            found[name] = (_SHORT.repr(value) if isinstance(value, list | Mapping) else str(value))[:200]
    return found


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = 40
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 4, 200, 200


_OWN = ("seed", "run_dir", "resume", "resume_from", "next_step", "checkpoint_dir", "record_video")


def _without_seed(run: Run) -> str:
    return repr(sorted((k, v) for k, v in flattened(run.config()).items() if k not in _OWN)) + run.kind


def _differences(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    settings = [flattened(run.config()) for run in runs]
    names = sorted({name for one in settings for name in one} - set(_OWN))
    rows = [(name, *(one.get(name, NONE) for one in settings)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1][:100]


def _team_chart(teams: Sequence[Sequence[Run]], name: str) -> Html | None:
    series = []
    for colour, team in enumerate(teams):
        curves_of = [dict(zip(*points(run.rows(), run.x, name), strict=True)) for run in team]
        curves_of = [curve for curve in curves_of if curve]
        if not curves_of:
            continue
        shared = sorted(set.intersection(*(set(curve) for curve in curves_of)))
        values = [[curve[x] for curve in curves_of] for x in shared]
        if shared:
            low, high = (
                ([min(v) for v in values], [max(v) for v in values]) if len(curves_of) > 1 else ([], [])
            )
            mean = [statistics.fmean(v) for v in values]
            series.append(Series(_team_name(team), shared, mean, low=low, high=high, colour=colour))
    if not series:
        return None
    return _figure(series, name, teams[0][0].x, shares=name in SHARES)
