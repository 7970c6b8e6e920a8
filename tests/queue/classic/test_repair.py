from __future__ import annotations

from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.core.errors import DamagedQueue
from penstock.queue.classic.layout import STATUS_SIZE, Slot, Status, slot_offset
from penstock.queue.endpoint import check, repair


def fill(url: str, count: int) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"message %d" % i for i in range(count)], type=1)


def payloads(url: str) -> list[bytes]:
    with open_reader(url) as reader:
        return [m.payload for m in reader.available()]


def overwrite(path: str, offset: int, data: bytes) -> None:
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_whole_queue_passes_the_check_and_a_repair_keeps_everything(queue_url: str) -> None:
    fill(queue_url, 50)
    before = payloads(queue_url)
    assert check(queue_url) == 20
    done = repair(queue_url)
    assert (done.kept, done.dropped) == (20, 0)
    assert payloads(queue_url) == before
    assert check(queue_url) == 20


def test_the_youngest_keeps_its_number_so_that_readers_go_on(queue_url: str) -> None:
    fill(queue_url, 50)
    with open_reader(queue_url, start="end") as reader:
        repair(queue_url)
        with open_writer(queue_url) as writer:
            assert writer.write(b"after the repair") == 50
        message = reader.read(timeout=1)
        assert message is not None
        assert message.seq == 50


def test_a_broken_status_is_made_anew_from_the_slots(queue_url: str, queue_path: str) -> None:
    fill(queue_url, 30)
    before = payloads(queue_url)
    overwrite(f"{queue_path}.stat", 0, b"\xff" * STATUS_SIZE)
    with pytest.raises(DamagedQueue):
        check(queue_url)
    assert repair(queue_url).kept == 20
    assert payloads(queue_url) == before
    assert check(queue_url) == 20


def test_a_broken_slot_costs_its_own_message_only(queue_url: str, queue_path: str) -> None:
    fill(queue_url, 10)
    overwrite(f"{queue_path}.stat", slot_offset(3) + 20, b"\x7f\xff\xff\xff")
    with pytest.raises(DamagedQueue) as caught:
        check(queue_url)
    assert caught.value.field == "slot 3 checksum"
    done = repair(queue_url)
    assert (done.kept, done.dropped) == (9, 1)
    assert payloads(queue_url) == [b"message %d" % i for i in range(10) if i != 3]


def test_a_message_that_was_never_published_is_not_kept(queue_url: str, queue_path: str) -> None:
    fill(queue_url, 5)
    stat = Path(f"{queue_path}.stat").read_bytes()
    fill(queue_url, 1)
    overwrite(f"{queue_path}.stat", 0, stat[:STATUS_SIZE])
    assert repair(queue_url).kept == 5


def test_the_queue_as_it_was_is_kept_beside_it(queue_url: str, queue_path: str) -> None:
    fill(queue_url, 5)
    before = [Path(f"{queue_path}.{part}").read_bytes() for part in ("stat", "buf")]
    done = repair(queue_url)
    assert [path.read_bytes() for path in done.backup] == before


def test_a_repaired_queue_keeps_times_types_and_compression(queue_url: str) -> None:
    with open_writer(queue_url, compress="gzip") as writer:
        for number in range(5):
            writer.write(b"z" * 1000, number, -number, created_ns=(10**9 + number) * 10**9)
    with open_reader(queue_url) as reader:
        before = list(reader.available())
    repair(queue_url)
    with open_reader(queue_url) as reader:
        assert list(reader.available()) == before


def test_files_too_short_for_a_queue_are_left_alone(queue_url: str, queue_path: str) -> None:
    fill(queue_url, 5)
    overwrite(f"{queue_path}.stat", 0, b"\0" * 4)
    with Path(f"{queue_path}.stat").open("r+b") as file:
        file.truncate(STATUS_SIZE + 10)
    before = Path(f"{queue_path}.stat").read_bytes()
    with pytest.raises(DamagedQueue):
        repair(queue_url)
    assert Path(f"{queue_path}.stat").read_bytes() == before


def test_an_empty_queue_can_be_checked_and_repaired(queue_url: str) -> None:
    with open_writer(queue_url):
        pass
    assert check(queue_url) == 0
    assert repair(queue_url).kept == 0
    assert check(queue_url) == 0


def test_a_free_slot_and_a_status_read_back_as_they_were_written() -> None:
    status = Status.of_empty_queue(5, 100, 7)
    assert Status.decode(status.encode()) == status
    slot = Slot(1, 2, 3, 4, 16, 0, -5, 6, 0, 0)
    assert Slot.decode(slot.encode()) == slot
