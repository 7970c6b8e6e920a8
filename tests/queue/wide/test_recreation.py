"""A queue that is removed while it is used: what is left is read, and then the new one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import aio, create, open_writer
from penstock.core.errors import NotFound
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.statistics import Loss
from penstock.queue import wait_any
from penstock.queue.wide import creation
from penstock.queue.wide.file import QueueFile
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import WideReader
from support.waiting import background, waits
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import list_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How long a reader has, and its writer, to notice.
SOON = 6.0


def by_read(reader: WideReader) -> Iterator[bytes]:
    if message := reader.read(timeout=0.05):
        yield message.payload


def by_polling(reader: WideReader) -> Iterator[bytes]:
    time.sleep(0.01)
    if message := reader.read(timeout=0):
        yield message.payload


def by_many(reader: WideReader) -> Iterator[bytes]:
    for message in reader.read_many(10, timeout=0.05):
        yield message.payload


def by_batch(reader: WideReader) -> Iterator[bytes]:
    yield from reader.read_batch(10, timeout=0.05)["payload"].to_pylist()


def by_available(reader: WideReader) -> Iterator[bytes]:
    time.sleep(0.01)
    for message in reader.available():
        yield message.payload


def by_view(reader: WideReader) -> Iterator[bytes]:
    with reader.view(timeout=0.05) as message:
        if message is not None:
            yield bytes(message.payload)


def by_waiting(reader: WideReader) -> Iterator[bytes]:
    if wait_any([reader], timeout=0.05):
        yield from by_many(reader)


def until(
    way: Callable[[WideReader], Iterator[bytes]], reader: WideReader, last: bytes
) -> list[bytes]:
    found: list[bytes] = []
    deadline = time.monotonic() + SOON
    while last not in found and time.monotonic() < deadline:
        found += way(reader)
    return found


@pytest.mark.parametrize(
    "way", [by_read, by_polling, by_many, by_batch, by_available, by_view, by_waiting]
)
def test_a_reader_that_never_waits_long_finds_the_queue_that_took_the_place_of_its_own(
    queue_path: str, way: Callable[[WideReader], Iterator[bytes]]
) -> None:
    url = f"fmq:{queue_path}?slots=64"
    with wide_writer(url) as writer:
        writer.write_many([b"a", b"b"])
        with wide_reader(f"fmq:{queue_path}") as reader:
            assert until(way, reader, b"b") == [b"a", b"b"]
            Path(f"{queue_path}.fmq").unlink()
            writer.write_many([b"c", b"d"])  # into the file that has no name
            writer.close()
            with wide_writer(url) as other:
                other.write_many([b"e", b"f"])
                assert until(way, reader, b"f") == [b"c", b"d", b"e", b"f"]
            books = reader.statistics()
            assert (books.messages, books.lost, books.restarts) == (6, 0, 1)


def test_nothing_is_missed_of_a_queue_that_is_removed_while_it_is_written(queue_path: str) -> None:
    count, done = 0, threading.Event()

    def write() -> None:
        nonlocal count
        with open_writer(f"fmq:{queue_path}?slots=65536") as writer:
            while not done.is_set():
                writer.write(b"%d" % count)
                count += 1
                time.sleep(0.001)

    thread = threading.Thread(target=write)
    with wide_writer(f"fmq:{queue_path}?slots=65536"):
        pass
    with wide_reader(f"fmq:{queue_path}") as reader:
        thread.start()
        found: list[bytes] = []
        began, removed = time.monotonic(), False
        while time.monotonic() - began < 2.5:
            found += by_many(reader)
            if not removed and time.monotonic() - began > 0.3:
                Path(f"{queue_path}.fmq").unlink()
                removed = True
        done.set()
        thread.join()
        while payloads := list(by_many(reader)):
            found += payloads
        assert reader.statistics().restarts == 1
        assert reader.statistics().lost == 0
    assert found == [b"%d" % n for n in range(count)]


def test_what_was_overwritten_in_the_new_queue_before_the_reader_came_is_counted(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}?slots=8"
    wide_writer(url).close()
    with wide_reader(f"fmq:{queue_path}") as reader:
        Path(f"{queue_path}.fmq").unlink()
        with wide_writer(url) as writer:
            writer.write_many(b"%d" % n for n in range(20))
            assert until(by_many, reader, b"19") == [b"%d" % n for n in range(12, 20)]
        assert reader.statistics().losses == (Loss(0, 11, DropReason.OVERRUN),)


def test_what_somebody_still_writes_to_a_removed_queue_is_counted(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.queue.wide.reader._WRITER_NOTICES", 0.2)
    url = f"fmq:{queue_path}?slots=8"
    with wide_writer(url) as stubborn:
        monkeypatch.setattr(stubborn, "_look", lambda *_: None)  # it does not notice
        stubborn.write(b"old")
        with wide_reader(f"fmq:{queue_path}") as reader:
            assert until(by_many, reader, b"old") == [b"old"]
            Path(f"{queue_path}.fmq").unlink()
            with wide_writer(url) as writer:
                writer.write(b"new")
                assert until(by_many, reader, b"new") == [b"new"]
                stubborn.write_many([b"to", b"nobody"])
                books = reader.statistics()
                assert books.losses == (Loss(1, 2, DropReason.RECREATED),)


@pytest.mark.parametrize("compress", ["", "&compress=lz4"])
def test_a_reader_of_a_queue_that_was_created_anew_leaves_the_rows_of_others_alone(
    queue_path: str, compress: str
) -> None:
    url = f"fmq:{queue_path}?slots=64&readers=4{compress}"
    with wide_writer(url) as writer:
        writer.write(b"old")
        with wide_reader(f"fmq:{queue_path}") as first, wide_reader(f"fmq:{queue_path}") as second:
            assert until(by_many, first, b"old") == until(by_many, second, b"old") == [b"old"]
            first.close()
            Path(f"{queue_path}.fmq").unlink()
            writer.close()
            # There, the row that it had in the old queue is another reader's, which is held.
            with wide_writer(f"{url}&hold=a,b&keep=true&policy=fail") as other:
                other.write_many([b"new", b"newer"])
                assert until(by_many, second, b"newer") == [b"new", b"newer"]
                second.acknowledge()
                rows = list_queue(f"{queue_path}.fmq").readers
                assert [(row.name, row.position) for row in rows] == [("a", 0), ("b", 0), ("", 2)]


def test_a_reader_of_a_compressed_queue_stays_within_the_table_of_the_new_one(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}?slots=64&compress=lz4"
    with wide_writer(f"{url}&readers=32") as writer:
        writer.write(b"old")
    with wide_reader(f"fmq:{queue_path}") as reader:
        assert until(by_many, reader, b"old") == [b"old"]
        Path(f"{queue_path}.fmq").unlink()
        with wide_writer(f"{url}&readers=0") as writer:  # slots are where its row was
            writer.write_many([b"new", b"newer"])
            assert until(by_many, reader, b"newer") == [b"new", b"newer"]
            reader.acknowledge()
            # Its place in the old table would be the time of the first message here.
            assert list_queue(f"{queue_path}.fmq").messages[0].created_ns > 2


def test_a_task_that_waits_for_moments_finds_the_new_queue(queue_path: str) -> None:
    async def follow() -> list[bytes]:
        found: list[bytes] = []
        async with aio.open_reader(f"fmq:{queue_path}") as reader:
            deadline = time.monotonic() + SOON
            while b"new" not in found and time.monotonic() < deadline:
                message = await reader.read(timeout=0.05)
                if message is not None:
                    found.append(message.payload)
                    if found == [b"old"]:
                        replace()
        return found

    def replace() -> None:
        Path(f"{queue_path}.fmq").unlink()
        with wide_writer(f"fmq:{queue_path}") as writer:
            writer.write(b"new")

    with wide_writer(f"fmq:{queue_path}") as writer:
        writer.write(b"old")
    assert asyncio.run(follow()) == [b"old", b"new"]


def test_a_writer_that_was_silent_for_long_writes_to_the_queue_that_is_there_now(
    queue_path: str,
) -> None:
    with wide_writer(f"fmq:{queue_path}?slots=64") as writer:
        writer.write(b"one")
        time.sleep(1.1)
        Path(f"{queue_path}.fmq").unlink()
        wide_writer(f"fmq:{queue_path}?slots=64").close()
        writer.write(b"two")
    assert [message.payload for message in list_queue(f"{queue_path}.fmq").messages] == [b"two"]


def test_a_message_that_is_refused_because_its_queue_was_removed_is_nowhere(
    queue_path: str,
) -> None:
    wide_writer(f"fmq:{queue_path}?slots=64").close()
    kept = Path(f"{queue_path}-kept.fmq")
    kept.hardlink_to(f"{queue_path}.fmq")
    with wide_writer(f"fmq:{queue_path}?create=never") as writer:
        writer.write(b"one")
        time.sleep(1.1)
        Path(f"{queue_path}.fmq").unlink()
        with pytest.raises(NotFound):
            writer.write(b"two")
        assert (writer.statistics().messages, writer.statistics().refused) == (1, 1)
    assert [message.payload for message in list_queue(str(kept)).messages] == [b"one"]


def test_a_reader_that_cannot_see_writers_gets_what_one_still_writes_to_the_removed_queue(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(f"{url}?slots=64") as writer:
        writer.write(b"one")
        file = QueueFile.open(queue_path, writable=False)  # as of a file of somebody else
        with WideReader(url, queue_path, Position.START, WideOptions(), file) as reader:
            assert [message.payload for message in reader.read_many(9)] == [b"one"]
            Path(f"{queue_path}.fmq").unlink()
            with wide_writer(f"{url}?slots=64") as other:
                other.write(b"new")
            found = reader.read_many(1, timeout=0.3)
            writer.write(b"late")
            while len(found) < 2 and (message := reader.read(timeout=SOON)):
                found.append(message)
            assert {message.payload for message in found} == {b"late", b"new"}
            assert reader.statistics().lost == 0


def test_a_writer_that_comes_while_the_queue_is_replaced_writes_to_the_new_one(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fmq:{queue_path}"
    wide_writer(f"{url}?slots=64").close()
    write_new_file = creation.write_new_file

    def write() -> None:
        with open_writer(url) as writer:
            writer.write(b"one")

    with contextlib.ExitStack() as stack:
        writing = []

        def make_slowly(*arguments: Any, **options: Any) -> None:
            writing.append(stack.enter_context(background(write)))
            assert waits(writing[0]), "it writes to what is thrown away"
            write_new_file(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(creation, "write_new_file", make_slowly)
            create(url, replace=True, slots=128)
        writing[0].result()
    found = list_queue(f"{queue_path}.fmq")
    assert (found.header.slots, [m.payload for m in found.messages]) == (128, [b"one"])


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_what_was_written_to_a_removed_stream_until_the_end_is_told(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_writer(f"{kind}:{tmp_path}/x") as writer:
        writer.write(b"there")
        for path in sorted(tmp_path.rglob("*.fmq")):
            path.unlink()
        writer.write(b"gone")
    assert "was removed with all its messages; the last 2 of them" in caplog.text
