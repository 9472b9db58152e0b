"""A double of vLLM and SGLang that serves a real small model: it has weights of its own, and loads others from folders.

It speaks the routes that the two document for training. It never takes a key of a request but by a field of the test's,
`shoal_key`: with it, its tokens are those of `HuggingFaceEngine` in process.
"""

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from tests.rollout.doubles import answer_of

from shoal.samplers.huggingface.engine import HuggingFaceEngine, read_weights
from shoal.samplers.sampler import Key, Request, Sampling

GENERATION = {"vllm": "/v1/completions", "sglang": "/generate"}


def keyed(dialect):
    """A dialect that also says whose noise a request has."""

    def body(request, model, tokenizer):
        key = request.key
        return dialect.body(request, model, tokenizer) | {"shoal_key": [key.seed, *key.path]}

    return replace(dialect, body=body)


class ModelServer(ThreadingHTTPServer):
    """Serves the model of a folder.

    `faults` come before answers to prompts: None, a status, "restart" (connections break, nobody answers for `away`
    seconds, then the base weights do), "quiet" (a restart in which it is never away) or "hang up" (connections break,
    and that is all).
    """

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, folder, kind="vllm"):
        self.kind, self.folder, self.lock = kind, Path(folder), threading.Lock()
        self.faults, self.calls, self.open, self.away = [], [], set(), 0.3
        self.ignores = False  # what it is told to load
        self.breaks = lambda path: None  # a status for a call that is no prompt
        self.answered = {"base": 0, "loaded": 0, "stale": 0}
        self.asked = set()  # by whom now
        self.mixed = 0  # prompts with an adapter that were scored beside others
        self._boot()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._listen()

    def _boot(self):
        """Begin with the base weights, as a new process does."""
        self.adapters, self.paused, self.stale, self.has = {}, threading.Event(), False, "base"
        self.paused.set()  # not paused
        self.model = HuggingFaceEngine.load(self.folder)

    def _listen(self):
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def hang_up(self):
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self, away):
        """End all connections; come back after `away` seconds, with the base weights."""
        address = self.server_address
        if away:
            self.shutdown()
            self.socket.close()
        self.hang_up()
        with self.lock:
            self._boot()
        if away:
            time.sleep(away)
            self.socket = socket.socket(self.address_family, self.socket_type)
            self.server_address = address
            self.server_bind()
            self.server_activate()
            self._listen()

    def close(self):
        self.shutdown()
        self.server_close()

    # --- what it knows
    def reply_to(self, path, body):
        path, _, query = path.partition("?")
        if path == "/v1/models":
            return {"data": [{"id": "m", "owned_by": self.kind, "max_model_len": 512}]}
        if path == GENERATION[self.kind]:
            return self.complete(body)
        self.calls.append((path, body))
        if status := self.breaks(path):
            raise RefusedError(status, "broken")
        with self.lock:
            if path.endswith("load_lora_adapter"):
                return self.adapter(path, body)
            return {"vllm": self.vllm, "sglang": self.sglang}[self.kind](path, query, body)

    def vllm(self, path, query, body):
        if path == "/pause" and query == "mode=wait":
            self.paused.clear()
        elif path == "/resume":
            self.paused.set()
        elif path == "/reset_prefix_cache":
            self.stale = False
        elif path == "/collective_rpc" and body["method"] == "reload_weights":
            assert not self.paused.is_set()
            self.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        else:
            raise RefusedError(404, "Not Found")
        return {}

    def sglang(self, path, query, body):
        if path != "/update_weights_from_disk":
            raise RefusedError(404, "Not Found")
        self.load(body["model_path"])
        self.stale = not body["flush_cache"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def load(self, folder):
        assert (Path(folder) / "config.json").is_file()
        if not self.ignores:
            self.model.load_weights(read_weights(Path(folder), self.model.model), 0)
            self.has, self.stale = "loaded", True

    def adapter(self, path, body):
        name = body["lora_name"]
        if "unload" in path:
            del self.adapters[name]
        elif self.ignores:
            self.adapters[name] = self.model
        else:
            self.adapters[name] = HuggingFaceEngine.load(self.folder)
            self.adapters[name].load_adapter(Path(body["lora_path"]), 0)
        return {"success": True}

    def complete(self, body):
        """Tokens and log-probabilities, as the two tell them."""
        vllm = self.kind == "vllm"
        settings = body if vllm else body["sampling_params"]
        ids = tuple(body["prompt"] if vllm else body["input_ids"])
        name = body["model"] if vllm else body.get("lora_path")
        assert self.paused.wait(60)
        self.asked.add(me := threading.get_ident())
        try:
            return self.complete_one(vllm, ids, name, settings, body)
        finally:
            self.asked.discard(me)

    def complete_one(self, vllm, ids, name, settings, body):
        with self.lock:
            if name not in (None, "m") and name not in self.adapters:
                raise RefusedError(404 if vllm else 400, f"The model `{name}` does not exist.")
            model = self.adapters.get(name, self.model)
            seed, *path = body["shoal_key"]
            count = settings["max_tokens" if vllm else "max_new_tokens"]
            sampling = Sampling(count, settings["temperature"], tuple(settings["stop"]))
            (said,) = model.generate([Request(ids, Key(seed, tuple(path)), sampling)])
            probed = body.get("prompt_logprobs") if vllm else body["logprob_start_len"] == 0
            self.mixed += bool(probed and name in self.adapters and len(self.asked) > 1)
            scores = scores_of(model, ids) if probed else None
            if not probed:
                what = "stale" if self.stale else "loaded" if name in self.adapters else self.has
                self.answered[what] += 1
        answer = answer_of(self.kind, ids, said.token_ids, said.logprobs, said.finish)
        if probed and vllm:
            pairs = zip(ids[1:], scores, strict=True)
            rows = [{"0": {"logprob": -9.0}, str(i): {"logprob": s, "rank": 1}} for i, s in pairs]
            answer["choices"][0]["prompt_logprobs"] = [None, *rows]
        elif probed:
            pairs = zip(ids, [None, *scores], strict=True)
            answer["meta_info"]["input_token_logprobs"] = [[s, i, None] for i, s in pairs]
        return answer


def scores_of(model, ids):
    """Log-probabilities of a prompt's tokens after the first, by one plain pass."""
    row = torch.tensor([ids])
    with torch.no_grad():
        return model.model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0].tolist()


class RefusedError(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def setup(self):
        super().setup()
        self.server.open.add(self.connection)

    def finish(self):
        self.server.open.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        server, status, fault = self.server, 200, None
        if self.path == GENERATION[server.kind]:
            with server.lock:
                fault = server.faults.pop(0) if server.faults else None
        if isinstance(fault, str):
            self.close_connection = True
            if fault == "hang up":
                server.hang_up()
            else:
                server.restart(server.away if fault == "restart" else 0)
            return
        try:
            if fault:
                raise RefusedError(fault, f"fault {fault}")
            reply = server.reply_to(self.path, body)
        except RefusedError as error:
            status, reply = error.args[0], {"error": {"message": error.args[1]}}
        data = json.dumps(reply).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
