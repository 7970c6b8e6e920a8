"""What do stages remember of earlier batches: is it allowed where they stand, and where is it?"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from penstock.pipeline.model import Pipeline

__all__ = ["refuse_state", "state_store"]

#: RocksDB takes Hadoop's local file system for the one that forks, which `spark_session` leaves
#: aside; and Hadoop would go on with the one that it has, whatever is asked for.
_ROCKS_DB: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}

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


@contextmanager
def state_store(spark: SparkSession, stages: Sequence[DataFrame]) -> Iterator[None]:
    """Let a query that is started meanwhile keep its state where its stages need it.

    `transformWithState` works with RocksDB only, which is not what Spark takes by itself. A query
    that has a checkpoint stays with what it began with.
    """
    steps = {step for stage in stages for step in _steps(stage)}
    if not any(step.startswith("TransformWithState") for step in steps):
        yield
        return
    before = {key: spark.conf.get(key, None) for key in _ROCKS_DB}
    for key, value in _ROCKS_DB.items():
        spark.conf.set(key, value)
    try:
        yield  # a query has settings of its own from its start on
    finally:
        for key, earlier in before.items():
            if earlier is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, earlier)


def _steps(frame: DataFrame) -> list[str]:
    plan = getattr(frame, "_jdf", None)
    if plan is None:  # Spark Connect does not show its plans
        return []
    found: list[str] = _STATEFUL.findall(plan.queryExecution().analyzed().toString())
    return found
