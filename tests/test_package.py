"""What people install: wheel and sdist hold everything, and the light install is enough to step environments."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.test_docs import run_page

ROOT = Path(__file__).parents[1]


def test_everything_is_every_extra_that_installs_together():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("shoal[").removesuffix("]").split(","))
    assert named == set(extras) - {"all", "vllm", "trl", "verl"}  # these pin what others pin differently


def test_what_an_error_tells_to_install_holds_what_was_missing():
    """Of each import under `needs_extra(…, extra)`: its package is in that extra, or in those that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, installed = project["optional-dependencies"], importlib.metadata.packages_distributions()

    def packages(requirements):
        for requirement in requirements:
            if named := re.match(r"shoal\[(.+)\]", requirement):
                yield from packages(each for extra in named[1].split(",") for each in extras[extra])
            yield re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")

    guarded = [
        (node, item.context_expr.args[1].value)
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and getattr(item.context_expr.func, "id", "") == "needs_extra"
    ]
    assert len(guarded) > 20
    for node, extra in guarded:
        held = {*packages(extras[extra]), *packages(project["dependencies"]), "shoal"}
        held |= {"tokenizers"} if "transformers" in held else set()
        for each in ast.walk(node):
            names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else []
            names += [each.module] if isinstance(each, ast.ImportFrom) else []
            for name in (name.partition(".")[0] for name in names):
                homes = {home.lower().replace("_", "-") for home in installed.get(name, [name])}
                assert homes & held, f"{name} is in no package of the extra {extra}"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, made from a copy of the checkout."""
    place = tmp_path_factory.mktemp("built")
    copy = place / "copy"
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, files):
        if not name.startswith(("benchmarks/", "docs/")) and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    code = f"import setuptools.build_meta as b; b.build_wheel({str(place)!r}); b.build_sdist({str(place)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(place.glob("*.whl")), next(place.glob("*.tar.gz"))


@pytest.mark.slow
def test_wheel_and_sdist_hold_code_configs_and_the_viewers_files(built):
    wheel, sdist = built
    inside = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    source = {
        p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "shoal").rglob("*") if p.is_file()
    }
    wanted = {name for name in source if name.endswith((".py", ".yaml", ".typed", ".js", ".css"))}
    assert wanted <= inside
    assert {f"src/{name}" for name in wanted} <= packed
    assert {"README.md", "LICENSE", "NOTICE", "pyproject.toml"} <= packed
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in inside if ".dist-info/licenses/" in name}
    assert not any(name.startswith("tests") for name in packed)  # they need benchmarks and documents too


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_steps_envs_and_with_its_extras_runs_the_demo(built, tmp_path):
    """Packages come from pip; nothing is seen of the checkout."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    python = tmp_path / "venv" / "bin" / "python"

    def run(*words: object) -> str:
        done = subprocess.run(list(map(str, words)), cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        return done.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pins = ("-c", ROOT / "requirements" / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, built[0])
    step = (
        "import sys, shoal; envs = shoal.make_vec('CartPole-v1', 4, backend='process', num_workers=2); "
        "envs.reset(seed=0); envs.step(envs.action_space.sample()); envs.close(); assert 'torch' not in sys.modules; "
        "print(shoal.__file__)"
    )
    script = tmp_path / "step.py"
    script.write_text(f"def main():\n    {step}\n\n\nif __name__ == '__main__':\n    main()\n")
    assert str(tmp_path) in run(python, script)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "torch==2.13.0", *pins)
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *pins,
        f"shoal[train,web] @ file://{built[0]}",
    )
    shoal = tmp_path / "venv" / "bin" / "shoal"
    run(
        shoal,
        "train",
        "--config-name",
        "demo",
        "run_dir=runs/demo",
        "trainer.iterations=2",
        "warmup.steps=60",
    )
    assert "success" in run(shoal, "show", "runs/demo")
    run(shoal, "view", "runs/demo", "--export", "demo.html")
    assert (tmp_path / "demo.html").stat().st_size > 20_000
    assert "python" in run(shoal, "doctor", "--json").lower()
    env["PATH"] = f"{shoal.parent}:{env['PATH']}"
    assert run_page(ROOT / "docs" / "tutorials" / "environment.md", tmp_path, env, python) == 3
