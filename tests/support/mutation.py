"""How are bytes changed for a parser to trip over, at random but the same in every run?"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest

__all__ = [
    "Mutate",
    "Way",
    "cut",
    "double",
    "insert",
    "mutator",
    "set_byte",
    "set_piece",
    "set_word",
    "sizes",
    "truncate",
]

#: Changes some bytes at a place, which may be the end.
Way: TypeAlias = Callable[[bytearray, int, random.Random], None]
Mutate: TypeAlias = Callable[[bytes, random.Random], bytes]


def sizes(quick: int, full: int) -> list[object]:
    """Return how many changed inputs there are, of a quick test and of a full one."""
    return [quick, pytest.param(full, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]


def mutator(times: Sequence[int], *ways: Way) -> Mutate:
    """Return what changes a seed one of these numbers of times, each in one of the ways."""

    def mutated(seed: bytes, chance: random.Random) -> bytes:
        data = bytearray(seed)
        for _ in range(chance.choice(times)):
            at = chance.randrange(len(data) + 1)
            chance.choice(ways)(data, at, chance)
        return bytes(data)

    return mutated


def set_byte(data: bytearray, at: int, chance: random.Random) -> None:
    """Set a byte to any value."""
    data[at : at + 1] = chance.randbytes(1)


def truncate(data: bytearray, at: int, _: random.Random) -> None:
    """Leave out the rest."""
    del data[at:]


def cut(most: int) -> Way:
    """Leave out up to so many bytes."""

    def way(data: bytearray, at: int, chance: random.Random) -> None:
        del data[at : at + chance.randrange(1, most + 1)]

    return way


def double(most: int) -> Way:
    """Repeat up to so many bytes."""

    def way(data: bytearray, at: int, chance: random.Random) -> None:
        data[at:at] = data[at : at + chance.randrange(1, most + 1)]

    return way


def set_word(words: Sequence[bytes]) -> Way:
    """Set an aligned word of four bytes to one of these."""

    def way(data: bytearray, at: int, chance: random.Random) -> None:
        at = at // 4 * 4
        data[at : at + 4] = chance.choice(words)

    return way


def set_piece(pieces: Sequence[bytes]) -> Way:
    """Put one of these in the place of a byte."""

    def way(data: bytearray, at: int, chance: random.Random) -> None:
        data[at : at + 1] = chance.choice(pieces)

    return way


def insert(pieces: Sequence[bytes]) -> Way:
    """Put one of these between two bytes."""

    def way(data: bytearray, at: int, chance: random.Random) -> None:
        data[at:at] = chance.choice(pieces)

    return way
