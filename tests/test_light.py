"""The arrows and the light install are tests, not promises."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAVY = (
    "torch transformers ray jax PIL matplotlib hydra joblib peft numba stable_baselines3 safetensors pandas"
)
ADAPTERS = ("sb3.py",)  # subclasses of another library's classes, imported by name only
ROOMS = [
    "shoal",
    "shoal.core",
    "shoal.envs",
    "shoal.vector",
    "shoal.splitting",
    "shoal.skills",
    "shoal.rollout",
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
        for room in ("core", "envs", "vector", "rollout")
        for path in sorted((root / "shoal" / room).rglob("*.py"))
        if "engines" not in path.parts and path.name not in ("__init__.py", *ADAPTERS)
    ]
    code = f"""
        import sys, importlib
        for name in {modules!r}:
            importlib.import_module(name)
            heavy = [h for h in {HEAVY!r}.split() if h in sys.modules]
            assert not heavy, (name, heavy)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_every_public_name_resolves():
    import shoal

    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        shoal.nonsense  # noqa: B018
