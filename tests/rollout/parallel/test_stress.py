import pytest
from tests.rollout.parallel.stress import run_case


@pytest.mark.parametrize("seed", range(900, 906))
def test_rollouts_drawn_at_random_with_faults_equal_the_serial_ones(seed):
    run_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_rollouts_drawn_at_random_with_faults_equal_the_serial_ones(seed):
    run_case(seed)
