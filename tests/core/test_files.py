import concurrent.futures
import contextlib
import errno
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from shoal.core import files
from shoal.core.errors import DataError, reading
from shoal.core.files import (
    append_line,
    read_json,
    remove_leftovers,
    restore_folders,
    verify_folder,
    write_bytes,
    write_folder,
    write_json,
    write_text,
)


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002], ids="{:03o}".format)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_new_files_and_folders_may_be_read_by_whom_the_umask_lets(tmp_path, umask):
    (tmp_path / "plain").write_text("")
    (tmp_path / "others").mkdir()
    write_bytes(tmp_path / "file", b"1")
    with write_folder(tmp_path / "folder") as folder:
        (folder / "by a library").write_text("")
        (folder / "by a library").chmod(0o600)  # as safetensors writes
        (folder / "program").write_text("")
        (folder / "program").chmod(0o755)
        write_json(folder / "by shoal", {})
    assert mode(tmp_path / "file") == mode(tmp_path / "plain") == 0o666 & ~umask
    assert mode(tmp_path / "folder") == mode(tmp_path / "others") == 0o777 & ~umask
    for name in ("by a library", "by shoal", "manifest.json"):
        assert mode(tmp_path / "folder" / name) == 0o666 & ~umask, name
    assert mode(tmp_path / "folder" / "program") == 0o755


@pytest.mark.parametrize("chosen", [0o600, 0o640, 0o644, 0o664])
def test_what_is_replaced_keeps_its_mode(tmp_path, umask, chosen):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").chmod(chosen)
    (tmp_path / "folder").chmod(chosen | 0o100)
    for number in range(2):
        write_json(tmp_path / "file", number)
        with write_folder(tmp_path / "folder") as folder:
            (folder / "a").write_text(str(number))
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (chosen, chosen | 0o100)


# A script, since it forks: each child is killed at another one of the calls that change the disk.
KILLED_AT_EVERY_STEP = """
import os, pathlib, shutil, signal, sys
from shoal.core import files
root = pathlib.Path(sys.argv[1])
os.fsync = lambda descriptor: None  # a killed process loses nothing that it has written

def watched(owner, name, arm):
    call = getattr(owner, name)
    def stepwise(*args, **kwargs):
        arm()
        result = call(*args, **kwargs)
        arm()
        return result
    setattr(owner, name, stepwise)

def killed(step, work):
    "Whether `work` was killed at its step-th step."
    child = os.fork()
    if child == 0:
        left = [step]
        def arm():
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        for owner, name in ((os, "replace"), (os, "fsync"), (os, "chmod"), (os, "unlink"), (os, "rmdir"),
                            (os, "mkdir")):
            watched(owner, name, arm)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0

def write(content):
    files.write_bytes(root / "g", content.encode() * 1000)
    with files.write_folder(root / "f") as folder:
        (folder / "a").write_text(content)
        (folder / "in").mkdir()
        (folder / "in" / "b").write_text(content)

def read():
    folder = files.verify_folder(root / "f")
    first, second = (folder / "a").read_text(), (folder / "in" / "b").read_text()
    assert first == second, (first, second)
    assert (root / "g").read_text() in ("old" * 1000, "new" * 1000)
    return first

def fresh():
    shutil.rmtree(root)
    root.mkdir()
    write("old")

steps = 0
root.mkdir()
fresh()
while killed(steps := steps + 1, lambda: write("new")):
    assert read() in ("old", "new"), steps  # a reader right after the crash
    files.remove_leftovers(root)
    assert read() in ("old", "new") and sorted(os.listdir(root)) == ["f", "g"], (steps, os.listdir(root))
    fresh()
assert read() == "new" and sorted(os.listdir(root)) == ["f", "g"]
print("killed at", steps - 1, "steps")
"""


def test_a_replaced_file_or_folder_is_never_lost_wherever_its_writers_are_killed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path / "root")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) > 20


def test_a_folder_survives_an_exception_at_every_rename(tmp_path, monkeypatch):
    replace = os.replace
    for failing in range(1, 9):
        calls = []

        def failed(source, target, failing=failing, calls=calls):
            calls.append(target)
            if len(calls) == failing:
                raise KeyboardInterrupt
            replace(source, target)

        with write_folder(tmp_path / "f") as folder:
            (folder / "a").write_text("old")
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(os, "replace", failed)
            with write_folder(tmp_path / "f") as folder:
                (folder / "a").write_text("new")
        assert (verify_folder(tmp_path / "f") / "a").read_text() == (
            "old" if len(calls) >= failing else "new"
        )
        assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("way", ["file", "line", "folder"])
def test_a_write_that_the_disk_does_not_take_names_its_file_and_leaves_the_old_one(tmp_path, way):
    def write(text):
        if way == "file":
            write_text(tmp_path / "x", text)
        elif way == "line":
            append_line(tmp_path / "x", text.encode())
        else:
            with write_folder(tmp_path / "x") as folder, open(folder / "a", "w") as file:
                file.write(text)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    write("old\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large: '.*/x'") as told:
            write("new\n" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (told.value.errno, told.value.filename) == (errno.EFBIG, str(tmp_path / "x"))
    assert (tmp_path / "x" / "a" if way == "folder" else tmp_path / "x").read_text().startswith("old\n")
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_that_shutil_meets_is_told_as_such(tmp_path):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a").write_text("a")
    with pytest.raises(OSError, match="No space left") as told, write_folder(tmp_path / "f") as folder:
        shutil.copytree(tmp_path / "from", folder / "from", copy_function=full)
    assert told.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["from"]


def test_writers_of_one_folder_at_a_time_leave_one_of_theirs_whole(tmp_path):
    begin = threading.Barrier(4)

    def write(number):
        begin.wait()
        for _ in range(15):
            with write_folder(tmp_path / "f") as folder:
                for name in "ab":
                    (folder / name).write_text(str(number))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, number) for number in range(4)]:
            done.result()
    folder = verify_folder(tmp_path / "f")
    assert (folder / "a").read_text() == (folder / "b").read_text()
    assert os.listdir(tmp_path) == ["f"]


def test_a_copy_put_aside_does_not_take_the_place_of_a_folder_that_is_there(tmp_path):
    for place in (tmp_path / "f", tmp_path / ".f.abcdefgh.old"):
        with write_folder(place) as folder:
            (folder / "a").write_text(place.name)
    assert (verify_folder(tmp_path / "f") / "a").read_text() == "f"
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["f"]


def test_a_copy_that_cannot_be_put_back_keeps_no_other_from_it(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / f".{name}.abcdefgh.old").mkdir()
    replace = os.replace

    def refusing(source, target):
        if target.name == "b":
            raise PermissionError(errno.EACCES, "only reading is allowed here")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    restore_folders(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".b.abcdefgh.old", "a", "c"]


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "empty folder", "folder"])
def test_whatever_has_the_name_is_replaced(tmp_path, kind):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("kept")
    {
        "file": lambda: (tmp_path / "f").write_text("x"),
        "link": lambda: (tmp_path / "f").symlink_to(tmp_path / "other"),
        "dangling link": lambda: (tmp_path / "f").symlink_to(tmp_path / "nowhere"),
        "empty folder": lambda: (tmp_path / "f").mkdir(),
        "folder": lambda: shutil.copytree(tmp_path / "other", tmp_path / "f"),
    }[kind]()
    with write_folder(tmp_path / "f") as folder:
        (folder / "a").write_text("new")
    assert (verify_folder(tmp_path / "f") / "a").read_text() == "new"
    assert sorted(os.listdir(tmp_path / "f")) == ["a", "manifest.json"]
    assert sorted(os.listdir(tmp_path)) == ["f", "other"]
    assert os.listdir(tmp_path / "other") == ["kept"]


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    write_json(tmp_path / "x.json", {"old": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "x.json", {"new": float("nan")})
    with pytest.raises(FileNotFoundError), write_folder(tmp_path / "folder") as folder:
        (folder / "missing" / "half").write_text("half")
    assert os.listdir(tmp_path) == ["x.json"]
    assert read_json(tmp_path / "x.json") == {"old": 1}


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (lambda folder: (folder / "weights").write_text("123"), "weights was altered or truncated"),
        (lambda folder: (folder / "weights").unlink(), "weights, which is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "never committed"),
        ({"sha256": {}}, "weights is not listed"),
        ({"sha256": {"weights": None}}, "weights was altered"),
        ({"sha256": {"weights\0": "0"}}, "which cannot be read"),
        ({"sha256": {"w" * 300: "0"}}, "which cannot be read"),
        ({"sha256": {"\ud800": "0"}}, "which cannot be read"),
        ({"sha256": {"loop": "0"}}, "which cannot be read|missing"),  # 3.13 raises nothing
        ({"sha256": {"/etc/passwd": "0"}}, "leaves the folder"),
        ({"sha256": {"../other": "0"}}, "leaves the folder"),
        ({"sha256": {"": "0"}}, "which is missing"),
        ({"sha256": ["weights"]}, "must hold an object"),
        ({"sums": {}}, "must hold an object"),
        (["weights"], "must hold an object"),
        (None, "must hold an object"),
    ],
)
def test_a_folder_that_is_damaged_or_not_that_of_its_manifest_is_refused(tmp_path, manifest, said):
    with write_folder(tmp_path / "f") as folder:
        (folder / "weights").write_text("12345")
    (tmp_path / "f" / "loop").symlink_to("loop")
    if callable(manifest):
        manifest(tmp_path / "f")
    else:
        (tmp_path / "f" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=said):
        verify_folder(tmp_path / "f")


def test_files_of_folders_inside_are_listed_too_but_hidden_ones_need_not_be(tmp_path):
    with write_folder(tmp_path / "f") as folder:
        (folder / "in").mkdir()
        (folder / "in" / "manifest.json").write_text("{}")
    (tmp_path / "f" / ".DS_Store").write_text("a file browser was here")
    assert verify_folder(tmp_path / "f")
    (tmp_path / "f" / "in" / "added").write_text("x")
    with pytest.raises(DataError, match="in/added is not listed"):
        verify_folder(tmp_path / "f")


def test_a_user_without_a_home_has_a_cache_folder_all_the_same(monkeypatch):
    """As HOME=/ has, which containers give to users that they do not know."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert str(files.cache_folder()) == "/.cache/shoal"


def test_broken_json_names_the_file(tmp_path):
    write_bytes(tmp_path / "bad.json", b'{"a": ')
    with pytest.raises(DataError, match="bad.json is not valid JSON"):
        read_json(tmp_path / "bad.json")


def test_whatever_a_file_makes_others_raise_names_the_file_and_once():
    for error, told in (
        (OSError(2, "gone", "a.npz"), "a.npz is broken (FileNotFoundError: [Errno 2] gone: 'a.npz')"),
        (DataError("nothing in a.npz"), "nothing in a.npz"),
        (DataError("nothing"), "a.npz is broken (DataError: nothing)"),
    ):
        with pytest.raises(DataError) as caught, reading("a.npz", "is broken"):
            raise error
        assert str(caught.value) == told


def test_half_a_surrogate_pair_survives_the_way_through_json(tmp_path) -> None:
    write_json(tmp_path / "a.json", {"\ud800é": ["\udfff", "𝄞"]})
    assert r'"\ud800é": [' in (tmp_path / "a.json").read_text(encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"\ud800é": ["\udfff", "𝄞"]}


def test_an_error_of_the_disk_that_safetensors_tells_is_one_of_the_disk(tmp_path):
    """As a full disk is, which is told otherwise on the command line than an error of the program."""
    safetensors = pytest.importorskip("safetensors.numpy")
    with pytest.raises(FileNotFoundError) as refused, write_folder(tmp_path / "made") as folder:
        safetensors.save_file({"a": np.zeros(3)}, folder / "nosuch" / "a.safetensors")
    assert (refused.value.errno, refused.value.filename) == (2, str(tmp_path / "made"))
    assert list(tmp_path.iterdir()) == []
