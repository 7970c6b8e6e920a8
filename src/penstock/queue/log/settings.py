"""What does a log keep about itself, beside its segments?"""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.core.errors import DamagedQueue, Unsupported
from penstock.core.interfaces import Ancestor, Bounds
from penstock.core.stream_id import StreamId
from penstock.core.whole_files import sync_names, write_whole
from penstock.queue.log.options import KEPT_AT_CREATION, KEPT_FROM_WRITERS, LogOptions
from penstock.queue.storage import storage_errors
from penstock.queue.wide.compression import Compression  # noqa: TC001 - pydantic reads it
from penstock.queue.wide.layout import MAX_BUFFER, MAX_SLOTS, Geometry

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.wide.queue_file import QueueFile

__all__ = [
    "SETTINGS",
    "Previous",
    "Settings",
    "adopted",
    "load_settings",
    "new_settings",
    "save_settings",
]

#: The name of the file.
SETTINGS: Final = "log.json"
#: A log that power failures cut has the second version: the first one's readers know one epoch.
_FIRST_VERSION: Final = 1
_VERSION: Final = 2
_LARGEST: Final = 1 << 20
#: Epochs that are remembered, each of a power failure.
_LONGEST_LINEAGE: Final = 1000


class Previous(BaseModel):
    """The log that was here before this one."""

    model_config = ConfigDict(frozen=True)
    epoch: int
    #: Number of the message that would have been its next.
    head: int
    #: The epochs that it continued.
    ancestors: tuple[int, ...] = ()

    def had(self, epoch: int) -> bool:
        """Tell whether a segment of this epoch was one of its own."""
        return epoch == self.epoch or epoch in self.ancestors


def _stream(value: object) -> object:
    return StreamId.parse(value) if isinstance(value, str) else value


class Settings(BaseModel):
    """The properties of a log; see `LogOptions` for those with the same name."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
    version: int = _FIRST_VERSION
    #: Another number for every log that is created, and after every power failure.
    epoch: Annotated[int, Field(ge=1, lt=1 << 64)]
    created_ns: int
    segment: Annotated[int, Field(ge=1, le=MAX_BUFFER)]
    segment_slots: Annotated[int, Field(ge=2, le=MAX_SLOTS)]
    compress: Compression
    crc: bool
    stream: Annotated[StreamId | None, BeforeValidator(_stream)] = None
    retain: Annotated[int, Field(ge=0)] | None = None
    retain_age: Annotated[float, Field(ge=0)] | None = None
    hold: tuple[str, ...] = ()
    previous: Previous | None = None
    #: The epochs that this one continues. A segment keeps the one that it was written in.
    lineage: tuple[Ancestor, ...] = ()

    @property
    def epochs(self) -> frozenset[int]:
        """All epochs that segments of this log may have."""
        return frozenset({self.epoch, *(ancestor.epoch for ancestor in self.lineage)})

    def lineage_of(self, epoch: int) -> tuple[Ancestor, ...]:
        """Return the epochs that one of this log continues."""
        earlier = [ancestor.epoch for ancestor in self.lineage]
        return self.lineage[: earlier.index(epoch)] if epoch in earlier else self.lineage

    def successor(self, epoch: int, seq: int) -> int | None:
        """Return where a reader goes on in this log; see `Bounds.successor`."""
        return Bounds(self.epoch, 0, 0, self.lineage).successor(epoch, seq)

    @property
    def geometry(self) -> Geometry:
        """The shape of its segments. Readers need no row there: they are known by cursors."""
        return Geometry.fitting(self.segment_slots, self.segment, 0)

    def given(self, options: LogOptions) -> Settings:
        """Take over what a writer gave."""
        named = set(KEPT_FROM_WRITERS) & options.model_fields_set
        return self.model_copy(update={name: getattr(options, name) for name in named})

    def begun_anew(self, head: int | None = None) -> Settings:
        """Return those of a log like this, whose segments are all gone or never were.

        :param head: the number of its next message, if that is known
        """
        return self.model_copy(
            update={
                "version": _FIRST_VERSION,
                "epoch": _new_epoch(),
                "created_ns": time.time_ns(),
                "lineage": (),
                "previous": self.previous if head is None else self.as_previous(head),
            }
        )

    def cut_at(self, seq: int) -> Settings:
        """Return those of this log when its machine went down: a new epoch begins at `seq`."""
        lineage = (*self.lineage, Ancestor(self.epoch, seq))[-_LONGEST_LINEAGE:]
        return self.model_copy(
            update={"version": _VERSION, "epoch": _new_epoch(), "lineage": lineage}
        )

    def as_previous(self, head: int) -> Previous:
        """Return what the log that takes this one's place remembers of it."""
        return Previous(epoch=self.epoch, head=head, ancestors=tuple(a.epoch for a in self.lineage))


def _new_epoch() -> int:
    return secrets.randbits(63) | 1


def new_settings(options: LogOptions, previous: Previous | None = None) -> Settings:
    """Return those of a log that is created now."""
    kept = {name: getattr(options, name) for name in (*KEPT_AT_CREATION, *KEPT_FROM_WRITERS)}
    return Settings(epoch=_new_epoch(), created_ns=time.time_ns(), previous=previous, **kept)


def adopted(file: QueueFile, crc: bool, lineage: tuple[Ancestor, ...]) -> Settings:
    """Return what the newest segment tells of its log, for want of the file."""
    own = bytes(file.header["stream"][0])
    return Settings(
        version=_VERSION if lineage else _FIRST_VERSION,
        lineage=lineage,
        epoch=file.field("epoch"),
        created_ns=file.field("created_ns"),
        segment=file.geometry.buffer_size,
        segment_slots=file.geometry.slots,
        compress=file.compression,
        crc=crc,
        stream=StreamId(own) if any(own) else None,
    )


def load_settings(folder: Path) -> Settings | None:
    """Return what the log keeps; None when there is no such file.

    :raises DamagedQueue: it is not readable.
    :raises Unsupported: a newer Penstock wrote it.
    """
    path = folder / SETTINGS
    with storage_errors("reading", str(path)):
        try:
            with path.open("rb") as file:
                text = file.read(_LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        found = Settings.model_validate_json(text)
    except (ValidationError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"msg": str(error)}
        where = ".".join(map(str, first.get("loc", ()))) or "the file"
        raise DamagedQueue(str(path), where, 0, "the properties of a log", first["msg"]) from None
    if found.version > _VERSION:
        raise Unsupported(
            f"{path} has version {found.version} of the log; this Penstock knows {_VERSION}",
            hint="use a newer Penstock",
        )
    return found


def save_settings(folder: Path, settings: Settings, *, sync: bool) -> None:
    """Keep them, whole at any moment. The caller is the log's writer.

    :raises StorageError: the operating system refuses.
    """
    path = folder / SETTINGS
    fields = settings.model_dump(mode="json", exclude={"stream"})
    fields["stream"] = None if settings.stream is None else settings.stream.hex()
    text = json.dumps(fields, indent=2).encode()
    with storage_errors("writing", str(path)):
        write_whole(path, text + b"\n", sync=sync)
        if sync:
            sync_names(folder)
