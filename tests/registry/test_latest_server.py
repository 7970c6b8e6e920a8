"""DsLdataServer: ours behind recorded clients of LROSE, and behind our own, over real TCP."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConnectionLost, InvalidOption, Malformed, NotFound
from penstock.protocols.lrose import sku
from penstock.protocols.lrose.ds_client import RequestRefused
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.ds_server import DsServer
from penstock.protocols.lrose.ldata_client import LdataClient
from penstock.protocols.lrose.ldata_format import LatestInfo
from penstock.protocols.lrose.ldata_wire import MESSAGE_TYPE, Arguments, LdataMessage, Mode
from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_server import LdataServer, LdataServerOptions
from support.mosquitto import free_port
from support.until import until

WIRE = Path(__file__).parents[1] / "vectors" / "lrose" / "wire"


def serve(root: Path, **options: Any) -> DsServer:
    said = {"root": root, "port": 0, "datamapper": False, **options}
    return LdataServer(LdataServerOptions(**said))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def server(root: Path) -> Iterator[DsServer]:
    with serve(root) as thread:
        yield thread


def client(server: DsServer, directory: str = "mdv/radar", **options: Any) -> LdataClient:
    return LdataClient(f"ldatap://{server.address}/{directory}", timeout=20, **options)


def write(directory: Path, *names: str) -> None:
    with LatestDataInfo(directory, register=None) as there:
        for number, name in enumerate(names):
            there.write(name, time=1705320000 + number, data_type="mdv")


def paths(there: LdataClient) -> list[str]:
    found = []
    while (info := there.read()) is not None:
        found.append(info.rel_data_path)
    return found


def session(server: DsServer, sent: bytes, expected: int) -> bytes:
    host, port = "127.0.0.1", server.port
    with socket.create_connection((host, port), 20) as connection:
        connection.sendall(sent)
        received = b""
        while len(received) < expected and (data := connection.recv(65536)):
            received += data
    return received


# --- recorded sessions ------------------------------------------------------------------------


def test_a_recorded_client_gets_the_recorded_replies(server: DsServer, root: Path) -> None:
    expected = (WIRE / "ldata_01.s2c").read_bytes()
    assert session(server, (WIRE / "ldata_01.c2s").read_bytes(), len(expected) + 1) == expected
    with LatestDataInfo(root / "mdv" / "remote", register=None) as there:
        info = there.read()
    assert info is not None
    assert (info.rel_data_path, info.writer) == ("20240201/000000.mdv", "RemoteW")
    books = server.statistics()
    assert (books.requests, books.replies, books.unanswered) == (3, 3, 0)


def test_a_recorded_ping_gets_the_recorded_reply_but_for_the_process_id(
    server: DsServer,
) -> None:
    expected = (WIRE / "ldata_00.s2c").read_bytes()
    at = expected.index(struct.pack(">i", 0x3ECC))
    received = session(server, (WIRE / "ldata_00.c2s").read_bytes(), len(expected))
    assert received[:at] == expected[:at]
    assert received[at + 4 :] == expected[at + 4 :]


def test_a_client_asks_as_the_recorded_one_did() -> None:
    """Our client against a peer that only knows the recorded replies of LROSE's server."""
    asked = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def play() -> None:
        connection, _ = listener.accept()
        decoder = sku.Decoder(1 << 20)
        replies = sku.Decoder(1 << 20).feed((WIRE / "ldata_01.s2c").read_bytes())
        with connection:
            for reply in replies:
                frames: list[sku.Frame] = []
                while not frames:
                    data = connection.recv(65536)
                    asked.extend(data)
                    frames = decoder.feed(data)
                connection.sendall(sku.encode(reply))

    thread = threading.Thread(target=play)
    thread.start()
    port = listener.getsockname()[1]
    info = LatestInfo(
        latest_time=1706745600,
        rel_data_path="20240201/000000.mdv",
        file_ext="mdv",
        writer="RemoteW",
    )
    with LdataClient(f"ldatap:://127.0.0.1:{port}:mdv/remote") as there:
        there.write(info)
    thread.join()
    listener.close()
    recorded = sku.Decoder(1 << 20).feed((WIRE / "ldata_01.c2s").read_bytes())
    ours = sku.Decoder(1 << 20).feed(bytes(asked))
    assert [frame.id for frame in ours] == [frame.id for frame in recorded]
    # The first one names the server, and ours has another port. The rest is the same.
    assert ours[1:] == recorded[1:]
    opened, theirs = (
        LdataMessage.from_message(DsMessage.from_bytes(frames[0].payload))
        for frames in (ours, recorded)
    )
    assert opened.arguments == theirs.arguments
    assert opened.url == f"ldatap:://127.0.0.1:{port}:mdv/remote"


# --- our client and our server ----------------------------------------------------------------


def test_entries_written_here_are_read_there_in_order(server: DsServer, root: Path) -> None:
    with client(server) as reader, client(server) as writer:
        assert reader.read() is None
        writer.write(LatestInfo(latest_time=5, rel_data_path="a.nc"))
        assert paths(reader) == ["a.nc"]
        for name in ("b.nc", "c.nc", "d.nc"):
            writer.write(LatestInfo(latest_time=6, rel_data_path=name))
        assert paths(reader) == ["b.nc", "c.nc", "d.nc"]
    with LatestDataInfo(root / "mdv" / "radar", register=None) as there:
        info = there.read()
        assert info is not None
        assert info.data_type == "mdv"  # guessed from the directory's name


def test_the_age_and_the_force_of_a_read_are_heeded(server: DsServer, root: Path) -> None:
    write(root / "mdv" / "radar", "old.nc")
    for end in (".stat", ".xml", ""):
        os.utime(root / "mdv" / "radar" / f"_latest_data_info{end}", (1000, 1000))
    with client(server) as there:
        assert there.read(max_valid_age=60) is None
        with pytest.raises(RequestRefused):
            there.read(max_valid_age=60, forced=True)
        assert there.read() is not None
        assert there.read() is None
        again = there.read(forced=True)
        assert again is not None
        assert again.rel_data_path == "old.nc"


def test_an_entry_for_the_queue_only_leaves_the_files_alone(server: DsServer, root: Path) -> None:
    with client(server) as there:
        there.write(LatestInfo(latest_time=5, rel_data_path="a.nc"), fmq_only=True)
        assert paths(there) == ["a.nc"]
    names = {path.name for path in (root / "mdv" / "radar").iterdir()}
    assert names == {"_latest_data_info.stat", "_latest_data_info.buf"}


def test_arguments_can_be_changed(server: DsServer, root: Path) -> None:
    write(root / "mdv" / "radar", "a.nc", "b.nc")
    with client(server) as there:
        there.change(Mode.SET_READ_FMQ_FROM_START, readFmqFromStart=True)
        assert paths(there) == ["a.nc", "b.nc"]
        there.change(Mode.SET_USE_FMQ, useFmq=False)
        there.change(Mode.SET_USE_ASCII, useAscii=False)
        assert paths(there) == []  # the XML file tells of the same one
        write(root / "mdv" / "radar", "c.nc")
        assert paths(there) == ["c.nc"]
        there.change(Mode.SET_LDATA_FILE_NAME, ldataFileName="other")
        there.write(LatestInfo(latest_time=5, rel_data_path="x"))
    names = {path.name for path in (root / "mdv" / "radar").glob("_other*")}
    assert names == {"_other.xml", "_other.lock"}


def test_a_change_leaves_the_place_where_it_is(server: DsServer, root: Path) -> None:
    write(root / "mdv" / "radar", "a.nc")
    with client(server) as there:
        assert paths(there) == ["a.nc"]
        write(root / "mdv" / "radar", "b.nc", "c.nc")
        there.change(Mode.SET_USE_XML, useXml=False)
        there.change(Mode.SET_FMQ_NSLOTS, fmqNSlots=100)
        assert paths(there) == ["b.nc", "c.nc"]


def test_a_label_keeps_its_place_on_the_server(server: DsServer, root: Path) -> None:
    write(root / "mdv" / "radar", "a.nc", "b.nc", "c.nc")
    options: dict[str, Any] = {"saveLatestReadInfo": True, "latestReadInfoLabel": "view"}
    with client(server, readFmqFromStart=True, **options) as there:
        first = there.read()
        assert first is not None
        assert first.rel_data_path == "a.nc"
    with client(server, **options) as there:
        assert paths(there) == ["b.nc", "c.nc"]
    with (
        pytest.raises(RequestRefused),
        client(server, **{**options, "latestReadInfoLabel": "/"}) as there,
    ):
        there.read()


def ask(connection: socket.socket, request: LdataMessage) -> LdataMessage:
    connection.sendall(sku.encode(sku.Frame(MESSAGE_TYPE, 1, request.to_message().to_bytes())))
    decoder = sku.Decoder(1 << 20)
    frames: list[sku.Frame] = []
    while not frames:
        frames = decoder.feed(connection.recv(65536))
    return LdataMessage.from_message(DsMessage.from_bytes(frames[0].payload))


@pytest.mark.parametrize(("closes", "following"), [(False, "b.nc"), (True, "c.nc")])
def test_a_label_keeps_an_entry_only_when_its_client_surely_has_it(
    server: DsServer, root: Path, closes: bool, following: str
) -> None:
    write(root / "mdv" / "radar", "a.nc", "b.nc", "c.nc")
    options: dict[str, Any] = {"saveLatestReadInfo": True, "latestReadInfoLabel": "view"}
    arguments = Arguments(readFmqFromStart=True, **options)
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        ask(connection, LdataMessage(mode=Mode.OPEN, arguments=arguments, url="mdv/radar"))
        for name in ("a.nc", "b.nc"):
            info = ask(connection, LdataMessage(mode=Mode.READ, arguments=arguments)).info
            assert info is not None
            assert info.rel_data_path == name
        if closes:  # otherwise the connection breaks, maybe before the reply has come
            ask(connection, LdataMessage(mode=Mode.CLOSE))
    until(lambda: server.statistics().clients == 0)
    with client(server, **options) as there:
        assert paths(there)[0] == following


def test_a_client_goes_on_after_the_server_came_back(root: Path) -> None:
    folder = root / "mdv" / "radar"
    port = free_port()
    server = serve(root, port=port)
    write(folder, "a.nc")
    there = client(server)
    assert paths(there) == ["a.nc"]
    server.close()
    write(folder, "b.nc", "c.nc")
    with pytest.raises(ConnectionLost):
        there.read()
    with serve(root, port=port):
        assert paths(there) == ["b.nc", "c.nc"]
        assert there.gaps == 0
        write(folder, "d.nc")
        assert paths(there) == ["d.nc"]
        there.close()


def test_a_client_that_found_nothing_gets_all_that_came_while_the_server_was_away(
    root: Path,
) -> None:
    port = free_port()
    server = serve(root, port=port)
    there = client(server)
    assert there.read() is None
    server.close()
    write(root / "mdv" / "radar", "a.nc", "b.nc")
    with pytest.raises(ConnectionLost):
        there.read()
    with serve(root, port=port):
        assert paths(there) == ["a.nc", "b.nc"]
        there.close()


def play(*replies: LdataMessage) -> tuple[int, threading.Thread]:
    """Answer the requests of clients, one after another, with these replies."""
    listener = socket.create_server(("127.0.0.1", 0))
    waiting = list(replies)

    def answer() -> None:
        with listener:
            while waiting:
                connection, _ = listener.accept()
                connection.settimeout(20)
                decoder = sku.Decoder(1 << 20)
                with connection:
                    while waiting and (data := connection.recv(65536)):
                        for _ in decoder.feed(data):
                            reply = waiting.pop(0).to_message()
                            connection.sendall(sku.encode(sku.Frame(1, 1, reply.to_bytes())))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


def reply(name: str | None = None, *, error: str | None = None) -> LdataMessage:
    info = None if name is None else LatestInfo(latest_time=5, rel_data_path=name)
    return LdataMessage(mode=Mode.REPLY, info=info, error=error)


def test_a_refusal_to_open_is_told_each_time_and_not_forgotten() -> None:
    port, thread = play(reply(error="not today"), reply(error="not today"), reply(), reply("a"))
    there = LdataClient(f"ldatap://127.0.0.1:{port}/mdv", timeout=20)
    for _ in range(2):
        with pytest.raises(RequestRefused, match="not today"):
            there.read()
    info = there.read()
    assert info is not None
    assert info.rel_data_path == "a"
    thread.join(20)
    there.close()


def test_a_search_that_was_refused_half_way_is_begun_again() -> None:
    port, thread = play(
        *(reply(), reply("a")),
        *(reply(), reply("a"), reply("b"), reply(error="disk")),
        *(reply(), reply("a"), reply("b"), reply("c"), reply()),
    )
    there = LdataClient(f"ldatap://127.0.0.1:{port}/mdv", timeout=20)
    assert there.read() is not None
    there._drop()
    with pytest.raises(RequestRefused, match="disk"):
        there.read()
    assert [info and info.rel_data_path for info in (there.read(), there.read())] == ["b", "c"]
    assert there.gaps == 0
    thread.join(20)
    there.close()


def test_what_lies_between_two_entries_that_are_alike_is_not_skipped(root: Path) -> None:
    folder = root / "mdv" / "radar"
    port = free_port()
    server = serve(root, port=port)
    write(folder, "first.nc")
    there = client(server)
    assert paths(there) == ["first.nc"]
    write(folder, "a.nc")
    assert paths(there) == ["a.nc"]
    server.close()
    write(folder, "a.nc")
    with LatestDataInfo(folder, register=None) as local:
        local.write("b.nc", time=1705320000, data_type="mdv")
        local.write("a.nc", time=1705320000, data_type="mdv")
    with pytest.raises(ConnectionLost):
        there.read()
    with serve(root, port=port):
        assert paths(there) == ["a.nc", "b.nc", "a.nc"]
        there._drop()
        assert paths(there) == []
        there.close()


def test_an_entry_that_is_none_is_told_of_and_the_next_one_follows() -> None:
    bad = reply("x").to_message()
    parts = [
        part._replace(data=part.data.replace(b"unix_time", b"what_time").replace(b"year", b"yea_"))
        for part in bad.parts
    ]

    class Bad:
        def to_message(self) -> DsMessage:
            return bad._replace(parts=tuple(parts))

    port, thread = play(reply(), Bad(), reply("b"))  # type: ignore[arg-type]
    there = LdataClient(f"ldatap://127.0.0.1:{port}/mdv", timeout=20)
    with pytest.raises(Malformed):
        there.read()
    info = there.read()
    assert info is not None
    assert info.rel_data_path == "b"
    thread.join(20)
    there.close()


def test_a_directory_may_be_written_with_a_slash_at_its_end(server: DsServer, root: Path) -> None:
    write(root / "mdv" / "radar", "a.nc")
    with client(server, "mdv/radar/") as there:
        assert paths(there) == ["a.nc"]


# --- what is not allowed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "directory", ["../outside", "/etc", "a/../../outside", "link", ".", "a\x01b"]
)
def test_a_directory_outside_the_root_is_refused(
    server: DsServer, root: Path, directory: str
) -> None:
    (root / "link").symlink_to("/etc")
    request = LdataMessage(mode=Mode.OPEN, url=f"ldatap:://localhost::{directory}").to_message()
    frame = sku.encode(sku.Frame(MESSAGE_TYPE, 1, request.to_bytes()))
    reply = sku.Decoder(1 << 20).feed(session(server, frame, 64 + 24))
    said = LdataMessage.from_message(DsMessage.from_bytes(reply[0].payload))
    assert said.error is not None
    assert str(root.parent) not in said.error


def test_a_name_of_shared_memory_or_of_a_link_that_leads_out_is_refused(
    server: DsServer, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestRefused), client(server, ldataFileName="shmem_471100") as there:
        there.write(LatestInfo(latest_time=5), fmq_only=True)
    write(tmp_path / "secret", "a.nc")
    (root / "open").mkdir()
    for end in (".stat", ".buf"):
        (root / "open" / f"_latest_data_info{end}").symlink_to(
            tmp_path / "secret" / f"_latest_data_info{end}"
        )
    with pytest.raises(RequestRefused), client(server, "open") as there:
        there.read()


def test_files_outside_the_root_are_not_told_of(server: DsServer, root: Path) -> None:
    with client(server) as there:
        for elsewhere in ("/etc", "../outside"):
            with pytest.raises(RequestRefused):
                there.write(LatestInfo(latest_time=5, displaced_dir_path=elsewhere))
        there.write(LatestInfo(latest_time=5, displaced_dir_path=str(root / "mdv" / "files")))
        info = there.read()
    assert info is not None
    assert info.displaced_dir_path == str(root / "mdv" / "files")


def test_a_directory_that_is_refused_leaves_none_open(server: DsServer, root: Path) -> None:
    write(root / "mdv" / "radar", "a.nc")
    requests = [
        LdataMessage(mode=Mode.OPEN, url="ldatap:://localhost::mdv/radar"),
        LdataMessage(mode=Mode.OPEN, url="ldatap:://localhost::../outside"),
        LdataMessage(mode=Mode.READ),
    ]
    frames = [sku.encode(sku.Frame(1, 1, each.to_message().to_bytes())) for each in requests]
    decoder = sku.Decoder(1 << 20)
    replies: list[sku.Frame] = []
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        for frame in frames:
            connection.sendall(frame)
            before = len(replies)
            while len(replies) == before:
                replies += decoder.feed(connection.recv(65536))
    said = [LdataMessage.from_message(DsMessage.from_bytes(each.payload)) for each in replies]
    assert [each.error is None for each in said] == [True, False, False]


def test_a_server_that_is_read_only_takes_no_entries(root: Path) -> None:
    with serve(root, read_only=True) as server, client(server) as there:
        with pytest.raises(RequestRefused):
            there.write(LatestInfo(latest_time=5))
        assert there.read() is None
    assert list(root.iterdir()) == []


def test_what_is_too_large_is_refused(server: DsServer) -> None:
    with pytest.raises(RequestRefused), client(server, fmqNSlots=10**6) as there:
        there.read()
    with pytest.raises(RequestRefused), client(server, ldataFileName="../x") as there:
        there.read()


def test_a_request_before_opening_is_refused(server: DsServer) -> None:
    for mode in (Mode.READ, Mode.WRITE, Mode.SET_USE_XML, Mode.REPLY):
        request = LdataMessage(mode=mode, info=LatestInfo(latest_time=1)).to_message()
        frame = sku.encode(sku.Frame(MESSAGE_TYPE, 1, request.to_bytes()))
        reply = sku.Decoder(1 << 20).feed(session(server, frame, 64 + 24))
        assert LdataMessage.from_message(DsMessage.from_bytes(reply[0].payload)).error


def test_clients_that_wait_for_a_lock_hold_up_no_other(server: DsServer, root: Path) -> None:
    write(root / "slow", "a.nc")
    lock = (root / "slow" / "_latest_data_info.lock").open("r+b")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    slow = [client(server, "slow") for _ in range(20)]
    info = LatestInfo(latest_time=6)
    threads = [threading.Thread(target=each.write, args=(info,)) for each in slow]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    with client(server) as other:
        other.write(LatestInfo(latest_time=5, rel_data_path="x"))
        assert paths(other) == ["x"]
    assert time.monotonic() - began < 5
    assert all(thread.is_alive() for thread in threads)
    fcntl.lockf(lock, fcntl.LOCK_UN)
    lock.close()
    for each, thread in zip(slow, threads, strict=True):
        thread.join(20)
        assert not thread.is_alive()
        each.close()


def test_a_root_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        serve(tmp_path / "nothing")
    with pytest.raises((InvalidOption, ValueError)):
        serve(tmp_path, port=-1)
