"""The client of a DataMapper: LROSE's bytes on the wire, errors noticed, nobody held up."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import InvalidOption, Malformed
from penstock.core.errors import ConnectionLost
from penstock.protocols.lrose import datamapper_client
from penstock.protocols.lrose.datamapper_client import (
    DataMapClient,
    Registrar,
    below_data_dir,
    register_latest,
)
from penstock.protocols.lrose.datamapper_wire import DataSetInfo, MapReply, MapRequest, ReplyKind
from penstock.protocols.lrose.ds_client import RequestRefused
from penstock.protocols.lrose.ds_message import DsMessage, ErrorCode, error_reply
from penstock.protocols.lrose.sku import Frame, encode
from protocols.lrose.recordings import frames_of, recording
from support.until import until

#: Where the time of registration is in a recorded registration.
CLOCK = slice(20 + 64 + 24 + 12, 20 + 64 + 24 + 16)


class Listening:
    """A server that says what it is told, and keeps what it hears."""

    def __init__(self, replies: list[bytes | None]) -> None:
        self.heard: list[bytes] = []
        self._replies = replies
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it is closed while it waits
            for reply in self._replies:
                self._answer(reply)

    def _answer(self, reply: bytes | None) -> None:
        connection, _ = self._socket.accept()
        with connection:
            request = bytearray()
            while not frames_of(bytes(request)):
                if not (more := connection.recv(1 << 16)):
                    return
                request += more
            self.heard.append(bytes(request))
            if reply is None:
                time.sleep(60)  # it hangs; nobody waits for this thread
            else:
                connection.sendall(reply)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def listening(*replies: bytes | DsMessage | None) -> Iterator[Listening]:
    server = Listening(
        [
            encode(Frame(3818000, 1, each.to_bytes())) if isinstance(each, DsMessage) else each
            for each in replies
        ]
    )
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the machine of the recordings."""
    monkeypatch.setattr(datamapper_client, "own_host", lambda: ("vm", "127.0.0.1"))
    monkeypatch.delenv("DATA_MAPPER_ACTIVE", raising=False)


def same_but_for_the_clock(ours: bytes, recorded: bytes) -> bool:
    blank = bytearray(ours)
    assert abs(int.from_bytes(blank[CLOCK]) - time.time()) < 60
    blank[CLOCK] = recorded[CLOCK]
    return bytes(blank) == recorded


def test_it_says_byte_for_byte_what_lroses_client_says() -> None:
    replies = [recording(f"dmap_{number:02d}.s2c") for number in (0, 1, 2, 6)]
    with listening(*replies) as server:
        client = DataMapClient("127.0.0.1", server.port)
        client.register_latest("mdv/test", 0x65A52670, "mdv")
        client.register_latest("mdv/fcst", 0x65A51E40, "mdv", lead=3600)
        everything = client.all()
        chosen = client.selected("mdv", "mdv/fcst")
    assert [each.dir for each in everything] == ["mdv/fcst", "mdv/test"]
    assert chosen == everything[:1]
    assert same_but_for_the_clock(server.heard[0], recording("dmap_00.c2s"))
    assert same_but_for_the_clock(server.heard[1], recording("dmap_01.c2s"))
    assert server.heard[2] == recording("dmap_02.c2s")
    assert server.heard[3] == recording("dmap_06.c2s")


def test_an_error_is_noticed_wherever_it_is_said() -> None:
    in_flags = MapReply(ReplyKind.WITH_INFO, error="the cat sat on it").to_message()
    in_error = error_reply(3818000, -1, ErrorCode.SERVICE_DENIED, "too many")
    with listening(in_flags, in_error) as server:
        client = DataMapClient("127.0.0.1", server.port)
        with pytest.raises(RequestRefused, match="the cat sat on it"):
            client.all()
        with pytest.raises(RequestRefused, match="too many"):
            client.all()


@pytest.mark.parametrize(
    "reply",
    [
        MapReply(ReplyKind.REG_STATUS).to_message(),
        DsMessage(43000),
        DsMessage(3818000, ReplyKind.WITH_INFO, flags=7),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(3000),
    ],
)
def test_a_reply_that_is_none_is_refused(reply: DsMessage | bytes) -> None:
    with listening(reply) as server, pytest.raises(Malformed):
        DataMapClient("127.0.0.1", server.port).all()


def test_relays_are_named_with_colons() -> None:
    with listening(recording("dmap_02.s2c")) as server:
        DataMapClient("127.0.0.1:gate:inner", server.port).all()
    (frame,) = frames_of(server.heard[0])
    request = MapRequest.from_message(DsMessage.from_bytes(frame.payload))
    assert request.relay == ("gate", "inner")


@pytest.mark.parametrize("hosts", ["", ":a", "a:", "a::b"])
def test_a_list_of_hosts_with_a_hole_is_refused(hosts: str) -> None:
    with pytest.raises(InvalidOption):
        DataMapClient(hosts)


def test_what_does_not_fit_is_said_before_anybody_is_called() -> None:
    with pytest.raises(InvalidOption, match="dir"):
        DataMapClient("127.0.0.1", 1).register_latest("x" * 300, 0)


def test_times_beyond_32_bits_are_held_at_the_last_second_there_is() -> None:
    with listening(recording("dmap_00.s2c")) as server:
        DataMapClient("127.0.0.1", server.port).register_latest("a", 2**40)
    (frame,) = frames_of(server.heard[0])
    (info,) = MapRequest.from_message(DsMessage.from_bytes(frame.payload)).infos
    assert info.latest_time == 2**31 - 1


def test_nobody_there_is_a_typed_error_and_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConnectionLost):
        register_latest(DataSetInfo(dir="a"), host="127.0.0.1", port=1)
    monkeypatch.setenv("DATA_MAPPER_ACTIVE", "false")
    register_latest(DataSetInfo(dir="a"), host="127.0.0.1", port=1)


def test_paths_are_seen_from_the_data_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAP_DATA_DIR", raising=False)
    monkeypatch.setenv("DATA_DIR", f"{tmp_path}/")
    assert below_data_dir(f"{tmp_path}/fmq/dsr") == "fmq/dsr"
    assert below_data_dir(f"{tmp_path}x/fmq") == f"{tmp_path}x/fmq"
    monkeypatch.chdir(tmp_path)
    assert below_data_dir("fmq/dsr") == "fmq/dsr"
    monkeypatch.setenv("RAP_DATA_DIR", f"{tmp_path}/fmq")
    assert below_data_dir(f"{tmp_path}/fmq/dsr") == "dsr"
    monkeypatch.setenv("DATA_DIR", "")
    monkeypatch.delenv("RAP_DATA_DIR")
    assert below_data_dir(f"{tmp_path}/fmq/dsr") == f"{tmp_path}/fmq/dsr"


# --- the registrar --------------------------------------------------------------------------


def registrar(port: int, interval: float = 1.0) -> Registrar:
    client = DataMapClient("127.0.0.1", port, timeout=0.5)
    return Registrar("fmq/a", "fmq", client=client, interval=interval)


def latest_of(heard: bytes) -> int:
    (frame,) = frames_of(heard)
    return MapRequest.from_message(DsMessage.from_bytes(frame.payload)).infos[0].latest_time


def test_a_registrar_tells_the_first_and_the_last_of_what_came_in_its_interval() -> None:
    with listening(*[recording("dmap_00.s2c")] * 3) as server:
        with registrar(server.port, interval=60) as telling:
            telling.note(1)
            deadline = time.monotonic() + 40
            while not telling.statistics().registered:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for latest in range(2, 1000):
                telling.note(latest)
        assert telling.statistics() == (2, 0, None)
        assert [latest_of(heard) for heard in server.heard] == [1, 999]


def test_the_last_note_is_registered_after_the_interval_although_none_follows() -> None:
    with listening(*[recording("dmap_00.s2c")] * 2) as server, registrar(server.port) as telling:
        for latest in (1, 2):
            telling.note(latest)
            until(lambda: telling.statistics().registered)
        until(lambda: len(server.heard) == 2)
        assert [latest_of(heard) for heard in server.heard] == [1, 2]


def test_a_note_is_registered_when_the_map_is_back_although_none_follows() -> None:
    with registrar(1) as telling:
        telling.note(1)
        until(lambda: telling.statistics().failed)
        with listening(recording("dmap_00.s2c")) as server:
            telling._client.port = server.port
            until(lambda: telling.statistics().registered)
            assert [latest_of(heard) for heard in server.heard] == [1]


def test_a_map_that_is_down_is_said_once_and_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with registrar(1, interval=0) as telling:
        for attempt in range(3):
            telling.note(attempt)
            deadline = time.monotonic() + 40
            while telling.statistics().failed <= attempt:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        with listening(recording("dmap_00.s2c")) as server:
            telling._client.port = server.port
            telling.note(9)
            telling.close()
    registered, failed, error = telling.statistics()
    assert (registered, error) == (1, None)
    assert failed >= 3  # it may have tried again by itself
    assert caplog.text.count("not registered") == 1
    assert caplog.text.count("data map again\n") == 1


def test_a_map_that_hangs_holds_nobody_up() -> None:
    with listening(None) as server:
        began = time.monotonic()
        client = DataMapClient("127.0.0.1", server.port, timeout=60)
        telling = Registrar("fmq/a", "fmq", client=client, interval=0)
        for latest in range(1000):
            telling.note(latest)
        telling.close(patience=0.05)
        assert time.monotonic() - began < 10
    assert telling.statistics().registered == 0


def test_a_registrar_that_heard_nothing_says_nothing() -> None:
    telling = registrar(1)
    telling.close()
    telling.close()
    telling.note(1)
    assert telling.statistics() == (0, 0, None)


def test_registering_can_be_turned_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_MAPPER_ACTIVE", "false")
    with registrar(1, interval=0) as telling:
        telling.note(1)
    assert telling.statistics() == (0, 0, None)


@pytest.mark.parametrize("interval", [-1, float("nan")])
def test_an_interval_that_is_none_is_refused(interval: float) -> None:
    with pytest.raises(InvalidOption):
        registrar(1, interval=interval)
