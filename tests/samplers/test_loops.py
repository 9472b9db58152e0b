import asyncio
import gc
import signal

import pytest

from shoal.samplers.loops import run_here


def test_ctrl_c_reaches_the_caller_and_is_logged_by_no_task(caplog):
    def end(number, frame):  # a command has a handler of its own, so that asyncio takes none
        raise KeyboardInterrupt

    async def step():
        signal.raise_signal(signal.SIGTERM)

    async def rollout():
        stepping = asyncio.create_task(step())
        await asyncio.Event().wait()
        await stepping

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_here(rollout())
    finally:
        signal.signal(signal.SIGTERM, before)
    gc.collect()
    assert caplog.text == ""
