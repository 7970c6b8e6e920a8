"""What do the tests of the example radar share?"""

from __future__ import annotations

import pyarrow as pa
from storms import Cell, Day, Wind
from synthetic_radar import RadarSettings, SyntheticRadar

__all__ = ["LOOKING_NORTH", "NYQUIST", "SMALL", "batch_of", "even_rain", "payloads"]

SMALL = RadarSettings(pulses=8, gates=12, elevations=(0.5, 1.5), beams_per_sweep=40)
LOOKING_NORTH = RadarSettings(beams_per_sweep=1, elevations=(0.0,))
#: m/s, of both.
NYQUIST = 25.0


def payloads(radar: SyntheticRadar, count: int) -> list[bytes]:
    return [beam.tobytes() for beam in radar.next_beams(count)]


def batch_of(beams: list[bytes], type: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.record_batch([pa.array(beams, type or pa.binary())], names=["payload"])


def even_rain(speed: float, width: float, peak: float = 35.0) -> Day:
    """The same rain everywhere that counts, with a wind from south to north."""
    return Day(Wind(0.0, speed), (Cell(0.0, 0.0, peak, 1e9, width),), extent=1e9)
