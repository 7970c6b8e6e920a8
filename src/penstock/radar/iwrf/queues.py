"""How do pulses lie in LROSE's queues? `iwrf+fmq:PATH` and `iwrf+fmqp://host:port/path`.

Each message of the queue is a DsMessage, with a part for each packet. A message of the stream is
all packets of one of them, under the queue's own number. LROSE's readers wait for the metadata, so
a writer repeats it from time to time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from pydantic import Field

from penstock.core.capabilities import Worded
from penstock.core.derived_reader import DerivedReader
from penstock.core.errors import Malformed, MessageTooLarge
from penstock.core.options import Duration, Options
from penstock.core.overflow import DropReason
from penstock.protocols.lrose.ds_message import DsMessage, Part
from penstock.radar.iwrf.messages import (
    CANNOT_CARRY,
    PacketWriter,
    Reminder,
    packets_of,
    type_of,
    words_of,
)
from penstock.radar.iwrf.packets import ID_BASE, Kind, is_known_id, read, time_ns_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.message import Message
    from penstock.core.statistics import WriterStatistics

__all__ = ["IwrfQueueReader", "IwrfQueueWriter", "QueueOptions"]

log = logging.getLogger(__name__)

#: The category of messages in queues.
_PLAIN: Final = 0
#: Bytes of one message of the queue, more or less.
_LARGEST: Final = 4 << 20


class QueueOptions(Options):
    """Options of `iwrf+fmq:` and `iwrf+fmqp:` beside those of the queue."""

    #: Writer: packets in a message of the queue, at most.
    parts: Annotated[int, Field(ge=1, le=100_000)] = 200
    #: Writer: say the metadata again after so long; 0: never.
    repeat: Annotated[Duration, Field(ge=0)] = 1.0


class IwrfQueueReader(DerivedReader, Worded):
    """Reads the packets in an LROSE queue, a message of it at a time."""

    cannot_carry: ClassVar[Mapping[str, str]] = CANNOT_CARRY

    def __init__(self, url: str, queue: Reader, wanted: int | None = None) -> None:
        """Take over the reader of the queue.

        :param wanted: the type of the messages to deliver
        """
        super().__init__(url, queue)
        self._wanted = wanted

    def _made_of(self, message: Message) -> Message | None:
        try:
            made = _packets_in(message)
        except Malformed as fault:
            log.warning("%s: message %d: %s", self.url, message.seq, fault)
            self._lose(message, DropReason.DAMAGED)
            return None
        if self._wanted is not None and made.type != self._wanted:
            self._filtered += 1
            return None
        return made

    def in_words(self, message: Message) -> str:
        return words_of(message.payload)


def _packets_in(message: Message) -> Message:
    """Return a message of packets, of a message of a queue.

    :raises Malformed: the message is no DsMessage, or a part is no packet.
    """
    parts = DsMessage.from_bytes(message.payload).parts
    if not parts:
        raise Malformed("a message of pulses", "nParts", "at least 1", 0)
    for part in parts:
        if not is_known_id(part.type):
            raise Malformed("a message of pulses", "dataType", f"above {ID_BASE:#x}", part.type)
    first = read(parts[0].data)
    return message._replace(
        payload=b"".join([part.data for part in parts]),
        type=type_of(part.type - ID_BASE for part in parts),
        subtype=0,
        time_ns=int(time_ns_of(first)[0]),
    )


class IwrfQueueWriter(PacketWriter):
    """Writes packets into an LROSE queue; they are stored when a call returns."""

    def __init__(self, url: str, queue: Writer, options: QueueOptions) -> None:
        super().__init__(url)
        self._queue = queue
        self._most = options.parts
        self._reminder = Reminder(options.repeat)

    def _write(self, payloads: list[bytes]) -> None:
        self._check_open()
        message: list[tuple[int, bytes]] = []
        pending: list[bytes] = []
        size = 0
        for payload in payloads:
            try:
                packets = packets_of(payload)
            except Malformed:
                self._send(message, pending)
                self._refused += 1
                raise
            length = len(payload)
            if message and (len(message) + len(packets) > self._most or size + length > _LARGEST):
                self._send(message, pending)
                message, pending, size = [], [], 0
            packets = self._reminded(packets)
            message += packets
            pending.append(payload)
            size += length
        self._send(message, pending)

    def _reminded(self, packets: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Return packets with metadata before the first pulse, if a repetition is due."""
        told: list[tuple[int, bytes]] = []
        for kind, packet in packets:
            if kind == Kind.PULSE:
                time_ns = int(time_ns_of(read(packet))[0])
                if self._reminder.is_due(time_ns):
                    told += self._reminder.packets(time_ns, sync=False)
            self._reminder.note(kind, packet)
            told.append((kind, packet))
        return told

    def _send(self, packets: list[tuple[int, bytes]], payloads: list[bytes]) -> None:
        if not packets:
            return
        parts = tuple(Part(ID_BASE + kind, packet) for kind, packet in packets)
        data = DsMessage(0, category=_PLAIN, parts=parts).to_bytes()
        try:
            self._last_seq = self._queue.write(data)
        except MessageTooLarge:
            self._refused += len(payloads)
            raise
        self._messages += len(payloads)
        self._bytes += sum(map(len, payloads))

    def flush(self) -> None:
        self._queue.flush()

    @property
    def syncs(self) -> bool:
        return self._queue.syncs

    def statistics(self) -> WriterStatistics:
        return super().statistics()._replace(waited=self._queue.statistics().waited)

    def close(self) -> None:
        self._is_closed = True
        self._queue.close()
