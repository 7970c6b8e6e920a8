"""How far is a query, how fast is it, and did it lose anything?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Progress", "QueryState", "Watch"]

QueryState = Literal["waiting", "starting", "running", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What there is to say of a query now."""

    query: str
    state: QueryState
    #: Batches that are done, and the number of the last of them in the life of the query.
    batches: int = 0
    batch: int | None = None
    rows: int = 0
    #: Of the last batch that had any.
    rows_per_second: float = 0.0
    batch_seconds: float = 0.0
    #: Messages that each source has and that the query has not seen, by URL.
    lag: Mapping[str, int] | None = None
    #: Messages that were gone before they could be read, by URL; where it goes on regardless. Of
    #: this run, as all of it is.
    lost: Mapping[str, int] | None = None
    #: How often a queue was created anew, and nobody can tell how many were lost with the old one.
    lost_unknown: int = 0
    #: Messages that did not decode and were left out, by the source or stage that decodes.
    skipped: Mapping[str, int] | None = None

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
    """Follows one query."""

    def __init__(self, name: str) -> None:
        self._last = -1
        self._now = Progress(name, "waiting")
        #: What was told of the query's losses before this run, by URL, and how often it was
        #: unknown. None: what its first report begins with.
        self._before: tuple[dict[str, int], int] | None = None

    def begin(self, lost: dict[str, int], unknown: int) -> None:
        """Count losses from there on: so much is told."""
        self._before = lost, unknown

    def settle(self, lost: dict[str, int], unknown: int) -> bool:
        """Take in all that the query has lost by its end, and tell whether that is news."""
        before = self._now
        new, new_unknown = self._since(lost, unknown)
        self._now = replace(before, lost=new, lost_unknown=new_unknown)
        return (before.lost or {}, before.lost_unknown) != (new, new_unknown)

    @property
    def now(self) -> Progress:
        return self._now

    def say(self, state: QueryState) -> None:
        self._now = replace(self._now, state=state)

    def look(self, query: StreamingQuery) -> bool:
        """Take in what Spark reports, and tell whether there was anything new."""
        is_new = False
        for report in query.recentProgress:
            seen = json.loads(report.json) if hasattr(report, "json") else dict(report)
            if seen["batchId"] <= self._last or "triggerExecution" not in seen["durationMs"]:
                continue
            if self._before is None:
                self._before = _lost(seen["sources"], "startOffset")
            if "addBatch" not in seen["durationMs"]:  # nothing came, so nothing was done
                self._now = replace(self._now, lag=_lag(seen["sources"]))
                continue
            self._last = seen["batchId"]
            self._take(seen)
            is_new = True
        return is_new

    def _take(self, seen: Mapping[str, Any]) -> None:
        rows = int(seen["numInputRows"])
        seconds = seen["durationMs"]["triggerExecution"] / 1000
        before = self._now
        lost, lost_unknown = self._lost_since(seen["sources"])
        self._now = replace(
            before,
            state="running",
            batches=before.batches + 1,
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
        """Return what was lost in this run: the offsets have it since the query was begun."""
        return self._since(*_lost(sources))

    def _since(self, lost: Mapping[str, int], unknown: int) -> tuple[dict[str, int], int]:
        before, unknown_before = self._before or ({}, 0)
        new = {url: count - before.get(url, 0) for url, count in lost.items()}
        # Fewer than before: the checkpoint has fallen back.
        return {url: n for url, n in new.items() if n > 0}, max(0, unknown - unknown_before)


def _lag(sources: list[dict[str, Any]]) -> dict[str, int]:
    lag: dict[str, int] = {}
    for source in sources:
        end, latest = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
        for url, there in latest.items():
            at = int(end.get(url, {}).get("end", there.get("oldest", 0)))
            # One stream may be read by two sources.
            lag[url] = max(lag.get(url, 0), int(there["end"]) - at)
    return lag


def _lost(
    sources: list[dict[str, Any]], which: Literal["startOffset", "endOffset"] = "endOffset"
) -> tuple[dict[str, int], int]:
    """Return how many messages of each stream were lost, and how often nobody could count them."""
    lost: dict[str, int] = {}
    unknown = 0
    for source in sources:
        for url, offset in _offsets(source.get(which)).items():
            lost[url] = lost.get(url, 0) + int(offset.get("lost", 0))
            unknown += int(offset.get("lost_unknown", 0))
    return lost, unknown


def _skipped(before: Mapping[str, int] | None, observed: object) -> dict[str, int]:
    """Add up what each batch left out."""
    sums = dict(before or {})
    for name, metrics in observed.items() if isinstance(observed, dict) else ():
        if metrics and (count := metrics.get("skipped")):
            sums[name] = sums.get(name, 0) + int(count)
    return sums


def _offsets(said: object) -> dict[str, dict[str, Any]]:
    """Return what our source said; Spark gives it as text, or as JSON."""
    given = json.loads(said) if isinstance(said, str) else said
    if not isinstance(given, dict):
        return {}
    return {url: fields for url, fields in given.items() if isinstance(fields, dict)}
