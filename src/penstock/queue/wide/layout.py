"""What are the bytes of a wide queue?

`include/penstock/ring.h` is the C side of this; `docs/queue-format.md` explains both.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.core.errors import DamagedQueue, Unsupported
from penstock.core.interfaces import Ancestor
from penstock.queue.wide import _ring

if TYPE_CHECKING:
    import mmap

__all__ = [
    "HEADER",
    "LINEAGE",
    "LIVE_READER",
    "LIVE_WRITER",
    "MAGIC",
    "MAX_BUFFER",
    "MAX_READERS",
    "MAX_SLOTS",
    "PAGE",
    "READER",
    "READER_SIZE",
    "SLOT",
    "VERSION",
    "Geometry",
    "HeaderFlag",
    "Rows",
    "SlotFlag",
    "State",
    "check_header",
    "check_of",
    "check_progress",
    "header_of",
    "lineage_of",
    "slots_of",
    "state_of",
    "state_word",
]

#: "PENRING1", read as a little-endian number.
MAGIC: Final = int.from_bytes(b"PENRING1", "little")
VERSION: Final = 1
PAGE: Final = 4096
READER_SIZE: Final = 128
#: Messages begin at multiples of this.
ALIGN: Final = 64

#: The last message that was published keeps its slot while the next one is written.
MIN_SLOTS: Final = 2
MAX_SLOTS: Final = 1 << 40
MAX_BUFFER: Final = 1 << 56
MAX_READERS: Final = 1 << 16

#: Whoever uses a queue locks a byte this far behind its end; the kernel unlocks it when he dies.
LIVE_READER: Final = 1 << 62
LIVE_WRITER: Final = LIVE_READER + (1 << 24)

#: Numbers of compression that are known; see `Compression`.
_COMPRESSIONS: Final = 2

#: Epochs that a header remembers.
LINEAGE: Final = 4

#: A writer may have gone around the queue between two looks at it.
_LOOKS: Final = 100

#: A structured array of numpy.
Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"


class HeaderFlag(IntFlag):
    """What a queue is like as a whole."""

    #: Every message has a checksum.
    CRC = 1
    #: Writers take turns, under the lock in the header.
    MANY_WRITERS = 2
    #: Not all of the file has its disk space yet.
    SPARSE = 4
    #: Nothing is overwritten: a segment of a log.
    KEEPS = 8


class State(IntEnum):
    """What is to become of a queue."""

    LIVE = 0
    #: No more messages will come.
    SEALED = 1
    #: The path names another queue by now.
    REPLACED = 2


class SlotFlag(IntFlag):
    """What a message has besides its payload."""

    STREAM = 1
    ATTRIBUTES = 2
    CRC = 4


def _dtype(size: int, **fields: tuple[str, int]) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [format for format, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": size,
        }
    )


HEADER: Final = _dtype(
    PAGE,
    magic=("<u8", 0),
    version=("<u4", 8),
    flags=("<u4", 12),
    epoch=("<u8", 16),
    slots=("<u8", 24),
    buffer_size=("<u8", 32),
    readers=("<u4", 40),
    compression=("<u4", 44),
    slots_offset=("<u8", 48),
    buffer_offset=("<u8", 56),
    file_size=("<u8", 64),
    stream=("V16", 72),
    created_ns=("<i8", 88),
    first_seq=("<u8", 96),
    check=("<u4", 104),
    head=("<u8", 128),
    tail=("<u8", 192),
    sleeping=("<u4", 256),
    wakes=("<u4", 260),
    room_wanted=("<u4", 320),
    room_wakes=("<u4", 324),
    holders=("<u4", 328),
    lock=("<u4", 384),
    next_writer=("<u4", 388),
    writer_pid=("<u4", 392),
    state=("<u4", 396),
    boot_id=("V16", 400),
    state_check=("<u8", 416),
    guard=("<u8", 424),
    guard_next=("<u8", 432),
    lineage=(f"({LINEAGE},2)<u8", 448),
)

SLOT: Final = _dtype(
    64,
    seq=("<u8", 0),
    time_ns=("<i8", 8),
    created_ns=("<i8", 16),
    position=("<u8", 24),
    length=("<u8", 32),
    type=("<i4", 40),
    subtype=("<i4", 44),
    flags=("<u4", 48),
    block=("<u4", 52),
    attributes=("<u4", 56),
    crc32c=("<u4", 60),
)


#: What of a row in the reader table others may look at; `queue/cursor_entries.py` has all of it.
READER: Final = _dtype(
    READER_SIZE,
    state=("<u4", 0),
    pid=("<u4", 4),
    epoch=("<u8", 8),
    position=("<u8", 16),
    check=("<u8", 120),
)


class Geometry(NamedTuple):
    """How large the parts of a queue are."""

    slots: int
    buffer_size: int
    readers: int

    @property
    def slots_offset(self) -> int:
        return PAGE + _whole_pages(self.readers * READER_SIZE)

    @property
    def buffer_offset(self) -> int:
        return _whole_pages(self.slots_offset + self.slots * SLOT.itemsize)

    @property
    def file_size(self) -> int:
        return self.buffer_offset + self.buffer_size

    @classmethod
    def fitting(cls, slots: int, buffer_size: int, readers: int) -> Geometry:
        """Return the next larger geometry that the format has: slots are a power of two."""
        return cls(1 << max(1, (slots - 1).bit_length()), _whole_pages(buffer_size), readers)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def header_of(mapping: mmap.mmap) -> Rows:
    """Lay the header's fields over a queue; an array of one."""
    return np.frombuffer(mapping, HEADER, 1)


def slots_of(mapping: mmap.mmap, geometry: Geometry) -> Rows:
    """Lay the slot table over a queue."""
    return np.frombuffer(mapping, SLOT, geometry.slots, geometry.slots_offset)


def check_of(header: Rows) -> int:
    """Return the checksum of what only recovery changes in a header."""
    assert HEADER.fields is not None
    page = header.view(np.uint8)
    at, lineage = HEADER.fields["check"][1], HEADER.fields["lineage"][1]
    kept = page[lineage : lineage + HEADER["lineage"].itemsize]
    return _ring.crc32c(page[:at].tobytes() + kept.tobytes()) or 1


def lineage_of(header: Rows) -> tuple[Ancestor, ...]:
    """Return the epochs that a queue continues, the oldest first."""
    return tuple(Ancestor(int(epoch), int(end)) for epoch, end in header["lineage"][0] if epoch)


def state_word(state: int) -> int:
    """Return a state as `state_check` has it: with its complement above it."""
    return state | (~state & 0xFFFF_FFFF) << 32


def state_of(header: Rows) -> int:
    """Return what is to become of a queue.

    `state_check` is believed before `state`, if its halves agree: a bit of `state` may have
    changed, or who stored both was killed between.
    """
    both = int(header["state_check"][0])
    state = both & 0xFFFF_FFFF
    return state if both and both == state_word(state) else int(header["state"][0])


def check_header(path: str, header: bytes, file_size: int) -> Geometry:
    """Make sure that a queue of this version begins here, and that all of it is there.

    :raises DamagedQueue: names the first field that is wrong.
    :raises Unsupported: it is of a newer version.
    """
    if len(header) < PAGE:
        raise DamagedQueue(
            path, "the header", 0, f"{PAGE} bytes", len(header), hint="the file was cut off"
        )
    fields = np.frombuffer(header, HEADER, 1)
    numbers = [name for name in HEADER.names or () if HEADER[name].kind in "iu"]
    found = {name: int(fields[name][0]) for name in numbers}

    def need(field: str, expected: object, *, holds: bool) -> None:
        if not holds:
            assert HEADER.fields is not None
            offset = HEADER.fields[field][1]
            raise DamagedQueue(path, field, offset, expected, found[field])

    need("magic", MAGIC, holds=found["magic"] == MAGIC)
    if found["version"] > VERSION:
        raise Unsupported(
            f"queue {path} has version {found['version']} of the wide layout; "
            f"this Penstock knows version {VERSION}",
            hint="use a newer Penstock",
        )
    need("version", VERSION, holds=found["version"] == VERSION)
    slots = found["slots"]
    need(
        "slots",
        "a power of two",
        holds=MIN_SLOTS <= slots <= MAX_SLOTS and slots & (slots - 1) == 0,
    )
    size = found["buffer_size"]
    need("buffer_size", f"a multiple of {PAGE}", holds=0 < size <= MAX_BUFFER and size % PAGE == 0)
    need("readers", f"up to {MAX_READERS}", holds=found["readers"] <= MAX_READERS)
    need("compression", f"up to {_COMPRESSIONS}", holds=found["compression"] <= _COMPRESSIONS)
    if both := found["state_check"]:
        word = state_word(both & 0xFFFF_FFFF)
        need("state_check", "a state and its complement", holds=both == word)
    need("state", f"up to {max(State)}", holds=state_of(fields) <= max(State))
    geometry = Geometry(slots, size, found["readers"])
    for field in ("slots_offset", "buffer_offset", "file_size"):
        expected = getattr(geometry, field)
        need(field, expected, holds=found[field] == expected)
    if found["check"]:
        need("check", check_of(fields), holds=found["check"] == check_of(fields))
    if file_size < geometry.file_size:
        raise DamagedQueue(
            path, "the file", 0, f"{geometry.file_size} bytes", file_size, hint="it was cut off"
        )
    return geometry


def check_progress(path: str, header: Rows, geometry: Geometry) -> None:
    """Make sure that the numbers which a writer changes all the time fit together.

    :raises DamagedQueue: they do not.
    """
    for _ in range(_LOOKS):
        # In this order: both only grow, so the second is never below the first.
        first, oldest = int(header["first_seq"][0]), int(header["tail"][0])
        head = int(header["head"][0])
        if first <= oldest <= head <= oldest + geometry.slots:
            return
    field, expected = "tail", f"from {first} to {head}"
    if first <= oldest <= head:
        field, expected = "head", f"up to {oldest + geometry.slots}"
    assert HEADER.fields is not None
    raise DamagedQueue(path, field, HEADER.fields[field][1], expected, int(header[field][0]))
