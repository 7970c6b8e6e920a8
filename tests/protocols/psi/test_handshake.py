from __future__ import annotations

import struct
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi import (
    ClientHello,
    ClientHelloDecoder,
    MetaDecoder,
    ServerHello,
    SessionIdDecoder,
    Transport,
    Truncated,
    WrongVersion,
)
from penstock.protocols.psi.handshake import (
    decode_session_id,
    encode_session_id,
    pipe_path,
)
from penstock.protocols.psi.ticks import MAX_NS, MAX_TICKS, MIN_NS
from penstock.protocols.psi.wire import pack_text

TICKS = st.integers(0, MAX_TICKS)


def hello_bytes(version: int, start: int, end: int) -> bytes:
    return struct.pack("<hqq", version, start, end)


@given(st.none() | TICKS, TICKS)
def test_a_client_hello_comes_out_as_it_went_in(start: int | None, end: int) -> None:
    hello = ClientHello(start, end)
    assert ClientHelloDecoder().feed(hello.to_bytes()) == [hello]


def test_a_start_of_minus_1_is_the_exporters_now() -> None:
    (hello,) = ClientHelloDecoder().feed(hello_bytes(0, -1, MAX_TICKS))
    assert hello == ClientHello()
    assert hello.start_ns is None
    started = hello.starting(1_700_000_000_000_000_099)
    assert not started.covers(1_699_999_999_999_999_999)
    assert started.covers(1_700_000_000_000_000_000)


def test_an_interval_is_closed_at_both_ends_and_counts_in_ticks() -> None:
    hello = ClientHello.of(1000, 2000)
    assert [ns for ns in range(900, 2200, 50) if hello.covers(ns)] == list(range(1000, 2100, 50))
    assert ClientHello.of(2000, 1000).covers(1500) is False
    assert ClientHello.everything().covers(MIN_NS)
    assert ClientHello.everything().covers(MAX_NS)


@pytest.mark.parametrize("version", [1, -1, 32767])
def test_another_version_is_refused_before_the_rest_has_come(version: int) -> None:
    decoder = ClientHelloDecoder()
    with pytest.raises(WrongVersion) as caught:
        decoder.feed(struct.pack("<h", version))
    assert caught.value.version == version
    with pytest.raises(WrongVersion):
        decoder.feed(b"more")


@pytest.mark.parametrize(("start", "end"), [(-2, 0), (0, -1), (MAX_TICKS + 1, 0), (0, 2**62)])
def test_ticks_that_are_no_times_are_refused(start: int, end: int) -> None:
    with pytest.raises(Malformed):
        ClientHelloDecoder().feed(hello_bytes(0, start, end))
    with pytest.raises(InvalidOption):
        ClientHello(start, end).to_bytes()


def test_a_hello_that_breaks_off_is_truncated_and_a_bare_connect_is_nothing() -> None:
    decoder = ClientHelloDecoder()
    decoder.finish()
    assert decoder.feed(hello_bytes(0, 0, 0)[:9]) == []
    with pytest.raises(Truncated):
        decoder.finish()


def test_bytes_behind_a_hello_are_counted_and_dropped() -> None:
    decoder = ClientHelloDecoder()
    assert len(decoder.feed(hello_bytes(0, 0, 0) + b"12345")) == 1
    assert decoder.feed(b"67") == []
    assert (decoder.surplus, decoder.held) == (7, 0)
    decoder.finish()


@given(st.uuids(), st.sampled_from([Transport.TCP, Transport.UDP]), st.integers(1, 65535))
def test_a_server_hello_comes_out_as_it_went_in(id: UUID, kind: Transport, port: int) -> None:
    hello = ServerHello(id, kind, port)
    assert MetaDecoder().feed(hello.to_bytes()) == [hello]


#: The same in every process that collects the tests.
SESSION = bytes(range(16))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        SESSION,
        SESSION + pack_text("tcp") + struct.pack("<i", 5),
        SESSION + pack_text(None),
        SESSION + pack_text("Tcp") + struct.pack("<i", 0),
        SESSION + pack_text("Tcp") + struct.pack("<i", 65536),
        SESSION + pack_text("NamedPipes") + pack_text("../../etc/passwd"),
        SESSION + pack_text("NamedPipes") + pack_text(""),
        SESSION + struct.pack("<i", 2**31 - 1),
    ],
)
def test_a_server_hello_that_leads_nowhere_is_refused(body: bytes) -> None:
    with pytest.raises(Malformed):
        ServerHello.from_bytes(body)


@pytest.mark.parametrize("length", [0, -1, 4097, 2**31 - 1, -(2**31)])
def test_a_length_of_a_server_hello_is_checked_before_anything_is_held(length: int) -> None:
    with pytest.raises(Malformed):
        MetaDecoder().feed(struct.pack("<i", length))


def test_a_hello_without_its_place_cannot_be_sent() -> None:
    with pytest.raises(InvalidOption):
        ServerHello(uuid4(), Transport.TCP).to_bytes()
    with pytest.raises(InvalidOption):
        ServerHello(uuid4(), Transport.NAMED_PIPES).to_bytes()


@given(st.uuids())
def test_a_session_id_comes_out_as_it_went_in(id: UUID) -> None:
    assert decode_session_id(encode_session_id(id)) == id
    assert SessionIdDecoder().feed(encode_session_id(id)) == [id]
    with pytest.raises(Malformed):
        decode_session_id(b"short")


def test_a_pipes_name_stays_in_its_folder() -> None:
    assert pipe_path("cb8d-1", "/run/x") == "/run/x/CoreFxPipe_cb8d-1"
    for name in ("", "a/b", "..", ".hidden", "x" * 101):
        with pytest.raises(InvalidOption):
            pipe_path(name)
