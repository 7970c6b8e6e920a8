"""Is a message for a new receiver as safe as any other, before there are files for it?"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.core.errors import StorageError
from penstock.dispatch import Limits, outlets
from penstock.dispatch.outbox import log
from penstock.dispatch.outbox.state import StateFile
from penstock.dispatch.outbox.store import Store
from penstock.protocols.uprotocol import UPriority, UUri
from support.dispatching import World, status
from support.waiting import background

Make = Callable[..., World]


def address(number: int) -> UUri:
    return UUri("here", 0x100 + number, 1, 0)


def crashed(world: World, folder: Path) -> World:
    """Open another one with the files as they are now; this one writes no more."""
    with ExitStack() as upkeeps:  # which rename and remove files meanwhile
        for outlet in world.dispatcher._outlets.all():
            upkeeps.enter_context(outlet.outbox._upkeep)
        shutil.copytree(world.state, folder)
    return World(folder, clock=world.clock, table=world.table, **world.options)


def tend(world: World) -> None:
    for outlet in world.dispatcher._outlets.all():
        outlet.outbox.tend()


def folders(world: World) -> list[str]:
    """Return the receivers that have files."""
    return sorted(path.parent.name for path in (world.state / "outbox").glob("*/receiver"))


def delivered(world: World, count: int) -> list[list[bytes | None]]:
    return [world.local.payloads(address(number)) for number in range(count)]


def fill(world: World, receivers: int, messages: int = 3) -> list[list[bytes]]:
    """Store messages of several classes; return them by receiver, in order."""
    world.local.always = status("UNAVAILABLE")
    sent: list[list[bytes]] = [[] for _ in range(receivers)]
    for i in range(messages):
        for number in range(receivers):
            payload = b"%d of %d" % (i, number)
            priority = (UPriority.CS1, UPriority.CS4)[i % 2]
            world.ingest(world.notify(payload, sink=address(number), priority=priority))
            sent[number].append(payload)
    world.run()
    return sent


def test_whoever_is_away_has_no_files_and_all_messages_after_a_crash(
    make_world: Make, tmp_path: Path
) -> None:
    world = make_world()
    sent = fill(world, 5)
    tend(world)
    assert folders(world) == []
    after = crashed(world, tmp_path / "after")
    assert after.queued == 15
    after.balance()
    again = crashed(after, tmp_path / "again")
    again.run()
    assert delivered(again, 5) == sent
    assert again.queued == 0
    for each in (after, again):
        each.balance()
        each.close()


def test_they_stay_without_files_over_a_restart_and_what_comes_then_is_behind(
    make_world: Make,
) -> None:
    sent = fill(world := make_world(), 3)
    world.local.always = None
    after = world.reopen()
    assert folders(after) == []
    after.ingest(*(after.notify(b"new", sink=address(number)) for number in range(3)))
    after.run()
    assert delivered(after, 3) == [[*each, b"new"] for each in sent]
    after.balance()
    last = after.reopen()
    assert len(folders(last)) == 3
    assert not (last.state / "outbox" / "new").exists()
    assert last.queued == 0
    books = last.dispatcher.books()
    assert (books.copies.stored, books.copies.acked) == (12, 12)
    last.close()


@pytest.mark.parametrize(("damage", "lost"), [(b'"address"', 3), (b"1 of 0", 1)])
def test_messages_that_are_damaged_or_whose_receiver_is_not_known_are_counted(
    make_world: Make, tmp_path: Path, damage: bytes, lost: int
) -> None:
    world = make_world()
    sent = fill(world, 2)
    shutil.copytree(world.state, tmp_path / "damaged")
    (segment,) = (tmp_path / "damaged" / "outbox" / "new").glob("*.fmq")
    segment.write_bytes(segment.read_bytes().replace(damage, b"x" * len(damage), 1))
    after = World(tmp_path / "damaged", clock=world.clock, table=world.table, **world.options)
    copies = after.dispatcher.books().copies
    assert (copies.stored, copies.damaged, copies.queued) == (6, lost, 6 - lost)
    after.balance()
    after.run()
    assert delivered(after, 2)[1] == sent[1]
    after.balance()
    after.close()


def test_what_is_settled_and_tended_does_not_come_again_after_a_crash(
    make_world: Make, tmp_path: Path
) -> None:
    world = make_world()
    world.ingest(*(world.notify(b"%d" % i, sink=address(i)) for i in range(4)))
    world.run()
    tend(world)
    assert len(folders(world)) == 4
    after = crashed(world, tmp_path / "after")
    after.run()
    assert delivered(after, 4) == [[]] * 4
    assert after.dispatcher.books().copies.acked == 4
    after.close()


def test_one_that_is_new_after_a_crash_that_left_an_empty_common_log_has_its_message_once(
    make_world: Make, tmp_path: Path
) -> None:
    world = make_world()
    world.ingest(*(world.notify(b"%d" % i, sink=address(i)) for i in range(4)))
    world.run()
    tend(world)  # all of them have files, and what the common log has is not needed any more
    after = crashed(world, tmp_path / "after")
    after.local.always = status("UNAVAILABLE")
    after.ingest(after.notify(b"new", sink=address(7)))
    again = crashed(after, tmp_path / "again")
    assert again.queued == 1
    again.run()
    assert again.local.payloads(address(7)) == [b"new"]
    for each in (after, again):
        each.balance()
        each.close()


@pytest.mark.parametrize("where", ["_open_state", "set_floor", "save"])
def test_a_crash_while_the_files_are_made_loses_and_repeats_nothing(
    make_world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    world = make_world()
    sent = fill(world, 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("writing", "it", OSError(28, "no space"))

    with monkeypatch.context() as patch:
        owner, name = {
            "_open_state": (Store, "_open_state"),
            "set_floor": (StateFile, "set_floor"),
            "save": (Store, "_owned"),
        }[where]
        patch.setattr(owner, name, refuse)
        for outlet in world.dispatcher._outlets.all():
            with pytest.raises(StorageError):
                outlet.outbox._store.make()
    world.ingest(*(world.notify(b"more", sink=address(number)) for number in range(2)))
    sent = [[*each, b"more"] for each in sent]
    after = crashed(world, tmp_path / "after")
    after.run()
    assert delivered(after, 2) == sent
    after.balance()
    after.close()
    # Without the crash it goes on, too, and the files are made when that is possible.
    world.local.always = None
    world.run(20)
    assert delivered(world, 2) == sent
    tend(world)
    assert len(folders(world)) == 2


def test_large_messages_have_files_of_their_own_at_once(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    world.local.always = status("UNAVAILABLE")
    large = [bytes([i]) * 40_000 for i in range(3)]
    for payload in large:
        world.ingest(world.notify(payload, sink=address(0)))
    assert len(folders(world)) == 1
    after = crashed(world, tmp_path / "after")
    after.run()
    assert delivered(after, 1) == [large]
    after.close()


def test_the_common_log_does_not_grow_for_one_that_stays_away(
    make_world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_MOST_BEHIND", 4000)
    world = make_world()
    world.local.always = status("UNAVAILABLE")
    for number in range(40):
        world.ingest(world.notify(bytes(100), sink=address(number)))
        tend(world)
    assert 10 < len(folders(world)) < 38
    after = crashed(world, tmp_path / "after")
    assert after.queued == 40
    after.run()
    assert delivered(after, 40) == [[bytes(100)]] * 40
    after.balance()
    after.close()


def test_one_without_files_that_has_to_make_room_is_counted_once(
    make_world: Make, tmp_path: Path
) -> None:
    world = make_world(limits=Limits(receivers=2))
    for i in range(12):
        world.ingest(world.notify(b"%d" % i, sink=address(i % 4)))
        world.run()
    assert delivered(world, 4) == [[b"%d" % i for i in range(n, 12, 4)] for n in range(4)]
    assert world.dispatcher.books().copies.acked == 12
    world.balance()
    after = crashed(world, tmp_path / "after")
    after.balance()
    after.run()
    # Only what no file had noted down yet may come again.
    assert sum(map(len, delivered(after, 4))) <= 2
    after.close()


def test_a_crash_as_one_without_files_makes_room_loses_no_count(
    make_world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(limits=Limits(receivers=1))
    world.ingest(world.notify(b"1", sink=address(1)))
    world.run()
    with monkeypatch.context() as patch:
        patch.setattr(outlets, "save_notes", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            world.ingest(world.notify(b"2", sink=address(2)))
    after = crashed(world, tmp_path / "after")
    assert after.dispatcher.books().copies.stored == 1
    after.balance()
    after.close()


def test_files_that_are_made_hold_up_nobody(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_MOST_BEHIND", -1)
    world = make_world()
    fill(world, 3)
    is_making, go_on = threading.Event(), threading.Event()
    make = Store.make

    def slow(store: Store) -> None:
        is_making.set()
        assert go_on.wait(20)
        make(store)

    monkeypatch.setattr(Store, "make", slow)
    (first, *_) = world.dispatcher._outlets.all()
    with background(first.outbox.tend) as call:
        assert is_making.wait(10)
        with background(world.ingest, world.notify(b"now", sink=address(7))) as other:
            other.result(10)  # also one for another new receiver
        go_on.set()
        call.result(10)
    world.local.always = None
    world.run(20)
    assert world.local.payloads(address(7)) == [b"now"]
