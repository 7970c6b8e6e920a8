"""Pipelines at work: data frames, queries, progress, and the end."""

from penstock.pipeline.running.faults import NotStarted, QueryFailed
from penstock.pipeline.running.progress import Progress
from penstock.pipeline.running.queries import SHOWN
from penstock.pipeline.running.runner import Outcome, run

__all__ = ["SHOWN", "NotStarted", "Outcome", "Progress", "QueryFailed", "run"]
