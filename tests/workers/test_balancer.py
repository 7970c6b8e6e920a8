"""Several queues behind one address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.core.capabilities import Grouped
from penstock.core.errors import Unacknowledged, WriteTimeout
from penstock.core.worker_function import place_of
from penstock.protocols.lhhttt import encode_bytes, join_frames
from penstock.protocols.lhhttt.queue import MessageQueue, QueueSettings
from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions
from penstock.relay.faults import FaultRouter, Faults
from penstock.workers.balancer import Balancer
from protocols.lhhttt.queues import Asker, StreamAsker, assert_balanced


@contextmanager
def balanced(
    count: int = 3,
    key: str | None = None,
    lease: float = 30.0,
    capacity: int = 1_000_000,
    journals: Path | None = None,
) -> Iterator[tuple[LhhtttServer, list[MessageQueue]]]:
    def journal(number: int) -> str | None:
        return None if journals is None else f"log:{journals}/{number}?segment=4096"

    queues = [
        MessageQueue(QueueSettings(lease=lease, capacity=capacity, journal=journal(number)))
        for number in range(count)
    ]
    try:
        with LhhtttServer(ServerOptions(port=0, tcp=True), Balancer(queues, key)) as server:
            yield server, queues
    finally:
        for queue in queues:
            queue.close()


def counts(queues: list[MessageQueue]) -> list[int]:
    return [queue.statistics().queued for queue in queues]


def test_the_prototypes_verbs_work_at_the_one_address() -> None:
    with balanced() as (server, queues), Asker(server.port) as asker:
        for number in range(6):
            assert asker.ask(b"PUT:%d" % number) == b"PUT 1 bytes"
        assert counts(queues) == [2, 2, 2]
        assert asker.ask(b"SIZE") == b"6"
        assert sorted(asker.ask(b"GET") for _ in range(6)) == [b"%d" % n for n in range(6)]
        assert asker.ask(b"GET") == b""
        asker.send(b"WHAT")
        assert asker.is_silent(0.2)
        assert_balanced(server.statistics().queue)


def test_an_empty_message_is_taken_once_and_hides_no_other() -> None:
    with balanced(2) as (server, queues), Asker(server.port) as asker:
        asker.ask(b"PUT:")
        asker.ask(b"PUT:x")
        assert sorted(asker.ask(b"GET") for _ in range(2)) == [b"", b"x"]
        assert [queue.statistics().taken for queue in queues] == [1, 1]


@pytest.mark.parametrize("verb", [b"PUT", b"RPUT", b"RPUTS"])
def test_messages_of_one_key_go_to_the_same_queue(verb: bytes) -> None:
    messages = [b"%b,%d" % (key, number) for key in (b"a", b"b", b"c", b"d") for number in range(5)]
    with balanced(3, key="^([^,]*),") as (server, queues):
        with Asker(server.port) as asker:
            if verb == b"RPUTS":
                frames = join_frames(messages)
                assert asker.ask(b"RPUTS:me:1:" + frames) == b"OK:1"
                assert asker.ask(b"RPUTS:me:1:" + frames) == b"OK:1"  # the same again
            for seq, message in enumerate(messages):
                if verb == b"PUT":
                    asker.ask(b"PUT:" + message)
                elif verb == b"RPUT":
                    assert asker.ask(b"RPUT:me:%d:%b" % (seq, message)) == b"OK:%d" % seq
        expected = [place_of(message.partition(b",")[0], 3) for message in messages]
        assert counts(queues) == [expected.count(place) for place in range(3)]
        assert_balanced(server.statistics().queue)


def test_a_request_with_too_many_messages_for_one_queue_is_stored_by_parts_once() -> None:
    sent = [b"%d" % number for number in range(20)]
    with balanced(2, key=".*", capacity=15) as (server, queues):
        by_place = [place_of(message, 2) for message in sent]
        same = [message for message, place in zip(sent, by_place, strict=True) if place == 0] * 2
        assert len(same) > 15
        assert len(same) < 30
        other = next(m for m, place in zip(sent, by_place, strict=True) if place == 1)
        with Asker(server.port) as asker:
            frames = join_frames([other, *same])
            assert asker.ask(b"RPUTS:me:1:" + frames) == (
                b"ERR:1:too-large:at most 15 messages, 67108864 bytes"
            )
        assert counts(queues) == [0, 0]
        with open_writer(f"lhhttt://{server.address}?timeout=300ms") as writer:
            with pytest.raises(WriteTimeout):
                writer.write_many([other, *same])
            assert writer.statistics().messages == sum(counts(queues))


def test_a_request_with_a_message_too_large_for_a_queue_is_stored_by_no_queue(
    tmp_path: Path,
) -> None:
    key = {place_of(b"%d" % number, 2): b"%d" % number for number in range(20)}
    with balanced(2, key="^[^,]*", journals=tmp_path) as (server, queues):
        with Asker(server.port) as asker:
            fits = [key[0] + b"," + bytes(3000), key[1] + b"," + bytes(3000)] * 2
            assert asker.ask(b"RPUTS:me:1:" + join_frames(fits)) == b"OK:1"
            large = [key[0] + b",", key[1] + b"," + bytes(4001)]
            assert asker.ask(b"RPUTS:me:2:" + join_frames(large)) == (
                b"ERR:2:too-large:at most 1000000 messages, 4000 bytes"
            )
        assert counts(queues) == [2, 2]


def test_a_request_of_which_a_queue_stored_its_part_fails_while_another_is_full() -> None:
    """Whoever hears that it is full would store the part again, with another number."""
    key = {place_of(b"%d" % number, 2): b"%d" % number for number in range(20)}
    batch = [key[0] + b",x", key[1] + b",y"]
    with balanced(2, key="^[^,]*", capacity=3) as (server, queues), Asker(server.port) as asker:
        assert asker.ask(b"RPUTS:b:1:" + join_frames([key[1]] * 3)) == b"OK:1"
        # The part of the full one comes first: nothing is stored.
        other_way_round = b"RPUTS:a:1:" + join_frames(batch[::-1])
        assert asker.ask(other_way_round) == b"ERR:1:full:the queue holds 3 messages"
        for _ in range(2):
            said = asker.ask(b"RPUTS:a:2:" + join_frames(batch))
            assert said == b"ERR:2:failed:the queue holds 3 messages"
            assert counts(queues) == [1, 3]
        with open_writer(f"lhhttt://{server.address}?timeout=300ms") as writer:
            with pytest.raises(Unacknowledged) as caught:
                writer.write_many(batch)
            assert (caught.value.acknowledged, caught.value.in_doubt) == (0, 2)
        assert counts(queues) == [2, 3]
        while asker.ask(b"GET"):
            pass
        assert asker.ask(b"RPUTS:a:2:" + join_frames(batch)) == b"OK:2"
        assert counts(queues) == [2, 4]
        assert_balanced(server.statistics().queue)


def test_a_request_that_is_repeated_is_done_once() -> None:
    with balanced(3) as (server, queues), Asker(server.port) as asker:
        for seq in (1, 1, 2, 2, 3, 3):
            assert asker.ask(b"RPUT:me:%d:m%d" % (seq, seq)) == b"OK:%d" % seq
        assert counts(queues) == [1, 1, 1]
        first = asker.ask(b"RGET:me:7")
        assert asker.ask(b"RGET:me:7") == first
        second = asker.ask(b"RGET:me:8")
        assert first.split(b":")[3] != second.split(b":")[3]
        assert asker.ask(b"RGET:me:7") == b"NONE:7"
        for answer in (first, second):
            tag = answer.split(b":")[2]
            assert asker.ask(b"ACK:me:" + tag) == b"OK:" + tag
        assert asker.ask(b"ACK:me:1.5").startswith(b"ERR:1.5:no-lease:")
        assert server.statistics().queue.acked == 2
        assert asker.ask(b"RPUTS:me:x:10").startswith(b"ERR:")


@pytest.mark.parametrize("wait", [b"", b":50"], ids=["at once", "after a while"])
def test_a_request_that_got_no_message_gets_none_when_it_is_repeated(wait: bytes) -> None:
    with balanced(3) as (server, _), Asker(server.port) as asker:
        assert asker.ask(b"RGET:me:7" + wait) == b"NONE:7"
        asker.ask(b"PUT:late")
        # Its sender waits for the answer to a later one, and would leave this message leased.
        assert asker.ask(b"RGET:me:7" + wait) == b"NONE:7"
        assert asker.ask(b"RGET:me:8").endswith(b":late")
        assert server.statistics().queue.leased == 1


def test_a_request_that_waits_and_is_repeated_by_another_connection_is_answered_there() -> None:
    with balanced(2) as (server, _), StreamAsker(server.port) as before:
        before.send(b"RGET:me:7:20000")
        assert before.is_silent()
        with StreamAsker(server.port) as asker, Asker(server.port) as other:
            asker.send(b"RGET:me:7:20000")
            assert before.answer() == b"NONE:7"
            other.ask(b"PUT:x")
            assert asker.answer().endswith(b":x")
            assert asker.ask(b"SIZE") == before.ask(b"SIZE") == b"0"


def test_a_request_that_arrives_behind_a_later_one_of_its_client_gets_no_message() -> None:
    with balanced(3) as (server, _), Asker(server.port) as asker, Asker(server.port) as late:
        late.send(b"RGET:me:7:20000")
        assert late.is_silent()
        asker.send(b"RGET:me:8:20000")
        assert late.answer() == b"NONE:7"  # the later one has its place
        assert late.ask(b"RGET:me:7:20000") == b"NONE:7"
        assert asker.is_silent()
        late.ask(b"PUT:x")
        assert asker.answer().endswith(b":x")
        assert server.statistics().queue.leased == 1


def test_who_waits_is_given_what_comes_or_comes_again() -> None:
    with balanced(3, lease=0.2) as (server, _), Asker(server.port) as waiting:
        waiting.send(b"RGET:one:1:5000")
        assert waiting.is_silent(0.2)
        with Asker(server.port) as asker:
            asker.ask(b"PUT:late")
        answer = waiting.answer()
        assert answer.endswith(b":late")
        # Its lease runs out while it waits for the next.
        again = waiting.ask(b"RGET:one:2:5000")
        assert again.split(b":")[2:] == answer.split(b":")[2:]
        tag = again.split(b":")[2]
        assert waiting.ask(b"ACK:one:" + tag) == b"OK:" + tag
        assert waiting.ask(b"RGET:one:3:50") == b"NONE:3"


def test_no_message_is_lost_on_a_bad_network_before_it() -> None:
    messages = [b"%d" % number for number in range(300)]
    with (
        balanced(3, key="") as (server, _),
        FaultRouter.udp(
            ("127.0.0.1", server.port), Faults(drop=0.2, duplicate=0.05, reorder=0.05), seed=4
        ) as router,
    ):
        url = f"lhhttt://127.0.0.1:{router.address[1]}?mode=reliable"
        with open_writer(url) as writer:
            for at in range(0, 300, 60):
                writer.write_many(messages[at : at + 60])
        seen: dict[tuple[bytes | None, int], bytes] = {}
        with open_reader(url) as reader:
            assert isinstance(reader, Grouped)
            while len(seen) < 300:
                found = reader.read_many(50, timeout=2)
                seen |= {(message.attributes, message.seq): message.payload for message in found}
                if found:
                    reader.ack(found)
        assert sorted(seen.values()) == sorted(messages)
        assert server.statistics().queue.held == 0
        assert_balanced(server.statistics().queue)


def test_messages_of_different_queues_with_the_same_number_are_settled_each() -> None:
    with balanced(2) as (server, queues):
        url = f"lhhttt://{server.address}"
        with open_writer(url) as writer:
            writer.write_many([b"%d" % number for number in range(4)])
        with open_reader(url) as reader:
            assert isinstance(reader, Grouped)
            first, second = reader.read_many(2), reader.read_many(2)
            assert [message.seq for message in first] == [message.seq for message in second]
            reader.ack([*first, *first])
            assert sorted(queue.statistics().acked for queue in queues) == [0, 2]
            reader.nack(second[:1])
            # Not those of the first, which are done.
            (again,) = reader.read_many(2)
            assert (again.attributes, again.payload) == (second[0].attributes, second[0].payload)
            reader.acknowledge()
            assert server.statistics().queue.held == 0
        assert_balanced(server.statistics().queue)


def test_a_frame_of_it_is_one_of_the_protocol() -> None:
    with balanced(2) as (server, _), Asker(server.port) as asker:
        asker.socket.send(encode_bytes(b"CAPS"))
        assert asker.answer().startswith(b"CAPS:1:")
