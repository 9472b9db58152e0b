"""math-verify (symbolic equality of answers) in a process of its own that ends when it takes too long.

In-process it would stall a worker for seconds on hostile input and refuse to run outside the main thread. What is
counted is the time of its processor, so that an answer is no more wrong on a busy machine than on an idle one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

from shoal.core.errors import missing_extra
from shoal.envs.math_answers import final_answer

MAX_ANSWER = 200
"""Characters of an answer handed over; longer ones are not verified."""
MAX_MEMORY = 4 * 2**30
"""Bytes of address space the process may use."""


class MathVerifier:
    """Asks math-verify whether two answers are the same; safe to share between threads.

    Args:
        seconds: CPU seconds that one question may take before its process is killed and the answer counts as wrong.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise missing_extra("checker='math_verify'", "math")
        self.seconds = seconds
        self.kills = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def same(self, response: str, truth: str) -> bool:
        """Whether math-verify calls the final answers equal, within the deadline."""
        answers = final_answer(response), final_answer(truth)
        if any(answer is None or len(answer) > MAX_ANSWER for answer in answers):
            return False
        with self._lock:
            found = self._ask(answers)
            if found is None:  # the process was ended from elsewhere, or by this question
                found = self._ask(answers)
            return bool(found)

    def _ask(self, answers: tuple[str | None, ...]) -> bool | None:
        """What the process says; None if it ended for another reason than that this takes too long."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([self.seconds, *answers]).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line:
            return json.loads(line) is True
        self._kill()
        late = process.returncode == -signal.SIGPROF
        self.kills += late
        return False if late else None

    def __reduce__(self) -> tuple[Any, ...]:
        return MathVerifier, (self.seconds,)

    def close(self) -> None:
        """End the process; the next question starts a new one."""
        with self._lock:
            self._kill()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(item for item in sys.path if item and isinstance(item, str))
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.envs.math_verifier"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdout is not None
        if not process.stdout.readline():
            self._kill()
            raise RuntimeError("the math-verify process did not start; try `import math_verify` by hand")
        return process

    def _kill(self) -> None:
        if self._process is not None:
            self._finalizer.detach()
            _end(self._process)
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def _serve() -> None:
    """Answer questions from standard input, one JSON pair a line, until it ends, as it does with its parent."""
    import resource

    import math_verify

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    # The first question of each kind loads half of sympy: that is not the asker's time.
    for given, wanted in ((r"\frac{x}{2}", "(x+1)(x-1)"), ("0.5", "50"), (r"\sqrt{2}", "2^{10}")):
        _verify(math_verify, given, wanted)
    _reply("ready")
    for line in sys.stdin.buffer:
        seconds, given, wanted = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of user and system; its signal ends the process
        equal = _verify(math_verify, given, wanted)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(equal)


def _verify(math_verify: Any, given: str, wanted: str) -> bool:
    """One question; whatever math-verify raises on odd input means "not equal"."""
    try:
        parsed = [math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=0) for answer in (wanted, given)]
        return bool(
            all(parsed) and math_verify.verify(*parsed, timeout_seconds=0)
        )  # its own limits are of the clock
    except (Exception, MemoryError):
        return False


def _reply(value: object) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
