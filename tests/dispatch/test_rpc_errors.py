"""R13 to R17 (docs/specs/uprotocol.md 10.2): is a failed request answered, and only that?"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from penstock.core.errors import StorageError
from penstock.dispatch import Access, Limits, Policy, Routes, Rule
from penstock.dispatch.dead_letters import DeadLetters, Letter
from penstock.dispatch.outbox import Outbox
from penstock.protocols.uprotocol import (
    UAttributes,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatus,
    UUri,
    response,
)
from penstock.queue.log.writer import LogWriter
from support.dispatching import ALICE, BOB, CAROL, METHOD, TOPIC, World, status

THERE = UUri("there", 0, 0, 0)
THRICE = UUri("there", 0x30, 1, 3)


def _no_route(world: World) -> UMessage:
    asked = world.request(method=UUri("nowhere", 1, 1, 1))
    world.ingest(asked)
    return asked


def _stopped(world: World) -> UMessage:
    asked = world.request(ttl=300)
    world.dispatcher.stop_topic(METHOD, queue=False)
    world.ingest(asked)
    return asked


def _used_up(world: World) -> UMessage:
    world.far.always = status("CANCELLED")
    asked = world.request(method=THRICE)
    world.ingest(asked)
    return asked


def _unknown(world: World) -> UMessage:
    world.far.always = status("UNKNOWN")
    asked = world.request(method=THRICE)
    world.ingest(asked)
    return asked


def _raises(world: World) -> UMessage:
    world.far.always = RuntimeError("a bug")
    asked = world.request(method=THRICE)
    world.ingest(asked)
    return asked


def _expired_on_arrival(world: World) -> UMessage:
    asked = world.request(ttl=100)
    world.run(1)
    world.ingest(asked)
    return asked


def _expired_in_queue(world: World) -> UMessage:
    world.dispatcher.stop_topic(METHOD)
    asked = world.request(ttl=100)
    world.ingest(asked)
    return asked


def _forbidden(world: World) -> UMessage:
    asked = world.request(source=BOB)
    world.ingest(asked)
    return asked


def _spoofed(world: World) -> UMessage:
    asked = world.request(source=CAROL)
    world.ingest(asked)
    return asked


def _too_large(world: World) -> UMessage:
    asked = world.request(payload=bytes(3000), payload_format=UPayloadFormat.RAW)
    world.ingest(asked)
    return asked


def _invalid(world: World) -> UMessage:
    asked = world.request().with_attributes(priority=UPriority.CS1)
    world.ingest(asked)
    return asked


def _shared_memory(world: World) -> UMessage:
    asked = world.request(payload=b"address", payload_format=UPayloadFormat.SHM)
    world.ingest(asked)
    return asked


def _unmapped(world: World) -> UMessage:
    world.far.always = UStatus(UCode.ALREADY_EXISTS, "odd")
    asked = world.request()
    world.ingest(asked)
    return asked


def _broken(world: World) -> UMessage:
    world.far.always = UStatus(UCode.DATA_LOSS, "odd")
    asked = world.request()
    world.ingest(asked)
    return asked


CASES: list[tuple[UCode, Callable[[World], UMessage]]] = [
    (UCode.UNAVAILABLE, _no_route),
    (UCode.UNAVAILABLE, _stopped),
    (UCode.UNAVAILABLE, _used_up),
    (UCode.DEADLINE_EXCEEDED, _expired_on_arrival),
    (UCode.DEADLINE_EXCEEDED, _expired_in_queue),
    (UCode.PERMISSION_DENIED, _forbidden),
    (UCode.UNAUTHENTICATED, _spoofed),
    (UCode.RESOURCE_EXHAUSTED, _too_large),
    (UCode.INVALID_ARGUMENT, _invalid),
    (UCode.INVALID_ARGUMENT, _shared_memory),
    (UCode.UNKNOWN, _unmapped),
    (UCode.UNKNOWN, _unknown),
    (UCode.INTERNAL, _raises),
    (UCode.INTERNAL, _broken),
]


@pytest.mark.parametrize(("code", "trigger"), CASES)
def test_r13_each_of_the_eight_codes_is_sent_once_for_its_reason(
    make_world: Callable[..., World], code: UCode, trigger: Callable[[World], UMessage]
) -> None:
    policies = [Policy(topic=THRICE, max_attempts=3)]
    rules = [Rule(allow="call", source=ALICE), Rule(allow="call", source=CAROL)]
    world = make_world(access=Access(rules), limits=Limits(message=2000), policies=policies)
    asked = trigger(world)
    world.run(60)
    source = asked.attributes.source
    assert source is not None
    (answer,) = world.responses(source)
    attributes = answer.attributes
    assert answer.validate() == []
    assert attributes.type == UMessageType.RESPONSE
    assert attributes.commstatus == code
    assert attributes.reqid == asked.attributes.id
    assert attributes.id != asked.attributes.id
    assert (attributes.source, attributes.sink) == (asked.attributes.sink, source)
    assert attributes.ttl == asked.attributes.ttl
    usable = (asked.attributes.priority, UPriority.CS4)
    assert attributes.priority in usable
    assert attributes.payload_format == UPayloadFormat.PROTOBUF
    assert UStatus.from_bytes(answer.payload or b"").code == code
    assert world.codes == [code]  # R17
    assert world.far.arrived == {}


def test_r13_a_full_queue_answers_with_resource_exhausted(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(queue_messages=3))
    world.far.always = status("UNAVAILABLE")
    world.ingest(*(world.notify(sink=CAROL, priority=UPriority.CS6) for _ in range(3)))
    world.ingest(world.request())
    world.run(1)
    (answer,) = world.responses()
    assert answer.attributes.commstatus == UCode.RESOURCE_EXHAUSTED
    assert world.codes == [UCode.RESOURCE_EXHAUSTED]


def test_r13_all_codes_of_the_table_have_a_trigger() -> None:
    assert sorted({code for code, _ in CASES}) == [2, 3, 4, 7, 8, 13, 14, 16]


def test_r13_one_response_for_a_request_that_fails_again_and_again(world: World) -> None:
    asked = world.request(method=UUri("nowhere", 1, 1, 1))
    for _ in range(3):
        world.ingest(asked)
        world.run(1)
    assert len(world.responses()) == 1
    assert world.dispatcher.books().counts.unanswered == 2


def test_r13_a_response_that_the_disk_has_no_room_for_is_stored_when_the_request_comes_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = world.request(method=UUri("nowhere", 1, 1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "append", _full)
        with pytest.raises(StorageError):
            world.ingest(asked)
    assert world.dispatcher.books().counts.responses == 0
    world.ingest(asked)
    world.run(1)
    assert len(world.responses()) == 1
    assert world.dispatcher.books().counts.responses == 1
    world.balance()


def test_r13_no_response_for_each_retry(world: World) -> None:
    world.far.always = status("UNAVAILABLE")
    world.ingest(world.request(ttl=20_000))
    world.run(19)
    assert world.responses() == []
    world.run(10)
    assert len(world.responses()) == 1


def test_r13_no_response_once_the_request_was_acknowledged(world: World) -> None:
    world.ingest(world.request(ttl=100))
    world.run(60)
    assert len(world.far.arrived[THERE]) == 1
    assert world.responses() == []


def test_r14_only_requests_are_answered(world: World) -> None:
    world.far.always = status("PERMISSION_DENIED")
    world.table.add(TOPIC, CAROL)
    asked = world.request(source=CAROL, method=UUri("here", 0x10, 1, 1))
    world.ingest(
        world.publish(),
        world.notify(sink=CAROL),
        world.response(asked),
        world.notify(sink=UUri("nowhere", 1, 1, 0)),
    )
    world.run(60)
    assert len(world.letters) == 4
    assert world.local.arrived == {}
    assert world.dispatcher.books().counts.responses == 0


def test_r15_an_error_response_that_cannot_be_delivered_is_a_dead_letter(world: World) -> None:
    world.local.always = status("NOT_FOUND")
    asked = world.request(method=UUri("nowhere", 1, 1, 1))
    world.ingest(asked)
    world.run(60)
    assert [letter.header.type for letter in world.letters] == [
        UMessageType.REQUEST,
        UMessageType.RESPONSE,
    ]
    assert world.codes == [UCode.UNAVAILABLE, UCode.NOT_FOUND]
    assert world.dispatcher.books().counts.responses == 1


def test_r15_an_error_response_without_a_way_is_a_dead_letter(
    make_world: Callable[..., World],
) -> None:
    routes = Routes(authorities={"local": ["here"], "far": ["*"]})
    world = make_world(routes=routes)
    world.dispatcher.ingest(
        "far", [world.request(source=UUri("who", 1, 1, 0), ttl=1000).to_bytes()]
    )
    world.far.always = status("UNAVAILABLE")
    world.run(60)
    assert world.codes == [UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED]


@pytest.mark.parametrize(
    "change",
    [
        {"id": None},
        {"source": None},
        {"sink": None},
        {"source": UUri("here", 0xFFFF, 1, 0)},
        {"source": UUri("here", 0x10, 1, 9)},
    ],
)
def test_r16_a_request_that_cannot_be_answered_is_a_letter_with_its_header(
    world: World, change: dict[str, object]
) -> None:
    asked = world.request(payload=b"gone", payload_format=UPayloadFormat.RAW)
    world.ingest(asked.with_attributes(**change))
    world.run(1)
    (letter,) = world.letters
    assert letter.code == UCode.INVALID_ARGUMENT
    assert letter.original is None
    assert isinstance(letter.header, UAttributes)
    assert letter.header.type == UMessageType.REQUEST
    assert world.local.arrived == {}
    assert world.dispatcher.books().counts.unanswered == 1


def test_r17_the_letter_has_the_code_of_the_response(world: World) -> None:
    for name in ("NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE"):
        world.far.next.append(status(name))
    for _ in range(4):
        world.ingest(world.request())
        world.run()
    told = [answer.attributes.commstatus for answer in world.responses()]
    assert told == world.codes
    assert told == [14, 3, 14, 3]


@pytest.mark.parametrize(("ttl", "notice"), [(10_000, 100), (1000, 100), (500, 50)])
def test_whoever_calls_an_absent_receiver_hears_of_it_while_he_listens(
    tmp_path: Path, ttl: int, notice: int
) -> None:
    world = World(tmp_path)
    world.far.always = status("UNAVAILABLE")
    asked = world.request(ttl=ttl)
    world.ingest(asked)
    world.run((ttl - notice - 5) / 1000)
    assert world.responses() == []
    world.run(0.01)
    (answer,) = world.responses()
    assert answer.attributes.commstatus == UCode.UNAVAILABLE
    assert answer.attributes.reqid == asked.attributes.id
    assert world.codes == [UCode.UNAVAILABLE]
    world.far.always = None
    world.run(ttl / 1000)
    assert world.far.arrived == {}  # it was answered: nobody gets it any more
    assert len(world.responses()) == 1
    world.balance()
    world.close()


def test_a_response_without_a_ttl_has_what_its_request_has_left(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked = world.request(ttl=5000)
    world.ingest(asked)
    world.run(1)
    answer = response(asked, b"late but good", id=world.id()).with_attributes(ttl=None)
    world.ingest(answer, leg="far")
    world.run(0.1)
    (got,) = world.responses()
    assert (got.payload, got.attributes.ttl) == (b"late but good", 4000)
    assert got.attributes.id == answer.attributes.id
    world.run(5)
    late = response(asked, b"too late", id=world.id()).with_attributes(ttl=None)
    world.ingest(late, leg="far")
    world.run(1)
    assert len(world.responses()) == 1
    assert world.codes == [UCode.DEADLINE_EXCEEDED]
    world.balance()
    world.close()


def test_a_response_without_a_ttl_to_a_request_that_is_not_known_is_delivered(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    asked = world.request(ttl=5000)  # which came before a restart, or by another way
    world.ingest(response(asked, b"yes", id=world.id()).with_attributes(ttl=None), leg="far")
    world.run(0.1)
    assert [got.payload for got in world.responses()] == [b"yes"]
    world.close()


def _full(*_: object, **__: object) -> None:
    raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))


def test_a_response_that_finds_no_room_is_made_again_with_its_request_after_a_full_disk(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(limits=Limits(queue_messages=1))
    _fill_the_queue_to_the_caller(world)
    asked = world.request(method=UUri("nowhere", 1, 1, 7))
    with monkeypatch.context() as patch:
        patch.setattr(DeadLetters, "write", _full)
        with pytest.raises(StorageError):
            world.ingest(asked)
    world.balance()
    world.ingest(asked)  # the leg has it again
    world.balance()
    counts = world.dispatcher.books().counts
    assert (counts.responses, counts.copies_refused, counts.unanswered) == (1, 1, 0)
    assert [letter.header.type for letter in world.letters][-2:] == [
        UMessageType.RESPONSE,
        UMessageType.REQUEST,
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_a_response_that_finds_no_room_outlasts_a_full_disk_after_its_request_waited(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The request is settled with its letter, and never comes again."""
    world = make_world(limits=Limits(queue_messages=1))
    _fill_the_queue_to_the_caller(world)
    write, numbers = DeadLetters.write, itertools.count(1)

    def write_or_fail(letters: DeadLetters, some: Iterable[Letter]) -> list[Letter]:
        if next(numbers) == number:
            raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))
        return write(letters, some)

    monkeypatch.setattr(DeadLetters, "write", write_or_fail)
    world.ingest(world.request(ttl=1000))
    with contextlib.suppress(StorageError):
        world.run(2)
    world.balance()
    world.run(30)
    world.balance()
    counts = world.dispatcher.books().counts
    assert (counts.responses, counts.copies_refused, counts.unanswered) == (1, 1, 0)
    assert _letter_types(world) == {UMessageType.REQUEST: 1, UMessageType.RESPONSE: 1}


def test_a_response_that_finds_no_room_is_not_lost_by_a_crash_between_two_letters(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letter of the request says that it was answered."""
    world = make_world(limits=Limits(queue_messages=1))
    _fill_the_queue_to_the_caller(world)
    write = DeadLetters.write

    def write_one(letters: DeadLetters, some: Iterable[Letter]) -> list[Letter]:
        write(letters, [*some][:1])
        raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))

    world.ingest(world.request(ttl=1000))
    with monkeypatch.context() as patch:
        patch.setattr(DeadLetters, "write", write_one)
        with pytest.raises(StorageError):
            world.run(2)
    again = world.reopen()
    again.local.always = status("UNAVAILABLE")
    again.run(30)
    again.balance()
    assert _letter_types(again) == {UMessageType.REQUEST: 1, UMessageType.RESPONSE: 1}
    again.close()


def test_a_response_that_finds_no_room_has_one_letter_however_often_the_disk_is_full_behind_it(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(limits=Limits(queue_messages=1))
    _fill_the_queue_to_the_caller(world)
    write, write_many, numbers = DeadLetters.write, LogWriter.write_many, itertools.count()

    def write_first(writer: LogWriter, records: list[bytes]) -> None:
        write_many(writer, records[:1])
        _full()

    def write_or_fail(letters: DeadLetters, some: Iterable[Letter]) -> list[Letter]:
        with monkeypatch.context() as patch:
            if next(numbers) < 3:
                patch.setattr(LogWriter, "write_many", write_first)
            return write(letters, some)

    monkeypatch.setattr(DeadLetters, "write", write_or_fail)
    world.ingest(world.request(ttl=1000))
    for _ in range(30):
        with contextlib.suppress(StorageError):
            world.run(2)
    world.balance()
    assert next(numbers) > 1
    assert _letter_types(world) == {UMessageType.REQUEST: 1, UMessageType.RESPONSE: 1}


def _fill_the_queue_to_the_caller(world: World) -> None:
    """Let no leg deliver, and the queue to ALICE have room for one message."""
    world.local.always = world.far.always = status("UNAVAILABLE")
    world.ingest(world.notify(sink=ALICE, priority=UPriority.CS6))
    world.run()


def _letter_types(world: World) -> Counter[UMessageType]:
    return Counter(letter.header.type for letter in world.letters)
