import json
import re

import gymnasium
import pytest

from shoal.cli.main import main
from shoal.testing.speed import Speed, measure, measure_backends


def test_it_measures_each_way_and_says_which_to_take(prints, tmp_path):
    arguments = ["CartPole-v1", "--num-envs", "4", "--seconds", "0.05", "--backends", "serial", "thread"]
    result = json.loads(prints("bench", *arguments, "--run-dir", tmp_path / "run", "--json"))
    assert [way["name"] for way in result["ways"]] == [
        "serial",
        "thread",
        "gymnasium sync",
        "gymnasium async",
    ]
    assert all(way["steps_per_second"] > 0 and way["problem"] is None for way in result["ways"])
    assert result["observation_bytes"] == 16  # four float32
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    best = max(way["steps_per_second"] for way in result["ways"])
    assert summary["command"] == "bench"
    assert summary["metrics"]["steps_per_second"] == best
    out = prints("bench", *arguments, "--no-peers")
    assert "fastest of shoal here: make_vec('CartPole-v1', 4, backend='" in out
    assert "gymnasium" not in out


def test_settings_reach_the_environment(capsys):
    assert main(["bench", "sokoban", "dim_room=[5,5]", "--num-envs", "2", "--seconds", "0.05", "--backends",
                 "serial", "--no-peers", "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["observation_bytes"] == 5 * 6 - 1


class Drifting(gymnasium.Wrapper):
    """Its episodes depend on how many there were before."""

    resets = 0

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        Drifting.resets += 1
        return obs + Drifting.resets, info


def test_what_differs_from_a_plain_loop_is_named_and_not_timed():
    def broken(fns):
        raise TypeError("no such space")

    speeds = measure(
        {"drifting": gymnasium.vector.SyncVectorEnv, "broken": broken},
        lambda: Drifting(gymnasium.make("CartPole-v1")),
        num_envs=2,
        seconds=0.05,
    )
    assert "not the results of a plain loop: reset 0: env 0" in speeds[0].problem
    assert speeds[1] == Speed("broken", problem="cannot run: TypeError: no such space")


def test_an_environments_own_batch_is_measured_where_there_is_one_and_named_where_it_is_fastest(prints):
    brief = ["--num-envs", "512", "--seconds", "0.2", "--no-peers"]
    out = " ".join(prints("bench", "CartPole-v1", *brief, "--backends", "serial", "native").split())
    assert "another implementation" in out
    assert re.search(
        r"native is [\d.]+x the next: make_vec\('CartPole-v1', 512, backend='native'\)",
        out,
    )
    for env, has_one in (("CartPole-v1", True), ("MountainCar-v0", False)):
        speeds = measure_backends(env, num_envs=2, num_workers=1, seconds=0.01, peers=False)
        assert ("native" in [speed.name for speed in speeds.ways]) == has_one
        assert speeds.loop_steps_per_second > 0
    problem = json.loads(
        prints("bench", "MountainCar-v0", *brief, "--backends", "serial", "native", "--json")
    )["ways"][1]["problem"]
    assert "cannot run: ConfigError: backend='native' needs" in problem


def test_a_batch_of_its_own_is_not_measured_of_an_env_in_a_wrapper(prints):
    """It has no place for one: it was measured without."""
    short = ["--num-envs", "2", "--num-workers", "1", "--seconds", "0.01", "--no-peers", "--json"]
    wrapper = ["--wrapper", "gymnasium.wrappers:TimeAwareObservation"]
    result = json.loads(prints("bench", "CartPole-v1", *wrapper, *short))
    assert result["observation_bytes"] == 5 * 8  # with the time, all in float64
    assert "native" not in [way["name"] for way in result["ways"]]


@pytest.mark.parametrize("wrong", [["--num-envs", "0"], *(["--seconds", s] for s in ("0", "nan", "inf"))])
def test_nonsense_is_refused(prints, wrong):
    assert f"{wrong[0]} must be " in prints("bench", "CartPole-v1", *wrong, code=2)
