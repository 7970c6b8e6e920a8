"""What is stored of a message that could not be delivered?"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.core.errors import InvalidStreamId, Malformed
from penstock.core.message import Message
from penstock.core.stream_id import StreamId

__all__ = ["KEEPS_REASONS", "MARK", "NO_REASONS", "Code", "DeadLetter"]

#: Why some streams take no dead letters, and which do.
NO_REASONS: Final = "it keeps no attributes, which hold the reason of a dead letter"
KEEPS_REASONS: Final = "use a log: or a wide fmq: queue"
#: What the attributes of a dead letter begin with.
MARK: Final = b'{"penstock_dead_letter":'

# A dead letter must stay about as large as the message it carries, whatever an error had to say.
_LONGEST_REASON = 1024
_LONGEST_RECEIVER = 512
_CUT = "…"


class Code(IntEnum):
    """Why a delivery failed, with the numbers of google.rpc.Code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A complete message that one receiver did not get, and the reason.

    Long texts are cut and end in an ellipsis; characters that UTF-8 cannot encode become `?`.
    """

    #: The message as it was to be delivered.
    original: Message
    #: Why it failed, for programs.
    code: Code
    #: Why it failed, for people. At most 1,024 characters.
    reason: str
    #: The intended receiver. At most 512 characters.
    receiver: str
    #: How many times delivery was tried.
    attempts: int
    #: When it was first tried, nanoseconds since 1970 UTC.
    first_attempt_ns: int
    #: When it was last tried, nanoseconds since 1970 UTC.
    last_attempt_ns: int
    #: When it was given up, nanoseconds since 1970 UTC.
    dead_ns: int

    def __post_init__(self) -> None:
        # The way to set a field of a frozen dataclass during construction.
        object.__setattr__(self, "reason", _bounded(self.reason, _LONGEST_REASON))
        object.__setattr__(self, "receiver", _bounded(self.receiver, _LONGEST_RECEIVER))

    def to_message(self) -> Message:
        """Return the message that carries this dead letter through a queue.

        Its payload, time, types and stream are those of the original, so that dead letters are
        filtered and looked at as any other message. All else is compact JSON in its attributes:
        the queue has to keep attributes.
        """
        original = self.original
        attributes = {
            "penstock_dead_letter": 1,
            "code": int(self.code),
            "reason": self.reason,
            "receiver": self.receiver,
            "attempts": self.attempts,
            "first_attempt_ns": self.first_attempt_ns,
            "last_attempt_ns": self.last_attempt_ns,
            "dead_ns": self.dead_ns,
            "original": {
                "seq": original.seq,
                "time_ns": original.time_ns,
                "created_ns": original.created_ns,
                "type": original.type,
                "subtype": original.subtype,
                "stream": None if original.stream is None else original.stream.hex(),
                "attributes": (
                    None
                    if original.attributes is None
                    else base64.b64encode(original.attributes).decode("ascii")
                ),
            },
        }
        text = json.dumps(attributes, ensure_ascii=False, separators=(",", ":"))
        return original._replace(seq=0, created_ns=self.dead_ns, attributes=text.encode())

    @classmethod
    def from_message(cls, message: Message) -> DeadLetter:
        """Return the dead letter that a message carries.

        :raises Malformed: the attributes are not those of a dead letter
        """
        if message.attributes is None:
            raise Malformed("dead letter", "attributes", "JSON", "none")
        try:
            record = _Record.model_validate_json(message.attributes)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(("attributes", *map(str, first["loc"])))
            raise Malformed("dead letter", where, "as documented", first["msg"]) from None
        header = record.original
        original = Message(
            seq=header.seq,
            time_ns=header.time_ns,
            created_ns=header.created_ns,
            type=header.type,
            subtype=header.subtype,
            stream=_decode_stream(header.stream),
            attributes=_decode_attributes(header.attributes),
            payload=message.payload,
        )
        return cls(
            original=original,
            code=Code(record.code),
            reason=record.reason,
            receiver=record.receiver,
            attempts=record.attempts,
            first_attempt_ns=record.first_attempt_ns,
            last_attempt_ns=record.last_attempt_ns,
            dead_ns=record.dead_ns,
        )


_Nanoseconds = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Header(_Strict):
    """The original's header in the JSON."""

    seq: Annotated[int, Field(ge=0, lt=2**64)]
    time_ns: _Nanoseconds
    created_ns: _Nanoseconds
    type: _Int32
    subtype: _Int32
    stream: str | None
    attributes: str | None


class _Record(_Strict):
    """The JSON of `to_message`. A change of its fields needs a new version number."""

    penstock_dead_letter: Literal[1]
    code: Annotated[int, Field(ge=min(Code), le=max(Code))]
    reason: str
    receiver: str
    attempts: Annotated[int, Field(ge=0)]
    first_attempt_ns: _Nanoseconds
    last_attempt_ns: _Nanoseconds
    dead_ns: _Nanoseconds
    original: _Header


def _decode_stream(text: str | None) -> StreamId | None:
    try:
        return None if text is None else StreamId.parse(text)
    except InvalidStreamId as error:
        raise Malformed("dead letter", "original.stream", "a stream id in hex", error) from None


def _decode_attributes(text: str | None) -> bytes | None:
    try:
        return None if text is None else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed("dead letter", "original.attributes", "base64", error) from None


def _bounded(text: str, longest: int) -> str:
    """Return text that UTF-8 can carry: file names of the system may hold lone surrogates."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= longest else text[: longest - len(_CUT)] + _CUT
