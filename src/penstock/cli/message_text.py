"""How is a message shown: its fields, and a payload that may be text, JSON or bytes?"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import typer

from penstock.core.errors import InvalidOption
from penstock.core.json_lines import payload_value
from penstock.core.units import format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.message import Message

__all__ = [
    "FIELDS",
    "MessageFields",
    "Template",
    "message_line",
    "part_of",
    "payload_text",
    "unescaped",
]

_CONTROL: Final = {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}
_ESCAPES: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_NAMED: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


# --- payloads -------------------------------------------------------------------------------------


def payload_text(payload: bytes, most: int | None = None) -> str:
    """Show a payload on one line: text with its control characters escaped, or else hex.

    :param most: the most bytes to show; None: all
    """
    is_cut = most is not None and len(payload) > most
    head = payload[:most] if is_cut else payload
    try:
        # A character split by the limit is omitted.
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=not is_cut)
    except UnicodeDecodeError:
        text = ""
    text = text.translate(_CONTROL)
    if text.isprintable() and (text or not payload):
        return text + ("…" if is_cut else "")
    if most is None:
        return payload.hex()
    return head[: most // 3].hex(" ") + ("…" if len(payload) > most // 3 else "")


# --- messages -------------------------------------------------------------------------------------


def message_line(message: Message, time_ns: int, said: str, *, is_coloured: bool = False) -> str:
    """Format a message as a line, with this time and text."""
    number = f"{message.seq:>10}"
    kind = f"{message.type}/{message.subtype}"
    header = f"{format_time(time_ns):<20}  {kind:>9}  {message.size:>9,} B"
    if is_coloured:
        number, header = typer.style(number, fg="cyan"), typer.style(header, dim=True)
    return f"{number}  {header}  {said}"


#: The fields of a message, by name.
FIELDS: Final[Mapping[str, Callable[[Message], Any]]] = {
    "seq": lambda message: message.seq,
    "time": lambda message: format_time(message.time_ns),
    "time_ns": lambda message: message.time_ns,
    "created": lambda message: format_time(message.created_ns),
    "created_ns": lambda message: message.created_ns,
    "origin": lambda message: format_time(message.origin_ns),
    "origin_ns": lambda message: message.origin_ns,
    "type": lambda message: message.type,
    "subtype": lambda message: message.subtype,
    "stream": lambda message: None if message.stream is None else message.stream.hex(),
    "size": lambda message: message.size,
    "payload": lambda message: payload_value(message.payload),
    "payload_hex": lambda message: message.payload.hex(),
    "payload_b64": lambda message: base64.b64encode(message.payload).decode(),
}


class MessageFields(Mapping[str, Any]):
    """The fields of a message by name, each computed on access."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __getitem__(self, name: str) -> Any:
        return FIELDS[name](self._message)

    def __iter__(self) -> Iterator[str]:
        return iter(FIELDS)

    def __len__(self) -> int:
        return len(FIELDS)


# --- templates ------------------------------------------------------------------------------------


def unescaped(text: str) -> str:
    r"""Return text in which `\n`, `\t`, `\r`, `\0`, `\x1f` and `\\` are what they mean."""

    def one(match: re.Match[str]) -> str:
        code, name = match.groups()
        return chr(int(code, 16)) if code else _NAMED.get(name, match[0])

    return _ESCAPES.sub(one, text)


class Template:
    r"""A line with fields in it: `%{time} %{seq} %{payload}\n`."""

    _FIELD: Final = re.compile(r"%(?:\{([^}]*)\}|%)")

    def __init__(self, text: str) -> None:
        """Parse the text.

        :raises InvalidOption: it contains no field, or one that is not closed.
        """
        self._text = text
        #: Text with field names in between; %% is a percent sign.
        self._parts: list[tuple[str, str | None]] = []
        at = 0
        for match in self._FIELD.finditer(text):
            before = unescaped(text[at : match.start()])
            at = match.end()
            self._parts.append((before, match[1]) if match[1] is not None else (before + "%", None))
        self._parts.append((unescaped(text[at:]), None))
        if any("%{" in before for before, _ in self._parts):
            raise InvalidOption("format", text, "'%{' is not closed", hint="as in '%{seq}'")
        if not any(name for _, name in self._parts):
            raise InvalidOption(
                "format", text, "it names no field", hint="as in '%{time} %{seq} %{payload}\\n'"
            )

    def filled(self, fields: Mapping[str, Any], payload: bytes | None = None) -> bytes:
        """Return the line of a message. `payload` is inserted as raw bytes.

        :raises InvalidOption: a field does not exist.
        """
        out = []
        for text, name in self._parts:
            out.append(text.encode())
            if name is None:
                continue
            if name == "payload" and payload is not None:
                out.append(payload)
                continue
            try:
                value = _value_of(fields, name)
            except KeyError:
                known = ", ".join(fields)
                raise InvalidOption(
                    "format", self._text, f"there is no field {name!r}", hint=f"there are: {known}"
                ) from None
            out.append(_as_text(value))
        return b"".join(out)


def _value_of(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field, or for `payload.sensor.name` what is inside of one; None: it is not there.

    :raises KeyError: the field does not exist.
    """
    if name in fields:
        return fields[name]
    first, *inside = name.split(".")
    value = fields[first]
    for key in inside:
        value = part_of(value, int(key) if key.isdigit() and isinstance(value, list) else key)
    return value


def part_of(whole: Any, key: object) -> Any:
    """Return what is under a key of a JSON value, or None."""
    try:
        return whole[key]
    except (KeyError, IndexError, TypeError):
        return None


def _as_text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode(errors="surrogateescape")
    if value is None:
        return b""
    return json.dumps(value, default=str).encode()
