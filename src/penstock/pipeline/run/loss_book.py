"""How many messages has a query lost in its life, and how many of them were reported to the user?

The offsets in the checkpoint count losses up to the last batch. Losses that tasks of that batch
found are in their reports until the next batch is planned; a run that ends earlier reads them from
there. A run that is killed reports nothing: the next one that ends normally does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import PenstockError
from penstock.core.whole_files import write_whole
from penstock.pipeline.sink.file_sink import run_of
from penstock.pipeline.source.checkpoint import folder_of, last_offsets
from penstock.pipeline.source.loss_reports import Attempt, note_delivered, reports_of, uncounted
from penstock.pipeline.spark_process import private_folder
from penstock.queue.append_once import known_of
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.graph.model import Sink, Source
    from penstock.pipeline.source.checkpoint import Offset

__all__ = ["LossBook", "Losses"]

_TOLD: Final = "told.json"


class Losses(NamedTuple):
    """Lost messages by URL, and the number of losses of unknown size."""

    lost: dict[str, int]
    unknown: int = 0


class LossBook:
    """Records the losses of one query, beside its checkpoint on the local disk."""

    def __init__(self, checkpoint: Path, sources: Sequence[Source]) -> None:
        self._checkpoint = checkpoint
        self._urls = [url for source in sources if (url := source.losses_to) is not None]
        #: Where tasks report missing messages.
        self.folder = Path(f"{checkpoint}.losses")

    @classmethod
    def of(cls, checkpoint: str, sources: Sequence[Source]) -> LossBook | None:
        """Return the record of a query; None: a loss fails it, or its checkpoint is remote."""
        folder = folder_of(checkpoint)
        goes_on = any(source.goes_on_after_loss for source in sources)
        return cls(folder, sources) if folder is not None and goes_on else None

    def begin(self, sinks: Sequence[Sink]) -> Losses:
        """Return the losses reported so far. Those before the first record count as reported.

        :raises StorageError: the record cannot be read or written.
        """
        self.note_delivered_attempt(sinks)
        told = self._told()
        if told is None:
            told = self.total()
            self.tell(told)
        return told

    def _told(self) -> Losses | None:
        with storage_errors("reading", str(self.folder)):
            try:
                stored = json.loads((self.folder / _TOLD).read_text())
                if stored["query"] not in (None, self._query()):
                    return None  # of a query whose checkpoint was removed
                lost = {str(url): int(count) for url, count in stored["lost"].items()}
                return Losses(lost, int(stored["unknown"]))
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                return None

    def tell(self, losses: Losses) -> None:
        """Store the losses as reported."""
        with storage_errors("writing", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            stored = {**losses._asdict(), "query": self._query()}
            write_whole(self.folder / _TOLD, json.dumps(stored).encode(), sync=True)

    def _query(self) -> str | None:
        """Return Spark's id of the query; None: it has not started yet."""
        try:
            return str(json.loads((self._checkpoint / "metadata").read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def total(self) -> Losses:
        """Return all losses, whether already counted in the checkpoint or not.

        :raises PenstockError: the reports of tasks cannot be read.
        """
        lost: dict[str, int] = {}
        unknown = 0
        _, sources = last_offsets(self._checkpoint) or (0, [])
        for offsets in sources:
            for url, at in offsets.items() if isinstance(offsets, dict) else ():
                found = at.lost + self._uncounted(url, at)
                lost[url] = lost.get(url, 0) + found
                unknown += at.lost_unknown
        return Losses({url: count for url, count in lost.items() if count}, unknown)

    def _uncounted(self, url: str, at: Offset) -> int:
        if not at.reader:
            return 0
        count = 0
        for where in (*self._urls, None):
            reports = reports_of(where, str(self.folder), at.reader)
            try:
                count += uncounted(reports.heard(), url, at)
            finally:
                reports.close()
        return count

    def clean(self) -> None:
        """Remove reports that the checkpoint counts: all but those of the last batch."""
        _, sources = last_offsets(self._checkpoint) or (0, [])
        at = [at for each in sources if isinstance(each, dict) for at in each.items()]
        kept = {offset.reader for url, offset in at if self._uncounted(url, offset)}
        for path in self.folder.glob("*/"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def note_delivered_attempt(self, sinks: Sequence[Sink]) -> None:
        """Note which attempt at the last batch was delivered, if the batch will be replayed.

        Call it before each start of the query: tasks of a delivered batch read it once more, and
        may find fewer messages by then.

        :raises StorageError: the note cannot be written.
        """
        batch, _ = last_offsets(self._checkpoint) or (None, [])
        if batch is None or (self._checkpoint / "commits" / str(batch)).exists():
            return
        query = self._query()
        try:
            runs = set() if query is None else {_run_of(sink, query, batch) for sink in sinks}
        except (OSError, PenstockError):
            return  # what is wrong with it is said when it runs
        run = runs.pop() if len(runs) == 1 else None
        if run is not None:
            with storage_errors("writing", str(self.folder)):
                note_delivered(self.folder, Attempt(batch, run))


def _run_of(sink: Sink, query: str, batch: int) -> str | None:
    """Return the run of a query that has delivered a batch to a sink, or started to."""
    if sink.stream is None:
        return run_of(sink.target, query, batch) if sink.writes_files else None
    folder = sink.options.get("staging")
    where = private_folder("staging") if folder is None else Path(folder)
    known = known_of(sink.stream, query, batch, where)
    return None if known is None else known.run
