"""One static file of runs: pages as sections of one document, style and script inside, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from urllib.parse import parse_qsl

from shoal.core.errors import DataError
from shoal.viewer.curves import PANELS
from shoal.viewer.index import Filter
from shoal.viewer.markup import Html, join, tag
from shoal.viewer.pages import Site, address_of, not_here
from shoal.viewer.runs import Run
from shoal.viewer.server import ICON, SCRIPTS, bar, keys, page_for, static

FILES = 12
"""Newest files of episodes whose first page is in the file."""


def export(runs: Sequence[Run], episodes: int = 60) -> str:
    """The text of the file.

    Args:
        runs: to be shown, their indexes up to date.
        episodes: of each run at most; the worst, the best, failed ones and the newest.
    """
    names: dict[str, str] = {}  # of sections, by address
    for address in _addresses(Site(runs), episodes):
        name = re.sub(r"[^A-Za-z0-9.:_-]+", "-", address).strip("-") or "runs"
        names[address] = f"{name}.{len(names)}" if name in names.values() else name
    site = Site(runs, only={address: f"#{name}" for address, name in names.items()})
    sections = []
    for address, name in names.items():
        path, _, query = address.partition("?")
        try:
            page = page_for(site, path, dict(parse_qsl(query)))
        except DataError as error:  # one record that cannot be read hides no other
            page = not_here(str(error), site.link(""))
        ways = {"data_prev": page.previous, "data_next": page.next, "data_up": page.up}
        known = {"id": name, "data_title": page.title, **ways}
        sections.append(tag("div", bar(page), tag("main", page.body), class_="page", **known))
    style = static("view.css")
    scripts = [static(name).replace("</", "<\\/") for name in SCRIPTS]
    sums = " ".join(f"'{_sum(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {sums}; style-src '{_sum(style)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    title = ", ".join(run.name for run in runs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} · shoal"),
        tag("link", rel="icon", href=ICON),
        Html(f"<style>{style}</style>"),
    )
    run = [Html(f'<script type="module">{script}</script>') for script in scripts]
    body = tag("body", join(*sections), keys(), run, data_static=True)
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _sum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _addresses(site: Site, most: int) -> list[str]:
    """Path and query of every page that the file holds."""
    found = [""]
    for run in site.runs:
        place = site.place(run)
        found += [place, f"{place}/log"] if run.log() else [place]
        found += [address_of(f"{place}/skill", name=skill["name"]) for skill in run.skills()["skill"]]
        found += [address_of(f"{place}/sample", number=k) for k in range(min(len(run.samples()), most))]
        files = run.index.files()[-FILES:]
        found += [address_of(f"{place}/episodes", file=file) for file in (None, *files)] if files else []
        part = max(1, most // 4)
        chosen = [
            *run.index.episodes(order="worst", limit=part),
            *run.index.episodes(order="best", limit=part),
            *run.index.episodes(Filter(outcome="error"), limit=part),
            *run.index.episodes(order="newest", limit=part),
        ]
        names = list(dict.fromkeys(episode.name for episode in chosen))[:most]
        found += [address_of(f"{place}/episode", name=name) for name in names]
        found += [address_of(f"{place}/group", name=name) for name in names[:part]]
    kinds = [run.kind for run in site.runs if run.kind in PANELS]
    if len(kinds) > len(set(kinds)):  # two of a kind
        found.append("compare")
    return found
