from __future__ import annotations

import datetime as dt
import random
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.batches import batch_of, checked, decode_all, failures_of, rows_of
from penstock.core.decoding import decoder_for

SCHEMA = "id BIGINT, name STRING"


def stream(*tables: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, tables[0].schema, options=options) as writer:
        for table in tables:
            writer.write_table(table)
    return bytes(sink.getvalue())


def table(ids: list[int | None], names: list[str | None]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "name": pa.array(names, pa.string())})


_ROWS = st.lists(
    st.tuples(
        st.none() | st.integers(-(2**63), 2**63 - 1),
        st.none() | st.text(st.characters(codec="utf-8")),
    ),
    max_size=4,
)


@given(st.lists(_ROWS, max_size=5), st.sampled_from([None, "lz4", "zstd"]))
def test_rows_come_back_with_the_message_they_came_from(
    payloads: list[list[tuple[Any, Any]]], compression: str | None
) -> None:
    decoded = decode_all(
        [stream(table([r[0] for r in rows], [r[1] for r in rows]), compression=compression)
         for rows in payloads],
        format="arrow", schema=SCHEMA,
    )  # fmt: skip
    assert not decoded.failures
    assert [tuple(row.values()) for row in decoded.rows.to_pylist()] == [
        row for rows in payloads for row in rows
    ]
    assert decoded.origin is not None
    assert decoded.origin.tolist() == [i for i, rows in enumerate(payloads) for _ in rows]


def test_several_batches_other_columns_and_other_types_are_fine() -> None:
    wide = pa.table({"more": [1.5], "name": ["x"], "id": pa.array([7], pa.uint8())})
    folded = pa.table({"id": [1, 2], "name": pa.array(["a", "a"]).dictionary_encode()})
    nothing = pa.table({"id": [3], "name": pa.nulls(1)})
    payloads = [stream(table([1], ["a"]), table([2], [None])), stream(wide), stream(folded),
                stream(nothing)]  # fmt: skip
    assert [tuple(r.values()) for r in rows_of(payloads, format="arrow", schema=SCHEMA)] == [
        (1, "a"), (2, None), (7, "x"), (1, "a"), (2, "a"), (3, None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        (b"", "cut off"),
        (b"nonsense", "cut off"),
        (stream(table([1], ["a"]))[:-8], "cut off"),
        (stream(table([1], ["a"])) * 2, "behind its end"),
        (stream(pa.table({"id": [1]})), "no column name"),
        (stream(pa.table({"id": ["x"], "name": ["a"]})), "x"),
        (stream(pa.table({"id": [1], "name": [[1]]})), ""),
        (stream(pa.table({"id": [1], "name": pa.array(["a"], pa.string_view())})), "string_view"),
    ],
)
def test_a_bad_payload_fails_by_itself(payload: bytes, found: str) -> None:
    good = stream(table([5], ["x"]))
    decoded = decode_all([good, payload, good], format="arrow", schema=SCHEMA)
    assert decoded.rows.column(0).to_pylist() == [5, 5]
    (failure,) = decoded.failures
    assert failure.row == 1
    assert found in failure.found


def test_a_stream_that_would_unpack_to_more_than_allowed_is_not_unpacked() -> None:
    bomb = stream(table([1], ["a" * 10_000_000]), compression="zstd")
    assert len(bomb) < 10_000
    (reason,) = failures_of([bomb], format="arrow", schema=SCHEMA, max_size="1M").values()
    assert "at most 1,048,576 bytes when unpacked" in reason
    assert rows_of([bomb], format="arrow", schema=SCHEMA, max_size="20M")


def test_a_length_that_lies_is_refused_before_memory_is_taken() -> None:
    data = stream(table([1] * 1000, ["a" * 1000] * 1000), compression="lz4")
    honest = struct.pack("<q", 1_000_000)
    assert honest in data
    liar = data.replace(honest, struct.pack("<q", 1 << 40))
    (reason,) = failures_of([liar], format="arrow", schema=SCHEMA).values()
    assert f"{1 << 40:,}"[:9] in reason


def test_rows_and_values_that_stand_for_more_are_limited() -> None:
    many = stream(table([1] * 1001, ["a"] * 1001))
    (reason,) = failures_of([many], format="arrow", schema=SCHEMA, max_rows=1000).values()
    assert "at most 1,000 rows" in reason
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int8()), ["a" * 100_000])
    folded = stream(pa.table({"id": [1] * 1000, "name": large}))
    (reason,) = failures_of([folded], format="arrow", schema=SCHEMA, max_size="10M").values()
    assert "100,000,000" in reason


def test_slices_and_empty_batches_decode() -> None:
    decoder = decoder_for({"format": "arrow", "schema": SCHEMA})
    batch = batch_of([stream(table([i, i], ["a", "b"])) for i in range(6)])
    part = checked(decoder.decode(batch.slice(2, 2)), 2)
    assert part.rows.column(0).to_pylist() == [2, 2, 3, 3]
    assert checked(decoder.decode(batch.slice(0, 0)), 0).rows.schema == decoder.schema


def test_damage_anywhere_gives_rows_or_a_failure() -> None:
    source = random.Random(4)
    originals = [stream(table([1, 2, None], ["a", None, "ccc"]), compression=c)
                 for c in (None, "lz4", "zstd")]  # fmt: skip
    payloads = []
    for _ in range(1500):
        data = bytearray(source.choice(originals))
        for _ in range(source.randint(1, 3)):
            data[source.randrange(len(data) - 8)] = source.choice([0, 1, 127, 128, 255])
        payloads.append(bytes(data))
    decoded = decode_all(payloads, format="arrow", schema=SCHEMA, max_size="1M")
    assert decoded.failures


_NOON = dt.datetime(2026, 2, 3, 12, tzinfo=dt.UTC)
_TEXT = pa.string()


@pytest.mark.parametrize(
    ("kind", "to", "good", "bad"),
    [
        (pa.float64(), "FLOAT", [0.5, float("nan"), float("inf")], [0.1, 1e39]),
        (pa.float64(), "DECIMAL(10,2)", [0.25, 12.34], [0.125, 1e9]),
        (pa.float64(), "BOOLEAN", [0.0, 1.0], [0.5, 2.0]),
        (pa.float64(), "INT", [5.0], [5.5, float("nan"), 3e9]),
        (pa.int64(), "BOOLEAN", [0, 1], [2]),
        (pa.int64(), "DECIMAL(10,2)", [5], [100_000_000]),
        (pa.int64(), "DOUBLE", [2**53], [2**53 + 1]),
        (pa.uint64(), "DECIMAL(20,0)", [2**64 - 1], []),
        (pa.decimal128(38, 0), "DECIMAL(38,18)", [Decimal(5)], [Decimal(4 * 10**20)]),
        (pa.decimal128(10, 2), "INT", [Decimal(5)], [Decimal("5.5")]),
        (pa.decimal128(38, 18), "DOUBLE", [Decimal("0.5")], [Decimal("0.100000000000000001")]),
        (pa.decimal256(76, 0), "DECIMAL(38,18)", [Decimal(5)], [Decimal(10**75)]),
        (pa.timestamp("us", "UTC"), "DATE", [_NOON.replace(hour=0)], [_NOON]),
        (pa.timestamp("us", "Asia/Tokyo"), "TIMESTAMP_NTZ", [], [_NOON]),
        (pa.timestamp("us", "UTC"), "TIMESTAMP_NTZ", [_NOON], []),
        (pa.timestamp("ns", "UTC"), "TIMESTAMP", [1_000], [1_001]),
        (pa.timestamp("us", "UTC"), "TIMESTAMP", [_NOON], [-(2**62), 2**62]),
        (pa.date32(), "DATE", [0], [-1_000_000, 10_000_000]),
        (_TEXT, "INT", ["31", "007"], ["0x1F", "1.5", " 1"]),
        (_TEXT, "DOUBLE", ["1e3", "inf"], ["1e400"]),
        (_TEXT, "DECIMAL(38,18)", ["1.5"], ["400000000000000000000", "9" * 77, "1e70"]),
        (pa.list_(pa.float64()), "ARRAY<FLOAT>", [[0.5, None], None, []], [[0.5, 0.1]]),
        (pa.struct([("x", pa.int64()), ("y", _TEXT)]), "STRUCT<x: DECIMAL(10,2)>",
         [{"x": 5, "y": "a"}, None], [{"x": 100_000_000, "y": "a"}]),
        (pa.map_(_TEXT, pa.float64()), "MAP<STRING, FLOAT>", [[("a", 0.5)]], [[("a", 0.1)]]),
    ],
)  # fmt: skip
def test_a_value_that_would_be_changed_fails_by_itself(
    kind: pa.DataType, to: str, good: list[Any], bad: list[Any]
) -> None:
    values = [*good, *bad, *good]
    payloads = [stream(pa.table({"a": pa.array([None, each], kind)})) for each in values]
    found = failures_of(payloads, format="arrow", schema=f"a {to}")
    assert list(found) == list(range(len(good), len(good) + len(bad)))
