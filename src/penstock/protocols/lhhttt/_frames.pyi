from collections.abc import Sequence
from typing import TypeVar

from typing_extensions import Buffer

_Address = TypeVar("_Address")

# What the whole frames hold that data begins with, and where they end: at the end of the data, at
# one that is not whole or longer than the limit, or at what is no frame.
def split(data: Buffer, limit: int, /) -> tuple[list[bytes], int]: ...

# Of datagrams with their addresses: what those hold that are exactly one frame, with the same
# addresses, and how many are not.
def decode_all(
    datagrams: Sequence[tuple[bytes, _Address]], /
) -> tuple[list[tuple[bytes, _Address]], int]: ...

# The frames of some bytes, one behind the other.
def join(payloads: Sequence[bytes], /) -> bytes: ...

# Of columns: where each payload begins in the bytes of all, as 32-bit numbers, with the end of the
# last one behind them; and these bytes. The frames one behind the other, or each of them.
def join_columns(offsets: Buffer, data: Buffer, /) -> bytes: ...
def frames(offsets: Buffer, data: Buffer, /) -> list[bytes]: ...
