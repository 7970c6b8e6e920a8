"""What is to be received from a broker, what does its session have of it, and what came for it?"""

from __future__ import annotations

import logging
import random
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from paho.mqtt.client import MQTTMessage

    from penstock.protocols.uprotocol.codes import UStatus

__all__ = ["Arrival", "Subscriptions", "identifier"]

log = logging.getLogger(__name__)

#: MQTT 5, 3.8.2.1.2: the numbers that a subscription can have, beginning with 1.
_IDENTIFIERS: Final = 268_435_455
#: Between attempts to subscribe to what the broker refused: it may be allowed meanwhile.
_BACKOFF: Final = Backoff(initial=1.0, maximum=60.0)


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


@dataclass(slots=True)
class _Refusal:
    status: UStatus
    attempts: int
    #: When to ask again (monotonic seconds).
    due: float


class Subscriptions:
    """The topic filters of a session. Whoever calls it holds the lock of the link."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._wanted: set[str] = set()
        #: What the session has, as far as is known, wanted or not.
        self._there: set[str] = set()
        #: What is wanted, and was not granted.
        self._refused: dict[str, _Refusal] = {}

    def add(self, topic_filter: str) -> None:
        """Want a filter."""
        self._wanted.add(topic_filter)

    def confirm(self, topic_filter: str) -> None:
        """Note that the session has it."""
        self._there.add(topic_filter)
        self._refused.pop(topic_filter, None)

    def refuse(self, topic_filter: str, status: UStatus) -> None:
        """Note that the session does not have it now; it is to be asked for again."""
        self._there.discard(topic_filter)
        if topic_filter not in self._wanted:
            return
        before = self._refused.get(topic_filter)
        if before is None:
            log.warning("%s: %s; it is asked again", topic_filter, status.message)
        attempts = 1 if before is None else before.attempts + 1
        due = self._now() + _BACKOFF.delay(attempts, self._rng)
        self._refused[topic_filter] = _Refusal(status, attempts, due)

    @property
    def refused(self) -> int:
        """How many are wanted, and were not granted."""
        return len(self._refused)

    @property
    def refusal(self) -> UStatus | None:
        """Why the first of those was not granted."""
        return next((it.status for it in self._refused.values()), None)

    @property
    def next_due(self) -> float | None:
        """When something is to be asked for again (monotonic seconds); None: nothing is."""
        return min((it.due for it in self._refused.values()), default=None)

    def due(self) -> list[str]:
        """Return what is to be asked for again now."""
        now = self._now()
        return [name for name, it in self._refused.items() if it.due <= now]

    def remove(self, topic_filter: str) -> None:
        """Want a filter no more."""
        self._wanted.discard(topic_filter)
        self._refused.pop(topic_filter, None)

    def confirm_removal(self, topic_filter: str) -> None:
        """Note that the session does not have it any more."""
        self._there.discard(topic_filter)

    def resumed(self, *, is_kept: bool) -> tuple[list[str], list[str]]:
        """Return what is to be subscribed to, and unsubscribed from, with a new connection.

        :param is_kept: whether the broker still had the session.
        """
        if not is_kept:
            self._there.clear()
        self._refused.clear()  # all of them are asked for
        return self.changed()

    def changed(self) -> tuple[list[str], list[str]]:
        """Return what is to be subscribed to, and unsubscribed from, which then is under way."""
        missing = sorted(self._wanted - self._there - self._refused.keys())
        unwanted = sorted(self._there - self._wanted)
        self._there = self._wanted - self._refused.keys()
        return missing, unwanted
