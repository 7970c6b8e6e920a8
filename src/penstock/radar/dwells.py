"""Which pulses form one beam, and what are its moments?

A dwell is a run of pulses: a fixed number of them, or all in one sector of angle. It ends with a
sweep or volume, and where pulses stop being alike: another radar setting, a gap in their numbers, a
clock that jumps. It never ends because a batch did. Each pulse is in one beam.

Which dwell a pulse belongs to follows from the pulse alone: its number (`pulse_seq_num`) divided by
the count, or its angle by the width. So parts of a stream can be processed in parallel, and only
the dwells at their ends have to be joined.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.core.errors import InvalidOption, Unsupported
from penstock.radar.beams import BEAM_SCHEMA, FIELD_TYPE, FIELDS, SWEEP_MODES, make_beams
from penstock.radar.iwrf.packets import (
    BY_ELEVATION,
    ENDS,
    INFO_KINDS,
    MISSING,
    STARTS,
    Event,
    Kind,
    Record,
    is_missing,
)
from penstock.radar.iwrf.pulses import Metadata, PulseDecoder, Pulses
from penstock.radar.pulse_pair import (
    SPEED_OF_LIGHT,
    Receiver,
    attenuation_by_gases,
    moments_of,
    wavelength_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["BeamMaker", "BeamStatistics", "Cut", "DwellOptions", "cut"]

log = logging.getLogger(__name__)

#: Pulses of a dwell, if neither the caller nor the radar says.
DEFAULT_PULSES: Final = 64
_MOST_PULSES: Final = 4096
#: Dwells worked on at once.
_AT_ONCE: Final = 8
#: xmit_rcv_mode: H and V in turns, and both at once.
_ALTERNATING, _SIMULTANEOUS = (2, 3, 4, 9), (5, 6)
_VERTICAL: Final = (8, 10)
#: hv_flag of a pulse that was sent in both.
_BOTH: Final = 3
#: prf_mode: fixed; others have pulses at different distances.
_FIXED_PRF: Final = (0, 1)
_PRT_MODES: Final = {
    1: "fixed",
    2: "staggered",
    3: "staggered",
    4: "staggered",
    5: "dual",
    6: "dual",
}
_POLARIZATIONS: Final = {1: "horizontal", 2: "vertical", 3: "hv_alt", 4: "hv_sim", 5: "hv_alt"}
_FOLLOWED: Final = {1: "none", 2: "sun", 3: "vehicle", 4: "aircraft", 5: "target", 6: "manual"}
_PLATFORMS: Final = {1: "fixed", 2: "vehicle", 3: "ship", 4: "aircraft"}
#: What must not change within a dwell, of a pulse's header.
_ALIKE: Final = (
    *("volume_num", "sweep_num", "scan_mode", "n_gates", "n_channels", "hv_flag"),
    *("start_range_m", "gate_spacing_m", "antenna_transition"),
)
#: By CfRadial's names, where they are not those of the calibration.
_CALIBRATION: Final = {
    "xmit_power_h": "xmit_power_dbm_h",
    "xmit_power_v": "xmit_power_dbm_v",
    "noise_hc": "noise_dbm_hc",
    "noise_hx": "noise_dbm_hx",
    "noise_vc": "noise_dbm_vc",
    "noise_vx": "noise_dbm_vx",
    "receiver_gain_hc": "receiver_gain_db_hc",
    "receiver_gain_hx": "receiver_gain_db_hx",
    "receiver_gain_vc": "receiver_gain_db_vc",
    "receiver_gain_vx": "receiver_gain_db_vx",
    "two_way_waveguide_loss_h": "two_way_waveguide_loss_db_h",
    "two_way_waveguide_loss_v": "two_way_waveguide_loss_db_v",
    "two_way_radome_loss_h": "two_way_radome_loss_db_h",
    "two_way_radome_loss_v": "two_way_radome_loss_db_v",
    "receiver_mismatch_loss": "receiver_mismatch_loss_db",
    "antenna_gain_h": "gain_ant_db_h",
    "antenna_gain_v": "gain_ant_db_v",
    "zdr_correction": "zdr_correction_db",
    **{
        name: name
        for name in (
            *("radar_constant_h", "radar_constant_v", "base_dbz_1km_hc", "base_dbz_1km_hx"),
            *("base_dbz_1km_vc", "base_dbz_1km_vx", "k_squared_water", "dbz_correction"),
        )
    },
}


@dataclass(frozen=True, slots=True)
class DwellOptions:
    """How pulses are grouped into dwells."""

    #: Pulses of a dwell; None: by the angle, or as the radar says.
    pulses: int | None = None
    #: Degrees of a dwell, which are indexed from 0; None: by the count, or as the radar says.
    degrees: float | None = None
    #: -1 of a receiver that has Q the other way around.
    velocity_sign: int = 1
    #: Add to reflectivities what gases take.
    attenuation: bool = False

    def __post_init__(self) -> None:
        if self.pulses is not None and self.degrees is not None:
            raise InvalidOption("degrees", self.degrees, "a dwell is by count or by angle")
        if self.pulses is not None and not 1 <= self.pulses <= _MOST_PULSES:
            raise InvalidOption("pulses", self.pulses, f"must be 1 to {_MOST_PULSES}")
        if self.degrees is not None and not 0 < self.degrees <= 360:  # noqa: PLR2004
            raise InvalidOption("degrees", self.degrees, "must be above 0 and up to 360")
        if self.velocity_sign not in {-1, 1}:
            raise InvalidOption("velocity_sign", self.velocity_sign, "must be 1 or -1")

    def of(self, state: Metadata) -> DwellOptions:
        """Return the options with the radar's own values where none were given."""
        if self.pulses is not None or self.degrees is not None:
            return self
        indexed = state.number(Kind.TS_PROCESSING, "beams_are_indexed")
        degrees = state.number(Kind.TS_PROCESSING, "indexed_beam_spacing_deg")
        if indexed and degrees is not None and 0 < degrees <= 360:  # noqa: PLR2004
            return replace(self, degrees=degrees)
        count = state.number(Kind.TS_PROCESSING, "integration_cycle_pulses")
        known = count is not None and 1 <= count <= _MOST_PULSES
        pulses = int(count) if known and count is not None else DEFAULT_PULSES
        return replace(self, pulses=pulses)


class BeamStatistics(NamedTuple):
    """Counters of a beam maker: pulses = used + unready + open."""

    pulses: int
    beams: int
    #: Pulses in beams.
    used: int
    #: Pulses that came before radar_info and ts_processing.
    unready: int
    #: Pulses of the dwell that is not at its end.
    open: int
    #: Pulses that are missing, by the numbers of those that came.
    missing: int
    #: How often a pulse was older than the one before.
    jumps: int
    #: Bytes that belong to no packet.
    skipped_bytes: int


class Cut(NamedTuple):
    """The result of cutting packets into dwells."""

    #: Of whole dwells.
    beams: pa.Table
    #: Packets before the first dwell that certainly begins here; all packets if none does.
    head: bytes
    #: The state of the radar, and packets of the dwell that may go on. None: all is in the head.
    tail: bytes | None
    #: What it adds to the books.
    books: BeamStatistics
    #: The number of the last pulse; None: there is none.
    last: int | None = None


def cut(
    data: NDArray[np.uint8],
    options: DwellOptions,
    *,
    is_start: bool,
    is_end: bool,
    before: int | None = None,
) -> Cut:
    """Make beams of the dwells in some packets.

    :param is_start: the first pulse begins a dwell; otherwise that dwell goes into the head, as
        does everything before the required metadata
    :param is_end: the last pulse ends one; otherwise that dwell goes into the tail
    :param before: the number of the pulse before the first; those between them are missing

    :raises Unsupported: horizontal and vertical pulses alternate.
    """
    decoder = PulseDecoder()
    pulses = decoder.feed(data)
    flags = pulses.headers["event_flags"]
    if is_end and len(pulses):
        flags[-1] |= decoder.finish()
    found = _segments(pulses, options, is_start=is_start)
    numbers = pulses.headers["pulse_seq_num"]
    missing, last_number = found.missing, None
    if len(pulses):
        last_number = int(numbers[-1])
        missing += 0 if before is None else max(0, int(numbers[0]) - before - 1)
    books = BeamStatistics(
        *(len(pulses), 0, 0, 0, 0),
        missing=missing,
        jumps=found.jumps,
        skipped_bytes=decoder.statistics().skipped_bytes,
    )
    starts, ends = found.starts, np.append(found.starts[1:], len(pulses))
    first, last = 0, len(starts)
    if not is_start:
        known = _first_known(pulses, starts)
        if known is None:
            return Cut(BEAM_SCHEMA.empty_table(), data.tobytes(), None, books, last_number)
        first = known
    if not is_end and last > first and not flags[-1] & ENDS:
        last -= 1
    head = b"" if not first else data[: pulses.places[starts[first], 0]].tobytes()
    done = int(ends[last - 1]) if last else 0
    tail = decoder.state.to_bytes() if is_end else _tail(data, pulses, done)
    chosen = [i for i in range(first, last) if pulses.states[pulses.state_of[starts[i]]].is_ready]
    used = sum(int(ends[i] - starts[i]) for i in chosen)
    worked = done - int(starts[first]) if last > first else 0
    beams = _beams_of(pulses, starts, ends, chosen, options)
    books = books._replace(
        beams=beams.num_rows, used=used, unready=worked - used, open=len(pulses) - done
    )
    return Cut(beams, head, tail, books, last_number)


def _tail(data: NDArray[np.uint8], pulses: Pulses, done: int) -> bytes:
    """Return what has to be remembered of packets whose first `done` pulses are in beams.

    That is the state of the radar, the other pulses, and what tells of them and of those to come:
    changes of the state and notices. Repeated metadata and damaged bytes are left out.
    """
    place, state = 0, pulses.states[0]
    if done:
        place, state = int(pulses.places[done - 1, 1]), pulses.states[pulses.state_of[done - 1]]
    said, pieces = Metadata(), []
    for run in pulses.runs:
        if run.end <= place:
            continue
        if run.kind == Kind.PULSE:
            pieces += state.packets_since(said)
            said = state
            pieces.append(data[max(run.start, place) : run.end].tobytes())
        elif run.kind == Kind.EVENT_NOTICE:
            pieces.append(data[run.start : run.end].tobytes())
        elif run.kind in INFO_KINDS and run.kind != Kind.SYNC:
            for start, end in run.packets():
                state = state.updated(data[start:end].tobytes(), run.kind)
    return b"".join([*pieces, *state.packets_since(said)])


class BeamMaker:
    """Turns the packets of one radar into beams, batch by batch."""

    def __init__(self, options: DwellOptions | None = None, state: bytes = b"") -> None:
        """Start, or continue from another maker's state.

        :param state: its `state`
        """
        self._options = options or DwellOptions()
        #: What has to be remembered: the radar's metadata and the open dwell, as packets.
        self.state = state
        self._totals = BeamStatistics(*[0] * len(BeamStatistics._fields))
        #: The number of the last pulse that came.
        self._last: int | None = None

    def feed(self, data: bytes | NDArray[np.uint8]) -> pa.Table:
        """Return the beams that these whole packets complete."""
        return self._cut(data, is_end=False)

    def finish(self, data: bytes = b"") -> pa.Table:
        """Return the beams of the last packets and of the dwell that is open behind them."""
        return self._cut(data, is_end=True)

    def statistics(self) -> BeamStatistics:
        return self._totals

    def _cut(self, data: bytes | NDArray[np.uint8], *, is_end: bool) -> pa.Table:
        some = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        whole = np.concatenate((np.frombuffer(self.state, np.uint8), some))
        before = self._totals
        # The open dwell has the last pulse; without one, this number does.
        number = None if before.open else self._last
        found = cut(whole, self._options, is_start=True, is_end=is_end, before=number)
        self.state, now = found.tail or b"", found.books
        self._last = self._last if found.last is None else found.last
        if now.unready and not before.unready:
            log.warning(
                "%d pulses came before radar_info and ts_processing: no beams of them", now.unready
            )
        if now.jumps and not before.jumps:
            log.warning("the radar's clock jumped back %d times: dwells end there", now.jumps)
        self._totals = BeamStatistics(
            pulses=before.pulses + now.pulses - before.open,
            beams=before.beams + now.beams,
            used=before.used + now.used,
            unready=before.unready + now.unready,
            open=now.open,
            missing=before.missing + now.missing,
            jumps=before.jumps + now.jumps,
            skipped_bytes=before.skipped_bytes + now.skipped_bytes,
        )
        return found.beams


# --- which pulses belong together -----------------------------------------------------------------


class _Segments(NamedTuple):
    #: The numbers of the pulses that dwells begin with.
    starts: NDArray[np.int64]
    missing: int
    jumps: int


def _segments(pulses: Pulses, options: DwellOptions, *, is_start: bool) -> _Segments:
    count = len(pulses)
    if not count:
        return _Segments(np.empty(0, np.int64), 0, 0)
    headers = pulses.headers
    begins = np.zeros(count, bool)
    begins[0] = True
    later, earlier = headers[1:], headers[:-1]
    for name in _ALIKE:
        begins[1:] |= later[name] != earlier[name]
    flags = headers["event_flags"]
    begins |= (flags & STARTS) != 0
    begins[1:] |= (flags[:-1] & ENDS) != 0

    times = pulses.times
    is_jump = times[1:] < times[:-1]
    numbers = headers["pulse_seq_num"].astype(np.int64)
    steps = np.diff(numbers)
    missing = 0
    if count > 1 and not steps.any():
        numbers = np.arange(count)  # a radar that does not count them
    else:
        begins[1:] |= steps != 1
        missing = int((steps[steps > 1] - 1).sum())
    begins[1:] |= is_jump

    settings = _settings_of(pulses.states, is_start=is_start)[pulses.state_of]
    begins[1:] |= settings[1:] != settings[:-1]
    for some in _parts(settings):
        state = pulses.states[pulses.state_of[some.stop - 1]]
        prf_mode = state.number(Kind.TS_PROCESSING, "prf_mode") or 0
        if prf_mode in _FIXED_PRF:
            prt = headers["prt"][some]
            begins[some.start + 1 : some.stop] |= np.abs(np.diff(prt)) > 1e-7  # noqa: PLR2004
        index = _index_of(headers[some], numbers[some], options.of(state))
        begins[some.start + 1 : some.stop] |= np.diff(index) != 0
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, count))
    if lengths.max() > _MOST_PULSES:  # an antenna that stands still
        starts = np.concatenate(
            [np.arange(s, s + n, _MOST_PULSES) for s, n in zip(starts, lengths, strict=True)]
        )
    return _Segments(starts, missing, int(is_jump.sum()))


#: What beams are made of.
_NEEDED: Final = (Kind.RADAR_INFO, Kind.TS_PROCESSING, Kind.CALIBRATION, Kind.SCAN_SEGMENT)


def _settings_of(states: Sequence[Metadata], *, is_start: bool) -> NDArray[np.int64]:
    """Return a number for each metadata state; states with equal effect on beams share one.

    What is said for the first time in the middle of a stream may have been said before, so that
    it changes nothing.
    """
    known: dict[tuple[bytes, ...], int] = {}
    numbers = [
        known.setdefault(
            tuple(state.packets.get(kind, b"")[56:] for kind in _NEEDED[:3]), len(known)
        )
        for state in states
    ]
    if not is_start:
        complete = [i for i, state in enumerate(states) if _is_complete(state)]
        first = complete[0] if complete else len(states) - 1
        numbers[:first] = [numbers[first]] * first
    return np.array(numbers, np.int64)


def _is_complete(state: Metadata) -> bool:
    return all(kind in state.packets for kind in _NEEDED)


def _parts(values: NDArray[np.int64]) -> Iterator[slice]:
    """Yield the runs of equal values."""
    edges = np.flatnonzero(np.diff(values)) + 1
    starts = [0, *edges.tolist(), len(values)]
    for start, end in itertools.pairwise(starts):
        yield slice(start, end)


def _index_of(
    headers: Record, numbers: NDArray[np.int64], options: DwellOptions
) -> NDArray[np.int64]:
    """Return the dwell number of each pulse."""
    if options.degrees is None:
        return numbers // (options.pulses or DEFAULT_PULSES)
    by_elevation = np.isin(headers["scan_mode"], BY_ELEVATION)
    angle = np.where(by_elevation, headers["elevation"], headers["azimuth"]).astype(np.float64)
    # A beam of index i looks at i times the width, and is that wide.
    index: NDArray[np.int64] = np.floor(angle / options.degrees + 0.5).astype(np.int64)
    around = round(360 / options.degrees)
    return np.where(by_elevation, index, index % around)


def _first_known(pulses: Pulses, starts: NDArray[np.int64]) -> int | None:
    """Return the first dwell that certainly begins here with all metadata known.

    What was said before is not seen here. So each kind of metadata that beams are made of has to
    have come.
    """
    # A radar that moves says where it is.
    moves = Kind.PLATFORM_GEOREF in pulses.states[-1].packets
    for i in range(1, len(starts)):
        state = pulses.states[pulses.state_of[starts[i]]]
        if _is_complete(state) and (not moves or Kind.PLATFORM_GEOREF in state.packets):
            return i
    return None


# --- the beams ------------------------------------------------------------------------------------


def _beams_of(
    pulses: Pulses,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    chosen: Sequence[int],
    options: DwellOptions,
) -> pa.Table:
    """Make beams of dwells, those of one shape that follow each other at once."""
    groups: list[list[int]] = []
    before: object = None
    for i in chosen:
        first = pulses.headers[starts[i]]
        shape = (
            *(int(ends[i] - starts[i]), int(pulses.state_of[starts[i]])),
            *(first[name].item() for name in ("n_gates", "n_channels", "hv_flag", "prt")),
            *(first[name].item() for name in ("start_range_m", "gate_spacing_m", "scan_mode")),
        )
        is_next = bool(groups) and ends[groups[-1][-1]] == starts[i]
        if shape == before and is_next and len(groups[-1]) < _AT_ONCE:
            groups[-1].append(i)
        else:
            groups.append([i])
        before = shape
    tables = [
        _group(
            pulses, starts[group[0]], len(group), int(ends[group[0]] - starts[group[0]]), options
        )
        for group in groups
    ]
    return pa.concat_tables(tables).combine_chunks() if tables else BEAM_SCHEMA.empty_table()


def _group(pulses: Pulses, start: int, dwells: int, length: int, options: DwellOptions) -> pa.Table:
    """Make beams of dwells of one shape and setting, each of so many pulses."""
    headers = pulses.headers[start : start + dwells * length].reshape(dwells, length)
    state = pulses.states[pulses.state_of[start]]
    first = headers[0, 0]
    gates, channels = int(first["n_gates"]), int(first["n_channels"])
    spacing = _or_setting(first["gate_spacing_m"], state, "gate_spacing_m")
    first_gate = _or_setting(first["start_range_m"], state, "start_range_m")
    prt = float(first["prt"])
    if prt <= 0:
        prt = (state.number(Kind.TS_PROCESSING, "prt_usec") or 0.0) * 1e-6
    is_dual, channel = _polarisation(state, first)
    receiver = Receiver.of(state, prt, channel=channel, sign=options.velocity_sign)
    samples = pulses.iq[pulses.starts[start] : pulses.starts[start + dwells * length]]
    ranges = first_gate + spacing * np.arange(gates, dtype=np.float64)
    fields = moments_of(samples, (dwells, length, channels, gates), receiver, ranges, dual=is_dual)
    prf_mode = int(state.number(Kind.TS_PROCESSING, "prf_mode") or 0)
    if prf_mode not in _FIXED_PRF:  # pairs of pulses are not all as far from each other
        for name in ("VEL", "WIDTH"):
            fields[name][:] = np.nan
    columns = _columns(pulses, start, headers, state)
    if options.attenuation:
        elevations = columns["elevation"].astype(np.float64)
        fields["DBZ"] += attenuation_by_gases(elevations, ranges, wavelength_of(state))
    columns |= {
        "prt": np.full(dwells, prt, np.float32),
        "prt_mode": [_PRT_MODES.get(prf_mode, "fixed")] * dwells,
        "nyquist": _known(np.full(dwells, receiver.nyquist)),
        "unambiguous_range": np.full(dwells, SPEED_OF_LIGHT * prt / 2, np.float32),
        "start_range": np.full(dwells, first_gate, np.float32),
        "gate_spacing": np.full(dwells, spacing, np.float32),
        **{name: fields.get(name, pa.nulls(dwells, FIELD_TYPE)) for name in FIELDS},
    }
    return make_beams(columns)


def _or_setting(value: float, state: Metadata, name: str) -> float:
    """Return a number of a pulse, or of the radar's settings if the pulse has none."""
    if value != 0 and not is_missing(value):  # the first gate may lie before the radar
        return float(value)
    return state.number(Kind.TS_PROCESSING, name) or 0.0


def _polarisation(state: Metadata, first: np.void) -> tuple[bool, str]:
    """Return whether both were sent at once, and the one that channel 0 received.

    :raises Unsupported: the polarisations alternate.
    """
    mode = state.number(Kind.TS_PROCESSING, "xmit_rcv_mode") or 0
    if mode in _ALTERNATING:
        raise Unsupported(
            f"the radar sends H and V in turns (xmit_rcv_mode {mode:.0f})",
            hint="single polarisation and simultaneous H and V can be worked on",
        )
    two = int(first["n_channels"]) > 1
    is_dual = two and (mode in _SIMULTANEOUS or (not mode and int(first["hv_flag"]) == _BOTH))
    return is_dual, "v" if mode in _VERTICAL else "h"


def _columns(pulses: Pulses, start: int, headers: Record, state: Metadata) -> dict[str, Any]:
    """Return angles, times and radar of beams."""
    dwells, length = headers.shape
    times = pulses.times[start : start + dwells * length].reshape(dwells, length)
    first, last = headers[:, 0], headers[:, -1]
    flags = np.bitwise_or.reduce(headers["event_flags"], axis=1)
    mode = int(first["scan_mode"][0])
    fixed = first["fixed_az" if mode in BY_ELEVATION else "fixed_el"].astype(np.float64)
    turn = (last["azimuth"].astype(np.float64) - first["azimuth"] + 180) % 360 - 180
    rise = last["elevation"].astype(np.float64) - first["elevation"]
    seconds = (times[:, -1] - times[:, 0]) / 1e9
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = (rise if mode in BY_ELEVATION else turn) / seconds

    def number(kind: Kind, name: str) -> list[float | None]:
        return [state.number(kind, name)] * dwells

    middles = pulses.state_of[start + length // 2 : start + dwells * length : length]

    def position(moving: str, fixed: str, factor: float = 1.0) -> list[float | None]:
        """Return where the radar was in the middle of each, or where it always is."""
        said = (pulses.states[i].number(Kind.PLATFORM_GEOREF, moving) for i in middles)
        return [
            always if now is None else now * factor
            for now, always in zip(said, number(Kind.RADAR_INFO, fixed), strict=True)
        ]

    def text(kind: Kind, name: str) -> list[str | None]:
        return [state.text(kind, name)] * dwells

    wavelength = wavelength_of(state)
    pol_mode = int(state.number(Kind.TS_PROCESSING, "pol_mode") or 0)
    info, segment = Kind.RADAR_INFO, Kind.SCAN_SEGMENT
    platform = int(state.number(info, "platform_type") or 0)
    return {
        "time_ns": times[:, 0] + (times[:, -1] - times[:, 0]) // 2,
        "azimuth": ((first["azimuth"] + turn / 2) % 360).astype(np.float32),
        "elevation": (first["elevation"] + rise / 2).astype(np.float32),
        "fixed_angle": _known(fixed),
        "volume_number": _numbered(first["volume_num"], state, "volume_num"),
        "sweep_number": _numbered(first["sweep_num"], state, "sweep_num"),
        "start_of_volume": (flags & Event.START_OF_VOLUME) != 0,
        "end_of_volume": (flags & Event.END_OF_VOLUME) != 0,
        "start_of_sweep": (flags & Event.START_OF_SWEEP) != 0,
        "end_of_sweep": (flags & Event.END_OF_SWEEP) != 0,
        "sweep_mode": [SWEEP_MODES.get(mode)] * dwells,
        "polarization_mode": [_POLARIZATIONS.get(pol_mode)] * dwells,
        "follow_mode": [_FOLLOWED.get(int(first["follow_mode"][0]))] * dwells,
        "antenna_transition": headers["antenna_transition"].max(axis=1) > 0,
        "pulse_width": first["pulse_width_us"].astype(np.float32) * np.float32(1e-6),
        "samples": np.full(dwells, length, np.int32),
        "scan_rate": _known(rate),
        "transmit_power_h": number(Kind.XMIT_POWER, "power_dbm_h"),
        "transmit_power_v": number(Kind.XMIT_POWER, "power_dbm_v"),
        "radar": text(info, "radar_name"),
        "site": text(info, "site_name"),
        "scan_name": text(segment, "segment_name"),
        "latitude": position("latitude", "latitude_deg"),
        "longitude": position("longitude", "longitude_deg"),
        "altitude": position("altitude_msl_km", "altitude_m", 1000),
        "platform_type": [_PLATFORMS.get(platform)] * dwells,
        "wavelength": [wavelength] * dwells,
        "beam_width_h": number(info, "beamwidth_deg_h"),
        "beam_width_v": number(info, "beamwidth_deg_v"),
        "gain_h": number(info, "nominal_gain_ant_db_h"),
        "gain_v": number(info, "nominal_gain_ant_db_v"),
        "calibration": _calibration(state, dwells),
    }


def _known(values: NDArray[np.float64]) -> pa.Array:
    """Return a column with null for missing values."""
    mask = ~np.isfinite(values) | (np.abs(values - MISSING) < 0.001)  # noqa: PLR2004
    return pa.array(values.astype(np.float32), mask=mask)


def _numbered(values: NDArray[np.int32], state: Metadata, name: str) -> pa.Array:
    """Return the numbers of volumes or sweeps: those of pulses, or what the scan says."""
    said = state.number(Kind.SCAN_SEGMENT, name)
    otherwise = -1 if said is None else int(said)
    numbers = np.where(values < 0, otherwise, values).astype(np.int32)
    return pa.array(numbers, mask=numbers < 0)


def _calibration(state: Metadata, count: int) -> pa.Array | None:
    pairs = [
        (name, value)
        for name, field in _CALIBRATION.items()
        if (value := state.number(Kind.CALIBRATION, field)) is not None
    ]
    width = state.number(Kind.CALIBRATION, "pulse_width_us")
    if width is not None:
        pairs.append(("pulse_width", width * 1e-6))
    if not pairs:
        return None
    one = pa.array([pairs], BEAM_SCHEMA.field("calibration").type)
    return one.take(pa.array(np.zeros(count, np.int64)))
