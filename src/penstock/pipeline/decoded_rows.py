"""Which rows does Spark see when the source decodes the payloads?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.core.decoding import InvalidDecoding, Rows, decoder_for, parse_decoding
from penstock.pipeline.rows import ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.types import StructType

__all__ = ["DecodedRows"]


class DecodedRows:
    """The columns of messages, and behind them those that their payloads became."""

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
        """As Spark declares it."""
        kept = [ROW_SCHEMA.field(name) for name in self._rows.keep]
        return from_arrow_schema(pa.schema([*kept, *self._rows.new]))

    def of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Decode the payloads of a batch.

        :raises DecodeError: one does not decode, and the policy is to fail.
        """
        return self._rows.of(rows)[0]
