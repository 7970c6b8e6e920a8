"""Reading over Flight: everything that a reader of the queue itself gets, and is told."""

from __future__ import annotations

import itertools
import secrets
import time
from itertools import count, islice
from pathlib import Path

import pytest
from pyarrow import flight

from penstock import Message, create, describe, open_reader, open_writer
from penstock.core.batch import messages_from_batch
from penstock.core.capabilities import Replayable
from penstock.core.errors import (
    Closed,
    CursorInUse,
    InvalidOption,
    Malformed,
    NotFound,
    PositionError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.stream_id import StreamId
from penstock.protocols.flight.access import Root
from penstock.protocols.flight.reader import FlightReader, read_chunk
from penstock.protocols.flight.server import FlightServer
from penstock.protocols.flight.sources import Holds
from penstock.protocols.flight.wire import Acknowledge, ActionKind, Hold, Mark, Spot, Take, Told
from protocols.flight.serving import served
from support.interruption import Interrupted, interrupted_at_line, take
from support.log_files import segment_files
from support.mosquitto import free_port
from support.waiting import SOON, background, waits

STREAM = StreamId(bytes(range(16)))


def fill(local: str, count: int, **options: object) -> list[Message]:
    """Write messages of all kinds to a queue, and return them as it has them."""
    with open_writer(f"fmq:{local}", **options) as writer:
        for i in range(count):
            stream = STREAM if i % 3 == 0 else None
            attributes = b"attributes %d" % i if i % 2 else None
            writer.write(b"payload %d" % i, i % 4, -i, 10 + i, None, stream, attributes)
    with open_reader(f"fmq:{local}") as reader:
        return list(reader.available())


def test_every_field_arrives(url: str, local: str) -> None:
    there = fill(local, 50)
    with open_reader(url) as reader:
        assert list(reader.available()) == there
        books = reader.statistics()
    assert (books.messages, books.bytes) == (50, sum(m.size for m in there))
    assert (books.lost, books.filtered, books.next_seq, books.backlog) == (0, 0, 50, 0)


def test_the_forms_of_reading_can_be_mixed(url: str, local: str) -> None:
    there = fill(local, 40)
    with open_reader(url, chunk=1024) as reader:
        got = [reader.read(0)]
        got += reader.read_many(5)
        while len(got) < 30:
            got += messages_from_batch(reader.read_batch(7))
        while (message := reader.read(0)) is not None:
            got.append(message)
        assert got == there
        assert reader.read_many(0) == []
        assert reader.read_batch(0).num_rows == reader.read_batch(5).num_rows == 0


def test_what_was_written_a_moment_ago_is_there_without_waiting(url: str, local: str) -> None:
    with open_writer(f"fmq:{local}") as writer, open_reader(url) as reader:
        for i in range(20):
            writer.write(b"%d" % i)
            message = reader.read(0)
            assert message is not None
            assert message.payload == b"%d" % i


def test_a_reader_waits_for_as_long_as_it_is_told(url: str, local: str) -> None:
    with open_writer(f"fmq:{local}") as writer, open_reader(url) as reader:
        began = time.monotonic()
        assert reader.read(0.3) is None
        assert 0.3 <= time.monotonic() - began < SOON
        with background(reader.read) as call:
            assert waits(call)
            writer.write(b"now")
            message = call.result(SOON)
        assert isinstance(message, Message)
        assert message.payload == b"now"


def test_following_yields_what_comes(url: str, local: str) -> None:
    with open_writer(f"fmq:{local}") as writer, open_reader(url, "end") as reader:

        def follow() -> list[bytes]:
            return [message.payload for message in islice(reader, 100)]

        with background(follow) as call:
            for i in range(100):
                writer.write(b"%d" % i)
                time.sleep(0.001)
            assert call.result(SOON) == [b"%d" % i for i in range(100)]


@pytest.mark.parametrize(
    ("start", "first"), [("start", 0), ("end", None), ("last", 29), (7, 7), ("time", 12)]
)
def test_a_reader_starts_and_seeks_where_it_is_told(
    url: str, local: str, start: str | int, first: int | None
) -> None:
    if not Path(f"{local}.fmq").exists():
        for _ in range(30):
            with open_writer(f"fmq:{local}") as writer:
                writer.write(b"x")
    with open_reader(f"fmq:{local}") as reader:
        there = list(reader.available())
    from penstock import Position

    place = Position.time(there[12].created_ns) if start == "time" else Position.of(start)
    with open_reader(url, place) as reader:
        message = reader.read(0)
        assert (None if message is None else message.seq) == first
        reader.seek(3)
        assert [m.seq for m in reader.read_many(2)] == [3, 4]
        reader.seek(place)
        message = reader.read(0)
        assert (None if message is None else message.seq) == first


def test_the_server_filters_by_type_and_says_how_many(url: str, local: str) -> None:
    there = fill(local, 100)
    with open_reader(url, type=2) as reader:
        assert list(reader.available()) == [m for m in there if m.type == 2]
        assert reader.read(0) is None
        books = reader.statistics()
    assert (books.messages, books.filtered, books.lost, books.next_seq) == (25, 75, 0, 100)


def test_bounds_and_the_newest_number_are_those_of_the_queue(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=16&size=4k")
    with open_reader(url) as reader, open_reader(f"fmq:{local}") as own:
        assert reader.newest_seq() is None
        assert reader.bounds() == own.bounds()
        fill(local, 40)
        assert reader.newest_seq() == 39
        assert reader.bounds() == own.bounds()


def test_overrun_is_told_to_the_message(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=16&size=64k")
    fill(local, 10)
    with open_reader(url) as reader:
        assert [m.seq for m in reader.read_many(4)] == [0, 1, 2, 3]
        reader.seek(4)  # leaves nothing here that was copied before
        fill(local, 30)
        message = reader.read(0)
        assert message is not None
        books = reader.statistics()
        assert [(loss.first, loss.last, loss.reason) for loss in books.losses] == [
            (4, message.seq - 1, DropReason.OVERRUN)
        ]
        rest = list(reader.available())
        books = reader.statistics()
    assert books.messages == 4 + 1 + len(rest)
    assert books.messages + books.lost == 40


def test_a_lossy_ring_keeps_exact_books_while_it_is_overrun(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=64&size=16k")
    seen: list[int] = []
    with open_writer(f"fmq:{local}") as writer, open_reader(url, chunk=1024) as reader:
        for turn in range(40):
            writer.write_many([b"x" * 40] * (turn * 7))
            seen += [m.seq for m in reader.read_many(13)]
        total = sum(turn * 7 for turn in range(40))
        seen += [m.seq for m in reader.available()]
        books = reader.statistics()
    assert books.lost > 0
    assert books.messages == len(seen) == len(set(seen))
    assert seen == sorted(seen)
    missing = set(range(total)) - set(seen)
    told = {seq for loss in books.losses for seq in range(loss.first, loss.last + 1)}
    assert told == missing
    assert books.lost == len(missing)


def test_what_retention_removed_is_told(server: FlightServer, url: str, local: str) -> None:
    log_url = f"log:{local}?segment=4k&segment_slots=16"
    with open_writer(log_url) as writer:
        writer.write_many([b"x" * 100] * 20)
    with open_reader(url) as reader:
        assert len(reader.read_many(3)) == 3
        reader.seek(3)
        with open_writer(log_url, retain="16k") as writer:
            writer.write_many([b"x" * 100] * 200)
        rest = list(reader.available())
        books = reader.statistics()
    assert books.lost > 0
    assert {loss.reason for loss in books.losses} == {DropReason.RETENTION}
    assert 3 + len(rest) + books.lost == 220
    assert server.statistics().lost >= books.lost


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_stream_that_was_created_anew_is_noticed(
    server: FlightServer, root: Path, kind: str
) -> None:
    local, url = f"{kind}:{root}/anew-{kind}", f"{server.url}anew-{kind}"
    with open_writer(local) as writer:
        writer.write_many([b"old"] * 5)
    with open_reader(url) as reader:
        assert len(reader.read_many(3)) == 3
        reader.seek(3)
        create(local, replace=True)
        with open_writer(local) as writer:
            writer.write_many([b"new"] * 4)
        payloads: list[bytes] = []
        while (message := reader.read(1)) is not None and len(payloads) < 10:
            payloads.append(message.payload)
        books = reader.statistics()
    assert [p for p in payloads if p == b"new"] == [b"new"] * 4
    assert books.restarts == 1


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt(), Malformed("batch", "its bytes", "Arrow IPC", "others")]
)
def test_what_an_interrupted_read_received_comes_with_the_next_one(
    url: str, local: str, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    url, local = f"{url}-{type(fault).__name__}", f"{local}-{type(fault).__name__}"
    with open_writer(f"log:{local}") as writer:
        writer.write_many([b"%d" % i for i in range(2000)])
    numbers = count(1)

    def interrupted(chunk: object) -> tuple[object, Told]:
        if next(numbers) == 5:
            raise fault
        return read_chunk(chunk)

    seen: list[int] = []
    with open_reader(url, chunk=4096, hold="archive") as reader:
        monkeypatch.setattr("penstock.protocols.flight.reader.read_chunk", interrupted)
        with pytest.raises(type(fault)):
            reader.read_many(100)  # it comes within the first run, which has more chunks
        while messages := reader.read_many(100):
            seen += [m.seq for m in messages]
        assert reader.statistics().lost == 0
    assert seen == list(range(2000))


@pytest.mark.parametrize("by", ["one", "many", "batch", "available"])
def test_a_read_that_is_interrupted_at_any_line_takes_nothing(
    url: str, local: str, by: str
) -> None:
    url, local = f"{url}-{by}", f"{local}-{by}"
    with open_writer(f"fmq:{local}") as writer:
        writer.write_many([b"%d" % i for i in range(30)])
    with open_reader(url) as reader:
        for line in itertools.count(1, 5):
            reader.seek("start")
            before = reader.statistics()
            found: list[int] = []
            where = ""
            try:
                with interrupted_at_line(line, "penstock/protocols/flight"):
                    take(reader, by, found)
            except Interrupted as place:
                where = f"at {place}"
                take(reader, "many", found)
            after = reader.statistics()
            assert found == list(range(30)), where
            assert (after.messages - before.messages, after.lost) == (30, 0), where
            if not where:
                return


def test_what_is_interrupted_at_any_line_while_it_is_received_counts_once(
    url: str, local: str
) -> None:
    ring = "layout=wide&slots=64&size=64k"
    receive = FlightReader._receive
    create(f"fmq:{local}?{ring}")
    with open_reader(f"{url}?type=1") as reader:
        for line in itertools.count(1):
            before = reader.statistics()
            create(f"fmq:{local}?{ring}", replace=True)
            with open_writer(f"fmq:{local}") as writer:
                for number in range(100):
                    writer.write(b"x", number % 2)
            where = ""

            def interrupted(reader: FlightReader, at: int = line) -> bool:
                with interrupted_at_line(at, "penstock/protocols/flight"):
                    return receive(reader)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FlightReader, "_receive", interrupted)
                found: list[int] = []
                try:
                    found += [message.seq for message in reader.read_many(100)]
                except Interrupted as place:
                    where = f"at {place}"
            take(reader, "many", found)
            books = reader.statistics()
            assert books.restarts - before.restarts == 1, where
            assert books.lost - before.lost == found[0] // 2 * 2, where
            assert books.filtered - before.filtered == len(found), where
            assert found == list(range(found[0], 100, 2)), where
            if not where:
                return


def test_a_seek_that_is_interrupted_at_any_line_passes_over_nothing(url: str, local: str) -> None:
    with open_writer(f"fmq:{local}") as writer:
        writer.write_many([b"%d" % i for i in range(30)])
    with open_reader(url) as reader:
        for line in itertools.count(1, 3):
            reader.seek("start")
            assert [message.seq for message in reader.read_many(10)] == list(range(10))
            where = ""
            try:
                with interrupted_at_line(line, "penstock/protocols/flight"):
                    reader.seek(5)
            except Interrupted as place:
                where = f"at {place}"
            found: list[int] = []
            take(reader, "many", found)
            assert found in ([*range(5, 30)], [*range(10, 30)]), where
            if not where:
                assert found[0] == 5
                return


@pytest.mark.parametrize("scheme", ["fmq", "log"])
def test_a_group_is_refused_and_the_server_goes_on(url: str, local: str, scheme: str) -> None:
    with open_writer(f"{scheme}:{local}") as writer:
        writer.write(b"x")
    with pytest.raises(Unsupported, match="not shared") as caught:
        open_reader(url, group="g")
    assert "hold=" in (caught.value.hint or "")
    with open_reader(url) as reader:
        assert [message.payload for message in reader.available()] == [b"x"]


STREAMS = {
    "wide": ("fmq", "layout=wide&slots=64&size=64k"),
    "log": ("log", "segment=4k&segment_slots=16&retain=8k"),
}


@pytest.mark.parametrize("name", ["wide", "log"])
def test_what_a_stream_that_was_created_anew_has_lost_already_is_counted(
    server: FlightServer, root: Path, name: str
) -> None:
    kind, options = STREAMS[name]
    local, url = f"{kind}:{root}/lossy-{name}", f"{server.url}lossy-{name}"
    with open_writer(f"{local}?{options}") as writer:
        writer.write_many([b"old"] * 10)
    with open_reader(url) as reader:
        assert len(list(reader.available())) == 10
        create(f"{local}?{options}", replace=True)
        with open_writer(f"{local}?{options}") as writer:
            for _ in range(20):
                writer.write_many([b"new"] * 20)
        seen: list[int] = []
        while not seen or seen[-1] < 399:
            seen += [m.seq for m in reader.read_many(100, SOON)]
        books = reader.statistics()
    assert seen == list(range(seen[0], 400))
    assert seen[0] > 0
    assert (books.lost, books.restarts) == (seen[0], 1)
    assert [(loss.first, loss.last) for loss in books.losses] == [(0, seen[0] - 1)]


@pytest.mark.parametrize("looks", [False, True])
def test_a_classic_queue_that_was_created_anew_and_is_shorter_is_read(
    url: str, local: str, looks: bool
) -> None:
    classic = f"fmq:{local}?layout=classic&slots=64&size=64k"
    with open_writer(classic, create="always") as writer:
        writer.write_many([b"old"] * 20)
    with open_reader(url) as reader:
        assert len(reader.read_many(15)) == 15
        assert len(reader.read_many(5)) == 5
        create(classic, replace=True)
        with open_writer(classic) as writer:
            writer.write_many([b"new"] * 5)
        if looks:
            assert reader.newest_seq() == 4
        assert [(m.seq, m.payload) for m in reader.read_many(9)] == [(n, b"new") for n in range(5)]
        books = reader.statistics()
    assert (books.messages, books.lost, books.restarts) == (25, 0, 1)


@pytest.mark.parametrize("name", ["wide", "log"])
def test_a_stream_that_was_created_anew_and_is_shorter_is_read_by_a_server_that_met_it_only_now(
    tmp_path: Path, name: str
) -> None:
    kind, options = STREAMS[name]
    local = f"{kind}:{tmp_path}/a"
    port = free_port()
    with open_writer(f"{local}?{options}") as writer:
        writer.write_many([b"old"] * 50)
    with served(tmp_path, port=port) as server:
        reader = open_reader(f"{server.url}a")
        assert [m.seq for m in reader.available()][-1] == 49
    create(f"{local}?{options}", replace=True)
    with open_writer(local) as writer:
        writer.write_many([b"new"] * 5)
    with served(tmp_path, port=port), reader:
        assert [m.payload for m in reader.read_many(50, SOON)] == [b"new"] * 5
        assert reader.statistics().restarts == 1


@pytest.mark.parametrize(
    ("damaged", "start", "first"), [(0, 50, 50), (0, "end", 100), (-1, "start", 0), (-1, 50, 50)]
)
def test_a_damaged_segment_is_met_only_by_who_reads_it(
    tmp_path: Path, damaged: int, start: int | str, first: int
) -> None:
    port = free_port()
    with open_writer(f"log:{tmp_path}/a?segment=4k&segment_slots=16") as writer:
        for _ in range(10):
            writer.write_many([b"x"] * 10)
    with served(tmp_path, port=port) as server:
        reader = open_reader(f"{server.url}a", start)
        seen = [m.seq for m in reader.read_many(2)]
    file = segment_files(tmp_path / "a")[damaged]
    file.write_bytes(bytes(256) + file.read_bytes()[256:])
    with served(tmp_path, port=port) as server, reader:
        seen += [m.seq for m in reader.read_many(2)]
        with open_reader(f"{server.url}a", start) as later:
            assert [m.seq for m in later.read_many(4)] == seen
    assert seen == list(range(100))[first : first + 4]


def test_small_chunks_and_large_messages_pass(url: str, local: str) -> None:
    sizes = [0, 10, 5_000_000, 3, 2_000_000, 1, 100_000] * 2
    with open_writer(f"fmq:{local}?size=64M") as writer:
        for i, size in enumerate(sizes):
            writer.write(bytes([i]) * size)
    with open_reader(url, chunk=1024) as reader:
        assert [m.payload for m in reader.available()] == [
            bytes([i]) * s for i, s in enumerate(sizes)
        ]


def test_a_stream_that_is_not_there_is_not_found(url: str) -> None:
    with pytest.raises(NotFound, match="no stream tests/"):
        open_reader(url)
    with pytest.raises(NotFound):
        describe(url)


def test_a_reader_can_wait_for_its_stream(url: str, local: str) -> None:
    with background(lambda: open_reader(url, wait="10s")) as call:
        assert waits(call)
        create(f"fmq:{local}")
        reader = call.result(SOON)
    assert isinstance(reader, FlightReader)
    reader.close()


def test_an_unknown_option_is_named_by_the_server(url: str, local: str) -> None:
    create(f"fmq:{local}")
    with pytest.raises(InvalidOption) as caught:
        open_reader(url, tpye=5)
    assert caught.value.option == "tpye"
    assert "type" in str(caught.value.hint)


def test_a_closed_reader_says_so(url: str, local: str) -> None:
    fill(local, 3)
    reader = open_reader(url)
    reader.close()
    reader.close()
    with pytest.raises(Closed):
        reader.read(0)
    assert reader.statistics().messages == 0


def test_a_classic_queue_is_read_too(url: str, local: str) -> None:
    with open_writer(f"fmq:{local}?layout=classic&slots=20&size=8k") as writer:
        writer.write_many([b"%d" % i for i in range(10)], type=3)
    with open_reader(f"fmq:{local}") as reader:
        there = list(reader.available())
    with open_reader(url) as reader:
        assert list(reader.available()) == there


# --- named readers --------------------------------------------------------------------------------


def test_the_writer_waits_for_a_held_reader(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=8&size=4k")
    with (
        open_writer(f"fmq:{local}?hold=archive&timeout=200ms") as writer,
        open_reader(url, hold="archive") as reader,
    ):
        writer.write_many([b"x"] * 8)
        with pytest.raises(WriteTimeout, match="archive"):
            writer.write(b"one too many")
        assert len(reader.read_many(4)) == 4
        with pytest.raises(WriteTimeout):  # they are with the caller, who is not done
            writer.write(b"one too many")
        assert reader.read(0) is not None
        time.sleep(0.1)
        assert reader.read(0) is not None
        writer.write_many([b"y"] * 4)
        got = [m.payload for m in reader.read_many(100)]
        got += [m.payload for m in reader.read_many(100)]
        assert got == [b"x"] * 2 + [b"y"] * 4
        assert reader.statistics().lost == 0


def test_acknowledge_gives_back_at_once(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=8&size=4k")
    with (
        open_writer(f"fmq:{local}?hold=archive&timeout=5s") as writer,
        open_reader(url, hold="archive") as reader,
    ):
        writer.write_many([b"x"] * 8)
        assert isinstance(reader, FlightReader)
        reader.read_many(8)
        reader.acknowledge()
        writer.write_many([b"y"] * 8)


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_named_reader_goes_on_where_it_was(server: FlightServer, root: Path, kind: str) -> None:
    local, url = f"{kind}:{root}/named-{kind}", f"{server.url}named-{kind}"
    with open_writer(local) as writer:
        writer.write_many([b"%d" % i for i in range(20)])
    with open_reader(url, hold="archive") as reader:
        assert [m.seq for m in reader.read_many(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError), open_reader(url, hold="archive") as reader:  # noqa: PT012
        assert [m.seq for m in reader.read_many(3)] == [5, 6, 7]
        _ = 1 / 0  # what it was working on comes again
    with open_reader(url, hold="archive") as reader:
        assert [m.seq for m in reader.read_many(2)] == [5, 6]
        reader.seek(15)
    with open_reader(url, cursor="archive") as reader:
        assert [m.seq for m in reader.read_many(2)] == [15, 16]


def test_the_late_end_of_a_reader_releases_no_name_of_the_next_one(tmp_path: Path) -> None:
    create(f"log:{tmp_path}/a")
    place = Root(tmp_path).place("a", None)
    holds = Holds()

    def take(reader: str) -> int:
        asked = Hold(stream="a", reader=reader, name="archive", at=Spot.of(Position.START))
        return holds.take(place, asked)[0]

    one, two = secrets.token_hex(16), secrets.token_hex(16)
    first = take(one)
    holds.forget(one)
    second = take(two)
    holds.release(place, "archive", first)  # by the thread that served it
    assert holds.is_current(place, "archive", second)
    holds.close()


def test_a_name_that_a_client_failed_to_take_is_free(tmp_path: Path) -> None:
    """It says that it is done with messages that there are not."""
    with open_writer(f"log:{tmp_path}/a") as writer:
        writer.write(b"0")
    with open_reader(f"log:{tmp_path}/a") as reader:
        assert isinstance(reader, Replayable)
        done = Mark(epoch=reader.bounds().epoch, seq=1000)
    who, start = secrets.token_hex(16), Spot.of(Position.START)
    ticket = Hold(stream="a", reader=who, name="archive", at=start, done=done)
    with (
        served(tmp_path) as server,
        flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        with pytest.raises(flight.FlightError, match="has no message 1000"):
            client.do_get(flight.Ticket(ticket.to_bytes())).read_chunk()
        with open_reader(f"{server.url}a", hold="archive") as reader:
            message = reader.read(SOON)
    assert message is not None
    assert message.payload == b"0"


def test_a_name_is_for_one_client_at_a_time(url: str, local: str) -> None:
    fill(local, 3)
    with open_reader(url, hold="archive"):
        with pytest.raises(CursorInUse) as caught:
            open_reader(url, hold="archive")
        assert caught.value.name == "archive"
    open_reader(url, hold="archive").close()


def test_a_named_reader_is_told_what_it_lost_while_it_was_away(url: str, local: str) -> None:
    create(f"fmq:{local}?slots=16&size=64k")
    fill(local, 4)
    with open_reader(url, hold="archive") as reader:
        assert len(reader.read_many(2)) == 2
    fill(local, 30)
    with open_reader(url, hold="archive") as reader:
        rest = list(reader.available())
        books = reader.statistics()
    assert [(loss.first, loss.last) for loss in books.losses] == [(2, rest[0].seq - 1)]
    assert rest[-1].seq == 33


def test_a_hold_that_was_idle_too_long_is_taken_again(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/a?slots=8&size=4k")
    with (
        served(tmp_path, idle=1.5) as server,
        open_writer(f"fmq:{tmp_path}/a") as writer,
        open_reader(f"{server.url}a", hold="archive") as reader,
    ):
        writer.write_many([b"x"] * 4)
        assert len(reader.read_many(2)) == 2
        deadline = time.monotonic() + SOON
        while server.statistics().holds:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        writer.write_many([b"y"] * 4)
        assert len(list(reader.available())) == 6
        assert server.statistics().holds == 1


# --- numbers that are not there -------------------------------------------------------------------

BEYOND = 2**63 - 2


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_number_beyond_the_end_is_refused_and_the_reader_stays_where_it_was(
    url: str, local: str, kind: str
) -> None:
    url, local = f"{url}-{kind}", f"{local}-{kind}"
    with open_writer(f"{kind}:{local}") as writer, open_reader(url) as reader:
        writer.write_many([b"%d" % i for i in range(10)])
        assert len(reader.read_many(4, 5)) == 4
        with pytest.raises(PositionError, match="the next is 10") as caught:
            reader.seek(BEYOND)
        error = caught.value
        assert (error.seq, error.oldest, error.end) == (BEYOND, 0, 10)
        with pytest.raises(PositionError):
            open_reader(url, start=11)
        writer.write(b"10")
        assert [reader.read(SOON).seq for _ in range(7)] == list(range(4, 11))  # type: ignore[union-attr]
        reader.seek(11)  # the next one to come
        writer.write(b"11")
        message = reader.read(SOON)
    assert message is not None
    assert message.seq == 11


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_named_place_cannot_be_put_beyond_the_end(url: str, local: str, kind: str) -> None:
    url, local = f"{url}-{kind}", f"{local}-{kind}"
    with open_writer(f"{kind}:{local}") as writer:
        writer.write_many([b"%d" % i for i in range(10)])
        with open_reader(url, hold="archive") as reader:
            assert len(reader.read_many(4)) == 4
            with pytest.raises(PositionError):
                reader.seek(BEYOND)
        writer.write(b"10")
    with open_reader(url, hold="archive") as reader:
        assert [message.seq for message in reader.available()] == list(range(4, 11))


def test_what_a_client_says_it_has_done_with_is_checked_on_the_server(
    url: str, local: str, name: str
) -> None:
    there = fill(local, 10)
    with open_reader(url, hold="archive") as reader:
        assert isinstance(reader, FlightReader)
        epoch = reader.bounds().epoch
        beyond = Mark(epoch=epoch, seq=BEYOND)
        ask = reader._connection.ask
        with pytest.raises(PositionError, match="the next is 10"):
            ask(
                ActionKind.ACKNOWLEDGE,
                Acknowledge(stream=name, reader=reader._id, name="archive", done=beyond),
            )
        ticket = Take(stream=name, reader=secrets.token_hex(16), at=beyond)
        with pytest.raises(flight.FlightError) as caught:
            reader._get(ticket).read_chunk()
        assert isinstance(reader._connection.understood(caught.value), PositionError)
        assert list(reader.available()) == there
