"""How do messages of one length travel together, without a look at each of them?

What `fmq_messages` does for any messages, for those whose part headers are known beforehand. None
is returned for every other form; the caller then takes the long way.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.protocols.lrose.fmq_wire import PartType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["MOST", "decode_rows", "encode_rows", "encode_same", "split_rows"]

_HEADER_SIZE: Final = 64
_PART: Final = struct.Struct(">3i12x")
#: type, subtype, len, preCompressed, uncompressedLen, id, time; and the padding.
_INFO: Final = struct.Struct(">7i4x")
_FIELDS: Final = 7
_LEN: Final = 2
_ALIGNMENT: Final = 8
_INT: Final = struct.Struct(">i")
#: Where the len of the first DATA part is.
_FIRST_LEN: Final = _HEADER_SIZE + _PART.size + 8
#: More messages than this in one request or reply take the long way: what is kept is bounded.
MOST: Final = 4096
_KEPT: Final = 16
_LARGEST: Final = 2**31 - 1


def _stride(size: int) -> int:
    """Return the bytes of an INFO and a payload, with their padding."""
    return _INFO.size + (size // _ALIGNMENT + 1) * _ALIGNMENT


@lru_cache(_KEPT)
def _part_headers(count: int, size: int) -> bytes:
    start, stride = _HEADER_SIZE + 2 * count * _PART.size, _stride(size)
    parts = np.zeros((count, 2, 6), ">i4")
    parts[:, 0, 0] = PartType.INFO
    parts[:, 0, 1] = np.arange(start, start + count * stride, stride)
    parts[:, 0, 2] = _FIELDS * 4
    parts[:, 1, 0] = PartType.DATA
    parts[:, 1, 1] = parts[:, 0, 1] + _INFO.size
    parts[:, 1, 2] = size
    return parts.tobytes()


@lru_cache(_KEPT)
def _payloads_of(count: int, size: int) -> struct.Struct:
    padding = _stride(size) - _INFO.size - size
    return struct.Struct(f"{_INFO.size}x{size}s{padding}x" * count)


def _fits(count: int, size: int) -> bool:
    whole = _HEADER_SIZE + count * (2 * _PART.size + _stride(size))
    return 1 < count <= MOST and whole < _LARGEST


def encode_same(
    header: bytes,
    payloads: Sequence[bytes | bytearray | memoryview],
    type: int,
    subtype: int,
    time: int = 0,
) -> bytes | None:
    """Return a request with plain messages that differ in their payloads only."""
    count, size = len(payloads), len(payloads[0])
    if not _fits(count, size):
        return None
    info = _INFO.pack(type, subtype, size, 0, size, 0, time)
    padding = bytes(_stride(size) - _INFO.size - size)
    pieces = list(payloads)
    pieces[0] = b"".join((header, _part_headers(count, size), info, pieces[0]))
    pieces[-1] = b"".join((pieces[-1], padding))
    return (padding + info).join(pieces)


def encode_rows(
    header: bytes, infos: npt.NDArray[np.int64], payloads: npt.NDArray[np.uint8]
) -> bytearray | None:
    """Return a reply with messages that are rows of bytes; `infos` has what is in an INFO."""
    count, size = payloads.shape
    if not _fits(count, size):
        return None
    headers = _part_headers(count, size)
    start, stride = _HEADER_SIZE + len(headers), _stride(size)
    whole = bytearray(start + count * stride)
    whole[:_HEADER_SIZE] = header
    whole[_HEADER_SIZE:start] = headers
    body = np.frombuffer(whole, np.uint8, offset=start).reshape(count, stride)
    body[:, : _FIELDS * 4].view(">i4")[:] = infos
    body[:, _INFO.size : _INFO.size + size] = payloads
    return whole


def decode_rows(
    payload: bytes, count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], int] | None:
    """Return the INFOs of messages of one length, which of their columns are the same, that length.

    The payloads lie where `split_rows` finds them.
    """
    if not 1 < count <= MOST or len(payload) < _FIRST_LEN + 4:
        return None
    size = _INT.unpack_from(payload, _FIRST_LEN)[0]
    if size < 0:
        return None
    stride = _stride(size)
    start = _HEADER_SIZE + 2 * count * _PART.size
    # Nothing is made of the numbers before there are the bytes for it.
    if start + count * stride > len(payload):
        return None
    if not payload.startswith(_part_headers(count, size), _HEADER_SIZE):
        return None
    body = np.frombuffer(payload, np.uint8, count * stride, start).reshape(count, stride)
    infos = body[:, : _FIELDS * 4].view(">i4").astype(np.int32)
    is_same = (infos == infos[0]).all(axis=0)
    if not is_same[_LEN] or infos[0, _LEN] != size:
        return None
    return infos, is_same, size


def split_rows(payload: bytes, count: int, size: int) -> tuple[bytes, ...]:
    """Return the payloads of messages whose form is known by `decode_rows`."""
    return _payloads_of(count, size).unpack_from(payload, _HEADER_SIZE + 2 * count * _PART.size)
