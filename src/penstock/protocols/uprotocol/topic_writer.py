"""How is a stream published to a topic?"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from penstock.core.batch import messages_from_batch
from penstock.core.errors import ConnectionLost, MessageTooLarge, Unacknowledged
from penstock.core.interfaces import BookedWriter
from penstock.protocols.uprotocol.codes import UCode, UStatus, UStatusError
from penstock.protocols.uprotocol.message import UAttributes, UMessage, publish
from penstock.protocols.uprotocol.mqtt_wire import REFUSED
from penstock.protocols.uprotocol.topic_reader import READER_NAME
from penstock.protocols.uprotocol.transports.interface import HandedOver
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.stream_id import StreamId
    from penstock.protocols.uprotocol.endpoint import TopicOptions
    from penstock.protocols.uprotocol.transports.interface import Leg

__all__ = ["TopicWriter"]

log = logging.getLogger(__name__)

#: Messages per call of the transport.
_BATCH: Final = 1024
_HINTS: Final = {
    UCode.PERMISSION_DENIED: "ask whoever runs the broker to allow publishing to this topic",
    UCode.RESOURCE_EXHAUSTED: "the broker has no room now: try again later, or raise its limits",
}
#: Retry interval while no receiver is reachable (seconds).
_LOOK: Final = 0.02


class _Offered(NamedTuple):
    payload: bytes
    time_ns: int | None = None
    stream: StreamId | None = None
    attributes: bytes | None = None


class TopicWriter(BookedWriter):
    """Publishes to a topic. A write returns when the transport has accepted the message.

    A transport without acknowledgements may still lose it with the link. So a message is kept for
    `Leg.settle_after` seconds, and published again if a link is lost meanwhile; `flush` and `close`
    wait until no message is kept.
    """

    cannot_carry: ClassVar[Mapping[str, str]] = {
        "type": "left out: a topic has one kind of messages",
        "subtype": "left out: a message has none",
        "stream": "left out: topics have addresses",
        "attributes": "left out, unless replay=true sends them as they were recorded",
    }

    def __init__(self, url: str, leg: Leg, options: TopicOptions) -> None:
        super().__init__(url)
        self._leg = leg
        self._options = options
        sink = getattr(options, "sink", None)
        self._address = UUri(sink or options.topic.authority_name or READER_NAME)
        self._on_its_way: HandedOver[UMessage] = HandedOver(leg)
        #: Messages in flight when a link was lost, the oldest first.
        self._again: list[UMessage] = []
        self._has_given_up = False

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        del type, subtype, created_ns
        self._write([_Offered(bytes(payload), time_ns, stream, attributes)])
        return self._messages - 1

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        del type, subtype
        return self._write([_Offered(bytes(payload)) for payload in payloads])

    def write_batch(self, batch: Batch) -> int | None:
        return self._write(
            [
                _Offered(it.payload, it.time_ns, it.stream, it.attributes)
                for it in messages_from_batch(batch)
            ]
        )

    def _write(self, offered: Sequence[_Offered]) -> int | None:
        self._check_open()
        before = self._messages
        try:
            self._publish([self._made(it) for it in offered], self._options.wait)
        finally:
            done = self._messages - before
            self._refused += len(offered) - done
            for it in offered[:done]:
                self._bytes += len(it.payload)
                self._headers_dropped += it.stream is not None
                self._headers_dropped += it.attributes is not None and not self._options.replay
            self._last_seq = self._messages - 1 if self._messages else None
        return self._last_seq

    def _made(self, offered: _Offered) -> UMessage:
        options, time_ns = self._options, offered.time_ns
        if options.replay and offered.attributes is not None:
            return UMessage.from_parts(UAttributes.from_bytes(offered.attributes), offered.payload)
        # With a ttl the id gets the time of publishing, else it keeps the message's own time.
        keeps_time = time_ns is not None and time_ns >= 0 and options.ttl is None
        return publish(
            options.topic,
            offered.payload,
            payload_format=options.format,
            priority=options.priority,
            ttl=None if options.ttl is None else max(1, round(options.ttl * 1000)),
            id=UUID7.new((time_ns or 0) // 1_000_000) if keeps_time else None,
        )

    # --- publishing -------------------------------------------------------------------------------

    def _publish(self, messages: Sequence[UMessage], patience: float) -> None:
        """Publish messages, after those to be published again.

        :raises Unacknowledged: the transport accepted nothing within the timeout.
        """
        done = 0
        deadline = time.monotonic() + patience
        while True:
            self._settle()
            is_again = bool(self._again)
            some = self._again[:_BATCH] if is_again else messages[done : done + _BATCH]
            if not some:
                break
            taken, status = self._hand_over(some)
            if is_again:
                del self._again[:taken]
            else:
                self._messages += taken
                done += taken
            if taken:
                deadline = time.monotonic() + patience
            if status is None:
                continue
            if status.code != UCode.UNAVAILABLE or time.monotonic() >= deadline:
                self._has_given_up = True
                # Messages of earlier calls still in flight are in doubt, too.
                tried = 0 if is_again else len(messages) - done
                raise self._error(status, some[taken], done, tried + len(self._again))
            time.sleep(_LOOK)
        self._has_given_up = False

    def _hand_over(self, messages: Sequence[UMessage]) -> tuple[int, UStatus | None]:
        """Pass messages to the transport; return how many it accepted, and the first error."""
        links_lost = self._leg.links_lost
        found = self._leg.deliver(self._address, messages)
        status = next((status for status in found if status is not None), None)
        taken = len(found) if status is None else found.index(status)
        if taken and self._leg.settle_after:
            size = sum(len(it.payload or b"") for it in messages[:taken])
            self._on_its_way.add(messages[:taken], links_lost, size)
        return taken, status

    def _settle(self) -> None:
        """Settle arrived messages, and keep lost ones; wait while too many are in flight."""
        while True:
            _, lost = self._on_its_way.take()
            if lost:
                self._again += lost
                log.warning(
                    "%s lost its link: %s messages are published again", self.url, f"{len(lost):,}"
                )
            if not self._on_its_way.is_full:
                return
            time.sleep(_LOOK)

    def _error(self, status: UStatus, failed: UMessage, done: int, in_doubt: int) -> Exception:
        if status.code == UCode.UNAVAILABLE:
            return Unacknowledged(
                self.url,
                status.message,
                acknowledged=done,
                in_doubt=in_doubt,
                hint="see that the other side is there; what is in doubt may have to be sent again",
            )
        # Only our own limit means too large: a broker without room may have room later.
        if status.code == UCode.RESOURCE_EXHAUSTED and not status.message.startswith(REFUSED):
            limit = getattr(self._options, "largest", 0)
            return MessageTooLarge(len(failed.payload or b""), limit, hint=status.message)
        return UStatusError(status.code, status.message, hint=_HINTS.get(status.code))

    # --- ending -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until no written message can be lost with the link.

        :raises Unacknowledged: a link was lost, and messages could not be published again.
        """
        self._check_open()
        self._flush(self._options.wait)

    def _flush(self, patience: float) -> None:
        while True:
            self._publish((), patience)
            due = self._on_its_way.next_due
            if due is None:
                return
            time.sleep(min(_LOOK, max(0.0, due - time.monotonic())))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._flush(0 if self._has_given_up else self._options.wait)
        finally:
            self._leg.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ConnectionLost as lost:
            if error is None:
                raise
            log.warning("%s", lost)  # and not instead of what made it end
