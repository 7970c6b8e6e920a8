"""What do a Flight client and its server say to each other, byte for byte?

Every ticket, command, action body and piece of metadata is one of these records, as JSON. Nothing
here touches a socket. Messages themselves travel as Arrow record batches of `BATCH_SCHEMA`.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal, Self, TypeAlias
from urllib.parse import quote, unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from penstock.core.errors import Malformed
from penstock.core.overflow import DropReason  # noqa: TC001 - pydantic reads it
from penstock.core.position import Position

__all__ = [
    "LONGEST_WAIT",
    "MAX_NAME",
    "MAX_NOTE",
    "MAX_RECORD",
    "Acknowledge",
    "ActionKind",
    "BulkOpened",
    "CloseWriter",
    "Create",
    "Described",
    "Failure",
    "Forget",
    "Hold",
    "Identified",
    "Kind",
    "Locate",
    "Located",
    "Lost",
    "Mark",
    "Noted",
    "OpenWriter",
    "Outcome",
    "Piece",
    "Put",
    "Record",
    "Spot",
    "Stream",
    "Take",
    "Told",
    "WriteNote",
    "WriterOpened",
    "decode_name",
    "encode_name",
    "parse_ticket",
]

#: Bytes of one record. A thousand lost ranges fit, which is what a reader remembers.
MAX_RECORD: Final = 128 << 10
#: Bytes of a note that a stream keeps of a writer, and of all its notes.
MAX_NOTE: Final = 4 << 20
MAX_NOTES: Final = 64 << 20
#: Bytes of the path of a stream, and characters of it when percent-encoded.
MAX_NAME: Final = 1024
#: A server waits for messages this long (seconds) in one call; a client asks again.
LONGEST_WAIT: Final = 30.0

_INT64: Final = 1 << 63

Number: TypeAlias = Annotated[int, Field(ge=0, lt=_INT64)]
_Id: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=3 * MAX_NAME)]
_Label: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
_Text: TypeAlias = Annotated[str, Field(max_length=4096)]
_Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Kind(StrEnum):
    """The kinds of stream behind a server, as records name them."""

    QUEUE = "fmq"
    LOG = "log"


class ActionKind(StrEnum):
    """What can be asked of a server besides streams of messages; the Flight action's type."""

    LOCATE = "locate"
    ACKNOWLEDGE = "acknowledge"
    FORGET = "forget"
    DESCRIBE = "describe"
    CREATE = "create"
    OPEN_WRITER = "open_writer"
    CLOSE_WRITER = "close_writer"
    #: Its body is a `Stream`.
    IDENTIFY = "identify"
    #: Its body is a `Put`.
    OPEN_BULK = "open_bulk"
    #: Its body is a `Stream`.
    READ_NOTES = "read_notes"
    WRITE_NOTE = "write_note"


# --- how a record is written and read -------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Record(_Part):
    """A thing said: it writes itself, and reads itself back only when all of it is right."""

    #: The version of these records. A change that an older one would misunderstand is another.
    v: Literal[1] = 1
    #: Bytes of one.
    longest: ClassVar[int] = MAX_RECORD

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a record.

        :raises Malformed: it is too long, is no JSON, lacks a field or has one that does not fit.
        """
        _check_size(cls.__name__, data, cls.longest)
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise _malformed(cls.__name__, error) from None


def _check_size(what: str, data: bytes, longest: int = MAX_RECORD) -> None:
    if len(data) > longest:
        raise Malformed(f"flight {what}", "length", f"at most {longest}", len(data))


def _malformed(what: str, error: ValidationError) -> Malformed:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "record"
    hint = "the other side has another version of Penstock" if first["loc"][-1:] == ("v",) else None
    return Malformed(f"flight {what}", where, "as documented", first["msg"], hint=hint)


def encode_name(path: str) -> str:
    """Return the path of a stream as text that every JSON reader takes: percent-encoded."""
    return quote(os.fsencode(path), safe="/")


def decode_name(name: str) -> str:
    """Return the path of a stream as the file system knows it. Decoded once, and only once."""
    return os.fsdecode(unquote_to_bytes(name))


# --- places in a stream ---------------------------------------------------------------------------


class Mark(_Part):
    """A message of one life of a stream: where a reader goes on, also on another connection."""

    epoch: Annotated[int, Field(ge=0, lt=1 << 64)]
    seq: Number


class Spot(_Part):
    """A `Position`, as said by a client."""

    anchor: Literal["start", "end", "last", "seq", "time"]
    value: Annotated[int, Field(ge=-_INT64, lt=_INT64)] = 0

    @classmethod
    def of(cls, position: Position) -> Spot:
        return cls(anchor=position.anchor, value=position.value)

    def position(self) -> Position:
        if self.anchor == "seq":
            return Position.sequence(self.value)
        return Position(self.anchor, self.value)


class Lost(_Part):
    """A run of messages that were gone."""

    first: Number
    last: Number
    reason: DropReason


# --- what a client asks ---------------------------------------------------------------------------


class Stream(Record):
    """Names a stream below the server's root, with options for its own endpoint there."""

    #: The path, percent-encoded.
    stream: _Name
    #: What it is, or shall be when it is made; None: what is there, or else a queue.
    kind: Kind | None = None
    options: Annotated[dict[_Label, _Text], Field(max_length=64)] = {}


class Locate(Stream):
    """Stand at a place, or (without one) only tell what is there. Answered by `Located`."""

    reader: _Id
    at: Spot | None = None
    #: The hold of this name moves along.
    hold: _Label | None = None


class Take(Stream):
    """The ticket of a stream of messages: all that are there now, from a mark on."""

    call: Literal["take"] = "take"
    reader: _Id
    #: None: from the start.
    at: Mark | None = None
    #: When nothing is there, wait so many seconds for the first.
    wait: Annotated[_Seconds, Field(le=LONGEST_WAIT)] = 0.0
    #: Bytes of one record batch, but for a message that is larger by itself.
    chunk: Annotated[int, Field(ge=1024, le=1 << 30)] = 1 << 20
    hold: _Label | None = None
    #: With `hold`: everything before this is done with.
    done: Mark | None = None


class Hold(Stream):
    """The ticket of a stream without messages: while it is open, the name is held."""

    call: Literal["hold"] = "hold"
    reader: _Id
    name: _Label
    #: Where a name begins that is new.
    at: Spot
    #: Where it goes on, when it was held before and the connection broke.
    done: Mark | None = None


class Acknowledge(Stream):
    """Everything before this is done with."""

    reader: _Id
    name: _Label
    done: Mark


class Forget(Record):
    """This reader will not come again."""

    reader: _Id


class Create(Stream):
    """Make a stream."""

    replace: bool = False


class OpenWriter(Stream):
    """Begin to write; make the stream if it is missing. Answered by `WriterOpened`."""

    writer: _Id


class CloseWriter(Record):
    """This writer will not come again."""

    writer: _Id


class WriteNote(Stream):
    """Keep a note of a writer with the stream; see `StreamNotes`."""

    longest: ClassVar[int] = 2 * MAX_NOTE

    name: _Label
    #: JSON; None: forget it.
    note: Annotated[str, Field(max_length=MAX_NOTE)] | None
    #: Answer when it is on the disk.
    sync: bool = True


class Put(Record):
    """The command of a stream of batches to append."""

    writer: _Id
    #: The server that `WriterOpened` came from. Another one does not know what was appended.
    instance: _Id
    #: Counts the streams of this writer: only the latest may append.
    attempt: Annotated[int, Field(ge=1, lt=_INT64)]


class Piece(Record):
    """Goes with each batch to append."""

    #: Counts the batches of a writer, from 1; one that comes twice is appended once.
    number: Annotated[int, Field(ge=1, lt=_INT64)]
    #: Only hand over what was written so far; the batch is empty.
    flush: bool = False
    #: Keep `created_ns` of the batch.
    exact: bool = False


# --- what a server answers ------------------------------------------------------------------------


class Failure(Record):
    """An error, with its fields; see `failures`."""

    kind: Annotated[str, Field(max_length=64)]
    message: _Text
    hint: _Text | None = None
    fields: Annotated[dict[_Label, int | _Text | None], Field(max_length=16)] = {}


class Located(Record):
    """Where a reader stands, and what can be read."""

    mark: Mark
    oldest: Number
    end: Number
    newest: Number | None
    #: The epochs that this one continues, each with the number at which it was cut.
    lineage: Annotated[tuple[Mark, ...], Field(max_length=1024)] = ()

    def to_bytes(self) -> bytes:
        # Clients of release 0.1 refuse a field that they do not know; few streams have any.
        return self.model_dump_json(exclude=None if self.lineage else {"lineage"}).encode()


class Told(Record):
    """Goes with each batch of messages: what happened since the one before, and where we are."""

    #: Where the reader goes on after this batch.
    mark: Mark
    #: The number of the next message to come, at this moment.
    end: Number
    filtered: Number = 0
    restarts: Number = 0
    #: Messages lost, and the ranges of the latest of them.
    lost: Number = 0
    losses: Annotated[tuple[Lost, ...], Field(max_length=1000)] = ()
    #: The next batch belongs to this one; both count only together.
    more: bool = False


class Described(Record):
    """What a stream holds: the fields of `StreamInfo` but the URL, as JSON."""

    info: Annotated[str, Field(max_length=MAX_RECORD - 4096)]


class Identified(Record):
    """Where a stream is stored: a token that is the same for all its names. None: there is none."""

    storage: _Label | None


class Noted(Record):
    """The notes that a stream keeps, as JSON."""

    longest: ClassVar[int] = 2 * MAX_NOTES

    notes: Annotated[str, Field(max_length=MAX_NOTES)]


class WriterOpened(Record):
    """A writer is known to the server from now on."""

    instance: _Id
    #: Bytes of a batch that the server takes.
    max_message: Annotated[int, Field(ge=1, lt=_INT64)]
    #: Fields of messages that the stream has no place for, and what becomes of each.
    cannot_carry: Annotated[dict[_Label, _Text], Field(max_length=16)] = {}


class BulkOpened(Record):
    """A writer may come to another port of the same host, too; see `bulk_wire`."""

    port: Annotated[int, Field(ge=1, le=65535)]
    #: To be said there, once and soon.
    key: _Id
    #: The port of the server itself. Who came by another one came through something between.
    serves: Annotated[int, Field(ge=1, le=65535)]


class Outcome(Record):
    """What became of a batch to append."""

    number: Annotated[int, Field(ge=1, lt=_INT64)]
    #: Messages of it that were appended, the first of them.
    written: Number
    last_seq: Number | None = None
    waited: _Seconds = 0.0
    headers_dropped: Number = 0
    #: Why the others were not.
    failure: Failure | None = None


_TICKET: TypeAdapter[Take | Hold] = TypeAdapter(Annotated[Take | Hold, Field(discriminator="call")])


def parse_ticket(data: bytes) -> Take | Hold:
    """Read a ticket.

    :raises Malformed: it is none.
    """
    _check_size("ticket", data)
    try:
        return _TICKET.validate_json(data)
    except ValidationError as error:
        raise _malformed("ticket", error) from None
