"""A queue gets another size, and whoever reads it goes on without a gap."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.core.capabilities import InUse
from penstock.core.endpoints import create, describe, remove, resize
from penstock.core.errors import InvalidOption, LockTimeout, NotFound, Unsupported
from penstock.core.message import Message
from penstock.queue.wide.file import QueueFile
from penstock.queue.wide.resize import writing_alone


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
