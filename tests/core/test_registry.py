"""Names find code, and what is registered in a block that fails is taken back."""

import importlib
import sys
import types

import pytest

from shoal.core.errors import UnknownNameError
from shoal.core.registry import Registry, all_or_nothing


@pytest.mark.parametrize("name", ["sokobn", "", None, 5, ["sokoban"], {}])
def test_what_is_no_name_is_told_with_those_there_are(name):
    envs = Registry("env")
    envs.register("sokoban", object())
    with pytest.raises(UnknownNameError, match="Known: sokoban"):
        envs[name]


def test_a_block_that_fails_takes_back_what_blocks_inside_it_registered():
    envs = Registry("env")
    envs.register("kept", 1)

    def outer():
        with all_or_nothing():
            envs.register("outer", 1)
            with all_or_nothing():
                envs.register("inner", 2)
                envs.register("kept", 2, replace=True)
            raise RuntimeError

    def inner():
        with all_or_nothing():
            envs.register("inner", 4)
            envs.register("outer", 4)

    with pytest.raises(RuntimeError):
        outer()
    assert {name: envs[name] for name in envs} == {"kept": 1}
    with all_or_nothing():
        envs.register("outer", 3)
        with pytest.raises(ValueError, match="registered already"):
            inner()
    assert {name: envs[name] for name in envs} == {"kept": 1, "outer": 3}


@pytest.mark.parametrize(("ends", "left"), [("pass", ["theirs"]), ("raise RuntimeError", [])])
def test_what_a_module_registered_is_taken_back_unless_it_was_imported_whole(
    tmp_path, monkeypatch, ends, left
):
    envs = Registry("env")
    monkeypatch.setitem(sys.modules, "holds_envs", types.SimpleNamespace(envs=envs))
    (tmp_path / "brings_an_env.py").write_text(
        f"from holds_envs import envs\nenvs.register('theirs', 1)\n{ends}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def block():
        with all_or_nothing():
            envs.register("own", 1)
            importlib.import_module("brings_an_env")
            raise RuntimeError

    try:
        with pytest.raises(RuntimeError):
            block()
    finally:
        sys.modules.pop("brings_an_env", None)
    assert list(envs) == left
