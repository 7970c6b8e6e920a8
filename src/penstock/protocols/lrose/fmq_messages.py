"""How do messages travel, one or many of them in a WRITE or a reply to a READ? Spec lrose 2.5."""

from __future__ import annotations

import struct
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.core.errors import Malformed
from penstock.protocols.lrose.ds_message import Category, DsMessage
from penstock.protocols.lrose.fmq_uniform import decode_rows, encode_same, split_rows
from penstock.protocols.lrose.fmq_wire import Op, PartType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = [
    "LARGEST_INFO",
    "Messages",
    "decode_messages",
    "encode_message",
    "encode_messages",
    "is_write",
    "written_reply",
]

_WHAT = "DsFmq message"

#: As in `ds_message`: the header of a message, of which only some is of interest here.
_HEADER: Final = struct.Struct(">11i20x")
_PART: Final = struct.Struct(">3i12x")
#: type, subtype, len, preCompressed, uncompressedLen, id, time.
_INFO: Final = struct.Struct(">7i")
#: A part of the length of an INFO, with its padding.
_INFO_ROOM: Final = 32
#: A whole request or reply with one message, up to its payload.
_ONE: Final = struct.Struct(">11i20x3i12x3i12x7i4x")
_ALIGNMENT: Final = 8
_PADDING: Final = [bytes(_ALIGNMENT - size) for size in range(_ALIGNMENT)]
_LARGEST: Final = 2**31 - 1
#: Bytes that a message adds to its payload: two part headers, INFO, padding.
LARGEST_INFO: Final = 2 * _PART.size + _INFO_ROOM + _ALIGNMENT
#: From so many messages on numpy pays.
_MANY: Final = 6

_IntColumn: TypeAlias = "Sequence[int] | npt.NDArray[np.int64] | int"


class Messages(NamedTuple):
    """Messages by column; each of the lists has as many items as there are messages."""

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
        """Return a run of the messages."""
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
    """Tell whether this is a WRITE, without taking it apart."""
    return payload[:4] == _TYPE_OF_WRITE and payload[28:32] == _GENERIC


_WRITTEN: Final = DsMessage(Op.REPLY, Op.WRITE).to_bytes()


def written_reply(mode: int) -> bytes:
    """Return the reply to a WRITE: there is none that is asked for more often."""
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
    """Return a request or a reply with one message; `head` has no parts."""
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
    """Return a request or a reply with many messages; a single number stands for all of them.

    :raises Malformed: all together are more than 32 bits can count.
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
        whole = encode_same(header, payloads, types, subtypes, times)
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
    """Take a request or a reply with messages apart; the head comes without its parts.

    :raises Malformed: it is cut off, or its parts do not fit each other.
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
    """Decode the usual form of one message; None if it is another."""
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
    """Decode messages of one length; None if they are of several, or have another form."""
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
    """Decode INFO and DATA by turns, back to back, at words; None if it is another form."""
    size = len(payload)
    start = _HEADER.size + n_parts * _PART.size
    if start > size:
        return None
    words = np.frombuffer(payload, ">i4", size // 4)
    parts = words[_HEADER.size // 4 : start // 4].reshape(-1, 2, 6)[:, :, :3].astype(np.int64)
    infos, datas = parts[:, 0], parts[:, 1]
    lens = datas[:, 2]
    begins = datas[:, 1]
    # As it is always written. Every other way to lay them out takes the long way.
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
        if len(info.data) != _INFO.size:
            raise Malformed(_WHAT, f"length of INFO {number}", _INFO.size, len(info.data))
        type, subtype, size, *rest = _INFO.unpack(info.data)
        if not 0 <= size <= len(data.data):
            raise Malformed(_WHAT, f"len of INFO {number}", f"0 to {len(data.data)}", size)
        row = (type, subtype, *rest, data.data[:size])
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return Messages(*columns)
