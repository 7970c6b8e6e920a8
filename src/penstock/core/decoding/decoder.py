"""What does a decoder do with payloads, and how does it report those that do not decode?

`Decoder` is the interface. Its implementations share the rest: all payloads of a batch as one
buffer (`Bytes`), and a parser of many payloads at a time (`parse_all`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.decoding.schema import ddl_of
from penstock.core.errors import InvalidOption, Malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = [
    "MOST_VALUES",
    "Bytes",
    "DecodeError",
    "Decoded",
    "Decoder",
    "Failure",
    "Parsed",
    "Part",
    "Refused",
    "one_array",
    "parse_all",
    "too_many_values",
    "valid_text",
]

#: The most values of a column, and bytes of its text.
MOST_VALUES: Final = np.iinfo(np.int32).max

_FIRST_BYTES: Final = 16
_LONGEST_FINDING: Final = 200
_NOTHING: Final = np.empty(0, np.uint8)
#: Bytes parsed per call. A parser needs a few times this memory.
_MOST_BYTES: Final = 64 << 20
#: A range of at most this many payloads is parsed one by one instead of halved.
_FEW: Final = 6


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
    """Format the first bytes of a payload."""
    if not payload:
        return "it is empty"
    more = " …" if len(payload) > _FIRST_BYTES else ""
    return f"{len(payload):,} bytes that start with {payload[:_FIRST_BYTES].hex(' ')}{more}"


def too_many_values(found: str) -> Malformed:
    """Return the error for a batch that is too large to become columns."""
    return Malformed(
        "a batch of payloads",
        "values of one column",
        f"at most {MOST_VALUES:,}",
        found,
        hint="set spark.sql.execution.arrow.maxRecordsPerBatch lower, or decode smaller batches",
    )


class Failure(NamedTuple):
    """One payload that does not decode."""

    #: The message's index in the batch.
    row: int
    expected: str
    found: str

    @property
    def reason(self) -> str:
        return f"expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoded rows.

    A payload that decodes may have no rows; one that does not is a failure.
    """

    #: The new columns only.
    rows: pa.RecordBatch
    #: For each row, the index of its message in the batch; None: one row each, none failed.
    origin: NDArray[np.int64] | None
    failures: Sequence[Failure]


class Part(NamedTuple):
    """Decoded payloads of one format, before its columns get their final names."""

    columns: Sequence[pa.Array]
    origin: NDArray[np.int64] | None
    failures: Sequence[Failure]


class Decoder(ABC):
    """Decodes payloads to columns. Must pickle, because Spark's tasks get it."""

    format: ClassVar[str]

    def __init__(self, schema: pa.Schema, prefix: str) -> None:
        """Set the names of the new columns.

        :raises InvalidOption: two columns have the same name.
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
        """The new columns, with types that Spark supports."""
        return self._schema

    @property
    def spark_schema(self) -> str:
        """The schema as Spark's DDL."""
        return ddl_of(self._schema)

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        """Decode the column `payload` of a batch.

        A bad payload is returned as a failure, never raised.

        :raises Malformed: the batch has no such column, or it does not hold bytes.
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
        """Decode payloads without nulls; `origin` and `row` are indices into them."""

    def _nothing(self) -> list[pa.Array]:
        return [pa.array([], field.type) for field in self._plain]


def _payloads(batch: pa.RecordBatch) -> pa.LargeBinaryArray:
    index = batch.schema.get_field_index("payload")
    if index < 0:
        raise Malformed("rows to decode", "columns", "with payload", batch.schema.names)
    column: Any = batch.column(index)
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise Malformed("rows to decode", "column payload", "binary", column.type)
    # Normalise to one type. It shares the bytes, only the offsets are widened.
    return column.cast(pa.large_binary())


def _bounded(failure: Failure) -> Failure:
    # A parser's error may quote the payload, which may be of any size, and not text.
    found = failure.found.encode(errors="replace").decode()
    if len(found) > _LONGEST_FINDING:
        found = found[: _LONGEST_FINDING - 1] + "…"
    return failure._replace(found=found)


# --- many payloads as one buffer -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bytes:
    """Contiguous payloads, and the start of each."""

    data: NDArray[np.uint8]
    #: One more than the number of payloads: the last is the end of all.
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, payloads: pa.LargeBinaryArray) -> Bytes:
        """Return a view of payloads without nulls, without a copy; the array may be a slice."""
        _, offsets, data = payloads.buffers()
        if not len(payloads):
            return cls(_NOTHING, np.zeros(1, np.int64))
        places = np.frombuffer(offsets, np.int64, len(payloads) + 1, payloads.offset * 8)
        start, end = int(places[0]), int(places[-1])
        raw = _NOTHING if start == end else np.frombuffer(data, np.uint8, end - start, start)
        return cls(raw, places - start)

    @classmethod
    def from_lengths(cls, data: NDArray[np.uint8], lengths: NDArray[np.int64]) -> Bytes:
        return cls(data, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def starts(self) -> NDArray[np.int64]:
        return self.offsets[:-1]

    @property
    def ends(self) -> NDArray[np.int64]:
        return self.offsets[1:]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def only(self, kept: NDArray[np.bool_]) -> Bytes:
        """Return a selection of the payloads, contiguous again."""
        lengths = self.lengths
        return Bytes.from_lengths(self.data[np.repeat(kept, lengths)], lengths[kept])

    def slice(self, start: int, end: int) -> Bytes:
        """Return the payloads from `start` up to `end`, without a copy."""
        places = self.offsets[start : end + 1]
        return Bytes(self.data[places[0] : places[-1]], places - places[0])

    def at(self, index: int) -> bytes:
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def counts(self, byte: int) -> NDArray[np.int64]:
        """Count a byte in each payload."""
        places = np.flatnonzero(self.data == byte)
        return np.diff(np.searchsorted(places, self.offsets)).astype(np.int64)

    def lines(self) -> pa.Buffer:
        """Return all payloads, each followed by a line feed."""
        nothing, feed = (pa.scalar(text, pa.large_binary()) for text in (b"", b"\n"))
        lines = pc.binary_join_element_wise(self.binary(), nothing, feed).buffers()[2]
        return lines.slice(0, len(self.data) + len(self))

    def binary(self) -> pa.LargeBinaryArray:
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)


def valid_text(values: pa.Array) -> NDArray[np.bool_] | None:
    """Tell which values are UTF-8; None: all are."""
    try:
        values.cast(pa.large_string() if pa.types.is_large_binary(values.type) else pa.string())
    except pa.ArrowInvalid:
        return np.array([_is_text(value) for value in values.to_pylist()], np.bool_)
    return None


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- many texts in one go --------------------------------------------------------------------


class Refused(Exception):
    """At least one of the payloads does not parse."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected = expected
        self.found = found


class Parsed(NamedTuple):
    """The rows of successfully parsed payloads."""

    rows: pa.Table
    #: Rows of each payload; None: one each.
    counts: NDArray[np.int64] | None


def parse_all(
    lengths: NDArray[np.int64],
    parse: Callable[[int, int], Parsed],
    schema: pa.Schema,
    at_once: int = _MOST_BYTES,
) -> tuple[list[pa.Array], NDArray[np.int64], list[Failure]]:
    """Parse all payloads, as many at a time as possible.

    `parse(start, end)` either accepts or refuses a whole range. A refused range is halved until
    the bad payloads are isolated: k bad ones of n cost about k log(n) calls, and all others are
    still parsed many at a time. `at_once` limits the bytes of one call, except for a single payload
    that is longer.
    """
    pieces: list[pa.Table] = []
    origins: list[NDArray[np.int64]] = []
    failures: list[Failure] = []
    waiting = _ranges(lengths, at_once)[::-1]
    while waiting:
        start, end = waiting.pop()
        try:
            rows, counts = parse(start, end)
        except Refused as refused:
            if end - start == 1:
                failures.append(Failure(start, refused.expected, refused.found))
            elif end - start <= _FEW:
                waiting += [(row, row + 1) for row in reversed(range(start, end))]
            else:
                middle = (start + end) // 2
                waiting += [(middle, end), (start, middle)]
            continue
        places = np.arange(start, end, dtype=np.int64)
        pieces.append(rows)
        origins.append(places if counts is None else np.repeat(places, counts))
    whole = pa.concat_tables([schema.empty_table(), *pieces]).combine_chunks()
    origin = np.concatenate(origins) if origins else np.empty(0, np.int64)
    return [one_array(column) for column in whole.columns], origin, failures


def _ranges(lengths: NDArray[np.int64], at_once: int) -> list[tuple[int, int]]:
    if not len(lengths):
        return []
    group = np.cumsum(lengths) // at_once
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(lengths)]
    return [(start, end) for start, end in pairwise(cuts) if start < end]


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one contiguous array."""
    chunks: Sequence[pa.Array] = column.chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [column.combine_chunks()])
