"""Which messages pass a streamer in a test, and what is to become of each?"""

from __future__ import annotations

import time
from enum import Enum
from typing import Final, Literal

from penstock.dispatch import Access, Rule, dead_letter_topic
from penstock.protocols.uprotocol import UUID7, UCode, UMessage, UUri, notification

__all__ = [
    "BUS",
    "DEAD_LETTERS",
    "LISTENER",
    "SOURCES",
    "Fate",
    "Side",
    "access",
    "fate",
    "made",
    "number_of",
]

#: The two sides of the streamer are the authorities behind its legs.
Side = Literal["device", "cloud"]

BUS: Final = "bus"
DEAD_LETTERS: Final = dead_letter_topic(BUS)
#: Who listens to the dead letters, at the broker.
LISTENER: Final = UUri("cloud", 0x30, 1, 0)

#: Each side has this many entities that send, one message after the other.
SOURCES: Final = 4
_FIRST_SOURCE, _SINK, _FORBIDDEN, _SPOOFER = 0x10, 0x20, 0x21, 0x66
_TOPIC: Final = 0x8001
_TTL_MS: Final = 600_000


class Fate(Enum):
    """What becomes of a message: it arrives, or there is a dead letter with this code."""

    ARRIVES = UCode.OK
    EXPIRED = UCode.DEADLINE_EXCEEDED
    SPOOFED = UCode.UNAUTHENTICATED
    FORBIDDEN = UCode.PERMISSION_DENIED


_UNUSUAL: Final = {7: Fate.EXPIRED, 22: Fate.SPOOFED, 37: Fate.FORBIDDEN}


def fate(number: int) -> Fate:
    """Tell what is to become of a message."""
    return _UNUSUAL.get(number % 50, Fate.ARRIVES)


def other(side: Side) -> Side:
    return "cloud" if side == "device" else "device"


def made(number: int, side: Side, size: int = 64) -> UMessage:
    """Make the message of this number that a side sends to the other."""
    source = UUri(side, _FIRST_SOURCE + number % SOURCES, 1, _TOPIC)
    sink = UUri(other(side), _SINK, 1, 0)
    payload = b"%d " % number + bytes(size)
    wanted = fate(number)
    if wanted is Fate.EXPIRED:
        # The broker counts from when it gets it, the dispatcher from when it was made.
        id = UUID7.new(time.time_ns() // 1_000_000 - 2 * _TTL_MS)
        return notification(source, sink, payload, ttl=_TTL_MS, id=id)
    if wanted is Fate.SPOOFED:
        source = UUri(other(side), _SPOOFER, 1, _TOPIC)
    elif wanted is Fate.FORBIDDEN:
        sink = UUri(other(side), _FORBIDDEN, 1, 0)
    return notification(source, sink, payload)


def number_of(message: UMessage | None) -> int:
    """Return the number of a message."""
    assert message is not None
    return int((message.payload or b"").split(b" ", 1)[0])


def access() -> Access:
    """Allow both sides to notify one entity of the other."""
    sides: tuple[Side, Side] = "device", "cloud"
    return Access(
        Rule(
            allow="notify",
            source=UUri.ANY.with_authority(side),
            sink=UUri(other(side), _SINK, 1, 0),
        )
        for side in sides
    )
