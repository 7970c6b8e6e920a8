from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.protocols.lhhttt import join_frames
from protocols.lhhttt.queues import Asker, assert_balanced, served, served_elsewhere

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
