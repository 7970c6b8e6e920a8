"""A `psi://` reader goes on where it was, on the same connection or on another."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from cli.command import PENSTOCK
from penstock.core.endpoints import open_reader
from penstock.core.errors import NotFound, PositionError, Unsupported
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.core.position import Position
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.queue.waiting import wait_any
from support.mosquitto import free_port
from support.until import until


def take(reader: Reader, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        more = reader.read_many(count - len(found), 10)
        assert more, f"{len(found)} of {count} came"
        found += more
    return found


def test_a_number_means_the_same_message_on_every_connection() -> None:
    with RemoteExporter(port=0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "byte[]")
        stream.post_many([(str(number).encode(), None) for number in range(300)])
        url = f"psi://127.0.0.1:{exporter.port}/Numbers"
        with open_reader(url) as reader:
            epoch = reader.bounds().epoch
            first = take(reader, 200)
            assert [(m.seq, m.payload) for m in first[:2]] == [(0, b"0"), (1, b"1")]
        with open_reader(url) as reader:
            assert reader.bounds().epoch == epoch
            reader.seek(200)
            assert [m.payload for m in take(reader, 3)] == [b"200", b"201", b"202"]
            assert reader.statistics().lost == 0
            reader.seek(100)  # what is here still is taken from here
            assert [m.seq for m in take(reader, 2)] == [100, 101]
            reader.seek(Position.START)
            assert take(reader, 1)[0].payload == b"0"
            with pytest.raises(PositionError):
                reader.seek(Position.time(5))
        assert exporter.statistics().clients_seen == 2
        with open_reader(url, "end") as reader, pytest.raises(Unsupported):
            reader.bounds()


def test_what_a_small_reader_has_let_go_of_is_asked_for_again() -> None:
    with RemoteExporter(port=0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "byte[]")
        stream.post_many([(str(number).encode(), None) for number in range(900)])
        url = f"psi://127.0.0.1:{exporter.port}/Numbers?slots=64"
        with open_reader(url) as reader:
            take(reader, 800)
            reader.seek(10)
            assert [m.payload for m in take(reader, 2)] == [b"10", b"11"]
            assert reader.statistics().lost == 0


def test_a_stream_that_begins_anew_has_another_epoch_and_its_numbers_begin_anew() -> None:
    port = free_port()
    first = RemoteExporter(port=port)
    url = f"psi://127.0.0.1:{port}/Numbers"
    stream = first.exporter.write(None, "Numbers", "byte[]")
    stream.post_many([(b"old", None)] * 5)
    with open_reader(url) as reader:
        assert [m.seq for m in take(reader, 5)] == [0, 1, 2, 3, 4]
        epoch = reader.bounds().epoch
        first.close()
        with RemoteExporter(port=port) as second:
            stream = second.exporter.write(None, "Numbers", "byte[]")
            stream.post_many([(b"new", None)] * 3)
            found = take(reader, 3)
            assert [(m.seq, m.payload) for m in found] == [(0, b"new"), (1, b"new"), (2, b"new")]
            assert reader.bounds().epoch != epoch
            books = reader.statistics()
            assert (books.restarts, books.lost) == (1, 0)


def test_messages_behind_the_beginning_of_a_stream_made_anew_end_a_wait() -> None:
    port = free_port()
    first = RemoteExporter(port=port)
    stream = first.exporter.write(None, "Numbers", "byte[]")
    stream.post_many([(b"old", None)] * 5)
    with open_reader(f"psi://127.0.0.1:{port}/Numbers") as reader:
        take(reader, 4)
        first.close()
        with RemoteExporter(port=port) as second:
            stream = second.exporter.write(None, "Numbers", "byte[]")
            stream.post_many([(b"new", None)] * 3)
            until(lambda: reader.statistics().backlog == 4)
            assert [m.payload for m in reader.read_many(9)] == [b"old"]
            assert wait_any([reader], 10) == [reader]
            assert [m.payload for m in reader.read_many(9)] == [b"new"] * 3
            assert wait_any([reader], 0) == []


def test_a_copy_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    with RemoteExporter(tmp_path / "rig", port=0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "byte[]")
        url = f"psi://127.0.0.1:{exporter.port}/Numbers"
        copy = [
            PENSTOCK, "cp", url, f"log:{tmp_path}/copy", "--follow",
            "--state", str(tmp_path / "state"), "--progress", "none",
        ]  # fmt: skip
        target = f"log:{tmp_path}/copy"
        sent = 0
        for _ in range(3):
            process = subprocess.Popen(copy)
            try:
                for _ in range(200):
                    stream.post(str(sent).encode())
                    sent += 1
                    time.sleep(0.001)
                until(partial(_has, target, sent - 50), 30)
            finally:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        process = subprocess.Popen(copy)
        stream.post(str(sent).encode())
        sent += 1
        try:
            until(partial(_has, target, sent), 30)
            time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
        with open_reader(target) as reader:
            assert [int(message.payload) for message in reader.available()] == list(range(sent))


def _has(url: str, count: int) -> bool:
    try:
        with open_reader(url) as reader:
            return reader.bounds().end >= count
    except NotFound:
        return False
