"""What do the two ends of a bulk connection say to each other, byte for byte?

The client says a key that it got from the server by Flight; the server says welcome, or a failure.
Then come pieces, as many ahead of their answers as the client likes: a head, a `Piece` as JSON, a
batch of `BATCH_SCHEMA` as one Arrow IPC message. Each is answered in its turn: a head, and an
`Outcome` as JSON; or a `Failure`, and that is the end. Nothing here touches a socket.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import Malformed
from penstock.protocols.flight.sources import EMPTY
from penstock.protocols.flight.wire import MAX_RECORD, Failure, Outcome

if TYPE_CHECKING:
    from penstock.core.batch import Batch
    from penstock.protocols.flight.wire import Piece

__all__ = [
    "ANSWER",
    "HEAD",
    "HELLO",
    "Head",
    "Pack",
    "encode_answer",
    "encode_hello",
    "parse_answer",
    "parse_answer_head",
    "parse_head",
    "parse_hello",
    "unpack_batch",
]

_MAGIC: Final = b"PNBULK\x01\n"
_MARK: Final = 0x4543_4950
#: Magic, key.
HELLO: Final = struct.Struct("<8s16s")
#: Mark, bytes of the record, bytes of the batch.
HEAD: Final = struct.Struct("<IIQ")
#: What it is, bytes of the record.
ANSWER: Final = struct.Struct("<II")
_WELCOME, _OUTCOME, _FAILURE = 0x434C_4557, 0x434F_5554, 0x4C49_4146

#: Bytes of a batch on the wire besides those in memory: its description, and what aligns it.
_SURPLUS: Final = 64 << 10


class Head(NamedTuple):
    """What comes next: so many bytes of record, so many of a batch."""

    record: int
    batch: int


def encode_hello(key: str) -> bytes:
    """Write what a client says first."""
    return HELLO.pack(_MAGIC, bytes.fromhex(key))


def parse_hello(data: bytes) -> str:
    """Return the key.

    :raises Malformed: the other end is no client of ours.
    """
    magic, key = HELLO.unpack(data)
    if magic != _MAGIC:
        raise Malformed("bulk hello", "magic", _MAGIC, magic)
    said: str = key.hex()
    return said


# --- pieces ---------------------------------------------------------------------------------------


class _Parts:
    """A file that keeps what is written to it as it is: nothing is copied."""

    closed = False

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def write(self, data: Any) -> int:
        self.kept.append(data)
        return len(data)

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Pack:
    """Turns pieces into what goes over the wire, without copying messages."""

    def __init__(self) -> None:
        self._parts = _Parts()
        self._writer = pa.ipc.new_stream(self._parts, BATCH_SCHEMA)
        self._writer.write_batch(EMPTY)  # with the schema before it, which both ends know

    def encode(self, batch: Batch, piece: Piece) -> list[Any]:
        """Return the bytes of a piece, in parts."""
        self._parts.kept = []
        self._writer.write_batch(batch)
        parts, self._parts.kept = self._parts.kept, []
        record = piece.to_bytes()
        head = HEAD.pack(_MARK, len(record), sum(map(len, parts)))
        return [head, record, *parts]


def parse_head(data: bytes, limit: int) -> Head:
    """Read the head of a piece whose batch is to have `limit` bytes at most.

    :raises Malformed: it is none, or more would come than may.
    """
    mark, record, batch = HEAD.unpack(data)
    if mark != _MARK:
        raise Malformed("bulk head", "mark", _MARK, mark)
    if record > MAX_RECORD:
        raise Malformed("bulk head", "record", f"at most {MAX_RECORD}", record)
    if batch > limit + _SURPLUS:
        raise Malformed("bulk head", "batch", f"at most {limit + _SURPLUS}", batch)
    return Head(record, batch)


def unpack_batch(buffer: Any) -> Batch:
    """Read a batch; it has its columns in that memory.

    :raises Malformed: it is none of messages.
    """
    try:
        return pa.ipc.read_record_batch(buffer, BATCH_SCHEMA)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise Malformed("batch", "its bytes", "Arrow IPC", error) from None


# --- answers --------------------------------------------------------------------------------------


def encode_answer(said: Outcome | Failure | None) -> bytes:
    """Write what a server answers; None: welcome."""
    if said is None:
        return ANSWER.pack(_WELCOME, 0)
    record = said.to_bytes()
    return ANSWER.pack(_OUTCOME if isinstance(said, Outcome) else _FAILURE, len(record)) + record


def parse_answer_head(data: bytes) -> Head:
    """Read how much of an answer follows.

    :raises Malformed: the other end is no server of ours.
    """
    kind, length = ANSWER.unpack(data)
    if kind not in {_WELCOME, _OUTCOME, _FAILURE}:
        raise Malformed("bulk answer", "kind", "that of an answer", kind)
    if length > MAX_RECORD:
        raise Malformed("bulk answer", "length", f"at most {MAX_RECORD}", length)
    return Head(length, 0)


def parse_answer(head: bytes, record: bytes) -> Outcome | Failure | None:
    """Read an answer; None: welcome.

    :raises Malformed: it is none.
    """
    kind, _ = ANSWER.unpack(head)
    if kind == _WELCOME:
        return None
    return (Outcome if kind == _OUTCOME else Failure).from_bytes(record)
