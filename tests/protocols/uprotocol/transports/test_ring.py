from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.core.endpoints import create, describe, open_reader, open_writer
from penstock.core.errors import InvalidURL, StorageError
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.protocols.uprotocol import (
    UCode,
    UMessage,
    UStatusError,
    UUri,
    notification,
    publish,
)
from penstock.protocols.uprotocol.transports import ring_files
from penstock.protocols.uprotocol.transports.interface import NOT_TRIED
from penstock.protocols.uprotocol.transports.ring import RingLeg, RingTransport
from penstock.protocols.uprotocol.transports.ring_files import place_of
from support.until import until

TOPIC = UUri("vehicle1", 0x10AB, 1, 0x8001)
ENTITY = UUri("vehicle1", 0x20AB, 1, 0)


def small(path: Path, name: str) -> str:
    return f"fmq:{path}/{name}?slots=64&size=64k"


def numbered(count: int, size: int = 0) -> list[UMessage]:
    return [notification(TOPIC, ENTITY, b"%06d" % n + bytes(size)) for n in range(count)]


def test_what_breaks_a_rule_is_counted_and_does_not_stay_in_the_ring(tmp_path: Path) -> None:
    ring = f"fmq:{tmp_path}/server"
    heard: list[UMessage] = []
    sent = numbered(1)[0]
    with RingTransport("vehicle1", receive=ring, send=ring) as transport:
        transport.register_listener(UUri.ANY, heard.append, UUri.ANY)
        with open_writer(ring) as writer:  # as a peer may that does not look at what it sends
            writer.write(sent.with_attributes(id=None).to_bytes())
            writer.write(sent.to_bytes())
        until(lambda: heard)
        assert heard == [sent]
        books = transport.statistics()
        assert (books["invalid"], books["waiting"]) == (1, 0)


def test_a_ring_that_could_not_be_read_for_a_moment_is_read_on_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Reader] = []
    ingested: list[bytes | UMessage] = []

    def open_faulty(*given: Any, **options: Any) -> Reader:
        reader = open_reader(*given, **options)
        read, calls = reader.read_many, iter(range(10**9))

        def read_or_fail(count: int, timeout: float | None = 0) -> list[Message]:
            found = read(count, timeout)
            if len(opened) == 2 and found and next(calls) == 1:  # one that reads, one that holds
                raise StorageError("reading", "it", OSError(5, "it failed"))
            return found

        monkeypatch.setattr(reader, "read_many", read_or_fail)
        opened.append(reader)
        return reader

    monkeypatch.setattr(ring_files, "open_reader", open_faulty)
    with (
        RingLeg("local", receive=small(tmp_path, "in")) as leg,
        RingTransport("vehicle1", send=f"fmq:{tmp_path}/in") as sender,
    ):
        leg.start(ingested.extend, ["vehicle1"])
        sent = numbered(20)
        for message in sent[:10]:
            sender.send(message)
        until(lambda: ingested)
        for message in sent[10:]:
            sender.send(message)
        until(lambda: len(ingested) == 20)
        assert [UMessage.from_bytes(it) for it in ingested if isinstance(it, bytes)] == sent
        assert leg.statistics()["ingest_failures"] == len(opened) // 2 - 1 == 1


def test_entities_talk_through_a_dispatcher_with_bytes_unchanged(tmp_path: Path) -> None:
    ingested: list[bytes | UMessage] = []
    with (
        RingLeg("local", receive=small(tmp_path, "in"), send=f"fmq:{tmp_path}/{{ue_id}}") as leg,
        RingTransport("vehicle1", send=f"fmq:{tmp_path}/in") as sender,
        RingTransport("vehicle1", receive=small(tmp_path, "20AB")) as receiver,
    ):
        leg.start(ingested.extend, ["vehicle1"])
        heard: list[UMessage] = []
        receiver.register_listener(TOPIC, heard.append, ENTITY)
        sent = numbered(30)
        for message in sent:
            sender.send(message)
        until(lambda: len(ingested) == 30)
        assert ingested == [message.to_bytes() for message in sent]
        messages = [UMessage.from_bytes(bytes(it)) for it in ingested if isinstance(it, bytes)]
        assert leg.deliver(ENTITY, messages) == [None] * 30
        until(lambda: len(heard) == 30)
        assert [message.to_bytes() for message in heard] == ingested
        assert leg.statistics() == {
            "received": 30,
            "delivered": 30,
            "failed": 0,
            "ingest_failures": 0,
        }


def test_a_full_ring_is_not_overwritten_and_the_rest_is_not_tried(tmp_path: Path) -> None:
    create(small(tmp_path, "20AB"), writers="many")
    with RingLeg("local", send=f"fmq:{tmp_path}/{{ue_id}}") as leg:
        messages = numbered(100)
        found = leg.deliver(ENTITY, messages)
        done = found.count(None)
        assert found[:done] == [None] * done
        assert 0 < done < 100
        status = found[done]
        assert status is not None
        assert status.code == UCode.UNAVAILABLE
        assert all(it is NOT_TRIED for it in found[done + 1 :])
        heard: list[UMessage] = []
        with RingTransport("vehicle1", receive=small(tmp_path, "20AB")) as receiver:
            receiver.register_listener(TOPIC, heard.append, ENTITY)
            rest = messages[done:]
            while rest:
                found = leg.deliver(ENTITY, rest)
                rest = rest[found.count(None) :]
            until(lambda: receiver.statistics()["arrived"] == 100)
        assert heard == messages[100 - len(heard) :]


def test_a_message_that_never_fits_is_refused_after_those_before_it(tmp_path: Path) -> None:
    create(small(tmp_path, "20AB"), writers="many")
    with RingLeg("local", send=f"fmq:{tmp_path}/{{ue_id}}") as leg:
        messages = [*numbered(2), *numbered(1, 100_000), *numbered(1)]
        first, second, third, fourth = leg.deliver(ENTITY, messages)
        assert first is second is None
        assert third is not None
        assert third.code == UCode.RESOURCE_EXHAUSTED
        assert fourth is NOT_TRIED


def test_a_receiver_without_a_ring_is_unavailable_and_makes_none(tmp_path: Path) -> None:
    with RingLeg("local", send=f"fmq:{tmp_path}/{{authority}}-{{ue_id}}-{{ue_version}}") as leg:
        [status] = leg.deliver(ENTITY, numbered(1))
        assert status is not None
        assert status.code == UCode.UNAVAILABLE
        assert not list(tmp_path.iterdir())
        create(small(tmp_path, "vehicle1-20AB-1"), writers="many")
        assert leg.deliver(ENTITY, numbered(1)) == [None]


@pytest.mark.parametrize("authority", ["", ".", "..", "..."])
def test_an_authority_does_not_lead_out_of_the_directory(authority: str) -> None:
    with pytest.raises(ValueError):
        place_of("fmq:/run/bus/{authority}/ring", UUri.unchecked(authority, 1, 1, 0))


def test_places_are_written_as_addresses_are() -> None:
    template = "fmq:/run/{authority}/{ue_id}.{ue_version}"
    assert (
        place_of(template, UUri("[2001::7]", 0x10ABC, 0xF, 0))
        == "fmq:/run/%5B2001%3A%3A7%5D/10ABC.F"
    )


def test_what_was_not_stored_comes_again(tmp_path: Path) -> None:
    attempts: list[int] = []
    stored: list[bytes | UMessage] = []

    def ingest(messages: Sequence[bytes | UMessage]) -> None:
        attempts.append(len(messages))
        if len(attempts) < 3:
            raise StorageError("writing", "it", OSError(28, "no space"))
        stored.extend(messages)

    with (
        RingLeg("local", receive=small(tmp_path, "in")) as leg,
        RingTransport("vehicle1", send=f"fmq:{tmp_path}/in") as sender,
    ):
        leg.start(ingest, [])
        sent = numbered(10)
        for message in sent:
            sender.send(message)
        until(lambda: len(stored) == 10)
        assert stored == [message.to_bytes() for message in sent]
        assert leg.statistics()["ingest_failures"] == 2


def test_what_was_being_stored_when_it_stopped_comes_again(tmp_path: Path) -> None:
    url = small(tmp_path, "in")
    entered = threading.Event()

    def never(messages: Sequence[bytes | UMessage]) -> None:
        entered.set()
        raise StorageError("writing", str(len(messages)), OSError(28, "no space"))

    sent = numbered(5)
    with RingLeg("local", receive=url) as leg:
        leg.start(never, [])
        with RingTransport("vehicle1", send=f"fmq:{tmp_path}/in") as sender:
            for message in sent:
                sender.send(message)
        assert entered.wait(10)
    stored: list[bytes | UMessage] = []
    with RingLeg("local", receive=url) as leg:
        leg.start(stored.extend, [])
        until(lambda: len(stored) == 5)
    assert stored == [message.to_bytes() for message in sent]


def test_after_stop_nothing_is_ingested(tmp_path: Path) -> None:
    stored: list[bytes | UMessage] = []
    with RingLeg("local", receive=small(tmp_path, "in")) as leg:
        leg.start(stored.extend, [])
        leg.stop()
        with RingTransport("vehicle1", send=f"fmq:{tmp_path}/in") as sender:
            sender.send(publish(TOPIC))
        assert stored == []


_DISPATCHER = """
import sys, time
from penstock.protocols.uprotocol.transports.ring import RingLeg
def ingest(messages):
    for message in messages:
        print(message.hex(), flush=True)
    if len(messages) and sys.argv[2] == "hang":
        time.sleep(60)
leg = RingLeg("local", receive=sys.argv[1])
leg.start(ingest, [])
time.sleep(60)
"""


def test_a_dispatcher_that_is_killed_gets_again_what_it_had_not_stored(tmp_path: Path) -> None:
    url = small(tmp_path, "in")
    command = [sys.executable, "-c", _DISPATCHER, url]
    first = subprocess.Popen([*command, "hang"], stdout=subprocess.PIPE, text=True)
    second: subprocess.Popen[str] | None = None
    try:
        sent = numbered(20)
        with RingTransport("vehicle1", send=f"fmq:{tmp_path}/in") as sender:
            until(lambda: (tmp_path / "in").exists() or list(tmp_path.glob("in*")))
            for message in sent:
                until(lambda message=message: _is_sent(sender, message))  # type: ignore[misc]
        assert first.stdout is not None
        assert first.stdout.readline()
        first.kill()
        first.wait(10)
        second = subprocess.Popen([*command, "store"], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        found = [bytes.fromhex(second.stdout.readline().strip()) for _ in sent]
        assert found == [message.to_bytes() for message in sent]
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait(10)
                assert process.stdout is not None
                process.stdout.close()


def _is_sent(sender: RingTransport, message: UMessage) -> bool:
    try:
        sender.send(message)
    except UStatusError as error:
        assert error.code == UCode.UNAVAILABLE  # noqa: PT017
        return False
    return True


def test_several_entities_append_to_one_ring_at_once(tmp_path: Path) -> None:
    stored: list[bytes | UMessage] = []
    url = f"fmq:{tmp_path}/in?slots=8192&size=4M"
    with RingLeg("local", receive=url) as leg:
        leg.start(stored.extend, [])

        def send() -> None:
            with RingTransport("vehicle1", send=f"fmq:{tmp_path}/in") as sender:
                for message in numbered(200):
                    sender.send(message)

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        until(lambda: len(stored) == 800)
    assert len(set(stored)) == 800
    assert describe(f"fmq:{tmp_path}/in").count == 800


def test_what_is_no_message_is_counted_and_passed_over(tmp_path: Path) -> None:
    from penstock.core.endpoints import open_writer

    with RingTransport("vehicle1", receive=small(tmp_path, "20AB")) as receiver:
        with open_writer(f"fmq:{tmp_path}/20AB") as writer:
            writer.write(b"\xff\xff")
            writer.write(publish(TOPIC).to_bytes())
        until(lambda: receiver.statistics()["arrived"] == 1)
        assert receiver.statistics()["undecodable"] == 1
        assert receiver.receive(TOPIC).attributes.source == TOPIC


def test_only_rings_are_taken_and_a_publish_is_for_no_ring_in_particular(tmp_path: Path) -> None:
    with pytest.raises(InvalidURL, match="not a ring"):
        RingLeg("local", send=f"log:{tmp_path}/x")
    with (
        RingTransport("vehicle1", send=f"fmq:{tmp_path}/{{ue_id}}") as sender,
        pytest.raises(UStatusError, match="INVALID_ARGUMENT"),
    ):
        sender.send(publish(TOPIC))
