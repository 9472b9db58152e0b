"""The environments that the pages show keep every promise."""

import re
import sys
import types
from pathlib import Path

import pytest

from shoal.envs.catalogue import resolve_text
from shoal.testing import check_text_env

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("docs/tutorials/environment.md", "NumberEnv"),
        ("docs/how-to/own-env.md", "Lamps"),
        ("docs/how-to/own-env.md", "Coin"),
    ],
)
def test_the_env_that_a_page_shows_is_a_whole_one(page, name, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    (code,) = [block for block in blocks if f"class {name}(" in block]
    module = types.ModuleType("shown_env")
    monkeypatch.setitem(sys.modules, "shown_env", module)
    exec(code, module.__dict__)
    check_text_env(resolve_text(getattr(module, name)))
