"""The defaults that the docs name beside shoal's are those of the installed TRL and verl."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import yaml
from docs.library_names import TRL, VERL


def defaults(table):
    """Each setting of a table with its default there."""
    for name in table:
        theirs = name.theirs.split(", ")
        yield from zip(theirs, name.default if len(theirs) > 1 else [name.default], strict=True)


def test_the_defaults_of_trl_are_those_of_its_config():
    trl = pytest.importorskip("trl")
    found = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    named = dict(defaults(TRL))
    del named["peft_config"]  # an argument of the trainer
    assert named == {name: found.get(name, "no such setting") for name in named}


def test_the_defaults_of_verl_are_those_of_its_yaml():
    pytest.importorskip("verl")
    (place,) = importlib.util.find_spec("verl").submodule_search_locations
    config = yaml.safe_load((Path(place) / "trainer/config/_generated_ppo_trainer.yaml").read_text())
    named = dict(defaults(VERL))
    del named["trainer.default_local_dir"]  # made of other settings
    found = {}
    for name in named:
        node = config["actor_rollout_ref"] if name.startswith(("actor.", "rollout.")) else config
        for part in name.split("."):
            node = node[part]
        found[name] = node
    assert named == found
