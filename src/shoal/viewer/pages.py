"""The pages about whole runs: all of them, one, several compared; and what every page is made of.

A page is a function of the files at that moment. Links go through `Site.link`, so that the same pages make the server's
site and the one static file.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import re
import shlex
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from shoal.core.errors import DataError
from shoal.core.run_folder import command_of, is_number
from shoal.train.advice import Advice, advise
from shoal.viewer import curves
from shoal.viewer.curves import AXES, PANELS, SHARES, Line
from shoal.viewer.markup import (
    NONE,
    Html,
    counted,
    duration,
    fold,
    join,
    number,
    share,
    spark,
    state_class,
    tag,
    wide,
)
from shoal.viewer.runs import FILMS, PICTURES, Run, has_checkpoint, linked, points, resume_words

EMBEDDED = 4 * 2**20
"""Bytes up to which a static file holds a picture."""
NEWEST = 10
"""Files of episodes that a run's page lists unfolded."""
MOST_DIFFERENCES = 100
WHY = 100
"""Letters of why a run failed in the list of runs."""
STOPPED = ("unfinished", "interrupted", "failed")
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
        runs: to be looked at.
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
        self.known = list(runs)  # a run that went stays, so that links stay right
        self.base = base
        self.only = only
        self.find = find
        self._gone: set[Path] = set()
        self._names: list[str] = []  # of the known runs, in links
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

    def run(self, name: str) -> Run:
        """The run of that name in links, or else of that number."""
        found = [run for run in self.known if self.name(run) == name]
        twins = [self.name(run) for run in self.known if run.word == name]
        if not found and twins:  # an address of the time when it was the only one of that name
            raise DataError(f"several runs are called {name}: {', '.join(twins)}")
        if not found and name.isdecimal() and len(name) < 7:
            found = self.known[int(name) :]
        if not found:
            raise DataError("there is no run of that name here")
        if found[0].path in self._gone:
            raise DataError(f"{found[0].path} is not there any more")
        return found[0]

    def name(self, run: Run) -> str:
        """What links call a run: its own name, so that they last, of several of one name behind that of their folder.

        What a run is called does not change while it is known, so that open pages go on.
        """
        with self._lock:
            words = Counter(one.word for one in self.known)
            for one in self.known[len(self._names) :]:
                name = (
                    one.word
                    if words[one.word] == 1
                    else f"{linked(one.path.resolve().parent.name)}.{one.word}"
                )
                names = (f"{name}.{n}" if n > 1 else name for n in itertools.count(1))
                self._names.append(next(name for name in names if name not in self._names))
        return self._names[self.known.index(run)]

    def link(self, path: str, **query: Any) -> str | None:
        """The address of a page; None if a static file does not hold it."""
        address = address_of(path, **query)
        return self.base + address if self.only is None else self.only.get(address)

    def title(self, run: Run) -> str:
        """What pages call a run: its name, or where two have one that of links."""
        return run.name if [one.name for one in self.runs].count(run.name) < 2 else self.name(run)

    def place(self, run: Run) -> str:
        """The beginning of the paths of a run's pages."""
        return f"run/{self.name(run)}"

    def page(
        self,
        run: Run,
        title: str,
        body: Html,
        *behind: tuple[str, str | None],
        ways: Ways = (None, None, None),
    ) -> Page:
        """A page of a run: the trail goes on `behind` it, `ways` are to the page before, the next and up."""
        trail = (("runs", self.link("")), (self.title(run), self.link(self.place(run))), *behind)
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
    """Path and query of a page; what is None is left out."""
    asked = {key: value for key, value in query.items() if value is not None}
    return path + (f"?{urlencode(asked)}" if asked else "")


def anchor(site: Site, content: Any, path: str, class_: str | None = None, **query: Any) -> Html:
    """A link where there is something behind it, else its content alone."""
    address = site.link(path, **query)
    return tag("a", content, href=address, class_=class_) if address else tag("span", content, class_=class_)


def arrows(label: str, ways: Ways, *between: Html | None) -> Html:
    """Links to the page before and to the next one, and what stands between and behind them."""
    before, after, _ = ways
    first, *behind = between
    return tag(
        "nav",
        tag("a", "← previous", href=before, class_="button", rel="prev") if before else None,
        first,
        tag("a", "next →", href=after, class_="button", rel="next") if after else None,
        *behind,
        class_="steps",
        aria_label=label,
    )


def facts(pairs: Mapping[str, Any]) -> Html:
    """Names and values in a row."""
    shown = [(key, value) for key, value in pairs.items() if value is not None]
    return tag(
        "dl", [tag("div", tag("dt", key), tag("dd", number(value))) for key, value in shown], class_="facts"
    )


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], class_: str = "") -> Html:
    """A table; columns of numbers stand on the right, a zero is grey."""
    sides = [_side(cells) for cells in zip(*rows, strict=True)] or [None] * len(head)
    names = tag("tr", [tag("th", name, class_=side) for name, side in zip(head, sides, strict=True)])
    lines = [tag("tr", [_cell(cell, side) for cell, side in zip(row, sides, strict=True)]) for row in rows]
    made = tag("table", tag("thead", names), tag("tbody", lines), class_=class_ or None)
    return wide(made, class_ or ", ".join(head))


def _side(cells: Sequence[Any]) -> str | None:
    texts = [re.sub("<[^>]*>", "", str(number(cell))) for cell in cells]
    return "n" if all(text == NONE or _NUMBER.fullmatch(text) for text in texts) else None


def _cell(cell: Any, side: str | None) -> Html:
    shown = number(cell)
    return tag("td", shown, class_="n zero" if side and shown in ("0", "0.0%") else side)


_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?%?( \([-+\d,.e]+ to [-+\d,.e]+\))?")


def command(words: Sequence[str] | str, *behind: Html | None) -> Html:
    """A command line with a button that copies it, and what stands behind."""
    text = words if isinstance(words, str) else shlex.join(words)
    copy = tag("button", "copy", type="button", data_copy=text)
    return tag("p", tag("code", text), copy, *behind, class_="command")


# --- all runs
def home(site: Site) -> Page:
    """Every run with its state, progress, result and small curve, the one written last first."""
    runs = sorted(site.runs, key=lambda run: run.written() or 0.0, reverse=True)
    if not runs:
        empty = tag("p", "There are no runs yet. A run that begins in this folder appears here.")
        return Page("Runs", tag("section", tag("h1", "Runs"), empty), (("runs", None),))
    head = [tag("th", tag("button", name, type="button", data_sort=name)) for name in COLUMNS]
    shared, known = _known(runs)
    rows = [tag("tr", _cells(site, run), data_known=_json(own)) for run, own in zip(runs, known, strict=True)]
    kinds = [run.kind for run in runs if run.kind in PANELS]
    can_compare = len(kinds) > len(set(kinds))
    names = sorted({name for one in (*shared.values(), *known) for name in one})
    tools = tag(
        "div",
        tag("input", type="search", id="find", placeholder=_FIND, title=_FOUND, aria_label="search runs"),
        tag(
            "label", "add a column ", tag("input", id="column", list="names", placeholder="setting or metric")
        ),
        tag("label", "group by ", tag("input", id="group", list="names", type="search")),
        tag("datalist", [tag("option", value=name) for name in names], id="names"),
        can_compare and anchor(site, "Compare", "compare", class_="button"),
        can_compare and site.only is None and tag("small", "those that are ticked, or all"),
        tag("small", "", id="unknown", role="status"),
        class_="tools",
    )
    listed = tag(
        "table", tag("thead", tag("tr", head)), tag("tbody", rows), class_="runs", data_shared=_json(shared)
    )
    body = tag("section", tag("h1", "Runs"), tools, wide(listed, "runs"))
    return Page("Runs", body, (("runs", None),))


COLUMNS = ("run", "kind", "state", "env", "result", "curve", "advice", "seed", "written", "took")


_FIND, _FOUND = (
    "words, or learning_rate>0.001",
    "words of a line, or conditions on a setting, a metric or a column: adv_estimator=gigpo",
)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _known(runs: Sequence[Run]) -> tuple[dict[str, dict[str, str]], list[dict[str, Any]]]:
    """What runs can be listed by: the settings that all of a kind share, and of each its others and its metrics."""
    settings = [flattened(run.config()) for run in runs]
    shared: dict[str, dict[str, str]] = {}
    for run, own in zip(runs, settings, strict=True):
        shared[run.kind] = dict(shared.get(run.kind, own).items() & own.items())
    known = [
        dict(sorted(own.items() - shared[run.kind].items())) | run.last_values()
        for run, own in zip(runs, settings, strict=True)
    ]
    return shared, known


def _cells(site: Site, run: Run) -> list[Html]:
    """The cells of a run in the list, each with what it is sorted by."""
    rows, status, written, took = run.rows(), run.status(), run.written(), run.seconds()
    found = ((name, points(rows, run.x, name)[1]) for name in HEADLINES)
    name, values = next(((name, values) for name, values in found if values), ("", []))
    worst = advise(rows, run.config(), run=str(run.path))[:1]
    word = tag("span", worst[0].title, class_=f"advice-word {worst[0].level}") if worst else NONE
    tick = tag("input", type="checkbox", data_run=site.name(run), aria_label=f"compare {run.name}")
    env, seed = _envs(run.config()) or NONE, run.seed()
    result = (
        join(tag("b", number(values[-1])), " ", tag("small", curves.spoken(name)))
        if values
        else _counted_result(run)
    )
    told = [f"last row {value}" if key == "last row" else value for key, value in _ahead(run, status).items()]
    ahead = tag("small", ", ".join(told)) if told else None
    why = run.summary().get("error")
    can_be_ticked = site.only is None and run.kind in PANELS
    shown = [
        (
            join(can_be_ticked and tick, anchor(site, site.title(run), site.place(run), class_="row-link")),
            run.name,
        ),
        (run.kind, run.kind),
        (join(state(status), ahead, why and tag("small", str(why)[:WHY])), status),
        (env, env),
        (result, values[-1] if values else None),
        (spark(values, (0.0, 1.0) if name in SHARES else None), None),
        (word, worst[0].title if worst else ""),
        (str(seed) if seed is not None else NONE, seed),
        (clock(written), written),
        (duration(took), took),
    ]
    return [
        tag("td", cell, data_value=value, data_name=name)
        for name, (cell, value) in zip(COLUMNS, shown, strict=True)
    ]


def _counted_result(run: Run) -> str:
    if run.kind == "split":
        return counted(len(run.samples()), "sample")
    skills = run.skills()["skill"]
    done = sum(skill["status"] == "completed" for skill in skills)
    return f"{done} of {counted(len(skills), 'skill')}" if skills else NONE


def _ahead(run: Run, status: str) -> dict[str, str]:
    """How far a run is that is not at its end; of one that runs what is left, and when its last row came."""
    told = {}
    if status != "completed" and (progress := run.progress()):
        done, total, left = progress
        told["progress"] = f"{run.x} {number(done)} of {number(total)}"
        if status == "running" and left is not None:
            told["time left"] = f"about {duration(left)} left"
    row = run.written("metrics.jsonl") if status == "running" else None
    return told | ({"last row": f"at {clock(row, '%H:%M:%S')}"} if row else {})


def _resumed(run: Run, status: str) -> Html | None:
    """The command that goes on with a run that was stopped, where there is something to go on from."""
    if status not in STOPPED:
        return None
    made_by = command_of(run.path)
    words = resume_words(run.path, made_by)
    if words is None or not has_checkpoint(run.path, made_by):
        return None
    return tag("section", tag("p", "It goes on from its last checkpoint with"), command(["shoal", *words]))


def clock(when: float | None, shown: str = "%Y-%m-%d %H:%M") -> str:
    """A moment in the time of this machine."""
    return NONE if when is None else time.strftime(shown, time.localtime(when))


def state(text: str) -> Html:
    """A state as a coloured word."""
    return tag("span", text, class_=f"state {state_class(text)}")


# --- one run
def overview(site: Site, run: Run) -> Page:
    """State, advice, curves; further parts by the kind of the run."""
    from shoal.viewer.skill_pages import skills_section
    from shoal.viewer.split_pages import samples_section

    rows, summary, config, status = run.rows(), run.summary(), run.config(), run.status()
    versions, known = summary.get("versions"), flattened(config)
    told = {
        "kind": run.kind,
        "seed": None if run.seed() is None else str(run.seed()),
        "env": _envs(config),
        "model": _first(known, "engine.model", "engine.name"),
        "estimator": _first(known, "algorithm.adv_estimator"),
        "learning rate": _first(known, "algorithm.learning_rate", "ppo.learning_rate"),
        **_ahead(run, status),
        "rows": len(rows) or None,
        "whole run": duration(run.seconds()) if run.seconds() is not None else None,
        "written": clock(run.written()),
        "shoal": versions.get("shoal") if isinstance(versions, dict) else None,
    }
    to_log = anchor(site, "Log", f"{site.place(run)}/log", class_="button") if run.log() else None
    parts = [
        tag("header", tag("h1", run.name, " ", state(status)), facts(told)),
        command(started, to_log) if (started := run.started_by()) else to_log,
        tag("p", str(summary["error"]), class_="error") if "error" in summary else None,
        _resumed(run, status),
        advice_list(advise(rows, config, run=str(run.path))) if run.kind in PANELS and rows else None,
    ]
    own = {"skills": skills_section, "split": samples_section}.get(run.kind)
    parts.append(own(site, run) if own else _curves(site, run, rows))
    if run.kind == "ppo":
        parts.append(media(site, run))
    if run.index.files():
        parts.append(files_section(site, run))
    parts.append(_settings(run, summary))
    return Page(run.name, join(*parts), (("runs", site.link("")), (run.name, None)), up=site.link(""))


def _first(known: Mapping[str, str], *names: str) -> str | None:
    """The first of some settings that a run has."""
    return next((known[name] for name in names if known.get(name, NONE) != NONE), None)


_LOUD = re.compile(r"\S+ \S+ (WARNING|ERROR) ")


def log(site: Site, run: Run, _: Mapping[str, str]) -> Page:
    """What a run said in the terminal, its warnings, and how it ended."""
    lines = [
        tag("mark", line, class_="invalid") if _LOUD.match(line) else line
        for line in run.log().splitlines(keepends=True)
    ]
    body = join(tag("h1", "Log of ", run.name), tag("pre", lines or "no log", class_="log"))
    up = site.link(site.place(run))
    return site.page(run, f"Log of {run.name}", body, ("log", None), ways=(None, None, up))


def _envs(config: Mapping[str, Any]) -> str | None:
    named = config.get("env", config.get("env_name"))
    if isinstance(named, str):
        return named
    try:
        return ", ".join(map(str, config["es_manager"]["train"]["env_configs"]["tags"]))
    except (KeyError, TypeError):
        return None


def advice_list(found: Sequence[Advice]) -> Html:
    """Advice as boxes, each with a link to its curve."""
    boxes = [
        tag("li", tag("b", item.title), tag("span", item.text), tag("code", item.metric), class_=item.level)
        for item in found
    ]
    if not boxes:
        return tag("p", "Nothing striking in the metrics.", class_="hint")
    return tag("section", tag("h2", "Advice"), tag("ul", boxes, class_="advice"))


def _curves(site: Site, run: Run, rows: Sequence[Mapping[str, Any]]) -> Html:
    """The curves of a run; points whose episodes were kept lead to them."""
    kept, place, x = set(run.index.files()), f"{site.place(run)}/episodes", run.x
    links: dict[str, dict[int, str]] = {"train": {}, "heldout": {}}
    said = []
    for part, name in (("train", "training"), ("heldout", "held-out")) if run.kind == "agent" else ():
        for number_of_row, row in enumerate(rows):
            file = f"{part}-{int(row[x]) if is_number(row[x]) else -1:06d}.jsonl"
            if file in kept and (link := site.link(place, file=file)):
                links[part][number_of_row] = link
        at = [number(rows[k][x]) for k in links[part]]
        shown = ", ".join(at if len(at) < 13 else [*at[:10], "…", at[-1]])
        said += [f"Ringed points open the {name} episodes of iteration {shown}."] if at else []
    return curves.of_a_run(run.kind, rows, x, links, " ".join(said) or None)


def media(site: Site, run: Run) -> Html | None:
    """Pictures and films that the run made."""
    shown = []
    for name in ("video.gif", "video.mp4", "video.webm", "chain.gif"):
        with contextlib.suppress(DataError):  # it made none of that name
            _, kind = run.file(name, PICTURES | FILMS)
            if (address := site.picture(run, name)) is not None:
                seen = tag("img", src=address, alt=name, loading="lazy")
                if kind in FILMS.values():
                    seen = tag("video", src=address, controls=True, muted=True)
                shown.append(tag("figure", seen, tag("figcaption", name)))
    return tag("section", tag("h2", "Pictures"), tag("div", shown, class_="media")) if shown else None


def files_section(site: Site, run: Run) -> Html:
    """The files of episodes with their means, the newest first."""
    place = f"{site.place(run)}/episodes"
    summary = run.index.summary()
    is_broken = any(row["broken"] for row in summary)
    rows = []
    for row in reversed(summary[-200:]):
        file, errors = row["file"], row["errors"]
        name = anchor(site, file, place, class_="row-link", file=file)
        failed = anchor(site, number(errors), place, file=file, outcome="error") if errors else "0"
        unreadable = [row["broken"] or ""] if is_broken else []
        rows.append((name, row["episodes"], row["reward"], share(row["success"]), failed, *unreadable))
    heads = ("file", "episodes", "mean reward", "solved", "errors", *["unreadable lines"] * is_broken)
    every = anchor(site, "All episodes", place, class_="button")
    newest, older = table(heads, rows[:NEWEST]), rows[NEWEST:]
    more = fold(counted(len(older), "older file"), table(heads, older)) if older else None
    return tag("section", tag("h2", "Episodes"), reading_hint(run), every, newest, more, id="episodes")


def reading_hint(run: Run) -> Html | None:
    """How far the episodes of a run are read, until all are."""
    done, todo = run.index.progress
    return tag("p", f"reading episodes: {done / todo:.0%}", class_="hint") if todo else None


def _settings(run: Run, summary: Mapping[str, Any]) -> Html:
    """The settings as they were written, and the numbers of the summary."""
    try:
        text = run.path_of("config.yaml").read_text("utf-8", "replace")[:200_000]
    except OSError:
        text = ""
    numbers: list[tuple[str, Any]] = []
    for key, value in (summary.get("metrics") or {}).items():
        numbers += sorted(flattened({key: value}).items()) if isinstance(value, dict) else [(key, value)]
    return tag(
        "section",
        fold("Settings", tag("pre", text, tabindex=0)) if text else None,
        fold("Summary", table(("metric", "value"), numbers)) if numbers else None,
    )


# --- comparing
def compare(site: Site, query: Mapping[str, str]) -> Page:
    """Curves of several runs; those that differ by their seed alone are one curve with its range."""
    asked = query.get("runs")
    runs = [site.run(name) for name in asked.split(",")] if asked else site.runs
    drawn = [run for run in runs if run.kind in PANELS and run.rows()]
    parts = [
        _compared(site, of_kind, kind) for kind in PANELS if (of_kind := [r for r in drawn if r.kind == kind])
    ]
    left = ", ".join(run.name for run in runs if run not in drawn)
    told = tag("p", f"Left out, having no curves to compare: {left}.", class_="hint") if left else None
    nothing = tag("p", "no curves to compare", class_="empty")
    body = join(tag("header", tag("h1", "Runs compared"), told), parts or nothing)
    return Page("Runs compared", body, (("runs", site.link("")), ("compared", None)), up=site.link(""))


def _compared(site: Site, runs: Sequence[Run], kind: str) -> Html:
    """The last numbers, the curves and the differing settings of runs of one kind."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(_without_seed(run), []).append(run)
    teams = list(together.values())
    metrics = [name for _, names in PANELS[kind] for name in names]
    found = [_team_rows(team, kind, metrics) for team in teams]
    lasts = {name: [_last(rows, name) for rows in found] for name in HEADLINES}
    shown = [name for name, values in lasts.items() if any(value != NONE for value in values)]
    names = [_team_name(site, team) for team in teams]
    rows = [
        (
            join(
                tag("span", names[k], class_=f"key {curves.style_of(k, k)}"), ", ", _counted(team, found[k])
            ),
            *(lasts[name][k] for name in shown),
        )
        for k, team in enumerate(teams)
    ]
    tables = [curves.table(rows, AXES[kind], metrics, name) for rows, name in zip(found, names, strict=True)]
    panels = []
    for metric in metrics:
        there = [k for k, one in enumerate(tables) if metric in one["curves"]]
        lines = [Line(metric, names[k], k, k) for k in there]
        panels += (
            [curves.figure(curves.spoken(metric), lines, kind, shares=metric in SHARES)] if lines else []
        )
    title = {"agent": "Agents", "ppo": "PPO"}[kind]
    said = (
        "Runs that differ by their seed alone are one curve, as far as all have come: their mean and range."
    )
    first = [
        table(("runs", *map(curves.spoken, shown)), rows),
        tag("div", panels, class_="panels"),
        _differences(site, teams),
    ]
    return curves.section(title, f"compared-{kind}", tables, *first, said=said)


def _team_rows(team: Sequence[Run], kind: str, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that all runs of a team have: the means, and of each metric the lowest and the highest."""
    by_x = [{row[run.x]: row for row in run.rows()} for run in team]
    found = []
    for x in sorted(set.intersection(*map(set, by_x))):
        row: dict[str, Any] = {}
        for name in {*metrics, *AXES[kind]}:
            values: list[float] = [one[x][name] for one in by_x if is_number(one[x].get(name))]
            if len(values) == len(team):
                row |= {name: statistics.fmean(values)}
                row |= {f"{name} low": min(values), f"{name} high": max(values)} if len(team) > 1 else {}
        found.append(row)
    return found


def _last(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """The last value of a metric that all runs of a team have, its mean and its range."""
    row = next((row for row in reversed(rows) if name in row), None)
    if row is None:
        return NONE
    low, high = row.get(f"{name} low"), row.get(f"{name} high")
    reach = f" ({number(low, 3)} to {number(high, 3)})" if low != high else ""
    return f"{number(row[name])}{reach}"


def _counted(team: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> str:
    """How many runs a curve is made of, with how many seeds, and where it ends if one of them goes further."""
    seeds, x = len({run.seed() for run in team}), team[0].x
    told = counted(seeds, "seed") if seeds == len(team) else f"{len(team)} runs of {counted(seeds, 'seed')}"
    furthest, end = max(row[x] for run in team for row in run.rows()), rows[-1][x] if rows else 0
    return told if end == furthest else f"{told}, up to {x} {number(end)}"


def _team_name(site: Site, team: Sequence[Run]) -> str:
    names = [site.title(run) for run in team]
    return ", ".join(names[:3]) + (f" and {len(team) - 3} more" if len(team) > 3 else "")


def flattened(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings as dotted names."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = NONE if value is None else str(value)[:200]
    return found


_OWN = ("seed", "run_dir", "resume", "resume_from", "next_step", "checkpoint_dir", "record_video")


def _without_seed(run: Run) -> str:
    return repr(sorted((k, v) for k, v in flattened(run.config()).items() if k not in _OWN)) + run.kind


def _differences(site: Site, teams: Sequence[Sequence[Run]]) -> Html | None:
    """The settings in which runs differ: first those that all have, behind a fold those that only some have."""
    known = [(_team_name(site, team), flattened(team[0].config())) for team in teams]
    without = [name for name, settings in known if not settings]
    there = [settings for _, settings in known if settings]
    heads = ("setting", *[name for name, settings in known if settings])
    names = sorted({name for one in there for name in one} - set(_OWN))
    rows = [(name, *(one.get(name) for one in there)) for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    everywhere = [row for row in rows if None not in row]
    some = [tuple(NONE if cell is None else cell for cell in row) for row in rows if None in row]
    if not rows and not without:
        return None

    def listed(found: Sequence[Sequence[Any]]) -> Html:
        cut = tag("p", f"The first {MOST_DIFFERENCES} of {len(found)} settings.", class_="hint")
        return join(table(heads, found[:MOST_DIFFERENCES]), cut if len(found) > MOST_DIFFERENCES else None)

    title = f"{counted(len(some), 'setting')} that only some of the runs have"
    return join(
        tag("h2", "Settings that differ"),
        tag("p", f"No settings are known of {', '.join(without)}.", class_="hint") if without else None,
        listed(everywhere) if everywhere else None,
        fold(title, listed(some), open=not everywhere) if some else None,
    )
