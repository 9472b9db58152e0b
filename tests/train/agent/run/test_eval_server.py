"""`shoal eval openai:MODEL` plays a server, and keeps its failures apart from the agent's."""

import json
import re
import socket
import sys

import pytest
from tests.rollout.doubles import FakeServer
from tests.train.agent.tiny_model import write_tiny_model

from shoal.cli.main import main
from shoal.core.data import read_trajectories
from shoal.core.files import sha256_of_folder
from shoal.train.records.evaluation import PANEL_SEED, PANELS

OPTIONS = ["--env", "bandit", "--episodes", "20", "--json"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Two threads, which the command takes for a folder, wait for each other on a busy machine: minutes in all."""
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)


@pytest.fixture
def server():
    with FakeServer("openai") as server:
        server.change = pull_the_dragon
        yield server


def pull_the_dragon(reply):
    """The better arm by its name; other replies (the list of models) stay as they are."""
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        arm = re.search(r"(\d): dragon", message["content"]).group(1)
        message["content"] = f"I pull <action>{arm}</action>"
    return reply


def evaluate(server, *more):
    return main(["eval", "openai:m", "--base-url", f"{server.url}/v1", *OPTIONS, *more])


def test_a_model_on_a_server_is_evaluated(server, capsys, tmp_path):
    assert evaluate(server, "--out", str(tmp_path / "out")) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (result["success"], result["episodes"], result["failed_episodes"]) == (1.0, 20, 0)
    played = list(read_trajectories(tmp_path / "out" / "trajectories" / "eval.jsonl"))
    assert sum(t.success for t in played) == 20
    asked = [body for path, body, _ in server.seen if path == "/v1/chat/completions"]
    assert len(asked) == 20
    assert all("stop" not in body and body["temperature"] == 0.0 for body in asked)


def test_a_failed_request_costs_its_episode_and_is_not_a_failure_of_the_agent(server, capsys):
    server.faults = [400, 400, 400]
    assert evaluate(server) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[0])
    assert (result["success"], result["episodes"], result["failed_episodes"]) == (1.0, 17, 3)
    assert "3 episodes failed and are not counted" in err
    assert "HTTP 400: fault 400" in err
    assert len([path for path, body, _ in server.seen if body]) == 20  # nobody was asked twice


def test_a_server_that_only_fails_is_an_error_with_its_words(server, capsys):
    server.faults = [500] * 40
    assert evaluate(server, "--retries", "0") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "none of 20 episodes came to an end" in err
    assert "HTTP 500: fault 500" in err


def test_a_server_that_is_not_there_is_named(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        assert main(["eval", "openai:", "--base-url", url, "--retries", "0", *OPTIONS]) == 1
    error = capsys.readouterr().err
    assert url.removesuffix("/v1") in error
    assert "refused" in error


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["openai:n", *OPTIONS], 1, "has no model 'n'. Known: m"),
        (["openai:m", "--episodes", "3"], 2, "say which env to play"),
        (["openai:m", "--api-key-env", "NO_SUCH_KEY", *OPTIONS], 2, "NO_SUCH_KEY, which is not set"),
    ],
)
def test_a_mistake_is_said_before_anything_is_played(server, capsys, arguments, code, message):
    assert main(["eval", *arguments, "--base-url", f"{server.url}/v1"]) == code
    assert message in capsys.readouterr().err
    assert not [path for path, _, _ in server.seen if path == "/v1/chat/completions"]


def test_a_device_is_for_models_that_run_here(server, capsys, tmp_path):
    assert evaluate(server, "--device", "cuda:0") == 2
    assert "--device cuda:0 has no effect on a server's model" in capsys.readouterr().err
    folder = tmp_path / "model"
    write_tiny_model(folder)
    assert main(["eval", str(folder), *OPTIONS, "--device", "meta"]) == 2  # where weights have no values
    assert "meta" in capsys.readouterr().err


# --- panels
PANEL = ["--panel", "core", "--episodes", "2", "--json"]


def test_a_panel_gives_two_people_the_same_table_and_each_row_is_that_of_its_env_played_alone(
    tmp_path, capsys
):
    folder = tmp_path / "model"
    write_tiny_model(folder)
    tables = []
    for person in "ab":
        assert main(["eval", str(folder), *PANEL, "--max-tokens", "3", "--out", str(tmp_path / person)]) == 0
        tables.append(json.loads(capsys.readouterr().out))
    assert tables[0] == tables[1] == json.loads((tmp_path / "a" / "panel.json").read_text())
    assert tables[0]["repeatable"]
    assert (tables[0]["temperature"], tables[0]["max_tokens"]) == (0.0, 3)
    assert tables[0]["weights"] == f"sha256 {sha256_of_folder(folder)}"
    rows = {row.pop("env"): row for row in tables[0]["rows"]}
    assert list(rows) == ["sokoban", "frozen_lake", "webshop", "countdown"]
    assert {row["episodes"] for row in rows.values()} == {2}
    files = [(tmp_path / person / "trajectories" / "webshop.jsonl").read_bytes() for person in "ab"]
    assert files[0] == files[1]
    alone = ["--env", "countdown", "--env-config", "difficulty=easy", "--seed", str(PANEL_SEED)]
    assert main(["eval", str(folder), *alone, "--episodes", "2", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows["countdown"]


def test_a_panel_of_a_server_is_marked_and_kept_with_its_answers(server, tmp_path, capsys):
    url = ["--base-url", f"{server.url}/v1"]
    server.change = lambda reply: reply
    assert main(["eval", "openai:m", *PANEL, *url]) == 2
    assert "keep them beside the table with --out FOLDER" in capsys.readouterr().err
    options = ["--panel", "core", "--episodes", "2", "--out", str(tmp_path / "out")]
    assert main(["eval", "openai:m", *options, *url]) == 0
    assert "not repeatable" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "panel.json").read_text())["repeatable"] is False
    assert len(list(read_trajectories(tmp_path / "out" / "trajectories" / "sokoban.jsonl"))) == 2
    assert main(["eval", "openai:m", *options, *url, "--env", "bandit"]) == 2
    assert "leave --env, --env-config and --seed out" in capsys.readouterr().err


SMALL = {"bandit": {}, "countdown": {"difficulty": "easy"}}


def small_panel(server, monkeypatch, *options, panel=SMALL):
    """Play a panel of few envs; the models that were asked, in order."""
    monkeypatch.setitem(PANELS, "core", panel)
    begun = len(server.seen)
    where = ["--base-url", f"{server.url}/v1", "--retries", "0"]
    code = main(["eval", "openai:", "--panel", "core", "--episodes", "2", *where, *map(str, options)])
    return code, [body["model"] for path, body, _ in server.seen[begun:] if path == "/v1/chat/completions"]


def test_a_package_that_a_panel_lacks_is_told_before_anything_is_played(
    server, tmp_path, capsys, monkeypatch
):
    panel = SMALL | {"textworld": {}}
    monkeypatch.setitem(sys.modules, "textworld", None)
    code, asked = small_panel(server, monkeypatch, "--out", tmp_path / "out", panel=panel)
    assert (code, asked) == (1, [])
    assert "textworld envs need a package" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_model_plays_a_whole_panel_and_the_table_says_which(server, tmp_path, monkeypatch):
    """A server that lists another model by the second env: half of the table was the other one's."""
    names = iter("mn")

    def change(reply):
        return {"data": [{"id": next(names), "owned_by": "x"}]} if "data" in reply else reply

    server.change = change
    code, asked = small_panel(server, monkeypatch, "--out", tmp_path)
    assert (code, set(asked)) == (0, {"m"})
    assert json.loads((tmp_path / "panel.json").read_text())["model"] == "openai:m"


def test_a_panel_that_is_broken_off_leaves_no_table_of_other_episodes(server, tmp_path, monkeypatch):
    server.change = lambda reply: reply
    assert small_panel(server, monkeypatch, "--out", tmp_path)[0] == 0
    assert {"panel.json", "summary.json"} <= {path.name for path in tmp_path.iterdir()}
    server.say = lambda said: "I pull <action>1</action>"
    whole = server.reply_to

    def reply_to(path, body):
        assert "slot machines" in str(body) or body is None, "out of order"
        return whole(path, body)

    server.reply_to = reply_to
    assert small_panel(server, monkeypatch, "--out", tmp_path)[0] == 1
    (played, *_) = read_trajectories(tmp_path / "trajectories" / "bandit.jsonl")
    assert played.turns[0].response == "I pull <action>1</action>"
    assert not {"panel.json", "summary.json"} & {path.name for path in tmp_path.iterdir()}
