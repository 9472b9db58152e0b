"""Samplers that answer each request by itself, as soon as it is asked: servers, vLLM, replicas on Ray."""

from __future__ import annotations

import asyncio
import weakref
from abc import abstractmethod
from collections.abc import Sequence

from shoal.core.errors import EngineError
from shoal.core.executors import Closing
from shoal.rollout.loops import LoopThread
from shoal.rollout.samplers.sampler import Completion, Request


class ContinuousSampler(Closing):
    """Answers requests in an event loop of its own, in a thread; callers may be in any thread or event loop.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = LoopThread(name)
        self._end_loop = weakref.finalize(self, self._loop.close)

    @abstractmethod
    async def _answer(self, request: Request) -> Completion:
        """The completion of a request, in the sampler's event loop.

        Raises:
            EngineError: there is none.
        """

    async def sample(self, request: Request) -> Completion:
        """The completion of a request, which waits for no other one.

        Raises:
            EngineError: there is none.
        """
        return await self._loop.within(self._answer(request))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order; raises the first failure after all have ended."""
        results = self.generate_each(requests)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            raise EngineError(
                f"{len(failed)} of {len(results)} requests failed; the first: {failed[0]}"
            ) from failed[0]
        return [result for result in results if isinstance(result, Completion)]

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | BaseException]:
        """Like `generate`, with an exception in the place of each request that has no completion."""

        async def all_of_them() -> list[Completion | BaseException]:
            return await asyncio.gather(*map(self._answer, requests), return_exceptions=True)

        return self._loop.run(all_of_them())

    def close(self) -> None:
        """Give up requests that are under way; nothing is answered any more."""
        self._end_loop()
