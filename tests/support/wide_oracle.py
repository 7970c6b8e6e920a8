"""What does a wide queue hold, by `docs/queue-format.md` alone?

Nothing here comes from the library: it is written from the document, and raises where a file is
not exactly as the document says.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

__all__ = [
    "Header",
    "Inconsistent",
    "Listing",
    "ReaderEntry",
    "Stored",
    "crc32c",
    "list_queue",
    "parse_header",
]

PAGE: Final = 4096
READER_SIZE: Final = 128
SLOT_SIZE: Final = 64
ALIGN: Final = 64

WITH_CRC, MANY_WRITERS, SPARSE, KEEPS = 1, 2, 4, 8
HAS_STREAM, HAS_ATTRIBUTES, HAS_CRC, HAS_ORIGIN = 1, 2, 4, 8
CODECS: Final = {1: "lz4", 2: "zstd"}
LENGTH_SIZE: Final = 8

#: The parts of the header, each with its place; zeros are between them.
_FIXED: Final = struct.Struct("<QIIQQQIIQQQ16sqQI")
_HEAD: Final = struct.Struct("<Q")
_SLEEP: Final = struct.Struct("<II")
_ROOM: Final = struct.Struct("<III")
_LOCK: Final = struct.Struct("<IIII16sQQQQ")
_LINEAGE: Final = struct.Struct("64s")
_PARTS: Final = {
    0: _FIXED, 128: _HEAD, 192: _HEAD, 256: _SLEEP, 320: _ROOM, 384: _LOCK, 448: _LINEAGE,
}  # fmt: skip
_READER: Final = struct.Struct("<IIQQq88sQ")
_SLOT: Final = struct.Struct("<QqqQQiiIIII")


class Inconsistent(Exception):
    """The bytes are not those of a queue."""


class Header(NamedTuple):
    magic: int
    version: int
    flags: int
    epoch: int
    slots: int
    buffer_size: int
    readers: int
    compression: int
    slots_offset: int
    buffer_offset: int
    file_size: int
    stream: bytes
    created_ns: int
    first_seq: int
    check: int
    head: int
    tail: int
    sleeping: int
    wakes: int
    room_wanted: int
    room_wakes: int
    holders: int
    lock: int
    next_writer: int
    writer_pid: int
    state: int
    boot_id: bytes
    state_check: int
    guard: int
    guard_next: int
    head_check: int
    lineage: bytes


class ReaderEntry(NamedTuple):
    index: int  # type: ignore[assignment]
    state: int
    pid: int
    epoch: int
    position: int
    updated_ns: int
    name: str


class Stored(NamedTuple):
    """One message, as it is stored and as it was written."""

    seq: int
    time_ns: int
    created_ns: int
    position: int
    length: int
    type: int
    subtype: int
    flags: int
    block: int
    attributes_length: int
    crc32c: int
    stream: bytes | None
    attributes: bytes | None
    payload: bytes

    @property
    def end(self) -> int:
        """The position behind it, where the next message may begin."""
        return up(self.position + self.block + self.length, ALIGN)


class Listing(NamedTuple):
    """All that a queue says."""

    header: Header
    readers: list[ReaderEntry]
    messages: list[Stored]


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        entries.append(crc)
    return tuple(entries)


_CRC: Final = _table()


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum: reflected, begun and ended with all ones."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def need(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise Inconsistent(f"{what}: {found}")


def parse_header(page: bytes, file_size: int) -> Header:
    """Check the first page of a file against its size, and return its fields."""
    need(len(page) == PAGE, "the header is cut off", len(page))
    need(page[:8] == b"PENRING1", "magic", page[:8])
    fields: list[object] = []
    expected = 0
    for at, part in _PARTS.items():
        need(not any(page[expected:at]), f"bytes before {at} are not zero", page[expected:at])
        fields += part.unpack_from(page, at)
        expected = at + part.size
    need(not any(page[expected:]), f"bytes from {expected} on are not zero", "")
    h = Header(*fields)  # type: ignore[arg-type]
    need(h.version == 1, "version", h.version)
    need(h.flags < 16, "flags", h.flags)
    need(2 <= h.slots <= 1 << 40 and h.slots & (h.slots - 1) == 0, "slots", h.slots)
    sized = 0 < h.buffer_size <= 1 << 56 and h.buffer_size % PAGE == 0
    need(sized, "buffer_size", h.buffer_size)
    need(h.readers <= 1 << 16, "readers", h.readers)
    need(h.compression in {0, *CODECS}, "compression", h.compression)
    slots_offset = PAGE + up(h.readers * READER_SIZE, PAGE)
    buffer_offset = up(slots_offset + h.slots * SLOT_SIZE, PAGE)
    need(h.slots_offset == slots_offset, "slots_offset", h.slots_offset)
    need(h.buffer_offset == buffer_offset, "buffer_offset", h.buffer_offset)
    need(h.file_size == buffer_offset + h.buffer_size, "file_size", h.file_size)
    need(file_size >= h.file_size, "the file is cut off", file_size)
    need(h.first_seq <= h.tail <= h.head, "tail", (h.first_seq, h.tail, h.head))
    need(h.head - h.tail <= h.slots, "head", (h.tail, h.head))
    need(h.head_check <= h.head, "head_check", (h.head, h.head_check))
    need(h.sleeping <= 1 and h.room_wanted <= 1, "marks", (h.sleeping, h.room_wanted))
    need(h.state <= 2, "state", h.state)
    both = h.state | (h.state ^ 0xFFFFFFFF) << 32
    need(h.state_check in {0, both}, "state_check", h.state_check)
    check = crc32c(page[:104] + page[448:512]) or 1
    need(h.check in {0, check}, f"check, should be {check:#x}", hex(h.check))
    return h


def list_queue(path: str | Path) -> Listing:
    """Return everything that the queue in this file holds. Nobody writes to it meanwhile.

    :raises Inconsistent: a byte is not as the format says.
    """
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        header = parse_header(memory[:PAGE], len(memory))
        readers = [_reader(memory, index) for index in range(header.readers)]
        messages: list[Stored] = []
        for seq in range(header.tail, header.head):
            messages.append(_message(memory, header, seq, messages[-1] if messages else None))
    if messages:
        span = messages[-1].end - messages[0].position
        need(span <= header.buffer_size, "the messages overlap", span)
    return Listing(header, [entry for entry in readers if entry.state], messages)


def _reader(memory: mmap.mmap, index: int) -> ReaderEntry:
    fields = _READER.unpack_from(memory, PAGE + index * READER_SIZE)
    state, pid, epoch, position, updated_ns, short, check = fields
    need(state <= 2, f"state of reader {index}", state)
    if state == 0:  # what it was before does not matter
        return ReaderEntry(index, 0, 0, 0, 0, 0, "")
    padded = short if short[-1] == 0 else short + check.to_bytes(8, "little")
    name, zero, _ = padded.partition(b"\0")
    need(bool(zero), f"name of reader {index} has no end", padded)
    need(bool(name) == (state == 1), f"name of reader {index}", padded)
    if state == 1 and short[-1] == 0 and check:
        crc = crc32c(short + struct.pack("<QQ", epoch, position))
        expected = (position & 0xFFFFFFFF) << 32 | crc or 1
        need(check == expected, f"check of reader {index}, should be {expected:#x}", hex(check))
    return ReaderEntry(index, state, pid, epoch, position, updated_ns, name.decode())


def _message(memory: mmap.mmap, header: Header, seq: int, before: Stored | None) -> Stored:
    at = header.slots_offset + seq % header.slots * SLOT_SIZE
    slot = memory[at : at + SLOT_SIZE]
    found, time_ns, created_ns, position, length, type, subtype, flags, block, attributes, crc = (
        _SLOT.unpack(slot)
    )
    who = f"message {seq}"
    need(found == seq, f"{who}: seq", found)
    need(flags < 16, f"{who}: flags", flags)
    need(bool(flags & HAS_CRC) == bool(header.flags & WITH_CRC), f"{who}: flag crc", flags)
    need(attributes == 0 or bool(flags & HAS_ATTRIBUTES), f"{who}: attributes", attributes)
    stream_size = 16 if flags & HAS_STREAM else 0
    origin_size = 8 if flags & HAS_ORIGIN else 0
    expected = up(stream_size + attributes, 8) + origin_size
    need(block == expected, f"{who}: block", (block, attributes))
    size = header.buffer_size
    need(position % ALIGN == 0, f"{who}: position", position)
    need(position % size + block + length <= size, f"{who}: end", (position, block, length))
    if before is not None:
        need(created_ns >= before.created_ns, f"{who}: created_ns", created_ns)
        places = {before.end, up(before.end, size)}
        need(position in places, f"{who}: position, not in {places}", position)
    start = header.buffer_offset + position % size
    data = memory[start : start + block + length]
    expected = crc32c(slot[:60] + data) if flags & HAS_CRC else 0
    need(crc == expected, f"{who}: crc32c, should be {expected:#x}", hex(crc))
    fill = data[stream_size + attributes : block - origin_size]
    need(not any(fill), f"{who}: fill", data[:block])
    stream = data[:16] if stream_size else header.stream if any(header.stream) else None
    own = data[stream_size : stream_size + attributes] if flags & HAS_ATTRIBUTES else None
    payload = _expand(who, header, data[block:])
    return Stored(
        seq, time_ns, created_ns, position, length, type, subtype, flags, block, attributes, crc,
        stream, own, payload,
    )  # fmt: skip


def _expand(who: str, header: Header, stored: bytes) -> bytes:
    if header.compression == 0:
        return stored
    need(len(stored) >= LENGTH_SIZE, f"{who}: too short to be compressed", len(stored))
    length = int.from_bytes(stored[:LENGTH_SIZE], "little")
    need(length <= header.buffer_size, f"{who}: length before compression", length)
    if length == 0:
        return b""
    frame = pa.BufferReader(stored[LENGTH_SIZE:])
    try:
        # Not `Codec.decompress`, which believes the length that it is given.
        payload: bytes = pa.CompressedInputStream(frame, CODECS[header.compression]).read()
    except (OSError, pa.ArrowException) as error:
        raise Inconsistent(f"{who}: {error}") from error
    need(len(payload) == length, f"{who}: bytes after decompression", len(payload))
    return payload
