"""How does a pipeline open files and make grids? Stages for `use:`, which run in the executors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import pyarrow as pa
from pydantic import ValidationError

from penstock.core.batch import batch_from_messages
from penstock.core.decoding import decoder_for
from penstock.core.endpoints import open_reader
from penstock.core.errors import InvalidOption, Malformed, NotFound
from penstock.core.url import escaped
from penstock.radar.beams import (
    FIELD_TYPE,
    FIELDS,
    RAY_SCHEMA,
    beams_from_batch,
    check_beams,
    together,
)
from penstock.radar.grids import (
    GRID_SCHEMA,
    GridOptions,
    grid_beams,
    grid_row,
    read_grid,
)
from penstock.radar.iwrf.files import files_in
from penstock.radar.volume_files import read_volume

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame

__all__ = ["decode_beams", "grid", "open_files"]

log = logging.getLogger(__name__)

_LARGEST_FILE: Final = 256 << 20
#: Rays that go to Spark at once.
_AT_ONCE: Final = 256
_PULSES_AT_ONCE: Final = 4096
_NO_PULSES: Final = batch_from_messages([])
#: What tells volumes apart, and where one begins and ends.
_OF_VOLUME: Final = ("radar", "volume_number", "start_of_volume", "end_of_volume")


def decode_beams(df: DataFrame, *, fields: Sequence[str] = tuple(FIELDS)) -> DataFrame:
    """Return the beams that messages hold, as columns, with the `fields` that are named."""
    schema = _Beams(fields).schema
    return df.select("payload").mapInArrow(_Unpacking(schema), _spark_schema(schema))


class _Unpacking:
    """Reads beams from messages."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _fitted(beams_from_batch(batch), self._schema).to_batches()


def open_files(
    df: DataFrame,
    *,
    format: str,
    fields: Sequence[str] = tuple(FIELDS),
    on_error: Literal["fail", "skip"] = "fail",
    **options: Any,
) -> DataFrame:
    """Open the file of each row, and return its rows: those of `latest:DIR?format=json`.

    `iwrf` gives messages, as `moments` takes them. `cfradial` gives beams and `cfgrid` grids, both
    with the `fields` that are named, null where a file has none. `xml` and `struct` give the
    columns that their options describe, those of `decode`, and the file's `path`. A row may have
    the column `path` instead of a payload.

    :raises InvalidOption: there is no such format, or an option does not fit.
    """
    skips = _skips(on_error)
    opener = _opener(format, fields, options, skips=skips)
    return df.select("path" if "path" in df.columns else "payload").mapInArrow(
        _Opening(opener, skips=skips), _spark_schema(opener.schema)
    )


def grid(df: DataFrame, *, partial: bool = False, **options: Any) -> DataFrame:
    """Put volumes of beams on a grid: one row a volume, as `cfgrid:DIR` takes it.

    Options are those of `cfgrid:`, as `x: "-100:100:1"`. The rays of a volume have to follow each
    other in one partition, as those of a file do. A live stream of beams is cut by batches: give it
    to `cfgrid:`, which waits for the whole volume. A volume without its beginning or its end is an
    error here, unless it may be `partial`.

    :raises InvalidOption: an option is unknown, or its value does not fit.
    """
    try:
        chosen = GridOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "grid"
        raise InvalidOption(name, options.get(name), str(first["msg"])) from None
    names = chosen.fields or [name for name in df.columns if name not in RAY_SCHEMA.names]
    schema = pa.schema([*GRID_SCHEMA, *(pa.field(name, FIELD_TYPE) for name in names)])
    return df.mapInArrow(_Gridding(chosen, partial=partial), _spark_schema(schema))


def _spark_schema(schema: pa.Schema) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    plain = [pa.field(field.name, field.type) for field in schema]
    return from_arrow_schema(pa.schema(plain))


def _skips(on_error: str) -> bool:
    if on_error not in {"fail", "skip"}:
        raise InvalidOption("on_error", on_error, "must be fail or skip")
    return on_error == "skip"


class _Opener(Protocol):
    """Reads one file. It is sent to Spark's tasks, so it must pickle."""

    schema: pa.Schema

    def read(self, path: Path) -> pa.Table:
        """Return the rows of a file.

        :raises Malformed: the file has another format.
        """


def _opener(format: str, fields: Sequence[str], options: dict[str, Any], *, skips: bool) -> _Opener:
    if format in {"xml", "struct"}:
        return _Decoded({"format": format, **options})
    if options:
        name = min(options)
        raise InvalidOption(name, options[name], f"{format} has no such option")
    if format == "cfradial":
        return _Beams(fields)
    if format == "cfgrid":
        return _Grids(fields)
    if format == "iwrf":
        return _Pulses(skips=skips)
    raise InvalidOption(
        "format", format, "there is no such format", hint="iwrf, cfradial, cfgrid, xml or struct"
    )


class _Pulses:
    """Time series, as the messages that `moments` takes."""

    schema = pa.schema(
        [
            pa.field("url", pa.string()),
            pa.field("seq", pa.int64()),
            pa.field("time_ns", pa.int64()),
            pa.field("payload", pa.binary()),
        ]
    )

    def __init__(self, *, skips: bool) -> None:
        self._skips = skips

    def read(self, path: Path) -> pa.Table:
        url = f"iwrf:{escaped(str(path))}"
        with open_reader(url) as reader:
            batches = list(iter(lambda: reader.read_batch(_PULSES_AT_ONCE), _NO_PULSES))
            size = sum(file.stat().st_size for file in files_in(path))
            left = size - reader.statistics().bytes
        if left:
            found = f"{left:,} bytes that are no packet"
            damage = Malformed(str(path), "content", "packets", found)
            if not self._skips:
                raise damage
            log.warning("%s; the others are taken", damage)
        rows = pa.Table.from_batches(batches or [_NO_PULSES])
        return rows.append_column("url", pa.array([url] * rows.num_rows, pa.string()))


class _Beams:
    """Volumes, as beams."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.schema = pa.schema([*RAY_SCHEMA, *(pa.field(name, FIELD_TYPE) for name in fields)])

    def read(self, path: Path) -> pa.Table:
        return read_volume(path)


class _Grids:
    """Grids, a row each."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.schema = pa.schema([*GRID_SCHEMA, *(pa.field(name, FIELD_TYPE) for name in fields)])

    def read(self, path: Path) -> pa.Table:
        return grid_row(read_grid(path))


class _Decoded:
    """Files that a decoder of payloads reads."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._decoder = decoder_for(options)
        self.schema = pa.schema([pa.field("path", pa.string()), *self._decoder.schema])

    def read(self, path: Path) -> pa.Table:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise Malformed(str(path), "size", f"at most {_LARGEST_FILE:,} bytes", "more")
        decoded = self._decoder.decode(pa.record_batch({"payload": [content]}))
        for failure in decoded.failures:
            raise Malformed(str(path), "content", failure.expected, failure.found)
        paths = pa.array([str(path)] * decoded.rows.num_rows, pa.string())
        return pa.Table.from_batches([decoded.rows]).add_column(0, "path", paths)


class _Opening:
    """The function that runs in tasks."""

    def __init__(self, opener: _Opener, *, skips: bool) -> None:
        self._opener = opener
        self._skips = skips

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for entry in batch.column(0).to_pylist():
                yield from self._rows_of(entry)

    def _rows_of(self, entry: Any) -> Iterator[pa.RecordBatch]:
        try:
            path = _path_of(entry)
            rows = _fitted(self._opener.read(path), self._opener.schema)
        except (Malformed, NotFound, OSError) as error:
            if not self._skips:
                raise
            log.warning("a file is left out: %s", error)
            return
        yield from rows.to_batches(max_chunksize=_AT_ONCE)


def _path_of(entry: Any) -> Path:
    if isinstance(entry, str):
        return Path(entry)
    try:
        fields = json.loads(entry)
        path = fields["path"]
    except (ValueError, TypeError, KeyError):
        raise Malformed(
            "a row of files",
            "payload",
            "an entry of latest_data_info as JSON",
            bytes(entry or b"")[:60],
            hint="read latest:DIR?format=json",
        ) from None
    if path is None:
        raise NotFound(f"{fields.get('rel_data_path')} is gone from {fields.get('directory')}")
    return Path(path)


def _fitted(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the declared columns; missing ones are null."""
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    plain = pa.schema([pa.field(field.name, field.type) for field in schema])
    return pa.Table.from_arrays(columns, schema=plain)


class _Gridding:
    """Collects the rays of each volume, and puts them on a grid."""

    def __init__(self, options: GridOptions, *, partial: bool) -> None:
        self._options = options
        self._partial = partial

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        open_rows: list[pa.Table] = []
        before: tuple[Any, ...] = ()
        for batch in batches:
            rows = check_beams(pa.Table.from_batches([batch]))
            columns = (rows.column(name).to_pylist() for name in _OF_VOLUME)
            start = 0
            for at, (*volume, is_first, is_last) in enumerate(zip(*columns, strict=True)):
                is_next = is_first or tuple(volume) != before
                before = tuple(volume)
                if is_next and (open_rows or at > start):
                    yield from self._unfinished([*open_rows, rows.slice(start, at - start)])
                    open_rows, start = [], at
                if is_last:
                    yield from self._grid([*open_rows, rows.slice(start, at + 1 - start)])
                    open_rows, start = [], at + 1
            if start < rows.num_rows:
                open_rows.append(rows.slice(start))
        if open_rows:
            yield from self._unfinished(open_rows)

    def _unfinished(self, parts: list[pa.Table]) -> Iterator[pa.RecordBatch]:
        self._refuse(together(parts), "end")
        return self._grid(parts)

    def _grid(self, parts: list[pa.Table]) -> Iterator[pa.RecordBatch]:
        volume = together(parts)
        if not volume.column("start_of_volume")[0].as_py():
            self._refuse(volume, "beginning")
        yield from grid_row(grid_beams(volume, self._options)).to_batches()

    def _refuse(self, volume: pa.Table, what: str) -> None:
        if not self._partial:
            raise Malformed(
                f"volume {volume.column('volume_number')[0]} in this partition",
                "its rays",
                "all of them",
                f"those without its {what}",
                hint="send live beams to cfgrid:, which waits for them; or partial: true",
            )
