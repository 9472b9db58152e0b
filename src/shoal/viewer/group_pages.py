"""A group side by side: its members by reward, those that did the same in one column, from the turn where they part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.data import Trajectory, Turn
from shoal.viewer.episode_lists import ended, steps, within_list
from shoal.viewer.episode_pages import compared, drawing, marked
from shoal.viewer.index import Episode
from shoal.viewer.markup import Html, counted, join, number, tag, wide
from shoal.viewer.pages import Page, Site, anchor, facts
from shoal.viewer.runs import Run

KINDS = {
    "as-most": "acts as most in the same state",
    "other": "acts otherwise than most in the same state",
    "alone": "nobody else was in this state",
}


@dataclass(frozen=True)
class Column:
    """Members of a group that did and got the same."""

    members: list[Episode]
    trajectory: Trajectory


def columns_of(members: Sequence[Episode], trajectories: Sequence[Trajectory]) -> list[Column]:
    """The members by reward, the best first, equal ones together."""
    columns: dict[Any, Column] = {}
    for member, trajectory in sorted(
        zip(members, trajectories, strict=True), key=lambda pair: -pair[0].reward
    ):
        did = member.outcome, member.reward, tuple(map(_act, trajectory.turns))
        columns.setdefault(did, Column([], trajectory)).members.append(member)
    return list(columns.values())


def parting(trajectories: Sequence[Trajectory]) -> int | None:
    """The first turn at which the members of a group do different things; None if they never do.

    A member that has ended parts from one that goes on.
    """
    for k in range(max((len(t.turns) for t in trajectories), default=0)):
        if len({turn and _act(turn) for turn in _turns_at(k, trajectories)}) > 1:
            return k
    return None


def _act(turn: Turn) -> tuple[Any, ...]:
    return (turn.observation, turn.action if turn.action_is_valid else turn.response, turn.action_is_valid)


def kinds_of(columns: Sequence[Column]) -> list[list[str]]:
    """For each turn and column a word of `KINDS`, or `gone`: only actions in the same state are compared.

    The state is the observations up to there; of equally frequent actions that of the higher reward counts as most.
    """
    trajectories = [column.trajectory for column in columns]
    states: list[int] = [0] * len(columns)
    kinds = []
    for k in range(max((len(t.turns) for t in trajectories), default=0)):
        turns = _turns_at(k, trajectories)
        states = [hash((s, t.observation)) if t else -1 for s, t in zip(states, turns, strict=True)]
        acts: dict[int, Counter[Any]] = {}
        for state, turn, column in zip(states, turns, columns, strict=True):
            acts.setdefault(state, Counter())[turn and _act(turn)] += len(column.members)
        line = []
        for state, turn in zip(states, turns, strict=True):
            usual = acts[state].most_common(1)[0][0]
            same = "as-most" if turn and usual == _act(turn) else "other"
            line.append("gone" if turn is None else same if states.count(state) > 1 else "alone")
        kinds.append(line)
    return kinds


def _turns_at(k: int, trajectories: Sequence[Trajectory]) -> list[Turn | None]:
    return [t.turns[k] if k < len(t.turns) else None for t in trajectories]


def group(site: Site, run: Run, query: Mapping[str, str]) -> Page:
    """The page of the group of an episode."""
    episode = run.index.find(query.get("name", ""))
    members = run.index.group_of(episode)
    trajectories = [run.index.read(member) for member in members]
    columns, part = columns_of(members, trajectories), parting(trajectories)
    mean, spread = compared(members)
    told = {
        "env": episode.env,
        "iteration": episode.iteration,
        "env seed": str(trajectories[0].env_seed),
        "members": len(members),
        "mean reward": mean,
        "standard deviation": spread,
        "parting": "all members did the same" if part is None else f"they part in turn {part + 1}",
    }
    place, within = site.place(run), within_list(site, query)
    heads = [_head(site, place, column, mean, episode.name, within) for column in columns]
    kinds = kinds_of(columns)
    rows = [_row(k, columns, kinds[k], part) for k in range(len(kinds))]
    arrows, ways = steps(site, run, "group", episode, query)
    equal = "All rewards are equal: this group gives no advantage to learn from."
    legend = [tag("span", text, class_=f"edge {kind}") for kind, text in KINDS.items()]
    side = tag("table", tag("thead", tag("tr", tag("th", "turn"), heads)), tag("tbody", rows), class_="group")
    body = join(
        tag("header", tag("h1", f"Group {episode.group}"), arrows, facts(told)),
        None if spread else tag("p", equal, class_="hint"),
        tag("p", legend, class_="key-line") if part is not None else None,
        wide(side, "members side by side", "wide sides"),
    )
    files = site.link(f"{place}/episodes", file=episode.file)
    behind = (episode.file.removesuffix(".jsonl"), files), (f"group {episode.group}", None)
    return site.page(run, f"Group {episode.group}", body, *behind, ways=ways)


def _head(
    site: Site, place: str, column: Column, mean: float, chosen: str, within: Mapping[str, str]
) -> Html:
    """The head of a column: who it is, how it ended, its reward and how far from the group's mean."""
    first, several = column.members[0], len(column.members) > 1
    names = [anchor(site, f"{m.member}", f"{place}/episode", name=m.name, **within) for m in column.members]
    told = f"reward {number(first.reward)} ({first.reward - mean:+.3g}), {counted(first.turns, 'turn')}"
    return tag(
        "th",
        tag("span", f"\N{MULTIPLICATION SIGN}{len(column.members)} ", class_="times") if several else None,
        "members " if several else "member ",
        [join(", " if k else None, name) for k, name in enumerate(names)],
        " ",
        ended(first),
        tag("small", told),
        class_="chosen" if any(m.name == chosen for m in column.members) else None,
        scope="col",
    )


def _row(k: int, columns: Sequence[Column], kinds: Sequence[str], part: int | None) -> Html:
    """One turn of all members: a cell for all until they part, then one each."""
    head = tag("th", str(k + 1), tag("small", "they part here") if k == part else None, scope="row")
    turns = _turns_at(k, [column.trajectory for column in columns])
    if part is None or k < part:
        same = tag("small", "the same in all")
        return tag("tr", head, [tag("td", _cell(turns[0]), same, colspan=len(turns), class_="same")])
    cells = [tag("td", _cell(turn), class_=kind) for turn, kind in zip(turns, kinds, strict=True)]
    return tag("tr", head, cells, class_="parting" if k == part else None)


def _cell(turn: Turn | None) -> Html:
    if turn is None:
        return tag("span", "ended")
    saw = drawing(turn.observation) or tag("pre", turn.observation[:2000], class_="saw")
    did = tag("pre", marked(turn.response[:2000].strip("\n"), turn.action_is_valid), class_="said")
    paid = tag("small", f"reward {number(turn.reward)}") if turn.reward else None
    return join(saw, did, paid)
