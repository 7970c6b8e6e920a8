"""What do a Flight client and its server send to each other, byte for byte?

Every ticket, command, action body and piece of metadata is one of these records, as JSON. Nothing
here touches a socket. Messages themselves travel as Arrow record batches of `BATCH_SCHEMA`.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self, TypeAlias
from urllib.parse import quote, unquote_to_bytes

import numpy as np
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from penstock.core.batch import batch_from_messages, integers_in
from penstock.core.errors import Malformed
from penstock.core.overflow import DropReason  # noqa: TC001 - pydantic reads it
from penstock.core.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.core.batch import Batch

__all__ = [
    "EMPTY",
    "LONGEST_WAIT",
    "MAX_NAME",
    "MAX_NOTE",
    "MAX_RECORD",
    "OVERHEAD",
    "Acknowledge",
    "ActionKind",
    "BulkOpened",
    "CloseWriter",
    "CommitStaged",
    "Committed",
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
    "Stage",
    "StagedFile",
    "Stream",
    "Take",
    "Told",
    "Unstage",
    "WriteNote",
    "WriterOpened",
    "check_buffers",
    "decode_name",
    "encode_name",
    "parse_command",
    "parse_ticket",
    "payload_bytes",
    "pieces_of",
]

#: Most bytes of one record. Room for the thousand lost ranges that a reader remembers.
MAX_RECORD: Final = 128 << 10
#: Most bytes of a note of a writer, and of all notes of a stream.
MAX_NOTE: Final = 4 << 20
MAX_NOTES: Final = 64 << 20
#: Most bytes of the path of a stream, and most characters when percent-encoded.
MAX_NAME: Final = 1024
#: Most seconds that a server waits for messages in one call; the client calls again.
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
    """Requests besides streams of messages; the type of the Flight action."""

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
    COMMIT = "commit"
    UNSTAGE = "unstage"


# --- how a record is written and read -------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Record(_Part):
    """A message of the protocol, encoded as JSON; decoding validates every field."""

    #: The version of the protocol; it changes with every incompatible change.
    v: Literal[1] = 1
    #: Most bytes of one record.
    longest: ClassVar[int] = MAX_RECORD
    #: Fields that release 0.1 does not know, and rejects: sent only where they say something.
    later: ClassVar[frozenset[str]] = frozenset()

    def to_bytes(self) -> bytes:
        fields = type(self).model_fields
        usual = {name for name in self.later if getattr(self, name) == fields[name].default}
        return self.model_dump_json(exclude=usual or None).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode a record.

        :raises Malformed: it is too long, is not JSON, lacks a field or has an invalid one.
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
    """Return the path of a stream percent-encoded, which is valid in JSON."""
    return quote(os.fsencode(path), safe="/")


def decode_name(name: str) -> str:
    """Return the path of a stream in the file system. Must be applied exactly once."""
    return os.fsdecode(unquote_to_bytes(name))


# --- places in a stream ---------------------------------------------------------------------------


class Mark(_Part):
    """A position in one epoch of a stream, where a reader resumes on any connection."""

    epoch: Annotated[int, Field(ge=0, lt=1 << 64)]
    seq: Number


class Spot(_Part):
    """A `Position`, as sent by a client."""

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
    """A range of lost messages."""

    first: Number
    last: Number
    reason: DropReason


# --- what a client asks ---------------------------------------------------------------------------


class Stream(Record):
    """Names a stream below the server's root, with options for its own endpoint there."""

    #: The path, percent-encoded.
    stream: _Name
    #: Kind of the stream, also if it is created; None: that of the existing stream, or a queue.
    kind: Kind | None = None
    options: Annotated[dict[_Label, _Text], Field(max_length=64)] = {}


class Locate(Stream):
    """Move a reader to a position, if one is given. Answered by `Located`."""

    reader: _Id
    at: Spot | None = None
    #: Move the hold of this name to the same position.
    hold: _Label | None = None


class Take(Stream):
    """The ticket of a stream of messages: the existing ones from a mark on."""

    call: Literal["take"] = "take"
    reader: _Id
    #: None: from the start.
    at: Mark | None = None
    #: Seconds to wait for the first message.
    wait: Annotated[_Seconds, Field(le=LONGEST_WAIT)] = 0.0
    #: Most bytes of one record batch, unless a single message is larger.
    chunk: Annotated[int, Field(ge=1024, le=1 << 30)] = 1 << 20
    hold: _Label | None = None
    #: With `hold`: everything before this is processed.
    done: Mark | None = None


class Hold(Stream):
    """The ticket of a stream without messages: while it is open, the name is held."""

    call: Literal["hold"] = "hold"
    reader: _Id
    name: _Label
    #: Where a new name starts.
    at: Spot
    #: Where to resume after a broken connection.
    done: Mark | None = None


class Acknowledge(Stream):
    """Everything before `done` is processed."""

    reader: _Id
    name: _Label
    done: Mark


class Forget(Record):
    """This reader has left."""

    reader: _Id


class Create(Stream):
    """Create a stream."""

    replace: bool = False


class OpenWriter(Stream):
    """Open a writer; create the stream if it is missing. Answered by `WriterOpened`."""

    writer: _Id


class CloseWriter(Record):
    """This writer has left."""

    writer: _Id


class WriteNote(Stream):
    """Store a note of a writer with the stream; see `StreamNotes`."""

    longest: ClassVar[int] = 2 * MAX_NOTE

    name: _Label
    #: JSON; None: remove the note.
    note: Annotated[str, Field(max_length=MAX_NOTE)] | None
    #: Answer only after a sync to the disk.
    sync: bool = True


class _OfBatch(Stream):
    """Names a batch: the writer, a suffix for the stream's URL, and the number."""

    writer: _Label
    suffix: Annotated[str, Field(max_length=32)] = ""
    batch: Number


class Stage(_OfBatch):
    """The command of a stream of batches to stage until they are committed.

    Its last piece is a `flush`; without that nothing is kept. The same id replaces the file.
    """

    call: Literal["stage"] = "stage"
    id: _Id
    partition: Number


class StagedFile(_Part):
    """The staged file of one task attempt."""

    id: _Id
    partition: Number
    messages: Number


class CommitStaged(_OfBatch):
    """Append staged files, in the order of partitions, once. Answered by `Committed`."""

    longest: ClassVar[int] = 2 * MAX_NOTE

    #: Stays the same when the request is repeated.
    id: _Id
    files: Annotated[tuple[StagedFile, ...], Field(max_length=100_000)]
    #: Where the batch comes from; see `Origin`. The ranges are JSON.
    ranges: Annotated[str, Field(max_length=MAX_NOTE)] | None = None
    checkpoint: _Text | None = None
    run: _Text | None = None
    is_renamed: bool = False
    #: Answer within this many seconds, even if the commit is not done.
    wait: Annotated[_Seconds, Field(le=LONGEST_WAIT)] = 0.0


class Unstage(_OfBatch):
    """Remove staged files, except those that an append under way needs."""

    longest: ClassVar[int] = 2 * MAX_NOTE

    files: Annotated[tuple[StagedFile, ...], Field(max_length=100_000)] = ()
    #: The batch is appended: remove all its files, and those of batches before it.
    is_done: bool = False


class Put(Record):
    """The command of a stream of batches to append."""

    writer: _Id
    #: The server instance that sent `WriterOpened`. Another one does not know the outcomes.
    instance: _Id
    #: Counts the streams of this writer: only the latest may append.
    attempt: Annotated[int, Field(ge=1, lt=_INT64)]


class Piece(Record):
    """The metadata of each batch to append or stage."""

    #: Counts the batches of a writer, from 1; one that is sent twice is appended once.
    number: Annotated[int, Field(ge=1, lt=_INT64)]
    #: Flush what was written so far; the batch is empty.
    flush: bool = False
    #: Keep `created_ns` of the batch.
    exact: bool = False


# --- what a server answers ------------------------------------------------------------------------


class Failure(Record):
    """An error, with its fields; see `describe_error`."""

    kind: Annotated[str, Field(max_length=64)]
    message: _Text
    hint: _Text | None = None
    fields: Annotated[dict[_Label, int | _Text | None], Field(max_length=16)] = {}


class Located(Record):
    """The position of a reader, and the bounds of the stream."""

    mark: Mark
    oldest: Number
    end: Number
    newest: Number | None
    #: The epochs that this one continues, each with the number at which it ended.
    lineage: Annotated[tuple[Mark, ...], Field(max_length=1024)] = ()
    later = frozenset({"lineage"})


class Told(Record):
    """The metadata of each batch of messages: losses since the previous one, and the position."""

    #: The position after this batch.
    mark: Mark
    #: The number that the next appended message will have.
    end: Number
    filtered: Number = 0
    restarts: Number = 0
    #: Messages lost, and the ranges of the latest of them.
    lost: Number = 0
    losses: Annotated[tuple[Lost, ...], Field(max_length=1000)] = ()
    #: The next batch belongs to this one; both take effect only together.
    more: bool = False


class Described(Record):
    """The description of a stream: the fields of `StreamInfo` but the URL, as JSON."""

    info: Annotated[str, Field(max_length=MAX_RECORD - 4096)]


class Identified(Record):
    """A token of a stream's storage, the same for all its names; None: it has none."""

    storage: _Label | None


class Noted(Record):
    """The notes of a stream, as JSON."""

    longest: ClassVar[int] = 2 * MAX_NOTES

    notes: Annotated[str, Field(max_length=MAX_NOTES)]


class Committed(Record):
    """The state of a commit."""

    is_done: bool
    #: Messages that were new in the stream.
    new: Number = 0
    #: Seconds that the append took.
    seconds: _Seconds = 0.0


class WriterOpened(Record):
    """A writer was opened."""

    instance: _Id
    #: Most bytes of a batch that the server accepts.
    max_message: Annotated[int, Field(ge=1, lt=_INT64)]
    #: Fields of messages that the stream cannot store, and what happens to each.
    cannot_carry: Annotated[dict[_Label, _Text], Field(max_length=16)] = {}
    #: Whether a flush syncs to the disk.
    syncs: bool = True
    later = frozenset({"syncs"})


class BulkOpened(Record):
    """The port, on the same host, for a bulk connection; see `bulk`."""

    port: Annotated[int, Field(ge=1, le=65535)]
    #: Key to send on that port; valid once, for a short time.
    key: _Id
    #: The port of the server itself. A client that used another one came through a proxy.
    serves: Annotated[int, Field(ge=1, le=65535)]


class Outcome(Record):
    """The outcome of a batch to append or stage."""

    number: Annotated[int, Field(ge=1, lt=_INT64)]
    #: How many messages of the batch were appended, from its start.
    written: Number
    last_seq: Number | None = None
    waited: _Seconds = 0.0
    headers_dropped: Number = 0
    #: Why the rest was not appended.
    failure: Failure | None = None


_TICKET: TypeAdapter[Take | Hold] = TypeAdapter(Annotated[Take | Hold, Field(discriminator="call")])

#: A `Put` does not name its type.
_COMMAND: TypeAdapter[Put | Stage] = TypeAdapter(
    Annotated[
        Annotated[Put, Tag("put")] | Annotated[Stage, Tag("stage")],
        Discriminator(lambda said: "stage" if isinstance(said, dict) and "call" in said else "put"),
    ]
)


def parse_command(data: bytes) -> Put | Stage:
    """Decode the command of a stream of batches.

    :raises Malformed: it is not a command.
    """
    _check_size("command", data)
    try:
        return _COMMAND.validate_json(data)
    except ValidationError as error:
        raise _malformed("command", error) from None


def parse_ticket(data: bytes) -> Take | Hold:
    """Decode a ticket.

    :raises Malformed: it is not a ticket.
    """
    _check_size("ticket", data)
    try:
        return _TICKET.validate_json(data)
    except ValidationError as error:
        raise _malformed("ticket", error) from None


# --- batches --------------------------------------------------------------------------------------


EMPTY: Final = batch_from_messages([])


#: Bytes of a message in a batch besides payload, attributes and stream: numbers and offsets.
OVERHEAD = 48


def payload_bytes(batch: Batch) -> int:
    """Return the total bytes of all payloads."""
    return pc.sum(pc.binary_length(batch.column("payload"))).as_py() or 0


def pieces_of(batch: Batch, limit: int) -> Iterator[Batch]:
    """Yield the batch in pieces of up to `limit` bytes; a message larger than that goes alone."""
    if batch.nbytes <= limit:
        yield batch
        return
    ends = np.cumsum(_sizes(batch))
    start, count = 0, batch.num_rows
    while start < count:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield batch.slice(start, stop - start)
        start = stop


def _sizes(batch: Batch) -> NDArray[np.int64]:
    sizes = np.full(batch.num_rows, OVERHEAD + 16, np.int64)
    for name in ("payload", "attributes"):
        lengths = pc.fill_null(pc.binary_length(batch.column(name)), 0)
        sizes += integers_in(lengths)
    return sizes


def check_buffers(batch: Batch) -> None:
    """Check the buffers and offsets of a batch from outside, before they are used.

    :raises Malformed: they are not valid.
    """
    try:
        batch.validate(full=True)
    except ValueError as error:
        raise Malformed("batch", "its buffers", "whole", error) from None
