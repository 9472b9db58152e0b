"""Wrong arguments are refused as Gymnasium's own vector environments refuse them, and do no harm."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics

from shoal.core.errors import ConfigError, EnvError
from shoal.vector import AsyncVectorEnv, ParallelEnv, PettingZooVectorEnv
from tests.vector.faulty import CountEnv
from tests.vector.same_step import make_vec
from tests.vector.test_multi_agent import Race

MAKERS: dict[str, Callable[[], Any]] = {
    "gymnasium": lambda: SyncVectorEnv([CountEnv] * 3, autoreset_mode=AutoresetMode.DISABLED),
    "async": lambda: AsyncVectorEnv([CountEnv] * 3, autoreset_mode=AutoresetMode.DISABLED),
    "serial": lambda: make_vec(CountEnv, 3, backend="serial", autoreset="disabled"),
    "process": lambda: make_vec(CountEnv, 3, backend="process", autoreset="disabled"),
}


@pytest.fixture(params=MAKERS)
def envs(request: pytest.FixtureRequest) -> Any:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        (np.array([1, 1]), ValueError),
        (np.array([1, 1, 1, 1]), ValueError),
        ([1, 1], ValueError),
        (1, TypeError),
        (np.int64(1), TypeError),
    ],
)
def test_actions_that_are_not_one_for_each_env_are_refused(envs: Any, actions: Any, error: Any) -> None:
    envs.reset(seed=0)
    with pytest.raises(error):
        envs.step(actions)
    if not isinstance(envs, SyncVectorEnv):  # (Gymnasium's has stepped some of them by then)
        assert envs.step(np.array([1, 2, 3]))[1].tolist() == [11.0, 21.0, 31.0]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.array([True]), ValueError, r"must have shape `\(3,\)`, got \(1,\)"),
        (np.array([[True, True, True]]), ValueError, r"must have shape `\(3,\)`, got \(1, 3\)"),
        (np.array([False] * 3), ValueError, r"at least one True value, got reset_mask=\[False False False\]"),
        (np.array([1, 1, 0]), TypeError, r"must have `dtype=np.bool_`, got int64"),
        ([True, True, False], TypeError, "reset_mask"),
    ],
)
def test_masks_that_name_no_env_are_refused_in_gymnasiums_words(
    envs: Any, mask: Any, error: Any, message: str
) -> None:
    envs.reset(seed=0)
    envs.step(np.array([1, 1, 1]))
    with pytest.raises((error, AssertionError), match=message):
        envs.reset(options={"reset_mask": mask})
    assert envs.step(np.array([0, 0, 0]))[1].tolist() == [2.0, 2.0, 2.0]  # nobody was reset


@pytest.mark.parametrize("options", [3, True, "reset_mask", [np.array([True])]])
def test_options_of_a_reset_that_are_no_dict_are_refused_as_such(options: Any) -> None:
    made = [
        MAKERS["serial"](),
        MAKERS["async"](),
        make_vec("CartPole-v1", 2, backend="native", autoreset="next_step"),
    ]
    made.append(PettingZooVectorEnv(Race, 1, backend="serial"))
    for envs in made:
        envs.reset(seed=0)
        with pytest.raises(TypeError, match=re.escape(f"options must be a dict or None, got {options!r}")):
            envs.reset(options=options)
        envs.step(envs.action_space.sample())
        envs.reset(options={})
        envs.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "proces"}, ValueError, "no vector backend named 'proces'. Did you mean 'process'"),
        ({"on_failure": "restrat"}, ValueError, "on_failure must be 'raise' or 'restart', got 'restrat'"),
        ({"start_method": "frok"}, ValueError, "no start method named 'frok'. Did you mean 'fork'"),
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
        ({"step_timeout": 0}, ValueError, "step_timeout must be positive, got 0"),
        ({"make_timeout": -0.5}, ValueError, "make_timeout must be positive, got -0.5"),
        ({"step_timeout": float("nan")}, ValueError, "step_timeout must be a number or None, got nan"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0, got -1"),
        ({"autoreset": "same"}, ValueError, "no autoreset mode 'same'"),
        ({"backend": "serial", "step_timeout": 1.0}, ConfigError, "the caller cannot interrupt itself"),
        ({"backend": "serial", "num_workers": 2}, ConfigError, "only to process and thread and ray"),
        ({"backend": "process", "ray_options": {}}, ConfigError, "ray_options={} means nothing"),
        ({"ray_options": {"num_cpus": 2}}, ConfigError, "ray_options=.* means nothing to backend='auto'"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be a whole number, got 1.5"),
        ({"num_workers": True}, TypeError, "num_workers must be a whole number, got True"),
        ({"backend": None}, ValueError, "no vector backend named None"),
        ({"autoreset": None}, ValueError, "no autoreset mode None"),
        ({"max_restarts": float("nan")}, ValueError, "max_restarts must be a number or None, got nan"),
        ({"max_restarts": None}, TypeError, "max_restarts must be a number .math.inf .*, got None"),
        ({"max_restarts": "3"}, TypeError, "max_restarts must be a number or None, got '3'"),
        ({"check_nan": None}, TypeError, "check_nan must be True or False, got None"),
        ({"copy": "yes"}, TypeError, "copy must be True or False, got 'yes'"),
        ({"env_kwargs": [1]}, ConfigError, "env_kwargs must be a mapping of names to values, got .1."),
        ({"step_timeout": "5"}, TypeError, "step_timeout must be a number or None, got '5'"),
        ({"make_timeout": [5]}, TypeError, "make_timeout must be a number or None, got .5."),
        ({"step_timeout": True}, TypeError, "step_timeout must be a number or None, got True"),
        ({"backend": "ray", "start_method": "fork"}, ConfigError, "start_method='fork' means nothing"),
    ],
    ids=str,
)
def test_options_that_do_not_exist_or_mean_nothing_are_refused(
    options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        make_vec(CountEnv, 2, **options)


@pytest.mark.parametrize(
    ("env", "num_envs", "message"),
    [
        ([], None, "at least one environment is needed"),
        (CountEnv, 0, "num_envs must be at least 1, got 0"),
        ([CountEnv, CountEnv], 3, "got 2 environments but num_envs=3"),
    ],
)
def test_how_many_environments_there_are_must_be_clear(env: Any, num_envs: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_vec(env, num_envs, backend="serial")
    for wrong in (2.0, True, "2"):
        for backend in ("serial", "native"):
            with pytest.raises(TypeError, match=f"num_envs must be a whole number, got {wrong!r}"):
                make_vec(CountEnv, wrong, backend=backend)  # type: ignore[arg-type]
    one = make_vec([CountEnv], 1, backend="serial")
    assert (one.num_envs, one.reset(seed=3)[0].tolist()) == (1, [[3, 1, 0, 0]])
    one.close()


@pytest.mark.parametrize("wrong", [[True, False], np.array([True, False]), [0.9, 1.0], ["0", "1"]], ids=str)
def test_indices_that_are_no_whole_numbers_name_nobody(wrong: Any) -> None:
    envs = make_vec(CountEnv, 2, backend="serial")
    envs.reset(seed=0)
    for ask in (
        lambda: envs.step_some(wrong, [1, 2]),
        lambda: envs.reset_some(wrong, [1, 2]),
        lambda: envs.send(wrong, [1, 2]),
        lambda: envs.apply(type, indices=wrong),
    ):
        with pytest.raises(TypeError, match="an index must be a whole number"):
            ask()
    assert envs.step_some(np.array([1, 0]), [1, 2])[0].reward == 11.0
    assert envs.step_some([np.array(1)], [1])[0].reward == 12.0  # as elements of tensors are
    envs.close()


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_numbers_that_the_space_has_no_room_for_are_refused_not_changed(backend: Any) -> None:
    class Small(CountEnv):
        observation_space = spaces.Box(-100, 100, (2,), np.int8)

        def observe(self, action: Any) -> Any:
            return np.array([self.t, -100 * int(action)], dtype=np.int64)

    envs = make_vec(Small, 2, backend=backend)
    assert envs.reset(seed=0)[0].tolist() == [[0, 0], [0, 0]]
    assert envs.step([0, 1])[0].tolist() == [[1, 0], [1, -100]]
    with pytest.raises(EnvError, match="env 1 .*numbers that int8 has no room for"):
        envs.step([1, 2])
    envs.close()


def test_actions_of_another_shape_reach_the_envs_as_gymnasium_gives_them() -> None:
    class Shown(CountEnv):
        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(np.asarray(action).item())
            return obs, float(np.ndim(action)), *rest

    for made in (SyncVectorEnv([Shown] * 2), make_vec(Shown, 2, backend="process", num_workers=1)):
        made.reset(seed=0)
        assert made.step(np.array([[1], [2]]))[1].tolist() == [1.0, 1.0]
        assert made.step(np.array([1, 2]))[1].tolist() == [0.0, 0.0]
        made.close()


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_whole_numbers_reach_the_envs_as_the_type_that_the_caller_gave_where_that_is_another_kind(
    backend: Any,
) -> None:
    class Shown(CountEnv):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"kind": type(action).__name__}

    envs = make_vec(Shown, 2, backend=backend, num_workers=None if backend == "serial" else 1)
    envs.reset(seed=0)
    for dtype, kind in ((np.float64, "float64"), (np.int32, "int64"), (np.int64, "int64")):
        assert envs.step(np.array([1, 1], dtype))[4]["kind"].tolist() == [kind, kind]
    envs.close()


def test_seeds_are_one_for_each(envs: Any) -> None:
    with pytest.raises(ValueError, match="length must match num_envs=3"):
        envs.reset(seed=[1, 2])
    if isinstance(envs, SyncVectorEnv):
        return
    assert envs.reset(seed=[5, None, 7])[0][[0, 2], 0].tolist() == [5, 7]


def test_gymnasiums_modes_are_known_by_their_names_too() -> None:
    envs = AsyncVectorEnv([CountEnv], autoreset_mode=AutoresetMode.SAME_STEP.value)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    envs.close()
    with pytest.raises(ValueError, match="'never' is not a valid AutoresetMode"):
        AsyncVectorEnv([CountEnv], autoreset_mode="never")


def test_seeds_are_whole_numbers_of_any_kind_and_nothing_else() -> None:
    envs = make_vec(CountEnv, 2, backend="serial")
    drawn = np.array([4, 5])
    assert [seen[0] for seen, _ in envs.reset_some([1, 0], drawn)] == [4, 5]
    envs.send_reset([0, 1], drawn)
    assert envs.recv(2).observations[:, 0].tolist() == [4, 5]
    wrong: list[Any] = [0.5, [0.5, 1.7], "12", ["1", "2"], {0: 7, 1: 8}, {7, 8}, b"78"]
    resets = [functools.partial(envs.reset, seed=seeds) for seeds in wrong]
    for reset in (
        *resets,
        lambda: envs.reset_some([0], wrong[1][:1]),
        lambda: envs.send_reset([0, 1], wrong[1]),
    ):
        with pytest.raises(TypeError, match="a seed must be a whole number or None, got"):
            reset()
    assert envs.reset(seed=np.int64(7))[0][:, 0].tolist() == [7, 8]
    envs.close()


def test_what_can_be_looked_at_only_once_is_as_good_as_a_list() -> None:
    envs = make_vec(CountEnv, 3, backend="thread")
    assert [seen[0] for seen, _ in envs.reset_some(iter([2, 0, 1]), map(int, "456"))] == [4, 5, 6]  # type: ignore[arg-type]
    assert [result.reward for result in envs.step_some(iter([2, 0]), map(np.int64, "12"))] == [11.0, 21.0]  # type: ignore[arg-type]
    assert envs.apply(lambda env: env.t, indices=iter([2, 1])) == [1, 0]  # type: ignore[arg-type]
    envs.send(iter([1, 2]), map(np.int64, "34"))  # type: ignore[arg-type]
    assert envs.recv(2).rewards.tolist() == [31.0, 42.0]
    envs.send_reset(iter([1, 2]), map(int, "78"))  # type: ignore[arg-type]
    assert envs.recv(2).observations[:, 0].tolist() == [7, 8]
    with pytest.raises(TypeError, match="min_envs must be a whole number, got nan"):
        envs.recv(float("nan"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected one action for each of 2 environments"):
        envs.step_some([0, 1], {1, 2})  # type: ignore[arg-type]
    envs.close()


PARTS = {
    "a dict with the keys ['a', 'b']": spaces.Dict(a=spaces.Discrete(9), b=spaces.Discrete(9)),
    "a tuple of 2": spaces.Tuple((spaces.Discrete(9), spaces.Discrete(9))),
}


class Parted(CountEnv):
    """Shows what it is given, where its space has parts."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.observation_space, self.shown = space, space.sample()

    def observe(self, action: Any) -> Any:
        return self.shown


@pytest.mark.parametrize("expected", PARTS)
@pytest.mark.parametrize("given", [{"a": [1, 2]}, ([1, 2],), [], 1, None, np.zeros(1), {}])
def test_values_without_the_parts_of_their_space_are_refused_with_what_was_expected(
    expected: str, given: Any
) -> None:
    class Acting(CountEnv):
        action_space: Any = PARTS[expected]

        def step(self, action: Any) -> Any:
            return *super().step(1)[:4], {"given": str(action)}

    envs = make_vec(Acting, 2, backend="serial")
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=re.escape(f"expected {expected}, as its space says, got ")):
        envs.step(given)
    whole = ([1, 2], [3, 4])
    heard = envs.step(dict(zip("ab", whole, strict=True)) if "dict" in expected else whole)[4]["given"]
    assert [re.findall(r"\((\d)\)", words) for words in heard] == [["1", "3"], ["2", "4"]]
    envs.close()
    envs = make_vec(functools.partial(Parted, PARTS[expected]), 2, backend="serial")
    envs.reset(seed=0)
    envs.apply(lambda env: setattr(env, "shown", given), indices=[1])
    with pytest.raises(ValueError, match=f"expected {re.escape(expected)}, as its space says") as caught:
        envs.step([1, 1])
    assert caught.value.__notes__[0].startswith("env 1 ")
    envs.close()


@pytest.mark.parametrize("actions", [lambda: map(int, "12"), lambda: {"a": 1, "b": 2}.values()])
def test_actions_may_be_whatever_can_be_gone_through_as_in_gymnasium(actions: Any) -> None:
    for envs in (SyncVectorEnv([CountEnv] * 2), make_vec(CountEnv, 2, backend="serial")):
        envs.reset(seed=0)
        assert envs.step(actions())[1].tolist() == [11.0, 21.0]
        envs.close()
    with contextlib.closing(make_vec(CountEnv, 2, backend="serial")) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match=r"expected 2 actions, one for each environment, got 3"):
            envs.step(map(int, "123"))


class HeedingEnv(CountEnv):
    """Does as it is told in words."""

    action_space: Any = spaces.Text(10)

    def step(self, action: str) -> Any:
        return (*super().step(1)[:4], {"heard": action})


@pytest.mark.parametrize("single", ["up", 3])
def test_a_number_or_a_text_is_one_action_and_not_one_for_each_env(single: Any) -> None:
    envs = make_vec(HeedingEnv, 2, backend="serial")
    envs.reset(seed=0)
    some = functools.partial(envs.step_some, [0, 1]), functools.partial(envs.send, [0, 1])
    for step in (envs.step, *some, functools.partial(envs.send_reset, [0, 1])):
        with pytest.raises(TypeError, match=f"one (action|seed) for each of 2 .*, got the single {single!r}"):
            step(single)
    assert envs.step(["up", "down"])[4]["heard"].tolist() == ["up", "down"]
    envs.close()


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "serial"},
        {"backend": "thread", "num_workers": 3},
        {"backend": "process", "num_workers": 1},
    ],
    ids=str,
)
def test_one_env_cannot_stand_in_two_places(options: Any) -> None:
    env = CountEnv()
    with pytest.raises(ConfigError, match="environments 0 and 1 are one object"):
        make_vec(lambda: env, 3, **options)
    with pytest.raises(ConfigError, match="environments 0 and 1 are one object"):
        make_vec(lambda: env, 3, wrappers=[RecordEpisodeStatistics], **options)
    make_vec(lambda: env, 1, **options).close()


@pytest.mark.parametrize("timeout", [float("nan"), "2", True, [1.0]])
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_wait_of_no_length_is_refused_and_what_was_begun_is_there_still(backend: Any, timeout: Any) -> None:
    with contextlib.closing(make_vec([CountEnv] * 2, backend=backend)) as envs:
        envs.reset(seed=0)
        envs.step_async(np.zeros(2, np.int64))
        with pytest.raises((TypeError, ValueError), match="timeout must be"):
            envs.step_wait(timeout)
        first = envs.step_wait(60)[0]
        envs.send([1], [0])
        with pytest.raises((TypeError, ValueError), match="timeout must be"):
            envs.recv(timeout=timeout)
        assert envs.in_flight == [1]
        assert envs.recv()[0].tolist() == [1]
        with pytest.raises((TypeError, ValueError), match="timeout must be"):
            envs.close(timeout=timeout)
        assert len(first) == 2


@pytest.mark.parametrize("make", [make_vec, ParallelEnv])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"render_mode": "rgb_array"}, "go into env_kwargs={'render_mode': 'rgb_array'}"),
        ({"size": 3}, "go into env_kwargs={'size': 3}"),
        ({"autoreset_mode": "same_step"}, "write autoreset='same_step'"),
        ({"vectorization_mode": "async"}, "write backend='process'"),
        ({"step_time_out": 3}, "Did you mean 'step_timeout'?"),
        ({"numworkers": 3}, "Did you mean 'num_workers'?"),
    ],
)
def test_an_argument_that_is_not_known_is_answered_with_the_one_that_was_meant(make, given, said) -> None:
    with pytest.raises(TypeError, match=f"make_vec has no argument '{next(iter(given))}'.*{re.escape(said)}"):
        make([CountEnv] * 2, **given)
