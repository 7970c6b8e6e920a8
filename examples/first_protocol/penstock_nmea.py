"""How are the sentences of a GPS receiver read? `nmea://host:port`, NMEA 0183 over TCP."""

from __future__ import annotations

import socket
import time
from functools import reduce
from operator import xor

from penstock import Endpoint, Message, Reader
from penstock.core.errors import ConnectionLost, PositionError
from penstock.core.overflow import DropReason
from penstock.core.position import Position, PositionLike
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics
from penstock.core.url import URL

_PORT = 10110
_LONGEST = 1024  # by the standard 82; some receivers send more


class NmeaEndpoint(Endpoint):
    """Says what the scheme can do."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        del start  # what was sent before is gone
        return NmeaReader(url.text, url.host or "127.0.0.1", url.port or _PORT)


class NmeaReader(Reader):
    """Receives sentences. One whose checksum is wrong has a number, too, and counts as lost."""

    def __init__(self, url: str, host: str, port: int) -> None:
        super().__init__(url)
        try:
            self._socket = socket.create_connection((host, port), timeout=5.0)
        except OSError as error:
            raise ConnectionLost(f"{host}:{port}", str(error), hint="is it running?") from error
        self._socket.setblocking(False)
        self._rest = b""
        self._has_ended = False
        self._next = self._messages = self._bytes = 0
        self._damaged = LossLedger()

    def _take(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        while len(messages) < limit and (sentence := self._sentence()) is not None:
            now = time.time_ns()
            if _is_whole(sentence):
                messages.append(Message(self._next, now, now, 0, 0, None, None, sentence))
            else:
                self._damaged.add(Loss(self._next, self._next, DropReason.DAMAGED))
            self._next += 1
        if not messages and self._has_ended:
            raise ConnectionLost(self.url, "it has ended the connection")
        self._messages += len(messages)
        self._bytes += sum(message.size for message in messages)
        return messages

    def _sentence(self) -> bytes | None:
        while b"\n" not in self._rest and len(self._rest) < _LONGEST and not self._has_ended:
            try:
                received = self._socket.recv(_LONGEST)
            except BlockingIOError:
                return None
            self._has_ended = not received
            self._rest += received
        if not self._rest:
            return None
        sentence, _, self._rest = self._rest.partition(b"\n")
        return sentence.rstrip(b"\r")

    def seek(self, position: PositionLike) -> None:
        if Position.of(position) not in {Position.START, Position.END}:
            raise PositionError(f"{self.url}: sentences come as they are sent")

    def statistics(self) -> ReaderStatistics:
        lost, losses = self._damaged.total, self._damaged.ranges()
        return ReaderStatistics(self._messages, self._bytes, lost, 0, 0, self._next, 0, losses)

    def close(self) -> None:
        self._socket.close()


def _is_whole(sentence: bytes) -> bool:
    """Tell whether the two digits behind the star are the XOR of what is before it."""
    text, star, digits = sentence[1:].partition(b"*")
    return bool(star) and digits.upper() == b"%02X" % reduce(xor, text, 0)
