"""Which messages were lost before Spark could read them, and where does the user see that?"""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.endpoints import open_writer
from penstock.core.errors import LockTimeout, NotFound, PenstockError, Unsupported
from penstock.core.position import Position
from penstock.core.retry import Backoff, RetryPolicy, retry
from penstock.core.whole_files import write_whole
from penstock.pipeline.spark_process import private_folder
from penstock.queue.append_once import read_back

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.interfaces import Reader
    from penstock.pipeline.source.checkpoint import Offset

__all__ = [
    "Attempt",
    "DataLoss",
    "LossReports",
    "LostRange",
    "Reported",
    "discard",
    "note_delivered",
    "reports_of",
    "uncounted",
]

log = logging.getLogger(__name__)

#: A record found among this many latest ones is not written again.
_LOOK_BACK: Final = 1000
#: Options of the log of reports for the planning process.
_KEPT: Final = "segment=64k&retain=4M&sync=batch"
_DELIVERED: Final = "delivered.json"
#: Several tasks may report at the same time; a stream has one writer at a time.
_TAKE_TURNS: Final = RetryPolicy(
    retry_on=(LockTimeout,), backoff=Backoff(initial=0.05, maximum=1.0), max_elapsed=120.0
)


class Attempt(NamedTuple):
    """The batch and Spark run of the task that found a loss."""

    batch: int
    run: str


@dataclass(frozen=True, slots=True)
class LostRange:
    """Messages that were gone before Spark could read them."""

    url: str
    #: The epoch of the sequence numbers.
    epoch: int
    first: int
    #: None: the number of lost messages is unknown.
    last: int | None
    reason: str
    #: With `last` unknown: the known minimum.
    seen: int = 0

    @property
    def count(self) -> int:
        """The number of messages known to be lost."""
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

    def to_json(self, run: str, attempt: Attempt | None = None) -> bytes:
        """Return the record for the loss stream."""
        fields = asdict(self) | {"epoch": str(self.epoch), "run": run}
        if attempt is not None:
            fields |= {"batch": attempt.batch, "attempt": attempt.run}
        fields["count"] = None if self.last is None else self.count
        return json.dumps(fields, sort_keys=True).encode()


class DataLoss(PenstockError):
    """Messages that a query should read are lost."""

    def __init__(self, lost: LostRange, hint: str | None = None) -> None:
        super().__init__(
            str(lost),
            hint=hint
            or "make the queue larger, let the writer wait (hold=NAME), keep a log (and more of "
            "it: retain=SIZE), or set failOnDataLoss=false to go on and count them",
        )
        self.lost = lost


class Reported(NamedTuple):
    """A loss that a task has reported."""

    lost: LostRange
    attempt: Attempt | None


class LossReports:
    """A stream of records, one for each lost range.

    Tasks have no other way to inform the process that plans the query. That process counts them,
    so that the offsets in the query's progress show the losses. The records stay: if the query
    ends before its next batch is planned, they are counted when it is restarted.
    """

    def __init__(self, url: str, run: str, folder: Path | None = None) -> None:
        """Use the records of the name `run` in the stream `url`.

        :param folder: where `note_delivered` notes the delivered attempt at a batch
        """
        self._url = url
        #: Marks the records of this query in the stream, across restarts.
        self._run = run
        self._folder = folder
        self._reader: Reader | None = None
        self._found: list[Reported] = []

    def report(self, lost: LostRange, attempt: Attempt | None = None) -> None:
        """Log a loss, and append a record.

        :raises PenstockError: the record cannot be written; no loss may go unreported.
        """
        log.warning("%s", lost)
        retry(lambda: self._append(lost, attempt), _TAKE_TURNS)

    def _append(self, lost: LostRange, attempt: Attempt | None) -> None:
        with open_writer(self._url) as writer:
            record = lost.to_json(self._run, attempt)
            if not self._is_there(json.loads(record)):  # a task may run twice
                writer.write(record)
                writer.flush()

    def _is_there(self, wanted: dict[str, Any]) -> bool:
        with suppress(Unsupported, NotFound), read_back(self._url, Position.END) as reader:
            bounds = reader.bounds()
            reader.seek(max(bounds.oldest, bounds.end - _LOOK_BACK))
            records = (_record(message.payload) for message in reader.read_many(_LOOK_BACK))
            return any(record == wanted for record in records)
        return False

    def heard(self) -> list[Reported]:
        """Return all retained reports of tasks of this query."""
        if self._reader is None:
            try:
                self._reader = read_back(self._url, Position.START)
            except (NotFound, Unsupported):
                return []
        while messages := self._reader.read_many(_LOOK_BACK):
            records = (_record(message.payload) for message in messages)
            mine = [record for record in records if record.get("run") == self._run]
            self._found += [_reported(record) for record in mine]
        batch, run = _delivered(self._folder)
        return [
            one
            for one in self._found
            # Losses of a later attempt do not count: the batch was delivered before.
            if one.attempt is None or one.attempt.batch != batch or one.attempt.run == run
        ]

    def forget(self, done: Iterable[tuple[str, Offset]]) -> None:
        """Drop reports that are already counted."""
        at = dict(done)
        self._found = [
            one
            for one in self._found
            if (offset := at.get(one.lost.url)) is None
            or offset.epoch != one.lost.epoch
            or one.lost.last is None
            or one.lost.last >= offset.start
        ]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _PrivateReports(LossReports):
    """Reports for the planning process only, in a log of their own."""

    def __init__(self, folder: Path, run: str, notes: Path | None) -> None:
        super().__init__(f"log:{folder}?{_KEPT}", run, notes)
        self._log = folder

    def discard(self) -> None:
        """Remove the records after all are counted."""
        self.close()
        shutil.rmtree(self._log, ignore_errors=True)


def reports_of(url: str | None, folder: str | None, run: str) -> LossReports:
    """Return the reports of a query, in a stream, a folder, or the temporary directory."""
    notes = None if folder is None else Path(folder)
    if url is not None:
        return LossReports(url, run, notes)
    return _PrivateReports((notes or private_folder("losses")) / run, run, notes)


def discard(reports: LossReports) -> None:
    """Close reports, and remove them unless they are in a stream of the user."""
    reports.close()
    if isinstance(reports, _PrivateReports):
        reports.discard()


def uncounted(reported: Iterable[Reported], url: str, offset: Offset) -> int:
    """Return how many messages of the last batch of a stream tasks reported as lost.

    Its offset counts those of earlier batches. A task that runs twice may report the same loss
    and more: overlapping ranges count once.
    """
    ranges = sorted(
        (max(lost.first, offset.start), min(lost.last, offset.end - 1))
        for lost, _ in reported
        if lost.url == url and lost.epoch == offset.epoch and lost.last is not None
    )
    count, end = 0, offset.start
    for first, last in ranges:
        count += max(0, last + 1 - max(first, end))
        end = max(end, last + 1)
    return count


def note_delivered(folder: Path, delivered: Attempt) -> None:
    """Note which attempt at a batch was delivered: losses of other attempts do not count.

    :raises OSError: the operating system refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _DELIVERED, json.dumps(delivered._asdict()).encode(), sync=True)


def _delivered(folder: Path | None) -> tuple[int | None, str | None]:
    if folder is None:
        return None, None
    try:
        stored = json.loads((folder / _DELIVERED).read_text())
        return int(stored["batch"]), str(stored["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _record(payload: bytes) -> dict[str, Any]:
    try:
        record = json.loads(payload)
    except ValueError:
        return {}  # a message of another writer
    return record if isinstance(record, dict) else {}


def _reported(record: dict[str, Any]) -> Reported:
    lost = LostRange(
        record["url"],
        int(record["epoch"]),
        record["first"],
        record["last"],
        record["reason"],
        record["seen"],
    )
    if record.get("batch") is None:
        return Reported(lost, None)
    return Reported(lost, Attempt(int(record["batch"]), str(record.get("attempt"))))
