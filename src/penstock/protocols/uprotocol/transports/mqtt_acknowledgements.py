"""In which order is a broker told of what was taken? (MQTT 5, 4.6)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.protocols.uprotocol.transports.mqtt_subscriptions import Arrival

__all__ = ["Acknowledgements"]


class Acknowledgements:
    """Packets are acknowledged in the order in which they came. Safe to share between threads.

    A packet that nobody takes holds back those behind it, but not for good: when so many wait for
    it, those that are taken are acknowledged before it. The broker would else send nothing more.

    :param acknowledge: called in order.
    :param most: packets that one may hold back.
    """

    def __init__(self, acknowledge: Callable[[Sequence[Arrival]], None], most: int) -> None:
        self._acknowledge = acknowledge
        self._most = most
        self._lock = threading.Lock()
        self._connection = -1
        #: By their numbers, in order, and whether each is taken.
        self._open: dict[int, bool] = {}
        self._arrivals: dict[int, Arrival] = {}

    def came(self, arrival: Arrival) -> None:
        """Enter a packet."""
        packet, connection = arrival
        if not packet.qos:
            return
        with self._lock:
            if connection != self._connection:  # whatever came by another one comes again
                self._open.clear()
                self._arrivals.clear()
                self._connection = connection
            self._open.pop(packet.mid, None)
            self._open[packet.mid] = False
            self._arrivals[packet.mid] = arrival

    def taken(self, arrivals: Collection[Arrival]) -> None:
        """Acknowledge packets, or note that they may be."""
        with self._lock:
            for packet, connection in arrivals:
                if connection == self._connection and packet.mid in self._open:
                    self._open[packet.mid] = True
            done = []
            is_crowded = len(self._open) > self._most
            for number, is_taken in self._open.items():
                if is_taken:
                    done.append(number)
                elif not is_crowded:
                    break
            if done:
                for number in done:
                    del self._open[number]
                # With the lock, so that nobody is quicker.
                self._acknowledge([self._arrivals.pop(number) for number in done])
