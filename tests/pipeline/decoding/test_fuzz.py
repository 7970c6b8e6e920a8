"""Whatever bytes come, each payload becomes rows or a failure, and nothing is raised."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.pipeline.decoding import decoder_for
from penstock.pipeline.decoding.layout import from_c, is_format
from penstock.pipeline.decoding.types import Wrong, parse_ddl
from pipeline.decoding.batches import batch_of, checked
from pipeline.decoding.test_protobuf import descriptors, message_class

COUNT = 5_000
SCHEMA = "id BIGINT, name STRING, x DOUBLE"
VALUES = {"id": 5, "name": 'größe, "q"', "x": 2.5}


def _arrow() -> bytes:
    table = pa.table({name: [value, None] for name, value in VALUES.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _protobuf() -> bytes:
    beam = message_class("radar.Beam")
    data: bytes = beam(
        id=5, name="x", dbz=[1, 2], at={"lat": 1}, tags={"a": 1}, ticks=2**63
    ).SerializeToString()
    return data


FORMATS: dict[str, tuple[dict[str, Any], Callable[[], bytes], bytes]] = {
    "struct": ({"layout": "char name[4]; float x; int16_t tail[]"},
               lambda: struct.pack("<4sf3h", b"abc", 1.5, 1, 2, 3), b"\0\xff\x80a"),
    "json": ({"schema": SCHEMA + ", a ARRAY<STRUCT<b: INT>>"},
             lambda: json.dumps({**VALUES, "a": [{"b": 1}]}).encode(),
             b'{}[]",:\\\n\r\t 0-.eu\xff\0'),
    "csv": ({"schema": SCHEMA}, lambda: b'5,"a ""b""\n",2.5\r\n6,c,-1e3\n', b'",;\n\r 0-.e\xff\0'),
    "header": ({"format": "csv", "schema": SCHEMA, "header": True},
               lambda: b"x,id,name\n1.5,2,a\n2.5,3,b\n", b'",;\n\r 0-.exid\xff\0'),
    "arrow": ({"schema": SCHEMA, "max_size": "1M"}, _arrow, b"\0\x01\x7f\x80\xff"),
    "protobuf": ({"message": "radar.Beam"}, _protobuf, b"\0\x01\x08\x12\x2a\x7f\x80\xff"),
}  # fmt: skip


def _damaged(source: random.Random, original: bytes, signs: bytes) -> bytes:
    data = bytearray(original)
    match source.randrange(6):
        case 0:
            return source.randbytes(source.randrange(64))
        case 1:
            return bytes(source.choice(signs) for _ in range(source.randrange(64)))
        case 2:
            del data[source.randrange(len(data) + 1) :]
        case 3:
            for _ in range(source.randint(1, 4)):
                data[source.randrange(len(data))] = source.choice(signs)
        case 4:
            at = source.randrange(len(data))
            data[at:at] = bytes(source.choice(signs) for _ in range(source.randint(1, 4)))
        case _:
            at = source.randrange(len(data))
            del data[at : at + source.randint(1, 8)]
    return bytes(data)


@pytest.mark.parametrize("format", FORMATS)
def test_fuzz_payloads_become_rows_or_failures(format: str, tmp_path: Path) -> None:
    options, make, signs = FORMATS[format]
    if format == "protobuf":
        path = tmp_path / "beam.desc"
        path.write_bytes(descriptors().SerializeToString())
        options = {**options, "descriptor_set": str(path)}
    decoder = decoder_for({"format": format, **options})
    source = random.Random(format)
    original = make()
    assert not decoder.decode(batch_of([original])).failures
    seen = failed = 0
    while seen < COUNT:
        size = source.choice([1, 10, 500])
        payloads = [
            original if source.random() < 0.2 else _damaged(source, original, signs)
            for _ in range(size)
        ]
        decoded = checked(decoder.decode(batch_of(payloads)), size)
        origin = range(size) if decoded.origin is None else decoded.origin.tolist()
        failures = {each.row for each in decoded.failures}
        # A stream or text may have no rows at all; then it is neither.
        assert {i for i, p in enumerate(payloads) if p == original} <= set(origin) - failures
        seen += size
        failed += len(failures)
    assert 0 < failed < seen


def test_fuzz_layouts_and_schemas_are_read_or_refused() -> None:
    source = random.Random(1)
    words = ["float", "int", "char", "unsigned", "x", "y", "[", "]", "3", "99999999", ";", ",", " ",
             "<", ">", "array", "struct", "map", "decimal", "(", ")", ":", "`", "{", "}", "//",
             "/*", "*/", "\n", "é", "\0", "-1"]  # fmt: skip
    understood = 0
    for _ in range(COUNT):
        text = "".join(source.choice(words) for _ in range(source.randrange(20)))
        for read in (parse_ddl, lambda each: from_c(each, "little", packed=False)):
            with contextlib.suppress(Wrong):
                read(text)
                understood += 1
        is_format(text)
    assert 0 < understood < 2 * COUNT  # both happened
