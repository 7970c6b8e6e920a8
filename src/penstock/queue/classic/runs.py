"""How is a run of messages copied from a queue that may be overwritten meanwhile?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, Batch
from penstock.core.errors import DamagedQueue, Malformed
from penstock.core.message import Message
from penstock.queue.classic._rows import make_messages
from penstock.queue.classic.compression import decompress
from penstock.queue.classic.layout import (
    FRAME_EXTRA,
    FRAME_HEAD,
    ID_COUNT,
    MESSAGE_MAGIC,
    SLOT_SIZE,
    Slot,
    Slots,
    Status,
    decode_slots,
    slot_checksums_hold,
)
from penstock.queue.classic.slots import REPAIR_HINT, slot_fault

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.queue.classic.device import Device

__all__ = ["Run", "copy_run", "explain_fault"]

#: Most bytes copied at a time, unless one message is larger.
_COPY_BYTES = 4 << 20

#: Columns of `Slots`.
_ACTIVE, _ID, _TIME, _MSG_LEN, _STORED_LEN, _OFFSET, _TYPE, _SUBTYPE, _COMPRESS = range(9)

_SECOND = 1_000_000_000


class Run(NamedTuple):
    """Consecutive messages, complete and checked."""

    slots: Slots
    #: Their frames, back to back.
    frames: bytes
    #: Offset of each frame in `frames`.
    starts: npt.NDArray[np.int64]

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    @property
    def is_compressed(self) -> bool:
        """True if any of the messages is compressed."""
        return bool(self.slots[:, _COMPRESS].any())

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads, decompressed."""
        return int(self.slots[:, _MSG_LEN].sum())

    def payloads(self) -> list[bytes]:
        """Return the decompressed payloads, up to the first that cannot be decompressed."""
        begins = self.starts + FRAME_HEAD
        ends = begins + self._body_lengths()
        cuts = map(slice, begins.tolist(), ends.tolist())
        bodies = list(map(self.frames.__getitem__, cuts))
        if not self.is_compressed:
            return bodies
        lengths = self.slots[:, _MSG_LEN].tolist()
        for row in np.flatnonzero(self.slots[:, _COMPRESS]).tolist():
            try:
                bodies[row] = decompress(bodies[row], lengths[row])
            except Malformed:
                return bodies[:row]
            if len(bodies[row]) != lengths[row]:
                return bodies[:row]
        return bodies

    def _body_lengths(self) -> npt.NDArray[np.int64]:
        stored = self.slots[:, _STORED_LEN] - FRAME_EXTRA
        return np.where(self.slots[:, _COMPRESS] != 0, stored, self.slots[:, _MSG_LEN])

    def messages(self, first_seq: int) -> list[Message]:
        """Return the messages, up to the first that cannot be decompressed."""
        payloads = self.payloads()
        count = len(payloads)
        return make_messages(
            Message,
            list(range(first_seq, first_seq + count)),
            (self.slots[:count, _TIME] * _SECOND).tolist(),
            self.slots[:count, _TYPE].tolist(),
            self.slots[:count, _SUBTYPE].tolist(),
            payloads,
        )

    def batch(self, first_seq: int) -> Batch:
        """Return the messages as one Arrow batch. Only for an uncompressed run."""
        n = len(self.starts)
        ends = np.zeros(n + 1, np.int32)
        np.cumsum(self.slots[:, _MSG_LEN], out=ends[1:])
        payload = pa.Array.from_buffers(
            pa.binary(), n, [None, pa.py_buffer(ends), self._packed_payloads(int(ends[-1]))]
        )
        times = pa.array(self.slots[:, _TIME] * _SECOND)
        columns = [
            pa.array(np.arange(first_seq, first_seq + n)),
            times,
            times,
            pa.array(self.slots[:, _TYPE].astype(np.int32)),
            pa.array(self.slots[:, _SUBTYPE].astype(np.int32)),
            pa.nulls(n, pa.binary(16)),
            pa.nulls(n, pa.binary()),
            payload,
        ]
        return pa.record_batch(columns, schema=BATCH_SCHEMA)

    def _packed_payloads(self, size: int) -> pa.Buffer:
        """Return the payloads back to back, without their frames."""
        packed = pa.allocate_buffer(size)
        length, stored = self.slots[0, _MSG_LEN], self.slots[0, _STORED_LEN]
        if (self.slots[:, _MSG_LEN] == length).all():  # one copy, row by row
            rows = np.frombuffer(self.frames, np.uint8)[: len(self.slots) * stored]
            rows = rows.reshape(-1, stored)[:, FRAME_HEAD : FRAME_HEAD + length]
            np.copyto(np.frombuffer(packed, np.uint8).reshape(len(rows), length), rows)
        else:
            memoryview(packed).cast("B")[:] = b"".join(self.payloads())
        return packed


def copy_run(device: Device, status: Status, first_slot: int, first_id: int, count: int) -> Run:
    """Copy up to `count` messages from `first_id` on, up to the first incomplete one.

    The slots are read again after the copy: a writer frees a slot before it reuses its bytes, so
    a message with an unchanged slot was complete (docs/specs/lrose.md 6.2).
    """
    seen = device.read_slots(first_slot, count, status.nslots)
    if len(seen) != count * SLOT_SIZE:
        return Run(decode_slots(b""), b"", np.zeros(0, np.int64))
    slots = decode_slots(seen)
    usable = _leading(_slots_are_right(slots, status, first_id))
    stored = slots[:usable, _STORED_LEN]
    ends = np.cumsum(stored)
    usable = min(usable, max(1, int(np.searchsorted(ends, _COPY_BYTES, side="right"))))
    slots, ends = slots[:usable], ends[:usable]
    frames = _copy_frames(device, slots)
    if len(frames) < ends[-1:].sum() and count > 1:  # truncated: try the first message alone
        return copy_run(device, status, first_slot, first_id, 1)
    run = Run(slots, frames, ends - slots[:, _STORED_LEN])
    whole = _leading(_frames_are_right(run, status, first_slot))
    again = device.read_slots(first_slot, count, status.nslots)
    if again != seen:
        before, now = (np.frombuffer(raw, np.uint8) for raw in (seen, again.ljust(len(seen))))
        changed = (before != now).reshape(-1, SLOT_SIZE).any(axis=1)
        whole = min(whole, _leading(~changed))
    return _first_rows(run, whole)


def _first_rows(run: Run, count: int) -> Run:
    if count == len(run.starts):
        return run
    return Run(run.slots[:count], run.frames, run.starts[:count])


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """Return the number of leading true flags."""
    return len(flags) if flags.all() else int(flags.argmin())


def _slots_are_right(slots: Slots, status: Status, first_id: int) -> npt.NDArray[np.bool_]:
    """Check many slots at once, like `slot_fault`."""
    ids = (first_id + np.arange(len(slots))) % ID_COUNT
    length, stored, offset = slots[:, _MSG_LEN], slots[:, _STORED_LEN], slots[:, _OFFSET]
    plain = stored == ((length + 3) & ~3) + FRAME_EXTRA
    right: npt.NDArray[np.bool_] = (
        (slots[:, _ACTIVE] == 1)
        & (slots[:, _ID] == ids)
        & slot_checksums_hold(slots)
        & (length >= 0)
        & (stored >= FRAME_EXTRA)
        & (offset >= 0)
        & (offset + stored <= status.buf_size)
        & ((stored | offset) & 3 == 0)
        & (plain | (slots[:, _COMPRESS] != 0))
    )
    return right


def _copy_frames(device: Device, slots: Slots) -> bytes:
    """Read the frames; adjacent ones with one read."""
    if len(slots) == 0:
        return b""
    begins = slots[:, _OFFSET]
    ends = begins + slots[:, _STORED_LEN]
    gaps = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts, lasts = [0, *gaps.tolist()], [*(gaps - 1).tolist(), len(slots) - 1]
    pieces = [
        device.read_buf(int(begins[first]), int(ends[last] - begins[first]))
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _frames_are_right(run: Run, status: Status, first_slot: int) -> npt.NDArray[np.bool_]:
    """Check cookie, slot number and id of every frame (docs/specs/lrose.md 1.6)."""
    stored = run.slots[:, _STORED_LEN]
    if len(run.frames) != int(stored.sum()):  # the buffer was truncated meanwhile
        return np.zeros(len(stored), np.bool_)
    words = np.frombuffer(run.frames, ">i4")
    heads = run.starts >> 2
    tails = (run.starts + stored >> 2) - 1
    indexes = (first_slot + np.arange(len(stored))) % status.nslots
    right: npt.NDArray[np.bool_] = (
        (words[heads] == MESSAGE_MAGIC)
        & (words[heads + 1] == indexes)
        & (words[tails] == run.slots[:, _ID])
    )
    return right


def explain_fault(device: Device, status: Status, index: int, id: int) -> DamagedQueue | None:
    """Return the fault of the message with this id in this slot, or None."""
    raw = device.read_slots(index, 1, status.nslots)
    if len(raw) != SLOT_SIZE:
        size = device.sizes()[0]
        return DamagedQueue(
            device.path, ".stat", size, "all its slots", f"{size} bytes", hint=REPAIR_HINT
        )
    slot = Slot.decode(raw)
    fault = slot_fault(device.path, status, index, slot, id)
    if fault is not None:
        return fault
    frame = device.read_buf(slot.offset, slot.stored_len)
    if len(frame) != slot.stored_len:
        return DamagedQueue(
            device.path, ".buf", slot.offset, f"{slot.stored_len} bytes", f"{len(frame)} bytes",
            hint=REPAIR_HINT,
        )  # fmt: skip
    for field, at, expected in (
        ("cookie", 0, MESSAGE_MAGIC),
        ("slot number", 4, index),
        ("id", slot.stored_len - 4, id),
    ):
        found = int.from_bytes(frame[at : at + 4], signed=True)
        if found != expected:
            return DamagedQueue(
                device.path, f"message {id} {field}", slot.offset + at, expected, found,
                hint=REPAIR_HINT,
            )  # fmt: skip
    if not slot.compress:
        return None
    try:
        length = len(decompress(frame[FRAME_HEAD:-4], slot.msg_len))
    except Malformed as error:
        return DamagedQueue(
            device.path, f"message {id} {error.what} {error.where}", slot.offset + FRAME_HEAD,
            error.expected, error.found, hint=REPAIR_HINT,
        )  # fmt: skip
    if length == slot.msg_len:
        return None
    return DamagedQueue(
        device.path, f"message {id} uncompressed length", slot.offset + FRAME_HEAD, slot.msg_len,
        length, hint=REPAIR_HINT,
    )  # fmt: skip
