"""What do the pulses of a radar say about the weather?

Power, signal-to-noise ratio and reflectivity from the strength of the echoes; their mean velocity
and spectrum width from how their phase turns between one pulse and the next ("pulse pair").

Everything takes many beams as well as one: the last two axes of samples are pulses x gates. A gate
without an echo has no moments: NaN in numpy, null in Arrow.

In Spark, one row per beam:

    beams.mapInArrow(moments_of_batches, MOMENTS_DDL)
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from beams import BeamHeader, Rows, beam_dtype, take_headers

from penstock import Malformed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

__all__ = [
    "LEAST_SNR",
    "MOMENTS_DDL",
    "MOMENTS_SCHEMA",
    "Moments",
    "autocovariance",
    "moments_of_batch",
    "moments_of_batches",
    "moments_of_beam",
    "moments_of_beams",
    "nyquist_velocity",
    "reflectivity",
    "spectrum_width",
    "to_complex",
    "velocity",
]

Floats: TypeAlias = "NDArray[np.float32]"
#: One number, or one for each beam, in a shape that fits beams x gates.
Numbers: TypeAlias = "float | NDArray[Any]"

#: dB. Of 32 pulses of noise, about one gate in 100,000 seems to be stronger than this.
LEAST_SNR: Final = 0.0

#: Samples that are worked on at once: about what a core's own cache holds.
_AT_ONCE: Final = 64 * 1024

_LISTS: Final = ("power", "snr", "dbz", "velocity", "width")

#: One row per beam. Lists have one item for each gate, null where there is no echo.
MOMENTS_SCHEMA: Final = pa.schema(
    [
        pa.field("beam", pa.int64()),
        pa.field("time_ns", pa.int64()),
        pa.field("volume", pa.int32()),
        pa.field("sweep", pa.int32()),
        pa.field("azimuth", pa.float32()),  # degrees, clockwise from north
        pa.field("elevation", pa.float32()),  # degrees
        pa.field("first_gate", pa.float32()),  # m
        pa.field("gate_spacing", pa.float32()),  # m
        pa.field("nyquist_velocity", pa.float32()),  # m/s
        pa.field("max_dbz", pa.float32()),  # null: there is no echo in the whole beam
        pa.field("max_dbz_range", pa.float32()),  # m, where it is
        *(pa.field(name, pa.list_(pa.float32())) for name in _LISTS),
    ]
)
_DDL: Final = {pa.int64(): "bigint", pa.int32(): "int", pa.float32(): "float"}
#: `MOMENTS_SCHEMA` in Spark's words.
MOMENTS_DDL: Final = ", ".join(
    f"{field.name} {_DDL.get(field.type, 'array<float>')}" for field in MOMENTS_SCHEMA
)


class Moments(NamedTuple):
    """The moments of one beam (gates) or of many (beams x gates); NaN where there is no echo."""

    #: dBm, of echo and noise together. There is always some.
    power: Floats
    #: dB, of the echo alone over the noise.
    snr: Floats
    #: Reflectivity, dBZ.
    dbz: Floats
    #: m/s along the beam, positive away from the radar.
    velocity: Floats
    #: m/s, the standard deviation of the velocities within a gate.
    width: Floats


# --- from samples to moments ----------------------------------------------------------------------


def to_complex(iq: NDArray[np.int16]) -> NDArray[np.complex64]:
    """Return samples of … x (in phase, quadrature) as complex numbers."""
    return iq.astype(np.float32, order="C").view(np.complex64)[..., 0]


def autocovariance(samples: NDArray[np.complex64], lag: int = 0) -> NDArray[np.complex64]:
    """Return the mean of each sample times the conjugate of the one `lag` pulses before."""
    product = samples[..., : samples.shape[-2] - lag, :].conj()
    product *= samples[..., lag:, :]
    mean: NDArray[np.complex64] = product.mean(axis=-2)
    return mean


def nyquist_velocity(prf: Numbers, wavelength: Numbers) -> Numbers:
    """Return the highest speed (m/s) that is told from its opposite."""
    return wavelength * prf / 4


def velocity(r1: NDArray[np.complex64], prf: Numbers, wavelength: Numbers) -> NDArray[Any]:
    """Return the mean velocity (m/s): what goes away comes back with an ever later phase."""
    return -nyquist_velocity(prf, wavelength) / np.pi * np.angle(r1)


def spectrum_width(
    signal: NDArray[Any], r1: NDArray[np.complex64], prf: Numbers, wavelength: Numbers
) -> NDArray[Any]:
    """Return the width (m/s) of a Gaussian spectrum, by how much `r1` falls short of the signal.

    With noise taken off, a signal may come out below `r1`. Its spectrum is as narrow as can be.
    """
    fall = np.log(np.maximum(signal / np.abs(r1), 1))
    width: NDArray[Any] = np.sqrt(2 * fall) * (nyquist_velocity(prf, wavelength) / np.pi)
    return width


def reflectivity(signal_power: NDArray[Any], range_m: Numbers, constant: Numbers) -> NDArray[Any]:
    """Return dBZ of echoes of a power in dBm: rain fills the beam, so it falls as 1 / range²."""
    dbz: NDArray[Any] = signal_power + 20 * np.log10(np.asarray(range_m) / 1000) + constant
    return dbz


def moments_of_beam(
    header: BeamHeader, iq: NDArray[np.int16], least_snr: float = LEAST_SNR
) -> Moments:
    """Return the moments of one beam, as `decode_beam` gives it."""
    return _moments(to_complex(iq), _Radar.of(header), least_snr)


def moments_of_beams(headers: Rows, iq: NDArray[np.int16], least_snr: float = LEAST_SNR) -> Moments:
    """Return the moments of many beams (x pulses x gates x 2) of one size, and their headers."""
    beams, pulses, gates = iq.shape[:3]
    step = max(1, _AT_ONCE // (pulses * gates))
    whole = Moments(*np.empty((len(Moments._fields), beams, gates), np.float32))
    for first in range(0, beams, step):
        some = slice(first, first + step)
        part = _moments(to_complex(iq[some]), _Radar.of(headers[some, None]), least_snr)
        for all_of_it, piece in zip(whole, part, strict=True):
            all_of_it[some] = piece
    return whole


class _Radar(NamedTuple):
    """What the moments need to know: of one beam, or columns of many."""

    ranges: Numbers  # m
    prf: Numbers
    wavelength: Numbers
    noise: Numbers  # in counts²
    constant: Numbers
    count_power: Numbers

    @classmethod
    def of(cls, header: BeamHeader | Rows) -> _Radar:
        of = header._asdict() if isinstance(header, BeamHeader) else header
        gates = np.arange(np.max(of["gates"], initial=0), dtype=np.float32)
        return cls(
            ranges=of["first_gate"] + gates * of["gate_spacing"],
            prf=of["prf"],
            wavelength=of["wavelength"],
            noise=10 ** ((of["noise_power"] - of["count_power"]) / 10),
            constant=of["radar_constant"],
            count_power=of["count_power"],
        )


def _moments(samples: NDArray[np.complex64], radar: _Radar, least_snr: float) -> Moments:
    r0 = autocovariance(samples).real
    r1 = autocovariance(samples, lag=1)  # noise has no memory: there is none of it in here
    # The power of the pairs that r1 is made of: all samples are in two, the first and the last in
    # one. Against r0, a narrow spectrum would seem wide whenever these two happen to be strong.
    pulses = samples.shape[-2]
    ends = np.abs(samples[..., 0, :]) ** 2 + np.abs(samples[..., -1, :]) ** 2
    of_pairs = (pulses * r0 - ends / 2) / (pulses - 1)
    # A gate may seem weaker than noise alone, or be silent: NaN, or minus infinity. Both are
    # below any threshold.
    with np.errstate(divide="ignore", invalid="ignore"):
        signal = r0 - radar.noise
        snr = 10 * np.log10(signal / radar.noise)
        is_echo = snr >= least_snr
        power = 10 * np.log10(r0) + radar.count_power
        echo_power = 10 * np.log10(signal) + radar.count_power
        found = (
            snr,
            reflectivity(echo_power, radar.ranges, radar.constant),
            velocity(r1, radar.prf, radar.wavelength),
            spectrum_width(of_pairs - radar.noise, r1, radar.prf, radar.wavelength),
        )
    echoes = (np.where(is_echo, values, np.nan).astype(np.float32) for values in found)
    return Moments(power.astype(np.float32), *echoes)


# --- from Arrow to Arrow --------------------------------------------------------------------------


def moments_of_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Do `moments_of_batch` for each batch; what Spark's `mapInArrow` takes."""
    for batch in batches:
        yield moments_of_batch(batch)


def moments_of_batch(batch: pa.RecordBatch, least_snr: float = LEAST_SNR) -> pa.RecordBatch:
    """Return one row of `MOMENTS_SCHEMA` for each beam of a batch of messages, in order.

    Only the column `payload` is used.

    :raises Malformed: a payload is not a beam; says which row.
    """
    data, offsets = _payloads(batch)
    headers = take_headers(data, offsets)
    # Beams of one size are one array. The size of a radar's beams changes seldom, if ever.
    size = headers[["pulses", "gates"]]
    changes = np.flatnonzero(size[1:] != size[:-1]) + 1
    edges = [0, *changes.tolist(), len(headers)]
    runs = [
        _run(headers[first:end], data[offsets[first] : offsets[end]], least_snr)
        for first, end in itertools.pairwise(edges)
        if end > first
    ]
    if len(runs) == 1:
        return runs[0]
    whole = pa.Table.from_batches(runs, MOMENTS_SCHEMA).combine_chunks().to_batches()
    return whole[0] if whole else pa.RecordBatch.from_pylist([], MOMENTS_SCHEMA)


def _payloads(batch: pa.RecordBatch) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of all payloads, and where in them each begins and the last ends."""
    if "payload" not in batch.schema.names:
        raise Malformed("a batch of beams", "column payload", "binary", "no column")
    column = batch.column("payload")
    if column.null_count:
        raise Malformed("a batch of beams", "column payload", "without nulls", "nulls")
    try:
        column = column.cast(pa.large_binary())  # also of views; copies no payload otherwise
    except pa.ArrowNotImplementedError:
        raise Malformed("a batch of beams", "column payload", "binary", column.type) from None
    _, places, payloads = column.buffers()
    if not len(column):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(places, np.int64)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(payloads or b"", np.uint8), offsets


def _run(headers: Rows, data: NDArray[np.uint8], least_snr: float) -> pa.RecordBatch:
    """Return the rows of beams of one size, which lie one behind the other."""
    pulses, gates = int(headers["pulses"][0]), int(headers["gates"][0])
    iq = data.view(beam_dtype(pulses, gates))["iq"]
    found = moments_of_beams(headers, iq, least_snr)
    dbz = np.where(np.isnan(found.dbz), -np.inf, found.dbz)
    strongest = dbz.argmax(axis=1)
    max_dbz = found.dbz[np.arange(len(dbz)), strongest]
    place = headers["first_gate"] + headers["gate_spacing"] * strongest.astype(np.float32)
    columns = {
        **{name: headers[name] for name in MOMENTS_SCHEMA.names if name in BeamHeader._fields},
        "nyquist_velocity": nyquist_velocity(headers["prf"], headers["wavelength"]),
        "max_dbz": max_dbz,
        "max_dbz_range": np.where(np.isnan(max_dbz), np.nan, place),
    }
    starts = pa.array(np.arange(0, (len(headers) + 1) * gates, gates, dtype=np.int32))
    for name in _LISTS:
        columns[name] = pa.ListArray.from_arrays(starts, _nullable(getattr(found, name).ravel()))
    arrays = [
        columns[field.name]
        if field.name in _LISTS
        else _nullable(columns[field.name]).cast(field.type)
        for field in MOMENTS_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MOMENTS_SCHEMA)


def _nullable(values: NDArray[Any]) -> pa.Array:
    """Return a column with null for NaN, which Spark takes for more than any other number."""
    return pa.array(np.ascontiguousarray(values), from_pandas=True)
