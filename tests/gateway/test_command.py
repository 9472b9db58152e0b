"""`shoal gateway MODEL` as a process: its first line is the address, and what it answered is on disk."""

import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import urllib.request
from http.client import HTTPException

import msgspec
import pytest

from shoal.cli.main import main
from shoal.gateway.sessions import Recorded


@contextlib.contextmanager
def started(out, *words):
    command = [sys.executable, "-m", "shoal", "gateway", "tiny", "--out", str(out), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(url, text):
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


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


@pytest.mark.parametrize("words", [["--max-tokens", "0"], ["--session", "../a"]])
def test_mistakes_are_one_line(tmp_path, capsys, words):
    assert main(["gateway", "tiny", "--out", str(tmp_path / "out"), *words]) != 0
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["gateway", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_what_was_answered_is_on_disk_whenever_the_process_is_killed(tmp_path):
    for run in range(20):
        answered, lock = [], threading.Lock()

        def agent(url, number, answered=answered, lock=lock):
            for turn in itertools.count():
                try:
                    answer = ask(url, f"{number} {turn}")
                except (OSError, ValueError, HTTPException):
                    return
                with lock:
                    answered.append((answer["id"], answer["choices"][0]["message"]["content"].strip()))

        with started(tmp_path / str(run)) as process:
            url = process.stdout.readline().strip()
            agents = [threading.Thread(target=agent, args=(url, number)) for number in range(4)]
            for one in agents:
                one.start()
            threading.Event().wait(random.Random(run).uniform(0.05, 1.0))
            process.kill()
            for one in agents:
                one.join()
        kept = [(f"chatcmpl-a-{call.number}", call.answer) for call in recorded(tmp_path / str(run))]
        assert len(set(kept)) == len(kept)
        assert set(answered) <= set(kept)
