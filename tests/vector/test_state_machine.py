"""Any sequence of operations and faults, on every backend: each call returns in time and tells the truth.

A machine plays a vector env beside the twins of `model.py`. What a fault does is chosen by the actions; no
rule may take longer than its watchdog allows, and after `close` nothing is left behind.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from shoal.core.errors import EnvError, WorkerError
from tests.vector.living import children
from tests.vector.model import FAULTS, LETHAL, LIMIT, RELEASED, SLOW, Encoded, Seen, Twin, unbatched
from tests.vector.same_step import make_vec

N = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2, "step_timeout": LIMIT},
    "process": {"backend": "process", "num_workers": 2, "step_timeout": LIMIT},
    "ray": {"backend": "ray", "num_workers": 2, "step_timeout": 2.0},
}
PATIENT = 1.0
"""The `step_timeout` in seconds where there is time: a busy machine may stand still longer than `LIMIT`."""
WATCHDOG = 60.0
"""Seconds that one rule may take on a busy machine; what hangs takes for ever."""

everyone = range(N)
plain = st.lists(st.one_of(st.integers(0, 7), st.integers(0, 7), st.just(SLOW)), min_size=N, max_size=N)
quick = st.lists(st.integers(0, 7), min_size=N, max_size=N)
faults = st.dictionaries(st.integers(0, N - 1), st.sampled_from(sorted(FAULTS)), min_size=1, max_size=2)
chosen = st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True)
seeds = st.integers(0, 10**6)


class TookTooLong(KeyboardInterrupt):
    """Raised into a call that hangs; a KeyboardInterrupt is what every backend lets through."""


@contextlib.contextmanager
def watchdog(what: str) -> Iterator[None]:
    """Fails when what is inside hangs."""

    def bark(*_: Any) -> None:
        raise TookTooLong

    handler = signal.signal(signal.SIGALRM, bark)
    before, _ = signal.setitimer(signal.ITIMER_REAL, WATCHDOG)
    try:
        yield
    except TookTooLong:
        raise AssertionError(f"{what} hangs") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)
        signal.signal(signal.SIGALRM, handler)


def named(error: BaseException) -> set[int]:
    """The envs that an error names, in its notes too."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {int(number) for number in re.findall(r"env (\d+)\b", text)}


def rows_of(obs: Any, rewards: Any, terminated: Any, truncated: Any, infos: Any) -> list[Seen]:
    """A batch row by row; flags and rewards are Python's."""
    parts = obs, rewards.tolist(), terminated.tolist(), truncated.tolist(), infos
    return [Seen(*row) for row in zip(*parts, strict=True)]


def belongings() -> tuple[set[int], int, int]:
    """Child processes, threads and open files of this process."""
    return children(), threading.active_count(), psutil.Process().num_fds()


def remembered(function: Any) -> Any:
    """When this rule fails, `teardown` does not look further."""

    @functools.wraps(function)
    def checked(self: Any, **values: Any) -> None:
        try:
            function(self, **values)
        except BaseException:
            self.failed = True
            raise

    return checked


def operation(**strategies: Any) -> Any:
    """A rule of the machine. It has no preconditions: what comes when depends on the machine's speed."""
    return lambda function: rule(**strategies)(remembered(function))


@functools.cache
def warm_up(backend: str) -> None:
    """Start what is started once."""
    for options in LAYOUTS.values() if backend != "ray" else [LAYOUTS["ray"]]:
        if options["backend"] == backend:
            envs = make_vec([functools.partial(Encoded, i) for i in everyone], **options)
            envs.reset(seed=0)
            envs.close()


class VectorMachine(RuleBasedStateMachine):
    """A vector env and its twins.

    Args:
        layout: which of `LAYOUTS`.
        limit: another `step_timeout` in seconds.
    """

    def __init__(self, layout: str, limit: float | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.options = {**LAYOUTS[layout], **({"step_timeout": limit} if limit else {})}
        self.envs: Any = None
        self.failed = False
        self.flying: dict[int, tuple[str, int]] = {}
        self.broken = False
        """An operation has raised: a full reset must follow."""
        self.endangered = False
        """A worker may have ended in a step that was given up, or is ending for one in flight."""

    # making and closing

    @initialize(
        policy=st.sampled_from(["raise", "restart", "restart"]),
        mode=st.sampled_from(["same_step", "next_step", "disabled"]),
        seed=seeds,
    )
    @remembered
    def open(self, policy: str, mode: str, seed: int) -> None:
        warm_up(LAYOUTS[self.layout]["backend"])
        self.policy, self.mode = policy, mode
        self.before = belongings()
        self._make(seed)

    def _make(self, seed: int) -> None:
        RELEASED.clear()
        with watchdog("make_vec"):
            self.envs = make_vec(
                [functools.partial(Encoded, i) for i in everyone],
                **self.options,
                on_failure=self.policy,
                autoreset=self.mode,
                max_restarts=10**6,
            )
        self.twins = [Twin(Encoded(i), self.mode) for i in everyone]
        self.flying, self.broken, self.endangered = {}, False, False
        self._reset(None, [seed + i for i in everyone], seed)

    def _close(self) -> None:
        envs, self.envs = self.envs, None
        with watchdog("close"):
            envs.close()
        RELEASED.set()
        del envs  # what it shared with its workers goes with it
        gc.collect()
        deadline = time.monotonic() + 60
        while True:
            children, threads, files = belongings()
            left = children - self.before[0], threads - self.before[1], files - self.before[2]
            if not left[0] and left[1] <= 0 and left[2] <= 0:
                return
            assert time.monotonic() < deadline, (
                f"left behind: processes {left[0]}, threads and files {left[1:]}"
            )
            time.sleep(0.02)

    def teardown(self) -> None:
        if self.envs is not None and self.failed:
            self.envs.close()
        elif self.envs is not None:
            self._close()
        RELEASED.set()

    @operation(seed=seeds)
    def close_and_make_again(self, seed: int) -> None:
        self._close()
        self._make(seed)

    # what is expected

    def land(self) -> None:
        """Receive all that is in flight, and repair what raised."""
        while self.flying:
            self._recv(1)
        if self.broken:
            self._reset(None, [100 + i for i in everyone], 100)

    def settle(self) -> None:
        """Reset the episodes that the caller has to reset."""
        self.land()
        self._reset_those_over()

    def be_certain(self) -> None:
        """Leave nothing open about any env."""
        self.settle()
        if any(twin.unsure or twin.fresh for twin in self.twins):
            self._reset(None, [200 + i for i in everyone], 200)

    def fitting(self, actions: dict[int, int]) -> dict[int, int]:
        """The actions, without faults that would end the caller itself."""
        cannot = {"serial": (12, 13, 14), "thread": (12, 13)}.get(self.layout, ())
        return {i: 8 if action in cannot else action for i, action in actions.items()}

    def _failing(self, actions: dict[int, int]) -> set[int]:
        """The envs that a step with these actions makes fail."""
        return {i for i, action in actions.items() if self.twins[i].steps and action in FAULTS}

    def _lethal(self, actions: dict[int, int]) -> bool:
        return any(action in LETHAL and self.twins[i].steps for i, action in actions.items())

    def _raised(
        self, error: Exception, failing: set[int], lethal: bool, *, may_be_others: bool = False
    ) -> None:
        """Check an error of a step; the vector env needs a reset now."""
        assert self.policy == "raise", f"raised in spite of the policy {self.policy!r}: {error}"
        assert failing, f"nothing failed: {error}"
        blamed = named(error)
        if lethal or may_be_others:
            assert blamed & failing, error
        else:
            assert blamed == failing, (error, failing)
        self._break()

    def _break(self) -> None:
        self.broken, self.endangered = True, False
        for twin in self.twins:
            twin.unsure, twin.shown = True, None

    def _see(self, actions: dict[int, int], rows: dict[int, Seen], failing: set[int], lethal: bool) -> None:
        """Check the results of a step of some envs."""
        assert not (failing and self.policy == "raise"), f"{failing} failed, but nothing was raised"
        for i, seen in rows.items():
            self.twins[i].see_step(actions[i], seen, faulty=i in failing, endangered=lethal)
        lost = sorted(self.envs.undone)  # with the worker of one that failed: to be reset first
        assert not lost or lethal, f"{lost} have to be reset without a reason"
        assert not rows.keys() & set(lost)
        if lost:
            with pytest.raises(WorkerError, match=r"env \d+ .*failed in step"):
                self.envs.step_some(lost[-1:], [np.int64(0)])
            for i in lost:
                self.twins[i].unsure, self.twins[i].shown = True, None
            self._reset([i in lost for i in everyone], [300 + i for i in everyone], 300)

    # reset

    def _reset(self, mask: list[bool] | None, given: list[int | None], seed: Any) -> None:
        options = None if mask is None else {"reset_mask": np.array(mask)}
        with watchdog("reset"):
            obs, infos = self.envs.reset(seed=seed, options=options)
        each = unbatched(infos, N)
        for i, twin in enumerate(self.twins):
            if mask is None or mask[i]:
                twin.see_reset(obs[i], each[i], given[i])
            elif twin.shown is not None:
                assert np.array_equal(obs[i], twin.shown), (obs[i], twin.shown)
        if mask is None:
            self.broken = self.endangered = False

    @operation(seed=seeds, way=st.sampled_from(["int", "list", "none"]))
    def reset(self, seed: int, way: str) -> None:
        if self.flying:
            self.land()
        given: list[int | None] = [None] * N if way == "none" else [seed + i for i in everyone]
        self._reset(None, given, {"int": seed, "list": given, "none": None}[way])

    @operation(
        mask=st.lists(st.booleans(), min_size=N, max_size=N).filter(any), seed=seeds, seeded=st.booleans()
    )
    def reset_some_by_mask(self, mask: list[bool], seed: int, seeded: bool) -> None:
        self.settle()
        given = [seed + i if seeded else None for i in everyone]
        self._reset(mask, given, seed if seeded else None)

    @operation(ids=chosen, seed=seeds, seeded=st.booleans())
    def reset_some(self, ids: list[int], seed: int, seeded: bool) -> None:
        self.settle()
        given = [seed + i if seeded else None for i in ids]
        with watchdog("reset_some"):
            results = self.envs.reset_some(ids, given)
        for i, (obs, info), own in zip(ids, results, given, strict=True):
            self.twins[i].see_reset(obs, info, own)

    # step

    def _reset_those_over(self) -> None:
        mask = [twin.waits for twin in self.twins]
        if any(mask):
            self._reset(mask, [None] * N, None)

    def _step(self, actions: dict[int, int]) -> None:
        given = np.array([actions[i] for i in everyone])
        failing = self._failing(actions)
        lethal = self._lethal(actions) or self.endangered
        try:
            with watchdog("step"):
                results = self.envs.step(given)
        except Exception as error:
            self._raised(error, failing, lethal)
        else:
            self._see_batch(actions, results, failing, lethal)

    def _see_batch(self, actions: dict[int, int], results: Any, failing: set[int], lethal: bool) -> None:
        obs, rewards, terminated, truncated, infos = results
        each = unbatched(infos, N)
        rows = dict(enumerate(rows_of(obs, rewards, terminated, truncated, each)))
        self.endangered = False
        self._see(actions, rows, failing, lethal)

    @operation(batches=st.lists(quick, min_size=1, max_size=5))
    def step(self, batches: list[list[int]]) -> None:
        self.land()
        for actions in batches:
            self._reset_those_over()
            self._step(dict(enumerate(actions)))
            self.land()

    @operation(actions=quick, bad=faults)
    def step_with_faults(self, actions: list[int], bad: dict[int, int]) -> None:
        self.settle()
        self._step(self.fitting({**dict(enumerate(actions)), **bad}))

    @operation(
        actions=plain,
        bad=st.one_of(st.just({}), st.just({}), faults),
        seconds=st.sampled_from([0.0, 0.03, 1.0]),
    )
    def step_and_give_up(self, actions: list[int], bad: dict[int, int], seconds: float) -> None:
        self.be_certain()
        given = self.fitting({**dict(enumerate(actions)), **bad})
        failing, lethal = self._failing(given), self._lethal(given)
        try:
            with watchdog("step_async and step_wait"):
                self.envs.step_async(np.array([given[i] for i in everyone]))
                results = self.envs.step_wait(timeout=seconds)
        except multiprocessing.TimeoutError:  # only a whole reset can follow
            with pytest.raises(EnvError, match="reset"):
                self.envs.step(np.array([given[i] for i in everyone]))
            self._break()
        except Exception as error:
            self._raised(error, failing, lethal)
        else:
            self._see_batch(given, results, failing, lethal)

    @operation(ids=chosen, actions=plain, bad=st.one_of(st.just({}), faults))
    def step_some(self, ids: list[int], actions: list[int], bad: dict[int, int]) -> None:
        self.settle()
        given = self.fitting({i: bad.get(i, actions[i]) for i in ids})
        failing, lethal = self._failing(given), self._lethal(given)
        try:
            with watchdog("step_some"):
                results = self.envs.step_some(ids, [np.int64(given[i]) for i in ids])
        except Exception as error:
            self._raised(error, failing, lethal)
        else:
            rows = {i: Seen(*result) for i, result in zip(ids, results, strict=True)}
            self._see(given, rows, failing, lethal)

    # send and recv

    def _units(self, ids: list[int]) -> list[int]:
        """All active environments of the workers that have some of these and are not in flight."""
        units = [list(w.ids) for w in self.envs.workers if not self.flying.keys() & set(w.ids)]
        units = [unit for unit in units if set(unit) & set(ids)]
        return [i for unit in units for i in unit]

    @operation(ids=chosen, actions=plain, bad=st.one_of(st.just({}), faults))
    def send(self, ids: list[int], actions: list[int], bad: dict[int, int]) -> None:
        if not self.flying:
            self.settle()
        ids = self._units(ids)
        if not ids or any(self.twins[i].waits for i in ids) or (self.endangered and self.mode == "disabled"):
            return
        given = self.fitting({i: bad.get(i, actions[i]) for i in ids})
        self.endangered = self.endangered or self._lethal(given)
        with watchdog("send"):
            self.envs.send(ids, [np.int64(given[i]) for i in ids])
        self.flying.update({i: ("step", given[i]) for i in ids})

    @operation(ids=chosen, seed=seeds)
    def send_reset(self, ids: list[int], seed: int) -> None:
        if not self.flying:
            self.settle()
        ids = self._units(ids)
        if not ids:
            return
        with watchdog("send_reset"):
            self.envs.send_reset(ids, [seed + i for i in ids])
        self.flying.update({i: ("reset", seed + i) for i in ids})

    @operation(least=st.integers(1, N))
    def recv(self, least: int) -> None:
        if self.flying:
            self._recv(least)

    def _recv(self, least: int) -> None:
        least = min(least, len(self.flying))
        steps = {i: value for i, (word, value) in self.flying.items() if word == "step"}
        failing, lethal = self._failing(steps), self.endangered
        try:
            with watchdog("recv"):
                ready = self.envs.recv(least)
        except Exception as error:
            self.flying = {}
            self._raised(error, failing, lethal, may_be_others=True)
            return
        assert len(ready.ids) >= least
        self._see_ready(ready, failing, lethal)
        if not self.flying:
            self.endangered = False

    def _see_ready(self, ready: Any, failing: set[int], lethal: bool) -> None:
        for i, row in zip(ready.ids.tolist(), rows_of(*ready[1:]), strict=True):
            word, value = self.flying.pop(i)
            if word == "reset":
                self.twins[i].unsure = self.twins[i].unsure or lethal
                self.twins[i].see_reset(row.obs, None, value)
            else:
                assert not (i in failing and self.policy == "raise"), f"{i} failed: {row}"
                self.twins[i].see_step(value, row, faulty=i in failing, endangered=lethal)
        if lethal:
            for twin in self.twins:
                twin.unsure, twin.shown = True, None


def play(layout: str, examples: int, steps: int = 15, limit: float | None = None, **options: Any) -> None:
    gc.collect()
    gc.freeze()  # what tests before left, through which each collection would go
    try:
        run_state_machine_as_test(
            functools.partial(VectorMachine, layout, limit),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                suppress_health_check=list(HealthCheck),
                database=None,
                print_blob=True,
                report_multiple_bugs=False,
                **options,
            ),
        )
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("layout", "examples"), [("serial", 4), ("thread", 4), ("process", 4)])
@pytest.mark.flaky(reruns=2)
def test_any_sequence_of_operations_and_faults_shows_what_plain_envs_show(layout: str, examples: int) -> None:
    play(layout, examples, phases=[Phase.generate])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", ["serial", "thread", "process"])
def test_any_of_500_sequences_shows_what_plain_envs_show(layout: str) -> None:
    play(layout, 500, steps=25, limit=None if layout == "serial" else PATIENT, derandomize=False)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
def test_any_sequence_on_ray_shows_what_plain_envs_show() -> None:
    ray = pytest.importorskip("ray")
    ray.shutdown()  # what a test before left running
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        play("ray", 50, derandomize=False)
    finally:
        ray.shutdown()
