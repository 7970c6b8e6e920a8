"""How are messages encoded in a WRITE and in a reply to a READ? (docs/specs/lrose.md 2.5).

Messages of one length are encoded and decoded together, not one by one, because their part headers
are known beforehand; otherwise those functions return None, and the general ones take over. A
WRITE of one plain message, the most usual request, is encoded and recognized as one frame.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.core.errors import (
    AlreadyExists,
    DamagedQueue,
    InvalidOption,
    InvalidURL,
    Malformed,
    MessageTooLarge,
    NotFound,
    Unsupported,
)
from penstock.protocols.lrose._short import Forms
from penstock.protocols.lrose.ds_message import (
    Category,
    DsMessage,
    ErrorCode,
    error_reply,
    int_part,
)
from penstock.protocols.lrose.fmq_wire import OURS, SOCKET_ID, Failure, Op, PartType
from penstock.protocols.lrose.sku import encode_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = [
    "LARGEST_INFO",
    "MOST",
    "NOTHING_THERE",
    "PAYLOAD_AT",
    "Messages",
    "decode_messages",
    "decode_rows",
    "encode_message",
    "encode_messages",
    "encode_rows",
    "encode_write",
    "encode_written",
    "failure_reply",
    "find_write",
    "find_written",
    "is_write",
    "marked_reply",
    "reply_header",
    "reply_with",
    "split_rows",
    "written_reply",
]

# --- messages of one length ---------------------------------------------------------------------

_HEADER_SIZE: Final = 64
_PART: Final = struct.Struct(">3i12x")
#: type, subtype, len, preCompressed, uncompressedLen, id, time; and the padding.
_PADDED_INFO: Final = struct.Struct(">7i4x")
_FIELDS: Final = 7
_LEN: Final = 2
_ALIGNMENT: Final = 8
_INT: Final = struct.Struct(">i")
#: Where the len of the first DATA part is.
_FIRST_LEN: Final = _HEADER_SIZE + _PART.size + 8
#: Larger requests and replies use the general functions, which bounds the cached headers.
MOST: Final = 4096
_KEPT: Final = 16
_LARGEST: Final = 2**31 - 1


def _stride(size: int) -> int:
    """Return the size of an INFO and a payload, with padding."""
    return _PADDED_INFO.size + (size // _ALIGNMENT + 1) * _ALIGNMENT


@lru_cache(_KEPT)
def _part_headers(count: int, size: int) -> bytes:
    start, stride = _HEADER_SIZE + 2 * count * _PART.size, _stride(size)
    parts = np.zeros((count, 2, 6), ">i4")
    parts[:, 0, 0] = PartType.INFO
    parts[:, 0, 1] = np.arange(start, start + count * stride, stride)
    parts[:, 0, 2] = _FIELDS * 4
    parts[:, 1, 0] = PartType.DATA
    parts[:, 1, 1] = parts[:, 0, 1] + _PADDED_INFO.size
    parts[:, 1, 2] = size
    return parts.tobytes()


@lru_cache(_KEPT)
def _payloads_of(count: int, size: int) -> struct.Struct:
    padding = _stride(size) - _PADDED_INFO.size - size
    return struct.Struct(f"{_PADDED_INFO.size}x{size}s{padding}x" * count)


def _fits(count: int, size: int) -> bool:
    whole = _HEADER_SIZE + count * (2 * _PART.size + _stride(size))
    return 1 < count <= MOST and whole < _LARGEST


def _encode_same(
    header: bytes,
    payloads: Sequence[bytes | bytearray | memoryview],
    type: int,
    subtype: int,
    time: int = 0,
) -> bytes | None:
    """Encode a request with plain messages that differ only in their payloads."""
    count, size = len(payloads), len(payloads[0])
    if not _fits(count, size):
        return None
    info = _PADDED_INFO.pack(type, subtype, size, 0, size, 0, time)
    padding = bytes(_stride(size) - _PADDED_INFO.size - size)
    pieces = list(payloads)
    pieces[0] = b"".join((header, _part_headers(count, size), info, pieces[0]))
    pieces[-1] = b"".join((pieces[-1], padding))
    return (padding + info).join(pieces)


def encode_rows(
    header: bytes, infos: npt.NDArray[np.int64], payloads: npt.NDArray[np.uint8]
) -> bytearray | None:
    """Encode a reply with messages that are rows of bytes; `infos` has the fields of the INFOs."""
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
    body[:, _PADDED_INFO.size : _PADDED_INFO.size + size] = payloads
    return whole


def decode_rows(
    payload: bytes, count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], int] | None:
    """Return the INFOs of messages of one length, their constant columns, and that length.

    `split_rows` returns the payloads.
    """
    if not 1 < count <= MOST or len(payload) < _FIRST_LEN + 4:
        return None
    size = _INT.unpack_from(payload, _FIRST_LEN)[0]
    if size < 0:
        return None
    stride = _stride(size)
    start = _HEADER_SIZE + 2 * count * _PART.size
    # Nothing is allocated from the numbers before the bytes for it are there.
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
    """Return the payloads of messages that `decode_rows` has decoded."""
    return _payloads_of(count, size).unpack_from(payload, _HEADER_SIZE + 2 * count * _PART.size)


# --- any messages -------------------------------------------------------------------------------

_WHAT = "DsFmq message"

#: The header of a message, as in `ds_message`; only some fields are used here.
_HEADER: Final = struct.Struct(">11i20x")
#: type, subtype, len, preCompressed, uncompressedLen, id, time.
_INFO: Final = struct.Struct(">7i")
#: A part of the length of an INFO, with its padding.
_INFO_ROOM: Final = 32
#: A whole request or reply with one message, up to its payload.
_ONE: Final = struct.Struct(">11i20x3i12x3i12x7i4x")
_PADDING: Final = [bytes(_ALIGNMENT - size) for size in range(_ALIGNMENT)]
#: Bytes that a message adds to its payload: two part headers, INFO, padding.
LARGEST_INFO: Final = 2 * _PART.size + _INFO_ROOM + _ALIGNMENT
#: From this many messages on numpy is faster.
_MANY: Final = 6

_IntColumn: TypeAlias = "Sequence[int] | npt.NDArray[np.int64] | int"


class Messages(NamedTuple):
    """Messages by column; each list has one item for each message."""

    types: list[int]
    subtypes: list[int]
    #: 1 where the payload is a buffer of LROSE's compression.
    pre_compressed: list[int]
    #: Lengths of the payloads before compression.
    uncompressed_lens: list[int]
    ids: list[int]
    #: When they were appended, in seconds since 1970.
    times: list[int]
    payloads: list[bytes]

    def rows(self, first: int, end: int | None = None) -> Messages:
        """Return a range of the messages."""
        return Messages(*(column[first:end] for column in self))  # type: ignore[arg-type]

    def chosen(self, rows: Sequence[int]) -> Messages:
        """Return some of the messages."""
        if len(rows) == len(self.ids):
            return self
        return Messages(*([column[row] for row in rows] for column in self))  # type: ignore[arg-type]


#: Where the type and the category are in a header.
_TYPE_OF_WRITE: Final = struct.pack(">i", Op.WRITE)
_GENERIC: Final = struct.pack(">i", Category.GENERIC)


def is_write(payload: bytes) -> bool:
    """Tell whether this is a WRITE, without decoding it."""
    return payload[:4] == _TYPE_OF_WRITE and payload[28:32] == _GENERIC


_WRITTEN: Final = DsMessage(Op.REPLY, Op.WRITE).to_bytes()


def written_reply(mode: int) -> bytes:
    """Return the reply to a WRITE, the most frequent reply."""
    return b"".join((_WRITTEN[:8], mode.to_bytes(4, signed=True), _WRITTEN[12:]))


def encode_message(
    head: DsMessage,
    payload: bytes | bytearray | memoryview,
    type: int,
    subtype: int,
    *,
    pre_compressed: int = 0,
    uncompressed_len: int = 0,
    id: int = 0,
    time: int = 0,
) -> bytes:
    """Encode a request or a reply with one message; `head` has no parts."""
    size = len(payload)
    front = _ONE.pack(
        *head[:9], 2, 0,
        PartType.INFO, _HEADER.size + 2 * _PART.size, _INFO.size,
        PartType.DATA, _ONE.size, size,
        type, subtype, size, pre_compressed, uncompressed_len, id, time,
    )  # fmt: skip
    return b"".join((front, payload, _PADDING[size % _ALIGNMENT]))


def encode_messages(
    head: DsMessage,
    payloads: Sequence[bytes | bytearray | memoryview],
    *,
    types: _IntColumn,
    subtypes: _IntColumn,
    pre_compressed: _IntColumn = 0,
    uncompressed_lens: _IntColumn | None = None,
    ids: _IntColumn = 0,
    times: _IntColumn = 0,
) -> bytes:
    """Encode a request or a reply with many messages; a single number applies to all of them.

    :raises Malformed: the total size exceeds 32 bits.
    """
    count = len(payloads)
    if not count:
        return head.to_bytes()
    lengths = list(map(len, payloads))
    header = _HEADER.pack(*head[:9], 2 * count, 0)
    if (
        isinstance(types, int)
        and isinstance(subtypes, int)
        and isinstance(times, int)
        and pre_compressed == ids == 0
        and (uncompressed_lens is None or uncompressed_lens == lengths)
        and lengths.count(lengths[0]) == count
    ):
        whole = _encode_same(header, payloads, types, subtypes, times)
        if whole is not None:
            return whole
    lens = np.array(lengths)
    strides = (lens // _ALIGNMENT + 1) * _ALIGNMENT + _INFO_ROOM
    ends = np.cumsum(strides) + (_HEADER.size + 2 * count * _PART.size)
    if ends[-1] >= _LARGEST:
        raise Malformed(_WHAT, "length", f"below {_LARGEST}", int(ends[-1]))
    begins = ends - strides
    parts = np.zeros((count, 2, 6), ">i4")
    parts[:, 0, 0] = PartType.INFO
    parts[:, 0, 1] = begins
    parts[:, 0, 2] = _INFO.size
    parts[:, 1, 0] = PartType.DATA
    parts[:, 1, 1] = begins + _INFO_ROOM
    parts[:, 1, 2] = lens
    infos = np.zeros((count, 8), ">i4")
    columns = (types, subtypes, lens, pre_compressed,
               lens if uncompressed_lens is None else uncompressed_lens, ids, times)  # fmt: skip
    for place, column in enumerate(columns):
        infos[:, place] = column
    table = infos.tobytes()
    rows = [table[at : at + _INFO_ROOM] for at in range(0, len(table), _INFO_ROOM)]
    padding = [_PADDING[size] for size in (lens % _ALIGNMENT).tolist()]
    body = chain.from_iterable(zip(rows, payloads, padding, strict=True))
    return b"".join((header, parts.tobytes(), *body))


def decode_messages(payload: bytes) -> tuple[DsMessage, Messages]:
    """Decode a request or a reply with messages; the head is returned without parts.

    :raises Malformed: it is truncated, or its parts are inconsistent.
    """
    size = len(payload)
    if size < _HEADER.size:
        raise Malformed(_WHAT, "length", f"at least {_HEADER.size} bytes", size)
    *fields, n_parts, wide = _HEADER.unpack_from(payload)
    head = DsMessage(*fields)
    if n_parts == 2 and not wide and size >= _ONE.size:  # noqa: PLR2004 - one message
        one = _decode_one(payload)
        if one is not None:
            return head, one
    if n_parts >= 2 * _MANY and n_parts % 2 == 0 and not wide:
        many = _decode_rows(payload, n_parts // 2) or _decode_regular(payload, n_parts)
        if many is not None:
            return head, many
    return head, _decode_any(DsMessage.from_bytes(payload))


def _decode_one(payload: bytes) -> Messages | None:
    """Decode one message in the usual layout; None: another layout."""
    fields = _ONE.unpack_from(payload)
    if fields[11:16] != _USUAL or fields[16] != fields[19]:
        return None
    size = fields[16]
    if not 0 <= size <= len(payload) - _ONE.size:
        return None
    return Messages(
        [fields[17]],
        [fields[18]],
        [fields[20]],
        [fields[21]],
        [fields[22]],
        [fields[23]],
        [payload[_ONE.size : _ONE.size + size]],
    )


#: What `_decode_one` expects of its part headers.
_USUAL: Final = (
    PartType.INFO, _HEADER.size + 2 * _PART.size, _INFO.size, PartType.DATA, _ONE.size,
)  # fmt: skip


def _decode_rows(payload: bytes, count: int) -> Messages | None:
    """Decode messages of one length; None: several lengths, or another layout."""
    found = decode_rows(payload, count)
    if found is None:
        return None
    infos, is_same, size = found
    types, subtypes, _, pre, plain, ids, times = (
        [int(column[0])] * count if same else column.tolist()
        for column, same in zip(infos.T, is_same, strict=True)
    )
    payloads = list(split_rows(payload, count, size))
    return Messages(types, subtypes, pre, plain, ids, times, payloads)


def _decode_regular(payload: bytes, n_parts: int) -> Messages | None:
    """Decode alternating INFO and DATA, contiguous and word-aligned; None: another layout."""
    size = len(payload)
    start = _HEADER.size + n_parts * _PART.size
    if start > size:
        return None
    words = np.frombuffer(payload, ">i4", size // 4)
    parts = words[_HEADER.size // 4 : start // 4].reshape(-1, 2, 6)[:, :, :3].astype(np.int64)
    infos, datas = parts[:, 0], parts[:, 1]
    lens = datas[:, 2]
    begins = datas[:, 1]
    # The layout that is always written. Others are decoded by the general function.
    strides = (lens // _ALIGNMENT + 1) * _ALIGNMENT + _INFO_ROOM
    is_regular = (
        (infos[:, 0] == PartType.INFO).all()
        and (datas[:, 0] == PartType.DATA).all()
        and (infos[:, 2] == _INFO.size).all()
        and (lens >= 0).all()
        and infos[0, 1] == start
        and (begins == infos[:, 1] + _INFO_ROOM).all()
        and (infos[1:, 1] == infos[:-1, 1] + strides[:-1]).all()
        and begins[-1] + lens[-1] <= size
    )
    if not is_regular:
        return None
    table = words[(infos[:, 1] // 4)[:, None] + np.arange(7)]
    if (table[:, 2] != lens).any():
        return None
    ends = begins + lens
    payloads = [payload[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    types, subtypes, _, pre, plain, ids, times = table.T.tolist()
    return Messages(types, subtypes, pre, plain, ids, times, payloads)


def _decode_any(message: DsMessage) -> Messages:
    infos = message.parts_of(PartType.INFO)
    datas = message.parts_of(PartType.DATA)
    if len(infos) != len(datas):
        raise Malformed(_WHAT, "number of DATA parts", len(infos), len(datas))
    columns: list[list[Any]] = [[] for _ in Messages._fields]
    for number, (info, data) in enumerate(zip(infos, datas, strict=True)):
        if len(info.data) < _INFO.size:
            wanted = f"at least {_INFO.size} bytes"
            raise Malformed(_WHAT, f"length of INFO {number}", wanted, len(info.data))
        type, subtype, size, *rest = _INFO.unpack_from(info.data)
        if not 0 <= size <= len(data.data):
            raise Malformed(_WHAT, f"len of INFO {number}", f"0 to {len(data.data)}", size)
        row = (type, subtype, *rest, data.data[:size])
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return Messages(*columns)


# --- replies ------------------------------------------------------------------------------------

_REPLY_TO_READ: Final = DsMessage(Op.REPLY, Op.READ)
NOTHING_THERE: Final = _REPLY_TO_READ.to_bytes()
#: Where the number of parts, and serialNum, are in it.
_N_PARTS: Final = 36
_SERIAL: Final = 24

#: Requests whose reply has their own number, also on failure.
_KNOWN: Final = frozenset(Op) - {Op.REPLY}


def failure_reply(
    request: DsMessage, error: Exception, text: str, written: int, *, is_ours: bool
) -> tuple[int, DsMessage]:
    """Return the frame id and the reply that report an error."""
    hint = getattr(error, "hint", None)
    if hint:
        text = f"{text} ({hint})"
    if request.type not in _KNOWN:
        return 0, error_reply(Op.REPLY, SOCKET_ID, ErrorCode.FAILED, text)
    reply = error_reply(Op.REPLY, request.type, ErrorCode.FAILED, text)
    if not is_ours:
        return SOCKET_ID, reply
    parts = reply.parts
    if isinstance(error, MessageTooLarge):
        parts += tuple(int_part(min(n, 2**31 - 1)) for n in (error.size, error.limit))
    return SOCKET_ID, reply._replace(mode=_kind(error), flags=OURS, serial_num=written, parts=parts)


def reply_header(n_parts: int) -> bytes:
    """Return the header of the reply to a READ."""
    return b"".join((NOTHING_THERE[:_N_PARTS], n_parts.to_bytes(4), NOTHING_THERE[_N_PARTS + 4 :]))


def marked_reply(reply: bytes | bytearray, restarts: int) -> bytes:
    """Return a reply to a READ with the number of recreations of the queue in serialNum."""
    return b"".join((reply[:_SERIAL], restarts.to_bytes(4), reply[_SERIAL + 4 :]))


def reply_with(messages: Messages) -> bytes:
    """Return the reply to a READ."""
    if not messages.ids:
        return NOTHING_THERE
    if len(messages.ids) == 1:
        return encode_message(
            _REPLY_TO_READ,
            messages.payloads[0],
            messages.types[0],
            messages.subtypes[0],
            pre_compressed=messages.pre_compressed[0],
            uncompressed_len=messages.uncompressed_lens[0],
            id=messages.ids[0],
            time=messages.times[0],
        )
    return encode_messages(
        _REPLY_TO_READ,
        messages.payloads,
        types=messages.types,
        subtypes=messages.subtypes,
        pre_compressed=messages.pre_compressed,
        uncompressed_lens=messages.uncompressed_lens,
        ids=messages.ids,
        times=messages.times,
    )


def _kind(error: Exception) -> Failure:
    if isinstance(error, NotFound):
        return Failure.NOT_FOUND
    if isinstance(error, MessageTooLarge):
        return Failure.TOO_LARGE
    if isinstance(error, DamagedQueue):
        return Failure.DAMAGED
    refused = (AlreadyExists, InvalidURL, InvalidOption, Unsupported)
    return Failure.REFUSED if isinstance(error, refused) else Failure.OTHER


# --- requests to write one plain message --------------------------------------------------------

#: Where the payload of such a request begins.
PAYLOAD_AT: Final = 164

_REQUEST: Final = encode_message(DsMessage(Op.WRITE), b"", 0, 0)
_REPLY: Final = DsMessage(Op.REPLY, Op.WRITE).to_bytes()
_FORMS: Final = Forms(
    encode_header(SOCKET_ID, 1, len(_REQUEST)) + _REQUEST,
    encode_header(SOCKET_ID, 1, len(_REPLY)) + _REPLY,
)

encode_write = _FORMS.encode_write
find_write = _FORMS.find_write
encode_written = _FORMS.encode_written
find_written = _FORMS.find_written
