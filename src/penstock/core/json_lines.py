"""How is a message a line of JSON, and a line of JSON a message?

`cat --json`, `put --jsonl` and `jsonl:` files share this format.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import errno
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import InvalidStreamId, Malformed, StorageError
from penstock.core.message import CopiedMessage, Message
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "JSON_KEYS",
    "chunks_of",
    "json_line",
    "json_text",
    "message_from_json",
    "payload_value",
    "pieces_of",
    "read_lines",
]

#: Bytes per read. A larger read would allocate new pages of memory each time.
_READ = 1 << 17
#: The longest line accepted.
_LONGEST_LINE = 1 << 30

#: Keys of a line; `put` ignores those that the target assigns.
JSON_KEYS = {
    "payload",
    "payload_b64",
    "type",
    "subtype",
    "time_ns",
    "stream",
    "attributes_b64",
    "seq",
    "created_ns",
    "origin_ns",
    "size",
}

_HINT = 'a line is like {"payload": "hello", "type": 1}'


def read_lines(path: str) -> Iterator[list[tuple[int, bytes]]]:
    """Yield numbered lines of a file (`-`: standard input), as many as one read returns.

    Blank lines are skipped.

    :raises StorageError: the file cannot be read.
    :raises Malformed: a line is too long.
    """
    number = 0
    for lines in pieces_of(path, b"\n"):
        yield [(n, line) for n, line in enumerate(lines, number + 1) if line.strip()]
        number += len(lines)


def pieces_of(path: str, ending: bytes) -> Iterator[list[bytes]]:
    """Yield the pieces of a file (`-`: standard input) between endings, read by read.

    :raises StorageError: the file cannot be read.
    :raises Malformed: a piece is too long.
    """
    for chunk in chunks_of(path, ending):
        yield chunk.split(ending)


def chunks_of(path: str, ending: bytes) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks of complete pieces, read by read.

    A chunk lacks its last ending, so that `split` returns its pieces. Raises as `pieces_of`.
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
            yield from _chunks_as_they_come(fd, path, ending)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError("reading", path, error) from error


def _chunks_as_they_come(fd: int, path: str, ending: bytes) -> Iterator[bytes]:
    begun: list[bytes] = []  # of an incomplete piece
    done = size = 0
    overlap = len(ending) - 1
    while data := os.read(fd, _READ):
        if begun and overlap:  # an ending may be split between reads
            last = begun.pop()
            begun.append(last[:-overlap])
            data = last[-overlap:] + data
            size -= len(last[-overlap:])
        # From the left, because an ending may overlap itself.
        rest = data.split(ending)[-1] if overlap else data[data.rfind(ending) + 1 :]
        whole = len(data) - len(rest)
        if whole:
            chunk = b"".join([*begun, data[: whole - len(ending)]])
            begun, size = [rest], len(rest)
            done += len(chunk) + len(ending)
            yield chunk
        else:
            begun.append(data)
            size += len(data)
            if size > _LONGEST_LINE:
                where = f"the line from byte {done:,} on"
                raise Malformed(path, where, f"below {_LONGEST_LINE} bytes", size)
    if size:
        yield b"".join(begun)


def json_line(message: Message) -> bytes:
    """Return a message as a JSON object, with its payload as base64 and, if it is text, as text."""
    fields: dict[str, Any] = {
        "seq": message.seq,
        "time_ns": message.time_ns,
        "created_ns": message.created_ns,
        "type": message.type,
        "subtype": message.subtype,
        "stream": None if message.stream is None else message.stream.hex(),
        "size": message.size,
        "payload_b64": base64.b64encode(message.payload).decode(),
    }
    if isinstance(message, CopiedMessage):
        fields["origin_ns"] = message.origin_ns
    if message.attributes is not None:
        fields["attributes_b64"] = base64.b64encode(message.attributes).decode()
    value = payload_value(message.payload)
    if value is not None:
        fields["payload"] = value
    try:
        return json.dumps(fields, allow_nan=False).encode() + b"\n"
    except ValueError:  # 1e400
        fields["payload"] = message.payload.decode()
        return json.dumps(fields).encode() + b"\n"


def payload_value(payload: bytes) -> Any:
    """Return a payload as JSON object or list, or as text; None: it is neither."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return None
    if text[:1] in {"{", "["}:
        try:
            return json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
    return text


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if isinstance(value, dt.date) else str(value)


def json_text(
    value: Any,
    *,
    default: Callable[[Any], str] = _plain,
    ensure_ascii: bool = True,
    compact: bool = False,
) -> str:
    """Format a value as JSON; `default` for what JSON has no type for: bytes as hex, or text.

    JSON has no `NaN` and no `Infinity` either, and most parsers refuse a line with one. They become
    text, as in protobuf's JSON and in Spark: null would be one for three, and for a missing value.
    """
    style: dict[str, Any] = {
        "default": default,
        "ensure_ascii": ensure_ascii,
        "separators": (",", ":") if compact else None,
    }
    try:
        return json.dumps(value, allow_nan=False, **style)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **style)


def _finite(value: Any) -> Any:
    """Replace the numbers that JSON does not have by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def message_from_json(line: bytes, path: str, number: int, type: int, subtype: int) -> Message:
    """Read one line; `type` and `subtype` are its defaults.

    :raises Malformed: the line is not such an object; names the line and the key.
    """
    fields = _Line(line, path, number)
    if unknown := fields.values.keys() - JSON_KEYS:
        raise fields.malformed(
            "", f"an object of {', '.join(sorted(JSON_KEYS))}", f"the key {min(unknown)[:60]!r}"
        )
    if "payload_b64" in fields.values or "payload" not in fields.values:
        payload = fields.bytes("payload_b64")
    else:
        payload = fields.payload()
    return Message(
        seq=fields.number("seq", 0, 64),
        time_ns=fields.number("time_ns", SYSTEM_CLOCK.now_ns(), 64),
        created_ns=fields.number("created_ns", 0, 64),
        type=fields.number("type", type, 32),
        subtype=fields.number("subtype", subtype, 32),
        stream=fields.stream(),
        attributes=fields.bytes("attributes_b64") if "attributes_b64" in fields.values else None,
        payload=payload,
    )


class _Line:
    """The values of one line by key, each checked on access."""

    def __init__(self, line: bytes, path: str, number: int) -> None:
        self._line, self._path, self._number = line, path, number
        try:
            values: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.malformed("", "a JSON object", f"{line[:60]!r} ({error})") from None
        if not isinstance(values, dict):
            raise self.malformed("", "a JSON object", f"{line[:60]!r}")
        self.values = values

    def malformed(self, key: str, expected: str, found: str) -> Malformed:
        where = f"line {self._number} {key}".rstrip()
        return Malformed(self._path, where, expected, found, hint=_HINT)

    def number(self, key: str, default: int, bits: int) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        limit = 1 << (bits - 1)
        if not isinstance(value, int) or isinstance(value, bool) or not -limit <= value < limit:
            raise self.malformed(key, f"a {bits}-bit number", repr(value)[:60])
        return value

    def payload(self) -> bytes:
        """Return the bytes of the payload: of text, or of any other JSON value as JSON."""
        value = self.values["payload"]
        if isinstance(value, str):
            return value.encode(errors="surrogatepass")
        style: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
        try:
            text = json.dumps(value, allow_nan=False, **style)
        except ValueError:  # Infinity: as it is written, or of 1e400
            json.loads(self._line, parse_float=self._check_finite)
            text = json.dumps(value, **style)
        try:
            return text.encode()
        except UnicodeEncodeError:  # half a pair, which only an escape can be
            return json.dumps(value, separators=style["separators"]).encode()

    def _check_finite(self, text: str) -> None:
        if math.isinf(float(text)):
            raise self.malformed("payload", "numbers of 64 bits", text[:60])

    def bytes(self, key: str) -> bytes:
        coded = self.values.get(key)
        try:
            return base64.b64decode(coded if isinstance(coded, str) else "?", validate=True)
        except ValueError:
            raise self.malformed(key, "base64 text", repr(coded)[:60]) from None

    def stream(self) -> StreamId | None:
        value = self.values.get("stream")
        try:
            return None if value is None else StreamId.parse(str(value))
        except InvalidStreamId:
            raise self.malformed("stream", "a stream id or null", repr(value)[:60]) from None
