"""What psi's own exporter sent is read, and what we send in its place is the same bytes."""

from __future__ import annotations

import math
from uuid import UUID

import pytest

from penstock.protocols.psi import (
    ClientHello,
    ClientHelloDecoder,
    CodecLibrary,
    Intermission,
    MessageDecoder,
    MetaDecoder,
    PsiMessage,
    RuntimeInfo,
    ServerHello,
    SessionIdDecoder,
    StreamMetadata,
    Transport,
    encode_burst,
    encode_message,
    encode_messages,
    known_schemas,
    qualify,
)
from penstock.protocols.psi.metadata import Record
from penstock.protocols.psi.ticks import ticks_to_ns
from protocols.psi.recordings import SESSIONS, catalog_of, expected, messages_of, recording

T0 = 638397614450000000


@pytest.mark.parametrize("session", SESSIONS)
def test_a_recorded_client_asked_for_everything(session: str) -> None:
    data = recording(f"{session}.c2s.handshake.bin")
    (hello,) = ClientHelloDecoder().feed(data)
    assert hello == ClientHello.everything()
    assert hello.to_bytes() == data


@pytest.mark.parametrize("session", SESSIONS)
def test_a_recorded_meta_connection_is_read_as_expected_and_written_again(session: str) -> None:
    hello_bytes = recording(f"{session}.s2c.handshake.bin")
    meta = recording(f"{session}.s2c.meta.bin")
    hello, *events = MetaDecoder().feed(hello_bytes + meta)
    wanted = expected(f"{session}.json")
    assert isinstance(hello, ServerHello)
    assert str(hello.session) == wanted["handshake"]["sessionGuid"]
    assert hello.port == wanted["handshake"]["dataPort"]
    assert hello.to_bytes() == hello_bytes
    records = [event for event in events if not isinstance(event, (Intermission, ServerHello))]
    assert events[-1] == Intermission(len(records))
    assert [record.name for record in records] == [
        record["name"] for record in wanted["metadata"] if "name" in record
    ]
    assert encode_burst(records) == meta


@pytest.mark.parametrize("session", SESSIONS)
def test_a_recorded_data_connection_is_read_as_expected_and_written_again(session: str) -> None:
    (id,) = SessionIdDecoder().feed(recording(f"{session}.c2s.data.bin"))
    wanted = expected(f"{session}.json")
    assert id == UUID(wanted["handshake"]["sessionGuid"])
    messages = messages_of(session)
    assert [
        (m.source_id, m.sequence_id, m.originating_ns, m.creation_ns, m.payload.hex())
        for m in messages
    ] == [
        (
            m["sourceId"],
            m["sequenceId"],
            ticks_to_ns(m["originatingTime"]["ticks"]),
            ticks_to_ns(m["creationTime"]["ticks"]),
            m["payload"],
        )
        for m in wanted["messages"]
    ]
    assert encode_messages(messages) == recording(f"{session}.s2c.data.bin")


def test_a_byte_at_a_time_gives_the_same() -> None:
    data = recording("basic.s2c.handshake.bin") + recording("basic.s2c.meta.bin")
    slow, fast = MetaDecoder(), MetaDecoder()
    events = [event for byte in data for event in slow.feed(bytes([byte]))]
    assert events == fast.feed(data)
    slow.finish()
    data = recording("types.s2c.data.bin")
    decoder = MessageDecoder()
    assert [m for byte in data for m in decoder.feed(bytes([byte]))] == messages_of("types")
    decoder.finish()


def test_the_basic_session_is_made_from_its_streams_to_the_byte() -> None:
    """All but the session id, the port, the times of creation and the stale bytes is ours."""
    recorded_hello, *_ = MetaDecoder().feed(recording("basic.s2c.handshake.bin"))
    assert isinstance(recorded_hello, ServerHello)
    ours = ServerHello(recorded_hello.session, Transport.TCP, recorded_hello.port)
    assert ours.to_bytes() == recording("basic.s2c.handshake.bin")

    streams = [
        StreamMetadata("Floats", 2, qualify("float")),
        StreamMetadata("Strings", 6, qualify("string")),
    ]
    records: list[Record] = [RuntimeInfo()]
    for stream, kind in zip(streams, ("float", "string"), strict=True):
        records += [*known_schemas(kind), stream]
    records += [stream._replace(opened_ns=ticks_to_ns(T0)) for stream in streams]
    assert encode_burst(records) == recording("basic.s2c.meta.bin")

    library = CodecLibrary()
    values = expected("basic.expected.json")["streams"]
    made: dict[tuple[int, int], tuple[int, bytes]] = {}
    for stream in streams:
        codec = library.codec(stream.type_name)
        for i, value in enumerate(values[stream.name]["values"]):
            told = math.nan if value == "NaN" else value
            time_ns = ticks_to_ns(T0 + 1_000_000 * (i + 1))
            made[stream.id, i + 1] = (time_ns, codec.encode(told))
    recorded = messages_of("basic")
    assert len(recorded) == len(made)
    largest = 0
    for theirs in recorded:
        time_ns, payload = made[theirs.source_id, theirs.sequence_id]
        message = PsiMessage(
            theirs.source_id, theirs.sequence_id, time_ns, theirs.creation_ns, payload
        )
        data = encode_message(message)
        original = encode_message(theirs)
        assert data[:24] == original[:24]
        assert data[28:] == original[28 : 28 + len(payload)]
        # psi's length is that of the largest message so far, in multiples of 4.
        largest = max(largest, len(payload) + -len(payload) % 4)
        assert len(theirs.payload) == largest


def test_a_named_pipe_carries_the_same_bytes_as_tcp() -> None:
    data = recording("basic_namedpipe.s2c.handshake.bin")
    (hello,) = MetaDecoder().feed(data)
    assert isinstance(hello, ServerHello)
    assert hello.transport is Transport.NAMED_PIPES
    assert hello.pipe == "cb8d504d-019b-46b1-8d53-de83ab763a43"
    assert hello.to_bytes() == data
    messages = MessageDecoder().feed(recording("basic_namedpipe.s2c.data.bin"))
    catalog = catalog_of("basic")
    library = CodecLibrary(catalog.schemas.values())
    values = expected("basic.expected.json")["streams"]
    for message in messages:
        stream = catalog.stream(message.source_id)
        value = library.codec(stream.type_name).decode(message.payload)
        wanted = values[stream.name]["values"][message.sequence_id - 1]
        assert value == wanted or (wanted == "NaN" and math.isnan(value))
    assert len(messages) == 10
