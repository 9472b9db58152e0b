import json
import os
import signal
import subprocess
import sys
import time

import pytest

from shoal.core.errors import DataError
from shoal.core.files import read_json, verify_folder, write_bytes, write_folder, write_json

WRITER = """
import sys
from shoal.core.files import write_bytes, write_folder
path, number = sys.argv[1], 0
print("ready", flush=True)
while True:
    number += 1
    write_bytes(path + "/file", str(number).encode() * 50_000)
    with write_folder(path + "/folder") as folder:
        for name in "ab":
            (folder / name).write_text(str(number) * 10_000)
"""


def test_a_killed_writer_leaves_the_old_content_or_the_new(tmp_path):
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.15 + 0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        content = (tmp_path / "file").read_bytes()
        assert content == content[: len(content) // 50_000] * 50_000
        if (tmp_path / "folder").exists():  # a kill between the two renames of a replacement leaves none
            folder = verify_folder(tmp_path / "folder")
            assert (folder / "a").read_text() == (folder / "b").read_text()


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    write_json(tmp_path / "x.json", {"old": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "x.json", {"new": float("nan")})
    with pytest.raises(FileNotFoundError), write_folder(tmp_path / "folder") as folder:
        (folder / "missing" / "half").write_text("half")
    assert os.listdir(tmp_path) == ["x.json"]
    assert read_json(tmp_path / "x.json") == {"old": 1}


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for content in ("one", "two"):
        with write_folder(tmp_path / "f") as folder:
            (folder / content).write_text(content)
    assert sorted(os.listdir(verify_folder(tmp_path / "f"))) == ["manifest.json", "two"]
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("damage", ["alter", "truncate", "remove", "escape", "no manifest"])
def test_a_damaged_folder_is_named(tmp_path, damage):
    with write_folder(tmp_path / "f") as folder:
        (folder / "weights").write_text("12345")
    target = tmp_path / "f" / "weights"
    if damage == "alter":
        target.write_text("12346")
    elif damage == "truncate":
        target.write_text("123")
    elif damage == "remove":
        target.unlink()
    elif damage == "escape":
        (tmp_path / "f" / "manifest.json").write_text(json.dumps({"sha256": {"../other": "0"}}))
    else:
        (tmp_path / "f" / "manifest.json").unlink()
    with pytest.raises(DataError, match="weights|leaves the folder|never committed"):
        verify_folder(tmp_path / "f")


def test_broken_json_names_the_file(tmp_path):
    write_bytes(tmp_path / "bad.json", b'{"a": ')
    with pytest.raises(DataError, match="bad.json is not valid JSON"):
        read_json(tmp_path / "bad.json")
