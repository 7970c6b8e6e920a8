"""What cannot be done is refused with a typed error, and what was stored is still there."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import (
    InvalidOption,
    Malformed,
    Message,
    PenstockError,
    Position,
    Unsupported,
    create,
    open_reader,
    open_writer,
)
from penstock.core.batch import batch_from_messages
from penstock.core.errors import (
    Closed,
    CursorInUse,
    CursorTableFull,
    LockTimeout,
    MessageTooLarge,
    PositionError,
    StorageError,
)
from penstock.queue.wide.file import QueueFile
from penstock.queue.wide.writer import WideWriter
from support.wide_files import SMALL, put_state, row, stored, unchanged
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import list_queue


def writer_of(path: str, options: str = SMALL) -> WideWriter:
    return wide_writer(f"fmq:{path}?{options}")


# --- messages -----------------------------------------------------------------------------------


def test_messages_of_no_bytes_are_messages(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"")
        writer.write_many([b"", bytearray(), memoryview(b"")])
        writer.write_batch(batch_from_messages([row(b""), row(b"", attributes=b"")]))
        writer.reserve(0).commit()
        writer.reserve(100).commit(0)
        assert writer.statistics().messages == 8
        assert writer.statistics().bytes == 0
    assert stored(queue_path) == [b""] * 8
    assert list_queue(f"{queue_path}.fmq").messages[5].attributes == b""
    with wide_reader(f"fmq:{queue_path}") as reader:
        assert reader.read_batch(10).column("payload").to_pylist() == [b""] * 8
        reader.seek(Position.START)
        with reader.view(timeout=0) as message:
            assert message is not None
            assert bytes(message.payload) == b""
        with reader.view_batch(10) as batch:
            assert batch.column("payload").to_pylist() == [b""] * 7


def ways_to_write(writer: WideWriter, payload: bytes, **header: Any) -> list[Callable[[], object]]:
    return [
        partial(writer.write, payload, **header),
        partial(writer.write_batch, batch_from_messages([row(payload, **header)])),
        partial(writer.reserve, len(payload), **header),
    ]


def test_a_message_larger_than_the_buffer_is_refused_and_nothing_is_harmed(
    queue_path: str,
) -> None:
    with writer_of(queue_path) as writer:
        writer.write_many([b"one", b"two"])
        writes: list[Callable[[], object]] = [
            *ways_to_write(writer, bytes(4097)),
            *ways_to_write(writer, bytes(4089), attributes=b"a"),
            partial(writer.write_many, [bytes(5000)]),
            partial(writer.reserve, 2**40),
            partial(writer.reserve, 2**80),
        ]
        with unchanged(queue_path):
            for write in writes:
                with pytest.raises(MessageTooLarge) as caught:
                    write()
                assert caught.value.limit == 4096
                assert caught.value.size > 4096
                assert caught.value.hint
        assert writer.statistics().refused == 9
        assert writer.statistics().messages == 2
        assert stored(queue_path) == [b"one", b"two"]
        assert writer.write(bytes(4096)) == 2  # all of the buffer
        assert stored(queue_path) == [bytes(4096)]
        assert writer.write(bytes(4088), attributes=b"a") == 3
        assert stored(queue_path) == [bytes(4088)]


@pytest.mark.parametrize("method", ["none", "lz4", "zstd"])
def test_what_comes_before_a_message_that_is_too_large_is_written(
    queue_path: str, method: str
) -> None:
    with writer_of(queue_path, f"{SMALL}&compress={method}") as writer:
        with pytest.raises(MessageTooLarge):
            writer.write_many([b"1", b"2", bytes(5000), b"3"])
        with pytest.raises(MessageTooLarge):
            writer.write_batch(batch_from_messages([row(b"4"), row(bytes(5000)), row(b"5")]))
        assert writer.statistics().messages == 3
        assert writer.statistics().refused == 4
    assert stored(queue_path) == [b"1", b"2", b"4"]


@pytest.mark.parametrize("method", ["lz4", "zstd"])
def test_a_payload_larger_than_the_buffer_is_refused_also_when_it_would_get_small(
    queue_path: str, method: str
) -> None:
    with writer_of(queue_path, f"{SMALL}&compress={method}") as writer:
        writer.write(bytes(4096))
        with pytest.raises(MessageTooLarge):
            writer.write(bytes(4097))
        with pytest.raises(MessageTooLarge):  # noise gets larger
            writer.write(os.urandom(4096))
        with pytest.raises(MessageTooLarge):
            writer.write_many([b"two", bytes(5000)])
        with pytest.raises(Unsupported):
            writer.reserve(10)
    assert stored(queue_path)[:1] == [bytes(4096)]


def test_a_negative_size_is_refused(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
        with unchanged(queue_path):
            with pytest.raises(ValueError, match="-1"):
                writer.reserve(-1)
            place = writer.reserve(10)
            for size in (-1, -(2**70), 11, 2**70):
                with pytest.raises(ValueError, match="of a reservation of 10"):
                    place.commit(size)
            place.abort()
    with open_reader(f"fmq:{queue_path}") as reader:
        assert reader.read_many(-1) == []
        assert reader.read_many(0, timeout=100) == []
        assert reader.read_batch(-1).num_rows == 0
        assert len(reader.read_many(10)) == 1
    for option in ("slots=-5", "size=-1", "size=0", "slots=0", "slots=1", "readers=-1"):
        with pytest.raises(InvalidOption):
            writer_of(f"{queue_path}-another", option)
    assert not Path(f"{queue_path}-another.fmq").exists()


@pytest.mark.parametrize(
    "header",
    [
        {"type": 2**31},
        {"type": -(2**31) - 1},
        {"subtype": 2**40},
        {"time_ns": 2**63},
        {"created_ns": -(2**63) - 1},
    ],
    ids=str,
)
def test_a_number_that_does_not_fit_is_refused(queue_path: str, header: dict[str, Any]) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here", type=2**31 - 1, subtype=-(2**31), time_ns=-(2**63))
        [name] = header
        with unchanged(queue_path):
            with pytest.raises(OverflowError, match=name):
                writer.write(b"more", **header)
            with pytest.raises(OverflowError, match=name):
                writer.reserve(4, **header)
            if name in {"type", "subtype"}:
                with pytest.raises(OverflowError, match=name):
                    writer.write_many([b"more"], **header)
        assert writer.statistics().refused >= 2
        assert writer.write(b"more") == 1
    assert stored(queue_path) == [b"here", b"more"]


def test_what_is_not_bytes_is_refused(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
        wrong: list[Callable[[Any], object]] = [
            lambda w: w.write("text"),
            lambda w: w.write(None),
            lambda w: w.write(5),
            lambda w: w.write([b"many"]),
            lambda w: w.write(),
            lambda w: w.write(b"more", type="one"),
            lambda w: w.write(b"more", type=1.5),
            lambda w: w.write(b"more", stream=b"short"),
            lambda w: w.write(b"more", stream="00112233445566778899aabbccddeeff"),
            lambda w: w.write(b"more", attributes="text"),
            lambda w: w.write(b"more", colour=5),
            lambda w: w.write(b"more", payload=b"again"),
            lambda w: w.write(b"more", 0, 0, None, None, None, None, None, 8),
            lambda w: w.write(b"more", origin_ns="now"),
            lambda w: w.write_many(5),
            lambda w: w.write_many(["text"]),
            lambda w: w.write_many([b"more"], type="one"),
            lambda w: w.write_split("text", b"x"),
            lambda w: w.write_split(b"text", "x"),
            lambda w: w.write_split(b"text", b""),
            lambda w: w.write_split(b"text"),
            lambda w: w.write_split(b"more", b"x", type="one"),
            lambda w: w.write_batch([b"more"]),
            lambda w: w.reserve("large"),
            lambda w: w.reserve(4, attributes="text"),
        ]
        with unchanged(queue_path):
            for write in wrong:
                with pytest.raises((TypeError, AttributeError)):
                    write(writer)
        assert writer.write_many([b"more"]) == 1
    assert stored(queue_path) == [b"here", b"more"]


def test_a_batch_of_other_columns_is_refused(queue_path: str) -> None:
    good = batch_from_messages([row(b"more")])
    with writer_of(queue_path) as writer:
        writer.write(b"here")
        with unchanged(queue_path):
            for batch in (
                good.select(["seq", "payload"]),
                good.rename_columns([*good.schema.names[:-1], "data"]),
                pa.record_batch({"payload": ["text"]}),
            ):
                with pytest.raises(Malformed):
                    writer.write_batch(batch)
        assert writer.write_batch(good.slice(1)) is None
        assert writer.write_many([]) is None
    assert stored(queue_path) == [b"here"]


# --- reservations ---------------------------------------------------------------------------------


def test_a_reservation_is_finished_once(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        place = writer.reserve(3)
        place.buffer[:] = b"one"
        assert place.commit() == 0
        with pytest.raises(ValueError, match="before"):
            place.commit()
        with pytest.raises(ValueError, match="released"):
            place.buffer[:] = b"two"  # it is the readers' by now
        place.abort()
        given_up = writer.reserve(3)
        given_up.abort()
        given_up.abort()
        with pytest.raises(ValueError, match="before"):
            given_up.commit()
        with pytest.raises(ZeroDivisionError), writer.reserve(3) as place:
            place.buffer[0] = 1 // 0
        with writer.reserve(5) as place:
            place.buffer[:] = b"three"
            place.commit(2)
        assert writer.statistics().messages == 2
    assert stored(queue_path) == [b"one", b"th"]


def test_nothing_else_is_written_while_a_reservation_is_under_way(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"before")
        with writer.reserve(4) as place:
            place.buffer[:] = b"mine"
            with unchanged(queue_path):
                write_many: Callable[[], object] = partial(writer.write_many, [b"more"])
                for write in [*ways_to_write(writer, b"more"), write_many]:
                    with pytest.raises(RuntimeError, match="reservation is under way"):
                        write()
        writer.write(b"after")
    assert stored(queue_path) == [b"before", b"mine", b"after"]


def test_a_reservation_ends_with_its_writer(queue_path: str) -> None:
    writer = writer_of(queue_path)
    writer.write(b"here")
    place = writer.reserve(10)
    writer.close()
    with pytest.raises(ValueError, match="released"):
        place.buffer[:5] = b"lost!"
    with pytest.raises((Closed, ValueError)):
        place.commit()
    place.abort()
    with writer_of(queue_path) as again:
        assert again.write(b"next") == 1
    assert stored(queue_path) == [b"here", b"next"]


# --- readers and writers ------------------------------------------------------------------------


def test_a_closed_writer_writes_nothing(queue_path: str) -> None:
    writer = writer_of(queue_path)
    writer.write(b"here")
    writer.close()
    writer.close()
    for use in [
        *ways_to_write(writer, b"more"),
        lambda: writer.write_many([b"more"]),
        writer.flush,
    ]:
        with pytest.raises(Closed):
            use()
    assert writer.statistics().messages == 1
    assert stored(queue_path) == [b"here"]


def test_a_closed_reader_reads_nothing(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write_many([b"1", b"2"])
    reader = wide_reader(f"fmq:{queue_path}")
    message = reader.read()
    assert message is not None
    reader.close()
    reader.close()

    def view() -> None:
        with reader.view():
            pass

    def view_batch() -> None:
        with reader.view_batch(5):
            pass

    for use in (
        reader.read,
        lambda: reader.read(timeout=0),
        lambda: reader.read_many(5),
        lambda: reader.read_batch(5),
        lambda: list(reader.available()),
        lambda: next(iter(reader)),
        lambda: reader.seek(Position.START),
        reader.newest_seq,
        reader.acknowledge,
        view,
        view_batch,
    ):
        with pytest.raises(Closed):
            use()
    assert reader.statistics().messages == 1
    assert message.payload == b"1"


def test_a_second_writer_is_refused_with_the_name_of_the_first(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
        for _ in range(2):
            with pytest.raises(LockTimeout, match=rf"\b{os.getpid()}\b") as caught:
                open_writer(f"fmq:{queue_path}?lock_timeout=0.05")
            assert caught.value.hint
        with pytest.raises(LockTimeout, match=rf"\b{os.getpid()}\b"):
            create(f"fmq:{queue_path}", replace=True)
        assert writer.write(b"more") == 1
    with writer_of(queue_path) as writer:
        assert writer.write(b"next") == 2
    assert stored(queue_path) == [b"here", b"more", b"next"]


def test_a_sealed_queue_takes_no_more_messages(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
    put_state(queue_path, 1)
    with unchanged(queue_path), pytest.raises(Closed, match="sealed"):
        open_writer(f"fmq:{queue_path}")
    assert stored(queue_path) == [b"here"]


def test_a_place_that_is_none_is_refused(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write_many([b"0", b"1", b"2"])
    with open_reader(f"fmq:{queue_path}", start=1) as reader:
        for place in (-1, 2**63, "someday", "nowhere", "-10"):
            with pytest.raises(PositionError):
                reader.seek(place)
        message = reader.read(timeout=0)
        assert message is not None
        assert message.seq == 1
        for place in (4, 2**63 - 2, 2**63 - 1):
            with pytest.raises(PositionError, match="the next is 3"):
                reader.seek(place)
        reader.seek(3)  # it may come
        assert reader.read(timeout=0.01) is None
        assert reader.statistics().lost == 0


@pytest.mark.parametrize("name", ["x" * 96, "ä" * 48, ",", "one,two"])
def test_a_name_that_a_held_reader_cannot_have_is_refused(queue_path: str, name: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
        with pytest.raises(InvalidOption):
            open_reader(f"fmq:{queue_path}?hold={name}")
    assert list_queue(f"{queue_path}.fmq").readers == []
    assert stored(queue_path) == [b"here"]


def test_a_held_reader_has_its_name_alone_and_a_table_has_an_end(queue_path: str) -> None:
    with writer_of(queue_path, f"{SMALL}&readers=2") as writer:
        writer.write(b"here")
        with open_reader(f"fmq:{queue_path}?hold=a"), open_reader(f"fmq:{queue_path}?hold=b"):
            with pytest.raises(CursorInUse, match="'a'") as caught:
                open_reader(f"fmq:{queue_path}?hold=a")
            assert caught.value.pid == os.getpid()
            with pytest.raises(CursorTableFull):
                open_reader(f"fmq:{queue_path}?hold=c")
            with open_reader(f"fmq:{queue_path}") as passing:  # is not in the table, that is all
                assert passing.read(timeout=0) is not None
        names = [entry.name for entry in list_queue(f"{queue_path}.fmq").readers]
        assert names == ["a", "b"]


def test_a_queue_without_a_reader_table_has_readers_all_the_same(queue_path: str) -> None:
    with writer_of(queue_path, f"{SMALL}&readers=0") as writer:
        writer.write(b"here")
        with open_reader(f"fmq:{queue_path}") as reader:
            assert reader.read(timeout=0) is not None
        with pytest.raises(PenstockError):
            open_reader(f"fmq:{queue_path}?hold=a")
    with pytest.raises(PenstockError):
        open_writer(f"fmq:{queue_path}?hold=a")
    assert stored(queue_path) == [b"here"]


@pytest.mark.parametrize(
    "option",
    [
        "compress=gzip", "sync=often", "policy=maybe", "writers=two", "resume=middle",
        "damaged=maybe", "stream=zebra", "slots=many", "size=large", "colour=red", "crc=maybe",
        "sparse=true&writers=many", "hold=", "timeout=-1s", "slots=2000000000000", "type=x",
        "readers=70000",
    ],
)  # fmt: skip
def test_an_option_that_does_not_fit_is_refused_by_its_name(queue_path: str, option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(InvalidOption) as caught:
        open_writer(f"fmq:{queue_path}?{option}")
    assert caught.value.option == name
    assert not Path(f"{queue_path}.fmq").exists()


def test_a_writer_that_another_thread_closes_ends_with_what_closing_met(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    payload, caught = bytes(64 << 20), None
    for attempt in range(50):  # until it is closed while the payload is copied
        writer = wide_writer(f"fmq:{queue_path}-{attempt}?size=64M&sync=1000s")
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr("os.fdatasync", refuse)
            written = pool.submit(writer.write, payload)
            time.sleep(0.002)
            with suppress(StorageError):
                writer.close()
            caught = written.exception()
        Path(f"{queue_path}-{attempt}.fmq").unlink()
        if caught is not None and not isinstance(caught, Closed):
            break
    assert isinstance(caught, StorageError)


def test_closing_syncs_the_last_messages_also_after_a_failure_that_has_passed(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed, synced = os.fdatasync, threading.Event(), []

    def sync(descriptor: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "the disk is broken")
        synced.append(descriptor)
        real(descriptor)

    writer = wide_writer(f"fmq:{queue_path}?sync=0.5s")
    monkeypatch.setattr("os.fdatasync", sync)
    writer.write(b"one")
    assert failed.wait(10)
    writer.write(b"last")
    assert synced == []
    with pytest.raises(StorageError, match="the disk is broken"):
        writer.close()
    assert len(synced) == 1
    file = QueueFile.open(queue_path, writable=False)
    assert any(file.header.boot_id)  # a crash now needs recovery
    file.close()


def test_messages_whose_sync_failed_are_written_again_before_a_sync_says_that_they_are_safe(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, write, is_broken = os.fdatasync, os.pwrite, True
    again: list[tuple[int, bytes]] = []

    def sync(descriptor: int) -> None:
        if is_broken:
            raise OSError(errno.EIO, "the disk is broken")
        real(descriptor)

    def noted(descriptor: int, data: bytes, at: int) -> int:
        some = data[:3000]  # the kernel may take a part
        again.append((at, some))
        return write(descriptor, some, at)

    with wide_writer(f"fmq:{queue_path}?sync=batch&slots=8&size=4096") as writer:
        monkeypatch.setattr("os.pwrite", noted)
        writer.write(b"safe")
        assert again == []
        monkeypatch.setattr("os.fdatasync", sync)
        with pytest.raises(StorageError):
            writer.write(b"in doubt")
        is_broken = False  # and the kernel has forgotten the pages that it could not write
        writer.flush()
        assert any(b"in doubt" in data for _, data in again)
        del again[:]
        writer.flush()
        assert again == []
    with open_reader(f"fmq:{queue_path}", start="start") as reader:
        assert [message.payload for message in reader.available()] == [b"safe", b"in doubt"]


def test_so_it_is_with_many_writers_though_another_writes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.fdatasync
    unsynced: list[int] = []

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    def sync(descriptor: int) -> None:
        unsynced.append(dirty_pages("broken.fmq"))
        real(descriptor)

    with tempfile.TemporaryDirectory() as folder:
        url = f"fmq:{folder}/broken?sync=1000s&slots=8&size=64k&writers=many"
        with wide_writer(url) as writer, wide_writer(url) as other:
            writer.write(bytes(60_000))
            with monkeypatch.context() as broken:
                broken.setattr("os.fdatasync", refuse)
                with pytest.raises(StorageError):
                    writer.flush()
            with Path(f"{folder}/broken.fmq").open("rb") as file:
                real(file.fileno())  # what the kernel forgets does not look dirty either
            if dirty_pages("broken.fmq"):
                pytest.skip("this file system has no pages that are written")
            other.write(b"another")
            monkeypatch.setattr("os.fdatasync", sync)
            writer.flush()
            assert unsynced[0] >= 15
            other.flush()
            assert unsynced[1] < 5, "nothing failed there"


def dirty_pages(name: str) -> int:
    """Return how many pages of a file this process has mapped that no sync has written."""
    dirty, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match("[0-9a-f]+-", line):
            is_it = line.endswith(name)
        elif is_it and re.match("(Shared|Private)_Dirty", line):
            dirty += int(line.split()[1])
    return dirty // 4


def test_a_message_has_a_hash(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write_many([b"one", b"two"])
    with open_reader(f"fmq:{queue_path}", start="start") as reader:
        one, two = reader.read_many(2)
    assert hash(one) == hash(Message(*one)) == hash(tuple(one))
    assert hash(one) != hash(two)
    assert {one: 1}[Message(*one)] == 1
