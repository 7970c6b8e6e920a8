"""Which settings of a log are stored beside its segments?"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import DamagedQueue, Unsupported
from penstock.core.interfaces import Ancestor, Bounds
from penstock.core.whole_files import sync_names, write_whole
from penstock.queue.log.options import KEPT_AT_CREATION, KEPT_FROM_WRITERS, LogOptions
from penstock.queue.options import choice, flag, or_none, own_stream, whole
from penstock.queue.storage import storage_errors
from penstock.queue.wide.file import Geometry
from penstock.queue.wide.layout import MAX_BUFFER, MAX_SLOTS, Compression

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.core.stream_id import StreamId
    from penstock.queue.wide.file import QueueFile

__all__ = [
    "SETTINGS",
    "Previous",
    "Settings",
    "adopted",
    "load_settings",
    "new_settings",
    "save_settings",
]

#: The name of the settings file.
SETTINGS: Final = "log.json"
#: Version 2: several epochs, after a power failure; readers of version 1 know one epoch only.
_FIRST_VERSION: Final = 1
_VERSION: Final = 2
_LARGEST: Final = 1 << 20
#: Most epochs to remember; every power failure adds one.
_LONGEST_LINEAGE: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Previous:
    """The log that this one replaced."""

    epoch: int
    #: Its next number when it was replaced.
    head: int
    #: The epochs that it continued.
    ancestors: tuple[int, ...] = ()

    def had(self, epoch: int) -> bool:
        """Tell whether an epoch belongs to it."""
        return epoch == self.epoch or epoch in self.ancestors


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a log; see `LogOptions` for fields of the same name."""

    version: int = _FIRST_VERSION
    #: Random; new for every created log, and after every power failure.
    epoch: int
    created_ns: int
    segment: int
    segment_slots: int
    compress: Compression
    crc: bool
    stream: StreamId | None = None
    retain: int | None = None
    retain_age: float | None = None
    hold: tuple[str, ...] = ()
    previous: Previous | None = None
    #: Earlier epochs of this log, in order. A segment keeps the epoch that it was created in.
    lineage: tuple[Ancestor, ...] = ()

    @property
    def epochs(self) -> frozenset[int]:
        """All epochs of this log."""
        return frozenset({self.epoch, *(ancestor.epoch for ancestor in self.lineage)})

    def lineage_of(self, epoch: int) -> tuple[Ancestor, ...]:
        """Return the epochs of this log before `epoch`."""
        earlier = [ancestor.epoch for ancestor in self.lineage]
        return self.lineage[: earlier.index(epoch)] if epoch in earlier else self.lineage

    def successor(self, epoch: int, seq: int) -> int | None:
        """Map a position of an earlier epoch to this one; see `Bounds.successor`."""
        return Bounds(self.epoch, 0, 0, self.lineage).successor(epoch, seq)

    @property
    def geometry(self) -> Geometry:
        """The geometry of its segments, without reader tables: readers have cursors."""
        return Geometry.fitting(self.segment_slots, self.segment, 0)

    def given(self, options: LogOptions) -> Settings:
        """Return the settings, updated by the options that a writer gave."""
        named = options.given.intersection(KEPT_FROM_WRITERS)
        return replace(self, **{name: getattr(options, name) for name in named})

    def begun_anew(self, head: int | None = None) -> Settings:
        """Return the settings to recreate this log with, after its segments were removed.

        :param head: the next number of the removed log, if known
        """
        return replace(
            self,
            version=_FIRST_VERSION,
            epoch=_new_epoch(),
            created_ns=time.time_ns(),
            lineage=(),
            previous=self.previous if head is None else self.as_previous(head),
        )

    def cut_at(self, seq: int) -> Settings:
        """Return the settings after a machine crash: a new epoch starts at `seq`."""
        lineage = (*self.lineage, Ancestor(self.epoch, seq))[-_LONGEST_LINEAGE:]
        return replace(self, version=_VERSION, epoch=_new_epoch(), lineage=lineage)

    def as_previous(self, head: int) -> Previous:
        """Return what the log that replaces this one stores about it."""
        return Previous(epoch=self.epoch, head=head, ancestors=tuple(a.epoch for a in self.lineage))


def _new_epoch() -> int:
    return secrets.randbits(63) | 1


def new_settings(options: LogOptions, previous: Previous | None = None) -> Settings:
    """Return the settings of a new log."""
    kept = {name: getattr(options, name) for name in (*KEPT_AT_CREATION, *KEPT_FROM_WRITERS)}
    return Settings(epoch=_new_epoch(), created_ns=time.time_ns(), previous=previous, **kept)


def adopted(file: QueueFile, crc: bool, lineage: tuple[Ancestor, ...]) -> Settings:
    """Reconstruct lost settings from the newest segment."""
    return Settings(
        version=_VERSION if lineage else _FIRST_VERSION,
        lineage=lineage,
        epoch=file.field("epoch"),
        created_ns=file.field("created_ns"),
        segment=file.geometry.buffer_size,
        segment_slots=file.geometry.slots,
        compress=file.compression,
        crc=crc,
        stream=file.header.stream,
    )


def load_settings(folder: Path) -> Settings | None:
    """Load the settings of a log; None: there is no settings file.

    :raises DamagedQueue: the file is not readable.
    :raises Unsupported: a newer Penstock wrote it.
    """
    path = folder / SETTINGS
    with storage_errors("reading", str(path)):
        try:
            with path.open("rb") as file:
                text = file.read(_LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
    found = _read(str(path), text)
    if found.version > _VERSION:
        raise Unsupported(
            f"{path} has version {found.version} of the log; this Penstock knows {_VERSION}",
            hint="use a newer Penstock",
        )
    return found


def _read(path: str, text: bytes) -> Settings:
    """Parse and validate the settings file."""
    name = "the file"
    try:
        stored = json.loads(text)
        values = {}
        for name, parse in _PARSERS.items():
            if name in stored:
                values[name] = parse(stored[name])
            elif name in _NEEDED:
                raise ValueError("is missing")  # noqa: TRY301 - reported like the others
        return Settings(**values)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedQueue(path, name, 0, "the properties of a log", error) from None


def _seconds(value: float) -> float:
    if isinstance(value, bool) or not value >= 0:
        raise ValueError("should be 0 or more")
    return float(value)


def _names(value: list[str]) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in value):
        raise ValueError("should be names")
    return tuple(value)


def _previous(stored: dict[str, Any]) -> Previous:
    number = whole()
    ancestors = tuple(map(number, stored.get("ancestors", ())))
    return Previous(epoch=number(stored["epoch"]), head=number(stored["head"]), ancestors=ancestors)


def _lineage(stored: list[list[int]]) -> tuple[Ancestor, ...]:
    number = whole()
    return tuple(Ancestor(number(epoch), number(end)) for epoch, end in stored)


_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "version": whole(),
    "epoch": whole(1, (1 << 64) - 1),
    "created_ns": whole(),
    "segment": whole(1, MAX_BUFFER),
    "segment_slots": whole(2, MAX_SLOTS),
    "compress": choice(*Compression),
    "crc": flag,
    "stream": or_none(own_stream),
    "retain": or_none(whole(0)),
    "retain_age": or_none(_seconds),
    "hold": _names,
    "previous": or_none(_previous),
    "lineage": _lineage,
}
_NEEDED: Final = {"epoch", "created_ns", "segment", "segment_slots", "compress", "crc"}


def save_settings(folder: Path, settings: Settings, *, sync: bool) -> None:
    """Save the settings atomically. The caller is the log's writer.

    :raises StorageError: the operating system reports an error.
    """
    path = folder / SETTINGS
    fields = asdict(settings)
    fields["stream"] = None if settings.stream is None else settings.stream.hex()
    text = json.dumps(fields, indent=2).encode()
    with storage_errors("writing", str(path)):
        write_whole(path, text + b"\n", sync=sync, as_folder=True)
        if sync:
            sync_names(folder)
