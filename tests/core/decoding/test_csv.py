from __future__ import annotations

import csv
import io
from typing import Any

import pyarrow.csv as pv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.decoding.batches import batch_of, checked, decode_all, failures_of, rows_of
from penstock.core.decoding import decoder_for
from penstock.core.errors import InvalidOption

SCHEMA = "id INT, name STRING"
_ROW = st.tuples(
    st.integers(-(2**31), 2**31 - 1), st.text(st.characters(codec="utf-8", exclude_characters="\0"))
)


def _written(rows: list[tuple[int, str]], delimiter: str = ",", end: str = "\r\n") -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerows(rows)
    return out.getvalue().encode()


@given(
    st.lists(st.lists(_ROW, min_size=1, max_size=3), max_size=5),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_lines_come_back_with_the_message_they_came_from(
    payloads: list[list[tuple[int, str]]], delimiter: str, end: str
) -> None:
    decoded = decode_all(
        [_written(rows, delimiter, end) for rows in payloads],
        format="csv", schema=SCHEMA, delimiter=delimiter,
    )  # fmt: skip
    assert not decoded.failures
    assert [tuple(row.values()) for row in decoded.rows.to_pylist()] == [
        row for rows in payloads for row in rows
    ]
    assert decoded.origin is not None
    assert decoded.origin.tolist() == [i for i, rows in enumerate(payloads) for _ in rows]


def test_a_header_in_each_payload_gives_the_order() -> None:
    payloads = [b"id,name\n1,a\n2,b\n", b"name,id,more\nc,3,x", b"id,name\r\n4,d\r\n", b"id,name"]
    decoded = decode_all(payloads, format="csv", schema=SCHEMA, header=True)
    assert [tuple(row.values()) for row in decoded.rows.to_pylist()] == [
        (1, "a"), (2, "b"), (3, "c"), (4, "d")
    ]  # fmt: skip
    assert decoded.origin is not None
    assert decoded.origin.tolist() == [0, 0, 1, 2]
    assert not decoded.failures


def test_a_header_without_a_column_is_a_failure() -> None:
    payloads = [b"id,nam\n1,a", b"id,id,name\n1,1,a", b"id,name\n1,a", b"\xff,name\n1,a"]
    found = failures_of(payloads, format="csv", schema=SCHEMA, header=True)
    assert list(found) == [0, 1, 3]
    assert "without name" in found[0]


BAD = [
    b"", b"\n", b"\r\n\r\n", b"1", b"1,a,b", b"x,a", b"1,\xff", b'1,"open', b'1,"open\n2,b',
    b"1,a\n\n2,b", b"99999999999,a", b"1.5,a", b"1,a\n2", b"\n1,a",
]  # fmt: skip
GOOD = [b"1,a", b"2,b\n3,c\n", b'4,"two\nlines"', b"5,a\r6,b", b'7,5" pipe', b'8,"q""q"', b",x"]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_payload_fails_by_itself(bad: bytes) -> None:
    decoded = decode_all([b"1,a", bad, b"2,b", bad], format="csv", schema=SCHEMA)
    assert [row["id"] for row in decoded.rows.to_pylist()] == [1, 2]
    assert [each.row for each in decoded.failures] == [1, 3]


@settings(max_examples=80)
@given(st.lists(st.sampled_from([*BAD, *GOOD]), max_size=10))
def test_together_payloads_decode_as_they_do_alone(payloads: list[bytes]) -> None:
    together = decode_all(payloads, format="csv", schema=SCHEMA)
    alone = [decode_all([payload], format="csv", schema=SCHEMA) for payload in payloads]
    assert together.rows.to_pylist() == [row for one in alone for row in one.rows.to_pylist()]
    assert [each.row for each in together.failures] == [
        i for i, one in enumerate(alone) if one.failures
    ]


def test_a_mark_of_the_byte_order_is_taken_off() -> None:
    payloads = [b"\xef\xbb\xbf1,a", b"\xef\xbb\xbf2,b"]
    assert [row["id"] for row in rows_of(payloads, format="csv", schema=SCHEMA)] == [1, 2]


def test_values_may_be_missing_by_the_words_for_it() -> None:
    rows = rows_of([b"-,-", b"1,"], format="csv", schema=SCHEMA, nulls=["-"])
    assert rows == [{"id": None, "name": "-"}, {"id": 1, "name": ""}]


def test_slices_and_empty_batches_decode() -> None:
    for header in (False, True):
        decoder = decoder_for({"format": "csv", "schema": SCHEMA, "header": header})
        head = b"id,name\n" if header else b""
        batch = batch_of([head + f"{i},x".encode() for i in range(10)])
        part = checked(decoder.decode(batch.slice(3, 4)), 4)
        assert [row["id"] for row in part.rows.to_pylist()] == [3, 4, 5, 6]
        assert checked(decoder.decode(batch.slice(0, 0)), 0).rows.schema == decoder.schema


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"delimiter": ",,"}, "decode.delimiter"),
        ({"delimiter": "\n"}, "decode.delimiter"),
        ({"schema": "a ARRAY<INT>"}, "decode.schema"),
        ({"header": "perhaps"}, "decode.header"),
        ({"delimeter": ";"}, "decode.delimeter"),
    ],
)
def test_an_option_that_is_wrong_is_named(options: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        decoder_for({"format": "csv", "schema": SCHEMA, **options})
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("DECIMAL(38,18)", ["1.5", " 1.5 ", ""], ["400000000000000000000", "1" + "0" * 58, "x"]),
        ("DECIMAL(10,2)", ["99999999.99"], ["100000000", "0.125", "9" * 90, " "]),
        ("FLOAT", ["3.4e38", "inf", "-Infinity", "nan"], ["1e39", "-1e400"]),
        ("DOUBLE", ["1e308", "inf"], ["1e309", "-1e400"]),
        ("INT", ["31", "-1", ""], ["0x1F", "0X1f"]),
        ("DATE", ["0001-01-01"], ["0000-01-01"]),
        ("TIMESTAMP", ["9999-12-31T23:59:59Z"], ["9999-12-31T23:59:59-12:00"]),
    ],
)
def test_a_value_that_its_column_cannot_hold_fails_by_itself(
    kind: str, good: list[str], bad: list[str]
) -> None:
    payloads = [f"{each},0x".encode() for each in (*good, *bad, *good)]
    found = failures_of(payloads, format="csv", schema=f"a {kind}, b STRING")
    assert list(found) == list(range(len(good), len(good) + len(bad)))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_may_end_in_any_way_with_a_header_too(end: str) -> None:
    payload = end.join(["id,name", "1,a", '2,"b\rc"']).encode()
    rows = rows_of([payload, payload], format="csv", schema=SCHEMA, header=True)
    assert [tuple(row.values()) for row in rows] == [(1, "a"), (2, "b\rc")] * 2


@pytest.mark.parametrize("bad", [b'1,x"y\n2,"open', b'1,"a"b', b'1,"a" ', b'1,"a\n2,"b', b'1,"'])
def test_a_quote_that_is_not_closed_takes_in_no_other_line(bad: bytes) -> None:
    decoded = decode_all([b"7,a", bad, b"8,b"], format="csv", schema=SCHEMA)
    assert [row["id"] for row in decoded.rows.to_pylist()] == [7, 8]
    (failure,) = decoded.failures
    assert "quote" in failure.found


@pytest.mark.parametrize("header", [False, True])
def test_line_ends_in_quotes_do_not_part_a_batch(
    header: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = pv.read_csv

    def counted(*arguments: Any, **options: Any) -> Any:
        reads.append(1)
        return read(*arguments, **options)

    monkeypatch.setattr(pv, "read_csv", counted)
    head = b"id,name\n" if header else b""
    payloads = [head + b'%d,"two\nlines, and 5"" pipe"' % i for i in range(500)]
    rows = rows_of([*payloads, head + b'500,5" pipe'], format="csv", schema=SCHEMA, header=header)
    assert [row["id"] for row in rows] == list(range(501))
    assert len(reads) == 1


def test_a_mark_inside_of_a_text_stays() -> None:
    schema = "name STRING, id INT"
    mark = "\ufeff"
    payloads = [f"name,id\n{mark}a,1".encode()] * 2
    rows = rows_of(payloads, format="csv", schema=schema, header=True)
    assert [row["name"] for row in rows] == [f"{mark}a"] * 2
