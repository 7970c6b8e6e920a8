"""A weather radar that writes its pulses as IWRF, without a radar or weather.

    python examples/radar/synthetic_radar.py iwrf+fmq:/tmp/radar/ts --speed 1 --volumes 2

It turns, tilts and turns again, and sends in both polarisations at once. The echoes are random as
real ones are: complex Gaussian, with the autocorrelation that velocity, spectrum width and power
ask for, with the likeness and phase between the polarisations that the drops ask for, over the
receiver's noise, in 16 bits.
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
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from storms import STORMY_DAY, Day, Weather

import penstock
from penstock.radar.iwrf.packets import Encoding, Event, Kind, make, read
from penstock.radar.iwrf.pulses import make_pulse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["RadarSettings", "SyntheticRadar", "main", "write_volumes"]

_SECOND: Final = 1_000_000_000
_H_AND_V: Final = 2
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
#: dB from a sample of amplitude 1 to the noise; the receiver ends 85 dB above that.
_NOISE_COUNTS: Final = 5.0
#: Beams that are made and written in one go: more would save little.
_AT_ONCE: Final = 12
#: Words of IWRF: turning at fixed elevations, both polarisations at once, an even PRT.
_SURVEILLANCE, _SIMULTANEOUS, _HV_SIM, _FIXED = 8, 5, 4, 1


@dataclass(frozen=True)
class RadarSettings:
    """An S-band radar with 60 km of gates; its Nyquist velocity is 25 m/s."""

    #: Pulses of one beam, which is 1° wide unless there are fewer than 360 in a turn.
    pulses: int = 32
    gates: int = 240
    gate_spacing: float = 250.0  # m; the middle of the first gate is half of it away
    prt: float = 0.001  # s
    wavelength: float = 0.10  # m
    noise_dbm: float = -77.0  # at the digitiser
    receiver_gain: float = 37.0  # dB
    base_dbz_1km: float = -42.0  # dBZ of an echo as strong as the noise, 1 km away
    elevations: tuple[float, ...] = (0.5, 1.8, 3.4, 5.6)  # degrees, one sweep each
    beams: int = 360  # of a sweep

    @property
    def nyquist(self) -> float:
        """Return the largest velocity that is not taken for another, m/s."""
        return self.wavelength / (4 * self.prt)

    @property
    def beams_per_volume(self) -> int:
        return self.beams * len(self.elevations)


class SyntheticRadar:
    """Turns around and around, and returns its beams in order, as packets.

    The same seed gives the same samples, however many beams are asked for at once.
    """

    def __init__(
        self,
        settings: RadarSettings | None = None,
        day: Day = STORMY_DAY,
        seed: int = 0,
        began_ns: int = 0,
    ) -> None:
        """Begin at a time with beam 0.

        :raises InvalidOption: no radar can have such settings.
        """
        self.settings = settings or RadarSettings()
        self.day = day
        self.began_ns = began_ns
        #: The next beam's number.
        self.beam = 0
        pulses, gates = self.settings.pulses, self.settings.gates
        if pulses < 2 or not 1 <= gates <= _SERIES:  # two for a pair; and see _SERIES
            raise penstock.InvalidOption(
                "pulses, gates", (pulses, gates), f"must be 2 or more, and 1 to {_SERIES:,}"
            )
        self._random = np.random.default_rng(seed)
        self._ranges = self.settings.gate_spacing / 1000 * (np.arange(gates) + 0.5)
        self._template = self._pulse()
        samples = ("iq", "<i2", (_H_AND_V, gates, 2))
        self._dtype = np.dtype([("header", self._template.dtype), samples])
        self._echoes = self._bank_of_echoes()
        self._noise = self._bank_of_noise()

    # --- what is there to be measured -----------------------------------------------------------

    def weather(self, beams: NDArray[np.int64]) -> Weather:
        """Return the weather that beams of these numbers meet: what perfect moments would say."""
        settings = self.settings
        sweep = beams // settings.beams % len(settings.elevations)
        azimuth = beams % settings.beams * (360 / settings.beams)
        elevation = np.asarray(settings.elevations)[sweep]
        seconds = beams * (settings.pulses * settings.prt)
        seen = self.day.look(azimuth, elevation, seconds, self._ranges)
        return seen._replace(width=_WIDTHS[_nearest_width(seen.width)])

    # --- what it says of itself -----------------------------------------------------------------

    def metadata(self, beam: int) -> list[bytes]:
        """Return the packets that tell whose pulses come from a beam on, and what they are."""
        settings = self.settings
        time_ns = self._time_ns(beam)
        volume, rest = divmod(beam, settings.beams_per_volume)
        sweep = rest // settings.beams
        rate = 360 / (settings.beams * settings.pulses * settings.prt)
        angles = np.full(512, -9999.0, np.float32)
        angles[: len(settings.elevations)] = settings.elevations
        receiver: dict[str, Any] = {
            f"{name}_{channel}": value
            for channel in ("hc", "vc")
            for name, value in (
                ("receiver_gain_db", settings.receiver_gain),
                ("noise_dbm", settings.noise_dbm),
                ("base_dbz_1km", settings.base_dbz_1km),
            )
        }
        return [
            make(
                Kind.RADAR_INFO,
                time_ns=time_ns,
                radar_name="SYNTH",
                site_name="Anywhere",
                wavelength_cm=100 * settings.wavelength,
                latitude_deg=39.95,
                longitude_deg=-105.2,
                altitude_m=1740.0,
                beamwidth_deg_h=1.0,
                beamwidth_deg_v=1.0,
                nominal_gain_ant_db_h=45.0,
                nominal_gain_ant_db_v=45.0,
            ),
            make(
                Kind.SCAN_SEGMENT,
                time_ns=time_ns,
                segment_name="storms",
                project_name="storm-watch",
                scan_mode=_SURVEILLANCE,
                follow_mode=1,
                volume_num=volume,
                sweep_num=sweep,
                n_sweeps=len(settings.elevations),
                fixed_angles=angles,
                current_fixed_angle=settings.elevations[sweep],
                scan_rate=rate,
            ),
            make(
                Kind.TS_PROCESSING,
                time_ns=time_ns,
                xmit_rcv_mode=_SIMULTANEOUS,
                pol_mode=_HV_SIM,
                prf_mode=_FIXED,
                prt_usec=settings.prt * 1e6,
                pulse_width_us=1.0,
                start_range_m=settings.gate_spacing / 2,
                gate_spacing_m=settings.gate_spacing,
                max_gate=settings.gates,
                integration_cycle_pulses=settings.pulses,
                beams_are_indexed=1,
                indexed_beam_width_deg=360 / settings.beams,
                indexed_beam_spacing_deg=360 / settings.beams,
            ),
            make(
                Kind.CALIBRATION,
                time_ns=time_ns,
                radar_name="SYNTH",
                wavelength_cm=100 * settings.wavelength,
                pulse_width_us=1.0,
                **receiver,
            ),
        ]

    def _pulse(self) -> NDArray[np.void]:
        """Return the header that all pulses have in common."""
        settings = self.settings
        packet = make_pulse(
            np.zeros((_H_AND_V, settings.gates), np.complex64),
            encoding=Encoding.SCALED_SI16,
            scale=math.sqrt(10 ** ((settings.noise_dbm - _NOISE_COUNTS) / 10)),
            scan_mode=_SURVEILLANCE,
            follow_mode=1,
            prt=settings.prt,
            prt_next=settings.prt,
            pulse_width_us=1.0,
            start_range_m=settings.gate_spacing / 2,
            gate_spacing_m=settings.gate_spacing,
            phase_cohered=1,
        )
        return read(packet, Kind.PULSE)

    def _time_ns(self, beam: int) -> int:
        return self.began_ns + round(beam * self.settings.pulses * self.settings.prt * _SECOND)

    # --- measuring ------------------------------------------------------------------------------

    def next_beams(self, count: int) -> list[bytes]:
        """Return the packets of the next beams, those of each together."""
        settings = self.settings
        beams = np.arange(self.beam, self.beam + count)
        self.beam += count
        packets = np.empty((count, settings.pulses), self._dtype)
        self._fill_headers(packets["header"], beams)
        packets["iq"] = self._samples(beams)
        return [
            b"".join((*(self.metadata(beam) if beam % settings.beams == 0 else ()), each.tobytes()))
            for beam, each in zip(beams.tolist(), packets, strict=True)
        ]

    def _fill_headers(self, headers: NDArray[np.void], beams: NDArray[np.int64]) -> None:
        settings = self.settings
        headers[:] = self._template[0]
        numbers = beams[:, None] * settings.pulses + np.arange(settings.pulses)
        sweeps, place = np.divmod(numbers, settings.beams * settings.pulses)
        volume, sweep = np.divmod(sweeps, len(settings.elevations))
        times = self.began_ns + np.round(numbers * (settings.prt * _SECOND)).astype(np.int64)
        headers["pulse_seq_num"] = headers["seq_num"] = numbers
        headers["time_secs_utc"], headers["time_nano_secs"] = np.divmod(times, _SECOND)
        headers["volume_num"], headers["sweep_num"] = volume, sweep
        headers["elevation"] = headers["fixed_el"] = np.asarray(settings.elevations)[sweep]
        # The antenna never stops: beam i is what is seen while it passes i times the width.
        turned = (place + 0.5) / settings.pulses - 0.5
        headers["azimuth"] = turned * (360 / settings.beams) % 360
        is_first, is_last = place == 0, place == settings.beams * settings.pulses - 1
        events = is_first * int(Event.START_OF_SWEEP) + is_last * int(Event.END_OF_SWEEP)
        events += (is_first & (sweep == 0)) * int(Event.START_OF_VOLUME)
        events += (is_last & (sweep == len(settings.elevations) - 1)) * int(Event.END_OF_VOLUME)
        headers["event_flags"] = events

    def _samples(self, beams: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return I and Q in counts: beams x pulses x polarisations x gates x 2."""
        pulses, gates, count = self.settings.pulses, self.settings.gates, len(beams)
        weather = self.weather(beams)
        # Four numbers for each beam, so that it does not matter how many are made at once.
        draws = self._random.integers(2**62, size=(count, 4))
        windows = np.lib.stride_tricks.sliding_window_view(self._noise, gates * pulses)
        samples = windows[draws[:, :2] % len(windows)]  # one window for each polarisation
        both = samples.reshape(count, _H_AND_V, gates, pulses).transpose(1, 0, 2, 3)

        power = 10 ** (_NOISE_COUNTS / 10) * self._signal_to_noise(weather.z)
        is_seen = np.flatnonzero(power.ravel() > _FAINTEST * 10 ** (_NOISE_COUNTS / 10))
        seen = Weather(*(part.ravel()[is_seen] for part in weather))
        turning = _turning(-math.pi * seen.velocity / self.settings.nyquist, pulses)
        turning *= np.sqrt(power.ravel()[is_seen], dtype=np.float32)[:, None]
        first, second = (
            self._echoes[self._series(weather.width, draw).ravel()[is_seen]] * turning
            for draw in draws[:, 2:].T
        )
        likeness = seen.rhohv.astype(np.float32)[:, None]
        turned = np.exp(1j * np.radians(seen.phidp)) * 10 ** (-seen.zdr / 20)
        second *= np.sqrt(1 - likeness**2)
        second += likeness * first
        second *= turned.astype(np.complex64)[:, None]
        for polarisation, echoes in zip(both, (first, second), strict=True):
            flat = polarisation.reshape(-1, pulses)
            flat[is_seen] += echoes
            polarisation[:] = flat.reshape(polarisation.shape)

        pulses_first = np.ascontiguousarray(both.transpose(1, 3, 0, 2))
        counts = pulses_first.view(np.float32).reshape(*pulses_first.shape, 2)
        np.rint(counts, out=counts)
        np.clip(counts, -32767, 32767, out=counts)  # a receiver has its limits
        return counts

    def _signal_to_noise(self, z: NDArray[Any]) -> NDArray[Any]:
        """Return how much stronger echoes are than the noise: the radar equation."""
        at_1_km = 10 ** (-self.settings.base_dbz_1km / 10)
        found: NDArray[Any] = z * at_1_km / self._ranges**2
        return found

    def _series(self, width: NDArray[Any], draw: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the series in the bank that each gate takes."""
        of_width = (draw[:, None] + np.arange(self.settings.gates)) % _SERIES
        return of_width + _nearest_width(width) * _SERIES

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
            spread = math.pi * width / self.settings.nyquist
            values, vectors = np.linalg.eigh(np.exp(-((spread * lags) ** 2) / 2))
            root = vectors * np.sqrt(np.maximum(values, 0))  # some are 0, give or take rounding
            series[:] = self._white((_SERIES, len(pulses)), power=1.0) @ root.T.astype(np.complex64)
        return bank.reshape(-1, len(pulses))

    def _bank_of_noise(self) -> NDArray[np.complex64]:
        size = max(_NOISE_SAMPLES, 4 * self.settings.pulses * self.settings.gates)
        # Rounding to counts adds a little noise of its own; together they are as announced.
        return self._white((size,), 10 ** (_NOISE_COUNTS / 10) - 2 * _ROUNDING)

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


# --- into a stream ------------------------------------------------------------------------------


def write_volumes(
    writer: penstock.Writer, radar: SyntheticRadar, volumes: int, speed: float | None = 1.0
) -> Iterator[int]:
    """Write whole volumes, so many times as fast as a real radar; yield beams after each few.

    :param speed: None: as fast as possible
    """
    beams = volumes * radar.settings.beams_per_volume
    dwell = radar.settings.pulses * radar.settings.prt
    began, written = time.monotonic(), 0
    while written < beams:
        payloads = radar.next_beams(min(_AT_ONCE, beams - written))
        written += len(payloads)
        if speed is not None:
            time.sleep(max(0.0, began + written * dwell / speed - time.monotonic()))
        writer.write_many(payloads)
        yield written


def main(arguments: Sequence[str] | None = None) -> int:
    """Write some volumes, and say how much it was."""
    given = _parse(arguments)
    settings = RadarSettings(pulses=given.pulses, gates=given.gates)
    duration = given.volumes * settings.beams_per_volume * settings.pulses * settings.prt
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.completed:>9,.0f} beams"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    try:
        # What is played faster began earlier, so that it ends now and not in the future.
        began_ns = time.time_ns() - (round(duration * _SECOND) if given.speed != 1 else 0)
        radar = SyntheticRadar(settings, seed=given.seed, began_ns=began_ns // _SECOND * _SECOND)
        began = time.monotonic()
        with penstock.open_writer(given.url) as writer, progress:
            task = progress.add_task("", total=given.volumes * settings.beams_per_volume)
            try:
                for written in write_volumes(writer, radar, given.volumes, given.speed or None):
                    progress.update(task, completed=written)
            except KeyboardInterrupt:
                console.print("stopped")
            done = writer.statistics()
    except penstock.PenstockError as error:
        console.print(f"synthetic_radar: {error}", markup=False, soft_wrap=True)
        if error.hint:
            console.print(f"  {error.hint}", markup=False, soft_wrap=True)
        return 1
    took = time.monotonic() - began
    print(
        f"wrote {done.messages:,} beams of {settings.pulses} pulses ({done.bytes / 1e6:,.1f} MB) "
        f"in {took:.1f} s"
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="where to, such as iwrf+fmq:/tmp/radar/ts or iwrf:/tmp/files")
    parser.add_argument("--volumes", type=int, default=1, help="how many (1)")
    parser.add_argument(
        "--speed", type=float, default=1, help="times that of a real radar (1); 0: no limit"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same samples")
    parser.add_argument("--pulses", type=int, default=RadarSettings.pulses, help="of a beam (32)")
    parser.add_argument("--gates", type=int, default=RadarSettings.gates, help="of a beam (240)")
    given = parser.parse_args(arguments)
    if given.speed < 0 or given.volumes < 1:
        parser.error("--speed must not be negative, and --volumes must be 1 or more")
    return given


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as by Ctrl-C
    sys.exit(main())
