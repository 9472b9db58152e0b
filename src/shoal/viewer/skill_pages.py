"""A graph of skills: what needs what, when it was trained, and which versions each expert has had."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import DataError
from shoal.core.run_folder import is_number, latest, whole_rows
from shoal.skills.spec import slug
from shoal.viewer import curves
from shoal.viewer.curves import Line
from shoal.viewer.markup import NONE, Html, counted, duration, fold, graph, join, share, tag, timeline
from shoal.viewer.pages import Page, Site, anchor, facts, media, state, table
from shoal.viewer.runs import Run

Row = dict[str, Any]
EVALUATED = "evaluated_success"


def _own_test(run: Run, attempts: list[Row], skill: Row) -> str:
    """The success of its expert as it was evaluated: after its training, or last in the one that goes on."""
    success = json.loads(skill["result"]).get("success")
    if success is None and skill["status"] == "running":
        rows = _training_rows(run, attempts, str(skill["name"]))
        success = next((row[EVALUATED] for row in reversed(rows) if is_number(row.get(EVALUATED))), None)
    return share(success)


def _training_rows(run: Run, attempts: list[Row], skill: str) -> list[Row]:
    """The metrics of the newest training of a skill, also of one that failed or goes on."""
    kept = [f.name for f in (run.path / "skills").glob("*") if f.name.partition("_")[2] == slug(skill)]
    own = [str(a["run_folder"]) for a in attempts if a["skill"] == skill]
    for folder in [*own[-1:], *(f"skills/{name}" for name in kept)]:
        with contextlib.suppress(OSError):
            return latest(whole_rows(run.path_of(f"{folder}/metrics.jsonl").read_bytes()), "step")
    return []


def _steps_used(run: Run, attempts: list[Row], skill: Row) -> int:
    """Env steps of a skill: those of its merged trainings, and those of its last one if it was not merged."""
    own = [a for a in attempts if a["skill"] == skill["name"]]
    rows = _training_rows(run, attempts, skill["name"]) if own and own[-1]["frames"] is None else []
    return int(skill["budget_used"]) + (int(rows[-1]["step"]) if rows else 0)


def skills_section(site: Site, run: Run) -> Html:
    """The graph, the time line and a table of all skills."""
    tables = run.skills()
    skills, attempts = tables["skill"], tables["attempt"]
    final = run.summary().get("metrics") or {}
    on_chain = final.get("skill_success") or {}
    if not skills:
        return tag("p", "no skills yet, or state.db has a layout that is not known here", class_="empty")
    place = f"{site.place(run)}/skill"
    names = [str(skill["name"]) for skill in skills]
    needs = {str(s["name"]): json.loads(s["dependencies"]) for s in skills}
    tests = {str(s["name"]): _own_test(run, attempts, s) for s in skills}
    states = {
        str(s["name"]): f"{s['status']}, own test {tests[s['name']]}".removesuffix(f", own test {NONE}")
        for s in skills
    }
    links = {name: link for name in names if (link := site.link(place, name=name))}
    now = time.time()
    bars = [
        (str(a["skill"]), float(a["started"]), float(a["ended"] or now), str(a["outcome"] or "running"))
        for a in attempts
    ]
    rows = [
        (
            anchor(site, s["name"], place, class_="row-link", name=s["name"]),
            state(str(s["status"])),
            tests[s["name"]],
            share(on_chain.get(s["name"])),
            _steps_used(run, attempts, s),
            s["budget_total"],
            sum(a["skill"] == s["name"] for a in attempts),
            s["reason"] or "",
        )
        for s in skills
    ]
    heads = ("skill", "state", "own test", "on the chain", "env steps used", "of", "trainings", "reason")
    training = sum((a["ended"] or a["started"]) - a["started"] for a in attempts)
    span = max((b[2] for b in bars), default=0.0) - min((b[1] for b in bars), default=0.0)
    done = sum(s["status"] == "completed" for s in skills)
    said = {
        "whole chain, on unseen worlds": share(final["chain_success"]) if "chain_success" in final else None,
        "skills": f"{done} of {len(skills)} completed",
        "trainings": len(attempts),
        "from the first to the last": duration(span),
        "training in all": duration(training),
    }
    words = (
        "Own test: the success of a skill's expert as it was evaluated last in its training. On the chain: of the "
        "unseen worlds that got to the skill, the share that did it. The whole chain: the share of all worlds that did "
        "every skill. Env steps used: all that its trainings learned from, whichever expert acted in them; frames, in "
        "the terminal, are those in which an expert acted itself, over all trainings."
    )
    return join(
        tag("section", tag("h2", "Graph"), facts(said), graph(needs, states, links), id="graph"),
        tag("section", tag("h2", "Time line"), timeline(bars), id="timeline"),
        tag("section", tag("h2", "Skills"), tag("p", words, class_="hint"), table(heads, rows)),
        media(site, run),
        _events(tables["event"]),
    )


def _events(events: list[Row]) -> Html | None:
    if not events:
        return None
    first = min(float(e["time"]) for e in events)
    rows = [
        (f"{float(e['time']) - first:.1f} s", str(e["kind"]), e["skill"] or "", str(e["detail"] or "")[:300])
        for e in events
    ]
    return tag("section", fold(counted(len(rows), "event"), table(("at", "event", "skill", "detail"), rows)))


def skill_page(site: Site, run: Run, query: Mapping[str, str]) -> Page:
    """One skill: what it says of itself, its trainings, the versions of its expert, its curve."""
    tables, name = run.skills(), query.get("name", "")
    found = [s for s in tables["skill"] if s["name"] == name]
    if not found:
        raise DataError(f"there is no skill {name[:80]!r} in this run")
    skill = found[0]
    heads = {h["version"] for h in tables["head"] if h["expert"] == skill["expert"]}
    versions = [v for v in tables["version"] if v["expert"] == skill["expert"]]
    attempts = [a for a in tables["attempt"] if a["skill"] == name]
    rows = _training_rows(run, attempts, name)
    steps = int(rows[-1]["step"]) if rows else NONE
    version_rows = [
        (
            v["id"],
            "head" if v["id"] in heads else "",
            v["parent"],
            v["frames"],
            "accepted" if v["accepted"] else "refused",
            tag("code", str(v["sha256"])[:12]),
        )
        for v in versions
    ]
    attempt_rows = [
        (
            a["id"],
            state(str(a["outcome"] or "running")),
            f"{float(a['ended'] or time.time()) - float(a['started']):.1f} s",
            a["frames"] if a["frames"] is not None else steps if a is attempts[-1] else NONE,
            str(a["launcher"] or ""),
            str(a["reason"] or ""),
        )
        for a in attempts
    ]
    spec = json.dumps(json.loads(skill["spec"]), indent=2, ensure_ascii=False)
    told = {
        "expert": skill["expert"],
        "needs": ", ".join(json.loads(skill["dependencies"])) or "nothing",
        "own test": _own_test(run, attempts, skill),
        "env steps used": f"{_steps_used(run, attempts, skill):,} of {skill['budget_total']:,}",
    }
    of_version = ("version", "in use", "made from", "env steps", "test", "file")
    of_attempt = ("no.", "end", "took, with its start", "env steps", "launcher", "reason")
    none_yet = tag("p", "None: no training of it was accepted.", class_="hint")
    listed = table(of_version, version_rows) if versions else none_yet
    body = join(
        tag("header", tag("h1", name, " ", state(str(skill["status"])))),
        facts(told),
        tag("p", skill["reason"], class_="error") if skill["reason"] else None,
        _curves(rows),
        tag("section", tag("h2", "Versions of its expert"), listed),
        tag("section", tag("h2", "Trainings"), table(of_attempt, attempt_rows)),
        tag("section", tag("h2", "Specification"), tag("pre", spec, tabindex=0)),
    )
    place = site.place(run)
    names = [str(s["name"]) for s in tables["skill"]]
    at = names.index(name)
    before = site.link(f"{place}/skill", name=names[at - 1]) if at else None
    after = site.link(f"{place}/skill", name=names[at + 1]) if at + 1 < len(names) else None
    return site.page(run, name, body, (name, None), ways=(before, after, site.link(place)))


def _curves(rows: list[Row]) -> Html | None:
    """Success, reward and entropy over a training."""
    names = [name for name in (EVALUATED, "success", "reward", "entropy") if any(name in row for row in rows)]
    if not names:
        return None
    renamed = [{**row, "env steps": row["step"], "seconds": row.get("wall")} for row in rows]
    held = curves.table(renamed, ("env steps", "seconds"), names)
    # Of practice, the share of episodes that ended in an update: as failures take longest, it is too high at first.
    titles = {EVALUATED: "success as evaluated", "success": "success of the practice that ended"}
    panels = [
        curves.figure(titles.get(name, f"{name} of each update"), [Line(name, name)], shares=name in titles)
        for name in names
    ]
    return curves.section("Training", "curves", [held], tag("div", panels, class_="panels"))
