"""The page of an episode: turn by turn, token by token, with the tree of its calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.data import ENDINGS, Call, Trajectory, Turn
from shoal.core.errors import DataError
from shoal.core.files import read_json
from shoal.envs.pictures import THEMES, picture_of
from shoal.rollout.images import picture_url
from shoal.viewer.episode_lists import ended, steps, within_list
from shoal.viewer.index import Episode
from shoal.viewer.markup import ACTION, Html, counted, fold, join, number, tag
from shoal.viewer.pages import Page, Site, anchor, command, facts
from shoal.viewer.runs import PICTURES, Run

logger = logging.getLogger(__name__)
Spell = Callable[[Sequence[int]], list[str]]
"""Token ids to the text of each."""
LONG = 4
"""Turns from which an episode has an outline and a player."""
_MESSAGE = re.compile(
    r"<\|?(?:im_start|start_header_id|start_of_turn)\|?>(\w+)(?:<\|end_header_id\|>)?\s*"
    r"(.*?)(?:<\|?(?:im_end|eot_id|end_of_turn)\|?>\s*|\Z)",
    re.DOTALL,
)
"""A message in the marks of ChatML (Qwen, SmolLM), Llama 3 or Gemma."""
_TOOL = re.compile(r"<(tool_call|tool_response)>\s*(.*?)\s*</\1>", re.DOTALL)
_CALL = 2000
"""Letters of a prompt that the tree of calls shows."""


def one_episode(site: Site, run: Run, query: Mapping[str, str]) -> Page:
    """An episode turn by turn, with the tokens that the model wrote."""
    name, turn_number = query.get("name", ""), query.get("turn")
    episode = run.index.find(name)
    trajectory = run.index.read(episode)
    place = site.place(run)
    members = run.index.group_of(episode)
    mean, _ = compared(members)
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
    versus = None
    if len(members) > 1:
        versus = f"{episode.reward - mean:+.3g} against the mean of its {len(members)} members"
    versions = sorted({call.weights_version for call in trajectory.calls})
    told = {
        "env": episode.env,
        "iteration": episode.iteration,
        "env seed": str(trajectory.env_seed),
        "reward": episode.reward,
        "in its group": versus,
        "turns": episode.turns,
        "tokens": episode.tokens,
        "ended": ENDINGS[trajectory.ended] if trajectory.ended else None,
        "weights": " to ".join(map(str, dict.fromkeys(versions[:1] + versions[-1:]))) or None,
    }
    why = "the program failed" if trajectory.program_failed else episode.status
    broke = f"{why}: {episode.error or 'no cause was recorded'}"
    aside = f"Its group of {len(members)}, side by side"
    beside = anchor(site, aside, f"{place}/group", class_="button", name=name, **within_list(site, query))
    has_colours = trajectory.turns and (spell or any(call.logprobs for call in trajectory.calls))
    buttons = beside if versus else None, COLOURS if has_colours and largest else None
    arrows, ways = steps(site, run, "episode", episode, query, *buttons)
    turns = [
        _turn(site, run, k, trajectory, spell, turn_number, strips[k]) for k in range(len(trajectory.turns))
    ]
    requests = trajectory.requests.lines() if trajectory.requests else []
    head = tag(
        "header",
        tag("h1", "Episode ", episode.name, " ", ended(episode)),
        facts(told),
        tag("p", broke, class_="error") if episode.status != "ok" or episode.error else None,
        [tag("p", line, class_="hint") for line in requests],
        command(["shoal", "replay", str(run.path), episode.name]),
        key(largest if known else None) if has_colours else None,
        tag("p", "No update learned from this episode.", class_="hint") if used is False else None,
        _overview(site, trajectory.turns) if len(turns) >= LONG else None,
        scores(trajectory),
        call_tree(trajectory, spell),
    )
    nothing = tag("p", "This episode has no turns.", class_="empty") if not turns else None
    if trajectory.last:
        why_ended = tag("small", f": {ENDINGS[trajectory.ended]}") if trajectory.ended else None
        shown = drawing(trajectory.last), tag("pre", readable(trajectory.last), class_="saw")
        turns.append(
            tag(
                "article",
                tag("h2", "At its end", why_ended),
                tag("div", shown, class_="turn-body"),
                class_="end",
            )
        )
    file = site.link(f"{place}/episodes", file=episode.file)
    behind = (episode.file.removesuffix(".jsonl"), file), (f"episode {episode.row}", None)
    return site.page(run, f"Episode {episode.name}", join(arrows, head, turns, nothing), *behind, ways=ways)


def compared(members: Sequence[Episode]) -> tuple[float, float]:
    """Mean and standard deviation of the rewards that an update compares: those of whole episodes, if there are any."""
    rewards = [m.reward for m in members if m.status == "ok"] or [m.reward for m in members]
    return statistics.fmean(rewards), statistics.pstdev(rewards)


_BY = [tag("b", kind, class_=f"by-{kind}") for kind in ("probability", "advantage")]
COLOURS = tag("button", "colours show the ", _BY, type="button", data_do="colour", title="change it (a)")


def key(largest: float | None) -> Html:
    """What the colours of tokens mean.

    Args:
        largest: advantage of the group; None if none are known. Above 0 there are two kinds of colours, and a button.
    """
    chances = ((0, "< 1 %"), (3, "10 %"), (6, "50 %"), (9, "> 90 %"))
    by_chance = [tag("span", text, class_=f"token plain p{k}") for k, text in chances]
    chance = tag("p", "probability of a token when it was sampled: ", by_chance, class_="key-line chance")
    if largest is None:
        return chance
    if not largest:
        equal = "Its group has no difference: every advantage is 0, so no token has a colour for it."
        return join(chance, tag("p", equal, class_="hint"))
    values = ((0, f"{-largest:.3g}"), (4, "0"), (9, f"{largest:+.3g}"))
    by_worth = [tag("span", text, class_=f"token plain p{k}") for k, text in values]
    worth = tag("p", "advantage of a token: ", by_worth, class_="key-line worth")
    return join(chance, worth)


def _overview(site: Site, turns: Sequence[Turn]) -> Html:
    """Of a long episode: a player, buttons that fold, and a line of links to the turns."""
    links = []
    for k, turn in enumerate(turns):
        did = (turn.action or "")[:20] if turn.action_is_valid else "✗"
        paid = f" {turn.reward:+.3g}" if turn.reward else ""
        links.append(tag("a", f"{k + 1} {did}{paid}", href=f"#turn-{k + 1}", class_="chip"))
    slider = tag("input", type="range", min=1, max=len(turns), value=1, aria_label="turn that is shown")
    player = tag(
        "div",
        tag("button", "▶ play", type="button", data_do="play"),
        slider,
        tag("output", f"turn 1 of {len(turns)}"),
        tag("div", class_="stage"),
        class_="player",
    )
    buttons = [
        tag("button", "fold or open all turns", type="button", data_do="fold", title="f"),
        tag("button", "short turns", type="button", data_do="compact", title="v", aria_pressed="false"),
    ]
    outline = tag("nav", links, class_="chips outline", aria_label="turns") if site.only is None else None
    return join(player, tag("p", buttons, class_="chips folds"), outline)


def _turn(
    site: Site, run: Run, k: int, trajectory: Trajectory, spell: Spell | None, chosen: str | None,
    tokens: Html | None,
) -> Html:  # fmt: skip
    turn = trajectory.turns[k]
    call, ids = trajectory.call_of(turn), trajectory.prompt_ids(turn.call)
    # of a prompt that goes on from the turn before its own part is shown, so that a page grows as its record does
    goes_on = k > 0 and call.parent == trajectory.turns[k - 1].call
    new = call.new_prompt_ids if goes_on else ids
    verdict = turn.action if turn.action_is_valid else "no valid action"
    prompt = "".join(spell(new)) if spell and new else None
    length = f"prompt of {counted(len(ids), 'token')}" + (f", {len(new):,} after turn {k}" if goes_on else "")
    short = tag("small", length, class_="prompt")
    drawn = _image(site, run, turn.image) or drawing(turn.observation)
    saw = tag("pre", readable(turn.observation), class_="saw")
    # what the answer says in its mark, or is, only the player shows again
    above = turn.action_is_valid and f">{turn.action}<" in f">{turn.response}<"
    words = "did" if turn.action_is_valid else "did invalid"
    did = tag("p", "→ ", tag("b", verdict), class_=words, hidden=above)
    head = tag(
        "summary",
        tag(
            "h2",
            f"Turn {k + 1} ",
            tag("small", f"→ {verdict}", class_="folded"),
            tag("small", f"reward {number(turn.reward)}"),
            tag("small", "cut at the limit of tokens")
            if call.finish == "length" and not turn.action_is_valid
            else None,
        ),
    )
    said = tag(
        "div",
        fold(length, chat(prompt), class_="prompt") if prompt else short,
        tag("pre", marked(turn.response.strip("\n"), turn.action_is_valid), class_="said"),
        tokens,
        did,
        _tools(turn),
    )
    return tag(
        "article",
        tag("details", head, tag("div", tag("div", drawn, saw), said, class_="turn-body"), open=True),
        id=f"turn-{k + 1}" if site.only is None else None,
        class_="turn chosen" if chosen == str(k + 1) else "turn",
    )


def _tools(turn: Turn) -> list[Html]:
    """The tools that a turn called, with what the model was shown of each."""
    found = []
    for use in turn.tools:
        style = "tool" if use.error is None else "tool failed"
        words = (tag("b", use.name), " ", _indented(use.arguments), "\n", use.shown)
        found.append(tag("pre", words, class_=style))
    return found


def scores(trajectory: Trajectory) -> Html | None:
    """What each of the run's rewards says of the episode, and what a judge was asked and answered."""
    parts: list[Html] = []
    for score in trajectory.scores:
        parts.append(tag("p", tag("b", score.name), f" {number(score.value)}, weight {number(score.weight)}"))
        asked = (("asked", score.prompt), ("answered", score.answer))
        parts += [tag("pre", tag("b", f"{word}\n"), text) for word, text in asked if text]
    total = f"{counted(len(trajectory.scores), 'reward')} judged it"
    return fold(total, parts) if parts else None


def _indented(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False, default=str)


@functools.lru_cache(maxsize=256)
def drawing(observation: str) -> Html | None:
    """The picture of an observation that is a lake or a room in the symbols of shoal's own envs; None for others."""
    lines = observation.split("\n")
    if not (2 <= len(lines) <= 40 and 2 <= len(lines[0]) <= 40 and len({*map(len, lines)}) == 1):
        return None
    theme = "sokoban" if "#" in observation else "frozen_lake"
    player = "PS" if theme == "sokoban" else "PX√"
    if set("".join(lines)) - THEMES[theme].keys() or sum(map(observation.count, player)) != 1:
        return None
    url = picture_url(picture_of(observation, theme))
    return tag("img", src=url, alt="the observation below, drawn", class_="shot drawn")


def readable(text: str) -> Html:
    """Text with its tool calls and their results set apart, JSON in them indented."""
    parts: list[Any] = []
    end = 0
    for match in _TOOL.finditer(text):
        inside = match[2]
        with contextlib.suppress(ValueError, RecursionError):
            inside = _indented(json.loads(inside))
        said = tag("b", match[1].replace("_", " ")), "\n", inside
        parts += [text[end : match.start()], tag("span", *said, class_="tool")]
        end = match.end()
    return join(*parts, text[end:])


def chat(prompt: str) -> Html:
    """A prompt as its messages by role, that of the system folded; what is in no message as it stands."""
    parts: list[Html] = []
    end = 0
    for match in _MESSAGE.finditer(prompt):
        role, said = match[1], tag("div", readable(match[2]), class_="text")
        parts.append(
            tag("pre", prompt[end : match.start()]) if prompt[end : match.start()].strip() else join()
        )
        shown = fold(role, said) if role == "system" else (tag("b", role), said)
        kind = role if role in ("system", "user", "assistant") else "other"
        parts.append(tag("div", shown, class_=f"message {kind}"))
        end = match.end()
    return join(*parts, tag("pre", prompt[end:]) if prompt[end:].strip() else None)


def marked(text: str, valid: bool) -> Html:
    """Text of a model with its action marked."""
    parts: list[Any] = []
    end = 0
    for match in ACTION.finditer(text):
        parts += [
            readable(text[end : match.start()]),
            tag("mark", match.group(), class_="valid" if valid else "invalid"),
        ]
        end = match.end()
    return join(*parts, readable(text[end:])) if text else tag("i", "(nothing)")


# --- the calls
def call_tree(trajectory: Trajectory, spell: Spell | None) -> Html | None:
    """The calls as a tree, with the new part of each prompt and the answer; None where they are one turn after another.

    A call that goes on from another stands below it; a second one that does is a branch.
    """
    calls = trajectory.calls
    goes_on: dict[int | None, list[int]] = {}
    for one, call in enumerate(calls):
        goes_on.setdefault(call.parent, []).append(one)
    roots = goes_on.get(None, [])
    branches = sum(len(behind) > 1 for parent, behind in goes_on.items() if parent is not None)
    of_turn = {turn.call: k for k, turn in enumerate(trajectory.turns)}
    plain = len(roots) == 1 or len(roots) == len(calls)  # one chain, or prompts that each begin anew
    if len(of_turn) == len(calls) and plain and not branches:
        return None
    lines = []
    todo = [(one, 0) for one in reversed(roots)]
    while todo:
        one, depth = todo.pop()  # a chain stays at its depth, a branch of it stands one in
        call, behind = calls[one], goes_on.get(one, [])
        todo += [(k, depth + (k != behind[0])) for k in reversed(behind)]
        begins = None
        if goes_on[call.parent][0] != one:
            begins = "begins anew" if call.parent is None else f"branch of call {call.parent + 1}"
        turn = f"turn {of_turn[one] + 1}" if one in of_turn else "in no turn"
        sizes = f"{counted(len(call.new_prompt_ids), 'new token')}, {counted(len(call.response_ids), 'token')} answered"
        title = f"call {one + 1} ", tag("small", ", ".join(filter(None, (turn, begins, sizes))))
        texts = []
        if spell:
            for style, ids in (("saw", call.new_prompt_ids[:_CALL]), ("said", call.response_ids)):
                texts.append(tag("pre", readable("".join(spell(ids))), class_=style))
        lines.append(tag("li", fold(title, texts), class_=f"depth-{min(depth, 6)}"))
    kinds = f"{counted(len(roots), 'prompt')} from the start, branches at {counted(branches, 'call')}"
    said = f"{counted(len(calls), 'call')}: {kinds}"
    return fold(said, tag("ol", lines, class_="calls"), class_="call-tree")


# --- tokens
def strip(
    call: Call, spell: Spell | None, *, trained: bool | None, advantages: Sequence[float], largest: float
) -> Html | None:
    """The tokens of a response, coloured by their probability or their advantage; both stand in the tip."""
    if not call.response_ids:
        return None
    pieces = spell(call.response_ids) if spell else [str(i) for i in call.response_ids]
    columns = itertools.zip_longest(call.response_ids, pieces, call.logprobs or (), advantages)
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
    if (address := site.picture(run, image)) is None:
        return None
    return tag("img", src=address, alt="what the agent saw", class_="shot", loading="lazy")


# --- tokens as text, by the tokenizer that lies in the run; without one they are shown by their numbers
def spelling(run: Path) -> Spell | None:
    """How the tokens of a run are written, by its newest engine; None if nothing in its folder tells."""
    for place in (run / "engine", *sorted(run.glob("checkpoints/*/engine"), reverse=True)):
        if (file := place / "engine.json").is_file():
            return _spelling(str(place), file.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=16)
def _spelling(folder: str, changed: int) -> Spell | None:
    try:
        described: Any = read_json(Path(folder) / "engine.json")
        if described.get("engine") == "tiny":
            from shoal.samplers.tokenizers import TinyTokenizer

            tokens = TinyTokenizer(described["words"]).tokens
            return lambda ids: [tokens[i] if 0 <= i < len(tokens) else f"#{i}" for i in ids]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever lies there, the page is shown, with numbers
        logger.warning("the tokenizer in %s cannot be read (%s); tokens are shown by number", folder, error)
        return None
    known = frozenset(tokenizer.get_vocab().values())
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return lambda ids: [decode([i]) if i in known else f"#{i}" for i in ids]
