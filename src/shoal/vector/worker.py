"""A worker process: makes its environments, tells what they are, then steps them on command until told to end."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from shoal.vector import slots as slot_words
from shoal.vector.actions import read, reader
from shoal.vector.channel import Channel, ChannelClosedError, dumps
from shoal.vector.failures import Failure, from_exception, portable
from shoal.vector.share import CATCH, EnvFn, Extras, Share
from shoal.vector.slots import Slots, address_of
from shoal.vector.spaces import Layout
from shoal.vector.strips import strips_of
from shoal.vector.timing import turn_over
from shoal.vector.waiting import Patience, Signal
from shoal.vector.writers import members_of

STEP, STEP_SOME, MESSAGE, CLOSE, TRIAL = range(1, 6)
HAS_EXTRAS, HAS_TEXT = 1, 2
STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a worker write the stack of its threads into its log, whatever it is doing."""


@dataclass
class Setup:
    """The first message: the caller's surroundings, and the environments of each lane."""

    path: list[str]
    folder: str
    environ: dict[str, str]
    argv: list[str]
    lanes: list[tuple[int, bytes]]  # (first env, pickled functions)
    parent: int


@dataclass
class Attach:
    """The second message: how the shared block is laid out; it comes with the descriptors."""

    n_envs: int
    observations: Layout
    actions: Layout
    n_lanes: int
    lane_numbers: list[int]
    ring: int
    text_bytes: int
    autoreset: AutoresetMode
    check_nan: bool
    spin: float


@dataclass
class About:
    """One environment as its worker describes it."""

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any


def main(descriptor: int, log: int) -> int:
    """Run a worker; returns its exit code."""
    with contextlib.suppress(Exception):
        faulthandler.enable(log, all_threads=True)
        faulthandler.register(STACK_SIGNAL, log, all_threads=True, chain=False)
    channel = Channel(socket.socket(fileno=descriptor))
    setup: Setup = channel.receive()
    sys.path[:], sys.argv[:] = setup.path, setup.argv
    os.environ.clear()
    os.environ.update(setup.environ)
    with contextlib.suppress(OSError):
        os.chdir(setup.folder)
    made = _make(setup, channel)
    if made is None:
        return 1
    attach: Attach = channel.receive()
    message, descriptors, _, _ = socket.recv_fds(channel.sock, 1, 1 + len(attach.lane_numbers))
    del message
    slots = _map(attach, descriptors[0])
    lanes = []
    for number, (first, env_fns, envs), sock in zip(attach.lane_numbers, made, descriptors[1:], strict=True):
        word = slots.reply[number][slot_words.PROGRESS : slot_words.PROGRESS + 1]
        share = Share(
            env_fns, first, slots, attach.autoreset, check_nan=attach.check_nan, progress=word, envs=envs
        )
        lanes.append(LaneServer(share, slots, number, Channel(socket.socket(fileno=sock)), attach.spin))
    gc.collect()
    gc.freeze()
    channel.send(dumps("attached"))
    if len(lanes) == 1:
        lanes[0].serve()
    else:
        sys.setswitchinterval(5e-4)
        threads = [threading.Thread(target=lane.serve, name=f"lane-{lane.number}") for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return 0


def _make(setup: Setup, channel: Channel) -> list[tuple[int, list[EnvFn], list[Any]]] | None:
    made: list[tuple[int, list[EnvFn], list[Any]]] = []
    abouts: list[About] = []
    for first, data in setup.lanes:
        at = first
        try:
            env_fns: list[EnvFn] = pickle.loads(data)
            envs: list[Any] = []
            for at in range(first, first + len(env_fns)):
                env = env_fns[at - first]()
                envs.append(env)
                abouts.append(
                    About(
                        env.observation_space, env.action_space, dict(env.metadata), env.render_mode, env.spec
                    )
                )
        except CATCH as error:
            channel.send(dumps(portable(from_exception(at, "make", error, None, os.getpid()))))
            return None
        made.append((first, env_fns, envs))
    try:
        channel.send(dumps(abouts))
    except Exception as error:  # a space or metadata that does not pickle
        channel.send(dumps(portable(from_exception(setup.lanes[0][0], "make", error, None, os.getpid()))))
        return None
    return made


def _map(attach: Attach, descriptor: int) -> Slots:
    import mmap

    slots = Slots(
        attach.n_envs,
        attach.observations,
        attach.actions,
        n_lanes=attach.n_lanes,
        ring=attach.ring,
        text_bytes=attach.text_bytes,
        buffer=mmap.mmap(descriptor, 0),
    )
    os.close(descriptor)
    return slots


class LaneServer:
    """Answers the commands of one lane."""

    def __init__(self, share: Share, slots: Slots, number: int, channel: Channel, spin: float) -> None:
        self.share, self.slots, self.number, self.channel = share, slots, number, channel
        self.command, self.reply = slots.command[number], slots.reply[number]
        base = address_of(slots.signal_bytes)
        self.wake = Signal(base + 2 * number * slot_words.LINE)
        self.ready = Signal(base + (2 * number + 1) * slot_words.LINE)
        self.bell = Signal(base + 2 * slots.n_lanes * slot_words.LINE)
        self.patience = Patience(spin)
        self.strips = strips_of(slots, share.first, share.count)
        self.all = range(share.count)
        self.read = reader(slots, share.first, share.count)

    def serve(self) -> None:
        """Until `CLOSE`."""
        command, reply, channel = self.command, self.reply, self.channel
        parent = os.getppid()
        look, wake = self.patience.look, self.wake.acquire
        while True:
            if not look(wake):
                while not wake(True, 1.0):
                    if os.getppid() != parent:
                        os._exit(1)
            done = command[slot_words.SEQUENCE]
            operation = command[slot_words.OPERATION]
            if operation == CLOSE:
                with contextlib.suppress(*CATCH):
                    self.share.close()
                reply[slot_words.REPLY_MESSAGE] = 0
                reply[slot_words.REPLY_SEQUENCE] = done
                return
            try:
                message = channel.receive() if command[slot_words.HAS_MESSAGE] else None
            except ChannelClosedError:
                return
            extras = self._do(operation, message, command[slot_words.RING])
            flags = 0
            data = b""
            if extras is not None:
                if extras.columns and self._pack_text(extras):
                    flags = HAS_TEXT
                if extras.columns or extras.infos or extras.failures or extras.value is not None:
                    flags |= HAS_EXTRAS
                    data = self._pack(extras, done)
            reply[slot_words.REPLY_MESSAGE] = flags
            reply[slot_words.REPLY_SEQUENCE] = done
            (self.bell if command[slot_words.BELL_MODE] else self.ready).release()
            if data:
                try:
                    channel.send(data)
                except ChannelClosedError:
                    os._exit(1)

    def _do(self, operation: int, message: Any, ring: int) -> Extras | None:
        share = self.share
        if operation == STEP:
            actions = read(self.slots, share.first, self.all, message) if message else self.read()
            return share.step(actions, self.all, ring)
        if operation == STEP_SOME:
            stop = share.first + share.count
            members = members_of(self.slots.mask[share.first : stop].tolist())
            return share.step(read(self.slots, share.first, members, message or {}), members, ring)
        if operation == TRIAL:
            turn_over(ring)
            return None
        name, arguments = message
        result: Extras | None = getattr(share, name)(*arguments)
        return result

    def _pack_text(self, extras: Extras) -> bool:
        """Move the text of a reply into shared memory; all of it or none."""
        for leaf, strip in self.strips.items():
            if not strip.pack(extras.columns[leaf]):
                return False
        for leaf in self.strips:
            del extras.columns[leaf]
        return bool(self.strips)

    def _pack(self, extras: Extras, sequence: int) -> bytes:
        for failure in extras.failures:
            portable(failure)
        try:
            return dumps((sequence, extras))
        except Exception as error:
            return dumps((sequence, self._unpackable(extras, error)))

    def _unpackable(self, extras: Extras, error: Exception) -> Extras:
        """The same reply without what cannot be sent, with a failure for each env concerned."""
        failures: list[Failure] = list(extras.failures)
        infos = []
        for record in extras.infos:
            try:
                dumps(record)
                infos.append(record)
            except Exception as problem:
                failures.append(from_exception(record[0], "sending its info", problem, None, os.getpid()))
        if not failures:
            failures = [from_exception(self.share.first, "sending its results", error, None, os.getpid())]
        columns: dict[int, list[Any]] = {leaf: [None] * len(v) for leaf, v in extras.columns.items()}
        for leaf, values in extras.columns.items():
            for at, value in enumerate(values):
                with contextlib.suppress(Exception):
                    dumps(value)
                    columns[leaf][at] = value
        return Extras(columns, infos, [portable(failure) for failure in failures], None)


def watch_parent(parent: int, seconds: float = 0.5) -> None:
    """End this process when its parent is gone (for forked workers, whose parent is the caller itself)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()
