"""Streams reach their destinations whole and in order, or it is counted why not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import create, open_reader, open_writer
from penstock.core.batch import Batch
from penstock.core.config import parse_config
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.errors import (
    ConfigError,
    DamagedQueue,
    InvalidOption,
    InvalidStreamId,
    InvalidURL,
    StorageError,
)
from penstock.core.overflow import OverflowPolicy
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.flight import ServerOptions as FlightOptions
from penstock.protocols.flight.server import FlightServer
from penstock.protocols.jrtc.config import ForwarderConfig, ForwarderService
from penstock.protocols.jrtc.destinations import (
    Destination,
    HttpDestination,
    Outcome,
    Rejected,
    UdpDestination,
    destination_for,
)
from penstock.protocols.jrtc.forwarder import Forwarder, RouteStatistics
from penstock.protocols.jrtc.schemas import Schemas
from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions
from penstock.queue.streams import OutputStream
from protocols.jrtc.forwarded import (
    EXAMPLE,
    HOST,
    LIMITS,
    STATUS,
    UP,
    as_set,
    describe,
    example_schemas,
    listening,
    port_of,
    smo,
    stream_of,
)
from support.until import until


def assert_balanced(books: RouteStatistics) -> None:
    gone = sum(books.rejected.values()) + books.undelivered + books.waiting
    assert books.taken == books.forwarded + gone


@contextmanager
def forwarding(
    folder: Path, destinations: dict[int, Destination], schemas: Schemas | None = None, **more: Any
) -> Iterator[Forwarder]:
    with Forwarder(destinations, schemas or Schemas(), directory=folder, **more) as forwarder:
        yield forwarder.start()
    for books in forwarder.statistics().routes.values():
        assert_balanced(books)


class Box(Destination):
    """Keeps what it gets, and can be told to fail."""

    name = "a box"

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.fails: Exception | None = None
        self.most = 1 << 30
        self.calls = 0
        self.takes_long = 0.0

    def send(self, batch: Batch) -> Outcome:
        self.calls += 1
        time.sleep(self.takes_long)
        if self.fails is not None:
            raise self.fails
        part = batch.slice(0, self.most)
        self.batches.append(part)
        return Outcome(len(part))

    @property
    def payloads(self) -> list[bytes]:
        return [each for batch in self.batches for each in batch.column("payload").to_pylist()]


def test_bursts_arrive_whole_where_the_original_lost_nine_of_ten(tmp_path: Path) -> None:
    with (
        listening() as sock,
        forwarding(tmp_path, {2: UdpDestination(HOST, port_of(sock))}) as forwarder,
        OutputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
    ):
        for burst in range(20):
            stream.write_many([b"%d" % (10 * burst + i) for i in range(10)])
        got = [sock.recv(100) for _ in range(200)]
    assert got == [STATUS + b"%d" % i for i in range(200)]
    assert forwarder.statistics().routes[2].forwarded == 200
    assert forwarder.statistics().lost == 0


def test_messages_of_no_bytes_are_forwarded(tmp_path: Path) -> None:
    with (
        listening() as sock,
        forwarding(tmp_path, {2: UdpDestination(HOST, port_of(sock))}),
        OutputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
    ):
        stream.write(b"")
        stream.write(b"next")
        assert [sock.recv(100), sock.recv(100)] == [STATUS, STATUS + b"next"]


def test_structs_are_serialised_and_those_that_cannot_be_are_dead_letters(tmp_path: Path) -> None:
    schemas = example_schemas(nanopb=True)
    schema = schemas.find(STATUS)
    assert schema is not None
    assert schema.codec is not None
    good = schema.codec.deserialise(pa.array([UP], pa.binary())).rows[0].tobytes()
    dead = open_writer(f"log:{tmp_path}/dead")
    with (
        listening() as sock,
        forwarding(
            tmp_path, {2: UdpDestination(HOST, port_of(sock))}, schemas, dead=dead
        ) as forwarder,
        OutputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
    ):
        stream.write_many([good, b"too short", good])
        assert [sock.recv(100), sock.recv(100)] == [STATUS + UP] * 2
    books = forwarder.statistics()
    assert books.routes[2].rejected == {Code.INVALID_ARGUMENT: 1}
    assert (books.dead, books.lost) == (1, 0)
    with open_reader(f"log:{tmp_path}/dead") as reader:
        letter = DeadLetter.from_message(next(reader.available()))
    assert letter.original.payload == b"too short"
    assert letter.original.stream == STATUS
    assert "116 bytes, found 9 bytes" in letter.reason


def test_structs_whose_message_is_gone_are_rejected_and_not_sent_as_they_are(
    tmp_path: Path,
) -> None:
    schemas, box = example_schemas(nanopb=True), Box()
    schemas.upsert(as_set(describe({"other": [("id", "uint32")]}, name="example.proto")))
    with (
        forwarding(tmp_path, {2: box}, schemas) as forwarder,
        OutputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
    ):
        stream.write_many([bytes(116)] * 2)
        until(lambda: forwarder.statistics().taken == 2)
    assert forwarder.statistics().routes[2].rejected == {Code.FAILED_PRECONDITION: 2}
    assert box.payloads == []


def test_protobuf_is_forwarded_as_it_is_also_if_its_package_lost_the_message(
    tmp_path: Path,
) -> None:
    schemas, box = example_schemas(), Box()
    schemas.upsert(as_set(describe({"other": [("id", "uint32")]}, name="example.proto")))
    with (
        forwarding(tmp_path, {2: box}, schemas) as forwarder,
        OutputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
    ):
        stream.write_many([UP] * 2)
        until(lambda: forwarder.statistics().taken == 2)
    assert forwarder.statistics().routes[2].rejected == {}
    assert box.payloads == [UP] * 2


def test_what_does_not_fit_a_datagram_is_a_dead_letter_and_never_cut(tmp_path: Path) -> None:
    dead = open_writer(f"log:{tmp_path}/dead")
    with (
        listening() as sock,
        forwarding(tmp_path, {2: UdpDestination(HOST, port_of(sock))}, dead=dead) as forwarder,
        OutputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
    ):
        largest, larger = b"a" * 65_491, b"b" * 65_492
        stream.write_many([b"1", larger, b"2", larger, largest, larger])
        assert [len(sock.recv(1 << 17)) for _ in range(3)] == [17, 17, 65_507]
        until(lambda: forwarder.statistics().dead == 3)
    books = forwarder.statistics()
    assert books.routes[2].rejected == {Code.OUT_OF_RANGE: 3}
    assert books.routes[2].bytes == 2 + len(largest)
    with open_reader(f"log:{tmp_path}/dead") as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert {letter.original.payload for letter in letters} == {larger}
    assert "65,508 bytes do not fit a datagram" in letters[0].reason


def test_each_stream_goes_where_its_destination_says(tmp_path: Path) -> None:
    boxes: dict[int, Destination] = {2: Box(), 4: Box(), 8: Box()}
    with forwarding(tmp_path, boxes) as forwarder:
        for dst in (1, 2, 4, 8, 16):
            for device in (1, 5):
                with OutputStream.create(
                    stream_of("a-name", dst, device), owner="x", directory=tmp_path
                ) as stream:
                    stream.write(b"%d of %d" % (dst, device))
        until(lambda: forwarder.statistics().forwarded == 6)
    for dst, box in boxes.items():
        assert isinstance(box, Box)
        assert sorted(box.payloads) == [b"%d of 1" % dst, b"%d of 5" % dst]
        assert all(batch.column("stream")[0].as_py()[0] == 0 for batch in box.batches)


def test_a_destination_that_is_away_gets_everything_when_it_is_back(tmp_path: Path) -> None:
    box, other = Box(), Box()
    box.fails = ConnectionError("away")
    with (
        forwarding(tmp_path, {2: box, 4: other}) as forwarder,
        OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
        OutputStream.create(stream_of("other", 4), owner="x", directory=tmp_path) as beside,
    ):
        stream.write_many([b"%d" % i for i in range(50)])
        until(lambda: box.calls > 1)
        beside.write(b"others do not wait")
        until(lambda: other.payloads)
        assert forwarder.statistics().routes[2].waiting == 50
        box.most = 7
        box.fails = None
        until(lambda: len(box.payloads) == 50)
    assert box.payloads == [b"%d" % i for i in range(50)]
    assert forwarder.statistics().routes[2].outages >= 1


def test_what_was_not_taken_at_the_end_is_a_dead_letter(tmp_path: Path) -> None:
    box = Box()
    box.fails = ConnectionError("away")
    dead = open_writer(f"log:{tmp_path}/dead")
    with (
        forwarding(tmp_path, {2: box}, dead=dead) as forwarder,
        OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
    ):
        stream.write_many([b"1", b"2"])
        until(lambda: box.calls)
    books = forwarder.statistics()
    assert books.routes[2].undelivered == 2
    assert (books.dead, books.lost) == (2, 0)


def test_a_forwarder_that_is_too_slow_says_what_it_lost(tmp_path: Path) -> None:
    box = Box()
    box.fails = ConnectionError("away")
    with (
        forwarding(tmp_path, {2: box}) as forwarder,
        OutputStream.create(STATUS, owner="x", directory=tmp_path, slots=64) as stream,
    ):
        stream.write(b"first")
        until(lambda: box.calls)
        stream.write_many([b"%d" % i for i in range(1000)])
        box.fails = None
        until(lambda: box.payloads[-1:] == [b"999"])
    books = forwarder.statistics()
    assert books.routes[2].lost == 1001 - books.routes[2].forwarded
    assert books.lost >= 900


@pytest.mark.parametrize("policy", [OverflowPolicy.DROP_OLDEST, OverflowPolicy.BLOCK])
def test_what_is_in_a_stream_at_the_end_is_lost_unless_the_next_forwarder_goes_on(
    tmp_path: Path, policy: OverflowPolicy
) -> None:
    box, more = Box(), Box()
    box.fails = ConnectionError("away")
    with OutputStream.create(
        STATUS, owner="x", directory=tmp_path, slots=20_000, hold="forwarder-2"
    ) as stream:
        dead = open_writer(f"log:{tmp_path}/dead")
        with forwarding(tmp_path, {2: box}, policy=policy, dead=dead) as forwarder:
            until(lambda: forwarder.statistics().routes[2].streams == 1)
            stream.write(b"first")
            until(lambda: box.calls)
            stream.write_many([b"%d" % i for i in range(10_000)])
            box.takes_long = 3.0
            box.fails = None
        books = forwarder.statistics().routes[2]
        left = 10_001 - books.taken
        assert left > 0
        if policy is OverflowPolicy.BLOCK:
            assert books.lost == 0
            with forwarding(tmp_path, {2: more}, policy=policy):
                until(lambda: len(more.payloads) >= left)
            assert more.payloads[-1] == b"9999"
        else:
            assert books.lost == left


def test_under_block_the_next_forwarder_gets_what_a_destination_that_is_away_did_not_take(
    tmp_path: Path,
) -> None:
    box, more = Box(), Box()
    box.most = 7
    with OutputStream.create(
        STATUS, owner="x", directory=tmp_path, slots=20_000, hold="forwarder-2"
    ) as stream:
        with forwarding(tmp_path, {2: box}, policy=OverflowPolicy.BLOCK) as forwarder:
            until(lambda: forwarder.statistics().routes[2].streams == 1)
            stream.write(b"0")
            until(lambda: box.payloads)
            box.fails = ConnectionError("away")
            stream.write_many([b"%d" % i for i in range(1, 10_000)])
            until(lambda: forwarder.statistics().routes[2].waiting)
            until(lambda: box.calls > 3)
        books = forwarder.statistics()
        assert (books.routes[2].undelivered, books.lost) == (0, 0)
        with forwarding(tmp_path, {2: more}, policy=OverflowPolicy.BLOCK):
            until(lambda: more.payloads[-1:] == [b"9999"])
    assert box.payloads + more.payloads == [b"%d" % i for i in range(10_000)]


def test_under_block_what_cannot_be_serialised_is_rejected_once_also_when_its_batch_is_left(
    tmp_path: Path,
) -> None:
    schemas, box, more = example_schemas(nanopb=True), Box(), Box()
    good, bad = bytes(116), b"too short"
    books = []
    with OutputStream.create(STATUS, owner="x", directory=tmp_path, hold="forwarder-2") as stream:
        for each in (box, more):
            with forwarding(
                tmp_path,
                {2: each},
                schemas,
                policy=OverflowPolicy.BLOCK,
                dead=open_writer(f"log:{tmp_path}/dead"),
            ) as forwarder:
                until(lambda: forwarder.statistics().routes[2].streams == 1)
                if each is box:
                    box.fails = ConnectionError("away")
                    stream.write_many([good, bad, good, bad, good])
                    until(lambda: box.calls > 1)
                else:
                    until(lambda: len(more.payloads) == 3)
            books.append(forwarder.statistics().routes[2])
    assert [(book.taken, book.rejected) for book in books] == [
        (0, {}),
        (5, {Code.INVALID_ARGUMENT: 2}),
    ]
    with open_reader(f"log:{tmp_path}/dead") as letters:
        assert len(list(letters.available())) == 2


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_under_block_nobody_gets_what_is_left_of_a_removed_stream_so_it_counts(
    tmp_path: Path, is_made_anew: bool
) -> None:
    box = Box()
    box.most = 7
    stream = OutputStream.create(STATUS, owner="x", directory=tmp_path, hold="forwarder-2")
    with open_writer(f"log:{tmp_path}/dead") as dead:
        with forwarding(tmp_path, {2: box}, policy=OverflowPolicy.BLOCK, dead=dead) as forwarder:
            until(lambda: forwarder.statistics().routes[2].streams == 1)
            stream.write(b"0")
            until(lambda: box.payloads)
            box.fails = ConnectionError("away")
            stream.write_many([b"%d" % i for i in range(1, 11)])
            until(lambda: forwarder.statistics().routes[2].waiting)
            waiting = forwarder.statistics().routes[2].waiting
            stream.remove()
            if is_made_anew:
                stream = OutputStream.create(STATUS, owner="x", directory=tmp_path)
        books = forwarder.statistics()
    stream.close()
    assert books.routes[2].undelivered == waiting
    assert books.routes[2].taken + books.routes[2].lost == 11
    with open_reader(f"log:{tmp_path}/dead") as letters:
        assert len(list(letters.available())) == waiting


def test_a_destination_that_takes_some_at_a_time_gets_the_rest_at_the_end(tmp_path: Path) -> None:
    box = Box()
    box.most, box.takes_long = 100, 0.05
    with (
        OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
        forwarding(tmp_path, {2: box}) as forwarder,
    ):
        stream.write_many([b"%d" % i for i in range(510)])
        until(lambda: box.calls)
    assert box.payloads == [b"%d" % i for i in range(510)]
    assert forwarder.statistics().routes[2].undelivered == 0


@pytest.mark.parametrize("policy", [OverflowPolicy.DROP_OLDEST, OverflowPolicy.BLOCK])
def test_a_destination_that_never_returns_does_not_keep_the_forwarder_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: OverflowPolicy
) -> None:
    is_over = threading.Event()

    class Stuck(Box):
        def send(self, batch: Batch) -> Outcome:
            super().send(batch)
            is_over.wait()
            return Outcome(0)

    monkeypatch.setattr("penstock.protocols.jrtc.forwarder._LEAVING", 0.1)
    box = Stuck()
    with (
        OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
        forwarding(tmp_path, {2: box}, policy=policy) as forwarder,
    ):
        stream.write_many([b"1", b"2"])
        until(lambda: box.calls)
    books = forwarder.statistics()
    assert books.routes[2].undelivered == 2
    assert books.lost == (0 if policy is OverflowPolicy.BLOCK else 2)
    is_over.set()
    forwarder._routes[2]._worker.join()
    assert_balanced(forwarder.statistics().routes[2])


def test_creators_can_wait_for_a_forwarder(tmp_path: Path) -> None:
    box = Box()
    box.most = 10
    with (
        forwarding(tmp_path, {2: box}, policy=OverflowPolicy.BLOCK) as forwarder,
        OutputStream.create(
            STATUS, owner="x", directory=tmp_path, slots=64, hold="forwarder-2", policy="wait"
        ) as stream,
    ):
        until(lambda: forwarder.statistics().routes[2].streams == 1)
        for i in range(1000):
            stream.write(b"%d" % i)
        until(lambda: len(box.payloads) == 1000)
    assert box.payloads == [b"%d" % i for i in range(1000)]
    assert forwarder.statistics().lost == 0


def test_nobody_who_listens_is_noticed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((HOST, 0))
        port = port_of(sock)
    destination = UdpDestination(HOST, port)
    with (
        forwarding(tmp_path, {2: destination}) as forwarder,
        OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
    ):
        for _ in range(10):
            stream.write(b"hello")
            time.sleep(0.02)
        until(lambda: forwarder.statistics().forwarded == 10)
        until(lambda: destination.unheard)


def test_a_web_server_gets_json_also_when_it_fails_at_first(tmp_path: Path) -> None:
    schemas = example_schemas()
    with smo(503, 429) as (url, bodies):
        destination = destination_for(url, schemas)
        with (
            forwarding(tmp_path, {2: destination}, schemas) as forwarder,
            OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
            OutputStream.create(stream_of("no-schema"), owner="x", directory=tmp_path) as unknown,
        ):
            stream.write_many([UP, b"\xff", UP])
            until(lambda: bodies)
            unknown.write(b"x")
            until(lambda: forwarder.statistics().rejected == 2)
    (objects,) = bodies
    assert [each["id"] for each in objects] == [7, 7]
    assert objects[0]["_stream_id"] == str(STATUS)
    books = forwarder.statistics().routes[2]
    assert books.rejected == {Code.INVALID_ARGUMENT: 1, Code.FAILED_PRECONDITION: 1}
    assert (books.forwarded, books.outages) == (2, 2)


def test_what_a_web_server_refuses_is_rejected() -> None:
    schemas = example_schemas()
    batch = _batch(UP, UP)
    with smo(400) as (url, _), HttpDestination(url, schemas) as destination:
        outcome = destination.send(batch)
    assert outcome.done == 2
    assert [each.row for each in outcome.rejected] == [0, 1]
    with (
        HttpDestination("http://127.0.0.1:1/", schemas) as destination,
        pytest.raises(ConnectionError),
    ):
        destination.send(batch)


def _batch(*payloads: bytes) -> Batch:
    from penstock.protocols.jrtc.wire import batch_of_datagrams

    return batch_of_datagrams([STATUS + payload for payload in payloads], 0, 0)


def test_any_stream_is_a_destination(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/queue?slots=1000&size=1M"
    with (
        forwarding(tmp_path, {4: destination_for(url, Schemas())}) as forwarder,
        OutputStream.create(stream_of("a-stream", 4), owner="x", directory=tmp_path) as stream,
    ):
        stream.write_many([b"%d" % i for i in range(100)])
        stream.write(bytes(2 << 20))  # larger than the queue
        stream.write(b"last")
        until(lambda: forwarder.statistics().forwarded == 101)
    assert forwarder.statistics().routes[4].rejected == {Code.OUT_OF_RANGE: 1}
    with open_reader(f"fmq:{tmp_path}/queue") as reader:
        messages = list(reader.available())
    assert [m.payload for m in messages] == [*(b"%d" % i for i in range(100)), b"last"]
    assert {m.stream for m in messages} == {stream_of("a-stream", 4)}


def _sent_in_calls(destination: Destination, *payloads: bytes) -> list[bytes]:
    """Send until nothing is left, as a forwarder does; return the payloads that are rejected."""
    batch, refused = _batch(*payloads), []
    while len(batch):
        done, rejected = destination.send(batch)
        refused += [batch.column("payload")[each.row].as_py() for each in rejected]
        batch = batch.slice(done)
    return refused


def test_a_message_that_is_too_large_for_a_remote_queue_costs_no_other(tmp_path: Path) -> None:
    good, large = [b"good-%d" % i for i in range(5)], bytes(40_000)
    with FmqServer(FmqServerOptions(root=tmp_path, port=0)) as server:
        url = f"{server.url}/q?create=missing"
        with destination_for(f"{url}&max_message=20000", Schemas()) as destination:
            assert _sent_in_calls(destination, *good, large, b"behind", large) == [large, large]
        with open_reader(f"fmq:{tmp_path}/q") as reader:
            assert [message.payload for message in reader.available()] == [*good, b"behind"]


def test_a_message_that_its_queue_cannot_take_is_rejected_and_does_not_block_others() -> None:
    with (
        LhhtttServer(ServerOptions(port=0)) as server,
        destination_for(f"lhhttt://{HOST}:{server.port}?mode=legacy", Schemas()) as destination,
    ):
        assert _sent_in_calls(destination, b"1", b"no text: \xac", b"2") == [b"no text: \xac"]


def test_a_damaged_queue_is_an_outage_and_no_verdict_on_messages(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    create(f"{url}?layout=classic")
    with destination_for(url, Schemas()) as destination:
        assert destination.send(_batch(b"1")) == (1, ())
        status = tmp_path / "q.stat"
        whole = status.read_bytes()
        with status.open("r+b") as file:
            file.write(whole[:4] + bytes(len(whole) - 4))
        with pytest.raises(DamagedQueue):
            destination.send(_batch(b"2", b"3"))
        with status.open("r+b") as file:
            file.write(whole)
        assert destination.send(_batch(b"2", b"3")) == (2, ())


def test_another_client_with_other_options_is_an_outage_and_no_verdict_on_messages(
    tmp_path: Path,
) -> None:
    with FlightServer(FlightOptions(root=tmp_path, port=0)) as server:
        url, port = f"{server.url}x", server.port
        destination = destination_for(url, Schemas())
        assert destination.send(_batch(b"1")) == (1, ())
    with destination, FlightServer(FlightOptions(root=tmp_path, port=port)):
        with open_writer(f"{url}?policy=drop"), pytest.raises(InvalidOption, match="policy"):
            destination.send(_batch(b"2", b"3"))
        assert destination.send(_batch(b"2", b"3")) == (2, ())


def test_destinations_that_are_none() -> None:
    for url in ("http://host:99999/x", "http://[::1/x"):
        with pytest.raises(InvalidURL):
            destination_for(url, Schemas())
    with pytest.raises(InvalidURL):
        destination_for("jrtc+udp:///path", Schemas())
    with pytest.raises(InvalidURL):
        destination_for("http://", Schemas())
    with pytest.raises(InvalidURL):
        destination_for("e2://ric:36421", Schemas())
    with pytest.raises(StorageError):
        destination_for("jrtc+udp://no.such.host.invalid:1", Schemas())
    for number in (0, 127, 130, -1):
        with pytest.raises(InvalidStreamId):
            Forwarder({number: Box()}, Schemas())


def test_a_routing_application_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "example.pb").write_bytes(EXAMPLE)
    (tmp_path / "example.options").write_text(
        "".join(f"{name} max_size:{each['max_size']}\n" for name, each in LIMITS.items())
    )
    with listening() as sock:
        text = f"""
destinations:
  2: jrtc+udp://{HOST}:{port_of(sock)}
  4: log:{tmp_path}/kept
schemas:
  - file: {tmp_path}/example.pb
    options: {tmp_path}/example.options
    payloads: nanopb
    streams:
      {STATUS}: status
dead: log:{tmp_path}/dead
directory: {tmp_path}
"""
        config = parse_config(text, ForwarderConfig)
        schema = example_schemas(nanopb=True).find(STATUS)
        assert schema is not None
        assert schema.codec is not None
        row = np.zeros(1, schema.codec.dtype)
        row["id"] = 5
        row["status"] = b"fine"
        with (
            ForwarderService(config) as service,
            OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
        ):
            stream.write(row[0].tobytes())
            assert sock.recv(100) == STATUS + b"\x08\x05\x12\x04fine\x1a\x02\x08\x00"
            assert service.schemas.packages() == ["example"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("destinations: {130: 'log:/x'}", "destinations"),
        ("schemas: [{file: x.pb, streams: {abc: status}}]", "not a stream id"),
        ("control: {tcp_port: 70000, allow: []}", "65535"),
        ("destination: {}", "did you mean destinations"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, ForwarderConfig)
    assert said in f"{caught.value} {caught.value.hint}"


def test_rejections_of_a_plug_in_are_counted(tmp_path: Path) -> None:
    class Picky(Box):
        def send(self, batch: Batch) -> Outcome:
            super().send(batch)
            odd = [i for i, x in enumerate(batch.column("payload").to_pylist()) if x == b"odd"]
            return Outcome(len(batch), [Rejected(i, Code.PERMISSION_DENIED, "odd") for i in odd])

    with (
        forwarding(tmp_path, {2: Picky()}) as forwarder,
        OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
    ):
        stream.write_many([b"even", b"odd"] * 10)
        until(lambda: forwarder.statistics().taken == 20)
    books = forwarder.statistics()
    assert books.routes[2].rejected == {Code.PERMISSION_DENIED: 10}
    assert (books.forwarded, books.lost) == (10, 10)


def test_what_a_plug_in_fails_at_is_a_dead_letter_and_the_rest_goes_on(tmp_path: Path) -> None:
    box = Box()
    box.fails = ValueError("never seen such a thing")
    dead = f"log:{tmp_path}/dead"
    with (
        forwarding(tmp_path, {2: box}, dead=open_writer(dead)) as forwarder,
        OutputStream.create(STATUS, owner="x", directory=tmp_path) as stream,
    ):
        stream.write_many([b"1", b"2"])
        until(lambda: forwarder.statistics().rejected == 2)
        box.fails = None
        stream.write(b"3")
        until(lambda: forwarder.statistics().forwarded == 1)
    books = forwarder.statistics()
    assert books.routes[2].rejected == {Code.INTERNAL: 2}
    assert (books.dead, books.lost) == (2, 0)
    assert box.payloads == [b"3"]
    with open_reader(dead) as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert [letter.original.payload for letter in letters] == [b"1", b"2"]
    assert "never seen such a thing" in letters[0].reason


def test_what_is_sent_is_not_sent_again_when_the_network_fails_behind_a_large_one() -> None:
    with listening() as sock, UdpDestination(HOST, port_of(sock)) as destination:
        calls = iter([None, OSError(101, "Network is unreachable")])

        class Failing:
            """The kernel, of which the second call fails."""

            def __init__(self, real: DatagramSocket) -> None:
                self._real = real
                self.close = real.close

            def send_columns(self, *arguments: Any) -> int:
                if (fault := next(calls, None)) is not None:
                    raise fault
                return self._real.send_columns(*arguments)

        destination._socket = Failing(destination._socket)  # type: ignore[assignment]
        batch = _batch(b"1", b"2", b"x" * 65_500, b"4")
        done, rejected = destination.send(batch)
        assert (done, [each.row for each in rejected]) == (3, [2])
        assert destination.send(batch.slice(done)) == (1, [])
        assert [sock.recv(100) for _ in range(3)] == [STATUS + each for each in (b"1", b"2", b"4")]


def test_a_path_of_a_web_server_may_have_any_letters() -> None:
    schemas = example_schemas()
    with smo() as (url, bodies):
        there = url.replace("/telemetry?x=1", "/r\u00e4der und mehr?x=%20\u00e4")
        with HttpDestination(there, schemas) as destination:
            assert destination.send(_batch(UP)).done == 1
    assert len(bodies) == 1
