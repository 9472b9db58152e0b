"""Tools in rollouts: the same on every backend, MCP servers that misbehave, and records in the place of tools."""

import asyncio
import functools
import itertools
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.rollout.doubles import of_kind
from tests.rollout.tools import functions

from shoal import ParallelRolloutManager
from shoal.core.data import ToolUse
from shoal.core.errors import ConfigError
from shoal.envs.actions import ToolCall
from shoal.rollout.tools.mcp import ToolsFailedError
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.scripted import ScriptedEngine

MODULE = "tests.rollout.tools.functions"
NAMED = [f"{MODULE}:add", {"function": f"{MODULE}:look", "timeout": 20}]


def said(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.replace("'", '"')


PARALLEL = said("look", city="rome") + said("add", a=2) + said("look", city="oslo") + said("rm")


def scripted(*answers):
    """Answers by the number of the turn."""
    return ScriptedEngine(lambda text, key: answers[min(key.path[-1], len(answers) - 1)])


def config(tools, mode="append", groups=2, members=2, **proxy):
    lake = {"env_type": "frozen_lake", "max_actions_per_traj": 2, "env_config": {"is_slippery": False}}
    return of_kind(lake, groups, members, prompt={"mode": mode}, tools=tools, parallel_n_jobs=2, **proxy)


def play(settings, engine, backend="serial", **more):
    with ParallelRolloutManager(settings, engine, backend=backend, **more) as manager:
        return manager.collect(0)


@pytest.mark.parametrize("mode", ["append", "window"])
def test_calls_of_one_answer_are_made_at_once_and_shown_in_their_order(mode):
    episode = play(config(NAMED, mode), scripted(PARALLEL, "<action>left</action>"), "process")[0]
    first = episode.turns[0]
    assert [use.shown for use in first.tools] == [
        "Italy", "3", "Norway", "Error: there is no tool 'rm'; there are: add, look",
    ]  # fmt: skip
    assert (first.action, first.action_is_valid, first.reward) == (None, False, 0.0)
    parents = [call.parent for call in episode.calls]
    assert parents == ([None, 0, 1] if mode == "append" else [None, 0, None])


def test_turns_with_tools_have_a_limit_of_their_own():
    engine = scripted(said("add", a=1))
    [episode, *_] = play(config(NAMED, max_tool_turns=3), engine)
    assert (len(episode.turns), episode.truncated, episode.status) == (3, True, "ok")
    assert episode.turns[0].action == "call add"


def test_functions_that_hang_or_block_are_cut_at_their_limit():
    engine = scripted(said("block") + said("hang") + said("look", city="oslo"), "<action>left</action>")
    tools = [{"function": f"{MODULE}:{name}", "timeout": 0.3} for name in ("block", "hang")]
    began = time.monotonic()
    [episode] = play(config([*tools, NAMED[1]], groups=1), engine)[:1]
    assert time.monotonic() - began < 25  # hang sleeps for longer
    errors = [use.error for use in episode.turns[0].tools]
    assert errors == ["block did not answer within 0.3 s", "hang did not answer within 0.3 s", errors[2]]
    assert episode.status == "ok"


def test_two_tools_of_one_name_and_settings_that_cannot_be_are_refused():
    for items, why in (
        ([functions.add, functions.add], "two tools named 'add'"),
        ([{"function": "x:y", "recorded": "z"}], "one of function, mcp and recorded"),
        ([{"mcp": {"command": ["a"], "url": "b"}}], "not both"),
        ([{"mcp": {"command": ["a"], "headers": {"a": "b"}}}], "mcp.variables"),
        ([{"mcp": {"url": "b", "start_seconds": 0}}], "start_seconds"),
        (["nothing"], "module:Name"),
        (["no_such_module:f"], "cannot import the tool 'no_such_module:f'"),
        ([functools.partial(functions.add, 1)], "a function with a name"),
        ([{"function": "x:y", "limit": 3}], "unknown key 'tools.limit'"),
    ):
        with pytest.raises(ConfigError, match=why):
            Toolbox(items)


# --- MCP
SERVER = str(Path(__file__).with_name("server.py"))
PLACE = ("e", 0, 0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def box():
    pytest.importorskip("mcp")
    with Toolbox([{"mcp": {"command": ["{python}", SERVER]}, "timeout": 15}]) as toolbox:
        yield toolbox
    assert not servers()


def servers():
    """Processes below this one that run the server; Python's own for multiprocessing stay as long as this one."""
    return [child for child in psutil.Process().children(recursive=True) if SERVER in child.cmdline()]


def use(toolbox, *calls):
    return asyncio.run(toolbox.use([ToolCall(name, arguments) for name, arguments in calls], PLACE))


def cut(toolbox, name, seconds):
    """Shorten the limit of a tool."""
    import dataclasses

    toolbox.tools[name] = dataclasses.replace(toolbox.tools[name], timeout=seconds)


def test_a_server_names_its_tools_and_answers_calls_in_their_order(box):
    assert box.tools["double"].description == "Twice a number."
    assert box.tools["double"].parameters["required"] == ["number"]
    calls = [("double", {"number": n}) for n in range(20)]
    assert [each.result for each in use(box, *calls)] == [str(2 * n) for n in range(20)]


def test_what_a_server_refuses_is_an_error_for_the_model(box):
    refused, wrong = use(box, ("refuse", {}), ("double", {"number": "x"}))
    assert "Error executing tool refuse" in refused.error
    assert "number" in wrong.error


def test_all_that_a_server_answers_reaches_the_model_once(box):
    data = '{"rows": [{"city": "Køge", "degrees": 2.5}], "more": null}'
    shown = {
        "alone": data,
        "error": f"Error: {data}",
        "its own": f"two rows\n{data}",
        "a text within": "inside",
        "bytes within": "[resource file:///a.bin]",
        "a link": "[resource_link notes: file:///b.txt]",
        "a picture": "[image]\nsee",
    }
    assert {kind: use(box, ("shows", {"kind": kind}))[0].shown for kind in shown} == shown
    for kind in ("the same", "within"):
        assert use(box, ("shows", {"kind": kind}))[0].shown.count("2.5") == 1
    assert [each.shown for each in use(box, ("names", {}), ("double", {"number": 3}))] == ["a\nb", "6"]


def test_nonsense_between_messages_is_passed_over(box):
    assert use(box, ("nonsense", {})) == (ToolUse("nonsense", {}, "sense"),)


def test_a_slow_call_is_cut_and_others_go_on(box):
    cut(box, "slow", 1.0)
    slow, other = use(box, ("slow", {}), ("double", {"number": 4}))
    assert (slow.error, other.result) == ("slow did not answer within 1 s", "8")


def test_a_server_that_freezes_is_replaced(box, monkeypatch):
    monkeypatch.setattr("shoal.rollout.tools.mcp.LOOK_SECONDS", 1.0)
    cut(box, "freeze", 1.0)
    assert use(box, ("freeze", {}))[0].error == "freeze did not answer within 1 s"
    assert use(box, ("double", {"number": 4}))[0].result == "8"


def test_a_call_in_which_the_server_died_is_made_once_more(box, tmp_path):
    calls = ("once", {"file": str(tmp_path / "died")}), ("double", {"number": 5})
    assert [each.result for each in use(box, *calls)] == ["alive", "10"]
    [server] = servers()
    server.kill()
    assert use(box, ("double", {"number": 6}))[0].result == "12"


def test_a_server_that_dies_in_each_try_fails_the_episode_which_is_counted(box):
    engine = scripted(said("die"), "<action>left</action>")
    [episode] = play(config([], groups=1, members=1, parallel={"env_retries": 0}), engine, tools=box)
    assert episode.status == "env_error"
    assert "ended in a call of die, twice" in episode.error


@pytest.mark.parametrize("backend", [pytest.param("serial", marks=pytest.mark.slow), "thread"])
def test_each_episode_has_a_server_of_its_own_from_its_first_call_to_its_end(backend):
    pytest.importorskip("mcp")
    names = {}

    def answer(text, key):
        name = names.setdefault(key.path[:-1], f"e{len(names)}")
        return said("remember", word=name) if key.path[-1] < 2 else "<action>left</action>"

    mcp = {"command": ["{python}", SERVER], "names": ["remember"], "scope": "episode"}
    for _ in range(2):
        names.clear()
        episodes = play(config([{"mcp": mcp, "timeout": 30}]), ScriptedEngine(answer), backend)
        found = [[turn.tools[0].result for turn in episode.turns[:2]] for episode in episodes]
        assert sorted(found) == [[f"e{n}", f"e{n} e{n}"] for n in range(4)]
    assert not servers()


def test_a_server_of_an_episode_that_is_played_once_more_begins_anew(tmp_path):
    pytest.importorskip("mcp")
    engine = scripted(said("remember", word="x"), said("remember", word="y"), "<action>left</action>")
    mcp = {"command": ["{python}", SERVER], "scope": "episode"}
    settings = config([{"mcp": mcp, "timeout": 30}], groups=1, members=1)
    breaks = {"env_type": f"{MODULE}:Breaks", "env_config": {"file": str(tmp_path / "broke")}}
    settings["custom_envs"]["Lake"] |= breaks
    [episode] = play(settings, engine)
    assert (tmp_path / "broke").exists(), "its first attempt ended in an error of the env"
    assert [turn.tools[0].result for turn in episode.turns[:2]] == ["x", "x y"]
    assert not servers()


def test_headers_are_those_of_each_request_to_an_address():
    pytest.importorskip("mcp")
    import http.server
    import threading

    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.headers["authorization"])
            self.send_error(401)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/mcp"
        with pytest.raises(ToolsFailedError, match="cannot be reached"):
            Toolbox([{"mcp": {"url": url, "headers": {"Authorization": "Bearer abc"}}}])
        server.shutdown()
    assert set(seen) == {"Bearer abc"}


def test_a_server_that_says_nothing_is_waited_for_as_long_as_is_set():
    pytest.importorskip("mcp")
    mute = {"command": ["{python}", SERVER, "mute"], "start_seconds": 0.5}
    with pytest.raises(ToolsFailedError, match=r"did not answer within 0.5 s \(mcp.start_seconds\)"):
        Toolbox([{"mcp": mute}])
    assert not [one for one in servers() if "mute" in one.cmdline()]


def test_servers_that_do_not_start_are_named_with_their_last_words():
    pytest.importorskip("mcp")
    before = servers()
    with pytest.raises(ToolsFailedError, match="nobody here"):
        Toolbox([{"mcp": {"command": ["{python}", "-c", "raise SystemExit('nobody here')"]}}])
    with pytest.raises(ToolsFailedError, match="/no/such/program"):
        Toolbox([{"mcp": {"command": ["/no/such/program"]}}])
    with pytest.raises(ConfigError, match=r"has no tool 'triple'; it has double"):
        Toolbox([{"mcp": {"command": ["{python}", SERVER], "names": ["triple"]}}])
    assert set(servers()) <= set(before)


def test_a_server_at_an_address_is_called_over_http_without_the_proxy_of_the_environment(monkeypatch):
    pytest.importorskip("mcp")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    import socket
    import subprocess

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as reached:
                if not reached.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        with Toolbox(
            [{"mcp": {"url": f"http://127.0.0.1:{port}/mcp", "names": ["double"]}, "timeout": 5}]
        ) as there:
            assert list(there.tools) == ["double"]
            assert use(there, ("double", {"number": 4}))[0].result == "8"
            server.kill()
            server.wait()
            calls = [("double", {"number": 4})]
            with pytest.raises(ToolsFailedError, match="cannot be reached"):
                list(itertools.starmap(use, itertools.repeat((there, *calls), 2)))  # mcp 1 waits once in vain
    finally:
        server.kill()
        server.wait()


# --- records
def test_a_rollout_repeats_from_its_record_when_all_tools_are_gone(tmp_path):
    engine, settings = scripted(PARALLEL, "<action>left</action>"), config(NAMED)
    with Toolbox(NAMED) as toolbox:
        toolbox.keep(tmp_path)
        played = play(settings, engine, tools=toolbox)
    with (tmp_path / "tool_uses.jsonl").open("ab") as record:
        record.write(b'[["Lake",0,1')  # what a kill cut off
    functions_gone = config([{"recorded": str(tmp_path)}])
    for backend in ("serial", "process"):
        assert play(functions_gone, engine, backend) == played
    with Toolbox([{"recorded": str(tmp_path)}]) as recorded:
        assert not any(tool.function for tool in recorded.tools.values())
    other = scripted(said("add", a=3), "<action>left</action>")
    [episode, *_] = play(functions_gone, other)
    assert episode.status == "env_error"
    assert "the record has no result of add in turn 1" in episode.error
