"""Streams behind the URLs of a source; live ones are copied to a log."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
import zlib
from typing import TYPE_CHECKING, cast

import pytest

from penstock import open_reader, open_writer
from penstock.core.errors import MessageTooLarge, StorageError
from penstock.pipeline.source.inputs import LiveCopy, LostBefore
from penstock.protocols.jrtc.endpoint import DatagramReader
from penstock.protocols.uprotocol.topic_reader import TopicReader
from penstock.queue.log.writer import LogWriter
from protocols.jrtc.forwarded import HOST, STATUS, send
from protocols.lhhttt.queues import Prototype
from support.mosquitto import free_port, mosquitto
from support.small_disks import small_disk_at
from support.until import until

if TYPE_CHECKING:
    from pathlib import Path

    from penstock import Batch
    from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg


def live_reader() -> DatagramReader:
    reader = open_reader(f"jrtc+udp://{HOST}:0")
    assert isinstance(reader, DatagramReader)
    return reader


def test_messages_that_had_come_when_a_copy_is_stopped_are_in_its_log(tmp_path: Path) -> None:
    reader = live_reader()
    for at in range(0, 5000, 100):
        send(reader.port, *(STATUS + b"%d" % i for i in range(at, at + 100)))
    until(lambda: reader.statistics().backlog + reader.statistics().lost == 5000)
    assert not reader.statistics().lost
    copy = LiveCopy(reader, f"log:{tmp_path}/stage")
    copy.stop()
    with open_reader(copy.place) as log:
        assert [int(message.payload) for message in log.read_many(6000)] == list(range(5000))


def test_messages_that_a_stopped_copy_has_no_time_for_are_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.source.inputs._TIME_TO_DRAIN", 0.0)
    reader = live_reader()
    send(reader.port, *(STATUS for _ in range(100)))
    until(lambda: reader.statistics().backlog == 100)
    copy = LiveCopy(reader, f"log:{tmp_path}/stage")
    copy.stop()
    until(lambda: not copy._worker.is_alive)
    with open_reader(copy.place) as log:
        kept = len(log.read_many(200))
    assert kept + copy.lost.total == 100


def test_messages_that_had_come_when_a_copy_fails_are_counted_as_lost(tmp_path: Path) -> None:
    reader = live_reader()
    send(reader.port, *(STATUS + b"%d" % i for i in range(50)))
    send(reader.port, STATUS + bytes(20_000))
    send(reader.port, *(STATUS + b"%d" % i for i in range(50)))
    until(lambda: reader.statistics().backlog == 101)
    copy = LiveCopy(reader, f"log:{tmp_path}/stage?segment=16K")
    until(lambda: not copy._worker.is_alive)
    with pytest.raises(MessageTooLarge):
        copy.check()
    with open_reader(copy.place) as log:
        kept = len(log.read_many(200))
    assert copy.lost.total == 101 - kept
    again = LiveCopy(live_reader(), copy.place)
    again.stop()
    assert again.lost.total == 101 - kept


def test_what_a_stopping_copy_receives_until_it_is_closed_is_in_its_log_or_lost(
    tmp_path: Path,
) -> None:
    reader, is_over = live_reader(), threading.Event()

    def produce() -> None:
        while not is_over.wait(0.001):
            with contextlib.suppress(ConnectionRefusedError):  # it was closed
                send(reader.port, *(STATUS for _ in range(20)))

    producer = threading.Thread(target=produce)
    producer.start()
    copy = LiveCopy(reader, f"log:{tmp_path}/stage")
    until(lambda: reader.statistics().messages > 100)
    copy.stop()
    is_over.set()
    producer.join()
    with open_reader(copy.place) as log:
        kept = len(log.read_many(100_000))
    kernel = reader._server.statistics()
    assert kept + copy.lost.total == kernel.received + kernel.dropped


def test_what_an_importer_received_and_its_copy_had_no_time_for_is_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.source.inputs._TIME_TO_DRAIN", 0.0)
    exported = f"psi://127.0.0.1:{free_port()}/A"
    with open_writer(exported, linger=0) as writer, open_reader(exported, start="end") as reader:
        writer.write_many([b"%d" % i for i in range(3000)])
        until(lambda: reader.statistics().backlog == 3000)
        copy = LiveCopy(reader, f"log:{tmp_path}/stage")
        copy.stop()
        until(lambda: not copy._worker.is_alive)
    with open_reader(copy.place) as log:
        assert len(log.read_many(4000)) + copy.lost.total == 3000


def test_what_came_by_zenoh_and_its_copy_had_no_time_for_is_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.source.inputs._TIME_TO_DRAIN", 0.0)
    topic = f"up+zenoh://127.0.0.1:{free_port()}/?topic=up://vehicle/1/1/9000"
    reader = open_reader(f"{topic}&listen=true")
    assert isinstance(reader, TopicReader)
    with open_writer(topic) as writer:
        writer.write_many([b"%d" % i for i in range(4000)])
    pump = cast("ZenohLeg", reader._leg)._pump
    assert pump is not None
    until(lambda: reader.statistics().backlog + len(pump._waiting) == 4000)
    copy = LiveCopy(reader, f"log:{tmp_path}/stage")
    copy.stop()
    with open_reader(copy.place) as log:
        kept = len(log.read_many(5000))
    assert kept + copy.lost.total == 4000


def test_a_log_is_free_for_the_next_copy_soon_though_the_stream_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LogWriter.write_batch

    def write_slowly(writer: LogWriter, batch: Batch) -> int | None:
        time.sleep(0.05)  # a disk that is so slow that more has always come
        return write(writer, batch)

    exported = f"psi://127.0.0.1:{free_port()}/A"
    is_over = threading.Event()
    with open_writer(exported, linger=0) as writer, open_reader(exported, start="end") as reader:

        def produce() -> None:
            while not is_over.wait(0.01):
                writer.write_many([b"beam"] * 20)

        producer = threading.Thread(target=produce)
        producer.start()
        try:
            until(lambda: reader.statistics().backlog > 0)
            monkeypatch.setattr(LogWriter, "write_batch", write_slowly)
            copy = LiveCopy(reader, f"log:{tmp_path}/stage")
            until(lambda: reader.statistics().messages > 0)
            copy.ask_to_stop()
            open_writer(copy.place).close()  # as the next planner does
        finally:
            is_over.set()
            producer.join()
            copy.stop()


def test_what_was_taken_from_a_queue_that_takes_nothing_back_is_in_the_log_or_lost(
    tmp_path: Path,
) -> None:
    with Prototype() as queue:
        queue.messages[:] = [b"0"] * 50 + [bytes(20_000)] + [b"1"] * 50
        reader = open_reader(f"{queue.url}?mode=legacy")
        copy = LiveCopy(reader, f"log:{tmp_path}/stage?segment=16K")
        until(lambda: not copy._worker.is_alive)
        left = len(queue.messages)
    with open_reader(copy.place) as log:
        assert len(log.read_many(200)) + copy.lost.total == 101 - left


def test_what_a_broker_delivers_again_after_a_copy_failed_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    with mosquitto(tmp_path / "broker") as broker:
        topic = f"up+{broker.url}/?topic=up://vehicle/1/1/9000"
        reader = open_reader(f"{topic}&client_id=stage")
        with open_writer(topic) as writer:
            for i in range(101):
                writer.write(b"%5d" % i + bytes(20_000 * (i == 50)))
        copy = LiveCopy(reader, f"log:{tmp_path}/stage?segment=16K")
        until(lambda: not copy._worker.is_alive)
        assert copy.lost.total == 0
        again = LiveCopy(open_reader(f"{topic}&client_id=stage"), f"log:{tmp_path}/larger")
        kept: set[int] = set()
        with open_reader(copy.place) as before, open_reader(again.place) as after:

            def has_all() -> bool:
                kept.update(
                    int(m.payload[:5]) for log in (before, after) for m in log.read_many(200)
                )
                return kept == set(range(101))

            until(has_all)
        again.stop()
        assert again.lost.total == 0


def test_messages_that_a_full_disk_costs_are_counted_and_the_log_is_the_error(
    tmp_path: Path,
) -> None:
    with small_disk_at(tmp_path / "disk", "4M") as disk:
        reader = live_reader()
        for _ in range(100):
            send(reader.port, *(STATUS + bytes(1000) for _ in range(50)))
        until(lambda: reader.statistics().backlog + reader.statistics().lost == 5000)
        copy = LiveCopy(reader, f"log:{disk}/stage?segment=256K")
        with (disk / "others").open("wb", buffering=0) as others, contextlib.suppress(OSError):
            while others.write(bytes(4096)):
                pass
        until(lambda: not copy._worker.is_alive)
        with pytest.raises(StorageError) as failure:
            copy.check()
        assert failure.value.errno == errno.ENOSPC
        assert "lost.json" not in str(failure.value)
        with open_reader(copy.place) as log:
            lost = 5000 - len(log.read_many(6000))
        assert copy.lost.total == lost > 0
        (disk / "others").unlink()
        again = LiveCopy(live_reader(), copy.place)
        again.stop()
        assert again.lost.total == lost


def test_a_count_of_an_earlier_release_and_one_that_is_half_written_go_on(tmp_path: Path) -> None:
    file = tmp_path / "stage.lost.json"
    for content in (b'{"lost": 7}', None):
        if content is not None:
            file.write_bytes(content)
        else:  # a power failure while the second of two was written
            file.write_bytes(file.read_bytes()[:4096] + b'{"lost": 80'.ljust(4096))
        copy = LiveCopy(live_reader(), f"log:{tmp_path}/stage")
        copy.stop()
        # An earlier release did not tell which of them a query had counted: all count as old.
        assert copy.lost == LostBefore(total=7, counted=7)
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(each["lost"], each["counted"]) for each in records] == [(7, 7)] * 2


def test_a_record_of_an_earlier_release_beside_its_older_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "stage.lost.json"
    records = [json.dumps({"lost": n, "crc32": zlib.crc32(b"%d" % n)}) for n in (12, 9)]
    file.write_text("".join(record.ljust(4095) + "\n" for record in records))
    copy = LiveCopy(live_reader(), f"log:{tmp_path}/stage")
    copy.note_counted(10)  # an offset that is older than the file
    copy.stop()
    assert copy.lost == LostBefore(total=12, counted=12)


def test_how_much_of_a_count_queries_have_counted_is_kept_beside_it(tmp_path: Path) -> None:
    (tmp_path / "stage.lost.json").write_text("")
    reader = live_reader()
    send(reader.port, STATUS + bytes(20_000), *(STATUS for _ in range(9)))
    until(lambda: reader.statistics().backlog == 10)
    copy = LiveCopy(reader, f"log:{tmp_path}/stage?segment=16K")
    until(lambda: not copy._worker.is_alive)
    assert copy.lost == LostBefore(total=10, counted=0)
    for counted, known in ((4, 4), (10, 10), (3, 10), (11, 10)):
        copy.note_counted(counted)
        assert copy.lost == LostBefore(total=10, counted=known)
        again = LiveCopy(live_reader(), copy.place)
        again.stop()
        assert again.lost == copy.lost
