"""How do Penstock's own queues pass messages?"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from peers.contract import BUFFER, PATIENCE, Case, Receiver, Scratch, Sender, Way, send_each
from penstock.core.batch import batch_from_messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peers.tally import Payload, Taker

__all__ = ["Form", "QueueWay", "group_of", "take_batches", "take_lists"]

_SLOTS = 16_384

#: Large messages pass best through a ring that stays in the cache beside what is copied into it:
#: its bytes for messages of that size or more. Those who lend memory from a pool get the same by
#: lending what came back last.
_LARGE = {1 << 20: 2 << 20, 64 << 10: 4 << 20}

#: What a batch reader takes at a time, at most: messages, and bytes.
_READ_GROUP = 1000
_READ_BYTES = 1 << 20

_payload = attrgetter("payload")


class Form(Enum):
    """Which methods are used on the two ends."""

    #: `write` and `read`: one message a call, handed out as bytes.
    SINGLE = "write/read"
    #: `write_many` and `read_many`.
    LISTS = "lists"
    #: `write_batch` and `read_batch`.
    ARROW = "Arrow"
    #: `reserve` and `view`: written and touched where it lies.
    IN_PLACE = "in place"
    #: For latency: `read` with no timeout, over and over.
    POLLED = "polled"
    #: For latency: `read` sleeps until it is woken.
    SLEEPING = "sleeping"


@dataclass(frozen=True)
class QueueWay(Way):
    """A queue in a file or in /dev/shm; the writer waits for its readers, so nothing is lost."""

    layout: str = "wide"
    form: Form = Form.SINGLE

    def missing(self) -> str | None:
        with tempfile.TemporaryDirectory() as directory:
            try:
                penstock.open_writer(f"fmq:{directory}/queue?layout={self.layout}").close()
            except penstock.PenstockError as error:
                return f"not in this version: {error}"
        return None

    def version(self) -> str:
        return f"penstock {penstock.__version__}"

    def address(self, scratch: Scratch) -> str:
        return f"{scratch.directory(self.storage)}/queue"

    def open_writer(self, address: str, case: Case) -> Sender:
        hold = ",".join(f"r{number}" for number in range(case.readers))
        lossless = f"hold={hold}&policy=wait" if self.layout == "wide" else "blocking=true"
        slots, buffer = _SLOTS, BUFFER
        if self.layout == "wide":
            buffer = next((room for size, room in _LARGE.items() if case.size >= size), BUFFER)
        else:  # one that waits must run out of slots before it runs out of room
            slots = min(_SLOTS, BUFFER // (case.size + 1024))
        options = f"layout={self.layout}&slots={slots}&size={buffer}&{lossless}"
        return _SENDERS[self.form](penstock.open_writer(f"fmq:{address}?{options}"))

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        hold = f"?hold=r{number}" if self.layout == "wide" else ""
        return _RECEIVERS[self.form](penstock.open_reader(f"fmq:{address}{hold}"), case.size)

    def clean_up(self, address: str) -> None:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


class _Single(Sender):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        return send_each(self._writer.write, payloads, seconds)

    def send(self, payload: bytes) -> None:
        self._writer.write(payload)

    def close(self) -> None:
        self._writer.close()


class _Lists(_Single):
    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        return len(payloads) * send_each(self._writer.write_many, [payloads], seconds)


class _Arrow(_Single):
    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        batch = batch_from_messages(
            [penstock.Message(0, 0, 0, 0, 0, None, None, payload) for payload in payloads]
        )
        return len(payloads) * send_each(self._writer.write_batch, [batch], seconds)


class _Reserving(_Single):
    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        return send_each(self.send, payloads, seconds)

    def send(self, payload: bytes) -> None:
        reserved = self._writer.reserve(len(payload))
        reserved.buffer[:] = payload
        reserved.commit()


class _SingleReceiver(Receiver):
    """Waits by itself as long as it must: it looks a few times, then sleeps."""

    def __init__(self, reader: Any, size: int) -> None:
        self._reader = reader
        self._group = group_of(size)

    def take_all(self, taker: Taker) -> None:
        taker.each(map(_payload, iter(partial(self._reader.read, PATIENCE), None)))

    def close(self) -> None:
        self._reader.close()


class _PolledReceiver(_SingleReceiver):
    def take_all(self, taker: Taker) -> None:
        read = self._reader.read
        while (message := read(0)) is None or not taker.one(message.payload):
            pass


class _ListsReceiver(_SingleReceiver):
    def take_all(self, taker: Taker) -> None:
        take_lists(self._reader, self._group, taker)


class _ArrowReceiver(_SingleReceiver):
    def take_all(self, taker: Taker) -> None:
        take_batches(self._reader, self._group, taker)


class _ViewingReceiver(_SingleReceiver):
    def take_all(self, taker: Taker) -> None:
        taker.each(self._views())

    def _views(self) -> Iterator[Payload]:
        view = self._reader.view
        while True:
            with view(PATIENCE) as message:
                if message is None:
                    return
                yield message.payload


def group_of(size: int) -> int:
    """How many messages of a size a batch reader takes at a time."""
    return max(1, min(_READ_GROUP, _READ_BYTES // size))


def take_lists(reader: Any, group: int, taker: Taker) -> None:
    """Hand over messages by `read_many`, up to the last one."""
    read_many = reader.read_many
    while messages := read_many(group, PATIENCE):
        if taker.many([message.payload for message in messages]):
            return


def take_batches(reader: Any, group: int, taker: Taker) -> None:
    """Hand over messages by `read_batch`, up to the last one."""
    read_batch = reader.read_batch
    while (batch := read_batch(group, PATIENCE)).num_rows:
        if taker.batch(batch):
            return


_SENDERS = {
    Form.SINGLE: _Single,
    Form.LISTS: _Lists,
    Form.ARROW: _Arrow,
    Form.IN_PLACE: _Reserving,
    Form.POLLED: _Single,
    Form.SLEEPING: _Single,
}

_RECEIVERS = {
    Form.SINGLE: _SingleReceiver,
    Form.LISTS: _ListsReceiver,
    Form.ARROW: _ArrowReceiver,
    Form.IN_PLACE: _ViewingReceiver,
    Form.POLLED: _PolledReceiver,
    Form.SLEEPING: _SingleReceiver,
}
