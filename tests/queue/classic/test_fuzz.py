"""Damaged queues: a typed error or the right message, never anything else, never for long."""

from __future__ import annotations

import contextlib
import random
import resource
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from penstock import Malformed, PenstockError
from penstock.core.errors import DamagedQueue
from penstock.queue.classic import reader as reader_module
from penstock.queue.classic import slots as slots_module
from penstock.queue.classic.compression import decompress
from penstock.queue.classic.options import Compression
from support.damage import damaged, lying
from support.queue_files import QueueBytes, reader_of, writer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Nothing takes this long (seconds), however damaged.
LONGEST = 20.0
#: Nothing takes this much memory (KiB).
LARGEST = 200 << 10

SIZES = {"default": 3000, "full": 60_000}
FULL = [
    pytest.param(SIZES["default"], id="some"),
    pytest.param(
        SIZES["full"],
        id="all",
        marks=[pytest.mark.full, pytest.mark.timeout(3600)],
    ),
]


# --- what LROSE's rules say, told a second time ---------------------------------------------


class Found(NamedTuple):
    """What a reader has to find in a queue, whatever its bytes are."""

    #: The number of the first message that was not freed.
    first: int
    #: From there on, by number: the payload, or None where the message is damaged.
    payloads: dict[int, bytes | None]


def look(queue: QueueBytes) -> Found | None:
    """Judge the bytes of a queue by docs/specs/lrose.md 1.3 to 1.7; None if it cannot be opened."""
    stat, buf = queue
    if len(stat) < 56:
        return None
    s = struct.unpack(">14i", stat[:56])
    (magic, young_id, young_slot, old_slot, nslots, buf_size, begin_insert, end_insert, tail) = s[
        :9
    ]
    inverted = {1, 3, 6, 8, 11}
    total = sum(~word if i in inverted else word for i, word in enumerate(s[:12]))
    slots = range(nslots)
    right = (
        magic == 88008801
        and (s[13] == 0 or (total - s[13]) % 2**32 == 0)
        and nslots > 0
        and buf_size > 0
        and -1 <= young_id < 10**9
        and (young_slot == old_slot == -1 if young_id == -1 else young_slot in slots)
        and (old_slot == -1 or old_slot in slots)
        and 0 <= begin_insert <= end_insert <= tail <= buf_size
    )
    if not right or len(stat) < 56 + 40 * nslots or len(buf) < buf_size:
        return None
    all_freed = young_id >= 0 and tail == 0 and old_slot == (young_slot + 1) % nslots
    if old_slot >= 0 and tail < 12 and not all_freed:  # messages need room
        return None
    span = 0 if old_slot < 0 or all_freed else (young_slot - old_slot) % nslots + 1
    young = young_id + (10**9 if span > young_id + 1 > 0 else 0)
    first = young - span + 1
    payloads: dict[int, bytes | None] = {}
    for seq in range(first, young + 1):
        index = (young_slot - (young - seq)) % nslots
        words = struct.unpack(">10i", stat[56 + 40 * index : 96 + 40 * index])
        ahead = (words[1] - seq) % 10**9
        later = words[0] == 1 and 0 < ahead <= 5 * 10**8 and ahead % nslots == 0
        if not payloads and (words[0] == 0 or later):
            first = seq + 1
        else:
            payloads[seq] = judge(words, buf, buf_size, index, seq % 10**9)
    return Found(first, payloads)


def judge(words: tuple[int, ...], buf: bytes, buf_size: int, index: int, id: int) -> bytes | None:
    active, its_id, _, length, stored, offset, _, _, compressed, checksum = words
    inverted = {1, 3, 6, 8}
    total = sum(~word if i in inverted else word for i, word in enumerate(words[:9]))
    if active != 1 or its_id != id or (checksum != 0 and (total - checksum) % 2**32):
        return None
    if length < 0 or stored < 12 or stored % 4 or offset < 0 or offset % 4:
        return None
    if offset + stored > buf_size or (not compressed and stored != (length + 3) // 4 * 4 + 12):
        return None
    frame = buf[offset : offset + stored]
    head = struct.unpack(">2i", frame[:8])
    if head != (88008802, index) or frame[-4:] != id.to_bytes(4):
        return None
    if not compressed:
        return frame[8 : 8 + length]
    try:
        payload = decompress(frame[8:-4], length)
    except Malformed:
        return None
    return payload if len(payload) == length else None


# --- queues to damage -----------------------------------------------------------------------


def make(path: str, name: str) -> QueueBytes:
    chance = random.Random(name)
    method, count = {
        "plain": (Compression.OFF, 6),
        "wrapped": (Compression.OFF, 45),
        "gzip": (Compression.GZIP, 37),
        "bzip2": (Compression.BZIP2, 5),
        "stored": (Compression.NONE, 30),
    }[name]
    with writer_of(path, slots=9, size=900, compress=method) as writer:
        for number in range(count):
            text = b"%d beams of the radar; " % number * 9
            noise = chance.randbytes(chance.randrange(80))
            payload = text[: chance.randrange(150)] if chance.random() < 0.5 else noise
            writer.write(payload, type=chance.randint(-1, 3), subtype=number)
    return QueueBytes.load(path)


NAMES = ["plain", "wrapped", "gzip", "bzip2", "stored"]


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no writer to wait for."""
    monkeypatch.setattr(slots_module, "PATIENCE", 0.0)
    monkeypatch.setattr(reader_module, "PATIENCE", 0.0)


class Cases:
    """Damaged queues, one after the other, each within its time, all within their memory."""

    def __init__(
        self, path: str, count: int, harm: Callable[[QueueBytes, random.Random], QueueBytes]
    ) -> None:
        self._path = path
        self._count = count
        self._harm = harm

    def __iter__(self) -> Iterator[tuple[str, QueueBytes, QueueBytes]]:
        originals = {name: make(f"{self._path}-{name}", name) for name in NAMES}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(self._count):
            chance = random.Random(number)
            name = NAMES[number % len(NAMES)]
            queue = self._harm(originals[name], chance)
            queue.store(self._path)
            began = time.monotonic()
            yield f"case {number}, {name}", originals[name], queue
            assert time.monotonic() - began < LONGEST, f"case {number}, {name}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < LARGEST


def drain(path: str, **options: Any) -> tuple[dict[int, bytes], int, PenstockError | None]:
    """Read until there is nothing more: what came, how many were lost, what was raised."""
    found: dict[int, bytes] = {}
    with reader_of(path, **options) as reader:
        start = reader.statistics().next_seq
        raised: PenstockError | None = None
        try:
            while messages := reader.read_many(1000):
                found |= {m.seq: m.payload for m in messages}
        except PenstockError as error:
            raised = error
        books = reader.statistics()
        assert books.messages == len(found)
        assert start is not None
        assert books.next_seq is not None
        assert books.messages + books.lost == books.next_seq - start
    return found, books.lost, raised


def raw_payload_touched(before: QueueBytes, after: QueueBytes) -> set[int]:
    """Return the slots whose message may read differently: LROSE has no sum over payloads.

    Bytes of a payload that is not compressed, or a slot that was changed and still adds up.
    """
    touched = set()
    for index in before.live():
        slot = before.slot(index)
        frame = slice(slot.offset + 8, slot.offset + slot.stored_len - 4)
        coded = slot.compress and before.buf[frame][:4] in (b"\xf7" * 4, b"\xf3" * 4)
        if not coded and before.buf[frame] != after.buf[frame]:
            touched.add(index)
        if len(after.stat) >= 96 + 40 * index and before.slot(index) != after.slot(index):
            touched.add(index)
    return touched


# --- the tests ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", FULL)
def test_a_damaged_queue_gives_the_right_messages_or_a_typed_error(
    queue_path: str, count: int
) -> None:
    opened = errors = 0
    for case, original, queue in Cases(queue_path, count, damaged):
        expected = look(queue)
        if expected is None:
            with pytest.raises(DamagedQueue):
                drain(queue_path)
            continue
        opened += 1
        found, lost, raised = drain(queue_path)
        whole: dict[int, bytes] = {}
        for seq, payload in expected.payloads.items():
            if payload is None:
                break
            whole[seq] = payload
        assert found == whole, case
        assert lost == 0, case
        assert (raised is not None) == (None in expected.payloads.values()), case
        if raised is not None:
            errors += 1
            assert isinstance(raised, DamagedQueue)
            assert raised.hint
        before = look(original)
        assert before is not None
        if queue.status[:10] == original.status[:10]:
            may_differ = raw_payload_touched(original, queue)
            nslots, young = queue.status.nslots, queue.status.youngest_slot
            for seq, payload in whole.items():
                if (young - (queue.status.youngest_id - seq)) % nslots not in may_differ:
                    assert payload == before.payloads[seq], case
    assert opened > count // 4
    assert errors > count // 20


@pytest.mark.parametrize("count", FULL)
def test_a_reader_that_skips_gets_every_message_that_can_be_read(
    queue_path: str, count: int
) -> None:
    for case, _, queue in Cases(queue_path, count // 2, damaged):
        expected = look(queue)
        if expected is None:
            continue
        found, lost, raised = drain(queue_path, damaged="skip")
        assert raised is None, case
        assert found == {s: p for s, p in expected.payloads.items() if p is not None}, case
        assert lost == len(expected.payloads) - len(found), case


@pytest.mark.parametrize("count", FULL)
def test_a_queue_that_lies_with_a_right_checksum_gives_no_other_error(
    queue_path: str, count: int
) -> None:
    for case, _, queue in Cases(queue_path, count // 2, lying):
        expected = look(queue)
        try:
            found, lost, raised = drain(queue_path, damaged="skip")
        except DamagedQueue:
            assert expected is None, case
            continue
        assert expected is not None, case
        assert raised is None, case
        assert found == {s: p for s, p in expected.payloads.items() if p is not None}, case
        assert lost == len(expected.payloads) - len(found), case


@pytest.mark.parametrize("count", FULL)
def test_a_writer_makes_a_damaged_queue_no_worse(queue_path: str, count: int) -> None:
    refused = written = 0
    for case, original, queue in Cases(queue_path, count, damaged):
        before = look(queue)
        chance = random.Random(case)
        new: dict[int, bytes] = {}
        try:
            writer = writer_of(queue_path, create="never")
        except DamagedQueue:
            assert QueueBytes.load(queue_path) == queue, case
            refused += 1
            continue
        assert before is not None, case
        with writer:
            for number in range(chance.randrange(1, 14)):
                payload = b"new message %d" % number * chance.randrange(1, 20)
                try:
                    new[writer.write(payload)] = payload
                except DamagedQueue:
                    refused += 1
                    break
            books = writer.statistics()
            assert books.messages == len(new)
        written += len(new)
        lied = queue.status[1:10] != original.status[1:10]
        if lied:  # without a checksum (0 is none): nobody can tell
            continue
        assert not harmed(QueueBytes.load(queue_path), before, new), case
    assert refused > count // 4
    assert written > count


def harmed(queue: QueueBytes, before: Found, new: dict[int, bytes]) -> list[int]:
    """Return the messages that are still in range and read differently from before."""
    after = look(queue)
    assert after is not None
    kept = {seq: p for seq, p in {**before.payloads, **new}.items() if p is not None}
    return [seq for seq, p in kept.items() if seq >= after.first and after.payloads[seq] != p]


@pytest.mark.parametrize("count", FULL)
def test_a_queue_damaged_under_a_running_reader_and_writer_gives_typed_errors_only(
    queue_path: str, count: int
) -> None:
    for case, original, queue in Cases(queue_path, count // 4, damaged):
        original.store(queue_path)
        with (
            reader_of(queue_path, damaged="skip") as skipping,
            reader_of(queue_path) as failing,
            writer_of(queue_path, create="never") as writer,
        ):
            failing.read(timeout=0)
            queue.store(queue_path)
            for number in range(4):
                with contextlib.suppress(PenstockError):
                    writer.write(b"new message %d" % number)
                for reader in (skipping, failing):
                    with contextlib.suppress(PenstockError):
                        reader.read_many(5)
            books = skipping.statistics()
            assert books.lost == sum(loss.count for loss in books.losses), case
