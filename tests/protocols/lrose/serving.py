"""A server of queues for tests, ours or one with LROSE's ways, and small clients."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from penstock.core.errors import Unsupported
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.ds_server import DsServer
from penstock.protocols.lrose.fmq_messages import Messages, reply_with
from penstock.protocols.lrose.fmq_queues import layout_of
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions, FmqSession, Shared
from penstock.protocols.lrose.fmq_wire import Op, SeekTo, decode_init
from penstock.protocols.lrose.sku import Decoder, Frame, encode
from penstock.queue.classic.creation import open_device
from penstock.queue.classic.layout import (
    FRAME_HEAD,
    ID_COUNT,
    MESSAGE_MAGIC,
    SLOT_SIZE,
    STATUS_SIZE,
    Slot,
    Status,
    slot_offset,
)


@contextmanager
def served(root: Path, **options: object) -> Iterator[FmqServer]:
    settings = {"root": root, "port": 0} | options
    with FmqServer(FmqServerOptions(**settings)) as server:  # type: ignore[arg-type]
        yield server


class LroseFmq:
    """Reads a classic queue as LROSE's library does, faults and all (docs/specs/lrose.md 1.9, 2.5).

    It knows the status of its last read only, takes the oldest slot and the one behind the youngest
    for what they were then, and jumps to the youngest message where one does not follow.
    """

    def __init__(self, path: str, start: SeekTo) -> None:
        self._device = open_device(path, writable=False)
        self._last_id = self._last_slot = -1
        self._read_status()
        self.seek(start)

    def close(self) -> None:
        self._device.close()

    def _read_status(self) -> None:
        self._status = Status.decode(self._device.read_stat(0, STATUS_SIZE))

    def _slot(self, number: int) -> Slot:
        return Slot.decode(self._device.read_stat(slot_offset(number), SLOT_SIZE))

    def _back(self, slot: int) -> int:
        return self._status.nslots - 1 if slot == 0 else slot - 1

    def _ahead(self, slot: int) -> int:
        return 0 if slot >= self._status.nslots - 1 else slot + 1

    def seek(self, place: SeekTo) -> None:
        if place is SeekTo.START:
            self._last_id, self._last_slot = -1, self._back(self._status.oldest_slot)
        elif place is not SeekTo.BACK:
            youngest = self._status.youngest_id
            ids = [self._slot(number).id for number in range(self._status.nslots)]
            if youngest >= 0 and youngest not in ids:
                raise Unsupported(f"Cannot find slot for id: {youngest}")
            slot = ids.index(youngest) if youngest >= 0 else -1
            self._last_id, self._last_slot = youngest, slot
            if place is SeekTo.LAST:
                self._last_id = ID_COUNT - 1 if youngest == 0 else youngest - 1
                self._last_slot = self._back(slot)
        elif self._last_id == 0:
            self._last_id = self._last_slot = -1
        elif self._last_id > 0:
            self._last_id, self._last_slot = self._last_id - 1, self._back(self._last_slot)

    def take(self, wanted: int) -> bytes:
        found: list[tuple[Slot, bytes]] = []
        while len(found) <= 100 and sum(len(payload) for _, payload in found) <= 1_000_000:
            one = self._read_next()
            if one is None:
                break
            if wanted < 0 or one[0].type == wanted:
                found.append(one)
        slots, payloads = [slot for slot, _ in found], [payload for _, payload in found]
        return reply_with(
            Messages(
                [slot.type for slot in slots],
                [slot.subtype for slot in slots],
                [slot.compress for slot in slots],
                [slot.msg_len for slot in slots],
                [slot.id for slot in slots],
                [slot.time for slot in slots],
                payloads,
            )
        )

    def _read_next(self) -> tuple[Slot, bytes] | None:
        self._read_status()
        if self._status.youngest_id == -1:
            self._last_id = self._last_slot = -1
        if self._last_id == self._status.youngest_id:
            return None
        number = self._ahead(self._last_slot)
        found = self._message(number)
        if found is None:
            number = self._status.youngest_slot
            found = self._message(number)
        if found is None:
            raise Unsupported("cannot read that")
        self._last_id, self._last_slot = found[0].id, number
        return found

    def _message(self, number: int) -> tuple[Slot, bytes] | None:
        assert number >= 0, "here LROSE's server dies"
        slot = self._slot(number)
        self._last_slot, last = number, self._last_id
        self._last_id = -1
        if not slot.active or last not in (-1, (slot.id - 1) % ID_COUNT):
            return None
        frame = self._device.read_buf(slot.offset, slot.stored_len)
        self._last_id = slot.id
        if int.from_bytes(frame[:4]) != MESSAGE_MAGIC or int.from_bytes(frame[-4:]) != slot.id:
            return None
        end = None if slot.compress else FRAME_HEAD + slot.msg_len
        return slot, frame[FRAME_HEAD:end]


class LroseSession(FmqSession):
    """Does what LROSE's server does: cannot seek to an id, does not wait, reads as `LroseFmq`."""

    _fmq: LroseFmq | None = None

    def handle(self, request: DsMessage):  # type: ignore[no-untyped-def]
        request = request._replace(flags=0)
        if request.type == Op.SEEK_TO_ID:
            raise Unsupported("there is no request 43011")
        if request.type == Op.INIT:
            return self._open_as_lrose(request)
        if request.type == Op.READ and self._fmq is not None:
            return self._fmq.take(request.sub_type)
        if request.type == Op.SEEK and self._fmq is not None:
            self._fmq.seek(SeekTo(request.sub_type))
            return DsMessage(Op.REPLY, request.type)
        return super().handle(request)

    def _open_as_lrose(self, request: DsMessage) -> DsMessage:
        reply = self._open(request)
        assert self._queue is not None
        if layout_of(self._queue.path) == "classic":
            is_start = decode_init(request).open_position == SeekTo.START
            self._fmq = LroseFmq(self._queue.path, SeekTo.START if is_start else SeekTo.END)
        return reply

    def close(self) -> None:
        super().close()
        fmq, self._fmq = self._fmq, None
        if fmq is not None:
            fmq.close()


@contextmanager
def served_as_lrose(root: Path, max_clients: int = 256) -> Iterator[str]:
    options = FmqServerOptions(root=root, port=0, max_clients=max_clients)

    shared = Shared(options)
    with DsServer(options, lambda connection: LroseSession(shared, connection)) as server:
        yield f"fmqp://{server.address}"
    shared.close()


class Caller:
    """A client that says what it is told to, and nothing else."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self._decoder = Decoder(1 << 24, allow_http=True)
        self._frames: list[Frame] = []
        self._seq = 0

    def say(self, message: DsMessage, id: int = 43000) -> None:
        self._seq += 1
        self.socket.sendall(encode(Frame(id, self._seq, message.to_bytes())))

    def hear_frame(self) -> Frame:
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def hear(self) -> DsMessage:
        return DsMessage.from_bytes(self.hear_frame().payload)

    def ask(self, message: DsMessage) -> DsMessage:
        self.say(message)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
