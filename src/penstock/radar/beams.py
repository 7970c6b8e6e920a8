"""What is a beam, and how does it travel? One row a ray: where it looked, and its fields.

Moments of pulses are beams, volumes are made of them, and files of volumes become beams again.
They are an Arrow table whose first columns are `BEAM_SCHEMA`'s; every column behind them, of type
`list<float>`, is a field with one value a gate. NaN is a gate without a value.

As a message a beam is an Arrow stream of one row, which `decode: {format: arrow}` reads, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.decoding.arrow_stream import read_stream
from penstock.core.decoding.decoder import Refused
from penstock.core.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.core.batch import Batch

__all__ = [
    "BEAM_SCHEMA",
    "FIELDS",
    "FIELD_TYPE",
    "RAY_SCHEMA",
    "SWEEP_MODES",
    "Field",
    "batch_from_beams",
    "batch_from_rows",
    "beams_from_batch",
    "check_beams",
    "field_names",
    "first_of",
    "gates_of",
    "make_beams",
    "together",
    "values_of",
]


class Field(NamedTuple):
    """CF metadata of a field, by its name."""

    long_name: str
    standard_name: str
    units: str
    #: Whether values beyond the Nyquist velocity come back at the other end.
    folds: bool = False


#: The moments that `penstock.radar` makes.
FIELDS: Final[Mapping[str, Field]] = {
    "DBZ": Field("reflectivity", "equivalent_reflectivity_factor", "dBZ"),
    "VEL": Field(
        "radial velocity",
        "radial_velocity_of_scatterers_away_from_instrument",
        "m/s",
        folds=True,
    ),
    "WIDTH": Field("spectrum width", "doppler_spectrum_width", "m/s"),
    "SNR": Field("signal to noise ratio", "signal_to_noise_ratio", "dB"),
    "NCP": Field("normalized coherent power", "normalized_coherent_power", "1"),
    "ZDR": Field("differential reflectivity", "log_differential_reflectivity_hv", "dB"),
    "PHIDP": Field("differential phase", "differential_phase_hv", "degrees"),
    "RHOHV": Field("cross correlation", "cross_correlation_ratio_hv", "1"),
    "DBM": Field("received power", "received_power", "dBm"),
}

FIELD_TYPE: Final = pa.list_(pa.float32())

#: The words of CfRadial for how a sweep is scanned, by the number that IWRF has for it.
SWEEP_MODES: Final[Mapping[int, str]] = {
    1: "sector",
    2: "coplane",
    3: "rhi",
    4: "vertical_pointing",
    7: "idle",
    8: "azimuth_surveillance",
    9: "elevation_surveillance",
    11: "sunscan",
    12: "pointing",
    13: "follow_vehicle",
    14: "elevation_surveillance",
    15: "manual_ppi",
    16: "manual_rhi",
    17: "sunscan_rhi",
}

#: What every beam has beside its fields. What is not known is null.
RAY_SCHEMA: Final = pa.schema(
    [
        #: The middle of the dwell, nanoseconds since 1970 UTC.
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("azimuth", pa.float32(), nullable=False),
        pa.field("elevation", pa.float32(), nullable=False),
        #: The elevation that was asked for; of an RHI the azimuth.
        pa.field("fixed_angle", pa.float32()),
        pa.field("volume_number", pa.int32()),
        pa.field("sweep_number", pa.int32()),
        pa.field("start_of_volume", pa.bool_()),
        pa.field("end_of_volume", pa.bool_()),
        pa.field("start_of_sweep", pa.bool_()),
        pa.field("end_of_sweep", pa.bool_()),
        #: A word of `SWEEP_MODES`.
        pa.field("sweep_mode", pa.string()),
        #: horizontal, vertical, hv_alt, hv_sim …
        pa.field("polarization_mode", pa.string()),
        #: fixed, staggered or dual.
        pa.field("prt_mode", pa.string()),
        #: none, sun, vehicle …
        pa.field("follow_mode", pa.string()),
        pa.field("antenna_transition", pa.bool_()),
        #: Seconds.
        pa.field("prt", pa.float32()),
        pa.field("pulse_width", pa.float32()),
        #: Metres a second.
        pa.field("nyquist", pa.float32()),
        #: Metres.
        pa.field("unambiguous_range", pa.float32()),
        pa.field("samples", pa.int32()),
        #: Degrees a second.
        pa.field("scan_rate", pa.float32()),
        #: Metres to the centre of the first gate, and from gate to gate.
        pa.field("start_range", pa.float32(), nullable=False),
        pa.field("gate_spacing", pa.float32(), nullable=False),
        #: As measured with this beam, dBm.
        pa.field("transmit_power_h", pa.float32()),
        pa.field("transmit_power_v", pa.float32()),
        pa.field("radar", pa.string()),
        pa.field("site", pa.string()),
        pa.field("scan_name", pa.string()),
        pa.field("latitude", pa.float64()),
        pa.field("longitude", pa.float64()),
        #: Metres above mean sea level.
        pa.field("altitude", pa.float64()),
        #: What carries the radar: fixed, vehicle, ship, aircraft …
        pa.field("platform_type", pa.string()),
        #: Metres.
        pa.field("wavelength", pa.float32()),
        #: Degrees.
        pa.field("beam_width_h", pa.float32()),
        pa.field("beam_width_v", pa.float32()),
        #: Decibels.
        pa.field("gain_h", pa.float32()),
        pa.field("gain_v", pa.float32()),
        #: Numbers by CfRadial's names without `r_calib_`, such as noise_hc.
        pa.field("calibration", pa.map_(pa.string(), pa.float32())),
    ]
)

_OF_RAYS: Final = frozenset(RAY_SCHEMA.names)

#: A beam with all of the moments.
BEAM_SCHEMA: Final = pa.schema([*RAY_SCHEMA, *(pa.field(name, FIELD_TYPE) for name in FIELDS)])

#: Bytes that one beam may have in memory, and rows of one message.
_LARGEST_BEAM: Final = 64 << 20
_MOST_BEAMS: Final = 100_000


def make_beams(columns: Mapping[str, object]) -> pa.Table:
    """Make a table of beams of columns: arrays, lists, or fields as matrices of a row a ray.

    Columns of `RAY_SCHEMA` that are left out are null; others are fields.

    :raises Malformed: a column has the wrong type, or a required one is missing.
    """
    count = len(columns["time_ns"])  # type: ignore[arg-type]
    fields = [pa.field(name, FIELD_TYPE) for name in columns if name not in _OF_RAYS]
    arrays = []
    for field in (*RAY_SCHEMA, *fields):
        value = columns.get(field.name)
        if value is None:
            array = pa.nulls(count, field.type)
        elif isinstance(value, np.ndarray) and value.ndim == _MATRIX:
            array = lists_of(value)
        else:
            try:
                array = pa.array(value, field.type)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise Malformed("beams", f"column {field.name}", field.type, error) from error
        arrays.append(array)
    table = pa.Table.from_arrays(arrays, schema=pa.schema([*RAY_SCHEMA, *fields]))
    return check_beams(table)


_MATRIX: Final = 2


def lists_of(matrix: NDArray[np.float32]) -> pa.Array:
    """Return the rows of a matrix as lists."""
    rows, gates = matrix.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * gates)
    values = pa.array(np.ascontiguousarray(matrix, np.float32).reshape(-1))
    return pa.ListArray.from_arrays(offsets, values)


def field_names(schema: pa.Schema) -> list[str]:
    """Return the names of the fields among the columns, in their order."""
    return [name for name in schema.names if name not in _OF_RAYS]


def check_beams(table: pa.Table) -> pa.Table:
    """Return beams with the columns of `RAY_SCHEMA` first, then their fields.

    Columns that another system made nullable or 64 bits wide are cast back.

    :raises Malformed: a column is missing or has the wrong type.
    """
    schema = table.schema
    given = dict(zip(schema.names, table.columns, strict=True))
    fields = [
        pa.field(name, FIELD_TYPE, metadata=schema.field(name).metadata)
        for name in field_names(schema)
    ]
    columns = []
    for field in (*RAY_SCHEMA, *fields):
        if field.name in given:
            columns.append(_fitted(given[field.name], field))
        elif field.nullable:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            raise Malformed("beams", f"column {field.name}", field.type, "no column")
    return pa.Table.from_arrays(columns, schema=pa.schema([*RAY_SCHEMA, *fields]))


def _fitted(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type != field.type:
        try:
            column = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise Malformed(
                "beams",
                f"column {field.name}",
                field.type,
                f"{column.type}: {error}",
                hint="every column that is none of a ray's own is a field: list<float>",
            ) from None
    if not field.nullable and column.null_count:
        raise Malformed("beams", f"column {field.name}", "a value in every row", "null")
    return column


def together(parts: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables of beams; a field that one table lacks is null there."""
    if all(part.schema == parts[0].schema for part in parts):
        return check_beams(pa.concat_tables(parts).combine_chunks())
    # Each by itself first: what other systems made may differ in its types as well.
    fitted = [check_beams(part) for part in parts]
    return check_beams(pa.concat_tables(fitted, promote_options="default").combine_chunks())


def first_of(beams: pa.Table, column: str) -> Any:
    """Return the first value of a column that is not null, or None."""
    values = beams.column(column).drop_null()
    return values[0].as_py() if len(values) else None


def gates_of(beams: pa.Table) -> NDArray[np.int64]:
    """Return the number of gates of each ray, by its longest field."""
    most = np.zeros(beams.num_rows, np.int64)
    for name in field_names(beams.schema):
        lengths = pc.fill_null(pc.list_value_length(beams.column(name)), 0)
        most = np.maximum(most, lengths.to_numpy())
    return most


def values_of(table: pa.Table, name: str, gates: int) -> NDArray[np.float32]:
    """Return a field as a matrix of a row a ray, with NaN where there is no value."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of no rows, in some versions of Arrow
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], FIELD_TYPE)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(column)
    values = pc.fill_null(flat, np.nan).to_numpy(zero_copy_only=False).astype(np.float32)
    matrix: NDArray[np.float32] = np.full((len(lengths), gates), np.nan, np.float32)
    matrix[np.arange(gates) < lengths[:, None]] = values
    return matrix


# --- as messages ----------------------------------------------------------------------------------


def batch_from_beams(table: pa.Table) -> Batch:
    """Return beams as messages, each of one beam, with its time.

    :raises Malformed: a column is missing or has the wrong type.
    """
    return batch_from_rows(check_beams(table))


def batch_from_rows(table: pa.Table) -> Batch:
    """Return the rows of a table with the column `time_ns` as messages, each of one row."""
    payloads = [_stream_of(row) for row in _rows(table)]
    count = len(payloads)
    columns = {
        "time_ns": table.column("time_ns").combine_chunks(),
        "payload": pa.array(payloads, pa.binary()),
    }
    zero = {"seq", "created_ns", "type", "subtype"}
    arrays = [
        columns[field.name]
        if field.name in columns
        else pa.repeat(pa.scalar(0 if field.name in zero else None, field.type), count)
        for field in BATCH_SCHEMA
    ]
    return pa.record_batch(
        [a.chunk(0) if isinstance(a, pa.ChunkedArray) else a for a in arrays], schema=BATCH_SCHEMA
    )


def _rows(table: pa.Table) -> Iterator[pa.RecordBatch]:
    for batch in table.to_batches():
        for row in range(batch.num_rows):
            yield batch.slice(row, 1)


def _stream_of(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return bytes(sink.getvalue())


def beams_from_batch(batch: Batch) -> pa.Table:
    """Return the beams in messages, in order.

    :raises Malformed: a payload holds no beam.
    """
    parts = []
    payloads = batch.column(batch.schema.get_field_index("payload")).cast(pa.large_binary())
    for row, payload in enumerate(payloads):
        try:
            part = read_stream(
                payload.as_buffer(), None, max_size=_LARGEST_BEAM, max_rows=_MOST_BEAMS
            )
        except Refused as error:
            raise Malformed(f"beam {row}", "its payload", error.expected, error.found) from None
        parts.append(part)
    return together(parts) if parts else BEAM_SCHEMA.empty_table()
