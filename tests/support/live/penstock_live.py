"""A stream that cannot be read again: `live://host:port` reads datagrams from a real socket.

A package of its own, as anybody's endpoint is: the folder that it is in goes on the path. Each
datagram begins with the sender's number in four bytes, so that what is missing is known.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from penstock.core.endpoints import Endpoint
from penstock.core.errors import PositionError
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics

if TYPE_CHECKING:
    from penstock.core.position import Position, PositionLike
    from penstock.core.url import URL

__all__ = ["LiveEndpoint"]


class LiveEndpoint(Endpoint):
    def open_reader(self, url: URL, start: Position) -> Reader:  # noqa: ARG002
        return _LiveReader(url)


class _LiveReader(Reader):
    def __init__(self, url: URL) -> None:
        super().__init__(url.text)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((url.host or "127.0.0.1", url.port or 0))
        self._socket.setblocking(False)
        self._next = self._count = 0
        self._losses = LossLedger()

    def _take(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        while len(messages) < limit:
            try:
                datagram = self._socket.recv(65536)
            except BlockingIOError:
                break
            number, now = int.from_bytes(datagram[:4], "big"), time.time_ns()
            if number > self._next:
                self._losses.add(Loss(self._next, number - 1, DropReason.OVERRUN))
            self._next = number + 1
            if datagram[4:] == b"break":
                raise ConnectionResetError("the sender broke it")
            messages.append(Message(number, now, now, 0, 0, None, None, datagram[4:]))
        self._count += len(messages)
        return messages

    def seek(self, position: PositionLike) -> None:
        raise PositionError(f"{self.url} has no positions, such as {position}")

    def statistics(self) -> ReaderStatistics:
        lost = self._losses.total
        return ReaderStatistics(self._count, 0, lost, 0, 0, self._next, 0, self._losses.ranges())

    def close(self) -> None:
        self._socket.close()
