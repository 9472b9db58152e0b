"""A port is free, or a line says why it cannot be had."""

import socket

import pytest

from shoal.core.errors import ConfigError
from shoal.core.ports import listening


def test_a_free_port_answers_at_once():
    with listening(0) as listener:
        socket.create_connection(listener.getsockname(), 5.0).close()
        with pytest.raises(ConfigError, match="is taken; choose another"):
            listening(listener.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65536, 70000, 2**40, True, 80.0, None])
def test_what_is_no_port_is_told(port):
    with pytest.raises(ConfigError, match="from 0 to 65535"):
        listening(port)


def test_a_port_that_is_not_this_users_to_take_is_told(monkeypatch):
    monkeypatch.setattr(
        socket.socket, "bind", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied"))
    )
    with pytest.raises(ConfigError, match=r"port 80 cannot be used \(denied\)"):
        listening(80)
