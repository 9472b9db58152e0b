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
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from shoal import envs
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, DataError, EngineError, did_you_mean, format_error, needs_extra
from shoal.core.executors import OwnThread
from shoal.integrations.rows import bridge_config, require_whole_episodes
from shoal.integrations.verl import agent_loop_outputs
from shoal.rollout.episode import Episode
from shoal.rollout.factory import make_roles
from shoal.rollout.hosts.episodes import (
    CLOSE_SECONDS,
    MAKE,
    EnvFailedError,
    in_env,
    reset_env,
    seconds_for,
    step_env,
)
from shoal.rollout.plan import place_of
from shoal.rollout.prompts import Prompter
from shoal.rollout.settings import ParallelConfig
from shoal.samplers.sampler import Completion, Finish, Request, checked
from shoal.samplers.tokenizers import TemplateTokenizer

with needs_extra("the agent loop for verl", "verl"):
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

logger = logging.getLogger(__name__)
ANY_TOKEN = 2**31
"""Models have more tokens than their tokenizers."""


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
        if proxy.tools:
            raise ConfigError(
                "agent_proxy.tools: verl's agent loop does not call them; train with `shoal train`"
            )
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
        own = _OwnEnv(
            partial(envs.make, kind.env_type, **kind.env_config), self.settings.agent_proxy.parallel
        )
        try:
            await own.make()
            await own.do("reset", lambda env: reset_env(episode, env))
            prompt = 0
            while not episode.over:
                request = episode.request()
                prompt = prompt or len(request.prompt_ids)
                room = self._limit - (len(request.prompt_ids) - prompt)
                if room < 1:
                    return episode.trajectory(ended="tokens")  # what verl keeps of a response is full
                completion = await self._ask(name, request, room, sampling_params, metrics)
                for action in episode.respond(completion):
                    if await own.do(f"step({action!r})", partial(step_env, episode, action=action)):
                        break
                episode.end_turn()
        except EnvFailedError as error:
            return episode.trajectory("env_error", str(error))
        except (ConfigError, EngineError):
            raise
        except Exception as error:  # of the tokenizer or a template, say: it costs this episode alone
            return episode.trajectory("engine_error", format_error(error))
        finally:
            await own.close()
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
            raise EngineError(f"verl's server failed: {format_error(error)}") from error
        metrics.generate_sequences += asyncio.get_running_loop().time() - clock
        limit = min(sampling.max_tokens, room)
        end, finish = self._end(list(answer.token_ids[:limit]), sampling.stop)
        given = tuple(answer.log_probs or ())[:end]  # none where the server was not asked for them
        found = checked(request, Completion(answer.token_ids[:end], given or (0.0,) * end, finish), ANY_TOKEN)
        return found if given else Completion(found.token_ids, (math.nan,) * end, finish)

    def _end(self, ids: list[int], stops: tuple[str, ...]) -> tuple[int, Finish]:
        """How many of the tokens count, up to the end of the turn or to the first stop text, and what ended them."""
        reach = 4 * max(map(len, stops), default=0)  # a character may be up to four tokens
        for count in range(1, len(ids) + 1):
            if ids[count - 1] in self._tokens.end_ids:
                return count, "stop"
            if stops and any(
                stop in self._tokens.decode(ids[max(0, count - reach) : count]) for stop in stops
            ):
                return count, "stop"
        return len(ids), "length"

    def _output(self, trajectory: Trajectory, metrics: Any) -> AgentLoopOutput:
        outputs = agent_loop_outputs(trajectory, int(self.tokenizer.eos_token_id))
        if len(outputs) > 1:
            raise DataError(f"an episode of {trajectory.env} is {len(outputs)} rows of tokens instead of one")
        (output,) = outputs
        output.metrics = metrics
        if trajectory.status != "ok":  # verl has no word for a failed episode: nothing of it is learned
            output.response_mask = [0] * len(output.response_mask)
            output.reward_score = 0.0
        if any(map(math.isnan, output.response_logprobs)):  # the server was not asked for them
            output.response_logprobs = None
        return output


class _OwnEnv:
    """Where the env of one episode lives and dies: in a thread of its own, so that the loop waits for none."""

    def __init__(self, make: Callable[[], Any], limits: ParallelConfig) -> None:
        self._lost = False
        self._make, self._limits = make, limits
        self._envs: list[Any] = []
        self._thread = OwnThread("shoal-verl-env")

    async def make(self) -> None:
        """Make the env."""
        await self._in_thread(MAKE, lambda: self._envs.append(self._make()))

    async def do(self, doing: str, call: Callable[[Any], Any]) -> Any:
        """`call(env)`, see `in_env`; an env that takes too long is left behind with its thread."""
        return await self._in_thread(doing, lambda: call(self._envs[0]))

    async def close(self) -> None:
        """Close the env, one that hangs when it comes back."""
        closing = self._thread.submit(lambda: [in_env("close", env.close) for env in self._envs])
        self._thread.end()
        if not self._lost:
            with contextlib.suppress(TimeoutError, EnvFailedError):
                await asyncio.wait_for(asyncio.wrap_future(closing), CLOSE_SECONDS)

    async def _in_thread(self, doing: str, call: Callable[[], Any]) -> Any:
        seconds = seconds_for(self._limits, doing)
        work = self._thread.submit(partial(in_env, doing, call))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), seconds)
        except TimeoutError:
            self._lost = True
            raise EnvFailedError(f"{doing} failed: no answer within {seconds:g} s") from None
        except asyncio.CancelledError:
            self._lost = True
            raise
