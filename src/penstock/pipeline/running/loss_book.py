"""What has a query lost in its life, and what of it was told when a run ended?

The offsets in the checkpoint count what was lost up to the last batch. What tasks of that batch did
not find is in their reports, until the next batch is planned; a run that ends before it reads them
there. And a run that is killed tells nothing: the next one that ends in order tells it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import PenstockError
from penstock.core.whole_files import write_whole
from penstock.pipeline.commits import known_of
from penstock.pipeline.losses import Attempt, note_delivered, reports_of, uncounted
from penstock.pipeline.private_folder import private_folder
from penstock.pipeline.provenance import folder_of, last_offsets
from penstock.pipeline.running.files import run_of
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.model import Sink, Source
    from penstock.pipeline.offsets import Offset

__all__ = ["LossBook", "Losses"]

_TOLD: Final = "told.json"


class Losses(NamedTuple):
    """Messages that were lost, by URL, and how often nobody could count them."""

    lost: dict[str, int]
    unknown: int = 0


class LossBook:
    """Keeps account of the losses of one query, beside its checkpoint on this machine's disk."""

    def __init__(self, checkpoint: Path, sources: Sequence[Source]) -> None:
        self._checkpoint = checkpoint
        self._urls = [source.loss_url for source in sources if source.loss_url is not None]
        #: Where tasks report what they do not find.
        self.folder = Path(f"{checkpoint}.losses")

    @classmethod
    def of(cls, checkpoint: str, sources: Sequence[Source]) -> LossBook | None:
        """Return the book of a query; None: a loss ends it, or its checkpoint is elsewhere."""
        folder = folder_of(checkpoint)
        goes_on = any(source.goes_on_after_loss for source in sources)
        return cls(folder, sources) if folder is not None and goes_on else None

    def begin(self, sinks: Sequence[Sink]) -> Losses:
        """Return what was told so far. What was lost before there was a book counts as told.

        :raises StorageError: it cannot be read or written.
        """
        self._find_delivered(sinks)
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
        """Remember what was told."""
        with storage_errors("writing", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            stored = {**losses._asdict(), "query": self._query()}
            write_whole(self.folder / _TOLD, json.dumps(stored).encode(), sync=True)

    def _query(self) -> str | None:
        """Return the name that Spark has given the query; None: it has not begun yet."""
        try:
            return str(json.loads((self._checkpoint / "metadata").read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def total(self) -> Losses:
        """Return all that was lost, counted in the checkpoint or not yet.

        :raises PenstockError: what tasks have reported cannot be read.
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
        """Remove reports that are counted: all but those of the last batch."""
        _, sources = last_offsets(self._checkpoint) or (0, [])
        at = [at for each in sources if isinstance(each, dict) for at in each.items()]
        kept = {offset.reader for url, offset in at if self._uncounted(url, offset)}
        for path in self.folder.glob("*/"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _find_delivered(self, sinks: Sequence[Sink]) -> None:
        """Note which attempt at the last batch was delivered, if that is done again.

        Tasks of a batch that is there already read it once more, and may find less by now.
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
    """Return which run of a query has delivered a batch to a sink, or will go on with it."""
    if sink.stream is None:
        return run_of(sink.target, query, batch) if sink.writes_files else None
    folder = sink.options.get("staging")
    where = private_folder("staging") if folder is None else Path(folder)
    known = known_of(sink.stream, query, batch, where)
    return None if known is None else known.run
