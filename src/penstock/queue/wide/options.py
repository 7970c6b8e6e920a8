"""What can be asked of a wide queue in its URL?"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from penstock.core.options import Duration, Size  # noqa: TC001 - pydantic reads it
from penstock.queue.groups.options import GROUP_OPTIONS, GroupOptions
from penstock.queue.options import Creation, FileMode, HeldReaders, OwnStream, Patience, SyncOption
from penstock.queue.wide.compression import Compression
from penstock.queue.wide.layout import MAX_BUFFER, MAX_READERS, MAX_SLOTS

__all__ = ["READER_OPTIONS", "WRITER_OPTIONS", "Policy", "WideOptions"]

#: Options that say nothing to a writer, and nothing to a reader.
READER_OPTIONS: Final = GROUP_OPTIONS | {"type", "resume", "damaged", "trace", "group"}
WRITER_OPTIONS: Final = frozenset({"policy", "timeout", "keep", "lock_timeout", "sync"})


class Policy(StrEnum):
    """What a writer does when a held reader still needs what it would overwrite."""

    #: Wait for the reader, `timeout` long.
    WAIT = "wait"
    #: Refuse the message.
    FAIL = "fail"
    #: Overwrite; the reader is told what it lost.
    DROP = "drop"


class WideOptions(GroupOptions):
    """Options of `fmq:…?layout=wide`."""

    layout: Literal["wide"] | None = None
    #: Slots of a queue that is created: messages that it holds at most. Rounded up to a power of 2.
    slots: Annotated[int, Field(ge=2, le=MAX_SLOTS)] = 16384
    #: Bytes of its buffer, rounded up to whole pages.
    size: Annotated[Size, Field(ge=1, le=MAX_BUFFER)] = 16 << 20
    #: Rows of its reader table.
    readers: Annotated[int, Field(ge=0, le=MAX_READERS)] = 128
    compress: Annotated[Compression, BeforeValidator(Compression.parse)] = Compression.NONE
    #: Keep a checksum of every message, and check it at every read.
    crc: bool = False
    #: Get disk space as messages come, instead of all at creation.
    sparse: bool = False
    #: One writer at a time, or many that take turns.
    writers: Literal["one", "many"] = "one"
    #: The stream that the queue's messages belong to.
    stream: OwnStream = None
    #: Who may use the file of a queue that is created; without it, its owner alone.
    mode: FileMode = None
    create: Creation = Creation.MISSING
    #: Wait for the queue to appear: `true`, or for how long.
    wait: Patience = 0.0
    #: Writer: wait for these readers. Reader: be the one of that name.
    hold: HeldReaders = ()
    #: Writer: what to do when a held reader is behind.
    policy: Policy = Policy.WAIT
    #: Writer: how long to wait for it; without it, for ever.
    timeout: Duration | None = None
    #: Writer: wait also for held readers that are not there.
    keep: bool = False
    #: Writer: how long to wait for another writer.
    lock_timeout: Duration = 5.0
    #: Writer, group: bring messages, or what is settled, to the disk: `none`, after every `batch`
    #: (call), or a time between.
    sync: SyncOption = "none"
    #: Reader: deliver only messages of this type.
    type: int | None = None
    #: Reader: where to go on after being overrun.
    resume: Literal["oldest", "newest"] = "oldest"
    #: Reader: raise an error at a damaged message, or count it as lost and go on.
    damaged: Literal["fail", "skip"] = "fail"
    #: Reader: leave marks in the files: who reads, how far, who sleeps. `false`: none at all.
    trace: bool = True
