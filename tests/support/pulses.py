"""Pulses for tests: the packets of a small radar, and the vectors of LROSE's own code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.radar.iwrf.packets import Event, Kind, make
from penstock.radar.iwrf.pulses import make_pulse

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["VECTORS", "metadata", "samples", "scan", "vector"]

VECTORS = Path(__file__).parents[1] / "vectors" / "iwrf"
#: 15 June 2025, 15:06:40.
T0 = 1_750_000_000_000_000_000


def vector(name: str) -> NDArray[np.uint8]:
    """Return the bytes of a file of the vectors."""
    return np.fromfile(VECTORS / f"{name}.iwrf_ts", np.uint8)


def metadata(time_ns: int = T0, **fields: Any) -> list[bytes]:
    """Return what a radar says of itself."""
    processing: dict[str, Any] = {
        "xmit_rcv_mode": 5,
        "prf_mode": 1,
        "pol_mode": 4,
        "prt_usec": 1000,
        "integration_cycle_pulses": 16,
        **fields,
    }
    gains: dict[str, Any] = {
        "receiver_gain_db_hc": 37,
        "receiver_gain_db_vc": 37,
        "base_dbz_1km_hc": -45.5,
    }
    place = {"latitude_deg": 40.125, "longitude_deg": -104.625, "altitude_m": 1742.5}
    radar: dict[str, Any] = {
        "wavelength_cm": 10,
        "radar_name": "TEST",
        "site_name": "Testville",
        **place,
    }
    return [
        make(Kind.RADAR_INFO, time_ns=time_ns, **radar),
        make(Kind.SCAN_SEGMENT, time_ns=time_ns, segment_name="around", n_sweeps=2),
        make(Kind.TS_PROCESSING, time_ns=time_ns, **processing),
        make(Kind.CALIBRATION, time_ns=time_ns, noise_dbm_hc=-77, noise_dbm_vc=-77, **gains),
    ]


def samples(pulses: int, gates: int = 8, channels: int = 2, seed: int = 0) -> NDArray[Any]:
    """Return noise with a weak echo that goes away (pulses x channels x gates)."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((pulses, channels, gates, 2), np.float32).view(np.complex64)[..., 0]
    turn = np.exp(-0.5j * np.arange(pulses))[:, None, None]
    found: NDArray[Any] = (1e-4 * noise + 1e-3 * turn).astype(np.complex64)
    return found


def scan(
    pulses: int,
    *,
    gates: int = 8,
    channels: int = 2,
    encoding: int = 1,
    every: int = 20,
    sweep: int = 100,
    first: int = 0,
    seed: int = 0,
    flags: bool = True,
    **fields: Any,
) -> list[bytes]:
    """Return the packets of a radar that turns, with metadata before each `every`-th pulse."""
    iq = samples(pulses, gates, channels, seed)
    packets: list[bytes] = []
    for i in range(pulses):
        k = first + i
        time_ns = T0 + k * 1_000_000
        if not k % every:
            packets += metadata(time_ns, **fields)
        event = Event(0)
        if flags:
            event |= Event.START_OF_SWEEP if not k % sweep else Event(0)
            event |= Event.END_OF_SWEEP if k % sweep == sweep - 1 else Event(0)
        header = {"scan_mode": 8, "follow_mode": 1, "volume_num": 3, "sweep_num": k // sweep}
        angles = {"azimuth": k * 0.25 % 360, "elevation": 0.5, "fixed_el": 0.5}
        ranges = {"start_range_m": 75.0, "gate_spacing_m": 150.0}
        packets.append(
            make_pulse(
                iq[i],
                encoding=encoding,
                time_ns=time_ns,
                seq_num=len(packets) + 1,
                pulse_seq_num=k,
                prt=0.001,
                prt_next=0.001,
                pulse_width_us=1.0,
                event_flags=int(event),
                **header,
                **angles,
                **ranges,
            )
        )
    return packets
