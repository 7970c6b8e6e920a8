"""What is left of a log when its writer, or its machine, went down?"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.errors import DamagedQueue, NotFound
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.freeing import seal
from penstock.queue.log.retention import CURSORS
from penstock.queue.log.segments import numbers_of, open_segment, path_of
from penstock.queue.log.settings import SETTINGS
from penstock.queue.storage import storage_errors
from penstock.queue.wide.creation import boot_id
from penstock.queue.wide.layout import HEADER, PAGE, State, check_header, slots_of
from penstock.queue.wide.verification import first_bad

if TYPE_CHECKING:
    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Recovery", "recover", "set_aside"]

log = logging.getLogger(__name__)

#: Files that a writer was making when it died.
_UNFINISHED: Final = re.compile(
    rf"\.\d{{20}}\.fmq\.\d+(-[0-9a-f]+)?\.new|{re.escape(SETTINGS)}\.new"
)


@dataclass(slots=True)
class Recovery:
    """What a writer found when it opened a log, and what it did about it."""

    #: Messages that did not get to the disk, and were cut off.
    cut: int = 0
    #: Files that could not be used; they were given another name.
    set_aside: list[Path] = field(default_factory=list)
    #: The newest segment; None when there is none.
    newest: int | None = None
    #: Whether messages can be appended to it.
    is_open: bool = False
    #: Number of the next message. One that was given before the crash is not given again.
    next_seq: int = 0
    #: Whether its machine went down while it was written.
    after_crash: bool = False


def recover(folder: Path, settings: Settings) -> Recovery:
    """Make a log ready to go on. The caller is its writer.

    A process that dies leaves whole segments, though maybe two that take messages. A machine that
    does may have brought a header to the disk, and not yet all that it counts: then the messages
    from the first bad one on are cut off. What is sealed and was synced is not looked at.

    :raises StorageError: the operating system refuses.
    """
    found = Recovery()
    _remove_unfinished(folder)
    lost: list[int] = []
    for number in reversed(numbers_of(folder)):
        try:
            file = _open(folder, number, settings)
        except NotFound:
            continue
        except DamagedQueue as error:
            lost.append(number)
            _set_aside(folder, number, error, found)
            continue
        try:
            is_settled = _settle(file, found, is_newest=found.newest is None)
        finally:
            file.close()
        if found.newest is None:
            found.newest = number
        if is_settled:
            break
    for number in reversed(lost):
        # What was in it is not known: its numbers are passed over. One that is far off is garbage.
        if number <= found.next_seq or found.newest is None:
            found.next_seq = max(found.next_seq, number + settings.geometry.slots)
            found.is_open = False
    if lost or found.after_crash:
        _pass_cursors(folder, settings.epoch, found)
    return found


def _open(folder: Path, number: int, settings: Settings) -> QueueFile:
    """Map a segment; one that was cut short gets its size again."""
    path = path_of(folder, number)
    with storage_errors("opening", str(path)):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"there is no segment {path}") from None
        try:
            size, page = os.fstat(descriptor).st_size, os.pread(descriptor, PAGE, 0)
            geometry = check_header(str(path), page, 1 << 62)
            if size < geometry.file_size:
                log.warning("%s has %s bytes of %s", path, f"{size:,}", f"{geometry.file_size:,}")
                os.ftruncate(descriptor, geometry.file_size)
                _forget_boot(descriptor)
        finally:
            os.close(descriptor)
    file = open_segment(folder, number, to_write=True)
    if file.field("epoch") != settings.epoch:
        found = file.field("epoch")
        file.close()
        hint = "it is of another log"
        raise DamagedQueue(str(path), "epoch", 16, settings.epoch, found, hint=hint)
    return file


def _forget_boot(descriptor: int) -> None:
    """Let a segment be looked at, whenever it was written."""
    assert HEADER.fields is not None
    os.pwrite(descriptor, b"\xff" * 16, HEADER.fields["boot_id"][1])


def _settle(file: QueueFile, found: Recovery, *, is_newest: bool) -> bool:
    """Check a segment as far as it may not be right; tell whether those before it need none."""
    boot, written = boot_id(), bytes(file.header["boot_id"][0])
    is_sealed = file.field("state") != State.LIVE
    if is_sealed and not any(written):
        if is_newest:
            found.next_seq = file.field("head")
        return True
    head = file.field("head")
    if written != boot or not _last_is_sane(file):
        found.after_crash = True
        if (bad := first_bad(file)) is not None:
            _cut(file, bad, found)
    is_open = is_newest and not is_sealed and file.field("head") == head
    if is_open:
        file.header["boot_id"] = np.void(boot.ljust(16, b"\0"))
    else:
        seal(file)
        with storage_errors("syncing", file.path):
            os.fdatasync(file.descriptor)
        file.header["boot_id"] = np.void(bytes(16))
    if is_newest:
        found.is_open, found.next_seq = is_open, head
    return False


def _last_is_sane(file: QueueFile) -> bool:
    head = file.field("head")
    slots = slots_of(file.mapping, file.geometry)
    return head == file.field("tail") or int(slots[(head - 1) % len(slots)]["seq"]) == head - 1


def _cut(file: QueueFile, bad: int, found: Recovery) -> None:
    lost = file.field("head") - bad
    log.warning(
        "%s: the last %s messages, from %s on, did not get to the disk", file.path, f"{lost:,}", bad
    )
    if first_bad(file, file.field("head") - 1) is None:
        # Not the end is bad. What comes behind the bad one cannot stay, but somebody may want it.
        copy = _free_name(Path(file.path), "torn")
        with storage_errors("copying", file.path):
            shutil.copyfile(file.path, copy)
        log.warning("the last of them is whole; the segment as it was: %s", copy)
        found.set_aside.append(copy)
    found.cut += lost
    file.header["head"] = bad


def _set_aside(folder: Path, number: int, error: DamagedQueue, found: Recovery) -> None:
    path = set_aside(path_of(folder, number))
    log.warning("%s; it was put aside as %s", error, path)
    found.set_aside.append(path)


def set_aside(path: Path) -> Path:
    """Give a file that cannot be used another name, and return that."""
    with storage_errors("renaming", str(path)):
        return path.rename(_free_name(path, "damaged"))


def _free_name(path: Path, what: str) -> Path:
    names = (path.with_name(f"{path.name}.{what}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _remove_unfinished(folder: Path) -> None:
    with storage_errors("looking at", str(folder)):
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _pass_cursors(folder: Path, epoch: int, found: Recovery) -> None:
    """Give no number to a message that a reader has passed already."""
    path = folder / CURSORS
    if not path.exists():
        return
    with CursorFile(str(path)) as cursors:
        passed = [entry.seq for entry in cursors.entries() if entry.epoch == epoch]
    if max(passed, default=0) > found.next_seq:
        found.next_seq = max(passed)
        found.is_open = False
