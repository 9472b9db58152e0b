"""Writes the API reference, a page for each room, from the public names and their docstrings.

A hook of mkdocs adds it to the site, and the list of changes.

python docs/make_reference.py [FOLDER]    needs shoal and its packages; mkdocs fills in the docstrings
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "reference"
ROOMS = {
    "shoal": "Every name that `import shoal` offers; the names of training are explained below, the others on the "
    "page of their room",
    "shoal.vector": "Vector environments",
    "shoal.envs": "Environments",
    "shoal.rollout": "Rollouts and engines",
    "shoal.gateway": "The gateway, which answers the model calls of programs",
    "shoal.splitting": "Trajectory splitting",
    "shoal.skills": "Skills",
    "shoal.testing": "Checks of your own parts",
    "shoal.core": "Records, seeds, executors and errors",
}
"""A name of `shoal` is on the page of its room, or on the first one."""
ALSO = {
    "shoal.envs": (
        "shoal.envs.text.TextEnv",
        "shoal.envs.text.Outcome",
        "shoal.envs.tool_env.ToolEnv",
        "shoal.envs.actions.Projection",
        "shoal.envs.catalogue.make",
        "shoal.envs.catalogue.register",
        "shoal.envs.catalogue.resolve",
    ),
    "shoal.rollout": (
        "shoal.rollout.journal.Journal",
        "shoal.samplers.registry.sampler",
        "shoal.samplers.registry.make_engine",
        "shoal.samplers.sampler.Sampler",
        "shoal.samplers.sampler.Request",
        "shoal.samplers.sampler.Completion",
    ),
    "shoal.gateway": (
        "shoal.gateway.programs.sessions_of",
        "shoal.gateway.server.Gateway",
        "shoal.gateway.server.GatewayServer",
    ),
    "shoal.core": ("shoal.core.executors.make_executor", "shoal.core.errors"),
}
"""Names of rooms that list none in `__all__`."""


def pages() -> Iterator[tuple[str, str]]:
    """The name of each file, and its Markdown."""
    shared = public("shoal")
    for room, title in ROOMS.items():
        inside = [place for place in shared if room_of(place) == room]
        places = sorted({*inside, *(public(room) if room != "shoal" else ()), *ALSO.get(room, ())}, key=last)
        listed = sorted(shared, key=last) if room == "shoal" else places
        blocks = "\n".join(f"::: {place}\n" for place in places)
        yield f"{room.removeprefix('shoal.')}.md", f"# {room}\n\n{title}.\n\n{contents(listed)}\n\n{blocks}"


def contents(places: list[str]) -> str:
    """A line for each name: a link to its entry, and the first sentences of its docstring."""
    lines = []
    for place in places:
        module, _, name = place.rpartition(".")
        text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        first = " ".join(text.partition("\n\n")[0].split())
        lines.append(f"- [`{name}`][{place}]: {first}")
    return "\n".join(lines)


def room_of(place: str) -> str:
    """The room in which a name is defined: the longest that its path begins with."""
    return max((room for room in ROOMS if place.startswith(f"{room}.")), key=len)


def last(place: str) -> str:
    """A name without its path."""
    return place.rpartition(".")[2]


def public(room: str) -> list[str]:
    """Where each name that a room lists is defined."""
    module = importlib.import_module(room)
    return [defined(module, name) for name in getattr(module, "__all__", ()) if name != "__version__"]


def defined(module: Any, name: str) -> str:
    """The full path of a public name."""
    value = getattr(module, name)
    home = value.__module__ if inspect.isclass(value) or inspect.isfunction(value) else module.__name__
    return f"{home}.{name}"


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: the pages that were written into build/reference, and the list of changes."""
    from mkdocs.structure.files import File

    for page in sorted(PAGES.glob("*.md")):
        files.append(File.generated(config, f"reference/{page.name}", content=page.read_text("utf-8")))
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    return files


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (folder / name).write_text(text, "utf-8")
