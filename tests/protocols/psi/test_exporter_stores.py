"""An exporter serves the store that it is given: by path and name, ours or psi's own files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.endpoints import open_writer
from penstock.core.errors import InvalidOption, NotFound, StorageError, Unsupported
from penstock.protocols.psi import (
    REPLAY_ALL,
    Exporter,
    PsiFiles,
    RemoteExporter,
    RemoteImporter,
    Store,
    open_store,
)
from protocols.psi.raw_client import client
from protocols.psi.recordings import SESSIONS, VECTORS, catalog_of, messages_of, recording
from protocols.psi.test_store import INTS, SECOND, block, ints, write_store
from support.mosquitto import free_port
from support.small_disks import small_disk_at

HOST = "127.0.0.1"


def test_a_store_is_named_by_its_path_its_name_and_whether_a_subdirectory_is_made(
    tmp_path: Path,
) -> None:
    for number in range(2):
        with RemoteExporter(tmp_path, 0, name="Rig", subdirectory=True) as exporter:
            exporter.exporter.write(None, "Numbers", "int").post(number)
            assert exporter.store.name == "Rig"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Rig.0000", "Rig.0001"]
    with (
        RemoteExporter(tmp_path, 0, name="Rig") as exporter,
        RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
        importer.open_stream("Numbers") as stream,
    ):
        received = stream.read(10)
        assert received is not None
        assert received.value == 1  # the newest of that name
    with RemoteExporter(tmp_path, 0, name="Other") as exporter:
        assert exporter.store.streams() == []
    assert (tmp_path / "Other").is_dir()
    with (
        RemoteExporter(tmp_path / "Other", 0) as exporter,
        RemoteImporter(
            HOST, exporter.port, REPLAY_ALL, store=tmp_path, name="In", subdirectory=True
        ) as importer,
    ):
        assert importer.store.place.folder == tmp_path / "In.0000"


def test_all_writers_of_a_store_feel_its_back_pressure_also_those_who_do_not_know_of_it() -> None:
    with Store.volatile(slots=64, size=1 << 20) as store:
        unaware = Exporter(store).write(None, "Unaware", "byte[]")
        other = store.add_stream("Bare", "byte[]")
        with (
            RemoteExporter(store, 0, patience=10, max_bytes_per_second=100_000) as exporter,
            client(exporter.port) as peer,
        ):
            peer.burst()
            peer.open_data()

            def post() -> None:
                for _ in range(100):
                    unaware.post(bytes(1000))
                    store.append(other.id, b"\0\0\0\x80" + struct.pack("<i", 4) + b"four")

            writer = threading.Thread(target=post)
            began = time.monotonic()
            writer.start()
            found = peer.messages(200)
            writer.join(20)
            took = time.monotonic() - began
            assert [m.sequence_id for m in found if m.source_id == unaware.id] == list(
                range(1, 101)
            )
            assert [m.sequence_id for m in found if m.source_id == other.id] == list(range(1, 101))
            assert exporter.statistics().lost == 0
            assert exporter.statistics().waited > 0.3
            assert took > 0.5


def test_writers_wait_for_a_client_from_its_hello_on_but_not_for_ever() -> None:
    with (
        Store.volatile(slots=64, size=1 << 20) as store,
        RemoteExporter(store, 0, patience=0.6) as exporter,
        client(exporter.port) as peer,
    ):
        peer.burst()
        stream = exporter.exporter.write(None, "Numbers", "int")
        began = time.monotonic()
        for i in range(200):
            stream.post(i)  # more than the ring holds, and no data connection yet
        assert 0.3 < time.monotonic() - began < 10
        assert exporter.statistics().waited > 0.2


# --- how a session ends -----------------------------------------------------------------------


def read_to_the_end(sock: socket.socket) -> tuple[bytes, bool]:
    """Return all that came, and whether the end was a reset."""
    sock.settimeout(15)
    data = b""
    while True:
        try:
            piece = sock.recv(1 << 16)
        except ConnectionResetError:
            return data, True
        if not piece:
            return data, False
        data += piece


@pytest.mark.parametrize("reset", [True, False])
def test_a_connection_ends_by_a_reset_behind_all_that_was_sent(reset: bool) -> None:
    """psi's importer takes an orderly end for a pause, and waits for ever at full speed."""
    with RemoteExporter(port=0, reset=reset) as exporter:
        stream = exporter.exporter.write(None, "Bytes", "byte[]")
        with client(exporter.port) as peer:
            peer.burst()
            peer.open_data()
            for _ in range(50):
                stream.post(bytes(10_000))
            closing = threading.Thread(target=exporter.close)
            closing.start()
            data, was_reset = read_to_the_end(peer.data)
            assert was_reset == reset
            assert len(data) == 50 * (28 + 8 + 10_000)
            assert read_to_the_end(peer.meta)[1] == reset
            closing.join(20)


KILLED = """
import sys, time
from penstock.protocols.psi import RemoteExporter
exporter = RemoteExporter(sys.argv[1], 0)
exporter.exporter.write(None, "Numbers", "int").post(1)
print(exporter.port, flush=True)
time.sleep(60)
"""


def test_an_exporter_that_is_killed_resets_its_connections(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        with client(int(process.stdout.readline())) as peer:
            peer.burst()
            peer.open_data()
            assert len(peer.messages(1)) == 1
            os.kill(process.pid, signal.SIGKILL)
            assert read_to_the_end(peer.data) == (b"", True)
            assert read_to_the_end(peer.meta)[1]


# --- psi's own files ----------------------------------------------------------------------------


@pytest.mark.parametrize("session", SESSIONS)
def test_a_recorded_store_of_psi_is_served_with_exact_lengths(session: str) -> None:
    folder = VECTORS / f"store_{session}"
    catalog, recorded = catalog_of(session), messages_of(session)
    with RemoteExporter(folder, 0) as exporter, client(exporter.port) as peer:
        peer.burst()
        peer.open_data()
        found = peer.messages(len(recorded))
    assert [message[:4] for message in found] == [message[:4] for message in recorded]
    for ours, psis in zip(found, recorded, strict=True):
        codec = catalog.codec(ours.source_id)
        if not codec.is_raw:
            assert ours.payload == codec.trim(psis.payload)


def test_the_catalog_of_a_recorded_store_is_sent_as_psi_sent_it() -> None:
    """psi was asked while it still wrote: what it told then is what we tell first."""
    with RemoteExporter(VECTORS / "store_basic", 0) as exporter, client(exporter.port) as peer:
        peer.burst()
        told = peer.bytes[len(recording("basic.s2c.handshake.bin")) :]
    assert told[:1000] == recording("basic.s2c.meta.bin")[:1000]


def test_a_store_of_psi_is_imported_to_its_end_and_again_by_time(tmp_path: Path) -> None:
    shutil.copytree(VECTORS / "store_basic", tmp_path / "Oracle.0003")
    with (
        RemoteExporter(tmp_path, 0, name="Oracle") as exporter,
        RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
        importer.open_stream("Floats", "float") as floats,
    ):
        times = [received.creation_ns for received in floats]
        assert importer.statistics().lost == 0
        assert len(times) > 3
        with (
            RemoteImporter(HOST, exporter.port, (times[1], times[-2])) as part,
            part.open_stream("Floats") as some,
        ):
            assert [received.creation_ns for received in some] == times[1:-1]
        with pytest.raises(Unsupported, match="only read"):
            exporter.exporter.write(None, "Mine", "int")


def test_what_psi_writes_while_it_is_served_arrives(tmp_path: Path) -> None:
    write_store(tmp_path, [ints(range(1, 4))])
    (tmp_path / "S.Live").touch()
    with (
        RemoteExporter(tmp_path, 0) as exporter,
        RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
        importer.open_stream(INTS.name, "int") as stream,
    ):
        assert [stream.read(10) is not None for _ in range(3)] == [True] * 3
        data = tmp_path / "S.Data_000000.psi"
        before = b"".join(map(block, ints(range(1, 4))))
        data.write_bytes(before + b"".join(map(block, ints(range(4, 6)))) + bytes(64))
        later = [stream.read(10) for _ in range(2)]
        assert [each.value for each in later if each is not None] == [4, 5]


def test_which_store_is_meant_is_told_when_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_store(tmp_path / "nothing")
    with pytest.raises(NotFound):
        open_store(tmp_path, "Rig")
    write_store(tmp_path, [ints(range(1, 4))])
    with pytest.raises(NotFound, match="Rig"):
        open_store(tmp_path, "Rig")
    for file in list(tmp_path.iterdir()):
        shutil.copy(file, tmp_path / file.name.replace("S.", "T."))
    with pytest.raises(InvalidOption, match="several"):
        open_store(tmp_path)
    store = open_store(tmp_path, "T")
    assert isinstance(store, PsiFiles)
    with store.reader() as reader:
        first = reader.read(0)
        assert first is not None
        assert (first.time_ns, first.type, first.subtype) == (SECOND, INTS.id, 1)
    store.close()
    with pytest.raises(Unsupported, match="only read"):
        RemoteImporter(HOST, 1, store=tmp_path, name="T")


# --- what an importer's program reads ---------------------------------------------------------


def test_a_program_that_is_slow_reads_by_its_policy_and_the_books_add_up() -> None:
    with (
        RemoteExporter(port=0) as exporter,
        RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
    ):
        numbers = exporter.exporter.write(None, "Numbers", "int")
        with importer.open_stream("Numbers", policy="latest") as latest:
            numbers.post(0)
            assert latest.read(10) is not None
            for i in range(1, 500):
                numbers.post(i)
            numbers.close()
            with importer.open_stream("Numbers", policy="throttle") as everything:
                assert [received.value for received in everything] == list(range(500))
            deadline = time.monotonic() + 40
            while (
                (books := latest.statistics()) is not None
                and books.accepted < 500
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            rest = [received.value for received in latest]
            assert rest == [499]
            books = latest.statistics()
            assert books is not None
            assert (books.accepted, books.delivered, books.held) == (500, 2, 0)
            assert sum(books.dropped.values()) == 498


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Give a store whose catalog has room for one more stream of bytes, and what fills its disk."""
    with small_disk_at(tmp_path / "disk", "16m") as disk:
        with Store.create(disk, "S") as store:
            for number in range(4091):
                store.add_stream(f"{number}", "int")
        yield disk / "S", disk / "filling"


def fill(filling: Path) -> None:
    with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_stream_whose_end_could_not_be_stored_is_ended_by_another_call(
    full_disk: tuple[Path, Path],
) -> None:
    folder, filling = full_disk
    with Store.open(folder, writable=True) as store:
        stream = Exporter(store).write(None, "Numbers", "byte[]")
        stream.post(b"one")
        fill(filling)
        with pytest.raises(StorageError):
            stream.close()
        filling.unlink()
        stream.close()
        assert store.metadata(stream.id).is_closed


def test_a_writer_whose_end_could_not_be_stored_leaves_its_port(
    full_disk: tuple[Path, Path],
) -> None:
    folder, filling = full_disk
    url = f"psi://127.0.0.1:{free_port()}/Numbers"
    writer = open_writer(url, store=str(folder), linger=0)
    writer.write(b"one")
    fill(filling)
    with pytest.raises(StorageError):
        writer.close()
    filling.unlink()
    with open_writer(url, store=str(folder), linger=0) as writer:
        assert writer.write(b"two") == 2
