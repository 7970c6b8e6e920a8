"""What does a log keep about itself, beside its segments?"""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.core.errors import DamagedQueue, Unsupported
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
_VERSION: Final = 1
_LARGEST: Final = 1 << 20


class Previous(BaseModel):
    """The log that was here before this one."""

    model_config = ConfigDict(frozen=True)
    epoch: int
    #: Number of the message that would have been its next.
    head: int


def _stream(value: object) -> object:
    return StreamId.parse(value) if isinstance(value, str) else value


class Settings(BaseModel):
    """The properties of a log; see `LogOptions` for those with the same name."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
    version: int = _VERSION
    #: Another number for every log that is created, and for all of its segments.
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

    @property
    def geometry(self) -> Geometry:
        """The shape of its segments. Readers need no row there: they are known by cursors."""
        return Geometry.fitting(self.segment_slots, self.segment, 0)

    def given(self, options: LogOptions) -> Settings:
        """Take over what a writer gave."""
        named = set(KEPT_FROM_WRITERS) & options.model_fields_set
        return self.model_copy(update={name: getattr(options, name) for name in named})

    def begun_anew(self) -> Settings:
        """Return those of a log like this, whose segments are all gone or never were."""
        return self.model_copy(update={"epoch": _new_epoch(), "created_ns": time.time_ns()})


def _new_epoch() -> int:
    return secrets.randbits(63) | 1


def new_settings(options: LogOptions, previous: Previous | None = None) -> Settings:
    """Return those of a log that is created now."""
    kept = {name: getattr(options, name) for name in (*KEPT_AT_CREATION, *KEPT_FROM_WRITERS)}
    return Settings(epoch=_new_epoch(), created_ns=time.time_ns(), previous=previous, **kept)


def adopted(file: QueueFile, crc: bool) -> Settings:
    """Return what a segment tells of its log, for want of the file."""
    own = bytes(file.header["stream"][0])
    return Settings(
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
