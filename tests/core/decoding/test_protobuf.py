from __future__ import annotations

import pickle
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.decoding.batches import batch_of, checked, decode_all
from penstock.core.decoding import decoder_for
from penstock.core.decoding._protobuf import Plan
from penstock.core.errors import InvalidOption

_Field = descriptor_pb2.FieldDescriptorProto


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """Return what protoc would make of a file with a few messages."""
    file = descriptor_pb2.FileDescriptorProto(name="beam.proto", package="radar", syntax="proto3")
    kind = file.enum_type.add(name="Kind")
    for number, name in enumerate(["NONE", "PPI", "RHI"]):
        kind.value.add(name=name, number=number)
    place = file.message_type.add(name="Place")
    _add(place, "lat", 1, _Field.TYPE_DOUBLE)
    _add(place, "lon", 2, _Field.TYPE_DOUBLE)
    beam = file.message_type.add(name="Beam")
    _add(beam, "id", 1, _Field.TYPE_INT64)
    _add(beam, "name", 2, _Field.TYPE_STRING)
    _add(beam, "raw", 3, _Field.TYPE_BYTES)
    _add(beam, "dbz", 4, _Field.TYPE_FLOAT, repeated=True)
    _add(beam, "at", 5, _Field.TYPE_MESSAGE, type_name=".radar.Place")
    _add(beam, "kind", 6, _Field.TYPE_ENUM, type_name=".radar.Kind")
    _add(beam, "ticks", 7, _Field.TYPE_UINT64)
    _add(beam, "track", 8, _Field.TYPE_MESSAGE, repeated=True, type_name=".radar.Place")
    _add(beam, "tags", 9, _Field.TYPE_MESSAGE, repeated=True, type_name=".radar.Beam.TagsEntry")
    maybe = _add(beam, "maybe", 10, _Field.TYPE_INT32)
    maybe.proto3_optional = True
    maybe.oneof_index = 0
    beam.oneof_decl.add(name="_maybe")
    entry = beam.nested_type.add(name="TagsEntry")
    entry.options.map_entry = True
    _add(entry, "key", 1, _Field.TYPE_STRING)
    _add(entry, "value", 2, _Field.TYPE_INT32)
    tree = file.message_type.add(name="Tree")
    _add(tree, "value", 1, _Field.TYPE_INT32)
    _add(tree, "left", 2, _Field.TYPE_MESSAGE, type_name=".radar.Tree")
    return descriptor_pb2.FileDescriptorSet(file=[file, _old_file()])


def _old_file() -> descriptor_pb2.FileDescriptorProto:
    """Return a file by proto2, whose strings the library does not check."""
    file = descriptor_pb2.FileDescriptorProto(name="old.proto", package="radar", syntax="proto2")
    mode = file.enum_type.add(name="Mode")
    mode.options.allow_alias = True
    for name, number in (("OFF", 0), ("IDLE", 0), ("ON", 3)):
        mode.value.add(name=name, number=number)
    old = file.message_type.add(name="Old")
    _add(old, "name", 1, _Field.TYPE_STRING)
    _add(old, "names", 2, _Field.TYPE_STRING, repeated=True)
    _add(old, "mode", 3, _Field.TYPE_ENUM, type_name=".radar.Mode")
    _add(old, "counts", 4, _Field.TYPE_MESSAGE, repeated=True, type_name=".radar.Old.CountsEntry")
    _add(old, "word", 5, _Field.TYPE_FIXED64)
    _add(old, "step", 6, _Field.TYPE_SINT32)
    _add(old, "deep", 7, _Field.TYPE_MESSAGE, type_name=".radar.Deep")
    needed = _add(old, "needed", 8, _Field.TYPE_UINT32)
    needed.label = _Field.LABEL_REQUIRED
    entry = old.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    _add(entry, "key", 1, _Field.TYPE_STRING)
    _add(entry, "value", 2, _Field.TYPE_UINT64)
    _add(file.message_type.add(name="Deep"), "text", 1, _Field.TYPE_STRING)
    return file


def _add(message: Any, name: str, number: int, type: Any, *, repeated: bool = False,
         type_name: str | None = None) -> Any:  # fmt: skip
    label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    return message.field.add(name=name, number=number, type=type, label=label, type_name=type_name)


def message_class(name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptors().file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "beam.desc"
    path.write_bytes(descriptors().SerializeToString())
    return {"format": "protobuf", "descriptor_set": str(path), "message": "radar.Beam"}


_FLOAT = st.floats(width=32, allow_nan=False)
_PLACE = st.fixed_dictionaries({"lat": _FLOAT, "lon": _FLOAT})
_BEAMS = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "name": st.text(st.characters(codec="utf-8")),
        "raw": st.binary(max_size=20),
        "dbz": st.lists(_FLOAT, max_size=4),
        "at": st.none() | _PLACE,
        "kind": st.sampled_from(["NONE", "PPI", "RHI"]),
        "ticks": st.integers(0, 2**64 - 1),
        "track": st.lists(_PLACE, max_size=2),
        "tags": st.dictionaries(
            st.text(st.characters(codec="utf-8"), max_size=3), st.integers(-5, 5), max_size=2
        ),
        "maybe": st.none() | st.integers(-(2**31), 2**31 - 1),
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(_BEAMS, max_size=4))
def test_messages_come_back(options: dict[str, Any], values: list[dict[str, Any]]) -> None:
    beam = message_class("radar.Beam")
    payloads = [
        beam(**{k: v for k, v in value.items() if v is not None}).SerializeToString()
        for value in values
    ]
    found = decode_all(payloads, **options)
    assert not found.failures
    rows = [{**row, "tags": dict(row["tags"])} for row in found.rows.to_pylist()]
    assert rows == [{**value, "ticks": Decimal(value["ticks"])} for value in values]


def test_a_decoder_travels_to_a_task(options: dict[str, Any]) -> None:
    payload = message_class("radar.Beam")(id=5).SerializeToString()
    decoder = pickle.loads(pickle.dumps(decoder_for({**options, "fields": ["id", "kind"]})))
    decoded = checked(decoder.decode(batch_of([payload])), 1)
    assert decoded.rows.to_pylist() == [{"id": 5, "kind": "NONE"}]
    assert decoder.spark_schema == "`id` BIGINT, `kind` STRING"


def test_bad_payloads_fail_by_themselves(options: dict[str, Any]) -> None:
    good = message_class("radar.Beam")(id=5, name="x").SerializeToString()
    bad = [good[:-1], b"\xff", b"\x12\xff\xff\xff\xff\x07", b"\x12\x01\xff", b"\x0b" * 5_000]
    decoded = decode_all([good, *bad, None, b"", good], **options)
    assert decoded.rows.column(0).to_pylist() == [5, 0, 5]
    assert [each.row for each in decoded.failures] == [1, 2, 3, 4, 5, 6]


def test_a_payload_above_the_limit_is_not_parsed(options: dict[str, Any]) -> None:
    payload = message_class("radar.Beam")(raw=bytes(2000)).SerializeToString()
    (failure,) = decode_all([payload], **options, max_size="1k").failures
    assert failure.reason == "expected at most 1,024 bytes, found 2,003 bytes"


def test_nesting_without_end_fails(options: dict[str, Any]) -> None:
    tree = message_class("radar.Tree")
    payload = tree(value=1).SerializeToString()
    while len(payload) < 5_000:
        size = len(payload)
        length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
        payload = b"\x12" + length + payload
    options = {**options, "message": "radar.Tree", "fields": ["value"]}
    decoded = decode_all([payload, tree(value=3).SerializeToString()], **options)
    assert decoded.rows.to_pylist() == [{"value": 3}]


def test_slices_and_empty_batches_decode(options: dict[str, Any]) -> None:
    beam = message_class("radar.Beam")
    batch = batch_of([beam(id=i).SerializeToString() for i in range(6)])
    decoder = decoder_for(options)
    part = checked(decoder.decode(batch.slice(2, 3)), 3)
    assert part.rows.column(0).to_pylist() == [2, 3, 4]
    assert checked(decoder.decode(batch.slice(0, 0)), 0).rows.schema == decoder.schema


@pytest.mark.parametrize(
    ("changed", "option", "reason", "hint"),
    [
        ({"message": "radar.Baem"}, "message", "no such message", "did you mean radar.Beam?"),
        ({"fields": ["nmae"]}, "fields", "has no such field", "did you mean name?"),
        ({"message": "radar.Tree"}, "fields", "radar.Tree has itself inside", "fields: [a, b]"),
        ({"descriptor_set": "/nowhere"}, "descriptor_set", "cannot be read", None),
        ({"descriptor_set": __file__}, "descriptor_set", "not a descriptor set", "protoc"),
        ({"descriptor_set": "/dev/null"}, "descriptor_set", "has no files", "protoc"),
        ({"max_size": "x"}, "max_size", "", None),
    ],
)
def test_an_option_that_is_wrong_is_named(
    options: dict[str, Any], changed: dict[str, Any], option: str, reason: str, hint: str | None
) -> None:
    with pytest.raises(InvalidOption) as caught:
        decoder_for({**options, **changed})
    assert caught.value.option == f"decode.{option}"
    assert reason in caught.value.reason
    if hint is not None:
        assert hint in str(caught.value.hint)


def test_text_that_is_not_utf8_fails_by_itself_by_proto2_too(options: dict[str, Any]) -> None:
    old = message_class("radar.Old")
    good = old(needed=1, name="x", names=["y"], counts={"z": 2**63}).SerializeToString()
    needed = old(needed=1).SerializeToString()
    bad = [needed + b"\x0a\x02a\xff", needed + b"\x12\x01\xfe",
           needed + b"\x22\x03\x0a\x01\xfd", needed + b"\x3a\x03\x0a\x01\xfd", b""]  # fmt: skip
    decoded = decode_all([good, *bad, good], **{**options, "message": "radar.Old"})
    assert decoded.rows.column(0).to_pylist() == ["x", "x"]
    assert decoded.rows.column(3).to_pylist() == [[("z", Decimal(2**63))]] * 2
    assert [each.row for each in decoded.failures] == [1, 2, 3, 4, 5]


def test_of_several_names_for_a_number_it_is_the_first(options: dict[str, Any]) -> None:
    payload = message_class("radar.Old")(needed=1, mode=0).SerializeToString()
    decoded = decode_all([payload], **{**options, "message": "radar.Old", "fields": ["mode"]})
    assert decoded.rows.to_pylist() == [{"mode": "OFF"}]


# --- descriptor sets ------------------------------------------------------------------------


def set_of(*files: descriptor_pb2.FileDescriptorProto) -> bytes:
    written: bytes = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    return written


def file_of(name: str, *imports: str) -> Any:
    return descriptor_pb2.FileDescriptorProto(
        name=f"{name}.proto", package=name, syntax="proto2",
        dependency=[f"{each}.proto" for each in imports],
    )  # fmt: skip


def test_one_set_has_many_messages_and_its_files_may_be_in_any_order() -> None:
    inner, outer = file_of("inner"), file_of("outer", "inner")
    _add(inner.message_type.add(name="Place"), "lat", 1, _Field.TYPE_DOUBLE)
    _add(outer.message_type.add(name="Beam"), "at", 1, _Field.TYPE_MESSAGE,
         type_name=".inner.Place")  # fmt: skip
    both = set_of(outer, inner)
    payload = b"\x09" + bytes(8)
    for name, sent, expected in (
        ("inner.Place", payload, {"lat": 0.0}),
        ("outer.Beam", b"\x0a\x09" + payload, {"at": {"lat": 0.0}}),
    ):
        decoder = decoder_for(format="protobuf", descriptor_set=both, message=name)
        assert decoder.decode(batch_of([sent])).rows.to_pylist() == [expected]
    with pytest.raises(InvalidOption, match="does not fit together"):
        decoder_for(format="protobuf", descriptor_set=set_of(outer), message="outer.Beam")
    outer.dependency.append("outer.proto")
    with pytest.raises(InvalidOption, match="does not fit together"):
        decoder_for(format="protobuf", descriptor_set=set_of(outer, inner), message="outer.Beam")


def test_a_set_of_a_few_bytes_does_not_become_millions_of_columns() -> None:
    file = file_of("wide")
    for level in range(40):
        message = file.message_type.add(name=f"M{level}")
        for number in (1, 2):
            _add(
                message, f"f{number}", number, _Field.TYPE_MESSAGE, type_name=f".wide.M{level + 1}"
            )
    _add(file.message_type.add(name="M40"), "x", 1, _Field.TYPE_INT32)
    with pytest.raises(InvalidOption, match="more than 10,000 columns"):
        decoder_for(format="protobuf", descriptor_set=set_of(file), message="wide.M0")


def test_messages_that_are_too_deep_for_any_payload_are_no_column() -> None:
    file = file_of("deep")
    for level in range(500):
        _add(file.message_type.add(name=f"M{level}"), "f", 1, _Field.TYPE_MESSAGE,
             type_name=f".deep.M{level + 1}")  # fmt: skip
    _add(file.message_type.add(name="M500"), "x", 1, _Field.TYPE_INT32)
    with pytest.raises(InvalidOption, match="more than 100 messages inside"):
        decoder_for(format="protobuf", descriptor_set=set_of(file), message="deep.M0")


def test_message_sets_and_messages_without_fields_are_refused() -> None:
    file = file_of("old")
    kind = file.message_type.add(name="Set")
    kind.options.message_set_wire_format = True
    kind.extension_range.add(start=4, end=100)
    file.message_type.add(name="Nothing")
    _add(file.message_type.add(name="Has"), "set", 1, _Field.TYPE_MESSAGE, type_name=".old.Set")
    for name, reason in (("old.Has", "message set"), ("old.Set", "no fields"),
                         ("old.Nothing", "no fields")):  # fmt: skip
        with pytest.raises(InvalidOption, match=reason):
            decoder_for(format="protobuf", descriptor_set=set_of(file), message=name)


# --- what is only told of a whole message ---------------------------------------------------


def test_the_required_field_that_is_missing_is_named(options: dict[str, Any]) -> None:
    old = message_class("radar.Old")
    good = old(needed=1).SerializeToString()
    (failure,) = decode_all([good, b""], **{**options, "message": "radar.Old"}).failures
    assert failure.reason == "expected a message radar.Old, found none of the required needed"


def test_of_several_entries_of_a_key_the_last_counts(options: dict[str, Any]) -> None:
    beam = message_class("radar.Beam")
    one, two, again = (
        beam(tags=each).SerializeToString() for each in ({"a": 1}, {"b": 2}, {"a": 3})
    )
    decoded = decode_all([one + two + again, two + two], **{**options, "fields": ["tags"]})
    assert decoded.rows.column(0).to_pylist() == [[("b", 2), ("a", 3)], [("b", 2)]]


def test_a_map_of_many_equal_keys_takes_no_longer_than_others(options: dict[str, Any]) -> None:
    one = message_class("radar.Beam")(tags={"a": 1}).SerializeToString()
    decoded = decode_all([one * 200_000], **{**options, "fields": ["tags"]})
    assert decoded.rows.to_pylist() == [{"tags": [("a", 1)]}]


# --- in C -----------------------------------------------------------------------------------


def test_other_threads_run_while_payloads_are_parsed(options: dict[str, Any]) -> None:
    payload = message_class("radar.Beam")(name="x" * 50, tags={"a": 1}).SerializeToString()
    decoder = decoder_for(options)
    payloads = pa.array([payload] * 100_000, pa.large_binary())
    ticks, is_over = [0], threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    _, offsets, data = payloads.buffers()
    before = ticks[0]
    decoder._plan.parse(offsets, data, 0, len(payloads), 1_000)  # type: ignore[attr-defined]
    after = ticks[0]
    is_over.set()
    thread.join()
    assert after > before + 100


def test_several_threads_decode_with_one_decoder(options: dict[str, Any]) -> None:
    beam = message_class("radar.Beam")
    decoder = decoder_for({**options, "fields": ["id", "track"]})
    batches = [
        batch_of([beam(id=i, track=[{"lat": i}] * (i % 5)).SerializeToString() for i in range(n)])
        for n in (500, 1_000, 1_500, 2_000)
    ]
    found: dict[int, list[int]] = {}

    def work(place: int) -> None:
        for _ in range(20):
            found[place] = decoder.decode(batches[place]).rows.column(0).to_pylist()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(4)] == [list(range(n)) for n in (500, 1000, 1500, 2000)]


def _table(*rows: tuple[int, ...]) -> bytes:
    return b"".join(number.to_bytes(4, "little", signed=True) for row in rows for number in row)


_ONE = _table((0, 1, 0, 0))
_INT = _table((1, 5, 0, -1, -1))


@pytest.mark.parametrize(
    ("types", "fields", "columns"),
    [
        (b"", b"", b""),
        (_table((0, 2, 0, 0)), _INT, _table((11, 0, 0, -1, 0))),  # fields that are not there
        (_ONE, _table((1, 99, 0, -1, -1)), _table((11, 0, 0, -1, 0))),  # no such kind
        (_ONE, _table((1, 11, 0, 7, -1)), _table((11, 0, 0, -1, 0))),  # no such message
        (_ONE, _table((1, 14, 0, 0, -1)), _table((11, 0, 0, -1, 0))),  # no such enum
        (_ONE, _table((1, 5, 0, -1, 3)), _table((11, 0, 0, -1, 0))),  # no such oneof
        (_ONE, _table((1, 11, 17, 0, -1)), _table((11, 0, 0, -1, 0))),  # no entry of a map
        (_ONE, _INT, _table((11, 0, 0, -1, 1))),  # columns that are not there
        (_ONE, _INT, _table((11, 0, 0, -1, 0), (5, 0, 0, -1, 0))),  # nor asked for
        (_ONE, _INT, _table((11, 0, 0, -1, 1), (9, 0, 0, -1, 0))),  # of another kind
        (_ONE, _INT, _table((11, 0, 0, -1, 1), (5, 0, 1, -1, 0))),  # of no field
        (_ONE, _INT, _table((11, 0, 0, -1, 1), (19, 0, 0, -1, 1), (5, 0, 0, -1, 0))),  # no list
        (_ONE, _table((1, 5, 1, -1, -1)), _table((11, 0, 0, -1, 1), (5, 0, 0, -1, 0))),  # a list
    ],
)
def test_a_plan_that_points_to_nowhere_is_refused(
    types: bytes, fields: bytes, columns: bytes
) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        Plan(types, fields, b"", b"", columns, b"")


def test_offsets_that_point_to_nowhere_are_refused() -> None:
    plan = Plan(_ONE, _INT, b"", b"", _table((11, 0, 0, -1, 1), (5, 0, 0, -1, 0)), b"")
    offsets = [(0).to_bytes(8, "little"), (4).to_bytes(8, "little")]
    assert plan.parse(b"".join(offsets), b"\x08\x01\x08\x02", 0, 1, 100)[1] == []
    for first, count, placed in (
        (0, 1, [offsets[0], (5).to_bytes(8, "little")]),
        (0, 1, [offsets[1], offsets[0]]),
        (0, 2, offsets),
        (1, 1, offsets),
        (-1, 1, offsets),
        (0, -1, offsets),
        (0, 0, []),
    ):
        with pytest.raises(ValueError, match="offsets"):
            plan.parse(b"".join(placed), b"\x08\x01\x08\x02", first, count, 100)
