"""The pages about episodes: a filtered list, a group side by side, one episode turn by turn, token by token."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.data import Call, Trajectory, Turn
from shoal.core.errors import DataError
from shoal.core.files import read_json
from shoal.viewer.index import ORDERS, Episode, Filter
from shoal.viewer.markup import ACTION, Html, counted, histogram, join, number, tag
from shoal.viewer.pages import Page, Site, anchor, command, facts, table
from shoal.viewer.runs import PICTURES, Run

logger = logging.getLogger(__name__)
PAGE = 50
"""Episodes on a page."""
Spell = Callable[[Sequence[int]], list[str]]
"""Token ids to the text of each."""
OUTCOMES = {"success": "solved", "failed": "failed", "truncated": "out of turns", "error": "error"}


def episodes(site: Site, run: Run, query: Mapping[str, str]) -> Page:
    """A page of episodes with the histogram and the causes of failures as filters."""
    wanted, order = read_filter(query)
    at = max(0, _whole(query.get("page", "0")))
    place = f"{site.place(run)}/episodes"
    outcomes = run.index.outcomes(replace(wanted, outcome=None))
    total = sum(outcomes.values()) if wanted.outcome is None else outcomes[wanted.outcome]

    def with_(**changes: Any) -> dict[str, Any]:
        return {key: value for key, value in {**query, "page": None, **changes}.items() if value is not None}

    chips = [
        anchor(
            site,
            join(f"{OUTCOMES[name]} ", tag("b", number(n))),
            place,
            class_=f"chip {name}" + (" chosen" if wanted.outcome == name else ""),
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
    causes = []
    for cause, n in run.index.causes(replace(wanted, cause=None)):
        chosen = "chosen" if cause == wanted.cause else None
        linked = anchor(site, cause[:300], place, class_=chosen, **with_(cause=cause))
        causes.append(tag("li", tag("b", number(n)), linked))
    found = run.index.episodes(wanted, order, PAGE, at * PAGE)  # type: ignore[arg-type]
    orders = [
        anchor(site, name, place, class_="chip chosen" if name == order else "chip", **with_(order=name))
        for name in ORDERS
    ]
    back = site.link(place, **with_(page=at - 1 or None)) if at else None
    forth = site.link(place, **with_(page=at + 1)) if (at + 1) * PAGE < total else None
    pager = [
        tag("a", "← earlier", href=back, rel="prev") if back else None,
        tag("span", f"{at * PAGE + bool(total):,} to {at * PAGE + len(found):,} of {total:,}"),
        tag("a", "later →", href=forth, rel="next") if forth else None,
    ]
    ends = tag("h2", "How they ended"), tag("p", chips, class_="chips")
    whys = (tag("h2", "Why they broke off"), tag("ul", causes, class_="causes")) if causes else None
    rewards = tag("figure", tag("figcaption", tag("b", "Rewards")), drawn)
    body = join(
        tag("header", tag("h1", "Episodes"), _chosen(site, place, query)),
        tag("div", rewards, tag("div", ends, whys), class_="split"),
        tag("p", "order: ", orders, class_="chips"),
        episode_table(site, run, found),
        tag("nav", pager, class_="pager"),
    )
    ways = back, forth, site.link(site.place(run))
    return site.page(run, f"Episodes of {run.name}", body, ("episodes", None), ways=ways)


def _chosen(site: Site, place: str, query: Mapping[str, str]) -> Html | None:
    """The filters that hold, each with a link that drops it."""
    shown = {k: v for k, v in query.items() if k not in ("page", "order") and v}
    chips = []
    for key, value in shown.items():
        rest = {k: v for k, v in query.items() if k not in (key, "page")}
        chips.append(
            anchor(site, f"{key.replace('_', ' ')}: {value[:80]} ✕", place, class_="chip chosen", **rest)
        )
    return tag("p", chips, class_="chips") if chips else None


def read_filter(query: Mapping[str, str]) -> tuple[Filter, str]:
    """The filter and the order that a link asks for; what it does not say right is a `DataError`."""
    outcome, order = query.get("outcome"), query.get("order", "file")
    if outcome not in (None, *OUTCOMES) or order not in ORDERS:
        raise DataError("that is no kind of episode, or no order, that there is")
    whole = {key: _whole(query[key]) for key in ("iteration", "group") if query.get(key)}
    real = {key: _real(query[key]) for key in ("reward_from", "reward_to") if query.get(key)}
    text = {key: query[key] for key in ("file", "env", "cause") if query.get(key)}
    return Filter(**text, **whole, **real, outcome=outcome, contains_invalid="invalid" in query), order  # type: ignore[arg-type]


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise DataError(f"{text[:40]!r} is no whole number")
    return int(text)


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{text[:40]!r} is no number") from None


def _ended(episode: Episode) -> Html:
    return tag("span", OUTCOMES[episode.outcome], class_=f"chip {episode.outcome}", title=episode.error)


def episode_table(site: Site, run: Run, found: Sequence[Episode]) -> Html:
    """Episodes line by line."""
    place = site.place(run)
    rows = [
        (
            anchor(site, e.name, f"{place}/episode", class_="row-link", name=e.name),
            _ended(e),
            e.reward,
            e.turns,
            anchor(site, f"{e.group}.{e.member}", f"{place}/group", name=e.name),
            e.tokens,
            e.invalid,
            e.iteration,
            e.env,
        )
        for e in found
    ]
    heads = ("episode", "end", "reward", "turns", "group.member", "tokens", "invalid", "iteration", "env")
    return table(heads, rows, "episodes")


# --- a group
def parting(trajectories: Sequence[Trajectory]) -> int | None:
    """The first turn at which the members of a group do different things; None if they never do.

    A member that has ended parts from one that goes on.
    """
    longest = max((len(t.turns) for t in trajectories), default=0)
    for k in range(longest):
        if len({_act(t.turns[k]) if k < len(t.turns) else None for t in trajectories}) > 1:
            return k
    return None


def _act(turn: Turn) -> tuple[Any, ...]:
    return (turn.observation, turn.action if turn.action_is_valid else turn.response, turn.action_is_valid)


def _compared(members: Sequence[Episode]) -> tuple[float, float]:
    """Mean and standard deviation of the rewards that an update compares: those of whole episodes, if there are any."""
    rewards = [m.reward for m in members if m.status == "ok"] or [m.reward for m in members]
    return statistics.fmean(rewards), statistics.pstdev(rewards)


def group(site: Site, run: Run, name: str) -> Page:
    """The members of a group side by side, from the turn where they part."""
    episode = run.index.find(name)
    members = run.index.group_of(episode)
    trajectories = [run.index.read(member) for member in members]
    part = parting(trajectories)
    place = site.place(run)
    mean, spread = _compared(members)
    told = {
        "env": episode.env,
        "iteration": episode.iteration,
        "env seed": trajectories[0].env_seed,
        "members": len(members),
        "mean reward": mean,
        "standard deviation": spread,
        "parting": "all members did the same" if part is None else f"they part in turn {part + 1}",
    }
    heads = [_member(site, place, member, mean, chosen=member.name == episode.name) for member in members]
    longest = max((len(t.turns) for t in trajectories), default=0)
    turns = [[t.turns[k] if k < len(t.turns) else None for t in trajectories] for k in range(longest)]
    rows = [_side_by_side(k, of_turn, part) for k, of_turn in enumerate(turns)]
    equal = "All rewards are equal: this group gives no advantage to learn from."
    side = tag("table", tag("thead", tag("tr", tag("th", "turn"), heads)), tag("tbody", rows), class_="group")
    body = join(
        tag("header", tag("h1", f"Group {episode.group}"), facts(told)),
        None if spread else tag("p", equal, class_="hint"),
        tag("div", side, class_="wide"),
    )
    files = site.link(f"{place}/episodes", file=episode.file)
    behind = (episode.file.removesuffix(".jsonl"), files), (f"group {episode.group}", None)
    ways = (
        _neighbour(site, run, "group", members[0], -1),
        _neighbour(site, run, "group", members[-1], 1),
        files,
    )
    return site.page(run, f"Group {episode.group}", body, *behind, ways=ways)


def _member(site: Site, place: str, member: Episode, mean: float, *, chosen: bool) -> Html:
    """The head of a column: who it is, how it ended, its reward and how far from the group's mean."""
    return tag(
        "th",
        anchor(site, f"member {member.member}", f"{place}/episode", name=member.name),
        _ended(member),
        tag(
            "small",
            f"reward {number(member.reward)} ({member.reward - mean:+.3g}), {counted(member.turns, 'turn')}",
        ),
        class_="chosen" if chosen else None,
    )


def _side_by_side(k: int, turns: Sequence[Turn | None], part: int | None) -> Html:
    """One turn of all members: a cell for all until they part, then one each, those marked that differ from most."""
    head = tag("th", str(k + 1), tag("small", "they part here") if k == part else None)
    if part is None or k < part:
        same = tag("small", "the same in all")
        return tag("tr", head, [tag("td", _cell(turns[0]), same, colspan=len(turns), class_="same")])
    usual = Counter(_act(turn)[1] for turn in turns if turn is not None).most_common(1)[0][0]
    cells = [
        tag("td", _cell(t), class_="gone" if t is None else "as-most" if _act(t)[1] == usual else "other")
        for t in turns
    ]
    return tag("tr", head, cells, class_="parting" if k == part else None)


def _neighbour(site: Site, run: Run, kind: str, episode: Episode, step: int) -> str | None:
    """The page of the episode before or behind in the file, or of its group, if there is one."""
    with contextlib.suppress(DataError):  # a row below 0 is no name of an episode
        name = run.index.find(f"{episode.file}:{episode.row + step}").name
        return site.link(f"{site.place(run)}/{kind}", name=name)
    return None


def _cell(turn: Turn | None) -> Html:
    if turn is None:
        return tag("span", "ended")
    saw = tag("pre", turn.observation[:2000], class_="saw")
    did = tag("pre", _marked(turn.response[:2000].strip("\n"), turn.action_is_valid), class_="said")
    paid = tag("small", f"reward {number(turn.reward)}") if turn.reward else None
    return join(saw, did, paid)


def _marked(text: str, valid: bool) -> Html:
    """Text of a model with its action marked."""
    parts: list[Any] = []
    end = 0
    for match in ACTION.finditer(text):
        parts += [
            text[end : match.start()],
            tag("mark", match.group(), class_="valid" if valid else "invalid"),
        ]
        end = match.end()
    return join(*parts, text[end:]) if text else tag("i", "(nothing)")


# --- an episode
def one_episode(site: Site, run: Run, name: str, turn_number: int | None = None) -> Page:
    """An episode turn by turn, with the tokens that the model wrote."""
    episode = run.index.find(name)
    trajectory = run.index.read(episode)
    place = site.place(run)
    members = run.index.group_of(episode)
    mean, _ = _compared(members)
    spell = spelling(run.path)
    known = run.index.advantages(members)
    own = known[members.index(episode)] if known else None
    largest = max((abs(a) for one in known or () for turn in one or () for a in turn), default=0.0)
    # of a training without such a file nobody knows; a held-out episode is never learned from
    used = own is not None if known else None if episode.file.startswith("train-") else False
    strips = [
        strip(call, spell, trained=used or None, advantages=own[k] if own else (), largest=largest)
        for k, call in enumerate(map(trajectory.call_of, trajectory.turns))
    ]
    versus = (
        f"{episode.reward - mean:+.3g} against the mean of its {len(members)} members"
        if len(members) > 1
        else None
    )
    versions = sorted({call.weights_version for call in trajectory.calls})
    told = {
        "env": episode.env,
        "iteration": episode.iteration,
        "env seed": trajectory.env_seed,
        "reward": episode.reward,
        "in its group": versus,
        "turns": episode.turns,
        "tokens": episode.tokens,
        "weights": " to ".join(map(str, dict.fromkeys(versions[:1] + versions[-1:]))) or None,
    }
    broke = f"{episode.status}: {episode.error or 'no cause was recorded'}"
    aside = f"Its group of {len(members)}, side by side"
    head = tag(
        "header",
        tag("h1", "Episode ", episode.name, " ", _ended(episode)),
        facts(told),
        tag("p", broke, class_="error") if episode.status != "ok" else None,
        tag("p", anchor(site, aside, f"{place}/group", class_="button", name=name)) if versus else None,
        command(["shoal", "replay", str(run.path), episode.name]),
        key(largest if known else None) if spell or any(call.logprobs for call in trajectory.calls) else None,
        tag("p", "No update learned from this episode.", class_="hint") if used is False else None,
    )
    turns = [
        _turn(site, run, k, trajectory, spell, turn_number, strips[k]) for k in range(len(trajectory.turns))
    ]
    nothing = tag("p", "This episode has no turns.", class_="empty") if not turns else None
    file = site.link(f"{place}/episodes", file=episode.file)
    behind = (episode.file.removesuffix(".jsonl"), file), (f"episode {episode.row}", None)
    before, after = (_neighbour(site, run, "episode", episode, step) for step in (-1, 1))
    ways = before, after, site.link(f"{place}/group", name=name) or site.link(place)
    return site.page(run, f"Episode {episode.name}", join(head, turns, nothing), *behind, ways=ways)


def key(largest: float | None) -> Html:
    """What the colours of tokens mean.

    Args:
        largest: advantage of the group; None if none are known. With it there are two kinds of colours, and a button.
    """
    chances = ((0, "< 1 %"), (3, "10 %"), (6, "50 %"), (9, "> 90 %"))
    by_chance = [tag("span", text, class_=f"token plain p{k}") for k, text in chances]
    chance = tag("p", "probability of a token when it was sampled: ", by_chance, class_="key-line chance")
    if largest is None:
        return chance
    values = ((0, f"{-largest:.3g}"), (4, "0"), (9, f"{largest:+.3g}"))
    by_worth = [tag("span", text, class_=f"token plain p{k}") for k, text in values]
    worth = tag("p", "advantage of a token: ", by_worth, class_="key-line worth")
    button = tag("button", "colour by advantage or probability", type="button", data_do="colour")
    return join(chance, worth, tag("p", button))


def _turn(
    site: Site, run: Run, k: int, trajectory: Trajectory, spell: Spell | None, chosen: int | None,
    tokens: Html | None,
) -> Html:  # fmt: skip
    turn = trajectory.turns[k]
    ids, cut = trajectory.prompt_ids(turn.call), trajectory.call_of(turn).finish == "length"
    verdict = turn.action if turn.action_is_valid else "no valid action"
    prompt = "".join(spell(ids)) if spell and ids else None
    length = counted(len(ids), "token")
    return tag(
        "article",
        tag(
            "h2",
            tag("a", f"Turn {k + 1}", href=f"#turn-{k + 1}") if site.only is None else f"Turn {k + 1}",
            tag("small", f"reward {number(turn.reward)}"),
            tag("small", "cut at the limit of tokens") if cut else None,
        ),
        _image(site, run, turn.image),
        tag("pre", turn.observation, class_="saw"),
        tag("details", tag("summary", f"prompt of {length}"), tag("pre", prompt))
        if prompt
        else tag("small", f"prompt of {length}"),
        tag("pre", _marked(turn.response.strip("\n"), turn.action_is_valid), class_="said"),
        tokens,
        tag("p", "→ ", tag("b", verdict), class_="did" if turn.action_is_valid else "did invalid"),
        id=f"turn-{k + 1}" if site.only is None else None,
        class_="turn chosen" if chosen == k + 1 else "turn",
    )


def strip(
    call: Call, spell: Spell | None, *, trained: bool | None, advantages: Sequence[float], largest: float
) -> Html | None:
    """The tokens of a response, coloured by their probability or their advantage; both stand in the tip."""
    if not call.response_ids:
        return None
    n = len(call.response_ids)
    pieces = spell(call.response_ids) if spell else [str(i) for i in call.response_ids]
    columns = zip(
        call.response_ids, pieces, call.logprobs or (None,) * n, advantages or (None,) * n, strict=False
    )
    tokens = [token(i, piece, p, trained=trained, advantage=a, largest=largest) for i, piece, p, a in columns]
    return tag("p", tokens, class_="strip")


def token(
    i: int, piece: str, logprob: float | None, *, trained: bool | None = True, advantage: float | None = None,
    largest: float = 0.0,
) -> Html:  # fmt: skip
    """One token: its colour is its probability, or its advantage as a share of the `largest`.

    A line under it says that it was `trained` on; None: nobody knows.
    """
    shown = piece.replace("\n", "⏎").replace(" ", "·") or "∅"
    said = [f"token {i}"]
    shade = "plain"
    if logprob is not None:
        p = math.exp(min(float(logprob), 0.0))
        shade = f"p{max(0, min(9, int(p * 10) if p >= 0.1 else 2 if p >= 0.05 else 1 if p >= 0.01 else 0))}"
        said += [f"log-prob {logprob:.4g}", f"probability {p:.1%}"]
    more = {True: "", False: " masked", None: " unknown"}[trained]
    if advantage is not None:
        said.append(f"advantage {advantage:+.4g}")
        share = advantage / largest if largest else 0.0
        sign = " up" if advantage > 0 else " down" if advantage else ""
        more += f" a{round(4.5 + 4.5 * share)}" if largest else sign
    if trained is not None:
        said.append("trained on" if trained else "not trained on")
    return tag("span", shown, class_=f"token {shade}{more}", title=", ".join(said), tabindex="-1")


def _image(site: Site, run: Run, image: str | None) -> Html | None:
    """The picture of a turn: a data URL of a picture, or a file inside the run."""
    if not image:
        return None
    if re.match(r"data:image/(png|jpeg|gif|webp|bmp);base64,[A-Za-z0-9+/=\s]*\Z", image):
        return tag("img", src=image, alt="what the agent saw", class_="shot")
    try:
        run.file(image, PICTURES)
    except DataError:
        return tag("small", f"picture {image[:200]} is not in the run folder")
    address = site.picture(run, image)
    return (
        tag("img", src=address, alt="what the agent saw", class_="shot", loading="lazy") if address else None
    )


# --- tokens as text, by the tokenizer that lies in the run; without one they are shown by their numbers
def spelling(run: Path) -> Spell | None:
    """How the tokens of a run are written; None if nothing in its folder tells."""
    for folder in _engines(run):
        return _spelling(str(folder), (folder / "engine.json").stat().st_mtime_ns)
    return None


def _engines(run: Path) -> list[Path]:
    """Folders of an engine in a run, those of the newest weights first."""
    places = [run / "engine", *sorted(run.glob("checkpoints/*/engine"), reverse=True)]
    return [place for place in places if (place / "engine.json").is_file()]


@functools.lru_cache(maxsize=16)
def _spelling(folder: str, changed: int) -> Spell | None:
    try:
        described: Any = read_json(Path(folder) / "engine.json")
        if described.get("engine") == "tiny":
            from shoal.rollout.samplers.tokenizers import TinyTokenizer

            return functools.partial(_by_table, TinyTokenizer(described["words"]).tokens)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever lies there, the page is shown, with numbers
        logger.warning("the tokenizer in %s cannot be read (%s); tokens are shown by number", folder, error)
        return None
    return functools.partial(_by_tokenizer, tokenizer, frozenset(tokenizer.get_vocab().values()))


def _by_table(tokens: Sequence[str], ids: Sequence[int]) -> list[str]:
    return [tokens[i] if 0 <= i < len(tokens) else f"#{i}" for i in ids]


def _by_tokenizer(tokenizer: Any, known: Set[int], ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([i], skip_special_tokens=False) if i in known else f"#{i}" for i in ids]
