"""Training a language-model agent: play groups, compare within them, update, and keep everything on disk.

The loop is a straight line: rollouts, groups with different rewards, advantages, update, evaluation, checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from shoal.core.configuration import plain_values
from shoal.core.data import Trajectory
from shoal.core.errors import ConfigError
from shoal.core.executors import Closing
from shoal.core.run_folder import Event
from shoal.core.seeding import derive_seed
from shoal.envs.catalogue import resolve_text
from shoal.gateway.programs import sessions_of
from shoal.maths.updates import decayed
from shoal.rollout.factory import host_of, make_environments, make_roles
from shoal.rollout.play import ParallelRolloutManager, TrajectoryCollector
from shoal.rollout.prompts import Prompter
from shoal.rollout.report import FailureLog
from shoal.rollout.rewards.judge import Judge
from shoal.rollout.rewards.scorers import Answers
from shoal.rollout.rewards.settings import Given, reward_list
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.registry import close_engine
from shoal.samplers.sampler import Sampler
from shoal.samplers.versions import At
from shoal.train.advice import Rejected
from shoal.train.agent.algorithms.conflicts import doubts_of, refuse_without_signal
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.config import AgentConfig
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.huggingface import safe_batching
from shoal.train.agent.policies.loading import load_teacher, make_networked, policy_of, refuse_stranger
from shoal.train.agent.policies.policy import Policy, checkpointed_layers, weights_sha256
from shoal.train.agent.policies.reference import make_networks
from shoal.train.agent.policies.sharding import ShardedPolicy
from shoal.train.agent.policies.sync import WeightSync
from shoal.train.agent.processes.determinism import applies, deterministic, threads
from shoal.train.agent.processes.distributed import Processes
from shoal.train.agent.run.answers import with_room
from shoal.train.agent.run.checkpoint import (
    Progress,
    earlier_weights,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from shoal.train.agent.run.metrics import (
    heldout_metrics,
    iteration_times,
    rejected_answer,
    rollout_metrics,
    signal_metrics,
)
from shoal.train.agent.run.playing import Ahead, Played, SharedCollector, play_groups, refuse_all_failed
from shoal.train.agent.run.records import Records, refuse_taken
from shoal.train.agent.supervised.rehearsal import rehearse
from shoal.train.agent.supervised.warmup import refuse_without_actions, warm_up, warmup_steps
from shoal.train.agent.update import Learner, advantages_of, prepare_samples, sampled_entropy, update

logger = logging.getLogger(__name__)


class AgentTrainer(Closing):
    """Trains one policy on the envs of a config.

    Args:
        config: an `AgentConfig`, or a mapping (or OmegaConf config) with its keys.
        on_event: called at durable moments (checkpoint, evaluation, summary).
        policy: what is trained, in the place of the one that `config.engine` names; the sampler's own if not given.
        sampler: what writes, in the place of the one that `config.engine` names; the caller closes it.
        rewards: in the place of `config.rewards`: settings, names, or functions.
        tools: what the model may call, in the place of `config.agent_proxy.tools`; functions may stand among them.

    Use it as a context manager, or call `close`, so that env workers end, and engines that sample elsewhere.
    """

    def __init__(
        self,
        config: AgentConfig | Mapping[str, Any],
        on_event: Event | None = None,
        *,
        policy: Policy | None = None,
        sampler: Sampler | None = None,
        rewards: Iterable[Given] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        if policy is not None and sampler is None:
            raise ConfigError(
                "a policy samples nothing: give AgentTrainer the sampler too that writes for it"
            )
        if not isinstance(config, AgentConfig):
            config = AgentConfig.read(plain_values(config))
        if rewards is not None:
            config = replace(config, rewards=reward_list(rewards))
        if sampler is not None and config.trainer.lag:
            raise ConfigError(
                f"trainer.lag={config.trainer.lag} needs copies of the weights, and a sampler that is given has one: "
                f"name it in engine.name, or set trainer.lag to 0"
            )
        refuse_taken(config)
        refuse_without_signal(config)
        sharded = config.trainer.sharding == "full"
        self.processes = Processes.join(config.engine.device, sharded=sharded)
        with ExitStack() as started:  # what has begun ends if the rest cannot
            self._begin(config, on_event, started, policy, sampler, tools)
            self._end = started.pop_all()

    def _begin(
        self,
        config: AgentConfig,
        on_event: Event | None,
        begun: ExitStack,
        policy: Policy | None,
        sampler: Any,
        tools: Sequence[Any] | None,
    ) -> None:
        given = config.agent_proxy.tools if tools is None else tools
        self.toolbox = Toolbox(given, config.agent_proxy.max_tool_turns)
        begun.callback(self.toolbox.close)
        parallel = config.agent_proxy.use_parallel_rollout
        self.train_envs, self.val_envs = make_environments(config, with_pools=not parallel)
        begun.callback(self.train_envs.pool.close)
        begun.callback(self.val_envs.pool.close)
        roles = {**self.train_envs.roles, **self.val_envs.roles}
        refuse_without_actions(config.warmup, self.train_envs.roles)
        exact = config.engine.deterministic
        if sampler is None:
            applies(exact, config.engine.device)  # so that cuBLAS knows it when it begins
            policy, sampler = make_networked(config, roles, self.processes, list(self.toolbox.tools.values()))
            begun.callback(close_engine, sampler)
        policy = policy_of(sampler) if policy is None else policy
        refuse_stranger(sampler, policy)
        self._deterministic = applies(exact, str(next(policy.module.parameters()).device))
        self.sampler = sampler
        algorithm, teacher = config.algorithm, None
        if config.model.lora.rank and not hasattr(policy, "without_adapters"):
            raise ConfigError(
                f"model.lora.rank={config.model.lora.rank} has no effect on a policy that is given without adapters: "
                f"give shoal.train.agent.policies.lora.add_lora(policy, ...), or set it to 0"
            )
        if algorithm.gradient_checkpointing and not checkpointed_layers(policy.module):
            raise ConfigError(
                "algorithm.gradient_checkpointing=true has no effect on this model, whose layers cannot be computed "
                "twice: leave it out"
            )
        chat = self.toolbox.chat(policy.tokenizer)
        self._prompter = Prompter(config.agent_proxy.prompt, policy.tokenizer, chat)
        config = replace(config, agent_proxy=with_room(config.agent_proxy, roles, self._prompter))
        batching = safe_batching(policy, algorithm.batching)
        if algorithm.teacher:
            teacher = load_teacher(algorithm.teacher, policy)
            batching = safe_batching(teacher, batching, "the teacher")
        algorithm = replace(algorithm, batching=batching)
        self.config = config = replace(config, algorithm=algorithm)
        also: dict[str, Any] = {"teacher_sha256": weights_sha256(teacher.module)} if teacher else {}
        if self.toolbox.tools:
            also["tools"] = self.toolbox.schemas
        self._settings = config.comparable() | also
        self.records = Records(config, on_event, writes=self.processes.first)
        begun.callback(self.records.close)
        kept = self.records.folder.path / "reference"
        self.policy, self.critic, self._reference = make_networks(config, policy, kept, self.processes)
        trained, weight_decay = trained_parameters(self.policy.module), algorithm.weight_decay
        self.optimizer = split_optimizer(trained, self.critic, *algorithm.rates, weight_decay)
        self._sync = WeightSync(self.policy, sampler, config.trainer.lag)
        reference = self._reference.policy if self._reference else None
        self._learner = Learner(
            self.policy, self.optimizer, algorithm, config.agent_proxy, self.critic, reference, teacher, config.seed,
            self.processes, self._token_budget(), config.trainer.log_entropy,
        )  # fmt: skip
        window = 1 if config.agent_proxy.prompt.mode == "append" else self._most_turns()
        for doubt in doubts_of(config, len(self.train_envs.tags) * self.train_envs.group_size * window):
            logger.warning("%s", doubt)
        self.progress = Progress(0, 0.0, 0, 0)
        self._failures = FailureLog()
        self._judge: Judge | None = None
        if config.paid:
            answers = Answers(self.records.folder.path, self.processes.rank, self.records.folder.hold)
            self._judge = begun.enter_context(Judge(config.paid, answers))
        self._ahead: Ahead | None = None
        self._at: dict[str, At] = {}  # with a lag, what each collector samples by
        if config.trainer.lag:
            # what plays beside the updates computes with as many
            begun.enter_context(threads(config.engine.threads))
        self._collector = self._make_collector("train", config.seed)
        begun.callback(self._collector.close)
        self._val_collector = self._make_collector("val", derive_seed(config.seed, "held-out"))
        begun.callback(self._val_collector.close)
        if config.trainer.lag:
            self._ahead = begun.enter_context(Ahead(self._play))
        self._success: float  # held out, at this iteration; 0 if not measured
        self._rejected: Rejected | None = None  # an answer of the last iteration without a valid action
        self.resumed_at: int | None = None
        """The iteration that a resumed run goes on from, once `train` has begun; rows up to it were played before."""
        self.kept_episodes = 0
        """Episodes of a resumed run that ended after its checkpoint, and are not played again."""
        self._doing: tuple[str, SharedCollector | None] = "starting", None

    def _most_turns(self) -> int:
        """Turns of the longest episode."""
        roles = make_roles(self.config.custom_envs, self.train_envs.tags, self.config.agent_proxy.max_turn)
        return max(role.max_turns for role in roles.values())

    def _token_budget(self) -> int:
        """Tokens that the model may write in a sample: in a turn, or where a chat goes on in the longest episode.

        Turns with calls of tools come before.
        """
        proxy = self.config.agent_proxy
        acts_by_tools = any(role.tools is not None for role in self.train_envs.roles.values())
        turns = self._most_turns() if proxy.prompt.mode == "append" or acts_by_tools else 1
        return proxy.token_limit * (turns + proxy.max_tool_turns * bool(self.toolbox.tools))

    def close(self) -> None:
        """End env workers, and what the engine started; may be called twice."""
        self._end.close()

    def describe(self) -> str:
        """One line: what is trained, on what, and on what it is evaluated."""
        size = sum(parameter.numel() for parameter in self.policy.module.parameters())
        config, processes = self.config, self.processes
        groups, held_out = config.es_manager.train, config.es_manager.val
        several = f", {processes.count} processes" if processes.count > 1 else ""
        several += " (sharded)" if processes.sharded else ""
        return (
            f"{config.engine.name} engine with {size / 1e6:.2f}M parameters, {config.algorithm.adv_estimator}, "
            f"{groups.env_groups} groups of {groups.group_size} on {', '.join(self.train_envs.roles)}{several}; "
            f"evaluated in {held_out.env_groups * held_out.group_size} held-out episodes on "
            f"{', '.join(self.val_envs.roles)}"
        )

    def doing(self) -> str:
        """What it is at now, such as "iteration 3, 12 of 32 episodes played"; any thread may ask."""
        words, collector = self._doing
        if collector is None:
            return words
        done, wanted = collector.collector.counts
        return f"{words}, {done} of {wanted} episodes played"

    def worker_pids(self) -> list[int]:
        """The worker processes that play training episodes now; any thread may ask."""
        return self._collector.collector.worker_pids()

    # --- the loop
    def train(self) -> Iterator[dict[str, Any]]:
        """Run to the end, yielding one row of metrics an iteration (row 0 is the start); resumes if asked to."""
        if self.config.resume and not self.processes.all_gather(self.records.only_begun)[0]:
            yield from self._resume()
        else:
            with threads(self.config.engine.threads):
                start = self._start()
            yield start
        settings = self.config.trainer
        enough = np.inf if settings.stop_at_success is None else settings.stop_at_success
        while self._success < enough and not self._ended():
            row = self.train_iteration()
            last = self._ended(row)
            improved = False
            if last or self.progress.iteration % settings.eval_every == 0:
                row |= self._validate()
                improved = row["heldout_success"] > self.progress.best_success
                if improved:
                    self.progress = replace(self.progress, best_success=row["heldout_success"])
                last = last or row["heldout_success"] >= enough
            self._success = row.get("heldout_success", 0.0)
            self.records.report(row, self._rejected)
            if last or improved or self.progress.iteration % settings.save_every == 0:
                self._save(best=improved)
            yield row
        if self._ahead is not None:  # what has begun beyond the end
            self._ahead.close()
            self._collector.close()
        self.records.finish(self.progress)

    def train_iteration(self) -> dict[str, Any]:
        """One round of rollouts and one update; returns its metrics."""
        with threads(self.config.engine.threads):
            return self._train_iteration()

    def _train_iteration(self) -> dict[str, Any]:
        config, iteration = self.config, self.progress.iteration
        clock = time.perf_counter()
        self._doing = f"iteration {iteration + 1}", self._collector
        played = self._played(iteration)
        trajectories, learned, rollouts = played.groups
        waited = time.perf_counter() - clock
        row: dict[str, Any] = {"iteration": iteration + 1, **rollout_metrics(trajectories), **rollouts}
        if config.trainer.lag:
            row |= {"lag": iteration - played.version, "overlap": max(0.0, 1 - waited / played.seconds)}
        row |= signal_metrics(trajectories, learned, config)
        for group, rate in zip(self.optimizer.param_groups, config.algorithm.rates, strict=False):
            group["lr"] = decayed(rate, config.algorithm.lr_schedule, iteration / config.trainer.iterations)
        self._doing = f"iteration {iteration + 1}, learning from {len(learned)} episodes", None
        with deterministic(self._deterministic):
            learning, samples = self._learn(trajectories, learned, iteration)
        self.policy.weights_version = iteration + 1
        row |= learning
        if samples:
            row["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self._rejected = rejected_answer(trajectories, self.train_envs.roles)
        tokens = sum(t.n_tokens for t in trajectories)
        done = self.progress
        episodes, tokens = done.episodes + len(trajectories), done.tokens + tokens
        self.progress = Progress(iteration + 1, done.best_success, episodes, tokens)
        row |= {"episodes": self.progress.episodes, "tokens": self.progress.tokens}
        written = sum(t.n_tokens for t in trajectories if t not in self._collector.collector.journal)
        row |= iteration_times(row, played.seconds, time.perf_counter() - clock - waited, written)
        if (iteration + 1) % config.trainer.save_trajectories_every == 0 or iteration == 0:
            used = advantages_of(trajectories, learned, samples, self._learner)
            self.records.keep_trajectories(f"train-{iteration + 1:06d}", trajectories, used)
        return row

    def evaluate(self, *, greedy: bool = True) -> list[Trajectory]:
        """Play the held-out episodes; the same ones every time."""
        with threads(self.config.engine.threads):
            return self._val_collector.collect(0, self.config.agent_proxy.sampling(greedy=greedy))

    # --- parts of an iteration
    def _play(self, iteration: int) -> Played:
        """Play the groups of an iteration with the weights of its plan, which the sampler has."""
        clock, version = time.perf_counter(), max(0, iteration - self.config.trainer.lag)
        if self._ahead is not None:
            self._at["train"].weights_version = version
        groups = play_groups(self._collector, iteration, self.config)
        return Played(groups, version, time.perf_counter() - clock)

    def _played(self, iteration: int) -> Played:
        """The groups of an iteration; with a lag, those behind it are played from now on, too."""
        if self._ahead is None:
            return self._play(iteration)
        self._sync.carry()
        for ahead in range(
            iteration, min(iteration + self.config.trainer.lag + 1, self.config.trainer.iterations)
        ):
            self._ahead.begin(ahead)
        return self._ahead.take(iteration)

    def _ended(self, row: dict[str, Any] | None = None) -> bool:
        """Whether all iterations are done, or by the rows so far and `row` the policy has collapsed."""
        done = self.progress.iteration >= self.config.trainer.iterations
        return done or self.processes.all_gather(lambda: self.records.collapsed(row))[0]

    def _learn(
        self, trajectories: list[Trajectory], learned: list[Trajectory], iteration: int
    ) -> tuple[dict[str, float], list[Sample]]:
        """One update from the groups to learn from; its metrics, and the samples that it read."""
        config, learner = self.config, self._learner
        row: dict[str, float] = {}
        samples = prepare_samples(learned, learner)
        if samples:
            row = update(learner, samples, iteration, entropy=sampled_entropy(trajectories))
        if config.warmup.rehearsal and iteration >= config.algorithm.critic.warmup:
            sampling, weight = config.agent_proxy.sampling(), config.warmup.rehearsal
            roles = self.train_envs.roles
            row |= rehearse(learner, trajectories, roles, self._prompter, sampling, weight, iteration)
        return row, samples

    # --- beginnings and ends
    def _start(self) -> dict[str, Any]:
        self.processes.all_gather(self.records.begin)
        self.toolbox.keep(self.records.folder.path)
        self._doing = "a probe of the model's answers", self._collector
        if self._ahead is not None:
            self._sync.carry()
        steps, probed = warmup_steps(self.config, self._collector, self.train_envs.roles)
        row: dict[str, Any] = {"iteration": 0, **probed}
        self._doing = f"warm-up, 0 of {steps} steps", None
        if self._reference is not None and self.config.algorithm.kl.anchor == "start":
            self._reference.keep(self.policy)
        with deterministic(self._deterministic):
            for done, loss in enumerate(self._warm_up(steps) if steps else (), start=1):
                self._doing = f"warm-up, {done} of {steps} steps", None
                row["warmup_loss"] = loss
        self.processes.share_weights(self.policy.module.state_dict().values())
        if self.critic is not None:
            self.critic.model.load_state_dict(self.policy.module.state_dict())
        self.optimizer.take_weights()
        self._sync.changed()
        if self._reference is not None and self.config.algorithm.kl.anchor == "warmup":
            self._reference.keep(self.policy)
        row |= self._validate()
        self._success = row["heldout_success"]
        self.progress = replace(self.progress, best_success=self._success)
        self.records.report(row)
        self._keep_episodes()
        self._save(best=True)
        return row

    def _warm_up(self, steps: int) -> Iterator[float]:
        config, roles = self.config, self.train_envs.roles
        kinds = {tag: config.custom_envs[tag] for tag in roles}
        makers = {tag: resolve_text(kind.env_type, kind.env_config) for tag, kind in kinds.items()}
        return warm_up(
            self.policy, makers, roles, self._prompter, replace(config.warmup, steps=steps),
            config.algorithm.micro_batch_tokens, config.seed, vector=host_of(config), failures=self._failures,
            sampling=config.agent_proxy.sampling(), toolbox=self.toolbox, batching=config.algorithm.batching,
            processes=self.processes,
        )  # fmt: skip

    def _resume(self) -> Iterator[dict[str, Any]]:
        folder = self.records.checkpoints  # the first process puts it in order for all
        newest = self.processes.all_gather(
            lambda: newest_checkpoint(folder) if self.processes.first else None
        )
        assert newest[0] is not None
        self.progress = load_checkpoint(
            newest[0], self.policy, self.critic, self.optimizer, self._settings, self.config.rates
        )
        self.resumed_at = self.progress.iteration
        self.toolbox.keep(self.records.folder.path)
        self._sync.changed()
        if self.config.trainer.lag:
            self._sync.restore(earlier_weights(newest[0]))
        if self._reference is not None:
            self._reference.load()
        rows = self.processes.all_gather(lambda: self.records.go_on(self.progress.iteration))[0]
        self._keep_episodes()
        last = rows[-1] if rows else {}
        at_end = last.get("iteration") == self.progress.iteration  # else its row was lost: the best is known
        self._success = float(last.get("heldout_success") or 0.0) if at_end else self.progress.best_success
        yield from rows

    def _keep_episodes(self) -> None:
        """Write down from now on what is played, and play nothing again that was written down."""
        self._journal = self.records.journal(self._settings, self.processes.rank)
        self.kept_episodes = self._journal.count
        self._collector.collector.journal = self._val_collector.collector.journal = self._journal

    def _validate(self) -> dict[str, float]:
        self._doing = "evaluation", self._val_collector
        trajectories = self.evaluate()
        self._doing = "writing down the evaluation", None
        self.records.keep_trajectories(f"heldout-{self.progress.iteration:06d}", trajectories)
        refuse_all_failed(trajectories, "the evaluation")
        return heldout_metrics(trajectories)

    def _save(self, *, best: bool = False) -> None:
        self._doing = "writing a checkpoint", None
        trained, folder = (self.policy, self.critic, self.optimizer), self.records.checkpoints
        keep, rates = self.config.trainer.keep_checkpoints, self.config.rates
        first, last = self.progress.iteration - self.config.trainer.lag, self.progress.iteration
        earlier = {
            version: weights for version, weights in self._sync.earlier.items() if first <= version < last
        }
        save = partial(save_checkpoint, folder, *trained, self.progress, self._settings, keep)
        [path, *_] = self.processes.all_gather(
            partial(save, rates=rates, best=best, earlier=earlier, processes=self.processes)
        )
        self.records.saved(path, self.progress.iteration)
        self._journal.forget(self.progress.iteration)

    def _make_collector(self, which: Literal["train", "val"], seed: int) -> SharedCollector:
        config, proxy = self.config, self.config.agent_proxy
        judged: dict[str, Any] = {"failures": self._failures, "judge": self._judge}
        sampler = self.sampler
        if config.trainer.lag:
            sampler = self._at[which] = At(sampler)
        collector: TrajectoryCollector
        if proxy.use_parallel_rollout:
            judged |= {"sessions": sessions_of, "tools": self.toolbox}
            collector = ParallelRolloutManager(config, sampler, side=which, seed=seed, **judged)
        else:
            side = self.train_envs if which == "train" else self.val_envs
            roles = make_roles(config.custom_envs, side.tags, proxy.max_turn)
            collector = TrajectoryCollector(
                side.pool, side.tags, roles, side.group_size, sampler, proxy.prompt, seed,
                env_retries=proxy.parallel.env_retries, toolbox=self.toolbox, **judged,
            )  # fmt: skip
        if which == "train" and config.trainer.lag:  # whose weights are set by iteration, in another thread
            return SharedCollector(collector, self.processes.apart())
        return SharedCollector(collector, self.processes, self._in_sync)

    @contextmanager
    def _in_sync(self) -> Iterator[None]:
        """The sampler writes by the present weights for as long as this lasts."""
        shards = isinstance(self.policy, ShardedPolicy) and self._sync.shared
        with self.policy.whole() if shards else nullcontext():  # type: ignore[attr-defined]
            self._sync.carry()
            if self._ahead is not None:
                self._at["val"].weights_version = self.policy.weights_version
            yield
