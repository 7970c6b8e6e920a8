"""The processes of the torture test: one writes as fast as it can, one checks every byte.

`python -m support.wide_torture` serves them (`support.lives`). A payload's crc32 is in the
message's `type`, its number in `time_ns`; where many payloads share a header (`subtype` 2) the
crc32 comes before the payload.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.core.batch import batch_from_messages
from penstock.core.errors import Overrun
from penstock.core.message import Message
from support.lives import Reporter, serve
from support.peer import LAST_TYPE
from support.wide_opening import wide_reader, wide_writer

if TYPE_CHECKING:
    from penstock.core.batch import Batch
    from penstock.queue.wide.reader import WideReader
    from penstock.queue.wide.writer import WideWriter

__all__ = ["MODES"]

LARGEST = 8 << 20
_SIZES = (0, 1, 63, 64, 65, 500, 4095, 4096, 4097, 20_000, 65_536, 300_000, 1 << 20, LARGEST)
_OWN, _SHARED, _LAST = 1, 2, 3
#: The ways to read; records of kind `m` count the messages that came by each.
MODES = ("read", "read_many", "read_batch", "view", "view_batch")


def _checksum(data: bytes | memoryview) -> int:
    return zlib.crc32(data) - (1 << 31)


class _Pool:
    """Payloads made once, so that nothing but the queue limits the writer."""

    def __init__(self, chance: random.Random) -> None:
        noise = chance.randbytes(2 * LARGEST)
        payloads = []
        for size in _SIZES:
            for _ in range(3 if size > 100_000 else 12):
                at = chance.randrange(len(noise) - size + 1)
                payloads.append(noise[at : at + max(0, size - chance.randrange(2))])
        payloads.append(noise[:LARGEST])
        self.payloads = [(payload, _checksum(payload)) for payload in payloads]
        small = [payload for payload in payloads if len(payload) < 100_000]
        self.shared = [zlib.crc32(p).to_bytes(4, "little") + p for p in small]


def write(url: str, report: str, *, seed: int, seconds: float, least: int) -> None:
    """Write for so long, in every way, and so many; then one of LAST_TYPE; report the count."""
    chance = random.Random(seed)
    pool = _Pool(chance)
    with wide_writer(url) as writer:
        Reporter(report).add(b"r", 0, 0, 0)
        end = time.monotonic() + seconds
        count = 0
        while time.monotonic() < end or count < least:
            count = _write_some(writer, chance, pool, count)
        assert writer.write(b"", LAST_TYPE, subtype=_LAST) == count
        Reporter(report).add(b"e", 0, count + 1, writer.statistics().messages)


def _write_some(writer: WideWriter, chance: random.Random, pool: _Pool, count: int) -> int:
    match chance.randrange(4):
        case 0:
            for payload, crc in chance.choices(pool.payloads, k=20):
                assert writer.write(payload, crc, _OWN, count) == count
                count += 1
        case 1:
            payloads = chance.choices(pool.shared, k=chance.randint(1, 200))
            assert writer.write_many(payloads, subtype=_SHARED) == count + len(payloads) - 1
            count += len(payloads)
        case 2:
            chosen = chance.choices(pool.payloads, k=chance.randint(1, 8))
            rows = [
                Message(0, count + i, 0, crc, _OWN, None, None, payload)
                for i, (payload, crc) in enumerate(chosen)
            ]
            assert writer.write_batch(batch_from_messages(rows)) == count + len(rows) - 1
            count += len(rows)
        case _:
            for payload, crc in chance.choices(pool.payloads, k=3):
                with writer.reserve(len(payload), crc, _OWN, count) as place:
                    place.buffer[:] = payload
                count += 1
    return count


class _Checker:
    """Looks at every message, and keeps count."""

    def __init__(self) -> None:
        self.delivered: Counter[str] = Counter()
        self.overruns = 0
        self.next = 0
        self.ended = False

    def is_whole(self, message: Message) -> bool:
        match message.subtype:
            case 1:
                whole = _checksum(message.payload) == message.type
                return whole and message.time_ns == message.seq
            case 2:
                data = memoryview(message.payload)
                return zlib.crc32(data[4:]) == int.from_bytes(data[:4], "little")
        return message.type == LAST_TYPE and message.subtype == _LAST

    def count(self, mode: str, messages: list[Message]) -> None:
        for message in messages:
            assert message.seq >= self.next, (message.seq, self.next)
            self.next = message.seq + 1
            self.ended = self.ended or message.type == LAST_TYPE
        self.delivered[mode] += len(messages)

    def take(self, mode: str, messages: list[Message]) -> None:
        for message in messages:
            assert self.is_whole(message), f"{mode}: message {message.seq} is not whole"
        self.count(mode, messages)


def _rows(batch: Batch) -> list[Message]:
    # Not to_pylist: of views it would copy before anybody looks.
    columns: list[list[Any]] = [batch.column(name).to_pylist() for name in batch.schema.names[:7]]
    payloads = [memoryview(value.as_buffer()) for value in batch.column("payload")]
    return [Message(*row) for row in zip(*columns, payloads, strict=True)]


def _read_in_place(reader: WideReader, checker: _Checker, mode: str) -> None:
    try:
        if mode == "view":
            with reader.view(60) as message:
                assert message is not None
                found = [message]
                whole = checker.is_whole(message)
        else:
            with reader.view_batch(20, 60) as batch:
                found = _rows(batch)
                whole = all(map(checker.is_whole, found))
                found = [m._replace(payload=b"") for m in found]
    except Overrun:
        checker.overruns += 1
    else:
        assert whole, f"{mode}: message {found[0].seq} is not whole, and nobody said so"
        checker.count(mode, found)


def read(url: str, report: str, *, seed: int, behind: int = 0) -> None:
    """Read in every way until a message of LAST_TYPE; report what came.

    It begins when that many messages are there, or no more come for a while.
    """
    chance = random.Random(seed)
    checker = _Checker()
    with wide_reader(url) as reader:
        Reporter(report).add(b"r", 0, 0, 0)
        until = time.monotonic() + 30
        while (reader.newest_seq() or 0) < behind and time.monotonic() < until:
            time.sleep(0.001)
        while not checker.ended:
            mode = chance.choice(MODES)
            match mode:
                case "read":
                    message = reader.read(60)
                    checker.take(mode, [] if message is None else [message])
                case "read_many":
                    checker.take(mode, reader.read_many(chance.randint(1, 100), 60))
                case "read_batch":
                    checker.take(mode, _rows(reader.read_batch(chance.randint(1, 50), 60)))
                case _:
                    _read_in_place(reader, checker, mode)
        books = reader.statistics()
    assert books.messages == sum(checker.delivered.values())
    reporter = Reporter(report)
    reporter.add_all((b"m", i, checker.delivered[mode], 0) for i, mode in enumerate(MODES))
    reporter.add(b"o", 0, checker.overruns, 0)
    reporter.add(b"e", 0, books.messages, books.lost)


if __name__ == "__main__":
    serve({"write": write, "read": read}, ["penstock.queue.endpoint"])
