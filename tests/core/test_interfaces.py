"""Readers and writers: what all of them can do, and how they are closed."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest

from penstock.core.batch import BATCH_SCHEMA, batch_from_messages
from penstock.core.errors import Closed, Malformed
from penstock.core.interfaces import (
    Ancestor,
    Bounds,
    BytesLike,
    Closable,
    Concluding,
    Reader,
    Writer,
)
from penstock.core.message import Message
from penstock.core.position import Position, PositionLike
from penstock.core.statistics import ReaderStatistics, WriterStatistics
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM = StreamId.generate(0, 0, "app", "stream")


class MemoryWriter(Writer):
    """Only what the interface asks for."""

    def __init__(self, stored: list[Message]) -> None:
        super().__init__("memory:")
        self.stored = stored
        self.is_closed = False

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        seq = len(self.stored)
        now = time.time_ns()
        self.stored.append(
            Message(
                seq,
                now if time_ns is None else time_ns,
                now if created_ns is None else created_ns,
                type,
                subtype,
                stream,
                attributes,
                bytes(payload),
            )
        )
        return seq

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(len(self.stored), 0, 0, 0, 0.0, len(self.stored) - 1)

    def close(self) -> None:
        self.is_closed = True


class MemoryReader(Reader):
    """Only what the interface asks for."""

    def __init__(self, stored: list[Message]) -> None:
        super().__init__("memory:")
        self.stored = stored
        self.next = 0
        self.is_closed = False

    def _take(self, limit: int) -> list[Message]:
        if self.is_closed:
            raise Closed("memory: was closed")
        messages = self.stored[self.next : self.next + limit]
        self.next += len(messages)
        return messages

    def seek(self, position: PositionLike) -> None:
        self.next = Position.of(position).value

    def statistics(self) -> ReaderStatistics:
        backlog = len(self.stored) - self.next
        return ReaderStatistics(self.next, 0, 0, 0, 0, self.next, backlog, ())

    def close(self) -> None:
        self.is_closed = True


class KnowingReader(MemoryReader):
    """Knows the newest message, too."""

    def newest_seq(self) -> int | None:
        return len(self.stored) - 1 if self.stored else None


@pytest.fixture
def stored() -> list[Message]:
    return []


@pytest.fixture
def writer(stored: list[Message]) -> MemoryWriter:
    return MemoryWriter(stored)


@pytest.fixture(params=[MemoryReader, KnowingReader])
def reader(request: pytest.FixtureRequest, stored: list[Message]) -> MemoryReader:
    kind: type[MemoryReader] = request.param
    return kind(stored)


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.payload for message in messages]


# --- reading and waiting --------------------------------------------------------------------


def test_a_read_returns_what_is_there_whatever_the_timeout(
    writer: MemoryWriter, reader: MemoryReader
) -> None:
    writer.write_many([b"0", b"1", b"2"])
    for number, timeout in enumerate((None, 0, 10.0)):
        message = reader.read(timeout)
        assert message is not None
        assert message.payload == b"%d" % number


def test_a_timeout_of_zero_does_not_wait(reader: MemoryReader) -> None:
    reader.read_batch(1)  # the first batch of a process loads what Arrow needs
    began = time.monotonic()
    assert reader.read(0) is None
    assert reader.read(-1) is None
    assert reader.read_many(10) == []
    assert reader.read_batch(10).num_rows == 0
    assert time.monotonic() - began < 0.1


def test_a_read_waits_for_the_time_given_and_then_returns_none(reader: MemoryReader) -> None:
    began = time.monotonic()
    assert reader.read(0.1) is None
    assert 0.1 <= time.monotonic() - began < 1


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_waiting_read_ends_with_the_message(
    writer: MemoryWriter, reader: MemoryReader, timeout: float | None
) -> None:
    later = threading.Timer(0.05, writer.write, [b"late"])
    later.start()
    message = reader.read(timeout)
    later.join()
    assert message is not None
    assert message.payload == b"late"


def test_reading_many_waits_for_the_first_one_only(
    writer: MemoryWriter, reader: MemoryReader
) -> None:
    later = threading.Timer(0.05, writer.write, [b"late"])
    later.start()
    assert payloads(reader.read_many(10, timeout=30)) == [b"late"]
    later.join()


@pytest.mark.parametrize("n", [0, -1])
def test_whoever_asks_for_no_message_neither_waits_nor_gets_one(
    writer: MemoryWriter, reader: MemoryReader, n: int
) -> None:
    assert reader.read_many(n, timeout=None) == []
    writer.write(b"stays")
    assert reader.read_many(n, timeout=None) == []
    assert reader.read_batch(n, timeout=None).num_rows == 0
    assert payloads(reader.read_many(5)) == [b"stays"]


def test_reading_many_returns_no_more_than_asked_for(
    writer: MemoryWriter, reader: MemoryReader
) -> None:
    writer.write_many([b"0", b"1", b"2"])
    assert payloads(reader.read_many(2)) == [b"0", b"1"]
    assert payloads(reader.read_many(2)) == [b"2"]


def test_a_batch_has_the_one_schema_whether_full_or_empty(
    writer: MemoryWriter, reader: MemoryReader
) -> None:
    assert reader.read_batch(5).schema.equals(BATCH_SCHEMA)
    writer.write(b"payload", 1, 2, time_ns=3, created_ns=4, stream=STREAM, attributes=b"header")
    batch = reader.read_batch(5)
    assert batch.schema.equals(BATCH_SCHEMA)
    assert batch.to_pylist() == [
        {
            "seq": 0,
            "time_ns": 3,
            "created_ns": 4,
            "type": 1,
            "subtype": 2,
            "stream": bytes(STREAM),
            "attributes": b"header",
            "payload": b"payload",
        }
    ]


# --- available and iteration ----------------------------------------------------------------


def test_available_yields_what_is_there_and_ends(
    writer: MemoryWriter, reader: MemoryReader
) -> None:
    assert list(reader.available()) == []
    writer.write_many([b"%d" % i for i in range(1000)])
    assert payloads(list(reader.available())) == [b"%d" % i for i in range(1000)]
    assert list(reader.available()) == []


def test_available_ends_although_a_writer_goes_on(
    writer: MemoryWriter, reader: MemoryReader
) -> None:
    writer.write_many([b"before"] * 10)
    yielded = 0
    for _ in reader.available():
        yielded += 1
        assert yielded < 100
        time.sleep(0.001)  # so that the clock moves on between two messages
        writer.write_many([b"meanwhile"] * 3)
    assert yielded >= 10


def test_available_ends_in_an_empty_stream_although_a_writer_begins_just_then(
    writer: MemoryWriter,
) -> None:
    class UnluckyReader(KnowingReader):
        def newest_seq(self) -> int | None:
            newest = super().newest_seq()
            time.sleep(0.001)
            writer.write(b"just then")
            return newest

    for yielded, _ in enumerate(UnluckyReader(writer.stored).available()):
        assert yielded < 100
        writer.write_many([b"meanwhile"] * 3)


def test_breaking_off_loses_nothing(writer: MemoryWriter, reader: MemoryReader) -> None:
    writer.write_many([b"%d" % i for i in range(10)])
    for iterator in (reader.available(), iter(reader)):
        for message in iterator:
            if message.seq % 3 == 2:
                break
    assert payloads(reader.read_many(1)) == [b"6"]


def test_iterating_follows_for_ever(writer: MemoryWriter, reader: MemoryReader) -> None:
    def write_slowly() -> None:
        for number in range(5):
            time.sleep(0.01)
            writer.write(b"%d" % number)

    background = threading.Thread(target=write_slowly)
    background.start()
    found = payloads(list(itertools.islice(reader, 5)))
    background.join()
    assert found == [b"0", b"1", b"2", b"3", b"4"]


# --- endpoints as a whole -------------------------------------------------------------------


def test_a_context_manager_closes_also_after_an_error(
    writer: MemoryWriter, reader: MemoryReader
) -> None:
    for endpoint in (writer, reader):
        with contextlib.suppress(KeyError), endpoint as same:
            assert same is endpoint
            raise KeyError
        assert endpoint.is_closed


def test_a_closed_reader_says_so_in_every_form(reader: MemoryReader) -> None:
    reader.close()
    for read in (
        reader.read,
        lambda: reader.read_many(1),
        lambda: reader.read_batch(1),
        lambda: list(reader.available()),
        lambda: next(iter(reader)),
    ):
        with pytest.raises(Closed):
            read()


def test_an_endpoint_shows_its_url(writer: MemoryWriter, reader: MemoryReader) -> None:
    assert repr(writer) == "<MemoryWriter memory:>"
    assert "memory:" in repr(reader)


# --- writing --------------------------------------------------------------------------------


def test_writing_many_takes_any_iterable_and_returns_the_last_number(writer: MemoryWriter) -> None:
    def generated() -> Iterator[bytes]:
        yield b"a"
        yield b"b"

    assert writer.write_many([]) is None
    assert writer.write_many(generated(), type=7, subtype=8) == 1
    assert [(m.payload, m.type, m.subtype) for m in writer.stored] == [(b"a", 7, 8), (b"b", 7, 8)]


def test_writing_a_batch_keeps_everything_but_the_numbers_of_its_old_place(
    writer: MemoryWriter,
) -> None:
    original = Message(77, 10, 20, -1, 2, STREAM, b"header", b"payload")
    assert writer.write_batch(batch_from_messages([])) is None
    assert writer.write_batch(batch_from_messages([original, original])) == 1
    for seq, message in enumerate(writer.stored):
        assert message.created_ns > 20
        assert message == original._replace(seq=seq, created_ns=message.created_ns)


def test_writing_a_batch_of_another_schema_is_refused_before_anything_is_written(
    writer: MemoryWriter,
) -> None:
    batch = batch_from_messages([Message(0, 0, 0, 0, 0, None, None, b"x")])
    for wrong in (batch.drop_columns(["payload"]), batch.slice(0, 0).drop_columns(["seq"])):
        with pytest.raises(Malformed):
            writer.write_batch(wrong)
    assert writer.stored == []


def test_flushing_is_nothing_to_do_where_nothing_is_held_back(writer: MemoryWriter) -> None:
    writer.flush()
    assert writer.stored == []


def test_a_position_of_an_earlier_epoch_goes_on_at_the_cut_or_where_it_was() -> None:
    bounds = Bounds(9, 10, 300, (Ancestor(5, 100), Ancestor(7, 120)))
    assert bounds.successor(9, 250) == 250
    assert bounds.successor(7, 119) == 119
    assert bounds.successor(7, 200) == 120
    assert bounds.successor(5, 150) == 100
    assert bounds.successor(5, 80) == 80
    assert Bounds(9, 0, 300, (Ancestor(5, 100), Ancestor(7, 60))).successor(5, 90) == 60


def test_a_position_of_a_stream_that_was_created_anew_has_no_successor() -> None:
    assert Bounds(9, 0, 300).successor(5, 150) is None
    assert Bounds(9, 0, 300, (Ancestor(5, 100),)).successor(4, 150) is None


# --- closing ------------------------------------------------------------------------------------


class _Tap(Closable):
    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_with_hands_out_the_thing_itself_and_closes_it_at_its_end() -> None:
    tap = _Tap()
    with tap as entered:
        assert entered is tap
        assert tap.closed == 0
    assert tap.closed == 1


def test_a_failure_inside_a_with_closes_it_and_is_not_hidden() -> None:
    tap = _Tap()
    with pytest.raises(ValueError, match="inside"), tap:
        raise ValueError("inside")
    assert tap.closed == 1


def test_what_cannot_be_closed_cannot_be_made() -> None:
    class Leak(Closable):
        pass

    with pytest.raises(TypeError, match="close"):
        Leak()  # type: ignore[abstract]


def test_a_thing_with_slots_stays_without_a_dictionary() -> None:
    assert not hasattr(_Tap(), "__dict__")


class _Worker(Concluding):
    def __init__(self) -> None:
        self.said: list[bool] = []

    def _close(self, *, finished: bool) -> None:
        self.said.append(finished)


def test_work_is_done_when_it_is_closed_or_a_with_ends_well() -> None:
    worker = _Worker()
    with worker as entered:
        assert entered is worker
    worker.close()
    assert worker.said == [True, True]


def test_work_is_not_done_when_a_with_fails() -> None:
    worker = _Worker()
    with pytest.raises(KeyboardInterrupt), worker:
        raise KeyboardInterrupt
    assert worker.said == [False]
