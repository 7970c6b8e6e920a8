"""Bad input is a typed error or counted, costs no memory, and disturbs nobody else."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import ConnectionLost, Malformed, NotFound, StorageError
from penstock.protocols.psi import (
    REPLAY_ALL,
    ClientHello,
    ClientHelloDecoder,
    ExportedStream,
    MessageDecoder,
    MetaDecoder,
    PsiMessage,
    RemoteExporter,
    RemoteImporter,
    RuntimeInfo,
    StreamMetadata,
    UnknownStream,
    WrongVersion,
    encode_burst,
    encode_message,
    qualify,
)
from penstock.protocols.psi.handshake import encode_session_id
from protocols.psi.raw_client import client
from protocols.psi.test_importer import NOW, PsiExporter
from support.until import until

HOST = "127.0.0.1"
NUMBERS = StreamMetadata("Numbers", 1, qualify("int"))
GOOD = encode_message(PsiMessage(1, 1, NOW, NOW, b"\7\0\0\0"))
LARGEST = struct.pack("<i", 2**31 - 1)


@contextlib.contextmanager
def little_memory(limit: int = 24 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def undisturbed() -> Iterator[tuple[RemoteExporter, ExportedStream]]:
    """An exporter with a client, which gets its messages before and after what happens."""
    with RemoteExporter(port=0, first_message=0.5, stalled=1.0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        with client(exporter.port) as other:
            other.burst()
            other.open_data()
            stream.post(1)
            assert len(other.messages(1)) == 1
            with little_memory():
                yield exporter, stream
            before = exporter.store.metadata(stream.id).message_count
            stream.post(2)
            assert other.messages(before)[-1].sequence_id == before + 1


# --- what a client says -------------------------------------------------------------------------

HELLOS = {
    "wrong version": b"\1\0" + ClientHello.everything().to_bytes()[2:],
    "negative start": b"\0\0" + struct.pack("<qq", -2, 100),
    "negative end": b"\0\0" + struct.pack("<qq", 0, -1),
    "times behind the last": b"\0\0" + struct.pack("<qq", 2**62, 2**62),
    "a length of 2 GiB": LARGEST * 5,
    "half a hello": b"\0\0\0\0",
    "nothing at all": b"",
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_client_that_says_what_is_no_hello_is_cut_off(hello: bytes) -> None:
    with (
        undisturbed() as (exporter, _),
        socket.create_connection((HOST, exporter.port), 10) as peer,
    ):
        peer.sendall(hello)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""


def test_a_wrong_version_is_a_typed_error() -> None:
    with pytest.raises(WrongVersion) as caught:
        ClientHelloDecoder().feed(HELLOS["wrong version"])
    assert caught.value.version == 1


def test_a_session_that_nobody_has_is_cut_off() -> None:
    with undisturbed() as (exporter, _):
        assert exporter.data_port is not None
        with socket.create_connection((HOST, exporter.data_port), 10) as peer:
            peer.sendall(bytes(range(16)))
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""


def test_a_client_that_stops_reading_is_cut_off_and_costs_no_memory() -> None:
    with (
        RemoteExporter(port=0, stalled=1.0, patience=0.2) as exporter,
        client(exporter.port) as stopped,
        little_memory(64 << 20),
    ):
        stopped.burst()
        stopped.open_data()
        stream = exporter.exporter.write(None, "Large", "byte[]")
        with client(exporter.port) as reading:
            reading.burst()
            reading.open_data()
            got: list[int] = []
            receiving = threading.Thread(
                target=lambda: got.extend(m.sequence_id for m in reading.messages(600))
            )
            receiving.start()
            for _ in range(600):
                stream.post(bytes(100_000))
                time.sleep(0.002)
            receiving.join(30)
            assert got == list(range(1, 601))
        # 60 MB were sent to one and not to the other, which is cut off while it reads nothing.
        waiting = select.poll()
        waiting.register(stopped.data, select.POLLRDHUP)
        assert waiting.poll(20_000)
        stopped.data.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while stopped.data.recv(1 << 20):
                pass


def test_garbage_on_the_udp_port_is_counted_and_a_client_still_served() -> None:
    with RemoteExporter(port=0, transport="udp") as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        assert exporter.data_port is not None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for garbage in (b"", b"x", bytes(40), bytes(60_000), LARGEST * 20):
                sock.sendto(garbage, (HOST, exporter.data_port))
        until(lambda: exporter.statistics().malformed == 5)
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer:
            stream.post(7)
            with importer.open_stream("Numbers") as numbers:
                received = numbers.read(10)
        assert received is not None


# --- what an exporter says ----------------------------------------------------------------------


def length(number: int) -> bytes:
    return GOOD[:24] + struct.pack("<i", number)


DATA: dict[str, Callable[[], bytes]] = {
    "a negative length": lambda: length(-1),
    "the most negative length": lambda: length(-(2**31)),
    "a length of 2 GiB": lambda: length(2**31 - 1),
    "a time behind the last": lambda: GOOD[:8] + b"\xff" * 16 + GOOD[24:],
}


@pytest.mark.parametrize("bad", DATA.values(), ids=DATA)
def test_a_message_that_is_none_ends_the_connection_and_it_is_tried_again(
    bad: Callable[[], bytes],
) -> None:
    decoder = MessageDecoder()
    with pytest.raises(Malformed):
        decoder.feed(bad())
    psi = PsiExporter()
    meta = encode_burst([RuntimeInfo(), NUMBERS])
    serving = psi.serve_all((meta, GOOD + bad()), (meta, GOOD))
    with little_memory(), RemoteImporter(HOST, psi.port, REPLAY_ALL) as importer:
        serving.join(20)
        assert not serving.is_alive()
        until(lambda: importer.statistics().repeated == 1)
        assert (importer.statistics().messages, importer.statistics().lost) == (1, 0)
    psi.close()


@pytest.mark.parametrize("number", [-1, -(2**31), 2**31 - 1])
def test_a_record_of_metadata_that_is_none_is_refused_from_its_length(number: int) -> None:
    with little_memory(1 << 20), pytest.raises(Malformed):
        MetaDecoder(hello=False).feed(struct.pack("<i", number))


def test_an_unknown_stream_is_a_typed_error_that_names_those_that_are_there() -> None:
    with (
        RemoteExporter(port=0) as exporter,
        RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
    ):
        exporter.exporter.write(None, "Numbers", "int")
        importer.open_stream("Numbers").close()
        with pytest.raises(NotFound) as caught:
            importer.open_stream("Words", timeout=0.1)
        assert "Numbers" in str(caught.value.hint)
        with pytest.raises(UnknownStream):
            importer.remote_stream("Words")
        with pytest.raises(NotFound) as caught:
            open_reader(f"psi://{HOST}:{exporter.port}/Words?wait=500ms")
        assert "Numbers" in str(caught.value.hint)
        with pytest.raises(StorageError, match="in use") as in_use:
            open_writer(f"psi://{HOST}:{exporter.port}/Words")
        assert "another port" in str(in_use.value.hint)
    with RemoteImporter(HOST, 1, longest_wait=0.1) as nobody, pytest.raises(ConnectionLost):
        nobody.open_stream("Words", timeout=0.2)


def test_messages_of_a_source_that_nobody_announced_are_counted_and_others_come() -> None:
    strange = encode_message(PsiMessage(99, 1, NOW, NOW, b"what"))
    psi = PsiExporter()
    burst = encode_burst([RuntimeInfo(), NUMBERS])
    serving = psi.serve_all((burst, strange * 3 + GOOD))
    with (
        RemoteImporter(HOST, psi.port, REPLAY_ALL) as importer,
        importer.open_stream("Numbers") as numbers,
    ):
        assert numbers.read(15) is not None
        assert importer.statistics().refused == 3
        serving.join(20)
    psi.close()


def test_garbage_on_the_importers_udp_port_is_counted_and_messages_come() -> None:
    """An exporter whose datagrams are noise, and good ones between them."""
    with (
        socket.create_server((HOST, 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as data,
    ):
        data.bind((HOST, 0))
        done = threading.Event()

        def serve() -> None:
            from uuid import uuid4

            from penstock.protocols.psi import Chunker, ServerHello, Transport

            meta, _ = listener.accept()
            meta.recv(18)
            session = uuid4()
            hello = ServerHello(session, Transport.UDP, data.getsockname()[1])
            meta.sendall(hello.to_bytes() + encode_burst([RuntimeInfo(), NUMBERS]))
            said, address = data.recvfrom(100)
            assert said.endswith(encode_session_id(session))
            chunker = Chunker()
            for number in range(1, 11):
                for garbage in (b"", b"noise", bytes(40), LARGEST * 30):
                    data.sendto(garbage, address)
                message = PsiMessage(1, number, NOW + number * 100, NOW, bytes([number, 0, 0, 0]))
                for datagram in chunker.split(encode_message(message)):
                    data.sendto(datagram, address)
            done.wait(20)
            meta.close()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        port = listener.getsockname()[1]
        with little_memory(), RemoteImporter(HOST, port, REPLAY_ALL) as importer:
            with importer.open_stream("Numbers") as numbers:
                found = [numbers.read(10) for _ in range(10)]
            assert [each.value for each in found if each is not None] == list(range(1, 11))
            done.set()
            serving.join(20)
            until(lambda: importer.statistics().datagrams_refused > 0)
