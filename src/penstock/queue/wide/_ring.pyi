# The native core, documented in `_ring.c`. Names with an underscore are for the Python
# classes built on these, and so are the methods that those have to have: `_make_room`, `_sync`,
# `_lock_timed_out`, `_lapped`, `_renumbered`, `_damaged`, `_idle`,
# `_raise_closed`, `_raise_cut` and `close`.
import mmap
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import Buffer as _Buffer

from penstock.core.interfaces import BytesLike
from penstock.core.message import Message
from penstock.core.stream_id import StreamId

# numpy arrays are buffers, but are not typed so.
Buffer: TypeAlias = _Buffer | np.ndarray[Any, Any]

# Codes that `_make_room` is called with.
DAMAGED: int
TOO_LARGE: int
FULL: int
CHANGED: int
NO_SPACE: int
CLOSED: int
GUARDED: int

class RingWriter:
    _messages: int
    _bytes: int
    _refused: int
    _head: int
    _position: int
    _limit: int
    _guard: int
    _created_ns: int
    _ready_position: int
    _ready_seq: int
    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
        origin_ns: int | None = None,
    ) -> int: ...
    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None: ...
    def write_split(
        self, data: bytes, ending: bytes, type: int = 0, subtype: int = 0
    ) -> int | None: ...
    # Places are pairs of 64-bit numbers: where each part begins and ends in the data.
    def write_parts(self, data: BytesLike, places: Buffer) -> int | None: ...
    def _write_rows(self, slots: Buffer, blocks: Buffer, payloads: Buffer) -> int: ...
    def _reserve(
        self,
        size: int,
        type: int,
        subtype: int,
        time_ns: int | None,
        created_ns: int | None,
        stream: StreamId | None,
        attributes: bytes | None,
    ) -> int: ...
    def _commit(self, size: int) -> int | None: ...
    def _attach(
        self, mapping: mmap.mmap, fd: int, lock_timeout_ns: int, sync_each: bool
    ) -> int: ...
    def _resume(self) -> bool: ...
    def _detach(self, is_forked: bool, /) -> bool: ...
    def _wait_for(self, rows: Buffer, holders: int) -> None: ...
    def _sleep_for_room(self, seconds: float) -> bool: ...

class RingReader:
    _next: int
    _messages: int
    _bytes: int
    _filtered: int
    # The epoch that `_next` counts in.
    _numbers_of: int
    _entry: int
    # Whether the last call took messages: those that `_put_back` returns to.
    _has_taken: bool
    @property
    def _head(self) -> int: ...
    @property
    def _oldest(self) -> int: ...
    def read(self, timeout: float | None = None) -> Message | None: ...
    def acknowledge(self) -> None: ...
    def _take(self, limit: int) -> list[Message]: ...
    def _take_more(self, limit: int) -> list[Message]: ...
    def _pass(self, first: int, count: int, messages: int, bytes: int) -> None: ...
    def _put_back(self) -> None: ...
    def _peek(self, timeout: float | None) -> Message | None: ...
    def _wait(self, timeout: float | None) -> bool: ...
    def _look_if_due(self, seconds: float, /) -> None: ...
    def _columns(
        self, first: int, limit: int, most_bytes: int, out: Buffer
    ) -> tuple[int, int, int]: ...
    def _payloads(self, first: int, count: int, out: Buffer) -> int | None: ...
    def _attach(
        self,
        mapping: mmap.mmap | memoryview,
        entry: int,
        holds: bool,
        type: int | None,
        stream: StreamId | None,
        view: memoryview,
    ) -> None: ...
    def _detach(self) -> bool: ...

def wait_for_any(readers: tuple[RingReader, ...], bell: Buffer, timeout: float | None) -> bool: ...
def watch(mapping: mmap.mmap, /) -> int: ...
def unwatch(id: int, /) -> None: ...
def crc32c(data: Buffer, portable: bool = False) -> int: ...
def wake(memory: Buffer, offset: int) -> None: ...
