"""Which rows does Spark see when the source decodes the payloads?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pipeline.decoding import InvalidDecoding, Rows, decoder_for, parse_decoding
from penstock.pipeline.decoding.policy import ERROR, ERROR_DDL
from penstock.pipeline.rows import ROW_SCHEMA, spark_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

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
        decoder = decoder_for(chosen)
        self._rows = Rows(decoder, chosen, ROW_SCHEMA.names)
        kept = [spark_schema(self._rows.keep)] if self._rows.keep else []
        error = [f"{ERROR} {ERROR_DDL}"] if self._rows.has_error else []
        #: As Spark declares it.
        self.spark_schema = ", ".join([*kept, decoder.spark_schema, *error])

    def of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Decode the payloads of a batch.

        :raises DecodeError: one does not decode, and the policy is to fail.
        """
        return self._rows.of(rows)[0]
