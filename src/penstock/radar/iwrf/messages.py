"""How do packets travel as messages?

The payload of a message is one whole packet or several, back to back, as they are. Its type is
their kind (12 is a pulse; 0: of several kinds), its time that of the first. Writers
repeat metadata for late joiners, and sync words.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import BATCH_SCHEMA, messages_from_batch, numbers_of
from penstock.core.capabilities import Worded
from penstock.core.errors import Closed, Malformed
from penstock.core.interfaces import BookedWriter, Reader
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics
from penstock.radar import _pulses
from penstock.radar.iwrf.framing import Framing, Run, frame, places_of
from penstock.radar.iwrf.packets import (
    INFO_KINDS,
    Encoding,
    Event,
    Kind,
    dtype_of,
    layout_of,
    make,
    name_of,
    read,
    text_of,
    time_ns_of,
)
from penstock.radar.iwrf.pulses import Metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.message import Message
    from penstock.core.stream_id import StreamId

__all__ = [
    "CANNOT_CARRY",
    "PacketReader",
    "PacketWriter",
    "Reminder",
    "batch_of",
    "details_of",
    "packets_of",
    "runs_of",
    "type_of",
    "words_of",
]

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000_000
_INFO: Final = dtype_of("iwrf_packet_info_t")
#: Kinds that are not told again: they say that something happens now.
_ONCE: Final = (Kind.SYNC, Kind.EVENT_NOTICE)


def batch_of(
    data: NDArray[np.uint8], runs: Sequence[Run], first_seq: int, created_ns: int | None = None
) -> Batch:
    """Return the packets in bytes as messages of one packet each, numbered on from `first_seq`.

    :param created_ns: append time; None takes each packet's own time
    """
    starts, sizes = places_of(runs)
    count = len(starts)
    numbers = [run.number for run in runs]
    kinds = np.repeat(np.array([run.kind for run in runs], np.int32), numbers)
    infos = np.empty(count, _INFO)
    _pulses.gather(data, starts, _INFO.itemsize, infos)
    is_swapped = np.repeat([run.order == ">" for run in runs], numbers)
    if is_swapped.any():
        infos[is_swapped] = infos[is_swapped].view(dtype_of("iwrf_packet_info_t", ">"))
    times = time_ns_of(infos)
    if count and starts[-1] + sizes[-1] - starts[0] == sizes.sum():  # nothing lies between them
        payloads = data[starts[0] : starts[-1] + sizes[-1]]
    else:
        parts = [data[run.start : run.end] for run in runs]
        payloads = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    payload = pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(payloads)]
    )
    created = times if created_ns is None else np.full(count, created_ns, np.int64)
    return pa.record_batch(
        [
            pa.array(np.arange(first_seq, first_seq + count)),
            pa.array(times),
            pa.array(created),
            pa.array(kinds),
            pa.array(np.zeros(count, np.int32)),
            pa.nulls(count, pa.binary(16)),
            pa.nulls(count, pa.binary()),
            payload,
        ],
        schema=BATCH_SCHEMA,
    )


def runs_of(payload: NDArray[np.uint8]) -> list[Run]:
    """Return the packets of a payload.

    :raises Malformed: bytes belong to no packet, or there is no packet.
    """
    found: Framing = frame(payload)
    if found.skipped or not found.runs:
        place = found.skipped[0][0] if found.skipped else 0
        raise Malformed(
            "a message of packets",
            f"byte {place}",
            "an IWRF packet",
            payload[place : place + 8].tobytes().hex(" ") or "nothing",
            hint="a payload is one packet or several, back to back",
        )
    return found.runs


def packets_of(payload: bytes | memoryview) -> list[tuple[int, bytes]]:
    """Return the kinds and the bytes of the packets in a payload.

    :raises Malformed: bytes belong to no packet.
    """
    data = np.frombuffer(payload, np.uint8)
    return [
        (run.kind, data[start:end].tobytes())
        for run in runs_of(data)
        for start, end in run.packets()
    ]


def type_of(kinds: Iterable[int]) -> int:
    """Return the type of a message of packets of these kinds."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else 0


# --- saying it again ------------------------------------------------------------------------------


class Reminder:
    """Decides when to repeat metadata and sync words for late joiners."""

    def __init__(self, every: float) -> None:
        """Start without metadata.

        :param every: seconds, of the packets' time and by the clock; 0: never
        """
        self._every = every
        self.state = Metadata()
        #: When each kind was said last: by the packets' time, and by the clock.
        self._said: dict[int, tuple[int, float]] = {}

    def note(self, kind: int, packet: bytes) -> None:
        """Note a written packet."""
        if kind in INFO_KINDS and kind not in _ONCE:
            self.state = self.state.updated(packet, kind)
            self._said[kind] = (int(time_ns_of(read(packet))[0]), time.monotonic())

    def is_due(self, time_ns: int) -> bool:
        """Tell whether a repetition is due before a packet of this time."""
        if not self._every or not self._said:
            return False
        span, before = int(self._every * _SECOND), time.monotonic() - self._every
        return any(
            abs(time_ns - then) >= span or clock <= before for then, clock in self._said.values()
        )

    def packets(self, time_ns: int, *, sync: bool) -> list[tuple[int, bytes]]:
        """Return the packets to repeat, with sync words first if wanted."""
        self._said = dict.fromkeys(self._said, (time_ns, time.monotonic()))
        first = [(int(Kind.SYNC), make(Kind.SYNC, time_ns=time_ns))] if sync else []
        return first + self.state.by_kind()


# --- readers and writers --------------------------------------------------------------------------

#: What packets have no place for.
CANNOT_CARRY: Final = {
    "subtype": "left out: packets have a kind",
    "stream": "left out: packets have a radar_id",
    "attributes": "left out",
}
_NO_MESSAGES: Final = pa.RecordBatch.from_pylist([], BATCH_SCHEMA)


class PacketReader(Worded, Reader):
    """Base of readers whose packets stand back to back; a subclass has the source.

    A stretch of bytes that belongs to no packet counts as one lost message.
    """

    cannot_carry: ClassVar[Mapping[str, str]] = CANNOT_CARRY

    def __init__(self, url: str, wanted: int | None) -> None:
        """Start at packet 0.

        :param wanted: the kind of the packets to deliver; None: all
        """
        super().__init__(url)
        self._wanted = wanted
        self._is_closed = False
        #: Packets that were read and not handed out, and the number of the one behind them.
        self._ready: Batch | None = None
        self._next = 0
        self._messages = self._bytes = self._filtered = 0
        #: Bytes that belong to no packet.
        self.skipped_bytes = 0
        self._damaged = LossLedger()

    @abstractmethod
    def _fill(self) -> bool:
        """Read the next packets into `_ready`; False if there are none now."""

    def _has_news(self) -> bool:
        self._check_open()
        return self._is_ready()

    def _is_ready(self) -> bool:
        """Tell whether `_ready` begins with a wanted packet; drop and count others before it."""
        while self._ready is not None or self._fill():
            assert self._ready is not None
            if self._wanted is None:
                return True
            is_wanted = numbers_of(self._ready, "type") == self._wanted
            others = int(np.argmax(is_wanted)) if is_wanted.any() else len(is_wanted)
            self._filtered += others
            if others < len(is_wanted):
                self._ready = self._ready.slice(others)
                return True
            self._ready = None
        return False

    def _take(self, limit: int) -> list[Message]:
        return list(messages_from_batch(self._take_batch(limit)))

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        if n > 0:
            batch = self._take_batch(n)
            if batch.num_rows or timeout == 0:
                return batch
        return super().read_batch(n, timeout)

    def _take_batch(self, limit: int) -> Batch:
        self._check_open()
        if not self._is_ready():
            return _NO_MESSAGES
        ready = self._ready
        assert ready is not None
        some = ready.slice(0, limit)
        self._ready = ready.slice(limit) if ready.num_rows > limit else None
        if self._wanted is not None:
            rows = some.num_rows
            kind = pa.scalar(self._wanted, pa.int32())
            some = some.filter(pc.equal(some.column("type"), kind))
            self._filtered += rows - some.num_rows
        self._messages += some.num_rows
        self._bytes += int(pc.sum(pc.binary_length(some.column("payload"))).as_py())
        return some

    def _note_skipped(self, found: Framing, file: str = "", since: int = 0) -> None:
        """Count and say the bytes that belong to no packet, before the packets are numbered.

        :param since: the number from which on packets are wanted
        """
        numbers = [self._next + packets for packets in found.packets_before_skipped]
        skipped = [
            (seq, end - start)
            for seq, (start, end) in zip(numbers, found.skipped, strict=True)
            if seq >= since
        ]
        if not skipped:
            return
        places, size = len(skipped), sum(length for _, length in skipped)
        where = (f" of {file}" if file else "") + (f" in {places} places" if places > 1 else "")
        log.warning("%s: %d bytes%s are no packet", self.url, size, where)
        self.skipped_bytes += size
        for seq, _ in skipped:
            self._damaged.add(Loss(seq, seq, DropReason.DAMAGED))

    def in_words(self, message: Message) -> str:
        return words_of(message.payload)

    def statistics(self) -> ReaderStatistics:
        waiting = 0 if self._ready is None else self._ready.num_rows
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._damaged.total,
            filtered=self._filtered,
            restarts=0,
            next_seq=self._next - waiting,
            backlog=waiting,
            losses=self._damaged.ranges(),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")


class PacketWriter(BookedWriter):
    """Base of writers of packets; a subclass has the target."""

    cannot_carry: ClassVar[Mapping[str, str]] = CANNOT_CARRY

    @abstractmethod
    def _write(self, payloads: list[bytes]) -> None:
        """Write messages and count them, including those before a refused one.

        :raises Malformed: bytes of a payload belong to no packet.
        """

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        """Write packets; see `Writer.write`. Type and time are those that the packets say.

        :raises Malformed: bytes of the payload belong to no packet.
        """
        del type, subtype, time_ns, created_ns
        self._headers_dropped += (stream is not None) + (attributes is not None)
        self._write([bytes(payload)])
        return -1 if self._last_seq is None else self._last_seq

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        del type, subtype
        self._write([bytes(payload) for payload in payloads])
        return self._last_seq

    def write_batch(self, batch: Batch) -> int | None:
        dropped = 2 * len(batch) - batch.column("stream").null_count
        self._headers_dropped += dropped - batch.column("attributes").null_count
        self._write(batch.column("payload").to_pylist())
        return self._last_seq if len(batch) else None


# --- for people -----------------------------------------------------------------------------------


def words_of(payload: bytes) -> str:
    """Describe a message on one line."""
    data = np.frombuffer(payload, np.uint8)
    found = frame(data)
    said: list[str] = []
    pulses = [run for run in found.runs if run.kind == Kind.PULSE]
    others: dict[int, int] = {}
    for run in found.runs:
        if run.kind != Kind.PULSE:
            others[run.kind] = others.get(run.kind, 0) + run.number
    if pulses:
        said.append(_pulses_in_words(data, pulses))
    if found.packets == 1 and not pulses:
        said.append(_in_words(found.runs[0].kind, payload))
    elif others:
        names = (name_of(kind) + (f" x{n}" if n > 1 else "") for kind, n in others.items())
        said.append(", ".join(names))
    if found.skipped_bytes:
        said.append(f"{found.skipped_bytes:,} bytes that are no packet")
    return "; ".join(said) or "no packet"


def _pulses_in_words(data: NDArray[np.uint8], runs: Sequence[Run]) -> str:
    first = runs[0].records(data)[0]
    last = runs[-1].records(data)[-1]
    count = sum(run.number for run in runs)
    events = Event(0)
    for run in runs:
        events |= Event(int(np.bitwise_or.reduce(run.records(data)["event_flags"])) & 0x3F)

    def span(name: str, unit: str) -> str:
        a, b = float(first[name]), float(last[name])
        return f"{a:.2f}{unit}" if count == 1 or a == b else f"{a:.2f} to {b:.2f}{unit}"

    try:
        encoding = Encoding(int(first["iq_encoding"])).name
    except ValueError:
        encoding = f"encoding {first['iq_encoding']}"
    numbers = f"{first['pulse_seq_num']}"
    if count > 1:
        numbers += f" to {last['pulse_seq_num']}"
    channels = int(first["n_channels"])
    said = [
        f"pulse {numbers}" if count == 1 else f"{count} pulses {numbers}",
        f"az {span('azimuth', '°')} el {span('elevation', '°')}",
        f"{first['n_gates']} gates x {channels} channel{'s' if channels > 1 else ''} {encoding}",
        f"prt {float(first['prt']) * 1e3:.3g} ms",
        f"volume {first['volume_num']} sweep {first['sweep_num']}",
    ]
    said += [event.name.lower().replace("_", " ") for event in events if event.name]
    return ", ".join(said)


#: What is most worth saying of a kind.
_TELLING: Final = {
    Kind.RADAR_INFO: ("radar_name", "site_name", "wavelength_cm", "latitude_deg", "longitude_deg"),
    Kind.SCAN_SEGMENT: ("segment_name", "scan_mode", "volume_num", "sweep_num", "n_sweeps"),
    Kind.TS_PROCESSING: ("prt_usec", "prf_mode", "xmit_rcv_mode", "max_gate"),
    Kind.CALIBRATION: ("noise_dbm_hc", "receiver_gain_db_hc", "base_dbz_1km_hc"),
    Kind.XMIT_POWER: ("power_dbm_h", "power_dbm_v"),
    Kind.EVENT_NOTICE: (
        *("start_of_sweep", "end_of_sweep", "start_of_volume", "end_of_volume"),
        *("volume_num", "sweep_num"),
    ),
    Kind.BURST: ("pulse_seq_num", "n_samples", "power_dbm", "phase_deg"),
    Kind.ANTENNA_CORRECTION: ("az_correction", "el_correction"),
    Kind.PLATFORM_GEOREF: ("latitude", "longitude", "altitude_msl_km", "heading_deg"),
}


def _in_words(kind: int, packet: bytes) -> str:
    if kind not in _TELLING or len(packet) < layout_of(kind).itemsize:
        return name_of(kind)
    record = read(packet)[0]
    said = []
    for name in _TELLING[Kind(kind)]:
        value = record[name]
        if isinstance(value, bytes):
            said.append(f"{name} {text_of(value)!r}")
        else:
            said.append(
                f"{name} {value:g}" if isinstance(value, np.floating) else f"{name} {value}"
            )
    return f"{name_of(kind)} ({', '.join(said)})"


def details_of(payloads: Iterable[bytes]) -> dict[str, Any]:
    """Return what messages tell about a radar: name, pulses, gates and channels."""
    state = Metadata()
    pulse: np.void | None = None
    for payload in payloads:
        data = np.frombuffer(payload, np.uint8)
        for run in frame(data).runs:
            if run.kind == Kind.PULSE:
                pulse = run.records(data)[-1].copy()
            elif run.kind in INFO_KINDS and run.kind not in _ONCE:
                packet = data[run.end - run.length : run.end].tobytes()
                state = state.updated(packet, run.kind)
        if pulse is not None and state.is_ready:
            break
    wavelength = state.number(Kind.RADAR_INFO, "wavelength_cm")
    prt_usec = state.number(Kind.TS_PROCESSING, "prt_usec")
    found: dict[str, Any] = {
        "radar": state.text(Kind.RADAR_INFO, "radar_name"),
        "site": state.text(Kind.RADAR_INFO, "site_name"),
        "wavelength": None if wavelength is None else f"{wavelength:g} cm",
        "scan": state.text(Kind.SCAN_SEGMENT, "segment_name"),
        "prt": None if prt_usec is None else f"{prt_usec / 1000:g} ms",
    }
    if pulse is not None:
        encoding = int(pulse["iq_encoding"])
        if pulse["prt"] > 0:
            found["prt"] = f"{float(pulse['prt']) * 1000:g} ms"
        found |= {
            "gates": int(pulse["n_gates"]),
            "channels": int(pulse["n_channels"]),
            "encoding": Encoding(encoding).name if encoding in set(Encoding) else encoding,
            "gate_spacing": f"{float(pulse['gate_spacing_m']):g} m",
        }
    return found
