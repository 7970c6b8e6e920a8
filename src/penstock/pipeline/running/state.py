"""Does a stage remember rows of earlier batches, where each batch is worked out by itself?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.pipeline.model import Pipeline

__all__ = ["refuse_state"]

#: Steps of Spark's plans that look at more than one row, and so keep state in a stream. A join does
#: only between streams, which SQL shows.
_STATEFUL = re.compile(
    r"(?m)^[\s+\-:!'~]*(Aggregate|Deduplicate\w*|DropDuplicates\w*|Distinct|Intersect|Except"
    r"|GlobalLimit|Offset|Tail|Window|\w*GroupsWithState\w*|\w*InPandasWithState\w*"
    r"|TransformWithState\w*)\b"
)


def refuse_state(pipeline: Pipeline, sink: str, rows: DataFrame, trunk: DataFrame) -> None:
    """Make sure that there is nothing stateful between a trunk and a sink.

    :raises ConfigError: there is. A batch by itself would give other results than the stream.
    """
    steps, before = _steps(rows), _steps(trunk)
    if len(steps) <= len(before):
        return
    from_ = pipeline.sinks[sink].from_
    raise pipeline.error(
        ("stages", from_) if from_ in pipeline.stages else ("sinks", sink),
        f"keeps state between batches ({steps[0]}), and shares its batches with other sinks",
        hint="say stateful: true, and it gets a query of its own",
        at_key=True,
    )


def _steps(frame: DataFrame) -> list[str]:
    plan = getattr(frame, "_jdf", None)
    if plan is None:  # Spark Connect does not show its plans
        return []
    found: list[str] = _STATEFUL.findall(plan.queryExecution().analyzed().toString())
    return found
