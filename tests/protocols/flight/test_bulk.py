"""Many messages of all kinds, both ways: byte for byte what they were."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Batch, Message, StreamId, create, open_reader, open_writer
from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.errors import (
    ConnectionLost,
    Malformed,
    MessageTooLarge,
    StorageError,
    Unacknowledged,
)
from penstock.core.url import URL
from penstock.protocols.flight import ServerBusy, bulk
from penstock.protocols.flight.bulk import (
    ANSWER,
    HEAD,
    HELLO,
    Pack,
    encode_answer,
    encode_hello,
    parse_answer,
    parse_answer_head,
    parse_head,
    parse_hello,
    unpack_batch,
)
from penstock.protocols.flight.client import Connection, Target
from penstock.protocols.flight.server import FlightServer
from penstock.protocols.flight.wire import (
    MAX_RECORD,
    ActionKind,
    BulkOpened,
    Failure,
    OpenWriter,
    Outcome,
    Piece,
    Put,
    WriterOpened,
    check_buffers,
)
from penstock.protocols.flight.writer import FlightWriter
from protocols.flight.serving import served, server_process, wires_to
from support.descriptors import cpu_seconds, open_descriptors, starved
from support.until import until
from support.waiting import SOON, background, waits


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_100_000_messages_pass_both_ways(tmp_path: Path, kind: str) -> None:
    _pass_both_ways(tmp_path, kind, 100_000)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_million_messages_pass_both_ways(tmp_path: Path, kind: str) -> None:
    _pass_both_ways(tmp_path, kind, 1_000_000)


def _pass_both_ways(root: Path, kind: str, count: int) -> None:
    rng = random.Random(kind)
    size = "&slots=1048576&size=256M" if kind == "fmq" else ""
    ids = [None, *(StreamId(rng.randbytes(16)) for _ in range(5))]
    noise = rng.randbytes(1 << 16)
    written = 0
    with server_process(root) as server:
        url = f"{server.url}bulk?kind={kind}"
        with open_writer(url + size) as writer, open_reader(url) as reader:
            while written < count:
                # Most messages of a telemetry stream have neither a stream of their own nor
                # attributes; one batch in five has both.
                has_more = written % 50_000 == 0
                messages = []
                for seq in range(written, written + 10_000):
                    at = rng.randrange(60_000)
                    payload = noise[at : at + rng.randrange(120)]
                    own = noise[at : at + seq % 40] if has_more and seq % 3 else None
                    stream = ids[seq % 6] if has_more else None
                    kinds = rng.randrange(-(2**31), 2**31), seq % 11
                    messages.append(Message(seq, -seq, 0, *kinds, stream, own, payload))
                last = writer.write_batch(batch_from_messages(messages))
                written += 10_000
                assert last == written - 1
                got: list[Message] = []
                while len(got) < len(messages):
                    batch = reader.read_batch(3000, timeout=10)
                    got += (m._replace(created_ns=0) for m in messages_from_batch(batch))
                assert got == messages
            assert reader.read(0) is None
            assert reader.statistics()[2:5] == (0, 0, 0)
            assert writer.statistics().messages == reader.statistics().messages == count


# --- bytes ----------------------------------------------------------------------------------------


ID = "0123456789abcdef" * 2

messages = st.builds(
    Message,
    st.integers(0, 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.none() | st.binary(min_size=16, max_size=16).map(StreamId),
    st.none() | st.binary(max_size=40),
    st.binary(max_size=200),
)


def sent(pack: Pack, batch: Batch, piece: Piece) -> bytes:
    return b"".join(bytes(part) for part in pack.encode(batch, piece))


@given(st.lists(st.lists(messages, max_size=8), min_size=1, max_size=3), st.integers(0, 3))
def test_a_piece_reads_what_it_wrote_also_when_it_is_part_of_a_batch(
    batches: list[list[Message]], start: int
) -> None:
    pack = Pack()
    for number, each in enumerate(batches, 1):
        batch = batch_from_messages(each).slice(start)
        data = sent(pack, batch, Piece(number=number))
        head = parse_head(data[: HEAD.size], 1 << 20)
        record = data[HEAD.size : HEAD.size + head.record]
        rest = data[HEAD.size + head.record :]
        assert Piece.from_bytes(record) == Piece(number=number)
        assert len(rest) == head.batch
        found = unpack_batch(pa.py_buffer(rest))
        check_buffers(found)
        assert found.equals(batch)


def test_messages_are_not_copied_to_be_sent() -> None:
    batch = batch_from_messages([Message(0, 0, 0, 0, 0, None, None, bytes(100_000))])
    payload = batch.column("payload").buffers()[2]
    parts = Pack().encode(batch, Piece(number=1))
    assert payload.address in {part.address for part in parts if isinstance(part, pa.Buffer)}


@pytest.mark.parametrize(
    ("mark", "record", "batch", "field"),
    [
        (0, 10, 10, "mark"),
        (0x4543_4950, MAX_RECORD + 1, 10, "record"),
        (0x4543_4950, 10, (1 << 20) + (64 << 10) + 1, "batch"),
        (0x4543_4950, 10, 2**64 - 1, "batch"),
    ],
)
def test_a_head_that_promises_too_much_is_malformed(
    mark: int, record: int, batch: int, field: str
) -> None:
    with pytest.raises(Malformed) as caught:
        parse_head(HEAD.pack(mark, record, batch), 1 << 20)
    assert caught.value.where == field


def test_a_hello_has_the_key_and_nothing_else_is_one() -> None:
    assert parse_hello(encode_hello(ID)) == ID
    with pytest.raises(Malformed):
        parse_hello(b"GET / HTTP/1.1".ljust(HELLO.size))


@pytest.mark.parametrize(
    "said",
    [None, Outcome(number=3, written=2, last_seq=7), Failure(kind="NotFound", message="gone")],
)
def test_an_answer_reads_what_it_wrote(said: Outcome | Failure | None) -> None:
    data = encode_answer(said)
    head, record = data[: ANSWER.size], data[ANSWER.size :]
    assert parse_answer_head(head).record == len(record)
    assert parse_answer(head, record) == said


@pytest.mark.parametrize("head", [bytes(8), encode_answer(None)[:4] + struct.pack("<I", 1 << 30)])
def test_an_answer_that_is_none_is_malformed(head: bytes) -> None:
    with pytest.raises(Malformed):
        parse_answer_head(head)


@given(st.binary(max_size=400))
def test_fuzz_bytes_that_are_no_batch_are_malformed_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        unpack_batch(pa.py_buffer(data))


@given(st.data())
def test_fuzz_a_changed_batch_is_read_or_malformed(data: st.DataObject) -> None:
    batch = batch_from_messages([Message(1, 2, 3, 4, 5, None, b"some", b"payload")] * 5)
    whole = bytearray(b"".join(bytes(p) for p in Pack().encode(batch, Piece(number=1))[2:]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    with contextlib.suppress(Malformed):
        check_buffers(unpack_batch(pa.py_buffer(bytes(whole[:cut] if cut % 2 else whole))))


# --- the port -------------------------------------------------------------------------------------


def payloads_of(local: str) -> list[bytes]:
    with open_reader(local) as reader:
        return [message.payload for message in reader.available()]


# --- who goes there -------------------------------------------------------------------------------


def test_a_writer_that_comes_again_stays_connected(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        with open_writer(f"{server.url}a") as writer:
            assert writer.write(b"0") == 0
            assert server.statistics().bulk == 0
            assert [writer.write(b"%d" % i) for i in range(1, 50)] == list(range(1, 50))
            assert writer.write_many([b"x"] * 10_000) == 10_049
            writer.flush()
            assert server.statistics().bulk == 1
            assert writer.statistics().messages == server.statistics().messages_in == 10_050
        until(lambda: server.statistics().bulk == 0)
    assert payloads_of(f"fmq:{tmp_path}/a") == [*(b"%d" % i for i in range(50)), *[b"x"] * 10_000]


@pytest.mark.parametrize(
    ("served_with", "written_with"),
    [
        ({"bulk_port": "off"}, {}),
        ({}, {"bulk": False}),
        ({"host": "0.0.0.0", "insecure": True}, {}),
    ],
)
def test_without_a_port_or_the_wish_all_goes_by_flight(
    tmp_path: Path, served_with: dict[str, object], written_with: dict[str, object]
) -> None:
    with served(tmp_path, **served_with) as server:
        url = f"flight://127.0.0.1:{server.port}/a"
        with open_writer(url, **written_with) as writer:
            assert [writer.write(b"x") for _ in range(5)] == list(range(5))
            assert server.statistics().bulk == 0


def test_a_port_that_cannot_be_reached_is_gone_without(tmp_path: Path) -> None:
    with served(tmp_path) as server, wires_to(server) as (wire, bulk):
        bulk.close()
        with open_writer(wire.url("a")) as writer:
            assert [writer.write(b"x") for _ in range(5)] == list(range(5))
        assert server.statistics().bulk == 0


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(StorageError, match="listening"),
        served(tmp_path, bulk_port=taken.getsockname()[1]),
    ):
        pass


def test_there_is_a_limit_of_connections_and_who_finds_no_place_goes_by_flight(
    tmp_path: Path,
) -> None:
    with served(tmp_path, max_clients=2) as server:
        writers = [open_writer(f"{server.url}a") for _ in range(4)]
        for i in range(4):
            for writer in writers:
                writer.write(b"%d" % i)
        assert server.statistics().bulk == 2
        for writer in writers:
            writer.close()
    assert sorted(payloads_of(f"fmq:{tmp_path}/a")) == sorted([b"%d" % i for i in range(4)] * 4)


def test_a_connection_without_work_takes_no_place_of_a_client(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/b")
    with served(tmp_path, max_clients=1) as server, open_writer(f"{server.url}a") as writer:
        for _ in range(3):
            writer.write(b"x")
        assert server.statistics().bulk == 1
        until(lambda: server.statistics().clients == 0)
        reader = open_reader(f"{server.url}b", hold="name")  # a call that lasts
        with pytest.raises(ServerBusy):
            open_writer(f"{server.url}a")
        with background(writer.write, b"y") as call:
            assert waits(call)  # as by Flight: it is tried again
            reader.close()
            assert call.result(2 * SOON) == 3


def test_encrypted_and_with_a_token_it_is_the_same(
    tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    with served(tmp_path, tls_cert=cert, tls_key=key, token_file=token_file) as server:
        options = {"ca": str(cert), "token_file": str(token_file)}
        payloads = [random.Random(i).randbytes(1000) for i in range(5000)]
        with open_writer(f"{server.url}a?kind=log", **options) as writer:
            for start in range(0, 5000, 500):
                writer.write_many(payloads[start : start + 500])
            assert server.statistics().bulk == 1
            with socket.create_connection(("127.0.0.1", server.bulk_port or 0)) as plain:
                plain.sendall(encode_hello(ID))
                plain.settimeout(SOON)
                with contextlib.suppress(ConnectionResetError):
                    assert len(plain.recv(8)) < ANSWER.size  # an alert of TLS, or the end
            writer.write(b"last")
    assert payloads_of(f"log:{tmp_path}/a") == [*payloads, b"last"]


# --- what breaks ----------------------------------------------------------------------------------


def test_a_connection_that_ends_while_nothing_is_under_way_is_made_anew(
    server: FlightServer, name: str, local: str, caplog: pytest.LogCaptureFixture
) -> None:
    with wires_to(server) as (wire, bulk), open_writer(wire.url(name)) as writer:
        for i in range(5):
            writer.write(b"%d" % i)
        assert isinstance(writer, FlightWriter)
        for i in range(5, 8):
            kept = writer._bulk
            assert kept is not None
            bulk.cut()
            until(lambda: server.statistics().bulk == 0)
            # Not only there: what is written before this end hears of it is under way.
            until(lambda kept=kept: not kept.is_whole)  # type: ignore[misc]
            assert writer.write(b"%d" % i) == i
        assert bulk.connections == 4
    assert payloads_of(f"fmq:{local}") == [b"%d" % i for i in range(8)]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_batch_whose_answer_was_cut_off_is_appended_once(
    server: FlightServer, name: str, local: str
) -> None:
    with wires_to(server) as (wire, bulk), open_writer(wire.url(name), chunk=1024) as writer:
        writer.write(b"first")
        writer.write(b"second")
        bulk.answers.clear()
        with background(writer.write_many, [b"%d" % i for i in range(500)]) as call:
            until(lambda: len(payloads_of(f"fmq:{local}")) > 20)  # and the client cannot know
            bulk.cut()
            bulk.answers.set()
            assert call.result(SOON) == 501
        books = writer.statistics()
    expected = [b"first", b"second", *(b"%d" % i for i in range(500))]
    assert payloads_of(f"fmq:{local}") == expected
    assert (books.messages, books.refused) == (502, 0)


@pytest.mark.parametrize("count", [6_000, pytest.param(60_000, marks=pytest.mark.full)])
def test_a_writer_survives_cuts_at_any_moment(
    server: FlightServer, name: str, local: str, count: int
) -> None:
    name, local = f"{name}-{count}", f"{local}-{count}"
    rng = random.Random(2)
    done = threading.Event()
    with wires_to(server) as (wire, bulk):

        def cut() -> None:
            while not done.wait(rng.uniform(0.01, 0.1)):
                bulk.cut()

        with open_writer(f"{wire.url(name)}?kind=log", chunk=2048) as writer:
            thread = threading.Thread(target=cut)
            thread.start()
            try:
                written = 0
                # On a busy machine there may be no time for a cut before all of them are written.
                while written < count or (bulk.connections <= 2 and written < 100 * count):
                    writer.write_many([b"%d" % i for i in range(written, written + 200)])
                    written += 200
            finally:
                done.set()
                thread.join()
            assert bulk.connections > 2
            assert writer.statistics().messages == written
    assert payloads_of(f"log:{local}") == [b"%d" % i for i in range(written)]


def test_a_write_after_a_restart_of_the_server_is_appended_once(tmp_path: Path) -> None:
    with server_process(tmp_path) as server, open_writer(f"{server.url}a?kind=log") as writer:
        for i in range(12):
            if i in {4, 8}:
                server.kill()
                server.start()
            assert writer.write(b"%d" % i) == i
    assert payloads_of(f"log:{tmp_path}/a") == [b"%d" % i for i in range(12)]


def test_a_write_that_a_dying_server_did_not_answer_is_told(tmp_path: Path) -> None:
    local = f"fmq:{tmp_path}/a"
    create(f"{local}?slots=64&size=64k")
    with (
        server_process(tmp_path) as server,
        open_reader(f"{local}?hold=r") as reader,
        open_writer(f"{server.url}a?hold=r&policy=wait&retry=10s") as writer,
    ):
        writer.write(b"x")
        writer.write(b"x")
        with background(writer.write_many, [b"y"] * 100) as call:
            assert waits(call)  # for the reader
            server.kill()
            server.start()
            with pytest.raises(Unacknowledged) as caught:
                call.result(2 * SOON)
        assert caught.value.in_doubt == 100
        assert reader.read(0) is not None


def test_a_writer_that_was_idle_too_long_becomes_known_again_by_itself(tmp_path: Path) -> None:
    with served(tmp_path, idle="500ms") as server, open_writer(f"{server.url}a") as writer:
        for round_ in range(2):
            for i in range(3):
                assert writer.write(b"x") == 3 * round_ + i
            assert server.statistics().bulk == 1
            until(lambda: server.statistics().writers == 0)
    assert len(payloads_of(f"fmq:{tmp_path}/a")) == 6


def test_a_silent_server_is_asked_after_and_waited_for_while_it_lives(
    server: FlightServer, name: str
) -> None:
    with wires_to(server) as (wire, bulk):
        writer = open_writer(wire.url(name), call_timeout="200ms", retry="500ms")
        writer.write(b"x")
        writer.write(b"x")
        bulk.answers.clear()
        with background(writer.write, b"y") as call:
            time.sleep(0.6)
            assert waits(call)
            bulk.answers.set()
            assert call.result(SOON) == 2
        bulk.answers.clear()
        wire.answers.clear()
        with background(writer.write, b"z") as call, pytest.raises(ConnectionLost):
            call.result(2 * SOON)
        bulk.answers.set()
        wire.answers.set()
        writer.close()


def test_a_refusal_is_told_and_the_next_call_goes_on(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=64&size=4k")
    with open_writer(url) as writer:
        for _ in range(3):
            writer.write(b"x")
        batch = batch_from_messages(
            [Message(0, 1, 1, 0, 0, None, None, bytes(size)) for size in (5, 9_000, 7)]
        )
        with pytest.raises(MessageTooLarge) as caught:
            writer.write_batch(batch)
        assert caught.value.limit == 4096
        assert writer.write(b"goes on") == writer.statistics().messages - 1
        books = writer.statistics()
    assert books.messages + books.refused == 3 + 3 + 1


def test_what_was_sent_ahead_of_a_refusal_is_not_appended(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=4096&size=4M")
    with open_writer(url, chunk=1024) as writer:
        writer.write_many([b"x"] * 2)
        sizes = [100] * 20 + [5 << 20] + [100] * 5000
        with pytest.raises(MessageTooLarge):
            writer.write_batch(
                batch_from_messages([Message(0, 1, 1, 0, 0, None, None, bytes(n)) for n in sizes])
            )
        assert writer.write(b"last") == 22
    assert [len(p) for p in payloads_of(f"fmq:{local}")] == [1, 1, *[100] * 20, 4]


def test_a_server_stops_at_once_although_a_writer_is_connected(tmp_path: Path) -> None:
    with served(tmp_path) as server, open_writer(f"{server.url}a", retry="100ms") as writer:
        for _ in range(3):
            writer.write(b"x")
        began = time.monotonic()
        assert server.stop()
        assert time.monotonic() - began < 2
        with pytest.raises(ConnectionLost):
            writer.write(b"x")


def test_a_server_stops_although_a_writer_waits_for_a_reader(tmp_path: Path) -> None:
    local = f"fmq:{tmp_path}/a"
    create(f"{local}?slots=64&size=64k")
    with served(tmp_path) as server, open_reader(f"{local}?hold=r"):
        writer = open_writer(f"{server.url}a?hold=r&policy=wait", retry="100ms")
        writer.write(b"x")
        writer.write(b"x")
        with background(writer.write_many, [b"y"] * 100) as call:
            assert waits(call)
            began = time.monotonic()
            assert server.stop()
            assert time.monotonic() - began < SOON
            assert call.exception(SOON) is not None
        assert writer.statistics().messages == 64
        writer.close()


def test_a_child_that_was_forked_does_not_write_for_its_parent(url: str, local: str) -> None:
    code = (
        "import os, sys, penstock\n"
        "writer = penstock.open_writer(sys.argv[1])\n"
        "for _ in range(3):\n"
        "    writer.write(b'parent')\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try:\n"
        "        writer.write(b'child')\n"
        "    except penstock.Unsupported as error:\n"
        "        writer.close()\n"
        "        os._exit(0)\n"
        "    os._exit(1)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "writer.write(b'parent')\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, url], timeout=20, check=False)
    assert done.returncode == 0
    assert payloads_of(f"fmq:{local}") == [b"parent"] * 4


# --- garbage --------------------------------------------------------------------------------------


def opened(server: FlightServer, name: str) -> BulkOpened:
    """Return the key for a writer of its own."""
    target = Target.of(URL.parse(f"{server.url}{name}"))
    connection = Connection(target)
    question = OpenWriter(**target.names(options={}, writer=ID))
    known = WriterOpened.from_bytes(connection.ask(ActionKind.OPEN_WRITER, question))
    put = Put(writer=ID, instance=known.instance, attempt=1)
    found = BulkOpened.from_bytes(connection.ask(ActionKind.OPEN_BULK, put))
    connection.drop()
    return found


def answer(connection: socket.socket) -> Outcome | Failure | None:
    connection.settimeout(SOON)
    head = connection.recv(ANSWER.size, socket.MSG_WAITALL)
    length = parse_answer_head(head).record
    return parse_answer(head, connection.recv(length, socket.MSG_WAITALL) if length else b"")


def said_to(server: FlightServer, data: bytes) -> Failure:
    with socket.create_connection(("127.0.0.1", server.bulk_port or 0)) as connection:
        connection.sendall(data)
        found = answer(connection)
    assert isinstance(found, Failure)
    return found


def test_a_key_is_good_for_once_and_only_one_that_was_given(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        key = opened(server, "a").key
        with socket.create_connection(("127.0.0.1", server.bulk_port or 0)) as connection:
            connection.sendall(encode_hello(key))
            assert answer(connection) is None
            for wrong in (key, ID, "f" * 32):
                assert said_to(server, encode_hello(wrong)).kind == "UnknownWriter"
        assert said_to(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").kind == "Malformed"
        until(lambda: server.statistics().bulk == 0)


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(100),
        HEAD.pack(0x4543_4950, 2, 2**63),
        HEAD.pack(0x4543_4950, 2**31, 0),
        HEAD.pack(0x4543_4950, 2, 8) + b"{}" + bytes(8),
        HEAD.pack(0x4543_4950, 2, 0) + b"{}",
    ],
)
def test_garbage_is_told_and_others_are_not_touched(tmp_path: Path, garbage: bytes) -> None:
    with served(tmp_path) as server, open_writer(f"{server.url}b") as other:
        other.write(b"x")
        other.write(b"x")
        with socket.create_connection(("127.0.0.1", server.bulk_port or 0)) as connection:
            connection.sendall(encode_hello(opened(server, "a").key))
            assert answer(connection) is None
            connection.sendall(garbage)
            found = answer(connection)
            assert isinstance(found, Failure)
            assert found.kind == "Malformed"
        assert other.write(b"x") == 2
        until(lambda: server.statistics().bulk == 1)


def test_who_connects_and_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.bulk_port or 0)):
            until(lambda: server.statistics().bulk == 1)
            with open_writer(f"{server.url}a") as writer:
                for i in range(3):
                    assert writer.write(b"x") == i
            began = time.monotonic()
            assert server.stop()
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("said", [b"PNBULK", encode_hello("f" * 32)])
def test_who_says_a_byte_now_and_then_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Before it said a key, and after it said a wrong one."""
    monkeypatch.setattr(bulk, "_TO_SAY_HELLO", 0.4)
    with (
        served(tmp_path) as server,
        socket.create_connection(("127.0.0.1", server.bulk_port or 0)) as connection,
    ):
        connection.sendall(said)
        until(lambda: server.statistics().bulk == 1)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while server.statistics().bulk and time.monotonic() - began < 10:
                connection.send(b"x")
                time.sleep(0.2)
        assert time.monotonic() - began < 5
        until(lambda: server.statistics().bulk == 0)


def test_a_piece_that_comes_a_byte_now_and_then_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_STALLED", 0.4)
    monkeypatch.setattr(bulk, "_QUIET", 0.2)
    with (
        served(tmp_path) as server,
        socket.create_connection(("127.0.0.1", server.bulk_port or 0)) as connection,
    ):
        connection.sendall(encode_hello(opened(server, "a").key))
        assert answer(connection) is None
        connection.sendall(HEAD.pack(0x4543_4950, 100, 0))
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while server.statistics().bulk and time.monotonic() - began < 10:
                connection.send(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < 5
        until(lambda: server.statistics().bulk == 0)


def test_without_descriptors_a_server_waits_at_no_cost_and_serves_again_with_them(
    tmp_path: Path,
) -> None:
    with server_process(tmp_path) as server, contextlib.ExitStack() as stack:
        pid = server.process.pid
        writer = stack.enter_context(open_writer(f"{server.url}a"))
        assert [writer.write(b"x"), writer.write(b"x")] == [0, 1]
        connection = Connection(Target.of(URL.parse(f"{server.url}a")))
        with starved(pid):
            for port in (server.port, bulk_port_of(pid, server.port)):
                for _ in range(30):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            time.sleep(0.5)
            before = cpu_seconds(pid)
            time.sleep(1)
            assert cpu_seconds(pid) - before < 0.25
        until(lambda: len(open_descriptors(pid)) > 40)
        connection.check()
        connection.drop()
        stack.close()
        with open_writer(f"{server.url}a") as other:
            assert [other.write(b"x") for _ in range(3)] == [2, 3, 4]
        _, _, errors = server.stop()
    assert errors.count("flight bulk: accepting clients is not possible now") == 1
    assert "Traceback" not in errors


def bulk_port_of(pid: int, port: int) -> int:
    """Return the other port that a process listens at."""
    sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            found.add(int(fields[1].partition(":")[2], 16))
    (other,) = found - {port}
    return other
