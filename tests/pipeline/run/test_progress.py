from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.pipeline.run.progress import Watch


class Reports:
    """What a query of Spark reports; the fields are those of its progress events."""

    def __init__(self) -> None:
        self.recentProgress: list[dict[str, Any]] = []

    def add(self, batch: int, rows: int, end: int, latest: int, **more: Any) -> None:
        duration = {"triggerExecution": 500, **({"addBatch": 400} if rows else {})}
        self.recentProgress.append(
            {
                "batchId": batch,
                "numInputRows": rows,
                "durationMs": duration,
                "sources": [
                    {
                        "endOffset": json.dumps({"fmq:/a": {"end": end, "epoch": "1", **more}}),
                        "latestOffset": {"fmq:/a": {"end": latest, "epoch": "1", "oldest": 0}},
                    }
                ],
            }
        )


def test_batches_are_counted_once_however_often_one_looks() -> None:
    watch, reports = Watch("q"), Reports()
    reports.add(7, 100, 100, 150)
    assert watch.look(reports)  # type: ignore[arg-type]
    assert not watch.look(reports)  # type: ignore[arg-type]
    reports.add(8, 50, 150, 150)
    assert watch.look(reports)  # type: ignore[arg-type]
    now = watch.now
    assert (now.batches, now.batch, now.rows) == (2, 8, 150)
    assert (now.rows_per_second, now.batch_seconds) == (100.0, 0.5)
    assert now.behind == 0
    assert now.state == "running"


def test_batches_that_passed_unseen_are_counted_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, reports = Watch("q"), Reports()
    reports.add(7, 100, 100, 150)
    watch.look(reports)  # type: ignore[arg-type]
    assert not caplog.text
    reports.recentProgress.clear()  # Spark keeps the last hundred
    reports.add(38, 10, 450, 450)
    watch.look(reports)  # type: ignore[arg-type]
    assert (watch.now.batches, watch.now.batch) == (32, 38)
    assert "q: 30 batches passed unseen" in caplog.text


def test_a_trigger_without_data_is_no_batch_and_still_tells_the_lag() -> None:
    watch, reports = Watch("q"), Reports()
    reports.add(0, 100, 100, 100)
    watch.look(reports)  # type: ignore[arg-type]
    reports.add(1, 0, 100, 140)
    assert not watch.look(reports)  # type: ignore[arg-type]
    assert watch.now.batches == 1
    assert watch.now.lag == {"fmq:/a": 40}


def test_what_was_lost_is_told_by_stream_and_in_all() -> None:
    watch, reports = Watch("q"), Reports()
    reports.add(0, 10, 30, 30, lost=20, lost_unknown=1)
    watch.look(reports)  # type: ignore[arg-type]
    assert watch.now.lost == {"fmq:/a": 20}
    assert watch.now.lost_unknown == 1
    assert watch.now.as_dict()["lost_in_all"] == 20


def test_what_was_lost_in_an_earlier_run_is_not_told_again() -> None:
    watch, reports = Watch("q"), Reports()
    reports.add(7, 10, 60, 60, lost=25, lost_unknown=2)
    before = {"fmq:/a": {"end": 30, "epoch": "1", "lost": 20, "lost_unknown": 2}}
    reports.recentProgress[0]["sources"][0]["startOffset"] = json.dumps(before)
    watch.look(reports)  # type: ignore[arg-type]
    assert (watch.now.lost, watch.now.lost_unknown) == ({"fmq:/a": 5}, 0)
    reports.add(8, 10, 90, 90, lost=26, lost_unknown=3)
    watch.look(reports)  # type: ignore[arg-type]
    assert (watch.now.lost, watch.now.lost_unknown) == ({"fmq:/a": 6}, 1)


def test_sources_of_others_say_nothing_about_lag() -> None:
    watch, reports = Watch("q"), Reports()
    reports.add(0, 10, 30, 30)
    reports.recentProgress[0]["sources"] = [{"endOffset": "3", "latestOffset": None}]
    watch.look(reports)  # type: ignore[arg-type]
    assert watch.now.lag == {}
