"""What is left of a log when its writer, or its machine, went down?"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.core.errors import CursorInUse, DamagedQueue, NotFound
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.freeing import seal
from penstock.queue.log.retention import CLOCK, CURSORS
from penstock.queue.log.segments import numbers_of, open_segment, path_of
from penstock.queue.log.settings import SETTINGS, save_settings
from penstock.queue.storage import storage_errors
from penstock.queue.wide.creation import boot_id
from penstock.queue.wide.layout import HEADER, PAGE, State, check_header, slots_of, state_of
from penstock.queue.wide.verification import first_bad

if TYPE_CHECKING:
    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.queue_file import QueueFile

__all__ = [
    "Recovered",
    "Recovery",
    "is_left_over",
    "is_unsettled",
    "recover",
    "remove_unfinished",
    "set_aside",
]

log = logging.getLogger(__name__)

#: Files that a writer was making when it died.
_UNFINISHED: Final = re.compile(
    rf"\.\d{{20}}\.fmq\.\d+(-[0-9a-f]+)?\.new|{re.escape(SETTINGS)}(\.\d+-[0-9a-f]+)?\.new"
)
#: What a reader made, what a clock was, and what was put aside.
_LEFT: Final = re.compile(rf"{CURSORS}\.\d+-[0-9a-f]+\.new|{CLOCK}(\.new)?|.+\.(damaged|torn)-\d+")


@dataclass(slots=True)
class Recovery:
    """What a writer found when it opened a log, and what it did about it."""

    #: Messages that did not get to the disk, and were cut off.
    cut: int = 0
    #: Files that could not be used; they were given another name.
    set_aside: list[Path] = field(default_factory=list)
    #: Number of the next message. One that was given before the crash is not given again.
    next_seq: int = 0
    #: Whether its machine went down while it was written: then a new epoch began.
    after_crash: bool = False


class Recovered(NamedTuple):
    """A log that is ready to go on."""

    recovery: Recovery
    settings: Settings
    #: The segment that takes messages; None: one is to be made that begins with the next message.
    file: QueueFile | None
    #: One that takes no more, to be sealed when that one is there.
    ended: QueueFile | None


def recover(folder: Path, settings: Settings) -> Recovered:
    """Make a log ready to go on. The caller is its writer.

    A process that dies leaves whole segments, though maybe two that take messages. A machine that
    does may have brought a header to the disk, and not yet all that it counts: then the messages
    from the first bad one on are cut off. It may also have shown messages to a reader that it did
    not bring to the disk, so that nobody knows of them any more: the numbers from there on are
    given in a new epoch. What is sealed and was synced is not looked at.

    Nothing is settled before the new epoch is on the disk: whoever dies in between leaves all that
    the next one needs to see.

    :raises StorageError: the operating system refuses.
    """
    found = Recovery()
    with contextlib.ExitStack() as undo:
        files = _unsettled(folder, settings, found, undo)
        newest = files[0] if files else None
        found.next_seq = max(found.next_seq, *(a.end for a in settings.lineage), 0)
        if found.after_crash:
            settings = settings.cut_at(found.next_seq)
            save_settings(folder, settings, sync=True)
            log.warning(
                "%s: its machine went down while it was written; a new epoch begins at %s",
                folder,
                found.next_seq,
            )
        for file in files[1:]:
            _settle(file, found)
            seal(file)
        if found.after_crash:
            _move_cursors(folder, settings)
        is_open = newest is not None and _is_open(newest, settings, found.next_seq)
        if newest is not None and is_open:
            _begin_boot(newest)
        elif newest is not None:
            _settle(newest, found)
        undo.pop_all()
    for file in files[1:]:
        file.close()
    return Recovered(found, settings, *((newest, None) if is_open else (None, newest)))


def is_left_over(name: str) -> bool:
    """Tell whether a file is what a log leaves behind when its machine goes down."""
    return bool(_UNFINISHED.fullmatch(name) or _LEFT.fullmatch(name))


def is_unsettled(folder: Path) -> bool:
    """Tell whether the machine of a log went down, and no writer has looked after it since."""
    for number in reversed(numbers_of(folder)):
        with contextlib.suppress(NotFound):
            try:
                file = open_segment(folder, number)
            except DamagedQueue:
                return True
            boot = bytes(file.header["boot_id"][0])
            file.close()
            return any(boot) and boot != _boot()
    return False


def _unsettled(
    folder: Path, settings: Settings, found: Recovery, undo: contextlib.ExitStack
) -> list[QueueFile]:
    """Map the newest segment, and all others that may not be right; put aside what is none."""
    files: list[QueueFile] = []
    lost: list[int] = []
    is_settled = False
    for number in reversed(numbers_of(folder)):
        if is_settled and not _is_live(path_of(folder, number)):
            continue
        try:
            file = _open(folder, number, settings)
        except NotFound:
            continue
        except DamagedQueue as error:
            if not is_settled:  # one in the middle is left as it is
                lost.append(number)
                _set_aside(folder, number, error, found)
            continue
        undo.callback(file.close)
        boot, is_sealed = bytes(file.header["boot_id"][0]), file.field("state") != State.LIVE
        is_safe = is_sealed and not any(boot)
        if not files:
            found.next_seq = file.field("head")
            # A newest one that is sealed had another behind it, which is gone. So had one of an
            # earlier epoch, unless somebody died in a recovery.
            found.after_crash = is_sealed or file.field("epoch") != settings.epoch
        elif is_safe:
            file.close()
            is_settled = True
            continue
        files.append(file)
        if not is_settled and any(boot) and boot != _boot():
            found.after_crash = True
        is_settled = is_settled or is_safe
    _pass_over(lost, settings, found, is_all=not files)
    return files


def _pass_over(lost: list[int], settings: Settings, found: Recovery, *, is_all: bool) -> None:
    """Give no number that may have been in a segment of which nothing is known."""
    for number in reversed(lost):
        if number <= found.next_seq or is_all:  # or it is far off, and garbage
            found.next_seq = max(found.next_seq, number + settings.geometry.slots)
            found.after_crash = True


def _is_live(path: Path) -> bool:
    """Tell whether a segment says that it takes messages, without mapping it."""
    with storage_errors("looking at", str(path)):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            page = os.pread(descriptor, PAGE, 0)
        finally:
            os.close(descriptor)
    return len(page) == PAGE and state_of(np.frombuffer(page, HEADER, 1)) == State.LIVE


def _is_open(file: QueueFile, settings: Settings, next_seq: int) -> bool:
    """Tell whether messages can be appended to the newest segment as it is."""
    return (
        file.field("state") == State.LIVE
        and file.field("epoch") == settings.epoch
        and file.field("head") == next_seq
        and _last_is_sane(file)
    )


def _boot() -> bytes:
    return boot_id().ljust(16, b"\0")


def _begin_boot(file: QueueFile) -> None:
    """Say in a segment which run of the machine writes it, before a message does.

    :raises StorageError: the device refuses.
    """
    is_clean = not any(bytes(file.header["boot_id"][0]))
    file.header["boot_id"] = np.void(_boot())
    if is_clean:  # otherwise it would look as clean after a power failure
        with storage_errors("syncing", file.path):
            os.fdatasync(file.descriptor)


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
    if file.field("epoch") not in settings.epochs:
        found = file.field("epoch")
        file.close()
        hint = "it is of another log"
        raise DamagedQueue(str(path), "epoch", 16, settings.epoch, found, hint=hint)
    return file


def _forget_boot(descriptor: int) -> None:
    """Let a segment be looked at, whenever it was written."""
    assert HEADER.fields is not None
    os.pwrite(descriptor, b"\xff" * 16, HEADER.fields["boot_id"][1])


def _settle(file: QueueFile, found: Recovery) -> None:
    """Cut off what is not right in a segment that gets no more messages, and bring it to the disk.

    :raises StorageError: the device refuses.
    """
    boot = bytes(file.header["boot_id"][0])
    if file.field("state") != State.LIVE and not any(boot):
        return
    is_old = boot != _boot() or not _last_is_sane(file)
    if is_old and (bad := first_bad(file)) is not None:
        _cut(file, bad, found)
    with storage_errors("syncing", file.path):
        os.fdatasync(file.descriptor)
    file.header["boot_id"] = np.void(bytes(16))


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


def remove_unfinished(folder: Path) -> None:
    """Remove what a writer was making when it died. The caller is the writer now.

    :raises StorageError: the operating system refuses.
    """
    with storage_errors("looking at", str(folder)):
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _move_cursors(folder: Path, settings: Settings) -> None:
    """Let the cursors of readers go on in the new epoch, none of them beyond its beginning.

    One that somebody owns now is his to move.
    """
    path = folder / CURSORS
    if not path.exists():
        return
    with CursorFile(str(path)) as cursors:
        for entry in cursors.entries():
            seq = settings.successor(entry.epoch, entry.seq)
            if entry.name and not entry.alive and seq is not None:
                with (
                    contextlib.suppress(CursorInUse, DamagedQueue),  # whoever claims it is told
                    cursors.claim(entry.name) as cursor,
                ):
                    cursor.move(seq, settings.epoch)
        cursors.sync()
