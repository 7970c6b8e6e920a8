"""How large would an Arrow stream become in memory? Told from its headers, before it is read.

A compressed buffer says itself how large it will be, and Arrow believes it. The few fields that
are needed are taken from the flatbuffers of Arrow's `Message.fbs`, which Arrow has verified.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import pyarrow as pa

__all__ = ["END", "Extent", "extent_of"]

#: What a writer puts at the end of a stream.
END: Final = b"\xff\xff\xff\xff\0\0\0\0"

_DICTIONARY, _RECORDS = 2, 3
_INT64 = struct.Struct("<q")
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")
_UINT16 = struct.Struct("<H")


class Extent(NamedTuple):
    """What a stream holds."""

    rows: int
    #: Bytes of all buffers, unpacked.
    size: int
    #: Bytes of the payload that the stream takes.
    length: int


def extent_of(payload: bytes) -> Extent:
    """Add up the messages of a stream.

    :raises pa.ArrowInvalid: it is not a stream, or its parts point to nowhere.
    """
    source = pa.BufferReader(payload)
    reader = pa.ipc.MessageReader.open_stream(source)
    rows = size = 0
    try:
        for message in reader:
            found = _records(bytes(message.metadata))
            if found is None:
                continue
            table, is_dictionary = found
            length, unpacked = _measure(table, message.body)
            rows += 0 if is_dictionary else length
            size += unpacked
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid(f"a header points to nowhere: {error}") from None
    return Extent(rows, size, source.tell())


class _Table:
    """A table of a flatbuffer: fields by their number."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self._at = at
        self._fields = at - _INT32.unpack_from(data, at)[0]

    def place(self, number: int) -> int | None:
        """Return where a field is, if it is there."""
        size = _UINT16.unpack_from(self.data, self._fields)[0]
        entry = 4 + 2 * number
        if entry + 2 > size:
            return None
        offset = _UINT16.unpack_from(self.data, self._fields + entry)[0]
        return self._at + offset if offset else None

    def follow(self, number: int) -> int | None:
        """Return where a field points to."""
        place = self.place(number)
        return None if place is None else place + _UINT32.unpack_from(self.data, place)[0]


def _records(metadata: bytes) -> tuple[_Table, bool] | None:
    message = _Table(metadata, _UINT32.unpack_from(metadata, 0)[0])
    kind, header = message.place(1), message.follow(2)
    if kind is None or header is None or metadata[kind] not in {_DICTIONARY, _RECORDS}:
        return None
    table = _Table(metadata, header)
    if metadata[kind] == _RECORDS:
        return table, False
    inner = table.follow(1)
    return None if inner is None else (_Table(metadata, inner), True)


def _measure(table: _Table, body: pa.Buffer | None) -> tuple[int, int]:
    """Return the rows of a record batch, and its bytes when unpacked."""
    place = table.place(0)
    rows = 0 if place is None else _INT64.unpack_from(table.data, place)[0]
    if rows < 0:
        raise pa.ArrowInvalid(f"a batch of {rows} rows")
    buffers = table.follow(2)
    if buffers is None or body is None:
        return rows, 0
    raw = memoryview(body)
    is_packed = table.place(3) is not None
    count = _UINT32.unpack_from(table.data, buffers)[0]
    size = 0
    for number in range(count):
        entry = buffers + 4 + 16 * number
        offset = _INT64.unpack_from(table.data, entry)[0]
        length = _INT64.unpack_from(table.data, entry + 8)[0]
        if offset < 0 or length < 0 or offset + length > len(raw):
            raise pa.ArrowInvalid("a buffer lies outside of its message")
        unpacked = length
        if is_packed and length:
            # -1: this buffer is as it is, though others are packed.
            unpacked = max(length, _INT64.unpack_from(raw, offset)[0])
        size += unpacked
    return rows, size
