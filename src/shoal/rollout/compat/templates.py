"""Prompt templates by kind of env: data, each setting of which can be replaced in YAML (`custom_envs.<tag>.prompt`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.configuration import from_mapping
from shoal.rollout.prompts import PromptConfig

_MOVE = "Think first, then give one move as <action>move</action>. The moves are: {actions}."
_ANSWER = "Reason as long as you need, then give the final answer as <answer>answer</answer>."

TEMPLATES: dict[str, dict[str, str]] = {
    "sokoban": {
        "first": "{instructions}\n\nThe room:\n{observation}\n\n" + _MOVE,
        "later": "{instructions}\n\nYour last moves:\n{history}\n\nThe room now, after {step} of {max_turns} "
        "moves:\n{observation}\n\n" + _MOVE,
        "turn": "{step}. In\n{observation}\nyou chose {action}.",
    },
    "frozen_lake": {
        "first": "{instructions}\n\nThe lake:\n{observation}\n\n" + _MOVE,
        "later": "{instructions}\n\nYour last moves:\n{history}\n\nThe lake now, after {step} of {max_turns} "
        "moves:\n{observation}\n\n" + _MOVE,
        "turn": "{step}. On\n{observation}\nyou chose {action}.",
    },
    "bandit": {
        "first": "{instructions}\n\n{observation}\n\nChoose with <action>number</action>; numbers: {actions}.",
        "later": "{instructions}\n\n{history}\n\n{observation}\n\nChoose with <action>number</action>; "
        "numbers: {actions}.",
        "turn": "Pull {step}: {action}, paid {reward}.",
    },
    "countdown": {
        "first": "{instructions}\n\n{observation}\n\n" + _ANSWER,
        "later": "{instructions}\n\nSo far:\n{history}\n\n{observation}\n\n" + _ANSWER,
        "turn": "Try {step}: {action}",
    },
    "metamathqa": {
        "first": "{instructions}\n\n{observation}\n\n" + _ANSWER,
        "later": "{instructions}\n\nSo far:\n{history}\n\n{observation}\n\n" + _ANSWER,
        "turn": "Try {step}: {action}",
    },
    "webshop": {
        "first": "{instructions}\n\nThe page:\n{observation}\n\nYou can do: {actions}\n\n"
        "Think first, then give one of them as <action>…</action>.",
        "later": "{instructions}\n\nYou have done {step} steps, the last of them:\n{history}\n\nThe page now:\n"
        "{observation}\n\nYou can do: {actions}\n\nThink first, then give one of them as <action>…</action>.",
        "turn": "{step}. On the page\n{observation}\nyou did {action}.",
    },
}


def template_of(env_type: str | None, settings: Mapping[str, Any] | None = None) -> PromptConfig:
    """The prompts of a kind of env (a general one for kinds without their own), with `settings` replaced.

    >>> template_of("sokoban", {"history": 5}).history
    5
    """
    return from_mapping(PromptConfig, {**TEMPLATES.get(env_type or "", {}), **(settings or {})}, "prompt.")
