"""How does one radar beam travel as the payload of a message?

All pulses of one direction: a C struct, then the samples, in the byte order of the machines that we
have (little-endian), without padding:

    struct beam_header {            /* 80 bytes */
        char     magic[4];          /* "BEAM" */
        uint16_t version;           /* 1 */
        uint16_t header_size;       /* 80: the samples begin there */
        int64_t  beam;              /* counts from 0 and leaves nothing out: a gap is a loss */
        int64_t  time_ns;           /* when it was measured, nanoseconds since 1970 UTC */
        int32_t  volume;            /* which time around all elevations, from 0 */
        int32_t  sweep;             /* which elevation of the volume, from 0 */
        float    azimuth;           /* degrees, clockwise from north */
        float    elevation;         /* degrees above the horizon */
        uint32_t pulses;
        uint32_t gates;
        float    first_gate;        /* m, from the antenna to the middle of the first gate */
        float    gate_spacing;      /* m */
        float    prf;               /* Hz, pulses in a second */
        float    wavelength;        /* m */
        float    noise_power;       /* dBm, of a gate without an echo */
        float    radar_constant;    /* dBZ of 1 mW from 1 km: dbz = dBm + 20 log10(km) + this */
        float    count_power;       /* dBm of a sample of amplitude 1 */
        uint32_t reserved;          /* 0 */
    };
    int16_t iq[pulses][gates][2];   /* in phase, quadrature */

There is no checksum: a queue made with `crc=true` has one of every message.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock import Malformed

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BEAM_HEADER",
    "BeamHeader",
    "Rows",
    "beam_dtype",
    "check_headers",
    "decode_beam",
    "encode_beam",
    "mark",
    "take_headers",
]

BEAM_HEADER: Final = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("header_size", "<u2"),
        ("beam", "<i8"),
        ("time_ns", "<i8"),
        ("volume", "<i4"),
        ("sweep", "<i4"),
        ("azimuth", "<f4"),
        ("elevation", "<f4"),
        ("pulses", "<u4"),
        ("gates", "<u4"),
        ("first_gate", "<f4"),
        ("gate_spacing", "<f4"),
        ("prf", "<f4"),
        ("wavelength", "<f4"),
        ("noise_power", "<f4"),
        ("radar_constant", "<f4"),
        ("count_power", "<f4"),
        ("reserved", "<u4"),
    ]
)
_HEADER_SIZE: Final = BEAM_HEADER.itemsize
_SAMPLE_SIZE: Final = 4
_MAGIC: Final = b"BEAM"
_VERSION: Final = 1
#: More than any radar has; whoever finds more in a header has found damage.
_MOST_PULSES: Final = 65_536
_MOST_GATES: Final = 65_536

#: What must be more than nothing, and what must at least be a number.
_POSITIVE: Final = ("first_gate", "gate_spacing", "prf", "wavelength")
_FINITE: Final = ("azimuth", "elevation", "noise_power", "radar_constant", "count_power")

#: Rows of one of the types here: headers, or whole beams.
Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"


class BeamHeader(NamedTuple):
    """What a beam says of itself; the units are those of the struct above."""

    beam: int
    time_ns: int
    volume: int
    sweep: int
    azimuth: float
    elevation: float
    pulses: int
    gates: int
    first_gate: float
    gate_spacing: float
    prf: float
    wavelength: float
    noise_power: float
    radar_constant: float
    count_power: float


@lru_cache(maxsize=64)
def beam_dtype(pulses: int, gates: int) -> np.dtype[np.void]:
    """Return the type of a whole payload, so that an array of it is many beams at once."""
    return np.dtype([("header", BEAM_HEADER), ("iq", "<i2", (pulses, gates, 2))])


def mark(headers: Rows, pulses: int, gates: int) -> None:
    """Fill in what makes these the headers of beams of that size."""
    headers["magic"] = _MAGIC
    headers["version"] = _VERSION
    headers["header_size"] = _HEADER_SIZE
    headers["pulses"] = pulses
    headers["gates"] = gates


def encode_beam(header: BeamHeader, iq: NDArray[np.int16]) -> bytes:
    """Put a beam into a payload. `iq` is pulses x gates x (in phase, quadrature).

    :raises Malformed: the samples are not as many as the header says, or are not 16-bit numbers.
    """
    expected = (header.pulses, header.gates, 2)
    if iq.shape != expected:
        raise Malformed("a beam's samples", "their shape", expected, iq.shape)
    if iq.dtype != np.int16:
        raise Malformed("a beam's samples", "their type", "int16", iq.dtype)
    payload = np.zeros(1, beam_dtype(header.pulses, header.gates))
    for name, value in header._asdict().items():
        payload["header"][name] = value
    mark(payload["header"], header.pulses, header.gates)
    check_headers(payload["header"])
    payload["iq"] = iq
    return payload.tobytes()


def decode_beam(payload: bytes | memoryview) -> tuple[BeamHeader, NDArray[np.int16]]:
    """Take a beam out of a payload; the samples (pulses x gates x 2) are a view, not a copy.

    :raises Malformed: it is not a beam, or not a whole one.
    """
    data = np.frombuffer(payload, np.uint8)
    headers = take_headers(data, np.array([0, len(data)]))
    header = BeamHeader(*(headers[name].item() for name in BeamHeader._fields))
    samples: NDArray[np.int16] = data.view(beam_dtype(header.pulses, header.gates))["iq"][0]
    samples.flags.writeable = False  # other readers may see the same memory
    return header, samples


def take_headers(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Rows:
    """Copy the headers of beams that lie in `data` from each of `offsets` to the next.

    :raises Malformed: one is not a beam, or not a whole one; says which row.
    """
    sizes = np.diff(offsets)
    _check("size in bytes", sizes, sizes >= _HEADER_SIZE, f">= {_HEADER_SIZE}")
    places = offsets[:-1, None] + np.arange(_HEADER_SIZE)
    headers: Rows = data[places].view(BEAM_HEADER)[:, 0]
    check_headers(headers)
    samples = headers["pulses"].astype(np.int64) * headers["gates"]
    whole = _HEADER_SIZE + samples * _SAMPLE_SIZE
    _check("size in bytes", sizes, sizes == whole, whole)
    return headers


def check_headers(headers: Rows) -> None:
    """Make sure that these are headers of beams.

    :raises Malformed: one is not; says which row, its field and what was found there.
    """
    for name, value in (("magic", _MAGIC), ("version", _VERSION), ("header_size", _HEADER_SIZE)):
        _check(name, headers[name], headers[name] == value, value)
    for name, least, most in (("pulses", 2, _MOST_PULSES), ("gates", 1, _MOST_GATES)):
        values = headers[name]
        _check(name, values, (values >= least) & (values <= most), f"{least} to {most:,}")
    for name in _POSITIVE:
        values = headers[name]
        _check(name, values, np.isfinite(values) & (values > 0), "a number above 0")
    for name in _FINITE:
        _check(name, headers[name], np.isfinite(headers[name]), "a number")


def _check(name: str, values: NDArray[Any], are_right: NDArray[np.bool_], expected: object) -> None:
    if are_right.all():
        return
    row = int(np.argmin(are_right))
    raise Malformed(
        "a beam" if len(values) == 1 else f"the beam in row {row}",
        name,
        expected[row] if isinstance(expected, np.ndarray) else expected,
        values[row].item(),
        hint="see beams.py for the layout; does something else write into this queue, too?",
    )
