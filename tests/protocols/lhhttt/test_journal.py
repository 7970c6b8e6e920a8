from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.core.errors import StorageError
from penstock.protocols.lhhttt import join_frames, journal
from penstock.protocols.lhhttt.queue import MessageQueue
from protocols.lhhttt.queues import Asker, StreamAsker, assert_balanced, served, served_elsewhere

MEMORY = "/dev/shm/penstock-lhhttt-"


def _tags(answer: bytes) -> bytes:
    return answer.split(b":", 3)[2]


def _taken(asker: Asker) -> list[bytes]:
    found: list[bytes] = []
    while message := asker.ask(b"GET"):
        found.append(message)
    return found


# --- who stored what ----------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [1, 2, 3])
def test_a_batch_of_which_a_server_stored_a_part_is_completed(tmp_path: Path, stored: int) -> None:
    journal = f"log:{tmp_path}/queue"
    batch = [b"1", b"2", b"3", b"4"]
    with open_writer(journal) as writer:
        writer.write(batch[0], attributes=b"a:1:3")
        writer.write_many(batch[1:stored])
    for _ in range(2):  # and is remembered after another restart
        with served(journal=journal) as server, Asker(server.port) as asker:
            assert asker.ask(b"PUT:other") == b"PUT 5 bytes"
            assert asker.ask(b"RPUTS:a:1:" + join_frames(batch)) == b"OK:1"
            assert_balanced(server.statistics().queue)
    with served(journal=journal) as server, Asker(server.port) as asker:
        assert _taken(asker) == [*batch[:stored], b"other", *batch[stored:], b"other"]


@pytest.mark.parametrize("options", ["", "&compress=lz4", "&compress=zstd"])
def test_a_journal_takes_messages_up_to_its_largest_in_any_request(
    tmp_path: Path, options: str
) -> None:
    journal = f"log:{tmp_path}/queue?segment=8k{options}"
    client, latest = b"c" * 64, 2**63 - 1  # the longest names
    with served(journal=journal, tcp=True) as server, StreamAsker(server.port) as asker:
        assert isinstance(server.queue, MessageQueue)
        _, largest = server.queue.limits
        assert 7700 < largest < 8192
        whole, beyond = os.urandom(largest), os.urandom(largest + 1)
        for count in (1, 2, 3):
            request = b"RPUTS:%b:%d:" % (client, latest - count)
            assert asker.ask(request + join_frames([whole] * count)).startswith(b"OK:")
            request = b"RPUTS:%b:%d:" % (client, latest - 10 - count)
            said = asker.ask(request + join_frames([*[b"x"] * count, beyond]))
            assert said.endswith(b":at most 1000000 messages, %d bytes" % largest)
        assert server.statistics().queue.queued == 6
        assert_balanced(server.statistics().queue)


def test_after_a_restart_finished_messages_behind_an_old_one_take_no_room(tmp_path: Path) -> None:
    journal, capacity = f"log:{tmp_path}/queue", 1500
    with (
        served(journal=journal, capacity_bytes=capacity) as server,
        Asker(server.port) as asker,
    ):
        asker.ask(b"RPUTS:a:1:" + join_frames([bytes(100)] * 10))
        epoch = _tags(asker.ask(b"RGETS:c:1:10")).partition(b".")[0]
        assert asker.ask(b"ACK:c:%b.1-9" % epoch).startswith(b"OK:")
    with (
        served(journal=journal, capacity_bytes=capacity) as server,
        Asker(server.port) as asker,
    ):
        assert server.statistics().queue.held_bytes == 100
        assert asker.ask(b"RPUT:a:2:" + bytes(1400)) == b"OK:2"
        assert_balanced(server.statistics().queue)


def test_messages_of_nobody_behind_a_part_are_not_taken_for_the_rest_of_it(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue"
    with open_writer(journal) as writer:
        writer.write(b"1", attributes=b"a:1:2")
    with served(journal=journal) as server, Asker(server.port) as asker:
        for number in (b"x", b"y", b"z"):
            asker.ask(b"PUT:" + number)
    with served(journal=journal) as server, Asker(server.port) as asker:
        assert asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"])) == b"OK:1"
        assert _taken(asker) == [b"1", b"x", b"y", b"z", b"2", b"3"]


def test_a_journal_tells_of_each_request_by_its_first_and_last_message(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue"
    with served(journal=journal) as server, Asker(server.port) as asker:
        asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"]))
        asker.ask(b"RPUT:b:7:x")
    with open_reader(journal) as reader:
        notes = [message.attributes for message in reader.read_many(10)]
    assert notes == [b"a:1:2", None, b"a:1:0", b"b:7:0"]


# --- what comes again ---------------------------------------------------------------------------


def test_parts_of_leases_come_again_in_the_order_of_their_numbers() -> None:
    messages = [b"%d" % number for number in range(10)]
    with served() as server, Asker(server.port) as asker:
        asker.ask(b"RPUTS:a:1:" + join_frames(messages))
        epoch = _tags(asker.ask(b"RGETS:c:1:8")).partition(b".")[0]
        ack = b"ACK:c:" + b",".join(b"%b.%d" % (epoch, number) for number in (1, 4, 6))
        assert asker.ask(ack) == b"OK:%b.1" % epoch
        assert asker.ask(b"NACK:c:%b.5-7" % epoch) == b"OK:%b.5" % epoch
        assert asker.ask(b"NACK:c:%b.0-2" % epoch) == b"OK:%b.0" % epoch
        answer = asker.ask(b"RGETS:d:1:10")
        wanted = [(0, 1), (2, 3), (5, 6), (7, 10)]
        assert _tags(answer) == b",".join(
            b"%b.%d" % (epoch, first) if end == first + 1 else b"%b.%d-%d" % (epoch, first, end - 1)
            for first, end in wanted
        )
        numbers = [number for first, end in wanted for number in range(first, end)]
        assert answer.endswith(b":" + join_frames([messages[number] for number in numbers]))
        books = server.statistics().queue
    assert (books.acked, books.redelivered, books.leased) == (3, 4, 9 - 2)
    assert_balanced(books)


def test_dead_letters_among_messages_with_other_delays_are_counted(tmp_path: Path) -> None:
    dead = f"log:{tmp_path}/dead"
    with served(deliveries=1, dead=dead) as server, Asker(server.port) as asker:
        asker.ask(b"RPUTS:a:1:" + join_frames([b"x" * 100, b"y" * 10, b"z"]))
        tags = _tags(asker.ask(b"RGETS:c:1:2"))
        epoch = tags.partition(b".")[0]
        asker.ask(b"NACK:c:%b.0:300" % epoch)
        asker.ask(b"NACK:c:%b.1:0" % epoch)
        sizes: dict[int, int] = {}
        while 2 not in sizes:
            books = server.statistics().queue
            sizes[books.dead] = books.held_bytes
            time.sleep(0.01)
        assert {1: 101, 2: 1} | sizes == {1: 101, 2: 1}
        assert asker.ask(b"GET") == b"z"
        books = server.statistics().queue
    assert (books.held, books.held_bytes) == (0, 0)
    assert_balanced(books)


# --- a disk that is full for a while ------------------------------------------------------------


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Let these calls to the group of a journal fail."""

    def fail(*_: object) -> None:
        raise StorageError("writing to", "the disk", OSError(28, "No space left on device"))

    with monkeypatch.context() as fault:
        for name in names:
            fault.setattr(f"penstock.queue.{name}", fail)
        yield


_NACK = "groups.reader.GroupReader.nack_ranges"
_READ = "groups.reader.GroupReader.read_batch"


@pytest.mark.parametrize("calls", [[_NACK], [_READ], [_NACK, _READ]], ids=["nack", "read", "both"])
@pytest.mark.parametrize("why", ["its lease is over", "it is given back", "its client is gone"])
def test_a_message_comes_again_that_could_not_be_given_back_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, calls: list[str]
) -> None:
    monkeypatch.setattr(journal, "_SETTLED_AGAIN", 0.05)
    monkeypatch.setattr(journal, "_LOOKED_FOR_AGAIN", 0.05)
    lease = 0.2 if "lease" in why else 30.0
    with (
        served(journal=f"log:{tmp_path}/queue", lease=lease) as server,
        Asker(server.port) as asker,
    ):
        asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2"]))
        tags = _tags(asker.ask(b"RGETS:w-1.c:1:2"))
        with failing(monkeypatch, *calls):
            if "lease" in why:
                time.sleep(0.4)
            elif "client" in why:
                assert isinstance(server.queue, MessageQueue)
                server.queue.release(b"w-1")
            else:
                assert asker.ask(b"NACK:w-1.c:" + tags) == b"OK:" + tags.partition(b"-")[0]
            time.sleep(0.2)
            assert asker.ask(b"RGET:d:1") == b"NONE:1"
            assert server.statistics().queue.leased == 0
        answer = asker.ask(b"RGETS:d:2:9:5000")
        assert answer.endswith(b":" + join_frames([b"1", b"2"]))
        assert _tags(answer) == tags
        assert asker.ask(b"ACK:d:" + tags).startswith(b"OK:")
        books = server.statistics().queue
        assert (books.held, books.leased, books.acked) == (0, 0, 2)
        assert_balanced(books)


def test_messages_at_hand_are_given_while_others_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(journal=f"log:{tmp_path}/queue") as server, Asker(server.port) as asker:
        for round_, verb in enumerate((b"GET", b"RGETS:d:%d:9")):
            asker.ask(b"PUT:1")
            tags = _tags(asker.ask(b"RGETS:c:%d:1" % (round_ + 1)))
            asker.ask(b"NACK:c:" + tags)  # which brings it to hand
            asker.ask(b"PUT:2")
            with failing(monkeypatch, _READ):
                if verb == b"GET":
                    assert [asker.ask(b"GET"), asker.ask(b"GET")] == [b"1", b""]
                else:
                    assert asker.ask(verb % 1).endswith(b":" + join_frames([b"1"]))
                    asker.ask(b"ACK:d:" + tags)
            assert asker.ask(b"GET") == b"2"
        books = server.statistics().queue
        assert (books.held, books.leased) == (0, 0)
        assert_balanced(books)


def test_messages_are_settled_once_that_were_settled_by_a_call_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_SETTLED_AGAIN", 0.05)
    with served(journal=f"log:{tmp_path}/queue") as server, Asker(server.port) as asker:
        asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"]))
        with failing(monkeypatch, "log.consumer.HeldPlace.__call__"):
            time.sleep(0.3)
            assert [asker.ask(b"GET"), asker.ask(b"GET")] == [b"1", b"2"]
            time.sleep(0.3)
        asker.ask(b"PUT:4")
        assert [asker.ask(b"GET") for _ in range(3)] == [b"3", b"4", b""]
        books = server.statistics().queue
        assert (books.held, books.taken) == (0, 4)
        assert_balanced(books)


# --- memory -------------------------------------------------------------------------------------


def _memory_of(pid: int) -> Path:
    """Return the folder in memory of the one queue in a process."""
    names = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists()]
    (folder,) = {Path(*Path(name).parts[:4]) for name in names if name.startswith(MEMORY)}
    return folder


def test_the_memory_of_a_server_that_was_killed_is_given_back_by_the_next() -> None:
    with served_elsewhere() as (process, port), Asker(port) as asker:
        asker.ask(b"PUT:x")
        folder = _memory_of(process.pid)
        with served():  # while it lives, nobody touches it
            assert folder.exists()
            assert asker.ask(b"GET") == b"x"
        process.kill()
        process.wait()
        assert folder.exists()
    with served() as server, Asker(server.port) as asker:
        assert not folder.exists()
        assert asker.ask(b"PUT:y") == b"PUT 1 bytes"
