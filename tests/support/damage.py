"""How are the bytes of a queue damaged, at random but the same in every run?"""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

from support.queue_files import QueueBytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["damaged", "lying"]

_TELLING = (0, 1, -1, 2, 3, 4, 12, 2**31 - 1, -(2**31), 88008801, 88008802, 10**9, 10**9 - 1)


def damaged(queue: QueueBytes, chance: random.Random) -> QueueBytes:
    """Damage one or two places of `.stat` or `.buf`."""
    for _ in range(chance.choice((1, 1, 1, 2))):
        is_stat = chance.random() < 0.6
        part = bytearray(queue.stat if is_stat else queue.buf)
        if part:
            chance.choice(_WAYS)(part, chance)
        queue = queue._replace(**{"stat" if is_stat else "buf": bytes(part)})
    return queue


def lying(queue: QueueBytes, chance: random.Random) -> QueueBytes:
    """Change a field of the status or of a slot, and make its checksum right again."""
    value = chance.choice((*_TELLING, chance.randint(-(2**31), 2**31 - 1), chance.randint(0, 600)))
    index = chance.choice([-1, *queue.live()])
    if index < 0:
        return queue.with_status(**{chance.choice(queue.status._fields[:13]): value})
    return queue.with_slot(index, **{chance.choice(queue.slot(index)._fields[:9]): value})


def _flip(part: bytearray, chance: random.Random) -> None:
    part[chance.randrange(len(part))] ^= 1 << chance.randrange(8)


def _set_byte(part: bytearray, chance: random.Random) -> None:
    part[chance.randrange(len(part))] = chance.randrange(256)


def _word_at(part: bytearray, chance: random.Random) -> int:
    return chance.randrange(max(1, len(part) // 4)) * 4


def _set_word(part: bytearray, chance: random.Random) -> None:
    value = chance.choice((*_TELLING, chance.randint(-(2**31), 2**31 - 1)))
    at = _word_at(part, chance)
    part[at : at + 4] = struct.pack(">i", value)


def _step_word(part: bytearray, chance: random.Random) -> None:
    at = _word_at(part, chance)
    value = int.from_bytes(part[at : at + 4]) + chance.choice((-8, -4, -1, 1, 4, 8))
    part[at : at + 4] = (value % 2**32).to_bytes(4)


def _swap_words(part: bytearray, chance: random.Random) -> None:
    a = _word_at(part, chance)
    b = (a + 4 * chance.randrange(1, 12)) % max(4, len(part) - 3) // 4 * 4
    part[a : a + 4], part[b : b + 4] = part[b : b + 4], part[a : a + 4]


def _cut(part: bytearray, chance: random.Random) -> None:
    del part[chance.randrange(len(part)) :]


def _lengthen(part: bytearray, chance: random.Random) -> None:
    part += chance.choice((bytes(40), chance.randbytes(chance.randrange(1, 200))))


def _copy_block(part: bytearray, chance: random.Random) -> None:
    size = chance.choice((4, 8, 40, 64))
    source, target = (chance.randrange(max(1, len(part) - size)) for _ in range(2))
    part[target : target + size] = part[source : source + size]


def _zero_block(part: bytearray, chance: random.Random) -> None:
    at, size = chance.randrange(len(part)), chance.choice((4, 16, 40, 200))
    part[at : at + size] = bytes(len(part[at : at + size]))


_WAYS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip,
    _flip,
    _set_byte,
    _set_word,
    _set_word,
    _step_word,
    _swap_words,
    _cut,
    _lengthen,
    _copy_block,
    _zero_block,
)
