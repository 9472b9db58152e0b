"""A real vLLM server, run by the Python that `SHOAL_TEST_VLLM` names."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request

import pytest

PYTHON = os.environ.get("SHOAL_TEST_VLLM")
needs_vllm = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="SHOAL_TEST_VLLM names no Python with vLLM"),
]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
}


class RealServer:
    """Serves a model folder on a port of its own, again and again."""

    def __init__(self, model, log, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log, self.process = f"http://127.0.0.1:{port}", log, None
        self.command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32"]
        self.command += ["--max-model-len", "2048", *options]

    def start(self):
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **SETTINGS},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self):
        """Until it answers."""
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                return
            time.sleep(1)

    def stop(self, how=signal.SIGTERM):
        os.killpg(self.process.pid, how)
        self.process.wait(60)


@contextlib.contextmanager
def real_server(model, log, *options):
    server = RealServer(model, log, *options)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()
