"""`shoal gateway MODEL`: a model at an address that OpenAI's and Anthropic's packages can ask."""

from __future__ import annotations

import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.request import getproxies

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import new_folder, print_json, refuse_below
from shoal.core.errors import ConfigError

TINY = "tiny"
TINY_CONTEXT = 2048


@dataclass(frozen=True)
class GatewayOptions:
    """Serve a model to programs of this machine, by the APIs of OpenAI and Anthropic, and record each call.

    The first line is the address. It ends in SESSION/v1: any other name there is a session of its own.
    """

    model: Annotated[str, Positional("MODEL")]
    """a run folder, a Hugging Face model folder, a name of `shoal model list`, or `tiny`, an untrained model"""
    port: int = 0
    """on which to answer; 0 takes a free one"""
    session: str = "a"
    """the session of the address that is printed"""
    max_tokens: int = 1024
    """of an answer, at most"""
    checkpoint: str = "newest"
    """of a run: newest, best, or an iteration"""
    seed: int = 0
    """of the noise with which tokens are picked; and of the weights of `tiny`"""
    device: str | None = None
    """where the model runs, such as cuda:1; where the run was trained, or the CPU, if not given"""
    idle_hours: float = 24.0
    """after which a session ends in which nothing was asked"""
    most_sessions: int = 10_000
    """held at once; the one that is idle longest ends for a further one"""
    most_megabytes: int = 1024
    """of the calls of all sessions in memory, roughly; beyond it those end that are idle longest"""
    out: Path | None = None
    """folder for the record, calls.jsonl; a new one in runs/ if not given"""
    json: bool = False
    """print the address, and all environment variables by which programs find it, as one line of JSON"""


MORE = """\
examples:
  shoal gateway tiny
  shoal gateway runs/demo --port 8000 --out calls
  OPENAI_BASE_URL=ADDRESS OPENAI_API_KEY=none python agent.py
"""
WANTED = ("--port", "--session", "--max-tokens", "--checkpoint", "--device", "--out", "--json")


def gateway(options: GatewayOptions) -> None:
    """Serve until interrupted."""
    from shoal.gateway.server import Gateway, GatewayServer, Room
    from shoal.samplers.asking import SamplerClient
    from shoal.samplers.registry import close_engine

    refuse_below(options, max_tokens=1, most_sessions=1, most_megabytes=1)
    if options.idle_hours <= 0:
        raise ConfigError(f"--idle-hours must be above 0, got {options.idle_hours}")
    room = Room(3600 * options.idle_hours, options.most_sessions, options.most_megabytes << 20)
    folder = options.out or new_folder("gateway")
    journal = folder / "calls.jsonl"
    if journal.exists():
        raise ConfigError(f"{journal} is the record of an earlier gateway: choose another --out")
    with contextlib.ExitStack() as ending:
        engine = _engine(options)
        ending.callback(close_engine, engine)
        folder.mkdir(parents=True, exist_ok=True)
        answers = Gateway(
            ending.enter_context(SamplerClient(engine)), engine.tokenizer, max_tokens=options.max_tokens,
            journal=journal, seed=options.seed, model=Path(options.model).name,
            room=room,
        )  # fmt: skip
        answers.open(options.session)
        server = ending.enter_context(GatewayServer(answers, options.port))
        variables = server.variables(options.session)
        with contextlib.suppress(KeyboardInterrupt):  # how a server is ended
            if options.json:
                print_json(
                    {"url": variables["OPENAI_BASE_URL"], "variables": variables, "record": str(journal)}
                )
            else:
                print(variables["OPENAI_BASE_URL"], flush=True)
                print(f"each call is in {journal} before it is answered; Ctrl-C ends it", file=sys.stderr)
                if getproxies().keys() & {"http", "https", "all"}:
                    told = f"a proxy is set: programs need NO_PROXY={variables['NO_PROXY']}"
                    print(told, file=sys.stderr)
            signal.pause()


def _engine(options: GatewayOptions) -> Any:
    if options.model == TINY:
        from shoal.samplers.registry import EngineConfig, make_engine

        config = EngineConfig(context=TINY_CONTEXT, device=options.device or "cpu")
        return make_engine(config, (), options.seed)
    from shoal.train.records.models import open_model

    return open_model(
        options.model, checkpoint=options.checkpoint, device=options.device, seed=options.seed
    ).engine


COMMAND = Command(GatewayOptions, gateway, MORE, WANTED)
