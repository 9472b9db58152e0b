"""A policy that knows the product: for demonstrations, and to prove that goals can be met."""

from __future__ import annotations

from shoal.envs.webshop.catalogue import search
from shoal.envs.webshop.env import WebShopEnv
from shoal.envs.webshop.goals import Goal
from shoal.envs.webshop.pages import BACK, NEXT, PREVIOUS


def expert_action(env: WebShopEnv) -> str:
    """What somebody who knows the product would do next; the policy scores 1 on every goal it can.

    It searches for the instruction, then for the title, turns pages until it sees the product, chooses the
    options and buys.
    """
    place, goal = env.place, env.goal
    size = env.config.page_size
    if place.page == "search":
        found = search(env.catalogue, goal.instruction.lower(), env.config.max_results)
        words = goal.instruction if goal.asin in found[: 3 * size] else goal.name
        return f"search[{words.replace('[', ' ').replace(']', ' ').lower()[:1000]}]"
    if place.page == "results":
        if goal.asin not in place.found:
            return f"click[{BACK.lower()}]"
        page = place.found.index(goal.asin) // size + 1
        if page == place.number:
            return f"click[{goal.asin.lower()}]"
        return f"click[{(NEXT if page > place.number else PREVIOUS).lower()}]"
    if place.page != "item" or place.asin != goal.asin:
        return f"click[{PREVIOUS.lower()}]"
    chosen = set(place.options.values())
    for value in _wanted(env, goal):
        if value not in chosen:
            return f"click[{value}]"
    return "click[buy now]"


def _wanted(env: WebShopEnv, goal: Goal) -> list[str]:
    """The values to click: those wanted, where the product has them."""
    values = goal.options.values() if not isinstance(goal.options, tuple) else goal.options
    offered = {value for of_option in env.catalogue[goal.asin].options.values() for value in of_option}
    return [value for value in values if value in offered]
