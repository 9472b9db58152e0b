"""Typed Python functions as tools of an episode: called where it is played, each within its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from shoal.core.data import ToolUse
from shoal.core.errors import format_error
from shoal.core.executors import in_own_thread
from shoal.envs.actions import ToolCall
from shoal.envs.tools import Tool


def run_functions(
    tools: Mapping[str, Tool], calls: Sequence[ToolCall]
) -> tuple[list[ToolUse | None], tuple[ToolCall, ...]]:
    """What came of calls, one after the other; None of those that run beside the driver, and these calls."""
    uses: list[ToolUse | None] = []
    for call in calls:
        if call.error is not None:
            uses.append(ToolUse(call.name, call.arguments, error=call.error))
        else:
            uses.append(_run(tools[call.name], call) if tools[call.name].in_hosts else None)
    return uses, tuple(call for call, use in zip(calls, uses, strict=True) if use is None)


def _run(tool: Tool, call: ToolCall) -> ToolUse:
    function: Any = tool.function
    running = in_own_thread(lambda: tool.result(function(**tool.converted(call.arguments))), "shoal-tool")
    wait([running], tool.timeout)
    return came_of(tool, call, running)


def came_of(tool: Tool, call: ToolCall, running: Future[str]) -> ToolUse:
    """What came of a call that has ended, or has taken too long."""
    if not running.done():
        running.cancel()
        return late(tool, call)
    if (error := running.exception()) is not None:
        return ToolUse(call.name, call.arguments, error=format_error(error)[:500])
    return ToolUse(call.name, call.arguments, running.result())


def late(tool: Tool, call: ToolCall) -> ToolUse:
    """A call that has taken too long."""
    error = f"{tool.name} did not answer within {tool.timeout:g} s"
    return ToolUse(call.name, call.arguments, error=error)


def filled(uses: Sequence[ToolUse | None], rest: Sequence[ToolUse]) -> list[ToolUse]:
    """The results with the rest of them in the places of None, in order."""
    others = iter(rest)
    return [next(others) if use is None else use for use in uses]
