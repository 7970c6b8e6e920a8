"""What can be asked of a log in its URL?"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from penstock.core.units import parse_duration, parse_size
from penstock.queue.groups.options import GROUP_OPTIONS, GroupOptions
from penstock.queue.options import Creation, FileMode, HeldReaders, OwnStream, Patience, SyncOption
from penstock.queue.wide.compression import Compression
from penstock.queue.wide.layout import MAX_BUFFER, MAX_SLOTS

__all__ = [
    "KEPT_AT_CREATION",
    "KEPT_FROM_WRITERS",
    "READER_OPTIONS",
    "WRITER_OPTIONS",
    "LogOptions",
]

#: Options that say nothing to a writer, and nothing to a reader.
READER_OPTIONS: Final = GROUP_OPTIONS | {"type", "resume", "damaged", "cursor", "trace", "group"}
WRITER_OPTIONS: Final = frozenset({"retain", "retain_age", "hold", "sync", "lock_timeout"})

#: What a log is made with, and keeps.
KEPT_AT_CREATION: Final = ("segment", "segment_slots", "compress", "crc", "stream")
#: What a log keeps until a writer gives another value.
KEPT_FROM_WRITERS: Final = ("retain", "retain_age", "hold")


def _or_none(parse: object) -> BeforeValidator:
    """Accept `none` for no limit."""

    def parse_or_none(value: object) -> object:
        if value is None or value == "none":
            return None
        return parse(value)  # type: ignore[operator]

    return BeforeValidator(parse_or_none)


class LogOptions(GroupOptions):
    """Options of `log:/path/name`."""

    #: Creating: bytes of a segment's buffer, and so the largest message; rounded up to whole pages.
    segment: Annotated[int, BeforeValidator(parse_size), Field(ge=1, le=MAX_BUFFER)] = 64 << 20
    #: Creating: messages in a segment at most. Rounded up to a power of 2.
    segment_slots: Annotated[int, Field(ge=2, le=MAX_SLOTS)] = 65536
    #: Creating: how payloads are stored.
    compress: Annotated[Compression, BeforeValidator(Compression.parse)] = Compression.NONE
    #: Creating: keep a checksum of every message, and check it at every read.
    crc: bool = True
    #: Creating: the stream that the messages belong to.
    stream: OwnStream = None
    #: Creating: who may use the log's directory; without it, its owner alone.
    mode: FileMode = None
    create: Creation = Creation.MISSING
    #: Wait for the log to appear: `true`, or for how long.
    wait: Patience = 0.0
    #: Writer: bytes on the disk, above which the oldest segments go.
    retain: Annotated[int | None, _or_none(parse_size)] = None
    #: Writer: segments go when their newest message is older.
    retain_age: Annotated[float | None, _or_none(parse_duration)] = None
    #: Writer: keep what the cursors of these names have not passed yet; `hold=`: of none any more.
    hold: Annotated[HeldReaders, BeforeValidator(lambda value: value or ())] = ()
    #: Writer, group: bring messages, or what is settled, to the disk: `none`, after every `batch`
    #: (call), or a time between.
    sync: SyncOption = 1.0
    #: Writer: how long to wait for another writer.
    lock_timeout: Annotated[float, BeforeValidator(parse_duration)] = 5.0
    #: Reader: the name of a position that survives the reader.
    cursor: str | None = None
    #: Reader: deliver only messages of this type.
    type: int | None = None
    #: Reader: where to go on after retention removed what it had not read.
    resume: Literal["oldest", "newest"] = "oldest"
    #: Reader: raise an error at a damaged message, or count it as lost and go on.
    damaged: Literal["fail", "skip"] = "fail"
    #: Reader: leave marks in the files: who reads, how far, who sleeps. `false`: none at all.
    trace: bool = True
