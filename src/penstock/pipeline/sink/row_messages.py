"""Which message, or which dead letter, does a row of a data frame become?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Tabular
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import endpoint_of
from penstock.core.message import Message
from penstock.core.stream_id import StreamId
from penstock.core.url import URL
from penstock.pipeline.spark_process import freeze_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

__all__ = [
    "LETTER",
    "OUTPUT",
    "WHOLE_TIMES",
    "dead_letters",
    "for_output",
    "left_behind",
    "letters",
    "message_rows",
    "takes_rows",
]

#: The column with the target stream of a row.
OUTPUT: Final = "output"

#: Fields of a message and their types. A column of another type is ordinary data.
_HEADER: Final = {
    "payload": {"binary", "string"},
    "type": {"int", "bigint", "smallint", "tinyint"},
    "subtype": {"int", "bigint", "smallint", "tinyint"},
    "time_ns": {"bigint"},
    "time": {"timestamp"},
    "stream": {"binary"},
    "attributes": {"binary"},
}
#: Fields that the target stream assigns anew.
_OF_A_SOURCE: Final = frozenset({"url", "seq", "created_ns"})

#: Keeps Spark's text formats from truncating times to milliseconds.
WHOLE_TIMES: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS][XXX]",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]",
}


def message_rows(frame: DataFrame, url: str | None = None) -> DataFrame:
    """Return rows with the columns of a sink, for the stream of a URL if that is known.

    A stream of rows gets a message of all columns. Otherwise a row with the column `payload`
    becomes a message of it. In a row without, all columns that are not fields of a message
    (time, type and so on) become JSON.
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    header = _header(frame)
    if url is not None and "payload" not in header and takes_rows(url):
        # Fields assigned by the original stream are not data.
        rows = frame.drop(*_OF_A_SOURCE, *(set(header) - {"time", "time_ns"}))
        return rows.mapInArrow(_Packing(url), "time_ns bigint, payload binary")
    columns = [f.col(name) for name in header if not (name == "time" and "time_ns" in header)]
    if "payload" in header:
        if _types(frame)["payload"] == "string":
            columns[header.index("payload")] = f.col("payload").cast("binary").alias("payload")
        return frame.select(*columns)
    data = [f.col(f"`{name}`") for name in frame.columns if name not in header]
    if not data:
        data = [f.col(name) for name in header]
    json = f.to_json(f.struct(*data), {"ignoreNullFields": "false", **WHOLE_TIMES})
    return frame.select(*columns, json.cast("binary").alias("payload"))


class _Packing:
    """Converts rows to messages, in Spark's tasks."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        url, endpoint = URL.parse(self._url), endpoint_of(self._url)
        assert isinstance(endpoint, Tabular)
        for batch in batches:
            if batch.num_rows:
                yield endpoint.messages_of(url, batch).select(["time_ns", "payload"])


def for_output(frame: DataFrame, name: str, url: str | None = None) -> DataFrame:
    """Return the rows as messages, with the name of their output.

    All results have the same columns, so that several frames can be united.
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    rows = message_rows(frame, url)
    there = set(rows.columns)
    now = f.current_timestamp()
    time_ns = f.unix_micros(f.col("time") if "time" in there else now) * 1000
    absent = {
        "type": f.lit(0),
        "subtype": f.lit(0),
        "time_ns": time_ns,
        "stream": f.lit(None).cast("binary"),
        "attributes": f.lit(None).cast("binary"),
    }
    return rows.select(
        f.lit(name).alias(OUTPUT),
        "payload",
        *(f.col(name) if name in there else made.alias(name) for name, made in absent.items()),
    )


def takes_rows(url: str) -> bool:
    """Tell whether a stream consists of rows, so that its messages have their own form."""
    return isinstance(endpoint_of(url), Tabular)


def left_behind(frame: DataFrame) -> list[str]:
    """Return the columns that are lost when rows with a payload become messages."""
    header = _header(frame)
    if "payload" not in header:
        return []
    return [name for name in frame.columns if name not in header and name not in _OF_A_SOURCE]


def _header(frame: DataFrame) -> list[str]:
    types = _types(frame)
    return [name for name, fitting in _HEADER.items() if types.get(name) in fitting]


def _types(frame: DataFrame) -> dict[str, str]:
    def name_of(kind: DataType) -> str:
        return kind.simpleString()

    return {field.name: name_of(field.dataType) for field in frame.schema.fields}


#: The columns of dead letters.
LETTER: Final = (
    "payload BINARY, type INT, subtype INT, time_ns BIGINT, stream BINARY, attributes BINARY"
)


def dead_letters(frame: DataFrame, receiver: str) -> DataFrame:
    """Return the rows as dead letters of a pipeline."""
    rows = for_output(frame, receiver).drop("output")
    reason = f"pipeline {receiver} sent it to its dead letters"

    def give_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield letters(batch, receiver, reason)

    return rows.mapInArrow(give_up, LETTER)


def letters(batch: pa.RecordBatch, receiver: str, reason: str) -> pa.RecordBatch:
    """Return messages, in the columns of a sink, as dead letters."""
    import pyarrow as pa  # noqa: PLC0415 - in a worker of Spark

    now = time.time_ns()
    attributes = []
    for row in batch.to_pylist():
        stream = row["stream"]
        original = Message(
            seq=0,
            time_ns=row["time_ns"],
            created_ns=now,
            type=row["type"],
            subtype=row["subtype"],
            stream=None if stream is None else StreamId.from_bytes(stream),
            attributes=row["attributes"],
            payload=row["payload"],
        )
        letter = DeadLetter(original, Code.UNKNOWN, reason, receiver, 1, now, now, now)
        attributes.append(letter.to_message().attributes)
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["attributes"] = pa.array(attributes, pa.binary())
    for name in ("type", "subtype"):  # a row may have them as any whole number
        columns[name] = columns[name].cast(pa.int32())
    return pa.RecordBatch.from_pydict(columns)
