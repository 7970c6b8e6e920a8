"""What does a dead letter say? (spec uprotocol 10.3)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import Malformed
from penstock.dispatch.headers import tagged
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
from penstock.protocols.uprotocol.validation import is_traceparent

if TYPE_CHECKING:
    from penstock.dispatch.receivers import Receiver

__all__ = ["DLT_RESOURCE", "STREAMER", "Letter", "dead_letter_topic", "letter_id"]

#: The service id and version of a streamer, and its topic of dead letters.
STREAMER: Final = 4
STREAMER_VERSION: Final = 1
DLT_RESOURCE: Final = 0x8001

_LONGEST_TEXT = 1024
_FIELDS: Final = proto.DeadLetter.DESCRIPTOR.fields_by_name
_FULL, _HEADER = (int(_FIELDS[name].number) for name in ("full", "header"))
_VERSION: Final = 0x7000
_VARIANT: Final = 0b10 << 62


def dead_letter_topic(authority: str) -> UUri:
    """Return the topic of the dead letters of a dispatcher."""
    return UUri(authority, STREAMER, STREAMER_VERSION, DLT_RESOURCE)


def letter_id(receiver: Receiver, stored_ms: int, priority: int, seq: int) -> UUID7:
    """Return the id of the letter about a stored message: always the same one.

    A crash may come after the letter is written and before the message is settled; then the letter
    is there already.
    """
    text = f"{receiver} {priority} {seq} {stored_ms}".encode()
    chance = int.from_bytes(blake2b(text, digest_size=10, person=b"dead-letter").digest())
    return UUID7.unchecked(
        (stored_ms & (1 << 48) - 1) << 16 | _VERSION | chance >> 68,
        _VARIANT | chance & ((1 << 62) - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that one receiver did not get, and why."""

    id: UUID7
    code: UCode
    reason: DeadLetterReason
    #: Why, for people. At most 1,024 characters.
    message: str = ""
    #: Who should have got it; None: that was not found out.
    receiver: UUri | None = None
    #: The leg towards the receiver.
    leg: str = ""
    #: When it first failed and when it was given up, milliseconds since 1970 UTC.
    first_failure_ms: int = 0
    dead_ms: int = 0
    attempts: int = 0
    dispatcher: UUri
    header: UAttributes
    #: The message itself, without its token; None where only the header is kept.
    original: UMessage | None = None
    #: Its number in the log of dead letters; -1 outside of it.
    number: int = -1
    #: Its protobuf form, once that was asked for.
    record: bytes = field(default=b"", init=False, compare=False, repr=False)

    def to_bytes(self) -> bytes:
        """Write the protobuf form."""
        if not self.record:
            # Kept beside the fields: it is written to a log, and sent to each who subscribed.
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
        # The message as it is: to read it into the record would be to write it once more.
        if self.original is None:
            number, part = _HEADER, self.header.to_bytes()
        else:
            number, part = _FULL, self.original.to_bytes()
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
        """Return one that keeps only the header."""
        return replace(self, original=None)

    def without_token(self) -> Letter:
        """Return one that tells nobody the secret of the sender."""
        if self.header.token is None:
            return self
        header = self.header.replace(token=None)
        original = None if self.original is None else self.original.replace(attributes=header)
        return replace(self, header=header, original=original)

    def to_message(self, topic: UUri) -> UMessage:
        """Return the publish that tells subscribers of it."""
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
