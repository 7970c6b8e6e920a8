from __future__ import annotations

import socket
import ssl

import pytest

from penstock.core.errors import ConnectionLost, PositionError
from penstock.protocols.reaching import why_unreachable


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
