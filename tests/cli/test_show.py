import pytest
from tests.viewer.test_index import episode

from shoal.cli.main import main
from shoal.core.data import write_trajectories


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "run" / "trajectories" / "heldout-000001.jsonl"
    write_trajectories(file, [episode((0.25,)), episode((1.0,)), episode((0.0, 0.0)), episode((0.0,))])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "episode 0 of 4"),
        (["--best"], "episode 1 of 4"),
        (["--worst"], "episode 2 of 4"),
        (["--episode", "3"], "episode 3 of 4"),
    ],
)
def test_the_episode_that_was_asked_for_is_shown(run, capsys, asked, told):
    assert main(["show", str(run), *asked]) == 0
    assert told in capsys.readouterr().out


def test_an_episode_that_is_not_there_says_which_are(run, capsys):
    assert main(["show", str(run), "--episode", "4"]) == 2
    assert "--episode must be in [0, 3], got 4" in capsys.readouterr().err
