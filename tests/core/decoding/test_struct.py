from __future__ import annotations

import random
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.batches import batch_of, checked, decode_all, failures_of, rows_of
from penstock.core.decoding import decoder_for
from penstock.core.decoding.options import StructOptions, parse_decoding
from penstock.core.decoding.structs import encode_structs
from penstock.core.errors import InvalidOption, Malformed

BEAM = "float azimuth; uint16_t gates; float iq[2][3];"


def test_a_format_of_pythons_struct_gives_numbered_columns() -> None:
    payloads = [struct.pack("<dH", i + 0.5, i) for i in range(3)]
    assert rows_of(payloads, format="struct", layout="<dH") == [
        {"f0": i + 0.5, "f1": i} for i in range(3)
    ]


def test_a_format_may_have_names() -> None:
    rows = rows_of(
        [struct.pack(">hx3s", -2, b"abc")], format="struct", layout=">hx3s", names=["a", "b"]
    )
    assert rows == [{"a": -2, "b": b"abc"}]


@given(
    st.sampled_from("@=<>!"),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from("cbB?hHiIlLqQefdx")), min_size=1, max_size=8
    ),
    st.randoms(use_true_random=False),
)
def test_any_format_decodes_as_python_does(
    prefix: str, items: list[tuple[int, str]], source: random.Random
) -> None:
    layout = prefix + "".join(f"{count}{sign}" for count, sign in items)
    if not any(count for count, sign in items if sign != "x"):
        return
    payloads = [source.randbytes(struct.calcsize(layout)) for _ in range(3)]
    expected = [struct.unpack(layout, payload) for payload in payloads]
    found = [tuple(row.values()) for row in rows_of(payloads, format="struct", layout=layout)]
    plain = [tuple(int(x) if isinstance(x, Decimal) else x for x in row) for row in found]
    assert repr(plain) == repr(expected)  # where NaN is like NaN


def test_c_declarations_are_placed_as_a_compiler_places_them() -> None:
    iq = np.arange(6, dtype="<f4").reshape(2, 3)
    payload = struct.pack("<fHxx", 1.5, 9) + iq.tobytes()
    assert rows_of([payload], format="struct", layout=BEAM) == [
        {"azimuth": 1.5, "gates": 9, "iq": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]}
    ]
    packed = struct.pack("<fH", 1.5, 9) + iq.tobytes()
    assert rows_of([packed], format="struct", layout=BEAM, packed=True)[0]["gates"] == 9


def test_c_may_have_comments_several_names_and_a_struct_around_it() -> None:
    layout = """
        typedef struct beam {
            unsigned char a, b[2];   // two
            /* and text */ char name[4];
            fl32 dbz; ui16 n;
        } beam_t;
    """
    payload = struct.pack("=BBB4sxfHxx", 1, 2, 3, b"ab\0x", 2.5, 7)
    assert rows_of([payload], format="struct", layout=layout) == [
        {"a": 1, "b": [2, 3], "name": "ab", "dbz": 2.5, "n": 7}
    ]


def test_a_list_of_fields_is_packed_unless_told_otherwise() -> None:
    layout = [{"name": "a", "type": "u1"}, {"name": "b", "type": ">i4"}]
    assert rows_of([struct.pack(">Bi", 1, -2)], format="struct", layout=layout) == [
        {"a": 1, "b": -2}
    ]
    gaps = struct.pack(">Bxxxi", 1, -2)
    assert rows_of([gaps], format="struct", layout=layout, packed=False) == [{"a": 1, "b": -2}]


def test_a_numpy_dtype_is_taken_with_its_offsets() -> None:
    dtype = np.dtype(
        {"names": ["a", "b"], "formats": ["<i2", "<f8"], "offsets": [1, 8], "itemsize": 20}
    )
    data = np.zeros(2, dtype)
    data["a"], data["b"] = [1, 2], [0.5, 1.5]
    payloads = [data[i : i + 1].tobytes() for i in range(2)]
    assert rows_of(payloads, format="struct", layout=dtype) == [
        {"a": 1, "b": 0.5},
        {"a": 2, "b": 1.5},
    ]


@pytest.mark.parametrize(
    ("type", "value", "ddl"),
    [
        ("u1", 255, "SMALLINT"),
        ("u2", 65535, "INT"),
        ("u4", 2**32 - 1, "BIGINT"),
        ("u8", 2**64 - 1, "DECIMAL(20,0)"),
        ("i1", -128, "TINYINT"),
        ("i8", -(2**63), "BIGINT"),
        ("f2", 0.5, "FLOAT"),
        ("f8", 1e300, "DOUBLE"),
        ("?", True, "BOOLEAN"),
        (">u8", 2**63 + 5, "DECIMAL(20,0)"),
        (">f2", 2.0, "FLOAT"),
    ],
)
def test_a_type_that_spark_lacks_becomes_the_next_that_holds_every_value(
    type: str, value: Any, ddl: str
) -> None:
    layout = [{"name": "x", "type": type}]
    assert decoder_for({"format": "struct", "layout": layout}).spark_schema == f"`x` {ddl}"
    payload = np.array([value], type).tobytes()
    assert rows_of([payload], format="struct", layout=layout) == [{"x": value}]


def test_complex_numbers_are_structs_or_neighbours_in_an_array() -> None:
    iq = np.array([1 + 2j, 3 - 4j], ">c8")
    layout = [{"name": "iq", "type": ">c8", "shape": [2]}]
    assert rows_of([iq.tobytes()], format="struct", layout=layout) == [
        {"iq": [{"re": 1.0, "im": 2.0}, {"re": 3.0, "im": -4.0}]}
    ]
    flat = rows_of([iq.tobytes()], format="struct", layout=layout, complex="array")
    assert flat == [{"iq": [1.0, 2.0, 3.0, -4.0]}]
    one = [{"name": "z", "type": "c16"}]
    payload = np.array([1 + 2j], "c16").tobytes()
    assert rows_of([payload], format="struct", layout=one, complex="array") == [{"z": [1.0, 2.0]}]


@given(st.lists(st.lists(st.integers(-(2**15), 2**15 - 1), max_size=5), max_size=8))
def test_a_tail_has_any_length(tails: list[list[int]]) -> None:
    payloads = [struct.pack(f">B{len(tail)}h", i, *tail) for i, tail in enumerate(tails)]
    layout = [{"name": "n", "type": "u1"}, {"name": "tail", "type": ">i2", "shape": [-1]}]
    assert rows_of(payloads, format="struct", layout=layout) == [
        {"n": i, "tail": tail} for i, tail in enumerate(tails)
    ]


def test_a_tail_may_have_further_dimensions_or_be_all_there_is() -> None:
    data = np.arange(12, dtype="<f4")
    layout = [{"name": "x", "type": "f4", "shape": [-1, 2]}]
    assert rows_of(
        [data[:4].tobytes(), b"", data[4:].tobytes()], format="struct", layout=layout
    ) == [{"x": [[0, 1], [2, 3]]}, {"x": []}, {"x": [[4, 5], [6, 7], [8, 9], [10, 11]]}]
    assert 0 in failures_of([data[:3].tobytes()], format="struct", layout=layout)
    cx = [{"name": "x", "type": "c8", "shape": [-1]}]
    assert rows_of([data[:4].tobytes()], format="struct", layout=cx, complex="array") == [
        {"x": [0, 1, 2, 3]}
    ]


def test_a_tail_of_char_is_text() -> None:
    payloads = [b"\x01\0hello", b"\x02\0", "\x03\0größe".encode(), b"\x04\0\xff"]
    decoded = decode_all(payloads, format="struct", layout="uint16_t n; char text[]")
    assert decoded.rows.to_pylist() == [
        {"n": 1, "text": "hello"},
        {"n": 2, "text": ""},
        {"n": 3, "text": "größe"},
    ]
    assert [each.row for each in decoded.failures] == [3]


def test_text_that_is_not_utf8_fails_by_itself() -> None:
    payloads = [b"ab\0\0", b"\xff\xfe\0\0", b"toolong", b"abcd"]
    layout = "char name[4]"
    decoded = decode_all(payloads, format="struct", layout=layout)
    assert decoded.rows.to_pylist() == [{"name": "ab"}, {"name": "abcd"}]
    assert [each.row for each in decoded.failures] == [1, 2]
    assert "UTF-8" in decoded.failures[0].expected
    lists = decode_all([b"ab\xffd", b"abcd"], format="struct", layout="char name[2][2]")
    assert lists.rows.to_pylist() == [{"name": ["ab", "cd"]}]


def test_a_payload_of_another_size_fails_and_the_others_do_not() -> None:
    payloads = [
        struct.pack("<d", 1.0),
        b"short",
        None,
        b"",
        struct.pack("<d", 2.0) + b"x",
        struct.pack("<d", 3.0),
    ]
    decoded = decode_all(payloads, format="struct", layout="<d")
    assert decoded.rows.to_pylist() == [{"f0": 1.0}, {"f0": 3.0}]
    assert decoded.origin is not None
    assert decoded.origin.tolist() == [0, 5]
    assert [each.reason for each in decoded.failures] == [
        "expected 8 bytes, found 5 bytes",
        "expected a payload, found null",
        "expected 8 bytes, found 0 bytes",
        "expected 8 bytes, found 9 bytes",
    ]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(0, 20), st.integers(0, 20))
def test_a_slice_of_a_batch_decodes_as_that_part(
    values: list[int], start: int, length: int
) -> None:
    batch = batch_of([struct.pack("<I", value) for value in values]).slice(start, length)
    decoded = decoder_for({"format": "struct", "layout": "<I"}).decode(batch)
    checked(decoded, batch.num_rows)
    assert decoded.rows.column(0).to_pylist() == values[start : start + length]


def test_an_empty_batch_gives_no_rows_of_the_same_schema() -> None:
    for layout in ("<dH", BEAM, "char text[]", "char a[4]; float x[][2]"):
        decoder = decoder_for({"format": "struct", "layout": layout})
        decoded = checked(decoder.decode(batch_of([])), 0)
        assert decoded.rows.schema == decoder.schema


def test_large_binary_payloads_decode_too() -> None:
    batch = pa.record_batch({"payload": pa.array([struct.pack("<i", 5)], pa.large_binary())})
    decoder = decoder_for({"format": "struct", "layout": "<i"})
    assert decoder.decode(batch).rows.to_pylist() == [{"f0": 5}]


@pytest.mark.parametrize(
    ("layout", "option", "reason", "hint"),
    [
        ("flaot azimuth", "decode.layout", "there is no type 'flaot'", "did you mean float?"),
        ("float", "decode.layout", "cannot be read at 'float'", "as in"),
        ("float x[n]", "decode.layout", "cannot be read", None),
        ("float x[0]", "decode.layout", "0 is not a length", "only the first dimension"),
        ("float x[]; int y", "decode.layout", "x: only the last field", None),
        ("float x[99999][99999]", "decode.layout", "larger than", None),
        ("", "decode.layout", "at least one field", None),
        ("<P", "decode.layout", "no fixed meaning", None),
        ("<n", "decode.layout", "no fixed meaning", None),
        ("<999999999d", "decode.layout", "too many fields", None),
        ([], "decode.layout", "at least one field", None),
        ([{"name": "a", "type": "f5"}], "decode.layout[0].type", "there is no type 'f5'", "f4"),
        ([{"name": "a", "type": "O"}], "decode.layout[0].type", "cannot be in a payload", None),
        (
            [{"name": "a", "type": "f4", "shap": [2]}],
            "decode.layout[0].shap",
            "no such option",
            "did you mean shape?",
        ),
        ([{"name": "a"}], "decode.layout[0].type", "is missing", None),
        ([{"name": "a", "type": "f4", "shape": "x"}], "decode.layout[0].shape", "tuple", None),
        (np.dtype("f4"), "decode.layout", "needs fields", None),
        (7, "decode.layout", "string", None),
    ],
)
def test_a_layout_that_is_wrong_is_named(
    layout: Any, option: str, reason: str, hint: str | None
) -> None:
    with pytest.raises(InvalidOption) as caught:
        decoder_for({"format": "struct", "layout": layout})
    assert caught.value.option == option
    assert reason in caught.value.reason
    if hint is not None:
        assert hint in str(caught.value.hint)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidOption, match="two columns have this name"):
        decoder_for({"format": "struct", "layout": "float a; int A;"})


def test_the_bytes_of_equal_payloads_are_not_copied_for_native_numbers() -> None:
    values = np.arange(1000, dtype="<f8")
    payloads = pa.Array.from_buffers(
        pa.large_binary(),
        1000,
        [None, pa.py_buffer(np.arange(0, 8001, 8, dtype=np.int64)), pa.py_buffer(values)],
    )
    batch = pa.record_batch({"payload": payloads})
    column = decoder_for({"format": "struct", "layout": "<d"}).decode(batch).rows.column(0)
    assert column.buffers()[1].address == values.ctypes.data


@pytest.mark.parametrize("complex", ["struct", "array"])
@pytest.mark.parametrize(
    "layout",
    [
        "float complex iq[2];",
        "double complex z;",
        "float complex iq[2][3]; short n;",
        "char names[2][4];",
        "char names[2][3][4]; int n[2];",
        [{"name": "raw", "type": "V3", "shape": [2]}],
    ],
)
def test_arrays_of_any_type_are_written_as_they_were_read(layout: Any, complex: str) -> None:
    options = parse_decoding({"format": "struct", "layout": layout})
    assert isinstance(options, StructOptions)
    described = options.described()
    payload = bytes(i % 96 + 30 for i in range(described.size * 3))
    given: dict[str, Any] = {"format": "struct", "layout": layout, "complex": complex}
    found = decode_all([payload], **given, records=True).rows
    assert found.num_rows == 3
    again = decode_all([encode_structs(described, found)], **given, records=True).rows
    assert again.to_pylist() == found.to_pylist()


@pytest.mark.parametrize(
    "values", [["ab"], ["ab", "cd", "ef"], ["ab", None], [["ab"], ["cd"]], "ab", [1, 2]]
)
def test_a_list_of_another_shape_or_type_is_not_written(values: Any) -> None:
    options = parse_decoding({"format": "struct", "layout": "char names[2][4];"})
    assert isinstance(options, StructOptions)
    with pytest.raises(Malformed, match="column names"):
        encode_structs(options.described(), pa.record_batch({"names": [values]}))


def test_a_header_is_skipped_before_a_last_field_of_any_length() -> None:
    options: dict[str, Any] = {"format": "struct", "layout": "float a; float iq[];", "skip": 4}
    payloads = [b"HEAD" + struct.pack(f"<{n}f", *range(n)) for n in range(4)] + [b"HEA"]
    assert rows_of(payloads[1:4], **options) == [
        {"a": 0.0, "iq": [float(i) for i in range(1, n)]} for n in (1, 2, 3)
    ]
    assert rows_of([b"HEAD"], format="struct", layout="float iq[];", skip=4) == [{"iq": []}]
    failures = failures_of([*payloads, b"HEAD" + bytes(6)], **options)
    assert list(failures) == [0, 4, 5]
    assert "found 6 bytes after the first 4" in failures[5]
