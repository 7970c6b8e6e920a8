"""Does the dispatcher hold together: threads, failing disks, access, many receivers?"""

from __future__ import annotations

import errno
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import InvalidOption, Malformed, StorageError
from penstock.core.retry import Backoff
from penstock.dispatch import Access, Delivery, Limits, Policy, Retry, Routes, Rule, outlets
from penstock.dispatch.books import Books
from penstock.dispatch.outbox import Entry, Outbox, OutboxBooks, Part
from penstock.dispatch.outbox.log import OutboxLog
from penstock.dispatch.outbox.state import save_notes
from penstock.dispatch.outbox.store import Store
from penstock.protocols.uprotocol import UCode, UMessage, UStatus, UUri
from support.dispatching import ALICE, BOB, CAROL, METHOD, TOPIC, World, in_order, status
from support.waiting import SOON, background, waits

THERE = UUri("there", 0, 0, 0)


def test_threads_of_many_legs_and_receivers_lose_nothing_and_keep_the_order(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        clock=SYSTEM_CLOCK,
        threads=True,
        retry=Retry(backoff=Backoff(initial=0.001, maximum=0.01), max_attempts=10_000),
    )
    rng = random.Random(3)

    def judge(_: UUri, __: UMessage) -> UStatus | None:
        return status("UNAVAILABLE") if rng.random() < 0.1 else None

    world.local.judge = world.far.judge = judge
    entities = [UUri("here", 0x20 + n, 1, 0) for n in range(4)]
    for entity in (*entities, CAROL):
        world.table.add(UUri("here", 0xFFFF, 1, 0x8001), entity)

    def send(source: int) -> None:
        topic = UUri("here", source, 1, 0x8001)
        for part in range(25):
            batch = [world.publish(b"%d" % (part * 20 + i), topic=topic) for i in range(20)]
            world.ingest(*batch)

    threads = [threading.Thread(target=send, args=(source,)) for source in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.dispatcher.stop(grace=60)
    assert world.queued == 0
    for arrived in (*(world.local.arrived[each] for each in entities), world.far.arrived[THERE]):
        for source in (1, 2, 3):
            own = [m for m in arrived if m.attributes.source == UUri("here", source, 1, 0x8001)]
            assert in_order(own) == [b"%d" % i for i in range(500)]
    books = world.dispatcher.books()
    assert books.counts.received == 1500
    assert books.copies.acked == 7500
    world.balance()
    world.close()


def test_a_disk_that_is_full_refuses_and_what_comes_again_is_no_duplicate(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.table.add(TOPIC, BOB)
    world.table.add(TOPIC, CAROL)
    sent = [world.publish(b"%d" % i) for i in range(10)]
    append = Outbox.append

    def full(outbox: Outbox, *args: Any, **options: Any) -> Any:
        if "there" in outbox.folder.name:
            raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))
        return append(outbox, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "append", full)
        with pytest.raises(StorageError):
            world.ingest(*sent)
    world.balance()
    assert world.dispatcher.books().counts.ingest_failures == 1
    world.ingest(*sent)
    world.run()
    assert world.far.payloads(THERE) == [b"%d" % i for i in range(10)]
    assert in_order(world.local.arrived[BOB]) == [b"%d" % i for i in range(10)]
    assert world.dispatcher.books().counts.duplicates == 0


@pytest.mark.parametrize("is_full", [True, False])
def test_a_duplicate_is_not_acknowledged_before_the_first_is_stored(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, *, is_full: bool
) -> None:
    """Otherwise its sender takes it as stored, and it is lost if that fails."""
    world = make_world()
    message = world.notify(b"once")
    entered, release = threading.Event(), threading.Event()
    append = Outbox.append

    def slow(outbox: Outbox, *args: Any, **options: Any) -> Any:
        if not entered.is_set():
            entered.set()
            assert release.wait(30)
            if is_full:
                raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))
        return append(outbox, *args, **options)

    monkeypatch.setattr(Outbox, "append", slow)
    with background(world.ingest, message) as first:
        assert entered.wait(10)
        with background(world.ingest, message) as second:
            assert waits(second)
            world.ingest(world.notify(b"another", sink=ALICE))  # which does not wait
            release.set()
            assert (first.exception(10) is not None) == is_full
            assert second.exception(10) is None
    world.run()
    assert world.local.payloads(BOB) == [b"once"]
    assert world.local.payloads(ALICE) == [b"another"]
    assert world.dispatcher.books().counts.duplicates == (not is_full)


def test_a_letter_that_cannot_be_written_leaves_the_message_queued(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.local.next.append(status("NOT_FOUND"))
    world.ingest(world.notify(b"0"), world.notify(b"1"))

    def full(_: object) -> None:
        raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))

    with monkeypatch.context() as patch:
        patch.setattr(world.dispatcher.dead_letters, "write", full)
        with pytest.raises(StorageError):
            world.run()
    assert world.queued == 2
    world.local.next.append(status("NOT_FOUND"))
    world.run(60)
    assert world.codes == [UCode.NOT_FOUND]
    assert world.local.payloads(BOB) == [b"1"]


def test_the_books_balance_when_letters_cannot_be_written_halfway(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(limits=Limits(queue_messages=20, leg_messages={"far": 200}))
    nowhere = UUri("nowhere", 1, 1, 0)
    batch = [world.notify(b"%d" % i, sink=nowhere) for i in range(300)]
    batch += [world.notify(b"%d" % i) for i in range(300)]  # the queue takes 20
    batch += [world.notify(bytes(500), sink=CAROL)]
    write = world.dispatcher.dead_letters.write
    calls = []

    def full_after(letters: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise StorageError("writing", "x", OSError(errno.ENOSPC, "no space"))
        return write(letters)

    with monkeypatch.context() as patch:
        patch.setattr(world.dispatcher.dead_letters, "write", full_after)
        with pytest.raises(StorageError):
            world.ingest(*batch)
    world.balance()
    assert world.dispatcher.books().counts.refused_in_vain == 256
    world.run()
    world.ingest(*batch)
    world.run()
    assert world.dispatcher.books().counts.received == 601
    assert world.dispatcher.books().counts.no_route == 300


def test_the_list_of_access_decides_who_may_publish_notify_and_call(
    make_world: Callable[..., World],
) -> None:
    rules = [
        Rule(allow="publish", source=TOPIC),
        Rule(allow="notify", source=UUri("here", 0xFFFFFFFF, 0xFF, 0xFFFF), sink=BOB),
        Rule(allow="call", source=ALICE, sink=METHOD),
    ]
    world = make_world(access=Access(rules))
    world.table.add(UUri("here", 0x10, 1, 0xFFFF), BOB)
    asked = world.request()
    world.ingest(world.publish(), world.notify(), asked)
    world.run()
    assert world.letters == []
    world.ingest(world.response(asked), leg="far")
    world.run()
    assert world.letters == []
    world.ingest(
        world.publish(topic=TOPIC.with_resource(0x8002)),
        world.notify(sink=CAROL),
        world.request(BOB),
        world.request(method=METHOD.with_resource(9)),
    )
    unasked = world.response(world.request(BOB, METHOD))
    world.ingest(unasked, leg="far")
    world.run()
    assert world.codes == [UCode.PERMISSION_DENIED] * 5
    assert world.dispatcher.books().counts.forbidden == 5
    access = Access([Rule(allow="subscribe", source=BOB, sink=TOPIC)])
    assert access.may("subscribe", BOB, TOPIC)
    assert not access.may("subscribe", ALICE, TOPIC)


def test_an_idle_receiver_makes_room_for_another_and_the_books_keep_its_messages(
    make_world: Callable[..., World],
) -> None:
    world = make_world(limits=Limits(receivers=3))
    for n in range(20):
        world.ingest(world.notify(sink=UUri("here", n, 1, 0)))
        world.run()
    assert len(world.dispatcher.receivers()) == 3
    assert world.dispatcher.books().copies.acked == 20
    world.local.always = status("UNAVAILABLE")
    world.ingest(*(world.notify(sink=UUri("here", 100 + n, 1, 0)) for n in range(5)))
    assert world.codes == [UCode.RESOURCE_EXHAUSTED] * 2
    world.balance()
    again = world.reopen()
    assert again.dispatcher.books().copies.stored == 23
    again.run(1)
    again.balance()
    again.close()


def test_what_is_stored_just_when_its_receiver_makes_room_is_not_lost(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(limits=Limits(receivers=1))
    world.ingest(world.notify(b"1"))
    world.run()
    (outlet,) = world.dispatcher._outlets.all()
    late = world.notify(b"2").to_bytes()
    queued = Outbox.queued

    def look(outbox: Outbox) -> int:
        """Let another thread store one, right after it was found to be empty."""
        found: int = queued.__get__(outbox)
        if not outlet.outbox.is_closed:
            monkeypatch.undo()
            outlet.store([Part.of([Entry(1, 0, 0, 0, 3, late)])])
        return found

    monkeypatch.setattr(Outbox, "queued", property(look))
    close = Outbox.close_if_empty

    def close_late(outbox: Outbox, remove: Callable[[OutboxBooks], None]) -> bool:
        look(outbox)
        return close(outbox, remove)

    monkeypatch.setattr(Outbox, "close_if_empty", close_late)
    world.ingest(world.notify(b"3", sink=ALICE))
    world.run()
    assert world.local.payloads(BOB) == [b"1", b"2"]
    assert len(world.local.payloads(ALICE)) + len(world.letters) == 1


def test_a_receiver_does_not_make_room_between_two_messages_of_one_batch_for_it(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = Policy(topic=TOPIC, delivery=Delivery.LATEST)
    world = make_world(limits=Limits(receivers=1), policies=[latest])
    world.ingest(world.notify(b"0"))
    world.run()
    append = Outbox.append_latest

    def append_slowly(outbox: Outbox, *args: Any, **options: Any) -> Any:
        """Let this one be delivered, and another receiver need its room, before the next one."""
        monkeypatch.undo()
        done = append(outbox, *args, **options)
        world.run()
        with background(world.ingest, world.notify(b"other", sink=ALICE)) as call:
            call.result(SOON)
        world.run()
        return done

    monkeypatch.setattr(Outbox, "append_latest", append_slowly)
    world.ingest(world.notify(b"1"), world.notify(b"2", source=UUri("here", 0x10, 1, 0x8002)))
    world.run()
    assert world.local.payloads(BOB) == [b"0", b"1", b"2"]
    assert len(world.local.payloads(ALICE)) + len(world.letters) == 1
    world.balance()


def test_a_full_disk_while_a_receiver_makes_room_counts_its_messages_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, limits=Limits(receivers=2))
    for sink in (ALICE, BOB):
        world.ingest(world.notify(b"1", sink=sink))
    world.run()
    for outlet in world.dispatcher._outlets.all():
        outlet.outbox.tend()  # now it has files

    def full(path: Path, *_: object, **__: object) -> None:
        raise StorageError("writing", str(path), OSError(errno.ENOSPC, "no space"))

    others = [UUri("here", number, 1, 0) for number in (0x40, 0x50)]
    with monkeypatch.context() as patch:
        patch.setattr(outlets, "save_notes", full)
        for sink in others:
            with pytest.raises(StorageError):
                world.ingest(world.notify(b"2", sink=sink))
    world.balance()
    assert len(world.dispatcher.receivers()) == 2
    for sink in (*others, ALICE, BOB):
        world.ingest(world.notify(b"2", sink=sink))
        world.run()
    assert world.local.payloads(ALICE) == [b"1", b"2"]
    assert world.dispatcher.books().copies.stored == 6
    world.balance()
    again = world.reopen()
    assert again.dispatcher.books().copies.stored == 6
    again.close()


@pytest.mark.parametrize("call", ["suspend", "let_go"])
def test_a_receiver_that_makes_room_is_removed_quietly_also_by_a_failing_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    world = World(tmp_path, limits=Limits(receivers=1))
    world.ingest(world.notify(b"1"))
    world.run()
    for outlet in world.dispatcher._outlets.all():
        outlet.outbox.tend()  # now it has files
    world.ingest(world.notify(b"2"))  # and a log that is open
    world.run()
    owner = {"suspend": OutboxLog, "let_go": Store}[call]
    close = getattr(owner, call)

    def fail(self: object) -> None:
        close(self)
        raise StorageError("syncing", "log", OSError(errno.EIO, "broken"))

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, fail)
        if call == "suspend":  # nothing is removed yet
            with pytest.raises(StorageError):
                world.ingest(world.notify(b"a", sink=ALICE))
            assert [it.receiver.address for it in world.dispatcher.receivers()] == [BOB]
        else:
            world.ingest(world.notify(b"a", sink=ALICE))
            assert "was not closed well" in caplog.text
    caplog.clear()
    for sink in (ALICE, BOB):
        world.ingest(world.notify(b"3", sink=sink))
        world.run()
    assert world.local.payloads(BOB) == [b"1", b"2", b"3"]
    assert world.local.payloads(ALICE)[-1:] == [b"3"]
    assert "removed" not in caplog.text
    world.balance()
    world.close()


def test_books_that_are_read_while_a_receiver_makes_room_count_its_messages_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, limits=Limits(receivers=1))
    world.ingest(*(world.notify(b"%d" % number) for number in range(5)))
    world.run()
    world = world.reopen()

    with ThreadPoolExecutor(1) as pool:
        calls: list[Future[object]] = []

        def save_slowly(path: Path, *args: Any, **options: Any) -> None:
            calls.append(pool.submit(world.dispatcher.books))
            waits(calls[0])  # so that it looks now
            save_notes(path, *args, **options)

        monkeypatch.setattr(outlets, "save_notes", save_slowly)
        world.ingest(world.notify(b"other", sink=ALICE))
        books = calls[0].result(SOON)
    assert isinstance(books, Books)
    assert (books.copies.stored, books.before.stored) == (5, 5)
    world.run()
    world.balance()
    world.close()


@pytest.mark.parametrize("crash", ["rename", "save_notes", "rmtree"])
def test_a_crash_while_a_receiver_makes_room_counts_its_messages_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    world = World(tmp_path / "before", limits=Limits(receivers=1))
    for _ in range(3):
        world.ingest(world.notify(b"1"))
    world.run()
    (outlet,) = world.dispatcher._outlets.all()
    outlet.outbox.tend()  # now it has files

    class Crash(BaseException):
        """The files are as they were copied; what this process does then counts no more."""

    def die(path: Path, *_: object, **__: object) -> None:
        if path.name != "receiver" and (crash != "rmtree" or path.exists()):
            shutil.copytree(world.state, tmp_path / "after", dirs_exist_ok=True)
            raise Crash

    with monkeypatch.context() as patch:
        if crash == "rename":
            patch.setattr(Path, "rename", die)
        elif crash == "save_notes":
            patch.setattr(outlets, "save_notes", die)
        else:
            patch.setattr("shutil.rmtree", die)
        with pytest.raises(Crash):
            world.ingest(world.notify(b"2", sink=ALICE))
    world.close()
    again = World(tmp_path / "after", clock=world.clock, limits=Limits(receivers=1))
    assert again.dispatcher.books().copies.stored == 3
    again.ingest(again.notify(b"2", sink=ALICE))
    again.run()
    assert again.local.payloads(ALICE) == [b"2"]
    assert again.dispatcher.books().copies.stored == 4
    assert not list((again.state / "outbox").glob("*.gone"))
    again.balance()
    again.close()


def test_many_more_receivers_than_there_may_be_in_one_batch(
    make_world: Callable[..., World],
) -> None:
    world = make_world(limits=Limits(receivers=3))
    world.ingest(*(world.notify(sink=UUri("here", n, 1, 0)) for n in range(20)))
    world.run()
    delivered = sum(map(len, world.local.arrived.values()))
    assert delivered + len(world.letters) == 20
    assert delivered >= 3


def test_legs_listen_to_what_is_subscribed_behind_them(world: World) -> None:
    far_topic = UUri("there", 0x30, 1, 0x8001)
    world.table.add(far_topic, BOB)
    world.table.add(TOPIC, CAROL)
    world.dispatcher.subscriptions_changed()
    assert world.far.listens == {far_topic}
    assert world.local.listens == {TOPIC}
    world.table.remove(far_topic, BOB)
    world.run()
    assert world.far.listens == set()
    assert world.far.authorities == {"here"}
    assert world.local.authorities == {"*"}


def test_own_services_are_behind_a_leg_of_their_own(tmp_path: Path) -> None:
    routes = Routes(authorities={"local": ["here"]}, services={0: "far", 3: "far"})
    world = World(tmp_path, routes=routes, scope="entity")
    service = UUri("here", 0, 4, 1)
    asked = world.request(ALICE, service)
    world.ingest(asked)
    world.run()
    assert len(world.far.arrived[service.with_resource(0)]) == 1
    world.ingest(world.response(asked), leg="far")
    world.ingest(world.request(ALICE, METHOD), leg="far")  # no service is called Alice
    world.run()
    assert len(world.responses()) == 1
    assert [letter.code for letter in world.letters[:1]] == [UCode.UNAUTHENTICATED]
    world.balance()
    world.close()


def test_the_last_publish_of_each_topic_is_told(make_world: Callable[..., World]) -> None:
    told: list[dict[UUri, bytes]] = []
    world = make_world(on_publish=lambda last: told.append(dict(last)))
    other = TOPIC.with_resource(0x8002)
    sent = [world.publish(b"%d" % i, topic=topic) for i in range(5) for topic in (TOPIC, other)]
    world.ingest(*sent, world.notify())
    assert told == [{TOPIC: sent[-2].to_bytes(), other: sent[-1].to_bytes()}]


def test_messages_of_several_topics_arrive_in_the_order_they_came(world: World) -> None:
    topics = [TOPIC.with_resource(0x8001 + n) for n in range(3)]
    for topic in topics:
        world.table.add(topic, BOB)
    rng = random.Random(8)
    sent = [world.publish(b"%d" % i, topic=rng.choice(topics)) for i in range(200)]
    world.ingest(*sent)
    world.run()
    assert world.local.payloads(BOB) == [b"%d" % i for i in range(200)]


def test_a_receiver_has_an_order_and_people_see_what_waits(
    make_world: Callable[..., World],
) -> None:
    world = make_world(policies=[Policy(topic=TOPIC, order="priority")])
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(bytes(100)))
    world.run(0.01)
    (info,) = world.dispatcher.receivers()
    assert (info.receiver.leg, info.receiver.address, info.order) == ("local", BOB, "priority")
    assert info.books.queued == 1
    assert info.bytes > 100
    assert info.due_in is not None
    assert 0 < info.due_in <= 0.1
    assert world.dispatcher.statistics()["local"] == {"delivered": 0}


def test_somebody_drops_what_waits(world: World) -> None:
    world.local.always = status("UNAVAILABLE")
    other = TOPIC.with_resource(0x8002)
    world.ingest(*(world.notify(b"%d" % i) for i in range(300)), world.notify(b"x", source=other))
    world.run(0.01)
    (info,) = world.dispatcher.receivers()
    assert info.attempts == 1
    assert "UNAVAILABLE" in info.trouble
    assert world.dispatcher.drop_queued(info.receiver, TOPIC) == 300
    world.local.always = None
    world.run(1)
    assert world.local.payloads(BOB) == [b"x"]
    assert world.dispatcher.books().copies.admin == 300
    assert world.dispatcher.receivers()[0].trouble == ""


def test_a_publish_between_two_other_devices_passes(make_world: Callable[..., World]) -> None:
    routes = Routes(
        authorities={"local": ["here"], "far": ["there"]}, device_to_device=frozenset({"far"})
    )
    world = make_world(routes=routes)
    sink = UUri("there", 0xFFFFFFFF, 0xFF, 0xFFFF)
    yonder = make_world(routes=Routes(authorities={"local": ["yonder"], "far": ["there"]}))
    passing = UUri("yonder", 1, 1, 0x8001)
    sent = yonder.publish(topic=passing, sink=sink)
    yonder.ingest(sent)
    yonder.run()
    assert [message.attributes.sink for message in yonder.far.arrived[THERE]] == [sink]
    own = world.publish(sink=sink)  # of a topic here, which nobody subscribed to
    world.ingest(own)
    world.run()
    assert world.dispatcher.books().counts.no_subscriber == 1


def test_no_entity_is_taken_for_a_service(tmp_path: Path) -> None:
    routes = Routes(authorities={"local": ["here"]}, services={0: "far"})
    world = World(tmp_path, routes=routes, scope="entity")
    service = UUri("here", 0, 4, 0x8000)
    world.ingest(world.notify(source=service))
    assert world.codes == [UCode.UNAUTHENTICATED]
    world.ingest(world.notify(source=service), leg="far")
    world.run()
    assert len(world.local.arrived[BOB]) == 1
    world.balance()
    world.close()


def test_what_does_not_fit_on_the_wire_does_not_stop_the_others(world: World) -> None:
    odd = world.notify().with_attributes(ttl=1 << 40)
    world.dispatcher.ingest("local", [odd, world.notify(b"good")])
    world.run()
    assert world.local.payloads(BOB) == [b"good"]
    assert world.dispatcher.books().counts.undecodable == 1


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption):
        Limits(receivers=0)
    with pytest.raises(InvalidOption):
        Limits(clock_skew=float("nan"))
    with pytest.raises(InvalidOption):
        Retry(max_attempts=0)
    with pytest.raises(InvalidOption):
        Policy(max_age=0)
    with pytest.raises(InvalidOption):
        World(tmp_path, routes=Routes(authorities={"local": ["a"], "far": ["a"]}))


def test_files_of_the_state_that_are_not_right_are_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ingest(world.notify())
    world.run()
    world.close()
    (tmp_path / "switches").write_text('{"stopped": [{"topic": "x"}]}')
    with pytest.raises(Malformed, match="switches"):
        World(tmp_path)
    (tmp_path / "switches").unlink()
    (name,) = (tmp_path / "outbox").glob("*/receiver")
    name.write_text("{}")
    with pytest.raises(Malformed, match="receiver"):
        World(tmp_path)


def test_a_pause_that_ends_between_two_looks_at_the_clock_is_not_overlooked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.local.next.append(status("UNAVAILABLE"))
    world.ingest(world.notify())
    (outlet,) = world.dispatcher._outlets.all()
    assert outlet.deliver() == []  # it fails, and rests
    due = outlet.next_due()
    assert due is not None
    with monkeypatch.context() as patched:
        times = iter([due - 1e-6, due + 1e-6])
        patched.setattr(world.clock, "monotonic", lambda: next(times))
        assert outlet.deliver() is None
        assert outlet.next_due() == due
    world.run(1)
    assert world.queued == 0
