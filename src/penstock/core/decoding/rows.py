"""Which columns do decoded messages have, and what happens to failures?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.decoding.decoder import DecodeError
from penstock.core.decoding.options import InvalidDecoding
from penstock.core.message import Message
from penstock.core.options import nearest
from penstock.core.redaction import shown
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.decoding.decoder import Decoded, Decoder, Failure
    from penstock.core.decoding.options import DecodeOptions

__all__ = ["DEAD_LETTER", "ERROR", "Rows"]

#: The column that says why a payload did not decode; null where it did.
ERROR: Final = "decode_error"

#: A dead letter as the sink accepts it, and its reason for people.
DEAD_LETTER: Final = pa.struct(
    [
        ("reason", pa.string()),
        ("payload", pa.binary()),
        ("type", pa.int32()),
        ("subtype", pa.int32()),
        ("time_ns", pa.int64()),
        ("stream", pa.binary()),
        ("attributes", pa.binary()),
    ]
)


class Rows:
    """Joins the kept columns of messages with their decoded payloads."""

    def __init__(self, decoder: Decoder, options: DecodeOptions, columns: Sequence[str]) -> None:
        """Select the columns.

        :raises InvalidDecoding: a payload or a kept column is missing, or two columns would have
            the same name.
        """
        if "payload" not in columns:
            raise InvalidDecoding((), list(columns), "there is no column payload to decode")
        if options.keep is None:
            keep = tuple(name for name in columns if name != "payload")
        else:
            keep = options.keep
        for index, name in enumerate(keep):
            if name not in columns:
                hint = nearest(name, columns, "columns")
                raise InvalidDecoding(("keep", index), name, "there is no such column", hint=hint)
        self.keep = keep
        self.has_error = options.on_error != "fail"
        self._policy = options.on_error
        self._error_type = DEAD_LETTER if options.on_error == "dead_letter" else pa.string()
        #: The columns after the kept ones.
        self.new = decoder.schema
        if self.has_error:
            self.new = self.new.append(pa.field(ERROR, self._error_type))
        self._decoder = decoder
        taken = {name.lower() for name in keep} | ({ERROR} if self.has_error else set())
        clash = [name for name in decoder.schema.names if name.lower() in taken]
        if clash:
            raise InvalidDecoding(
                ("prefix",),
                options.prefix,
                f"the payload and the message both have a column {', '.join(clash)}",
                hint="give a prefix for those of the payload, as in prefix: payload_, or leave "
                "those of the message out of keep",
            )

    def of(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Sequence[Failure]]:
        """Decode a batch of messages.

        :raises DecodeError: a payload does not decode, and the policy is to fail.
        """
        decoded = self._decoder.decode(batch)
        if decoded.failures and not self.has_error:
            raise self._error(batch, decoded.failures[0])
        columns = [batch.column(name) for name in self.keep]
        fields = [batch.schema.field(name) for name in self.keep]
        new, origin = list(decoded.rows.columns), decoded.origin
        if self.has_error:
            new, origin = self._with_errors(batch, decoded)
        if origin is not None:
            places = pa.array(origin)
            columns = [column.take(places) for column in columns]
        rows = pa.RecordBatch.from_arrays([*columns, *new], schema=pa.schema([*fields, *self.new]))
        return rows, decoded.failures

    def _with_errors(self, batch: pa.RecordBatch, decoded: Decoded) -> tuple[list[pa.Array], Any]:
        """Insert a row with nulls and the reason for each payload that did not decode."""
        rows, failures = decoded.rows, decoded.failures
        no_error = pa.nulls(rows.num_rows, self._error_type)
        if not failures:
            return [*rows.columns, no_error], decoded.origin
        assert decoded.origin is not None
        errors = pa.array(self._errors(batch, failures), self._error_type)
        origin = np.concatenate([decoded.origin, [each.row for each in failures]])
        order = np.argsort(origin, kind="stable")
        places = pa.array(order)
        columns = [
            pa.concat_arrays([column, pa.nulls(len(failures), column.type)]).take(places)
            for column in rows.columns
        ]
        return [*columns, pa.concat_arrays([no_error, errors]).take(places)], origin[order]

    def _errors(self, batch: pa.RecordBatch, failures: Sequence[Failure]) -> list[Any]:
        if self._policy == "skip":
            return [each.reason for each in failures]
        return [self._dead_letter(batch, each) for each in failures]

    def _dead_letter(self, batch: pa.RecordBatch, failure: Failure) -> dict[str, Any]:
        now = time.time_ns()
        url = _value(batch, "url", failure.row)
        stream = _value(batch, "stream", failure.row)
        original = Message(
            seq=_value(batch, "seq", failure.row) or 0,
            time_ns=_value(batch, "time_ns", failure.row) or 0,
            created_ns=_value(batch, "created_ns", failure.row) or 0,
            type=_value(batch, "type", failure.row) or 0,
            subtype=_value(batch, "subtype", failure.row) or 0,
            stream=_stream_id(stream),
            attributes=_value(batch, "attributes", failure.row),
            payload=_value(batch, "payload", failure.row) or b"",
        )
        place = "" if url is None else f" of {shown(url)}"
        letter = DeadLetter(
            original=original,
            code=Code.INVALID_ARGUMENT,
            reason=failure.reason,
            receiver=f"decode as {self._decoder.format}{place}",
            attempts=1,
            first_attempt_ns=now,
            last_attempt_ns=now,
            dead_ns=now,
        )
        sent = letter.to_message()
        return {
            "reason": letter.reason,
            "payload": sent.payload,
            "type": sent.type,
            "subtype": sent.subtype,
            "time_ns": sent.time_ns,
            "stream": sent.stream,
            "attributes": sent.attributes,
        }

    def _error(self, batch: pa.RecordBatch, failure: Failure) -> DecodeError:
        url, seq, payload = (_value(batch, name, failure.row) for name in ("url", "seq", "payload"))
        return DecodeError(self._decoder.format, url, seq, failure, payload)


def _value(batch: pa.RecordBatch, name: str, row: int) -> Any:
    """Return a value of a column, or None without that column: frames of other sources lack it."""
    index = batch.schema.get_field_index(name)
    return None if index < 0 else batch.column(index)[row].as_py()


def _stream_id(value: Any) -> StreamId | None:
    # A frame of another source may have another type of stream.
    is_id = isinstance(value, bytes) and len(value) == len(StreamId(bytes(16)))
    return StreamId(value) if is_id else None
