"""C structs and protobuf messages: by nanopb's conventions, and at random beside the library."""

from __future__ import annotations

import ctypes
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.decoding.protobuf import find_message
from penstock.core.errors import InvalidOption, Malformed
from penstock.core.message import Message
from penstock.protocols.jrtc._structs import Plan
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.struct_codec import StructCodec, StructLike
from penstock.protocols.uprotocol.message import varint
from protocols.jrtc.forwarded import EXAMPLE, LIMITS, UP, VECTORS, as_set, describe

NUMBERS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool"),
)
EVERYTHING = {
    "Inner": [("x", "sint32"), ("name", "string")],
    "All": [
        *((f"one_{kind}", kind) for kind in NUMBERS),
        *((f"opt_{kind}", f"?{kind}") for kind in NUMBERS),
        *((f"many_{kind}", f"*{kind}") for kind in NUMBERS),
        ("text", "string"),
        ("texts", "*string"),
        ("data", "bytes"),
        ("datas", "*bytes"),
        ("inner", "Inner"),
        ("inners", "*Inner"),
        ("tail", "int32", {"number": 20_000}),
    ],
}
ROOM = Nanopb(
    {
        "*.name": {"max_size": 9},
        "*.text*": {"max_size": 12, "max_count": 3},
        "*.data*": {"max_size": 10, "max_count": 3},
        "*.many_*": {"max_count": 5},
        "*.inners": {"max_count": 4},
    }
)


def codec_of(descriptors: bytes, message: str, struct: StructLike) -> StructCodec:
    return StructCodec(find_message(descriptors, message), struct)


def column(*payloads: bytes) -> pa.Array:
    return pa.array(payloads, pa.binary())


def class_of(descriptors: bytes, message: str) -> Any:
    return message_factory.GetMessageClass(find_message(descriptors, message))


def value_of(kind: str, rng: random.Random) -> Any:
    bits = 64 if "64" in kind else 32
    if kind in {"double", "float"}:
        value = rng.choice([0.0, -0.0, 1.5, rng.uniform(-1e30, 1e30)])
        return struct.unpack("<f", struct.pack("<f", value))[0] if kind == "float" else value
    if kind == "bool":
        return rng.random() < 0.5
    if kind.startswith(("u", "fixed")):
        return rng.choice([0, 1, rng.getrandbits(bits), 2**bits - 1])
    return rng.choice(
        [0, -1, 1, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, rng.getrandbits(bits - 1)]
    )


def filled(message: Any, rng: random.Random) -> Any:
    """Fill a message as far as its struct has room."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            continue
        kind = field.name.partition("_")[2]
        name = field.name
        if name == "inner":
            message.inner.SetInParent()
            filled(message.inner, rng)
        elif name == "inners":
            for _ in range(rng.randrange(5)):
                filled(message.inners.add(), rng)
        elif name in {"text", "name"}:
            setattr(message, name, "é" * rng.randrange(3) + "x")
        elif name == "data":
            message.data = rng.randbytes(rng.randrange(11))
        elif name == "texts":
            message.texts.extend(
                "abcdefghijk"[: rng.randrange(12)] for _ in range(rng.randrange(4))
            )
        elif name == "datas":
            message.datas.extend(rng.randbytes(rng.randrange(11)) for _ in range(rng.randrange(4)))
        elif name in {"tail", "x"}:
            setattr(message, name, value_of("int32", rng))
        elif field.is_repeated:
            values = [value_of(kind, rng) for _ in range(rng.randrange(6))]
            getattr(message, name).extend(values)
        else:
            setattr(message, name, value_of(kind, rng))
    return message


@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
def test_all_kinds_of_fields_survive_both_ways(syntax: str) -> None:
    descriptors = as_set(describe(EVERYTHING, syntax=syntax))  # type: ignore[arg-type]
    codec, kind = codec_of(descriptors, "All", ROOM), class_of(descriptors, "All")
    rng = random.Random(syntax)
    messages = [filled(kind(), rng) for _ in range(300)]
    payloads = column(*(message.SerializeToString() for message in messages))
    structs, failures = codec.deserialise(payloads)
    assert not failures
    again, failures = codec.serialise(column(*(row.tobytes() for row in structs)))
    assert not failures
    assert [kind.FromString(payload) for payload in again.to_pylist()] == messages


def test_a_slice_of_payloads_is_what_it_shows() -> None:
    codec = codec_of(EXAMPLE, "status", Nanopb(LIMITS))
    whole = column(b"wrong", UP, UP, b"wrong")
    rows, failures = codec.deserialise(whole.slice(1, 2))
    assert not failures
    structs = column(b"no", *(row.tobytes() for row in rows), b"no").slice(1, 2)
    payloads, failures = codec.serialise(structs)
    assert payloads.to_pylist() == [UP, UP]
    assert not failures
    assert codec.serialise(column()).payloads.to_pylist() == []
    assert len(codec.deserialise(column()).rows) == 0


class Mine(ctypes.Structure):
    _fields_ = (
        ("a_num", ctypes.c_uint32),
        ("has_another_num", ctypes.c_bool),
        ("another_num", ctypes.c_uint32),
    )


class Status(ctypes.Structure):
    """As nanopb's header has it."""

    _fields_ = (("id", ctypes.c_uint32), ("status", ctypes.c_char * 100), ("a_struct", Mine))


def test_structs_of_the_vectors_become_their_datagrams() -> None:
    given = Status(id=7, status=b"up", a_struct=Mine(a_num=300))
    also = Status(id=7, status="été".encode(), a_struct=Mine(300, True, 1))
    codec = codec_of(EXAMPLE, "status", Status)
    assert codec.dtype.itemsize == VECTORS["vectors"][0]["elem_size"]
    assert codec.dtype == codec_of(EXAMPLE, "status", Nanopb(LIMITS)).dtype
    payloads, failures = codec.serialise(column(bytes(given), bytes(also)))
    wanted = {vector["case"]: vector["datagram"] for vector in VECTORS["vectors"][1:]}
    assert [payload.hex() for payload in payloads.to_pylist()] == [
        wanted["status_basic"][32:],
        wanted["status_utf8"][32:],
    ]
    assert not failures


def test_a_oneof_has_the_member_that_its_struct_says() -> None:
    codec = codec_of(EXAMPLE, "req_resp", Nanopb(LIMITS))
    request = bytes.fromhex("0a07080112016e1801")
    rows, failures = codec.deserialise(column(request, b"", b"\x12\x05\x08\x02\x12\x01r"))
    assert not failures
    assert rows["which_req_or_resp"].tolist() == [1, 0, 2]
    assert rows["req_or_resp"]["req"]["id"][0] == 1
    payloads, _ = codec.serialise(column(*(row.tobytes() for row in rows)))
    assert payloads.to_pylist() == [request, b"", b"\x12\x05\x08\x02\x12\x01r"]
    # The last member counts, and nothing of the first is left where it was.
    rows, _ = codec.deserialise(column(request + b"\x12\x05\x08\x02\x12\x01r"))
    assert codec.serialise(column(rows[0].tobytes())).payloads.to_pylist() == [
        b"\x12\x05\x08\x02\x12\x01r"
    ]


def test_members_of_a_oneof_are_aligned_as_in_c() -> None:
    file = describe({"A": [("a", "double"), ("b", "bool"), ("c", "int32")]})
    file.message_type[0].oneof_decl.add(name="one")
    for field in file.message_type[0].field[:2]:
        field.oneof_index = 0
    descriptors = as_set(file)
    codec, struct = (
        codec_of(descriptors, "A", Nanopb()),
        Nanopb().struct(find_message(descriptors, "A")),
    )
    made = struct(which_one=1, c=7)
    made.one.a = 0.5
    expected = class_of(descriptors, "A")(a=0.5, c=7).SerializeToString()
    assert codec.dtype.itemsize == ctypes.sizeof(struct) == 24
    found = codec.serialise(column(bytes(made)))
    assert (found.payloads.to_pylist(), found.failures) == ([expected], [])
    assert codec.deserialise(column(expected)).rows.tobytes() == bytes(made)


def test_a_struct_of_another_size_fails_alone() -> None:
    codec = codec_of(EXAMPLE, "status", Status)
    good = bytes(Status(id=1, status=b"ok"))
    payloads, failures = codec.serialise(column(good, good[:-1], good + b"x", b"", good))
    assert [bool(payload) for payload in payloads.to_pylist()] == [True, False, False, False, True]
    assert [failure.row for failure in failures] == [1, 2, 3]
    assert failures[0].reason == "expected a struct of status, 116 bytes, found 115 bytes"


def test_structs_that_say_more_than_they_have_fail() -> None:
    descriptors = as_set(
        describe({"A": [("n", "*int32"), ("t", "string"), ("b", "bytes"), ("s", "*string")]})
    )
    dtype = np.dtype(
        [
            ("n_count", "u2"),
            ("n", "i4", (4,)),
            ("t", "S5"),
            ("b", np.dtype([("size", "u2"), ("bytes", "u1", (3,))])),
            ("s_count", "u1"),
            ("s", "S4", (2,)),
        ]
    )
    codec = codec_of(descriptors, "A", dtype)
    rows = np.zeros(6, dtype)
    rows["t"] = b"abcd"
    rows["n_count"] = [4, 5, 0, 0, 0, 0]
    rows["b"]["size"] = [3, 0, 4, 0, 0, 0xFFFF]
    rows["s_count"] = [2, 0, 0, 0, 3, 0]
    data = [row.tobytes() for row in rows]
    data[3] = data[3].replace(b"abcd\0", b"abcde")
    payloads, failures = codec.serialise(column(*data))
    found = {failure.row: failure.found for failure in failures}
    assert found == {
        1: "more elements than there is room for in n",
        2: "more bytes than there is room for, or not as many as there have to be in b",
        3: "a text that does not end in t",
        4: "more elements than there is room for in s",
        5: "more bytes than there is room for, or not as many as there have to be in b",
    }
    assert class_of(descriptors, "A").FromString(payloads[0].as_py()).t == "abcd"


def test_messages_that_do_not_fit_their_struct_fail() -> None:
    codec = codec_of(EXAMPLE, "status", Nanopb({**LIMITS, "status.status": {"max_size": 4}}))
    cases = {
        b"\x08\x07\x12\x04abcd\x1a\x02\x08\x01": "more bytes than there is room for, or not as "
        "many as there have to be in status",
        b"\x08\x07\x12\x03a\0c\x1a\x02\x08\x01": "a text with a zero byte inside in status",
        b"\x08\x07\x1a\x02\x08\x01": "none of the required status",
        b"\x08\x07\x12\x02up\x1a\x00": "none of the required a_struct.a_num",
        b"\x0d\x07\x00\x00\x00": "a field of another wire type in id",
        b"\x08": "the end inside of a field in id",
        b"\x12\x7f": "the end inside of a field in status",
        b"\x00\x00": "a field without a number, or of no wire type",
        b"\x0f": "a field without a number, or of no wire type",
        b"\x08" + b"\xff" * 10: "the end inside of a field in id",
    }
    del cases[b"\x0f"]  # of a wire type that is none: the field is known, so that is said
    _, failures = codec.deserialise(column(*cases))
    names = {"a_struct.a_num": "my_struct.a_num"}
    said = [failure.found for failure in failures]
    expected = [text.replace(*next(iter(names.items()))) for text in cases.values()]
    assert said == expected
    assert codec.deserialise(column(b"\x08\x07\x12\x03abc\x1a\x02\x08\x01")).failures == []


def test_unknown_fields_are_stepped_over() -> None:
    codec = codec_of(EXAMPLE, "status", Nanopb(LIMITS))
    unknown = b"\x78\x05" + b"\x7a\x02zz" + b"\x7d1234" + b"\x79" + b"8" * 8
    group = b"\x83\x01\x08\x01\x8b\x01\x8c\x01\x84\x01"
    rows, failures = codec.deserialise(column(unknown + UP + group, group[:-2] + UP))
    assert [failure.row for failure in failures] == [1]
    assert codec.serialise(column(rows[0].tobytes())).payloads.to_pylist() == [UP]
    nested = b"\x83\x01" * 60 + b"\x84\x01" * 60
    assert codec.deserialise(column(UP + nested)).failures[0].found.startswith("more messages")


def test_repeated_numbers_come_packed_or_not_and_in_pieces() -> None:
    descriptors = as_set(describe({"A": [("n", "*sint32")]}))
    codec = codec_of(descriptors, "A", np.dtype([("n_count", "u4"), ("n", "i4", (4,))]))
    payloads = column(
        b"\x0a\x02\x02\x04", b"\x08\x02\x08\x04", b"\x08\x02\x0a\x01\x04", b"\x0a\x00"
    )
    rows, failures = codec.deserialise(payloads)
    assert not failures
    assert rows["n_count"].tolist() == [2, 2, 2, 0]
    assert rows["n"][:3, :2].tolist() == [[1, 2]] * 3
    assert codec.deserialise(column(b"\x0a\x05\x02\x02\x02\x02\x02")).failures


def test_arrays_without_a_count_have_all_elements() -> None:
    descriptors = as_set(describe({"A": [("n", "*uint32")]}))
    codec = codec_of(descriptors, "A", np.dtype([("n", "u2", (3,))]))
    structs = np.array([([1, 2, 3],)], codec.dtype)
    payloads, _ = codec.serialise(column(structs[0].tobytes()))
    assert payloads.to_pylist() == [b"\x0a\x03\x01\x02\x03"]
    assert codec.deserialise(payloads).rows["n"].tolist() == [[1, 2, 3]]
    failures = codec.deserialise(column(b"\x0a\x02\x01\x02", b"\x0a\x04\x01\x80\x80\x04\x03"))[1]
    assert "fewer elements" in failures[0].found
    assert "a number that does not fit the struct in n" in failures[1].found


def test_of_an_array_or_bytes_of_a_fixed_length_none_are_all_zeros() -> None:
    # As nanopb reads them.
    descriptors = as_set(describe({"A": [("n", "*uint32"), ("b", "?bytes"), ("x", "int32")]}))
    room = {
        "A.n": {"max_count": 3, "fixed_count": 1},
        "A.b": {"max_size": 2, "fixed_length": 1},
    }
    codec = codec_of(descriptors, "A", Nanopb(room))
    payloads = column(b"\x18\x05", b"\x0a\x03\x01\x02\x03\x12\x00\x18\x05", b"\x12\x01a")
    rows, failures = codec.deserialise(payloads)
    assert [failure.row for failure in failures] == [2]
    assert rows["n"].tolist()[:2] == [[0, 0, 0], [1, 2, 3]]
    assert rows["has_b"].tolist()[:2] == [0, 1]
    assert rows["b"][:2].tobytes() == bytes(4)


def test_fields_that_one_side_lacks() -> None:
    descriptors = as_set(describe({"A": [("x", "int32"), ("new", "int32")]}))
    codec = codec_of(descriptors, "A", np.dtype([("_pad", "u4"), ("x", "i4")]))
    assert codec.serialise(column(b"pad_\x05\0\0\0")).payloads.to_pylist() == [b"\x08\x05"]
    with pytest.raises(InvalidOption, match="has no field y"):
        codec_of(descriptors, "A", np.dtype([("x", "i4"), ("y", "i4")]))
    with pytest.raises(InvalidOption, match="is required"):
        codec_of(EXAMPLE, "status", np.dtype([("id", "u4")]))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int32", "u4"),
        ("int32", "i8"),
        ("uint32", "i4"),
        ("float", "f8"),
        ("double", "f4"),
        ("int32", "f4"),
        ("bool", "i4"),
        ("int32", ">i4"),
        ("string", "i4"),
        ("*int32", "i4"),
        ("Inner", "i4"),
        ("bytes", "i4"),
    ],
)
def test_a_member_that_could_hold_what_its_field_cannot_is_refused(kind: str, dtype: str) -> None:
    descriptors = as_set(describe({"Inner": [("x", "int32")], "A": [("x", kind)]}))
    with pytest.raises(InvalidOption):
        codec_of(descriptors, "A", np.dtype([("x", dtype)]))


def test_nanopb_needs_to_know_how_long_fields_are(tmp_path: Path) -> None:
    status = find_message(EXAMPLE, "status")
    with pytest.raises(InvalidOption, match="needs max_size"):
        Nanopb().struct(status)
    options = tmp_path / "example.options"
    options.write_text("# limits\nstatus.status max_size:10 type:FT_STATIC // and more\n\n")
    assert Nanopb.from_options(options).struct(status).status.size == 10
    options.write_text("status.status max_size:many\n")
    with pytest.raises(Malformed, match="line 1"):
        Nanopb.from_options(options)
    recursive = find_message(as_set(describe({"N": [("n", "N")]})), "N")
    with pytest.raises(InvalidOption, match="itself inside"):
        Nanopb().struct(recursive)
    doubled = {f"M{i}": [("a", f"M{i + 1}"), ("b", f"M{i + 1}")] for i in range(30)}
    huge = as_set(describe({**doubled, "M30": [("x", "double")]}))  # type: ignore[dict-item]
    with pytest.raises(InvalidOption, match="larger than"):
        Nanopb().struct(find_message(huge, "M0"))


def test_nanopb_reads_the_options_of_the_proto_itself() -> None:
    file = describe({"A": [("t", "string"), ("n", "*int32"), ("b", "bytes")]})
    for field, options in zip(
        file.message_type[0].field,
        (b"\x70\x05", b"\x10\x03\x80\x01\x01", b"\x08\x04\x78\x01"),
        strict=True,
    ):
        field.options.MergeFromString(b"\x92\x3f" + bytes([len(options)]) + options)
    codec = codec_of(as_set(file), "A", Nanopb())
    assert codec.dtype["t"].itemsize == 6  # max_length 5, and a zero
    assert codec.dtype["n"].shape == (3,)
    assert "n_count" not in (codec.dtype.fields or {})  # fixed_count
    assert codec.dtype["b"].shape == (4,)  # fixed_length


def embed(options: Any, *numbers: tuple[int, int]) -> None:
    """Set options of nanopb, by their numbers, as `[(nanopb).max_size = 10]` does in a .proto."""
    inside = b"".join(varint(8 * number) + varint(value) for number, value in numbers)
    options.MergeFromString(b"\x92\x3f" + bytes([len(inside)]) + inside)


MAX_SIZE, TYPE, PACKED_STRUCT, INT_SIZE, NO_UNIONS, PACKED_ENUM = 1, 3, 5, 7, 8, 10
TYPE_OVERRIDE, SORT_BY_TAG, LABEL_OVERRIDE, ENUM_INTSIZE = 27, 28, 31, 34
PROTO3, PROTO3_SINGULAR_MSGS, SUBMSG_CALLBACK = 12, 21, 22


def test_nanopbs_options_of_a_file_and_a_message_hold_for_their_fields() -> None:
    def offset_of_b(*, is_in_file: bool, bits: int) -> int:
        file = describe({"A": [("a", "int32"), ("b", "int32")]})
        embed(file.options if is_in_file else file.message_type[0].options, (INT_SIZE, bits))
        struct = Nanopb().struct(find_message(as_set(file), "A"))
        return int(struct.b.offset)

    # As nanopb's own generator lays them out.
    assert offset_of_b(is_in_file=True, bits=8) == 1
    assert offset_of_b(is_in_file=False, bits=16) == 2


def test_numbers_of_a_fixed_size_keep_it_whatever_size_other_integers_have() -> None:
    kinds = ("fixed32", "sfixed64", "int32", "sint64", "uint32", "sfixed32", "fixed64")
    file = describe({"A": [(f"f_{kind}", kind) for kind in kinds]})
    embed(file.options, (INT_SIZE, 8))
    struct = Nanopb().struct(find_message(as_set(file), "A"))
    # As nanopb's own generator lays them out.
    sizes = [getattr(struct, f"f_{kind}").size for kind in kinds]
    assert sizes == [4, 8, 1, 1, 1, 4, 8]


@pytest.mark.parametrize(
    ("syntax", "kind", "has"),
    [
        ("proto3", "B", False),
        ("proto3", "?B", True),
        ("proto2", "B", True),
        ("proto2", "!B", False),
    ],
)
def test_only_messages_that_proto3_does_not_call_optional_lose_their_flag(
    syntax: str, kind: str, has: bool
) -> None:
    file = describe({"B": [("x", "int32")], "A": [("b", kind)]}, syntax=syntax)
    embed(file.options, (PROTO3_SINGULAR_MSGS, 1))
    struct = Nanopb().struct(find_message(as_set(file), "A"))
    assert hasattr(struct, "has_b") == has


def test_a_message_that_others_extend_is_refused() -> None:
    file = describe({"A": [("a", "int32")]}, syntax="proto2")
    file.message_type[0].extension_range.add(start=100, end=200)
    with pytest.raises(InvalidOption, match="has extensions"):
        Nanopb().struct(find_message(as_set(file), "A"))


def test_fields_of_a_struct_are_in_the_order_of_the_proto_if_that_is_asked_for() -> None:
    wanted = [("b", "int32", {"number": 2}), ("a", "int64", {"number": 1}), ("c", "int32")]
    file = describe({"A": wanted})  # type: ignore[dict-item]
    embed(file.message_type[0].options, (SORT_BY_TAG, 0))
    struct = Nanopb().struct(find_message(as_set(file), "A"))
    # As above.
    assert (struct.b.offset, struct.a.offset, struct.c.offset) == (0, 8, 16)


def test_what_a_proto_says_holds_and_not_what_a_file_of_options_says(tmp_path: Path) -> None:
    file = describe({"A": [("s", "string"), ("a", "int32")]})
    embed(file.message_type[0].field[0].options, (MAX_SIZE, 10))
    options = tmp_path / "a.options"
    options.write_text("A.s max_size:20\n")
    struct = Nanopb.from_options(options).struct(find_message(as_set(file), "A"))
    assert (struct.s.size, struct.a.offset, ctypes.sizeof(struct)) == (10, 12, 16)


@pytest.mark.parametrize(
    "line",
    [
        "A.s max_size: 20 max_count: 3",
        "A.s max_size:20, max_count:3",
        "A.s max_size:0x14; max_count:3 fixed_count:false type:FT_STATIC",
        "A.s max_size:20 callback_datatype:'max_size:9 #' max_count:3",
        "/* all,\nthat is */ A.* max_size:20 /* long */ max_count:3",
    ],
)
def test_a_line_of_options_is_written_in_many_ways(tmp_path: Path, line: str) -> None:
    options = tmp_path / "a.options"
    options.write_text(f"{line} # and so on\n")
    message = find_message(as_set(describe({"A": [("s", "*string"), ("a", "int32")]})), "A")
    struct = Nanopb.from_options(options).struct(message)
    assert (struct.s.size, struct.a.offset, ctypes.sizeof(struct)) == (60, 64, 68)


@pytest.mark.parametrize(
    ("scope", "option", "value"),
    [
        ("field", TYPE, 3),
        ("field", TYPE, 4),
        ("message", PACKED_STRUCT, 1),
        ("file", PACKED_STRUCT, 1),
        ("message", NO_UNIONS, 1),
        ("field", TYPE_OVERRIDE, 3),
        ("field", LABEL_OVERRIDE, 2),
        ("file", ENUM_INTSIZE, 8),
        ("enum", PACKED_ENUM, 1),
        ("file", PROTO3, 0),
    ],
)
def test_an_option_that_makes_another_struct_is_refused(
    scope: str, option: int, value: int
) -> None:
    file = describe({"A": [("b", "bool"), ("a", "int64"), ("e", "int32")]})
    message = file.message_type[0]
    enum = file.enum_type.add(name="E")
    enum.value.add(name="NONE", number=0)
    message.field[2].type, message.field[2].type_name = 14, ".E"
    message.oneof_decl.add(name="one")
    message.field[2].oneof_index = 0
    assert Nanopb().struct(find_message(as_set(file), "A")).one.offset == 20
    scopes = {"file": file, "message": message, "field": message.field[1], "enum": enum}
    embed(scopes[scope].options, (option, value))
    with pytest.raises(InvalidOption, match="struct"):
        Nanopb().struct(find_message(as_set(file), "A"))


def test_options_of_a_file_that_make_another_struct_are_refused(tmp_path: Path) -> None:
    options = tmp_path / "a.options"
    message = find_message(as_set(describe({"A": [("b", "bool"), ("a", "int64")]})), "A")
    for line, is_known in (
        ("* packed_struct:false sort_by_tag:true type:FT_DEFAULT", True),
        ("A packed_struct:true", False),
        ("A.a type:FT_IGNORE", False),
        ("*.a type:FT_SOMETHING", None),
    ):
        options.write_text(line)
        if is_known:
            assert Nanopb.from_options(options).struct(message).a.offset == 8
            continue
        with pytest.raises(Malformed if is_known is None else InvalidOption):
            Nanopb.from_options(options).struct(message)


@pytest.mark.parametrize("line", ["A.one no_unions:true", "A.one type:FT_IGNORE"])
def test_options_of_a_oneof_that_make_another_struct_are_refused(tmp_path: Path, line: str) -> None:
    file = describe({"A": [("a", "int64"), ("b", "bool")]})
    file.message_type[0].oneof_decl.add(name="one")
    for field in file.message_type[0].field:
        field.oneof_index = 0
    options = tmp_path / "a.options"
    for text, is_known in (("A.one max_size:9 type:FT_CALLBACK", True), (line, False)):
        options.write_text(text)
        if is_known:
            Nanopb.from_options(options).struct(find_message(as_set(file), "A"))
            continue
        with pytest.raises(InvalidOption, match="by which the struct is another one"):
            Nanopb.from_options(options).struct(find_message(as_set(file), "A"))


def test_a_callback_for_messages_inside_makes_another_struct() -> None:
    file = describe({"B": [("x", "int32")], "A": [("n", "int32"), ("b", "B")]})
    embed(file.options, (SUBMSG_CALLBACK, 1))
    assert Nanopb().struct(find_message(as_set(file), "B")).x.size == 4  # it has none inside
    with pytest.raises(InvalidOption, match="submsg_callback"):
        Nanopb().struct(find_message(as_set(file), "A"))


def test_a_message_is_cast_to_the_struct_of_its_codec() -> None:
    struct = Nanopb(LIMITS).struct(find_message(EXAMPLE, "status"))
    codec = codec_of(EXAMPLE, "status", struct)
    rows, _ = codec.deserialise(column(UP))
    message = Message(0, 0, 0, 0, 0, None, None, rows[0].tobytes())
    assert message.cast(struct).id == 7
    assert message.cast(codec.dtype)["status"][0] == b"up"


@given(st.binary(max_size=80))
def test_any_bytes_become_a_struct_if_the_library_takes_them(data: bytes) -> None:
    descriptors = as_set(describe(EVERYTHING))  # type: ignore[arg-type]
    codec, kind = codec_of(descriptors, "All", ROOM), class_of(descriptors, "All")
    rows, failures = codec.deserialise(column(data))
    if failures:
        return
    expected = kind.FromString(data)
    expected.DiscardUnknownFields()
    (payload,) = codec.serialise(column(rows[0].tobytes())).payloads.to_pylist()
    assert kind.FromString(payload) == expected


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_fuzz_of_structs_and_messages(count: int) -> None:
    descriptors = as_set(describe(EVERYTHING))  # type: ignore[arg-type]
    codec, kind = codec_of(descriptors, "All", ROOM), class_of(descriptors, "All")
    rng = random.Random(count)
    seeds = [filled(kind(), rng).SerializeToString() for _ in range(200)]
    size = codec.dtype.itemsize
    for _ in range(0, count, 2000):
        payloads = []
        for _ in range(1000):
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randrange(4)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            payloads.append(bytes(data[: rng.randrange(len(data) + 1)]))
        rows, failures = codec.deserialise(column(*payloads))
        bad = {failure.row for failure in failures}
        for row in rng.sample(range(1000), 20):
            try:
                kind.FromString(payloads[row])
            except DecodeError:
                # Text that is not UTF-8 is a C string all the same.
                assert row in bad or any(byte > 0x7F for byte in payloads[row])
        assert {i for i in range(1000) if not rows[i].tobytes().strip(b"\0")} >= bad
        # Structs of nonsense say too much, or become messages.
        nonsense = [rng.randbytes(size) for _ in range(900)] + [row.tobytes() for row in rows[:100]]
        again, failures = codec.serialise(column(*nonsense))
        assert len(again) == 1000


def test_tables_that_do_not_fit_together_are_refused() -> None:
    good = struct.pack("<14i", 1, 5, 0, 0, 4, 1, 4, 1, 0, 0, 0, 0, 0, -1)
    types = struct.pack("<3i", 0, 1, 8)
    Plan(types, good, 100)
    for at, value in ((0, 0), (1, 10), (1, 99), (2, 9), (3, 5), (3, -1), (4, 3), (6, 3), (7, 3)):
        bad = bytearray(good)
        struct.pack_into("<i", bad, 4 * at, value)
        with pytest.raises(ValueError, match="do not fit"):
            Plan(types, bytes(bad), 100)
    with pytest.raises(ValueError, match="do not fit"):
        Plan(struct.pack("<3i", 0, 2, 8), good, 100)
    plan = Plan(types, good, 100)
    with pytest.raises(ValueError, match="offsets"):
        plan.serialise(struct.pack("<2i", 0, 9), bytes(8), 0, 1)
    with pytest.raises(ValueError, match="offsets"):
        plan.deserialise(struct.pack("<2i", 0, 8), bytes(8), 1, 1)
