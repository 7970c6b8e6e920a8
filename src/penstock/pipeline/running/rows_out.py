"""Which message does a row of a data frame become?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["OUTPUT", "WHOLE_TIMES", "for_output", "left_behind", "message_rows"]

#: The column that tells the streams of a query apart.
OUTPUT: Final = "output"

#: What a message carries, and as what. Another column of that name is data like any other.
_HEADER: Final = {
    "payload": {"binary", "string"},
    "type": {"int", "bigint", "smallint", "tinyint"},
    "subtype": {"int", "bigint", "smallint", "tinyint"},
    "time_ns": {"bigint"},
    "time": {"timestamp"},
    "stream": {"binary"},
    "attributes": {"binary"},
}
#: What a message had where it came from; the stream that it goes to gives its own.
_OF_A_SOURCE: Final = frozenset({"url", "seq", "created_ns"})

#: For Spark's text formats, which would cut times to milliseconds.
WHOLE_TIMES: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS][XXX]",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]",
}


def message_rows(frame: DataFrame) -> DataFrame:
    """Return the columns that a sink takes.

    A row with the column `payload` becomes a message of it. Of one without, all columns that are
    not the message's own (its time, type and so on) become JSON.
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    header = _header(frame)
    columns = [f.col(name) for name in header if not (name == "time" and "time_ns" in header)]
    if "payload" in header:
        if _types(frame)["payload"] == "string":
            columns[header.index("payload")] = f.encode(f.col("payload"), "UTF-8").alias("payload")
        return frame.select(*columns)
    data = [f.col(f"`{name}`") for name in frame.columns if name not in header]
    if not data:
        data = [f.col(name) for name in header]
    json = f.to_json(f.struct(*data), {"ignoreNullFields": "false", **WHOLE_TIMES})
    return frame.select(*columns, f.encode(json, "UTF-8").alias("payload"))


def for_output(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the rows once for each of the streams that get them, with its name.

    All have the same columns, so that the rows of several frames can be put together.
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    rows = message_rows(frame)
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
    outputs: list[Column] = [f.lit(name) for name in names]
    return rows.select(
        f.explode(f.array(*outputs)).alias(OUTPUT) if len(names) > 1 else outputs[0].alias(OUTPUT),
        "payload",
        *(f.col(name) if name in there else made.alias(name) for name, made in absent.items()),
    )


def left_behind(frame: DataFrame) -> list[str]:
    """Return the columns of rows with a payload that are no part of a message."""
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
