"""Sessions of a gateway for the programs of a rollout: it answers in the loop of the driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shoal.gateway.server import Gateway, GatewayServer
from shoal.gateway.sessions import Recorded, Session
from shoal.rollout.programs import Exchanged, SessionRecord
from shoal.samplers.asking import SamplerClient
from shoal.samplers.sampler import ChatTokenizer, Key, Sampling

logger = logging.getLogger(__name__)


def sessions_of(sampler: SamplerClient, tokenizer: ChatTokenizer) -> GatewaySessions:
    """Sessions in front of the sampler of a rollout."""
    return GatewaySessions(sampler, tokenizer)


class GatewaySessions:
    """Opens a session a program; the server starts with the first one."""

    def __init__(self, sampler: SamplerClient, tokenizer: ChatTokenizer) -> None:
        self._gateway = Gateway(sampler, tokenizer, by_asking=False)
        self._server: GatewayServer | None = None

    async def open(self, name: str, key: Key, sampling: Sampling, most_calls: int) -> OpenSession:
        """A session whose noise `key` names, in the place of an older one of that name."""
        gateway, self._server = self._gateway, self._server or GatewayServer(self._gateway)
        gateway.max_tokens = sampling.max_tokens
        gateway.sessions.pop(name, None)
        session = gateway.open(name, key, fixed=sampling, most_calls=most_calls)
        return OpenSession(gateway, session, self._server.variables(name))

    async def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.end()


class OpenSession:
    """A session of the gateway, as a program's rollout sees it."""

    def __init__(self, gateway: Gateway, session: Session, variables: Mapping[str, str]) -> None:
        self._gateway, self._session, self.variables = gateway, session, variables

    async def exhausted(self) -> None:
        """Return when the program asks on and on though a budget is used up."""
        await self._session.exhausted.wait()

    def close(self, *, parallel: bool) -> SessionRecord:
        """End it; without `parallel` its calls have an order in time."""
        gateway, session = self._gateway, self._session
        gateway.sessions.pop(session.name, None)
        calls = session.close(in_time=not parallel)
        if session.at_once and not parallel and not gateway.warned:
            gateway.warned = True
            logger.warning(
                "a program asked while another call of its episode was under way; so that rewards are discounted the "
                "same in each run, set parallel: true in its env_config"
            )
        exchanged = [Exchanged(call, _new(recorded), recorded.answer) for recorded, call in calls]
        return SessionRecord(exchanged, session.requests, session.spent(in_time=not parallel), session.failed)


def _new(recorded: Recorded) -> str:
    """The messages of a call that are new."""
    if len(recorded.turns) == 1:
        return recorded.turns[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in recorded.turns)
