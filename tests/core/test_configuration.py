from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest

from shoal.core.configuration import check_fields, from_mapping, to_mapping
from shoal.core.errors import ConfigError
from shoal.envs.text import build_config


@dataclass(frozen=True)
class Inner:
    size: int = 3
    kind: Literal["a", "b"] = "a"
    rate: float = 1.0

    def __post_init__(self):
        if self.size < 0:
            raise ConfigError(f"size must not be negative, got {self.size}")


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: dict[str, Inner] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    rate: float = 0.5


@dataclass(frozen=True)
class Settings:
    inner: Inner = Inner()
    size: int = 3
    sides: tuple[int, ...] = ()
    made: Callable[[], int] | None = None


def test_nested_values_become_dataclasses_and_back():
    values = {
        "inner": {"size": 4},
        "maybe": {"kind": "b"},
        "many": {"x": {"size": 1}},
        "names": ["p"],
        "rate": 1,
    }
    built = from_mapping(Outer, values)
    assert built == Outer(Inner(4), Inner(kind="b"), {"x": Inner(1)}, ("p",), 1.0)
    assert from_mapping(Outer, to_mapping(built)) == built


@dataclass(frozen=True)
class Given:
    first: int
    second: int = 2


@dataclass(frozen=True)
class Others:
    inner: Inner = Inner(8, "b")
    given: Given = Given(5, 6)


def test_what_nested_settings_leave_out_is_as_in_the_default_of_their_field():
    assert from_mapping(Others, {"inner": {"size": 4}, "given": {"second": 7}}) == Others(
        Inner(4, "b"), Given(5, 7)
    )
    assert from_mapping(Others, {"inner": {}, "given": {}}) == Others()
    assert from_mapping(Others, {"inner": Inner()}) == Others(Inner())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"iner": {}}, "unknown key 'iner'. Did you mean 'inner'"),
        ({"inner": {"sise": 1}}, "unknown key 'inner.sise'. Did you mean 'inner.size'"),
        ({"many": {"x": {"sise": 1}}}, r"unknown key 'many.x.sise'"),
        ({"inner": {"size": "big"}}, "inner.size: Expected `int`, got 'big'"),
        ({"inner": {"kind": "c"}}, "inner.kind must be .* or .*, got 'c'"),
        ({"inner": {"size": -1}}, "inner.size must not be negative, got -1"),
        ({"inner": 3}, "inner must be a mapping of settings, got 3"),
        ({"rate": "fast"}, "rate: Expected `float`"),
        ({"many": {"a": 5}}, "^many.a must be a mapping"),
        ({"many": 5}, "^many must be a mapping"),
        ([1], "^Outer must be a mapping"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(Outer, values)


def test_settings_of_an_env_are_told_by_the_same_rules_in_its_own_words():
    made = build_config(Settings, {"size": np.int64(4), "sides": [1, 2], "made": int, "inner": {"size": 1}})
    assert made == Settings(Inner(1), 4, (1, 2), int)
    assert type(made.size) is int
    for values, message in (
        ({"sise": 1}, "Settings has no setting 'sise'. Did you mean 'size'"),
        ({"size": "x"}, "Settings.size: Expected `int`, got 'x'"),
        ({"inner": {"sise": 1}}, "unknown key 'Settings.inner.sise'. Did you mean 'Settings.inner.size'"),
        ({"inner": {"size": -1}}, "Settings.inner.size must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_config(Settings, values)


@dataclass(frozen=True)
class Many:
    listed: list[Inner] = field(default_factory=list)
    fixed: tuple[Inner, ...] = ()
    maybe: dict[str, Inner] | None = None
    deep: dict[str, list[Inner]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"listed": [{"size": 1}, {"sise": 2}]}, r"listed\.1\.sise"),
        ({"fixed": [{"sise": 2}]}, r"fixed\.0\.sise"),
        ({"maybe": {"a": {"sise": 2}}}, r"maybe\.a\.sise"),
        ({"deep": {"a": [{"sise": 2}]}}, r"deep\.a\.0\.sise"),
    ],
)
def test_unknown_keys_of_settings_in_lists_and_mappings_are_errors(values, where):
    with pytest.raises(
        ConfigError, match=rf"unknown key '{where}'\. Did you mean '{where.removesuffix('sise')}size'"
    ):
        from_mapping(Many, values)


def test_settings_in_lists_and_mappings_become_dataclasses_and_back():
    one = {"size": 5, "kind": "b"}
    values = {"listed": [one], "fixed": [one, one], "maybe": {"a": one}, "deep": {"b": [one]}}
    inner = Inner(5, "b")
    made = from_mapping(Many, values)
    assert made == Many([inner], (inner, inner), {"a": inner}, {"b": [inner]})
    assert from_mapping(Many, to_mapping(made)) == made
    assert from_mapping(Many, {"maybe": None}).maybe is None


NO_RATE = Inner(rate=float("nan"))


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (Many([Inner(), NO_RATE]), "listed.1.rate"),
        (Many(fixed=(NO_RATE,)), "fixed.0.rate"),
        (Outer(maybe=Inner(rate=float("inf"))), "maybe.rate"),
        (Outer(many={"a": NO_RATE}), "many.a.rate"),
    ],
)
def test_settings_within_settings_are_checked_wherever_they_stand(settings, path):
    check_fields(Many([Inner()], (Inner(),)))
    check_fields(Outer(maybe=Inner(), many={"a": Inner()}))
    with pytest.raises(ConfigError, match=f"^{path} must be a finite number"):
        check_fields(settings)
