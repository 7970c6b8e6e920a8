"""Where in a remote queue is a message: the oldest, the newest, one of a number?

A server of ours is asked for it. LROSE's seeks by the status that it saw at its last read, and
takes whatever is in the slot that was the oldest then (spec lrose 1.9): what it finds is stale, or
an error, on a connection that was not read for a while, and a guess beside a busy writer. So it is
made to open the queue anew, and steps back from what it reads then, which it checks by the ids.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import ConnectionLost
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.errors import RequestRefused
from penstock.protocols.lrose.fmq_client import QueueLink, Target, open_to_read
from penstock.protocols.lrose.fmq_wire import Op, SeekTo
from penstock.queue.classic.layout import id_distance, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.lrose.fmq_messages import Messages

__all__ = ["Scout", "find_message", "find_newest", "find_oldest", "stand_behind"]

#: A message so far back is not stepped to: reading all that is there is quicker.
_MOST_STEPS: Final = 20_000
#: How often LROSE's server may fail to read beside a busy writer, and how long (seconds) the
#: oldest message may be another one each time, before it is searched for.
_MOST_FAILURES: Final = 100
_BUSY: Final = 0.25

_BACK: Final = DsMessage(Op.SEEK, SeekTo.BACK)
_TO_START: Final = DsMessage(Op.SEEK, SeekTo.START)


def find_newest(link: QueueLink) -> Messages:
    """Return the newest message, and what came after it meanwhile; of LROSE's server only.

    The server opens the queue that its path means now, and stands behind them.

    :raises NotFound: there is none any more.
    :raises RequestRefused: the server cannot read it.
    """
    return _insist(lambda: link.read_after([link.reopening(), _BACK]))


def find_oldest(link: QueueLink) -> Messages:
    """Return the oldest messages; of LROSE's server, and of a queue that is not empty, only.

    They surely were: the message before them is not there. The server stands elsewhere then.
    """
    deadline = time.monotonic() + _BUSY
    while time.monotonic() < deadline:
        # The first question has the server look at the status, of which the seek makes use.
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
    """Look for the oldest message from the newest one on: what the status says is no help.

    A writer is too quick for it, or died before it wrote one.
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

    Of LROSE's server only. None: it is too far back to be stepped to.
    """
    steps = _steps_back(link, id)
    return None if steps is None else _insist(lambda: link.read_after([_BACK] * (steps + 1)))


def stand_behind(link: QueueLink, id: int) -> bool:
    """Have LROSE's server read next what follows on a message; False: it is too far back."""
    steps = _steps_back(link, id)
    if steps is None:
        return False
    link.ask_all([_BACK] * steps)
    return True


def _steps_back(link: QueueLink, id: int) -> int | None:
    if link.last_id is None or id_distance(link.last_id, id) < 0:
        find_newest(link)
    last = link.last_id
    # BACK stops at the first of all ids.
    if last is None or not 0 <= id <= last <= id + _MOST_STEPS:
        return None
    return last - id


def _insist(read: Callable[[], Messages]) -> Messages:
    """Read again where LROSE's server could not, because a writer was at that message."""
    for failures in range(_MOST_FAILURES):
        try:
            return read()
        except RequestRefused:
            if failures == _MOST_FAILURES - 1:
                raise
            time.sleep(0.0001 * failures)
    raise AssertionError


class Scout:
    """Looks at a queue over a connection of its own, which is made when it is first needed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._link: QueueLink | None = None

    def newest(self, patience: float | None = None) -> Messages:
        """Return the newest message, perhaps with some after it; none if there is none.

        :param patience: how long (seconds) to try to reach the server, if not as the URL says.
        :raises ConnectionLost: the server cannot be reached, also not with a new connection.
        :raises RequestRefused: it has too many clients already.
        :raises NotFound: there is no queue.
        """
        return self._look(SeekTo.LAST, patience)

    def bounds(self, near: int) -> tuple[int, int] | None:
        """Return the numbers of the oldest and the newest message; None: there are none.

        The protocol knows ids only: of the numbers that one may mean it is that next to `near`.

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
                    self._link = open_to_read(self._target, retry)
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
        """Hang up: the next look is over a new connection."""
        link, self._link = self._link, None
        if link is not None:
            link.abandon()

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
