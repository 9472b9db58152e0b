"""math-verify (symbolic equality of answers) in a process of its own that ends when it takes too long.

In-process it would stall a worker for seconds on hostile input and refuse to run outside the main thread. What is
counted is the time of its processor, so that an answer is no more wrong on a busy machine than on an idle one.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from shoal.core.errors import missing_extra
from shoal.core.workers import WorkerProcess
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
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None

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
        try:
            process.pipe.send((self.seconds, *answers))
            return bool(process.pipe.recv())
        except (EOFError, OSError):
            process.wait()
            late = process.exit_code == -signal.SIGPROF
            self._end()
            return False if late else None
        except BaseException:  # Ctrl-C: its answer would be taken for that to the next question
            self._end()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return MathVerifier, (self.seconds,)

    def close(self) -> None:
        """End the process; the next question starts a new one."""
        with self._lock:
            self._end()

    def _start(self) -> WorkerProcess:
        process = WorkerProcess(_serve)
        try:
            process.pipe.recv()
        except EOFError as error:
            raise RuntimeError(
                "the math-verify process did not start; try `import math_verify` by hand"
            ) from error
        self._process = process
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _serve(pipe: Any) -> None:
    """What the process runs; sympy and its parser print nothing on the user's terminal."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        _answer(pipe)


def _answer(pipe: Any) -> None:
    """Answer questions, each (seconds, given, wanted), until the other side is gone."""
    import resource

    import math_verify

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    # The first question of each kind loads half of sympy: that is not the asker's time.
    for given, wanted in ((r"\frac{x}{2}", "(x+1)(x-1)"), ("0.5", "50"), (r"\sqrt{2}", "2^{10}")):
        _verify(math_verify, given, wanted)
    pipe.send("ready")
    while True:
        try:
            seconds, given, wanted = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of user and system; its signal ends the process
        equal = _verify(math_verify, given, wanted)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(equal)


def _verify(math_verify: Any, given: str, wanted: str) -> bool:
    """One question; whatever math-verify raises on odd input means "not equal"."""
    try:
        parsed = [math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=0) for answer in (wanted, given)]
        # its own limits are of the clock
        return bool(all(parsed) and math_verify.verify(*parsed, timeout_seconds=0))
    except (Exception, MemoryError):
        return False
