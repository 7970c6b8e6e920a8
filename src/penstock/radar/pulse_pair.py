"""What do the pulses of a beam say about the weather? Pulse pair processing.

Power from the mean of |x|², velocity and width from the product of each sample with the one before,
and from two polarisations received at once their ratio, phase and likeness (Doviak and Zrnić, 1993,
chapter 6). The formulas are those of LROSE's RadarMoments with a rectangular window, without
clutter filter. A gate whose signal is below a hundredth of the noise has neither a
signal-to-noise ratio nor what follows from it: NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.radar import _pulses
from penstock.radar.iwrf.packets import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.radar.iwrf.pulses import Metadata

__all__ = ["SPEED_OF_LIGHT", "Receiver", "attenuation_by_gases", "moments_of", "wavelength_of"]

SPEED_OF_LIGHT: Final = 299_792_458.0
#: A signal below this part of the noise is none.
_LEAST_SIGNAL: Final = 0.01
_NARROWEST: Final = 0.01
#: Range below which the beam has no range, in metres.
_NEAR: Final = 1.0
#: Metres of wavelength, and how much more gases take than at 10 cm.
_BANDS: Final = ((0.08, 1.0), (0.04, 1.2))
_NAN: Final = float("nan")


@dataclass(frozen=True, slots=True)
class Receiver:
    """The radar constants that moments need; NaN where unknown, which makes results NaN."""

    #: Metres a second.
    nyquist: float
    #: dBm after the receiver, as 10 log10(I² + Q²): horizontal, vertical.
    noise_dbm: tuple[float, float]
    gain_db: float
    #: dBZ of an echo as strong as the noise, from one kilometre.
    base_dbz: float
    dbz_correction: float = 0.0
    zdr_correction: float = 0.0
    #: -1 of a receiver that has Q the other way around.
    velocity_sign: int = 1

    @classmethod
    def of(cls, state: Metadata, prt: float, *, channel: str = "h", sign: int = 1) -> Receiver:
        """Take it from the metadata of a radar that sends a pulse every `prt` seconds."""

        def known(field: str, otherwise: float = _NAN) -> float:
            found = state.number(Kind.CALIBRATION, field)
            return otherwise if found is None else found

        wavelength = wavelength_of(state)
        noise, gain = known(f"noise_dbm_{channel}c"), known(f"receiver_gain_db_{channel}c")
        derived = noise - gain - known(f"radar_constant_{channel}")
        return cls(
            nyquist=wavelength / (4 * prt) if wavelength is not None and prt > 0 else _NAN,
            noise_dbm=(noise, known("noise_dbm_vc")),
            gain_db=gain,
            base_dbz=known(f"base_dbz_1km_{channel}c", derived),
            dbz_correction=known("dbz_correction", 0.0),
            zdr_correction=known("zdr_correction_db", 0.0),
            velocity_sign=sign,
        )


def wavelength_of(state: Metadata) -> float | None:
    """Return a radar's wavelength in metres, if it says."""
    for kind in (Kind.RADAR_INFO, Kind.CALIBRATION):
        found = state.number(kind, "wavelength_cm")
        if found is not None and found > 0:
            return found / 100
    return None


def attenuation_by_gases(
    elevations: NDArray[np.float64], ranges: NDArray[np.float64], wavelength: float | None
) -> NDArray[np.float32]:
    """Return the decibels that air and vapour take from echoes: beams x gates, there and back.

    Doviak and Zrnić (1993), equation 3.19, for up to 10 degrees and 200 km at 10 cm; the shorter
    wavelengths by the factors that they give.

    :param ranges: metres
    """
    up = np.clip(elevations, 0.0, None)[:, None]
    far = ranges[None] / 1000
    lost = (0.4 + 3.45 * np.exp(-up / 1.8)) * -np.expm1(-far / (27.8 + 154 * np.exp(-up / 2.2)))
    factor = 1.0
    if wavelength is not None:
        factor = next((f for least, f in _BANDS if wavelength >= least), 1.5)
    found: NDArray[np.float32] = (lost * factor).astype(np.float32)
    return found


def moments_of(
    iq: NDArray[np.float32],
    shape: tuple[int, int, int, int],
    receiver: Receiver,
    ranges: NDArray[np.float64],
    *,
    dual: bool,
) -> dict[str, NDArray[np.float32]]:
    """Return the fields of dwells, each as dwells x gates.

    :param shape: dwells, pulses, channels and gates of the samples
    :param ranges: metres to each gate
    :param dual: two polarisations were sent at once, horizontal in channel 0
    """
    dwells, pulses, channels, gates = shape
    sums = np.empty((dwells, 3 * (channels + dual), gates))
    _pulses.pulse_pairs(iq, dwells, pulses, channels, gates, 1, dual, sums)
    # LROSE's powers of two polarisations are those of the earlier pulses of the pairs.
    counted = max(1, pulses - dual)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        h = _Channel(sums, 0, counted, pulses, receiver.noise_dbm[0])
        if dual:
            v = _Channel(sums, 1, counted, pulses, receiver.noise_dbm[1])
            found = _dual(h, v, sums[:, -2] / counted, sums[:, -1] / counted, receiver)
        else:
            found = {
                "VEL": _velocity(h.real, h.turn, receiver),
                "WIDTH": h.width(receiver),
                "NCP": np.minimum(h.r1 / h.r0, 1),
            }
        snr = np.where(h.is_censored, np.nan, 10 * np.log10(h.signal / h.noise))
        far = 20 * np.log10(np.where(ranges < _NEAR, 1000.0, ranges) / 1000)
        found["SNR"] = snr
        found["DBZ"] = snr + (receiver.base_dbz + receiver.dbz_correction + far)
        found["DBM"] = 10 * np.log10(h.r0) - receiver.gain_db
        if pulses > 2 and h.is_censored.any():  # noqa: PLR2004 - there is a lag of two
            # Less noise than signal: how the correlation falls from lag to lag still tells.
            _pulses.pulse_pairs(iq, dwells, pulses, channels, gates, 2, dual, sums)
            by_lags = _width_by_lags(h.r1, sums, pulses, receiver)
            found["WIDTH"] = np.where(h.is_censored, by_lags, found["WIDTH"])
        if pulses < 2:  # noqa: PLR2004 - there is no pair
            for name in ("VEL", "WIDTH", "NCP"):
                found[name] = np.full((dwells, gates), np.nan)
    return {name: values.astype(np.float32) for name, values in found.items()}


class _Channel:
    """Means over the pulses of one polarisation, each dwells x gates."""

    def __init__(
        self, sums: NDArray[np.float64], channel: int, counted: int, pulses: int, noise: float
    ) -> None:
        power, real, turn = (sums[:, 3 * channel + i] for i in range(3))
        self.r0 = power / counted
        pairs = max(1, pulses - 1)
        #: The product at a lag of one pulse: both parts, and its size.
        self.real, self.turn = real / pairs, turn / pairs
        self.r1 = _size(self.real, self.turn)
        self.noise = 10.0 ** (noise / 10)
        self.signal = self.r0 - self.noise
        self.is_censored: NDArray[np.bool_] = ~(self.signal >= _LEAST_SIGNAL * self.noise)

    def width(self, receiver: Receiver) -> NDArray[np.float64]:
        ratio = np.log(self.signal / self.r1)
        return _limited(receiver.nyquist / np.pi * np.sqrt(2 * np.maximum(ratio, 0)), receiver)


def _size(real: NDArray[np.float64], turn: NDArray[np.float64]) -> NDArray[np.float64]:
    # Samples are float32, so that no square overflows; `hypot` takes ten times as long.
    size: NDArray[np.float64] = np.sqrt(real * real + turn * turn)
    return size


def _limited(width: NDArray[np.float64], receiver: Receiver) -> NDArray[np.float64]:
    limited: NDArray[np.float64] = np.clip(width, _NARROWEST, receiver.nyquist)
    return limited


def _velocity(
    real: NDArray[np.float64], turn: NDArray[np.float64], receiver: Receiver
) -> NDArray[np.float64]:
    """Return velocities: what goes away comes back with an ever later phase."""
    found: NDArray[np.float64] = np.arctan2(turn, real)
    found *= -receiver.velocity_sign * receiver.nyquist / np.pi
    return found


def _dual(
    h: _Channel,
    v: _Channel,
    real: NDArray[np.float64],
    turn: NDArray[np.float64],
    receiver: Receiver,
) -> dict[str, NDArray[np.float64]]:
    """Return what two polarisations say together.

    :param real: and `turn`: of the mean of v times the conjugate of h
    """
    both = h.real + v.real, h.turn + v.turn
    is_censored = h.is_censored | v.is_censored
    zdr = 10 * np.log10(h.signal / v.signal) + receiver.zdr_correction
    likeness = np.minimum(_size(real, turn) / np.sqrt(h.signal * v.signal), 1)
    return {
        "VEL": _velocity(*both, receiver),
        "WIDTH": (h.width(receiver) + v.width(receiver)) / 2,
        "NCP": np.minimum(_size(*both) / (h.r0 + v.r0), 1),
        "ZDR": np.where(is_censored, np.nan, zdr),
        "PHIDP": np.rad2deg(np.arctan2(turn, real)),
        "RHOHV": np.where(is_censored, np.nan, likeness),
    }


def _width_by_lags(
    r1: NDArray[np.float64], sums: NDArray[np.float64], pulses: int, receiver: Receiver
) -> NDArray[np.float64]:
    r2 = _size(sums[:, 1], sums[:, 2]) / (pulses - 2)
    ratio = np.maximum(np.log(r1 / r2), 0)
    return _limited(receiver.nyquist / np.pi * np.sqrt(0.6667 * ratio), receiver)
