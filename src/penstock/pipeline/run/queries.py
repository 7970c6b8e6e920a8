"""How is a query of a plan started on Spark?"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.core.errors import PenstockError
from penstock.pipeline.run.data_frames import (
    Frames,
    check_format,
    refuse_state,
    state_store,
    united,
)
from penstock.pipeline.run.modules import Carried, is_remote
from penstock.pipeline.sink.file_sink import Files, write_once
from penstock.pipeline.sink.row_messages import (
    WHOLE_TIMES,
    dead_letters,
    for_output,
    left_behind,
    message_rows,
    takes_rows,
)
from penstock.pipeline.source.checkpoint import origin_of
from penstock.pipeline.spark_process import RUN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from penstock.pipeline.graph.fields import Trigger
    from penstock.pipeline.graph.model import Pipeline, Sink
    from penstock.pipeline.graph.plan import Query

__all__ = ["SHOWN", "Prepared", "check_sink", "rows_for"]

#: Rows of each batch for the console; one more row tells that there are more.
SHOWN = 20


class Prepared:
    """A query with all data frames created, so that its faults are known before it starts."""

    def __init__(
        self,
        query: Query,
        pipeline: Pipeline,
        spark: SparkSession,
        show: Callable[[str, DataFrame], None],
        losses: str | None = None,
        options: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Create the data frames; `losses` is the folder for loss reports.

        :param options: options that replace those of sources
        :raises ConfigError: the pipeline does not work; with the line.
        """
        self.query = query
        self.pipeline = pipeline
        self._show = show
        self._spark = spark
        self._frames = Frames(pipeline, spark, losses=losses, options=options)
        #: Spark's id of the query; batches that start before it is known wait for it.
        self._id: Future[str] = Future()
        #: Notes for the user: columns that a stream does not carry.
        self.notes = [
            note for name in query.sinks for note in check_sink(self._frames, pipeline, query, name)
        ]

    def start(self, checkpoint: str, trigger: Trigger) -> StreamingQuery:
        """Start the query, with its progress in the directory `checkpoint`."""
        writer = self._writer(checkpoint)
        # By its checkpoint: in one session a backfill may run beside the query that it is of.
        name = checkpoint.rstrip("/").rpartition("/")[2]
        writer = writer.queryName(name).trigger(**trigger.as_spark())
        sink = self._sink(self.query.sinks[0])
        writer = writer.outputMode(sink.mode).option("checkpointLocation", checkpoint)
        with state_store(self._spark, [self._frames.whole(name) for name in self.query.stages]):
            started = writer.start()
        if not self._id.done():  # one that is started again has the same
            self._id.set_result(started.id)
        return started

    @property
    def sinks(self) -> list[Sink]:
        return [self._sink(name) for name in self.query.sinks]

    def _sink(self, name: str) -> Sink:
        return self.pipeline.sinks[name]

    def _writer(self, checkpoint: str) -> DataStreamWriter:
        query, first = self.query, self.query.sinks[0]
        sink = self._sink(first)
        if query.kind == "single" and sink.kind == "format":
            return self._to_format(rows_for(self._frames, self.pipeline, first), sink)
        is_stream = query.kind == "single" and sink.stream is not None and sink.mode == "append"
        if is_stream or query.kind == "multiplexed":
            return self._to_streams(_together(self._frames, self.pipeline, query))
        return self._batch_by_batch(checkpoint)

    def _to_format(self, rows: DataFrame, sink: Sink) -> DataStreamWriter:
        assert sink.format is not None
        writer = rows.writeStream.format(sink.format).options(**sink.options)
        writer = writer if sink.path is None else writer.option("path", sink.path)
        return writer if sink.partition_by is None else writer.partitionBy(*sink.partition_by)

    def _to_streams(self, rows: DataFrame) -> DataStreamWriter:
        return rows.writeStream.format("penstock").options(**_targets(self.pipeline, self.query))

    def _batch_by_batch(self, checkpoint: str) -> DataStreamWriter:
        query, pipeline, show = self.query, self.pipeline, self._show
        trunk = query.trunk if query.kind == "foreach_batch" else None
        frame = (
            rows_for(self._frames, pipeline, query.sinks[0])
            if trunk is None
            else self._frames.whole(trunk)
        )
        if is_remote(self._spark):
            return frame.writeStream.foreachBatch(_RemoteBatches(pipeline, query, checkpoint))
        id_ = self._id

        def write(batch: DataFrame, number: int) -> None:
            _Batches(pipeline, query, id_.result(), checkpoint, show).write(batch, number, trunk)

        return frame.writeStream.foreachBatch(write)


def check_sink(frames: Frames, pipeline: Pipeline, query: Query, name: str) -> list[str]:
    """Check the rows of a sink while errors can still name its line.

    Return notes for the user: columns that a stream does not carry.

    :raises ConfigError: the rows do not fit the sink.
    """
    sink = pipeline.sinks[name]
    frame = rows_for(frames, pipeline, name)
    if sink.format is not None:
        try:
            check_format(frame.sparkSession, sink.format)
        except PenstockError as error:
            where = ("sinks", name, "format")
            raise pipeline.error(where, str(error), hint=error.hint) from error
    if query.kind == "foreach_batch":
        assert query.trunk is not None
        refuse_state(pipeline, name, frame, frames.whole(query.trunk))
    if sink.kind == "console" and is_remote(frame.sparkSession):
        raise pipeline.error(
            ("sinks", name, "console"),
            "rows are shown where they are, and over Spark Connect that is on the server",
            hint="write them to a stream, and look at that: penstock cat URL --follow",
        )
    missing = [column for column in sink.partition_by or () if column not in frame.columns]
    if missing:
        raise pipeline.error(
            ("sinks", name, "partition_by"),
            f"there is no column {missing[0]}",
            hint=f"there are: {', '.join(frame.columns)}",
        )
    behind = [] if sink.stream is None else left_behind(frame)
    said = f"{name}: a message is made of payload; it does not carry {', '.join(behind)}"
    return [said] if behind else []


class _RemoteBatches:
    """Writes batches in a process of the Spark Connect server."""

    def __init__(self, pipeline: Pipeline, query: Query, checkpoint: str) -> None:
        self._carried = Carried.of([pipeline])
        self._pipeline = replace(pipeline, lines=None)  # there is no such file
        self._query = query
        self._checkpoint = checkpoint

    def __call__(self, batch: DataFrame, number: int) -> None:
        if self._carried is not None:
            self._carried.unpack()
        # On the server only the checkpoint has the query's id.
        text = batch.sparkSession.read.text(f"{self._checkpoint}/metadata").collect()[0][0]
        trunk = self._query.trunk if self._query.kind == "foreach_batch" else None
        id_ = str(json.loads(text)["id"])
        writer = _Batches(self._pipeline, self._query, id_, self._checkpoint, lambda *_: None)
        writer.write(batch, number, trunk)


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
                self._to_streams(message_rows(batch, sinks[name].stream), number)
            return
        batch.persist()
        frames = Frames(self._pipeline, batch.sparkSession, {trunk: batch})
        try:
            if _outputs(self._pipeline, self._query):
                self._to_streams(_together(frames, self._pipeline, self._query), number)
            for name in self._query.sinks:
                if sinks[name].stream is None:
                    self._to_files(name, rows_for(frames, self._pipeline, name), number)
        finally:
            frames.forget()
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
        if sink.format is not None:
            writer = frame.write.format(sink.format).mode("append").options(**sink.options)
            writer.partitionBy(*(sink.partition_by or ())).save(sink.path)
            return
        columns, options = sink.partition_by or (), {**WHOLE_TIMES, **sink.options}
        origin = origin_of(self._checkpoint, number, _run(frame))
        wanted = Files(sink.kind, sink.target, columns, options, sink.layout, bool(sink.announce))
        write_once(frame, wanted, self._id, number, origin)


def _run(frame: DataFrame) -> str | None:
    """Return Spark's run id of the query."""
    context = getattr(frame.sparkSession, "_jsparkSession", None)  # Spark Connect has none
    if context is None:
        return None
    run: str | None = context.sparkContext().getLocalProperty(RUN)
    return run


def rows_for(frames: Frames, pipeline: Pipeline, sink: str) -> DataFrame:
    """Return the rows that a sink gets."""
    wanted = pipeline.sinks[sink]
    if pipeline.takes_failures(sink):
        return frames.failures(wanted.from_)
    rows = frames.rows(wanted.from_)
    return dead_letters(rows, pipeline.name) if wanted.kind == "dead_letter" else rows


def _together(frames: Frames, pipeline: Pipeline, query: Query) -> DataFrame:
    """Return the rows for all streams of a query, with the target in a column if there are two."""
    outputs = [
        (name, rows_for(frames, pipeline, name), urls[0])
        for name, urls in _outputs(pipeline, query).items()
    ]
    if len(outputs) == 1:
        [(_, rows, url)] = outputs
        return message_rows(rows, url)
    return united([for_output(rows, name, url) for name, rows, url in outputs])


def _outputs(pipeline: Pipeline, query: Query) -> dict[str, list[str]]:
    """Return the streams of a query, grouped under the first sink that gets the same messages.

    So Spark passes each message on once, however many streams get it.
    """
    first: dict[tuple[str, str], str] = {}
    outputs: dict[str, list[str]] = {}
    for name in query.sinks:
        sink = pipeline.sinks[name]
        if sink.stream is None:
            continue
        is_alone = sink.kind == "dead_letter" or takes_rows(sink.stream)
        key = first.setdefault((sink.from_, name if is_alone else ""), name)
        outputs.setdefault(key, []).append(sink.stream)
    return outputs


def _targets(pipeline: Pipeline, query: Query) -> dict[str, Any]:
    """Return the options of the sink of a query: its target URLs and further options."""
    outputs = _outputs(pipeline, query)
    sinks = [pipeline.sinks[name] for name in query.sinks]
    more = {k: v for sink in sinks if sink.stream for k, v in sink.options.items()}
    if len(outputs) == 1:  # all rows go to all of its streams
        return {"url": json.dumps(*outputs.values()), **more}
    return {"outputs": json.dumps(outputs, sort_keys=True), **more}
