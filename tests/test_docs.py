"""The documents: their links lead, their code is code, their commands are commands, and the tutorials run."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

import shoal
from shoal.cli.command import every, flags_of
from shoal.cli.main import COMMANDS
from shoal.core.configuration import to_mapping
from shoal.train.agent.config import AgentConfig, compose_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")]
    + list((ROOT / "docs").rglob("*.md"))
)
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.S | re.M)
ROOMS = ("shoal", "vector", "envs", "rollout", "gateway", "splitting", "skills", "testing", "core")
GENERATED = {"results.md", "changelog.md", *(f"reference/{room}.md" for room in ROOMS)}
"""Made with the site."""

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """What `#…` may follow the name of a page."""
    heads = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@of_each_page
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(ROOT / "docs") and str(target.relative_to(ROOT / "docs")) in GENERATED:
            continue
        assert target.exists(), f"{link} leads nowhere"
        if page.is_relative_to(ROOT / "docs"):
            assert target.is_relative_to(ROOT / "docs"), f"{link} leads nowhere on the site"
        if target.suffix == ".png":
            assert anchor in ("", "only-light", "only-dark")  # which the theme of the site knows
        elif anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


@of_each_page
def test_every_block_says_its_language(page):
    assert [text for kind, text in BLOCK.findall(page.read_text()) if not kind] == []


def test_shoal_is_installed_by_the_same_words_on_every_first_page():
    pages = [ROOT / "README.md", ROOT / "docs" / "index.md", *TUTORIALS]
    installed = {words for page in pages for words in re.findall(r'pip install "(.+?)"', page.read_text())}
    assert installed == {".[llm,vision,web]"}


@pytest.mark.parametrize("name", ["metrics", "glossary", "settings", "commands", "how-to/errors"])
def test_the_search_names_pages_that_are_looked_things_up_in_first(name):
    head = (ROOT / "docs" / f"{name}.md").read_text().split("---\n")[1]
    assert yaml.safe_load(head)["search"]["boost"] > 1


@of_each_page
def test_python_shown_is_python_and_its_names_exist(page):
    for _, code in [found for found in BLOCK.findall(page.read_text()) if found[0] == "python"]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shoal":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@cache
def known_flags() -> dict[str, set[str]]:
    """The flags of every command."""
    found = [one for name, entry in COMMANDS.items() for one in every(entry, name)]
    return {name: {*flags_of(command, name)} for name, command in found}


def commands_in(page: Path) -> list[list[str]]:
    """The words of every `shoal …` in the blocks of a page."""
    found = []
    for kind, text in BLOCK.findall(page.read_text()):
        if kind not in ("bash", "sh"):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if re.match(r"shoal [a-z]", line):
                for part in re.split(r"\s(?:&&|\||;|>)\s", line):
                    if part.startswith("shoal "):
                        found.append(shlex.split(part, comments=True)[1:])
    return found


@of_each_page
def test_commands_shown_are_commands_with_flags_that_exist(page):
    for words in commands_in(page):
        assert words[0] in COMMANDS, " ".join(words)
        known = known_flags().get(words[0]) or known_flags().get(" ".join(words[:2]), set())
        for flag in (word.split("=")[0] for word in words[1:] if word.startswith("--")):
            assert flag.replace("_", "-") in known | {"--help"}, (
                f"shoal {' '.join(words)}: there is no {flag}"
            )


def test_episodes_of_the_demo_that_are_shown_are_those_that_it_keeps():
    kept = compose_config("demo").trainer
    helps = [inner.more for name, entry in COMMANDS.items() for _, inner in every(entry, name)]
    texts = [BLOCK.sub(lambda block: block[2], page.read_text()) for page in PAGES] + helps
    lines = [line for text in texts for line in text.splitlines() if "runs/demo" in line]
    shown = [found for line in lines for found in re.findall(r"(train|heldout)-(\d{6})", line)]
    assert len(shown) >= 6
    for side, iteration in shown:
        every_so_many = kept.save_trajectories_every if side == "train" else kept.eval_every
        assert int(iteration) in {0, 1, *range(0, kept.iterations + 1, every_so_many)}, f"{side}-{iteration}"


def test_the_settings_that_other_libraries_settings_become_are_settings():
    text = (ROOT / "docs" / "how-to" / "from-trl-verl.md").read_text()
    here = [line.split("|")[2] for line in text.splitlines() if line.startswith("| `")]
    sections = "engine|model|agent_proxy|es_manager|algorithm|trainer"
    named = [
        found for cell in here for found in re.findall(rf"`((?:{sections})\.[\w.=]+|run_dir|resume)`", cell)
    ]
    assert len(named) > 60
    for name in named:
        key, _, value = name.partition("=")
        if key.startswith("engine.vllm."):
            continue  # an argument of vLLM
        node = to_mapping(AgentConfig())
        for part in key.split("."):
            assert part in node, f"there is no setting {key}"
            node = node[part]
        if value:
            compose_config("smollm2", [name])


@cache
def messages_of_the_source() -> str:
    """Every text in the source, neighbouring literals joined, with `…` for what an f-string fills in."""
    found = []
    for path in (ROOT / "src" / "shoal").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                pieces = [piece.value if isinstance(piece, ast.Constant) else "…" for piece in node.values]
                found.append("".join(map(str, pieces)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_messages_that_are_explained_are_messages_of_the_source():
    text = (ROOT / "docs" / "how-to" / "errors.md").read_text()
    shown = [found for line in text.splitlines() for found in re.findall(r"^\| `([^`]+)` \|", line)]
    assert len(shown) > 40
    assert [message for message in shown if message not in messages_of_the_source()] == []


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert (
        listed
        == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} | GENERATED
    )


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The pages that are made with the site."""
    folder = tmp_path_factory.mktemp("generated")
    for name in ("make_results", "make_reference"):
        subprocess.run([sys.executable, ROOT / "docs" / f"{name}.py", folder / name], check=True)
    return folder


def test_the_page_of_results_names_every_rival(generated):
    text = (generated / "make_results" / "results.md").read_text()
    assert text.count('<div class="bars">') > 20
    assert "sb3" in text
    assert "gymnasium async" in text
    assert text.index("\n## ") > 500, "the page begins with words"
    for section in text.split("\n## ")[1:]:
        assert len(section.split("\n\n")[1]) > 80, f"{section.splitlines()[0]} is not explained"
        folded = section.index("\n??? ")
        assert section[:folded].count('class="bars"') <= 3
        assert "| case |" not in section[:folded]


MARKUP = {
    "???": "pymdownx.details",
    "!!!": "admonition",
    "===": "pymdownx.tabbed",
    "```": "pymdownx.superfences",
}
"""The extension of Markdown that turns lines with this beginning into more than text."""


def test_markup_of_the_pages_has_its_extension(generated):
    extensions = set()
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["markdown_extensions"]:
        extensions |= {entry} if isinstance(entry, str) else {*entry}
    pages = [*(ROOT / "docs").rglob("*.md"), *generated.rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    used = set(re.findall(r"^ *(\?\?\?|!!!|===|```)", text, re.M))
    assert {"???", "```"} <= used
    assert {MARKUP[mark] for mark in used} - extensions == set()


def test_the_search_finds_names_and_the_parts_of_dotted_names():
    plugins = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"]
    separator = next(entry["search"]["separator"] for entry in plugins if "search" in entry)
    words = re.split(separator, "see `shoal.vector.make_vec(env_id)`, or EpisodeIndex")
    assert [word for word in words if word] == "see shoal vector make_vec env_id or EpisodeIndex".split()


def test_the_reference_has_every_public_name_with_its_docstring(generated):
    pages = {path.name: path.read_text() for path in (generated / "make_reference").iterdir()}
    assert pages.keys() == {f"{room}.md" for room in ROOMS}
    places = set(re.findall(r"^::: (.+)$", "".join(pages.values()), re.M))
    shown = {place.rpartition(".")[2] for place in places}
    rooms = ["shoal", *(f"shoal.{room}" for room in ROOMS[1:])]
    public = {name for room in rooms for name in getattr(importlib.import_module(room), "__all__", ())}
    assert public - shown == {"__version__"}
    listed = set(re.findall(r"^- \[`(\w+)`\]\[[\w.]+\]: \S", pages["shoal.md"], re.M))
    assert listed == {name for name in shoal.__all__ if name != "__version__"}
    for place in places:
        module, _, name = place.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__, f"{place} has no docstring"


def test_pictures_of_the_viewer_are_small():
    pictures = [*(ROOT / "docs" / "pictures").iterdir(), ROOT / "docs" / "images" / "viewer.gif"]
    assert sum("viewer-" in picture.name for picture in pictures) >= 4
    for picture in pictures:
        most = 400_000 if picture.name == "viewer.gif" else 150_000
        assert picture.stat().st_size <= most, f"{picture.name}: make it again with fewer colours"


SIZES = {"settings.md": 40_000, "commands.md": 45_000}
"""Bytes of pages that may be longer than others; results have no limit."""


@of_each_page
def test_a_page_is_read_in_one_go(page):
    if (not page.stem.endswith("-results") and page.parent != ROOT) or page.name == "README.md":
        assert len(page.read_bytes()) <= SIZES.get(page.name, 8192)


def test_the_changelog_is_short_and_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 150
    assert re.findall(r"^## (.+)$", text, re.M)[0] == shoal.__version__


def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a shell in which `shoal` is this checkout's, with a cache of its own."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "shoal").write_text(f'#!/bin/sh\nexec {sys.executable} -m shoal "$@"\n')
    (commands / "shoal").chmod(0o755)
    env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    return env


def run_page(page: Path, tmp_path: Path, env: dict[str, str], python: str | Path) -> int:
    """Run the blocks of a page in a folder of their own; returns how many."""
    work = tmp_path / "work"
    work.mkdir()
    ran = 0
    for kind, text in BLOCK.findall(page.read_text()):
        named = re.match(r"# ([\w-]+\.(?:py|yaml))\n", text)
        if named:
            (work / named[1]).write_text(text)
            continue
        if kind not in ("python", "bash"):
            continue
        words = [python, "-c", text] if kind == "python" else ["bash", "-euc", text]
        done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        ran += 1
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path):
    """Blocks of Python and bash run in order; one that begins with `# NAME` is saved under that name."""
    assert run_page(page, tmp_path, environment(tmp_path), sys.executable) > 0


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_and_holds_no_outputs(notebook):
    document = json.loads(notebook.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    for cell in document["cells"]:
        text = "".join(cell["source"])
        assert text.strip()
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            ast.parse(text)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    """Its cells run in one process without a file of its own, as a kernel runs them."""
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-2500:]}"
    assert done.stdout


def test_an_example_whose_packages_are_not_there_says_how_to_install_them(tmp_path):
    (tmp_path / "datasets.py").write_text("raise ModuleNotFoundError(name='datasets')")
    example = ROOT / "examples" / "trl_grpo_frozenlake.py"
    env = environment(tmp_path)
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, example], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'this example needs datasets: run pip install ".[trl]"\n'
