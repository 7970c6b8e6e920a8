"""Which options has a log in its URL?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from penstock.core.errors import InvalidOption
from penstock.core.units import parse_duration, parse_patience, parse_size
from penstock.queue.options import (
    GROUP_OPTIONS,
    Creation,
    GroupOptions,
    Sync,
    byte_size,
    choice,
    file_mode,
    flag,
    held_readers,
    option,
    or_none,
    own_stream,
    sync_policy,
    whole,
)
from penstock.queue.wide.layout import MAX_BUFFER, MAX_SLOTS, Compression
from penstock.queue.wide.options import parse_compression

if TYPE_CHECKING:
    from penstock.core.stream_id import StreamId

__all__ = [
    "KEPT_AT_CREATION",
    "KEPT_FROM_WRITERS",
    "READER_OPTIONS",
    "WRITER_OPTIONS",
    "LogOptions",
]

#: Options for readers only, and for writers only.
READER_OPTIONS: Final = GROUP_OPTIONS | {"type", "resume", "damaged", "cursor", "trace", "group"}
WRITER_OPTIONS: Final = frozenset({"retain", "retain_age", "sync", "lock_timeout"})

#: Settings fixed at creation.
KEPT_AT_CREATION: Final = ("segment", "segment_slots", "compress", "crc", "stream")
#: Settings that a later writer can change.
KEPT_FROM_WRITERS: Final = ("retain", "retain_age", "hold")


@dataclass(frozen=True, kw_only=True)
class LogOptions(GroupOptions):
    """Options of `log:/path/name`."""

    #: Creating: bytes of a segment's buffer, and so the largest message; rounded up to whole pages.
    segment: int = option(byte_size(1, MAX_BUFFER), 64 << 20)
    #: Creating: most messages in a segment; rounded up to a power of 2.
    segment_slots: int = option(whole(2, MAX_SLOTS), 65536)
    #: Creating: how payloads are stored.
    compress: Compression = option(parse_compression, Compression.NONE)
    #: Creating: keep a checksum of every message, and check it at every read.
    crc: bool = option(flag, default=True)
    #: Creating: the stream that the messages belong to.
    stream: StreamId | None = option(own_stream, None)
    #: Creating: permissions of the log's directory; default: the owner's only.
    mode: int | None = option(file_mode, None)
    create: Creation = option(choice(*Creation), Creation.MISSING)
    #: Wait for the log to appear: `true`, or a duration.
    wait: float = option(parse_patience, 0.0)
    #: Writer: bytes on disk, above which the oldest segments are removed.
    retain: int | None = option(or_none(parse_size), None)
    #: Writer: segments are removed when their newest message is older.
    retain_age: float | None = option(or_none(parse_duration), None)
    #: Writer: keep messages that the readers of these names have not read; empty: hold none.
    #: Reader: its name, which keeps its position across restarts.
    hold: tuple[str, ...] = option(lambda value: held_readers(value or ()), ())
    #: Writer, group: when messages, or settled state, are synced to disk: `none`, `batch` (after
    #: every call), or an interval.
    sync: Sync = option(sync_policy, 1.0)
    #: Writer: how long to wait for another writer.
    lock_timeout: float = option(parse_duration, 5.0)
    #: Reader: alias of `hold`.
    cursor: str | None = option(str, None)
    #: Reader: deliver only messages of this type.
    type: int | None = option(whole(), None)
    #: Reader: where to resume after retention removed unread messages.
    resume: Literal["oldest", "newest"] = option(choice("oldest", "newest"), "oldest")
    #: Reader: raise an error at a damaged message, or count it as lost and skip it.
    damaged: Literal["fail", "skip"] = option(choice("fail", "skip"), "fail")
    #: Reader: record its name, position and sleep in the files; `false`: write nothing.
    trace: bool = option(flag, default=True)

    def reader_name(self) -> str | None:
        """Return the name of the reader's position, or None.

        :raises InvalidOption: `hold` and `cursor` give several names, or `hold` gives none.
        """
        if "hold" in self.given and not self.hold:
            raise InvalidOption("hold", "", "names nobody", hint="as in hold=archive")
        names = {*self.hold, *(() if self.cursor is None else (self.cursor,))}
        if len(names) > 1:
            raise InvalidOption("hold", ",".join(sorted(names)), "a reader has one name")
        return next(iter(names), None)
