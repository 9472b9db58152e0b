"""Rollouts drawn at random, with faults, each compared with the serial one.

`python -m tests.rollout.parallel.stress FIRST_SEED SECONDS` goes on for a time.
A case that takes too long shows where every thread is and ends the program.
"""

import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.rollout.doubles import CounterEnv, HashEngine, config

from shoal import envs
from shoal.core.errors import EngineError
from shoal.core.processes import Zygote
from shoal.rollout.parallel.rollout import ParallelRolloutManager
from shoal.rollout.samplers.sampler import Key, Request

LIMIT = 240
"""Seconds of one case."""
OURS = ("shoal-episode", "shoal-share", "shoal-inference", "shoal-engine", "shoal-worker-keeper")


class MovingEngine(HashEngine):
    """Slow at times, failing at times; its words follow its weights."""

    def __init__(self, draw=None, stumbles=False):
        super().__init__()
        self.draw, self.stumbles, self.failed = draw, stumbles, set()

    def generate(self, requests):
        if self.draw is not None:
            time.sleep(self.draw.choice((0, 0, 0, 0.0005, 0.002, 0.01)))
        keys = {r.key for r in requests if (7 * r.key.group + 3 * r.key.member + r.key.turn) % 11 == 0}
        if self.stumbles and keys - self.failed:
            self.failed |= keys
            raise EngineError("stumbled")
        return super().generate(requests)

    def _answer(self, request):
        _, *names = (getattr(request.key, name) for name in Key.__struct_fields__)
        key = Key(1000 * self.weights_version + request.key.seed, *names)
        return super()._answer(Request(request.prompt_ids, key, request.sampling))


class Case:
    """One manager and what happens to it."""

    def __init__(self, seed, folder):
        self.draw = draw = random.Random(seed)
        self.backend = draw.choice(("threads", "threads", "processes", "processes", "processes", "loky"))
        self.fault = draw.choice(("", "", "", "raise", "exit", "nan", "hang", "raise once", "kill once"))
        if self.fault == "kill once" and self.backend == "threads":
            self.fault = "raise once"
        self.shape = {
            "groups": draw.randint(1, 6),
            "members": draw.randint(1, 4),
            "max_steps": draw.randint(1, 6),
            "every": draw.choice((2, 3, 4)),
        }
        self.parallel = {
            "schedule": draw.choice(("adaptive", "greedy", "barrier")),
            "episodes_at_once": draw.choice((None, None, 1, 2, 5)),
            "max_batch": draw.choice((1, 3, 4096, 4096)),
            "step_timeout": 0.6 if self.fault == "hang" else draw.choice((None, None, 20.0)),
            "episode_timeout": draw.choice((None, None, 40.0)),
            "request_timeout": draw.choice((None, None, 40.0)),
            "engine_timeout": draw.choice((None, None, 40.0)),
            "env_retries": draw.choice((1, 2)) if "once" in self.fault else draw.choice((0, 1, 2)),
            "engine_retries": draw.choice((1, 2)),
            "keep_envs": draw.random() < 0.4,
            "max_deaths": 1000,
        }
        self.stumbles = draw.random() < 0.4
        self.n_jobs = draw.choice((1, 2, 2, 3, 4, 7))
        self.nap = draw.choice((0, 0, 0.002, 0.02))
        self.once = folder / "once"
        self.acts = [
            draw.choice(("play", "play", "part", "kill", "drop", "interrupt", "close", "twice", "zygote"))
            for _ in range(draw.randint(1, 4))
        ]

    def __str__(self):
        return (
            f"{self.backend} {self.n_jobs} fault={self.fault!r} nap={self.nap} stumbles={self.stumbles} "
            f"{self.shape} { {k: v for k, v in self.parallel.items() if v is not None} } {self.acts}"
        )

    def config(self, **env):
        return config(**self.shape, n_jobs=self.n_jobs, parallel=self.parallel, **env)

    def run(self):
        """Play, and compare."""
        fault, _, once = self.fault.partition(" ")
        plain = {"hang": "raise"}.get(fault, "" if once else fault)
        engine = MovingEngine(self.draw, self.stumbles)
        reference = MovingEngine()
        settings = self.config(fault=fault, nap=self.nap, once=str(self.once) if once else "")
        with (
            ParallelRolloutManager(self.config(fault=plain), reference, backend="serial") as serial,
            ParallelRolloutManager(settings, engine, backend=self.backend) as manager,
        ):
            for number, act in enumerate([*self.acts, "play"]):
                engine.weights_version = reference.weights_version = 3 + number
                first, n = 0, self.shape["groups"]
                if act == "part":
                    first, n = self.draw.randint(0, 9), self.draw.randint(1, n)
                played = self.do(
                    act, manager, lambda f=first, n=n: manager.collect(4, first_group=f, n_groups=n)
                )
                if played is not None:
                    self.compare(serial.collect(4, first_group=first, n_groups=n), played, act)
        assert not manager.worker_pids()

    def do(self, act, manager, collect):
        """The trajectories, or None where the rollout ended early."""
        wait = self.draw.random() * 0.4
        if act == "interrupt":
            main = threading.main_thread().ident
            timer = threading.Timer(wait, lambda: signal.pthread_kill(main, signal.SIGUSR1))
            with contextlib.suppress(KeyboardInterrupt):
                timer.start()
                collect()
                time.sleep(60)
            return None
        if act == "close":
            manager.close()
        if act == "twice":
            other = threading.Thread(target=collect)
            other.start()
            played = collect()
            other.join()
            return played
        fault = {"kill": self.kill, "drop": self.drop, "zygote": self.kill_zygote}.get(act)
        timers = [threading.Timer(wait * k, fault, [manager]) for k in (0.3, 1.0)] if fault else []
        for timer in timers:
            timer.start()
        played = collect()
        for timer in timers:
            timer.join()
        return played

    def kill(self, manager):
        for pid in manager.worker_pids()[:2]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def drop(self, manager):
        inference = manager._inference
        if inference is not None:
            known = inference._connections
            inference._post(lambda: [known.drop(c) for c in list(known._by_descriptor.values())[:2]])

    def kill_zygote(self, manager):
        if self.backend == "processes" and Zygote._current is not None:
            Zygote._current.process.kill()

    def compare(self, expected, played, act):
        if self.fault != "hang":
            assert played == expected, (act, differences(expected, played))
            return
        for before, now in zip(expected, played, strict=True):
            if before.status == "ok":
                assert now == before, (act, differences([before], [now]))
            else:
                assert (now.status, now.turns) == ("timeout", before.turns), (act, now.status, now.error)


def differences(expected, played):
    return [
        (b.group, b.member, b.status, n.status, n.error)
        for b, n in zip(expected, played, strict=True)
        if b != n
    ]


def settle(before):
    """Wait until the threads of the manager are gone (those that hang in an env apart)."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        left = [t.name for t in set(threading.enumerate()) - before if t.name in OURS]
        if not left:
            return []
        time.sleep(0.02)
    return left


def run_case(seed, limit=LIMIT):
    """Play a case; its threads are gone afterwards, and its descriptors are closed."""
    envs.register("test_counter", CounterEnv, replace=True)
    faulthandler.dump_traceback_later(limit, exit=True)
    signal.signal(signal.SIGUSR1, signal.default_int_handler)  # a shell may have SIGINT ignored
    before, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(seed, Path(folder))
            try:
                case.run()
            except BaseException as error:
                raise AssertionError(f"case {seed}: {case}") from error
            left = [] if case.fault == "hang" else settle(before)
            assert not left, (seed, str(case), left)
            if case.backend != "loky" and case.fault != "hang":
                opened = len(os.listdir("/proc/self/fd")) - descriptors
                assert opened <= 2, (seed, str(case), opened)  # the process that forks has been started
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    first, seconds = int(sys.argv[1]), float(sys.argv[2])
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            run_case(seed)
        except AssertionError:
            import traceback

            traceback.print_exc()
        if (took := time.monotonic() - began) > 12:
            print(f"case {seed} took {took:.1f} s: {Case(seed, Path('.'))}", flush=True)  # noqa: T201
        seed += 1
    print(f"{seed - first} cases", flush=True)  # noqa: T201
    os._exit(0)
