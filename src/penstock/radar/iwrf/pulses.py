"""What do the packets of a radar say together? Pulses, each with the state of the radar.

A metadata packet holds for the pulses after it. Pulses become columns, all samples of a batch in
one buffer, without a Python loop over pulses.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.core.errors import Malformed
from penstock.radar import _pulses
from penstock.radar.iwrf.framing import Run, frame, places_of
from penstock.radar.iwrf.packets import (
    ENDS,
    INFO_KINDS,
    PACKET_SIZE,
    STARTS,
    Encoding,
    Kind,
    Record,
    dtype_of,
    is_missing,
    layout_of,
    make,
    read,
    text_of,
    time_ns_of,
)
from penstock.radar.iwrf.samples import SATURATION_DBM, PackedValues, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.core.batch import Batch

__all__ = [
    "PULSE_SCHEMA",
    "DecoderStatistics",
    "Metadata",
    "PulseDecoder",
    "Pulses",
    "bytes_of",
    "make_pulse",
]

_COMMON: Final = 56
#: Added to the kind of what a second unit says of where the platform is: the first one's holds.
_OF_SECOND_UNIT: Final = 1 << 10
_PULSE: Final = dtype_of("iwrf_pulse_header_t")
#: Azimuth surveillance that looks up is vertical pointing.
_SURVEILLANCE, _VERTICAL, _UP = 8, 4, (85.0, 95.0)

#: Columns that a pulse has by the names of its header.
_SAME: Final = (
    *("pulse_seq_num", "seq_num", "radar_id", "volume_num", "sweep_num", "scan_mode"),
    *("elevation", "azimuth", "fixed_el", "fixed_az", "prt", "prt_next", "pulse_width_us"),
    *("n_gates", "n_channels", "hv_flag", "antenna_transition", "event_flags"),
    *("start_range_m", "gate_spacing_m"),
)

#: Pulses as Arrow has them. `iq` is I and Q of each gate, channel after channel, in mW^½.
PULSE_SCHEMA: Final = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        *(pa.field(name, pa.from_numpy_dtype(_PULSE[name]), nullable=False) for name in _SAME),
        pa.field("iq", pa.large_list(pa.field("item", pa.float32(), nullable=False))),
    ]
)


class Metadata:
    """The state of a radar: the last packet of each kind of metadata. It never changes."""

    def __init__(self, packets: Mapping[int, bytes] | None = None) -> None:
        #: Whole packets, by their kinds; that of a second unit is kept apart.
        self.packets: Mapping[int, bytes] = packets or {}

    def updated(self, packet: bytes, kind: int) -> Metadata:
        """Return the state with a packet added; the same object if only its time is new."""
        if kind == Kind.PLATFORM_GEOREF and read(packet)[0]["unit_num"] == 1:
            kind += _OF_SECOND_UNIT
        known = self.packets.get(kind)
        if known is not None and known[_COMMON:] == packet[_COMMON:]:
            return self
        return Metadata({**self.packets, kind: packet})

    def by_kind(self) -> list[tuple[int, bytes]]:
        """Return each packet with its kind, in the order of the kinds."""
        return sorted((kind % _OF_SECOND_UNIT, packet) for kind, packet in self.packets.items())

    def get(self, kind: Kind) -> np.void | None:
        """Return the struct of a kind, or None."""
        packet = self.packets.get(kind)
        return None if packet is None else read(packet)[0]

    def number(self, kind: Kind, field: str) -> float | None:
        """Return a number, or None if it is missing."""
        found = self.get(kind)
        value = None if found is None else float(found[field])
        return None if value is None or is_missing(value) else value

    def text(self, kind: Kind, field: str) -> str | None:
        found = self.get(kind)
        return None if found is None else text_of(found[field]) or None

    @cached_property
    def is_ready(self) -> bool:
        """Whether radar and processing are known; before that, pulses cannot be interpreted."""
        return Kind.RADAR_INFO in self.packets and Kind.TS_PROCESSING in self.packets

    @cached_property
    def saturation_dbm(self) -> float:
        found = self.number(Kind.RVP8_OPS_INFO, "f_saturation_dbm")
        return SATURATION_DBM if found is None else found

    def to_bytes(self) -> bytes:
        """Return all packets, back to back."""
        return b"".join(self.packets_since(Metadata()))

    def packets_since(self, before: Metadata) -> list[bytes]:
        """Return the packets that an earlier state did not have."""
        return [
            self.packets[kind]
            for kind in sorted(self.packets)
            if before.packets.get(kind) is not self.packets[kind]
        ]


@dataclass(frozen=True, slots=True)
class Pulses:
    """Pulses in their order, with their samples in one buffer."""

    #: As they came, in the byte order of this machine; angles are 0 to 360 and -180 to 180.
    headers: Record
    #: I and Q of each gate, channel after channel, pulse after pulse.
    iq: NDArray[np.float32]
    #: Where in `iq` each begins, and the last ends.
    starts: NDArray[np.int64]
    #: The states of the radar, and which of them each pulse has.
    states: Sequence[Metadata]
    state_of: NDArray[np.int32]
    #: Where the packet of each begins in the bytes that were decoded, and ends.
    places: NDArray[np.int64]
    #: The packets of all kinds that were decoded.
    runs: Sequence[Run]

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def times(self) -> NDArray[np.int64]:
        return time_ns_of(self.headers)

    def to_arrow(self) -> pa.RecordBatch:
        """Return the pulses as a batch of `PULSE_SCHEMA`, without copying samples."""
        starts = pa.array(self.starts)
        iq = pa.LargeListArray.from_arrays(starts, pa.array(self.iq), PULSE_SCHEMA.field("iq").type)
        columns = [np.ascontiguousarray(self.headers[name]) for name in _SAME]
        return pa.RecordBatch.from_arrays(
            [pa.array(self.times), *(pa.array(column) for column in columns), iq],
            schema=PULSE_SCHEMA,
        )


class DecoderStatistics(NamedTuple):
    """Counters of a decoder: bytes = packets' bytes + skipped + waiting."""

    bytes: int
    #: Of whole packets.
    packet_bytes: int
    #: That belong to no packet.
    skipped_bytes: int
    #: Of a packet whose rest has not come.
    waiting_bytes: int
    packets: int
    pulses: int


class _Memory:
    """Memory for samples, lent again when nobody has the samples any more.

    To copy into pages that are new takes ten times as long as into those that were used before, and
    allocators soon give large blocks back to the system.
    """

    #: Blocks of fewer values are not worth it, and the others are multiples of so many.
    _STEP: Final = 1 << 18
    #: How many times as large as asked for a block may be.
    _ROOM: Final = 4

    def __init__(self, most: int) -> None:
        """Start with nothing.

        :param most: bytes to keep
        """
        self._most = most
        self._free: list[NDArray[np.float32]] = []
        self._turn = threading.Lock()

    def lend(self, values: int) -> NDArray[np.float32]:
        """Return memory for so many values; it comes back with the last view of it."""
        if values < self._STEP:
            return np.empty(values, np.float32)
        block = self._fitting(values)
        # Views keep an array that is not the block itself.
        lent = np.frombuffer(block, np.float32, values)
        weakref.finalize(lent, self._take_back, block).atexit = False
        return lent

    def _fitting(self, values: int) -> NDArray[np.float32]:
        with self._turn:
            for index, block in enumerate(self._free):
                if values <= len(block) <= self._ROOM * values:
                    return self._free.pop(index)
            self._free.clear()
        return np.empty(-(-values // self._STEP) * self._STEP, np.float32)

    def _take_back(self, block: NDArray[np.float32]) -> None:
        # Without the lock: this runs wherever the last view goes, in `_fitting` as well.
        if sum(each.nbytes for each in [*self._free, block]) <= self._most:
            self._free.append(block)


_memory: Final = _Memory(128 << 20)


class PulseDecoder:
    """Decodes the packets of one radar, and keeps the radar's state."""

    def __init__(self, *, iq_order: str = "<") -> None:
        """Start without metadata.

        :param iq_order: the byte order of samples behind swapped headers; nothing in them tells
        """
        self.state = Metadata()
        self._iq_order = iq_order
        self._rest = np.empty(0, np.uint8)
        #: Notices since the last pulse, and what that pulse was: its volume, sweep and events.
        self._notices: list[np.void] = []
        self._last: tuple[int, int, int] | None = None
        self._bytes = self._packet_bytes = self._skipped = self._packets = self._pulses = 0

    def statistics(self) -> DecoderStatistics:
        return DecoderStatistics(
            self._bytes,
            self._packet_bytes,
            self._skipped,
            len(self._rest),
            self._packets,
            self._pulses,
        )

    def feed(self, data: bytes | memoryview | NDArray[np.uint8], *, is_end: bool = True) -> Pulses:
        """Decode bytes, and return the pulses in them.

        :param is_end: no packet goes on in the bytes that come next
        """
        some = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        self._bytes += len(some)
        if len(self._rest):
            some = np.concatenate((self._rest, some))
        found = frame(some, is_end=is_end)
        self._rest = some[found.end :].copy()
        self._packets += found.packets
        self._packet_bytes += sum(run.length * run.number for run in found.runs)
        self._skipped += found.skipped_bytes
        pulses = self._decoded(some, found.runs)
        self._pulses += len(pulses)
        return pulses

    def _decoded(self, data: NDArray[np.uint8], runs: Sequence[Run]) -> Pulses:
        states, notices, of_run = self._noted(data, runs)
        self.state = states[-1]
        of_pulses = [run for run in runs if run.kind == Kind.PULSE]
        numbers = [run.number for run in of_pulses]
        places, lengths = places_of(of_pulses)
        state_of = np.repeat(np.array(of_run, np.int32), numbers)
        headers: Record = np.empty(len(places), _PULSE)
        _pulses.gather(data, places, _PULSE.itemsize, headers)
        is_swapped = np.repeat([run.order == ">" for run in of_pulses], numbers)
        if is_swapped.any():
            headers[is_swapped] = headers[is_swapped].view(layout_of(Kind.PULSE, ">"))
        starts = np.zeros(len(places) + 1, np.int64)
        channels, gates = (headers[name].astype(np.int64) for name in ("n_channels", "n_gates"))
        np.cumsum(2 * channels * gates, out=starts[1:])
        iq = _memory.lend(int(starts[-1]))
        for part in _alike(headers, is_swapped, state_of):
            order = self._iq_order if is_swapped[part.start] else "<"
            packed = PackedValues(data, places[part] + PACKET_SIZE[Kind.PULSE], 0, order)
            out = iq[starts[part.start] : starts[part.stop]]
            _decode(packed, headers[part], states[state_of[part.start]], out)
        _normalise(headers)
        self._tell(headers, notices)
        both_ends = np.stack((places, places + lengths), axis=1)
        return Pulses(headers, iq, starts, states, state_of, both_ends, runs)

    def _noted(
        self, data: NDArray[np.uint8], runs: Sequence[Run]
    ) -> tuple[list[Metadata], list[tuple[int, np.void]], list[int]]:
        """Follow the metadata: return the states, notices by pulses before, and runs' states."""
        raw = data.data
        states = [self.state]
        notices: list[tuple[int, np.void]] = [(0, notice) for notice in self._notices]
        of_run: list[int] = []
        pulses = 0
        for run in runs:
            if run.kind == Kind.PULSE:
                of_run.append(len(states) - 1)
                pulses += run.number
            elif run.kind == Kind.EVENT_NOTICE:
                notices += [(pulses, read(raw[start:end])[0]) for start, end in run.packets()]
            elif run.kind in INFO_KINDS and run.kind != Kind.SYNC:
                for start, end in run.packets():
                    state = states[-1].updated(raw[start:end].tobytes(), run.kind)
                    if state is not states[-1]:
                        states.append(state)
        return states, notices, of_run

    # --- events -------------------------------------------------------------------------------

    def _tell(self, headers: Record, notices: list[tuple[int, np.void]]) -> None:
        """Add what notices tell to the pulses that they mean.

        A pulse's own flags say best where something begins or ends. Where those of its neighbours
        say nothing of it, a start is at the next pulse. An end is at the one before, unless the
        next belongs to the same sweep.
        """
        flags = headers["event_flags"]
        last = self._last
        self._notices = []
        for index, notice in notices:
            if index == len(headers):
                self._notices.append(notice)
                continue
            following = headers[index]
            previous = _numbers(headers[index - 1]) if index else last
            told = int(flags[index]) | (0 if previous is None else previous[2])
            events = _events_of(notice) & ~told
            flags[index] |= events & STARTS
            ends = events & ENDS
            if not ends:
                continue
            same = previous is not None and _numbers(following)[:2] == previous[:2]
            if same and previous[:2] != (-1, -1):  # type: ignore[index]
                flags[index] |= ends
            elif index:
                flags[index - 1] |= ends
        if len(headers):
            self._last = _numbers(headers[-1])

    def finish(self) -> int:
        """Return the events that late notices assign to the last pulse."""
        told = 0 if self._last is None else self._last[2]
        events = 0
        for notice in self._notices:
            events |= _events_of(notice) & ~told & ENDS
        self._notices = []
        return events


def _numbers(pulse: np.void) -> tuple[int, int, int]:
    volume, sweep = int(pulse["volume_num"]), int(pulse["sweep_num"])
    return max(volume, -1), max(sweep, -1), int(pulse["event_flags"])


def _events_of(notice: np.void) -> int:
    names = ("end_of_sweep", "end_of_volume", "start_of_sweep", "start_of_volume")
    return sum(1 << bit for bit, name in enumerate(names) if notice[name] > 0)


#: What the pulses that are decoded at once have in common.
_SHAPE: Final = ("n_channels", "n_gates", "n_gates_burst", "iq_encoding")


def _alike(
    headers: Record, is_swapped: NDArray[np.bool_], state_of: NDArray[np.int32]
) -> Iterator[slice]:
    """Yield runs of pulses with the same shape and encoding."""
    if not len(headers):
        return
    differs = is_swapped[1:] != is_swapped[:-1]
    for name in _SHAPE:
        column = headers[name]
        differs |= column[1:] != column[:-1]
    if (headers["iq_encoding"] == Encoding.SIGMET_FL16).any():  # the metadata has its scale
        differs |= state_of[1:] != state_of[:-1]
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), len(headers)]
    for start, end in itertools.pairwise(edges):
        yield slice(start, end)


def _decode(
    packed: PackedValues, headers: Record, state: Metadata, out: NDArray[np.float32]
) -> None:
    """Decode the samples of pulses, but for those of the burst in front of each channel."""
    channels, gates, burst, encoding = (int(headers[name][0]) for name in _SHAPE)
    packed = packed._replace(values=2 * channels * (gates + burst))
    to = np.empty(len(headers) * packed.values, np.float32) if burst else out
    saturation = state.saturation_dbm if encoding == Encoding.SIGMET_FL16 else SATURATION_DBM
    scale, offset = headers["scale"], headers["offset"]
    decode(encoding, packed, scale, offset, to.reshape(len(headers), packed.values), saturation)
    if burst:
        by_gate = to.reshape(len(headers), channels, gates + burst, 2)
        out.reshape(len(headers), channels, gates, 2)[:] = by_gate[:, :, burst:]


def _normalise(headers: Record) -> None:
    """Normalise angles as LROSE's reader does."""
    elevation, azimuth = headers["elevation"], headers["azimuth"]
    elevation[elevation > 180] -= 360  # noqa: PLR2004
    azimuth[azimuth < 0] += 360
    looks_up = (elevation > _UP[0]) & (elevation < _UP[1])
    headers["scan_mode"][(headers["scan_mode"] == _SURVEILLANCE) & looks_up] = _VERTICAL


# --- batches and single pulses --------------------------------------------------------------------


def bytes_of(batch: Batch) -> NDArray[np.uint8]:
    """Return the concatenated payloads of a batch, without a copy.

    :raises Malformed: the batch has no column of payloads.
    """
    if "payload" not in batch.schema.names:
        raise Malformed("a batch of packets", "column payload", "binary", "no column")
    column = batch.column("payload")
    try:
        column = column.cast(pa.large_binary())  # also of views; copies no payload otherwise
    except pa.ArrowNotImplementedError:
        raise Malformed("a batch of packets", "column payload", "binary", column.type) from None
    if not len(column):
        return np.empty(0, np.uint8)
    _, places, payloads = column.buffers()
    offsets = np.frombuffer(places, np.int64, len(column) + 1, 8 * column.offset)
    data = np.frombuffer(payloads or b"", np.uint8)
    return data[offsets[0] : offsets[-1]]


def make_pulse(
    iq: NDArray[np.complex64], *, encoding: int = 1, time_ns: int = 0, **fields: Any
) -> bytes:
    """Return the packet of one pulse.

    :param iq: channels x gates
    :param fields: header fields; those that follow from the samples may be left out

    :raises InvalidOption: a field is not known, or does not fit.
    """
    channels, gates = iq.shape
    samples = np.ascontiguousarray(iq, np.complex64).view(np.float32).reshape(-1)
    data, scale, offset = encode(encoding, samples)
    offsets = [2 * gates * channel for channel in range(channels)]
    return make(
        Kind.PULSE,
        time_ns=time_ns,
        data=data,
        **{
            "n_gates": gates,
            "n_channels": channels,
            "iq_encoding": encoding,
            "n_data": 2 * gates * channels,
            "iq_offset": [*offsets, *[0] * (4 - channels)],
            "scale": scale,
            "offset": offset,
            "hv_flag": 3 if channels > 1 else 1,
            **fields,
        },
    )
