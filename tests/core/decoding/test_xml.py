"""XML becomes rows by XPath; records of one size follow each other in a payload."""

from __future__ import annotations

import pickle
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.decoding import Decoded, decoder_for
from penstock.core.decoding.options import StructOptions, parse_decoding
from penstock.core.decoding.structs import encode_structs
from penstock.core.errors import InvalidOption, Malformed

STORMS = b"""<?xml version="1.0"?>
<storms><storm id="1"><place lat="40.5"/><name> one </name><top>9</top><top>8.5</top></storm>
<storm id="2"><place/></storm></storms>"""
OPTIONS: dict[str, Any] = {
    "format": "xml",
    "rows": "//storm",
    "schema": "id INT, lat DOUBLE, name STRING, tops ARRAY<FLOAT>",
    "paths": {"lat": "place/@lat", "tops": "top"},
}


def decode(payloads: list[bytes], **options: Any) -> Decoded:
    decoder = pickle.loads(pickle.dumps(decoder_for(**options)))
    decoded: Decoded = decoder.decode(pa.record_batch({"payload": payloads}))
    return decoded


def test_elements_become_rows_and_paths_columns() -> None:
    assert decode([STORMS], **OPTIONS).rows.to_pylist() == [
        {"id": 1, "lat": 40.5, "name": "one", "tops": [9.0, 8.5]},
        {"id": 2, "lat": None, "name": None, "tops": []},
    ]


def test_namespaces_and_computed_values() -> None:
    text = b'<a xmlns="urn:x"><b>1</b><b>2</b></a>'
    found = decode(
        [text],
        format="xml",
        schema="n INT, any BOOLEAN",
        paths={"n": "count(x:b)", "any": "boolean(x:c)"},
        namespaces={"x": "urn:x"},
    )
    assert found.rows.to_pylist() == [{"n": 2, "any": False}]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "Document is empty"),
        (b"<a><b></a>", "mismatch"),
        (b'<!DOCTYPE a [<!ENTITY x "y">]><a id="1">&x;</a>', "DOCTYPE"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "DOCTYPE"),
        (STORMS.replace(b'"1"', b'"many"'), "id as int32"),
        (STORMS.replace(b"<name>", b"<name/><name>"), "one value of name"),
    ],
)
def test_a_document_that_does_not_decode_fails_alone(payload: bytes, reason: str) -> None:
    found = decode([STORMS, payload, STORMS], **OPTIONS)
    assert found.rows.num_rows == 4
    (failure,) = found.failures
    assert failure.row == 1
    assert reason in failure.reason


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("TINYINT", ["-128", "127"], ["0xFF", "0X1f", "128"]),
        ("DOUBLE", ["1e300", "-inf", "NaN"], ["1e400", "-1e400"]),
        ("FLOAT", ["1e38", "INF"], ["1e39"]),
        ("DECIMAL(10,2)", ["1.5", "1e3"], [f"{2**128 + 1}", f"{2**128 + 1}.5", "1.005", "nan"]),
        ("DECIMAL(38,10)", ["1e27"], ["12345678901234567890123456789012345678", "1e28"]),
    ],
)
def test_a_number_is_what_its_text_says_or_does_not_decode(
    kind: str, good: list[str], bad: list[str]
) -> None:
    texts = [*good, *bad, *good]
    for schema, path in ((f"x {kind}", "@x"), (f"x ARRAY<{kind}>", "v")):
        payloads = [f'<a x="{each}"><v>{each}</v></a>'.encode() for each in texts]
        found = decode(payloads, format="xml", schema=schema, paths={"x": path})
        failed = [failure.row for failure in found.failures]
        assert failed == list(range(len(good), len(good) + len(bad)))
        column = found.rows.column("x")
        values = column if path == "@x" else column.flatten()
        numbers = [float(each) for each in values.to_pylist()]
        expected = [float(each) for each in good * 2]
        assert numbers == pytest.approx(expected, rel=1e-6, abs=0, nan_ok=True)


@pytest.mark.parametrize("rows", ["//storm/@id", "//name/text()"])
def test_rows_that_are_no_elements_do_not_decode(rows: str) -> None:
    found = decode([STORMS], **{**OPTIONS, "rows": rows})
    assert [failure.expected for failure in found.failures] == ["elements as rows"]


def test_entities_that_would_grow_are_refused() -> None:
    laughs = b"".join(b'<!ENTITY l%d "%s">' % (n, b"&l%d;" % (n - 1) * 10) for n in range(1, 10))
    bomb = b'<!DOCTYPE a [<!ENTITY l0 "ha">' + laughs + b"]><a>&l9;</a>"
    assert decode([bomb], **OPTIONS).rows.num_rows == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": "//["}, "no XPath"),
        ({"paths": {"lat": "place["}}, "no XPath"),
        ({"paths": {"other": "a"}}, "no such column"),
        ({"schema": "a MAP<STRING, INT>", "paths": {}}, "cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        decoder_for(**{**OPTIONS, **change})


# --- records --------------------------------------------------------------------------------------

RECORD = struct.Struct("<fH")
LAYOUT = {"format": "struct", "layout": "<fH", "names": ("angle", "gates")}


def test_a_payload_of_records_becomes_a_row_each_behind_its_header() -> None:
    body = b"".join(RECORD.pack(n, n) for n in range(3))
    found = decode([b"HEAD" + body, b"HEAD", b"HEAD" + body[:-1]], **LAYOUT, records=True, skip=4)
    assert found.rows.column("gates").to_pylist() == [0, 1, 2]
    assert found.origin is not None
    assert found.origin.tolist() == [0, 0, 0]
    assert [failure.row for failure in found.failures] == [2]


def test_one_record_with_bad_text_makes_its_payload_a_failure() -> None:
    options = {"format": "struct", "layout": "char name[2];", "records": True}
    found = decode([b"aabb", b"aa\xff\xff", b"cc"], **options)
    assert found.rows.column("name").to_pylist() == ["aa", "bb", "cc"]
    assert [failure.row for failure in found.failures] == [1]


@given(st.lists(st.tuples(st.floats(width=32), st.integers(0, 65535)), max_size=20))
def test_rows_written_as_records_are_read_again(values: list[tuple[float, int]]) -> None:
    options = parse_decoding(LAYOUT)
    assert isinstance(options, StructOptions)
    rows = pa.record_batch(
        [
            pa.array([a for a, _ in values], pa.float32()),
            pa.array([b for _, b in values], pa.int32()),
        ],
        names=["angle", "gates"],
    )
    content = encode_structs(options.described(), rows)
    again = decode([content], **LAYOUT, records=True).rows
    assert str(again.to_pylist()) == str(rows.to_pylist())


@pytest.mark.parametrize("value", [70_000, -1, None])
def test_a_value_that_no_record_holds_is_refused(value: int | None) -> None:
    options = parse_decoding(LAYOUT)
    assert isinstance(options, StructOptions)
    rows = pa.record_batch({"angle": [1.0], "gates": pa.array([value], pa.int64())})
    with pytest.raises(Malformed, match="column gates"):
        encode_structs(options.described(), rows)


def test_a_number_beyond_a_record_is_refused_and_an_infinite_one_is_kept() -> None:
    options = parse_decoding({"format": "struct", "layout": "fl32 b; si32 a[3];"})
    assert isinstance(options, StructOptions)
    schema = pa.schema([("b", pa.float64()), ("a", pa.list_(pa.int64()))])

    def encoded(*values: float) -> bytes:
        rows = [{"b": value, "a": [1, 2, 3]} for value in values]
        return encode_structs(options.described(), pa.RecordBatch.from_pylist(rows, schema))

    with pytest.raises(Malformed, match=r"column b .* 1e\+300"):
        encoded(1.0, 1e300)
    assert encoded(float("inf"))[:4] == b"\x00\x00\x80\x7f"
    assert encoded() == b""


@pytest.mark.parametrize(
    ("layout", "column"),
    [
        ("char x[8];", pa.array([5])),
        ("char x[8];", pa.array([[65, 66]])),
        ("char x[8];", pa.array(["a\0b"])),
        ("char x[8];", pa.array([b"\xff"])),
        ("bool x;", pa.array([2])),
        ("bool x;", pa.array([0.5])),
        ("bool x;", pa.array(["no"])),
        ("fl32 x;", pa.array([0, 2**24 + 1])),
        ("fl64 x;", pa.array([-(2**53) - 1])),
        ("fl64 x;", pa.array([Decimal(2**53 + 1)])),
        ("fl32 x[2];", pa.array([[1, 2**24 + 1]])),
        ("fl32 x[2];", pa.array([[1.5, None]])),
        ("int64_t x;", pa.array([9.3e18])),
    ],
)
def test_a_value_that_a_record_would_change_is_refused(layout: str, column: pa.Array) -> None:
    options = parse_decoding({"format": "struct", "layout": layout})
    assert isinstance(options, StructOptions)
    with pytest.raises(Malformed, match="column x"):
        encode_structs(options.described(), pa.record_batch({"x": column}))


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        ("char x[8];", ["", "äbc", "12345678"]),
        ("bool x;", [True, False]),
        ("fl32 x;", [2**24, -(2**30), 0]),
        ("fl64 x;", [2**53, 2**62]),
        ("fl64 x[2];", [[0.1, float("inf")]]),
        ("fl64 x;", [Decimal("0.1"), Decimal("2.5")]),
    ],
)
def test_a_value_that_a_record_holds_is_written(layout: str, values: list[Any]) -> None:
    options = parse_decoding({"format": "struct", "layout": layout})
    assert isinstance(options, StructOptions)
    content = encode_structs(options.described(), pa.record_batch({"x": values}))
    again = decode([content], format="struct", layout=layout, records=True).rows
    found = again.column("x").to_pylist()
    assert found == [float(each) if isinstance(each, Decimal) else each for each in values]
