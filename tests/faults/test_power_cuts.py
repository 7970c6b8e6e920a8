"""The power fails at any moment, with anything on the disk that may be: all is accounted for."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import describe, open_reader, open_writer
from penstock.core.capabilities import Grouped
from penstock.core.overflow import DropReason
from penstock.dispatch import Limits, outlets
from penstock.dispatch.outbox import Entry, Outbox, Reason, log
from penstock.protocols.uprotocol import UMessage, UStatus, UUri
from penstock.queue.log.recovery import check_log
from penstock.queue.wide.writer import WideWriter
from support.disk_images import Disk, Image, unsynced
from support.dispatching import World, status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.interfaces import Bounds

#: Images of each kind, of the small form and of the full one: there, 24,000 in all.
_SMALL = 200
_FULL = 4_000
#: The power fails at so many moments of a life, and once more in so many lives after that.
_CUTS = 12
_AGAIN = 3

_IN_FULL = pytest.param(_FULL, marks=[pytest.mark.full, pytest.mark.timeout(3600)])
IMAGES = pytest.mark.parametrize("images", [_SMALL, _IN_FULL])


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    yield folder
    shutil.rmtree(folder)


class Books:
    """What was written to a stream, and what its writer promised."""

    def __init__(self) -> None:
        #: By epoch and number, what a reader may have seen.
        self.shown: dict[tuple[int, int], bytes] = {}
        #: What has to be on the disk.
        self.synced: set[bytes] = set()
        #: Up to where the consumer confirmed.
        self.confirmed = 0
        self.count = 0

    def copy(self) -> Books:
        other = Books()
        other.shown, other.synced = dict(self.shown), set(self.synced)
        other.confirmed, other.count = self.confirmed, self.count
        return other

    def survived(self, found: set[bytes]) -> None:
        """Note what was on the disk: from now on it stays."""
        self.synced = found

    def next(self) -> bytes:
        self.count += 1
        return f"message {self.count} ".encode() * (1 + self.count % 40)


class Stream:
    """A stream that lives until the power fails, and is looked at then."""

    def __init__(self, url: str, consumer: str, policies: tuple[str, ...]) -> None:
        self.url = self._url = url
        self._consumer = consumer
        self._policies = policies

    def live(self, folder: Path, books: Books, disk: Disk, chance: random.Random) -> None:
        """Write, sync and read for a while."""
        disk.said = books.copy
        with disk.watch(), contextlib.ExitStack() as stack:
            policy = chance.choice(self._policies)
            url = self._url.format(folder / "stream")
            writer = stack.enter_context(open_writer(f"{url}&sync={policy}"))
            assert isinstance(writer, WideWriter)
            plain = url.partition("?")[0]
            consumer = stack.enter_context(open_reader(f"{plain}?{self._consumer}"))
            epoch = consumer.bounds().epoch
            # What was confirmed last is above: where it goes on is below, after a power failure.
            for _ in range(chance.randrange(2, 9)):
                batch = [books.next() for _ in range(chance.choice((1, 1, 3, 12)))]
                end = consumer.bounds().end
                books.shown |= {(epoch, end + i): data for i, data in enumerate(batch)}
                writer.write_many(batch)
                if policy == "batch" or chance.random() < 0.3:
                    disk.event()
                    writer.sync()
                    books.synced.update(data for (e, _), data in books.shown.items() if e == epoch)
                if chance.random() < 0.4:
                    taken = consumer.read_many(chance.choice((1, 5, 20)))
                    if taken:
                        books.confirmed = taken[-1].seq + 1
                        consumer.acknowledge()
                disk.event()

    def look(self, folder: Path, books: Books) -> set[bytes]:
        """Go on after the power failed; return what is there of the messages."""
        url = self._url.format(folder / "stream")
        plain = url.partition("?")[0]
        with open_writer(f"{url}&sync=batch") as writer:
            new = [writer.write(data) for data in (b"new 1", b"new 2", b"new 3")]
        with open_reader(plain, "start") as reader:
            bounds = reader.bounds()
            messages = list(reader.available())
            lost = reader.statistics().lost
        assert [m.seq for m in messages[-3:]] == new
        assert not {(bounds.epoch, seq) for seq in new} & books.shown.keys(), "a number twice"
        written = {(seq, data) for (_, seq), data in books.shown.items()}
        old = [(m.seq, bytes(m.payload)) for m in messages[:-3]]
        assert set(old) <= written, "something that nobody wrote"
        found = [data for _, data in old]
        assert len(set(found)) == len(found), "a message twice"
        missing = books.synced - set(found)
        assert not missing, f"{len(missing)} messages that were synced are not there"
        assert len(messages) + lost == bounds.end - bounds.oldest, "a loss that is not counted"
        self._resume(plain, bounds, new, books)
        self._consume(plain, old, books)
        return set(found)

    def _resume(self, url: str, bounds: Bounds, new: list[int], books: Books) -> None:
        """Whoever has read up to some number gets all that is new."""
        for epoch, seq in [*books.shown][-20:]:
            place = bounds.successor(epoch, seq + 1)
            assert place is None or place <= new[0]
        if books.shown:
            epoch, seq = max(books.shown, key=lambda key: key[1])
            with open_reader(url, bounds.successor(epoch, seq + 1) or "start") as reader:
                assert [bytes(m.payload) for m in reader.available()][-3:][0] == b"new 1"

    def _consume(self, url: str, old: list[tuple[int, bytes]], books: Books) -> None:
        with open_reader(f"{url}?{self._consumer}") as consumer:
            came = [bytes(m.payload) for m in consumer.available()]
        assert came[-3:] == [b"new 1", b"new 2", b"new 3"]
        wanted = {data for seq, data in old if seq >= books.confirmed}
        assert wanted <= set(came), "a message that was not confirmed did not come"


LOG = Stream(
    "log:{}?segment=8k&segment_slots=8", "cursor=me", ("batch", "none", "none", "10ms", "1s")
)


class OutboxBooks:
    """What was stored in an outbox, and what was settled."""

    def __init__(self) -> None:
        #: All that ever was, and what is not known to be lost.
        self.ever: set[bytes] = set()
        self.stored: set[bytes] = set()
        self.synced: set[bytes] = set()
        #: Begun to be settled: they may come again or not.
        self.leaving: set[bytes] = set()
        self.count = 0

    def copy(self) -> OutboxBooks:
        other = OutboxBooks()
        other.stored, other.synced = set(self.stored), set(self.synced)
        other.leaving, other.ever, other.count = set(self.leaving), set(self.ever), self.count
        return other

    def survived(self, found: set[bytes]) -> None:
        self.synced, self.stored = set(found), set(found)


class Receiver:
    """An outbox that lives until the power fails."""

    def live(self, folder: Path, books: OutboxBooks, disk: Disk, chance: random.Random) -> None:
        disk.said = books.copy
        sync: Any = chance.choice(("batch", 0.05, "none"))
        with disk.watch(), Outbox(folder / "box", sync=sync, segment=1 << 13) as box:
            for _ in range(chance.randrange(2, 7)):
                batch = []
                for _ in range(chance.choice((1, 4, 20))):
                    books.count += 1
                    batch.append(f"letter {books.count} ".encode() * (1 + books.count % 9))
                books.stored.update(batch)
                books.ever.update(batch)
                box.append(Entry(chance.choice((0, 4)), 0, 0, 0, 1, raw) for raw in batch)
                if sync == "batch":
                    books.synced.update(batch)
                items = box.take(chance.choice((1, 6, 30)))
                books.leaving.update(item.raw for item in items)
                box.settle(items, Reason.ACKED)
                disk.event()
                if sync != "none" and chance.random() < 0.3:
                    box.tend()
                    books.synced |= books.stored
                disk.event()

    def look(self, folder: Path, books: OutboxBooks) -> set[bytes]:
        new = {f"new {number}".encode() for number in range(30)}
        with Outbox(folder / "box", sync="none", segment=1 << 13) as box:
            box.append(Entry(0, 0, 0, 0, 1, raw) for raw in sorted(new))
        with Outbox(folder / "box", sync="none", segment=1 << 13) as box:
            found = Counter(item.raw for item in box.take(10_000))
        assert max(found.values()) == 1, "a message twice"
        assert new <= set(found), "a new message counts as settled"
        assert set(found) <= new | books.ever, "something that nobody wrote"
        missing = books.synced - books.leaving - set(found)
        assert not missing, f"{len(missing)} messages that were synced are not there"
        return set(found) - new


class Bus:
    """A dispatcher whose receivers are new, come and go, until the power fails."""

    def __init__(self) -> None:
        self._lives = 0

    def live(self, folder: Path, books: OutboxBooks, disk: Disk, chance: random.Random) -> None:
        disk.said = books.copy
        sync: Any = chance.choice(("batch", 0.05, "none"))
        with disk.watch(), closing(self._open(folder, sync)) as world:
            for _ in range(chance.randrange(2, 6)):
                batch = []
                for _ in range(chance.choice((1, 4, 20))):
                    books.count += 1
                    payload = f"letter {books.count} ".encode() * chance.choice((1, 9, 100))
                    sink = UUri("here", 0x100 + chance.randrange(6), 1, 0)
                    batch.append(world.notify(payload, sink=sink))
                payloads = {message.payload or b"" for message in batch}
                books.stored |= payloads
                books.ever |= payloads
                world.ingest(*batch)
                if sync == "batch":
                    books.synced |= payloads
                disk.event()
                here = {0x100 + chance.randrange(6) for _ in range(2)}
                world.local.judge = partial(self._judge, here, books)
                world.run(0.5)
                disk.event()
                if sync != "none" and chance.random() < 0.3:
                    world.dispatcher._outlets._common.sync()
                    for outlet in world.dispatcher._outlets.all():
                        outlet.outbox.tend()
                    books.synced |= books.stored
                disk.event()

    def _judge(
        self, here: set[int], books: OutboxBooks, to: UUri, message: UMessage
    ) -> UStatus | None:
        if to.ue_id not in here:
            return status("UNAVAILABLE")
        books.leaving.add(message.payload or b"")
        return None

    def _open(self, folder: Path, sync: Any) -> World:
        # Only the outboxes are on the disk that fails; without the others it is quick.
        self._lives += 1
        state = folder.parent / f"state{self._lives}"
        state.mkdir()
        (folder / "outbox").mkdir(parents=True, exist_ok=True)
        (state / "outbox").symlink_to(folder / "outbox")
        return World(state, sync=sync, limits=Limits(message=4096))

    def look(self, folder: Path, books: OutboxBooks) -> set[bytes]:
        new = {f"new {number}".encode() for number in range(12)}
        with closing(self._open(folder, "none")) as world:
            world.local.always = status("UNAVAILABLE")
            for number, payload in enumerate(sorted(new)):
                world.ingest(world.notify(payload, sink=UUri("here", 0x100 + number % 6, 1, 0)))
            world.balance()
        with closing(self._open(folder, "none")) as world:
            world.balance()
            items = [
                item
                for outlet in world.dispatcher._outlets.all()
                for item in outlet.outbox.take(10_000, 1 << 30)
            ]
        found = Counter(UMessage.from_bytes(item.raw).payload or b"" for item in items)
        assert max(found.values()) == 1, "a message twice"
        assert new <= set(found), "a new message counts as settled"
        assert set(found) <= new | books.ever, "something that nobody wrote"
        missing = books.synced - books.leaving - set(found)
        assert not missing, f"{len(missing)} messages that were synced are not there"
        return set(found) - new


#: Large enough for all messages: none is overwritten.
RING = Stream(
    "fmq:{}?slots=256&size=256k&readers=4&crc=true", "hold=me", ("batch", "none", "10ms", "1s")
)


class GroupBooks(Books):
    """What was written to a stream, and what members of a group acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        #: Begun to be acknowledged: they may come again or not.
        self.leaving: set[bytes] = set()
        #: Acknowledged by a call that returned when the disk had it.
        self.settled: set[bytes] = set()

    def copy(self) -> GroupBooks:
        other = GroupBooks()
        other.shown, other.synced, other.count = dict(self.shown), set(self.synced), self.count
        other.leaving, other.settled = set(self.leaving), set(self.settled)
        return other


class Group:
    """Two readers of a group share a stream until the power fails."""

    def __init__(self, url: str) -> None:
        self._url = url

    def live(self, folder: Path, books: GroupBooks, disk: Disk, chance: random.Random) -> None:
        disk.said = books.copy
        url = self._url.format(folder / "stream")
        plain = url.partition("?")[0]
        with disk.watch(), contextlib.ExitStack() as stack:
            policy = chance.choice(("batch", "none", "none", "1s"))
            sync = chance.choice(("batch", "batch", "none", "10ms"))
            writer = stack.enter_context(open_writer(f"{url}&sync={policy}"))
            assert isinstance(writer, WideWriter)
            members = [
                stack.enter_context(open_reader(plain, group="us", sync=sync)) for _ in range(2)
            ]
            alone = stack.enter_context(open_reader(plain))
            epoch = alone.bounds().epoch
            for _ in range(chance.randrange(2, 9)):
                batch = [books.next() for _ in range(chance.choice((1, 1, 3, 12)))]
                end = alone.bounds().end
                books.shown |= {(epoch, end + i): data for i, data in enumerate(batch)}
                writer.write_many(batch)
                if policy == "batch" or chance.random() < 0.3:
                    writer.sync()
                    books.synced.update(data for (e, _), data in books.shown.items() if e == epoch)
                member = chance.choice(members)
                assert isinstance(member, Grouped)
                taken = member.read_many(chance.choice((1, 5, 20)))
                if chance.random() < 0.3:
                    member.nack([taken.pop() for _ in range(len(taken) // 2)])
                books.leaving.update(bytes(message.payload) for message in taken)
                member.ack(taken)
                if sync == "batch":
                    books.settled.update(bytes(message.payload) for message in taken)
                disk.event()

    def look(self, folder: Path, books: GroupBooks) -> set[bytes]:
        url = self._url.format(folder / "stream")
        plain = url.partition("?")[0]
        new = [b"new 1", b"new 2", b"new 3"]
        with open_writer(f"{url}&sync=batch") as writer:
            writer.write_many(new)
        with open_reader(plain, "start") as alone:
            there = {message.seq: bytes(message.payload) for message in alone.available()}
        found = list(there.values())
        assert found[-3:] == new
        with open_reader(plain, group="us") as reader:
            assert isinstance(reader, Grouped)
            came = Counter(bytes(message.payload) for message in reader.read_many(10_000))
            for loss in reader.statistics().losses:
                if loss.reason is not DropReason.RECREATED:  # which counts in earlier numbers
                    lost = set(range(loss.first, loss.last + 1))
                    assert not there.keys() & lost, "lost, but there"
            reader.acknowledge()
            assert reader.group().lag == 0
        assert max(came.values()) == 1, "a message twice"
        assert set(came) <= set(found)
        assert set(new) <= set(came), "a new message counts as settled"
        missing = set(found) - books.leaving - set(came)
        assert not missing, f"{len(missing)} messages that nobody acknowledged did not come"
        again = books.settled & set(came)
        assert not again, f"{len(again)} messages came again that were settled on the disk"
        return set(found[:-3])


def simulate(place: Path, life: Any, books: Any, images: int) -> None:
    """Let the power fail so many times, again and again after what was made of the disk."""
    seed = 0
    while images > 0:
        seed += 1
        chance = random.Random(seed)
        first = cut(place, life, books(), chance, None)
        images -= len(first)
        for image in first[:_AGAIN]:
            if images <= 0:
                return
            books_then = image.said.copy()
            books_then.survived(examine(place, life, image))
            images -= len(cut(place, life, books_then, chance, image))


def cut(
    place: Path, life: Any, books: Any, chance: random.Random, image: Image | None
) -> list[Image]:
    """Live on an image, or from nothing; look at what is there after the power failed."""
    folder = place / "life"
    folder.mkdir()
    if image is not None:
        image.write(folder)
    disk = Disk(folder, chance, _CUTS, 150)
    try:
        life.live(folder, books, disk, chance)
    finally:
        disk.close()
        shutil.rmtree(folder)
    chance.shuffle(disk.images)
    for found in disk.images:
        examine(place, life, found)
    return disk.images


def examine(place: Path, life: Any, image: Image) -> Any:
    """Look at an image; return what is there of what was written."""
    folder = place / "image"
    image.write(folder)
    with unsynced():
        found = life.look(folder, image.said)
    shutil.rmtree(folder)
    return found


@IMAGES
def test_a_log_loses_nothing_that_was_synced_and_gives_no_number_twice(
    place: Path, images: int
) -> None:
    simulate(place, LOG, Books, images)


def test_what_a_writer_synced_is_there_whoever_made_the_log(place: Path) -> None:
    chance = random.Random(0)
    for _ in range(20):
        folder = place / "life"
        folder.mkdir()
        disk = Disk(folder, chance, 0, 1)
        url = f"log:{folder}/stream?segment=8k&segment_slots=8"
        with disk.watch():
            with open_writer(f"{url}&sync=none&retain=1M") as writer:
                writer.write_many([b"careless"] * chance.choice((1, 20)))
            with open_writer(f"{url}&sync=batch") as writer:
                writer.write(b"careful")
                disk.take_image()
        disk.close()
        shutil.rmtree(folder)
        image = place / "image"
        disk.images[0].write(image)
        with unsynced(), open_writer(f"log:{image}/stream"):
            pass
        with open_reader(f"log:{image}/stream") as reader:
            assert list(reader.available())[-1].payload == b"careful"
        assert describe(f"log:{image}/stream").details["retain"] == 1 << 20
        shutil.rmtree(image)


@pytest.mark.parametrize("sync", ["batch", "1h"])
def test_a_full_segment_is_sealed_on_the_disk_when_it_was_synced(place: Path, sync: str) -> None:
    chance = random.Random(0)
    for _ in range(10):
        folder = place / "life"
        folder.mkdir()
        disk = Disk(folder, chance, 0, 1)
        url = f"log:{folder}/stream?segment=8k&segment_slots=8&sync={sync}"
        with disk.watch(), open_writer(url) as writer:
            assert isinstance(writer, WideWriter)
            for _ in range(chance.randrange(2, 5)):
                writer.write_many([b"message"] * 8)
            writer.sync()
            disk.take_image()
        disk.close()
        shutil.rmtree(folder)
        image = place / "image"
        disk.images[0].write(image)
        assert [one.faults for one in check_log(image / "stream") if one.faults] == []
        shutil.rmtree(image)


@IMAGES
def test_an_outbox_loses_nothing_that_was_synced_and_settles_nothing_new(
    place: Path, images: int
) -> None:
    simulate(place, Receiver(), OutboxBooks, images)


@pytest.mark.parametrize(
    "images",
    [
        pytest.param(_CUTS + 1, marks=pytest.mark.timeout(400)),  # some of them of a second life
        _IN_FULL,
    ],
)
def test_receivers_that_are_new_lose_nothing_that_was_synced(
    place: Path, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "_SEGMENT", 1 << 13)
    monkeypatch.setattr(log, "_MOST_OF_ONE", 2000)
    monkeypatch.setattr(log, "_MOST_BEHIND", 5000)
    simulate(place, Bus(), OutboxBooks, images)


@IMAGES
def test_a_ring_loses_nothing_that_was_synced_and_gives_no_number_twice(
    place: Path, images: int
) -> None:
    simulate(place, RING, Books, images)


@pytest.mark.parametrize("images", [_SMALL // 2, _IN_FULL])
@pytest.mark.parametrize("stream", [LOG, RING], ids=["log", "ring"])
def test_a_group_settles_nothing_new_and_gives_nothing_again_that_was_synced(
    place: Path, stream: Stream, images: int
) -> None:
    simulate(place, Group(stream.url), GroupBooks, images)
