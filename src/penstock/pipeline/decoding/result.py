"""What comes out of decoding payloads, and what is said of those that do not decode?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.core.errors import InvalidOption, Malformed
from penstock.pipeline.decoding.types import ddl_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["DecodeError", "Decoded", "Decoder", "Failure", "Part"]

_FIRST_BYTES: Final = 16
_LONGEST_FINDING: Final = 200


class DecodeError(Malformed):
    """A payload does not decode, and the policy is to fail."""

    def __init__(
        self, format: str, url: str | None, seq: int | None, failure: Failure, payload: bytes | None
    ) -> None:
        message = "a message" if seq is None else f"message {seq}"
        place = "" if url is None else f" of {url}"
        start = "" if payload is None else f"; {first_bytes(payload)}"
        super().__init__(
            f"{message}{place} does not decode as {format}",
            "its payload",
            failure.expected,
            f"{failure.found}{start}",
            hint="correct the options of decode, or let it go on with on_error: skip (they are "
            "counted) or on_error: dead_letter (they are kept)",
        )
        self.format = format
        self.url = url
        self.seq = seq


def first_bytes(payload: bytes) -> str:
    """Show how a payload starts."""
    if not payload:
        return "it is empty"
    more = " …" if len(payload) > _FIRST_BYTES else ""
    return f"{len(payload):,} bytes that start with {payload[:_FIRST_BYTES].hex(' ')}{more}"


class Failure(NamedTuple):
    """One payload that does not decode."""

    #: The message's place in the batch.
    row: int
    expected: str
    found: str

    @property
    def reason(self) -> str:
        return f"expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows that payloads became. Every payload either became rows or is a failure."""

    #: The new columns only.
    rows: pa.RecordBatch
    #: For each row, the place of its message in the batch; None: one row each, none failed.
    origin: NDArray[np.int64] | None
    failures: Sequence[Failure]


class Part(NamedTuple):
    """What a format makes of payloads, before its columns have their final names."""

    columns: Sequence[pa.Array]
    origin: NDArray[np.int64] | None
    failures: Sequence[Failure]


class Decoder(ABC):
    """Turns payloads into columns. It is sent to Spark's tasks, so it must pickle."""

    format: ClassVar[str]

    def __init__(self, schema: pa.Schema, prefix: str) -> None:
        """Name the new columns.

        :raises InvalidOption: two of them have the same name.
        """
        names = [prefix + name for name in schema.names]
        seen: dict[str, str] = {}
        for name in names:
            other = seen.setdefault(name.lower(), name)
            if names.count(name) > 1 or other != name:
                raise InvalidOption(
                    "columns", name, "two columns have this name", hint="SQL ignores case"
                )
        self._plain = schema
        self._schema = pa.schema(
            [field.with_name(name) for field, name in zip(schema, names, strict=True)]
        )

    @property
    def schema(self) -> pa.Schema:
        """The new columns, in types that Spark has."""
        return self._schema

    @property
    def spark_schema(self) -> str:
        """The same as Spark's DDL."""
        return ddl_of(self._schema)

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        """Decode the column `payload` of a batch.

        What is wrong with a payload is told as a failure, and never raised.

        :raises Malformed: there is no such column, or it does not hold bytes.
        """
        payloads = _payloads(batch)
        present: NDArray[np.int64] | None = None
        failures: list[Failure] = []
        if payloads.null_count:
            valid = payloads.is_valid().to_numpy(zero_copy_only=False)
            failures = [
                Failure(row, "a payload", "null") for row in np.flatnonzero(~valid).tolist()
            ]
            present = np.flatnonzero(valid)
            payloads = payloads.drop_null()
        part = self._decode(payloads)
        origin = part.origin
        if origin is None and (part.failures or present is not None):
            origin = np.arange(len(payloads), dtype=np.int64)
        if present is not None:
            assert origin is not None
            origin = present[origin]
            failures += [each._replace(row=int(present[each.row])) for each in part.failures]
            failures.sort()
        else:
            failures += sorted(part.failures)
        rows = pa.RecordBatch.from_arrays(list(part.columns), schema=self._schema)
        return Decoded(rows, origin, tuple(_bounded(each) for each in failures))

    @abstractmethod
    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        """Decode payloads of which none is null; `origin` and `row` are places among them."""

    def _nothing(self) -> list[pa.Array]:
        return [pa.array([], field.type) for field in self._plain]


def _payloads(batch: pa.RecordBatch) -> pa.LargeBinaryArray:
    index = batch.schema.get_field_index("payload")
    if index < 0:
        raise Malformed("rows to decode", "columns", "with payload", batch.schema.names)
    column: Any = batch.column(index)
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise Malformed("rows to decode", "column payload", "binary", column.type)
    # One form for all that follows. It shares the bytes, only the offsets are widened.
    return column.cast(pa.large_binary())


def _bounded(failure: Failure) -> Failure:
    # An error of a parser may quote the payload, which may be of any size, and no text.
    found = failure.found.encode(errors="replace").decode()
    if len(found) > _LONGEST_FINDING:
        found = found[: _LONGEST_FINDING - 1] + "…"
    return failure._replace(found=found)
