"""A port is free, or a line says why it cannot be had."""

import socket

import pytest

from shoal.core.errors import ConfigError
from shoal.core.ports import listening, no_proxy, proxy_for


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


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def environment(monkeypatch):
    """Sets variables about proxies; all others of them are unset."""

    def set_to(**values):
        for name in PROXIES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize(
    ("held", "names"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.org, .b.org"}, "a.org,.b.org,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.org", "no_proxy": "c.org,localhost"}, "a.org,c.org,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_programs_ask_this_machine_without_a_proxy_and_what_the_user_excepted_stays(environment, held, names):
    environment(**held)
    assert no_proxy() == {"NO_PROXY": names, "no_proxy": names}


@pytest.mark.parametrize(
    ("url", "held", "proxy"),
    [
        ("http://judge.org/v1", {}, None),
        ("http://judge.org/v1", {"HTTP_PROXY": "http://p:1"}, "http://p:1"),
        ("http://judge.org/v1", {"http_proxy": "p:1"}, "http://p:1"),
        ("https://judge.org/v1", {"HTTP_PROXY": "http://p:1"}, None),
        ("https://judge.org/v1", {"ALL_PROXY": "http://p:1"}, "http://p:1"),
        ("https://judge.org/v1", {"ALL_PROXY": "socks5://p:1"}, None),
        ("http://judge.org/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "judge.org"}, None),
        ("http://a.judge.org:80/v1", {"HTTP_PROXY": "http://p:1", "no_proxy": ".judge.org"}, None),
        ("http://127.0.0.1:8000/v1", {"HTTP_PROXY": "http://p:1"}, None),
        ("http://localhost:8000/v1", {"ALL_PROXY": "http://p:1"}, None),
        ("http://[::1]:8000/v1", {"HTTP_PROXY": "http://p:1"}, None),
    ],
)
def test_a_server_is_asked_through_the_proxy_that_the_environment_names_for_it(environment, url, held, proxy):
    environment(**held)
    assert proxy_for(url) == proxy
