"""The arrows and the light install are tests, not promises."""

import ast
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAVY = "torch transformers ray jax PIL matplotlib hydra joblib peft numba stable_baselines3 safetensors pandas aiohttp"
ADAPTERS = ("sb3.py",)  # subclasses of another library's classes, imported by name only
ROOMS = [
    "shoal",
    "shoal.splitting.splitters",
    "shoal.splitting.processors",
    "shoal.cli.skills",
    "shoal.train.agent.supervised.coach",
    "shoal.cli.main",
]


@pytest.mark.parametrize("room", ROOMS)
def test_light_rooms_stay_light(room):
    code = f"""
        import sys, pkgutil, importlib
        importlib.import_module({room!r})
        print(*[name for name in {HEAVY!r}.split() if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_every_module_of_the_light_rooms_imports_without_heavy_packages():
    root = Path(__file__).parents[1] / "src"
    modules = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for room in ("core", "maths", "envs", "vector", "rollout")
        for path in sorted((root / "shoal" / room).rglob("*.py"))
        if "samplers" not in path.parts and path.name not in ("__init__.py", *ADAPTERS)
    ]
    code = f"""
        import sys, importlib
        for name in {modules!r}:
            importlib.import_module(name)
            heavy = [h for h in {HEAVY!r}.split() if h in sys.modules]
            assert not heavy, (name, heavy)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("room", ["shoal", "shoal.vector", "shoal.splitting", "shoal.skills"])
def test_type_checkers_see_the_names_that_are_resolved_on_first_use(room):
    package = importlib.import_module(room)
    tree = ast.parse(Path(package.__file__).read_text("utf-8"))
    [block] = [node for node in tree.body if ast.unparse(node).startswith("if TYPE_CHECKING:")]
    seen = {alias.asname: f"{line.module}.{alias.name}" for line in block.body for alias in line.names}
    lazy = set(package.__all__) - {"__version__"}
    assert set(seen) - {"SB3VecEnv"} == lazy  # which needs Stable-Baselines3
    for name in sorted(lazy):
        module, _, attribute = seen[name].rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(package, name)


def test_every_public_name_resolves():
    import shoal

    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        shoal.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("from shoal.cli.main import main; sys.exit(main(['train']))", "shoal train needs an extra"),
        (
            "from shoal.cli.main import main; sys.exit(main(['train-ppo']))",
            "shoal train-ppo needs an",
        ),
        ("from shoal.cli.main import main; sys.exit(main(['rollout']))", "shoal rollout needs an extra"),
        ("from shoal import PPO", "shoal.PPO needs an extra"),
    ],
)
def test_without_the_extras_one_line_says_what_to_install(code, said, tmp_path):
    for package in ("torch", "hydra", "numba"):  # as in an install without extras
        (tmp_path / f"{package}.py").write_text(
            f"raise ModuleNotFoundError('no {package}', name={package!r})"
        )
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{said}" in done.stderr.splitlines()[-1]
    assert 'pip install ".[train]"' in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == ("PPO" in code)


@pytest.mark.parametrize(
    ("name", "instead"), [("LLMAgentProxy", "ParallelRolloutManager"), ("RayAgentTrainer", "AgentTrainer")]
)
def test_who_asks_for_a_class_of_another_project_is_told_what_does_its_work_here(name, instead):
    import shoal

    with pytest.raises(ImportError, match=f"no {name}: use {instead}"):
        exec(f"from shoal import {name}")
    with pytest.raises(ImportError, match=instead):
        getattr(shoal, name)
    assert instead in shoal.__all__
    assert name not in dir(shoal)
    with pytest.raises(AttributeError, match="has no attribute 'LLMAgentProxi'"):
        _ = shoal.LLMAgentProxi
