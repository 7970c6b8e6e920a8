"""How do pulses become beams in Spark, on many cores and across the borders of its batches?

Each task works on its part of a stream, and makes beams of all dwells that begin and end in it.
What is left at both ends, and everything before a part knows its radar's metadata, goes on as
packets. One task a stream then brings those of neighbours together, and with those of the last
batch, which Spark keeps as its state: metadata and the open dwell, as packets again.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from penstock.core.batch import numbers_of
from penstock.core.errors import PenstockError
from penstock.radar.beams import BEAM_SCHEMA
from penstock.radar.dwells import BeamMaker, DwellOptions, cut
from penstock.radar.iwrf.pulses import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

__all__ = ["moments", "moments_of_batch"]

#: What goes on behind the dwell before it, beams, and what begins a dwell.
_GOES_ON, _BEAMS, _BEGINS = range(3)
#: Between both steps. A payload is packets, or beams as an Arrow stream.
_PARTS: Final = pa.schema(
    [
        pa.field("url", pa.string()),
        pa.field("seq", pa.int64()),
        pa.field("part", pa.int32()),
        pa.field("kind", pa.int32()),
        pa.field("payload", pa.binary()),
    ]
)
_PARTS_DDL: Final = "url string, seq bigint, part int, kind int, payload binary"
#: Bytes of packets that a task works on at once.
_AT_ONCE: Final = 64 << 20


def moments(
    messages: Any,
    pulses: int | None = None,
    degrees: float | None = None,
    velocity_sign: int = 1,
    attenuation: bool = False,
) -> Any:
    """Make beams of IWRF messages: a stage of a pipeline, and a function of a batch.

    Of a `DataFrame` of messages it returns a `DataFrame` of beams. In a stream a dwell is open
    until its end is seen, in whichever batch. Of a `Batch` it returns the beams as a table, that
    of the last dwell too; for batches that belong together see `BeamMaker`.

    :param pulses: of a dwell; or
    :param degrees: of a dwell; with neither as the radar's own metadata says
    :param velocity_sign: -1 of a receiver that has Q the other way around
    :param attenuation: add to reflectivities what gases take

    :raises InvalidOption: a value does not fit.
    """
    options = DwellOptions(pulses, degrees, velocity_sign, attenuation)
    if isinstance(messages, pa.RecordBatch):
        return moments_of_batch(messages, options)
    return _stage(messages, options)


def moments_of_batch(batch: pa.RecordBatch, options: DwellOptions) -> pa.Table:
    """Return the beams in a batch of messages."""
    found = cut(bytes_of(batch), options, is_start=True, is_end=True)
    return found.beams


def _stage(messages: DataFrame, options: DwellOptions) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - only with Spark

    missing = {"url", "seq", "payload"} - set(messages.columns)
    if missing:
        raise PenstockError(
            f"moments are made of messages, and these have no {', '.join(sorted(missing))}",
            hint="put the stage behind a source, without decode",
        )
    parts = messages.select("url", "seq", "payload").mapInArrow(
        lambda batches: _parts(batches, options), _PARTS_DDL
    )
    groups = parts.groupBy("url")
    if messages.isStreaming:
        joined = groups.applyInPandasWithState(
            lambda _, frames, state: _join_stream(frames, state, options),
            "payload binary",
            "state binary",
            "append",
            "NoTimeout",
        )
    else:
        joined = groups.applyInArrow(lambda table: _join_table(table, options), "payload binary")
    return joined.mapInArrow(_beams, from_arrow_schema(BEAM_SCHEMA))


# --- in the tasks of the source -------------------------------------------------------------------


def _parts(batches: Iterable[pa.RecordBatch], options: DwellOptions) -> Iterator[pa.RecordBatch]:
    """Make beams of what is whole in a part of a stream, and keep its ends."""
    part: _Part | None = None
    for batch in batches:
        for some in _by_url(batch):
            url = some.column("url")[0].as_py()
            if part is None or part.url != url:
                if part is not None:
                    yield from part.finish()
                part = _Part(url, int(numbers_of(some, "seq")[0]), options)
            yield from part.feed(some)
    if part is not None:
        yield from part.finish()


def _by_url(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    urls = batch.column("url").dictionary_encode().indices.to_numpy(zero_copy_only=False)
    edges = [0, *(np.flatnonzero(np.diff(urls)) + 1).tolist(), batch.num_rows]
    for start, end in itertools.pairwise(edges):
        if end > start:
            yield batch.slice(start, end - start)


class _Part:
    """A part of one stream, in one task."""

    def __init__(self, url: str, seq: int, options: DwellOptions) -> None:
        self.url = url
        self._seq = seq
        self._options = options
        self._number = 0
        #: What may belong to the dwell before, until one is known to begin.
        self._head: bytes | None = b""
        self._maker: BeamMaker | None = None

    def feed(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        data = bytes_of(batch)
        if self._maker is not None:
            yield from self._told(_BEAMS, _stream_of(self._maker.feed(data)))
            return
        assert self._head is not None
        whole = np.concatenate((np.frombuffer(self._head, np.uint8), data))
        found = cut(whole, self._options, is_start=False, is_end=False)
        if found.tail is None:
            self._head = found.head
            if len(found.head) > _AT_ONCE:
                yield from self._told(_GOES_ON, found.head)
                self._head = b""
            return
        yield from self._told(_GOES_ON, found.head)
        yield from self._told(_BEAMS, _stream_of(found.beams))
        self._maker = BeamMaker(self._options, found.tail)

    def finish(self) -> Iterator[pa.RecordBatch]:
        if self._maker is None:
            yield from self._told(_GOES_ON, self._head or b"")
        else:
            yield from self._told(_BEGINS, self._maker.state)

    def _told(self, kind: int, payload: bytes) -> Iterator[pa.RecordBatch]:
        if payload:
            columns = [[self.url], [self._seq], [self._number], [kind], [payload]]
            self._number += 1
            yield pa.RecordBatch.from_arrays(
                [pa.array(c, f.type) for c, f in zip(columns, _PARTS, strict=True)], schema=_PARTS
            )


def _stream_of(beams: pa.Table) -> bytes:
    """Return beams as one Arrow stream; of none, nothing."""
    if not beams.num_rows:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BEAM_SCHEMA) as writer:
        writer.write_table(beams)
    return bytes(sink.getvalue())


# --- in the task that brings them together --------------------------------------------------------


def _join(rows: Iterable[tuple[int, int, int, bytes]], maker: BeamMaker) -> Iterator[bytes]:
    """Yield the beams of parts in their order, those across their borders among them.

    All other tasks wait for this one, so that the packets at a border are worked on once, together.
    """
    border: list[bytes] = []
    for _, _, kind, payload in sorted(rows, key=lambda row: row[:2]):
        if kind != _GOES_ON:  # the dwell before is at its end
            yield _stream_of(maker.finish(b"".join(border)))
            border = []
        if kind == _BEAMS:
            yield payload
            continue
        border.append(payload)
        if sum(map(len, border)) > _AT_ONCE:
            yield _stream_of(maker.feed(b"".join(border)))
            border = []
    yield _stream_of(maker.feed(b"".join(border)))


def _join_stream(
    frames: Iterator[pd.DataFrame], state: GroupState, options: DwellOptions
) -> Iterator[pd.DataFrame]:
    import pandas as pd  # noqa: PLC0415 - Spark has loaded it

    rows: list[tuple[int, int, int, bytes]] = []
    for frame in frames:
        columns = (frame[name].tolist() for name in ("seq", "part", "kind", "payload"))
        rows += zip(*columns, strict=True)
    maker = BeamMaker(options, bytes(state.get[0]) if state.exists else b"")
    made = [beams for beams in _join(rows, maker) if beams]
    state.update((maker.state,))
    if made:
        yield pd.DataFrame({"payload": made})


def _join_table(table: pa.Table, options: DwellOptions) -> pa.Table:
    columns = (table.column(name).to_pylist() for name in ("seq", "part", "kind", "payload"))
    maker = BeamMaker(options)
    made = [*_join(zip(*columns, strict=True), maker), _stream_of(maker.finish())]
    return pa.table({"payload": pa.array([beams for beams in made if beams], pa.binary())})


def _beams(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take the beams out of their streams."""
    for batch in batches:
        for payload in batch.column("payload"):
            yield from pa.ipc.open_stream(payload.as_buffer())
