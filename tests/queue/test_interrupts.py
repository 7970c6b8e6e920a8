"""A call that a signal interrupts has read nothing, and its counts are those of what it wrote."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock.core.batch
import penstock.queue.wide.arrow  # noqa: F401 - imported late, its lines would be interrupted
from penstock import open_reader, open_writer
from penstock.core.endpoints import remove
from penstock.core.errors import NotFound
from penstock.core.interfaces import Writer
from penstock.core.statistics import LoggedLosses
from penstock.queue.classic import writer as classic_writer
from penstock.queue.classic.watch import Sleeper
from penstock.queue.classic.writer import ClassicWriter
from penstock.queue.log.endpoint import trim_log
from penstock.queue.log.index import SegmentIndex
from penstock.queue.log.retention import Limits
from support.interruption import Interrupted, interrupted_after, interrupted_at_line, take

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.core.interfaces import Reader
    from penstock.core.message import Message
    from penstock.queue.classic._appender import Appender

# A signal that is raised within a finalizer gets to nobody.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: When a call is interrupted, in parts of the time that it takes.
MOMENTS = (0.2, 0.5, 0.8)
#: URLs, and how many messages take some milliseconds.
STREAMS = {
    "ring": ("fmq:{}/queue?slots=65536&size=16m", 40_000),
    "compressed ring": ("fmq:{}/queue?slots=4096&size=16m&compress=lz4", 2_000),
    "log": ("log:{}/log?segment=1m&segment_slots=4096&sync=none", 40_000),
    "compressed log": ("log:{}/log?segment=1m&segment_slots=256&sync=none&compress=lz4", 2_000),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("wanted", ["", "&type=0"], ids=["all", "filtered"])
def test_what_an_interrupted_read_took_comes_again(tmp_path: Path, kind: str, wanted: str) -> None:
    url, count = STREAMS[kind]
    url = url.format(tmp_path)
    with open_writer(url) as writer:
        for _ in range(count // 1000):
            writer.write_many([b"a"] * 900)
            writer.write_many([b"b"] * 100, type=1)
    expected = count * 9 // 10 if wanted else count
    with open_reader(f"{url.partition('?')[0]}?hold=h{wanted}") as reader:
        began = time.perf_counter()
        assert len(reader.read_many(count)) == expected
        took = time.perf_counter() - began
        for moment in MOMENTS:
            reader.seek("start")
            before = reader.statistics()
            taken: list[Message] = []
            try:
                with interrupted_after(took * moment):
                    taken = reader.read_many(count)
            except Interrupted:
                taken = taken or reader.read_many(count)
            assert taken[0].seq == 0
            assert len(taken) == expected
            after = reader.statistics()
            assert after.messages - before.messages == expected
            assert after.bytes - before.bytes == expected
            assert after.filtered - before.filtered == count - expected
            assert after.lost == 0


#: URLs of streams that have place for 20 messages, a log in three segments.
SMALL = {
    "ring": "fmq:{}/queue?slots=64&size=64k",
    "compressed ring": "fmq:{}/queue?slots=64&size=64k&compress=lz4",
    "log": "log:{}/log?segment=64k&segment_slots=8&sync=none",
    "compressed log": "log:{}/log?segment=64k&segment_slots=8&sync=none&compress=lz4",
    "classic": "fmq:{}/queue?layout=classic&slots=64&size=64k",
}


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("by", ["one", "many", "batch", "available", "view"])
@pytest.mark.parametrize("wanted", ["", "&type=0"], ids=["all", "filtered"])
@pytest.mark.parametrize("kind", SMALL)
def test_a_read_that_is_interrupted_at_any_line_takes_nothing(
    tmp_path: Path, kind: str, wanted: str, by: str, step: int
) -> None:
    if by == "view" and (kind == "classic" or "compressed" in kind):
        pytest.skip("its messages cannot be used in place")
    url = SMALL[kind].format(tmp_path)
    with open_writer(url) as writer:
        for number in range(20):
            writer.write(b"%d" % number, type=int(number % 4 == 3))
    expected = [i for i in range(20) if not wanted or i % 4 != 3]
    if (kind, wanted, by) == ("classic", "", "one"):
        pytest.skip("no signal can be raised between the lines that take a message copied ahead")
    hold = "" if kind == "classic" else "hold=h"
    with open_reader(f"{url.partition('?')[0]}?{hold}{wanted}") as reader:
        for line in itertools.count(1, step):
            reader.seek("start")
            before = reader.statistics()
            found: list[int] = []
            try:
                with interrupted_at_line(line, "penstock/queue"):
                    take(reader, by, found)
            except Interrupted as place:
                where = f"at {place}"
                take(reader, "many", found)
            else:
                return
            assert found == expected, where
            after = reader.statistics()
            assert after.messages - before.messages == len(expected), where
            assert after.filtered - before.filtered == 20 - len(expected), where
            assert after.lost == 0, where


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("by", ["one", "many", "batch", "available", "view"])
@pytest.mark.parametrize("kind", SMALL)
def test_a_signal_handler_may_close_the_reader_at_any_line_and_exit(
    tmp_path: Path, kind: str, by: str, step: int
) -> None:
    if by == "view" and (kind == "classic" or "compressed" in kind):
        pytest.skip("its messages cannot be used in place")
    url = SMALL[kind].format(tmp_path)
    with open_writer(url) as writer:
        writer.write_many([b"a"] * 20)
    for line in itertools.count(1, step):
        with open_reader(url.partition("?")[0]) as reader:
            try:
                with interrupted_at_line(line, "penstock/queue", reader.close):
                    take(reader, by, [])
            except Interrupted:
                assert reader.statistics().lost == 0
            else:
                return


def test_an_error_as_the_reader_of_a_log_goes_back_does_not_hide_the_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = itertools.count()

    def interrupt(*_: object) -> int:
        if next(segments) == 0:
            return 8
        raise Interrupted

    def fail(*_: object) -> None:
        raise NotFound("a segment")

    url = SMALL["log"].format(tmp_path)
    with open_writer(url) as writer:
        writer.write_many([b"a"] * 20)
    with open_reader(url.partition("?")[0]) as reader:
        reader.seek("start")
        with monkeypatch.context() as patch:
            patch.setattr(SegmentIndex, "following", interrupt)
            patch.setattr(SegmentIndex, "open_at", fail)
            with pytest.raises(Interrupted):
                reader.read_many(100)
        books = reader.statistics()
        assert (books.messages, books.lost) == (0, 0)
        found = reader.read_many(100)
        assert len(found) + reader.statistics().lost == 20


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("by", ["one", "many", "batch", "available", "view"])
@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "classic"])
def test_what_a_call_has_not_returned_when_a_signal_handler_closes_its_reader_comes_again(
    tmp_path: Path, kind: str, by: str, step: int
) -> None:
    if by == "view" and "compressed" in kind:
        pytest.skip("its messages cannot be used in place")
    url = SMALL[kind].format(tmp_path)
    with open_writer(url) as writer:
        writer.write_many([b"a"] * 20)
    held = f"{url.partition('?')[0]}?hold=h"
    for line in itertools.count(1, step):
        found: list[int] = []
        with open_reader(held) as reader:
            reader.seek("start")
            try:
                with interrupted_at_line(line, "penstock/queue", reader.close):
                    take(reader, by, found)
            except Interrupted as place:
                where = f"at {place}"
            else:
                return
        with open_reader(held) as reader:
            again = [message.seq for message in reader.read_many(100)]
        # What the last complete call returned may come again, too.
        assert again == [*range(20 - len(again), 20)], where
        assert len(found) + len(again) >= 20, where


class Late(Exception):
    """Not a `BaseException` only, as what most signal handlers raise."""


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("error", [Late, ValueError, TimeoutError])
@pytest.mark.parametrize("by", ["one", "many", "batch"])
@pytest.mark.parametrize("kind", ["compressed ring", "compressed log"])
def test_what_a_signal_handler_raises_is_no_damage_and_gets_to_the_caller(
    tmp_path: Path, kind: str, by: str, error: type[Exception], step: int
) -> None:
    def handle() -> None:
        raise error

    if kind == "compressed log" and error is TimeoutError:
        pytest.skip("an OSError is an error of the storage as the next segment is opened")
    url = SMALL[kind].format(tmp_path)
    with open_writer(url) as writer:
        writer.write_many([b"message"] * 20)
    with open_reader(f"{url.partition('?')[0]}?damaged=skip") as reader:
        for line in itertools.count(1, step):
            reader.seek("start")
            found: list[int] = []
            try:
                with interrupted_at_line(line, "penstock/queue/wide", handle) as lines:
                    take(reader, by, found)
            except error:
                take(reader, "many", found)
            else:
                assert next(lines) <= line, "it got to nobody"
                return
            assert found == [*range(20)]
            assert reader.statistics().lost == 0


# --- losses -------------------------------------------------------------------------------------


def overwrite(_url: str, writer: Writer) -> int:
    writer.write_many([b"b"] * 80)
    return 88


def remove_segments(url: str, writer: Writer) -> int:
    writer.write_many([b"b"] * 32)
    trim_log(url, Limits(before_seq=24))
    return 40


def create_log_anew(url: str, _writer: Writer) -> int:
    remove(url, force=True)
    with open_writer(f"{url}?segment=64k&segment_slots=8&sync=none") as new:
        new.write_many([b"new"] * 5)
    return 13


def damage_message(url: str, _writer: Writer) -> int:
    path = Path(f"{url.partition(':')[2]}.fmq")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"message 5"))
        file.write(b"another")
    return 8


def damage_segment(url: str, writer: Writer) -> int:
    writer.write_many([b"b"] * 16)
    with sorted(Path(url.partition(":")[2]).glob("*.fmq"))[1].open("r+b") as file:
        file.write(bytes(4096))
    return 24


#: What 8 messages are written to, how they are read, and what happens before that: it returns how
#: many messages there were in all.
LOSSES: dict[str, tuple[str, str, Callable[[str, Writer], int]]] = {
    "ring": ("fmq:{}/queue?slots=16&size=64k", "", overwrite),
    "ring, newest": ("fmq:{}/queue?slots=16&size=64k", "resume=newest", overwrite),
    "ring, damaged": ("fmq:{}/queue?slots=16&size=64k&crc=true", "damaged=skip", damage_message),
    "log": ("log:{}/log?segment=64k&segment_slots=8&sync=none", "", remove_segments),
    "log, newest": (
        "log:{}/log?segment=64k&segment_slots=8&sync=none",
        "resume=newest",
        remove_segments,
    ),
    "log, damaged": (
        "log:{}/log?segment=64k&segment_slots=8&sync=none",
        "damaged=skip",
        damage_segment,
    ),
    "log, anew": ("log:{}/log?segment=64k&segment_slots=16&sync=none", "", create_log_anew),
    "classic": ("fmq:{}/queue?layout=classic&slots=16&size=64k", "", overwrite),
}


def read_with_losses(
    folder: Path, kind: str, by: str, interruption: AbstractContextManager[object]
) -> bool:
    """Read what has losses, each of which counts once; tell whether it was interrupted."""
    url, options, happen = LOSSES[kind]
    folder.mkdir()
    url = url.format(folder)
    plain = url.partition("?")[0]
    is_interrupted, where, found = False, "", list[int]()
    with open_writer(url) as writer:
        writer.write_many(b"message %d" % number for number in range(8))
        with open_reader(f"{plain}?{options}") as reader:
            reader.seek("start")
            total = happen(plain, writer)
            try:
                with interruption:
                    reader.bounds()
                    take(reader, by, found)
            except Interrupted as place:
                is_interrupted, where = True, f"at {place}"
            reader.bounds()
            take(reader, "many", found)
            books = reader.statistics()
    assert books.messages == len(found), where
    assert sum(loss.count for loss in books.losses) == books.lost, where
    assert books.messages + books.lost == total, where
    assert books.lost > 0
    return is_interrupted


@contextmanager
def interrupted_as_it_logs_a_loss() -> Iterator[None]:
    def interrupt(*_: object, **__: object) -> None:
        patch.undo()  # as a signal: once
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoggedLosses, "tell", interrupt)
        yield


@pytest.mark.parametrize("by", ["one", "many", "batch"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_counted_once_if_a_signal_comes_as_it_is_logged(
    tmp_path: Path, kind: str, by: str
) -> None:
    assert read_with_losses(tmp_path / "streams", kind, by, interrupted_as_it_logs_a_loss())


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("by", ["many", "batch"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_counted_once_if_a_signal_comes_at_any_line(
    tmp_path: Path, kind: str, by: str, step: int
) -> None:
    for line in itertools.count(1, step):
        interruption = interrupted_at_line(line, "src/penstock")
        if not read_with_losses(tmp_path / str(line), kind, by, interruption):
            return


@pytest.mark.parametrize(
    "wait",
    [lambda r: r.read(20), lambda r: r.read_many(9, 20), lambda r: r.read_batch(9, 20)],
    ids=["one", "many", "batch"],
)
def test_a_classic_read_that_is_interrupted_when_its_wait_is_over_takes_nothing(
    tmp_path: Path, wait: Callable[[Reader], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Sleeper) -> None:
        raise Interrupted

    url = SMALL["classic"].format(tmp_path)
    with open_writer(url) as writer, open_reader(url.partition("?")[0]) as reader:
        later = threading.Timer(0.2, writer.write, [b"late"])
        later.start()
        with monkeypatch.context() as patch:
            patch.setattr(Sleeper, "stop_watching", interrupt)
            with pytest.raises(Interrupted):
                wait(reader)
        later.join()
        assert reader.statistics().messages == 0
        assert [message.payload for message in reader.read_many(9)] == [b"late"]


@pytest.mark.parametrize("kind", ["compressed ring", "compressed log"])
def test_a_read_that_is_interrupted_after_a_switch_reads_the_new_stream_from_its_start(
    tmp_path: Path, kind: str
) -> None:
    url = SMALL[kind].format(tmp_path)
    plain = url.partition("?")[0]
    with open_writer(url) as writer:
        writer.write_many([b"old"] * 5, type=1)
        writer.write_many([b"unwanted"] * 5)

    def create_anew() -> None:
        time.sleep(0.2)  # until the reader waits
        remove(plain, force=True)
        open_writer(url).close()

    with open_reader(f"{plain}?type=1") as reader:
        assert len(reader.read_many(5)) == 5
        thread = threading.Thread(target=create_anew)
        thread.start()
        with pytest.raises(Interrupted), interrupted_after(1.5):
            reader.read_many(100, None)
        thread.join()
        assert reader.statistics().restarts == 1
        with open_writer(url) as writer:
            writer.write_many([b"new"] * 7, type=1)
        assert [message.seq for message in reader.read_many(100, 2)] == list(range(7))


@pytest.mark.parametrize("single", [False, True], ids=["many", "one"])
@pytest.mark.parametrize("kind", ["ring", "log", "classic"])
def test_what_an_interrupted_write_wrote_is_counted_as_written(
    tmp_path: Path, kind: str, single: bool
) -> None:
    url = {
        "ring": f"fmq:{tmp_path}/queue?slots=1024&size=256m",
        "log": f"log:{tmp_path}/log?segment=16m&segment_slots=64&sync=none",
        "classic": f"fmq:{tmp_path}/queue?layout=classic&slots=1024&size=256m",
    }[kind]
    payloads = [bytes(4_000_000)] * (1 if single else 12)
    offered = 0
    with open_writer(url) as writer:
        began = time.perf_counter()
        writer.write_many(payloads)
        took = time.perf_counter() - began
        offered += len(payloads)
        for moment in MOMENTS:
            offered += len(payloads)
            with suppress(Interrupted), interrupted_after(took * moment):
                if single:
                    writer.write(payloads[0])
                else:
                    writer.write_many(payloads)
        books = writer.statistics()
    assert books.messages + books.refused == offered
    with open_reader(url.partition("?")[0]) as reader:
        assert sum(1 for _ in reader.available()) == books.messages


@pytest.mark.parametrize("error", [Interrupted, RuntimeError])
@pytest.mark.parametrize("moment", ["before it counts", "while it counts"])
def test_a_classic_write_that_is_interrupted_as_it_counts_counts_each_message_once(
    tmp_path: Path, moment: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        patch.undo()  # as a signal: once
        raise error

    url = SMALL["classic"].format(tmp_path)
    with open_writer(url) as writer, open_reader(url.partition("?")[0]) as reader:
        with monkeypatch.context() as patch:
            if moment == "before it counts":
                patch.setattr(ClassicWriter, "_count_written", interrupt)
            else:
                patch.setattr(classic_writer, "unwrap", interrupt)
            with pytest.raises(error):
                writer.write_many([b"a"] * 20)
        books = writer.statistics()
        written = len(reader.read_many(99))
        assert written > 0
        assert (books.messages, books.bytes, books.refused) == (written, written, 20 - written)
        assert books.last_seq == written - 1


class InterruptedAppender:
    """The native core of a writer; a signal handler raises an error behind each write of it."""

    def __init__(self, appender: Appender, error: type[BaseException]) -> None:
        self._appender = appender
        self._error = error

    @property
    def count(self) -> int:
        return self._appender.count

    @property
    def last_id(self) -> int:
        return self._appender.last_id

    def append_one(self, *arguments: Any) -> int:
        self._appender.append_one(*arguments)
        raise self._error


@pytest.mark.parametrize("error", [Interrupted, RuntimeError])
def test_a_classic_message_counts_as_written_if_a_signal_comes_behind_its_write(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_writer(SMALL["classic"].format(tmp_path)) as writer:
        assert isinstance(writer, ClassicWriter)
        writer.write(b"one")  # it looks at the path, which a write does once a second
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_now_ns", lambda: writer._looked_at_path * 10**9)
            patch.setattr(writer, "_appender", InterruptedAppender(writer._appender, error))
            with pytest.raises(error):
                writer.write(b"two")
        books = writer.statistics()
    assert (books.messages, books.refused, books.last_seq) == (2, 0, 1)
