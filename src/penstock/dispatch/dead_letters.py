"""What could not be delivered or decoded, why, and where is it kept?"""

from __future__ import annotations

import itertools
import json
import logging
import struct
import threading
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import Malformed, NotFound, PenstockError
from penstock.core.position import Position
from penstock.dispatch.outbox.state import save_notes
from penstock.protocols.uprotocol import (
    UUID7,
    DeadLetterReason,
    InvalidMessage,
    UAttributes,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UUri,
    proto,
)
from penstock.protocols.uprotocol.message import tagged
from penstock.protocols.uprotocol.validation import is_traceparent
from penstock.queue.log.consumer import open_log_reader
from penstock.queue.log.options import LogOptions
from penstock.queue.log.writer import open_log_writer
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.dispatch.outbox import Item, Outbox, Reason
    from penstock.dispatch.routes import Receiver
    from penstock.queue.log.writer import LogWriter
    from penstock.queue.options import Sync

__all__ = [
    "DLT_RESOURCE",
    "QUARANTINE",
    "STREAMER",
    "DeadLetters",
    "Failure",
    "Letter",
    "Quarantine",
    "Stored",
    "Stray",
    "dead_letter_topic",
    "letter_id",
    "strays",
]

log = logging.getLogger(__name__)

#: The service id and version of a streamer, and its topic of dead letters.
STREAMER: Final = 4
STREAMER_VERSION: Final = 1
DLT_RESOURCE: Final = 0x8001

_LONGEST_TEXT = 1024
_FIELDS: Final = proto.DeadLetter.DESCRIPTOR.fields_by_name
_FULL_FIELD, _HEADER_FIELD = (int(_FIELDS[name].number) for name in ("full", "header"))
_VERSION: Final = 0x7000
_VARIANT: Final = 0b10 << 62


class Stored(NamedTuple):
    """A message in an outbox, to be settled with a reason."""

    outbox: Outbox
    item: Item
    reason: Reason


class Failure(NamedTuple):
    """A message that cannot be delivered, and why."""

    raw: bytes
    code: UCode
    reason: DeadLetterReason
    text: str
    #: The leg it came by, if known.
    came_by: str = ""
    #: The intended receiver, if known.
    receiver: Receiver | None = None
    #: Its place in an outbox; None if it was not stored.
    stored: Stored | None = None
    attempts: int = 0
    first_failure_ms: int = 0
    header_only: bool = False
    #: The request that it is the error response to, if it was made here.
    request: UAttributes | None = None


def dead_letter_topic(authority: str) -> UUri:
    """Return the topic of the dead letters of a dispatcher."""
    return UUri(authority, STREAMER, STREAMER_VERSION, DLT_RESOURCE)


def letter_id(receiver: Receiver, stored_ms: int, seq: int) -> UUID7:
    """Return the id of the letter about a stored message, which is deterministic.

    After a crash between writing the letter and settling the message, the id shows that the letter
    exists.
    """
    # Earlier releases used the class and numbers per class, and so other ids.
    text = f"{receiver} {seq} {stored_ms}".encode()
    chance = int.from_bytes(blake2b(text, digest_size=10, person=b"dead-letter").digest())
    return UUID7.unchecked(
        (stored_ms & (1 << 48) - 1) << 16 | _VERSION | chance >> 68,
        _VARIANT | chance & ((1 << 62) - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that a receiver did not get, and why."""

    id: UUID7
    code: UCode
    reason: DeadLetterReason
    #: The reason in words, at most 1,024 characters.
    message: str = ""
    #: The intended receiver; None: unknown.
    receiver: UUri | None = None
    #: The leg to the receiver.
    leg: str = ""
    #: Times of the first failure and of giving up, milliseconds since 1970 UTC.
    first_failure_ms: int = 0
    dead_ms: int = 0
    attempts: int = 0
    dispatcher: UUri
    header: UAttributes
    #: The message without its token; None if only the header is kept.
    original: UMessage | None = None
    #: Its number in the log of dead letters; -1 if it is not there.
    number: int = -1
    #: Cache of its protobuf form.
    record: bytes = field(default=b"", init=False, compare=False, repr=False)

    def to_bytes(self) -> bytes:
        """Write the protobuf form."""
        if not self.record:
            # Cached: it is written to the log, and sent to each subscriber.
            object.__setattr__(self, "record", self._to_bytes())
        return self.record

    def _to_bytes(self) -> bytes:
        record = proto.DeadLetter(
            code=int(self.code),
            reason=int(self.reason),
            message=self.message[:_LONGEST_TEXT],
            leg=self.leg,
            first_failure_ms=self.first_failure_ms,
            dead_ms=self.dead_ms,
            attempts=self.attempts,
            dispatcher=self.dispatcher.to_proto(),
            id=self.id.to_proto(),
        )
        if self.receiver is not None:
            record.receiver.CopyFrom(self.receiver.to_proto())
        data: bytes = record.SerializeToString()
        # Append the bytes of the message, to save decoding and encoding it.
        if self.original is None:
            number, part = _HEADER_FIELD, self.header.to_bytes()
        else:
            number, part = _FULL_FIELD, self.original.to_bytes()
        return b"".join((data, tagged(number, len(part)), part))

    @classmethod
    def from_bytes(cls, data: bytes, number: int = -1) -> Letter:
        """Read the protobuf form.

        :raises Malformed: it is not a dead letter.
        """
        try:
            record: Any = proto.DeadLetter.FromString(data)
            original = None
            if record.HasField("full"):
                original = UMessage.from_bytes(record.full.SerializeToString())
                header = original.attributes
            else:
                header = UAttributes.from_bytes(record.header.SerializeToString())
        except (proto.DecodeError, InvalidMessage) as error:
            raise Malformed("dead letter", "the record", "a DeadLetter", error) from error
        receiver = record.receiver if record.HasField("receiver") else None
        return cls(
            id=UUID7.unchecked(record.id.msb, record.id.lsb),
            code=UCode(record.code),
            reason=DeadLetterReason(record.reason),
            message=record.message,
            receiver=None if receiver is None else UUri.from_proto_unchecked(receiver),
            leg=record.leg,
            first_failure_ms=record.first_failure_ms,
            dead_ms=record.dead_ms,
            attempts=record.attempts,
            dispatcher=UUri.from_proto_unchecked(record.dispatcher),
            header=header,
            original=original,
            number=number,
        )

    def without_payload(self) -> Letter:
        """Return a copy with the header only."""
        return replace(self, original=None)

    def without_texts(self) -> Letter:
        """Return a copy with those fields of the header only whose size has a limit."""
        header = self.header.replace(source=None, sink=None, token=None, traceparent=None)
        return replace(self, header=header, original=None)

    def without_token(self) -> Letter:
        """Return a copy without the sender's token."""
        if self.header.token is None:
            return self
        header = self.header.replace(token=None)
        original = None if self.original is None else self.original.replace(attributes=header)
        return replace(self, header=header, original=original)

    def to_message(self, topic: UUri) -> UMessage:
        """Return the publish for subscribers of dead letters."""
        traceparent = self.header.traceparent
        attributes = UAttributes(
            id=self.id,
            type=UMessageType.PUBLISH,
            source=topic,
            priority=UPriority.CS2,
            traceparent=traceparent if traceparent and is_traceparent(traceparent) else None,
            payload_format=UPayloadFormat.PROTOBUF,
        )
        return UMessage(attributes, self.to_bytes())


_GONE: Final = "gone"
_AT_ONCE: Final = 256
#: Number of recent ids remembered. A crash leaves few letters written but not settled.
_KNOWN: Final = 10_000
_SMALLEST_SEGMENT: Final = 64 << 10
_LARGEST_SEGMENT: Final = 16 << 20
_SEGMENTS: Final = 8


class DeadLetters:
    """A log of dead letters, bounded in bytes: the oldest are removed first.

    Only the dispatcher writes; others may read at the same time, with `writable=False`.
    """

    def __init__(
        self, folder: Path, retain: int = 256 << 20, *, sync: Sync = 1.0, writable: bool = True
    ) -> None:
        """Open the log; create it if `writable`.

        :raises StorageError: the operating system refuses.
        :raises NotFound: the log does not exist, and is not `writable`.
        """
        self._folder = Path(folder)
        self._url = f"log:{folder}"
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        segment = min(max(retain // _SEGMENTS, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
        #: Larger letters keep only their header, or what of it cannot be large.
        self._largest = segment // 2
        if writable:
            options = LogOptions(
                segment=segment, segment_slots=8192, retain=retain, sync=sync, damaged="skip"
            )
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._writer = open_log_writer(self._url, self._folder, options)
        elif not self._folder.exists():
            raise NotFound(f"there are no dead letters in {folder}")
        self._gone: set[int] = self._read_gone()
        self._known: dict[UUID7, None] = {}
        if writable:
            self._known = dict.fromkeys(letter.id for letter in self._read(newest=_KNOWN))

    # --- in -------------------------------------------------------------------------------------

    def knows(self, id: UUID7) -> bool:
        """Tell whether a recent letter has this id."""
        return id in self._known

    def new(self, letters: Iterable[Letter]) -> list[Letter]:
        """Return the letters not written yet, in the form in which they are kept."""
        return [self._kept(letter)[0] for letter in letters if not self.knows(letter.id)]

    def write(self, letters: Iterable[Letter]) -> list[Letter]:
        """Write the letters not written yet, without their tokens, and return them.

        :raises StorageError: the disk is full.
        """
        assert self._writer is not None
        with self._lock:
            kept = [self._kept(letter) for letter in letters if not self.knows(letter.id)]
            if kept:
                before = self._writer.statistics().messages
                try:
                    self._writer.write_many([record for _, record in kept])
                finally:  # the disk may have room for the first ones
                    written = self._writer.statistics().messages - before
                    self._known.update(dict.fromkeys(letter.id for letter, _ in kept[:written]))
                    while len(self._known) > _KNOWN:
                        del self._known[next(iter(self._known))]
            return [letter for letter, _ in kept]

    def _kept(self, letter: Letter) -> tuple[Letter, bytes]:
        """Return the form in which a letter is kept, and its bytes."""
        kept = letter.without_token()
        record = kept.to_bytes()
        if len(record) > self._largest:
            kept = kept.without_payload()
            record = kept.to_bytes()
        if len(record) > self._largest:  # of an invalid message: its leg would send it for ever
            kept = kept.without_texts()
            record = kept.to_bytes()
        return kept, record

    # --- for people -----------------------------------------------------------------------------

    def list(self, limit: int | None = None, start: int = 0) -> list[Letter]:
        """Return letters from number `start` on, the oldest first."""
        return [*itertools.islice(self.since(start), limit)]

    def since(self, start: int) -> Iterator[Letter]:
        """Yield letters from number `start` on, the oldest first."""
        return (letter for letter in self._read(start) if letter.number not in self._gone)

    def __iter__(self) -> Iterator[Letter]:
        return self.since(0)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def show(self, id: UUID7 | int) -> Letter:
        """Return a letter by its id or its number.

        :raises NotFound: no such letter exists, or it was removed.
        """
        for letter in self:
            if id in (letter.id, letter.number):
                return letter
        raise NotFound(f"there is no dead letter {id}", hint="list those that there are")

    def drop(self, letters: Sequence[Letter]) -> None:
        """Delete letters; their bytes are removed with their segment.

        :raises StorageError: the operating system refuses.
        """
        with self._lock:
            oldest = next((letter.number for letter in self._read()), 0)
            gone = {*self._gone, *(letter.number for letter in letters)}
            gone = {number for number in gone if number >= oldest}
            save_notes(self._folder / _GONE, json.dumps(sorted(gone)).encode(), sync=True)
            self._gone = gone

    def _read_gone(self) -> set[int]:
        path = self._folder / _GONE
        with storage_errors("reading", str(path)):
            try:
                return set(json.loads(path.read_bytes()))
            except FileNotFoundError:
                return set()
            except (ValueError, TypeError):
                return set()  # then they are listed again, which is no harm

    def _read(self, start: int = 0, newest: int | None = None) -> Iterator[Letter]:
        options = LogOptions(damaged="skip")
        with open_log_reader(self._url, self._folder, Position.START, options) as reader:
            if newest is not None or start > 0:
                bounds = reader.bounds()
                start = max(start, 0 if newest is None else bounds.end - newest)
                reader.seek(min(max(bounds.oldest, start), bounds.end))
            while messages := reader.read_many(_AT_ONCE):
                for message in messages:
                    try:
                        yield Letter.from_bytes(message.payload, message.seq)
                    except Malformed:
                        continue

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


#: Its folder in the state folder.
QUARANTINE: Final = "quarantine"

#: Arrival time (milliseconds since 1970 UTC), size, and length of the leg's name, which follows.
_STRAY: Final = struct.Struct("<QIB")
#: Bytes kept of each message, at most.
_KEPT: Final = 64 << 10
_STRAY_SEGMENTS: Final = 4
_SMALLEST_STRAY_SEGMENT: Final = 2 * _KEPT
_STRAYS_AT_ONCE: Final = 64


class Stray(NamedTuple):
    """An undecodable message."""

    number: int
    came_ms: int
    leg: str
    #: Its size in bytes; `data` has at most the first 65,536.
    size: int
    data: bytes


class Quarantine:
    """A bounded log of undecodable messages, for diagnosis only; the oldest are removed first."""

    def __init__(self, folder: Path, retain: int) -> None:
        """Set the limit in bytes; 0 keeps none. The log is created when first needed."""
        self._folder = folder
        self._retain = retain
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None

    def keep(self, leg: str, strays: Sequence[bytes], now_ms: int) -> int:
        """Keep undecodable messages of a leg if possible; return how many were kept.

        A full disk is ignored, so that it does not affect other messages.
        """
        if not self._retain:
            return 0
        name = leg.encode()[:255]
        records = [
            _STRAY.pack(now_ms, min(len(raw), 0xFFFF_FFFF), len(name)) + name + raw[:_KEPT]
            for raw in strays
        ]
        try:
            with self._lock:
                if self._writer is None:
                    self._writer = self._open()
                self._writer.write_many(records)
        except PenstockError as error:
            log.warning("%s undecodable messages are not kept: %s", f"{len(strays):,}", error)
            return 0
        return len(records)

    def _open(self) -> LogWriter:
        segment = max(self._retain // _STRAY_SEGMENTS, _SMALLEST_STRAY_SEGMENT)
        options = LogOptions(
            segment=segment, segment_slots=4096, retain=self._retain, sync="none", damaged="skip"
        )
        return open_log_writer(f"log:{self._folder}", self._folder, options)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def strays(folder: Path) -> Iterator[Stray]:
    """Yield the undecodable messages that are kept, the oldest first."""
    options = LogOptions(damaged="skip")
    try:
        reader = open_log_reader(f"log:{folder}", folder, Position.START, options)
    except NotFound:
        return
    with reader:
        while messages := reader.read_many(_STRAYS_AT_ONCE):
            for message in messages:
                payload = message.payload
                if len(payload) < _STRAY.size:
                    continue
                came_ms, size, length = _STRAY.unpack_from(payload)
                end = _STRAY.size + length
                leg = payload[_STRAY.size : end].decode(errors="replace")
                yield Stray(message.seq, came_ms, leg, size, payload[end:])
