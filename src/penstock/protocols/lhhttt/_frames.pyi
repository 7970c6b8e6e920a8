from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

_Address = TypeVar("_Address")

# What the whole frames hold that data begins with, and where they end: at the end of the data, at
# one that is not whole or longer than the limit, or at what is no frame.
def split(data: Buffer, limit: int, /) -> tuple[list[bytes], int]: ...

# Of datagrams with their addresses: the commands of those that are exactly one frame, and how many
# are not. Neighbours with one verb are a run: the verb, what follows the colon of each, and the
# address of each. And the same of commands that are no frames any more.
def decode_all(
    datagrams: Sequence[tuple[bytes, _Address]], /
) -> tuple[list[tuple[bytes, list[bytes], list[_Address]]], int]: ...
def group(
    commands: Sequence[tuple[bytes, _Address]], /
) -> list[tuple[bytes, list[bytes], list[_Address]]]: ...

# The same without an object for each: where each begins and ends, as pairs of 64-bit numbers, and
# the bytes of all. And what is at such places.
def locate(data: Buffer, limit: int, /) -> tuple[bytes, int, int]: ...
def cut(data: Buffer, places: NDArray[np.int64], /) -> list[bytes]: ...

# The frames of some bytes, one behind the other; with a head, one frame that has it before them.
def join(payloads: Sequence[bytes], head: Buffer = ..., /) -> bytes: ...

# How many payloads from `start` on, at most `most`, have up to `room` bytes, with `more` for each
# but the last.
def fitting(payloads: Sequence[bytes], start: int, most: int, room: int, more: int, /) -> int: ...

# Of columns: where each payload begins in the bytes of all, as 32-bit numbers, with the end of the
# last one behind them; and these bytes. One frame of a head and the frames of all rows of some; or
# the frame of each row.
def join_columns(head: Buffer, columns: Sequence[tuple[Buffer, Buffer]], /) -> bytes: ...
def frames(offsets: Buffer, data: Buffer, /) -> list[bytes]: ...
