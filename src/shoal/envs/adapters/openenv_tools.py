"""The tools of an OpenEnv server (`MCPEnvironment`) as actions: its steps are `list_tools` and `call_tool`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.data import ToolUse
from shoal.core.errors import EnvError
from shoal.envs.actions import ToolCall
from shoal.envs.adapters.library import OthersToolEnv
from shoal.envs.adapters.openenv import OnServer, OnServerConfig
from shoal.envs.text import Outcome
from shoal.envs.tools import tools_of


@dataclass(frozen=True)
class OpenEnvToolsConfig(OnServerConfig):
    """Settings of `OpenEnvToolEnv`."""

    instructions: str = ""
    """What the model is told to do, where the server's resets do not say it."""
    observation_field: str = "text"
    """Field of the server's reset to show. Without it the whole observation is shown as JSON, if it has any field."""
    success_reward: float = 1.0
    """Reward on the last call from which an episode counts as a success."""
    max_steps: int = 20
    """Steps after which an episode is truncated."""
    invalid_penalty: float = 0.0
    """Reward of a step in which no call could be made."""


class OpenEnvToolEnv(OnServer[OpenEnvToolsConfig], OthersToolEnv[OpenEnvToolsConfig]):
    """The tools of an env on an OpenEnv server.

    Each call is a step of the server, one after the other; those behind the end of the episode are not made. The reward
    of a step here is the sum of theirs.
    """

    Config = OpenEnvToolsConfig
    seed_stream = "OpenEnvToolEnv"

    def __init__(self, config: OpenEnvToolsConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.instructions = self.config.instructions or self.instructions

    def _start(self, rng: np.random.Generator) -> None:
        seen, _, _ = self._ask("reset", {"seed": self._seed})
        shown = seen.get(self.config.observation_field)
        written = json.dumps(seen, sort_keys=True, ensure_ascii=False) if seen else ""
        self._told = shown if isinstance(shown, str) else written
        listed, _, _ = self._ask("step", {"type": "list_tools"})
        self._listed = tools_of({"tools": [_described(tool) for tool in _list_of(listed.get("tools"))]})

    def _use(self, calls: Sequence[ToolCall]) -> Sequence[ToolUse]:
        paid, done, last = 0.0, False, 0.0
        uses = []
        for call in calls:
            if done:
                error = "the episode was over before this call"
                uses.append(ToolUse(call.name, call.arguments, error=error))
                continue
            asked = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            seen, last, done = self._ask("step", asked)
            paid += last
            uses.append(self._used(call, seen))
        self._step_outcome = Outcome(paid, done, done and last >= self.config.success_reward)
        return uses

    def _used(self, call: ToolCall, seen: dict[str, Any]) -> ToolUse:
        result, error = seen.get("result"), seen.get("error")
        said = self._tools[call.name].result(_said(result))
        if error is not None:
            text = str(error.get("message", error) if isinstance(error, dict) else error)
            return ToolUse(call.name, call.arguments, error=text)
        if isinstance(result, dict) and result.get("is_error") is True:
            return ToolUse(call.name, call.arguments, error=said)
        return ToolUse(call.name, call.arguments, said)


def _list_of(tools: Any) -> list[Any]:
    if not isinstance(tools, list) or not tools:
        raise EnvError(f"the server must list tools in answer to list_tools, got {tools!r:.80}")
    return tools


def _described(tool: Any) -> Any:
    """A tool of MCP, as an env of shoal describes it."""
    if not isinstance(tool, dict):
        return tool
    described = {"description": tool.get("description") or "", "parameters": tool.get("input_schema") or {}}
    return {"name": tool.get("name"), **described}


def _said(result: Any) -> Any:
    """The texts of a result of MCP; what is none, as it is."""
    parts = result.get("content") if isinstance(result, dict) else None
    found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    texts = [text for text in found if isinstance(text, str)]
    return "\n".join(texts) if texts and len(texts) == len(found) else result
