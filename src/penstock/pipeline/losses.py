"""What was lost before Spark could read it, and where does the user see that?"""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import LockTimeout, NotFound, PenstockError, Unsupported
from penstock.core.position import Position
from penstock.core.retry import Backoff, RetryPolicy, retry
from penstock.pipeline.private_folder import private_folder

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.interfaces import Reader

__all__ = ["DataLoss", "LossReports", "LostRange", "private_reports"]

log = logging.getLogger(__name__)

#: A record that is among so many of the latest is not written again.
_LOOK_BACK: Final = 1000
#: Several tasks may have something to tell at once; a stream has one writer at a time.
_TAKE_TURNS: Final = RetryPolicy(
    retry_on=(LockTimeout,), backoff=Backoff(initial=0.05, maximum=1.0), max_elapsed=120.0
)


@dataclass(frozen=True, slots=True)
class LostRange:
    """Messages that were gone before Spark could read them."""

    url: str
    #: Numbers count within it.
    epoch: int
    first: int
    #: None: nobody knows how many there were.
    last: int | None
    reason: str
    #: With `last` unknown: so many were seen.
    seen: int = 0

    @property
    def count(self) -> int:
        """How many are known to be lost."""
        return self.seen if self.last is None else self.last - self.first + 1

    def __str__(self) -> str:
        if self.last is None:
            least = f", at least {self.seen:,}" if self.seen else ""
            how_many = f"an unknown number of messages lost (seq {self.first} on{least})"
        elif self.count == 1:
            how_many = f"1 message lost (seq {self.first})"
        else:
            how_many = f"{self.count:,} messages lost (seq {self.first} to {self.last})"
        return f"{self.url}: {how_many}: {self.reason}"

    def to_json(self, run: str) -> bytes:
        """Return the record for the loss stream."""
        fields = asdict(self) | {"epoch": str(self.epoch), "run": run}
        fields["count"] = None if self.last is None else self.count
        return json.dumps(fields, sort_keys=True).encode()


class DataLoss(PenstockError):
    """Messages that a query was to read are gone."""

    def __init__(self, lost: LostRange) -> None:
        super().__init__(
            str(lost),
            hint="make the queue larger, let the writer wait (hold=NAME), keep a log (and more of "
            "it: retain=SIZE), or set failOnDataLoss=false to go on and count them",
        )
        self.lost = lost


class LossReports:
    """A stream of records, one for each range that was lost.

    Tasks have no other way to tell the process that plans the query. That one counts them, so that
    the offsets in the query's progress show how many were lost.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        #: Tells the records of this query from others in the same stream.
        self._run = run
        self._reader: Reader | None = None
        self._start = Position.END

    def report(self, lost: LostRange) -> None:
        """Say it in the log, and append a record.

        :raises PenstockError: it cannot be written; a loss that nobody sees must not be.
        """
        log.warning("%s", lost)
        retry(lambda: self._append(lost), _TAKE_TURNS)

    def _append(self, lost: LostRange) -> None:
        with open_writer(self._url) as writer:
            if not self._is_there(lost):  # a task may run twice
                writer.write(lost.to_json(self._run))
                writer.flush()

    def _is_there(self, lost: LostRange) -> bool:
        # Of this run only: what was lost is counted by the run that goes on from there.
        wanted = json.loads(lost.to_json(self._run))
        with suppress(Unsupported, NotFound), _reader_of(self._url, Position.END) as reader:
            bounds = reader.bounds()
            reader.seek(max(bounds.oldest, bounds.end - _LOOK_BACK))
            records = (_record(message.payload) for message in reader.read_many(_LOOK_BACK))
            return any(record == wanted for record in records)
        return False

    def heard(self) -> list[LostRange]:
        """Return what tasks of this query reported since the last call, or since `listen`."""
        reader = self.listen()
        if reader is None:
            return []
        found = []
        while messages := reader.read_many(_LOOK_BACK):
            records = (_record(message.payload) for message in messages)
            found += [_range_of(record) for record in records if record.get("run") == self._run]
        return found

    def listen(self) -> Reader | None:
        """Hear what is reported from now on."""
        if self._reader is None:
            try:
                self._reader = _reader_of(self._url, self._start)
            except NotFound:
                self._start = Position.START  # whatever comes is new
            except Unsupported:
                return None
        return self._reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _PrivateReports(LossReports):
    """Reports for the planning process only, on this machine, until it ends."""

    def __init__(self, folder: Path, run: str) -> None:
        super().__init__(f"log:{folder}?segment=64k&sync=none", run)
        self._folder = folder

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def private_reports(run: str) -> LossReports:
    """Return reports that nobody asked to keep."""
    return _PrivateReports(private_folder("losses") / run, run)


def _reader_of(url: str, start: Position) -> Reader:
    return open_reader(url.partition("?")[0] if url.startswith(("fmq:", "log:")) else url, start)


def _record(payload: bytes) -> dict[str, Any]:
    try:
        record = json.loads(payload)
    except ValueError:
        return {}  # somebody else's message
    return record if isinstance(record, dict) else {}


def _range_of(record: dict[str, Any]) -> LostRange:
    return LostRange(
        record["url"],
        int(record["epoch"]),
        record["first"],
        record["last"],
        record["reason"],
        record["seen"],
    )
