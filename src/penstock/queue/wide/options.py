"""Which options has a wide queue in its URL?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from penstock.core.units import parse_duration, parse_patience
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
    own_stream,
    sync_policy,
    whole,
)
from penstock.queue.wide.layout import MAX_BUFFER, MAX_READERS, MAX_SLOTS, Compression

if TYPE_CHECKING:
    from penstock.core.stream_id import StreamId

__all__ = ["READER_OPTIONS", "WRITER_OPTIONS", "Policy", "WideOptions", "parse_compression"]

#: Options for readers only, and for writers only.
READER_OPTIONS: Final = GROUP_OPTIONS | {"type", "resume", "damaged", "trace", "group"}
WRITER_OPTIONS: Final = frozenset({"policy", "timeout", "keep", "lock_timeout", "sync"})


class Policy(StrEnum):
    """What a writer does before it would overwrite a message that a held reader needs."""

    #: Wait for the reader, up to `timeout`.
    WAIT = "wait"
    #: Refuse the message.
    FAIL = "fail"
    #: Overwrite; the reader counts the loss.
    DROP = "drop"


_one_compression = choice(*Compression)


def parse_compression(value: str) -> str:
    """Parse a compression; `off` and `false` are none, `on` and `true` are zstd."""
    if value in {"gzip", "bzip2"}:
        raise ValueError("should be none, lz4 or zstd; gzip and bzip2 are for layout=classic")
    others = {"off": "none", "false": "none", "true": "zstd", "on": "zstd"}
    return _one_compression(others.get(value, value))


def _layout(value: str) -> str:
    if value != "wide":
        raise ValueError("should be 'wide' or 'classic'")  # which has options of its own
    return value


@dataclass(frozen=True, kw_only=True)
class WideOptions(GroupOptions):
    """Options of `fmq:…?layout=wide`."""

    layout: Literal["wide"] | None = option(_layout, None)
    #: Creating: slots, the most messages it holds; rounded up to a power of 2.
    slots: int = option(whole(2, MAX_SLOTS), 16384)
    #: Creating: bytes of the buffer, rounded up to whole pages.
    size: int = option(byte_size(1, MAX_BUFFER), 16 << 20)
    #: Creating: rows of the reader table.
    readers: int = option(whole(0, MAX_READERS), 128)
    compress: Compression = option(parse_compression, Compression.NONE)
    #: Creating: keep a checksum of every message, and check it at every read.
    crc: bool = option(flag, default=False)
    #: Creating: allocate disk space as messages arrive, not all at creation.
    sparse: bool = option(flag, default=False)
    #: Creating: one writer at a time, or many that take turns.
    writers: Literal["one", "many"] = option(choice("one", "many"), "one")
    #: Creating: the stream that the messages belong to.
    stream: StreamId | None = option(own_stream, None)
    #: Creating: permissions of the file; default: the owner's only.
    mode: int | None = option(file_mode, None)
    create: Creation = option(choice(*Creation), Creation.MISSING)
    #: Wait for the queue to appear: `true`, or a duration.
    wait: float = option(parse_patience, 0.0)
    #: Writer: readers to wait for. Reader: its name.
    hold: tuple[str, ...] = option(held_readers, ())
    #: Writer: what to do when a held reader is behind.
    policy: Policy = option(choice(*Policy), Policy.WAIT)
    #: Writer: how long to wait for it; default: forever.
    timeout: float | None = option(parse_duration, None)
    #: Writer: wait also for absent held readers.
    keep: bool = option(flag, default=False)
    #: Writer: how long to wait for another writer.
    lock_timeout: float = option(parse_duration, 5.0)
    #: Writer, group: when messages, or settled state, are synced to disk: `none`, `batch` (after
    #: every call), or an interval.
    sync: Sync = option(sync_policy, "none")
    #: Reader: deliver only messages of this type.
    type: int | None = option(whole(), None)
    #: Reader: where to resume after an overrun.
    resume: Literal["oldest", "newest"] = option(choice("oldest", "newest"), "oldest")
    #: Reader: raise an error at a damaged message, or count it as lost and skip it.
    damaged: Literal["fail", "skip"] = option(choice("fail", "skip"), "fail")
    #: Reader: record its name, position and sleep in the file; `false`: write nothing.
    trace: bool = option(flag, default=True)
