"""How do the sources and stages of a pipeline become data frames?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from penstock.core.errors import PenstockError
from penstock.core.options import nearest
from penstock.pipeline.running.faults import place_of, reason_of
from penstock.pipeline.timing import spark_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import JsonValue
    from pyspark.sql import DataFrame, SparkSession

    from penstock.pipeline.model import Path, Pipeline, Stage

__all__ = ["Frames", "united"]


class Frames:
    """The data frames of one pipeline, each made when it is first asked for.

    With `given`, the rows of some nodes are there already: a batch of the trunk, and what follows
    is worked out from it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        given: Mapping[str, DataFrame] | None = None,
        losses: str | None = None,
    ) -> None:
        self._pipeline = pipeline
        #: Where sources that go on after a loss keep account of it.
        self._losses = losses
        self._spark = spark
        self._whole: dict[str, DataFrame] = dict(given or {})

    def rows(self, name: str) -> DataFrame:
        """Return the rows that come out of a source or a stage.

        :raises ConfigError: what is said about it does not work, such as a column that is not there
        """
        decode = self._pipeline.sources[name].decode if name in self._pipeline.sources else None
        return _good(self.whole(name), decode)

    def whole(self, name: str) -> DataFrame:
        """Return the same, and for a source also what it could not decode."""
        if name not in self._whole:
            make = self._source if name in self._pipeline.sources else self._stage
            self._whole[name] = make(name)
        return self._whole[name]

    def failures(self, name: str) -> DataFrame:
        """Return what a source or a stage could not decode, as dead letters."""
        from penstock.pipeline.decoding import split_failures  # noqa: PLC0415 - loads Spark

        if name in self._pipeline.sources:
            return split_failures(self.whole(name))[1]
        stage = self._pipeline.stages[name]
        bad = [split_failures(self._decoded(name, stage, i))[1] for i in range(len(stage.from_))]
        return united(bad)

    def _source(self, name: str) -> DataFrame:
        source = self._pipeline.sources[name]
        options = source.spark_options()
        if self._losses is not None and source.goes_on_after_loss:
            options.setdefault("lossFolder", self._losses)
        reader = self._spark.readStream.format("penstock").options(**options)
        frame = self._try(("sources", name), reader.load)
        if source.decode is None:
            return frame
        decode = source.decode
        return self._try(("sources", name, "decode"), lambda: _decode(frame, decode, name))

    def _stage(self, name: str) -> DataFrame:
        stage = self._pipeline.stages[name]
        inputs = [self._input(name, stage, i) for i in range(len(stage.from_))]
        if stage.use is not None:
            function = self._function(name, stage.use)
            return self._try(
                ("stages", name, "use"),
                lambda: _checked(function(*inputs, **stage.options), inputs),
            )
        if stage.sql is not None:
            return self._try(
                ("stages", name, "sql"), lambda: _checked(self._query(stage, inputs), inputs)
            )
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
        for view, frame in zip(stage.from_, inputs, strict=True):
            frame.createOrReplaceTempView(view)
        assert stage.sql is not None
        try:
            return session.sql(stage.sql)
        finally:
            # Other stages must not find what is no input of theirs. Spark has looked the views up
            # by now, except for Spark Connect, which does so whenever it works. The views of a
            # batch stay until the next, since Spark would forget the rows that are kept as well.
            if inputs[0].isStreaming and hasattr(session, "_jsparkSession"):
                for view in stage.from_:
                    session.catalog.dropTempView(view)

    def _function(self, name: str, use: str | Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(use, str):
            return use
        module_name, _, path = use.partition(":")
        where: Path = ("stages", name, "use")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise self._pipeline.error(
                    where, f"{module_name} cannot be imported: {error}"
                ) from error
            raise self._pipeline.error(
                where,
                f"there is no module {module_name}",
                hint="it should be installed, beside the file of the pipeline, or on PYTHONPATH",
            ) from None
        except Exception as error:
            raise self._pipeline.error(
                where, f"{module_name} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        for part in path.split("."):
            if not hasattr(found, part):
                known = (n for n, v in vars(found).items() if callable(v) and n[0] != "_")
                raise self._pipeline.error(
                    where,
                    f"{module_name} has no function {path}",
                    hint=nearest(path, known, "it has"),
                )
            found = getattr(found, part)
        function: Callable[..., Any] = found
        return function

    def _try(self, path: Path, make: Callable[[], DataFrame]) -> DataFrame:
        """Say where it stands in the file if Spark does not take it."""
        try:
            return make()
        except Exception as error:
            if isinstance(error, PenstockError):
                raise self._pipeline.error(path, str(error), hint=error.hint) from error
            reason, place = reason_of(error), place_of(error)
            if not isinstance(error, PySparkException):  # which says what it is
                reason = f"{type(error).__name__}: {reason}"
            raise self._pipeline.error(path, f"{reason} ({place})" if place else reason) from error


def _decode(frame: DataFrame, options: Mapping[str, JsonValue], metric: str) -> DataFrame:
    from penstock.pipeline.decoding import decode  # noqa: PLC0415 - loads Spark

    return decode(frame, options, metric=metric)


def _good(frame: DataFrame, decode: Mapping[str, JsonValue] | None) -> DataFrame:
    if decode is None or decode.get("on_error") != "dead_letter":
        return frame
    from penstock.pipeline.decoding import split_failures  # noqa: PLC0415 - loads Spark

    return split_failures(frame)[0]


def _with_watermark(frame: DataFrame, column: str, delay: str) -> DataFrame:
    marked = frame.withWatermark(column, delay)
    _ = marked.schema  # a column that is not there is noticed only now
    return marked


def united(frames: list[DataFrame]) -> DataFrame:
    """Return the rows of all of them; columns are found by their names."""
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole


def _checked(made: object, inputs: list[DataFrame]) -> DataFrame:
    if not hasattr(type(made), "writeStream"):
        raise PenstockError(f"the function returned {type(made).__name__} and not a DataFrame")
    frame: Any = made
    _ = frame.schema  # what Spark does not take is noticed only now
    if inputs[0].isStreaming and not frame.isStreaming:
        raise PenstockError(
            "what comes out is a table and not a stream",
            hint="make it of the rows that go in; a table may be joined to them",
        )
    return frame  # type: ignore[no-any-return]
