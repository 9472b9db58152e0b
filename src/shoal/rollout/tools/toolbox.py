"""The tools of a run: opened once, called beside the driver, and recorded so that a run repeats without them.

Functions run in the hosts, where episodes are played. Functions that are `async`, and MCP servers, run here, in one
event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.configuration import check_settings, from_mapping
from shoal.core.data import ToolUse, Trajectory
from shoal.core.errors import ConfigError, DataError
from shoal.core.executors import Closing
from shoal.core.files import append_line, read_json, whole_lines, write_bytes
from shoal.envs.actions import ToolCall
from shoal.envs.catalogue import function_named
from shoal.rollout.tools.chat import MAX_TURNS, ToolChat
from shoal.rollout.tools.functions import NAME, Tool, came_of, function_tool, late
from shoal.rollout.tools.mcp import STOP_SECONDS, McpConfig, McpServer, ToolsFailedError
from shoal.samplers.asking import Loop
from shoal.samplers.sampler import ChatTokenizer

FILE = "tools.json"
"""Of a run folder: what the model was told of its tools."""
RECORD = "tool_uses.jsonl"
"""Of a run folder: what they answered, in all episodes."""
TurnId = tuple[str, int, int, int, int, int, int]
"""Env, iteration, group, member, env seed, version of the weights, and turn."""


@dataclass(frozen=True)
class ToolConfig:
    """One tool, or all of a server: `function`, `mcp` or `recorded`."""

    function: str | None = None
    """A typed Python function, `module:name`."""
    mcp: McpConfig | None = None
    """A server of the Model Context Protocol."""
    recorded: str | None = None
    """A run folder: its tools, whose results come from its record; nothing is called."""
    timeout: float = Tool.timeout
    """Seconds of one call; then the model is told that the tool did not answer."""
    max_chars: int = Tool.max_chars
    """Of a result; the rest is cut."""

    def __post_init__(self) -> None:
        check_settings(self, ["timeout"], max_chars=1)
        if sum(source is not None for source in (self.function, self.mcp, self.recorded)) != 1:
            raise ConfigError(
                "a tool must be module:function, or have one of function, mcp and recorded; got "
                f"{msgspec.to_builtins(self)}"
            )


class Toolbox(Closing):
    """The tools of a run.

    Args:
        items: `ToolConfig`s, mappings of their fields, names of functions (`module:name`), and functions.
        max_turns: responses with calls in an episode, at most.

    Raises:
        ConfigError: a tool that cannot be, or two of one name.
        ToolsFailedError: a server does not start.
    """

    def __init__(self, items: Sequence[Any], max_turns: int = MAX_TURNS) -> None:
        self._max_turns = max_turns
        self.tools: dict[str, Tool] = {}
        self._started: list[McpServer] = []
        self._servers: dict[str, McpServer] = {}  # by the names of their tools
        self._of_episodes: dict[tuple[Any, ...], dict[McpServer, McpServer]] = {}  # in the place of those
        self._answers: dict[TurnId, tuple[ToolUse, ...]] | None = None
        self._record: Path | None = None
        self._loop = Loop("shoal-tools") if items else None
        try:
            for item in items:
                self._add(item)
        except BaseException:
            self.close()
            raise

    def _add(self, item: Any) -> None:
        config = None if callable(item) else _config_of(item)
        found = [function_tool(item)] if config is None else self._found(config)
        for tool in found:
            if not NAME.match(tool.name):
                raise ConfigError(f"the name of a tool must match {NAME.pattern}, got {tool.name!r:.80}")
            if tool.name in self.tools:
                raise ConfigError(f"there are two tools named {tool.name!r}: rename one, or set mcp.names")
            self.tools[tool.name] = tool
        if self._answers is not None and len(self.tools) > len(found):
            raise ConfigError("recorded: it must be the only entry of tools, since a record has all results")

    def _found(self, config: ToolConfig) -> list[Tool]:
        if config.function is not None:
            function = function_named(config.function, "the tool")
            return [function_tool(function, config.timeout, config.max_chars)]
        if config.recorded is not None:
            self._answers = _answers_of(Path(config.recorded))
            return recorded_tools(Path(config.recorded))
        assert config.mcp is not None
        assert self._loop is not None
        server = McpServer(config.mcp)
        self._started.append(server)
        listed = self._loop.run(server.tools())
        self._servers |= dict.fromkeys((name for name, _, _ in listed), server)
        return [Tool(name, text, schema, config.timeout, config.max_chars) for name, text, schema in listed]

    def chat(self, tokenizer: ChatTokenizer) -> ToolChat | None:
        """How a model with this tokenizer is shown these tools; None where there are none."""
        return ToolChat(tokenizer, list(self.tools.values()), self._max_turns) if self.tools else None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told of them."""
        return [tool.schema for tool in self.tools.values()]

    def keep(self, folder: Path) -> None:
        """Write down in a run folder what the model is told of them, and from now on what they answer."""
        if self.tools:
            write_bytes(folder / FILE, msgspec.json.format(msgspec.json.encode(self.schemas)) + b"\n")
            self._record = folder / RECORD

    def record(self, episode: Trajectory) -> None:
        """Write down what tools answered in an episode that has ended."""
        if self._record is None:
            return
        place = episode.env, episode.iteration, episode.group, episode.member, episode.env_seed
        for number, turn in enumerate(episode.turns):
            if turn.tools:
                answered = (*place, episode.call_of(turn).weights_version, number), turn.tools
                append_line(self._record, msgspec.json.encode(answered) + b"\n")

    # --- calls
    async def use(self, calls: Sequence[ToolCall], place: TurnId) -> tuple[ToolUse, ...]:
        """What came of the calls that hosts do not make, all at once, in their order; from any event loop.

        Raises:
            ToolsFailedError: a server is gone, or the record has other calls.
        """
        if self._answers is not None:
            return _recorded(self._answers.get(place, ()), calls, place)
        return tuple(await asyncio.gather(*(self._use(call, place) for call in calls)))

    def end(self, place: TurnId) -> None:
        """End the servers that an episode had for itself, in the background."""
        for server in self._of_episodes.pop(_episode(place), {}).values():
            if self._loop is not None:
                self._loop.submit(self._stop(server))

    async def _stop(self, server: McpServer) -> None:
        with contextlib.suppress(Exception):
            await server.stop()
        self._started.remove(server)

    def _server(self, name: str, place: TurnId) -> McpServer | None:
        """The server that a tool is of, for this episode; None of a function."""
        server = self._servers.get(name)
        if server is None or server.config.scope == "run":
            return server
        own = self._of_episodes.setdefault(_episode(place), {})
        if server not in own:
            own[server] = McpServer(server.config)
            self._started.append(own[server])
        return own[server]

    async def _use(self, call: ToolCall, place: TurnId) -> ToolUse:
        assert self._loop is not None
        tool, server = self.tools[call.name], self._server(call.name, place)
        if server is None:
            running = self._loop.submit(_called(tool, call))
            await asyncio.wait([asyncio.wrap_future(running)], timeout=tool.timeout)
            return came_of(tool, call, running)
        try:
            said, is_error = await self._loop.within(server.call(call.name, call.arguments, tool.timeout))
        except TimeoutError:
            return late(tool, call)
        text = tool.result(said)
        return ToolUse(call.name, call.arguments, *(("", text) if is_error else (text,)))

    def close(self) -> None:
        """End the servers and the event loop; may be called twice."""
        loop, self._loop = self._loop, None
        if loop is not None:
            for server in list(self._started):
                with contextlib.suppress(Exception):
                    loop.run(server.stop(), 3 * STOP_SECONDS)
            loop.close()


def _episode(place: TurnId) -> tuple[Any, ...]:
    """The episode of a turn, whatever version of the weights plays it."""
    return place[:5]


async def _called(tool: Tool, call: ToolCall) -> str:
    function: Any = tool.function
    return tool.result(await function(**tool.converted(call.arguments)))


def _config_of(item: Any) -> ToolConfig:
    if isinstance(item, ToolConfig):
        return item
    return ToolConfig(item) if isinstance(item, str) else from_mapping(ToolConfig, item, "tools.")


# --- records
def recorded_tools(run: Path) -> list[Tool]:
    """The tools of a run as it wrote them down; none where it had none."""
    if not (run / FILE).exists():
        return []
    try:
        return [Tool(**schema) for schema in read_json(run / FILE)]
    except TypeError as error:
        raise DataError(f"{run / FILE} does not describe tools: {error}") from error


def _answers_of(run: Path) -> dict[TurnId, tuple[ToolUse, ...]]:
    if not (run / RECORD).exists():
        raise ConfigError(f"recorded: {run} has no {RECORD}: no tool was called in it")
    return dict(whole_lines(run / RECORD, tuple[TurnId, tuple[ToolUse, ...]]))


def _recorded(uses: Sequence[ToolUse], calls: Sequence[ToolCall], place: TurnId) -> tuple[ToolUse, ...]:
    """The recorded results of these calls, which are in the order of the recorded ones."""
    left, found = iter(uses), list[ToolUse]()
    for call in calls:
        same = (use for use in left if (use.name, use.arguments) == (call.name, call.arguments))
        if (use := next(same, None)) is None:
            raise ToolsFailedError(
                f"the record has no result of {call.name} in turn {place[-1] + 1} of this episode, which went on "
                f"otherwise then"
            )
        found.append(use)
    return tuple(found)
