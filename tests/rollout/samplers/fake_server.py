"""A server on this machine that speaks like vLLM, SGLang, llama.cpp or plain OpenAI, with faults on demand."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "openai": "somebody"}


def written(prompt_ids, n):
    """What the fake model writes: a function of the prompt alone, so that mixed-up answers show."""
    first = sum(i * (place + 1) for place, i in enumerate(prompt_ids))
    return [(first + step) % 97 for step in range(n)]


def logprob_of(token):
    return -0.25 - token / 64


class FakeServer(ThreadingHTTPServer):
    """Speaks like one kind of server; `faults` come before any answer.

    A fault is a status, a sleep (float), "drop" (no answer), "cut" (half an answer), "drip" (a byte at a time, without
    end), the bytes of an answer, or a status with them.
    """

    daemon_threads = True

    def __init__(self, kind):
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.faults, self.seen, self.ports = kind, [], [], set()
        self.lock, self.busy, self.most_busy, self.pause = threading.Lock(), 0, 0, 0.0
        self.change = lambda reply: reply
        self.props = {"default_generation_settings": {"n_ctx": None}}
        self.say = lambda said: f"you said {said}"
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def reply_to(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "m", "owned_by": OWNERS[self.kind]}]}
        if path == "/props":
            return self.props
        if path.endswith("_lora_adapter"):
            return {"success": True}
        if path == "/update_weights_from_disk":
            return {"success": body["model_path"].endswith("good"), "message": "no such folder"}
        assert "seed" not in json.dumps(body)
        if self.kind == "vllm" and path == "/v1/completions":
            assert {"top_p", "top_k", "min_p"} <= body.keys()
            assert body["repetition_penalty"] == 1.0
            ids = written(body["prompt"], body["max_tokens"])
            choice = {
                "token_ids": ids if body["return_token_ids"] else None,
                "prompt_token_ids": body["prompt"],
                "logprobs": {"token_logprobs": list(map(logprob_of, ids))},
                "finish_reason": "length",
            }
            return {"choices": [choice]}
        if self.kind == "sglang" and path == "/generate":
            ids = written(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            meta = {
                "prompt_tokens": len(body["input_ids"]),
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[logprob_of(i), i, None] for i in ids],
            }
            return {"output_ids": ids, "meta_info": meta}
        if self.kind == "llama.cpp" and path == "/completion":
            ids = written(body["prompt"], body["n_predict"])
            chosen = [{"id": i, "logprob": logprob_of(i)} for i in ids]
            return {
                "tokens": ids,
                "completion_probabilities": chosen,
                "stop_type": "limit",
                "tokens_evaluated": len(body["prompt"]),
            }
        assert path == "/v1/chat/completions", path
        said = " / ".join(str(m["content"])[:2000] for m in body["messages"])
        return {"choices": [{"message": {"content": self.say(said)}, "finish_reason": "stop"}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        server = self.server
        with server.lock:
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
            server.ports.add(self.client_address[1])
            server.seen.append((self.path, body, dict(self.headers)))
            fault = server.faults.pop(0) if server.faults and body is not None else None
        try:
            time.sleep(server.pause)
            if fault == "drop":
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(fault, float):
                time.sleep(fault)
            status = 200
            if isinstance(fault, tuple):
                status, fault = fault
            elif isinstance(fault, int):
                status = fault
            reply = {"error": {"message": f"fault {status}"}}
            if status == 200:
                reply = server.change(server.reply_to(self.path, body))
        except Exception as error:
            status, reply = 400, {"error": {"message": repr(error)}}
        finally:
            with server.lock:
                server.busy -= 1
        data = fault if isinstance(fault, bytes) else json.dumps(reply).encode()
        self.close_connection = self.close_connection or fault in ("cut", "drip")
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(10**6 if fault == "drip" else len(data)))
            self.end_headers()
            while fault == "drip":
                self.wfile.write(b" ")
                time.sleep(0.02)
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        except OSError:
            pass
