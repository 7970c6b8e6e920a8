"""How does a log come into being, and how is it opened to write to?"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import AlreadyExists, DamagedQueue, NotFound
from penstock.core.interfaces import Ancestor
from penstock.core.whole_files import sync_names
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.freeing import remove_segment, seal
from penstock.queue.log.locking import LOCK, WriterLock
from penstock.queue.log.places import Places
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
    numbers_of,
    open_segment,
    path_of,
)
from penstock.queue.log.settings import (
    SETTINGS,
    adopted,
    load_settings,
    new_settings,
    save_settings,
)
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import HeaderFlag, State
from penstock.queue.wide.queue_file import mark

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.options import LogOptions
    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Opened", "create_log", "open_to_write"]

log = logging.getLogger(__name__)

#: While a log is not there yet, look this often (seconds).
_LOOK_FOR_LOG: Final = 0.02


class Opened(NamedTuple):
    """A log that this process may write to."""

    settings: Settings
    #: The segment that takes messages.
    file: QueueFile
    lock: WriterLock
    recovery: Recovery


def create_log(folder: Path, options: LogOptions, *, replace: bool) -> None:
    """Make a log without messages.

    :raises AlreadyExists: there is one, and `replace` is not set; or the directory is another's.
    :raises LockTimeout: it is to be replaced, and somebody writes to it.
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
    """Become the writer of a log; make the log if that is asked for.

    :param anew: what a log is made with that was removed under its writer
    :raises NotFound: there is none, and none is to be made.
    :raises LockTimeout: another process writes to it.
    :raises StorageError: there is no space, or no permission.
    """
    if options.create is Creation.NEVER:
        deadline = time.monotonic() + options.wait
        while not numbers_of(folder):
            if time.monotonic() >= deadline:
                raise NotFound(
                    f"there is no log at {folder}", hint=f"create it: penstock create log:{folder}"
                )
            time.sleep(_LOOK_FOR_LOG)
    return _open(folder, options, replace=options.create is Creation.ALWAYS, anew=anew)


def _open(
    folder: Path, options: LogOptions, *, replace: bool, anew: Settings | None = None
) -> Opened:
    _make_folder(folder, options.mode, sync=options.sync != "none")
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
        _make_held_cursors(folder, settings)
        undo.pop_all()
    if ended is not None:
        ended.close()
    return Opened(settings, file, lock, recovered.recovery)


def _make_folder(folder: Path, mode: int | None, *, sync: bool) -> None:
    """Make the directory; leave alone one that holds other things.

    Its files can be used by those who can use it: the owner alone, unless `mode` says more.

    :raises AlreadyExists: it does.
    """
    with storage_errors("creating", str(folder)):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if folder in missing:  # who may read it may also look into it
            folder.chmod(0o700 if mode is None else mode | (mode & 0o444) >> 2)
        for made in missing if sync else ():  # what is synced in it is to be found by its name
            sync_names(made.parent)
        names = {path.name for path in folder.iterdir() if not is_left_over(path.name)}
    if names and not names & {LOCK, SETTINGS, CURSORS, GROUPS} and not numbers_of(folder):
        raise AlreadyExists(
            f"the directory {folder} holds other things than a log",
            hint="a log needs a directory of its own",
        )


def _settings(
    folder: Path, options: LogOptions, *, sync: bool, anew: Settings | None = None
) -> Settings:
    """Return the properties of the log, with what this writer gives; of a new one if need be."""
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
    """Tell whether a segment is of this log, if any can be read.

    An old version of the log's own file, which a power failure can bring back, is no reason to put
    all segments aside.
    """
    readable = 0
    for number in reversed(numbers_of(folder)):
        with contextlib.suppress(DamagedQueue, NotFound):
            if look(folder, number).epoch in settings.epochs:
                return True
            readable += 1
    return not readable


def _replace(folder: Path, options: LogOptions, *, sync: bool) -> Settings:
    """Empty the log, and begin another in its place. Once that is noted down, it will be done."""
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
        mark(newest, State.REPLACED)  # those who sleep there find the new one now
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
    """Put together from the segments what the log's own file said."""
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
    """Map the newest segment that can be mapped."""
    for number in reversed(numbers_of(folder)):
        with contextlib.suppress(DamagedQueue, NotFound):
            return open_segment(folder, number, to_write=True)
    return None


def _remove_previous(folder: Path, settings: Settings) -> None:
    """Remove what is left of the log that was here before; the newest goes last."""
    previous, newest = settings.previous, _newest(folder)
    if newest is None:
        return
    is_previous = previous is not None and previous.had(newest.field("epoch"))
    newest.close()
    if is_previous:
        for number in numbers_of(folder):
            remove_segment(path_of(folder, number), State.REPLACED)


def _make_held_cursors(folder: Path, settings: Settings) -> None:
    """Make those that retention waits for: a reader that comes later starts where the log does."""
    if not settings.hold:
        return
    oldest = Places(folder).oldest()
    with CursorFile(str(folder / CURSORS)) as cursors:
        for name in settings.hold:
            cursors.reserve(name, epoch=settings.epoch, seq=oldest)
