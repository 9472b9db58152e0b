"""The environments that `vector.py` measures with: made-up ones that each stress one thing, and real ones.

They are a module of their own so that workers can import them.
"""

from __future__ import annotations

import functools
import http.client
import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

EPISODE = 100


class Ticking(gymnasium.Env[Any, Any]):
    """Episodes of fixed length, reward 1, and whatever `work` costs."""

    action_space = spaces.Discrete(2)
    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(self) -> None:
        self.t = 0
        self.zero = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Back to the start."""
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do the work."""
        self.t += 1
        self.work()
        return self.observe(), 1.0, self.t >= EPISODE, False, {}

    def observe(self) -> Any:
        """What the agent sees."""
        return self.zero

    def work(self) -> None:
        """What a step costs."""


def burn(n: int) -> int:
    """A loop that keeps one core busy."""
    x = 0
    for i in range(n):
        x += i * i
    return x


def rounds_for(seconds: float) -> int:
    """How many rounds of `burn` take so long here."""
    best = min(_time(lambda: burn(4000)) for _ in range(50))
    return int(4000 * seconds / best)


def _time(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Burning(Ticking):
    """A CPU-bound step."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def work(self) -> None:
        """Compute."""
        burn(self.rounds)


def latency(rng: np.random.Generator) -> float:
    """Seconds of waiting: lognormal around 3.5 ms with a heavy tail, within 1 to 20 ms."""
    return float(min(max(rng.lognormal(np.log(0.0035), 0.9), 0.001), 0.020))


class Waiting(Ticking):
    """A step that waits for something else, as for a browser or a server."""

    def work(self) -> None:
        """Wait."""
        time.sleep(latency(self.np_random))


class Http(Waiting):
    """A step that asks a server on this machine, which takes as long to answer as `Waiting` sleeps."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.connection: http.client.HTTPConnection | None = None  # of the process or thread that steps

    def work(self) -> None:
        """Ask, and remember the answer."""
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        self.connection.request("GET", f"/{latency(self.np_random):.6f}")
        self.zero = np.full(4, float(self.connection.getresponse().read()), np.float32)

    def close(self) -> None:
        """Hang up."""
        if self.connection is not None:
            self.connection.close()


class Answer(socketserver.StreamRequestHandler):
    """`GET /0.0035` is answered with the number, so many seconds later."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        """All requests of one connection."""
        while request := self.rfile.readline():
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            body = request.split()[1][1:]
            time.sleep(min(float(body), 0.020))
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def serve() -> None:
    """Answer on a free port, which is printed, for as long as the parent lives."""
    parent = os.getppid()
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        while os.getppid() == parent:
            time.sleep(0.2)


def http_envs() -> Callable[[], Any]:
    """Start the server, in a process that ends with this one."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return functools.partial(Http, int(process.stdout.readline()))


class Images(Ticking):
    """84x84x3 frames, almost for free."""

    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def __init__(self) -> None:
        super().__init__()
        self.frames = np.random.default_rng(0).integers(0, 255, (4, 84, 84, 3), dtype=np.uint8)

    def observe(self) -> Any:
        """One of four frames."""
        return self.frames[self.t & 3]


PAGE = " ".join(f"item {i % 37} costs {i} coins and" for i in range(40))[:480]


class Text(Ticking):
    """500 characters of text, almost for free."""

    observation_space = spaces.Text(max_length=1000, charset="".join(map(chr, range(32, 127))))

    def observe(self) -> Any:
        """A page that names the step."""
        return f"step {self.t:04d}: {PAGE}"


def cartpole() -> Any:
    """Gymnasium's CartPole: about 5 microseconds a step."""
    return gymnasium.make("CartPole-v1")


def lunarlander() -> Any:
    """Box2D: about 40 microseconds a step."""
    return gymnasium.make("LunarLander-v3")


def halfcheetah() -> Any:
    """MuJoCo: about 80 microseconds a step."""
    return gymnasium.make("HalfCheetah-v5")


def minigrid() -> Any:
    """The whole grid as a small image: Python code of about 200 microseconds a step."""
    import minigrid  # noqa: F401  (registers its environments)
    from minigrid.wrappers import FullyObsWrapper, ImgObsWrapper

    return ImgObsWrapper(FullyObsWrapper(gymnasium.make("MiniGrid-DoorKey-8x8-v0")))


def pong() -> Any:
    """Atari as agents see it: four grey frames of 84x84, one step for four of the machine."""
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1)), 4)


@dataclass(frozen=True)
class Case:
    """One kind of environment."""

    prepare: Callable[[], Callable[[], Any]]
    """Gives what makes one env."""
    counts: tuple[int, ...] = (8, 32, 128)
    checked: int = 60
    """Steps that are compared with a plain loop."""
    forced: tuple[str, ...] = ("process",)
    """Backends measured beside what "auto" takes."""
    batch: str = ""
    """Its id where an environment brings a batch of its own."""
    envpool: str = ""
    waits: bool = False


CASES = {
    "cartpole": Case(
        lambda: cartpole, forced=("process", "serial"), batch="CartPole-v1", envpool="CartPole-v1"
    ),
    "images": Case(lambda: Images, forced=("process", "serial")),
    "text": Case(lambda: Text, forced=("process", "serial")),
    "cpu200us": Case(lambda: functools.partial(Burning, rounds_for(200e-6)), checked=10),
    "waiting": Case(lambda: Waiting, checked=2, forced=("process", "thread"), waits=True),
    "http": Case(http_envs, (8,), checked=3, forced=("process", "thread"), waits=True),
    "lunarlander": Case(lambda: lunarlander, checked=120, envpool="LunarLander-v3"),
    "halfcheetah": Case(
        lambda: halfcheetah, (8,), forced=("process", "thread", "serial"), envpool="HalfCheetah-v5"
    ),
    "minigrid": Case(
        lambda: minigrid, (8,), forced=("process", "thread", "serial"), envpool="MiniGrid-DoorKey-8x8-v0"
    ),
    "pong": Case(
        lambda: pong,
        (8,),
        forced=("process", "thread", "serial"),
        batch="ale_py:ALE/Pong-v5",
        envpool="Pong-v5",
    ),
}

if __name__ == "__main__":
    serve()
