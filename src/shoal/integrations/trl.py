"""shoal's environments in TRL's GRPOTrainer (TRL 1.16): as its `rollout_func`, or as tools of its own loop.

With `TRLRollout` shoal plays the episodes with the trainer's weights: exact tokens, envs in parallel, randomness
keyed by name. With `tool_environment` TRL plays them, and an env is a tool that the model calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shoal import envs
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError, EnvError, needs_extra
from shoal.core.executors import Closing
from shoal.core.seeding import derive_seed
from shoal.envs import TextEnv
from shoal.integrations.rows import (
    TokenRow,
    bridge_config,
    require_whole_episodes,
    row_of_nothing,
    token_rows,
)
from shoal.rollout.episode import EpisodeId, words_of
from shoal.rollout.hosts.episodes import EnvFailedError, close_env, in_env
from shoal.rollout.plan import Assignment, place_of
from shoal.rollout.play import ParallelRolloutManager
from shoal.rollout.settings import Backend
from shoal.samplers.sampler import Sampler, Sampling

HELD_OUT = " held-out"


class TRLRollout(Closing):
    """A `rollout_func` for TRL's GRPOTrainer that plays whole episodes of shoal's envs.

    A row of the dataset names a start state; the `num_generations` episodes of a group begin in it and differ in
    their sampling noise alone, which follows from the seed and the number of the update.

    Args:
        config: a mapping or object with `custom_envs`, `agent_proxy` (with `prompt.mode: append`) and `seed`, as
            `shoal train` reads it. The temperature is the trainer's.
        backend: where episodes are played; `agent_proxy.parallel.backend` if not given.
        max_batch: rows that are decoded at once.
    """

    def __init__(self, config: Any, *, backend: Backend | None = None, max_batch: int = 64) -> None:
        self.config = bridge_config(config)
        require_whole_episodes(self.config)
        for tag in self.config.custom_envs:
            if f"{tag}{HELD_OUT}" in self.config.custom_envs:
                raise ConfigError(
                    f"custom_envs has {tag!r} and {tag + HELD_OUT!r}: rows of the second would be called like held-out "
                    f"rows of the first; give one of them another name"
                )
        self.trajectories: list[Trajectory] = []
        """The episodes of the last call, in the order of the rows."""
        self._backend = backend
        self._max_batch = max_batch
        self._manager: ParallelRolloutManager | None = None
        self._model: Any = None
        self._calls = (-1, 0)  # the trainer's step, and how often it has asked in it

    def close(self) -> None:
        """End the env workers; may be called twice."""
        if self._manager is not None:
            self._manager.close()
        self._manager = self._model = None

    def dataset(self, starts: int, *, held_out: bool = False) -> Any:
        """A `datasets.Dataset` of start states, for `train_dataset` or `eval_dataset`; kinds of env take turns.

        Args:
            starts: how many.
            held_out: start states that no training row has.
        """
        with needs_extra("TRLRollout.dataset", "trl"):
            from datasets import Dataset
        tags = list(self.config.custom_envs)
        names = [f"{tags[i % len(tags)]}{HELD_OUT if held_out else ''} #{i}" for i in range(starts)]
        return Dataset.from_dict({"prompt": [[{"role": "user", "content": name}] for name in names]})

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """One episode a prompt: what TRL wants of a `rollout_func`, with rewards and counts beside it."""
        sampling = self._sampling(trainer)
        assignments = self._assignments(prompts, trainer)
        from trl.models import unwrap_model_for_generation

        gather = trainer.args.ds3_gather_for_generation
        with unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather
        ) as model:
            training = model.training
            manager = self._manager_of(model, trainer)
            model.eval()
            try:
                self.trajectories = manager.play(assignments, sampling)
            finally:
                model.train(training)
        end = int(trainer.processing_class.eos_token_id)
        rows = [_row(trajectory, end) for trajectory in self.trajectories]
        whole = [t.status == "ok" and bool(t.turns) for t in self.trajectories]
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.response_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.mask for row in rows],
            "env": [t.env for t in self.trajectories],
            "reward": [t.reward if ok else None for t, ok in zip(self.trajectories, whole, strict=True)],
            "success": [t.success for t in self.trajectories],
            "turns": [len(t.turns) for t in self.trajectories],
            "valid_actions": [sum(turn.action_is_valid for turn in t.turns) for t in self.trajectories],
        }

    def _sampling(self, trainer: Any) -> Sampling:
        """How tokens are picked: as the trainer's loss will assume."""
        plain = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
        for name, value in plain.items():
            found = getattr(trainer, name)
            if found != value and not (name == "min_p" and not found):
                raise ConfigError(
                    f"shoal samples from the whole distribution: GRPOConfig.{name} must be {value}, got {found}"
                )
        proxy = self.config.agent_proxy
        if proxy.sampling().restricted:
            raise ConfigError(
                "shoal samples from the whole distribution here, as the loss of TRL assumes: leave agent_proxy.top_p, "
                "top_k and min_p out"
            )
        return Sampling(proxy.token_limit, trainer.temperature, proxy.stop)

    def _assignments(self, prompts: Sequence[Any], trainer: Any) -> list[Assignment]:
        """Which episode each row is; rows of all processes count through, as TRL's groups do."""
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        iteration = self._iteration(trainer) if training else 0
        assignments = []
        for index, prompt in enumerate(prompts):
            tag, group, held_out = self._start_of(prompt)
            member = (first + index) % size
            if index and member and prompt != prompts[index - 1]:
                raise ConfigError(
                    f"row {index} is member {member} of its group and must have the prompt of the row before, "
                    f"{prompts[index - 1]!r}, got {prompt!r}"
                )
            seed = derive_seed(self.config.seed, "held-out") if held_out else self.config.seed
            env_seed = place_of(seed, 0, group, member).env_seed
            assignments.append(Assignment(index, EpisodeId(seed, iteration, group, member, env_seed), tag))
        return assignments

    def _iteration(self, trainer: Any) -> int:
        """A number for the sampling noise: of the update, and of the calls within one."""
        step = int(trainer.state.global_step)
        self._calls = (step, self._calls[1] + 1 if self._calls[0] == step else 0)
        return step * int(trainer.args.gradient_accumulation_steps) + self._calls[1]

    def _start_of(self, prompt: Any) -> tuple[str, int, bool]:
        """Tag, group and whether it is held out, of a row that `dataset` made."""
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        tag, _, number = str(text).rpartition(" #")
        held_out = tag not in self.config.custom_envs and tag.endswith(HELD_OUT)
        tag = tag.removesuffix(HELD_OUT) if held_out else tag
        if tag not in self.config.custom_envs or not number.isdecimal():
            raise ConfigError(
                f"a row of the dataset must name a start state, like '{next(iter(self.config.custom_envs))} #7' "
                f"(see TRLRollout.dataset), got {text!r}"
            )
        return tag, int(number), held_out

    def _manager_of(self, model: Any, trainer: Any) -> ParallelRolloutManager:
        if self._manager is None or self._model is not model:
            self.close()
            self._model = model
            self._manager = ParallelRolloutManager(
                self.config, _engine(model, trainer.processing_class, self._max_batch), backend=self._backend
            )
        engine: Any = self._manager.engine
        engine.weights_version = int(trainer.state.global_step)
        return self._manager


def episode_reward(
    reward: Sequence[float | None],
    success: Sequence[bool],
    turns: Sequence[int],
    valid_actions: Sequence[int],
    log_metric: Callable[[str, float], None] | None = None,
    **rest: Any,
) -> list[float | None]:
    """A reward function for TRL beside `TRLRollout`: what the env paid; None for episodes that failed.

    Logs the share of whole episodes that succeeded, their turns, the share of valid actions, and failures.
    """
    del rest
    whole = [i for i, value in enumerate(reward) if value is not None]
    if log_metric is not None:
        log_metric("shoal/failed_episodes", float(len(reward) - len(whole)))
        if whole:
            log_metric("shoal/success", sum(success[i] for i in whole) / len(whole))
            log_metric("shoal/turns", sum(turns[i] for i in whole) / len(whole))
            played = sum(turns[i] for i in whole)
            log_metric("shoal/valid_actions", sum(valid_actions[i] for i in whole) / played)
    return list(reward)


def _engine(model: Any, tokenizer: Any, max_batch: int) -> Sampler:
    from shoal.samplers.huggingface.engine import HuggingFaceEngine

    return HuggingFaceEngine(model, tokenizer, max_batch=max_batch)


def _row(trajectory: Trajectory, end: int) -> TokenRow:
    """The episode as one row, without anything to learn where the model wrote nothing or the episode failed.

    TRL takes a last token other than the end token for a row cut short, so an episode that the env ended gets one,
    masked.
    """
    rows = list(token_rows(trajectory))
    if not rows:
        return row_of_nothing(end)
    if len(rows) > 1:
        raise EnvError(f"an episode of {trajectory.env} is {len(rows)} rows of tokens instead of one")
    row = rows[0]
    if trajectory.status != "ok":
        # a reward of None keeps it out of the policy's loss, this out of all others
        row.mask[:] = [0] * len(row.mask)
    if trajectory.terminated and row.response_ids[-1] != end:
        row.response_ids.append(end)
        row.mask.append(0)
        row.logprobs.append(0.0)
    return row


def tool_environment(env_type: str, *, seed: int = 0, **env_config: Any) -> Callable[[], ToolEnvironment]:
    """An `environment_factory` for TRL: the model plays the env by calling the tool `act`.

    Rows of the dataset need a column `start`, the number of the start state; rows of a group share it.

    Args:
        env_type: a registered name (`shoal envs list`) or "module:Class".
        seed: of the run; start states follow from it as in shoal's own rollouts.
        env_config: settings of the env.
    """
    return lambda: ToolEnvironment(partial(envs.make, env_type, **env_config), seed)


class ToolEnvironment:
    """One env in the form in which TRL wants it; its public methods are the model's tools.

    An env that fails ends its episode without a reward, and the next one has another.
    """

    def __init__(self, make: Callable[[], TextEnv[Any]], seed: int) -> None:
        self._make, self._env = make, make()
        self._seed = seed
        self._total = 0.0
        self._over, self._failed = True, False

    def reset(self, start: int | None = None, **row: Any) -> str:
        """Begin the episode of a row; returns what the agent is told."""
        del row
        if start is None:
            raise ConfigError("the dataset needs a column `start` with the number of each row's start state")
        if self._failed:
            close_env(self._env)
            self._env, self._failed = self._make(), False
        self._over = self._failed = True  # should it fail
        observation, info = self._env.reset(seed=derive_seed(self._seed, "env", 0, int(start)))
        self._total, self._over, self._failed = 0.0, False, False
        return f"{self._env.instructions}\n\n{self._tell(observation, info)}"

    def act(self, action: str) -> str:
        """Take one action in the environment and see what it looks like then.

        Args:
            action: One of the possible actions.

        Returns:
            What the environment looks like after the action.
        """
        if self._over:
            return "The episode is over."
        try:
            return str(in_env("step", lambda: self._act(action)))
        except EnvFailedError:
            self._over = self._failed = True
            raise

    def _act(self, action: str) -> str:
        for step in self._env.projection(f"<action>{action}</action>").actions:
            observation, reward, terminated, truncated, info = self._env.step(step)
            self._total += reward
            self._over = terminated or truncated
            if self._over:
                return f"{observation}\n\nThe episode is over."
        return self._tell(observation, info)

    def get_reward(self) -> float | None:
        """What the env has paid in this episode; None where it failed, which TRL leaves out of its group."""
        return None if self._failed else self._total

    def _tell(self, observation: Any, info: dict[str, Any]) -> str:
        words = ", ".join(words_of(info))
        return f"{observation}\n\nPossible actions: {words}." if words else str(observation)
