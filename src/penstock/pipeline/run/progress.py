"""How far is a query, how fast is it, and did it lose anything?"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Progress", "QueryState", "Watch"]

log = logging.getLogger(__name__)

QueryState = Literal["waiting", "starting", "running", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The current state and counters of a query."""

    query: str
    state: QueryState
    #: Completed batches of this run, and the id of the last one.
    batches: int = 0
    batch: int | None = None
    rows: int = 0
    #: Of the last batch that had any.
    rows_per_second: float = 0.0
    batch_seconds: float = 0.0
    #: Unread messages, by URL.
    lag: Mapping[str, int] | None = None
    #: Messages lost before they could be read, by URL, with `failOnDataLoss: false`. In this run,
    #: as all counters.
    lost: Mapping[str, int] | None = None
    #: Losses of unknown size, as when a queue was recreated.
    lost_unknown: int = 0
    #: Messages skipped because they did not decode, by source or stage.
    skipped: Mapping[str, int] | None = None
    #: Restarts after an outage.
    restarts: int = 0

    @property
    def behind(self) -> int:
        return sum((self.lag or {}).values())

    @property
    def lost_in_all(self) -> int:
        return sum((self.lost or {}).values())

    @property
    def skipped_in_all(self) -> int:
        return sum((self.skipped or {}).values())

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "behind": self.behind,
            "lost_in_all": self.lost_in_all,
            "skipped_in_all": self.skipped_in_all,
        }


class Watch:
    """Tracks the progress of one query."""

    def __init__(self, name: str) -> None:
        self._last = -1
        self._now = Progress(name, "waiting")
        #: Losses reported before this run, by URL, and those of unknown size. None: taken from
        #: the start offsets of the first report.
        self._before: tuple[dict[str, int], int] | None = None

    def begin(self, lost: dict[str, int], unknown: int) -> None:
        """Count losses from here on: these were reported before."""
        self._before = lost, unknown

    def settle(self, lost: dict[str, int], unknown: int) -> bool:
        """Set the total losses at the end of the query; tell whether they changed."""
        before = self._now
        new, new_unknown = self._since(lost, unknown)
        self._now = replace(before, lost=new, lost_unknown=new_unknown)
        return (before.lost or {}, before.lost_unknown) != (new, new_unknown)

    @property
    def now(self) -> Progress:
        return self._now

    def say(self, state: QueryState) -> None:
        self._now = replace(self._now, state=state)

    def start_again(self) -> None:
        """Count a restart after an outage."""
        self._now = replace(self._now, state="starting", restarts=self._now.restarts + 1)

    def look(self, query: StreamingQuery) -> bool:
        """Process Spark's recent reports; tell whether any was new."""
        is_new = False
        for report in query.recentProgress:
            seen = json.loads(report.json) if hasattr(report, "json") else dict(report)
            is_new |= self.take(seen)
        return is_new

    def take(self, seen: Mapping[str, Any]) -> bool:
        """Process one report of Spark; tell whether it is about a completed batch."""
        if seen["batchId"] <= self._last or "triggerExecution" not in seen["durationMs"]:
            return False
        if self._before is None:
            self._before = _lost(seen["sources"], "startOffset")
        if "addBatch" not in seen["durationMs"]:  # nothing came, so nothing was done
            self._now = replace(self._now, lag=_lag(seen["sources"]))
            return False
        unseen = seen["batchId"] - self._last - 1 if self._last >= 0 else 0
        if unseen:  # while whoever is told of the progress, such as a terminal, took nothing
            log.warning(
                "%s: %d batches passed unseen: their rows, and what they skipped, are not counted",
                self._now.query,
                unseen,
            )
        self._last = seen["batchId"]
        self._take(seen, unseen)
        return True

    def _take(self, seen: Mapping[str, Any], unseen: int) -> None:
        rows = _rows(seen)
        seconds = seen["durationMs"]["triggerExecution"] / 1000
        before = self._now
        lost, lost_unknown = self._lost_since(seen["sources"])
        self._now = replace(
            before,
            state="running",
            batches=before.batches + 1 + unseen,
            batch=int(seen["batchId"]),
            rows=before.rows + rows,
            rows_per_second=rows / seconds if rows and seconds else before.rows_per_second,
            batch_seconds=seconds,
            lag=_lag(seen["sources"]),
            lost=lost,
            lost_unknown=lost_unknown,
            skipped=_skipped(before.skipped, seen.get("observedMetrics")),
        )

    def _lost_since(self, sources: list[dict[str, Any]]) -> tuple[dict[str, int], int]:
        """Return the losses of this run: offsets count since the first start of the query."""
        return self._since(*_lost(sources))

    def _since(self, lost: Mapping[str, int], unknown: int) -> tuple[dict[str, int], int]:
        before, unknown_before = self._before or ({}, 0)
        new = {url: count - before.get(url, 0) for url, count in lost.items()}
        # Fewer than before: an older checkpoint was restored.
        return {url: n for url, n in new.items() if n > 0}, max(0, unknown - unknown_before)


def _rows(seen: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch; Spark Connect has no total."""
    if "numInputRows" in seen:
        return int(seen["numInputRows"])
    return sum(int(source["numInputRows"]) for source in seen["sources"])


def _lag(sources: list[dict[str, Any]]) -> dict[str, int]:
    lag: dict[str, int] = {}
    for source in sources:
        end, latest = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
        for url, there in latest.items():
            at = int(end.get(url, {}).get("end", there.get("oldest", 0)))
            # Two sources may read the same stream.
            lag[url] = max(lag.get(url, 0), int(there["end"]) - at)
    return lag


def _lost(
    sources: list[dict[str, Any]], which: Literal["startOffset", "endOffset"] = "endOffset"
) -> tuple[dict[str, int], int]:
    """Return lost messages by stream, and the number of losses of unknown size."""
    lost: dict[str, int] = {}
    unknown = 0
    for source in sources:
        for url, offset in _offsets(source.get(which)).items():
            lost[url] = lost.get(url, 0) + int(offset.get("lost", 0))
            unknown += int(offset.get("lost_unknown", 0))
    return lost, unknown


def _skipped(before: Mapping[str, int] | None, observed: object) -> dict[str, int]:
    """Add the skipped messages of a batch to the sums."""
    sums = dict(before or {})
    for name, metrics in observed.items() if isinstance(observed, dict) else ():
        if metrics and (count := metrics.get("skipped")):
            sums[name] = sums.get(name, 0) + int(count)
    return sums


def _offsets(said: object) -> dict[str, dict[str, Any]]:
    """Return the offsets of a Penstock source, which Spark reports as text or as JSON."""
    try:
        given = json.loads(said) if isinstance(said, str) else said
    except ValueError:  # of another source
        return {}
    if not isinstance(given, dict):
        return {}
    ours = {"end", "epoch"}  # Kafka's source has a mapping for each topic, too
    return {url: f for url, f in given.items() if isinstance(f, dict) and ours.issubset(f)}
