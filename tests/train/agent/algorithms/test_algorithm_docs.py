"""What `docs/algorithms.md` names exists, and it names every algorithm that exists."""

import re
import shlex
from pathlib import Path
from typing import get_args

from shoal.train.agent.algorithms.advantages import ESTIMATORS, Method
from shoal.train.agent.algorithms.losses import LOSSES, Aggregation, KLEstimator
from shoal.train.agent.config import AgentConfig, compose_config

PAGE = Path(__file__).parents[4] / "docs" / "algorithms.md"
TEXT = PAGE.read_text()


def test_every_choice_has_its_words():
    own = [name for name in (*ESTIMATORS, *LOSSES) if not name.startswith("test")]
    choices = [name for kind in (Method, Aggregation, KLEstimator) for name in get_args(kind)]
    assert {name for name in (*own, *choices) if f"`{name}`" not in TEXT} == set()


def test_every_setting_that_is_named_exists():
    names = re.findall(r"`((?:algorithm|agent_proxy|trainer|es_manager)\.[a-z_.]+)", TEXT)
    assert len(names) > 20
    for name in (name for name in names if name != "algorithm."):
        node = AgentConfig()
        for part in name.split("."):
            assert hasattr(node, part), name
            node = getattr(node, part)


def test_every_command_composes():
    commands = re.findall(r"^shoal train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) > 2
    for command in commands:
        _, name, *overrides = shlex.split(command)
        compose_config(name, overrides)
