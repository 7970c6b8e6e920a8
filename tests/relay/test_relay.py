"""A relay in this process: what it copies, what it leaves out, and its books."""

from __future__ import annotations

import errno
import json
import struct
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock import create, open_reader, open_writer
from penstock.core.batch import Batch
from penstock.core.capabilities import Grouped
from penstock.core.errors import (
    Closed,
    ConfigError,
    ConnectionLost,
    CursorInUse,
    DamagedQueue,
    InvalidOption,
    MessageTooLarge,
    PositionError,
    StorageError,
    Unacknowledged,
    Unsupported,
)
from penstock.core.interfaces import BytesLike, Reader, Writer
from penstock.core.message import Message
from penstock.core.overflow import DropReason
from penstock.core.position import PositionLike
from penstock.core.statistics import ReaderStatistics, WriterStatistics
from penstock.core.stream_id import StreamId
from penstock.core.units import format_time
from penstock.protocols.flight import FlightServer, ServerOptions
from penstock.queue.wide.file import QueueFile, mark
from penstock.queue.wide.layout import State
from penstock.relay import Relay, RelayOptions, RelayStatistics, relay_options
from penstock.relay.config import load_relays
from penstock.relay.journal import Journal, Note
from relay.background import Background
from support.mosquitto import free_port
from support.until import until


@pytest.fixture
def source(tmp_path: Path) -> str:
    return f"log:{tmp_path}/source"


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"log:{tmp_path}/target"


def fill(url: str, count: int, first: int = 0) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"message %d" % i for i in range(first, first + count)], type=3)


def payloads(url: str) -> list[bytes]:
    with open_reader(url) as reader:
        return [message.payload for message in reader.available()]


def numbers(url: str) -> list[int]:
    return [int(payload.split()[1]) for payload in payloads(url)]


def adds_up(books: RelayStatistics) -> bool:
    return books.read == books.copied + sum(books.dropped.values()) + books.held


def relay(
    source: str,
    target: str,
    *,
    writer: Writer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[RelayStatistics], None] | None = None,
    **given: object,
) -> RelayStatistics:
    options = relay_options(**{"source": source, "target": target, "follow": False, **given})
    with open_reader(source, options.start) as reader, writer or open_writer(target) as to:
        books = Relay(reader, to, options, should_stop=should_stop, on_progress=on_progress).run()
    assert adds_up(books)
    return books


class Slow(Writer):
    """A target that takes its time, and remembers what it got."""

    def __init__(self, seconds: float = 0.0, largest: int = 1 << 30) -> None:
        super().__init__("slow:")
        self.got: list[bytes] = []
        self.times: list[float] = []
        self._seconds = seconds
        self._largest = largest

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
        del type, subtype, time_ns, created_ns, stream, attributes
        if len(payload) > self._largest:
            raise MessageTooLarge(len(payload), self._largest)
        time.sleep(self._seconds)
        self.got.append(bytes(payload))
        self.times.append(time.monotonic())
        return len(self.got) - 1

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(len(self.got), sum(map(len, self.got)), 0, 0, 0.0, None)

    def close(self) -> None:
        pass


# --- what is copied -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fmq:{}/t", "fmq:{}/t?layout=classic&slots=5000", "log:{}/t"])
def test_everything_arrives_in_order_in_any_of_our_targets(
    kind: str, source: str, tmp_path: Path
) -> None:
    fill(source, 3000)
    to = kind.format(tmp_path)
    books = relay(source, to, state=tmp_path / "state", batch=700)
    assert numbers(to) == list(range(3000))
    assert (books.read, books.copied, books.held, books.lost) == (3000, 3000, 0, 0)


def test_an_interval_of_numbers_has_both_ends(source: str, target: str) -> None:
    fill(source, 100)
    books = relay(source, target, start=10, end=20)
    assert numbers(target) == list(range(10, 21))
    assert books.read == 11


def test_an_interval_up_to_the_end_is_all_of_a_source_that_must_count_to_know_it(
    target: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("payload\n" + "".join(f"message {i}\n" for i in range(30)))
    relay(f"csv:{file}", target, end="end")
    assert numbers(target) == list(range(30))


def test_an_interval_up_to_the_end_of_an_empty_stream_is_empty(source: str, target: str) -> None:
    create(source)
    assert relay(source, target, end="end").read == 0
    assert relay(f"{source}?group=archive", target, end="end").read == 0


def test_an_interval_up_to_an_end_that_nobody_knows_is_refused(target: str) -> None:
    reader = LiveReader()
    options = relay_options(source="fmq:/live", target=target, follow=False, end="end")
    with open_writer(target) as writer, pytest.raises(PositionError, match="its end is not known"):
        Relay(reader, writer, options).run()


def test_an_interval_up_to_the_end_of_a_socket_is_refused(target: str) -> None:
    with pytest.raises(PositionError, match="its end is not known"):
        relay("jrtc+udp://127.0.0.1:0", target, end="end")


def test_an_interval_up_to_the_end_of_an_open_psi_stream_is_refused(target: str) -> None:
    exported = f"psi://127.0.0.1:{free_port()}/A"
    with open_writer(exported, linger=0) as writer:
        writer.write(b"0")
        with pytest.raises(PositionError, match="its end is not known"):
            relay(exported, target, end="end")


def test_an_interval_of_times_has_both_ends(source: str, target: str) -> None:
    with open_writer(source) as writer:
        for i in range(50):
            writer.write(b"message %d" % i)
            time.sleep(0.0001)
    with open_reader(source) as reader:
        created = [message.created_ns for message in reader.available()]
    relay(source, target, start=format_time(created[7]), end=format_time(created[30]))
    assert numbers(target) == list(range(7, 31))


def test_an_interval_that_is_followed_ends_by_itself(source: str, target: str) -> None:
    fill(source, 5)
    writer = threading.Timer(0.3, fill, (source, 20, 5))
    writer.start()
    relay(source, target, end=9, follow=True)
    writer.join()
    assert numbers(target) == list(range(10))


def test_a_time_that_is_past_ends_a_relay_that_follows(source: str, target: str) -> None:
    fill(source, 5)
    now = format_time(time.time_ns())
    books = relay(source, target, end=now, follow=True)
    assert books.copied == 5


def test_a_reader_with_a_name_is_left_behind_the_last_message_copied(
    source: str, target: str
) -> None:
    fill(source, 100)
    relay(f"{source}?cursor=archive", target, end=20)
    relay(f"{source}?cursor=archive", target)
    assert numbers(target) == list(range(100))


def test_the_clock_offset_is_added_to_every_time(source: str, target: str) -> None:
    with open_writer(source) as writer:
        writer.write(b"message 0", time_ns=5_000_000_000)
    relay(source, target, clock_offset="-1.5s")
    with open_reader(target) as reader:
        message = reader.read(0)
    assert message is not None
    assert message.time_ns == 3_500_000_000


def test_what_was_gone_before_it_could_be_read_is_counted(tmp_path: Path, target: str) -> None:
    ring = f"fmq:{tmp_path}/ring?slots=16&size=4k"
    fill(ring, 50)
    books = relay(ring, target, start=10)
    assert books.lost == 24
    assert numbers(target) == list(range(34, 50))


def test_a_message_that_the_target_never_takes_is_dropped_and_counted_if_asked_for(
    source: str, tmp_path: Path
) -> None:
    with open_writer(source) as writer:
        writer.write_many([b"message 1", b"x" * 9000, b"message 2", b"y" * 9000, b"message 3"])
    small = f"fmq:{tmp_path}/small?size=4k"
    with pytest.raises(MessageTooLarge) as caught:
        relay(source, small)
    assert not hasattr(caught.value, "__notes__")
    books = relay(source, f"fmq:{tmp_path}/other?size=4k", refused="drop", state=tmp_path / "state")
    assert books.dropped == {DropReason.REFUSED: 2}
    assert numbers(f"fmq:{tmp_path}/other") == [1, 2, 3]


# --- policies and quotas --------------------------------------------------------------------------


def test_the_latest_message_is_all_that_waits_for_a_slow_target(source: str) -> None:
    fill(source, 300)
    slow = Slow(0.02)
    books = relay(source, "slow:", writer=slow, policy="latest")
    assert slow.got[-1] == b"message 299"
    assert books.read == 300
    assert books.copied == len(slow.got)
    assert books.dropped == {DropReason.OVERFLOW_OLDEST: 300 - len(slow.got)}
    assert books.dropped[DropReason.OVERFLOW_OLDEST] > 200


@pytest.mark.parametrize("policy", ["unlimited", "throttle", "synchronous", "queue-throttled:7"])
def test_a_policy_that_drops_nothing_delivers_everything(source: str, policy: str) -> None:
    fill(source, 300)
    slow = Slow()
    books = relay(source, "slow:", writer=slow, policy=policy)
    assert slow.got == payloads(source)
    assert not books.dropped


def test_what_is_too_old_is_dropped(source: str, target: str) -> None:
    with open_writer(source) as writer:
        writer.write(b"message 1", time_ns=0)
        writer.write(b"message 2")
    books = relay(source, target, policy="latency:100s")
    assert numbers(target) == [2]
    assert books.dropped == {DropReason.EXPIRED: 1}


def test_a_dropped_message_does_not_come_again_after_a_restart(
    source: str, target: str, tmp_path: Path
) -> None:
    with open_writer(source) as writer:
        for i in range(10):
            writer.write(b"message %d" % i, time_ns=0 if i % 2 else None)
    for _ in range(2):
        relay(source, target, policy="latency:100s", state=tmp_path / "state")
    assert numbers(target) == [0, 2, 4, 6, 8]


def test_a_policy_stops_soon_and_says_what_is_held(source: str) -> None:
    fill(source, 1000)
    slow = Slow(0.01)
    began = time.monotonic()
    books = relay(
        source, "slow:", writer=slow, policy="unlimited", batch=5, follow=True,
        should_stop=lambda: len(slow.got) > 20,
    )  # fmt: skip
    assert time.monotonic() - began < 5
    assert books.copied == len(slow.got)
    assert books.held > 0


def test_a_throttled_source_that_keeps_its_place_gives_the_rest_of_a_batch_after_a_stop(
    source: str,
) -> None:
    """Of each batch read, a few messages wait in memory, and the rest waits to get there."""
    fill(source, 200)
    held = f"{source}?hold=archive"
    slow = Slow(0.05)
    books = relay(
        held, "slow:", writer=slow, policy="queue-throttled:7", batch=50, follow=True,
        should_stop=lambda: len(slow.got) > 20,
    )  # fmt: skip
    assert books.held > 0
    rest = Slow()
    relay(held, "slow:", writer=rest, policy="queue-throttled:7")
    assert [*slow.got, *rest.got] == payloads(source)


def test_the_quota_holds_within_5_percent_over_3_seconds(source: str) -> None:
    with open_writer(source) as writer:
        writer.write_many([bytes(1000)] * 4000)
    slow = Slow()
    began = time.monotonic()
    relay(
        source, "slow:", writer=slow, quota="400KB/s",
        should_stop=lambda: time.monotonic() - began > 3.3,
    )  # fmt: skip
    within = [at for at in slow.times if at - slow.times[0] <= 3]
    assert len(within) * 1000 == pytest.approx(3 * 400_000, rel=0.05)


# --- its state ------------------------------------------------------------------------------------


def test_it_goes_on_where_it_was(source: str, target: str, tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    fill(source, 100)
    relay(source, target, state=state)
    fill(source, 50, 100)
    books = relay(source, target, state=state)
    assert books.copied == 50
    assert numbers(target) == list(range(150))


def test_a_start_at_the_end_is_the_end_of_the_first_time(
    source: str, target: str, tmp_path: Path
) -> None:
    fill(source, 10)
    relay(source, target, start="end", state=tmp_path / "state")
    fill(source, 10, 10)
    relay(source, target, start="end", state=tmp_path / "state")
    assert numbers(target) == list(range(10, 20))


def test_a_stop_within_a_batch_continues_behind_the_last_message_written(
    source: str, target: str, tmp_path: Path
) -> None:
    fill(source, 500)
    copied: list[int] = []
    books = relay(
        source, target, state=tmp_path / "state", quota="2kB/s",
        on_progress=lambda so_far: copied.append(so_far.copied),
        should_stop=lambda: len(copied) > 2,
    )  # fmt: skip
    assert 0 < books.copied < 500
    assert books.held == books.read - books.copied > 0
    relay(source, target, state=tmp_path / "state")
    assert numbers(target) == list(range(500))


@pytest.mark.parametrize("policy", [None, "unlimited"])
def test_what_did_not_arrive_before_a_stop_in_an_outage_is_copied_by_the_next_run(
    source: str,
    target: str,
    tmp_path: Path,
    policy: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(source, 100)
    stop = threading.Event()
    writer = open_writer(target)
    write_batch = writer.write_batch

    def write_once(batch: Batch) -> int | None:
        if writer.statistics().messages:
            stop.set()
            raise ConnectionLost(target, "it is away")
        return write_batch(batch)

    monkeypatch.setattr(writer, "write_batch", write_once)
    state = tmp_path / "state"
    books = relay(
        source, target, writer=writer, should_stop=stop.is_set, state=state, policy=policy, batch=10
    )
    assert 0 < books.copied <= 10
    relay(source, target, state=state, policy=policy)
    assert numbers(target) == list(range(100))


def test_a_source_that_was_created_anew_is_copied_from_its_start(
    source: str, target: str, tmp_path: Path
) -> None:
    from penstock import create

    fill(source, 100)
    relay(source, target, state=tmp_path / "state")
    create(source, replace=True)
    fill(source, 10)
    books = relay(source, target, state=tmp_path / "state")
    assert numbers(target) == [*range(100), *range(10)]
    assert books.in_doubt == 0  # they are others


class Replaced:
    """A relay whose source is created anew while old messages wait in memory for the target."""

    def __init__(self, source: str, target: str, state: Path, patch: pytest.MonkeyPatch) -> None:
        fill(source, 300)
        self._may_write, self.is_away, self._stop = (threading.Event() for _ in range(3))
        given = {"source": source, "target": target, "policy": "unlimited", "batch": 100}
        self.books: list[RelayStatistics] = []
        with open_reader(source) as reader, open_writer(target) as writer:
            self._target, self._write_batch = target, writer.write_batch
            patch.setattr(writer, "write_batch", self._write)
            relay = Relay(
                reader, writer, relay_options(**given, state=state), should_stop=self._stop.is_set
            )
            thread = threading.Thread(target=lambda: self.books.append(relay.run()))
            thread.start()
            until(lambda: relay.statistics().read == 300)
            feed = relay._feed
            assert feed is not None
            epoch = feed.epoch
            create(source, replace=True)
            fill(source, 400, first=1000)
            until(lambda: feed.epoch != epoch)
            self._end(relay)
            thread.join(20)

    def _end(self, relay: Relay) -> None:
        self._may_write.set()
        until(lambda: relay.statistics().copied == 700)
        self._stop.set()

    def _write(self, batch: Batch) -> int | None:
        assert self._may_write.wait(20)
        if self.is_away.is_set():
            self._stop.set()
            raise ConnectionLost(self._target, "it is away")
        return self._write_batch(batch)


class ReplacedAndStopped(Replaced):
    """The target is away, and the relay is told to stop, before the old messages are written."""

    def _end(self, relay: Relay) -> None:
        del relay
        self.is_away.set()
        self._may_write.set()


def test_what_waits_in_memory_of_a_source_that_was_created_anew_is_written_first(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = Replaced(source, target, tmp_path / "state", monkeypatch)
    assert numbers(target) == [*range(300), *range(1000, 1400)]
    assert [(books.read, books.held) for books in replaced.books] == [(700, 0)]
    assert relay(source, target, state=tmp_path / "state").copied == 0


def test_no_message_is_skipped_of_a_source_that_was_created_anew_while_old_ones_waited(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (books,) = ReplacedAndStopped(source, target, tmp_path / "state", monkeypatch).books
    assert adds_up(books)
    assert books.dropped == {DropReason.ABANDONED: 300}, "they cannot be read again"
    relay(source, target, state=tmp_path / "state")
    assert numbers(target) == list(range(1000, 1400))


def test_rows_of_a_file_that_has_grown_are_copied_again_and_counted_as_maybe_twice(
    target: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("payload\n" + "".join(f"message {i}\n" for i in range(100)))
    relay(f"csv:{file}", target, state=tmp_path / "state")
    with file.open("a") as rows:
        rows.write("message 100\n")
    books = relay(f"csv:{file}", target, state=tmp_path / "state")
    assert (books.copied, books.in_doubt) == (101, 100)


def test_a_target_that_others_write_to_meanwhile_gets_everything_once(
    source: str, target: str, tmp_path: Path
) -> None:
    fill(source, 100)
    relay(source, target, state=tmp_path / "state", end=49)
    fill(target, 7, 1000)
    relay(source, target, state=tmp_path / "state")
    assert numbers(target) == [*range(50), *range(1000, 1007), *range(50, 100)]


def test_an_unfinished_batch_is_found_in_the_target_although_others_wrote_behind_it(
    source: str, target: str, tmp_path: Path
) -> None:
    """As after a kill: the note is there, and a part of its batch."""
    fill(source, 100)
    state = tmp_path / "state"
    relay(source, target, state=state, end=9)
    with open_reader(source) as reader, open_reader(target) as copy:
        life, of_target = reader.bounds().epoch, copy.bounds()
        reader.seek(10)
        with open_writer(target) as writer:
            writer.write_batch(reader.read_batch(15))
    with Journal(state, source, target) as journal:
        journal.put(Note(life, 50, (of_target.epoch, of_target.end), ((10, 40),)))
    fill(target, 3, 1000)
    relay(source, target, state=state)
    assert numbers(target) == [*range(25), *range(1000, 1003), *range(25, 100)]


def test_a_target_that_lost_its_end_with_the_power_gets_it_again(
    source: str, target: str, tmp_path: Path
) -> None:
    fill(source, 100)
    state = tmp_path / "state"
    relay(source, target, state=state, end=49)
    with Journal(state, source, target) as journal:
        note = journal.note
        assert note is not None
        assert note.target is not None
        epoch, end = note.target
        # The disk has 50; the notes of 70 got there, too, and its messages did not.
        journal.put(Note(note.source_epoch, 70, (epoch, end + 20)))
    books = relay(source, target, state=state)
    assert numbers(target) == list(range(100))
    assert books.in_doubt == 0


def test_a_target_that_cannot_be_asked_gets_an_unfinished_batch_again_and_it_is_counted(
    source: str, tmp_path: Path
) -> None:
    fill(source, 100)
    state = tmp_path / "state"
    with open_reader(source) as reader:
        life = reader.bounds().epoch
    with Journal(state, source, "slow:") as journal:
        journal.put(Note(life, 50, None, ((10, 40),)))
    slow = Slow()
    books = relay(source, "slow:", writer=slow, state=state)
    assert slow.got == payloads(source)[10:]
    assert books.in_doubt == 40


def test_a_state_serves_one_relay_at_a_time_and_only_its_own(
    source: str, target: str, tmp_path: Path
) -> None:
    fill(source, 1)
    state = tmp_path / "state"
    with Journal(state, source, target), pytest.raises(CursorInUse):
        relay(source, target, state=state)
    with pytest.raises(InvalidOption, match="belongs to a relay between"):
        relay(source, f"fmq:{tmp_path}/another", state=state)
    other = tmp_path / "other"
    other.write_bytes(b"no state at all" * 100)
    with pytest.raises(DamagedQueue):
        relay(source, target, state=other)


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_half_a_note_is_taken_for_none(cut: int, tmp_path: Path) -> None:
    state = tmp_path / "state"
    notes = [Note(1, i * 10, (2, i), ((i, 3), (i + 7, 4))) for i in range(1, 4)]
    with Journal(state, "log:a", "log:b") as journal:
        assert journal.note is None
        for note in notes:
            journal.put(note)
    newest, before = 8192 * 2, 8192
    data = bytearray(state.read_bytes())
    for place in (newest, before)[:cut]:
        data[place + 60] ^= 1
    state.write_bytes(data)
    with Journal(state, "log:a?x=1", "log:b") as journal:
        assert journal.note == [*notes[2:], *notes[1:2], None][cut]


# --- what is asked of it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"policy": "sometimes"}, "policy"),
        ({"quota": "fast"}, "quota"),
        ({"batch": 0}, "batch"),
        ({"clock_offset": "-x"}, "clock_offset"),
        ({"give_up": "-3s"}, "give_up"),
    ],
)
def test_an_option_that_does_not_fit_is_named(given: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        relay_options(source="log:a", target="log:b", **given)
    assert caught.value.option == option


def test_options_can_be_given_as_they_are_written_in_yaml() -> None:
    options = RelayOptions.model_validate(
        {"source": "log:a", "target": "log:b", "start": 5, "end": "end", "clock_offset": -2}
    )
    assert str(options.start) == "seq 5"
    assert options.clock_offset == -2
    assert isinstance(options.follow, bool)


def test_large_messages_are_moved_a_few_at_a_time(tmp_path: Path) -> None:
    source, target = f"log:{tmp_path}/large?segment=32M", f"log:{tmp_path}/copy?segment=32M"
    with open_writer(source) as writer:
        for _ in range(40):
            writer.write(bytes(1 << 20))
    steps = [0]
    relay(source, target, on_progress=lambda so_far: steps.append(so_far.copied))
    moved = [after - before for before, after in pairwise(steps)]
    assert sum(moved) == 40
    assert moved[0] <= 16  # nobody knew how large they are
    assert max(moved[1:]) <= 8


def test_a_batch_with_many_gaps_is_cut_to_fit_a_note(
    source: str, target: str, tmp_path: Path
) -> None:
    with open_writer(source) as writer:
        for i in range(4000):
            writer.write(b"message %d" % i, type=i % 2)
    books = relay(f"{source}?type=1", target, state=tmp_path / "state", batch=4000)
    assert books.copied == 2000
    assert numbers(target) == list(range(1, 4000, 2))


def test_a_loss_that_no_message_follows_is_in_the_books(tmp_path: Path) -> None:
    source, target = f"log:{tmp_path}/source", f"log:{tmp_path}/target"
    with open_writer(source, segment_slots=4) as writer:
        writer.write_many([b"%d" % i for i in range(20)])
    with open_reader(source) as reader, open_writer(target) as writer:
        create(source, replace=True)  # and nothing is written to it
        options = relay_options(source=source, target=target, follow=False)
        books = Relay(reader, writer, options).run()
        assert books.lost == reader.statistics().lost > 0
    assert books.copied + books.lost == 20
    assert books.read == books.copied + books.held


class LiveReader(Reader):
    """A source that gives every message once."""

    def __init__(self) -> None:
        super().__init__("live:")
        self.there: list[Message] = []
        self._given = 0

    def _take(self, limit: int) -> list[Message]:
        found, self.there = self.there[:limit], self.there[limit:]
        self._given += len(found)
        return found

    def seek(self, position: PositionLike) -> None:
        raise Unsupported(f"live: gives every message once, and has no {position}")

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(self._given, 0, 0, 0, 0, self._given, len(self.there), ())

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("policy", [None, "unlimited", "queue-throttled:3"])
def test_what_a_live_source_gave_and_nobody_got_is_dropped_with_its_reason(
    tmp_path: Path, policy: str | None
) -> None:
    """The target is away when the relay shall stop."""
    reader, stop, found = LiveReader(), threading.Event(), list[RelayStatistics]()
    with FlightServer(ServerOptions(root=tmp_path, port=0)) as server:
        target = f"{server.url}target?retry=0&call_timeout=3s"
        writer = open_writer(target)
        options = relay_options(source=f"fmq:{tmp_path}/live", target=target, policy=policy)
        relay = Relay(reader, writer, options, should_stop=stop.is_set)
        thread = threading.Thread(target=lambda: found.append(relay.run()))
        thread.start()
        until(lambda: relay._feed is not None)
    reader.there = [Message(i, 0, 0, 0, 0, None, None, b"%d" % i) for i in range(10)]
    until(lambda: relay.trouble is not None)
    stop.set()
    thread.join(20)
    writer.close()
    (books,) = found
    assert books.dropped == {DropReason.ABANDONED: 10}
    assert (books.read, books.copied, books.held, books.missing) == (10, 0, 0, 10)


@pytest.mark.parametrize("policy", [None, "unlimited"])
def test_what_a_live_source_gave_before_an_error_is_dropped_with_its_reason(
    policy: str | None,
) -> None:
    reader = LiveReader()
    payloads = [b"a", b"b", b"too large", b"d"]
    reader.there = [Message(i, 0, 0, 0, 0, None, None, each) for i, each in enumerate(payloads)]
    options = relay_options(source="fmq:/live", target="fmq:/slow", follow=False, policy=policy)
    relay = Relay(reader, Slow(largest=5), options)
    with pytest.raises(MessageTooLarge):
        relay.run()
    books = relay.statistics()
    assert adds_up(books)
    assert (books.read, books.copied, books.held, books.missing) == (4, 2, 0, 2)
    assert books.dropped == {DropReason.ABANDONED: 2}


@pytest.mark.parametrize("policy", [None, "unlimited", "queue-throttled:3"])
def test_a_held_place_does_not_pass_what_waited_when_the_target_failed(
    tmp_path: Path, policy: str | None
) -> None:
    source = f"log:{tmp_path}/source"
    with open_writer(source) as writer:
        writer.write_many([b"%d" % i if i != 50 else b"too large" for i in range(200)])
    held = f"{source}?hold=archive"
    slow = Slow(0.002, largest=5)
    with pytest.raises(MessageTooLarge):
        relay(held, "slow:", writer=slow, batch=10, policy=policy)
    assert slow.got == [b"%d" % i for i in range(50)]
    with open_reader(held) as reader:
        first = reader.read(0)
    assert first is not None
    assert 40 <= first.seq <= 50


@pytest.mark.parametrize("policy", [None, "unlimited"])
def test_a_target_that_takes_no_more_is_an_error(
    source: str, tmp_path: Path, policy: str | None
) -> None:
    fill(source, 10)
    target = f"fmq:{tmp_path}/target?writers=many"
    writer = open_writer(target)
    file = QueueFile.open(f"{tmp_path}/target", writable=True)
    mark(file, State.SEALED)
    file.close()
    with pytest.raises(Closed, match="takes no more"):
        relay(source, target, writer=writer, policy=policy)


def test_what_a_group_delivers_again_is_not_counted_as_dropped(tmp_path: Path) -> None:
    """The target is away when the relay shall stop."""
    source = f"log:{tmp_path}/source"
    open_writer(source).close()
    with FlightServer(ServerOptions(root=tmp_path, port=0)) as server:
        running = Background(
            f"{source}?group=archive", f"{server.url}target?retry=0&call_timeout=3s"
        )
        until(lambda: running.relay is not None and running.relay._feed is not None)
    fill(source, 10)
    until(lambda: running.relay is not None and running.relay.trouble is not None)
    books = running.end()
    assert (books.read, books.copied, books.dropped) == (10, 0, {})
    assert (books.held, books.missing) == (10, 0)
    assert numbers(f"{source}?group=archive") == list(range(10))


def test_a_state_goes_on_though_a_side_is_reached_in_another_way(tmp_path: Path) -> None:
    source, target = f"log:{tmp_path}/source", "flight://host/x"
    Journal(tmp_path / "state", f"{source}?trace=false", f"{target}?retry=1").close()
    Journal(tmp_path / "state", f"log:{tmp_path}/x/../source/", "flight://host:8815/x").close()
    for other in ("flight://host:8816/x", "flight://host/y"):
        with pytest.raises(InvalidOption, match="belongs to a relay between"):
            Journal(tmp_path / "state", source, other)


def test_a_state_of_an_earlier_release_is_known_by_the_urls(tmp_path: Path) -> None:
    source, target = f"log:{tmp_path}/source", "flight://host/x?retry=1"
    Journal(tmp_path / "state", source, target).close()
    kept = (tmp_path / "state").read_bytes()
    new = json.dumps([source, "flight://host:8815/x"]).encode()
    old = json.dumps([source, "flight://host/x"]).encode()
    assert kept[16 : 16 + len(new)] == new
    head = kept[:12] + struct.pack("<I", len(old)) + old
    (tmp_path / "state").write_bytes(head.ljust(8192, b"\0") + kept[8192:])
    Journal(tmp_path / "state", source, target).close()
    with pytest.raises(InvalidOption):
        Journal(tmp_path / "state", source, "flight://host/y")


def test_what_a_relay_copied_for_a_group_is_settled(source: str, target: str) -> None:
    fill(source, 100)
    books = relay(f"{source}?group=archive", target)
    assert (books.copied, numbers(target)) == (100, list(range(100)))
    with open_reader(f"{source}?group=archive") as reader:
        assert isinstance(reader, Grouped)
        found = reader.group()
    assert (found.acked, found.lag, found.redelivered) == (100, 0, 0)


@pytest.mark.parametrize(("count", "acked", "in_doubt"), [(40, 40, 0), (16, 0, 16)])
def test_what_a_failed_flush_left_unsettled_is_settled_by_the_next_or_in_doubt(
    source: str,
    target: str,
    count: int,
    acked: int,
    in_doubt: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(source, count)
    writer = open_writer(target)
    flush = writer.flush
    failures = iter([ConnectionLost(target, "it was restarted")])

    def fail_once() -> None:
        for failure in failures:
            raise failure
        flush()

    monkeypatch.setattr(writer, "flush", fail_once)
    books = relay(f"{source}?group=archive", target, writer=writer, batch=16)
    assert (books.copied, books.in_doubt) == (count, in_doubt)
    with open_reader(f"{source}?group=archive") as reader:
        assert isinstance(reader, Grouped)
        assert reader.group().acked == acked


def test_what_a_group_delivers_again_because_nobody_knows_if_it_arrived_is_in_doubt(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(source, 10)
    writer = open_writer(target)
    write_batch = writer.write_batch

    def break_behind(batch: Batch) -> int | None:
        write_batch(batch)
        raise Unacknowledged("host", "reset", acknowledged=0, in_doubt=batch.num_rows)

    monkeypatch.setattr(writer, "write_batch", break_behind)
    has_failed = threading.Event()
    monkeypatch.setattr(Relay, "_note_outage", lambda *_: has_failed.set())
    first = relay(f"{source}?group=archive", target, writer=writer, should_stop=has_failed.is_set)
    second = relay(f"{source}?group=archive", target)
    assert (first.copied, first.in_doubt, second.copied) == (0, 10, 10)
    assert len(numbers(target)) == 20


def test_what_others_overwrote_does_not_count_as_copied(source: str, tmp_path: Path) -> None:
    target = f"fmq:{tmp_path}/ring?slots=64&size=64k&writers=many"
    fill(source, 10)
    writer = open_writer(target)
    write_batch = writer.write_batch
    is_broken = True

    def break_first(batch: Batch) -> int | None:
        nonlocal is_broken
        if not is_broken:
            return write_batch(batch)
        is_broken = False
        with open_writer(target) as other:
            other.write_many([b"other 0"] * 100)
        raise ConnectionLost("host", "nothing of it arrived")

    writer.write_batch = break_first  # type: ignore[method-assign]
    books = relay(source, target, writer=writer)
    assert (books.copied, books.in_doubt) == (10, 10)
    assert numbers(target)[-10:] == list(range(10))


def test_what_was_overwritten_counts_as_copied_if_a_later_one_is_there(
    source: str, tmp_path: Path
) -> None:
    target = f"fmq:{tmp_path}/ring?slots=64&size=64k"
    fill(source, 100)
    writer = open_writer(target)
    write_batch = writer.write_batch
    is_broken = True

    def break_in_the_middle(batch: Batch) -> int | None:
        nonlocal is_broken
        if not is_broken:
            return write_batch(batch)
        is_broken = False
        write_batch(batch.slice(0, 80))
        raise ConnectionLost("host", "its answer is lost")

    writer.write_batch = break_in_the_middle  # type: ignore[method-assign]
    books = relay(source, target, writer=writer)
    assert (books.copied, books.in_doubt) == (100, 0)
    assert numbers(target) == list(range(36, 100))


def test_a_named_reader_that_cannot_go_back_does_not_pass_over_what_is_not_copied(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(source, 40)
    has_failed = threading.Event()

    def fail(_: PositionLike) -> None:
        raise StorageError("opening", source, OSError(errno.EMFILE, "no descriptor is left"))

    def break_off(_: Batch) -> int | None:
        has_failed.set()
        raise ConnectionLost("host", "it is away")

    options = relay_options(source=f"{source}?hold=archive", target=target)

    def run_until_it_fails() -> None:
        with open_reader(options.source) as reader, open_writer(target) as writer:
            monkeypatch.setattr(writer, "write_batch", break_off)
            monkeypatch.setattr(reader, "seek", fail)
            Relay(reader, writer, options, should_stop=has_failed.is_set).run()

    with pytest.raises(StorageError):
        run_until_it_fails()
    with open_reader(options.source) as reader:
        assert len(list(reader.available())) == 40


def test_what_a_relay_copied_for_a_group_before_it_failed_is_settled(
    source: str, tmp_path: Path
) -> None:
    shared, target = f"{source}?group=archive", f"fmq:{tmp_path}/small?size=64k"
    fill(source, 5)
    with open_writer(source) as writer:
        writer.write(bytes(500_000))
    for _ in range(2):
        with pytest.raises(MessageTooLarge):
            relay(shared, target)
    assert numbers(target) == list(range(5))  # and none of them twice


def test_a_relay_goes_on_that_was_too_slow_for_the_leases_of_its_group(source: str) -> None:
    fill(source, 40)
    shared = f"{source}?group=archive&lease=300ms"
    slow = Slow(0.2)
    books: list[RelayStatistics] = []
    thread = threading.Thread(
        target=lambda: books.append(relay(shared, "slow:", writer=slow, batch=16))
    )
    thread.start()
    until(lambda: slow.got)
    with open_reader(shared) as other:
        assert isinstance(other, Grouped)
        seqs: list[int] = []
        while len(seqs) < 40:  # first what the relay has not taken, then what it was given
            messages = other.read_many(40, 20)
            other.ack(messages)
            seqs += [message.seq for message in messages]
        fill(source, 1, first=40)
        thread.join(20)
    assert seqs == [*range(16, 40), *range(16)]
    assert (books[0].copied, books[0].in_doubt) == (17, 16)


def test_a_policy_that_drops_what_a_group_would_deliver_again_is_refused(
    source: str, target: str
) -> None:
    fill(source, 1)
    with pytest.raises(InvalidOption, match="deliver again"):
        relay(f"{source}?group=archive", target, policy="latest")


@pytest.mark.parametrize("by", ["source", "origin"])
def test_a_choice_by_time_that_a_group_would_deliver_again_is_refused(
    source: str, target: str, by: str
) -> None:
    fill(source, 1)
    with pytest.raises(InvalidOption, match="deliver again"):
        relay(f"{source}?group=archive", target, by=by, end="2026-05-01T12:00:00Z")


@pytest.mark.parametrize(("name", "more"), [("a-b", ""), ("c", ", state: positions/a-b.relay")])
def test_relays_of_one_file_do_not_share_a_state(tmp_path: Path, name: str, more: str) -> None:
    file = tmp_path / "relays.yaml"
    file.write_text(
        "state: positions\nrelays:\n"
        '  "a b": {source: "log:/a", target: "log:/b"}\n'
        f'  "{name}": {{source: "log:/a", target: "log:/c"{more}}}\n'
    )
    with pytest.raises(ConfigError, match=r"has the state of a b: .*/positions/a-b") as caught:
        load_relays(file)
    assert (caught.value.line, caught.value.field) == (4, f"relays.{name}")
