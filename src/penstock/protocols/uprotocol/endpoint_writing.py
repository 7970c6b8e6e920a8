"""How is a stream published to a topic?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.core.batch import messages_from_batch
from penstock.core.errors import Closed, MessageTooLarge, Unacknowledged
from penstock.core.interfaces import Writer
from penstock.core.statistics import WriterStatistics
from penstock.protocols.uprotocol.attributes import UAttributes
from penstock.protocols.uprotocol.codes import UCode, UStatus, UStatusError
from penstock.protocols.uprotocol.endpoint_reading import READER_NAME
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UMessage, publish
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.stream_id import StreamId
    from penstock.protocols.uprotocol.endpoint_options import TopicOptions
    from penstock.protocols.uprotocol.transports.interface import Leg

__all__ = ["TopicWriter"]

#: Messages that are handed to the transport at once.
_BATCH: Final = 1024
#: While nobody is there, look again this often (seconds).
_LOOK: Final = 0.02


class TopicWriter(Writer):
    """Publishes to a topic. Returns when the transport has taken a message over."""

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
        self._messages = self._bytes = self._refused = self._dropped = 0
        self._is_closed = False

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
        self._drop(stream, attributes)
        self._publish([self._made(bytes(payload), time_ns, attributes)])
        return self._messages - 1

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        del type, subtype
        self._publish([self._made(bytes(payload), None, None) for payload in payloads])
        return self._messages - 1 if self._messages else None

    def write_batch(self, batch: Batch) -> int | None:
        made = []
        for message in messages_from_batch(batch):
            self._drop(message.stream, message.attributes)
            made.append(self._made(message.payload, message.time_ns, message.attributes))
        self._publish(made)
        return self._messages - 1 if self._messages else None

    def _drop(self, stream: StreamId | None, attributes: bytes | None) -> None:
        self._dropped += stream is not None
        self._dropped += attributes is not None and not self._options.replay

    def _made(self, payload: bytes, time_ns: int | None, attributes: bytes | None) -> UMessage:
        options = self._options
        if options.replay and attributes is not None:
            try:
                return UMessage.from_parts(UAttributes.from_bytes(attributes), payload)
            except InvalidMessage:
                self._refused += 1
                raise
        # With a ttl the time that counts is that of publishing, else the message keeps its own.
        keeps_time = time_ns is not None and time_ns >= 0 and options.ttl is None
        return publish(
            options.topic,
            payload,
            payload_format=options.format,
            priority=options.priority,
            ttl=None if options.ttl is None else max(1, round(options.ttl * 1000)),
            id=UUID7.new((time_ns or 0) // 1_000_000) if keeps_time else None,
        )

    def _publish(self, messages: Sequence[UMessage]) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")
        deadline = time.monotonic() + self._options.wait
        done = 0
        while done < len(messages):
            found = self._leg.deliver(self._address, messages[done : done + _BATCH])
            for status in found:
                if status is not None:
                    break
                self._messages += 1
                self._bytes += len(messages[done].payload or b"")
                done += 1
            else:
                deadline = time.monotonic() + self._options.wait
                continue
            if status.code != UCode.UNAVAILABLE or time.monotonic() >= deadline:
                self._refused += len(messages) - done
                raise self._error(status, messages, done)
            time.sleep(_LOOK)

    def _error(self, status: UStatus, messages: Sequence[UMessage], done: int) -> Exception:
        if status.code == UCode.UNAVAILABLE:
            rest = len(messages) - done
            return Unacknowledged(self.url, status.message, acknowledged=done, in_doubt=rest)
        if status.code == UCode.RESOURCE_EXHAUSTED:
            limit = getattr(self._options, "largest", 0)
            return MessageTooLarge(len(messages[done].payload or b""), limit, hint=status.message)
        return UStatusError(status.code, status.message)

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(
            messages=self._messages,
            bytes=self._bytes,
            refused=self._refused,
            headers_dropped=self._dropped,
            waited=0.0,
            last_seq=self._messages - 1 if self._messages else None,
        )

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._leg.close()
