"""Every backend and worker count gives exactly what Gymnasium's serial vector env and a plain loop give."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal.vector.make import Plan
from tests.vector.faulty import CountEnv
from tests.vector.same_step import make_vec
from tests.vector.scripted import (
    NUMBERS,
    Coordinates,
    Numbers,
    Reuses,
    Scripted,
    Shares,
    TakingEnv,
    TellingEnv,
    look,
    same,
)


class OwnBox(spaces.Box):
    """A subclass is a Box too."""


simple = st.sampled_from(
    [
        OwnBox(-np.inf, np.inf, (4,), np.float64),
        spaces.Box(-1.0, 1.0, (3,), np.float32),
        spaces.Box(-1.0, 1.0, (), np.float64),
        spaces.Box(0, 255, (4, 3, 2), np.uint8),
        spaces.Box(-5, 5, (0,), np.float32),
        spaces.Discrete(7, start=-2),
        spaces.MultiDiscrete([2, 5]),
        spaces.MultiBinary((2, 2)),
        spaces.Text(40),
        spaces.Sequence(spaces.Box(0, 1, (2,))),
        spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
        Coordinates(),
    ]
)
nested = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: spaces.Tuple(tuple(items))),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=4,
)
action_spaces = st.sampled_from(
    [
        spaces.Discrete(4),
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.MultiDiscrete([3, 3]),
        spaces.Text(30),
        spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (1,)))),
        spaces.Dict({"move": spaces.Discrete(2), "say": spaces.Text(5)}),
    ]
)
PROCESSES = {"backend": "process", "num_workers": 2}
layouts = st.sampled_from(
    [
        {"backend": "serial"},
        {"backend": "thread", "num_workers": 2},
        {"backend": "process", "num_workers": 1},
        {"backend": "process", "num_workers": 3, "on_failure": "restart"},
        {"backend": "auto", "plan": Plan("process", workers=1, caller_share=2)},
    ]
)


def build(fns: Any, layout: dict[str, Any], monkeypatch: Any, **options: Any) -> Any:
    chosen = dict(layout)
    plan = chosen.pop("plan", None)
    if plan is not None:
        share = len(fns) // 2
        plan = Plan("process", 1, caller_share=share) if share else Plan("serial", caller_share=len(fns))
        monkeypatch.setattr("shoal.vector.make.planned", lambda *_: plan)
    else:
        monkeypatch.undo()
    return make_vec(fns, **chosen, **options)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    space=nested,
    actions=action_spaces,
    n=st.integers(1, 5),
    length=st.integers(1, 6),
    talk=st.integers(0, 4),
    mode=st.sampled_from([AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]),
    layout=layouts,
    seed=st.integers(0, 2**31 - 10),
)
def test_equal_to_gymnasiums_serial_vector_env(
    monkeypatch: Any,
    space: Any,
    actions: Any,
    n: int,
    length: int,
    talk: int,
    mode: Any,
    layout: Any,
    seed: int,
) -> None:
    fns = [functools.partial(Scripted, space, actions, length, talk)] * n
    theirs = SyncVectorEnv(fns, autoreset_mode=mode)
    ours = build(fns, layout, monkeypatch, autoreset=mode)
    try:
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
        assert same(theirs.reset(seed=seed), ours.reset(seed=seed))
        theirs.action_space.seed(seed)
        for _ in range(8):
            batch = theirs.action_space.sample()
            assert same(theirs.step(batch), ours.step(batch))
        seeds = [seed + 3 * i for i in range(n)]
        assert same(theirs.reset(seed=seeds, options={"a": 1}), ours.reset(seed=seeds, options={"a": 1}))
        batch = theirs.action_space.sample()
        assert same(theirs.step(batch), ours.step(batch))
    finally:
        ours.close()
        theirs.close()


tables = st.dictionaries(
    st.sampled_from(["x", "speed", "y", "é"]),
    st.sampled_from(list(NUMBERS)),
    max_size=4,
)


def of_values(infos: Any) -> Any:
    """Infos in which NaN equals itself, with the types of what they hold."""
    if isinstance(infos, dict):
        return {key: of_values(value) for key, value in infos.items()}
    if isinstance(infos, np.ndarray):
        return str(infos.dtype), infos.shape, [of_values(item) for item in infos.tolist()]
    if isinstance(infos, tuple | list):
        return type(infos), [of_values(item) for item in infos]
    return type(infos), repr(infos)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(tables, min_size=1, max_size=3),
    n=st.integers(1, 5),
    length=st.integers(1, 9),
    odd=st.integers(0, 9),
    silent=st.sets(st.integers(0, 4), max_size=3),
    text=st.booleans(),
    mode=st.sampled_from([AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]),
    layout=layouts,
)
@example([{"x": "float64", "é": "int"}], 5, 4, 9, set(), False, AutoresetMode.SAME_STEP, PROCESSES)
@example([{"x": "float64", "é": "int"}], 4, 4, 9, {2, 3}, True, AutoresetMode.SAME_STEP, PROCESSES)
@example([{"x": "float64", "é": "int"}], 4, 4, 9, {1}, False, AutoresetMode.SAME_STEP, PROCESSES)
@example([{"x": "float64", "é": "int"}], 2, 9, 1, set(), False, AutoresetMode.NEXT_STEP, PROCESSES)
@example([{"x": "text"}, {"x": "int"}], 5, 4, 9, set(), False, AutoresetMode.NEXT_STEP, PROCESSES)
@example([{"x": "int"}, {"x": "int", "y": "bool"}], 5, 4, 9, set(), False, AutoresetMode.NEXT_STEP, PROCESSES)
@example([{"final_obs": "float"}], 5, 4, 9, set(), False, AutoresetMode.NEXT_STEP, PROCESSES)
def test_infos_of_numbers_equal_gymnasiums(
    monkeypatch: Any,
    script: Any,
    n: int,
    length: int,
    odd: int,
    silent: set[int],
    text: bool,
    mode: Any,
    layout: Any,
) -> None:
    fns = [
        functools.partial(Numbers, i, [{}] if i in silent else script, length, odd, text) for i in range(n)
    ]
    theirs, ours = SyncVectorEnv(fns, autoreset_mode=mode), build(fns, layout, monkeypatch, autoreset=mode)
    kept = []
    try:
        assert of_values(ours.reset(seed=1)) == of_values(theirs.reset(seed=1))
        for _ in range(12):
            batch = np.ones(n, np.int64)
            mine, other = ours.step(batch), theirs.step(batch)
            kept.append((mine[4], other[4]))
            assert of_values(mine) == of_values(other)
        for mine, other in kept:  # no later step has changed them
            assert of_values(mine) == of_values(other)
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("kinds", [{"a": "float", "b": "int"}, {"a": "float64", "b": "int32", "c": "bool"}])
def test_infos_of_numbers_have_their_types_for_each_env_too(kinds: dict[str, str]) -> None:
    fns = [functools.partial(Numbers, i, [kinds], 100, 9) for i in range(4)]
    plain = [fn() for fn in fns]
    with contextlib.closing(make_vec(fns, backend="process", num_workers=2)) as ours:
        first = [env.reset()[1] for env in plain]
        assert of_values([info for _, info in ours.reset_some(range(4), [0] * 4)]) == of_values(first)
        for _ in range(3):
            told = [env.step(1)[4] for env in plain]
            ours.step_async(np.ones(4, np.int64))
            *_, found = ours.step_wait_each()
            assert of_values([item.info for item in found]) == of_values(told)
            told = [env.step(1)[4] for env in plain]
            assert of_values([one.info for one in ours.step_some(range(4), [1] * 4)]) == of_values(told)
            told = [env.step(1)[4] for env in plain]
            ours.send(range(4), [1] * 4)
            ready = ours.recv(4)
            assert of_values([ready.infos[k] for k in np.argsort(ready.ids)]) == of_values(told)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    space=nested,
    n=st.integers(1, 5),
    layout=layouts,
    seed=st.integers(0, 2**31 - 10),
    steps=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=8),
)
@example(spaces.Box(-1, 1, ()), 3, PROCESSES, 5, [[True] * 5] * 8)
@example(spaces.Dict(box=spaces.Box(-1, 1, ()), number=spaces.Discrete(4)), 2, PROCESSES, 5, [[True] * 5])
def test_stepping_some_equals_single_environments(
    monkeypatch: Any, space: Any, n: int, layout: Any, seed: int, steps: Any
) -> None:
    fn = functools.partial(Scripted, space, spaces.Text(9), 6, 4)
    plain = [fn() for _ in range(n)]
    ours = build([fn] * n, layout, monkeypatch, autoreset="disabled")
    try:
        seeds = [seed // (1 + i) for i in range(n)]
        expected = [env.reset(seed=s) for env, s in zip(plain, seeds, strict=True)]
        assert same([tuple(pair) for pair in ours.reset_some(range(n), seeds)], expected)
        over = [False] * n
        for t, mask in enumerate(steps):
            chosen = [i for i in reversed(range(n)) if mask[i] and not over[i]]
            actions = [f"{t} ☃ {i}" for i in chosen]
            results = ours.step_some(chosen, actions)
            for i, action, result in zip(chosen, actions, results, strict=True):
                want = plain[i].step(action)
                assert same(tuple(result), want)
                over[i] = want[2] or want[3]
            again = [i for i in range(n) if over[i] and mask[i] and i not in chosen]
            if again:
                assert same(ours.reset_some(again, again), [plain[i].reset(seed=i) for i in again])
                for i in again:
                    over[i] = False
    finally:
        ours.close()


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(n=st.integers(1, 6), layout=layouts, least=st.integers(1, 6), seed=st.integers(0, 1000))
def test_asynchronous_stepping_gives_each_env_its_own_trajectory(
    monkeypatch: Any, n: int, layout: Any, least: int, seed: int
) -> None:
    fn = functools.partial(Scripted, spaces.Box(-1, 1, (2,)), spaces.Discrete(5), 4, 3)
    plain = [fn() for _ in range(n)]
    ours = build([fn] * n, layout, monkeypatch, autoreset="same_step")
    try:
        ours.reset(seed=seed)
        for i, env in enumerate(plain):
            env.reset(seed=seed + i)
        counts = [0] * n
        ours.send(range(n), [np.int64(0)] * n)
        while min(counts) < 9:
            ready = ours.recv(min(least, len(ours.in_flight)))
            assert len(ready.ids) >= 1
            for k, i in enumerate(ready.ids.tolist()):
                obs, reward, terminated, truncated, info = plain[i].step(np.int64(counts[i] % 5))
                if terminated or truncated:
                    assert same(ready.infos[k]["final_obs"], obs)
                    obs, fresh = plain[i].reset()
                    info = {"final_obs": ready.infos[k]["final_obs"], "final_info": info, **fresh}
                assert same(ready.observations[k], obs)
                assert (ready.rewards[k], ready.terminated[k], ready.truncated[k]) == (
                    reward,
                    terminated,
                    truncated,
                )
                assert same(ready.infos[k], info)
                counts[i] += 1
            ours.send(ready.ids, [np.int64(counts[i] % 5) for i in ready.ids.tolist()])
        while ours.in_flight:
            ours.recv(n)
    finally:
        ours.close()


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_partial_resets_by_mask_equal_gymnasiums(backend: Any) -> None:
    fns = [functools.partial(CountEnv, 3)] * 4
    theirs = SyncVectorEnv(fns, autoreset_mode=AutoresetMode.DISABLED)
    ours = make_vec(fns, backend=backend, autoreset="disabled")
    assert same(ours.reset(seed=1), theirs.reset(seed=1))
    for _ in range(3):
        assert same(ours.step(np.array([1, 2, 3, 4])), theirs.step(np.array([1, 2, 3, 4])))
    for mask in ([True, False, True, False], [False, True, False, True]):
        options = {"reset_mask": np.array(mask)}
        assert same(ours.reset(seed=9, options=dict(options)), theirs.reset(seed=9, options=dict(options)))
    ours.close()
    theirs.close()


@pytest.mark.parametrize("options", [{}, {"on_failure": "restart"}], ids=str)
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_who_is_not_reset_or_stepped_shows_what_it_showed_before(backend: Any, options: Any) -> None:
    workers = None if backend == "serial" else 3
    envs = make_vec(functools.partial(CountEnv, 1000), 4, backend=backend, num_workers=workers, **options)
    envs.reset(seed=0)
    for k in range(6):
        obs, *_ = envs.step([k, 1, 2, 3])
        seen = obs.copy()
        obs[:] = -7  # the caller's own
        mask = np.arange(4) == k % 4
        seen[mask] = [[k % 4, seen[k % 4, 1] + 1, 0, 0]]
        assert envs.reset(options={"reset_mask": mask})[0].tolist() == seen.tolist()
        (one,) = envs.step_some([(k + 1) % 4], [5])
        seen[(k + 1) % 4] = one.observation
        assert envs.observations().tolist() == seen.tolist()
        assert one.observation[3] == 5.0
    envs.close()


def test_calls_attributes_and_rendering_reach_every_env_in_order() -> None:
    fns = [functools.partial(CountEnv, 5, i, "ansi") for i in range(5)]
    envs = make_vec(fns, backend="process", num_workers=2)
    envs.reset(seed=10)
    assert envs.get_attr("index") == (0, 1, 2, 3, 4)
    envs.set_attr("length", [1, 2, 3, 4, 5])
    assert envs.get_attr("length") == (1, 2, 3, 4, 5)
    assert envs.render() == ("10/0", "11/0", "12/0", "13/0", "14/0")
    assert envs.step([0] * 5)[2].tolist() == [True, False, False, False, False]
    assert envs.apply(lambda env, k: env.unwrapped.index + k, 100, indices=[3, 1]) == [103, 101]
    envs.close()


def test_different_environments_stand_in_one_vector() -> None:
    fns = [CountEnv, functools.partial(Scripted, spaces.Text(9), spaces.Text(9), 5, 2)]
    plain = [fn() for fn in fns]
    envs = make_vec(fns, backend="process")
    obs, _ = envs.reset(seed=3)
    assert same(list(obs), [env.reset(seed=3 + i)[0] for i, env in enumerate(plain)])
    obs, *_ = envs.step((4, "word"))
    assert same(list(obs), [plain[0].step(4)[0], plain[1].step("word")[0]])
    envs.close()


@pytest.mark.parametrize("layout", [("serial", None), ("thread", 1), ("process", 1)])
def test_options_that_an_env_takes_out_are_there_for_the_others_and_for_the_caller(layout: Any) -> None:
    backend, workers = layout
    given = {"level": 3}
    envs = make_vec(TakingEnv, 3, backend=backend, num_workers=workers)
    try:
        for _ in range(2):
            assert envs.reset(seed=0, options=given)[1]["level"].tolist() == [3, 3, 3]
    finally:
        envs.close()
    assert given == {"level": 3}


class Optionless(CountEnv):
    """Its `reset` takes a seed alone, which is enough for Stable-Baselines3."""

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


def test_an_env_that_knows_no_options_is_reset_where_none_are_given() -> None:
    with contextlib.closing(make_vec(Optionless, 2, backend="serial")) as envs:
        assert envs.reset(seed=4)[0][:, 0].tolist() == [4.0, 5.0]
        assert envs.reset_some([1], [7])[0][0][0] == 7
        with pytest.raises(TypeError, match="unexpected keyword argument 'options'"):
            envs.reset(options={"level": 3})


ODD_INFOS: list[Any] = [
    (None, {"b": 1}),
    ({"b": 1}, None),
    ({"b": 1}, 5, {"c": {"d": 2}}),
    (np.zeros(2), {"b": 1}),
    (2**70, 1),
    (1, 2**70),
    (2**63 - 1, 2**63),
    (2**63, 2**64),
    (np.int8(1), 300),
]


@pytest.mark.parametrize(
    ("told", "layout"),
    [
        *((told, {"backend": "serial"}) for told in ODD_INFOS),
        *((told, PROCESSES) for told in ODD_INFOS[1:6:2]),
    ],
)
def test_infos_of_kinds_that_do_not_go_together_are_told_as_they_are(told: Any, layout: Any) -> None:
    envs = make_vec([functools.partial(TellingEnv, one) for one in told], **layout)
    try:
        envs.reset(seed=0)
        infos = envs.step(np.ones(len(told), int))[4]
    finally:
        envs.close()
    assert infos["_a"].all()
    assert all(np.array_equal(one, given) for one, given in zip(infos["a"], told, strict=True))


def play_reusing(backend: Any, **options: Any) -> tuple[Any, Any]:
    """What was given in some steps, looked at in the end; and what became of what the caller gave."""
    fns = [functools.partial(Reuses, size) for size in (2, 3, 2, 3)]
    envs = make_vec(fns, backend=backend, **options)
    given, start = np.ones((4, 1)), {"start": {"at": 4}}
    shown: list[Any] = [envs.reset(options=start)]
    for k in range(4):
        given[:] = k
        envs.step_async(given)
        given[:] = -1
        obs, *rest = envs.step_wait()
        shown.append((obs, rest))
        obs[0][:] = 7  # the caller's own
        given[:] = k
        shown.append(envs.step_some([1], [given[1]])[0])
    shown.append(envs.reset(options={"reset_mask": np.array([False, True, False, False])}))
    envs.close()
    return repr(shown), (given.tolist(), start)


def test_what_envs_and_callers_go_on_to_change_is_theirs_alone_on_every_backend() -> None:
    serial, kept = play_reusing("serial")
    assert kept == ([[3.0]] * 4, {"start": {"at": 4}})
    assert "array([4., 4., 4.]" in serial  # all began there
    for backend, workers in (("thread", 2), ("process", 1), ("process", 4)):
        assert play_reusing(backend, num_workers=workers) == (serial, kept)


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_what_envs_share_is_told_as_each_of_them_left_it(mode: str) -> None:
    def check(infos: Any, seeds: list[int], t: int) -> None:
        assert infos["number"].tolist() == [seed + t for seed in seeds]
        assert list(infos["nested"]["list"]) == [[seed, t] for seed in seeds]
        assert [*map(list, infos["nested"]["queue"])] == [[seed, t] for seed in seeds]
        assert [tensor.number for tensor in infos["nested"]["tensor"]] == [seed + t for seed in seeds]
        assert [more[0][0][0] for more in infos["more"]] == [seed + t for seed in seeds]
        assert [more[0][1][0] for more in infos["more"]] == [[seed + t] for seed in seeds]
        assert [more[1] for more in infos["more"]] == [([seed + t], {t}) for seed in seeds]

    seeds, again = [10, 20, 30, 40], [11, 21, 31, 41]
    for backend, workers in (("serial", None), ("thread", 1), ("process", 1), ("process", 2)):
        with contextlib.closing(
            make_vec(Shares, 4, backend=backend, num_workers=workers, autoreset=mode)
        ) as envs:
            seen, infos = envs.reset(seed=seeds)
            assert [one["x"] for one in seen] == seeds
            check(infos, seeds, 0)
            for t in (1, 2):
                seen, paid, *_, infos = envs.step(np.zeros(4, int))
                begun = t == 2 and mode == "same_step"
                assert paid.tolist() == seeds
                assert [one["x"] for one in seen] == (again if begun else [seed + t for seed in seeds])
                check(infos["final_info"] if begun else infos, seeds, t)
            if mode == "next_step":
                seen, _, _, _, infos = envs.step(np.zeros(4, int))
            assert [one["x"] for one in seen] == again
            check(infos, again, 0)
            answers = envs.call("look"), envs.apply(look)
            envs.step(np.zeros(4, int))
            for each in answers:
                assert [(obs["x"], info["number"]) for obs, info in each] == list(
                    zip(again, again, strict=True)
                )


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(())], ids=["dict", "tuple"])
def test_an_action_of_no_parts_reaches_each_env(space: Any, backend: Any) -> None:
    fns = [functools.partial(Scripted, spaces.Discrete(3), space, 5, 4)] * 3
    envs = make_vec(fns, backend=backend)
    envs.reset(seed=0)
    empty = type(space.sample())()
    infos = [*envs.step(empty)[4].get("action", ()), *envs.step(empty)[4].get("action", ())]
    assert set(infos) - {None} == {repr(empty)}
    assert envs.step_some([1], [empty])[0].observation in range(3)
    envs.close()
