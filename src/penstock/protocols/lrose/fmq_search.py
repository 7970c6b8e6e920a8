"""Where in a remote queue is a message: the oldest, the newest, one of a number?

A server of ours is asked for it. LROSE's seeks by the status of its last read, and takes whatever
is in the slot that was the oldest then (docs/specs/lrose.md 1.9): the result is stale, or an error,
on a connection without recent reads, and a guess beside a busy writer. So it is made to reopen the
queue and to step back from the newest message; the ids verify the result.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import ConnectionLost
from penstock.protocols.lrose.ds_client import RequestRefused
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_client import QueueLink, Target, open_to_read
from penstock.protocols.lrose.fmq_wire import Op, SeekTo
from penstock.queue.classic.layout import id_distance, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.lrose.fmq_messages import Messages

__all__ = [
    "Delivered",
    "Probe",
    "Proof",
    "find_message",
    "find_newest",
    "find_oldest",
    "stand_behind",
]

#: Most steps back; beyond that, reading all messages is quicker.
_MOST_STEPS: Final = 20_000
#: How often LROSE's server may fail to read beside a busy writer, and how long (seconds) the
#: oldest message may be another one each time, before it is searched for.
_MOST_FAILURES: Final = 100
_BUSY: Final = 0.25

_BACK: Final = DsMessage(Op.SEEK, SeekTo.BACK)
_TO_START: Final = DsMessage(Op.SEEK, SeekTo.START)


def find_newest(link: QueueLink) -> Messages:
    """Return the newest message, and those appended meanwhile; only for LROSE's server.

    The server reopens the queue that its path names now, and is after them.

    :raises NotFound: the queue does not exist any more.
    :raises RequestRefused: the server cannot read it.
    """
    return _insist(lambda: link.read_after([link.reopening(), _BACK]))


def find_oldest(link: QueueLink) -> Messages:
    """Return the oldest messages; only for LROSE's server, and a queue that is not empty.

    This is verified: the message before them does not exist. It moves the server elsewhere.
    """
    deadline = time.monotonic() + _BUSY
    while time.monotonic() < deadline:
        # The read makes the server update the status that the seek uses.
        found = _insist(lambda: link.read_after([link.reading(), _TO_START]))
        ids = found.ids
        if not ids:
            return found
        steps = id_distance(ids[-1], ids[0]) + 2
        if steps != len(ids) + 1:
            continue  # it went from a slot that is not published yet to those that are
        if steps > ids[-1] + 1:  # there is no stepping to before the first of all ids
            return found
        before = _insist(functools.partial(link.read_after, [_BACK] * steps))
        if before.ids[:1] != [ids[0] - 1]:
            return found
    return _search_oldest(link)


def _search_oldest(link: QueueLink) -> Messages:
    """Search the oldest message backwards from the newest, without the status.

    The status is useless beside a fast writer, or if a writer died before it updated it.
    """
    found = find_newest(link)
    if not found.ids:
        return found
    there, gone, step = found.ids[0], -1, 1
    while there - gone > 1:
        middle = (there + gone) // 2
        probe = max(there - step, middle)
        tried = find_message(link, probe)
        if tried is None:
            break  # so far back that the first way should have worked
        if tried.ids[:1] == [probe]:
            found, there, step = tried, probe, 2 * step
        else:
            gone = probe
    return found


def find_message(link: QueueLink, id: int) -> Messages | None:
    """Return the message with an id, and those after it; newer ones if it is gone.

    Only for LROSE's server. None: it is too far back for steps.
    """
    steps = _steps_back(link, id)
    return None if steps is None else _insist(lambda: link.read_after([_BACK] * (steps + 1)))


def stand_behind(link: QueueLink, id: int) -> bool:
    """Move LROSE's server after a message; False: it is too far back."""
    steps = _steps_back(link, id)
    if steps is None:
        return False
    link.ask_all([_BACK] * steps)
    return True


def _steps_back(link: QueueLink, id: int) -> int | None:
    if link.last_id is None or id_distance(link.last_id, id) < 0:
        find_newest(link)
    last = link.last_id
    # BACK cannot pass id 0.
    if last is None or not 0 <= id <= last <= id + _MOST_STEPS:
        return None
    return last - id


def _insist(read: Callable[[], Messages]) -> Messages:
    """Retry a read that LROSE's server refused because a writer was at that message."""
    for failures in range(_MOST_FAILURES):
        try:
            return read()
        except RequestRefused:
            if failures == _MOST_FAILURES - 1:
                raise
            time.sleep(0.0001 * failures)
    raise AssertionError


class Probe:
    """Inspects a queue over its own connection, which is opened on demand."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._link: QueueLink | None = None

    def newest(self, patience: float | None = None) -> Messages:
        """Return the newest message, perhaps with some after it; empty for an empty queue.

        :param patience: seconds to retry to reach the server; default: as in the URL.
        :raises ConnectionLost: the server cannot be reached, even with a new connection.
        :raises RequestRefused: it has too many clients already.
        :raises NotFound: the queue does not exist.
        """
        return self._look(SeekTo.LAST, patience)

    def bounds(self, near: int) -> tuple[int, int] | None:
        """Return the numbers of the oldest and the newest message; None: the queue is empty.

        The protocol has only ids, which are unwrapped to the numbers closest to `near`.

        :raises ConnectionLost: as `newest`.
        """
        newest = self._look(SeekTo.LAST)
        oldest = self._look(SeekTo.START) if newest.ids else newest
        newest = self._look(SeekTo.LAST) if oldest.ids else newest
        if not oldest.ids or not newest.ids:
            return None
        last = unwrap(newest.ids[0], near)
        return unwrap(oldest.ids[0], last), last

    def _look(self, place: SeekTo, patience: float | None = None) -> Messages:
        retry = self._target.options.retry if patience is None else patience
        for attempt in range(2):
            try:
                if self._link is None:
                    self._link = open_to_read(self._target, retry, retry)
                if self._link.is_ours:
                    self._link.seek(place)
                    return self._link.read(most=1)
                find = find_oldest if place is SeekTo.START else find_newest
                return find(self._link)
            except ConnectionLost:
                self.forget()
                if attempt:
                    raise
        raise AssertionError

    def forget(self) -> None:
        """Disconnect; the next call opens a new connection."""
        link, self._link = self._link, None
        if link is not None:
            link.abandon()

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


# --- identity of messages ------------------------------------------------------------------------

#: Replies that are remembered: a server goes back by some messages at most.
_REMEMBERED: Final = 4


class Proof(NamedTuple):
    """Properties of a message, to recognise it."""

    seq: int
    #: type, subtype, length and time.
    kind: tuple[int, int, int, int]
    payload: bytes

    @classmethod
    def of(cls, messages: Messages, row: int, seq: int) -> Proof:
        kind = (
            messages.types[row],
            messages.subtypes[row],
            messages.uncompressed_lens[row],
            messages.times[row],
        )
        return cls(seq, kind, messages.payloads[row])


class Delivered:
    """The last messages received, to recognise repeats."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[Sequence[int], Messages]] = deque(maxlen=_REMEMBERED)

    def add(self, messages: Messages, seqs: Sequence[int]) -> None:
        self._blocks.append((seqs, messages))

    def is_same(self, messages: Messages, row: int, seq: int) -> bool | None:
        """Tell whether a message equals the one received with its number; None: unknown."""
        for seqs, known in reversed(self._blocks):
            if seqs[0] <= seq <= seqs[-1]:
                place = bisect_left(seqs, seq)
                if seqs[place] == seq:
                    return Proof.of(known, place, seq) == Proof.of(messages, row, seq)
        return None

    def clear(self) -> None:
        self._blocks.clear()
