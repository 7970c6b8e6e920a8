from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi import (
    Catalog,
    Intermission,
    MetaDecoder,
    RuntimeInfo,
    SchemaFlags,
    SchemaMember,
    StreamFlags,
    StreamMetadata,
    Truncated,
    TypeSchema,
    UnknownStream,
    decode_record,
    encode_record,
    frame_record,
    make_schema,
)
from penstock.protocols.psi.ticks import MAX_NS, MAX_TICKS, MIN_NS, ns_to_raw
from penstock.protocols.psi.wire import pack_text
from protocols.psi.recordings import recording

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
TIMES = st.sampled_from([MIN_NS, MAX_NS]) | st.integers(-(10**16), 10**16).map(lambda n: n * 100)
STREAMS = st.builds(
    StreamMetadata,
    name=TEXT,
    id=INT32,
    type_name=TEXT,
    flags=st.integers(0, 7).map(StreamFlags),
    opened_ns=TIMES,
    closed_ns=TIMES,
    message_count=st.integers(0, 2**63 - 1),
    size_sum=st.integers(0, 2**63 - 1),
    latency_sum_ns=st.integers(-(2**50), 2**50).map(lambda n: n * 100),
    first_creation_ns=TIMES,
    last_creation_ns=TIMES,
    first_originating_ns=TIMES,
    last_originating_ns=TIMES,
    supplemental_type=st.none() | TEXT,
    supplemental=st.binary(max_size=30),
    types=st.just(()),
    serialization_version=INT32,
    version=st.just(2),
)
SCHEMAS = st.builds(
    TypeSchema,
    name=TEXT,
    id=INT32,
    type_name=TEXT,
    members=st.lists(st.builds(SchemaMember, TEXT, TEXT, st.booleans()), min_size=1).map(tuple),
    flags=st.integers(0, 15).map(SchemaFlags),
    serializer_type_name=st.none() | TEXT,
    version=st.integers(2, 5),
    serialization_version=INT32,
)
RUNTIMES = st.builds(RuntimeInfo, TEXT, INT32, INT32)


@given(st.one_of(STREAMS, SCHEMAS, RUNTIMES), st.binary(max_size=3))
def test_a_record_comes_out_as_it_went_in_whatever_pads_it(
    record: StreamMetadata | TypeSchema | RuntimeInfo, padding: bytes
) -> None:
    assert decode_record(encode_record(record) + padding) == record


def old_stream(version: int, flags: int = 0) -> bytes:
    times = [ns_to_raw(second * 10**9) for second in range(1, 7)]
    body = pack_text("Old") + struct.pack("<i", 3) + pack_text("System.Int32")
    body += struct.pack("<i", version) + pack_text(None) + struct.pack("<iHH", 0, flags, 0)
    body += struct.pack("<2Qi4Qii", *times[:2], 10, *times[2:], 100, 7)
    if flags & 8:
        body += struct.pack("<i", 1) + struct.pack("<i", 42) + pack_text("A.B")
    if version == 1:
        body += pack_text("Extra") + struct.pack("<i", 3) + b"abc"
    return body


def test_a_stream_of_version_0_is_read_into_the_latest() -> None:
    stream = decode_record(old_stream(0, 8))
    assert isinstance(stream, StreamMetadata)
    assert stream.message_count == 10
    assert stream.size_sum == 1000
    assert stream.latency_sum_ns == 10 * 7 * 1000
    assert stream.last_originating_ns == 6 * 10**9
    assert stream.types == ((42, "A.B"),)
    assert (stream.supplemental_type, stream.supplemental, stream.version) == (None, b"", 0)
    again = decode_record(encode_record(stream))
    assert again == stream._replace(version=2)


def test_a_stream_of_version_1_has_supplemental_metadata() -> None:
    stream = decode_record(old_stream(1))
    assert isinstance(stream, StreamMetadata)
    assert (stream.supplemental_type, stream.supplemental) == ("Extra", b"abc")


def test_a_schema_without_members_has_flags_in_a_catalog_and_none_on_the_wire() -> None:
    schema = TypeSchema("System.String", 1, "System.String", (), SchemaFlags.CLASS)
    wire, stored = encode_record(schema), encode_record(schema, in_catalog=True)
    assert len(stored) == len(wire) + 4
    assert decode_record(wire) == decode_record(stored) == schema._replace(flags=SchemaFlags(0))


@pytest.mark.parametrize("version", [-1, 3])
def test_a_version_of_a_stream_that_is_not_known_is_refused(version: int) -> None:
    with pytest.raises(Malformed, match="version"):
        decode_record(old_stream(version))


def test_a_kind_that_is_not_known_is_refused() -> None:
    data = bytearray(encode_record(RuntimeInfo()))
    data[-2] = 3
    with pytest.raises(Malformed, match="kind"):
        decode_record(data)


@pytest.mark.parametrize("length", [-2, 2**31 - 1, -(2**31), 1000])
def test_a_length_that_lies_is_refused(length: int) -> None:
    with pytest.raises(Malformed, match="length of name"):
        decode_record(struct.pack("<i", length) + b"abc")


@pytest.mark.parametrize("count", [-1, 2**31 - 1])
def test_a_count_of_members_that_lies_is_refused(count: int) -> None:
    data = encode_record(TypeSchema("A", 1, "A"))[:-4] + struct.pack("<i", count)
    with pytest.raises(Malformed, match="member count"):
        decode_record(data)


@given(STREAMS, st.data())
def test_a_record_that_breaks_off_is_refused(stream: StreamMetadata, data: st.DataObject) -> None:
    whole = encode_record(stream)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Malformed):
        decode_record(whole[:cut])


def test_a_time_behind_the_last_one_is_refused() -> None:
    data = encode_record(StreamMetadata("A", 1, "B"))
    wrong = data.replace(struct.pack("<Q", MAX_TICKS), struct.pack("<Q", MAX_TICKS + 1))
    with pytest.raises(Malformed, match="ticks"):
        decode_record(wrong)


def test_a_number_that_does_not_fit_is_not_sent() -> None:
    with pytest.raises(InvalidOption):
        encode_record(StreamMetadata("A", 2**31, "B"))
    with pytest.raises(InvalidOption):
        encode_record(StreamMetadata("A", 1, "B", size_sum=2**63))


@pytest.mark.parametrize("length", [-1, 2**31 - 1, 101])
def test_a_record_that_is_too_long_is_refused_from_its_length(length: int) -> None:
    decoder = MetaDecoder(100, hello=False)
    with pytest.raises(Malformed):
        decoder.feed(struct.pack("<i", length))
    assert decoder.held == 0


def test_records_before_a_fault_are_given_and_then_the_fault() -> None:
    decoder = MetaDecoder(hello=False)
    assert decoder.feed(frame_record(RuntimeInfo()) + b"\xff\xff\xff\xff") == [RuntimeInfo()]
    assert decoder.fault is not None
    with pytest.raises(Malformed):
        decoder.feed(b"")
    with pytest.raises(Malformed):
        decoder.finish()


def test_a_meta_connection_that_ends_within_a_record_is_truncated() -> None:
    decoder = MetaDecoder(hello=False)
    decoder.feed(frame_record(RuntimeInfo())[:4])
    with pytest.raises(Truncated):
        decoder.finish()
    decoder = MetaDecoder(hello=False)
    decoder.feed(recording("basic.s2c.meta.bin"))
    assert decoder.feed(bytes(8)) == [Intermission(0), Intermission(0)]
    decoder.finish()


def test_the_last_word_on_a_stream_holds() -> None:
    catalog = Catalog()
    first = StreamMetadata("A", 1, "System.Int32")
    closed = first._replace(flags=StreamFlags.CLOSED, message_count=5)
    assert catalog.add(first) is True
    assert catalog.is_complete() is False
    assert catalog.add(closed) is False
    assert catalog.stream("A") is catalog.stream(1) is closed
    assert catalog.is_complete() is True
    catalog.add(closed._replace(name="B"))
    assert catalog.stream("B").id == 1
    with pytest.raises(UnknownStream):
        catalog.stream("A")


def test_an_unknown_stream_is_told_with_those_that_are_known() -> None:
    catalog = Catalog(StreamMetadata(f"S{number}", number, "T") for number in range(12))
    with pytest.raises(UnknownStream, match="4 more") as caught:
        catalog.stream(99)
    assert caught.value.stream == 99


def test_a_peer_cannot_fill_the_catalog() -> None:
    catalog = Catalog(max_records=3)
    catalog.add(StreamMetadata("A", 1, "T"))
    catalog.add(TypeSchema("T", 1, "T"))
    catalog.add(StreamMetadata("B", 2, "T"))
    catalog.add(StreamMetadata("B", 2, "T", message_count=1))
    with pytest.raises(Malformed, match="records"):
        catalog.add(StreamMetadata("C", 3, "T"))
    catalog = Catalog(max_bytes=1000)
    for count in range(5):
        catalog.add(StreamMetadata("A", 1, "T", supplemental=bytes(900), message_count=count))
    with pytest.raises(Malformed, match="bytes"):
        catalog.add(StreamMetadata("B", 2, "T", supplemental=bytes(900)))
    assert list(catalog.streams) == [1]


def test_codecs_follow_the_schemas_that_come() -> None:
    catalog = Catalog([StreamMetadata("A", 1, "Pair, app")])
    assert catalog.codec("A").is_raw
    members = [("X", "int"), ("Y", "int")]
    catalog.add(make_schema("Pair, app", members, SchemaFlags.STRUCT, "SimpleSerializer"))
    assert catalog.codec(1).decode(b"\x01\0\0\0\x02\0\0\0stale") == {"X": 1, "Y": 2}
    assert catalog.codec("A") is catalog.codec(1)


def test_an_old_polymorphic_stream_names_its_types_itself() -> None:
    types = ((7, "System.Int64, mscorlib"),)
    old = StreamMetadata("A", 1, "System.Object, mscorlib", StreamFlags.POLYMORPHIC, types=types)
    catalog = Catalog([old])
    assert catalog.codec("A").decode(struct.pack("<Iq", 0xC0000007, 5)) == 5
