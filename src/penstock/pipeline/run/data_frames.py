"""How do the sources and stages of a pipeline become data frames, and which keep state?"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException

from penstock.core.errors import PenstockError
from penstock.core.functions import FunctionNotFound, load_function
from penstock.core.options import nearest
from penstock.pipeline.graph.fields import spark_interval
from penstock.pipeline.run.errors import place_of, reason_of, words_of
from penstock.pipeline.run.modules import is_remote
from penstock.pipeline.run.spark import ROCKS_DB_FILES, STATE_STORE
from penstock.pipeline.sink.row_messages import dead_letters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pydantic import JsonValue
    from pyspark.sql import DataFrame, SparkSession

    from penstock.core.config import FieldPath
    from penstock.pipeline.graph.model import Pipeline, Source, Stage
    from penstock.pipeline.run.isolation import Isolated

__all__ = ["Frames", "check_format", "other_source", "refuse_state", "state_store", "united"]


_ROCKS_DB: Final = {
    STATE_STORE: "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    **ROCKS_DB_FILES,
}

#: Operators of Spark's plans that combine rows, and so keep state in a stream. A join does so only
#: between streams, which the SQL shows.
_STATEFUL = re.compile(
    r"(?m)^[\s+\-:!'~]*(Aggregate|Deduplicate\w*|DropDuplicates\w*|Distinct|Intersect|Except"
    r"|GlobalLimit|Offset|Tail|Window|\w*GroupsWithState\w*|\w*InPandasWithState\w*"
    r"|TransformWithState\w*)\b"
)


class Frames:
    """The data frames of one pipeline, each created on first use.

    `given` has the rows of some nodes, such as a batch of the trunk, from which everything
    downstream is computed. `tables` has messages that replace the streams of sources.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        given: Mapping[str, DataFrame] | None = None,
        losses: str | None = None,
        tables: Mapping[str, DataFrame] | None = None,
        options: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._pipeline = pipeline
        #: Messages that replace the input of sources.
        self._tables = tables or {}
        #: Options that replace those of sources.
        self._options = options or {}
        #: The folder for loss reports of sources with `failOnDataLoss: false`.
        self._losses = losses
        self._spark = spark
        self._whole: dict[str, DataFrame] = dict(given or {})
        #: Results of stages with `errors: dead_letter`.
        self._isolated: dict[str, Isolated] = {}

    def rows(self, name: str) -> DataFrame:
        """Return the output rows of a source or a stage.

        :raises ConfigError: its description does not work, as with a column that does not exist.
        """
        decode = self._pipeline.sources[name].decode if name in self._pipeline.sources else None
        return _good(self.whole(name), decode)

    def whole(self, name: str) -> DataFrame:
        """Return the output rows, and for a source also those that did not decode."""
        if name not in self._whole:
            make = self._source if name in self._pipeline.sources else self._stage
            self._whole[name] = make(name)
        return self._whole[name]

    def failures(self, name: str) -> DataFrame:
        """Return the dead letters of a source or stage: rows that did not decode or raised."""
        from penstock.pipeline.source.decoded_rows import split_failures  # noqa: PLC0415 - loads Spark

        if name in self._pipeline.sources:
            return split_failures(self.whole(name))[1]
        stage = self._pipeline.stages[name]
        bad = []
        if stage.decode is not None and stage.decode.get("on_error") == "dead_letter":
            some = [self._decoded(name, stage, i) for i in range(len(stage.from_))]
            bad = [split_failures(frame)[1] for frame in some]
        if stage.errors == "dead_letter":
            whole = self.whole(name)
            done = self._isolated.get(name)
            # During analysis there are no rows that could raise.
            bad.append(dead_letters(whole.where("false"), name) if done is None else done.bad)
        return united(bad)

    def no_rows(self, name: str) -> DataFrame:
        """Return an empty table with the columns of a source of another format."""
        source = self._pipeline.sources[name]
        # With a schema, the input need not exist.
        schema = source.schema_ or self._stream(name, source).schema
        return self._spark.createDataFrame([], schema)

    def forget(self) -> None:
        """Release the cached results of stages with `errors: dead_letter`."""
        for one in self._isolated.values():
            one.forget()

    def _source(self, name: str) -> DataFrame:
        source = self._pipeline.sources[name]
        is_table = name in self._tables
        frame = self._tables[name] if is_table else self._stream(name, source)
        decode = source.decode
        if decode is None or (source.decodes_inside and not is_table):
            return frame
        return self._try(("sources", name, "decode"), lambda: _decode(frame, decode, name))

    def _stream(self, name: str, source: Source) -> DataFrame:
        if source.format is not None:
            make = lambda: other_source(self._spark, source)  # noqa: E731 - called at once
            return self._try(("sources", name, "format"), make)
        options = dict(self._options.get(name) or source.spark_options())
        if self._losses is not None and source.goes_on_after_loss:
            options.setdefault("lossFolder", self._losses)
        if source.decodes_inside:
            options["decode"] = json.dumps(source.decode)
        reader: Any = self._spark.read if source.static else self._spark.readStream
        return self._try(("sources", name), reader.format("penstock").options(**options).load)

    def _stage(self, name: str) -> DataFrame:
        stage = self._pipeline.stages[name]
        inputs = [self._input(name, stage, i) for i in range(len(stage.from_))]
        made = self._worked(name, stage, inputs)
        streams = self._pipeline.streams_of(stage)
        if stage.errors == "fail" or any(frame.isStreaming for frame in inputs):
            return made
        from penstock.pipeline.run.isolation import isolate  # noqa: PLC0415 - loads Spark

        at = stage.from_.index(streams[0])

        def work(rows: DataFrame) -> DataFrame:
            return self._worked(name, stage, [*inputs[:at], rows, *inputs[at + 1 :]])

        done = isolate(inputs[at], work, name, f"{self._pipeline.name}.{name}")
        self._isolated[name] = done
        return done.good

    def _worked(self, name: str, stage: Stage, inputs: list[DataFrame]) -> DataFrame:
        """Apply a stage to its inputs."""
        if stage.use is not None:
            function = self._function(name, stage.use)
            return self._try(
                ("stages", name, "use"),
                lambda: _checked(function(*inputs, **stage.options), inputs),
            )
        if stage.sql is not None:
            path, make = (
                ("stages", name, "sql"),
                lambda: _checked(self._query(stage, inputs), inputs),
            )
            return self._try(path, make, stage.sql)
        return self._try(("stages", name, "from"), lambda: united(inputs))

    def _input(self, name: str, stage: Stage, index: int) -> DataFrame:
        frame = _good(self._decoded(name, stage, index), stage.decode)
        for column, delay in (stage.watermark or {}).items():
            path = ("stages", name, "watermark")
            late, frame_before = spark_interval(delay), frame
            frame = self._try(path, lambda: _with_watermark(frame_before, column, late))  # noqa: B023 - called at once
        return frame

    def _decoded(self, name: str, stage: Stage, index: int) -> DataFrame:
        frame = self.rows(stage.from_[index])
        decode = stage.decode
        if decode is None:
            return frame
        metric = name if len(stage.from_) == 1 else f"{name}.{stage.from_[index]}"
        return self._try(("stages", name, "decode"), lambda: _decode(frame, decode, metric))

    def _query(self, stage: Stage, inputs: list[DataFrame]) -> DataFrame:
        session = inputs[0].sparkSession
        assert stage.sql is not None
        if is_remote(session):
            return _remote_query(stage.sql, dict(zip(stage.from_, inputs, strict=True)))
        for view, frame in zip(stage.from_, inputs, strict=True):
            frame.createOrReplaceTempView(view)
        try:
            return session.sql(stage.sql)
        finally:
            # Other stages must not see these views, and Spark has resolved them by now. The views
            # of a batch stay until the next one: dropping them would also drop the cached rows.
            if any(one.isStreaming for one in inputs):
                for view in stage.from_:
                    session.catalog.dropTempView(view)

    def _function(self, name: str, use: str | Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(use, str):
            return use
        try:
            return load_function(use)
        except FunctionNotFound as error:
            path = ("stages", name, "use")
            raise self._pipeline.error(path, str(error), hint=error.hint) from error.__cause__

    def _try(
        self, path: FieldPath, make: Callable[[], DataFrame], sql: str | None = None
    ) -> DataFrame:
        """Call `make`, and add the place in the file to its errors."""
        try:
            return make()
        except Exception as error:
            if isinstance(error, PenstockError):
                raise self._pipeline.error(path, str(error), hint=error.hint) from error
            reason, place = reason_of(error), place_of(error)
            if not isinstance(error, PySparkException):  # which says what it is
                reason = f"{type(error).__name__}: {reason}"
            within = None if sql is None else words_of(error, sql)
            said = f"{reason} ({place})" if place else reason
            raise self._pipeline.error(path, said, within=within) from error


def _remote_query(sql: str, views: Mapping[str, DataFrame]) -> DataFrame:
    """Return an SQL query over Spark Connect, which resolves views only at execution.

    So the views are part of its plan, as with `sql("… {name}", name=frame)`.
    """
    from pyspark.sql.connect.dataframe import DataFrame as RemoteFrame  # noqa: PLC0415 - an extra
    from pyspark.sql.connect.plan import SQL, SubqueryAlias  # noqa: PLC0415

    frames: Mapping[str, Any] = views
    aliases = [SubqueryAlias(frame._plan, name) for name, frame in frames.items()]  # noqa: SLF001
    plan = SQL(sql, views=aliases)
    return RemoteFrame(plan, next(iter(frames.values())).sparkSession)


#: Packages that provide formats, as in Spark's setting `spark.jars.packages`.
_PACKAGES: Final = {
    "kafka": "org.apache.spark:spark-sql-kafka-0-10_2.13:VERSION",
    "avro": "org.apache.spark:spark-avro_2.13:VERSION",
    "delta": "io.delta:delta-spark_2.13:…",
    "iceberg": "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:…",
}
_BUILT_IN: Final = (
    *("parquet", "csv", "json", "orc", "text", "xml", "binaryFile", "rate", "rate-micro-batch"),
    *("socket", "jdbc", "console", "memory", "noop", "penstock"),
)


def check_format(spark: SparkSession, name: str) -> None:
    """Check that Spark knows a format.

    :raises PenstockError: the format does not exist, or its package is not loaded.
    """
    session = getattr(spark, "_jsparkSession", None)
    if session is None or name.lower() in {one.lower() for one in _BUILT_IN}:
        return  # Spark Connect says so when it is used
    state = session.sessionState()
    if state.dataSourceManager().dataSourceExists(name):  # one in Python
        return
    try:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - Spark has no other way to ask
        jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource(
            name, state.conf()
        )
    except Exception as error:
        package = _PACKAGES.get(name.lower())
        if package is None:
            known = [*_BUILT_IN, *_PACKAGES]
            hint = nearest(name, known, "Spark has") or "is its package in spark.jars.packages?"
            raise PenstockError(f"Spark has no format {name}", hint=hint) from error
        wanted = package.replace("VERSION", spark.version)
        raise PenstockError(
            f"Spark has no format {name}: its package is not there",
            hint=f'settings: {{spark: {{spark.jars.packages: "{wanted}"}}}}',
        ) from error


def other_source(spark: SparkSession, source: Source) -> DataFrame:
    """Return the rows of a source with `format`.

    :raises PenstockError: Spark has no such format.
    """
    assert source.format is not None
    check_format(spark, source.format)
    reader: Any = spark.read if source.static else spark.readStream
    reader = reader.format(source.format).options(**source.spark_options())
    frame: DataFrame = (reader if source.schema_ is None else reader.schema(source.schema_)).load()
    return frame


def _decode(frame: DataFrame, options: Mapping[str, JsonValue], metric: str) -> DataFrame:
    from penstock.pipeline.source.decoded_rows import decode  # noqa: PLC0415 - loads Spark

    return decode(frame, options, metric=metric)


def _good(frame: DataFrame, decode: Mapping[str, JsonValue] | None) -> DataFrame:
    if decode is None or decode.get("on_error") != "dead_letter":
        return frame
    from penstock.pipeline.source.decoded_rows import split_failures  # noqa: PLC0415 - loads Spark

    return split_failures(frame)[0]


def _with_watermark(frame: DataFrame, column: str, delay: str) -> DataFrame:
    marked = frame.withWatermark(column, delay)
    _ = marked.schema  # a column that is not there is noticed only now
    return marked


def united(frames: list[DataFrame]) -> DataFrame:
    """Return the union of frames, by column name."""
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole


def _checked(made: object, inputs: list[DataFrame]) -> DataFrame:
    if not hasattr(type(made), "writeStream"):
        raise PenstockError(f"the function returned {type(made).__name__} and not a DataFrame")
    frame: Any = made
    _ = frame.schema  # what Spark does not take is noticed only now
    if any(one.isStreaming for one in inputs) and not frame.isStreaming:
        raise PenstockError(
            "what comes out is a table and not a stream",
            hint="make it of the rows that go in; a table may be joined to them",
        )
    return frame  # type: ignore[no-any-return]


def refuse_state(pipeline: Pipeline, sink: str, rows: DataFrame, trunk: DataFrame) -> None:
    """Check that nothing between a trunk and a sink keeps state.

    :raises ConfigError: a step does: batch by batch, results would differ from the stream's.
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
    """Set the state store that the stages need, for queries started in this context.

    `transformWithState` needs RocksDB, which is not Spark's default. A query with a checkpoint
    keeps the state store that it started with.
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
