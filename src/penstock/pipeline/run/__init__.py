"""Pipelines at work: the session, data frames, queries, progress, and the end."""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names

if TYPE_CHECKING:
    from penstock.pipeline.run.backfill import Backfill, NothingToDo, Unfinished
    from penstock.pipeline.run.errors import NotStarted, QueryFailed, SparkDied
    from penstock.pipeline.run.metrics import Metrics, MetricsServer, QueryListener
    from penstock.pipeline.run.progress import Progress
    from penstock.pipeline.run.queries import SHOWN
    from penstock.pipeline.run.runner import Outcome, run
    from penstock.pipeline.run.spark import spark_session

__all__ = [
    "SHOWN",
    "Backfill",
    "Metrics",
    "MetricsServer",
    "NotStarted",
    "NothingToDo",
    "Outcome",
    "Progress",
    "QueryFailed",
    "QueryListener",
    "SparkDied",
    "Unfinished",
    "run",
    "spark_session",
]

__getattr__ = late_names(__name__)
