from __future__ import annotations

import json
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import open_reader, open_writer
from penstock.core.capabilities import Grouped
from penstock.core.errors import InvalidOption, StorageError
from penstock.core.overflow import DropReason, OverflowPolicy
from penstock.protocols.lhhttt import (
    decode_bytes,
    encode_bytes,
    join_frames,
    journal,
    split_frames,
)
from penstock.protocols.lhhttt.queue import MessageQueue, QueueSettings
from protocols.lhhttt.queues import (
    HOST,
    Asker,
    StreamAsker,
    assert_balanced,
    served,
    served_elsewhere,
)
from support.until import until

VECTORS = Path(__file__).parents[2] / "vectors" / "streampy"
LAST = next(
    server["transcript"]
    for server in json.loads((VECTORS / "udp_transcripts.json").read_text())["servers"]
    if server["version"] == "last"
)


def _whole(text: str, length: int) -> bytes:
    """Return a recorded datagram; long ones are cut, and go on with their last byte."""
    data = bytes.fromhex(text.rstrip("."))
    return data + data[-1:] * (length - len(data))


# --- the prototype's verbs ----------------------------------------------------------------------


def test_the_prototypes_transcript_is_played_with_all_its_answers_and_silences() -> None:
    with served() as server:
        for row in LAST:
            _play(server.port, row)
        books = server.statistics()
    assert_balanced(books.queue)
    assert books.malformed == 5
    assert books.datagrams.received == books.malformed + books.queue.commands


def _play(port: int, row: dict[str, Any]) -> None:
    if "nobody read" in row["note"]:  # the GET that came before this row was not recorded
        with Asker(port) as nobody:
            nobody.send(b"GET")
    with Asker(port) as asker:
        data = _whole(row["send_hex"], row["send_len"])
        if "send_error" in row:
            with pytest.raises(OSError, match=row["send_error"]):
                asker.socket.send(data)
            return
        asker.socket.send(data)
        if row["reply"] is None:
            assert asker.is_silent(0.05), row
        else:
            assert encode_bytes(asker.answer()) == _whole(row["reply_hex"], row["reply_len"]), row


@pytest.mark.parametrize(
    "command", [b"GET:\xff", b"SIZE:\xc3", b"PUT:\xed\xa0\x80", b"\xffGET", b"GET\xff"]
)
def test_what_is_no_text_is_left_unanswered_and_takes_nothing(command: bytes) -> None:
    """The prototype decodes a frame before it looks at the verb."""
    with served() as server, Asker(server.port) as asker:
        assert asker.ask(b"PUT:one") == b"PUT 3 bytes"
        asker.send(command)
        assert asker.is_silent()
        assert asker.ask(b"SIZE") == b"1"
        assert asker.ask("GET:é".encode()) == b"one"
        assert_balanced(server.statistics().queue)


def test_a_burst_of_puts_is_queued_and_the_books_count_what_the_kernel_dropped() -> None:
    count, frame = 20_000, encode_bytes(b"PUT:" + b"x" * 1024)
    with served_elsewhere() as (_, port), Asker(port) as probe:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(count):
                sender.sendto(frame, ("127.0.0.1", port))
        before, queued = -1, 0
        while queued != before:
            time.sleep(0.2)
            before, queued = queued, int(probe.ask(b"SIZE"))
    assert queued >= 0.999 * count


def test_sent_is_queued_and_refused_and_dropped_by_the_kernel() -> None:
    count = 3000
    with served(capacity=1000) as server, Asker(server.port) as asker:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(count):
                sender.sendto(b"15PUT:x", ("127.0.0.1", server.port))
        until(
            lambda: server.statistics().queue.puts + server.statistics().datagrams.dropped >= count
        )
        assert asker.ask(b"SIZE") == b"1000"
        books = server.statistics()
    assert books.queue.queued == 1000
    refused = sum(books.queue.refused.values())
    assert count == books.queue.queued + refused + books.datagrams.dropped


def test_datagrams_that_are_not_looked_at_in_time_are_counted_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served() as server, Asker(server.port) as asker:
        handle = server.queue.handle

        def slowly(commands: Any, send: Any, largest: int) -> Any:
            time.sleep(0.5)  # as a disk that has much to do
            return handle(commands, send, largest)

        monkeypatch.setattr(server.queue, "handle", slowly)
        for _ in range(3000):
            asker.send(b"PUT:x")
        until(lambda: server.statistics().datagrams.received == 3000)
    books = server.statistics()
    assert books.unhandled > 0
    assert books.datagrams.received == books.queue.commands + books.malformed + books.unhandled
    assert_balanced(books.queue)


def test_a_message_too_large_for_a_datagram_waits_for_who_can_take_it() -> None:
    large = b"x" * 70_000
    with served(tcp=True) as server, Asker(server.port) as asker:
        with open_writer(f"lhhttt+tcp://127.0.0.1:{server.port}") as writer:
            writer.write(large)
        for _ in range(2):
            asker.send(b"GET")
        assert asker.is_silent()
        assert asker.ask(b"SIZE") == b"1"
        books = server.statistics().queue
        assert (books.gets, books.taken, books.unanswered) == (2, 0, 2)
        with open_reader(f"lhhttt+tcp://127.0.0.1:{server.port}") as reader:
            assert isinstance(reader, Grouped)
            message = reader.read(timeout=10)
            assert message is not None
            assert message.payload == large
            reader.ack(message)
        assert_balanced(server.statistics().queue)


# --- room ---------------------------------------------------------------------------------------


def test_a_full_queue_is_silent_to_a_put_and_says_so_to_a_reliable_one() -> None:
    with served(capacity=2) as server, Asker(server.port) as asker:
        assert asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2"])) == b"OK:1"
        asker.send(b"PUT:3")
        assert asker.is_silent()
        assert asker.ask(b"RPUT:a:2:4").startswith(b"ERR:2:full:")
        assert asker.ask(b"RPUTS:a:3:" + join_frames([b"x"] * 3)).startswith(b"ERR:3:too-large:")
        assert asker.ask(b"GET") == b"1"
        assert asker.ask(b"RPUT:a:2:4") == b"OK:2"  # what was refused may come again
        books = server.statistics().queue
    assert books.refused == {"full": 2, "too-large": 3}
    assert_balanced(books)


def test_a_message_too_large_for_the_journal_is_refused_alone(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue?segment=4096"
    commands = [b"PUT:1", b"PUT:" + b"x" * 9000, b"PUT:3", b"SIZE"]
    with (
        served(journal=journal, tcp=True) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
        Asker(server.port) as asker,
    ):
        client.sendall(join_frames(commands))  # one batch
        answers = b""
        expected = join_frames([b"PUT 1 bytes", b"PUT 1 bytes", b"2"])
        while len(answers) < len(expected):
            answers += client.recv(1000)
        assert answers == expected
        assert asker.ask(b"RPUT:a:1:" + b"x" * 9000).startswith(b"ERR:1:too-large:")
        assert [asker.ask(b"GET") for _ in range(3)] == [b"1", b"3", b""]
        books = server.statistics().queue
    assert books.refused == {"too-large": 2}
    assert_balanced(books)


def test_nothing_is_stored_or_dropped_for_a_request_that_the_journal_cannot_hold(
    tmp_path: Path,
) -> None:
    journal = f"log:{tmp_path}/queue?segment=4096"
    with served(journal=journal, capacity=3, policy="drop_oldest") as server:
        with Asker(server.port) as asker:
            assert asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"])) == b"OK:1"
            large = join_frames([b"4", bytes(4001)])
            assert asker.ask(b"RPUTS:a:2:" + large) == (
                b"ERR:2:too-large:at most 3 messages, 4000 bytes"
            )
            assert asker.ask(b"RPUTS:a:3:" + join_frames([bytes(3000)] * 2)) == b"OK:3"
            assert asker.ask(b"GET") == b"3"
        books = server.statistics().queue
    assert books.refused == {"too-large": 2}
    assert sum(books.dropped.values()) == 2
    assert_balanced(books)


def test_a_request_of_which_a_part_is_stored_is_not_told_that_the_queue_is_full(
    tmp_path: Path,
) -> None:
    """Whoever hears that would store it all again, with another number."""
    journal = f"log:{tmp_path}/queue"
    with open_writer(journal) as writer:  # as a server leaves it that dies after the first
        writer.write(b"1", attributes=b"a:1:1")
    batch = b"RPUTS:a:1:" + join_frames([b"1", b"2"])
    with served(journal=journal, capacity=2) as server, Asker(server.port) as asker:
        assert asker.ask(b"RPUT:b:1:other") == b"OK:1"
        assert asker.ask(batch) == b"ERR:1:failed:the queue holds 2 messages"
        assert asker.ask(b"GET") == b"1"
        assert asker.ask(batch) == b"OK:1"
        assert [asker.ask(b"GET") for _ in range(3)] == [b"other", b"2", b""]
        books = server.statistics().queue
    assert books.refused == {"failed": 1}
    assert_balanced(books)


def test_bytes_are_counted_too() -> None:
    with served(capacity_bytes=1000) as server, Asker(server.port) as asker:
        assert asker.ask(b"RPUT:a:1:" + b"x" * 900) == b"OK:1"
        assert asker.ask(b"RPUT:a:2:" + b"x" * 200).startswith(b"ERR:2:full:")


@pytest.mark.parametrize(
    ("policy", "left", "reason"),
    [
        (OverflowPolicy.DROP_OLDEST, [b"2", b"3"], DropReason.OVERFLOW_OLDEST),
        (OverflowPolicy.DROP_NEWEST, [b"1", b"2"], DropReason.OVERFLOW_NEWEST),
    ],
)
def test_a_full_queue_drops_what_its_policy_says(
    policy: OverflowPolicy, left: list[bytes], reason: DropReason
) -> None:
    with served(capacity=2, policy=policy) as server, Asker(server.port) as asker:
        for number in (b"1", b"2", b"3"):
            assert asker.ask(b"PUT:" + number) == b"PUT 1 bytes"
        assert [asker.ask(b"GET") for _ in range(3)] == [*left, b""]
        books = server.statistics().queue
    assert books.dropped == {reason: 1}
    assert_balanced(books)


def test_nothing_is_dropped_for_messages_that_get_no_room_by_it() -> None:
    with served(capacity=10, policy="drop_oldest") as server, Asker(server.port) as asker:
        for number in range(10):
            assert asker.ask(b"PUT:%d" % number) == b"PUT 1 bytes"
        assert asker.ask(b"RGETS:me:1:6").startswith(b"MSGS:1:")
        more = b"".join(encode_bytes(b"%d" % number) for number in range(8))
        assert asker.ask(b"RPUTS:me:1:" + more).startswith(b"ERR:1:full:")
        books = server.statistics().queue
        assert (books.held, books.leased, sum(books.dropped.values())) == (10, 6, 0)
        assert asker.ask(b"RPUTS:me:2:" + more[:12]) == b"OK:2"
        books = server.statistics().queue
        assert (books.held, sum(books.dropped.values())) == (10, 4)
        assert_balanced(books)


def test_a_queue_of_datagrams_cannot_make_them_wait() -> None:
    with pytest.raises(InvalidOption, match="wait"):
        QueueSettings(policy=OverflowPolicy.BLOCK)


# --- the reliable mode --------------------------------------------------------------------------


def _tag(answer: bytes) -> bytes:
    return answer.split(b":", 3)[2]


def test_a_store_that_is_repeated_is_done_once() -> None:
    with served() as server, Asker(server.port) as asker, Asker(server.port) as other:
        for _ in range(3):
            assert asker.ask(b"RPUT:a:7:x:y") == b"OK:7"
        assert other.ask(b"RPUT:b:7:z") == b"OK:7"
        assert asker.ask(b"RPUT:a:5:earlier") == b"OK:5"  # overtaken on its way
        assert asker.ask(b"RPUT:a:5:earlier") == b"OK:5"
        assert [asker.ask(b"GET") for _ in range(4)] == [b"x:y", b"z", b"earlier", b""]
        assert asker.ask(b"RPUT:a:9000:new") == b"OK:9000"
        assert asker.ask(b"RPUT:a:5:earlier").startswith(b"ERR:5:stale:")
        books = server.statistics().queue
    assert (books.repeated, books.refused) == (3, {"stale": 1})
    assert_balanced(books)


def test_a_lease_that_is_repeated_gives_the_same_message() -> None:
    with served() as server, Asker(server.port) as asker:
        asker.ask(b"RPUTS:a:1:" + join_frames([b"", b"2", b"3"]))
        first = asker.ask(b"RGET:c:1")
        assert first.startswith(b"MSG:1:")
        assert first.endswith(b":")  # an empty message is one
        assert asker.ask(b"RGET:c:1") == first
        batch = asker.ask(b"RGETS:c:2:10")
        assert split_frames(batch.split(b":", 3)[3]) == [b"2", b"3"]
        assert asker.ask(b"RGETS:c:3:10") == b"NONE:3"
        assert asker.ask(b"ACK:c:" + _tag(first)) == b"OK:" + _tag(first)
        assert asker.ask(b"ACK:c:" + _tag(first)) == b"OK:" + _tag(first)
        assert asker.ask(b"RGET:c:1") == b"NONE:1"  # it was answered, and is done
        assert server.statistics().queue.leased == 2
        assert asker.ask(b"SIZE") == b"0"


def test_a_message_comes_again_with_its_tag_at_the_head_when_its_lease_is_over() -> None:
    with served(lease=0.2) as server, Asker(server.port) as asker:
        asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"]))
        first = asker.ask(b"RGET:c:1")
        time.sleep(0.3)
        again = asker.ask(b"RGET:d:1")
        assert (_tag(again), again[-2:]) == (_tag(first), b":1")
        assert asker.ask(b"ACK:c:" + _tag(first)).startswith(b"ERR:%b:no-lease:" % _tag(first))
        assert asker.ask(b"ACK:d:" + _tag(first)) == b"OK:" + _tag(first)
        books = server.statistics().queue
    assert (books.acked, books.redelivered, books.held) == (1, 1, 2)
    assert_balanced(books)


def test_a_lease_that_ran_out_counts_while_nobody_was_given_the_message() -> None:
    with served(lease=0.1) as server, Asker(server.port) as asker:
        asker.ask(b"RPUT:a:1:x")
        tag = _tag(asker.ask(b"RGET:c:1"))
        time.sleep(0.3)
        assert asker.ask(b"ACK:c:" + tag) == b"OK:" + tag
        assert asker.ask(b"GET") == b""


def test_a_message_that_is_given_back_comes_again_after_its_delay() -> None:
    with served() as server, Asker(server.port) as asker:
        asker.ask(b"RPUT:a:1:x")
        tag = _tag(asker.ask(b"RGET:c:1"))
        began = time.monotonic()
        assert asker.ask(b"NACK:c:" + tag + b":300") == b"OK:" + tag
        assert asker.ask(b"RGET:c:2") == b"NONE:2"
        assert _tag(asker.ask(b"RGET:c:3:5000")) == tag
        assert time.monotonic() - began >= 0.3


def test_a_request_that_waits_is_answered_when_a_message_comes_or_its_time_is_over() -> None:
    with served() as server, Asker(server.port) as asker, Asker(server.port) as other:
        assert asker.ask(b"RGET:c:1:100") == b"NONE:1"
        asker.send(b"RGET:c:2:20000")
        asker.send(b"RGET:c:2:20000")  # repeated, as its answer takes long
        until(lambda: server.statistics().queue.waiting == 1)
        other.ask(b"PUT:x")
        assert asker.answer().startswith(b"MSG:2:")
        assert asker.is_silent()


@pytest.mark.parametrize("again", [b"c:7:20000", b"c:8:20000"], ids=["the same", "the next"])
def test_a_request_that_waits_and_is_repeated_beside_a_message_gets_one_lease(
    again: bytes,
) -> None:
    late: list[tuple[bytes, Any]] = []
    peer: Any = (HOST, 1)
    with MessageQueue(QueueSettings(lease=0.3)) as queue:

        def handle(*commands: tuple[bytes, list[bytes]]) -> list[bytes]:
            asked = [(verb, rests, [peer] * len(rests)) for verb, rests in commands]
            replies, _ = queue.handle(asked, late.extend, 65_507)
            return [reply for reply, _ in replies]

        assert handle((b"RGET", [b"c:7:20000"])) == []
        stored = (b"RPUTS", [b"a:1:" + join_frames([b"one", b"two"])])
        replies = handle(stored, (b"RGET", [again]))
        answers = [decode_bytes(reply) for reply in [*replies[1:], *(reply for reply, _ in late)]]
        given = [answer for answer in answers if answer.startswith(b"MSG:")]
        assert len(given) == 1, answers
        assert given[0].split(b":")[1] == again.split(b":")[1]
        assert queue.statistics().leased == 1
        until(lambda: queue.statistics().redelivered == 1)  # not leased for ever


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "half open"])
def test_a_request_that_waits_and_is_repeated_by_another_connection_is_answered_there(
    is_cut: bool,
) -> None:
    with served(tcp=True) as server, StreamAsker(server.port) as before:
        before.send(b"RGET:c:7:20000")
        until(lambda: server.statistics().queue.waiting == 1)
        if is_cut:
            before.socket.close()
        with StreamAsker(server.port) as asker, Asker(server.port) as other:
            asker.send(b"RGET:c:7:20000")
            if not is_cut:
                assert before.answer() == b"NONE:7"
            other.ask(b"PUT:x")
            assert asker.answer().endswith(b":x")
            # Both connections go on.
            assert asker.ask(b"SIZE") == b"0"
            assert is_cut or before.ask(b"SIZE") == b"0"


def test_a_request_that_arrives_behind_a_later_one_of_its_client_gets_no_message() -> None:
    """Its client has given it up: messages that it got would reach nobody for a whole lease."""
    with served() as server, Asker(server.port) as asker:
        asker.send(b"RGET:c:8:20000")
        until(lambda: server.statistics().queue.waiting == 1)
        with Asker(server.port) as late:
            assert late.ask(b"RGET:c:7:20000") == b"NONE:7"
            assert asker.is_silent()  # it waits on
            late.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2"]))
            assert asker.answer().endswith(b":1")
            assert late.ask(b"RGET:c:6") == b"NONE:6"
        assert server.statistics().queue.leased == 1
        assert asker.ask(b"RGET:c:9").endswith(b":2")


def test_numbers_of_a_client_that_lie_far_apart_cost_nothing(tmp_path: Path) -> None:
    options = {"journal": f"log:{tmp_path}/queue"}
    far = 2**63 - 1
    with served(**options) as server, Asker(server.port) as asker:
        asker.ask(b"RPUT:a:%d:x" % far)
        assert asker.ask(b"RPUT:a:5:y").startswith(b"ERR:5:stale:")
        asker.send(b"RGET:b:%d:20000" % far)
        asker.answer()
        asker.send(b"RGET:c:%d:20000" % far)
        until(lambda: server.statistics().queue.waiting == 1)
        assert asker.ask(b"RGET:c:5").startswith(b"ERR:5:stale:")
    with open_writer(options["journal"]) as writer:
        # As a server leaves it that had forgotten the client: it was silent for long.
        writer.write(b"y", attributes=b"a:5:0")
    with served(**options) as server, Asker(server.port) as asker:
        assert asker.ask(b"RPUT:a:%d:x" % far) == b"OK:%d" % far
        assert server.statistics().queue.repeated == 1


def test_a_message_that_nobody_settles_becomes_a_dead_letter(tmp_path: Path) -> None:
    dead = f"log:{tmp_path}/dead"
    with served(deliveries=2, dead=dead) as server, Asker(server.port) as asker:
        asker.ask(b"RPUT:a:1:poison")
        for seq in (1, 2):
            tag = _tag(asker.ask(b"RGET:c:%d:5000" % seq))
            asker.ask(b"NACK:c:" + tag)
        assert asker.ask(b"RGET:c:9:300") == b"NONE:9"
        books = server.statistics().queue
    assert (books.dead, books.held, books.held_bytes) == (1, 0, 0)
    assert_balanced(books)
    with open_reader(dead) as reader:
        assert b"poison" in next(reader.available()).payload


def test_a_restart_is_no_delivery_of_what_nobody_was_given(tmp_path: Path) -> None:
    options = {
        "journal": f"log:{tmp_path}/journal",
        "deliveries": 2,
        "dead": f"log:{tmp_path}/dead",
        "lease": 0.2,
    }
    for start in range(5):
        with served(**options) as server, Asker(server.port) as asker:
            if not start:
                for number in range(20):
                    asker.ask(b"PUT:%d" % number)
            assert asker.ask(b"GET") == b"%d" % start  # all others are read ahead with it
            assert server.statistics().queue.held == 19 - start
    with served(**options) as server, Asker(server.port) as asker:
        for seq in (1, 2):
            assert asker.ask(b"RGET:a:%d:5000" % seq).endswith(b":5")
            until(lambda: server.statistics().queue.leased == 0)
        assert asker.ask(b"GET") == b"6"
        until(lambda: server.statistics().queue.dead == 1)
        assert_balanced(server.statistics().queue)


@pytest.mark.parametrize(
    "command",
    [
        b"RPUT:a", b"RPUT::1:x", b"RPUT:a:-1:x", b"RPUT:a:1_0:x", b"RPUT:a:99999999999999999999:x",
        b"RPUTS:a:1:", b"RPUTS:a:1:15x", b"RPUTS:a:1:zz", b"RGET:a", b"RGET:a:1:x",
        b"RGET:a:1:99999999", b"RGETS:a:1", b"RGETS:a:1:-5", b"RGETS:a:1:99999999",
        b"ACK:a", b"ACK:a:", b"ACK:a:1", b"ACK:a:1.5-4", b"ACK:a:1.1-99999999", b"ACK:a:g.1",
        b"NACK:a:1.1:x", b"ACK:" + b"n" * 65 + b":1.1",
    ],
)  # fmt: skip
def test_a_reliable_request_that_is_wrong_is_told_so(command: bytes) -> None:
    with served() as server, Asker(server.port) as asker:
        answer = asker.ask(command)
        assert answer.startswith(b"ERR:")
        assert b":malformed:" in answer
        assert server.statistics().queue.bad_requests == 1


def test_a_tag_of_another_queue_settles_nothing() -> None:
    with served() as server, Asker(server.port) as asker:
        asker.ask(b"RPUT:a:1:x")
        tag = _tag(asker.ask(b"RGET:c:1"))
        stranger = b"1." + tag.partition(b".")[2]
        assert asker.ask(b"ACK:c:" + stranger).startswith(b"ERR:" + stranger + b":no-lease")
        assert server.statistics().queue.leased == 1


def test_a_message_that_nobody_finishes_does_not_let_memory_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "_LARGEST_SEGMENT", 1 << 20)
    monkeypatch.setattr(journal, "_LOOKED_AT_MEMORY", 0.05)
    batch = join_frames([b"x" * 5000] * 10)
    with served(capacity_bytes=1 << 20) as server, Asker(server.port) as asker:
        asker.ask(b"RPUT:a:1:first")
        tag = _tag(asker.ask(b"RGET:c:1"))
        passed, answer = 0, b"OK"
        while answer.startswith(b"OK") and passed < 100_000_000:
            answer = asker.ask(b"RPUTS:a:%d:%b" % (passed + 2, batch))
            while asker.ask(b"GET"):
                passed += 5000
        assert b":full:" in answer
        assert 3_000_000 < passed < 50_000_000  # twice the capacity and a segment, less headers
        assert asker.ask(b"ACK:c:" + tag) == b"OK:" + tag
        until(lambda: asker.ask(b"RPUT:a:%d:x" % (passed + 3)).startswith(b"OK"))


# --- the journal --------------------------------------------------------------------------------


def test_a_journal_keeps_messages_and_who_stored_them(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue"
    with served(journal=journal) as server, Asker(server.port) as asker:
        asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"]))
        asker.ask(b"PUT:4")
        assert asker.ask(b"GET") == b"1"
        asker.ask(b"RGET:c:1")
    with served(journal=journal) as server, Asker(server.port) as asker:
        assert asker.ask(b"SIZE") == b"3"
        assert asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"])) == b"OK:1"
        assert [asker.ask(b"GET") for _ in range(4)] == [b"2", b"3", b"4", b""]
        books = server.statistics().queue
    assert (books.recovered, books.repeated) == (3, 3)
    assert_balanced(books)


def test_an_ack_after_a_restart_is_answered_by_what_became_of_the_message(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue"
    with served(journal=journal) as server, Asker(server.port) as asker:
        for number in range(4):
            asker.ask(b"PUT:%d" % number)
        delayed, held, done = (_tag(asker.ask(b"RGET:c:%d" % seq)) for seq in range(3))
        asker.ask(b"NACK:c:" + delayed + b":1000")
        asker.ask(b"ACK:c:" + done)
    with served(journal=journal) as server, Asker(server.port) as asker:
        assert asker.ask(b"RGET:d:1").endswith(b":1")
        for tag in (delayed, held):
            assert asker.ask(b"ACK:c:" + tag) == b"ERR:%b:no-lease:%b" % (tag, tag)
        assert asker.ask(b"ACK:c:" + done) == b"OK:" + done
        assert asker.ask(b"RGET:d:2").endswith(b":3")
        assert asker.ask(b"ACK:c:" + delayed) == b"ERR:%b:no-lease:%b" % (delayed, delayed)
        assert asker.ask(b"RGET:d:3:5000").endswith(b":0")
        assert asker.ask(b"ACK:d:" + delayed) == b"OK:" + delayed
        assert asker.ask(b"ACK:c:" + delayed) == b"OK:" + delayed
        assert server.statistics().queue.acked == 1


def test_a_batch_that_was_cut_off_is_completed_when_it_is_repeated(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue"
    with open_writer(journal) as writer:  # as a server leaves it that dies after the first
        writer.write(b"1", attributes=b"a:1:2")
    with served(journal=journal) as server, Asker(server.port) as asker:
        assert asker.ask(b"RPUTS:a:1:" + join_frames([b"1", b"2", b"3"])) == b"OK:1"
        assert [asker.ask(b"GET") for _ in range(4)] == [b"1", b"2", b"3", b""]
        assert_balanced(server.statistics().queue)


def test_a_journal_that_cannot_settle_costs_nobody_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that a GET took is nowhere else: its answer may not be left out."""
    monkeypatch.setattr(journal, "_SETTLED_AGAIN", 0.05)
    options = {"journal": f"log:{tmp_path}/queue"}
    with served(**options) as server, Asker(server.port) as asker:
        for number in range(10):
            assert asker.ask(b"PUT:%d" % number) == b"PUT 1 bytes"
        with monkeypatch.context() as fault:

            def fail(*_: object) -> None:
                raise StorageError("writing to", "the disk", OSError(28, "No space left on device"))

            fault.setattr("penstock.queue.groups.reader.GroupReader.ack_ranges", fail)
            for number in range(5):
                assert asker.ask(b"GET") == b"%d" % number
                time.sleep(0.03)
            assert asker.ask(b"PUT:more") == b"PUT 4 bytes"
        time.sleep(0.2)
        assert_balanced(server.statistics().queue)
    with served(**options) as server, Asker(server.port) as asker:
        assert [asker.ask(b"GET") for _ in range(7)] == [b"5", b"6", b"7", b"8", b"9", b"more", b""]


def test_a_journal_that_cannot_sync_costs_nobody_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("writing to", "the disk", OSError(5, "Input/output error"))

    with (
        served(journal=f"log:{tmp_path}/queue?sync=batch", tcp=True) as server,
        StreamAsker(server.port) as asker,
    ):
        for number in range(4):
            assert asker.ask(b"PUT:%d" % number) == b"PUT 1 bytes"
        with monkeypatch.context() as fault:
            fault.setattr("penstock.queue.log.writer.LogWriter.sync", fail)
            asker.send(b"PUT:4")  # whose answer would be a promise
            assert asker.is_silent()
            assert asker.ask(b"RPUT:me:1:5").startswith(b"ERR:1:failed:")
            assert asker.ask(b"RPUT:me").startswith(b"ERR::malformed:")
            assert [asker.ask(b"GET") for _ in range(2)] == [b"0", b"1"]
            assert asker.ask(b"SIZE") == b"4"
        assert asker.ask(b"RPUT:me:1:5") == b"OK:1"
        assert [asker.ask(b"GET") for _ in range(5)] == [b"2", b"3", b"4", b"5", b""]
        books = server.statistics().queue
        assert (books.taken, books.repeated) == (6, 1)
        assert_balanced(books)


@pytest.mark.parametrize("sync", ["none", "batch"])
def test_a_server_that_is_killed_has_lost_nothing(tmp_path: Path, sync: str) -> None:
    journal = f"log:{tmp_path}/queue?sync={sync}"
    rng = random.Random(sync)
    stored: list[bytes] = []
    taken: set[bytes] = set()
    for life in range(3):
        with served_elsewhere("--journal", journal) as (process, port), Asker(port) as asker:
            for number in range(rng.randrange(50, 150)):
                message = b"%d.%d" % (life, number)
                assert asker.ask(b"RPUT:a%d:%d:%b" % (life, number, message)).startswith(b"OK")
                stored.append(message)
                if rng.random() < 0.3:
                    taken.add(asker.ask(b"GET"))
            process.kill()
            process.wait()
    with served(journal=journal) as server, Asker(server.port) as asker:
        left: list[bytes] = []
        while message := asker.ask(b"GET"):
            left.append(message)
    assert taken | set(left) == set(stored)
    assert left == sorted(left, key=stored.index)


def test_what_a_client_has_that_is_gone_is_given_to_others_at_once() -> None:
    with served() as server, Asker(server.port) as asker:
        assert isinstance(server.queue, MessageQueue)
        for number in range(3):
            asker.ask(b"PUT:%d" % number)
        asker.ask(b"RGETS:w1-7.aa:1:2")
        other = asker.ask(b"RGETS:w1-77.bb:1:1")
        assert other.endswith(b":112")
        with Asker(server.port) as waiting:
            waiting.send(b"RGET:w1-7.aa:2:20000")  # it is killed while it waits
            until(lambda: server.statistics().queue.waiting == 1)
            server.queue.release(b"w1-7")
            assert server.statistics().queue.waiting == 0
        assert asker.ask(b"RGET:w1-7.aa:3") == b"NONE:3"  # was on its way when it was killed
        assert asker.ask(b"RGETS:w2-8.cc:1:5").endswith(b":110111")
        assert server.statistics().queue.leased == 3
        assert_balanced(server.statistics().queue)
