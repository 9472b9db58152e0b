"""Groups of environments in actors on a Ray cluster, with the results that the caller itself would get.

An actor serves its group in one thread and tells in another where that is. Ray never restarts an actor by itself:
the vector env does, so that an episode that was cut shows it.
"""
# ruff: noqa: D102 (what overrides are for is told where `Worker` and `Backend` have them)

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.executors import connect_ray
from shoal.core.processes import dumps
from shoal.envs.catalogue import EnvFn
from shoal.vector.buffers import LOADING
from shoal.vector.env_group import Reply, Reset, Step, even_cuts, ids_of
from shoal.vector.failures import Failure, from_exception
from shoal.vector.process import Backend, Limits, Worker, land, rows_of, with_own_rows
from shoal.vector.worker import Close, Make, QueueBox, packed, serve_or_end, unpacked

logger = logging.getLogger(__name__)
PLACING_OPTIONS = ("accelerator_type", "fallback_strategy", "label_selector", "scheduling_strategy")
"""With one of these Ray chooses the node of an actor."""
STRATEGIES = ("DEFAULT", "SPREAD")
OPTIONS = (*PLACING_OPTIONS, "memory", "num_cpus", "num_gpus", "resources", "runtime_env")
RETRY_SECONDS = 60.0
"""How long an actor that is lost before it serves is tried again: Ray may take 15 s to notice that a node is dead."""
REST_SECONDS = 0.1, 5.0
"""Before an actor that was lost so is tried the third time, and at most; doubled each time."""
REPORT_SECONDS = 10.0
"""Between two lines in the log about what is waited for, or what became of actors for one reason."""


class Sight(NamedTuple):
    """Where an actor is."""

    at: int = LOADING  # position in the group of the env that is at work
    pid: int | None = None
    node: str = ""
    times: Any = None  # histograms of the step times of its envs
    stack: str = ""


class Host:
    """The actor; of `path`, where its caller finds modules, those folders that exist here are searched, too."""

    def __init__(self, first: int, path: Sequence[str]) -> None:
        sys.path += [item for item in path if item not in sys.path and os.path.isdir(item)]
        self.first, self.box = first, QueueBox(queue.SimpleQueue())
        self.thread = threading.Thread(target=serve_or_end, args=(self.box,), daemon=True, name="envs")
        self.thread.start()

    def run(self, data: bytes) -> tuple[bytes, Any]:
        """Do what a command says: the reply, and the rows that a step or reset wrote."""
        try:
            command = pickle.loads(data)
        except BaseException as error:
            failure = from_exception(self.first, "reading its command", error, os.getpid())
            return packed(Reply(failures=[failure]), 0, self.first), None
        self.box.commands.put(command)
        self.box.bell.get()
        reply = self.box.replies.popleft()
        answer = b"" if reply is None else packed(reply, 0, self.first)
        if self.box.own is None or not isinstance(command, Step | Reset):
            return answer, None
        *rows, final = rows_of(self.box.own)
        return answer, (*rows, final if self.box.own.any_end() else None)

    def look(self, stack: bool = False) -> Sight:
        """Where it is now."""
        import ray

        frame = sys._current_frames().get(self.thread.ident or 0) if stack else None
        return Sight(
            self.box.progress[0],
            os.getpid(),
            ray.get_runtime_context().get_node_id(),
            None if self.box.own is None else self.box.own.times,
            "".join(traceback.format_stack(frame)) if frame is not None else "",
        )


class RayWorker(Worker):
    """A group in an actor."""

    inline, sends = False, True

    def __init__(self, backend: RayBackend, first: int, env_fns: Sequence[EnvFn], limits: Limits) -> None:
        super().__init__(first, env_fns, limits)
        self.backend, self.ray = backend, backend.ray
        self.name = f"env {first}" if self.count == 1 else f"envs {first} to {self.ids[-1]}"
        self.actor: Any = None
        self.node, self.starts = "", 0
        self.sight = Sight()
        self.placed = False
        """The actor lives; until then `reply` is that of a first look at it, and the command has not been sent."""
        self.reply: Any = None
        self._look: Any = None
        self._stack: Any = None
        self._data, self._retry_until = b"", 0.0
        self._tries = 0
        self.rests_until: float | None = None
        """Before which no other actor is started in the place of one that was lost on the way."""

    def _enter_actor(self) -> None:
        self.give_up()
        self.actor, self.node = self.backend.new_actor(self)
        self.sight, self.placed, self.reply, self._look, self._stack = Sight(), False, self._ask(), None, None
        self._tries, self.rests_until = self._tries + 1, None

    def _ask(self, stack: bool = False) -> Any:
        return self.actor.look.options(concurrency_group="look").remote(stack)

    def start(self, command: Any, *, bell: bool = False) -> None:
        """Send the command; the first one waits until a fresh actor has a place."""
        del bell
        data = self.bytes_of(with_own_rows(self, command))  # first: what cannot be sent was never begun
        self.command = command
        if isinstance(command, Make):
            self._data, self._retry_until = data, time.monotonic() + RETRY_SECONDS
            self.starts, self._tries = self.starts + 1, 0
            self._enter_actor()
        elif self.backend.connected():
            members = getattr(command, "members", None) or [0]
            self.sight, self._look = self.sight._replace(at=members[0]), None
            self.reply = self.actor.run.remote(data)

    def answered(self) -> bool:
        if self.lost is None and not self.backend.connected():
            self._die("the Ray session that it lived in was ended")
        if self.lost is not None:
            return True
        if self.rests_until is not None:
            if time.monotonic() >= self.rests_until:
                self._enter_actor()
            return False
        if not self.backend.is_there(self.reply):
            if not self.placed:
                self.backend.report()
            return False
        return self.placed or self._place()

    def _place(self) -> bool:
        """The actor has a place, or died on the way there: then again elsewhere. True if that is of no use."""
        errors = self.ray.exceptions
        try:
            self.sight = self.ray.get(self.reply)
        except errors.RayError as error:
            self.backend.suspects.add(self.node)
            broken = getattr(error, "actor_init_failed", False)
            if (
                broken
                or isinstance(error, errors.RuntimeEnvSetupError)
                or time.monotonic() > self._retry_until
            ):
                often = (
                    f"; so did {self._tries - 1} before it, and no other is tried" if self._tries > 1 else ""
                )
                self._die(_reason(error) + often, str(error))
                return True
            self.backend.tell_lost(self.name, _reason(error))
            least, most = REST_SECONDS
            rest = 0.0 if self._tries == 1 else min(least * 2 ** (self._tries - 2), most)
            self.rests_until = time.monotonic() + rest
            return False
        self.placed, self.node = True, self.sight.node
        self.reply = self.actor.run.remote(self._data)
        return False

    def _die(self, reason: str, trace: str = "") -> None:
        failure = self.failure("died", f"the Ray actor of {self.name} is gone: {reason}")
        others = [str(i) for i in self.ids if i != failure.env]
        if others and isinstance(
            self.command, Step | Reset
        ):  # (where it was is known from the last look at it)
            failure.summary += f" (or it was the fault of env {', '.join(others[:8])})"
        failure.trace = trace
        self.lose(failure)

    def pause(self, seconds: float) -> None:
        self.backend.wait_for([self], seconds)

    def quick(self) -> bool:
        """`answered`, after a short wait: one call of Ray instead of three."""
        self.pause(0.01)
        return self.answered()

    def receive(self) -> Reply | None:
        try:
            data, rows = self.ray.get(self.reply)
        except self.ray.exceptions.RayError as error:
            self.backend.suspects.add(self.node)
            self._die(_reason(error), str(error))
            return None
        if rows is not None and self.buffers is not None:
            land(rows, self.command, self.buffers, self.first, self.count)
        try:
            reply = unpacked(data)[1] if data else None
        except Exception as error:  # what came cannot be read here
            return self.unreadable(error)
        if reply is not None and rows is None and isinstance(self.command, Step | Reset):
            (failure,) = (
                reply.failures
            )  # it could not read the command, so none of its envs has done anything
            reply.failures = [replace(failure, env=i) for i in ids_of(self, self.command)]
        return reply

    def progress(self) -> int:
        """Position of the env that it was at when last looked at; looks again, without waiting."""
        if self.placed and self.lost is None and self.backend.connected():
            if self._look is None:
                self._look = self._ask()
            elif self.backend.is_there(self._look):
                with contextlib.suppress(self.ray.exceptions.RayError):  # whoever takes the reply tells
                    self.sight = self.ray.get(self._look)
                self._look = None
        return self.sight.at

    def overdue(self, now: float) -> float | None:
        """The time limit that is exceeded; that of making counts for a place that the cluster does not have, too."""
        limit = self.limits.of(self.command)
        if limit is not None and not self.placed and now - self._seen[1] > limit and self.backend.hopeless():
            return limit
        return super().overdue(now)

    def lose(self, failure: Failure) -> None:
        """Give it up; one that never had a place tells what was missing."""
        if failure.kind == "timeout" and not self.placed:
            failure.summary += f"; {self.backend.shortage()}"
        super().lose(failure)

    def give_up(self) -> None:
        if self.actor is not None and self.backend.connected():
            with contextlib.suppress(Exception):  # it is gone already
                self.ray.kill(self.actor)

    def ask_stack(self) -> None:
        """Have the actor tell where the thread of its envs is."""
        self._stack = self._ask(stack=True)

    def stack(self) -> str:
        if self._stack is None or not self.backend.connected():
            return ""
        with contextlib.suppress(self.ray.exceptions.RayError):
            if self.backend.is_there(self._stack):
                return str(self.ray.get(self._stack).stack)
        return ""

    def own_times(self) -> Any:
        """Of the group's own buffers; takes a second at most."""
        with contextlib.suppress(self.ray.exceptions.RayError):  # then what was known before
            if self.placed and self.lost is None and self.backend.connected():
                self.sight = self.ray.get(self._ask(), timeout=1.0)
        return self.sight.times

    @property
    def pid(self) -> int | None:
        return self.sight.pid


def _reason(error: BaseException) -> str:
    """What Ray says of a death, in one line."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "\t"))]
    told = next((line for line in lines if "dead because" in line), (lines or [type(error).__name__])[-1])
    return told.partition("dead because ")[2].partition(". ")[0] or told[:300]


class RayBackend(Backend):
    """Actors with a group each; Ray is started here, locally, where it does not run yet.

    Without `n_workers` there are as many as the cluster has room for; `options` are the actors', as Ray names them.
    """

    def __init__(
        self, env_fns: Sequence[EnvFn], n_workers: int | None, limits: Limits, options: Mapping[str, Any]
    ) -> None:
        for name in options:
            if name not in OPTIONS:
                raise ConfigError(f"ray_options has no {name!r}.{did_you_mean(name, OPTIONS)}")
        strategy = options.get("scheduling_strategy", STRATEGIES[0])
        if isinstance(strategy, str) and strategy not in STRATEGIES:
            raise ConfigError(
                f"scheduling_strategy must be one of {STRATEGIES} or an object of Ray's, got {strategy!r}."
                f"{did_you_mean(strategy, STRATEGIES)}"
            )
        self.workers: list[RayWorker] = []
        self.suspects: set[str] = set()
        """Nodes on which an actor died: perhaps they did, too."""
        self._reported, self._we_place = 0.0, options.keys().isdisjoint(PLACING_OPTIONS)
        self._losses: dict[
            str, tuple[float, int]
        ] = {}  # by reason: when it was told, and how often it came since
        self.ray, self.open = connect_ray(), True
        try:
            fixed = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"look": 1}}
            self._kind = self.ray.remote(**fixed, **options)(Host)
            cpus, more = options.get("num_cpus"), options.get("resources") or {}
            want = {"CPU": 1 if cpus is None else cpus, "GPU": options.get("num_gpus")}
            want |= {"memory": options.get("memory"), **more}
            self.want = {name: amount for name, amount in want.items() if amount}
            self.keeps = not {"num_cpus", "num_gpus", "resources"}.isdisjoint(options)
            """It is an actor's own while it lives; else, as is Ray's way, only needed to find a place."""
            room = n_workers or sum(map(self._room, self.nodes()))
            if math.isinf(room):
                room = self.ray.cluster_resources().get("CPU", 1)
            for lo, hi in even_cuts(len(env_fns), max(1, min(int(room), len(env_fns)))):
                self.workers.append(RayWorker(self, lo, env_fns[lo:hi], limits))
        except BaseException as error:
            if isinstance(error, ValueError | TypeError):
                raise ConfigError(f"Ray refuses ray_options={dict(options)}: {error}") from error
            raise

    def connected(self) -> bool:
        """The session in which the actors live goes on."""
        return bool(self.ray.is_initialized())

    def is_there(self, reference: Any) -> bool:
        """Its value, or an error in place of it, can be had at once."""
        return bool(self.ray.wait([reference], timeout=0)[0])

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that live, as far as Ray knows."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _room(self, node: dict[str, Any]) -> float:
        """How many actors a node can hold."""
        has = node["Resources"]
        room = min((int(has.get(k, 0) / n + 1e-6) for k, n in self.want.items()), default=math.inf)
        return room if self.keeps or not room else math.inf

    def start(self, workers: Sequence[Any]) -> None:
        self._reported = time.monotonic()
        for worker in workers:
            worker.node = ""
        super().start(workers)

    def new_actor(self, worker: RayWorker) -> tuple[Any, str]:
        """An actor and its node: of those with room the one with the fewest of ours for its CPUs.

        Ray's own "SPREAD" may put twice as many on one node as on another.
        """
        kind, node = self._kind, ""
        if self._we_place:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            ours = [other.node for other in self.workers if other is not worker and other.lost is None]
            ranks = []
            for found in self.nodes():
                name, cpus = found["NodeID"], max(found["Resources"].get("CPU", 0), 0.01)
                if self._room(found) > ours.count(name) and self._is_up(found):
                    ranks.append(((ours.count(name) + 1) / cpus, name))
            node = min(ranks)[1] if ranks else ""
            soft = bool(self.want)  # may go elsewhere; Ray does not heed this of an actor that needs nothing
            wish: Any = "SPREAD"
            if node:
                wish = NodeAffinitySchedulingStrategy(node, soft=soft, _spill_on_unavailable=soft)
            kind = kind.options(scheduling_strategy=wish)
        return kind.remote(worker.first, sys.path), node

    def _is_up(self, node: dict[str, Any]) -> bool:
        """Ray takes long to notice that a node is dead, so one under suspicion is asked for a connection."""
        if node["NodeID"] in self.suspects:
            with contextlib.suppress(OSError):
                socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), 1.0).close()
                self.suspects.discard(node["NodeID"])
        return node["NodeID"] not in self.suspects

    def hopeless(self) -> bool:
        """Even with nothing else on it the cluster, as it is, has no room for all actors."""
        return sum(map(self._room, self.nodes())) < len(self.workers)

    def shortage(self) -> str:
        """What is waited for, and what there is."""
        waiting = [worker.name for worker in self.workers if worker.lost is None and not worker.placed]
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        text = (
            f"waiting for {_amounts({name: amount * len(waiting) for name, amount in self.want.items()})}: "
        )
        text += f"{len(waiting)} of {len(self.workers)} actors have no place yet ({', '.join(waiting[:8])}), "
        text += f"{_amounts(self.want)} each; the cluster has {_amounts({k: total.get(k, 0) for k in self.want})} "
        text += f"on {len(self.nodes())} nodes, of which {_amounts({k: free.get(k, 0) for k in self.want})} are free"
        if self.hopeless():
            text += "; this can never do: add nodes, ask for less (ray_options) or fewer actors (num_workers)"
        return text

    def report(self) -> None:
        """Write into the log now and then what is waited for."""
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            logger.warning("%s", self.shortage())

    def tell_lost(self, name: str, reason: str) -> None:
        """Write into the log that an actor died before it served: of many for one reason one line now and then."""
        told, more = self._losses.get(reason, (-math.inf, 0))
        if time.monotonic() - told < REPORT_SECONDS:
            self._losses[reason] = told, more + 1
            return
        since = f"; {more + 1} since this was said last" if more else ""
        logger.warning("the actor for %s died before it served (%s); starting another%s", name, reason, since)
        self._losses[reason] = time.monotonic(), 0

    def wait_for(self, workers: Sequence[RayWorker], seconds: float) -> None:
        """Sleep until one of these that are at work has an answer or is to be tried again, or so many seconds."""
        working = [worker for worker in workers if worker.command is not None and worker.lost is None]
        rests = [worker.rests_until for worker in working if worker.rests_until is not None]
        seconds = max(0.0, min([seconds, *(until - time.monotonic() for until in rests)]))
        replies = [worker.reply for worker in working if worker.rests_until is None]
        if replies and self.connected():
            self.ray.wait(replies, timeout=seconds)
        elif rests:
            time.sleep(seconds)

    def wait_bell(self, seconds: float) -> None:
        self.wait_for(self.workers, seconds)

    def stats(self) -> list[dict[str, Any]]:
        return [{"pid": w.pid, "node": w.node, "restarts": w.starts - 1} for w in self.workers]

    def close(self, seconds: float) -> None:
        """Have the actors close their envs, kill them, and end a Ray that was started for vector envs."""
        if self.open and self.connected():
            told = [worker.actor for worker in self.workers if worker.lost is None and worker.placed]
            replies = [actor.run.remote(dumps(Close())[0]) for actor in told]
            if replies:
                self.ray.wait(replies, num_returns=len(replies), timeout=seconds)
            for worker in self.workers:
                worker.give_up()
        self.open = False


def _amounts(amounts: Mapping[str, float]) -> str:
    """Resources in words.

    >>> _amounts({"CPU": 2, "GPU": 0.5, "simulator": 1})
    '2 CPUs, 0.5 GPUs, 1 simulator'
    """
    words = [f"{n:g} {name}{'s' * (name in ('CPU', 'GPU') and n != 1)}" for name, n in amounts.items()]
    return ", ".join(words) or "nothing"
