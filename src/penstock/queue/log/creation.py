"""How is a log created, and opened for writing?"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import AlreadyExists, DamagedQueue, NotFound
from penstock.core.interfaces import Ancestor
from penstock.core.whole_files import make_folder, sync_file, sync_names
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.index import SegmentIndex
from penstock.queue.log.recovery import (
    Recovery,
    is_left_over,
    recover,
    remove_unfinished,
    set_aside,
)
from penstock.queue.log.retention import CURSORS, GROUPS
from penstock.queue.log.segments import (
    begin_segment,
    look,
    no_log,
    numbers_of,
    open_segment,
    path_of,
    remove_segment,
    seal,
)
from penstock.queue.log.settings import (
    SETTINGS,
    adopted,
    load_settings,
    new_settings,
    save_settings,
)
from penstock.queue.log.writer_lock import LOCK, WriterLock
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors
from penstock.queue.wide.file import mark
from penstock.queue.wide.layout import HeaderFlag, State

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.options import LogOptions
    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.file import QueueFile

__all__ = ["Opened", "create_log", "open_to_write"]

log = logging.getLogger(__name__)

#: Poll interval (seconds) while waiting for a log to appear.
_LOOK_FOR_LOG: Final = 0.02


class Opened(NamedTuple):
    """A log opened for writing."""

    settings: Settings
    #: The live segment, to append to.
    file: QueueFile
    lock: WriterLock
    recovery: Recovery


def create_log(folder: Path, options: LogOptions, *, replace: bool) -> None:
    """Create an empty log.

    :raises AlreadyExists: there is a log without `replace`, or the directory holds other files.
    :raises LockTimeout: another process writes to the log.
    :raises StorageError: there is no space, or no permission.
    """
    if not replace and numbers_of(folder):
        raise AlreadyExists(
            f"there is a log at {folder} already", hint="penstock create --replace empties it"
        )
    opened = _open(folder, options, replace=replace)
    opened.file.close()
    opened.lock.close()


def open_to_write(folder: Path, options: LogOptions, anew: Settings | None = None) -> Opened:
    """Become the writer of a log; create the log as `options.create` says.

    :param anew: settings to recreate a log with that was removed while open
    :raises NotFound: there is no log, with `create=never`.
    :raises LockTimeout: another process writes to it.
    :raises StorageError: there is no space, or no permission.
    """
    if options.create is Creation.NEVER:
        deadline = time.monotonic() + options.wait
        while not numbers_of(folder):
            if time.monotonic() >= deadline:
                raise no_log(folder)
            time.sleep(_LOOK_FOR_LOG)
    return _open(folder, options, replace=options.create is Creation.ALWAYS, anew=anew)


def _open(
    folder: Path, options: LogOptions, *, replace: bool, anew: Settings | None = None
) -> Opened:
    _make_folder(folder, options.mode)
    with contextlib.ExitStack() as undo:
        lock = WriterLock(folder, options.lock_timeout)
        undo.callback(lock.close)
        sync = options.sync != "none"
        remove_unfinished(folder)
        if replace:
            settings = _replace(folder, options, sync=sync)
        else:
            settings = _settings(folder, options, sync=sync, anew=anew)
        recovered = recover(folder, settings)
        settings, file, ended = recovered.settings, recovered.file, recovered.ended
        for mapped in (file, ended):
            if mapped is not None:
                undo.callback(mapped.close)
        if file is None:
            file = begin_segment(folder, settings, recovered.recovery.next_seq, sync=sync)
            undo.callback(file.close)
        if ended is not None:
            seal(ended)
        if sync:
            _sync_what_was_not(folder)
        _make_held_cursors(folder, settings)
        undo.pop_all()
    if ended is not None:
        ended.close()
    return Opened(settings, file, lock, recovered.recovery)


def _sync_what_was_not(folder: Path) -> None:
    """Sync the settings, and the names in the folder: a writer with `sync=none` may have made them.

    :raises StorageError: the sync fails.
    """
    with storage_errors("syncing", str(folder)):
        sync_file(folder / SETTINGS)
        sync_names(folder)


def _make_folder(folder: Path, mode: int | None) -> None:
    """Create the directory; refuse one that holds other files.

    The files in it get its permissions: the owner's only, unless `mode` says more.

    :raises AlreadyExists: the directory holds files that are not of a log.
    """
    with storage_errors("creating", str(folder)):
        if make_folder(folder):  # a readable directory is searchable, too
            folder.chmod(0o700 if mode is None else mode | (mode & 0o444) >> 2)
        names = {path.name for path in folder.iterdir() if not is_left_over(path.name)}
    if names and not names & {LOCK, SETTINGS, CURSORS, GROUPS} and not numbers_of(folder):
        raise AlreadyExists(
            f"the directory {folder} holds other things than a log",
            hint="a log needs a directory of its own",
        )


def _settings(
    folder: Path, options: LogOptions, *, sync: bool, anew: Settings | None = None
) -> Settings:
    """Return the settings of the log, updated by the writer's options; new ones if missing."""
    kept = _load(folder)
    if kept is not None:
        _remove_previous(folder, kept)
    if kept is not None and not _has_any_of(folder, kept):
        path = set_aside(folder / SETTINGS)
        log.warning("%s is of another log than all segments; it was put aside as %s", folder, path)
        kept = None
    if numbers_of(folder):
        settings = (kept or _adopt(folder, options)).given(options)
    elif kept is not None:
        settings = kept.begun_anew().given(options)
    else:
        settings = new_settings(options) if anew is None else anew
    if settings != kept:
        save_settings(folder, settings, sync=sync)
    return settings


def _has_any_of(folder: Path, settings: Settings) -> bool:
    """Tell whether any readable segment belongs to this log, or none is readable.

    A power failure can restore an old version of the settings file: that must not cause all
    segments to be set aside.
    """
    readable = 0
    for number in reversed(numbers_of(folder)):
        with contextlib.suppress(DamagedQueue, NotFound):
            if look(folder, number).epoch in settings.epochs:
                return True
            readable += 1
    return not readable


def _replace(folder: Path, options: LogOptions, *, sync: bool) -> Settings:
    """Replace the log by an empty one. Once the settings are saved, any writer completes it."""
    kept, newest = _load(folder), _newest(folder)
    if newest is None:
        return _settings(folder, options, sync=sync)
    try:
        if kept is None:
            kept = _adopted(folder, newest)
        settings = new_settings(options, kept.as_previous(newest.field("head")))
        save_settings(folder, settings, sync=sync)
        _remove_previous(folder, settings)
        begin_segment(folder, settings, 0, sync=sync).close()
        mark(newest, State.REPLACED)  # wakes sleeping readers, which find the new log
    finally:
        newest.close()
    return settings


def _load(folder: Path) -> Settings | None:
    try:
        return load_settings(folder)
    except DamagedQueue as error:
        path = set_aside(folder / SETTINGS)
        log.warning("%s; it was put aside as %s, and is made anew from the segments", error, path)
        return None


def _adopt(folder: Path, options: LogOptions) -> Settings:
    file = _newest(folder)
    if file is None:
        return new_settings(options)
    try:
        return _adopted(folder, file)
    finally:
        file.close()


def _adopted(folder: Path, newest: QueueFile) -> Settings:
    """Reconstruct the settings from the segments."""
    lineage: list[Ancestor] = []
    epoch = None
    for number in numbers_of(folder):
        with contextlib.suppress(DamagedQueue, NotFound):
            found = look(folder, number).epoch
            if epoch not in (None, found):
                lineage.append(Ancestor(epoch, number))
            epoch = found
    return adopted(newest, HeaderFlag.CRC in newest.flags, tuple(lineage))


def _newest(folder: Path) -> QueueFile | None:
    """Map the newest readable segment; None: no segment is readable."""
    for number in reversed(numbers_of(folder)):
        with contextlib.suppress(DamagedQueue, NotFound):
            return open_segment(folder, number, to_write=True)
    return None


def _remove_previous(folder: Path, settings: Settings) -> None:
    """Remove remaining segments of the previous log, the newest last."""
    previous, newest = settings.previous, _newest(folder)
    if newest is None:
        return
    is_previous = previous is not None and previous.had(newest.field("epoch"))
    newest.close()
    if is_previous:
        for number in numbers_of(folder):
            remove_segment(path_of(folder, number), State.REPLACED)


def _make_held_cursors(folder: Path, settings: Settings) -> None:
    """Create missing cursors of `hold` at the oldest message, so that retention waits for them."""
    if not settings.hold:
        return
    oldest = SegmentIndex(folder).oldest()
    with CursorFile(str(folder / CURSORS), as_folder=True) as cursors:
        for name in settings.hold:
            cursors.reserve(name, epoch=settings.epoch, seq=oldest)
