"""Are dead letters kept, bounded, shown, tried again and dropped?"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import Malformed, NotFound, StorageError, Unsupported
from penstock.dispatch import DeadLetters, Letter, Limits, dead_letter_topic
from penstock.dispatch.outbox import Outbox
from penstock.dispatch.routes import Receiver
from penstock.protocols.uprotocol import (
    UUID7,
    DeadLetterReason,
    UCode,
    UPriority,
    UUri,
    proto,
)
from support.dispatching import ALICE, BOB, CAROL, TOPIC, World, status
from support.until import until

DLT = dead_letter_topic("here")


def _fail(world: World, *payloads: bytes) -> None:
    world.local.always = status("NOT_FOUND")
    world.ingest(*(world.notify(payload) for payload in payloads))
    world.run()
    world.local.always = None


@pytest.mark.parametrize(
    ("limits", "size"), [(Limits(dead=4 << 20), 900_000), (Limits(), 17 << 20)]
)
def test_a_header_too_large_for_a_letter_holds_up_nobody(
    make_world: Callable[..., World], limits: Limits, size: int
) -> None:
    """A leg hands over a batch again until it is taken."""
    world = make_world(limits=limits)
    bad = proto.UMessage.FromString(world.notify(b"bad").to_bytes())
    bad.attributes.traceparent = "t" * size
    world.ingest(world.notify(b"0"), bad.SerializeToString(), world.notify(b"1"))
    world.run()
    assert world.local.payloads(BOB) == [b"0", b"1"]
    (letter,) = world.letters
    assert letter.reason in {DeadLetterReason.INVALID, DeadLetterReason.UNSUPPORTED}
    assert letter.original is None
    assert letter.header.id is not None


def test_a_letter_is_read_as_it_was_written(world: World) -> None:
    message = world.notify(b"payload", ttl=7)
    letter = Letter(
        id=UUID7.new(),
        code=UCode.UNAVAILABLE,
        reason=DeadLetterReason.UNREACHABLE,
        message="nobody was there",
        receiver=BOB,
        leg="local",
        first_failure_ms=1,
        dead_ms=2,
        attempts=3,
        dispatcher=UUri("here", 4, 1, 0),
        header=message.attributes,
        original=message,
    )
    assert Letter.from_bytes(letter.to_bytes()) == letter
    small = letter.without_payload()
    assert Letter.from_bytes(small.to_bytes()) == small
    with pytest.raises(Malformed):
        Letter.from_bytes(b"\xff\xff")


def test_letters_are_listed_shown_and_dropped(world: World) -> None:
    _fail(world, b"0", b"1", b"2")
    first, second, third = world.letters
    dead = world.dispatcher.dead_letters
    assert [letter.number for letter in dead.list(limit=1, start=second.number)] == [second.number]
    assert dead.show(second.id) == dead.show(second.number) == second
    world.dispatcher.drop_dead_letter(second.id)
    assert [letter.id for letter in world.letters] == [first.id, third.id]
    with pytest.raises(NotFound):
        dead.show(second.id)
    again = world.reopen()
    assert [letter.id for letter in again.letters] == [first.id, third.id]
    again.close()


def test_others_look_at_the_letters_while_the_dispatcher_writes(world: World) -> None:
    _fail(world, b"0")
    other = DeadLetters(world.state / "dead", writable=False)
    assert [letter.id for letter in other] == [letter.id for letter in world.letters]
    _fail(world, b"1")
    assert len(other) == 2
    other.close()
    with pytest.raises(NotFound):
        DeadLetters(world.state / "nothing", writable=False)


def test_a_letter_that_is_tried_again_goes_through_the_dispatcher(world: World) -> None:
    _fail(world, b"again", b"fails again")
    for letter in world.letters:
        world.dispatcher.retry_dead_letter(letter.id)
    world.local.judge = lambda _, m: status("NOT_FOUND") if m.payload == b"fails again" else None
    world.run()
    assert world.local.payloads(BOB) == [b"again"]
    (letter,) = world.letters
    assert letter.original is not None
    assert letter.original.payload == b"fails again"
    assert world.dispatcher.books().counts.letters_retried == 2


def test_a_letter_of_nobody_is_routed_when_it_is_tried_again(world: World) -> None:
    world.table.add(TOPIC, BOB)
    late = world.publish(b"late", ttl=1000)
    world.run(2)
    world.ingest(late)  # refused: no receiver was looked for
    (letter,) = world.letters
    assert letter.receiver is None
    world.dispatcher.retry_dead_letter(letter.id)
    assert world.codes == [UCode.DEADLINE_EXCEEDED]  # it is still late
    assert world.letters[0].id != letter.id


def test_a_header_cannot_be_tried_again(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(message=1000))
    world.ingest(world.notify(bytes(2000)))
    with pytest.raises(Unsupported, match="header"):
        world.dispatcher.retry_dead_letter(world.letters[0].id)


def test_the_letters_have_a_bound_on_the_disk(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(dead=1 << 20))
    for i in range(40):
        _fail(world, *(b"%d " % i + bytes(1000) for _ in range(100)))
    folder = world.state / "dead"
    used = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert used < 3 << 20
    assert 100 < len(world.letters) < 4000
    assert world.dispatcher.books().counts.letters == 4000


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_letter_that_waits_for_room_is_published_when_messages_leave_undelivered(
    tmp_path: Path, *, is_dropped: bool
) -> None:
    """They expire or are dropped while their topic is stopped: nothing is delivered."""
    limits = Limits(queue_messages=2)
    world = World(tmp_path, clock=SYSTEM_CLOCK, threads=True, limits=limits)
    world.table.add(DLT, BOB)
    world.dispatcher.stop_topic(TOPIC)
    ttl = None if is_dropped else 1000
    world.ingest(world.notify(b"0", ttl=ttl), world.notify(b"1", ttl=ttl))
    world.local.judge = lambda to, _: status("NOT_FOUND") if to == ALICE else None
    world.ingest(world.notify(source=TOPIC.with_resource(0x8002), sink=ALICE))
    until(lambda: world.letters)
    if is_dropped:
        assert world.dispatcher.drop_queued(Receiver("local", BOB)) == 2
    until(lambda: len(world.local.arrived[BOB]) == (1 if is_dropped else 3))
    world.balance()
    world.close()


def test_a_letter_larger_than_a_queue_keeps_no_other_from_its_subscribers(
    make_world: Callable[..., World],
) -> None:
    world = make_world(limits=Limits(queue_bytes=2000))
    world.table.add(DLT, CAROL)
    _fail(world, bytes(1880))
    _fail(world, b"small")
    assert len(world.letters) == 2
    assert sum(map(len, world.far.arrived.values())) == 1
    assert world.dispatcher.books().counts.letters_unpublished == 1


def test_what_made_room_for_a_letter_is_delivered_if_the_next_subscriber_gets_none(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other messages take the room that the letter was promised, and the disk gets full."""
    world = make_world(limits=Limits(queue_messages=2))
    world.table.add(DLT, BOB)
    world.table.add(DLT, CAROL)
    world.local.judge = lambda to, _: status("NOT_FOUND") if to == ALICE else None
    others = [world.notify(b"0"), world.notify(b"1")]
    append = Outbox.append

    def full(outbox: Outbox, *args: Any, **options: Any) -> Any:
        if "there" in outbox.folder.name:
            raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))
        if "20" in outbox.folder.name and others:
            came = others.copy()
            others.clear()
            world.ingest(*came)
        return append(outbox, *args, **options)

    world.ingest(world.notify(b"fails", sink=ALICE))
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "append", full)
        with pytest.raises(StorageError):
            world.run()
    world.run(60)
    assert world.queued == 0
    assert {b"0", b"1"} <= {*world.local.payloads(BOB)}


@pytest.mark.parametrize("has_waited", [False, True])
def test_a_letter_whose_room_other_messages_took_is_counted_as_unpublished(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, *, has_waited: bool
) -> None:
    world = make_world(limits=Limits(queue_messages=1))
    world.table.add(DLT, BOB)
    if has_waited:
        world.local.always = status("UNAVAILABLE")
        world.ingest(world.notify(b"0"))
    others = [world.notify(b"1", priority=UPriority.CS6)]
    append = Outbox.append

    def append_later(outbox: Outbox, *args: Any, **options: Any) -> Any:
        if others:
            world.ingest(others.pop())
        return append(outbox, *args, **options)

    monkeypatch.setattr(Outbox, "append", append_later)
    world.ingest(world.notify(sink=UUri("nowhere", 1, 1, 0)))
    world.local.always = None
    world.run(60)
    counts = world.dispatcher.books().counts
    assert (counts.letters_published, counts.letters_unpublished) == (0, 1)
    assert world.local.payloads(BOB)[-1:] == [b"1"]
    world.balance()


def test_nobody_else_publishes_dead_letters(world: World) -> None:
    world.table.add(DLT, BOB)
    world.ingest(world.publish(b"not one", topic=DLT))
    world.run()
    assert world.local.arrived == {}
    assert world.dispatcher.books().counts.unauthenticated == 1
    assert world.letters == []  # a letter about it would be one about a letter


def test_letters_take_no_other_messages_place(make_world: Callable[..., World]) -> None:
    world = make_world(limits=Limits(queue_messages=10))
    world.table.add(DLT, BOB)
    world.local.always = status("UNAVAILABLE")
    world.ingest(*(world.notify(b"%d" % i) for i in range(9)))
    world.ingest(*(world.notify(sink=UUri("nowhere", 1, 1, 0)) for _ in range(30)))
    counts = world.dispatcher.books().counts
    assert counts.letters == 30
    assert world.queued == 9 + counts.letters_published <= 10
    world.local.always = None
    world.run(20)
    assert world.dispatcher.books().counts.letters_published == 30
    payloads = world.local.payloads(BOB)
    assert [payload for payload in payloads if payload and len(payload) == 1] == [
        b"%d" % i for i in range(9)
    ]


def test_a_request_from_afar_about_letters_is_answered_afar(world: World) -> None:
    asked = world.request(CAROL, ALICE.with_resource(1))
    world.local.always = status("NOT_FOUND")
    world.ingest(asked, leg="far")
    world.run()
    (answer,) = world.responses(UUri("there", 0, 0, 0), world.far)
    assert answer.attributes.commstatus == UCode.UNAVAILABLE


def test_a_note_of_what_is_gone_that_cannot_be_read_lists_letters_again(world: World) -> None:
    _fail(world, b"0")
    world.dispatcher.drop_dead_letter(world.letters[0].id)
    Path(world.state / "dead" / "gone").write_bytes(b"{not json")
    again = world.reopen()
    assert len(again.letters) == 1
    again.close()


@pytest.mark.parametrize("count", [60, 200])
def test_more_letters_than_a_queue_holds_reach_who_subscribed_to_them(
    tmp_path: Path, count: int
) -> None:
    world = World(tmp_path, limits=Limits(queue_messages=50))
    world.table.add(world.dispatcher.topic, BOB)
    nowhere = UUri("nowhere", 1, 1, 0)
    world.ingest(*(world.notify(b"%d" % number, sink=nowhere) for number in range(count)))
    world.run(1)
    told = [Letter.from_bytes(payload or b"") for payload in world.local.payloads(BOB)]
    assert [letter.original.payload for letter in told if letter.original] == [
        b"%d" % number for number in range(count)
    ]
    counts = world.dispatcher.books().counts
    assert (counts.letters_published, counts.letters_unpublished) == (count, 0)
    world.balance()
    world.close()


@pytest.mark.parametrize("stays_full", [False, True])
def test_letters_that_wait_outlast_a_full_disk_or_are_counted(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, *, stays_full: bool
) -> None:
    world = make_world(limits=Limits(queue_messages=3))
    world.table.add(world.dispatcher.topic, BOB)
    nowhere = UUri("nowhere", 1, 1, 0)
    lost = [world.notify(b"%d" % number, sink=nowhere) for number in range(6)]
    world.ingest(*lost[:5])  # two letters wait for room
    append = Outbox.append

    def full(*_: object, **__: object) -> None:
        raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))

    monkeypatch.setattr(Outbox, "append", full)
    with pytest.raises(StorageError):
        world.run(1)
    with pytest.raises(StorageError):
        world.ingest(lost[5])
    if not stays_full:
        monkeypatch.setattr(Outbox, "append", append)
        world.ingest(lost[5])
        world.run(60)
        told = [Letter.from_bytes(payload or b"") for payload in world.local.payloads(BOB)]
        assert [letter.original.payload for letter in told if letter.original] == [
            b"%d" % number for number in range(6)
        ]
    world.close()
    counts = world.dispatcher.books().counts
    published = 3 if stays_full else 6
    assert counts.letters_published == published
    assert counts.letters_published + counts.letters_unpublished == counts.letters


def test_a_letter_that_is_retried_into_a_full_queue_on_a_full_disk_stays_and_is_not_counted(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(limits=Limits(queue_messages=1))
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(b"1", priority=UPriority.CS6), world.notify(b"2"))
    (letter,) = world.letters  # of the second one

    def full(*_: object) -> None:
        raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))

    with monkeypatch.context() as patch:
        patch.setattr(DeadLetters, "write", full)
        with pytest.raises(StorageError):
            world.dispatcher.retry_dead_letter(letter.number)
    assert world.letters == [letter]
    world.balance()


def test_a_retried_letter_that_is_written_anew_is_counted_although_the_disk_is_full_after_it(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response evicts a message, of which no letter can be written."""
    world = make_world(limits=Limits(queue_messages=1))
    world.far.always = status("UNAVAILABLE")
    world.ingest(world.notify(sink=CAROL, priority=UPriority.CS6), world.request())
    world.run()
    (letter,) = world.letters  # of the request
    world = world.reopen()  # it does not know any more that it answered
    world.far.always = world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(sink=ALICE, priority=UPriority.CS1))
    write, numbers = DeadLetters.write, itertools.count(1)

    def write_or_fail(letters: DeadLetters, some: Iterable[Letter]) -> list[Letter]:
        if next(numbers) == 2:
            raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))
        return write(letters, some)

    with monkeypatch.context() as patch:
        patch.setattr(DeadLetters, "write", write_or_fail)
        with pytest.raises(StorageError):
            world.dispatcher.retry_dead_letter(letter.number)
    world.balance()
    counts = world.dispatcher.books().counts
    assert (counts.letters, counts.copies_refused, counts.responses) == (1, 1, 1)
    world.run(60)
    world.balance()
    world.close()
