"""Waiting for many queues: asleep, woken by the first message, and by nothing else for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.core.errors import Closed, ConnectionLost, DamagedQueue, Unsupported
from penstock.core.interfaces import Reader, Writer
from penstock.queue.waiting import RingWaitGroup, Waiter, wait_any
from penstock.queue.wide.file import QueueFile
from protocols.flight.serving import served as flight_served
from protocols.lhhttt.queues import served
from protocols.lrose.serving import served as fmqp_served
from support.waiting import A_WHILE, SOON, background, waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TINY = "slots=2&size=4096&readers=2"

#: futex_waitv: readers that a thread can sleep for.
AT_ONCE = 127
#: F_SEAL_FUTURE_WRITE of Linux 5.1: those who map it from now on cannot write to it.
SEAL_FUTURE_WRITE = 16


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-wait"]


@pytest.fixture(autouse=True)
def _no_helper_stays() -> Iterator[None]:
    yield
    assert helpers() == []


@pytest.fixture
def urls(tmp_path: Path) -> Callable[[int], list[str]]:
    def make(count: int) -> list[str]:
        found = [f"fmq:{tmp_path}/q{number}" for number in range(count)]
        for url in found:
            penstock.create(f"{url}?{TINY}")
        return found

    return make


@pytest.fixture
def opened(urls: Callable[[int], list[str]]) -> Iterator[Callable[[int], list[Reader]]]:
    """Readers of new wide queues."""
    readers: list[Reader] = []

    def open_readers(count: int) -> list[Reader]:
        readers.extend(map(penstock.open_reader, urls(count)))
        return readers

    yield open_readers
    for reader in readers:
        reader.close()


def write(reader: Reader, type: int = 0) -> None:
    with penstock.open_writer(reader.url) as writer:
        writer.write(b"x", type)


@contextlib.contextmanager
def queue_to_look_at(path: str) -> Iterator[tuple[Reader, Writer]]:
    """A wide queue whose reader must not write to it, whoever runs this."""
    penstock.create(f"fmq:{path}?{TINY}")
    memory = os.memfd_create("queue", os.MFD_ALLOW_SEALING)
    try:
        os.write(memory, Path(f"{path}.fmq").read_bytes())
        url = f"fmq:/dev/fd/{memory}"
        with penstock.open_writer(url) as writer:
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
            with penstock.open_reader(url) as reader:
                yield reader, writer
    finally:
        os.close(memory)


# --- which are ready --------------------------------------------------------------------------


def test_those_that_have_something_are_returned_at_once(
    opened: Callable[[int], list[Reader]],
) -> None:
    readers = opened(4)
    write(readers[1])
    write(readers[3])
    assert wait_any(readers) == [readers[1], readers[3]]
    assert wait_any(readers, 0) == [readers[1], readers[3]]
    assert readers[3].read(0) is not None
    assert wait_any(iter(readers)) == [readers[1]]
    assert readers[1].read(0) is not None
    assert wait_any(readers, 0) == []


def test_none_are_returned_when_the_time_is_over_or_none_are_given(
    opened: Callable[[int], list[Reader]],
) -> None:
    assert wait_any([]) == []
    readers = opened(3)
    began = time.monotonic()
    assert wait_any(readers, 0.2) == []
    assert 0.2 <= time.monotonic() - began < SOON
    assert wait_any(readers, -1) == []


@pytest.mark.parametrize("count", [1, AT_ONCE, 300])
def test_a_message_ends_the_wait(count: int, opened: Callable[[int], list[Reader]]) -> None:
    readers = opened(count)
    for which in {0, count - 1}:
        with background(wait_any, readers) as call:
            assert waits(call)
            write(readers[which])
            assert call.result(SOON) == [readers[which]]
        assert readers[which].read(0) is not None


def test_a_reader_may_be_given_twice(opened: Callable[[int], list[Reader]]) -> None:
    [reader] = opened(1)
    with background(wait_any, [reader, reader]) as call:
        assert waits(call)
        write(reader)
        assert call.result(SOON) == [reader, reader]


def test_what_a_filter_leaves_out_does_not_keep_a_caller_busy(
    urls: Callable[[int], list[str]],
) -> None:
    [url] = urls(1)
    with penstock.open_reader(url, type=5) as reader:
        write(reader, type=4)
        assert wait_any([reader]) == [reader]
        assert reader.read(0) is None
        assert wait_any([reader], 0.05) == []
        write(reader, type=5)
        assert wait_any([reader]) == [reader]
        assert reader.read(0) is not None


def test_readers_of_every_kind_are_waited_for_in_one_call(
    tmp_path: Path, opened: Callable[[int], list[Reader]]
) -> None:
    classic_url = f"fmq:{tmp_path}/classic?layout=classic&slots=5&size=1k"
    with (
        queue_to_look_at(f"{tmp_path}/looked-at") as (read_only, writer),
        penstock.open_writer(classic_url) as classic_writer,
        penstock.open_reader(classic_url) as classic,
    ):
        assert read_only.wait_group is None
        assert classic.wait_group is None
        [wide] = opened(1)
        assert wide.wait_group is RingWaitGroup
        readers = [read_only, classic, wide]
        for reader, send in (
            (read_only, lambda: writer.write(b"x")),
            (classic, lambda: classic_writer.write(b"x")),
            (wide, lambda: write(wide)),
        ):
            with background(wait_any, readers) as call:
                assert waits(call)
                send()
                assert call.result(SOON) == [reader]
            assert reader.read(0) is not None
            assert wait_any(readers, 0) == []


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_ends_the_wait_until_it_is_read_to_its_end(kind: str, tmp_path: Path) -> None:
    url = f"{kind}:{tmp_path}/rows.{kind}"
    with penstock.open_writer(url) as writer:
        writer.write_many([b"a", b"b"])
    with penstock.open_reader(url) as reader:
        for _ in range(2):
            assert wait_any([reader], SOON) == [reader]
            assert len(reader.read_many(1)) == 1
        assert wait_any([reader], 0) == []


def test_a_message_of_a_shared_queue_ends_the_wait_and_is_not_leased_by_it() -> None:
    with served() as server:
        url = f"lhhttt://{server.address}"
        with (
            penstock.open_reader(url) as reader,
            penstock.open_reader(url) as other,
            penstock.open_writer(url) as writer,
        ):
            assert wait_any([reader], 0) == []
            writer.write_many([b"0", b"1"])
            assert wait_any([reader], SOON) == [reader]
            assert [message.payload for message in other.read_many(2)] == [b"0", b"1"]
            assert wait_any([reader], 0) == [], "they are leased to the other"


@pytest.mark.parametrize("kind", ["flight", "fmqp"])
def test_a_reader_of_a_remote_queue_ends_the_wait_for_each_message(
    kind: str, tmp_path: Path
) -> None:
    local = f"fmq:{tmp_path}/q?layout=classic"
    penstock.create(local)
    serve = flight_served if kind == "flight" else fmqp_served
    with (
        serve(tmp_path) as server,
        penstock.open_writer(local) as writer,
        penstock.open_reader(f"{server.url.rstrip('/')}/q?type=5") as reader,
    ):
        for _ in range(3):
            assert wait_any([reader], 0.05) == []
            with background(wait_any, [reader], SOON) as call:
                assert waits(call)
                writer.write(b"x", 5)
                assert call.result(SOON) == [reader]
            assert wait_any([reader], 0) == [reader]
            assert reader.read(0) is not None
            writer.write(b"left out", 4)
            assert reader.read(0) is None
        with penstock.open_writer(local, create="always") as writer_anew:
            writer_anew.write(b"anew", 5)
            assert wait_any([reader], SOON) == [reader]
            [message] = reader.read_many(5)
            assert message.payload == b"anew"
            assert reader.statistics().restarts == 1


def test_a_remote_queue_is_returned_when_its_server_is_away_for_too_long(tmp_path: Path) -> None:
    penstock.create(f"fmq:{tmp_path}/q?layout=classic")
    with fmqp_served(tmp_path) as server:
        readers = [penstock.open_reader(f"{server.url}/q?retry={s}") for s in ("100ms", "1h")]
        assert wait_any(readers, 0) == []
    assert wait_any(readers, SOON) == [readers[0]]
    with pytest.raises(ConnectionLost):
        readers[0].read(0)
    for reader in readers:
        reader.close()


# --- what it costs ----------------------------------------------------------------------------


def test_a_thousand_idle_queues_cost_no_cpu_and_wake_at_once(
    opened: Callable[[int], list[Reader]],
) -> None:
    readers = opened(1000)
    with background(wait_any, readers) as call:
        time.sleep(0.3)
        before, began = time.process_time(), time.monotonic()
        time.sleep(3)
        share = (time.process_time() - before) / (time.monotonic() - began)
        assert share < 0.01
        assert not call.done()
        sent = time.monotonic()
        write(readers[612])
        assert call.result(SOON) == [readers[612]]
        assert time.monotonic() - sent < 0.5


def test_messages_on_any_of_many_queues_are_found_one_by_one(
    opened: Callable[[int], list[Reader]],
) -> None:
    readers = opened(400)
    chance = random.Random(7)
    found: list[int] = []

    def write_to(chosen: list[Reader]) -> None:
        time.sleep(0.002)  # until it sleeps
        for reader in chosen:
            write(reader)

    with Waiter() as waiter:
        for _ in range(150):
            chosen = sorted(chance.sample(range(400), chance.randint(1, 3)))
            seen: list[int] = []
            with background(write_to, [readers[which] for which in chosen]):
                while len(seen) < len(chosen):
                    for reader in waiter.wait(readers, SOON):
                        assert reader.read(0) is not None
                        seen.append(readers.index(reader))
            assert sorted(seen) == chosen
            found += seen
        assert len(helpers()) in range(1, 6)
        assert waiter.wait(readers[:3], 0) == []
    assert len(set(found)) > 50


# --- interruptions ----------------------------------------------------------------------------


def test_another_thread_ends_the_wait(opened: Callable[[int], list[Reader]]) -> None:
    readers = opened(2)
    with Waiter() as waiter:
        with background(waiter.wait, readers) as call:
            assert waits(call)
            waiter.interrupt()
            assert call.result(SOON) == []
        waiter.interrupt()
        assert waiter.wait(readers) == []  # it was interrupted before it began
        with background(waiter.wait, []) as call:
            assert waits(call)
            waiter.interrupt()
            assert call.result(SOON) == []


def test_an_interruption_is_never_missed(opened: Callable[[int], list[Reader]]) -> None:
    readers = opened(1)
    with Waiter() as waiter:
        returned = threading.Semaphore(0)
        rounds = 2000

        def wait_again_and_again() -> None:
            for _ in range(rounds):
                waiter.wait(readers)
                returned.release()

        thread = threading.Thread(target=wait_again_and_again)
        began = time.monotonic()
        thread.start()
        for _ in range(rounds):
            waiter.interrupt()
            assert returned.acquire(timeout=SOON)
        thread.join()
        assert time.monotonic() - began < 20  # each that is missed costs a second


@pytest.mark.parametrize("count", [1, 300])
def test_control_c_ends_the_wait(count: int, urls: Callable[[int], list[str]]) -> None:
    script = (
        "import signal, sys, penstock\n"
        "from penstock.queue.waiting import wait_any\n"
        "readers = [penstock.open_reader(url) for url in sys.stdin.read().split()]\n"
        # Also where a shell runs the tests in the background, which ignore it then.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('ready', flush=True)\n"
        "try:\n"
        "    wait_any(readers)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(7)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n".join(urls(count)).encode())
        process.stdin.close()
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 7


def test_a_signal_that_is_handled_does_not_end_the_wait(
    opened: Callable[[int], list[Reader]],
) -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    try:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        began = time.monotonic()
        assert wait_any(opened(2), 0.4) == []
        assert time.monotonic() - began >= 0.4
        assert handled == [signal.SIGUSR1]
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- what does not go as usual ----------------------------------------------------------------


def test_a_reader_that_is_closed_is_returned_and_says_so(
    opened: Callable[[int], list[Reader]],
) -> None:
    readers = opened(300)
    with Waiter() as waiter:
        with background(waiter.wait, readers) as call:
            assert waits(call)
            readers[0].close()
            readers[299].close()
            waiter.interrupt()  # nothing else tells it
            found = call.result(SOON)
        assert found == [readers[0], readers[299]]
    with pytest.raises(Closed):
        readers[0].read(0)
    assert wait_any(readers) == [readers[0], readers[299]]


def test_a_writer_that_was_killed_before_it_woke_anybody_is_noticed(
    tmp_path: Path, opened: Callable[[int], list[Reader]]
) -> None:
    readers = opened(200)
    # The same queue, as a writer sees it who dies after its message is there.
    for which in (0, 199):
        file = QueueFile.open(f"{tmp_path}/q{which}", writable=True)
        with background(wait_any, readers) as call:
            assert waits(call)
            file.header["sleeping"] = 0
            write(readers[which])
            assert call.result(SOON) == [readers[which]]
        assert readers[which].read(0) is not None
        file.close()


@pytest.mark.parametrize("how", ["replaced", "removed"])
@pytest.mark.parametrize("layout", ["wide", "classic"])
def test_a_queue_that_is_created_anew_is_followed(how: str, layout: str, tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?layout={layout}&slots=4&size=4096"
    penstock.create(url)
    with penstock.open_reader(url) as reader:
        with background(wait_any, [reader]) as call:
            assert waits(call)
            if how == "removed":
                for file in tmp_path.iterdir():
                    file.unlink()
            penstock.create(url, replace=how == "replaced")
            with penstock.open_writer(url) as writer:
                writer.write(b"anew")
            assert call.result(SOON) == [reader]
        message = reader.read(0)
        assert message is not None
        assert message.payload == b"anew"
        if layout == "wide":  # a classic one has no mark: this could be its first message, too
            assert reader.statistics().restarts == 1


def test_damage_is_raised_by_the_read_that_follows(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=4&size=4096"
    penstock.create(url)
    with penstock.open_reader(url) as reader:
        with Path(f"{tmp_path}/q.stat").open("r+b") as file:
            file.write(bytes(range(64)))
        assert wait_any([reader], SOON) == [reader]
        with pytest.raises(DamagedQueue):
            reader.read(0)


def test_one_that_cannot_go_on_is_returned_and_the_others_are_not_disturbed(
    tmp_path: Path, opened: Callable[[int], list[Reader]]
) -> None:
    url = f"fmq:{tmp_path}/another"
    penstock.create(f"{url}?{TINY}")
    with (
        penstock.open_reader(url) as reader,
        background(wait_any, [reader, *opened(2)], SOON) as waiting,
    ):
        assert waits(waiting)
        (tmp_path / "another.fmq").unlink()
        penstock.create(f"{url}?{TINY}&compress=zstd")
        assert waiting.result() == [reader]
        with pytest.raises(Unsupported, match="other compression"):
            reader.read(0)


def test_a_log_is_waited_for_across_its_segments(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/log"
    with (
        penstock.open_writer(url, segment="64k") as writer,
        penstock.open_reader(url) as reader,
    ):
        assert reader.wait_group is RingWaitGroup
        for number in range(40):
            writer.write(number.to_bytes(4) + bytes(5000))
            assert wait_any([reader], SOON) == [reader]
            message = reader.read(0)
            assert message is not None
            assert message.payload[:4] == number.to_bytes(4)
            assert wait_any([reader], 0) == []


def test_a_group_forgets_those_that_are_discarded(opened: Callable[[int], list[Reader]]) -> None:
    readers = opened(300)
    group = RingWaitGroup()
    for reader in readers:
        group.add(reader)
    assert group.sleep(A_WHILE) == []
    for reader in readers[1:]:
        group.discard(reader)
        group.discard(reader)
    write(readers[150])
    write(readers[299])
    assert group.sleep(A_WHILE) == []
    write(readers[0])
    assert group.sleep(SOON) == [readers[0]]
    group.wake()
    began = time.monotonic()
    group.discard(readers[0])
    assert group.sleep(SOON) == []
    assert time.monotonic() - began < SOON / 2
    group.close()
