"""What a link says of its connection: which one it is, and why there is none."""

from __future__ import annotations

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.transports.mqtt_connection import Connection

REFUSED = UStatus(UCode.UNAUTHENTICATED, "the broker refuses")
GONE = UStatus(UCode.UNAVAILABLE, "the broker was disconnected")


@pytest.fixture
def connection() -> Connection:
    return Connection(Client(CallbackAPIVersion.VERSION2))


def test_each_connection_has_a_number_of_its_own(connection: Connection) -> None:
    assert (connection.number, connection.is_up) == (0, False)
    assert connection.why_down.code == UCode.UNAVAILABLE
    for number in (1, 2):
        with connection.changed:
            connection.begin(is_resumed=number == 2)
        assert (connection.number, connection.is_up) == (number, True)
        assert connection.session_began == 1
        with connection.changed:
            connection.end(GONE, is_news=False)
        assert (connection.is_up, connection.why_down) == (False, GONE)


def test_a_refusal_is_not_forgotten_because_the_broker_then_hangs_up(
    connection: Connection,
) -> None:
    with connection.changed:
        connection.end(REFUSED, is_news=False)
        connection.end(GONE, is_news=False)
        assert connection.why_down == REFUSED
        connection.end(GONE, is_news=True)
        assert connection.why_down == GONE
