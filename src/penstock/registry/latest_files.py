"""How are the files of latest_data_info written?

In LROSE's order and under its lock: the catalog, then ASCII, XML and the queue (spec lrose 3.1).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import DamagedQueue
from penstock.core.whole_files import open_new
from penstock.protocols.lrose.ldata_body import encode_body
from penstock.protocols.lrose.ldata_text import catalog_line, encode_ascii
from penstock.protocols.lrose.ldata_xml import encode_xml
from penstock.queue.classic.device import lock_held, open_lock_file
from penstock.queue.classic.options import ClassicOptions, Compression
from penstock.queue.classic.writer import ClassicWriter
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.protocols.lrose.ldata_info import LatestInfo
    from penstock.registry.latest_settings import InfoFiles, LatestSettings

__all__ = ["write_files", "write_state"]

log = logging.getLogger(__name__)


def write_files(
    files: InfoFiles,
    settings: LatestSettings,
    info: LatestInfo,
    clock: Clock = SYSTEM_CLOCK,
    *,
    queue_only: bool = False,
) -> int | None:
    """Write the set, and return the number of the queue's message; None: there is no queue.

    `queue_only` leaves all files but the queue as they are.

    :raises LockTimeout: another writer held the lock for the time allowed.
    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", files.queue):
        files.folder.mkdir(parents=True, exist_ok=True)
        if queue_only:
            return _append(files, settings, info, clock)
        _add_to_catalog(files, info)
        lock = open_lock_file(files.queue)
        try:
            with lock_held(lock, f"{files.queue}.lock", settings.lock_timeout):
                if settings.use_ascii:
                    _replace(files, files.ascii, encode_ascii(info))
                if settings.use_xml:
                    _replace(files, files.xml, encode_xml(info, files.directory))
                return _append(files, settings, info, clock) if settings.use_fmq else None
        finally:
            os.close(lock)


def write_state(files: InfoFiles, info: LatestInfo) -> None:
    """Write the XML alone: what a reader keeps of its place is nobody else's.

    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", str(files.xml)):
        files.folder.mkdir(parents=True, exist_ok=True)
        _replace(files, files.xml, encode_xml(info, files.directory))


def _replace(files: InfoFiles, target: Path, content: bytes) -> None:
    # LROSE removes the target first, for the sake of NFS caches, and for a moment there is none.
    with os.fdopen(open_new(files.temporary), "wb") as file:
        file.write(content)
    files.temporary.replace(target)


def _append(files: InfoFiles, settings: LatestSettings, info: LatestInfo, clock: Clock) -> int:
    """Append to the queue, which is opened for each entry: somebody may have removed it."""
    body = encode_body(info, files.directory, ascii_on=settings.use_ascii, xml_on=settings.use_xml)
    try:
        writer = _open_queue(files, settings, clock, Creation.MISSING)
    except DamagedQueue as damage:
        # As LROSE does: those who wait for the next file must not wait for a person to come.
        log.warning("%s; making it anew", damage)
        writer = _open_queue(files, settings, clock, Creation.ALWAYS)
    with writer:
        return writer.write(body)


def _open_queue(
    files: InfoFiles, settings: LatestSettings, clock: Clock, creation: Creation
) -> ClassicWriter:
    options = ClassicOptions(
        slots=settings.fmq_slots,
        size=settings.fmq_size,
        compress=Compression.GZIP,
        create=creation,
        lock_timeout=settings.lock_timeout,
    )
    return ClassicWriter(f"fmq:{files.queue}", files.queue, options, clock)


def _add_to_catalog(files: InfoFiles, info: LatestInfo) -> None:
    """Add a line to the day's catalog, if one is kept. It never holds up the rest."""
    if not files.catalog_wanted.exists():
        return
    day = files.folder / f"{info.calendar.year:04d}{info.calendar:%m%d}"
    try:
        day.mkdir(parents=True, exist_ok=True)
        with (day / "ldata_file_catalog").open("ab", buffering=0) as catalog:
            catalog.write(catalog_line(info, files.directory))
    except OSError as error:
        log.warning("cannot add to the catalog in %s: %s", day, error.strerror)
