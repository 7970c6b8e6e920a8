"""How are payloads decoded, in a Spark data frame or while the source reads them?

decode(df, format="struct", layout="float azimuth; uint16_t gates; float dbz[64];")

A payload that does not decode is never left out silently. `on_error` says what happens:

- `fail`, the default: the query fails, and names the message, what was expected and found.
- `skip`: the row is dropped and counted, in the query's observed metrics and in the log of the
  task.
- `dead_letter`: the row stays, without values, and its column `decode_error` has the message as a
  dead letter; `split_failures` separates these from the others.

The decoder is `penstock.core.decoding`, which needs no Spark; its names are exported here, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType

from penstock.core.decoding import (
    AnyDecodeOptions,
    Decoded,
    DecodeError,
    DecodeOptions,
    Decoder,
    Failure,
    InvalidDecoding,
    Rows,
    decoder_for,
    parse_decoding,
)
from penstock.core.decoding.rows import ERROR
from penstock.core.errors import InvalidOption
from penstock.pipeline.source.ranges import ROW_SCHEMA
from penstock.pipeline.spark_process import freeze_modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, Observation

__all__ = [
    "AnyDecodeOptions",
    "DecodeError",
    "DecodeOptions",
    "Decoded",
    "DecodedRows",
    "Decoder",
    "Failure",
    "InvalidDecoding",
    "Rows",
    "decode",
    "decoder_for",
    "parse_decoding",
    "split_failures",
]

log = logging.getLogger(__name__)

#: The column that is summed up, and the names of the sums.
_METRIC: Final = "decode"


def decode(
    df: DataFrame,
    options: DecodeOptions | Mapping[str, Any] | None = None,
    *,
    metric: str | Observation = _METRIC,
    **more: Any,
) -> DataFrame:
    """Turn the column `payload` into columns, as in `decode(df, format="struct", layout="<d")`.

    With `on_error="skip"` the frame counts: `decoded` and `skipped` are observed metrics under
    the name `metric`, which a streaming query has in its progress (`observedMetrics`). In a batch
    give an `Observation` to get at them. Several in one query need different names.

    With `on_error="dead_letter"` the frame has a further column, `decode_error`: see
    `split_failures`.

    :raises InvalidOption: an option is unknown or missing, or its value does not fit.
    :raises Unsupported: a library is missing that the format needs.
    """
    if isinstance(options, DecodeOptions):
        if more:
            raise InvalidOption("decode", sorted(more), "options were given twice")
        chosen = options
    else:
        chosen = parse_decoding({**(options or {}), **more})
    rows = Rows(decoder_for(chosen), chosen, df.columns)
    kept = df.select(*(f.col(f"`{name}`") for name in rows.keep)).schema
    new = from_arrow_schema(rows.new)
    schema = StructType(
        [StructField(x.name, x.dataType, x.nullable) for x in (*kept.fields, *new.fields)]
    )
    found = df.mapInArrow(_Task(rows), schema)
    if chosen.on_error != "skip":
        return found
    skipped = f.count(f.col(ERROR))
    return (
        found.observe(
            metric, (f.count(f.lit(1)) - skipped).alias("decoded"), skipped.alias("skipped")
        )
        .where(f.col(ERROR).isNull())
        .drop(ERROR)
    )


def split_failures(df: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Separate the rows that decoded from the others, which become dead letters.

    The second frame has the columns of a sink (payload, type, subtype, time_ns, stream and
    attributes), so that a stream gets each message as the dead letter that
    `penstock.core.dead_letter.DeadLetter.from_message` reads.

    :raises InvalidOption: the frame is not one of `decode` with `on_error="dead_letter"`.
    """
    kinds = {field.name: field.dataType for field in df.schema}
    if not isinstance(kinds.get(ERROR), StructType):
        raise InvalidOption(
            "on_error",
            None,
            f"the frame has no dead letters in a column {ERROR}",
            hint='decode(df, …, on_error="dead_letter")',
        )
    good = df.where(f.col(ERROR).isNull()).drop(ERROR)
    bad = df.where(f.col(ERROR).isNotNull()).select(f"{ERROR}.*").drop("reason")
    return good, bad


class _Task:
    """Decodes the batches of a Spark task."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        failed = 0
        first: str | None = None
        for batch in batches:
            rows, failures = self._rows.of(batch)
            if failures and first is None:
                first = failures[0].reason
            failed += len(failures)
            yield rows
        if failed:
            log.warning("%d payloads did not decode; the first: %s", failed, first)


class DecodedRows:
    """The columns of messages, followed by those of their decoded payloads."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Choose the columns.

        :raises InvalidOption: an option is unknown or missing, or its value does not fit.
        """
        chosen = parse_decoding(dict(options))
        if chosen.on_error == "skip":
            raise InvalidDecoding(
                ("on_error",),
                "skip",
                "a source has no place to count what it leaves out",
                hint='decode(df, …, on_error="skip") counts it in the progress of the query',
            )
        self._rows = Rows(decoder_for(chosen), chosen, ROW_SCHEMA.names)

    @property
    def spark_schema(self) -> StructType:
        """The schema in Spark's DDL."""
        kept = [ROW_SCHEMA.field(name) for name in self._rows.keep]
        return from_arrow_schema(pa.schema([*kept, *self._rows.new]))

    def of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Decode the payloads of a batch.

        :raises DecodeError: a payload does not decode, and `on_error` is `fail`.
        """
        return self._rows.of(rows)[0]
