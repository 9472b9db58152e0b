"""An OpenEnv server whose actions are tools, with the messages that openenv-core 0.3 exchanges."""

import contextlib
import json
import random
import threading

from websockets.sync.server import serve

TOOLS = [
    {"name": "note", "description": "Read the note.", "input_schema": {"type": "object", "properties": {}}},
    {
        "name": "turn",
        "description": "Turn the dial.",
        "input_schema": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
]


class Safe:
    """One session."""

    def answer(self, kind, data):
        if kind == "reset":
            self.code = random.Random(data["seed"]).randrange(10)
            return {}, 0.0, False
        if data["type"] == "list_tools":
            return {"tools": TOOLS}, None, False
        name, arguments = data["tool_name"], data["arguments"]
        if name == "note":
            text = f"the code is {self.code}"
            parts = [{"type": "text", "text": text, "annotations": None}]
            return (
                {"tool_name": name, "result": {"content": parts, "is_error": False}, "error": None},
                0.0,
                False,
            )
        number = arguments["number"]
        if number > 9:
            said = {"error_type": "execution_error", "message": "one digit"}
            return {"tool_name": name, "result": None, "error": said}, -0.5, False
        opened = number == self.code
        return {"tool_name": name, "result": {"opened": opened}, "error": None}, float(opened), opened


@contextlib.contextmanager
def served(kind=Safe):
    """The address of a server, which ends with the block."""

    def session(socket):
        safe = kind()
        for message in socket:
            asked = json.loads(message)
            seen, reward, done = safe.answer(asked["type"], asked["data"])
            data = {"observation": seen, "reward": reward, "done": done}
            socket.send(json.dumps({"type": "observation", "data": data}))

    with serve(session, "127.0.0.1", 0) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        serving.join()
