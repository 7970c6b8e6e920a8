"""How is a stream that cannot be read again kept, so that Spark can read it?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.core.endpoints import identity, open_writer
from penstock.core.url import URL
from penstock.core.worker import Worker
from penstock.pipeline.file_names import file_name
from penstock.relay.copy import CopyStatistics, copy

if TYPE_CHECKING:
    from penstock.core.interfaces import Reader

__all__ = ["LiveCopy", "log_for"]

log = logging.getLogger(__name__)

#: A copy that is told to stop has this long (seconds) to bring what it has to the disk.
_TIME_TO_STOP: Final = 10.0


def log_for(*names: str, below: str) -> str:
    """Return the log for a stream, below `stage=`: one that is there by one of its names, or new.

    The first name is the one that it gets; earlier releases went by the URL.
    """
    path, mark, options = below.partition("?")
    logs = [f"{path.rstrip('/')}/{file_name(name)}{mark}{options}" for name in names]
    places = {log: identity(log).path for log in logs}
    return next((log for log, at in places.items() if at is not None and at.exists()), logs[0])


class LiveCopy:
    """Copies a live stream to a log for as long as the query is planned, in a thread.

    Every batch is on the disk before the next is taken, so that what Spark was told of is there
    after a power failure too.
    """

    def __init__(self, reader: Reader, stage: str) -> None:
        """Begin; the reader belongs to the copy from now on.

        :raises LockTimeout: another query keeps a stream in that log.
        """
        #: The log's URL for readers.
        self.place = stage.partition("?")[0]
        self._reader = reader
        synced = {} if "sync" in URL.parse(stage).options else {"sync": "batch"}
        try:
            self._writer = open_writer(stage, **synced)
        except BaseException:
            reader.close()
            raise
        self._lost = self._lost_told = 0
        self._worker = Worker(f"the copy of {reader.url} to {self.place}", self._run, log=log)
        self._worker.start()

    def _run(self, worker: Worker) -> None:
        with self._reader, self._writer:
            copy(
                self._reader,
                self._writer,
                follow=True,
                on_progress=self._note,
                should_stop=lambda: worker.is_stopping,
            )

    def _note(self, so_far: CopyStatistics) -> None:
        self._lost = so_far.lost

    def check(self) -> None:
        """Make sure that it goes on.

        :raises Exception: whatever ended it.
        """
        if self._worker.error is not None:
            raise self._worker.error

    def take_lost(self) -> int:
        """Return how many messages the stream lost on its way here since the last call."""
        lost = self._lost - self._lost_told
        self._lost_told += lost
        return lost

    def stop(self) -> None:
        """End it, and bring what was copied to the disk."""
        self._worker.stop(_TIME_TO_STOP)
