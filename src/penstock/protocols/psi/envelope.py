"""What is a psi message, on the wire and in a store? (docs/specs/psi.md 4)"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.errors import Truncated, UnknownStream
from penstock.protocols.psi.ticks import MAX_TICKS, UNIX_EPOCH_TICKS, ns_to_raw, raw_to_ns
from penstock.protocols.psi.wire import Decoder

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from penstock.core.interfaces import BytesLike

__all__ = [
    "CLOSING_SEQUENCE_ID",
    "ENVELOPE_SIZE",
    "HEADER_SIZE",
    "MAX_PAYLOAD_BYTES",
    "Envelope",
    "MessageDecoder",
    "PsiMessage",
    "decode_message",
    "encode_header",
    "encode_message",
    "encode_messages",
]

_WHAT: Final = "psi message"
#: SourceId, SequenceId, OriginatingTime, CreationTime.
_ENVELOPE: Final = struct.Struct("<iiQQ")
#: The envelope, and the length of the payload.
_HEADER: Final = struct.Struct("<iiQQi")
ENVELOPE_SIZE: Final = _ENVELOPE.size
HEADER_SIZE: Final = _HEADER.size
#: The sequence number of a pipeline's internal closing message.
CLOSING_SEQUENCE_ID: Final = 2**31 - 1
#: A larger message is refused.
MAX_PAYLOAD_BYTES: Final = 1 << 28

_MASK: Final = 0x3FFF_FFFF_FFFF_FFFF
#: Ticks between these fit in 64 bits of nanoseconds: the usual case, converted without a call.
_FIRST: Final = UNIX_EPOCH_TICKS - 2**63 // 100
_LAST: Final = UNIX_EPOCH_TICKS + (2**63 - 1) // 100


class Envelope(NamedTuple):
    """The header of a message."""

    #: The id of the stream.
    source_id: int
    #: Counts from 1 in each stream.
    sequence_id: int
    #: When it happened at the source.
    originating_ns: int
    #: When it was created; replay intervals go by this time.
    creation_ns: int

    def to_bytes(self) -> bytes:
        """Return the 24 bytes.

        :raises InvalidOption: a number does not fit.
        """
        try:
            return _ENVELOPE.pack(
                self.source_id,
                self.sequence_id,
                ns_to_raw(self.originating_ns),
                ns_to_raw(self.creation_ns),
            )
        except struct.error as error:
            raise InvalidOption("envelope", self, str(error)) from None

    @classmethod
    def from_bytes(cls, data: BytesLike, at: int = 0) -> Envelope:
        """Decode an envelope.

        :raises Malformed: it is truncated, or a time is not valid.
        """
        if len(data) - at < ENVELOPE_SIZE:
            raise Truncated(_WHAT, "envelope", ENVELOPE_SIZE, len(data) - at)
        source, sequence, originating, creation = _ENVELOPE.unpack_from(data, at)
        return cls(source, sequence, raw_to_ns(originating), raw_to_ns(creation))


class PsiMessage(NamedTuple):
    """A message: the fields of its envelope, and its payload.

    psi sends stale bytes after the value: see `codecs.Codec.trim`.
    """

    source_id: int
    sequence_id: int
    originating_ns: int
    creation_ns: int
    payload: bytes

    @property
    def envelope(self) -> Envelope:
        """The fields of the envelope."""
        return Envelope(*self[:4])


def encode_header(message: PsiMessage) -> bytes:
    """Return the envelope and the payload's length.

    :raises InvalidOption: a number does not fit.
    """
    source, sequence, originating_ns, creation_ns, payload = message
    try:
        return _HEADER.pack(
            source, sequence, ns_to_raw(originating_ns), ns_to_raw(creation_ns), len(payload)
        )
    except struct.error as error:
        raise InvalidOption("message", message[:4], str(error)) from None


def encode_message(message: PsiMessage) -> bytes:
    """Return the bytes of a message on a data connection, or before it is chunked."""
    return encode_header(message) + message.payload


def encode_messages(messages: Iterable[PsiMessage]) -> bytes:
    """Return the bytes of many messages, for one write to a socket."""
    parts: list[bytes] = []
    for message in messages:
        parts += (encode_header(message), message.payload)
    return b"".join(parts)


def decode_message(data: BytesLike, max_bytes: int = MAX_PAYLOAD_BYTES) -> PsiMessage:
    """Return the message of one set of chunks.

    :raises Malformed: it is truncated (psi's chunker truncates some sizes), or too large.
    """
    decoder = MessageDecoder(max_bytes)
    messages = decoder.feed(data)
    decoder.finish()
    if len(messages) != 1:
        raise Malformed(_WHAT, "messages in a datagram", 1, len(messages))
    return messages[0]


class MessageDecoder(Decoder[PsiMessage]):
    """Decodes a data connection: messages back to back.

    `known` holds the valid ids, such as `Catalog.streams`; None: all.
    """

    what = _WHAT

    def __init__(
        self, max_bytes: int = MAX_PAYLOAD_BYTES, known: Container[int] | None = None
    ) -> None:
        super().__init__()
        if max_bytes < 1:
            raise InvalidOption("max_bytes", max_bytes, "must be at least 1")
        self.max_bytes = max_bytes
        self.known = known
        self._needed = HEADER_SIZE

    def _parse(self, view: memoryview, records: list[PsiMessage]) -> int:
        at, end = 0, len(view)
        unpack, found, make, known = _HEADER.unpack_from, records.append, PsiMessage, self.known
        max_bytes = self.max_bytes
        while True:
            start = at + HEADER_SIZE
            if start > end:
                self._needed = HEADER_SIZE
                return at
            source, sequence, originating, creation, size = unpack(view, at)
            if not 0 <= size <= max_bytes:
                raise Malformed(
                    _WHAT,
                    "payload length",
                    f"0 to {max_bytes}",
                    size,
                    hint="allow larger messages if this is one",
                )
            if known is not None and source not in known:
                raise UnknownStream(source, "")
            originating &= _MASK
            creation &= _MASK
            if not (_FIRST <= originating <= _LAST and _FIRST <= creation <= _LAST):
                if originating > MAX_TICKS or creation > MAX_TICKS:
                    worst = max(originating, creation)
                    raise Malformed(_WHAT, "ticks of a time", f"0 to {MAX_TICKS}", worst)
                originating_ns, creation_ns = raw_to_ns(originating), raw_to_ns(creation)
            else:
                originating_ns = (originating - UNIX_EPOCH_TICKS) * 100
                creation_ns = (creation - UNIX_EPOCH_TICKS) * 100
            stop = start + size
            if stop > end:
                self._needed = HEADER_SIZE + size
                return at
            found(make(source, sequence, originating_ns, creation_ns, bytes(view[start:stop])))
            at = stop
