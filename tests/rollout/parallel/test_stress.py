import pytest
from tests.rollout.parallel.stress import run_case

IN_TIME = pytest.param(902, marks=pytest.mark.flaky(reruns=2))
"""Its envs that hang are given up within 0.6 s."""


@pytest.mark.parametrize("seed", [900, 901, IN_TIME, 903, 904, 905])
def test_rollouts_drawn_at_random_with_faults_equal_the_serial_ones(seed):
    run_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_rollouts_drawn_at_random_with_faults_equal_the_serial_ones(seed):
    run_case(seed)
