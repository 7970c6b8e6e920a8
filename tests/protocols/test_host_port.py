from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

import pytest

from penstock.core.errors import ConnectionLost, PositionError, StorageError
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.host_port import why_unreachable
from penstock.protocols.server import listen_tcp


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "nobody listens at rig:1883"),
        (socket.gaierror(-2, "Name or service not known"), "there is no host 'rig'"),
        (TimeoutError(), "rig:1883 does not answer"),
        (ssl.SSLError(1, "[SSL] wrong version number"), "no TLS with rig:1883"),
        (OSError(113, "No route to host"), "rig:1883: No route to host"),
        (ValueError("odd"), "rig:1883: odd"),
        (ConnectionLost("rig", "it is silent"), "it is silent"),
        (PositionError("not there"), "not there"),
    ],
)
def test_what_keeps_a_host_away_is_told_in_words(error: Exception, expected: str) -> None:
    told = why_unreachable(error, "rig", 1883)
    assert expected in told
    assert "Errno" not in told


def test_an_address_of_version_6_is_told_from_its_port() -> None:
    assert why_unreachable(TimeoutError(), "::1", 5) == "[::1]:5 does not answer"


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
@pytest.mark.parametrize("listen", [listen_tcp, DatagramSocket.bind])
def test_a_port_that_is_none_is_refused_and_no_other_taken(
    listen: Callable[[str, int], object], port: int
) -> None:
    with pytest.raises(StorageError, match="no such port") as caught:
        listen("127.0.0.1", port)
    assert "65,535" in str(caught.value.hint)
