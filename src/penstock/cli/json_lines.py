"""What do the JSON lines of `put --jsonl` say?"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import InvalidStreamId, Malformed, StorageError
from penstock.core.message import Message
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["message_from_json", "read_lines"]

_READ = 1 << 20
#: A line longer than this is no message of ours.
_LONGEST_LINE = 1 << 30

#: Keys that `cat --json` prints; those that the target gives anew are passed over.
_KEYS = {"payload_b64", "type", "subtype", "time_ns", "stream", "seq", "created_ns", "size"}

_HINT = 'a line is like {"payload_b64": "aGVsbG8=", "type": 1}'


def read_lines(path: str) -> Iterator[list[tuple[int, bytes]]]:
    """Yield numbered lines of a file (`-`: standard input), as many as are there at a time.

    :raises StorageError: the file cannot be read.
    :raises Malformed: a line is too long.
    """
    try:
        with contextlib.ExitStack() as stack:
            if path == "-":
                if sys.stdin is None:
                    raise OSError(errno.EBADF, "standard input is closed")  # noqa: TRY301
                fd = sys.stdin.fileno()
            else:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
            yield from _lines_as_they_come(fd, path)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError("reading", path, error) from error


def _lines_as_they_come(fd: int, path: str) -> Iterator[list[tuple[int, bytes]]]:
    number = 0
    rest = b""
    while data := os.read(fd, _READ):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise Malformed(path, f"line {number + 1}", f"below {_LONGEST_LINE} bytes", len(rest))
        numbered = list(enumerate(lines, number + 1))
        number += len(lines)
        yield [(n, line) for n, line in numbered if line.strip()]
    if rest.strip():
        yield [(number + 1, rest)]


def message_from_json(line: bytes, path: str, number: int, type: int, subtype: int) -> Message:
    """Read one line; `type` and `subtype` are for lines that say none.

    :raises Malformed: the line is not such an object; names the line and the key.
    """
    where = f"line {number}"

    def malformed(key: str, expected: str, found: str) -> Malformed:
        return Malformed(path, f"{where} {key}".rstrip(), expected, found, hint=_HINT)

    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise malformed("", "a JSON object", f"{line[:60]!r} ({error})") from None
    if not isinstance(fields, dict):
        raise malformed("", "a JSON object", f"{line[:60]!r}")
    if unknown := fields.keys() - _KEYS:
        raise malformed(
            "", f"an object of {', '.join(sorted(_KEYS))}", f"the key {min(unknown)[:60]!r}"
        )

    def number_of(key: str, default: int, bits: int) -> int:
        value = fields.get(key)
        if value is None:
            return default
        limit = 1 << (bits - 1)
        if not isinstance(value, int) or isinstance(value, bool) or not -limit <= value < limit:
            raise malformed(key, f"a {bits}-bit number", repr(value)[:60])
        return value

    coded = fields.get("payload_b64")
    try:
        payload = base64.b64decode(coded if isinstance(coded, str) else "?", validate=True)
    except ValueError:
        raise malformed("payload_b64", "base64 text", repr(coded)[:60]) from None
    stream = fields.get("stream")
    try:
        stream_id = None if stream is None else StreamId.parse(str(stream))
    except InvalidStreamId:
        raise malformed("stream", "a stream id or null", repr(stream)[:60]) from None
    return Message(
        seq=0,
        time_ns=number_of("time_ns", SYSTEM_CLOCK.now_ns(), 64),
        created_ns=0,
        type=number_of("type", type, 32),
        subtype=number_of("subtype", subtype, 32),
        stream=stream_id,
        attributes=None,
        payload=payload,
    )
