"""What are the bytes of a wide queue?

`include/penstock/ring.h` is the C side of this; `docs/queue-format.md` explains both.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag, StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ALIGN",
    "COMPRESSIONS",
    "HEADER",
    "LINEAGE",
    "LIVE_READER",
    "LIVE_WRITER",
    "MAGIC",
    "MAX_BUFFER",
    "MAX_READERS",
    "MAX_SLOTS",
    "MIN_SLOTS",
    "PAGE",
    "READER",
    "READER_SIZE",
    "SLOT",
    "VERSION",
    "Compression",
    "Field",
    "HeaderFlag",
    "Record",
    "Slot",
    "SlotFlag",
    "State",
]

#: "PENRING1", read as a little-endian number.
MAGIC: Final = int.from_bytes(b"PENRING1", "little")
VERSION: Final = 1
PAGE: Final = 4096
READER_SIZE: Final = 128
#: Alignment of messages in the buffer.
ALIGN: Final = 64

#: At least 2: the last published message keeps its slot while the next one is written.
MIN_SLOTS: Final = 2
MAX_SLOTS: Final = 1 << 40
MAX_BUFFER: Final = 1 << 56
MAX_READERS: Final = 1 << 16

#: First lock bytes of readers and writers, far past the end; the kernel unlocks them at exit.
LIVE_READER: Final = 1 << 62
LIVE_WRITER: Final = LIVE_READER + (1 << 24)

#: Earlier epochs that a header stores.
LINEAGE: Final = 4


class HeaderFlag(IntFlag):
    """Properties of a queue."""

    #: Every message has a checksum.
    CRC = 1
    #: Writers take turns, under the lock in the header.
    MANY_WRITERS = 2
    #: Disk space is allocated as messages arrive.
    SPARSE = 4
    #: Nothing is overwritten: a segment of a log.
    KEEPS = 8


class State(IntEnum):
    """State of a queue."""

    LIVE = 0
    #: Takes no more messages.
    SEALED = 1
    #: The path names another queue.
    REPLACED = 2


class SlotFlag(IntFlag):
    """Optional parts of a message."""

    STREAM = 1
    ATTRIBUTES = 2
    CRC = 4
    #: A copy: the block ends with `origin_ns`, the time of its first append.
    ORIGIN = 8


class Compression(StrEnum):
    """How every payload of a queue is stored."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


#: Indexed by the number in the header.
COMPRESSIONS: Final = (Compression.NONE, Compression.LZ4, Compression.ZSTD)


class Field(NamedTuple):
    """Offset and `struct` format of a field."""

    offset: int
    format: str

    @property
    def size(self) -> int:
        """Size in bytes."""
        return struct.calcsize(f"<{self.format}")


class Record(NamedTuple):
    """A record of the file: its size, and its fields by name."""

    size: int
    fields: Mapping[str, Field]


HEADER: Final = Record(
    PAGE,
    {
        "magic": Field(0, "Q"),
        "version": Field(8, "I"),
        "flags": Field(12, "I"),
        "epoch": Field(16, "Q"),
        "slots": Field(24, "Q"),
        "buffer_size": Field(32, "Q"),
        "readers": Field(40, "I"),
        "compression": Field(44, "I"),
        "slots_offset": Field(48, "Q"),
        "buffer_offset": Field(56, "Q"),
        "file_size": Field(64, "Q"),
        "stream": Field(72, "16s"),
        "created_ns": Field(88, "q"),
        "first_seq": Field(96, "Q"),
        "check": Field(104, "I"),
        "head": Field(128, "Q"),
        "tail": Field(192, "Q"),
        "sleeping": Field(256, "I"),
        "wakes": Field(260, "I"),
        "room_wanted": Field(320, "I"),
        "room_wakes": Field(324, "I"),
        "holders": Field(328, "I"),
        "lock": Field(384, "I"),
        "next_writer": Field(388, "I"),
        "writer_pid": Field(392, "I"),
        "state": Field(396, "I"),
        "boot_id": Field(400, "16s"),
        "state_check": Field(416, "Q"),
        "guard": Field(424, "Q"),
        "guard_next": Field(432, "Q"),
        "head_check": Field(440, "Q"),
        "lineage": Field(448, "8Q"),
        "source_least": Field(512, "q"),
        "source_greatest": Field(520, "q"),
        "source_check": Field(528, "Q"),
        "origin_least": Field(536, "q"),
        "origin_greatest": Field(544, "q"),
        "origin_check": Field(552, "Q"),
    },
)

SLOT: Final = Record(
    64,
    {
        "seq": Field(0, "Q"),
        "time_ns": Field(8, "q"),
        "created_ns": Field(16, "q"),
        "position": Field(24, "Q"),
        "length": Field(32, "Q"),
        "type": Field(40, "i"),
        "subtype": Field(44, "i"),
        "flags": Field(48, "I"),
        "block": Field(52, "I"),
        "attributes": Field(56, "I"),
        "crc32c": Field(60, "I"),
    },
)


class Slot(NamedTuple):
    """One slot; its fields are those of `SLOT`."""

    seq: int = 0
    time_ns: int = 0
    created_ns: int = 0
    position: int = 0
    length: int = 0
    type: int = 0
    subtype: int = 0
    flags: int = 0
    block: int = 0
    attributes: int = 0
    crc32c: int = 0

    @property
    def end(self) -> int:
        """Position where the next message may start."""
        return -(-(self.position + self.block + self.length) // ALIGN) * ALIGN


#: Public fields of a row in the reader table; see `queue/cursors.py` for all.
READER: Final = Record(
    READER_SIZE,
    {
        "state": Field(0, "I"),
        "pid": Field(4, "I"),
        "epoch": Field(8, "Q"),
        "position": Field(16, "Q"),
        "check": Field(120, "Q"),
    },
)
