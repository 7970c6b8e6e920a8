import builtins
from collections.abc import Sequence
from typing import Self

from typing_extensions import Buffer

from penstock.protocols.datagrams import Address

SO_RXQ_OVFL: int

# A socket's datagrams by batches. For one thread at a time, but for `assist`.
class Batches:
    # Datagrams that the kernel dropped because the socket's room was full.
    # It is told with the next one, or by this.
    dropped: int
    def ask_dropped(self, descriptor: int, /) -> None: ...

    # Datagrams that came from the kernel, whole and cut; bytes of whole ones, or of what went.
    whole: int
    cut: int
    bytes: int

    # Up to `limit` (at most 1024) datagrams of up to `size` bytes pass at once.
    def __new__(cls, limit: int, size: int, /) -> Self: ...

    # Whole ones, and (what there was room for, address, true size) of those that were cut.
    # Waits so many seconds for the first; None waits for ever.
    def receive(
        self, descriptor: int, limit: int, timeout: float | None, /
    ) -> tuple[list[tuple[builtins.bytes, Address]], list[tuple[builtins.bytes, Address, int]]]: ...

    # Takes up to `limit` datagrams of those that have come, in their order; the others wait here,
    # up to about so many bytes, and not in the kernel. Meanwhile another thread may assist: it
    # looks every `between` seconds (less than 1) that the kernel's room does not fill.
    waiting: int
    def take(
        self, descriptor: int, limit: int, most_bytes: int, seconds: float, /
    ) -> tuple[list[tuple[builtins.bytes, Address]], list[tuple[builtins.bytes, Address, int]]]: ...
    def assist(
        self, descriptor: int, most_bytes: int, between: float, seconds: float, /
    ) -> None: ...

    # How many of them the kernel took, in their order, within so many seconds.
    def send(
        self,
        descriptor: int,
        datagrams: Sequence[tuple[Buffer, Address]],
        timeout: float | None,
        /,
    ) -> int: ...

    # The same of rows of two columns: heads of `head` bytes each, and what follows each of them, by
    # 32-bit offsets into `data`. All go to one address, or to that of a connected socket.
    def send_columns(
        self,
        descriptor: int,
        heads: Buffer,
        head: int,
        offsets: Buffer,
        data: Buffer,
        count: int,
        address: Address,
        timeout: float | None,
        /,
    ) -> int: ...
