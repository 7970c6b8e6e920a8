"""How is a WRITE of one plain message, the most usual request, made and known at a glance?

Whole frames, because each layer that looks at a request costs as much as sending it. Whatever has
another form is not known here: `fmq_wire` takes it apart.
"""

from __future__ import annotations

import struct
from typing import Final

from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_messages import encode_message
from penstock.protocols.lrose.fmq_wire import SOCKET_ID, Op
from penstock.protocols.lrose.sku import HEADER_SIZE, encode_header

__all__ = [
    "PAYLOAD_AT",
    "REPLY_SIZE",
    "encode_write",
    "encode_written",
    "find_write",
    "find_written",
]

_EMPTY: Final = encode_header(SOCKET_ID, 1, 0) + encode_message(DsMessage(Op.WRITE), b"", 0, 0)
#: Where the payload begins. Before it: cookie and id; len and seq_no; DsMessage, part INFO and the
#: type and offset of part DATA; its len; its spare; INFO and its padding.
PAYLOAD_AT: Final = 164
_WRITE: Final = struct.Struct(">12s2i96si12s7i4x")
_ID, _, _, _CONSTANT, _, _SPARE, *_ = _WRITE.unpack_from(_EMPTY)
_NUMBERS: Final = struct.Struct(">12xi4x96xi12x7i4x")
_PADDING: Final = [bytes(8 - size) for size in range(8)]

_DONE: Final = encode_header(SOCKET_ID, 1, 64) + DsMessage(Op.REPLY, Op.WRITE).to_bytes()
#: Cookie, id and len; seq_no; type and subType; mode; the rest.
_WRITTEN: Final = struct.Struct(">16si8si52s")
_FRONT, _, _TYPES, _, _REST = _WRITTEN.unpack(_DONE)
_MODE: Final = struct.Struct(">i")
_MODE_AT: Final = 28
_REST_AT: Final = 32
REPLY_SIZE: Final = len(_DONE)


def encode_write(seq: int, payload: bytes, type: int, subtype: int) -> bytes:
    """Return the frame of a request with one message.

    :raises struct.error: a number does not fit in 32 bits.
    """
    size = len(payload)
    padding = _PADDING[size & 7]
    front = _WRITE.pack(
        _ID, PAYLOAD_AT - HEADER_SIZE + size + len(padding), seq, _CONSTANT, size, _SPARE,
        type, subtype, size, 0, size, 0, 0,
    )  # fmt: skip
    return b"".join((front, payload, padding))


def find_write(buffer: bytes | bytearray, size: int) -> tuple[int, int, int] | None:
    """Know the request at the start of a buffer, if it is such a one and all of `size` bytes.

    Returns the message's type, its subtype, and where its payload ends; it begins at `PAYLOAD_AT`.
    """
    if size < PAYLOAD_AT or not (
        buffer.startswith(_CONSTANT, HEADER_SIZE) and buffer.startswith(_ID)
    ):
        return None
    whole, length, type, subtype, said, packed, _, _, time = _NUMBERS.unpack_from(buffer)
    end = PAYLOAD_AT + length
    if (
        length != said
        or whole != size - HEADER_SIZE
        or packed
        or time
        or not PAYLOAD_AT <= end <= size
    ):
        return None
    return type, subtype, end


def encode_written(seq: int, mode: int) -> bytes:
    """Return the frame that says that a WRITE was carried out."""
    return _WRITTEN.pack(_FRONT, seq, _TYPES, mode, _REST)


def find_written(buffer: bytes | bytearray, size: int) -> int | None:
    """Return `mode` of the reply at the start of a buffer, if it is one to a WRITE, and no error.

    None for anything else, or if there are not just its bytes.
    """
    if (
        size != REPLY_SIZE
        or not buffer.startswith(_FRONT)
        or not buffer.startswith(_TYPES, HEADER_SIZE)
        or not buffer.startswith(_REST, _REST_AT)
    ):
        return None
    mode: int = _MODE.unpack_from(buffer, _MODE_AT)[0]
    return mode
