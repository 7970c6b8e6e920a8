"""How are the bytes of a wide queue damaged, at random but the same in every run?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from penstock import Message, Position, StreamId, open_reader, open_writer
from support.wide_oracle import Listing, Stored, list_queue

__all__ = [
    "BUFFER",
    "END",
    "KINDS",
    "PAGE",
    "SLOT_TABLE",
    "Original",
    "damaged",
    "is_checked",
    "is_read_alike",
    "is_untouched",
    "make",
]

SLOTS, SIZE, READERS = 8, 4096, 4
PAGE = 4096
#: Where the parts of these queues begin.
TABLE, SLOT_TABLE, BUFFER, END = PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE

KINDS = {
    "empty": ("", 0),
    "plain": ("", 5),
    "wrapped": ("&stream=00112233445566778899aabbccddeeff", 45),
    "crc": ("&crc=true", 40),
    "lz4": ("&compress=lz4", 43),
    "zstd": ("&compress=zstd&crc=true", 41),
    "sparse": ("&sparse=true", 30),
    "many": ("&writers=many&crc=true", 44),
}

#: Offset and size of what the header, a reader's row and a slot hold.
HEADER_FIELDS = (
    (0, 8), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 4), (44, 4), (48, 8), (56, 8),
    (64, 8), (72, 16), (88, 8), (96, 8),
)  # fmt: skip
LIVE_FIELDS = (
    (128, 8), (128, 8), (192, 8), (192, 8), (256, 4), (260, 4), (320, 4), (324, 4), (328, 4),
    (440, 8), (384, 4), (388, 4), (392, 4), (396, 4), (400, 16),
)  # fmt: skip
ROW_FIELDS = ((0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (120, 8))
SLOT_FIELDS = (
    (0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 4), (44, 4), (48, 4), (52, 4), (56, 4), (60, 4),
)  # fmt: skip
TELLING = (
    0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 100, 4032, 4095, 4096, 4097, 8192, 1 << 31,
    (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 64,
    (1 << 64) - 4096, (1 << 64) - 1,
)  # fmt: skip


class Original(NamedTuple):
    """A queue before it was damaged."""

    data: bytes
    listing: Listing
    #: Every message that was ever in it, by number.
    history: dict[int, Message]


def make(path: str, kind: str) -> Original:
    options, count = KINDS[kind]
    chance = random.Random(kind)
    url = f"fmq:{path}?slots={SLOTS}&size={SIZE}&readers={READERS}{options}"
    history: dict[int, Message] = {}
    with open_writer(url) as writer:
        open_reader(f"fmq:{path}?hold=archive").close()
        with open_reader(f"fmq:{path}", start=Position.START) as reader:
            for number in range(count):
                text = b"%d beams of the radar; " % number * 60
                noise = chance.randbytes(chance.randrange(700))
                writer.write(
                    text[: chance.randrange(1200)] if number % 2 else noise,
                    chance.randint(-1, 2),
                    number,
                    stream=StreamId(chance.randbytes(16)) if chance.random() < 0.3 else None,
                    attributes=chance.randbytes(number % 11) if chance.random() < 0.4 else None,
                )
                message = reader.read(timeout=0)
                assert message is not None
                history[message.seq] = message
    listing = list_queue(f"{path}.fmq")
    return Original(Path(f"{path}.fmq").read_bytes(), listing, history)


def damaged(data: bytes, chance: random.Random, *, same_size: bool = False) -> bytes:
    """Damage one, two or three places; truncate or lengthen now and then."""
    part = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        base, rows, size, fields = chance.choice(
            (
                (0, 1, 448, HEADER_FIELDS),
                (0, 1, 448, LIVE_FIELDS),
                (TABLE, READERS, 128, ROW_FIELDS),
                (SLOT_TABLE, SLOTS, 64, SLOT_FIELDS),
                (SLOT_TABLE, SLOTS, 64, SLOT_FIELDS),
                (BUFFER, SIZE // 64, 64, ((0, 8), (8, 8), (24, 4))),
            )
        )
        row = base + chance.randrange(rows) * size
        offset, width = chance.choice(fields)
        at = row + offset
        match chance.randrange(8):
            case 0 | 1:
                part[row + chance.randrange(size)] ^= 1 << chance.randrange(8)
            case 2 | 3:
                value = chance.choice((*TELLING, chance.getrandbits(64), chance.getrandbits(16)))
                part[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            case 4:
                value = int.from_bytes(part[at : at + width], "little")
                value += chance.choice((-4096, -64, -8, -1, 1, 8, 64, 4096))
                part[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            case 5:
                other = base + chance.randrange(rows) * size
                part[row : row + size] = part[other : other + size]
            case 6:
                part[at : at + size] = bytes(size)
            case _ if same_size:
                part[at : at + 8] = chance.randbytes(8)
            case _:
                if chance.random() < 0.5:
                    del part[chance.choice((0, 8, 100, PAGE, at, END - 1, BUFFER)) :]
                    part += bytes(chance.choice((0, 0, 8)))
                else:
                    part += bytes(PAGE)
        part += bytes(max(0, END - len(part))) if same_size else b""
        if len(part) < END:
            break
    return bytes(part[:END]) if same_size else bytes(part)


def is_untouched(original: Original, data: bytes, message: Stored) -> bool:
    """Tell whether no byte of a message, or that says how to read it, was changed."""
    slot = SLOT_TABLE + message.seq % SLOTS * 64
    start = BUFFER + message.position % SIZE
    spans = ((slot, slot + 64), (start, start + message.block + message.length), (24, 32))
    return is_read_alike(original, data) and all(original.data[a:b] == data[a:b] for a, b in spans)


def is_read_alike(original: Original, data: bytes) -> bool:
    """Tell whether the header still says the same about flags, compression and its stream."""
    return all(original.data[a:b] == data[a:b] for a, b in ((12, 16), (44, 48), (72, 88)))


def is_checked(original: Original, data: bytes) -> bool:
    """Tell whether a checksum covers every message."""
    return bool(original.listing.header.flags & 1) and is_read_alike(original, data)
