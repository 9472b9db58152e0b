"""A tiny model, and servers in front of models, which end with the test."""

import pytest

from shoal.gateway.server import Gateway, GatewayServer
from shoal.samplers.tiny import TinyEngine, TinyShape


@pytest.fixture(scope="session")
def engine():
    return TinyEngine(["Up", "Down"], TinyShape(32, 1, 2, 2000), seed=3)


@pytest.fixture
def serve():
    servers = []

    def start(sampler, tokenizer=None, **more):
        servers.append(GatewayServer(Gateway(sampler, tokenizer or sampler.tokenizer, **more)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
