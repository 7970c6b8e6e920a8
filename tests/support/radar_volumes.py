"""Volumes of a radar that does not exist, the same each time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.radar.beams import FIELDS, make_beams

START_NS = 1_750_000_000_500_000_000


def volume(
    number: int = 1,
    *,
    sweeps: int = 2,
    rays: int = 36,
    gates: int = 64,
    radar: str = "GOLDEN",
    mode: str = "azimuth_surveillance",
    ends: bool = True,
    gap_ns: int = 100_000_000,
) -> pa.Table:
    """Return the beams of one volume; those of the next number follow it in time."""
    count = sweeps * rays
    rng = np.random.default_rng(number)
    index = np.arange(count)
    sweep = index // rays
    moving = ((index % rays) * 360.0 / rays + 0.25).astype(np.float32)
    fixed = np.array([0.5, 1.5, 2.5, 4.0, 8.0, 12.0], np.float32)[sweep % 6]
    is_rhi = mode == "rhi"
    fields = {
        name: rng.normal(10, 15, (count, gates)).astype(np.float32).round(3) for name in FIELDS
    }
    fields["DBZ"][:, ::7] = np.nan
    return make_beams(
        {
            "time_ns": START_NS + ((number - 1) * count + index) * gap_ns + 123_457,
            "azimuth": fixed * 10 if is_rhi else moving,
            "elevation": moving / 4 if is_rhi else fixed,
            "fixed_angle": fixed * 10 if is_rhi else fixed,
            "volume_number": np.full(count, number),
            "sweep_number": sweep,
            "start_of_volume": index == 0,
            "end_of_volume": (index == count - 1) & ends,
            "start_of_sweep": index % rays == 0,
            "end_of_sweep": index % rays == rays - 1,
            "sweep_mode": [mode] * count,
            "polarization_mode": ["hv_sim"] * count,
            "prt_mode": ["fixed"] * count,
            "follow_mode": ["none"] * count,
            "antenna_transition": np.zeros(count, bool),
            "prt": np.full(count, 0.001),
            "pulse_width": np.full(count, 1e-6),
            "nyquist": np.full(count, 25.0),
            "unambiguous_range": np.full(count, 149_896.0),
            "samples": np.full(count, 64),
            "scan_rate": np.full(count, 12.5),
            "start_range": np.full(count, 75.0),
            "gate_spacing": np.full(count, 150.0),
            "transmit_power_h": np.full(count, 84.5),
            "transmit_power_v": np.full(count, 84.25),
            "radar": [radar] * count,
            "site": ["Marshall"] * count,
            "latitude": np.full(count, 39.9501),
            "longitude": np.full(count, -105.1953),
            "altitude": np.full(count, 1742.5),
            "platform_type": ["fixed"] * count,
            "wavelength": np.full(count, 0.1068),
            "beam_width_h": np.full(count, 0.92),
            "beam_width_v": np.full(count, 0.91),
            "gain_h": np.full(count, 45.4),
            "gain_v": np.full(count, 45.3),
            "calibration": [[("noise_hc", -75.0), ("receiver_gain_hc", 37.0)]] * count,
            **fields,
        }
    )
