"""What were the bytes that came, and were no message of uProtocol? (spec uprotocol 10.3)."""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import NotFound, PenstockError
from penstock.core.position import Position
from penstock.queue.log.consuming import open_log_reader
from penstock.queue.log.options import LogOptions
from penstock.queue.log.writer import open_log_writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.queue.log.writer import LogWriter

__all__ = ["QUARANTINE", "Quarantine", "Stray", "strays"]

log = logging.getLogger(__name__)

#: The folder of it, in that of the state.
QUARANTINE: Final = "quarantine"

#: When it came (milliseconds since 1970 UTC), its size, and the size of the leg's name behind it.
_HEADER: Final = struct.Struct("<QIB")
#: Bytes of each that are kept.
_KEPT: Final = 64 << 10
_SEGMENTS: Final = 4
_SMALLEST_SEGMENT: Final = 2 * _KEPT
_AT_ONCE: Final = 64


class Stray(NamedTuple):
    """Bytes that came, and decode to nothing."""

    number: int
    came_ms: int
    leg: str
    #: How many bytes it had; `data` is the first 65,536 of them at most.
    size: int
    data: bytes


class Quarantine:
    """A log of such bytes, of which the oldest go when there are too many. Nobody relies on it."""

    def __init__(self, folder: Path, retain: int) -> None:
        """Keep so many bytes at most; 0 keeps none. The log is made when it is needed first."""
        self._folder = folder
        self._retain = retain
        self._writer: LogWriter | None = None

    def keep(self, leg: str, strays: Sequence[bytes], now_ms: int) -> int:
        """Keep what came by a leg, as far as that is possible; return how many were.

        Whoever calls has a lock. That a disk is full is no reason to refuse what else came.
        """
        if not self._retain:
            return 0
        name = leg.encode()[:255]
        records = [
            _HEADER.pack(now_ms, min(len(raw), 0xFFFF_FFFF), len(name)) + name + raw[:_KEPT]
            for raw in strays
        ]
        try:
            if self._writer is None:
                self._writer = self._open()
            self._writer.write_many(records)
        except PenstockError as error:
            log.warning("%s undecodable messages are not kept: %s", f"{len(strays):,}", error)
            return 0
        return len(records)

    def _open(self) -> LogWriter:
        segment = max(self._retain // _SEGMENTS, _SMALLEST_SEGMENT)
        options = LogOptions(
            segment=segment, segment_slots=4096, retain=self._retain, sync="none", damaged="skip"
        )
        return open_log_writer(f"log:{self._folder}", self._folder, options)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def strays(folder: Path) -> Iterator[Stray]:
    """Yield what is kept, the oldest first."""
    options = LogOptions(damaged="skip")
    try:
        reader = open_log_reader(f"log:{folder}", folder, Position.START, options)
    except NotFound:
        return
    with reader:
        while messages := reader.read_many(_AT_ONCE):
            for message in messages:
                payload = message.payload
                if len(payload) < _HEADER.size:
                    continue
                came_ms, size, length = _HEADER.unpack_from(payload)
                end = _HEADER.size + length
                leg = payload[_HEADER.size : end].decode(errors="replace")
                yield Stray(message.seq, came_ms, leg, size, payload[end:])
