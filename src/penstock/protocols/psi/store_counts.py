"""How far had a store come when it was last looked at, so that it need not be read again?

Beside the queue is a small file of counts, written anew now and then and when the store is closed.
Whoever opens the store to write goes on from there: only what was appended since is read. The file
is a help, no truth: where it is missing or does not fit, everything is read.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.whole_files import write_whole
from penstock.protocols.psi.store_books import COUNTS
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.interfaces import Bounds

__all__ = ["KEEP_EVERY", "KeptCounts", "keep_counts", "load_counts"]

#: Messages after which the counts are kept again: what has to be read after a kill, at most.
KEEP_EVERY: Final = 65_536

_NAME: Final = "counts.json"
_LARGEST: Final = 16 << 20


class KeptCounts(NamedTuple):
    """The counts of all streams, up to a message."""

    #: The life of the queue, and the number of the first message that is not counted.
    epoch: int
    next: int
    #: The latest time that the queue noted.
    last_ns: int
    #: See `StreamBooks.counts`.
    streams: dict[int, tuple[int, ...]]


def keep_counts(folder: Path, counts: KeptCounts) -> None:
    """Write the counts; under its name there is never half a file.

    :raises StorageError: the operating system refuses.
    """
    body = json.dumps([*counts[:3], {str(id): each for id, each in counts.streams.items()}])
    path = folder / _NAME
    with storage_errors("writing", str(path)):
        text = f"{zlib.crc32(body.encode()):08x} {body}\n"
        write_whole(path, text.encode("ascii"), sync=False)


def load_counts(folder: Path, bounds: Bounds) -> KeptCounts | None:
    """Return what was kept, if it is of this queue and all that it counts is there."""
    path = folder / _NAME
    try:
        if path.stat().st_size > _LARGEST:
            return None
        crc, _, body = path.read_text(encoding="ascii").rstrip("\n").partition(" ")
        if int(crc, 16) != zlib.crc32(body.encode()):
            return None
        counts = _parsed(json.loads(body))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    # A queue that ends earlier lost its last messages with the power.
    is_whole = bounds.successor(counts.epoch, counts.next) == counts.next
    fits = is_whole and bounds.oldest <= counts.next <= bounds.end
    return counts if fits else None


def _parsed(found: Any) -> KeptCounts:
    epoch, seq, last_ns, streams = found
    kept = {int(id): tuple(map(int, each)) for id, each in streams.items()}
    if any(len(each) != COUNTS for each in kept.values()):
        raise ValueError("another number of counts")
    return KeptCounts(int(epoch), int(seq), int(last_ns), kept)
