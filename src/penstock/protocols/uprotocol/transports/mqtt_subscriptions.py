"""What is to be received from a broker, what does its session have of it, and what came for it?"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from paho.mqtt.client import MQTTMessage

__all__ = ["Arrival", "Subscriptions", "identifier"]

#: MQTT 5, 3.8.2.1.2: the numbers that a subscription can have, beginning with 1.
_IDENTIFIERS: Final = 268_435_455


def identifier(topic_filter: str) -> int:
    """Give the number of a subscription, which is the same in another process."""
    return zlib.crc32(topic_filter.encode()) % _IDENTIFIERS + 1


class Arrival(NamedTuple):
    """A packet that came, and by which connection."""

    packet: MQTTMessage
    connection: int

    @property
    def identifiers(self) -> Collection[int]:
        """The subscriptions that it came for; none where the broker does not say."""
        found = getattr(self.packet.properties, "SubscriptionIdentifier", ())
        return (found,) if isinstance(found, int) else found


class Subscriptions:
    """The topic filters of a session. Whoever calls it holds the lock of the link."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        #: What the session has, as far as is known, wanted or not.
        self._there: set[str] = set()

    def add(self, topic_filter: str) -> None:
        """Want a filter."""
        self._wanted.add(topic_filter)

    def confirm(self, topic_filter: str) -> None:
        """Note that the session has it."""
        self._there.add(topic_filter)

    def remove(self, topic_filter: str) -> None:
        """Want a filter no more."""
        self._wanted.discard(topic_filter)

    def confirm_removal(self, topic_filter: str) -> None:
        """Note that the session does not have it any more."""
        self._there.discard(topic_filter)

    def resumed(self, *, is_kept: bool) -> tuple[list[str], list[str]]:
        """Return what is to be subscribed to, and unsubscribed from, with a new connection.

        :param is_kept: whether the broker still had the session.
        """
        if not is_kept:
            self._there.clear()
        missing = sorted(self._wanted - self._there)
        unwanted = sorted(self._there - self._wanted)
        self._there = set(self._wanted)
        return missing, unwanted
