"""A checkpoint is read whole while its run goes on."""

import shutil
from pathlib import Path

import pytest

from shoal.core.errors import DataError
from shoal.core.files import write_folder
from shoal.train.records.checkpoints import read_checkpoint


def commit(folder, text):
    with write_folder(folder) as new:
        (new / "engine").write_text(text)


@pytest.mark.parametrize("which", ["newest", "best"])
def test_a_checkpoint_that_its_run_replaces_or_drops_while_it_is_read_is_read_once_more(tmp_path, which):
    folder, read = tmp_path / "checkpoints", []
    for name in ("best", "step-000001"):
        commit(folder / name, "one")

    def reading(checkpoint):
        read.append((checkpoint / "engine").read_text())
        if len(read) == 1:
            commit(folder / "best", "two")
            commit(folder / "step-000002", "two")
            shutil.rmtree(folder / "step-000001")
            raise FileNotFoundError("half of it")
        return read[-1]

    assert read_checkpoint(tmp_path, which, reading) == "two"
    assert read == ["one", "two"]


def test_a_checkpoint_that_is_damaged_is_told_at_once(tmp_path):
    commit(tmp_path / "checkpoints" / "best", "one")
    (tmp_path / "checkpoints" / "best" / "engine").write_text("two")
    with pytest.raises(DataError, match="engine was altered"):
        read_checkpoint(tmp_path, "best", Path.read_text)


def test_the_newest_checkpoint_that_is_damaged_names_the_one_to_go_on_from(tmp_path):
    for number in (1, 2):
        commit(tmp_path / "checkpoints" / f"step-00000{number}", "one")
    (tmp_path / "checkpoints" / "step-000002" / "engine").write_text("two")
    with pytest.raises(DataError, match="engine was altered.* to go on from step-000001"):
        read_checkpoint(tmp_path, "newest", Path.read_text)
