"""A scanning weather radar that writes its pulses into a queue, without a radar or weather.

    python examples/radar/synthetic_radar.py 'fmq:/tmp/radar/iq?size=512M' --rate 1000 --seconds 30

Each message is one beam (see beams.py): its type is the sweep, its time is when it was due. The
echoes are random as real ones are, complex Gaussian with the autocorrelation that their velocity,
spectrum width and power ask for, over the receiver's noise, in 16 bits.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from beams import Rows, beam_dtype, mark
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from storms import STORMY_DAY, Day, Weather

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["RadarSettings", "SyntheticRadar", "main", "write_beams"]

#: m/s. Echoes come from a bank of series for each of these widths: a gate has the nearest one.
_WIDTHS: Final = np.arange(0.5, 6.01, 0.25)
#: Series in the bank for each width; also the most gates of a beam that are not alike by chance.
_SERIES: Final = 2048
#: Samples of noise in the bank. A beam takes its own from a random place.
_NOISE_SAMPLES: Final = 1 << 20
#: Echoes weaker than this part of the noise are left out: nobody could tell.
_FAINTEST: Final = 1e-3
#: Counts: variance of the error by which rounding changes each of I and Q.
_ROUNDING: Final = 1 / 12
#: Beams that are made and written in one go: more would save little.
_MOST_AT_ONCE: Final = 32


@dataclass(frozen=True)
class RadarSettings:
    """An S-band radar with 50 km of gates; its Nyquist velocity is 25 m/s."""

    pulses: int = 32
    gates: int = 200
    first_gate: float = 250.0  # m
    gate_spacing: float = 250.0  # m
    prf: float = 1000.0  # Hz
    wavelength: float = 0.10  # m
    noise_power: float = -112.0  # dBm
    radar_constant: float = 77.0  # dBZ of 1 mW from 1 km
    count_power: float = -115.0  # dBm of amplitude 1: noise is about that, the top is at -25
    elevations: tuple[float, ...] = (0.5, 1.5, 2.5)  # degrees, one sweep each
    beams_per_sweep: int = 360

    @property
    def dwell(self) -> float:
        """Seconds that one beam takes."""
        return self.pulses / self.prf


class SyntheticRadar:
    """Turns around and around, and returns its beams in order.

    The same seed gives the same beams, however many are asked for at once. The storms age by one
    dwell with each beam, so they move fast when beams are made faster than a real radar could.
    """

    def __init__(
        self, settings: RadarSettings | None = None, day: Day = STORMY_DAY, seed: int = 0
    ) -> None:
        self.settings = settings or RadarSettings()
        self.day = day
        #: The next beam's number.
        self.beam = 0
        pulses, gates = self.settings.pulses, self.settings.gates
        if pulses < 2 or not 1 <= gates <= _SERIES:  # two for a pair; and see _SERIES
            raise penstock.InvalidOption(
                "pulses, gates", (pulses, gates), f"must be 2 or more, and 1 to {_SERIES:,}"
            )
        self._random = np.random.default_rng(seed)
        self._dtype = beam_dtype(pulses, gates)
        self._ranges = self.settings.first_gate + self.settings.gate_spacing * np.arange(gates)
        self._echoes = self._bank_of_echoes()
        self._noise = self._bank_of_noise()

    # --- what is there to be measured -----------------------------------------------------------

    def directions(self, beams: NDArray[np.int64]) -> Rows:
        """Return the headers of beams of these numbers, with the radar's own times from 1970 on."""
        settings = self.settings
        sweep_number, place = np.divmod(beams, settings.beams_per_sweep)
        volume, sweep = np.divmod(sweep_number, len(settings.elevations))
        headers = np.zeros(len(beams), self._dtype["header"])
        mark(headers, settings.pulses, settings.gates)
        headers["beam"] = beams
        headers["time_ns"] = np.round(beams * (settings.dwell * 1e9))
        headers["volume"] = volume
        headers["sweep"] = sweep
        headers["azimuth"] = place * (360 / settings.beams_per_sweep)
        headers["elevation"] = np.asarray(settings.elevations)[sweep]
        for name in ("first_gate", "gate_spacing", "prf", "wavelength"):
            headers[name] = getattr(settings, name)
        for name in ("noise_power", "radar_constant", "count_power"):
            headers[name] = getattr(settings, name)
        return headers

    def weather(self, headers: Rows) -> Weather:
        """Return the weather that these beams meet: what perfect moments would say."""
        seconds = headers["beam"] * self.settings.dwell
        seen = self.day.look(headers["azimuth"], headers["elevation"], seconds, self._ranges)
        return seen._replace(width=_WIDTHS[_nearest_width(seen.width)])

    # --- measuring ------------------------------------------------------------------------------

    def next_beams(self, count: int) -> Rows:
        """Return the next beams: an array of `beam_dtype`, whose rows are payloads."""
        pulses, gates = self.settings.pulses, self.settings.gates
        headers = self.directions(np.arange(self.beam, self.beam + count))
        self.beam += count
        weather = self.weather(headers)
        # Two numbers for each beam, so that it does not matter how many are made at once.
        draws = self._random.integers(2**62, size=(count, 2))
        size = pulses * gates
        windows = np.lib.stride_tricks.sliding_window_view(self._noise, size)
        samples = windows[draws[:, 0] % len(windows)].reshape(count * gates, pulses)

        power = self._counts_of(weather.z)
        is_seen = np.flatnonzero(power.ravel() > _FAINTEST * self._noise_counts)
        series = (draws[:, 1, None] + np.arange(gates)) % _SERIES
        series += _nearest_width(weather.width) * _SERIES
        echoes = self._echoes[series.ravel()[is_seen]]
        turn = -math.pi * weather.velocity.ravel()[is_seen] / self._nyquist
        echoes *= _turning(turn, pulses)
        echoes *= np.sqrt(power.ravel()[is_seen], dtype=np.float32)[:, None]
        samples[is_seen] += echoes

        beams = np.zeros(count, self._dtype)
        beams["header"] = headers
        pulses_first = samples.reshape(count, gates, pulses).transpose(0, 2, 1)
        counts = np.ascontiguousarray(pulses_first).view(np.float32)
        np.rint(counts, out=counts)
        np.clip(counts, -32768, 32767, out=counts)  # a receiver has its limits
        beams["iq"] = counts.reshape(count, pulses, gates, 2)
        return beams

    @property
    def _nyquist(self) -> float:
        return self.settings.prf * self.settings.wavelength / 4

    @property
    def _noise_counts(self) -> float:
        return float(10 ** ((self.settings.noise_power - self.settings.count_power) / 10))

    def _counts_of(self, z: NDArray[Any]) -> NDArray[Any]:
        """Return the power of echoes, in counts²: the radar equation."""
        settings = self.settings
        one_at_1_km = 10 ** (-(settings.radar_constant + settings.count_power) / 10)
        return z * (one_at_1_km / (self._ranges / 1000) ** 2)

    # --- what is random, made once --------------------------------------------------------------

    def _bank_of_echoes(self) -> NDArray[np.complex64]:
        """Return series (widths * series x pulses) of power 1 that stand still, by width.

        The autocorrelation of a Gaussian spectrum is a Gaussian in time (Doviak and Zrnić, 1993,
        section 6.4). White noise times the root of its matrix has exactly that.
        """
        pulses = np.arange(self.settings.pulses)
        lags = pulses[:, None] - pulses
        bank = np.empty((len(_WIDTHS), _SERIES, len(pulses)), np.complex64)
        for series, width in zip(bank, _WIDTHS, strict=True):
            spread = math.pi * width / self._nyquist
            values, vectors = np.linalg.eigh(np.exp(-((spread * lags) ** 2) / 2))
            root = vectors * np.sqrt(np.maximum(values, 0))  # some are 0, give or take rounding
            series[:] = self._white((_SERIES, len(pulses)), power=1.0) @ root.T.astype(np.complex64)
        return bank.reshape(-1, len(pulses))

    def _bank_of_noise(self) -> NDArray[np.complex64]:
        size = max(_NOISE_SAMPLES, 4 * self.settings.pulses * self.settings.gates)
        # Rounding to counts adds a little noise of its own; together they are as announced.
        power = max(self._noise_counts - 2 * _ROUNDING, 0.0)
        return self._white((size,), power)

    def _white(self, shape: tuple[int, ...], power: float) -> NDArray[np.complex64]:
        pairs = self._random.standard_normal((*shape, 2), np.float32)
        pairs *= np.float32(math.sqrt(power / 2))
        return pairs.view(np.complex64)[..., 0]


def _nearest_width(width: NDArray[Any]) -> NDArray[np.int64]:
    step = _WIDTHS[1] - _WIDTHS[0]
    nearest: NDArray[np.int64] = np.rint((width - _WIDTHS[0]) / step).astype(np.int64)
    return nearest.clip(0, len(_WIDTHS) - 1)


def _turning(phase: NDArray[Any], pulses: int) -> NDArray[np.complex64]:
    """Return exp(i n phase) for n from 0 on (… x pulses), each half as the square of the other.

    One multiplication each instead of a sine and a cosine.
    """
    turned = np.empty((len(phase), pulses), np.complex64)
    turned[:, 0] = 1
    done = 1
    while done < pulses:
        more = min(done, pulses - done)
        step = np.exp(1j * done * phase).astype(np.complex64)
        np.multiply(turned[:, :more], step[:, None], out=turned[:, done : done + more])
        done += more
    return turned


# --- into a queue -------------------------------------------------------------------------------


def write_beams(
    writer: penstock.Writer,
    radar: SyntheticRadar,
    *,
    rate: float | None = None,
    beams: int | None = None,
    seconds: float | None = None,
) -> Iterator[int]:
    """Write beams at a rate, or as fast as possible; yield how many after each few of them.

    Ends after so many beams or seconds, whichever is first, or never. At a rate, a beam's time is
    when it was due, so that whoever measures the delay sees it also when we are late.
    """
    at_once = _MOST_AT_ONCE if rate is None else max(1, min(_MOST_AT_ONCE, int(rate / 100)))
    if rate is not None and seconds is not None:
        beams = min(round(rate * seconds), sys.maxsize if beams is None else beams)
    began, began_ns = time.monotonic(), time.time_ns()
    written = 0
    while beams is None or written < beams:
        if seconds is not None and time.monotonic() - began >= seconds:
            return
        some = radar.next_beams(at_once if beams is None else min(at_once, beams - written))
        written += len(some)
        if rate is None:
            times = np.full(len(some), time.time_ns())
        else:
            numbers = np.arange(written - len(some), written) + 1
            times = began_ns + np.round(numbers * (1e9 / rate)).astype(np.int64)
            time.sleep(max(0.0, began + written / rate - time.monotonic()))
        some["header"]["time_ns"] = times
        payloads = some.view(np.uint8).reshape(len(some), -1)
        sweeps = some["header"]["sweep"].tolist()
        for payload, sweep, time_ns in zip(payloads, sweeps, times.tolist(), strict=True):
            writer.write(payload.data, type=sweep, time_ns=time_ns)
        yield written


def main(arguments: Sequence[str] | None = None) -> int:
    """Write until told to stop, and say how much it was."""
    given = _parse(arguments)
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:>9,.0f} beams"),
        BarColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    rate = given.rate or None
    total = given.beams
    if total is None and rate and given.seconds is not None:
        total = round(rate * given.seconds)
    try:
        radar = SyntheticRadar(
            RadarSettings(pulses=given.pulses, gates=given.gates), seed=given.seed
        )
        radar.beam = given.first
        with penstock.open_writer(given.url) as writer:
            began = time.monotonic()
            try:
                with progress:
                    task = progress.add_task("", total=total, pace="")
                    for written in write_beams(
                        writer, radar, rate=rate, beams=given.beams, seconds=given.seconds
                    ):
                        pace = written / (time.monotonic() - began)
                        progress.update(task, completed=written, pace=f"{pace:,.0f} beams/s")
            except KeyboardInterrupt:
                console.print("stopped")
            took = time.monotonic() - began
            done = writer.statistics()
    except penstock.PenstockError as error:
        console.print(f"synthetic_radar: {error}", markup=False, soft_wrap=True)
        if error.hint:
            console.print(f"  {error.hint}", markup=False, soft_wrap=True)
        return 1
    print(
        f"wrote {done.messages:,} beams ({done.bytes / 1e6:,.1f} MB) in {took:.1f} s: "
        f"{done.messages / took:,.0f} beams/s, {done.bytes / 1e6 / took:,.1f} MB/s"
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the queue, such as fmq:/tmp/radar/iq?size=512M")
    parser.add_argument(
        "--rate", type=float, default=1000, help="beams/s (1000); 0: as fast as possible"
    )
    parser.add_argument("--seconds", type=float, help="stop after that long")
    parser.add_argument("--beams", type=int, help="stop after so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first beam (0)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same samples")
    parser.add_argument("--pulses", type=int, default=RadarSettings.pulses, help="of a beam (32)")
    parser.add_argument("--gates", type=int, default=RadarSettings.gates, help="of a beam (200)")
    given = parser.parse_args(arguments)
    if given.rate < 0 or given.first < 0:
        parser.error("--rate and --first must not be negative")
    return given


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as by Ctrl-C
    sys.exit(main())
