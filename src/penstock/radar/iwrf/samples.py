"""How are the I and Q samples of a pulse encoded?

Five encodings, both ways. Decoding takes many pulses of one shape at once, straight from the
packets into the output array; I² + Q² is then in milliwatts at the digitiser
(docs/specs/iwrf.md 2).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.core.errors import InvalidOption
from penstock.radar import _pulses
from penstock.radar.iwrf.packets import VALUE_BYTES, Encoding

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SATURATION_DBM", "Encoded", "PackedValues", "decode", "encode", "value_type"]

_NATIVE: Final = "<" if sys.byteorder == "little" else ">"

#: dBm of a saturated receiver of an RVP8, if it does not say.
SATURATION_DBM: Final = 6.0
#: What LROSE has for a value of exactly zero, so that logarithms are finite.
_ZERO_SUBSTITUTE: Final = np.float32(1e-20)
#: Degrees of one step of a phase. The turn is 65,534 steps, not 65,536.
_PHASE_STEP: Final = 180.0 / 32767
#: Values converted at once: what a core's own cache holds.
_AT_ONCE: Final = 1 << 14
_TOP_16: Final = 32767
_TOP_32: Final = 2**31 - 1
#: What one step of an RVP8's small numbers is.
_SIGMET_STEP: Final = 2.0**-24
_TYPES: Final = {4: "i4", 2: "i2"}


def value_type(encoding: int) -> str:
    """Return the type of a value on the wire, in the words of numpy and without its byte order."""
    return "f4" if encoding == Encoding.FL32 else _TYPES[VALUE_BYTES[Encoding(encoding)]]


class PackedValues(NamedTuple):
    """Where the values of pulses of one shape lie in some bytes."""

    data: NDArray[np.uint8]
    #: Of the first value of each pulse.
    places: NDArray[np.int64]
    #: Of each pulse.
    values: int
    #: As numpy has it. Swapped headers do not mean swapped values.
    order: str = "<"

    def array(self, encoding: int, part: slice) -> NDArray[Any]:
        """Return those of some pulses as pulses x values."""
        kind = np.dtype(f"{self.order}{value_type(encoding)}")
        places = self.places[part]
        found = np.empty((len(places), self.values), kind)
        _pulses.gather(self.data, places, self.values * kind.itemsize, found)
        return found


def decode(
    encoding: int,
    packed: PackedValues,
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    out: NDArray[np.float32],
    saturation_dbm: float = SATURATION_DBM,
) -> None:
    """Decode the values of pulses into interleaved I and Q.

    :param scale: and `offset`: of each pulse
    :param out: output: float32, pulses x values, contiguous
    """
    data, places, count, order = packed
    is_native = order == _NATIVE
    if encoding == Encoding.FL32 and is_native:
        _pulses.fl32(data, places, count, out)
        return
    if encoding == Encoding.SCALED_SI16 and is_native and not offset.any():
        # The same as in double precision: 16 and 24 bits make 40, and are rounded once.
        _pulses.si16(data, places, count, np.ascontiguousarray(scale, "f4"), out)
        return
    convert = _CONVERTERS[Encoding(encoding)]
    factor = 10.0 ** (saturation_dbm / 20)
    step = max(1, _AT_ONCE // max(1, count))
    for first in range(0, len(places), step):
        part = slice(first, first + step)
        values = packed.array(encoding, part)
        convert(values, scale[part, None], offset[part, None], out[part], factor)


def _fill_zeros(values: NDArray[np.float32]) -> None:
    is_zero = values == 0
    if is_zero.any():
        values[is_zero] = _ZERO_SUBSTITUTE


def _plain(
    values: NDArray[Any],
    _scale: NDArray[np.float32],
    _offset: NDArray[np.float32],
    out: NDArray[np.float32],
    _: float,
) -> None:
    out[:] = values
    _fill_zeros(out)


def _scaled(
    values: NDArray[Any],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    out: NDArray[np.float32],
    _: float,
) -> None:
    exact = values * scale.astype(np.float64)
    exact += offset
    with np.errstate(over="ignore"):  # a scale of nonsense gives nonsense
        out[:] = exact
    if values.dtype.itemsize == 2:  # noqa: PLR2004 - LROSE leaves zeros of 32 bits as they are
        _fill_zeros(out)


def _dbm_phase(
    values: NDArray[Any],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    out: NDArray[np.float32],
    _: float,
) -> None:
    dbm = values[:, 0::2] * scale.astype(np.float64)
    dbm += offset
    with np.errstate(over="ignore"):  # a scale of nonsense gives nonsense
        amplitude = np.exp(dbm * (np.log(10.0) / 20))
        phase = values[:, 1::2] * np.deg2rad(_PHASE_STEP)
        out[:, 0::2] = amplitude * np.cos(phase)
        out[:, 1::2] = amplitude * np.sin(phase)


def _sigmet(
    values: NDArray[Any],
    _scale: NDArray[np.float32],
    _offset: NDArray[np.float32],
    out: NDArray[np.float32],
    factor: float,
) -> None:
    native = values.astype(np.int16, copy=False)
    out[:] = (_sigmet_table() * factor).astype(np.float32)[native.view(np.uint16)]


@lru_cache(maxsize=1)
def _sigmet_table() -> NDArray[np.float64]:
    """Return the value of each 16-bit code of an RVP8: a 4-bit exponent, a 12-bit mantissa."""
    code = np.arange(65536)
    exponent, low = code >> 12, code & 0x7FF
    mantissa = np.where(code & 0x800, low - 4096, low + 2048)
    large = mantissa * 2.0**exponent / 3.355443e7
    small = np.where(code & 0x800, low - 2048, low) * 2.0**20 / 1.759218e13
    return np.where(exponent > 0, large, small)


_CONVERTERS: Final = {
    Encoding.FL32: _plain,
    Encoding.SCALED_SI16: _scaled,
    Encoding.SCALED_SI32: _scaled,
    Encoding.DBM_PHASE_SI16: _dbm_phase,
    Encoding.SIGMET_FL16: _sigmet,
}


# --- the other way --------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """Encoded values, and their header fields."""

    data: bytes
    scale: float
    offset: float


def encode(
    encoding: int, iq: NDArray[np.float32], saturation_dbm: float = SATURATION_DBM
) -> Encoded:
    """Encode the interleaved I and Q of one pulse.

    Scaled encodings use the full range for each pulse, with the header's float32 scale.

    :raises InvalidOption: the encoding is unknown, or a value is not finite.
    """
    values = np.asarray(iq, np.float32).ravel()
    try:
        kind = Encoding(encoding)
    except ValueError:
        raise InvalidOption("iq_encoding", encoding, "is none of 1 to 5") from None
    if kind == Encoding.FL32:
        return Encoded(values.astype("<f4").tobytes(), 1.0, 0.0)
    if not np.isfinite(values).all():
        raise InvalidOption("iq", "values", "are not all finite, and only FL32 has others")
    match kind:
        case Encoding.DBM_PHASE_SI16:
            return _to_dbm_phase(values)
        case Encoding.SIGMET_FL16:
            codes = _to_sigmet(values / 10.0 ** (saturation_dbm / 20))
            return Encoded(codes.astype("<u2").tobytes(), 1.0, 0.0)
        case _:
            top = _TOP_16 if kind == Encoding.SCALED_SI16 else _TOP_32
            largest = float(np.abs(values).max(initial=0.0))
            scale = float(np.float32(largest / top)) or 1.0
            counts = np.clip(np.floor(values / np.float64(scale) + 0.5), -top, top)
            return Encoded(counts.astype(f"<{value_type(kind)}").tobytes(), scale, 0.0)


def _to_dbm_phase(values: NDArray[np.float32]) -> Encoded:
    i, q = values[0::2].astype(np.float64), values[1::2].astype(np.float64)
    power = 10 * np.log10(np.maximum(i * i + q * q, float(_ZERO_SUBSTITUTE) ** 2))
    low, high = (power.min(), power.max()) if len(power) else (0.0, 0.0)
    scale = float(np.float32((high - low) / 65535)) or 1.0
    offset = float(np.float32((high + low) / 2))
    pairs = np.empty(len(values), "<i2")
    pairs[0::2] = np.clip(np.floor((power - offset) / scale + 0.5), -32768, _TOP_16)
    degrees = np.rad2deg(np.arctan2(q, i))
    pairs[1::2] = np.clip(np.floor(degrees / _PHASE_STEP + 0.5), -_TOP_16, _TOP_16)
    return Encoded(pairs.tobytes(), scale, offset)


def _to_sigmet(values: NDArray[Any]) -> NDArray[np.uint16]:
    steps = values.astype(np.float64) / _SIGMET_STEP
    small = np.clip(np.rint(steps), -4096, 4096)  # beyond that it is not small
    fraction, power = np.frexp(steps)
    mantissa = np.rint(fraction * 4096).astype(np.int64)
    exponent = power - 11
    is_full = mantissa == 4096  # noqa: PLR2004 - rounding up made it the next power of two
    mantissa[is_full], exponent[is_full] = 2048, exponent[is_full] + 1
    is_half = mantissa == -2048  # noqa: PLR2004 - which a negative one has as -4096
    mantissa[is_half], exponent[is_half] = -4096, exponent[is_half] - 1
    is_beyond = exponent > 15  # noqa: PLR2004
    mantissa[is_beyond] = np.where(steps[is_beyond] > 0, 4095, -4096)
    exponent[is_beyond] = 15
    large = (exponent << 12) | np.where(mantissa < 0, 0x800 | (mantissa + 4096), mantissa - 2048)
    is_small = (small >= -2048) & (small <= 2047)  # noqa: PLR2004
    codes: NDArray[np.uint16] = np.where(is_small, small.astype(np.int64) & 0xFFF, large).astype(
        np.uint16
    )
    return codes
