"""The commands that write and read messages: `put` and `cat`."""

from __future__ import annotations

import base64
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.json_lines import message_from_json, read_lines
from penstock.cli.losses import losses_named, name_losses
from penstock.cli.output import message_line, standard_output
from penstock.cli.stopping import progress_told, stop_on_signal
from penstock.core.batch import batch_from_messages
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import StorageError
from penstock.core.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cli.decoded_lines import DecodedLines
    from penstock.core.interfaces import Writer
    from penstock.core.message import Message
    from penstock.core.statistics import WriterStatistics

__all__ = ["LOST", "Follow", "From", "Register", "add_to", "writer_to"]

#: Exit code when messages were lost before they could be read.
LOST = 3

_AT_ONCE = 256
#: While following, look this often (seconds) whether to stop.
_PATIENCE = 0.5

Url = Annotated[str, typer.Argument(metavar="URL", help="The stream, such as fmq:/path/name.")]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="POSITION",
        help="Where to start: start, end, last, a sequence number or an ISO 8601 time.",
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")]
Register = Annotated[
    bool,
    typer.Option(
        "--register", help="Put the stream on this machine's data map (see map) as it is written."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    for command in (put, cat):
        app.command(rich_help_panel="Messages")(command)


# --- put ------------------------------------------------------------------------------------


def put(
    url: Url,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="A message of this text; repeatable.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", help="A message of this file's bytes; repeatable."),
    ] = None,
    jsonl: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help='Messages as JSON lines: {"payload_b64": …, "type": 0, "subtype": 0, '
            '"time_ns": optional}. What cat --json prints will do.',
        ),
    ] = None,
    type: Annotated[int, typer.Option(help="Type of the messages.")] = 0,
    subtype: Annotated[int, typer.Option(help="Subtype of the messages.")] = 0,
    register: Register = False,
) -> None:
    """Write messages to a stream, and create it if it is missing.

    Order: all --text, all --file, then --jsonl.
    """
    if not text and not file and jsonl is None:
        raise typer.BadParameter("give at least one of --text, --file and --jsonl")
    payloads = [os.fsencode(each) for each in text or []]
    payloads += [_read_file(each) for each in file or []]
    with writer_to(url, register) as writer, progress_told(lambda: _written(writer.statistics())):
        writer.write_many(payloads, type, subtype)
        if jsonl is not None:
            for lines in read_lines(jsonl):
                messages = [
                    message_from_json(line, jsonl, number, type, subtype) for number, line in lines
                ]
                writer.write_batch(batch_from_messages(messages))
        writer.flush()
        typer.echo(_written(writer.statistics()))


def writer_to(url: str, register: bool, **options: object) -> Writer:
    """Open a stream for writing, and put it on the data map if that is asked for."""
    writer = open_writer(url, **options)
    if not register:
        return writer
    from penstock.registry.registered import registered  # noqa: PLC0415 - most need none

    return registered(writer)


def _written(so_far: WriterStatistics) -> str:
    plural = "" if so_far.messages == 1 else "s"
    return f"{so_far.messages} message{plural} written ({format_size(so_far.bytes)})"


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError("reading", str(path), error) from error


# --- cat ------------------------------------------------------------------------------------


class _Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    RAW = "raw"
    HEX = "hex"


def cat(
    url: Url,
    start: From = "start",
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=0, help="Stop after so many messages.")
    ] = None,
    follow: Follow = False,
    type: Annotated[int | None, typer.Option(help="Only messages of this type.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The payloads, nothing between.")] = False,
    hex: Annotated[bool, typer.Option("--hex", help="A payload a line, in hex.")] = False,
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="The columns of payloads as JSON, as in '{format: struct, layout: \"<dHH\"}'.",
        ),
    ] = None,
) -> None:
    """Read messages from a stream and print them.

    Messages that were lost are named on stderr, and the exit code is then 3. With --decode it is 1
    if a payload does not decode; its line says why.
    """
    if as_json + raw + hex + (decode is not None) > 1:
        raise typer.BadParameter("give at most one of --json, --raw, --hex and --decode")
    chosen = {as_json: _Format.JSON, raw: _Format.RAW, hex: _Format.HEX}.get(True, _Format.TEXT)
    encode = _ENCODERS[chosen]
    decoded = None if decode is None else _decoded_lines(decode)
    options = {} if type is None else {"type": type}
    with (
        open_reader(url, start, **options) as reader,
        losses_named(reader, live=follow),
        standard_output() as out,
        stop_on_signal(held_up=lambda: name_losses(reader.statistics())) as stop,
    ):
        newest = None if follow else reader.newest_seq()
        left = sys.maxsize if count is None else count
        while left > 0 and not stop():
            messages = reader.read_many(min(left, _AT_ONCE), _PATIENCE if follow else 0)
            if decoded is None:
                out.writelines(encode(message) for message in messages)
            else:
                out.writelines(decoded.of(messages))
            left -= len(messages)
            if messages and follow:
                out.flush()
                reader.acknowledge()
            if not follow and (not messages or (newest is not None and messages[-1].seq >= newest)):
                break
        out.flush()
        reader.acknowledge()
        if stop() and not follow:
            raise KeyboardInterrupt
        lost = reader.statistics().lost
    if lost:
        raise typer.Exit(LOST)
    if decoded is not None and decoded.failed:
        raise typer.Exit(1)


def _decoded_lines(options: str) -> DecodedLines:
    from penstock.cli.decoded_lines import DecodedLines  # noqa: PLC0415 - loads Arrow's parsers

    return DecodedLines(options)


def _as_json(message: Message) -> bytes:
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
    return json.dumps(fields).encode() + b"\n"


_ENCODERS: dict[_Format, Callable[[Message], bytes]] = {
    _Format.TEXT: lambda message: message_line(message).encode() + b"\n",
    _Format.JSON: _as_json,
    _Format.RAW: lambda message: message.payload,
    _Format.HEX: lambda message: message.payload.hex().encode() + b"\n",
}
