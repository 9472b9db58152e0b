"""Projection functions for a batch of responses, by kind of env: thin over the envs' own projections."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.envs.actions import Projected, Projection, Style
from shoal.envs.catalogue import env_class

ActionSpace = Mapping[str, int | str] | Sequence[str] | None
"""What one env accepts now: words with their actions, a list of words, or None for all."""

ProjectionFunction = Callable[..., tuple[list[Any], list[bool]]]

GENERIC = Projection(parse=lambda text: text or None, invalid="")
"""Any text that is not empty, for envs that read free text."""


def create_projection_function(
    env_type: str,
    *,
    lenient: bool | Style = False,
    separator: str | None = None,
    max_actions: int = 1,
    tags: Sequence[str] = ("action", "answer"),
) -> ProjectionFunction:
    """A function from responses to actions and whether each response held a usable one.

    Args:
        env_type: a registered env (sokoban, frozen_lake, bandit, countdown, metamathqa, webshop, …) or
            "generic" for free text.
        lenient: imitate older projects: "verl-agent", "ragen", or True for whichever fits a response.
        separator: what parts several actions in a response; then an element of `actions` is a list.
        max_actions: how many actions a response may hold.
        tags: names of the tags that may hold an action.

    Returns:
        `function(text_actions, action_spaces=None) -> (actions, valids)`. A response without a usable action
        gives the env's "nothing" (0 or "") and False.

    >>> function = create_projection_function("sokoban")
    >>> function(["<action>up</action>", "<action>down</action>", "left"])
    ([1, 2, 0], [True, True, False])
    """
    if max_actions < 1 or separator == "" or (max_actions > 1 and separator is None):
        raise ValueError(
            f"max_actions must be at least 1, and more than one need a separator, got {max_actions} and {separator!r}"
        )
    base = GENERIC if env_type == "generic" else env_class(env_type).projection
    style: Style = lenient if isinstance(lenient, str) else "lenient" if lenient else "strict"
    projection = replace(base, style=style, separator=separator, max_actions=max_actions, tags=tuple(tags))

    def project(
        text_actions: Sequence[str], action_spaces: Sequence[ActionSpace] | None = None
    ) -> tuple[list[Any], list[bool]]:
        if action_spaces is not None and len(action_spaces) != len(text_actions):
            raise ValueError(
                f"action_spaces must have one entry per response, got {len(action_spaces)} "
                f"for {len(text_actions)} responses"
            )
        actions: list[Any] = []
        valids: list[bool] = []
        for number, text in enumerate(text_actions):
            space = None if action_spaces is None else action_spaces[number]
            projected = _within(projection, text, space)
            actions.append(list(projected.actions) if separator is not None else projected.actions[0])
            valids.append(projected.valid)
        return actions, valids

    return project


def _within(projection: Projection, text: str, space: ActionSpace) -> Projected:
    """The actions of a response, as far as the env accepts them now."""
    if isinstance(space, Mapping):
        return replace(projection, lookup=space, parse=None)(text)
    projected = projection(text)
    if space is None or not projected.valid:
        return projected
    fixed = {projection.action_of(word) for word in space if "<" not in word}
    patterns = tuple(word[: word.index("<")].lower() for word in space if "<" in word)
    for action in projected.actions:
        if action not in fixed and not (isinstance(action, str) and action.lower().startswith(patterns)):
            return projection.nothing
    return projected


def takes_two(function: Callable[..., Any]) -> bool:
    """Whether a projection function takes the action spaces too."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in kinds for p in parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def as_actions(action: Any) -> list[Any]:
    """The actions of one response: one, or several where a projection allows it."""
    return list(action) if isinstance(action, list | tuple) else [action]
