"""What are the bytes of jrt-controller's datagrams and frames?

A datagram is the 16 bytes of a stream id and one protobuf message. Towards input streams the same
bytes travel over TCP with a length prefix (docs/specs/jrtc.md 5.1).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import Malformed, MessageTooLarge
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.core.batch import Batch

__all__ = [
    "DATA_PORT",
    "DECODER_PORT",
    "GATEWAY_PORT",
    "ID_SIZE",
    "LARGEST_DATAGRAM",
    "LARGEST_FRAME",
    "FrameDecoder",
    "batch_of_datagrams",
    "pack",
    "pack_frame",
    "payload_bytes",
    "payload_sizes",
    "schema_key",
    "unpack",
]

#: Where a collector takes datagrams.
DATA_PORT: Final = 20788
#: Where it takes schemas, by gRPC.
DECODER_PORT: Final = 20789
#: Where it takes schemas, by HTTP.
GATEWAY_PORT: Final = 20787

ID_SIZE: Final = 16
#: What a datagram of IPv4 can carry: the id and the message.
LARGEST_DATAGRAM: Final = 65_507
#: What a frame's length can say: the id and the message.
LARGEST_FRAME: Final = 65_535

_LENGTH: Final = struct.Struct("<H")
#: The bits of a path and a name: what is not the version, the destination or the device.
_OF_SCHEMA: Final = (1 << 108) - 1


def schema_key(stream: StreamId) -> StreamId:
    """Return the key of a stream's schema: the id without version, destination and device.

    One schema serves a stream on all devices, wherever it is forwarded to.
    """
    number = int.from_bytes(stream, "big") & _OF_SCHEMA
    return StreamId(number.to_bytes(ID_SIZE, "big"))


# --- datagrams -------------------------------------------------------------------------------


def pack(stream: StreamId, payload: bytes) -> bytes:
    """Return the datagram of a message.

    :raises MessageTooLarge: it does not fit a datagram.
    """
    if len(payload) > LARGEST_DATAGRAM - ID_SIZE:
        raise MessageTooLarge(len(payload), LARGEST_DATAGRAM - ID_SIZE)
    return stream + payload


def unpack(datagram: bytes) -> tuple[StreamId, bytes]:
    """Return the stream and the payload of a datagram; the payload may be empty.

    :raises Malformed: it is shorter than an id.
    """
    if len(datagram) < ID_SIZE:
        found = f"{len(datagram)} bytes"
        raise Malformed("datagram", "its size", f"at least {ID_SIZE} bytes", found)
    return StreamId(datagram[:ID_SIZE]), datagram[ID_SIZE:]


def batch_of_datagrams(datagrams: Sequence[bytes], first_seq: int, now_ns: int) -> Batch:
    """Return datagrams of at least 16 bytes each as one batch of messages."""
    count = len(datagrams)
    whole = np.frombuffer(b"".join(datagrams), np.uint8)
    lengths = np.fromiter(map(len, datagrams), np.int64, count)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    ids = whole[starts[:, None] + np.arange(ID_SIZE)] if count else whole
    is_payload = np.ones(len(whole), np.bool_)
    is_payload[(starts[:, None] + np.arange(ID_SIZE)).ravel()] = False
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths - ID_SIZE, out=offsets[1:])
    now = pa.Array.from_buffers(pa.int64(), count, [None, _numbers(np.full(count, now_ns))])
    zeros = pa.Array.from_buffers(pa.int32(), count, [None, _numbers(np.zeros(count, np.int32))])
    seqs = np.arange(first_seq, first_seq + count)
    return pa.RecordBatch.from_arrays(
        [
            pa.Array.from_buffers(pa.int64(), count, [None, _numbers(seqs)]),
            now,
            now,
            zeros,
            zeros,
            pa.Array.from_buffers(pa.binary(ID_SIZE), count, [None, pa.py_buffer(ids.tobytes())]),
            pa.nulls(count, pa.binary()),
            pa.Array.from_buffers(
                pa.binary(),
                count,
                [None, pa.py_buffer(offsets), pa.py_buffer(whole[is_payload].tobytes())],
            ),
        ],
        schema=BATCH_SCHEMA,
    )


def payload_sizes(payloads: pa.BinaryArray) -> NDArray[np.int32]:
    """Return the size of each payload in bytes."""
    offsets = payloads.buffers()[1]
    if offsets is None or not len(payloads):
        return np.zeros(0, np.int32)
    places = np.frombuffer(offsets, np.int32, len(payloads) + 1, 4 * payloads.offset)
    return places[1:] - places[:-1]


def payload_bytes(batch: Batch) -> int:
    """Return the total size of the payloads in bytes."""
    return int(payload_sizes(batch.column("payload")).sum())


def _numbers(values: np.ndarray[tuple[int], np.dtype[np.int64 | np.int32]]) -> pa.Buffer:
    return pa.py_buffer(np.ascontiguousarray(values))


# --- frames ----------------------------------------------------------------------------------


def pack_frame(stream: StreamId, payload: bytes) -> bytes:
    """Return the TCP frame of a message to an input stream.

    :raises MessageTooLarge: its length does not fit 16 bits.
    """
    size = ID_SIZE + len(payload)
    if size > LARGEST_FRAME:
        raise MessageTooLarge(len(payload), LARGEST_FRAME - ID_SIZE)
    return _LENGTH.pack(size) + stream + payload


class FrameDecoder:
    """An incremental decoder of TCP frames. It buffers one frame at most."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_empty(self) -> bool:
        """Whether no partial frame is buffered."""
        return not self._rest

    def feed(self, data: bytes) -> Iterator[tuple[StreamId, bytes]]:
        """Add received bytes, and yield complete messages; consume them before the next call.

        :raises Malformed: a frame is shorter than an id; the rest of the stream is lost.
        """
        data = self._rest + data
        at = 0
        try:
            while len(data) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(data, at)
                if size < ID_SIZE:
                    expected = f"at least {ID_SIZE} bytes"
                    raise Malformed("frame", "its length", expected, f"{size} bytes")
                begin = at + _LENGTH.size
                if len(data) - begin < size:
                    return
                at = begin + size
                yield StreamId(data[begin : begin + ID_SIZE]), data[begin + ID_SIZE : at]
        finally:
            self._rest = data[at:]
