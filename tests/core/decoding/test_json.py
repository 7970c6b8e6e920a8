from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.decoding.batches import batch_of, checked, decode_all, failures_of, rows_of
from penstock.core.decoding import decoder_for
from penstock.core.errors import InvalidOption

SCHEMA = (
    "id BIGINT, name STRING, dbz ARRAY<DOUBLE>, at STRUCT<lat: DOUBLE, lon: DOUBLE>, ok BOOLEAN"
)

_NUMBER = st.floats(allow_nan=False, allow_infinity=False)
_OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.none() | st.integers(-(2**63), 2**63 - 1),
        "name": st.none() | st.text(st.characters(codec="utf-8")),
        "dbz": st.none() | st.lists(st.none() | _NUMBER, max_size=3),
        "at": st.none() | st.fixed_dictionaries({"lat": _NUMBER, "lon": _NUMBER}),
        "ok": st.none() | st.booleans(),
        "more": st.none() | st.integers() | st.text(st.characters(codec="utf-8")),
    },
)


def _expected(value: dict[str, Any]) -> dict[str, Any]:
    return {name: value.get(name) for name in ("id", "name", "dbz", "at", "ok")}


@given(st.lists(_OBJECTS, max_size=6), st.sampled_from([None, 0, 2]), st.booleans())
def test_objects_come_back_however_they_are_written(
    values: list[dict[str, Any]], indent: int | None, ascii: bool
) -> None:
    payloads = [json.dumps(v, indent=indent, ensure_ascii=ascii).encode() for v in values]
    assert rows_of(payloads, format="json", schema=SCHEMA) == [_expected(v) for v in values]


def test_space_around_an_object_is_nothing() -> None:
    payloads = [b' \r\n{"a": 1}\n', b'{"a":2}', b'\t{\r\n"a"\n:\t3}']
    assert rows_of(payloads, format="json", schema="a INT") == [{"a": 1}, {"a": 2}, {"a": 3}]


BAD = [
    b"", b" ", b"1", b"null", b"[1]", b"{", b"}", b"{}{}", b'{"a":1}{"a":2}', b'{"a":1},{"a":2}',
    b'{"a":"x"}', b'{"a":1.5}', b'{"a":99999999999}', b'{"a":1,"a":2}', b'{"a":1}x}',
    b'{"s":"\xff"}', b'{"s":"line\nfeed"}', b'{"s":"\\ud800"}', b'{"s":1}', b'{"a":{}}',
    b'{"a":1}\n{"a":2}', b'{"a":', b'{"a":1', b'{"s":"}', b"{'a':1}", b'{"a":1}\0}', b"\0",
    b'{"a":1} {"a":}', b'{"a":1}}', b'\xef\xbb\xbf{"a":1}',
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_payload_fails_by_itself(bad: bytes) -> None:
    good = b'{"a":5,"s":"x"}'
    decoded = decode_all([good, bad, good, bad, bad, good], format="json", schema="a INT, s STRING")
    assert decoded.rows.to_pylist() == [{"a": 5, "s": "x"}] * 3
    assert [each.row for each in decoded.failures] == [1, 3, 4]


def test_bad_payloads_cannot_hide_behind_each_other() -> None:
    # One gives two rows, the other none: together as many as there should be.
    payloads = [b'{"a":1}{"a":', b'{"b":2}}', b'{"a":3}']
    assert set(failures_of(payloads, format="json", schema="a INT")) == {0, 1}
    payloads = [b'{"a":1} {"a":2}', b"", b'{"a":3}']
    assert set(failures_of(payloads, format="json", schema="a INT")) == {0, 1}


@settings(max_examples=60)
@given(st.lists(st.sampled_from([*BAD, b'{"a":1}', b'{"a":2,"s":"y"}', b'{"z":[]}']), max_size=12))
def test_together_payloads_decode_as_they_do_alone(payloads: list[bytes]) -> None:
    together = decode_all(payloads, format="json", schema="a INT, s STRING")
    alone = [decode_all([payload], format="json", schema="a INT, s STRING") for payload in payloads]
    assert together.rows.to_pylist() == [row for one in alone for row in one.rows.to_pylist()]
    assert [each.row for each in together.failures] == [
        i for i, one in enumerate(alone) if one.failures
    ]


def test_dates_times_and_decimals_are_read_from_text() -> None:
    schema = "d DATE, t TIMESTAMP, n TIMESTAMP_NTZ, m DECIMAL(6,2)"
    payload = (b'{"d":"2026-02-03","t":"2026-02-03T04:05:06.5+01:00",'
               b'"n":"2026-02-03 04:05:06","m":"12.25"}')  # fmt: skip
    (row,) = rows_of([payload], format="json", schema=schema)
    assert row["d"] == dt.date(2026, 2, 3)
    assert row["t"] == dt.datetime(2026, 2, 3, 3, 5, 6, 500_000, dt.UTC)
    assert row["n"] == dt.datetime(2026, 2, 3, 4, 5, 6)  # noqa: DTZ001
    assert str(row["m"]) == "12.25"
    assert failures_of([b'{"d":"2026-13-03"}'], format="json", schema=schema)


def test_deep_nesting_costs_nothing_but_its_bytes() -> None:
    deep = b'{"z":' + b"[" * 300_000 + b"]" * 300_000 + b"}"
    assert rows_of([deep], format="json", schema="a INT") == [{"a": None}]
    assert failures_of([b'{"a":' * 100_000 + b"}" * 100_000], format="json", schema="a INT")


def test_slices_and_empty_batches_decode() -> None:
    decoder = decoder_for({"format": "json", "schema": {"a": "int"}, "prefix": "p_"})
    batch = batch_of([f'{{"a":{i}}}'.encode() for i in range(10)])
    part = checked(decoder.decode(batch.slice(3, 4)), 4)
    assert part.rows.to_pylist() == [{"p_a": i} for i in range(3, 7)]
    assert checked(decoder.decode(batch.slice(0, 0)), 0).rows.schema == decoder.schema


def test_a_finding_stays_short_whatever_the_payload_says() -> None:
    (reason,) = failures_of([b'{"a":' + b"9" * 100_000 + b"}"], format="json",
                            schema="a INT").values()  # fmt: skip
    assert len(reason) < 300


def test_an_arrow_schema_is_taken_too() -> None:
    schema = pa.schema([("a", pa.int32())])
    assert rows_of([b'{"a":1}'], format="json", schema=schema) == [{"a": 1}]


@pytest.mark.parametrize(
    ("schema", "reason", "hint"),
    [
        ("a ITN", "there is no type itn", "did you mean int?"),
        ("a", "at the end there should be a type", "as in"),
        ("a INT b INT", "a comma or the end", None),
        ("a ARRAY<INT", "'>'", None),
        ("a DECIMAL(50,2)", "no decimal(50,2)", None),
        ("a INT NOT NULL", "NOT NULL is not checked", "leave it out"),
        ("a MAP<STRING, INT>", "JSON cannot be read as map", "STRING"),
        ("a BINARY", "JSON cannot be read as binary", "unbase64"),
        ("a STRUCT<d: DATE>", "a DATE inside", "to_date"),
        ("", "the name of a column", None),
        ({}, "at least one column", None),
        ("a " + "ARRAY<" * 40 + "INT" + ">" * 40, "nested deeper", None),
        (pa.schema([("a", pa.uint64())]), "Spark has no type uint64", None),
    ],
)
def test_a_schema_that_is_wrong_is_named(schema: Any, reason: str, hint: str | None) -> None:
    with pytest.raises(InvalidOption) as caught:
        decoder_for({"format": "json", "schema": schema})
    assert caught.value.option == "decode.schema"
    assert reason in caught.value.reason
    if hint is not None:
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("DECIMAL(38,18)", ["1.5", "-99999999999999999999.5"], ["400000000000000000000", "1e20"]),
        ("DECIMAL(10,2)", ["99999999.99", '"1.5"', "0.10000"], ["100000000", "0.125", '"1e8"']),
        ("DECIMAL(38,0)", ["9" * 38, "1e37"], ["9" * 39, "1e38", "9" * 77, "1e999"]),
        ("FLOAT", ["3.4e38", "Infinity", "NaN"], ["3.5e38", "-1e39", "1e400"]),
        ("DOUBLE", ["1e308", "Infinity"], ["1e309", "-1e400"]),
        ("ARRAY<FLOAT>", ["[-Infinity, 1]"], ["[1e39]", "[Infinity, 1e39]"]),
        ("ARRAY<STRUCT<x: DECIMAL(10,2)>>", ['[{"x":1}]'], ['[{"x":1},{"x":100000000}]']),
        ("TIMESTAMP_NTZ", ['"2026-02-03T04:05:06"'], ['"2026-02-03T04:05:06+01:00"']),
        ("TIMESTAMP", ['"0001-01-01T00:00:00"'], ['"0000-12-31"', '"0001-01-01T00:00:00+12:00"']),
        ("DATE", ['"9999-12-31"'], ['"0000-01-01"']),
    ],
)
def test_a_value_that_its_column_cannot_hold_fails_by_itself(
    kind: str, good: list[str], bad: list[str]
) -> None:
    payloads = [f'{{"a":{each}}}'.encode() for each in (*good, *bad, *good)]
    found = failures_of(payloads, format="json", schema=f"a {kind}")
    assert list(found) == list(range(len(good), len(good) + len(bad)))


def test_nothing_inside_of_a_column_is_taken_for_never_null() -> None:
    # Spark would not look, and see a zero.
    filled = pa.list_(pa.field("element", pa.int32(), nullable=False))
    decoder = decoder_for({"format": "json", "schema": pa.schema([("a", filled)])})
    assert decoder.schema.field("a").type.value_field.nullable
    decoded = checked(decoder.decode(batch_of([b'{"a":[1,null]}'])), 1)
    assert decoded.rows.to_pylist() == [{"a": [1, None]}]
