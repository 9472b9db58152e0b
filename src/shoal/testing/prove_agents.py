"""Agent training, proved: one after another, in lockstep, on workers, on Ray, and with each of its processes killed."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import WorkerDiedError
from shoal.core.workers import WorkerProcess, describe_exit, dumps
from shoal.rollout.samplers.sampler import ChatTokenizer, Completion, Level, Request
from shoal.rollout.samplers.settings import EngineConfig
from shoal.rollout.verify import Difference
from shoal.testing.proof import (
    Case,
    Part,
    Toll,
    bytes_read_by,
    kill,
    kill_when,
    meanwhile,
    ray_is_here,
    rows_of,
    run_shoal,
    shoal_command,
)
from shoal.testing.recorded_runs import episodes_digest, first_difference, weights_digest

KEPT = ("trainer.save_trajectories_every=1", "trainer.tensorboard=false", "trainer.wandb=false")
"""Every episode of a proof is recorded."""


def agents(
    config_name: str = "demo",
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    *,
    quick: bool = False,
    faults: bool = True,
    ray: bool | None = None,
) -> Part:
    """The proof of a config.

    Args:
        config_name: of shoal's own configs, or of those in `config_dir`.
        overrides: settings to change, `key=value`.
        config_dir: folder with YAML configs.
        quick: two iterations of a few small groups instead of the whole run.
        faults: also kill workers, sampler and trainer.
        ray: also play on Ray; where it is installed, if not given.
    """
    training = _Training(config_name, [*overrides, *KEPT], config_dir, quick)
    cases = [
        training.case("one by one", "agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=serial"),
        training.case("lockstep", "agent_proxy.use_parallel_rollout=false", "use_parallel_envs=false",
                      "vector.step_timeout=null"),
        training.case("lockstep, envs in 3 workers", "agent_proxy.use_parallel_rollout=false",
                      "use_parallel_envs=true", "vector.backend=process", "vector.num_workers=3"),
    ]  # fmt: skip
    for workers in (3, 16):
        for name, schedule in (("greedy", "adaptive"), ("lockstep", "barrier")):
            cases.append(training.case(f"{workers} workers, {name}", *_workers(workers, schedule)))
    if ray_is_here(ray):
        on_ray = [*_workers(3, "adaptive")[:-1], "agent_proxy.parallel.backend=ray"]
        cases.append(training.case("3 workers on Ray", *on_ray))
    if faults:
        cases.append(Case("workers killed", training.with_workers_killed, fault=True))
        if training.own_sampler:
            cases.append(Case("sampler killed", training.with_sampler_killed, fault=True))
        cases.append(Case("trainer killed", training.with_trainer_killed, fault=True))
    calm = "3 workers, greedy"
    return Part("agents", "episodes", cases, training.digests, training.difference, calm, training.seed)


def _workers(count: int, schedule: str) -> tuple[str, ...]:
    return (
        "agent_proxy.use_parallel_rollout=true", f"agent_proxy.parallel_n_jobs={count}",
        f"agent_proxy.parallel.schedule={schedule}", "agent_proxy.parallel.backend=processes",
    )  # fmt: skip


class _Training:
    """A config that is trained again and again."""

    def __init__(self, name: str, overrides: Sequence[str], folder: Path | None, quick: bool) -> None:
        self.name, self.folder = name, folder
        self.overrides = list(overrides)
        if quick:
            self.overrides += _smaller(
                self.config([]), [word.partition("=")[0].lstrip("+~") for word in overrides]
            )
        config = self.config([])
        self.own_sampler = config.engine.name in ("tiny", "huggingface") and not config.model.lora.rank
        self.seed = config.seed
        self._hosts: Callable[[], list[int]] = list  # the processes that play, of the run that is under way
        self.exact = (
            config.engine.name == "tiny" and config.engine.device == "cpu" and config.engine.threads == 1
        )

    def config(self, changes: Sequence[str], run: Path | None = None) -> Any:
        """The settings of a run."""
        from shoal.train.agent.config import compose_config

        where = [] if run is None else [f"run_dir={run}"]
        return compose_config(self.name, [*self.overrides, *changes, *where], self.folder)

    def case(self, name: str, *changes: str) -> Case:
        """The run, played in this process with these settings."""
        return Case(name, lambda run: self.train(run, changes))

    def train(self, run: Path, changes: Sequence[str], sampler: Any = None, policy: Any = None) -> None:
        """The whole run, in this process."""
        import torch

        from shoal.train.agent.trainer import AgentTrainer

        config = self.config(changes, run)
        threads = torch.get_num_threads()
        torch.set_num_threads(config.engine.threads)
        try:
            with AgentTrainer(config, policy=policy, sampler=sampler) as trainer:
                self._hosts = trainer.worker_pids
                for _ in trainer.train():
                    pass
        finally:
            torch.set_num_threads(threads)

    # --- what is compared
    def digests(self, run: Path) -> dict[str, str]:
        """Of the recorded episodes and, where the engine is exact to the bit, of the weights."""
        found = {"episodes": episodes_digest(run, tokens_only=not self.exact)}
        if self.exact:
            found["weights"] = weights_digest(max((run / "checkpoints").glob("step-*"), key=_number))
        return found

    def difference(self, one: Path, other: Path) -> str:
        """The first token, seed or answer of an env in which two runs differ."""
        found: Difference | None = first_difference(one, other, tokens_only=not self.exact)
        return "" if found is None else str(found)

    # --- faults
    def with_workers_killed(self, run: Path) -> Toll:
        """Three workers; one that has just been answered, and so is at play, is killed until episodes were lost."""
        toll = Toll()

        def killing(done: threading.Event) -> None:
            heard: dict[int, int] = {}
            in_row = Counter[
                int
            ]()  # kills by the iteration: an episode that ends three workers counts as the cause
            while not done.wait(0.002):
                rows = rows_of(run)
                if in_row[len(rows)] == 2:
                    continue
                if sum(row.get("replayed_episodes", 0) for row in rows) and toll.kills >= 2:
                    return
                for pid in self._hosts():
                    before, heard[pid] = heard.get(pid), bytes_read_by(pid)
                    if rows and before is not None and heard[pid] != before:  # the run has begun
                        landed = kill(pid)
                        toll.kills += landed
                        in_row[len(rows)] += landed
                        done.wait(0.1)
                        break

        with meanwhile(killing):
            self.train(run, _workers(3, "adaptive"))
        toll.again = int(sum(row.get("replayed_episodes", 0) for row in rows_of(run)))
        return toll

    def with_sampler_killed(self, run: Path) -> Toll:
        """The sampler in a process of its own, killed over the requests that it is answering."""
        from shoal.rollout.factory import words_of
        from shoal.train.agent.policy import make_policy

        config = self.config(_workers(3, "adaptive"), run)
        words = words_of(config)
        policy, _ = make_policy(config.engine, words, config.seed)
        sampler = SamplerProcess(config.engine, words, config.seed)
        toll = Toll()

        def killing(done: threading.Event) -> None:
            answered = -1  # a request that is lost twice is not asked a third time: it has to be another one
            while toll.kills < 2 and not done.wait(0.002):
                if sampler.asking and sampler.answered > answered and rows_of(run) and kill(sampler.pid):
                    toll.kills += 1
                    answered = sampler.answered + 1

        try:
            with meanwhile(killing):
                self.train(run, _workers(3, "adaptive"), sampler, policy)
        finally:
            sampler.close()
        toll.again, toll.seconds = sampler.lost_requests, sampler.lost_seconds
        return toll

    def with_trainer_killed(self, run: Path) -> Toll:
        """`shoal train` killed when episodes are played that no checkpoint has learned from; then resumed."""
        words = ["train", "--config-name", self.name]
        words += [] if self.folder is None else ["--config-dir", str(self.folder)]
        words += [*self.overrides, *_workers(3, "adaptive"), f"run_dir={run}"]
        log = run.with_name(f"{run.name}.log")
        log.unlink(missing_ok=True)
        process = shoal_command(words, log)
        if not kill_when(process, lambda: bool(_unsafe(run))):
            return Toll()
        lost = _unsafe(run)
        episodes = sum(len(path.read_bytes().splitlines()) for path in lost)
        when, stamps = time.time(), {path: path.stat().st_mtime for path in lost}
        run_shoal([*words, "resume=true"], log)
        again = [path for path in lost if path.stat().st_mtime > stamps[path]]
        back = max((path.stat().st_mtime for path in again), default=when)
        return Toll(1, episodes if len(again) == len(lost) else 0, back - when)


def _unsafe(run: Path) -> list[Path]:
    """Files of training episodes that no checkpoint has learned from yet."""
    newest = max((_number(path) for path in (run / "checkpoints").glob("step-*")), default=-1)
    if newest < 0:
        return []
    return [path for path in sorted((run / "trajectories").glob("train-*.jsonl")) if _number(path) > newest]


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _smaller(config: Any, given: Sequence[str]) -> list[str]:
    """Two iterations of small groups: settings that make the run short, but for those that were given."""
    train, val = config.es_manager.train, config.es_manager.val
    wanted = {
        "trainer.iterations": 2,
        "trainer.eval_every": 2,
        "trainer.save_every": 2,
        "warmup.steps": min(config.warmup.steps, 20),
        "agent_proxy.max_turn": min(config.agent_proxy.max_turn or 6, 6),
        "es_manager.train.env_groups": _groups(train, 3),
        "es_manager.train.group_size": min(train.group_size, 4),
        "es_manager.val.env_groups": _groups(val, 4),
    }
    return [f"{key}={value}" for key, value in wanted.items() if key not in given]


def _groups(side: Any, wanted: int) -> int:
    """About so many groups, of every kind as many as its share."""
    shares = sum(side.env_configs.n_groups) if side.env_configs.n_groups else len(side.env_configs.tags)
    return min(int(side.env_groups), shares * max(1, wanted // shares))


# --- a sampler that may be killed at any moment
ATTEMPTS = 3
"""To begin anew, should the new process be killed as well."""


class SamplerProcess:
    """What `make_engine` makes of the same arguments, in a process of its own that may be killed at any moment.

    It begins anew with the last weights. Any thread may ask, one at a time does.

    Args:
        config: the `engine` part of a run's settings.
        words: action words that are one token each (tiny engine).
        seed: of fresh weights (tiny engine).
    """

    def __init__(self, config: EngineConfig, words: Sequence[str] = (), seed: int = 0) -> None:
        self._made_of = (config, tuple(words), seed)
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._weights: tuple[bytes, int] | None = None
        self.asking = 0
        """Requests that it is answering now."""
        self.answered = 0
        """Batches that it has answered."""
        self.lost_requests = 0
        """Requests that were asked for again, since the process died over them."""
        self.lost_seconds = 0.0
        """From a death until the next process was ready."""
        self.weights_version: int
        """Of the last weights."""
        self.tokenizer: ChatTokenizer
        self.level: Level
        self._start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.

        Raises:
            WorkerDiedError: the process died over these requests.
        """
        with self._lock:
            self.asking = len(requests)
            try:
                answer: list[Completion] = self._ask("generate", list(requests))
            except WorkerDiedError as error:
                self.lost_requests += len(requests)
                raise WorkerDiedError(f"the sampler's process {self.pid} is gone") from error
            finally:
                self.asking = 0
            self.answered += 1
            return answer

    def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Take over weights by name; `version` marks the completions they produce."""
        from safetensors.torch import save

        with self._lock:
            packed = save({name: tensor.contiguous().clone() for name, tensor in weights.items()})
            self._weights = packed, version
            self.weights_version = version
            try:
                self._ask("weights", self._weights)
            except WorkerDiedError:
                # killed just now: the next one gets them as it starts
                self._begin_anew()

    def restart(self) -> None:
        """Begin anew with the last weights, in a fresh process."""
        with self._lock:
            self._begin_anew()

    def close(self) -> None:
        """End the process; may be called twice."""
        with self._lock:
            if self._process is not None:
                self._process.close()

    def _begin_anew(self) -> None:
        began = time.monotonic()
        for attempt in range(ATTEMPTS):
            try:
                self._start()
                if self._weights is not None:
                    self._ask("weights", self._weights)
                break
            except WorkerDiedError:  # killed again before it was ready
                if attempt == ATTEMPTS - 1:
                    raise
        self.lost_seconds += time.monotonic() - began

    def _start(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = WorkerProcess(serve)
        self.tokenizer, self.level, version = self._ask("make", self._made_of)
        if self._weights is None:
            self.weights_version = version

    def _ask(self, what: str, value: Any) -> Any:
        assert self._process is not None
        try:
            self._process.pipe.send_bytes(dumps((what, value)))
            answer = pickle.loads(self._process.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.wait(1.0)
            raise WorkerDiedError(f"worker {self.pid} {describe_exit(self._process.exit_code)}") from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


def serve(pipe: Any) -> None:
    """What the process runs: make a sampler, then answer until the other side is gone."""
    from shoal.rollout.samplers.registry import make_engine

    sampler: Any = None
    while True:
        try:
            what, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        answer: Any = None
        try:
            if what == "make":
                import torch

                config, words, seed = value
                torch.set_num_threads(config.threads)
                sampler = make_engine(config, words, seed)
                answer = (sampler.tokenizer, sampler.level, sampler.weights_version)
            elif what == "weights":
                from safetensors.torch import load

                sampler.load_weights(load(value[0]), value[1])
            else:
                answer = sampler.generate(value)
        except Exception as error:
            answer = error
        pipe.send_bytes(dumps(answer))
