from collections.abc import Sequence

from typing_extensions import Buffer

# What the whole frames hold that data begins with, and where they end: at the end of the data, at
# one that is not whole or longer than the limit, or at what is no frame.
def split(data: Buffer, limit: int, /) -> tuple[list[bytes], int]: ...

# The frames of some bytes, one behind the other.
def join(payloads: Sequence[bytes], /) -> bytes: ...
