"""What do a remote queue and its clients send to each other? (docs/specs/lrose.md 2.5)."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.core.errors import Malformed
from penstock.protocols.lrose.ds_message import Category, CommonPart, DsMessage, Part, text_part

__all__ = [
    "OURS",
    "SOCKET_ID",
    "Failure",
    "Init",
    "Op",
    "OpenMode",
    "PartType",
    "SeekTo",
    "decode_init",
    "encode_init",
]

_WHAT = "DsFmq message"

#: The id of frames.
SOCKET_ID: Final = 43000

#: A client of ours says this in the `flags` of its INIT, and a server of ours in the reply; LROSE
#: ignores the one and says 0 in the other. Both then know that `mode` of a READ is how long
#: (milliseconds) the reply may wait for messages, that `flags` of a READ is the most messages
#: wanted (0: the server's own limit), that `time` of a written message counts if it is not 0,
#: that SEEK_TO_ID works, and that the reply to a WRITE has the id of the last message in `mode`.
#: The reply to a READ has in `serialNum`, if it is above 0, how often the queue was recreated since
#: it was opened, before the messages in it.
#: A reply that reports an error has its kind (`Failure`) in `mode` then, the number of messages of
#: a WRITE that were appended nevertheless in `serialNum`, and `OURS` in `flags`. For a message that
#: is too large it has two INT parts: its size, and the limit.
OURS: Final = 0x50535443


class Op(IntEnum):
    """Types of requests, and of the reply."""

    INIT = 43001
    SET_COMPRESSION_METHOD = 43002
    SET_BLOCKING_WRITE = 43003
    SET_SINGLE_WRITER = 43004
    SET_REG_WITH_DMAP = 43005
    SEEK = 43006
    READ = 43007
    WRITE = 43008
    CLOSE = 43009
    REPLY = 43010
    SEEK_TO_ID = 43011


class Failure(IntEnum):
    """Kinds of failure; only between clients and servers of ours."""

    OTHER = 0
    NOT_FOUND = 1
    TOO_LARGE = 2
    DAMAGED = 3
    REFUSED = 4


class PartType(IntEnum):
    """Parts of these messages, beside the common ones."""

    INIT = 44001
    INFO = 44002
    DATA = 44003


class OpenMode(IntEnum):
    """How a queue is opened (docs/specs/lrose.md 1.12)."""

    CREATE = 0
    READ_WRITE = 1
    READ_ONLY = 2
    BLOCKING_READ_ONLY = 3
    BLOCKING_READ_WRITE = 4


class SeekTo(IntEnum):
    """Where SEEK goes (docs/specs/lrose.md 1.9)."""

    START = 0
    END = 1
    LAST = 2
    BACK = 3


# --- INIT -----------------------------------------------------------------------------------

#: debug, compress, openMode, openPosition, numSlots, bufSize, spare[10], procName.
_INIT: Final = struct.Struct(">6i40x32s")


class Init(NamedTuple):
    """A request to open a queue."""

    url: str
    open_mode: int
    #: LROSE's clients send the mode here, so everything but CREATE starts at the end.
    open_position: int
    compress: bool = False
    num_slots: int = 1024
    buf_size: int = 10_000
    proc_name: str = "penstock"
    debug: int = 0
    #: It is a client of ours: see `OURS`.
    is_ours: bool = False


def encode_init(init: Init) -> DsMessage:
    """Encode the request that opens a queue."""
    name = init.proc_name.encode(errors="surrogateescape")[:31]
    data = _INIT.pack(
        init.debug,
        init.compress,
        init.open_mode,
        init.open_position,
        init.num_slots,
        init.buf_size,
        name,
    )
    return DsMessage(
        Op.INIT,
        flags=OURS if init.is_ours else 0,
        category=Category.START_GET,
        parts=(Part(PartType.INIT, data), text_part(CommonPart.URL, init.url)),
    )


def decode_init(message: DsMessage) -> Init:
    """Decode the request that opens a queue. What follows the known fields of a part is ignored.

    :raises Malformed: a part is missing or too short.
    """
    part, url = message.part(PartType.INIT), message.part(CommonPart.URL)
    if part is None or url is None:
        raise Malformed(
            _WHAT, "parts of INIT", "INIT_PART and URL", [p.type for p in message.parts]
        )
    if len(part.data) < _INIT.size:
        raise Malformed(
            _WHAT, "length of INIT_PART", f"at least {_INIT.size} bytes", len(part.data)
        )
    debug, compress, mode, position, slots, size, name = _INIT.unpack_from(part.data)
    text = name.partition(b"\0")[0].decode(errors="surrogateescape")
    is_ours = message.flags == OURS
    return Init(url.text, mode, position, bool(compress), slots, size, text, debug, is_ours)
