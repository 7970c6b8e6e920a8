"""How is a queue resized while its readers continue?

A queue of the new size is created beside it, with the same messages, numbers and epoch, and renamed
to its name. Open readers read the old one to its end, notice the new one, and continue there at
their number; named readers that return later find their position in its table.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidOption
from penstock.core.message import CopiedMessage
from penstock.core.position import Position
from penstock.core.whole_files import open_new, sync_names
from penstock.queue.storage import LockFile, storage_errors
from penstock.queue.wide.creation import busy_error, new_header, write_new_file
from penstock.queue.wide.file import SUFFIX, Geometry, QueueFile, mark
from penstock.queue.wide.layout import HeaderFlag, State
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import open_wide_reader
from penstock.queue.wide.readers import reader_table
from penstock.queue.wide.recovery import recover
from penstock.queue.wide.writer import open_wide_writer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["resize_wide", "writing_alone"]

#: Messages copied at a time.
_AT_ONCE = 4096


def resize_wide(path: str, options: WideOptions) -> None:
    """Change `slots`, `size` and `readers` of a queue to those given in the options.

    :raises InvalidOption: its messages do not fit.
    :raises LockTimeout: a process writes to the queue.
    :raises StorageError: no space, or no permission.
    """
    old = QueueFile.open(path, writable=True)
    try:
        with writing_alone(path, old):
            if old.needs_recovery():
                # The copy would look as if its machine had never crashed, and readers may have
                # seen numbers that it gives again.
                recover(path, old, None)
            _replace(path, old, _geometry(old, options))
            mark(old, State.REPLACED)
    finally:
        old.close()


def _geometry(old: QueueFile, options: WideOptions) -> Geometry:
    now, asked = old.geometry, options.given
    return Geometry.fitting(
        options.slots if "slots" in asked else now.slots,
        options.size if "size" in asked else now.buffer_size,
        options.readers if "readers" in asked else now.readers,
    )


@contextlib.contextmanager
def writing_alone(path: str, file: QueueFile) -> Iterator[None]:
    """Exclude writers of a queue.

    :raises LockTimeout: a process writes to the queue.
    """
    locks = LockFile(file.descriptor)
    try:
        if not locks.try_lock(*file.writer_locks):
            raise busy_error(path, file, "end it first")
        yield
    finally:
        locks.close()


def _replace(path: str, old: QueueFile, geometry: Geometry) -> None:
    name = Path(old.path)
    made = name.with_name(f".{name.name}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")
    header = new_header(
        geometry,
        old.flags,
        old.compression,
        old.header.stream,
        old.field("tail"),
        old.field("epoch"),
    )
    with storage_errors("creating", str(made)):
        descriptor = open_new(made, 0o600)
        try:
            os.fchmod(descriptor, old.mode)
            write_new_file(descriptor, header, geometry, sparse=HeaderFlag.SPARSE in old.flags)
            _fill(path, str(made), old)
            if not old.is_memory:
                os.fsync(descriptor)
            made.rename(name)
            if not old.is_memory:
                sync_names(name.parent)
        finally:
            os.close(descriptor)
            made.unlink(missing_ok=True)


def _fill(path: str, made: str, old: QueueFile) -> None:
    """Copy the messages of a queue, and the positions of its named readers."""
    unseen = WideOptions(trace=False)
    with (
        open_wide_reader(f"fmq:{path}", path, Position.START, unseen) as reader,
        open_wide_writer(f"fmq:{made}", made, WideOptions(sync="none")) as writer,
    ):
        while messages := reader.read_many(_AT_ONCE):
            for m in messages:
                header = m.type, m.subtype, m.time_ns, m.created_ns, m.stream, m.attributes
                origin_ns = m.origin_ns if isinstance(m, CopiedMessage) else None
                writer.write(m.payload, *header, origin_ns)
    new = QueueFile.open(made, writable=True)
    try:
        new.header.lineage = old.header.lineage
        new.header["check"] = new.header.checksum()
        if new.field("tail") != old.field("tail"):
            count, kept = (file.field("head") - file.field("tail") for file in (old, new))
            raise InvalidOption(
                "size",
                f"{new.geometry.slots:,} slots, {new.geometry.buffer_size:,} bytes",
                f"it holds {count:,} messages, of which only the last {kept:,} would fit",
                hint="give more slots= or a larger size=",
            )
        if old.geometry.readers and new.geometry.readers:
            with reader_table(old) as before, reader_table(new) as after:
                for entry in before.entries():
                    if entry.name:
                        after.reserve(entry.name, epoch=entry.epoch, seq=entry.seq)
    finally:
        new.close()
