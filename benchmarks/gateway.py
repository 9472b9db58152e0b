"""What the gateway costs a call: the median beyond that of the sampler asked directly and a bare Starlette echo.

One client asks again and again over one connection, once with a short prompt and once with a chat of 20 turns that
goes on; the three servers are asked in turns. The sampler answers at once, so that all the time is the gateway's.
`--quick` asks a few times and saves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import http.client
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import uvicorn  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.responses import Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

from shoal import __version__  # noqa: E402
from shoal.core.ports import listening  # noqa: E402
from shoal.gateway.server import Gateway, GatewayServer  # noqa: E402
from shoal.samplers.asking import Loop  # noqa: E402
from shoal.samplers.sampler import Completion, Key, Request, Sampling  # noqa: E402
from shoal.samplers.tokenizers import TinyTokenizer  # noqa: E402

TOKENIZER = TinyTokenizer()
ANSWER = Completion(TOKENIZER.encode("Up"), (-0.5, -0.5), "stop", 0)
TURNS = {"a short prompt": 1, "a chat of 20 turns": 20}


class Instant:
    """A sampler that answers at once."""

    async def sample(self, request: Request) -> Completion:
        """The same answer to all."""
        return ANSWER


def echo_server() -> tuple[int, Callable[[], None]]:
    """The port of a Starlette app that sends back what it gets, and how to end it."""

    async def echo(request: Any) -> Response:
        return Response(await request.body())

    listener = listening(0)
    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    loop = Loop("echo")
    serving = loop.submit(server.serve(sockets=[listener]))

    def end() -> None:
        server.should_exit = True
        serving.result(5)
        loop.close()

    return int(listener.getsockname()[1]), end


class Client:
    """One connection to a server."""

    def __init__(self, port: int, path: str) -> None:
        self._connection, self._path = http.client.HTTPConnection("127.0.0.1", port), path

    def ask(self, body: bytes) -> tuple[float, float]:
        """Seconds until the answer to a request has been read, and the CPU time of both sides."""
        began, used = time.perf_counter(), time.process_time()
        self._connection.request("POST", self._path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        read = answer.read()
        took = time.perf_counter() - began, time.process_time() - used
        assert answer.status == 200, read
        return took


def body_of(number: int, turns: int) -> bytes:
    """A chat whose turns but the last one are the same for all numbers."""
    messages = []
    for turn in range(turns - 1):
        messages += [
            {"role": "user", "content": f"turn {turn}: where are you?"},
            {"role": "assistant", "content": "Up"},
        ]
    return json.dumps(
        {"messages": [*messages, {"role": "user", "content": f"try {number}: where to?"}]}
    ).encode()


def directly(count: int) -> float:
    """The median of the sampler asked directly."""
    request = Request(TOKENIZER.start([{"role": "user", "content": "go"}]), Key(0, (0,)), Sampling(8))

    async def ask() -> list[float]:
        found = []
        for _ in range(count):
            began = time.perf_counter()
            await Instant().sample(request)
            found.append(time.perf_counter() - began)
        return found

    return statistics.median(asyncio.run(ask()))


def measure(turns: int, count: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds and CPU time of each call, by server."""
    port, end = echo_server()
    found: dict[str, list[tuple[float, float]]] = {}
    with (
        GatewayServer(Gateway(Instant(), TOKENIZER)) as plain,
        GatewayServer(Gateway(Instant(), TOKENIZER, journal=folder / f"{turns}.jsonl")) as kept,
    ):
        clients = {"echo": Client(port, "/")}
        for name, server in {"gateway": plain, "gateway with its record on disk": kept}.items():
            path = f"/{server.gateway.secret}/a/v1/chat/completions"
            clients[name] = Client(int(server.base.rpartition(":")[2]), path)
            for known in range(1, turns):  # the turns that are gone on from
                clients[name].ask(body_of(known, known).replace(f"try {known}: where to?".encode(),
                                  f"turn {known - 1}: where are you?".encode()))  # fmt: skip
        for number in range(count):
            body = body_of(number, turns)
            for name, client in clients.items():
                found.setdefault(name, []).append(client.ask(body))
        if turns > 1:
            session = plain.gateway.sessions["a"]
            roots = sum(recorded.call.parent is None for recorded in session.calls)
            assert roots == 1, "the chat did not go on from its turns"
    end()
    return {name: seconds[count // 10 :] for name, seconds in found.items()}


def main() -> None:
    """Measure, print, and save unless it is quick."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    count = 50 if parser.parse_args().quick else 3000
    rows = []
    direct = directly(count)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        for case, turns in TURNS.items():
            measured = measure(turns, count, Path(folder))
            echo, echo_cpu = (statistics.median(column) for column in zip(*measured["echo"], strict=True))
            for name, pairs in measured.items():
                found, used = zip(*pairs, strict=True)
                median, cpu = statistics.median(found), statistics.median(used)
                beyond, cpu_beyond = (
                    (0.0, 0.0) if name == "echo" else (median - echo - direct, cpu - echo_cpu)
                )
                row = {"case": case, "subject": name, "value": median, "unit": "ms", "runs": len(found)}
                times = {
                    "beyond": beyond,
                    "p99": sorted(found)[int(len(found) * 0.99)],
                    "cpu_beyond": cpu_beyond,
                }
                rows.append(row | {key: round(1000 * time, 3) for key, time in {"value": median, **times}.items()}
                            | {"cpu_seconds": round(cpu, 6)})  # fmt: skip
                shown = ", ".join(
                    f"{key} {1000 * time:.3f}" for key, time in {"p50": median, **times}.items()
                )
                print(f"{case:20} {name:32} {shown} ms")
    if count > 50:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        versions = {"python": platform.python_version(), "shoal": __version__, "uvicorn": uvicorn.__version__}
        result = {"machine": machine, "versions": versions, "date": str(datetime.date.today()), "rows": rows}
        (ROOT / "benchmarks" / "results" / "gateway.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
