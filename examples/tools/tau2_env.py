"""Domains of tau2-bench (arXiv:2506.07982) as an environment whose actions are calls of the domain's tools.

tau2 is installed from its repository, with the extra `gym`; its data lies there too, and `TAU2_DATA_DIR` names it. Then

    PYTHONPATH=examples/tools shoal envs check tau2_env:Tau2

Without `user_llm` the agent works on a task's ticket alone, in the domains `mock` and `telecom`. With it a model plays
the user, and the agent speaks to that user by the tool `respond`; the episodes are then a function of the seed only as
far as that model's answers are.
"""
# ruff: noqa: E402 (tau2 tells much while it is imported)

import contextlib
import json
from dataclasses import dataclass, field

from loguru import logger

logger.disable("tau2")  # it tells each step
from tau2.gym.gym_agent import AgentGymEnv
from tau2.registry import registry

from shoal.core.data import ToolUse
from shoal.core.errors import ConfigError, EnvError
from shoal.envs import ToolEnv
from shoal.envs.text import Outcome, check_numbers
from shoal.envs.tools import Tool, function_tool

DONE = "done"  # tau2's own tool, by which an agent without a user ends the episode


def respond(message: str) -> str:
    """Say something to the user, who then answers."""
    return message


@dataclass(frozen=True)
class Tau2Config:
    """Settings of `Tau2`."""

    domain: str = "mock"
    """"mock", "airline", "retail", "telecom", or another one that tau2 has registered."""
    split: str | None = None
    """Tasks of this split ("train", "test", …); all if not given."""
    user_llm: str | None = None
    """What litellm calls the model that plays the user, such as "openai/NAME"; none: the agent works alone."""
    user_llm_args: dict = field(default_factory=dict)
    """Its arguments: `{api_base: "http://127.0.0.1:8000/v1", api_key: none, temperature: 0}`."""
    max_steps: int = 30
    """Answers of the agent after which an episode is truncated."""

    def __post_init__(self):
        check_numbers(self, max_steps=1)
        if self.domain not in registry.get_info().domains:
            raise ConfigError(
                f"tau2 has no domain {self.domain!r}; it has {', '.join(registry.get_info().domains)}"
            )


class Tau2(ToolEnv[Tau2Config]):
    """Tasks of a domain; the reward is 0 until the end, and then what tau2 finds: 1 where all was done as expected."""

    Config = Tau2Config
    instructions = "Follow the policy. Call tools to act."

    def __init__(self, config=None, **settings):
        super().__init__(config, **settings)
        self._inner, alone = None, self.config.user_llm is None
        tasks = registry.get_tasks_loader(self.config.domain)(self.config.split)
        self._names = [task.id for task in tasks if task.ticket or not alone]
        if not self._names:
            raise ConfigError(f"no task of {self.config.domain!r} has a ticket: name a user_llm")

    def _start(self, rng):
        self._leave()
        alone, seed = self.config.user_llm is None, int(rng.integers(2**31))
        self._inner = AgentGymEnv(
            self.config.domain,
            self._names[int(rng.integers(len(self._names)))],
            max_steps=1_000_000,  # shoal counts them
            solo_mode=alone,
            user_llm=self.config.user_llm,
            user_llm_args={**self.config.user_llm_args, "seed": seed},
        )
        said, info = self._inner.reset(seed=seed)
        self._told = f"{info['policy']}\n\n{info['task'].ticket if alone else said}"
        described = [tool.openai_schema["function"] for tool in info["tools"]]
        self._listed = [Tool(one["name"], one["description"], one["parameters"]) for one in described]
        if not alone:
            self._listed = [*(tool for tool in self._listed if tool.name != DONE), function_tool(respond)]
        self._ended, self._paid = False, 0.0

    def observe(self):
        """The policy of the domain, and the ticket or what the user said first."""
        return self._told

    def tools(self):
        """Those of the domain."""
        return self._listed

    def _use(self, calls):
        uses = []
        for call in calls:
            if self._ended:
                uses.append(ToolUse(call.name, call.arguments, error="not called: the episode was over"))
                continue
            asked = {"name": call.name, "arguments": call.arguments}
            action = call.arguments["message"] if call.name == respond.__name__ else json.dumps(asked)
            said = self._step(action)
            said = said.removeprefix("tool: ").removeprefix("user: ")
            uses.append(ToolUse(call.name, call.arguments, self._tools[call.name].result(said)))
        return uses

    def _step(self, action):
        try:
            said, self._paid, self._ended, _, info = self._inner.step(action)
        except Exception as error:  # tau2 judges at the end, and may look for what the agent did not do
            self._paid, self._ended = 0.0, True
            return f"the result could not be judged: {error}"
        if self._ended and info["simulation_run"] == "{}":  # no failure of the agent
            raise EnvError(
                "tau2 ended the episode without a result, as where the user's model does not answer"
            )
        return said

    def _outcome(self):
        return Outcome(self._paid, self._ended, success=self._ended and self._paid >= 1.0)

    def _leave(self):
        """End the episode before, which plays in a thread of tau2."""
        if self._inner is not None and not self._ended:
            with contextlib.suppress(EnvError):
                self._step(json.dumps({"name": DONE, "arguments": {}}))
        self._inner = None

    def close(self):
        """End the episode."""
        super().close()
        self._leave()

    def __getstate__(self):
        return {**self.__dict__, "_inner": None}
