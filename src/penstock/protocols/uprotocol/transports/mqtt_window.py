"""Which packets are under way to a broker, and what did it say to each?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.mqtt_wire import code_of_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.uprotocol.transports.mqtt_packets import Packet

__all__ = ["REFUSED", "Flight", "Window"]

_NOBODY_LISTENS: Final = 0x10
#: How what a broker says to a packet begins, unlike what is found out before it is sent.
REFUSED: Final = "the broker refuses: reason"
#: Topics that are remembered as heard.
_MOST_HEARD: Final = 4096


class Flight:
    """Packets that are published by one call."""

    def __init__(self, packets: Sequence[Packet]) -> None:
        self.packets = packets
        #: The broker's answer to each, None to one that it said nothing of.
        self.answers: list[UStatus | None] = [None] * len(packets)
        #: How many are under way.
        self.open = 0
        #: Whether no more are to be sent.
        self.has_failed = False
        #: Whether the broker was waited for in vain.
        self.is_late = False

    def lose(self) -> None:
        """Count one that will not be answered."""
        self.has_failed = True
        self.open -= 1

    def answered(self, at: int, reason: int) -> None:
        """Enter the broker's answer to one."""
        if reason == _NOBODY_LISTENS and self.packets[at].must_be_heard:
            answer = UStatus(UCode.UNAVAILABLE, "nobody subscribes to it")
        else:
            code = code_of_reason(reason)
            refused = code != UCode.OK
            answer = UStatus(code, f"{REFUSED} {reason:#04x}" if refused else "")
        self.answers[at] = answer
        self.has_failed |= not answer.is_ok
        self.open -= 1


class Window:
    """All packets that are under way, up to `size`. Whoever calls it holds the lock of the link.

    :param wake: called when those who wait should look again.
    """

    def __init__(self, size: int, wake: Callable[[], None]) -> None:
        self.size = size
        self._wake = wake
        self._open = 0
        self._sent: dict[int, tuple[Flight, int]] = {}
        self._early: dict[int, int] = {}
        self._heard: set[str] = set()

    def goes_alone(self, packet: Packet) -> bool:
        """Tell whether nothing may follow a packet until it is answered.

        It has to be heard, and of its topic it is not known whether anybody listens. Somebody may
        begin to just behind it, and would have those that follow, but not this one.
        """
        return packet.must_be_heard and packet.topic not in self._heard

    @property
    def has_room(self) -> bool:
        return self._open < self.size

    def enter(self, flight: Flight) -> None:
        """Count one that is about to be sent."""
        self._open += 1
        flight.open += 1

    def leave(self, flight: Flight) -> None:
        """Count one that could not be sent after all."""
        self._open -= 1
        flight.lose()

    def sent(self, mid: int, flight: Flight, at: int) -> None:
        """Note under which number one was sent."""
        self._sent[mid] = flight, at
        early = self._early.pop(mid, None)
        if early is not None:
            self.answered(mid, early)

    def answered(self, mid: int, reason: int) -> None:
        """Take the broker's answer, which may be quicker than the thread that sends."""
        found = self._sent.pop(mid, None)
        if found is None:
            self._early[mid] = reason
            return
        flight, at = found
        flight.answered(at, reason)
        self._open -= 1
        if flight.has_failed:
            self._heard.clear()
        elif flight.packets[at].must_be_heard:
            if len(self._heard) >= _MOST_HEARD:
                self._heard.clear()
            self._heard.add(flight.packets[at].topic)
        # Wake few: who waits for room has a good part of the window then.
        if not flight.open or self._open <= self.size // 2 or flight.has_failed:
            self._wake()

    def lose_all(self) -> None:
        """Give up on all that are under way."""
        for flight, _ in self._sent.values():
            flight.lose()
        self._sent.clear()
        self._early.clear()
        self._heard.clear()
        self._open = 0
