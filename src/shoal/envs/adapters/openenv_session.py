"""One env in the words of the OpenEnv convention."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from shoal.envs.text import TextEnv

Make = Callable[[], TextEnv[Any]]


class Session:
    """One env and where it stands, in the words of the protocol."""

    def __init__(self, make: Make) -> None:
        self.env = make()
        self.steps = 0
        self._lock = asyncio.Lock()

    async def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The answer to a reset or step; the env runs in a thread, one call at a time."""
        async with self._lock:
            return await asyncio.to_thread(self.reset if kind == "reset" else self.step, data)

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Start an episode, from `data["seed"]` if there is one."""
        seed = data.get("seed")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
        observation, info = self.env.reset(seed=seed)
        self.steps = 0
        return self._answer(observation, 0.0, False, False, info)

    def step(self, data: dict[str, Any]) -> dict[str, Any]:
        """Take `data["action"]` (a word or action of the env) or what a response `data["text"]` says."""
        if isinstance(data.get("text"), str):
            action = self.env.projection(data["text"]).actions[0]
        elif isinstance(data.get("action"), int | str):
            given = data["action"]
            known = self.env.projection.action_of(given) if isinstance(given, str) else given
            action = self.env.invalid_action if known is None else known
        else:
            raise ValueError(
                f"a step needs 'action' (a word or number) or 'text' (a response), got {sorted(data)}"
            )
        answer = self._answer(*self.env.step(action))
        self.steps += 1
        return answer

    def state(self) -> dict[str, Any]:
        """What the convention calls the state."""
        return {"episode_id": None, "step_count": self.steps}

    def _answer(
        self, observation: Any, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> dict[str, Any]:
        fields = {
            "text": self.env.observe(),
            "instructions": self.env.instructions,
            "terminated": terminated,
            "truncated": truncated,
            **{key: info[key] for key in ("success", "action_is_valid", "action_is_effective")},
            "available_actions": info["available_actions"],
        }
        return {"observation": fields, "reward": reward, "done": terminated or truncated}


def json_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """The object that a message holds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


SCHEMA: dict[str, Any] = {
    "action": {
        "type": "object",
        "properties": {
            "action": {"type": ["string", "integer"], "description": "a word or number of the env"},
            "text": {"type": "string", "description": "a model's response, to be projected"},
        },
    },
    "observation": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "instructions": {"type": "string"},
            "terminated": {"type": "boolean"},
            "truncated": {"type": "boolean"},
            "success": {"type": "boolean"},
            "action_is_valid": {"type": "boolean"},
            "action_is_effective": {"type": "boolean"},
            "available_actions": {"type": "array", "items": {"type": "string"}},
        },
    },
    "state": {
        "type": "object",
        "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
    },
}
