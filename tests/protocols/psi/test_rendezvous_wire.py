from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi import Transport, Truncated, WrongVersion
from penstock.protocols.psi.rendezvous_wire import (
    AddProcess,
    Disconnect,
    Endpoint,
    EndpointKind,
    Process,
    RemoveProcess,
    RendezvousClientDecoder,
    RendezvousHello,
    RendezvousLimits,
    RendezvousServerDecoder,
    StreamOffer,
    Update,
    decode_updates,
    encode_client_hello,
    encode_hello,
    encode_update,
)
from protocols.psi.recordings import recording

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
OFFERS = st.lists(st.builds(StreamOffer, TEXT, TEXT), max_size=3).map(tuple)
PORTS = st.integers(0, 65535)
ENDPOINTS = st.one_of(
    st.builds(
        Endpoint,
        st.just(EndpointKind.TCP_SOURCE),
        TEXT,
        PORTS,
        st.none(),
        OFFERS.map(lambda o: o[:1]),
    ),
    st.builds(Endpoint, st.just(EndpointKind.NETMQ_SOURCE), TEXT, st.just(0), st.none(), OFFERS),
    st.builds(
        Endpoint,
        st.just(EndpointKind.REMOTE_EXPORTER),
        TEXT,
        PORTS,
        st.sampled_from(Transport),
        OFFERS,
    ),
    st.builds(
        Endpoint, st.just(EndpointKind.REMOTE_CLOCK_EXPORTER), TEXT, PORTS, st.none(), st.just(())
    ),
)
PROCESSES = st.builds(Process, TEXT, TEXT, st.lists(ENDPOINTS, max_size=4).map(tuple))
UPDATES = st.lists(
    st.one_of(st.builds(AddProcess, PROCESSES), st.builds(RemoveProcess, TEXT)), max_size=4
)


def test_a_recorded_hello_is_read_as_expected_and_written_again() -> None:
    data = recording("rendezvous.s2c.hello.bin")
    decoder = RendezvousClientDecoder()
    hello, sensors, empty = decoder.feed(data)
    decoder.finish()
    assert hello == RendezvousHello("127.0.0.1", 2)
    assert empty == AddProcess(Process("Empty", ""))
    assert isinstance(sensors, AddProcess)
    assert sensors.process.name == "Sensors"
    assert sensors.process.version == "1.2"
    assert [endpoint.kind for endpoint in sensors.process.endpoints] == list(EndpointKind)
    exporter = sensors.process.endpoints[2]
    assert (exporter.host, exporter.port, exporter.transport) == ("10.0.0.5", 11411, Transport.UDP)
    assert exporter.streams == (StreamOffer("Floats", "System.Single"),)
    assert encode_hello("127.0.0.1", [sensors.process, empty.process]) == data


def test_recorded_updates_are_read_and_written_again() -> None:
    data = recording("rendezvous.c2s.add.bin")
    (added,) = decode_updates(data)
    assert isinstance(added, AddProcess)
    (offer,) = added.process.endpoints[0].streams
    assert offer == StreamOffer("SSS", "T" * 200)
    assert encode_update(added) == data
    data = recording("rendezvous.s2c.remove.bin")
    assert decode_updates(data) == [RemoveProcess("Empty")]
    assert encode_update(RemoveProcess("Empty")) == data


@given(UPDATES, st.booleans())
def test_updates_come_out_as_they_went_in_a_byte_at_a_time(
    updates: list[Update], ends: bool
) -> None:
    updates = [*updates, Disconnect()] if ends else updates
    data = encode_client_hello() + b"".join(map(encode_update, updates))
    decoder = RendezvousServerDecoder()
    found = [update for byte in data for update in decoder.feed(bytes([byte]))]
    assert found == [RendezvousHello(None), *updates]
    decoder.finish()


def test_nothing_is_read_behind_a_disconnect() -> None:
    decoder = RendezvousServerDecoder()
    assert decoder.feed(encode_client_hello() + b"\0garbage") == [
        RendezvousHello(None),
        Disconnect(),
    ]
    assert decoder.surplus == 7


@pytest.mark.parametrize("version", [0, 1, 3, -1])
def test_another_version_is_refused(version: int) -> None:
    for decoder in (RendezvousClientDecoder(), RendezvousServerDecoder()):
        with pytest.raises(WrongVersion):
            decoder.feed(struct.pack("<h", version))


@pytest.mark.parametrize(
    "data",
    [
        b"\x03",
        b"\x02\xff\xff\xff\xff\x07",
        b"\x02\xff\xff\xff\xff\xff",
        b"\x02\x01\xff",
        b"\x01\x01a\x01b\xff\xff\xff\xff",
        b"\x01\x01a\x01b\xff\xff\xff\x7f",
        b"\x01\x01a\x01b\x01\0\0\0\x04",
        b"\x01\x01a\x01b\x01\0\0\0\x00\x01h\x00\x00\x01\x00",
        b"\x01\x01a\x01b\x01\0\0\0\x02\x01h\x01\x00\x00\x00\x03\x00\x00\x00",
        b"\x01\x01a\x01b\x01\0\0\0\x00\x01h\x01\x00\x00\x00\x02\x00\x00\x00",
        b"\x01\x01a\x01b\x01\0\0\0\x03\x01h\x01\x00\x00\x00\x01\x00\x00\x00",
    ],
)
def test_an_update_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_updates(data)


def test_an_update_that_breaks_off_is_truncated() -> None:
    with pytest.raises(Truncated):
        decode_updates(recording("rendezvous.c2s.add.bin")[:-1])


def test_many_small_texts_cannot_make_a_large_update() -> None:
    process = Process("p", "1", (Endpoint(EndpointKind.NETMQ_SOURCE, "x" * 50),) * 30)
    data = encode_client_hello() + encode_update(AddProcess(process))
    assert len(RendezvousServerDecoder().feed(data)) == 2
    decoder = RendezvousServerDecoder(RendezvousLimits(update_bytes=1000))
    assert decoder.feed(data) == [RendezvousHello(None)]
    with pytest.raises(Malformed):
        decoder.feed(b"")


def test_an_endpoint_that_psi_would_not_take_is_not_sent() -> None:
    offers = (StreamOffer("a", "b"),) * 2
    for endpoint in (
        Endpoint(EndpointKind.REMOTE_EXPORTER, "h", 1),
        Endpoint(EndpointKind.TCP_SOURCE, "h", 1, None, offers),
        Endpoint(EndpointKind.TCP_SOURCE, "h", 2**31),
    ):
        with pytest.raises(InvalidOption):
            encode_update(AddProcess(Process("p", "1", (endpoint,))))
