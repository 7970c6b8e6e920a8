"""How is a log recovered and checked after its writer or its machine crashed?"""

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

from penstock.core.errors import CursorInUse, DamagedQueue, NotFound
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.info import list_segments
from penstock.queue.log.retention import CLOCK, CURSORS
from penstock.queue.log.segments import (
    look,
    numbers_of,
    open_segment,
    path_of,
    seal,
    slot_at,
)
from penstock.queue.log.settings import SETTINGS, save_settings
from penstock.queue.storage import storage_errors
from penstock.queue.wide.file import Header, QueueFile, boot_id, check_header
from penstock.queue.wide.layout import HEADER, PAGE, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.queue.log.info import Listed
    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.file import Geometry

__all__ = [
    "Checked",
    "Recovered",
    "Recovery",
    "check_log",
    "is_left_over",
    "is_unsettled",
    "recover",
    "remove_unfinished",
    "set_aside",
]

log = logging.getLogger(__name__)

#: Temporary files of a writer that died.
_UNFINISHED: Final = re.compile(
    rf"\.\d{{20}}\.fmq\.\d+(-[0-9a-f]+)?\.new|{re.escape(SETTINGS)}(\.\d+-[0-9a-f]+)?\.new"
)
#: Temporary cursor files, clock files, and files that were set aside.
_LEFT: Final = re.compile(rf"{CURSORS}\.\d+-[0-9a-f]+\.new|{CLOCK}(\.new)?|.+\.(damaged|torn)-\d+")


@dataclass(slots=True)
class Recovery:
    """Result of recovery when a writer opened a log."""

    #: Messages that did not reach the disk, and were cut off.
    cut: int = 0
    #: Unusable files, which were renamed.
    set_aside: list[Path] = field(default_factory=list)
    #: Number of the next message. Numbers counted on disk before the crash are not reused.
    next_seq: int = 0
    #: Whether the machine crashed while the log was written: then a new epoch started.
    after_crash: bool = False


class Recovered(NamedTuple):
    """A log that is ready to be written."""

    recovery: Recovery
    settings: Settings
    #: The live segment; None: the caller creates one that starts at `next_seq`.
    file: QueueFile | None
    #: The segment before it, to be sealed once the live one exists.
    ended: QueueFile | None


def recover(folder: Path, settings: Settings) -> Recovered:
    """Recover a log for writing. The caller is its writer.

    A process crash leaves complete segments, though possibly two live ones. After a machine crash
    the disk may have a header without all messages that it counts: the messages from the first bad
    one on are cut off. Readers may also have seen messages that never reached the disk: so numbers
    from there on belong to a new epoch. Segments that are sealed and synced are not checked.

    The new epoch is on disk before any segment is changed, so that a crash during recovery leaves
    the next writer all that it needs.

    :raises StorageError: the operating system reports an error.
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
    """Tell whether a file is left over from a crash of a log's writer or machine."""
    return bool(_UNFINISHED.fullmatch(name) or _LEFT.fullmatch(name))


def is_unsettled(folder: Path) -> bool:
    """Tell whether the machine crashed, and no writer has recovered the log since."""
    for number in reversed(numbers_of(folder)):
        with contextlib.suppress(NotFound):
            try:
                file = open_segment(folder, number)
            except DamagedQueue:
                return True
            boot = file.header.boot_id
            file.close()
            return any(boot) and boot != _boot()
    return False


def _unsettled(
    folder: Path, settings: Settings, found: Recovery, undo: contextlib.ExitStack
) -> list[QueueFile]:
    """Map the newest segment and all others that need a check; set unreadable ones aside."""
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
            if not is_settled:  # a damaged older segment stays as it is
                lost.append(number)
                _set_aside(folder, number, error, found)
            continue
        undo.callback(file.close)
        boot, is_sealed = file.header.boot_id, file.field("state") != State.LIVE
        is_safe = is_sealed and not any(boot)
        if not files:
            found.next_seq = file.field("head")
            # A sealed newest segment had a successor, which is gone. So had one of an earlier
            # epoch, unless a recovery was interrupted.
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
    """Skip all numbers that a lost segment may have used."""
    for number in reversed(lost):
        if number <= found.next_seq or is_all:  # otherwise its name is garbage
            found.next_seq = max(found.next_seq, number + settings.geometry.slots)
            found.after_crash = True


def _is_live(path: Path) -> bool:
    """Tell whether the header of a segment says LIVE, without mapping it."""
    with storage_errors("looking at", str(path)):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            page = os.pread(descriptor, PAGE, 0)
        finally:
            os.close(descriptor)
    return len(page) == PAGE and Header(page).state == State.LIVE


def _is_open(file: QueueFile, settings: Settings, next_seq: int) -> bool:
    """Tell whether the newest segment can be appended to as it is."""
    return (
        file.field("state") == State.LIVE
        and file.field("epoch") == settings.epoch
        and file.field("head") == next_seq
        and _last_is_sane(file)
    )


def _boot() -> bytes:
    return boot_id().ljust(16, b"\0")


def _begin_boot(file: QueueFile) -> None:
    """Store the boot id in a segment before it is written.

    :raises StorageError: the sync fails.
    """
    is_clean = not any(file.header.boot_id)
    file.header.boot_id = _boot()
    if is_clean:  # otherwise it would look clean after a power failure
        with storage_errors("syncing", file.path):
            os.fdatasync(file.descriptor)


def _open(folder: Path, number: int, settings: Settings) -> QueueFile:
    """Map a segment; extend a truncated one to its full size."""
    path = path_of(folder, number)
    with storage_errors("opening", str(path)):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"there is no segment {path}") from None
        try:
            size, page = os.fstat(descriptor).st_size, os.pread(descriptor, PAGE, 0)
            geometry = check_header(str(path), page, 1 << 62)
            _restore_tail(path, number, descriptor, Header(page), geometry)
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


def _restore_tail(
    path: Path, first: int, descriptor: int, header: Header, geometry: Geometry
) -> None:
    """Let a segment begin at its first message, whatever its tail says.

    Messages are removed all at once, and their slots with them.
    """
    tail, head = header["tail"], header["head"]
    if tail == first or header["first_seq"] != first:
        return
    if tail == head and slot_at(descriptor, geometry, head - 1).seq != head - 1:
        return  # it has none
    log.warning("%s: its tail was %s, and is %s again", path, tail, first)
    os.pwrite(descriptor, first.to_bytes(8, "little"), HEADER.fields["tail"].offset)


def _forget_boot(descriptor: int) -> None:
    """Invalidate the boot id of a segment, so that it is checked."""
    os.pwrite(descriptor, b"\xff" * 16, HEADER.fields["boot_id"].offset)


def _settle(file: QueueFile, found: Recovery) -> None:
    """Cut off bad messages of a segment that is complete, and sync it.

    :raises StorageError: the sync fails.
    """
    boot = file.header.boot_id
    if file.field("state") != State.LIVE and not any(boot):
        return
    is_old = boot != _boot() or not _last_is_sane(file)
    from penstock.queue.wide.recovery import first_bad  # noqa: PLC0415 - loads numpy

    if is_old and (bad := first_bad(file)) is not None:
        _cut(file, bad, found)
    with storage_errors("syncing", file.path):
        os.fdatasync(file.descriptor)
    file.header.boot_id = bytes(16)


def _last_is_sane(file: QueueFile) -> bool:
    head = file.field("head")
    return head == file.field("tail") or file.slot(head - 1).seq == head - 1


def _cut(file: QueueFile, bad: int, found: Recovery) -> None:
    lost = file.field("head") - bad
    log.warning(
        "%s: the last %s messages, from %s on, did not get to the disk", file.path, f"{lost:,}", bad
    )
    from penstock.queue.wide.recovery import whole_runs  # noqa: PLC0415 - loads numpy

    if any(run.start >= bad for run in whole_runs(file)):
        # Good messages follow the bad one. They cannot stay: keep a copy of the segment.
        copy = _free_name(Path(file.path), "torn")
        with storage_errors("copying", file.path):
            shutil.copyfile(file.path, copy)
        log.warning("some of them are whole; the segment as it was: %s", copy)
        found.set_aside.append(copy)
    found.cut += lost
    file.header["head_check"] = 0
    file.header["head"] = bad


def _set_aside(folder: Path, number: int, error: DamagedQueue, found: Recovery) -> None:
    path = set_aside(path_of(folder, number))
    log.warning("%s; it was put aside as %s", error, path)
    found.set_aside.append(path)


def set_aside(path: Path) -> Path:
    """Rename an unusable file, and return its new path."""
    with storage_errors("renaming", str(path)):
        return path.rename(_free_name(path, "damaged"))


def _free_name(path: Path, what: str) -> Path:
    names = (path.with_name(f"{path.name}.{what}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files of a writer that died. The caller is the writer.

    :raises StorageError: the operating system reports an error.
    """
    with storage_errors("looking at", str(folder)):
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _move_cursors(folder: Path, settings: Settings) -> None:
    """Move unowned cursors to the new epoch, none of them beyond its start.

    A cursor with a live owner is moved by its owner.
    """
    path = folder / CURSORS
    if not path.exists():
        return
    with CursorFile(str(path)) as cursors:
        for entry in cursors.entries():
            seq = settings.successor(entry.epoch, entry.seq)
            if entry.name and not entry.alive and seq is not None:
                with (
                    contextlib.suppress(CursorInUse, DamagedQueue),  # the next claim raises it
                    cursors.claim(entry.name) as cursor,
                ):
                    cursor.move(seq, settings.epoch)
        cursors.sync()


# --- every message --------------------------------------------------------------------------------


class Checked(NamedTuple):
    """Result of the check of a segment."""

    path: Path
    #: Number of its first message.
    first: int
    #: Messages in it.
    messages: int
    #: Bytes that they use.
    bytes: int
    #: Descriptions of faults; empty if the segment is intact.
    faults: tuple[str, ...]


def check_log(folder: Path) -> Iterator[Checked]:
    """Check every segment, the oldest first. Safe while the log is written and read.

    :raises NotFound: there is no log at this path.
    """
    end: int | None = None
    every = list_segments(folder)
    filled = [one.first for one in every if one.segment is not None and one.segment.count]
    last = max(filled, default=0)
    for listed in every:
        faults = []
        if listed.first < last and listed.state == "live" and _takes_messages(folder, listed.first):
            faults.append("it takes messages, and is not the newest: the next writer seals it")
        if end is not None and listed.first > end:
            faults.append(f"messages {end} to {listed.first - 1} are missing before it")
        if end is not None and listed.first < end:
            faults.append(f"it begins with message {listed.first}, which was in the one before")
        checked = _check(listed)
        if checked is None:
            continue  # retention removed it
        faults += checked.faults
        end = None if listed.segment is None else listed.segment.head
        yield checked._replace(faults=tuple(faults))


def _takes_messages(folder: Path, first: int) -> bool:
    """Tell whether the segment is still live: the writer may have sealed it meanwhile."""
    with contextlib.suppress(NotFound, DamagedQueue):
        return look(folder, first).state == State.LIVE
    return False


def _check(listed: Listed) -> Checked | None:
    segment = listed.segment
    if segment is None:
        return Checked(listed.path, listed.first, 0, 0, (str(listed.damage),))
    faults: tuple[str, ...] = ()
    try:
        file = QueueFile.open_to_read(str(listed.path))
    except NotFound:
        return None
    except DamagedQueue as error:
        return Checked(listed.path, listed.first, 0, 0, (str(error),))
    try:
        from penstock.queue.wide.recovery import first_bad  # noqa: PLC0415 - as above

        bad = first_bad(file)
        if bad is not None and bad >= file.field("tail"):
            faults = (f"message {bad} is not as its writer made it",)
    finally:
        file.close()
    return Checked(listed.path, listed.first, segment.count, segment.used, faults)
