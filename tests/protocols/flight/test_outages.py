"""Connections that break and servers that die: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock import Batch, create, describe, open_reader, open_writer, wait_any
from penstock.core.errors import ConnectionLost, NotFound, ServerBusy, Unacknowledged
from penstock.core.overflow import QueueFull
from penstock.protocols.flight import bulk
from penstock.protocols.flight.errors import UnknownWriter
from penstock.protocols.flight.server import FlightServer
from penstock.protocols.flight.shared_writers import ClientWriter
from penstock.protocols.flight.wire import Outcome, Piece
from protocols.flight.serving import ServerProcess, served, server_process, wire_to
from support.mosquitto import free_port
from support.until import until
from support.waiting import SOON, background, waits


def payloads_of(local: str) -> list[bytes]:
    with open_reader(local) as reader:
        return [message.payload for message in reader.available()]


def wait_for_count(local: str, count: int) -> None:
    deadline = time.monotonic() + SOON
    while describe(local).count < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_goes_on_after_each_cut(server: FlightServer, name: str, local: str) -> None:
    with open_writer(f"log:{local}") as writer:
        writer.write_many([b"%d" % i for i in range(20_000)])
    seen: list[int] = []
    with wire_to(server.port) as wire, open_reader(wire.url(name), chunk=4096) as reader:
        while messages := reader.read_many(700):
            if len(seen) // 4000 != (len(seen) + len(messages)) // 4000:
                wire.cut()
            seen += [m.seq for m in messages]
        assert wire.connections > 1
        assert reader.statistics().lost == 0
    assert seen == list(range(20_000))


def test_a_reader_that_waits_goes_on_after_a_cut(
    server: FlightServer, name: str, local: str
) -> None:
    create(f"fmq:{local}")
    with (
        wire_to(server.port) as wire,
        open_reader(wire.url(name)) as reader,
        background(reader.read, 10) as call,
    ):
        assert waits(call)
        wire.cut()
        assert waits(call)
        with open_writer(f"fmq:{local}") as writer:
            writer.write(b"after")
        assert call.result(SOON) is not None


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_reader_survives_kill_and_restart_of_the_server(tmp_path: Path, kind: str) -> None:
    _read_through_kills(tmp_path, kind, count=30_000, kills=1)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_reader_survives_many_kills_of_the_server(tmp_path: Path, kind: str) -> None:
    _read_through_kills(tmp_path, kind, count=1_000_000, kills=12)


def _read_through_kills(root: Path, kind: str, count: int, kills: int) -> None:
    local = f"{kind}:{root}/beams" + ("?slots=1048576&size=256M" if kind == "fmq" else "")
    rng = random.Random(1)
    written, read = hashlib.sha256(), hashlib.sha256()
    with server_process(root) as server, open_writer(local) as writer:
        at = sorted(rng.sample(range(count // 10, count), kills))
        with open_reader(f"{server.url}beams", chunk="16k") as reader:
            seen = 0

            def write() -> None:
                for start in range(0, count, 1000):
                    payloads = [b"%d %s" % (i, os.urandom(20)) for i in range(start, start + 1000)]
                    for payload in payloads:
                        written.update(payload)
                    writer.write_many(payloads)

            thread = threading.Thread(target=write)
            thread.start()
            while seen < count:
                for message in reader.read_many(1000, 20):
                    assert message.seq == seen
                    read.update(message.payload)
                    seen += 1
                if at and seen >= at[0]:
                    del at[0]
                    server.kill()
                    server.start()
            thread.join()
            assert reader.read(0) is None
            books = reader.statistics()
    assert (books.messages, books.lost, books.restarts) == (count, 0, 0)
    assert read.digest() == written.digest()


def test_a_held_reader_survives_kill_and_restart_of_the_server(tmp_path: Path) -> None:
    local = f"fmq:{tmp_path}/beams"
    create(f"{local}?slots=64&size=64k")
    with (
        server_process(tmp_path) as server,
        open_reader(f"{server.url}beams", hold="archive") as reader,
        open_writer(f"{local}?hold=archive&keep=true&timeout=30s") as writer,
    ):
        seen: list[int] = []
        with background(writer.write_many, [b"%d" % i for i in range(1000)]) as call:
            while len(seen) < 1000:
                seen += [m.seq for m in reader.read_many(20, 10)]
                if 400 < len(seen) < 430:
                    server.kill()
                    server.start()
            call.result(SOON)
        assert seen == list(range(1000))
        assert reader.statistics().lost == 0


def test_a_client_that_dies_lets_go_of_its_name(
    server: FlightServer, name: str, local: str
) -> None:
    create(f"fmq:{local}?slots=8&size=4k")
    with wire_to(server.port) as wire:
        reader = open_reader(wire.url(name), hold="archive", retry=0)
        with open_writer(f"fmq:{local}?hold=archive&timeout=10s") as writer:
            writer.write_many([b"x"] * 8)
            with background(writer.write, b"waits") as call:
                assert waits(call)
                wire.cut()  # as when its machine goes down
                call.result(SOON)
        reader.close()


def test_without_a_server_the_error_comes_at_once_when_opening() -> None:
    began = time.monotonic()
    for call in (open_reader, open_writer, describe, create):
        with pytest.raises(ConnectionLost) as caught:
            call("flight://127.0.0.1:1/a")
        assert caught.value.server == "127.0.0.1:1"
        assert caught.value.hint
    assert time.monotonic() - began < SOON


def test_a_reader_can_wait_for_its_server(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/a")
    port = free_port()
    with background(lambda: open_reader(f"flight://127.0.0.1:{port}/a?wait=20s").close()) as call:
        assert waits(call)
        with served(tmp_path, port=port):
            call.result(SOON)


def test_a_reader_gives_up_when_its_time_is_over(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/a")
    with server_process(tmp_path) as server, open_reader(f"{server.url}a", retry="300ms") as reader:
        server.kill()
        with pytest.raises(ConnectionLost) as caught:
            reader.read(0)
        assert "gave up" in caught.value.__notes__[0]
        server.start()
        with open_writer(f"fmq:{tmp_path}/a") as writer:
            writer.write(b"x")
        assert reader.read(5) is not None  # and goes on when it is asked again


def test_who_waits_for_several_readers_waits_no_longer_for_one_whose_server_is_away(
    tmp_path: Path,
) -> None:
    create(f"fmq:{tmp_path}/a")
    with server_process(tmp_path) as server, open_reader(f"{server.url}a", retry="4s") as reader:
        server.kill()
        began = time.monotonic()
        assert wait_any([reader], timeout=0.5) == []
        assert time.monotonic() - began < 3
        assert wait_any([reader], timeout=20) == [reader]  # after `retry`: its read raises
        server.start()
        with open_writer(f"fmq:{tmp_path}/a") as writer:
            writer.write(b"x")
        assert wait_any([reader], timeout=SOON) == [reader]
        assert reader.read(5) is not None


def test_a_child_that_was_forked_is_told_to_start_anew(url: str, local: str) -> None:
    create(f"fmq:{local}")
    code = (
        "import os, sys, penstock\n"
        "reader = penstock.open_reader(sys.argv[1])\n"
        "pid = os.fork()\n"
        "if pid:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "for call in (lambda: reader.read(0), lambda: penstock.open_reader(sys.argv[1])):\n"
        "    try:\n"
        "        call()\n"
        "    except penstock.Unsupported as error:\n"
        "        assert 'spawn' in error.hint\n"
        "    else:\n"
        "        os._exit(1)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, url], timeout=20, check=False)
    assert done.returncode == 0


# --- writers --------------------------------------------------------------------------------------


def test_a_batch_whose_answer_was_cut_off_is_appended_once(
    server: FlightServer, name: str, local: str
) -> None:
    with (
        wire_to(server.port) as wire,
        open_writer(wire.url(name), chunk=1024, bulk=False) as writer,
    ):
        writer.write(b"first")
        wire.answers.clear()
        with background(writer.write_many, [b"%d" % i for i in range(500)]) as call:
            wait_for_count(f"fmq:{local}", 20)  # appended, and the client cannot know
            wire.cut()
            wire.answers.set()
            assert call.result(SOON) == 500
        assert writer.write(b"last") == 501
        books = writer.statistics()
        assert wire.connections > 1
    assert payloads_of(f"fmq:{local}") == [b"first", *(b"%d" % i for i in range(500)), b"last"]
    assert (books.messages, books.refused) == (502, 0)


def test_a_writer_survives_cuts_at_any_moment(server: FlightServer, name: str, local: str) -> None:
    rng = random.Random(2)
    with wire_to(server.port) as wire:
        done = threading.Event()

        def cut() -> None:
            while not done.wait(rng.uniform(0.03, 0.15)):
                wire.cut()

        with open_writer(f"{wire.url(name)}?kind=log", chunk=2048) as writer:
            thread = threading.Thread(target=cut)
            thread.start()
            try:
                for start in range(0, 6000, 600):
                    writer.write_many([b"%d" % i for i in range(start, start + 600)])
            finally:
                done.set()
                thread.join()
            assert wire.connections > 2
            assert writer.statistics().messages == 6000
    assert payloads_of(f"log:{local}") == [b"%d" % i for i in range(6000)]


def test_a_write_that_a_dying_server_did_not_answer_is_told(tmp_path: Path) -> None:
    local = f"fmq:{tmp_path}/a"
    create(f"{local}?slots=64&size=64k")
    with (
        server_process(tmp_path) as server,
        open_reader(f"{local}?hold=slow") as reader,
        open_writer(f"{server.url}a", hold="slow", chunk=1024) as writer,
    ):
        writer.write_many([b"before"] * 10)
        with background(writer.write_many, [b"%d" % i for i in range(100)]) as call:
            wait_for_count(local, 64)  # it is in the midst of it: the reader is behind
            _restart(server)
            with pytest.raises(Unacknowledged) as caught:
                call.result(SOON)
        error = caught.value
        stored = describe(local).count - 10
        assert 0 <= error.acknowledged <= stored <= error.acknowledged + error.in_doubt
        assert error.in_doubt > 0
        assert f"{error.in_doubt:,}" in str(error)
        assert len(reader.read_many(1000)) == stored + 10
        assert reader.read(0) is None
        assert writer.write(b"after") == stored + 10
        books = writer.statistics()
        assert books.messages == 10 + error.acknowledged + 1


def test_a_write_in_doubt_is_told_as_such_also_if_the_server_is_full_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = f"fmq:{tmp_path}/a"
    create(f"{local}?slots=8&size=64k")
    with (
        open_reader(f"{local}?hold=slow") as reader,
        served(tmp_path, max_clients=1, bulk_port="off") as server,
        wire_to(server.port) as wire,
        open_writer(wire.url("a"), hold="slow", retry="300ms") as writer,
    ):
        with background(writer.write_many, [b"%d" % i for i in range(12)]) as call:
            wait_for_count(local, 8)  # the call goes on over there, and is the only one allowed
            wire.cut()
            with pytest.raises(Unacknowledged) as caught:
                call.result(SOON)
        assert (caught.value.acknowledged, caught.value.in_doubt) == (0, 12)
        assert isinstance(caught.value.__cause__, ServerBusy)
        assert len(reader.read_many(8)) == 8
        assert len(reader.read_many(8, SOON)) == 4
        until(lambda: not server.statistics().clients)
    assert "a call failed" not in caplog.text  # that its client has left is no fault of the server


def test_a_write_that_is_refused_after_a_cut_is_not_in_doubt(
    server: FlightServer, name: str, local: str
) -> None:
    create(f"fmq:{local}?slots=8&size=64k")
    with (
        open_reader(f"fmq:{local}?hold=slow"),
        wire_to(server.port) as wire,
        open_writer(wire.url(name), hold="slow", policy="fail", chunk=1024, bulk=False) as writer,
    ):
        wire.answers.clear()
        with background(writer.write_many, [b"%d" % i for i in range(100)]) as call:
            wait_for_count(f"fmq:{local}", 8)
            wire.cut()
            wire.answers.set()
            with pytest.raises(QueueFull) as caught:
                call.result(SOON)
        assert "8 messages of this call are appended" in caught.value.__notes__
        assert writer.statistics().messages == 8


@pytest.mark.parametrize("bulk", [False, True])
def test_writers_that_wait_go_on_after_an_orderly_restart(tmp_path: Path, bulk: bool) -> None:
    local = f"fmq:{tmp_path}/a"
    create(f"{local}?slots=8&size=64k")
    port = free_port()
    with open_reader(f"{local}?hold=slow") as reader, ExitStack() as calls:
        with served(tmp_path, port=port) as server:
            url = f"{server.url}a?hold=slow&bulk={bulk}"
            writers = [calls.enter_context(open_writer(url)) for _ in range(2)]
            for writer in writers:
                writer.write(b"before")
            waiting = []
            for mark, writer in zip(b"xy", writers, strict=True):
                payloads = [b"%c%d" % (mark, i) for i in range(10)]
                waiting.append(calls.enter_context(background(writer.write_many, payloads)))
                wait_for_count(local, 8)  # the first waits for the reader, the second for the first
                assert waits(waiting[-1])
            assert server.stop()
        with served(tmp_path, port=port):
            seen: list[bytes] = []
            while len(seen) < 22:
                seen += [m.payload for m in reader.read_many(100, SOON)]
            for call in waiting:
                call.result(SOON)
        for mark in b"xy":
            sent = [b"%c%d" % (mark, i) for i in range(10)]
            assert [payload for payload in seen if payload[0] == mark] == sent
        assert [writer.statistics()[0] for writer in writers] == [11, 11]
        assert [writer.statistics().refused for writer in writers] == [0, 0]


@pytest.mark.parametrize("way", ["grpc", "bulk", "idle bulk"])
def test_a_write_that_a_stop_interrupts_goes_on_at_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    idle = 0.2
    monkeypatch.setattr(bulk, "_QUIET", idle if way == "idle bulk" else SOON)
    port = free_port()
    with ExitStack() as servers:
        server = servers.enter_context(served(tmp_path, port=port))
        url = f"{server.url}a?kind=log&chunk=1024&bulk={way != 'grpc'}"
        writer = servers.enter_context(open_writer(url))
        writer.write(b"before")  # the next calls go by the bulk port
        sent = [b"%d" % i * 1024 for i in range(40)]

        def payloads() -> Iterator[bytes]:
            yield from sent[:20]  # the last of them are not answered yet
            until(lambda: describe(f"log:{tmp_path}/a").count == 21, SOON)
            time.sleep(2 * idle)
            server.stop(0.2)
            servers.enter_context(served(tmp_path, port=port))
            for payload in sent[20:]:
                time.sleep(0.01)
                yield payload

        assert writer.write_many(payloads()) == 40
        books = writer.statistics()
    assert (books.messages, books.refused) == (41, 0)
    assert payloads_of(f"log:{tmp_path}/a") == [b"before", *sent]


def test_a_write_whose_answers_went_with_its_call_is_in_doubt(
    server: FlightServer, name: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release 0.1 ends a call so when it is stopped."""
    append = ClientWriter.append

    def append_nine(writer: ClientWriter, attempt: int, batch: Batch, piece: Piece) -> Outcome:
        if piece.number > 9:
            raise UnknownWriter("the server does not know this writer")
        return append(writer, attempt, batch, piece)

    monkeypatch.setattr(ClientWriter, "append", append_nine)
    sent = [b"%d" % i * 1024 for i in range(20)]

    def payloads() -> Iterator[bytes]:
        yield from sent[:11]
        time.sleep(0.3)  # the end of the call is there when the next one is sent
        yield from sent[11:]

    with (
        open_writer(f"{server.url}{name}?chunk=1024&bulk=false") as writer,
        pytest.raises(Unacknowledged) as caught,
    ):
        writer.write_many(payloads())
    assert payloads_of(f"fmq:{local}") == sent[:9]
    error = caught.value
    assert 0 < error.acknowledged < 9 <= error.acknowledged + error.in_doubt


def test_a_write_after_a_restart_is_appended_once(tmp_path: Path) -> None:
    with server_process(tmp_path) as server, open_writer(f"{server.url}a?kind=log") as writer:
        assert writer.write_many([b"0", b"1"]) == 1
        _restart(server)
        assert writer.write_many([b"2", b"3"]) == 3
        writer.flush()
    assert payloads_of(f"log:{tmp_path}/a") == [b"0", b"1", b"2", b"3"]


def test_a_write_without_a_server_says_that_nothing_was_appended(tmp_path: Path) -> None:
    with server_process(tmp_path) as server, open_writer(f"{server.url}a", retry="200ms") as writer:
        server.kill()
        with pytest.raises(ConnectionLost):
            writer.write(b"x")
        assert writer.statistics().messages == 0
    with pytest.raises(NotFound):
        open_reader(f"fmq:{tmp_path}/b")


def test_a_flush_may_be_the_first_call_after_an_outage(tmp_path: Path) -> None:
    url = "a?kind=log"
    with (
        server_process(tmp_path) as server,
        open_writer(f"{server.url}{url}", retry="200ms") as writer,
    ):
        writer.write_many([b"0", b"1"])
        server.kill()
        with pytest.raises(ConnectionLost):
            writer.write(b"nobody is there")
        server.start()
        writer.flush()
        writer.flush()
        assert writer.write(b"2") == 2
    assert payloads_of(f"log:{tmp_path}/a") == [b"0", b"1", b"2"]


def _restart(server: ServerProcess) -> None:
    server.kill()
    server.start()
