"""An agent loop for verl (0.9.1) that plays shoal's envs with verl's own servers: `agent_name: shoal_agent`.

Name it in the file of `actor_rollout_ref.rollout.agent.agent_loop_config_path`:

    - name: shoal_agent
      _target_: shoal.integrations.verl_agent.ShoalAgentLoop
      seed: 0
      custom_envs: {lake: {env_type: frozen_lake}}
      agent_proxy: {max_tokens: 32, prompt: {mode: append}}

Rows of the dataset have the columns `env` (a key of `custom_envs`) and `start` (the number of the start state, the
same for all rows of a group).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from shoal import envs
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, DataError, EngineError, did_you_mean, in_words, missing_extra
from shoal.integrations.rows import bridge_config, require_whole_episodes
from shoal.integrations.verl import agent_loop_outputs
from shoal.rollout.collector import place_of
from shoal.rollout.episode import Episode
from shoal.rollout.factory import make_roles
from shoal.rollout.prompts import Prompter
from shoal.rollout.samplers.sampler import Completion, Request
from shoal.rollout.samplers.tokenizers import TemplateTokenizer

try:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
except ImportError as error:
    raise missing_extra("the agent loop for verl", "verl") from error

logger = logging.getLogger(__name__)


class ShoalAgentLoop(AgentLoopBase):
    """Plays one episode of a shoal env.

    It does not register itself: that would replace the entry of the file above, and its settings with it.

    Args:
        custom_envs: kinds of env under names of their own, as `shoal train` reads them.
        agent_proxy: how the agent meets them, with `prompt.mode: append`.
        seed: of the run; start states follow from it and from the row.
    """

    def __init__(
        self,
        *args: Any,
        custom_envs: Mapping[str, Any] | None = None,
        agent_proxy: Mapping[str, Any] | None = None,
        seed: int = 0,
        **rest: Any,
    ) -> None:
        super().__init__(*args, **rest)
        from omegaconf import OmegaConf

        given = OmegaConf.create(
            {"seed": seed, "custom_envs": custom_envs or {}, "agent_proxy": agent_proxy or {}}
        )
        self.settings = bridge_config(OmegaConf.to_container(given, resolve=True))
        require_whole_episodes(self.settings)
        proxy = self.settings.agent_proxy
        self._limit = int(self.rollout_config.response_length)
        self._tokens = TemplateTokenizer(self.tokenizer, **dict(self.apply_chat_template_kwargs))
        self._prompter = Prompter(proxy.prompt, self._tokens)
        self._roles = make_roles(self.settings.custom_envs, list(self.settings.custom_envs), proxy.max_turn)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """One episode from the start state that the row names."""
        tag, start = row.get("env"), row.get("start")
        if tag not in self._roles or start is None:
            raise ConfigError(
                f"a row needs the columns `env` and `start`, got env={tag!r} and start={start!r}."
                f"{did_you_mean(str(tag), self._roles)}"
            )
        metrics = AgentLoopMetrics()
        for attempt in range(self.settings.agent_proxy.parallel.env_retries + 1):
            trajectory = await self._play(str(tag), int(start), sampling_params, metrics)
            if trajectory.status != "env_error":
                break
            logger.warning("%s #%s, attempt %d: %s", tag, start, attempt + 1, trajectory.error)
        return self._output(trajectory, metrics)

    async def _play(
        self, tag: str, start: int, sampling_params: Mapping[str, Any], metrics: Any
    ) -> Trajectory:
        """The straight story of an episode; what goes wrong in the env is in the record."""
        place = place_of(self.settings.seed, 0, start, 0)
        sampling = self.settings.agent_proxy.sampling()
        episode = Episode(place, self._roles[tag], self._prompter, sampling)
        kind = self.settings.custom_envs[tag]
        name = uuid4().hex  # the same for all turns: verl then asks the server that knows the context
        env: Any = None
        try:
            env = await asyncio.to_thread(envs.make, kind.env_type, **kind.env_config)
            episode.begin(*await asyncio.to_thread(env.reset, seed=place.env_seed))
            prompt = 0
            while not episode.over:
                request = episode.request()
                prompt = prompt or len(request.prompt_ids)
                room = self._limit - (len(request.prompt_ids) - prompt)
                if room < 1:
                    break  # what verl keeps of a response is full
                completion = await self._ask(name, request, room, sampling_params, metrics)
                for action in episode.respond(completion):
                    step = await asyncio.to_thread(env.step, action)
                    episode.observe(*step)
                    if step[2] or step[3]:
                        break
                episode.end_turn()
        except (ConfigError, EngineError):
            raise
        except Exception as error:
            return episode.trajectory("env_error", in_words(error))
        finally:
            if env is not None:
                env.close()
        return episode.trajectory()

    async def _ask(
        self, name: str, request: Request, room: int, sampling_params: Mapping[str, Any], metrics: Any
    ) -> Completion:
        """Let verl's server write a response, and end it where shoal's own engines would."""
        sampling = request.sampling
        clock = asyncio.get_running_loop().time()
        try:
            answer = await self.server_manager.generate(
                request_id=name,
                prompt_ids=list(request.prompt_ids),
                sampling_params={**sampling_params, "max_tokens": min(sampling.max_tokens, room)},
            )
        except Exception as error:
            raise EngineError(f"verl's server failed: {in_words(error)}") from error
        metrics.generate_sequences += asyncio.get_running_loop().time() - clock
        end = self._end(list(answer.token_ids[: min(sampling.max_tokens, room)]), sampling.stop)
        if not end:
            raise EngineError("verl's server wrote no token")
        logprobs = tuple(answer.log_probs[:end]) if answer.log_probs else (math.nan,) * end
        return Completion(tuple(answer.token_ids[:end]), logprobs, "stop")

    def _end(self, ids: list[int], stops: tuple[str, ...]) -> int:
        """How many of the tokens count: up to the end of the turn, or to the first stop text."""
        reach = 4 * max(map(len, stops), default=0)  # a character may be up to four tokens
        for count in range(1, len(ids) + 1):
            if ids[count - 1] in self._tokens.end_ids:
                return count
            if stops and any(
                stop in self._tokens.decode(ids[max(0, count - reach) : count]) for stop in stops
            ):
                return count
        return len(ids)

    def _output(self, trajectory: Trajectory, metrics: Any) -> AgentLoopOutput:
        outputs = agent_loop_outputs(trajectory)
        if len(outputs) > 1:
            raise DataError(f"an episode of {trajectory.env} is {len(outputs)} rows of tokens instead of one")
        output = outputs[0] if outputs else self._empty()
        output.metrics = metrics
        if trajectory.status != "ok":  # verl has no word for a failed episode: nothing of it is learned
            output.response_mask = [0] * len(output.response_mask)
            output.reward_score = 0.0
        if any(map(math.isnan, output.response_logprobs)):  # the server was not asked for them
            output.response_logprobs = None
        return output

    def _empty(self) -> AgentLoopOutput:
        end = int(self.tokenizer.eos_token_id)
        facts = {"success": 0.0, "turns": 0, "valid_actions": 0.0, "failed": 1.0}
        return AgentLoopOutput(
            prompt_ids=[end],
            response_ids=[end],
            response_mask=[0],
            response_logprobs=[0.0],
            reward_score=0.0,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [], "tool_rewards": [], "reward_extra_info": facts},
        )
