"""How are publishes of a topic read as a stream?"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.core.capabilities import Redelivering
from penstock.core.errors import Closed, ConnectionLost, PositionError
from penstock.core.interfaces import Concluding, Reader
from penstock.core.message import Message
from penstock.core.pending import Pending
from penstock.core.position import Position
from penstock.core.statistics import ReaderStatistics
from penstock.protocols.uprotocol.codes import UCode, UMessageType
from penstock.protocols.uprotocol.message import UMessage, is_expired

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.position import PositionLike
    from penstock.protocols.uprotocol.endpoint import TopicOptions
    from penstock.protocols.uprotocol.transports.interface import Leg

__all__ = ["READER_NAME", "HandOver", "TopicReader", "await_connection"]

log = logging.getLogger(__name__)

#: The default authority of a reader.
READER_NAME = "penstock"
_BROKER_HINT: Final = (
    "is an MQTT 5 broker listening there? `mosquitto -p PORT` starts one; wait=1m waits longer"
)
_TLS_HINT: Final = (
    "ca=FILE names the certificate that the broker's is signed by; a broker without TLS is "
    "connected to without tls=true"
)
_ALLOWED_HINT: Final = (
    "give username= and password_file=, or certificate= and key=, that it knows, or ask whoever "
    "runs the broker to allow it"
)
_HINTS: Final = {
    UCode.UNAUTHENTICATED: _ALLOWED_HINT,
    UCode.PERMISSION_DENIED: _ALLOWED_HINT,
}


class HandOver:
    """Passes messages from the thread of a leg to the thread that reads."""

    def __init__(self) -> None:
        #: The reader takes the lock alone: a signal between two calls of a condition would keep it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: Pending[bytes | UMessage] = Pending()
        self._brought = self._taken = self._done = 0
        #: Messages brought and not acknowledged when it was closed: the leg keeps them, too.
        self.refused = 0
        self._is_closed = False

    def ingest(self, messages: Sequence[bytes | UMessage]) -> None:
        """Pass messages on; return when all are acknowledged.

        :raises Closed: the reader was closed.
        """
        with self._changed:
            self._waiting.extend(messages)
            self._brought += len(messages)
            until = self._brought
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= until or self._is_closed)
            if self._done < until:
                self.refused += len(messages)
                raise Closed("the reader was closed before it was done")

    def first(self, limit: int, timeout: float) -> list[bytes | UMessage]:
        """Return the available messages, which stay until `take`; wait for the first."""
        with self._lock:
            if timeout:
                self._changed.wait_for(lambda: len(self._waiting), timeout)
            return self._waiting.first(limit)

    def take(self, count: int) -> None:
        """Take the first `count` messages; nothing interrupts this half-way."""
        self._waiting.drop(count)
        self._taken += count

    def acknowledge(self) -> None:
        """Acknowledge all messages taken."""
        with self._lock:
            if self._done != self._taken:
                # First: if a signal comes in between, the next call notifies again.
                self._changed.notify_all()
                self._done = self._taken

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def await_connection(url: str, leg: Leg, wait: float) -> None:
    """Wait until the leg is connected.

    :raises ConnectionLost: it is not connected in time.
    """
    status = leg.await_connection(wait)
    if status is not None:
        leg.close()
        hint = _HINTS.get(status.code, _BROKER_HINT)
        if "certificate" in status.message or "TLS" in status.message:
            hint = _TLS_HINT
        raise ConnectionLost(url, status.message, hint=hint)


class TopicReader(Concluding, Reader, Redelivering):
    """Reads publishes of a topic. `type` is the kind of message, 1: publish.

    The next call acknowledges the messages of the last one to the transport.
    """

    cannot_carry: ClassVar[Mapping[str, str]] = {"stream": "topics have addresses, not numbers"}

    def __init__(self, url: str, leg: Leg, options: TopicOptions) -> None:
        super().__init__(url)
        self._options = options
        self._leg = leg
        self._pattern = options.topic
        self._handed = HandOver()
        self._is_catching_up = True
        self._is_closed = False
        self._taken: list[Message] = []
        self._again: list[Message] = []
        self._next_seq = 0
        self._links_lost = leg.links_lost
        self._messages = self._bytes = self._filtered = 0
        try:
            d2d = getattr(options, "topics", "e2e") == "d2d"
            authority = options.authority or READER_NAME
            leg.start(self._handed.ingest, [authority] if d2d else ())
            await_connection(url, leg, options.wait)
            leg.listen(self._pattern)
            await_connection(url, leg, options.wait)  # it may not be allowed to
        except BaseException:
            leg.close()
            raise

    def _take(self, limit: int) -> list[Message]:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")
        self.acknowledge()
        if not self._again:
            return self._converted(limit)
        found, rest = self._again[:limit], self._again[limit:]
        count, size = len(found), _size(found)
        # No call from here on: whoever is interrupted before gets them at the next read.
        self._again = rest
        self._taken = found
        self._messages += count
        self._bytes += size
        return found

    def _note_lost_links(self) -> None:
        """Log that messages may be lost; some transports cannot tell which."""
        lost = self._leg.links_lost
        if lost != self._links_lost:
            self._links_lost = lost
            log.warning("%s lost a link: what was on its way by it may not come", self.url)

    def _converted(self, limit: int) -> list[Message]:
        self._note_lost_links()
        deadline = time.monotonic() + (self._options.quiet if self._is_catching_up else 0)
        while True:
            came = self._handed.first(limit, max(0.0, deadline - time.monotonic()))
            if not came:
                self._is_catching_up = False
                return []
            now = time.time_ns()
            found: list[Message] = []
            for each in came:
                message = self._message(each, now, self._next_seq + len(found))
                if message is not None:
                    found.append(message)
            count, size, filtered = len(found), _size(found), len(came) - len(found)
            self._handed.take(len(came))
            # No call from here on, as in `_take`.
            self._filtered += filtered
            self._next_seq += count
            if found:
                self._taken = found
                self._messages += count
                self._bytes += size
                return found

    def _message(self, message: bytes | UMessage, now: int, seq: int) -> Message | None:
        if isinstance(message, bytes):
            message = UMessage.from_bytes(message)
        attributes = message.attributes
        if (
            attributes.type != UMessageType.PUBLISH
            or attributes.source is None
            or attributes.id is None
            or not self._pattern.matches(attributes.source)
            or is_expired(attributes, now // 1_000_000)
        ):
            return None
        return Message(
            seq=seq,
            time_ns=attributes.id.time_ms * 1_000_000,
            created_ns=now,
            type=int(attributes.type),
            subtype=0,
            stream=None,
            attributes=attributes.to_bytes(),
            payload=message.payload or b"",
        )

    @property
    def redelivers(self) -> bool:
        return self._leg.is_lasting

    def acknowledge(self) -> None:
        # Messages to be read again, and all after them, are not acknowledged yet.
        if not self._again:
            self._handed.acknowledge()
        self._taken = []

    def seek(self, position: PositionLike) -> None:
        place = Position.of(position)
        there = [it for it in self._taken if it.seq >= place.value]
        if place.anchor != "seq" or not there or there[0].seq != place.value:
            raise PositionError(f"{self.url} can go back to what was read last only")
        self._untake(there)

    def _untake(self, messages: list[Message]) -> None:
        count, size = len(messages), _size(messages)
        again, taken = messages + self._again, self._taken[: len(self._taken) - count]
        self._messages -= count
        self._bytes -= size
        self._again = again
        self._taken = taken

    def statistics(self) -> ReaderStatistics:
        came = self._leg.statistics()
        # Known when it is closed: the leg received them, and passes them on no more.
        left_in_leg = max(0, came.get("abandoned", 0) - self._handed.refused)
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            # Sent without acknowledgement, and dropped for lack of room.
            lost=came.get("lost", 0),
            filtered=self._filtered + came.get("undecodable", 0) + came.get("mismatched", 0),
            restarts=0,
            next_seq=self._next_seq - len(self._again),
            backlog=self._handed.waiting + len(self._again) + left_in_leg,
            losses=(),
        )

    def _close(self, *, finished: bool) -> None:
        if self._is_closed:
            return
        if finished:
            self.acknowledge()
        self._is_closed = True
        self._handed.close()
        self._leg.close()


def _size(messages: Sequence[Message]) -> int:
    return sum([message.size for message in messages])
