"""Names find code."""

import importlib.util
import sys

import pytest

from shoal.core.errors import UnknownNameError
from shoal.core.registry import Registry


@pytest.mark.parametrize("name", ["sokobn", "", None, 5, ["sokoban"], {}])
def test_what_is_no_name_is_told_with_those_there_are(name):
    envs = Registry("env")
    envs.register("sokoban", object())
    guess = "Did you mean 'sokoban'. " if name == "sokobn" else ""
    with pytest.raises(UnknownNameError, match=f"{guess}Known: sokoban"):
        envs[name]


def test_a_name_that_is_taken_is_refused_unless_the_same_code_registers_it_again():
    def make(answer):
        def mine():
            return answer

        return mine

    envs = Registry("env")
    for number in (1, 2):  # as a file that is run, mended and run again
        envs.register("mine", make(number))
        assert envs["mine"]() == number
    with pytest.raises(ValueError, match="'mine' is registered already; pass replace=True"):
        envs.register("mine", len)
    assert envs.register("mine", len, replace=True) is envs["mine"] is len
    assert "mine" in envs
    assert list(envs) == ["mine"]


def test_a_file_that_is_imported_by_two_names_registers_its_own_again(tmp_path, monkeypatch):
    def mine_of(file, module):
        (tmp_path / file).write_text("def mine(): ...")
        spec = importlib.util.spec_from_file_location(module, tmp_path / file)
        monkeypatch.setitem(sys.modules, module, made := importlib.util.module_from_spec(spec))
        spec.loader.exec_module(made)
        return made.mine

    envs = Registry("env")
    envs.register("mine", mine_of("own.py", "own"))
    again = envs.register("mine", mine_of("own.py", "shoal_imports.own"))
    assert envs["mine"] is again
    with pytest.raises(ValueError, match="'mine' is registered already"):
        envs.register("mine", mine_of("other.py", "other"))
