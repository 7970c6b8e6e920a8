"""Does a pipeline do what its cases say: these rows or messages in, those rows out?

A case runs on tables, which is fast. One whose messages come in batches runs as a stream:
watermarks advance between the batches, and rows can be late.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, JsonValue, model_validator
from pyspark.sql import types as t

from penstock.core.batch import batch_from_messages
from penstock.core.config import ConfigModel, Lines, Text, WrongField, parse_with_lines, read_text
from penstock.core.endpoints import create, open_writer
from penstock.core.errors import ConfigError, InvalidOption, PenstockError
from penstock.core.message import Message
from penstock.core.options import nearest
from penstock.core.units import parse_time
from penstock.pipeline.graph.check import raise_all
from penstock.pipeline.graph.plan import input_of_first_dead_letter_stage
from penstock.pipeline.run.data_frames import Frames, state_store
from penstock.pipeline.run.errors import QueryFailed
from penstock.pipeline.run.queries import rows_for
from penstock.pipeline.source.ranges import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.core.config import FieldPath
    from penstock.pipeline.graph.model import Pipeline, Source
    from penstock.pipeline.graph.plan import Plan

__all__ = ["Cases", "Verdict", "cases_beside", "load_cases", "run_cases"]

#: The default time of the first message; each further one is a second later.
_BEGINNING: Final = parse_time("2000-01-01")
_SECOND: Final = 1_000_000_000
#: The most rows shown of a difference.
_SHOWN: Final = 10
#: Tolerance: numbers in a file have fewer digits than computed ones.
_PRECISION: Final = 1e-6


class _Message(ConfigModel):
    """A message of a source: its payload as text, as JSON or in hexadecimal."""

    text: str | None = None
    json_: JsonValue | None = Field(default=None, alias="json")
    hex: str | None = None
    type: int = 0
    subtype: int = 0
    #: ISO 8601.
    time: str | None = None

    @model_validator(mode="after")
    def _has_one_payload(self) -> _Message:
        given = self.model_fields_set & {"text", "json_", "hex"}
        if len(given) != 1:
            raise WrongField("should have one of text, json and hex")
        _ = self.at(0)  # a payload or a time that is none is told of at once
        return self

    def at(self, seq: int) -> Message:
        """Return the message with this sequence number."""
        try:
            happened = _BEGINNING + seq * _SECOND if self.time is None else parse_time(self.time)
            payload = bytes.fromhex(self.hex) if self.hex is not None else self._text().encode()
        except InvalidOption as error:
            raise WrongField(error.reason, hint=error.hint) from None
        except ValueError:
            raise WrongField("hex should be pairs of hexadecimal digits") from None
        return Message(seq, happened, happened, self.type, self.subtype, None, None, payload)

    def _text(self) -> str:
        return self.text if self.text is not None else json.dumps(self.json_)


class _Given(ConfigModel):
    """Input: messages of a source, at once or in batches, or rows of any node."""

    messages: tuple[_Message, ...] | None = None
    batches: tuple[tuple[_Message, ...], ...] | None = None
    rows: tuple[dict[str, Any], ...] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> _Given:
        if len(self.model_fields_set) != 1:
            raise WrongField("should have one of messages, batches and rows")
        return self


class _Expected(ConfigModel):
    """Expected output of a node, or input of a sink."""

    #: All expected rows; only the named columns are compared.
    rows: tuple[dict[str, Any], ...] | None = None
    count: int | None = Field(default=None, ge=0)
    order: Literal["any", "given"] = "any"

    @model_validator(mode="after")
    def _says_something(self) -> _Expected:
        if (self.rows is None) == (self.count is None):
            raise WrongField("should have rows, or count")
        if self.rows and any(row.keys() != self.rows[0].keys() for row in self.rows):
            raise WrongField("rows should all name the same columns")
        return self


class _Case(ConfigModel):
    case: Text
    #: Required if the file has several pipelines.
    pipeline: Text | None = None
    given: dict[str, _Given]
    expect: dict[str, _Expected] = Field(min_length=1)


class _Document(ConfigModel):
    cases: tuple[_Case, ...] = Field(min_length=1)


class Cases(NamedTuple):
    """The cases of a file."""

    cases: tuple[_Case, ...]
    lines: Lines


@dataclass(frozen=True)
class Verdict:
    """Result of a case."""

    case: str
    seconds: float
    #: Lines that describe the differences; empty: the case passed.
    differences: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not self.differences


def cases_beside(file: Path) -> Path:
    """Return the default path of the cases of a pipeline: `NAME.test.yaml` for `NAME.yaml`."""
    return file.with_name(f"{file.stem}.test{file.suffix}")


def load_cases(path: str | os.PathLike[str], plan: Plan) -> Cases:
    """Read the cases of a file, and check that they fit the pipelines.

    :raises ConfigError: there is exactly one fault; it has the line.
    :raises ConfigErrors: there are several faults.
    """
    text, file = read_text(path), os.fspath(path)
    document, lines = parse_with_lines(text, _Document, file)
    found = document.cases
    raise_all(
        [
            fault
            for index, case in enumerate(found)
            for fault in _faults(plan, case, lines, ("cases", index))
        ]
    )
    return Cases(found, lines)


def _faults(plan: Plan, case: _Case, lines: Lines, path: FieldPath) -> Iterator[ConfigError]:
    names = [pipeline.name for pipeline in plan.pipelines]
    if case.pipeline is None and len(names) > 1:
        hint = f"there are {', '.join(names)}"
        yield lines.error(path, "should say which pipeline it is about", hint=hint)
        return
    if case.pipeline is not None and case.pipeline not in names:
        hint = nearest(case.pipeline, names, "there are")
        yield lines.error((*path, "pipeline"), f"there is no {case.pipeline}", hint=hint)
        return
    pipeline = _pipeline_of(plan, case)
    nodes = pipeline.graph().nodes
    for section, given in (("given", case.given), ("expect", case.expect)):
        for name in given:
            where = (*path, section, name)
            if name not in nodes:
                reason = f"there is no source, stage or sink {name}"
                hint = nearest(name, nodes, "there are")
                yield lines.error(where, reason, hint=hint, at_key=True)
            elif section == "given" and name in pipeline.sinks:
                yield lines.error(where, "is a sink, and no rows come out of it", at_key=True)
    for name, one in case.given.items():
        source = pipeline.sources.get(name)
        if one.rows is None and (name in pipeline.stages or (source and source.format)):
            what = "is a stage" if source is None else f"reads {source.format}"
            reason = f"{name} {what}, and has rows, and no messages"
            yield lines.error((*path, "given", name), reason, at_key=True)
    streamed = [name for name, one in case.given.items() if one.batches is not None]
    whole = [
        name
        for name, one in case.given.items()
        if one.batches is None and name in nodes and not pipeline.is_static(name)
    ]
    if streamed and whole:
        reason = f"{streamed[0]} comes in batches, and {whole[0]} does not"
        yield lines.error((*path, "given", whole[0]), reason, at_key=True)


def _pipeline_of(plan: Plan, case: _Case) -> Pipeline:
    return plan.pipelines[0] if case.pipeline is None else plan.pipeline(case.pipeline)


def run_cases(plan: Plan, cases: Cases, spark: SparkSession) -> Iterator[Verdict]:
    """Run the cases one by one, and yield their results."""
    for index, case in enumerate(cases.cases):
        began = time.monotonic()
        try:
            run = _Run(_pipeline_of(plan, case), case, spark, cases.lines, ("cases", index))
            differences = run.differences()
        except PenstockError as error:
            differences = [str(error)]
        yield Verdict(case.case, time.monotonic() - began, tuple(differences))


class _Run:
    """A run of one case."""

    def __init__(
        self,
        pipeline: Pipeline,
        case: _Case,
        spark: SparkSession,
        lines: Lines,
        path: FieldPath,
    ) -> None:
        self._pipeline = pipeline
        self._case = case
        self._spark = spark
        self._lines = lines
        self._path = path

    def differences(self) -> list[str]:
        """Return the differences from what the case expects, as lines.

        :raises ConfigError: a column does not exist, or a value does not fit it; or the pipeline
            is not valid.
        :raises QueryFailed: a function fails with these rows.
        """
        is_stream = any(one.batches is not None for one in self._case.given.values())
        found = self._as_stream() if is_stream else self._as_table()
        return [
            line
            for name, (schema, rows) in found.items()
            for line in self._compared(name, schema, rows)
        ]

    # --- as a table ------------------------------------------------------------------------------

    def _as_table(self) -> dict[str, tuple[t.StructType, list[dict[str, Any]]]]:
        tables = {}
        for name, source in self._pipeline.sources.items():
            tables[name] = self._table(name, source)
        found = {}
        with ExitStack() as ends:
            plain = Frames(self._pipeline, self._spark, tables=tables)
            ends.callback(plain.forget)
            rows = {
                name: self._frame(name, plain.whole(name).schema, one.rows)
                for name, one in self._case.given.items()
                if one.rows is not None
            }
            frames = Frames(self._pipeline, self._spark, rows, tables=tables)
            ends.callback(frames.forget)
            for name in self._case.expect:
                frame = self._rows(frames, name)
                try:
                    collected = frame.collect()
                except Exception as error:
                    raise QueryFailed.of(name, error, "it fails with what is given") from error
                found[name] = frame.schema, [row.asDict(recursive=True) for row in collected]
        return found

    def _table(self, name: str, source: Source) -> DataFrame:
        """Return the messages of a case as rows of a source; no rows for another format."""
        if source.format is not None:
            return Frames(self._pipeline, self._spark).no_rows(name)
        given = self._case.given.get(name)
        messages = () if given is None else given.messages or ()
        batch = batch_from_messages([one.at(seq) for seq, one in enumerate(messages)])
        rows = rows_of(source.urls[0], batch)
        return self._spark.createDataFrame(pa.Table.from_batches([rows]))

    def _frame(self, name: str, schema: t.StructType, rows: Sequence[dict[str, Any]]) -> DataFrame:
        """Return given rows as the output of a node, with defaults or null for omitted columns."""
        values = []
        source = self._pipeline.sources.get(name)
        url = "" if source is None or not source.urls else source.urls[0]
        for index, row in enumerate(rows):
            where = (*self._path, "given", name, "rows", index)
            made = self._converted(schema, row, where)
            happened = _BEGINNING + index * _SECOND
            message = {
                "url": url,
                "seq": index,
                "time_ns": happened,
                "created_ns": happened,
                "type": 0,
                "subtype": 0,
                "payload": b"",
                "time": _moment(happened),
            }
            values.append(
                tuple(
                    made[one.name] if one.name in made else message.get(one.name)
                    for one in schema.fields
                )
            )
        nullable = t.StructType([t.StructField(x.name, x.dataType) for x in schema.fields])
        return self._spark.createDataFrame(values, nullable)

    def _converted(
        self, schema: t.StructType, row: Mapping[str, Any], where: FieldPath
    ) -> dict[str, Any]:
        kinds = {one.name: one.dataType for one in schema.fields}
        made = {}
        for name, value in row.items():
            if name not in kinds:
                raise self._lines.error(
                    (*where, name),
                    f"there is no column {name}",
                    hint=nearest(name, kinds, "there are"),
                    at_key=True,
                )
            try:
                made[name] = _value(kinds[name], value)
            except (TypeError, ValueError, AttributeError) as error:
                said = f"{value!r} is no {kinds[name].simpleString()}: {error}"
                raise self._lines.error((*where, name), said) from error
        return made

    def _rows(self, frames: Frames, name: str) -> DataFrame:
        is_sink = name in self._pipeline.sinks
        return rows_for(frames, self._pipeline, name) if is_sink else frames.rows(name)

    # --- as a stream -----------------------------------------------------------------------------

    def _as_stream(self) -> dict[str, tuple[t.StructType, list[dict[str, Any]]]]:
        with ExitStack() as ends:
            folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="penstock-test-"))
            sources = {}
            given = {}
            for name, source in self._pipeline.sources.items():
                if source.format is not None or source.static:
                    sources[name] = source
                    given[name] = self._beside_batches(name, source, folder)
                    continue
                sources[name] = _in_place_of(source, f"log:{folder}/{name}")
                create(f"log:{folder}/{name}")
            pipeline = replace(self._pipeline, sources=sources)
            frames = Frames(pipeline, self._spark, given)
            found: dict[str, tuple[t.StructType, list[dict[str, Any]]]] = {}
            queries = []
            for name in self._case.expect:
                frame = self._rows(frames, name)
                found[name] = frame.schema, []
                with state_store(self._spark, [frames.whole(one) for one in pipeline.stages]):
                    checkpoint = f"{folder}/{name}.checkpoint"
                    query = self._start(name, frames, frame, found[name][1], checkpoint)
                queries.append(query)
                ends.callback(query.stop)
            self._feed(sources, queries)
        return found

    def _beside_batches(self, name: str, source: Source, folder: str) -> DataFrame:
        """Return the rows of a table, or an empty stream for another format."""
        tables = {name: self._table(name, source)}
        plain = Frames(self._pipeline, self._spark, tables=tables).whole(name)
        one = self._case.given.get(name)
        if source.static and one is not None and one.rows is not None:
            return self._frame(name, plain.schema, one.rows)
        if source.static:
            return plain
        Path(folder, name).mkdir()
        return self._spark.readStream.schema(plain.schema).json(f"{folder}/{name}")

    def _start(
        self,
        name: str,
        frames: Frames,
        frame: DataFrame,
        rows: list[dict[str, Any]],
        checkpoint: str,
    ) -> StreamingQuery:
        sink = self._pipeline.sinks.get(name)
        mode = "append" if sink is None else sink.mode
        root = input_of_first_dead_letter_stage(self._pipeline, name)
        if root is not None:
            frame = frames.whole(root)

        def take(batch: DataFrame, _number: int) -> None:
            if mode == "complete":
                rows.clear()  # each batch has all results again
            if root is None:
                rows.extend(row.asDict(recursive=True) for row in batch.collect())
                return
            given = Frames(self._pipeline, batch.sparkSession, {root: batch.persist()})
            try:  # as a run does it
                found = self._rows(given, name)
                rows.extend(row.asDict(recursive=True) for row in found.collect())
            finally:
                given.forget()
                batch.unpersist()

        writer = frame.writeStream.outputMode(mode).option("checkpointLocation", checkpoint)
        try:
            return writer.foreachBatch(take).start()
        except Exception as error:
            raise QueryFailed.of(name, error, "mend its stages, or its mode") from error

    def _feed(self, sources: Mapping[str, Source], queries: Sequence[StreamingQuery]) -> None:
        """Append the batches one by one, each after the queries have processed the previous one."""
        batches = {name: list(one.batches or ()) for name, one in self._case.given.items()}
        seqs = dict.fromkeys(batches, 0)
        for number in range(max(map(len, batches.values()))):
            for name, all_ in batches.items():
                if number < len(all_):
                    with open_writer(sources[name].urls[0]) as writer:
                        for message in all_[number]:
                            made = message.at(seqs[name])
                            writer.write(
                                made.payload,
                                type=made.type,
                                subtype=made.subtype,
                                time_ns=made.time_ns,
                            )
                            seqs[name] += 1
            for name, query in zip(self._case.expect, queries, strict=True):
                try:
                    query.processAllAvailable()
                except Exception as error:
                    raise QueryFailed.of(name, error, "it fails with what is given") from error

    # --- what is not as it should be -------------------------------------------------------------

    def _compared(
        self, name: str, schema: t.StructType, rows: list[dict[str, Any]]
    ) -> Iterator[str]:
        wanted = self._case.expect[name]
        if wanted.rows is None:
            if wanted.count != len(rows):
                yield f"{name}: {_rows_of(wanted.count or 0)} expected, {len(rows)} came"
                yield from _listed("+", rows)
            return
        sink = self._pipeline.sinks.get(name)
        if sink is not None and sink.kind == "dead_letter":
            schema = t.StructType([*schema.fields, t.StructField("reason", t.StringType())])
            rows = [{**row, "reason": _reason(row["attributes"])} for row in rows]
        expected = [
            self._converted(schema, row, (*self._path, "expect", name, "rows", index))
            for index, row in enumerate(wanted.rows)
        ]
        named = expected[0] if expected else ()
        came = [{column: row[column] for column in named} for row in rows]
        if wanted.order == "given" and len(came) == len(expected):
            missing = [a for a, b in zip(expected, came, strict=True) if not _is_same(a, b)]
            surplus = [b for a, b in zip(expected, came, strict=True) if not _is_same(a, b)]
        else:
            missing = _left(expected, came, _is_same)
            surplus = _left(came, expected, lambda row, wanted: _is_same(wanted, row))
        if missing or surplus:
            yield f"{name}: {_rows_of(len(expected))} expected, {len(came)} came"
            yield from _listed("-", missing)
            yield from _listed("+", surplus)


def _in_place_of(source: Source, url: str) -> Source:
    """Return a copy of a source that reads another stream from its start."""
    nothing = ("starting_offsets", "max_offsets_per_trigger", "max_bytes_per_trigger", "hold")
    more = ("stage", "loss_url", "fail_on_data_loss", "min_partitions")
    changed: dict[str, Any] = {**dict.fromkeys((*nothing, *more)), "urls": (url,), "options": {}}
    return source.model_copy(update=changed)


def _left(
    some: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    is_same: Callable[[Any, Any], bool],
) -> list[Any]:
    """Return the rows of `some` that have no counterpart in `others`."""
    rest = list(others)
    left = []
    for row in some:
        index = next((i for i, other in enumerate(rest) if is_same(row, other)), None)
        if index is None:
            left.append(row)
        else:
            del rest[index]
    return left


def _is_same(expected: Any, came: Any) -> bool:
    """Tell whether two values are equal, floating-point numbers within `_PRECISION`."""
    if isinstance(expected, float) and isinstance(came, float):
        both = math.isnan(expected) and math.isnan(came)
        # Zero has no digits to compare. A small number has: any other would be near it.
        near = 0.0 if expected else _PRECISION
        return both or math.isclose(expected, came, rel_tol=_PRECISION, abs_tol=near)
    if isinstance(expected, dict) and isinstance(came, dict):
        return expected.keys() == came.keys() and all(
            _is_same(value, came[key]) for key, value in expected.items()
        )
    if isinstance(expected, list) and isinstance(came, list):
        return len(expected) == len(came) and all(map(_is_same, expected, came))
    return bool(expected == came)


def _value(kind: t.DataType, value: Any) -> Any:
    """Convert a value of the file to what Spark returns for its type.

    :raises ValueError: it does not fit the type.
    """
    if value is None:
        return None
    match kind:
        case t.ArrayType(elementType=inner):
            return [_value(inner, one) for one in value]
        case t.MapType(valueType=inner):
            return {key: _value(inner, one) for key, one in value.items()}
        case t.StructType(fields=fields):
            return {one.name: _value(one.dataType, value.get(one.name)) for one in fields}
        case t.IntegralType():
            if isinstance(value, bool) or int(value) != value:
                raise ValueError("it is no whole number")
            if not -(1 << _BITS[type(kind)] - 1) <= value < 1 << _BITS[type(kind)] - 1:
                raise ValueError("it is too large")
            return int(value)
        case t.DecimalType():
            return _decimal(kind, value)
        case _:
            convert = _PLAIN.get(type(kind))
            return value if convert is None else convert(value)


def _moment(time_ns: int) -> datetime:
    """Return a time as PySpark returns it: a naive datetime in the local time zone."""
    moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time_ns // 1000)
    return moment.astimezone().replace(tzinfo=None)


def _local_moment(value: object) -> datetime:
    """Return a time without a zone."""
    text = str(value)
    moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=parse_time(text) // 1000)
    if datetime.fromisoformat(text).tzinfo is not None:
        raise ValueError("it has a zone")
    return moment.replace(tzinfo=None)


def _decimal(kind: t.DecimalType, value: object) -> Decimal:
    if isinstance(value, bool):
        raise TypeError("it is no number")
    try:
        number = Decimal(str(value))
        stored = number.quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
    except InvalidOperation:
        raise ValueError("it is no number, or too large") from None
    if stored != number or len(stored.as_tuple().digits) > kind.precision:
        raise ValueError("it has more digits")
    return stored


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it is neither true nor false")
    return value


def _bytes(value: object) -> bytes:
    text = str(value)
    return bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode()


#: How a value of the file is converted to a column's type.
_PLAIN: Final[Mapping[type[t.DataType], Callable[[Any], Any]]] = {
    t.BinaryType: _bytes,
    t.BooleanType: _boolean,
    t.DateType: lambda value: date.fromisoformat(str(value)),
    t.DoubleType: float,
    t.FloatType: float,
    t.StringType: str,
    t.TimestampType: lambda value: _moment(parse_time(str(value))),
    t.TimestampNTZType: _local_moment,
}
#: With room for the digits of any DECIMAL.
_EXACT: Final = Context(prec=76)
_BITS: Final = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}


def _reason(attributes: bytes | None) -> str | None:
    return None if attributes is None else json.loads(attributes).get("reason")


def _rows_of(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _listed(sign: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows[:_SHOWN]:
        said = ", ".join(f"{name}: {_shown(value)}" for name, value in row.items())
        yield f"  {sign} {said}"
    if len(rows) > _SHOWN:
        yield f"  {sign} and {len(rows) - _SHOWN} more"


def _shown(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        try:
            text = bytes(value).decode()
        except UnicodeDecodeError:
            return f"0x{bytes(value).hex()}"
        return repr(text) if text.isprintable() else f"0x{bytes(value).hex()}"
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return repr(value) if isinstance(value, str) else str(value)
