"""A queue gets another size, and whoever reads it goes on without a gap."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.core.capabilities import InUse
from penstock.core.endpoints import create, describe, remove, resize
from penstock.core.errors import Closed, InvalidOption, LockTimeout, NotFound, Unsupported
from penstock.core.message import Message
from penstock.queue.wide.file import QueueFile, mark
from penstock.queue.wide.layout import State
from penstock.queue.wide.resize import _replace, writing_alone
from support.power_cuts import forget_boot
from support.waiting import background, waits


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"fmq:{tmp_path}/queue"


def write(url: str, start: int, count: int, **options: object) -> None:
    with open_writer(url, **options) as writer:
        for number in range(start, start + count):
            writer.write(b"%d" % number, number % 5, 1, number, attributes=b"a%d" % number)


def contents(url: str) -> list[Message]:
    with open_reader(url) as reader:
        return list(reader.available())


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_its_messages_are_as_they_were(url: str, compress: str) -> None:
    write(url, 0, 100, slots=64, size="64k", compress=compress, crc=True)
    before, epoch = contents(url), describe(url).details["epoch"]
    assert len(before) == 64
    resize(url, slots=1000, size="1M")
    assert contents(url) == before
    found = describe(url)
    assert found.slots == 1024
    assert found.buffer_size == 1 << 20
    assert found.details["epoch"] == epoch
    assert found.details["crc"]
    write(url, 100, 500)
    assert [message.seq for message in contents(url)] == list(range(36, 600))


def test_a_reader_that_is_open_goes_on_where_it_was(url: str) -> None:
    write(url, 0, 50, slots=64, size="64k")
    with open_reader(url) as reader, open_reader(url, "end") as late:
        assert len(reader.read_many(20)) == 20
        resize(url, slots=256)
        write(url, 50, 100)
        found: list[int] = []
        while message := reader.read(timeout=10):
            found.append(message.seq)
            if message.seq == 149:
                break
        assert found == list(range(20, 150))
        assert reader.statistics().lost == reader.statistics().restarts == 0
        after = late.read(timeout=10)
        assert after is not None
        assert after.seq == 50


def test_a_place_that_has_a_name_is_kept(url: str) -> None:
    write(url, 0, 50, slots=64, size="64k")
    with open_reader(url, hold="gone") as gone, open_reader(url, hold="open") as reader:
        gone.read_many(10)
        gone.close()
        reader.read_many(30)
        reader.acknowledge()
        resize(url, slots=128)
        assert [m.seq for m in reader.read_many(10)] == list(range(30, 40))  # from the old one
        reader.read_many(10)
        write(url, 50, 5)
        there = reader.read(timeout=10)
        assert there is not None
        assert there.seq == 50
        names = {each["name"]: each["alive"] for each in describe(url).details["readers"]}
        assert names == {"gone": False, "open": True}
    with open_reader(url, hold="gone") as again:
        assert [message.seq for message in again.read_many(100)] == list(range(10, 55))


def test_a_group_goes_on(url: str) -> None:
    write(url, 0, 40, slots=64, size="64k")
    with open_reader(url, group="g") as member:
        member.ack(member.read_many(15))  # type: ignore[attr-defined]
    resize(url, size="1M")
    with open_reader(url, group="g") as member:
        assert [message.seq for message in member.read_many(100)] == list(range(15, 40))


def test_many_writers_are_neither_replaced_nor_resized_nor_removed_and_are_kept_out(
    url: str, tmp_path: Path
) -> None:
    with open_writer(url, writers="many", slots=100, size=10_000) as writer:
        writer.write(b"one")
        with pytest.raises(LockTimeout, match="a process writes"):
            create(url, replace=True, slots=200)
        with pytest.raises(LockTimeout, match="a process writes"):
            resize(url, slots=200)
        with pytest.raises(InUse, match="writes"):
            remove(url)
        writer.write(b"two")
    assert [message.payload for message in contents(url)] == [b"one", b"two"]
    file = QueueFile.open(f"{tmp_path}/queue", writable=True)
    with writing_alone(url, file), pytest.raises(LockTimeout):
        open_writer(url, lock_timeout=0.1)
    file.close()
    write(url, 0, 1)
    resize(url, slots=200)
    create(url, replace=True, writers="many")
    remove(url)


def test_what_would_be_lost_is_refused(url: str, tmp_path: Path) -> None:
    write(url, 0, 60, slots=64, size="64k")
    before = contents(url)
    with pytest.raises(InvalidOption, match="holds 60 messages, of which only the last 32"):
        resize(url, slots=32)
    with open_writer(url), pytest.raises(LockTimeout, match="writes to"):
        resize(url, slots=128)
    assert contents(url) == before
    assert [path.name for path in tmp_path.iterdir()] == ["queue.fmq"]
    with pytest.raises(NotFound):
        resize(f"{url}x", slots=32)
    with open_writer(f"fmq:{tmp_path}/classic?layout=classic"):
        pass
    for other in (f"fmq:{tmp_path}/classic", f"log:{tmp_path}/log"):
        with pytest.raises(Unsupported):
            resize(other, slots=32)


def test_a_queue_whose_machine_went_down_begins_a_new_epoch(url: str, tmp_path: Path) -> None:
    write(url, 0, 10, slots=64, size="64k")
    with open_reader(url) as reader:
        before = reader.bounds()
    file = tmp_path / "queue.fmq"
    file.write_bytes(forget_boot(file.read_bytes()))
    resize(url, slots=256)
    write(url, 10, 1)
    with open_reader(url) as reader:
        after = reader.bounds()
    assert after.epoch != before.epoch, "readers may have seen numbers that are given again"
    assert after.successor(before.epoch, 50) == 10
    assert [message.seq for message in contents(url)] == list(range(11))


def test_a_named_reader_is_told_what_it_lost_before_the_resize(url: str) -> None:
    with open_writer(url, slots=16, size="64k") as writer:
        writer.write_many([b"x"] * 10)
        with open_reader(url, hold="archive") as reader:
            assert len(reader.read_many(5)) == 5
        writer.write_many([b"x"] * 90)
    resize(url, slots=64)
    with open_reader(url, hold="archive") as reader:
        assert len(reader.read_many(1000)) == 16
        assert reader.statistics().lost == 79


def test_a_writer_that_waits_for_a_resize_goes_on_in_the_new_queue(
    url: str, tmp_path: Path
) -> None:
    write(url, 0, 1, slots=64, size="64k")
    old = QueueFile.open(f"{tmp_path}/queue", writable=True)
    with contextlib.ExitStack() as alone:
        alone.enter_context(writing_alone(url, old))
        with background(write, url, 1, 1) as writing:
            assert waits(writing)
            _replace(f"{tmp_path}/queue", old, old.geometry._replace(slots=128))
            mark(old, State.REPLACED)
            alone.close()
            writing.result()
    old.close()
    assert [message.payload for message in contents(url)] == [b"0", b"1"]
    assert describe(url).slots == 128


def test_a_writer_that_waits_while_the_queue_is_removed_makes_a_new_one(
    url: str, tmp_path: Path
) -> None:
    write(url, 0, 1, slots=64, size="64k")
    old = QueueFile.open(f"{tmp_path}/queue", writable=True)
    with contextlib.ExitStack() as alone:
        alone.enter_context(writing_alone(url, old))
        with background(write, url, 1, 1) as writing:
            assert waits(writing)
            (tmp_path / "queue.fmq").unlink()
            alone.close()
            writing.result()
    old.close()
    assert [message.payload for message in contents(url)] == [b"1"]


def test_a_queue_whose_removal_a_power_failure_undid_says_what_to_do(
    url: str, tmp_path: Path
) -> None:
    write(url, 0, 1, slots=64, size="64k")
    kept = tmp_path / "kept"
    kept.hardlink_to(tmp_path / "queue.fmq")
    remove(url)
    kept.rename(tmp_path / "queue.fmq")
    with pytest.raises(Closed, match="was removed, and is there again") as caught:
        open_writer(url)
    assert "create --replace" in str(caught.value.hint)
