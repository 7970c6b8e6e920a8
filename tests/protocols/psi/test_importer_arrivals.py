from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.errors import StorageError
from penstock.protocols.psi import PsiMessage, StreamFlags, StreamMetadata, qualify
from penstock.protocols.psi.codecs import make_schema, schema_id
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.importer.arrivals import Arrivals, Gap, Intake
from penstock.protocols.psi.importer.client import REPLAY_ALL, RemoteImporter
from penstock.protocols.psi.metadata import SchemaFlags
from penstock.protocols.psi.store.streams import Store
from support.until import until

TICK = 100


class Failing:
    """A store's writer that finds no space now and then."""

    def __init__(self, writer: Any, at: set[int]) -> None:
        self._writer = writer
        self._at = at
        self._calls = 0

    def write(self, *arguments: Any) -> int:
        self._calls += 1
        if self._calls in self._at:
            raise StorageError("writing", "it", OSError(28, "no space"))
        written: int = self._writer.write(*arguments)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.volatile("here", slots=10_000, size=1 << 20) as made:
        yield made


def fail(store: Store, *at: int) -> None:
    store._writer = Failing(store._writer, set(at))  # type: ignore[assignment]


def message(id: int, sequence: int, size: int = 4, run: int = 0) -> PsiMessage:
    moment = 1_700_000_000_000_000_000 + (run * 1000 + sequence) * TICK
    return PsiMessage(id, sequence, moment, moment, bytes(size))


def test_what_could_not_be_stored_is_asked_for_again(store: Store) -> None:
    fail(store, 1, 150, 500)
    with Store.volatile("there", slots=10_000) as source, RemoteExporter(source, 0) as exporter:
        stream = exporter.exporter.write(None, "Number", "System.Int32")
        for number in range(1000):
            stream.post(number)
        with RemoteImporter("127.0.0.1", exporter.port, REPLAY_ALL, store=store) as importer:
            imported = importer.open_stream("Number")
            found = [imported.read(20) for _ in range(1000)]
            until(lambda: importer.statistics().messages == 1000)
            books = importer.statistics()
            assert isinstance(importer.last_error, StorageError)
        assert [it.value for it in found if it is not None] == list(range(1000))
        assert (books.lost, books.refused, books.gaps, imported.lost) == (0, 0, (), 0)
        imported.close()


def test_after_a_failure_the_books_say_what_is_stored(store: Store) -> None:
    arrivals = Arrivals(from_first=True)
    intake = Intake(store, arrivals, patience=0.0)
    stream = store.add_stream("Number", "System.Int32")
    intake._ids[stream.id] = stream.id, "Number"
    intake.take_messages([message(stream.id, 2)])
    fail(store, 3)
    with pytest.raises(StorageError):
        intake.take_messages([message(stream.id, n) for n in (2, 3, 5, 7, 8)])
    # 1 and 4 did not come; 7 was not stored, so that 6 is not missing yet.
    assert (arrivals.taken, arrivals.lost, arrivals.last_sequence("Number")) == (3, 2, 5)
    assert arrivals.gaps() == (Gap("Number", 1, 1), Gap("Number", 4, 4))
    intake.take_messages([message(stream.id, n) for n in (5, 6, 7, 8)])
    assert (arrivals.taken, arrivals.lost, arrivals.repeated) == (6, 2, 1)


def test_those_that_do_not_fit_are_refused_also_after_the_exporter_counts_anew(
    store: Store,
) -> None:
    arrivals = Arrivals(from_first=True)
    intake = Intake(store, arrivals, patience=0.0)
    stream = store.add_stream("Bytes", "System.Byte[]")
    intake._ids[stream.id] = stream.id, "Bytes"
    intake.take_messages([message(stream.id, n) for n in range(1, 101)])
    anew = [message(stream.id, n, 2 << 20 if n == 2 else 4, run=1) for n in range(1, 5)]
    intake.take_messages(anew)
    assert (arrivals.taken, intake.refused, arrivals.restarts) == (103, 1, 1)
    with store.reader() as reader:
        assert [it.subtype for it in reader.read_many(1000)][100:] == [1, 3, 4]


class Barrier:
    """Holds up whoever appends to a store."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.go_on = threading.Event()

    def wait(self, messages: int, size: int) -> None:
        del messages, size
        self.is_reached.set()
        self.go_on.wait(10)


def test_a_stream_is_not_ended_while_its_last_messages_wait_to_be_stored(store: Store) -> None:
    intake = Intake(store, Arrivals(from_first=True))
    stream = StreamMetadata("S", 7, qualify("int"), StreamFlags.CLOSED, message_count=3)
    intake.take_records([stream])
    barrier = Barrier()
    store.gates.append(barrier)
    messages = [message(7, number) for number in (1, 2, 3)]
    thread = threading.Thread(target=intake.take_messages, args=(messages,))
    thread.start()
    assert barrier.is_reached.wait(10)
    id = store.catalog.stream("S").id
    intake.end_streams(REPLAY_ALL, may_lose=False)
    assert not store.metadata(id).is_closed
    barrier.go_on.set()
    thread.join()
    intake.end_streams(REPLAY_ALL, may_lose=False)
    assert store.metadata(id).is_closed
    assert store.last_sequence(id) == 3


def test_a_stream_with_gaps_in_its_numbers_ends_with_its_last_message(store: Store) -> None:
    """psi counts what it stored, and numbers what was posted, also what a policy dropped."""
    intake = Intake(store, Arrivals(from_first=True))
    last = message(7, 9)
    stream = StreamMetadata(
        "S",
        7,
        qualify("int"),
        StreamFlags.CLOSED,
        message_count=3,
        last_originating_ns=last.originating_ns,
    )
    intake.take_records([stream])
    id = store.catalog.stream("S").id
    intake.take_messages([message(7, 2), message(7, 5)])
    intake.end_streams(REPLAY_ALL, may_lose=False)
    assert not store.metadata(id).is_closed
    intake.take_messages([last])
    intake.end_streams(REPLAY_ALL, may_lose=False)
    assert store.metadata(id).is_closed


THING, OTHER = (
    make_schema(f"App.{name}, App", [("size", "int")], SchemaFlags.CLASS, "ClassSerializer")
    for name in ("Thing", "Other")
)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_message_that_overtakes_the_schema_of_its_type_waits_for_it(
    store: Store, *, is_told: bool
) -> None:
    intake = Intake(store, Arrivals(from_first=True), patience=10.0 if is_told else 0.1)
    intake.take_records([OTHER, StreamMetadata("S", 7, "App.IThing, App")])
    payload = (0xC0000000 | THING.id).to_bytes(4, "little") + (5).to_bytes(4, "little")
    came = message(7, 1)._replace(payload=payload + b"stale")
    thread = threading.Thread(target=intake.take_messages, args=([came],))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    if is_told:
        intake.take_records([THING])
    thread.join()
    (stored,) = store.reader().read_many(2)
    assert stored.payload == (payload if is_told else came.payload)
    # Nobody waits a second time for what nobody told.
    before = time.monotonic()
    intake.take_messages([came._replace(sequence_id=2)])
    assert time.monotonic() - before < 0.09


def test_a_data_contract_and_supplemental_metadata_come_as_the_peer_has_them(store: Store) -> None:
    """psi gives a stream of a data contract the name of that, and looks its schema up by it."""
    own = "App.Point, App, Version=1.0.0.0"
    schema = make_schema(own, [("X", "double")], SchemaFlags.CLASS, "ClassSerializer")
    schema = schema._replace(name="urn:x:Point", id=schema_id("urn:x:Point"))
    stream = StreamMetadata("S", 7, "urn:x:Point", supplemental_type=own, supplemental=b"abc")
    intake = Intake(store, Arrivals(from_first=True))
    intake.take_records([schema, stream])
    ours = store.catalog.stream("S")
    found = ours.type_name, ours.supplemental_type, ours.supplemental
    assert found == ("urn:x:Point", own, b"abc")
    payload = b"\0\0\0\x80" + bytes(8)
    intake.take_messages([PsiMessage(7, 1, 0, 0, payload + b"stale")])
    with store.reader() as reader:
        assert reader.read(0).payload == payload  # type: ignore[union-attr]
    # Another run of the exporter: the same stream, with other supplemental metadata.
    intake.begin()
    intake.take_records([schema, stream._replace(supplemental=b"abcd")])
    assert store.catalog.stream("S").supplemental == b"abcd"
    assert store.catalog.stream("S").message_count == 1
