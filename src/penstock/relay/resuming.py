"""Where does a relay go on that was ended, however that was?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.errors import Unsupported
from penstock.core.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Reader
    from penstock.relay.arrivals import Tail
    from penstock.relay.journal import Journal, Note

__all__ = ["resume"]

log = logging.getLogger(__name__)


def resume(
    journal: Journal,
    reader: Reader,
    tail: Tail | None,
    arrived: Callable[[Tail, Batch], int],
) -> int:
    """Put a reader where the notes say; return how many messages may come a second time.

    `tail` is where the target ends now, `arrived` tells how many of a batch are behind some
    place in it.
    """
    note = journal.note
    if note is None:
        return 0
    try:
        bounds = reader.bounds()
    except Unsupported:
        return 0
    if bounds.epoch != note.source_epoch or (bounds.epoch == 0 and note.next > bounds.end):
        log.warning("%s was created anew since it was copied", reader.url)
        reader.seek(Position.START)
        return 0
    place, in_doubt = _place(journal, note, reader, tail, arrived)
    # Beyond the end: a source that lost its last messages with the power gives their numbers anew.
    reader.seek(min(place, bounds.end))
    return in_doubt


def _place(
    journal: Journal,
    note: Note,
    reader: Reader,
    tail: Tail | None,
    arrived: Callable[[Tail, Batch], int],
) -> tuple[int, int]:
    """Return the first number that is not in the target, and how many before it may be missing."""
    if note.target is None or tail is None:
        return (note.runs[0][0], note.messages) if note.runs else (note.next, 0)
    epoch, start = note.target
    if epoch == tail.epoch and tail.seq < start:
        return _before_power_failed(journal, note, tail)
    if not note.runs:
        return note.next, 0
    if epoch != tail.epoch:
        return note.runs[0][0], 0
    batch = _read_again(reader, note)
    if batch.num_rows == note.messages:
        count = arrived(tail._replace(seq=start), batch)
    else:  # the source has not kept them: they cannot be compared
        count = min(tail.seq - start, note.messages)
    return _number(note, count), 0


def _before_power_failed(journal: Journal, note: Note, tail: Tail) -> tuple[int, int]:
    """Go back to what was on the disk: the target has lost its last messages."""
    synced = journal.synced
    log.warning("the target ends earlier than it did: its last messages were lost with the power")
    if (
        synced is None
        or synced.target is None
        or synced.source_epoch != note.source_epoch
        or synced.target[0] != tail.epoch
        or synced.target[1] > tail.seq
    ):
        return 0, 0
    return synced.next, tail.seq - synced.target[1]


def _number(note: Note, index: int) -> int:
    """Return the number of a message of the batch, by its place in it; behind it, the next one."""
    for first, length in note.runs:
        if index < length:
            return first + index
        index -= length
    return note.next


def _read_again(reader: Reader, note: Note) -> Batch:
    """Return the messages of the batch, as far as the source has them."""
    wanted = {seq for first, length in note.runs for seq in range(first, first + length)}
    last = max(wanted)
    found = []
    reader.seek(note.runs[0][0])
    while batch := reader.read_batch(len(wanted), timeout=0):
        found += [message for message in messages_from_batch(batch) if message.seq in wanted]
        if batch.column("seq")[-1].as_py() >= last:
            break
    return batch_from_messages(found)
