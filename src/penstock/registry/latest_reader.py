"""What is new in a directory's latest_data_info?

LROSE's order and rules (docs/specs/lrose.md 3.5): the queue, then the XML file, then the ASCII
file. Unlike LROSE's, this reader does not remove what it cannot read, and tells apart two updates
within one second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import DamagedQueue, Malformed, NotFound, PenstockError
from penstock.core.position import Position
from penstock.protocols.lrose.ldata_format import (
    LARGEST_FILE,
    decode_ascii,
    decode_body,
    decode_xml,
)
from penstock.queue.classic.layout import ID_COUNT, id_distance
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.watch import Sleeper
from penstock.registry.latest_files import relative_path, stands_behind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.core.message import Message
    from penstock.protocols.lrose.ldata_format import LatestInfo
    from penstock.registry.latest_files import InfoFiles, LatestSettings, SavedPlace

__all__ = ["InfoReader", "LatestStatistics"]

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000_000
#: Seconds between two looks for other files while no entry arrives.
_LONGEST_WAIT: Final = 0.5
#: Most nanoseconds between a writer's ASCII and XML files.
_BETWEEN_FILES: Final = 200_000_000
#: Least seconds between two wakes: other files may be written all the time.
_AFTER_WAKE: Final = 0.005


class LatestStatistics(NamedTuple):
    """Counters of a reader. Every entry of the queue was delivered, unreadable or lost."""

    #: Entries delivered for the first time.
    entries: int
    #: Entries delivered again by a forced read.
    repeated: int
    #: Entries of the queue, and files, that do not follow their format.
    unreadable: int
    #: Entries overwritten before this reader reached them.
    lost: int
    #: How often the queue was recreated while it was read.
    restarts: int


class InfoReader:
    """Reads the files of one directory. Not safe to share between threads."""

    def __init__(
        self,
        files: InfoFiles,
        settings: LatestSettings,
        saved: SavedPlace | None = None,
        *,
        saved_max_age: float | None = None,
        saves_at_once: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start at the saved place, if there is one.

        :param saves_at_once: save the place of each entry as it is returned; otherwise
            `save_place` does
        """
        self._files = files
        self._settings = settings
        self._saved = saved
        self._saved_max_age = saved_max_age
        self._saves_at_once = saves_at_once
        #: The id and the content of the last entry returned, until its place is saved.
        self._unsaved: tuple[int, LatestInfo] | None = None
        self._clock = clock
        self._queue: ClassicReader | None = None
        #: The queue was too old when it was opened, and has had no entry since: files may be
        #: newer.
        self._is_stale = False
        #: The queue was unreadable at the last look.
        self._is_damaged = False
        #: There was no queue at the last look: all entries of a later one are new.
        self._saw_no_queue = False
        #: The last entry of the files, until the queue delivers one: the queue has it, too.
        self._told_by_file: LatestInfo | None = None
        self._sleeper = Sleeper()
        #: How each file looked when it was read last.
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._last: LatestInfo | None = None
        #: Seconds since 1970 when what was read last had been written.
        self.prev_mod_time = 0
        self._entries = self._repeated = self._unreadable = 0
        #: Counts of closed queues, and entries lost before a queue was opened.
        self._lost = self._restarts = 0

    def use(self, settings: LatestSettings) -> None:
        """Use other forms of the same files from now on; the position stays."""
        self._settings = settings
        if not settings.use_fmq:
            self._close_queue()

    @property
    def is_open(self) -> bool:
        """Whether the queue is open, so that `read` can wait by itself."""
        return self._queue is not None and not self._is_stale

    # --- reading ----------------------------------------------------------------------------

    def read(
        self, max_age: float | None, *, from_start: bool, forced: bool = False, wait: float = 0
    ) -> LatestInfo | None:
        """Return the next new entry, or None. `forced`: return the last entry even if not new.

        :raises StorageError: the operating system refuses.
        """
        has_queue = self._settings.use_fmq and self._files.has_queue()
        if not has_queue:
            self._close_queue()
            self._saw_no_queue = True
        elif self.is_open or not forced:
            queue = self._open_queue(max_age, from_start)
            if queue is not None:
                try:
                    info = self._read_queue(queue, 0 if self._is_stale else wait, forced=forced)
                except DamagedQueue as damage:
                    self._tell_of(damage)
                else:
                    self._is_damaged = False
                    if info is not None or not self._is_stale:
                        return info
        forms: tuple[tuple[bool, Path, Callable[[bytes], LatestInfo]], ...] = (
            (self._settings.use_xml, self._files.xml, decode_xml),
            (self._settings.use_ascii, self._files.ascii, decode_ascii),
        )
        for is_on, path, decode in forms:
            if is_on and not self._is_being_written(path):
                with contextlib.suppress(_NotThere):
                    return self._read_file(path, decode, max_age, forced=forced)
        return None

    def wait(self, seconds: float) -> None:
        """Sleep until a write to the directory, or the timeout."""
        seconds = min(seconds, _LONGEST_WAIT)
        try:
            folder = os.open(self._files.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            time.sleep(min(seconds, self._sleeper.longest_pause))
            return
        try:
            before = self._marks()
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0 and self._marks() == before:
                pause = min(left, self._sleeper.longest_pause)
                self._sleeper.sleep(folder, pause, lambda: self._marks() == before)
                self._sleeper.stop_watching()  # and forget what it has seen
                time.sleep(min(left, _AFTER_WAKE))
        finally:
            os.close(folder)

    def _marks(self) -> list[tuple[int, int, int] | None]:
        files = self._files
        return [_mark(path) for path in (files.stat, files.xml, files.ascii)]

    # --- the queue --------------------------------------------------------------------------

    def _open_queue(self, max_age: float | None, from_start: bool) -> ClassicReader | None:
        """Return the queue; None: it cannot be opened, so the files are used."""
        if self._queue is not None:
            return self._queue
        if not self._files.has_whole_queue():
            self._saw_no_queue = True
            return None
        path = self._files.queue
        try:
            # First to the end: entries written during the check of its age are not skipped.
            queue = ClassicReader(f"fmq:{path}", path, Position.END, ClassicOptions(damaged="skip"))
        except NotFound:
            return None
        except PenstockError as error:
            log.warning("%s; looking at the files instead", error)
            return None
        try:
            is_at_place = self._find_place(queue, max_age, from_start)
        except BaseException:
            queue.close()
            raise
        if not is_at_place:
            queue.close()
            return None
        self._queue = queue
        return queue

    def _find_place(self, queue: ClassicReader, max_age: float | None, from_start: bool) -> bool:
        """Move the queue to the start of reading; False: it is too old to be read."""
        kept = None
        if self._saved is not None:
            kept = self._saved.load(self._clock, self._saved_max_age)
        self._is_stale = (
            max_age is not None
            and max_age >= 0
            and not self._saw_no_queue
            and self._age(self._files.stat) > max_age
        )
        if self._is_stale:
            # Entries from before its end are wanted, once there is a fresh one behind them.
            return kept is None and not from_start
        if kept is not None:
            self._resume(queue, *kept)
        else:
            is_all_new = from_start or self._saw_no_queue
            queue.seek(Position.START if is_all_new else Position.LAST)
        return True

    def _resume(self, queue: ClassicReader, id: int, valid_time: int) -> None:
        """Move after the last entry read, or to the next one that the queue still has."""
        if stands_behind(queue, id, valid_time):
            return
        # LROSE would go to the newest one. None of these entries was read before.
        bounds = queue.bounds()
        gone = id_distance(bounds.oldest % ID_COUNT, id) - 1
        queue.seek(Position.START)
        if gone >= 0 and bounds.end > bounds.oldest:
            self._lost += gone
            log.warning("%s: %s entries were gone before they were read", queue.url, gone)
        else:
            self._restarts += 1
            log.warning("%s was made anew since it was read last", queue.url)

    def _read_queue(self, queue: ClassicReader, wait: float, *, forced: bool) -> LatestInfo | None:
        until = time.monotonic() + wait
        if forced:
            queue.seek_back()
        while True:
            left = max(0.0, until - time.monotonic())
            message = queue.read(timeout=min(left, _LONGEST_WAIT))
            if message is None:
                return None
            try:
                info = decode_body(message.payload)
            except Malformed as error:
                self._unreadable += 1
                log.warning("%s, entry %s: %s", queue.url, message.seq, error)
                continue
            told, self._told_by_file = self._told_by_file, None
            if told is not None and _same(told, info) and not forced:
                continue
            return self._delivered_from_queue(message, info, forced=forced)

    def _delivered_from_queue(
        self, message: Message, info: LatestInfo, *, forced: bool
    ) -> LatestInfo:
        mark = _mark(self._files.stat)
        if mark is not None:
            self.prev_mod_time = mark[0] // _SECOND
        self._last = info
        self._is_stale = False
        if forced:
            self._repeated += 1
        else:
            self._entries += 1
        self._unsaved = message.seq % ID_COUNT, info
        if self._saves_at_once:
            self.save_place()
        return info

    def save_place(self) -> None:
        """Save the place of the last entry returned, if there is a label."""
        unsaved, self._unsaved = self._unsaved, None
        if self._saved is not None and unsaved is not None:
            id, info = unsaved
            self._saved.save(id, info, relative_path(info, self._files.directory))

    def _tell_of(self, damage: DamagedQueue) -> None:
        """Log once that the files are used until the queue is recreated."""
        if not self._is_damaged:
            log.warning("%s; looking at the files instead", damage)
        self._is_damaged = True

    def _close_queue(self) -> None:
        if self._queue is not None:
            books = self._queue.statistics()
            self._lost += books.lost
            self._restarts += books.restarts
            self._queue.close()
            self._queue = None

    # --- the files --------------------------------------------------------------------------

    def _read_file(
        self,
        path: Path,
        decode: Callable[[bytes], LatestInfo],
        max_age: float | None,
        *,
        forced: bool,
    ) -> LatestInfo | None:
        """Return the entry of the file, or None if it is not new.

        :raises _NotThere: the file is missing, too old or unreadable: the next form is tried.
        """
        mark = _mark(path)
        if mark is None or (max_age is not None and 0 < max_age < self._age(path)):
            raise _NotThere
        if self._seen.get(path) == mark and not forced:
            return None
        try:
            with path.open("rb") as file:
                info = decode(file.read(LARGEST_FILE + 1))
        except FileNotFoundError:
            raise _NotThere from None
        except (OSError, Malformed) as error:
            if self._seen.get(path) != mark:
                self._seen[path] = mark
                self._unreadable += 1
                log.warning("%s is left as it is: %s", path, error)
            raise _NotThere from None
        if forced:
            self._repeated += 1
            return info
        # Already delivered by the queue, or by the other file.
        may_be_known = path not in self._seen or self._told_by_file is None
        is_known = may_be_known and self._last is not None and _same(self._last, info)
        self._seen[path] = mark
        if is_known:
            return None
        self._last = self._told_by_file = info
        self._entries += 1
        self.prev_mod_time = mark[0] // _SECOND
        return info

    def _is_being_written(self, path: Path) -> bool:
        """Tell whether the writer is about to write a form with more information."""
        if self._is_stale and self._queue is None:
            follower = self._files.stat  # with all that came since its place was kept
        elif path == self._files.ascii and self._settings.use_xml:
            follower = self._files.xml
        else:
            return False
        mark, other = _mark(path), _mark(follower)
        if mark is None or (other is not None and other[0] >= mark[0]):
            return False
        return 0 <= self._clock.now_ns() - mark[0] < _BETWEEN_FILES

    def _age(self, path: Path) -> int:
        mark = _mark(path)
        return 0 if mark is None else self._clock.now_ns() // _SECOND - mark[0] // _SECOND

    # --- the rest ---------------------------------------------------------------------------

    def statistics(self) -> LatestStatistics:
        lost, restarts = self._lost, self._restarts
        if self._queue is not None:
            books = self._queue.statistics()
            lost += books.lost
            restarts += books.restarts
        return LatestStatistics(self._entries, self._repeated, self._unreadable, lost, restarts)

    def close(self) -> None:
        self._close_queue()
        self._sleeper.close()


class _NotThere(Exception):
    """This form has nothing to read."""


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return a mark that changes with every write of a file, also by a rename."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _same(one: LatestInfo, other: LatestInfo) -> bool:
    """Tell whether two forms hold the same entry; ASCII has fewer fields."""
    return (one.valid_time, one.first_info, one.second_info) == (
        other.valid_time,
        other.first_info,
        other.second_info,
    )
