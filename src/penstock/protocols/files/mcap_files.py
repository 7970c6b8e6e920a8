"""How are messages stored in MCAP files, the recordings of robots?

`publish_time` is the originating time of a message, `log_time` the time it was appended. A channel
is a stream, type and subtype, stored in its metadata.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, batch_from_messages, messages_from_batch
from penstock.core.errors import InvalidStreamId, Malformed, Unsupported
from penstock.core.message import Message
from penstock.core.options import Options
from penstock.core.stream_id import StreamId
from penstock.protocols.files.formats import (
    AT_ONCE,
    LARGEST,
    FileFormat,
    WriterOptions,
    json_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from mcap.records import Channel, Chunk

    from penstock.core.batch import Batch
    from penstock.protocols.files.formats import RowSink

__all__ = ["McapFormat"]

log = logging.getLogger(__name__)

_INT32: Final = range(-(2**31), 2**31)
_SCHEMA_TYPES: Final = (
    ("boolean", "boolean"),
    ("integer", "integer"),
    ("floating", "number"),
    ("list", "array"),
    ("struct", "object"),
)


class McapReaderOptions(Options):
    """Options of `mcap:` for readers."""

    #: Only messages of this topic.
    topic: str | None = None


class McapWriterOptions(WriterOptions):
    """Options of `mcap:` for writers."""

    #: Prefix of the topics.
    topic: str = "/messages"


class McapFormat(FileFormat):
    """`mcap:`: the format of Foxglove and ROS tools."""

    reader_options = McapReaderOptions
    writer_options = McapWriterOptions
    cannot_carry: ClassVar[Mapping[str, str]] = {"attributes": "left out"}

    def sink(self, file: BinaryIO, schema: pa.Schema, options: Any) -> RowSink:
        _check_installed()
        return _McapSink(file, schema, options.topic)

    def batches(self, path: Path, skip: int, options: McapReaderOptions) -> Iterator[Batch]:
        _check_installed()
        found: list[Message] = []
        for message in _messages(path, options.topic):
            if skip:
                skip -= 1
                continue
            found.append(message)
            if len(found) >= AT_ONCE:
                yield batch_from_messages(found)
                found = []
        if found:
            yield batch_from_messages(found)


def _check_installed() -> None:
    try:
        import mcap  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise Unsupported(
            "mcap: needs the mcap library", hint="pip install 'penstock[mcap]'"
        ) from None


# --- writing --------------------------------------------------------------------------------------


class _McapSink:
    def __init__(self, file: BinaryIO, schema: pa.Schema, topic: str) -> None:
        from mcap.writer import Writer  # noqa: PLC0415 - an extra

        self._writer = Writer(file)
        self._writer.start(profile="", library="penstock")
        self._topic = topic.rstrip("/") or "/messages"
        self._is_plain = schema == BATCH_SCHEMA
        self._schema = 0
        if not self._is_plain:
            described = json.dumps(_json_schema(schema)).encode()
            self._schema = self._writer.register_schema("penstock.decoded", "jsonschema", described)
        self._channels: dict[tuple[StreamId | None, int, int], int] = {}
        #: Messages from before 1970, of which the format cannot tell when.
        self._too_old = 0

    def write(self, rows: pa.RecordBatch) -> None:
        if self._is_plain:
            messages = list(messages_from_batch(rows))
        else:
            # A column of payloads may have a field's name, and be null or of another type.
            known = [
                field.name
                for field in rows.schema
                if field.name in _NO_HEADER and field.type == BATCH_SCHEMA.field(field.name).type
            ]
            headers = [
                {name: value for name, value in row.items() if value is not None}
                for row in rows.select(known).to_pylist()
            ]
            messages = [
                Message(**{**_NO_HEADER, **header}, payload=payload)
                for header, payload in zip(headers, json_rows(rows), strict=True)
            ]
        for message in messages:
            self._too_old += min(message.time_ns, message.created_ns) < 0
            self._writer.add_message(
                channel_id=self._channel(message),
                log_time=max(0, message.created_ns),
                data=message.payload,
                publish_time=max(0, message.time_ns),
                sequence=message.seq & 0xFFFF_FFFF,
            )

    def _channel(self, message: Message) -> int:
        key = (message.stream, message.type, message.subtype)
        if key not in self._channels:
            stream, type, subtype = key
            topic = self._topic if stream is None else f"{self._topic}/{stream.hex()}"
            known = {"type": str(type), "subtype": str(subtype)}
            if stream is not None:
                known["stream"] = stream.hex()
            self._channels[key] = self._writer.register_channel(
                topic=f"{topic}/{type}/{subtype}" if type or subtype else topic,
                message_encoding="" if self._is_plain else "json",
                schema_id=self._schema,
                metadata=known,
            )
        return self._channels[key]

    def close(self) -> None:
        self._writer.finish()  # type: ignore[no-untyped-call]
        if self._too_old:
            log.warning("mcap: %d times before 1970 are stored as 1970", self._too_old)


_NO_HEADER: Final = {
    "seq": 0,
    "time_ns": 0,
    "created_ns": 0,
    "type": 0,
    "subtype": 0,
    "stream": None,
    "attributes": None,
}


def _json_schema(schema: pa.Schema) -> dict[str, Any]:
    def kind(type: pa.DataType) -> str:
        for name, said in _SCHEMA_TYPES:
            if getattr(pa.types, f"is_{name}")(type):
                return said
        return "string"

    properties = {field.name: {"type": kind(field.type)} for field in schema}
    return {"type": "object", "properties": properties}


# --- reading --------------------------------------------------------------------------------------


def _messages(path: Path, topic: str | None) -> Iterator[Message]:
    from mcap.records import Channel, Chunk  # noqa: PLC0415 - an extra
    from mcap.records import Message as Record  # noqa: PLC0415
    from mcap.stream_reader import StreamReader, breakup_chunk  # noqa: PLC0415

    headers: dict[int, tuple[int, int, StreamId | None] | None] = {}
    try:
        with path.open("rb") as file:
            within = cast("BinaryIO", _WithinFile(file))
            reader = StreamReader(within, emit_chunks=True, record_size_limit=LARGEST)
            for outer in reader.records:
                if isinstance(outer, Chunk):
                    records = breakup_chunk(_within_limit(path, outer), validate_crc=True)
                else:
                    records = [outer]
                for record in records:
                    if isinstance(record, Channel):
                        is_asked = topic is None or record.topic == topic
                        headers[record.id] = _header(record) if is_asked else None
                    elif isinstance(record, Record):
                        header = headers[record.channel_id]
                        if header is not None:
                            type, subtype, stream = header
                            yield Message(
                                record.sequence,
                                min(record.publish_time, 2**63 - 1),
                                min(record.log_time, 2**63 - 1),
                                type,
                                subtype,
                                stream,
                                None,
                                record.data,
                            )
    except (Malformed, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - three libraries, each with its own errors
        found = f"{error.__class__.__name__}: {error}"
        raise Malformed(str(path), "its content", "an MCAP file", found) from None


class _WithinFile:
    """A file that refuses reads beyond its end: the library trusts any length."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size

    def read(self, size: int) -> bytes:
        if size > self._left:
            raise EOFError(f"{size:,} bytes are said to follow, and {self._left:,} do")
        self._left -= size
        return self._file.read(size)


def _within_limit(path: Path, chunk: Chunk) -> Chunk:
    """Return a chunk that does not exceed the limit when the library decompresses it.

    :raises Malformed: it exceeds the limit.
    """
    size = chunk.uncompressed_size
    if chunk.compression == "zstd":  # of a frame without a size, the library takes the chunk's
        import zstandard  # noqa: PLC0415 - comes with mcap

        size = max(size, zstandard.frame_content_size(chunk.data))
    elif chunk.compression == "lz4" and size <= LARGEST:
        import lz4.frame  # noqa: PLC0415 - comes with mcap

        # A frame need not tell its size, and the library would take all that comes.
        unpacking = lz4.frame.LZ4FrameDecompressor()
        data = unpacking.decompress(chunk.data, max_length=LARGEST + 1)
        if unpacking.eof or len(data) > LARGEST:
            chunk, size = replace(chunk, compression="", data=data), len(data)
    if size > LARGEST:
        raise Malformed(str(path), "bytes in a chunk", f"at most {LARGEST:,}", size)
    return chunk


def _header(channel: Channel) -> tuple[int, int, StreamId | None]:
    """Return type, subtype and stream from a channel's metadata; 0 and None if absent."""

    def number(name: str) -> int:
        text = channel.metadata.get(name, "0")
        value = int(text) if text.removeprefix("-").isdecimal() and len(text) < 12 else 0  # noqa: PLR2004
        return value if value in _INT32 else 0

    try:
        stream = StreamId.parse(channel.metadata["stream"])
    except (KeyError, InvalidStreamId):
        stream = None
    return number("type"), number("subtype"), stream
