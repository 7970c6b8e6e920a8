"""Are all messages of a batch alike, but for their ids and payloads?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.dispatch.headers import ID_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["LEAST", "expiries_of", "is_uniform", "keys_of"]

#: For fewer messages than this it is not worth looking.
LEAST: Final = 16

#: Where in the attributes the id's parts are, and what they have to be: tags, version, variant.
_VERSION, _MIDDLE, _VARIANT = 4, 11, 19
_ID_BEGINS = 3


def is_uniform(messages: Sequence[Any]) -> bool:
    """Tell whether all are bytes, and as many."""
    return set(map(type, messages)) == {bytes} and len(set(map(len, messages))) == 1


def keys_of(
    messages: Sequence[bytes], begin: int, head: bytes, rest: bytes, source: bytes
) -> list[bytes] | None:
    """Return the id of each message and the source, as they are kept in the window of duplicates.

    :param messages: which are uniform, and of which one is `head`, an id, `rest` and a payload
    :param begin: where the attributes begin
    :returns: None when another one is not, or an id is not of version 7.
    """
    every = np.frombuffer(b"".join(messages), np.uint8).reshape(len(messages), -1)
    end = begin + ID_SIZE
    is_alike = (
        (every[:, : len(head)] == np.frombuffer(head, np.uint8)).all()
        and (every[:, end : end + len(rest)] == np.frombuffer(rest, np.uint8)).all()
        and (every[:, begin + _VERSION] >> 4 == 7).all()  # noqa: PLR2004
        and (every[:, begin + _MIDDLE] == 0x11).all()  # noqa: PLR2004
        and (every[:, begin + _VARIANT] >> 6 == 2).all()  # noqa: PLR2004
    )
    if not is_alike:
        return None
    size = ID_SIZE - _ID_BEGINS
    keys = np.empty((len(messages), size + len(source)), np.uint8)
    keys[:, :size] = every[:, begin + _ID_BEGINS : end]
    keys[:, size:] = np.frombuffer(source, np.uint8)
    found: list[bytes] = keys.view(f"V{keys.shape[1]}").ravel().tolist()
    return found


def expiries_of(keys: Sequence[bytes], ttl: int, now_ms: int, skew_ms: int, ends: int) -> list[int]:
    """Return when messages with these ids expire, which have the same time to live.

    :param skew_ms: an id that is so far in the future counts as one of now
    :param ends: they do not live longer than this; 0: they may
    """
    every = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    # 48 bits, little-endian, behind the version and what is random.
    made = np.zeros((len(keys), 8), np.uint8)
    made[:, :6] = every[:, 2:8]
    created = made.view("<u8").ravel().astype(np.int64)
    created[created > now_ms + skew_ms] = now_ms
    times = created + (ttl + 1)
    if ends:
        times = np.minimum(times, ends)
    found: list[int] = times.tolist()
    return found
