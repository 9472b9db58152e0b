"""`shoal gateway MODEL` as a process: its first line is the address, and what it answered is on disk."""

import contextlib
import json
import signal
import subprocess
import sys

import msgspec
import pytest

from shoal.cli.main import main
from shoal.gateway.sessions import Recorded
from tests.gateway.asking import chat_of, post_to


@contextlib.contextmanager
def started(out, *words):
    command = [sys.executable, "-m", "shoal", "gateway", "tiny", "--out", str(out), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(url, text):
    return post_to(f"{url}/chat/completions", chat_of(text, max_tokens=4))[1]


def recorded(out):
    """The whole lines of the record; a last one that was cut off belongs to a call that nobody got."""
    file = out / "calls.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [msgspec.json.decode(line, type=Recorded) for line in lines]


def test_the_first_line_is_the_address_and_ctrl_c_ends_it(tmp_path):
    with started(tmp_path / "out", "--session", "mine") as process:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/mine/v1")
        answer = ask(url, "hello")
        (call,) = recorded(tmp_path / "out")
        assert answer["id"] == f"chatcmpl-mine-{call.number}"
        assert answer["usage"]["completion_tokens"] == len(call.call.response_ids)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert main(["gateway", "tiny", "--out", str(tmp_path / "out")]) == 2  # an older record is not written on


def test_json_has_the_variables_of_both_packages(tmp_path):
    with started(tmp_path / "out", "--json") as process:
        told = json.loads(process.stdout.readline())
    assert told["variables"]["OPENAI_BASE_URL"] == told["url"]
    assert told["url"] == told["variables"]["ANTHROPIC_BASE_URL"] + "/v1"
    for name in ("NO_PROXY", "no_proxy"):
        assert {"127.0.0.1", "localhost"} <= set(told["variables"][name].split(","))


@pytest.mark.parametrize("words", [["--max-tokens", "0"], ["--session", "../a"]])
def test_mistakes_are_one_line(tmp_path, capsys, words):
    assert main(["gateway", "tiny", "--out", str(tmp_path / "out"), *words]) != 0
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["gateway", str(tmp_path / "none")]) == 2
