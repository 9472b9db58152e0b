"""A run that processes together must repeat."""

import pytest


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The folder of a run of one process."""
    from tests.train.agent.processes.test_processes import launch, rows_of

    folder = tmp_path_factory.mktemp("alone") / "run"
    done = launch(folder, 1, "trainer.iterations=3")
    assert done.returncode == 0, done.stderr
    assert rows_of(folder)[-1]["gradient_steps"] > 1
    return folder
