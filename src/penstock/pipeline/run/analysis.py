"""Which columns does every part of a pipeline have, and what is wrong, before any data comes?

Spark analyzes the plan without starting a query. With a sample, the first rows of each source are
processed as a table, and returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.errors import PySparkException

from penstock.core.errors import ConfigError
from penstock.pipeline.graph.model import Node
from penstock.pipeline.run.data_frames import Frames, other_source
from penstock.pipeline.run.errors import reason_of
from penstock.pipeline.run.queries import check_sink, rows_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import Row

    from penstock.pipeline.graph.model import Pipeline
    from penstock.pipeline.graph.plan import Plan

__all__ = ["Analysis", "ColumnType", "analyze"]

#: Options of a source that apply to streaming only.
_OF_STREAMS: Final = frozenset(
    {"maxOffsetsPerTrigger", "maxBytesPerTrigger", "hold", "stage", "lossUrl"}
)


class ColumnType(NamedTuple):
    """A column of rows."""

    name: str
    #: In Spark's terms.
    type: str
    is_nullable: bool


@dataclass
class Analysis:
    """Result of Spark's analysis of pipelines."""

    #: The output columns of every source and stage, and the input columns of every sink.
    schemas: dict[Node, list[ColumnType]] = field(default_factory=dict)
    #: All faults, with their lines.
    faults: list[ConfigError] = field(default_factory=list)
    #: The first rows of each source and stage, if requested.
    samples: dict[Node, list[Row]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "schemas": {
                str(node): [
                    {"name": one.name, "type": one.type, "nullable": one.is_nullable}
                    for one in columns
                ]
                for node, columns in self.schemas.items()
            },
            "samples": {
                str(node): [row.asDict(recursive=True) for row in rows]
                for node, rows in self.samples.items()
            },
        }


def analyze(plan: Plan, spark: SparkSession, sample: int = 0) -> Analysis:
    """Let Spark analyze a plan, and collect the columns and all faults.

    Nodes downstream of a faulty one are skipped.

    :param sample: number of rows to read and return for each source and stage
    :raises ConfigError: the rows of a sample cannot be read or processed.
    """
    found = Analysis()
    for pipeline in plan.pipelines:
        frames = Frames(pipeline, spark)
        for node, frame in _frames(pipeline, frames, found):
            fields = frame.schema.fields
            found.schemas[node] = [
                ColumnType(one.name, one.dataType.simpleString(), one.nullable) for one in fields
            ]
            for query in plan.queries_of(node) if node.name in pipeline.sinks else ():
                try:
                    check_sink(frames, pipeline, query, node.name)
                except ConfigError as error:
                    found.faults.append(error)
    if sample and not found.faults:
        for pipeline in plan.pipelines:
            _sample(pipeline, spark, sample, found)
    return found


def _sample(pipeline: Pipeline, spark: SparkSession, count: int, found: Analysis) -> None:
    """Process the first messages of each stream as a table, and collect the first rows."""
    tables = {}
    for name, source in pipeline.sources.items():
        if source.static:
            continue
        if source.format is not None:
            tables[name] = _table_of(pipeline, name, spark).limit(count)
            continue
        options = source.spark_options()
        kept = {key: value for key, value in options.items() if key not in _OF_STREAMS}
        tables[name] = spark.read.format("penstock").options(**kept).load().limit(count)
    for node, frame in _frames(pipeline, Frames(pipeline, spark, tables=tables), found):
        section = "sources" if node.name in pipeline.sources else "stages"
        if node.name not in pipeline.sinks:  # which get what comes out of those
            try:
                found.samples[node] = frame.limit(count).collect()
            except Exception as error:
                reason = reason_of(error)
                raise pipeline.error((section, node.name), reason, at_key=True) from error


def _table_of(pipeline: Pipeline, name: str, spark: SparkSession) -> DataFrame:
    """Return the current rows of a source of another format; none if it is stream-only."""
    try:
        return other_source(spark, pipeline.sources[name].model_copy(update={"static": True}))
    except PySparkException:
        return Frames(pipeline, spark).no_rows(name)


def _frames(
    pipeline: Pipeline, frames: Frames, found: Analysis
) -> Iterator[tuple[Node, DataFrame]]:
    """Yield the rows of each valid node of a pipeline, in topological order."""
    graph = pipeline.graph()
    sound: set[str] = set()
    for name in graph.topological_order():
        if not sound.issuperset(graph.parents(name)):
            continue
        try:
            is_sink = name in pipeline.sinks
            frame = rows_for(frames, pipeline, name) if is_sink else frames.rows(name)
        except ConfigError as error:
            found.faults.append(error)
            continue
        sound.add(name)
        yield Node(pipeline.name, name), frame
