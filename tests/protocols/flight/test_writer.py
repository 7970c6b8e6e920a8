"""Writing over Flight: what a call returned for is appended there, once."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from penstock import Message, create, describe, open_reader, open_writer
from penstock.core.batch import BATCH_SCHEMA, Batch, batch_from_messages
from penstock.core.errors import (
    Closed,
    InvalidOption,
    LockTimeout,
    Malformed,
    MessageTooLarge,
    NotFound,
    PenstockError,
    StorageError,
    WriteTimeout,
)
from penstock.core.interfaces import Writer
from penstock.core.overflow import QueueFull
from penstock.core.stream_id import StreamId
from penstock.protocols.flight import AccessRefused, shared_writers
from penstock.protocols.flight.server import FlightServer
from penstock.protocols.flight.wire import ActionKind, OpenWriter, Outcome, Piece, Put, WriterOpened
from penstock.queue.storage import write_again
from penstock.queue.wide.writer import WideWriter
from penstock.relay import fields_lost
from protocols.flight.serving import served, server_process
from support.descriptors import starved
from support.mosquitto import free_port
from support.until import until
from support.waiting import SOON, background, waits

STREAM = StreamId(bytes(range(16)))


def there(local: str) -> list[Message]:
    with open_reader(f"fmq:{local}") as reader:
        return list(reader.available())


def test_every_field_is_stored(url: str, local: str) -> None:
    with open_writer(url) as writer:
        assert writer.write(b"one", 5, -6, 7, None, STREAM, b"attributes") == 0
        assert writer.write(bytearray(b"two")) == 1
        assert writer.write(memoryview(b"three")) == 2
        books = writer.statistics()
    assert (books.messages, books.bytes, books.refused, books.last_seq) == (3, 11, 0, 2)
    first, second, third = there(local)
    assert first._replace(created_ns=0) == Message(0, 7, 0, 5, -6, STREAM, b"attributes", b"one")
    assert (second.payload, third.payload) == (b"two", b"three")
    assert abs(second.time_ns - time.time_ns()) < 60e9


def test_many_and_batches_are_stored_in_order(url: str, local: str) -> None:
    payloads = [b"%d" % i for i in range(10_000)]
    with open_writer(url, chunk="8k") as writer:
        assert writer.write_many(iter(payloads), 3, 4) == 9_999
        assert writer.write_many([]) is None
        batch = batch_from_messages([m._replace(type=9) for m in there(local)])
        assert writer.write_batch(batch.slice(100, 50)) == 10_049
        assert writer.write_batch(batch.slice(0, 0)) is None
        writer.flush()
        assert writer.statistics().messages == 10_050
    stored = there(local)
    assert [m.payload for m in stored] == payloads + payloads[100:150]
    assert {(m.type, m.subtype) for m in stored[:10_000]} == {(3, 4)}
    assert {m.type for m in stored[10_000:]} == {9}


def test_created_ns_is_kept_when_it_is_given(url: str, local: str) -> None:
    with open_writer(url) as writer:
        writer.write(b"x", created_ns=123_456)
    assert there(local)[0].created_ns == 123_456


def test_options_of_the_url_make_the_queue(server: FlightServer, url: str, local: str) -> None:
    with open_writer(f"{url}?slots=128&size=64k&crc=true&stream={STREAM.hex()}"):
        pass
    info = describe(f"fmq:{local}")
    assert (info.slots, info.buffer_size, info.details["crc"]) == (128, 65536, True)
    with open_writer(f"{server.url}tests/archive?kind=log&segment=64k") as writer:
        writer.write(b"x")
    assert describe(f"{server.url}tests/archive").layout == "log"


def test_create_always_empties_once(url: str) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"x"] * 5)
    with open_writer(url, create="always") as writer:
        assert writer.write(b"y") == 0


def test_create_never_wants_one_that_is_there(url: str) -> None:
    with pytest.raises(NotFound):
        open_writer(url, create="never")


def test_what_is_too_large_is_refused_and_the_rest_is_told(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=64&size=4k")
    with open_writer(url) as writer:
        with pytest.raises(MessageTooLarge) as caught:
            writer.write(bytes(10_000))
        assert (caught.value.size, caught.value.limit) == (10_000, 4096)
        batch = batch_from_messages([
            Message(0, 1, 1, 0, 0, None, None, bytes(size)) for size in (5, 6, 9_000, 7)
        ])  # fmt: skip
        with pytest.raises(MessageTooLarge) as caught:
            writer.write_batch(batch)
        stored = [m.size for m in there(local)]
        assert f"{len(stored)} messages of this call are appended" in caught.value.__notes__
        assert stored == [5, 6][: len(stored)]
        assert writer.write(b"goes on") == len(stored)
        books = writer.statistics()
    assert books.messages + books.refused == 1 + 4 + 1


def test_a_refused_write_leaves_no_writer_behind(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/a?slots=64&size=4k")
    with served(tmp_path) as server:
        with open_writer(f"{server.url}a") as writer:
            for _ in range(3):
                with pytest.raises(MessageTooLarge):
                    writer.write(bytes(10_000))
            writer.write(b"x")
            assert server.statistics().writers == 1
        assert server.statistics().writers == 0


def test_what_is_above_the_servers_limit_is_not_even_sent(tmp_path: Path) -> None:
    with served(tmp_path, max_message="64k") as server, open_writer(f"{server.url}a") as writer:
        with pytest.raises(MessageTooLarge) as caught:
            writer.write(bytes(100_000))
        assert "--max-message" in str(caught.value.hint)
        assert writer.write_many([bytes(30_000)] * 10) == 9
        assert server.statistics().messages_in == 10


def test_clients_of_one_queue_share_its_writer(url: str, local: str) -> None:
    numbers: list[int] = []

    def write(own: int) -> None:
        with open_writer(url) as writer:
            numbers.extend(writer.write(b"%d %d" % (own, i)) for i in range(20))

    threads = [threading.Thread(target=write, args=(own,)) for own in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(100))
    stored = [m.payload for m in there(local)]
    for own in range(5):
        mine = [p for p in stored if p.startswith(b"%d " % own)]
        assert mine == [b"%d %d" % (own, i) for i in range(20)]


def test_clients_that_share_a_writer_agree_on_its_options(url: str, local: str) -> None:
    create(f"fmq:{local}")
    with open_writer(url, hold="archive"):
        with pytest.raises(InvalidOption, match="other clients"):
            open_writer(url)
        with open_writer(url, hold="archive"):
            pass


def test_a_quiet_writer_lets_a_local_one_have_the_queue(url: str, local: str) -> None:
    with open_writer(url, lock_timeout="200ms", create="always") as writer:
        writer.write(b"flight")
        with open_writer(f"fmq:{local}", lock_timeout="10s") as own:
            own.write(b"local")
            with pytest.raises(LockTimeout):
                writer.write(b"refused")
        assert writer.write(b"again") == 2


@pytest.mark.parametrize("finder", ["flush", "idle"])
def test_what_a_failed_sync_left_is_written_again_before_a_flush_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finder: str
) -> None:
    sync = os.fdatasync
    is_broken = False
    written_again = 0

    def fail_once(descriptor: int) -> None:
        nonlocal is_broken
        if is_broken:
            is_broken = False
            raise OSError(errno.EIO, "broken")
        sync(descriptor)

    def counted(descriptor: int, at: int) -> None:
        nonlocal written_again
        written_again += 1
        write_again(descriptor, at)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    monkeypatch.setattr("penstock.queue.log.writer.write_again", counted)
    monkeypatch.setattr(shared_writers, "_LINGER", 0.2)
    interval = "100ms" if finder == "idle" else "60s"
    with (
        served(tmp_path) as server,
        open_writer(f"{server.url}a", kind="log", sync=interval) as writer,
    ):
        writer.write(b"one")
        writer.flush()
        is_broken = True
        writer.write(b"two")
        if finder == "flush":
            with pytest.raises(StorageError):
                writer.flush()
        else:
            until(lambda: written_again)  # by the server, before it closes its idle writer
        writer.flush()
        assert written_again == 1


def test_a_writer_waits_for_held_readers(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=8&size=4k")
    with (
        open_reader(f"fmq:{local}?hold=archive") as reader,
        open_writer(url, hold="archive") as writer,
    ):
        with background(writer.write_many, [b"%d" % i for i in range(20)]) as call:
            assert waits(call)
            got: list[bytes] = []
            while len(got) < 20:
                got += [m.payload for m in reader.read_many(100, SOON)]
            assert got == [b"%d" % i for i in range(20)]
            assert call.result(SOON) == 19
        assert writer.statistics().waited > 0


def test_a_writer_that_waited_long_for_a_reader_goes_on(tmp_path: Path) -> None:
    """Longer than the time after which a server forgets an idle writer."""
    local = f"fmq:{tmp_path}/a"
    create(f"{local}?slots=64&size=64k")
    with (
        served(tmp_path, idle="300ms") as server,
        open_reader(f"{local}?hold=r") as reader,
        open_writer(f"{server.url}a?hold=r") as writer,
    ):
        writer.write(b"x")
        with background(writer.write_many, [b"x"] * 100) as call:
            assert waits(call)
            time.sleep(3)
            assert len(reader.read_many(64)) == 64
            assert len(reader.read_many(64, SOON)) > 0
            assert call.result(SOON) == 100
        assert writer.write(b"y") == 101


def test_a_client_that_left_while_its_writer_waited_stands_in_nobodys_way(tmp_path: Path) -> None:
    local = f"fmq:{tmp_path}/a"
    create(f"{local}?slots=64&size=64k")
    code = (
        "import sys, penstock\n"
        "with penstock.open_writer(sys.argv[1]) as writer:\n"
        "    writer.write(b'x')\n"
        "    writer.write_many([b'x'] * 100)\n"
    )
    with served(tmp_path) as server, open_reader(f"{local}?hold=r") as reader:
        url = f"{server.url}a?hold=r"
        with subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE) as client:
            until(lambda: describe(local).count == 64)
            client.send_signal(signal.SIGINT)
            assert b"KeyboardInterrupt" in client.communicate(timeout=SOON)[1]
        with open_writer(url) as writer, background(writer.write, b"y") as call:
            assert waits(call)  # for the reader, and not for the client before
            assert len(reader.read_many(64)) == 64
            assert reader.read(SOON) is not None
            assert call.result(SOON) == 64


def test_a_writer_gives_up_when_its_time_is_over(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=8&size=4k")
    with open_reader(f"fmq:{local}?hold=archive"):
        with open_writer(url, hold="archive", timeout="300ms") as writer:
            with pytest.raises(WriteTimeout, match="archive") as caught:
                writer.write_many([b"x"] * 20)
            assert "8 messages of this call are appended" in caught.value.__notes__
            assert writer.statistics()[:3] == (8, 8, 12)
        with open_writer(url, hold="archive", policy="fail") as writer, pytest.raises(QueueFull):
            writer.write(b"x")


def test_a_timeout_tells_how_long_the_client_wanted_to_wait(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=8&size=4k")
    with (
        open_reader(f"fmq:{local}?hold=archive"),
        open_writer(url, hold="archive", timeout="700ms") as writer,
        pytest.raises(WriteTimeout, match=r"waited 0\.7 s for .*archive"),
    ):
        writer.write_many([b"x"] * 20)


def test_a_message_with_a_time_of_its_own_waits_for_held_readers_too(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=8&size=4k")
    with (
        open_reader(f"fmq:{local}?hold=archive") as reader,
        open_writer(url, hold="archive") as writer,
    ):
        writer.write_many([b"x"] * 8)
        with background(lambda: writer.write(b"y", created_ns=5)) as call:
            with pytest.raises(NotYet):
                call.result(1.2)  # longer than the server waits at a time
            assert len(reader.read_many(8)) == 8
            message = reader.read(SOON)
            assert call.result(SOON) == 8
        assert message is not None
        assert message.payload == b"y"


def test_what_a_classic_queue_cannot_carry_is_known(url: str, local: str) -> None:
    create(f"fmq:{local}?layout=classic&slots=20&size=8k")
    with open_writer(url) as writer, open_reader(url) as reader:
        assert set(fields_lost(reader, writer)) == {"time_ns", "stream", "attributes"}
        writer.write(b"x", stream=STREAM)
        assert writer.statistics().headers_dropped == 1


def test_what_went_before_a_bad_payload_is_appended(url: str, local: str) -> None:
    def payloads() -> Iterator[bytes]:
        yield from [b"x"] * 10_000
        raise KeyError("the caller's own")

    with open_writer(url) as writer:
        with pytest.raises(KeyError):
            writer.write_many(payloads())
        assert len(there(local)) == writer.statistics().messages == 10_000
        assert writer.write(b"goes on") == 10_000


def test_who_is_interrupted_is_told_that_more_may_be_appended_than_is_known(url: str) -> None:
    def payloads() -> Iterator[bytes]:
        yield from [b"x"] * 20_000
        raise KeyboardInterrupt

    with open_writer(url) as writer:
        writer.write(b"first")
        with pytest.raises(KeyboardInterrupt) as caught:
            writer.write_many(payloads())
    assert caught.value.__notes__ == [
        "0 messages of this call are appended; of 16,384 more it is not known"
    ]


def test_other_columns_are_malformed(url: str) -> None:
    with open_writer(url) as writer, pytest.raises(Malformed):
        writer.write_batch(pa.record_batch({"payload": [b"x"]}))


def test_a_closed_writer_says_so(url: str) -> None:
    writer = open_writer(url)
    writer.close()
    writer.close()
    with pytest.raises(Closed):
        writer.write(b"x")
    with pytest.raises(Closed):
        writer.write_many([b"x"])
    with pytest.raises(Closed):
        writer.flush()


# --- once and only once ---------------------------------------------------------------------------


class RawWriter:
    """A client that says what a test wants it to say."""

    def __init__(self, server: FlightServer, stream: str) -> None:
        self.id = secrets.token_hex(16)
        self._client = flight.FlightClient(f"grpc://127.0.0.1:{server.port}")
        question = OpenWriter(stream=stream, writer=self.id)
        action = flight.Action(ActionKind.OPEN_WRITER.value, question.to_bytes())
        answer = next(iter(self._client.do_action(action)))
        self.instance = WriterOpened.from_bytes(answer.body.to_pybytes()).instance

    def put(self, attempt: int, *numbers: int) -> list[Outcome]:
        command = Put(writer=self.id, instance=self.instance, attempt=attempt).to_bytes()
        stream, answers = self._client.do_put(
            flight.FlightDescriptor.for_command(command), BATCH_SCHEMA
        )
        for number in numbers:
            batch = batch_from_messages([Message(0, 1, 1, 0, 0, None, None, b"%d" % number)])
            stream.write_with_metadata(batch, Piece(number=number).to_bytes())
        stream.done_writing()
        outcomes = []
        while (answer := answers.read()) is not None:
            outcomes.append(Outcome.from_bytes(answer.to_pybytes()))
        stream.close()
        return outcomes

    def close(self) -> None:
        self._client.close()


def test_a_batch_that_comes_twice_is_appended_once(
    server: FlightServer, name: str, local: str
) -> None:
    writer = RawWriter(server, name)
    before = server.statistics().messages_in
    first = writer.put(1, 1, 2)
    again = writer.put(2, 2, 3)
    assert server.statistics().messages_in - before == 3
    assert [outcome.last_seq for outcome in first + again] == [0, 1, 1, 2]
    assert [m.payload for m in there(local)] == [b"1", b"2", b"3"]
    writer.close()


def test_an_earlier_stream_of_a_writer_may_not_append_any_more(
    server: FlightServer, name: str, local: str
) -> None:
    writer = RawWriter(server, name)
    writer.put(2, 1)
    with pytest.raises(flight.FlightServerError, match="too late"):
        writer.put(1, 2)
    with pytest.raises(flight.FlightServerError, match="number should be 2"):
        writer.put(3, 5)
    assert [m.payload for m in there(local)] == [b"1"]
    writer.close()


def test_a_writer_of_another_server_is_not_known(server: FlightServer, name: str) -> None:
    writer = RawWriter(server, name)
    writer.instance = secrets.token_hex(16)
    with pytest.raises(flight.FlightServerError, match="started anew"):
        writer.put(1, 1)
    writer.close()


def test_a_forgotten_writer_becomes_known_again_by_itself(tmp_path: Path) -> None:
    with served(tmp_path, idle=0.2) as server, open_writer(f"{server.url}a") as writer:
        writer.write(b"0")
        deadline = time.monotonic() + SOON
        while server.statistics().writers:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert writer.write(b"1") == 1


# --- a server that fails while it appends ---------------------------------------------------------


def append_all(writer: Writer, payloads: list[bytes], attempts: int) -> list[bytes]:
    """Write, and after an error the rest, as the books say; return what was never taken."""
    for _ in range(attempts):
        before = writer.statistics().messages
        try:
            writer.write_many(payloads)
        except PenstockError:
            payloads = payloads[writer.statistics().messages - before :]
        else:
            return []
    return payloads


@pytest.mark.parametrize("bulk", [True, False])
def test_without_descriptors_for_a_new_segment_every_message_is_appended_once(
    tmp_path: Path, bulk: bool
) -> None:
    numbers = iter(range(10_000))

    def some(count: int) -> list[bytes]:
        return [b"%d" % next(numbers) for _ in range(count)]

    sent: list[bytes] = []
    short = 0
    options = {
        "kind": "log", "segment_slots": 16, "segment": "64K", "bulk": bulk, "retry": "0.1s",
        "call_timeout": "0.5s",
    }  # fmt: skip
    with server_process(tmp_path) as server, open_writer(f"{server.url}a", **options) as writer:
        for spare in (None, 0, 1, 2, 0):
            now = some(40)
            sent += now
            if spare is not None:
                with starved(server.process.pid, spare):
                    now = append_all(writer, now, 2)
                short += bool(now)
            assert append_all(writer, now, 9) == []
        books = writer.statistics()
    assert short > 1, "it had what it needed"
    with open_reader(f"log:{tmp_path}/a") as reader:
        assert [message.payload for message in reader.available()] == sent
        assert reader.statistics().lost == 0
    assert (books.messages, books.last_seq) == (len(sent), len(sent) - 1)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("a fault")])
def test_what_fails_on_the_server_in_the_middle_of_a_batch_is_not_appended_again(
    url: str, local: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    url, local = f"{url}-{type(error).__name__}", f"{local}-{type(error).__name__}"
    plain = WideWriter.write_batch
    faults = [error, None, error]

    def faulty(self: WideWriter, batch: Batch) -> int | None:
        fault = faults.pop() if faults else None
        if fault is None:
            return plain(self, batch)
        plain(self, batch.slice(0, 15))
        raise fault

    monkeypatch.setattr(WideWriter, "write_batch", faulty)
    with open_writer(url) as writer:
        payloads = [b"%d" % i for i in range(40)]
        with pytest.raises(PenstockError) as caught:
            writer.write_many(payloads)
        assert "15 messages of this call are appended" in caught.value.__notes__
        assert (writer.statistics().messages, writer.statistics().refused) == (15, 25)
        assert append_all(writer, payloads[15:], 5) == []
    assert [message.payload for message in there(local)] == payloads
    if isinstance(error, OSError):
        assert isinstance(caught.value, StorageError)
        assert caught.value.errno == 24


def test_every_message_that_was_offered_is_in_the_books_as_written_or_refused(
    tmp_path: Path,
) -> None:
    """Whatever the server has against it."""
    port = free_port()
    with served(tmp_path, port=port) as server:
        writer = open_writer(f"{server.url}a", retry="1s")
        writer.write_many([b"x"] * 10)
    with served(tmp_path, port=port, read_only=True):
        with pytest.raises(AccessRefused):
            writer.write_many([b"x"] * 7)
        books = writer.statistics()
        assert (books.messages, books.refused) == (10, 7)
        with pytest.raises(AccessRefused):
            writer.write(b"x")
        with pytest.raises(AccessRefused):
            writer.write_batch(batch_from_messages([Message(0, 0, 0, 0, 0, None, None, b"x")] * 4))
    with served(tmp_path, port=port):
        writer.write_many([b"x"] * 5)
        writer.close()
    books = writer.statistics()
    assert (books.messages, books.refused, books.last_seq) == (15, 12, 14)
