"""Where does a remote queue begin and end, without a reader leaving its place?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import ConnectionLost
from penstock.protocols.lrose.fmq_client import QueueLink, Target, open_to_read
from penstock.queue.classic.layout import unwrap

if TYPE_CHECKING:
    from penstock.protocols.lrose.fmq_wire import SeekTo

__all__ = ["Scout"]


class Scout:
    """Looks at a queue over a connection of its own, which is made when it is first needed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._link: QueueLink | None = None

    def seq_at(self, place: SeekTo, near: int) -> int | None:
        """Return the number of the message at a place; None: there is none.

        The protocol knows ids only: of the numbers that one may mean it is that next to `near`.

        :raises ConnectionLost: the server cannot be reached, also not with a new connection.
        """
        for attempt in range(2):
            try:
                if self._link is None:
                    self._link = open_to_read(self._target, self._target.options.retry)
                self._link.seek(place)
                ids = self._link.read(most=1).ids
                return unwrap(ids[0], near) if ids else None
            except ConnectionLost:
                if self._link is not None:
                    self._link.abandon()
                    self._link = None
                if attempt:
                    raise
        return None

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
