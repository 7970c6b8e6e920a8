from collections.abc import Sequence
from typing import Self

from typing_extensions import Buffer

from penstock.protocols.datagrams import Address

SO_RXQ_OVFL: int

# A socket's datagrams by batches. For one thread at a time; the socket stays the caller's.
class Batches:
    # Datagrams that the kernel dropped because the socket's room was full.
    dropped: int

    # Up to `limit` (at most 1024) datagrams of up to `size` bytes pass at once.
    def __new__(cls, limit: int, size: int, /) -> Self: ...

    # Whole ones, and (what there was room for, address, true size) of those that were cut.
    # Waits so many seconds for the first; None waits for ever.
    def receive(
        self, descriptor: int, limit: int, timeout: float | None, /
    ) -> tuple[list[tuple[bytes, Address]], list[tuple[bytes, Address, int]]]: ...

    # How many of them the kernel took, in their order, within so many seconds.
    def send(
        self,
        descriptor: int,
        datagrams: Sequence[tuple[Buffer, Address]],
        timeout: float | None,
        /,
    ) -> int: ...
