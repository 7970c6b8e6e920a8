"""Which queues and logs are in a folder, who uses one, and how is it removed?"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import InUse
from penstock.core.errors import DamagedQueue, StorageError
from penstock.core.url import escaped
from penstock.queue.classic import sysv
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.log.info import is_set_aside
from penstock.queue.log.recovery import is_left_over
from penstock.queue.log.retention import CLOCK, CURSORS, GROUPS
from penstock.queue.log.segments import is_log, numbers_of, path_of, remove_segment
from penstock.queue.log.settings import SETTINGS
from penstock.queue.log.writer_lock import LOCK, WriterLock
from penstock.queue.notes import NoteFile
from penstock.queue.storage import LockFile, storage_errors
from penstock.queue.wide.creation import busy_error
from penstock.queue.wide.file import SUFFIX, QueueFile, file_of, groups_of, mark
from penstock.queue.wide.layout import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.interfaces import StreamInfo

__all__ = [
    "check_removable",
    "check_unused",
    "remove_classic",
    "remove_log",
    "remove_wide",
    "streams_in",
    "users_of",
]


log = logging.getLogger(__name__)

#: Files of a log other than its segments.
_OF_LOGS: Final = frozenset((LOCK, SETTINGS, CURSORS, CLOCK))


def streams_in(
    folder: str,
    pattern: str = "*",
    *,
    recursive: bool = False,
    is_store: Callable[[Path], bool] = lambda _: False,
) -> Iterator[str]:
    """Yield the URLs of the queues and logs in a folder, sorted by name.

    :param pattern: shell pattern of the names
    :param is_store: directories that are one thing, whatever queues are in them; their paths are
        yielded
    :raises StorageError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise StorageError("looking at", folder, error) from error
    below = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = entry.name.removesuffix(SUFFIX).removesuffix(".stat")
        is_asked = fnmatch.fnmatchcase(name, pattern)
        if entry.is_dir():
            is_log = _is_log(entry.path)
            if not is_log and not is_store(Path(entry.path)):
                below.append(entry)
            elif is_asked:
                yield f"log:{escaped(entry.path)}" if is_log else entry.path
        elif is_asked and entry.name.endswith((SUFFIX, ".stat")):
            yield f"fmq:{escaped(entry.path.removesuffix(SUFFIX).removesuffix('.stat'))}"
    for entry in below if recursive else ():
        if not entry.is_symlink() and not entry.name.endswith(f"{SUFFIX}.groups"):
            with contextlib.suppress(StorageError):  # no permission
                yield from streams_in(entry.path, pattern, recursive=True, is_store=is_store)


def _is_log(folder: str) -> bool:
    """Tell whether a directory is a log; one that may not be looked into is none."""
    try:
        return is_log(Path(folder))
    except OSError:
        return False


# --- users ----------------------------------------------------------------------------------------


def users_of(found: StreamInfo) -> list[str]:
    """Describe the processes that write or read a stream."""
    details = found.details
    users = []
    if details.get("writer_pid"):
        users.append(f"process {details['writer_pid']} writes")
    elif details.get("has_writer"):  # one of many, whose pid is not known
        users.append("a process writes")
    for reader in (*details.get("readers", ()), *details.get("cursors", ())):
        if reader["alive"]:
            name = f" as {reader['name']}" if reader["name"] else ""
            users.append(f"process {reader['pid']} reads{name}")
    for group in details.get("groups", ()):
        users += [
            f"process {member['pid']} reads in the group {group['name']}"
            for member in group.get("members", ())
            if member["alive"]
        ]
    return users


def check_unused(found: StreamInfo) -> None:
    """Check that no process has a stream open.

    :raises InUse: a process has it open.
    """
    if users := users_of(found):
        raise InUse(found.url, users)


def check_removable(describe: Callable[[], StreamInfo], *, force: bool) -> None:
    """Check that a stream exists, and without `force` that no process has it open.

    :raises InUse: a process has it open.
    :raises DamagedQueue: nobody can tell who uses it.
    """
    try:
        found = describe()
    except DamagedQueue:
        if not force:
            raise
    else:
        if not force:
            check_unused(found)


# --- removal --------------------------------------------------------------------------------------


def remove_wide(path: str, *, force: bool) -> None:
    """Remove a wide queue; with `force` even under its writer, which notices within a second.

    :raises LockTimeout: a process writes to the queue, without `force`.
    """
    try:
        file = QueueFile.open(path, writable=True)
    except DamagedQueue:
        if not force:
            raise
        with storage_errors("removing", file_of(path)):
            Path(file_of(path)).unlink()
    else:
        with contextlib.closing(file), contextlib.closing(LockFile(file.descriptor)) as locks:
            # Keeps new writers out; an existing one stays.
            if not locks.try_lock(*file.writer_locks) and not force:
                raise busy_error(path, file, "end it first, or force it")
            with storage_errors("removing", file.path):
                Path(file.path).unlink()
                mark(file, State.REPLACED)
    shutil.rmtree(groups_of(path), ignore_errors=True)
    NoteFile.beside(file_of(path)).path.unlink(missing_ok=True)


def remove_classic(path: str) -> None:
    """Remove a classic queue, in files or in shared memory."""
    key = shared_memory_key(path)
    with storage_errors("removing", path):
        if key is not None:
            for part in (key, key + 1):
                if (id := sysv.find(part)) is not None:
                    sysv.remove(id)
        for suffix in (".stat", ".buf") if key is None else (".lock",):
            Path(path + suffix).unlink(missing_ok=True)
    NoteFile.beside(f"{path}{SUFFIX}").path.unlink(missing_ok=True)


def remove_log(folder: Path, *, force: bool) -> None:
    """Remove a log and its folder; with `force` even under its writer, which notices.

    :raises LockTimeout: a process writes to the log, without `force`.
    """
    with contextlib.ExitStack() as stack:
        if not force:
            stack.callback(WriterLock(folder, 0.0).close)
        for number in reversed(numbers_of(folder)):
            remove_segment(path_of(folder, number))
        with storage_errors("removing", str(folder)):
            for path in list(folder.iterdir()):
                if path.name == GROUPS:
                    shutil.rmtree(path)
                elif path.name in _OF_LOGS or is_left_over(path.name) or is_set_aside(path.name):
                    path.unlink(missing_ok=True)
            try:
                folder.rmdir()
            except OSError:
                log.warning("%s holds other things than a log, and stays", folder)
    NoteFile.beside(str(folder)).path.unlink(missing_ok=True)
