"""The list of a run's episodes: filtered, sorted, searched. Its address says which list it is.

Pages of an episode or a group carry that part of the address, so that next, previous and up stay within the list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from shoal.core.errors import DataError
from shoal.viewer.index import COLUMNS, ORDERS, Episode, Filter
from shoal.viewer.markup import Html, histogram, join, number, tag
from shoal.viewer.pages import Page, Site, Ways, anchor, arrows, reading_hint, table
from shoal.viewer.runs import Run

PAGE = 50
"""Episodes on a page."""
OUTCOMES = {"success": "solved", "failed": "not solved", "truncated": "out of turns", "error": "error"}
_PAGES = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""What `page` in an address may be."""
_KINDS = {"int": "a whole number", "float": "a number", "str": "text"}
_HEADS = (
    ("episode", "file"), ("end", "outcome"), ("said", None), ("reward", "reward"), ("turns", "turns"),
    ("group.member", "group"), ("tokens", "tokens"), ("invalid", "invalid"), ("iteration", "iteration"), ("env", "env"),
)  # fmt: skip
"""What the columns are called, and the column of the index that each is sorted by."""


def episodes(site: Site, run: Run, query: Mapping[str, str]) -> Page:
    """A page of episodes with the histogram and the causes of failures as filters."""
    query = {key: value for key, value in query.items() if value}  # a form sends what is left empty too
    wanted, order = read_filter(query)
    at = _converted(query.get("page", 0), _PAGES)
    place = f"{site.place(run)}/episodes"
    outcomes = run.index.outcomes(replace(wanted, outcome=None))
    total = sum(outcomes.values()) if wanted.outcome is None else outcomes[wanted.outcome]

    def with_(**changes: Any) -> dict[str, Any]:
        return {**query, "page": None, **changes}

    chips = [
        anchor(
            site,
            join(f"{OUTCOMES[name]} ", tag("b", number(n))),
            place,
            class_=f"chip {name if n else 'none'}" + (" chosen" if wanted.outcome == name else ""),
            **with_(outcome=None if wanted.outcome == name else name),
        )
        for name, n in outcomes.items()
    ]
    unbound = replace(wanted, reward_from=None, reward_to=None)
    bars = run.index.rewards(unbound)
    links = [
        site.link(place, **with_(reward_from=repr(low), reward_to=repr(high))) for low, high, _, _ in bars
    ]
    reach = wanted.reward_from, wanted.reward_to
    drawn = histogram(bars, links, reach if None not in reach else None)  # type: ignore[arg-type]
    causes = run.index.causes(replace(wanted, cause=None))
    lines = []
    for cause, n in causes:
        chosen = "chosen" if cause == wanted.cause else None
        linked = anchor(site, cause[:300], place, class_=chosen, **with_(cause=cause))
        lines.append(tag("li", tag("b", number(n)), linked))
    found = run.index.episodes(wanted, order, PAGE, at * PAGE)
    back = site.link(place, **with_(page=at - 1 or None)) if at else None
    forth = site.link(place, **with_(page=at + 1)) if (at + 1) * PAGE < total else None
    pager = tag(
        "div",
        tag("a", "← earlier", href=back, rel="prev") if back else None,
        tag("span", f"{at * PAGE + bool(found):,} to {at * PAGE + len(found):,} of {total:,}"),
        tag("small", "this file holds no more") if site.only is not None and len(found) < total else None,
        tag("a", "later →", href=forth, rel="next") if forth else None,
        class_="pager",
    )
    ends = tag("h2", "How they ended"), tag("p", chips, class_="chips")
    whys = (tag("h2", "Why they broke off"), tag("ul", lines, class_="causes")) if causes else None
    rewards = tag("figure", tag("figcaption", tag("b", "Rewards")), drawn)
    body = join(
        tag("header", tag("h1", f"Episodes of {wanted.file}" if wanted.file else "Episodes")),
        reading_hint(run),
        _form(site, run, place, query, order, [cause for cause, _ in causes]) if site.only is None else None,
        tag("div", rewards, tag("div", ends, whys), class_="split"),
        pager,
        _table(site, run, found, query, order),
        pager if len(found) > PAGE // 4 else None,
    )
    ways = back, forth, site.link(site.place(run))
    return site.page(run, f"Episodes of {run.name}", body, ("episodes", None), ways=ways)


def _form(
    site: Site, run: Run, place: str, query: Mapping[str, str], order: str, causes: Sequence[str]
) -> Html:
    """The filters and the order as controls; sending it opens the list of that address."""

    def field(label: str, name: str, kind: str = "number", **more: Any) -> Html:
        return tag("label", label, tag("input", type=kind, name=name, value=query.get(name), **more))

    def choice(label: str, name: str, options: Mapping[str, str], chosen: str | None) -> Html:
        shown = [
            tag("option", text, value=value, selected=value == chosen) for value, text in options.items()
        ]
        return tag("label", label, tag("select", shown, name=name))

    envs, reasons = run.index.envs(), dict.fromkeys([*causes, *filter(None, [query.get("cause")])])
    any_ = {"": "any"}
    orders = {name: name for name in ORDERS} | ({} if order in ORDERS else {order: f"by {order}"})
    files = [tag("option", value=name) for name in reversed(run.index.files()[-200:])]
    return tag(
        "form",
        field("text", "text", "search", placeholder="seen, said or done"),
        choice("end", "outcome", any_ | OUTCOMES, query.get("outcome")),
        choice("cause", "cause", any_ | {cause: cause[:80] for cause in reasons}, query.get("cause"))
        if reasons
        else None,
        choice("env", "env", any_ | {env: env[:40] for env in envs}, query.get("env"))
        if len(envs) > 1
        else None,
        field("iteration", "iteration"),
        field("group", "group"),
        field("reward from", "reward_from", step="any"),
        field("to", "reward_to", step="any"),
        field("file", "file", "text", list="files"),
        tag("datalist", files, id="files"),
        tag(
            "label",
            tag("input", type="checkbox", name="invalid", value="1", checked="invalid" in query),
            "invalid actions",
            class_="tick",
        ),
        choice("order", "order", orders, order),
        tag("button", "show", type="submit"),
        anchor(site, "all", place, class_="button"),
        method="get",
        action=site.link(place),
        role="search",
        class_="filters",
    )


def _table(site: Site, run: Run, found: Sequence[Episode], query: Mapping[str, str], order: str) -> Html:
    """Episodes line by line; a head sorts by its column, and once more the other way round."""
    place, within = site.place(run), within_list(site, {**query, "order": order})
    sorted_by = ORDERS.get(order, order)
    rows = []
    for e in found:
        address = site.link(f"{place}/episode", name=e.name, **within)
        name = tag("a", e.name, href=address, class_="row-link", id=e.name) if address else e.name
        group = anchor(site, f"g{e.group}·m{e.member}", f"{place}/group", name=e.name, **within)
        said = _said(run, e, address, query.get("text"))
        rows.append((name, ended(e), said, e.reward, e.turns, group, e.tokens, e.invalid, e.iteration, e.env))
    heads = []
    for title, column in _HEADS:
        if column is None:
            heads.append(title)
            continue
        falling = sorted_by == f"-{column}"
        mark = " ▼" if falling else " ▲" if sorted_by == column else ""
        asked = {**query, "page": None, "order": column if falling else f"-{column}"}
        heads.append(
            anchor(site, title + mark, f"{place}/episodes", class_="sort", **asked) if found else title
        )
    return table(heads, rows, "episodes")


def _said(run: Run, episode: Episode, address: str | None, text: str | None) -> Html:
    """What stands where the text was found, which is marked, and a link to it; without a text the last action."""
    turn, said = run.index.said(episode, text)
    if not text:
        return tag("small", said)
    parts = re.split(f"({re.escape(text)})", said, flags=re.IGNORECASE)
    shown = [tag("mark", part) if k % 2 else part for k, part in enumerate(parts)]
    return tag("a", f"{turn}: ", shown, href=f"{address}#turn-{turn}" if address else None)


def ended(episode: Episode) -> Html:
    """How an episode ended, as a coloured word."""
    return tag("span", OUTCOMES[episode.outcome], class_=f"chip {episode.outcome}", title=episode.error)


def read_filter(query: Mapping[str, str]) -> tuple[Filter, str]:
    """The filter and the order that a link asks for; what it does not say right is a `DataError`."""
    order = query.get("order", "newest")
    if order not in ORDERS and order.removeprefix("-") not in COLUMNS:
        raise DataError(f"the order must be one of {', '.join((*ORDERS, *COLUMNS))}, got {order[:40]!r}")
    return _converted({key: value for key, value in query.items() if value}, Filter), order


def _converted(asked: Any, kind: Any) -> Any:
    """What stands in an address as text, as the types of `kind`."""
    try:
        return msgspec.convert(asked, kind, strict=False)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at ")  # of "Expected `int`, got `str` - at `$.group`"
        expected = re.sub(r"`(\w+)[^`]*`", lambda kind: _KINDS.get(kind[1], kind[1]), expected)
        name = place.strip("`$.")
        wrong = f"{name}={asked[name][:40]!r}" if name else repr(asked)[:40]
        raise DataError(
            f"the address asks for episodes by {wrong}, which is no value of it: {expected}"
        ) from error


# --- the list that one came from
def within_list(site: Site, query: Mapping[str, str]) -> dict[str, str]:
    """What a link to an episode says of its list, if there is one; nothing in a static file, which has no forms."""
    if site.only is not None or not query.get("order"):
        return {}
    return {key: query[key] for key in (*Filter.__dataclass_fields__, "order") if query.get(key)}


def steps(
    site: Site, run: Run, kind: str, episode: Episode, query: Mapping[str, str], *buttons: Html | None
) -> tuple[Html, Ways]:
    """Arrows to the episodes or groups (`kind`) before and behind in the list that one came from, up to it; `buttons`.

    Without a list in the address it is the file.
    """
    within = within_list(site, query)
    came = within or {"file": episode.file, "order": "file"}
    wanted, order = read_filter(came)
    spot = run.index.place_of(episode, wanted, order, groups=kind == "group")
    at = run.index.place_of(episode, wanted, order).at if kind == "group" else spot.at
    place = site.place(run)
    before, behind = (
        site.link(f"{place}/{kind}", name=one.name, **within) if one else None
        for one in (spot.before, spot.behind)
    )
    if site.only is None:
        line = f"#{quote(episode.name)}" if at is not None else ""
        up = f"{site.link(f'{place}/episodes', **came, page=(at or 0) // PAGE or None)}{line}"
    else:
        up = site.link(f"{place}/episodes", file=episode.file) or site.link(place) or "#"
    where = "not in the list" if spot.at is None else f"{kind} {spot.at + 1:,} of {spot.total:,}"
    told = ", ".join(f"{key.replace('_', ' ')} {value[:40]}" for key, value in came.items())
    ways = before, behind, up
    place_in_list = tag("small", f"{where} ({told})") if site.only is None else None
    first = tag("a", "↑ list", href=up, class_="button")
    return arrows("in the list", ways, first, *buttons, place_in_list), ways
