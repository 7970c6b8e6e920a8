"""How is a query of a plan started on Spark?"""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from penstock.pipeline.provenance import origin_of
from penstock.pipeline.running.dead import dead_letters
from penstock.pipeline.running.files import write_once
from penstock.pipeline.running.frames import Frames, united
from penstock.pipeline.running.rows_out import (
    WHOLE_TIMES,
    for_output,
    left_behind,
    message_rows,
)
from penstock.pipeline.running.state import refuse_state, state_store
from penstock.pipeline.task_process import RUN

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from penstock.pipeline.model import Pipeline, Sink
    from penstock.pipeline.plan import Query
    from penstock.pipeline.timing import Trigger

__all__ = ["SHOWN", "Prepared"]

#: Rows that the console gets of each batch, and one more if there are more.
SHOWN = 20


class Prepared:
    """A query of which all data frames are made, so that its mistakes are known."""

    def __init__(
        self,
        query: Query,
        pipeline: Pipeline,
        spark: SparkSession,
        show: Callable[[str, DataFrame], None],
        losses: str | None = None,
    ) -> None:
        """Make the data frames; in the folder `losses` sources keep account of what is gone.

        :raises ConfigError: something that the pipeline says does not work; with its line.
        """
        self.query = query
        self.pipeline = pipeline
        self._show = show
        self._spark = spark
        self._frames = Frames(pipeline, spark, losses=losses)
        #: The name that Spark gave it for life; batches that come early wait for it.
        self._id: Future[str] = Future()
        #: For people: columns that a stream does not carry.
        self.notes: list[str] = []
        for name in query.sinks:
            self._check(name)

    def start(self, checkpoint: str, trigger: Trigger) -> StreamingQuery:
        """Start it; what it has done is kept in the directory `checkpoint`."""
        writer = self._writer(checkpoint)
        writer = writer.queryName(self.query.name).trigger(**trigger.as_spark())
        sink = self._sink(self.query.sinks[0])
        writer = writer.outputMode(sink.mode).option("checkpointLocation", checkpoint)
        with state_store(self._spark, [self._frames.whole(name) for name in self.query.stages]):
            started = writer.start()
        self._id.set_result(started.id)
        return started

    @property
    def sinks(self) -> list[Sink]:
        return [self._sink(name) for name in self.query.sinks]

    def _sink(self, name: str) -> Sink:
        return self.pipeline.sinks[name]

    def _check(self, name: str) -> None:
        """Find out what is wrong with the rows of a sink while its line can still be told."""
        sink = self._sink(name)
        frame = _rows_for(self._frames, self.pipeline, name)
        if self.query.kind == "foreach_batch":
            assert self.query.trunk is not None
            refuse_state(self.pipeline, name, frame, self._frames.whole(self.query.trunk))
        missing = [column for column in sink.partition_by or () if column not in frame.columns]
        if missing:
            raise self.pipeline.error(
                ("sinks", name, "partition_by"),
                f"there is no column {missing[0]}",
                hint=f"there are: {', '.join(frame.columns)}",
            )
        if sink.stream is not None and (behind := left_behind(frame)):
            self.notes.append(
                f"{name}: a message is made of payload; it does not carry {', '.join(behind)}"
            )

    def _writer(self, checkpoint: str) -> DataStreamWriter:
        query, first = self.query, self.query.sinks[0]
        if query.kind == "multiplexed":
            return self._to_streams(self._together(query))
        sink = self._sink(first)
        if query.kind == "single" and sink.stream is not None and sink.mode == "append":
            return self._to_streams(message_rows(_rows_for(self._frames, self.pipeline, first)))
        return self._batch_by_batch(checkpoint)

    def _together(self, query: Query) -> DataFrame:
        if query.trunk is not None:
            return for_output(self._frames.rows(query.trunk), query.sinks)
        parts = [for_output(_rows_for(self._frames, self.pipeline, s), [s]) for s in query.sinks]
        return united(parts)

    def _to_streams(self, rows: DataFrame) -> DataStreamWriter:
        return rows.writeStream.format("penstock").options(**_targets(self.pipeline, self.query))

    def _batch_by_batch(self, checkpoint: str) -> DataStreamWriter:
        query, pipeline, show = self.query, self.pipeline, self._show
        trunk = query.trunk if query.kind == "foreach_batch" else None
        frame = (
            _rows_for(self._frames, pipeline, query.sinks[0])
            if trunk is None
            else self._frames.whole(trunk)
        )
        id_ = self._id

        def write(batch: DataFrame, number: int) -> None:
            _Batches(pipeline, query, id_.result(), checkpoint, show).write(batch, number, trunk)

        return frame.writeStream.foreachBatch(write)


class _Batches:
    """Writes one batch to each of the sinks of a query."""

    def __init__(
        self,
        pipeline: Pipeline,
        query: Query,
        id_: str,
        checkpoint: str,
        show: Callable[[str, DataFrame], None],
    ) -> None:
        self._pipeline = pipeline
        self._query = query
        self._id = id_
        self._checkpoint = checkpoint
        self._show = show

    def write(self, batch: DataFrame, number: int, trunk: str | None) -> None:
        sinks = self._pipeline.sinks
        if trunk is None:
            name = self._query.sinks[0]
            if sinks[name].stream is None:
                self._to_files(name, batch, number)
            else:  # Spark's own way to a sink like ours knows no mode but append
                self._to_streams(message_rows(batch), number)
            return
        batch.persist()
        try:
            frames = Frames(self._pipeline, batch.sparkSession, {trunk: batch})
            rows = {name: _rows_for(frames, self._pipeline, name) for name in self._query.sinks}
            streams = [name for name in rows if sinks[name].stream is not None]
            if streams:
                parts = [for_output(rows[name], [name]) for name in streams]
                self._to_streams(united(parts), number)
            for name, frame in rows.items():
                if name not in streams:
                    self._to_files(name, frame, number)
        finally:
            batch.unpersist()

    def _to_streams(self, rows: DataFrame, number: int) -> None:
        options = _targets(self._pipeline, self._query)
        writer = rows.write.format("penstock").mode("append")
        named = {"query": self._id, "batch": str(number), "checkpointLocation": self._checkpoint}
        writer.options(**options, **named).save()

    def _to_files(self, name: str, frame: DataFrame, number: int) -> None:
        sink = self._pipeline.sinks[name]
        if sink.kind == "console":
            self._show(name, frame.limit(SHOWN + 1))
            return
        columns, options = sink.partition_by or (), {**WHOLE_TIMES, **sink.options}
        origin = origin_of(self._checkpoint, number, _run(frame))
        write_once(frame, sink.kind, sink.target, self._id, number, columns, options, origin)


def _run(frame: DataFrame) -> str | None:
    """Return the name that Spark gives a query from its start to its end."""
    context = getattr(frame.sparkSession, "_jsparkSession", None)  # Spark Connect has none
    if context is None:
        return None
    run: str | None = context.sparkContext().getLocalProperty(RUN)
    return run


def _rows_for(frames: Frames, pipeline: Pipeline, sink: str) -> DataFrame:
    wanted = pipeline.sinks[sink]
    if pipeline.takes_failures(sink):
        return frames.failures(wanted.from_)
    rows = frames.rows(wanted.from_)
    return dead_letters(rows, pipeline.name) if wanted.kind == "dead_letter" else rows


def _targets(pipeline: Pipeline, query: Query) -> dict[str, Any]:
    """Return the options that say where the rows of a query go."""
    streams = {name: pipeline.sinks[name].stream for name in query.sinks}
    outputs = {name: url for name, url in streams.items() if url is not None}
    more = {k: v for name in outputs for k, v in pipeline.sinks[name].options.items()}
    if query.kind == "single":
        return {"url": next(iter(outputs.values())), **more}
    return {"outputs": json.dumps(outputs, sort_keys=True), **more}
