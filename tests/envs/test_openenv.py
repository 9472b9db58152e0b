"""Envs over the network in the OpenEnv convention: between two ends of our own, and with foreign ends."""

import contextlib
import http.server
import json
import queue
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import shoal.envs
from shoal.core.errors import ConfigError, EnvError
from shoal.envs.bandit import BanditEnv
from shoal.testing import check_text_env


def start_server(make=lambda: shoal.envs.make("sokoban", max_steps=12)):
    from shoal.envs.adapters.openenv_server import serve

    ready = queue.Queue()

    def run():
        serve("sokoban", make, port=0, on_ready=ready.put)

    threading.Thread(target=run, daemon=True).start()
    return ready.get(timeout=200)


@pytest.fixture(scope="module")
def port():
    return start_server()


def test_an_env_behind_a_server_plays_the_same_episodes(port):
    def remote():
        return shoal.envs.make("openenv", url=f"http://127.0.0.1:{port}", max_steps=12)

    check_text_env(remote, seeds=range(2))
    env, local = remote(), shoal.envs.make("sokoban", max_steps=12)
    choose = random.Random(0)
    for seed in range(5):
        text, info = env.reset(seed=seed)
        expected, expected_info = local.reset(seed=seed)
        over = False
        while not over:
            assert text == expected
            assert info["available_actions"] == expected_info["available_actions"]
            word = choose.choice([*local.projection.words(), "jump"])
            text, *mine, info = env.step(word)
            action = local.projection.action_of(word)
            expected, *theirs, expected_info = local.step(0 if action is None else action)
            assert mine == theirs
            for key in ("success", "action_is_valid", "action_is_effective", "step", "seed"):
                assert info[key] == expected_info[key]
            over = mine[1] or mine[2]
    assert env.instructions == local.instructions
    env.close()


def test_talking_to_a_server_leaves_no_thread_and_global_random_alone(port):
    # websockets' own pings draw from the global generator, in a thread, at any moment
    def threads():  # without those in which the server, in this process too, steps its envs
        return {thread for thread in threading.enumerate() if thread.name != "shoal-session"}

    before, state = threads(), random.getstate()
    env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{port}")
    env.reset(seed=1)
    assert not [thread for thread in threading.enumerate() if "keepalive" in thread.name]
    env.close()
    assert random.getstate() == state
    assert threads() <= before


def post(port, path, body, headers=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_the_server_answers_plain_http_and_refuses_nonsense(port):
    start = post(port, "/reset", b'{"seed": 3}')
    assert start["observation"]["text"] == shoal.envs.make("sokoban").reset(seed=3)[0]
    step = post(port, "/step", b'{"action": {"text": "<action>up</action>"}}')
    assert step["reward"] == -0.1
    assert not step["done"]
    for body in (b"[]", b"{", b'{"seed": -1}', b'{"seed": true}', b"[" * 100_000):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(port, "/reset", body)
        assert refusal.value.code == 422
        refusal.value.close()


def refused(port, path, body, headers):
    """The status of what is refused."""
    with pytest.raises(urllib.error.HTTPError) as refusal:
        post(port, path, body, headers)
    refusal.value.close()
    return refusal.value.code


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://[::1", "http://127.0.0.1.evil.example"],
)
def test_pages_of_other_sites_are_refused_whatever_they_ask(port, origin, caplog):
    post(port, "/reset", b'{"seed": 3}')
    for path, body in (("/reset", b"{}"), ("/step", b'{"action": "up"}'), ("/metadata", None)):
        assert refused(port, path, body, {"content-type": "text/plain", "origin": origin}) == 403
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=60) as response:
        assert json.load(response)["step_count"] == 0
    with pytest.raises(InvalidStatus):
        connect(f"ws://127.0.0.1:{port}/ws", origin=origin, proxy=None)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_request_made_to_another_name_is_refused(port):
    assert refused(port, "/reset", b"{}", {"Host": "evil.example"}) == 400


def test_pages_of_this_machine_may_play(port):
    assert "text" in post(port, "/reset", b'{"seed": 3}', {"origin": "http://localhost:3000"})["observation"]


def test_sessions_are_bounded_and_given_back(monkeypatch):
    monkeypatch.setattr("shoal.envs.adapters.openenv_server.MAX_SESSIONS", 3)
    url = f"ws://127.0.0.1:{start_server()}/ws"
    with contextlib.ExitStack() as open_ones:
        for _ in range(3):
            open_ones.enter_context(connect(url, proxy=None))
        with connect(url, proxy=None) as one_too_many:
            assert json.loads(one_too_many.recv(timeout=60))["data"]["code"] == "CAPACITY_REACHED"
    for _ in range(200):  # the server notices the goodbye a moment later
        with connect(url, proxy=None) as next_one:
            next_one.send('{"type": "reset", "data": {"seed": 1}}')
            answer = json.loads(next_one.recv(timeout=60))
        if answer["type"] == "observation":
            break
    assert answer["type"] == "observation"


class OfOneThread(BanditEnv):
    """Holds what may only be used in the thread that opened it."""

    def __init__(self):
        super().__init__()
        self.database = sqlite3.connect(":memory:")

    def _start(self, rng):
        self.database.execute("select 1")
        super()._start(rng)

    def close(self):
        self.database.close()  # raises in another thread
        super().close()


def test_a_served_env_is_made_stepped_and_closed_in_one_thread(caplog):
    ended = queue.Queue()

    class Watched(OfOneThread):
        def close(self):
            super().close()
            ended.put(self)

    env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{start_server(Watched)}")
    ended.get(timeout=60)  # the one that the server tried first
    env.reset(seed=1)
    assert env.step("1")[1] >= 0
    env.close()
    ended.get(timeout=60)
    assert not [record for record in caplog.records if record.name.startswith("shoal.")]


def test_envs_that_hang_keep_no_other_session_from_playing():
    free = threading.Event()

    class Waiting(BanditEnv):
        def _start(self, rng):
            if self._seed:
                free.wait()
            super()._start(rng)

    port = start_server(Waiting)
    with contextlib.ExitStack() as hanging:
        hanging.callback(free.set)  # before they are closed
        for _ in range(40):  # more than there are threads in a pool of asyncio's
            line = hanging.enter_context(connect(f"ws://127.0.0.1:{port}/ws", proxy=None))
            hanging.callback(free.set)
            line.send('{"type": "reset", "data": {"seed": 1}}')
        env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{port}", answer_seconds=100.0)
        assert env.reset(seed=0)[1]["seed"] == 0
        env.close()


@pytest.mark.parametrize("error", [StopIteration("done"), SystemExit(3), RuntimeError("arm 7")])
def test_whatever_a_served_env_raises_is_an_answer_and_what_is_no_refusal_is_logged(error, caplog):
    class Raising(BanditEnv):
        def _advance(self, action):
            raise error

    env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{start_server(Raising)}", answer_seconds=100.0)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=f"{type(error).__name__}: {error}"):
        env.step("1")
    assert ("an env that is served failed" in caplog.text) == isinstance(error, RuntimeError)
    assert env.reset(seed=1)[1]["step"] == 0
    env.close()


SERVED = """
import threading
from shoal.envs.adapters.openenv_server import serve
from shoal.envs.bandit import BanditEnv

class Hanging(BanditEnv):
    def _start(self, rng):
        print("hangs", flush=True)
        threading.Event().wait()

serve("bandit", Hanging, port=0, on_ready=lambda port: print(port, flush=True))
"""


def test_a_server_whose_env_hangs_ends_on_an_interrupt():
    server = subprocess.Popen(
        [sys.executable, "-c", SERVED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with (
        server,
        contextlib.suppress(OSError),
        connect(f"ws://127.0.0.1:{int(server.stdout.readline())}/ws", proxy=None) as line,
    ):
        try:
            line.send('{"type": "reset"}')
            assert server.stdout.readline() == "hangs\n"
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)  # TimeoutExpired where it does not end
        finally:
            server.kill()


def test_a_session_survives_broken_messages(port):
    with connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as socket:
        for message in ("", "[1]", "{", '{"type": "dance"}', '{"type": "step", "data": {}}'):
            socket.send(message)
            assert json.loads(socket.recv(timeout=60))["type"] == "error"
        socket.send('{"type": "step", "data": {"action": "up"}}')
        assert "never started" in json.loads(socket.recv(timeout=60))["data"]["message"]
        socket.send('{"type": "reset", "data": {"seed": 1}}')
        assert json.loads(socket.recv(timeout=60))["type"] == "observation"


def test_a_server_that_is_not_there_is_an_env_error():
    env = shoal.envs.make("openenv", url="http://127.0.0.1:9")
    with pytest.raises(EnvError, match="did not answer a reset"):
        env.reset(seed=0)
    with pytest.raises(EnvError, match="did not answer a reset: Port out of range"):
        shoal.envs.make("openenv", url="http://localhost:99999").reset(seed=0)
    for url in ("ftp://x", "x", "http:///shop"):
        with pytest.raises(ConfigError, match="url must be like"):
            shoal.envs.make("openenv", url=url)


class Line:
    """A connection to a server that gives these answers, and then is gone."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def send(self, message):
        pass

    def recv(self, timeout):
        if not self.answers:
            raise ConnectionResetError("gone")
        return json.dumps({"type": "observation", "data": self.answers.pop(0)})


def answered(monkeypatch, **data):
    """An env in an episode whose server gives this answer to the first step."""
    line = Line({"observation": {"text": "hello"}}, {"observation": {"text": "you"}, **data})
    monkeypatch.setattr("websockets.sync.client.connect", lambda url, **_: contextlib.nullcontext(line))
    env = shoal.envs.make("openenv", url="http://127.0.0.1:9")
    env.reset(seed=0)
    return env


@pytest.mark.parametrize(
    "data",
    [{"reward": "1"}, {"reward": float("nan")}, {"reward": 10**400}, {"reward": [1]}, {"done": "false"}],
)
def test_an_answer_that_is_no_reward_or_end_is_an_env_error(monkeypatch, data):
    env = answered(monkeypatch, **data)
    with pytest.raises(EnvError, match="a number as reward and true or false as done"):
        env.step("x")
    with pytest.raises(EnvError, match=r"reset\(\) first"):
        env.step("x")


def test_words_of_a_server_do_not_count_as_success_or_end(monkeypatch):
    said = {
        "text": "",
        "success": "false",
        "truncated": "no",
        "action_is_valid": None,
        "action_is_effective": 0,
    }
    _, reward, terminated, truncated, info = answered(monkeypatch, observation=said, done=True).step("x")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["success"], info["action_is_valid"], info["action_is_effective"]) == (False, True, True)


def object_of(*required, **properties):
    return {
        "type": "object",
        "required": required,
        "properties": {"metadata": {"type": "object"}, **properties},
    }


TEXT, WHOLE, PART = {"type": "string"}, {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    ("action", "text", "sent"),
    [
        (object_of("message", message=TEXT), "go", {"message": "go"}),
        (object_of("message", message=TEXT, loud={"type": "boolean"}), "7", {"message": "7"}),
        (object_of("guess", guess=WHOLE), "7", {"guess": 7}),
        (object_of("guess", guess=WHOLE), "7.5", None),
        (object_of("guess", guess=WHOLE), "true", None),
        (object_of("guess", guess=WHOLE), "seven", None),
        (object_of("guess", guess=PART), "7.5", {"guess": 7.5}),
        (object_of(x=WHOLE, y=WHOLE), "7", None),
        (object_of(x=WHOLE, y=WHOLE), '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
        (object_of(action=TEXT, text=TEXT), "up", {"action": "up"}),
        (object_of(choice={"enum": ["a"]}), "a", {"choice": "a"}),
        ({}, "up", {"action": "up"}),
        (None, "up", {"action": "up"}),
    ],
)
def test_an_action_goes_where_the_schema_of_the_server_wants_it(monkeypatch, action, text, sent):
    class Schema(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/play/schema"
            self.send_response(404 if action is None else 200)
            self.end_headers()
            seen = object_of(hint=TEXT, left=WHOLE, done={"type": "boolean"})
            self.wfile.write(json.dumps({"action": action, "observation": seen}).encode())

        def log_message(self, *args):
            pass

    messages = []

    class Listening(Line):
        def send(self, message):
            messages.append(json.loads(message)["data"])

    answers = [{"observation": {"hint": "hello", "left": 3}}, {"observation": {"hint": "you", "left": 2}}]
    line = contextlib.nullcontext(Listening(*answers))
    monkeypatch.setattr("websockets.sync.client.connect", lambda url, **_: line)
    with http.server.HTTPServer(("127.0.0.1", 0), Schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = shoal.envs.make("openenv", url=f"http://127.0.0.1:{server.server_port}/play/ws")
        seen = env.reset(seed=0)[0]
        assert seen == ('{"hint": "hello", "left": 3}' if action is None else "hello")
        info = env.step(text)[4]
        server.shutdown()
    assert messages[1:] == ([] if sent is None else [sent])
    assert info["action_is_valid"] is (sent is not None)
    several = action == object_of(x=WHOLE, y=WHOLE)
    assert ('a JSON object with "x" (integer), "y" (integer)' in env.instructions) == several


def test_what_an_address_asks_for_reaches_the_server(monkeypatch):
    asked = []

    def connect(url, **settings):
        asked.append(url)
        raise OSError("nobody there")

    monkeypatch.setattr("websockets.sync.client.connect", connect)
    with pytest.raises(EnvError, match="nobody there"):
        shoal.envs.make("openenv", url="https://example.org/shop?token=7").reset(seed=0)
    assert asked == ["wss://example.org/shop/ws?token=7"]


def test_an_episode_whose_server_is_gone_is_over(monkeypatch):
    env = answered(monkeypatch)
    env.step("x")
    with pytest.raises(EnvError, match="did not answer a step: gone"):
        env.step("x")
    with pytest.raises(EnvError, match=r"reset\(\) first"):  # the server would know nothing of it
        env.step("x")


@pytest.mark.filterwarnings("ignore")
def test_openenvs_own_client_plays_on_our_server(port):
    client = pytest.importorskip("openenv.core.generic_client")
    import asyncio

    async def play():
        async with client.GenericEnvClient(base_url=f"http://127.0.0.1:{port}") as remote:
            start = await remote.reset(seed=5)
            step = await remote.step({"action": "Left"})
            return start, step, await remote.state()

    start, step, state = asyncio.run(play())
    local = shoal.envs.make("sokoban")
    assert start.observation["text"] == local.reset(seed=5)[0]
    assert step.observation["text"] == local.step(3)[0]
    assert state["step_count"] == 1


@pytest.mark.filterwarnings("ignore")
def test_our_client_plays_on_openenvs_own_server():
    server = pytest.importorskip("openenv.core.env_server")
    import uvicorn

    class Said(server.Action):
        message: str

    class Heard(server.Observation):
        echo: str = ""

    class Echo(server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **more):
            self.turns = 0
            return Heard(echo=f"hello {seed}")

        def step(self, action, timeout_s=None, **more):
            self.turns += 1
            return Heard(echo=action.message, reward=float(len(action.message)), done=self.turns == 2)

        @property
        def state(self):
            return server.State(step_count=self.turns)

    app = server.create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
    running = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="warning"))
    threading.Thread(target=running.run, daemon=True).start()
    while not running.started:
        pass
    url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    env = shoal.envs.make(
        "openenv", url=url, action_field="message", observation_field="echo", success_reward=4
    )
    assert env.reset(seed=7)[0] == "hello 7"
    assert env.step("hi")[:3] == ("hi", 2.0, False)
    assert env.step('{"message": "json"}')[:3] == ("json", 4.0, True)
    by_schema = shoal.envs.make("openenv", url=url)
    assert by_schema.reset(seed=1)[0] == "hello 1"
    assert by_schema.step("you")[:3] == ("you", 3.0, False)
    wrong = shoal.envs.make("openenv", url=url, action_field="words")
    wrong.reset(seed=1)
    with pytest.raises(EnvError, match="VALIDATION_ERROR"):
        wrong.step("x")
    running.should_exit = True
