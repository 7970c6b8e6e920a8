"""After a power failure: nothing synced is lost, no number means two messages, and all is said."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import Position, open_reader, open_writer
from penstock.core.errors import DamagedQueue, PositionError
from penstock.queue.wide.layout import LINEAGE
from support.power_cuts import BOOT_ID_AT, PAGE, Disk, PowerCut, forget_boot
from support.waiting import background, waits
from support.wide_files import stored
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import list_queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.queue.wide.writer import WideWriter


def numbered(*numbers: int) -> list[bytes]:
    return [b"message %d" % number for number in numbers]


def image_of(path: str) -> bytes:
    return Path(f"{path}.fmq").read_bytes()


def power_fails(path: str, image: bytes) -> None:
    """Let the machine come up again with this on its disk."""
    file = Path(f"{path}.fmq")
    file.unlink(missing_ok=True)
    file.write_bytes(forget_boot(image))


def page_of(path: str, seq: int) -> slice:
    """Where a message begins that has a page of its own."""
    message = next(m for m in list_queue(f"{path}.fmq").messages if m.seq == seq)
    header = list_queue(f"{path}.fmq").header
    at = header.buffer_offset + message.position % header.buffer_size
    return slice(at, at + PAGE)


def filling(*numbers: int) -> list[bytes]:
    """Messages that have a page each."""
    return [(b"message %d " % number).ljust(PAGE, b".") for number in numbers]


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_that_were_given_before_a_power_failure_are_of_another_epoch(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}?slots=256&crc=true"
    with wide_writer(url) as writer:
        writer.write_many(numbered(*range(100)))
        writer.sync()
        on_disk = image_of(queue_path)
        writer.write_many(numbered(*range(100, 150)))
    with wide_reader(url.partition("?")[0]) as reader:
        assert len(reader.read_many(1000)) == 150
        before = reader.bounds()
    power_fails(queue_path, on_disk)
    with wide_writer(url) as writer:
        assert writer.write_many(numbered(*range(1000, 1080))) == 179
    with wide_reader(f"fmq:{queue_path}") as reader:
        after = reader.bounds()
        assert after.epoch != before.epoch
        assert after.lineage == ((before.epoch, 100),)
        # Who had read up to 150 goes on with the first of the new ones, and misses none.
        place = after.successor(before.epoch, before.end)
        assert place == 100
        reader.seek(place)
        assert [m.payload for m in reader.read_many(1000)] == numbered(*range(1000, 1080))


def test_a_power_failure_is_a_new_epoch_also_when_nothing_seems_to_be_missing(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(url) as writer:
        writer.write_many(numbered(0, 1, 2))
    epoch = list_queue(f"{queue_path}.fmq").header.epoch
    power_fails(queue_path, image_of(queue_path))
    with wide_writer(url) as writer:
        writer.write(b"next")
    with wide_reader(url) as reader:
        bounds = reader.bounds()
    assert bounds.epoch != epoch
    assert bounds.lineage == ((epoch, 3),)
    assert stored(queue_path) == [*numbered(0, 1, 2), b"next"]


@pytest.mark.parametrize("sync", ["batch", "10s"])
def test_a_queue_that_was_synced_and_closed_keeps_its_epoch(queue_path: str, sync: str) -> None:
    url = f"fmq:{queue_path}?sync={sync}"
    with wide_writer(url) as writer:
        writer.write_many(numbered(0, 1, 2))
    before = list_queue(f"{queue_path}.fmq").header
    assert not any(before.boot_id)
    power_fails(queue_path, image_of(queue_path))
    with wide_writer(url) as writer:
        assert any(list_queue(f"{queue_path}.fmq").header.boot_id)
        assert writer.write(b"next") == 3
        power_fails(f"{queue_path}-crashed", image_of(queue_path))
    assert list_queue(f"{queue_path}.fmq").header.epoch == before.epoch
    with wide_writer(f"fmq:{queue_path}-crashed"):
        assert list_queue(f"{queue_path}-crashed.fmq").header.epoch != before.epoch


def test_a_queue_that_is_written_again_says_so_on_the_disk_first(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wide_writer(f"fmq:{queue_path}?sync=batch") as writer:
        writer.write_many(numbered(0, 1, 2))
    disk = Disk(monkeypatch, f"{queue_path}.fmq")
    disk.sync()
    with wide_writer(f"fmq:{queue_path}?sync=10s") as writer:
        writer.write(b"seen by readers, and not on the disk")
        image = disk.image(random.Random(0), share=0)
    assert any(image[BOOT_ID_AT : BOOT_ID_AT + 16])


def test_one_of_many_writers_does_not_say_for_the_others_that_all_is_synced(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}?writers=many&sync=batch"
    with wide_writer(url) as other:
        with wide_writer(url) as writer:
            writer.write(b"one")
        assert any(list_queue(f"{queue_path}.fmq").header.boot_id)
        other.write(b"two")


def test_a_queue_remembers_its_last_four_epochs(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    epochs = []
    for number in range(LINEAGE + 2):
        with wide_writer(url) as writer:
            epochs.append(list_queue(f"{queue_path}.fmq").header.epoch)
            writer.write(b"%d" % number)
        power_fails(queue_path, image_of(queue_path))
    wide_writer(url).close()
    with wide_reader(url) as reader:
        bounds = reader.bounds()
    assert [ancestor.epoch for ancestor in bounds.lineage] == epochs[-LINEAGE:]
    assert [ancestor.end for ancestor in bounds.lineage] == [3, 4, 5, 6]
    assert bounds.successor(epochs[2], 5) == 3
    assert bounds.successor(epochs[0], 0) is None  # it is forgotten: read from the start


# --- readers ----------------------------------------------------------------------------------


def test_a_named_reader_beyond_the_cut_goes_on_at_the_cut(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(url) as writer:
        writer.write_many(numbered(*range(10)))
        old = image_of(queue_path)
        writer.write_many(numbered(*range(10, 15)))
        with wide_reader(f"{url}?hold=archive") as reader:
            assert len(reader.read_many(100)) == 15
        with wide_reader(f"{url}?hold=slow") as reader:
            assert len(reader.read_many(4)) == 4
        new = image_of(queue_path)
    # The disk got the page of readers, and neither header nor messages.
    power_fails(queue_path, old[:4096] + new[4096:8192] + old[8192:])
    with wide_writer(url) as writer:
        writer.write_many(numbered(20, 21))
    with wide_reader(f"{url}?hold=archive") as reader:
        assert [m.payload for m in reader.read_many(100)] == numbered(20, 21)
        assert reader.statistics()[2:5] == (0, 0, 0)
    with wide_reader(f"{url}?hold=slow") as reader:
        assert [m.seq for m in reader.read_many(100)] == list(range(4, 12))


def test_a_named_reader_is_told_when_nothing_is_left_of_what_it_had_not_read(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(f"{url}?slots=64&crc=true") as writer:
        writer.write_many(numbered(*range(10)))
        with wide_reader(f"{url}?hold=archive") as reader:
            assert len(reader.read_many(4)) == 4
    header = list_queue(f"{queue_path}.fmq").header
    image = image_of(queue_path)
    slots = slice(header.slots_offset, header.slots_offset + 64 * 64)
    power_fails(queue_path, image[: slots.start] + bytes(64 * 64) + image[slots.stop :])
    with wide_writer(url) as writer:
        writer.write(b"next")
    with wide_reader(f"{url}?hold=archive") as reader:
        assert [m.payload for m in reader.read_many(100)] == [b"next"]
        assert reader.statistics().lost == 6


def test_a_reader_that_was_first_after_a_power_failure_finds_its_place_again(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(url) as writer:
        writer.write_many(numbered(*range(10)))
        old = image_of(queue_path)
        writer.write_many(numbered(*range(10, 15)))
        with wide_reader(f"{url}?hold=archive") as reader:
            assert len(reader.read_many(100)) == 15
        new = image_of(queue_path)
    power_fails(queue_path, old[:4096] + new[4096:8192] + old[8192:])
    ways: tuple[Callable[[], list[bytes]], ...] = (
        lambda: [m.payload for m in named.read_many(100)],
        lambda: [m.payload for m in iter(lambda: passing.read(0), None) if m],
        lambda: list(batches.read_batch(100)["payload"].to_pylist()),
    )
    with (
        wide_reader(f"{url}?hold=archive") as named,
        wide_reader(url) as passing,
        wide_reader(url) as batches,
    ):
        assert [len(way()) for way in ways] == [0, 10, 10]
        # One more is on the disk than the new writer finds whole.
        with Path(f"{queue_path}.fmq").open("r+b") as file:
            file.seek(list_queue(f"{queue_path}.fmq").header.slots_offset + 9 * 64)
            file.write(bytes(64))
        with wide_writer(url) as writer:
            writer.write_many(numbered(*range(20, 40)))
            for way in ways:
                assert way() == numbered(*range(20, 40))


def test_a_position_that_no_message_had_is_refused_by_its_row(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(url) as writer:
        writer.write_many(numbered(*range(10)))
    wide_reader(f"{url}?hold=archive").close()
    with Path(f"{queue_path}.fmq").open("r+b") as file:
        file.seek(4096 + 16)
        file.write((2**63 - 2).to_bytes(8, "little"))
        file.seek(4096 + 120)
        file.write(bytes(8))  # a row of an earlier release, without a checksum
    with pytest.raises(DamagedQueue, match=r"row 0 .*archive at byte 4112 should be up to 10"):
        wide_reader(f"{url}?hold=archive")
    with wide_reader(url) as reader, pytest.raises(PositionError, match="the next is 10"):
        reader.seek(2**63 - 2)


# --- what was synced ------------------------------------------------------------------------------


def test_a_cut_inside_write_many_keeps_everything_that_was_synced(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fmq:{queue_path}?slots=1024&size=65536&crc=true&sync=batch"
    disk = Disk(monkeypatch, f"{queue_path}.fmq")
    writer = wide_writer(url)
    writer.write_many(numbered(*range(1024)))
    disk.syncs_left = 0
    with pytest.raises(PowerCut):
        writer.write_many(numbered(*range(1024, 1324)))
    tail = list_queue(f"{queue_path}.fmq").header.tail
    images = [disk.image(random.Random(seed)) for seed in range(10)]
    disk.syncs_left = None
    writer.close()
    for image in images:
        power_fails(queue_path, image)
        wide_writer(url).close()
        kept = list_queue(f"{queue_path}.fmq").messages
        assert kept[0].seq <= tail
        assert kept[-1].seq >= 1023
        assert [m.payload for m in kept] == numbered(*range(kept[0].seq, kept[-1].seq + 1))


def test_whole_messages_that_cannot_stay_are_kept_in_a_copy(
    queue_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"fmq:{queue_path}?slots=16&crc=true"
    with wide_writer(url) as writer:
        writer.write_many(numbered(*range(10)))
    header = list_queue(f"{queue_path}.fmq").header
    image = bytearray(image_of(queue_path))
    image[header.slots_offset + 3 * 64] ^= 1
    power_fails(queue_path, bytes(image))
    with wide_writer(url) as writer:
        assert writer.write(b"next") == 10
    assert stored(queue_path) == [*numbered(*range(4, 10)), b"next"]  # the longer run
    assert "3 of them are whole" in caplog.text
    copy = Path(f"{queue_path}.fmq.torn-1")
    assert copy.read_bytes() == forget_boot(bytes(image))
    assert copy.stat().st_mode & 0o777 == 0o600


def test_a_message_that_was_cut_off_does_not_come_back_in_place_of_a_new_one(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}?slots=64&size=256k&crc=true"
    with wide_writer(url) as writer:
        writer.write_many(filling(*range(10)))
        header = image_of(queue_path)[:PAGE]
        writer.write_many(filling(*range(10, 20)))
        on_disk = image_of(queue_path)[PAGE:]
    power_fails(queue_path, header + on_disk)  # they are there, and not counted
    with wide_writer(url) as writer:
        on_disk = image_of(queue_path)[PAGE:]
        assert writer.write_many(filling(*range(100, 110))) == 19
        header = image_of(queue_path)[:PAGE]
    power_fails(queue_path, header + on_disk)  # and now others are counted, and not there
    wide_writer(url).close()
    assert stored(queue_path) == filling(*range(10))


def test_a_writer_that_overtakes_what_it_synced_leaves_a_mark_where_that_ended(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fmq:{queue_path}?slots=16&size=64k&crc=true&sync=1000s"
    disk = Disk(monkeypatch, f"{queue_path}.fmq")
    with wide_writer(url) as writer:
        writer.write_many(filling(*range(16)))
        for number in range(16, 100):
            writer.write(filling(number)[0])
            header = list_queue(f"{queue_path}.fmq").header
            if header.guard == 2**64 - 1 and header.tail == disk.head - 3:
                break
        synced, tail = disk.head, header.tail
        image = bytearray(image_of(queue_path))
        # Three that were synced are there, and twelve new ones behind one that is not.
        assert synced - tail == 3
        assert header.head - synced == 13
        torn = page_of(queue_path, synced)
        image[torn] = bytes(PAGE)
    power_fails(queue_path, bytes(image))
    wide_writer(url).close()
    assert stored(queue_path) == filling(*range(tail, synced))
    assert len(list(Path(queue_path).parent.glob("*.torn-*"))) == 1


@pytest.mark.parametrize("syncs", [0, 1])
def test_a_cut_while_the_mark_is_made_loses_nothing_that_was_synced(
    queue_path: str, monkeypatch: pytest.MonkeyPatch, syncs: int
) -> None:
    url = f"fmq:{queue_path}?slots=16&size=64k&crc=true&sync=1000s"
    disk = Disk(monkeypatch, f"{queue_path}.fmq")
    writer = wide_writer(url)
    writer.write_many(filling(*range(16)))
    writer.sync()
    disk.syncs_left = syncs
    with pytest.raises(PowerCut):
        writer.write_many(filling(*range(16, 40)))
    header = list_queue(f"{queue_path}.fmq").header
    image, synced = bytearray(image_of(queue_path)), disk.head
    if header.head > synced:
        image[page_of(queue_path, synced)] = bytes(PAGE)
    disk.syncs_left = None
    writer.close()
    assert header.guard_next <= synced
    power_fails(queue_path, bytes(image))
    wide_writer(url).close()
    assert stored(queue_path) == filling(*range(header.tail, synced))


def survive(path: str, disk: Disk, chance: random.Random) -> None:
    """Write until the power fails, and make sure of what is there afterwards."""
    slots, size = chance.choice([(16, 65536), (64, 8192), (256, 65536)])
    sync = chance.choice(["batch", "batch", "1000s"])
    url = f"fmq:{path}?slots={slots}&size={size}&readers=2&crc=true&sync={sync}"
    sizes = chance.choice([(1, 64), (1, 2000), (100, 100)])
    payloads: dict[int, bytes] = {}
    disk.syncs_left = chance.randrange(3, 12)
    writer = wide_writer(url)
    disk.sync()
    try:
        for _ in range(1000):
            head = len(payloads)
            count = chance.choice([1, 1, 5, slots // 3, slots, 2 * slots])
            new = [chance.randbytes(chance.randint(*sizes)) for _ in range(count)]
            payloads.update(enumerate(new, head))
            writer.write_many(new)
            if chance.random() < 0.2:
                writer.sync()
    except PowerCut:
        pass
    tail = list_queue(f"{path}.fmq").header.tail
    image, synced = disk.image(chance, chance.random()), disk.head
    disk.syncs_left = None
    writer.close()
    power_fails(path, image)
    before = int.from_bytes(image[16:24], "little")
    with wide_writer(url) as writer:
        listing = list_queue(f"{path}.fmq")
        assert listing.header.epoch != before
        kept = {message.seq: message.payload for message in listing.messages}
        assert all(payloads[seq] == payload for seq, payload in kept.items())
        missing = [seq for seq in range(tail, synced) if seq not in kept]
        assert not missing, f"{len(missing)} of {synced} synced, from {missing[0]}"
        assert writer.write(b"next") == listing.header.head
    for copy in Path(path).parent.glob("*.torn-*"):
        copy.unlink()
    Path(f"{path}.fmq").unlink()


@pytest.mark.parametrize(
    "images", [60, pytest.param(6000, marks=pytest.mark.full)], ids=["some", "many"]
)
def test_what_was_synced_and_not_overwritten_survives_every_power_failure(
    queue_path: str, monkeypatch: pytest.MonkeyPatch, images: int
) -> None:
    disk = Disk(monkeypatch, f"{queue_path}.fmq")
    for seed in range(images):
        try:
            survive(queue_path, disk, random.Random(seed))
        except BaseException as error:
            error.add_note(f"image {seed}")
            raise


# --- many writers, of which each syncs as it likes ------------------------------------------------


def kept_after(path: str, image: bytes) -> set[int]:
    """Return which messages a writer finds after the power failed with this on the disk."""
    power_fails(path, image)
    wide_writer(f"fmq:{path}").close()
    kept = {message.seq for message in list_queue(f"{path}.fmq").messages}
    for file in Path(path).parent.glob("*.fmq*"):
        file.unlink()
    return kept


def test_a_sync_that_ends_while_another_goes_on_keeps_what_both_synced(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fmq:{queue_path}?slots=16&size=64k&crc=true&writers=many"
    disk = Disk(monkeypatch, f"{queue_path}.fmq")
    with (
        wide_writer(f"{url}&sync=none") as careless,
        wide_writer(f"{url}&sync=1000s") as late,
        wide_writer(f"{url}&sync=batch") as writer,
    ):
        for number in range(24):
            writer.write(filling(number)[0])
        sync = os.fdatasync

        def sync_beside(descriptor: int) -> None:
            monkeypatch.setattr(os, "fdatasync", sync)
            late.sync()
            sync(descriptor)

        monkeypatch.setattr(os, "fdatasync", sync_beside)
        writer.write(filling(24)[0])
        synced, guard = disk.head, list_queue(f"{queue_path}.fmq").header.guard
        syncs = disk.syncs
        while list_queue(f"{queue_path}.fmq").header.tail < guard:
            careless.write(filling(100)[0])
        assert disk.syncs == syncs, "it did not have to"
        tail = list_queue(f"{queue_path}.fmq").header.tail
        images = [disk.image(random.Random(seed), 0.5) for seed in range(40)]
    for image in images:
        assert kept_after(queue_path, image) >= set(range(tail, synced))


class ManyWriters:
    """Writers of one queue, until the power fails; while one syncs, another may, too."""

    def __init__(self, path: str, chance: random.Random) -> None:
        self._chance = chance
        self.slots, size = chance.choice([(16, 65536), (64, 8192), (64, 65536)])
        self._sizes = chance.choice([(1, 64), (1, 2000), (100, 100)])
        url = f"fmq:{path}?slots={self.slots}&size={size}&readers=2&crc=true&writers=many&sync="
        policies = chance.sample(["batch", "none", "1000s", "batch"], 3)
        self.writers = [wide_writer(url + policy) for policy in policies]
        self.payloads: dict[int, bytes] = {}
        #: Whose sync is the only one under way; None: there are two.
        self._at_work: WideWriter | None = None

    def live(self) -> None:
        plain = os.fdatasync
        os.fdatasync = partial(self._sync_beside, plain)
        try:
            for _ in range(1000):
                self._write()
        except PowerCut:
            pass
        finally:
            os.fdatasync = plain

    def _write(self) -> None:
        chance = self._chance
        self._at_work = writer = chance.choice(self.writers)
        count = chance.choice([1, 1, 5, self.slots // 3, self.slots, 2 * self.slots])
        new = [chance.randbytes(chance.randint(*self._sizes)) for _ in range(count)]
        self.payloads.update(enumerate(new, len(self.payloads)))
        writer.write_many(new)
        if chance.random() < 0.2:
            writer.sync()

    def _sync_beside(self, plain: Callable[[int], None], descriptor: int) -> None:
        writer = self._at_work
        if writer is not None and self._chance.random() < 0.3:
            self._at_work = None
            other = self._chance.choice([each for each in self.writers if each is not writer])
            assert other._disk is not None
            other._disk.sync()
            self._at_work = writer
        plain(descriptor)


@pytest.mark.parametrize(
    "images", [60, pytest.param(6000, marks=pytest.mark.full)], ids=["some", "many"]
)
def test_what_one_of_many_writers_synced_survives_every_power_failure(
    queue_path: str, monkeypatch: pytest.MonkeyPatch, images: int
) -> None:
    disk = Disk(monkeypatch, f"{queue_path}.fmq")
    for seed in range(images):
        chance = random.Random(seed)
        disk.syncs_left = None
        many = ManyWriters(queue_path, chance)
        disk.sync()
        disk.syncs_left = chance.randrange(3, 16)
        many.live()
        tail = list_queue(f"{queue_path}.fmq").header.tail
        image, synced = disk.image(chance, chance.random()), disk.head
        disk.syncs_left = None
        for writer in many.writers:
            writer.close()
        assert kept_after(queue_path, image) >= set(range(tail, synced)), f"image {seed}"


def test_a_writer_in_the_middle_of_a_call_heeds_what_another_syncs_meanwhile(
    queue_path: str,
) -> None:
    url = f"fmq:{queue_path}?slots=16&readers=4&writers=many"
    with wide_writer(f"{url}&hold=slow") as writer, wide_reader(f"fmq:{queue_path}?hold=slow") as r:
        writer.write_many(numbered(*range(16)))
        with background(writer.write_many, numbered(*range(16, 40))) as writing:
            assert waits(writing)
            with wide_writer(f"{url}&sync=batch"):
                before = list_queue(f"{queue_path}.fmq").header
                assert before.guard <= 16
                while r.statistics().messages < 40:
                    r.read_many(100, timeout=1)
                writing.result()
                after = list_queue(f"{queue_path}.fmq").header
                assert after.guard >= after.tail, "it overwrote what was synced"


def test_a_writer_that_is_killed_while_it_recovers_leaves_the_next_one_to_do_it(
    queue_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(url) as writer:
        writer.write_many(numbered(*range(10)))
    first = list_queue(f"{queue_path}.fmq").header.epoch
    power_fails(queue_path, image_of(queue_path))

    def die(_: int) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", die)
        with pytest.raises(PowerCut):
            open_writer(url)
    power_fails(queue_path, image_of(queue_path))  # what it did got to the disk
    with wide_writer(url) as writer:
        assert writer.write(b"next") == 10
    with open_reader(url, start=Position.START) as reader:
        bounds = reader.bounds()
        assert len(bounds.lineage) == 2
        assert bounds.successor(first, 10) == 10
