"""A message that is not as its writer made it is never delivered, filtered, or counted twice."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from penstock.core.errors import DamagedQueue, LockTimeout
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss
from penstock.queue.wide import _ring, compression
from penstock.queue.wide.compression import compress, decompress
from penstock.queue.wide.layout import HEADER, Compression
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import crc32c, parse_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.queue.wide.reader import WideReader

TYPE_AT = 40


def change(path: str, seq: int, at: int) -> None:
    """Change a bit in the slot of a message."""
    header = parse_header(Path(f"{path}.fmq").read_bytes()[:4096], 1 << 40)
    with Path(f"{path}.fmq").open("r+b") as file:
        file.seek(header.slots_offset + seq % header.slots * 64 + at)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def view(reader: WideReader) -> None:
    with reader.view(timeout=0):
        pass


def view_batch(reader: WideReader) -> None:
    with reader.view_batch(10):
        pass


WAYS: dict[str, Callable[[WideReader], object]] = {
    "read": lambda reader: reader.read(timeout=0),
    "read_many": lambda reader: reader.read_many(10),
    "read_batch": lambda reader: reader.read_batch(10),
    "available": lambda reader: list(reader.available()),
    "view": view,
    "view_batch": view_batch,
}


@pytest.mark.parametrize(
    ("way", "options"),
    [(way, "") for way in WAYS]
    + [(way, "&compress=lz4") for way in WAYS if not way.startswith("view")],
)
def test_a_message_whose_type_was_changed_is_damaged_and_not_filtered(
    queue_path: str, way: str, options: str
) -> None:
    with wide_writer(f"fmq:{queue_path}?crc=true{options}") as writer:
        writer.write(b"wanted", type=5)
    change(queue_path, 0, TYPE_AT)
    with wide_reader(f"fmq:{queue_path}?type=5") as reader:
        with pytest.raises(DamagedQueue, match="message 0"):
            WAYS[way](reader)
        assert reader.statistics().filtered == 0
    with wide_reader(f"fmq:{queue_path}?type=5&damaged=skip") as reader:
        WAYS[way](reader)
        books = reader.statistics()
        assert (books.filtered, books.losses) == (0, (Loss(0, 0, DropReason.DAMAGED),))


@pytest.mark.parametrize("way", WAYS)
def test_losses_before_a_damaged_message_are_counted_once_however_often_it_is_met(
    queue_path: str, way: str
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(f"{url}?slots=8&crc=true") as writer, wide_reader(url) as reader:
        writer.write_many(b"%d" % n for n in range(18))
        change(queue_path, 10, 8)
        for _ in range(3):
            with pytest.raises(DamagedQueue, match="message 10"):
                WAYS[way](reader)
            assert reader.statistics().losses == (Loss(0, 9, DropReason.OVERRUN),)


@pytest.mark.parametrize("way", WAYS)
def test_every_message_can_be_damaged_and_skipping_comes_to_an_end(
    queue_path: str, way: str
) -> None:
    with wide_writer(f"fmq:{queue_path}?slots=64&crc=true") as writer:
        writer.write_many(b"%d" % n for n in range(64))
    for seq in range(64):
        change(queue_path, seq, 8)
    with wide_reader(f"fmq:{queue_path}?damaged=skip") as reader:
        deadline = time.monotonic() + 40
        while reader.statistics().backlog:
            WAYS[way](reader)
            assert time.monotonic() < deadline
        assert reader.statistics().losses == (Loss(0, 63, DropReason.DAMAGED),)


def test_a_header_that_counts_more_lost_than_there_were_is_damaged(queue_path: str) -> None:
    with wide_writer(f"fmq:{queue_path}") as writer:
        writer.write(b"one")
        with wide_reader(f"fmq:{queue_path}?damaged=skip") as reader:
            with Path(f"{queue_path}.fmq").open("r+b") as file:
                file.seek(192)
                file.write((1 << 60).to_bytes(8, "little"))
            for way in WAYS.values():
                with pytest.raises(DamagedQueue, match="tail at byte 192"):
                    way(reader)
            assert reader.statistics().lost == 0


@pytest.mark.parametrize("portable", [False, True])
def test_the_checksum_is_crc_32c_with_and_without_the_instruction(portable: bool) -> None:
    assert _ring.crc32c(b"123456789", portable) == 0xE3069283
    # RFC 3720, B.4
    assert _ring.crc32c(bytes(32), portable) == 0x8A9136AA
    assert _ring.crc32c(b"\xff" * 32, portable) == 0x62A8AB43
    assert _ring.crc32c(bytes(range(32)), portable) == 0x46DD794E
    data = bytes(n * 7 & 255 for n in range(1000))
    for start, end in ((0, 0), (1, 2), (3, 11), (0, 8), (5, 997), (8, 1000)):
        assert _ring.crc32c(data[start:end], portable) == crc32c(data[start:end])


def test_a_flipped_bit_of_the_state_changes_nothing(queue_path: str) -> None:
    with wide_writer(f"fmq:{queue_path}") as writer:
        writer.write(b"one")
    with Path(f"{queue_path}.fmq").open("r+b") as file:
        file.seek(396)
        file.write(b"\1")
    with wide_reader(f"fmq:{queue_path}") as reader:
        assert reader.read(timeout=0) is not None
        with wide_writer(f"fmq:{queue_path}") as writer:
            writer.write(b"two")
        assert reader.read(timeout=0) is not None
    with Path(f"{queue_path}.fmq").open("r+b") as file:
        file.seek(416)
        file.write(b"\1")
    with pytest.raises(DamagedQueue, match="state_check at byte 416"):
        wide_reader(f"fmq:{queue_path}")


def flip_bit(path: str, field: str, bit: int) -> None:
    at, memory = HEADER.fields[field].offset, bytearray(8)
    with Path(f"{path}.fmq").open("r+b") as file:
        file.seek(at)
        file.readinto(memory)
        file.seek(at)
        file.write((int.from_bytes(memory, "little") ^ 1 << bit).to_bytes(8, "little"))


@pytest.mark.parametrize("options", ["", "&writers=many"], ids=["one writer", "many"])
@pytest.mark.parametrize("count", [100, 5000], ids=["never full", "overwritten"])
def test_a_ring_that_says_it_has_fewer_messages_is_damaged_until_a_writer_mends_it(
    queue_path: str, options: str, count: int
) -> None:
    url = f"fmq:{queue_path}?slots=1024&size=1M{options}"
    with wide_writer(url) as writer:
        writer.write_many([b"%d" % n for n in range(count)])
    for bit in [bit for bit in range(7) if count >> bit & 1]:
        flip_bit(queue_path, "head", bit)
        with pytest.raises(DamagedQueue, match="head at byte 128"):
            wide_reader(f"fmq:{queue_path}")
        with wide_writer(url) as writer:
            assert writer.write(b"%d" % count) == count
        count += 1
        with wide_reader(f"fmq:{queue_path}", "start") as reader:
            messages = list(reader.available())
        assert [message.payload for message in messages] == [
            b"%d" % n for n in range(messages[0].seq, count)
        ]
        assert len(messages) == min(count, 1024)


def test_a_writer_that_is_there_puts_a_flipped_bit_of_the_head_right(queue_path: str) -> None:
    with wide_writer(f"fmq:{queue_path}") as writer:
        writer.write_many([b"before"] * 8)
        flip_bit(queue_path, "head", 3)
        with pytest.raises(LockTimeout):
            wide_writer(f"fmq:{queue_path}?lock_timeout=0")
        writer.write(b"after")
        with wide_reader(f"fmq:{queue_path}") as reader:
            assert len(list(reader.available())) == 9


def test_a_flipped_bit_of_what_protects_the_head_of_a_ring_changes_nothing(queue_path: str) -> None:
    with wide_writer(f"fmq:{queue_path}") as writer:
        writer.write_many([b"%d" % n for n in range(2000)])
    for bit in range(64):
        flip_bit(queue_path, "head_check", bit)
        with wide_reader(f"fmq:{queue_path}", "last") as reader:
            assert [message.payload for message in reader.available()] == [b"1999"]
        flip_bit(queue_path, "head_check", bit)


def test_a_payload_that_arrow_has_no_memory_for_is_not_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = compress(Compression.LZ4, b"payload")

    def short(*_: Any) -> bytes:
        raise pa.ArrowMemoryError("malloc of size 9 failed")

    with monkeypatch.context() as patch:
        patch.setattr(compression, "_expand", short)
        with pytest.raises(MemoryError):
            decompress(Compression.LZ4, stored, 100)
    assert decompress(Compression.LZ4, stored, 100) == b"payload"


@pytest.mark.parametrize("way", ["read", "read_many", "read_batch", "available"])
def test_memory_that_is_short_while_payloads_are_decompressed_loses_no_message(
    queue_path: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = [b"%d" % n for n in range(20)]
    with wide_writer(f"fmq:{queue_path}?compress=lz4") as writer:
        writer.write_many(payloads)
    calls = itertools.count()

    def sometimes_short(*arguments: Any) -> bytes:
        if next(calls) % 3 == 2:
            raise MemoryError
        return decompress(*arguments)

    monkeypatch.setattr(compression, "decompress", sometimes_short)
    found: list[bytes] = []
    with wide_reader(f"fmq:{queue_path}") as reader:
        while len(found) < len(payloads):
            with contextlib.suppress(MemoryError):
                if way == "read":
                    found += [message.payload for message in [reader.read(timeout=0)] if message]
                elif way == "available":
                    found.extend(message.payload for message in reader.available())
                elif way == "read_many":
                    found += [message.payload for message in reader.read_many(7)]
                else:
                    found += reader.read_batch(7).column("payload").to_pylist()
        assert found == payloads
        assert reader.statistics()[:2] == (20, sum(map(len, payloads)))
        assert reader.statistics().lost == 0
