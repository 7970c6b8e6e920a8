"""Where does a relay go on that was ended, however that was?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.capabilities import Replayable
from penstock.core.position import Position
from penstock.relay.arrivals import Tail

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader
    from penstock.relay.journal import Journal, Note

__all__ = ["resume"]

log = logging.getLogger(__name__)


def resume(
    journal: Journal,
    reader: Reader,
    target: Bounds | None,
    arrived: Callable[[Tail, Batch], int],
) -> int:
    """Put a reader where the notes say; return how many messages may come a second time.

    `target` is what the target holds now, `arrived` tells how many of a batch are behind some
    place in it.
    """
    if journal.note is None or not isinstance(reader, Replayable):
        return 0
    source = reader.bounds()
    note = _translated(journal.note, source)
    if note is None or (source.epoch == 0 and note.next > source.end):
        log.warning("%s was created anew since it was copied", reader.url)
        reader.seek(Position.START)
        return 0
    place, in_doubt = _place(journal, note, reader, target, arrived)
    # Beyond the end: a source that lost its last messages with the power gives their numbers anew.
    reader.seek(min(place, source.end))
    return in_doubt


def _translated(note: Note, source: Bounds) -> Note | None:
    """Return a note in the numbers of the source as it is now; None: it was created anew.

    After a power failure the source may end before what was copied: those numbers are of other
    messages now.
    """
    cut = source.successor(note.source_epoch, note.next)
    if cut is None:
        return None
    runs = ((first, min(count, cut - first)) for first, count in note.runs)
    kept = tuple((first, count) for first, count in runs if count > 0)
    return note._replace(source_epoch=source.epoch, next=cut, runs=kept)


def _place(
    journal: Journal,
    note: Note,
    reader: Reader,
    target: Bounds | None,
    arrived: Callable[[Tail, Batch], int],
) -> tuple[int, int]:
    """Return the first number that is not in the target, and how many before it may be missing."""
    if note.target is None or target is None:
        return (note.runs[0][0], note.messages) if note.runs else (note.next, 0)
    epoch, start = note.target
    there = target.successor(epoch, start)
    if there is not None and min(there, target.end) < start:
        return _before_power_failed(journal, reader.bounds(), target)
    if not note.runs:
        return note.next, 0
    if there is None:  # it was created anew
        return note.runs[0][0], 0
    batch = _read_again(reader, note)
    if batch.num_rows == note.messages:
        count = arrived(Tail(target.epoch, start), batch)
    else:  # the source has not kept them: they cannot be compared
        count = min(target.end - start, note.messages)
    return _number(note, count), 0


def _before_power_failed(journal: Journal, source: Bounds, target: Bounds) -> tuple[int, int]:
    """Go back to what was on the disk: the target has lost its last messages."""
    log.warning("the target ends earlier than it did: its last messages were lost with the power")
    synced = None if journal.synced is None else _translated(journal.synced, source)
    if synced is None or synced.target is None:
        return 0, 0
    epoch, start = synced.target
    there = target.successor(epoch, start)
    if there is None or min(there, target.end) < start:
        return 0, 0
    return synced.next, target.end - start


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
