"""How is work done for every new file, in order and at least once? `on_new_data` and `Trigger`.

A trigger follows the queue of a directory's latest_data_info. Its position is saved after each file
that is done; a file in work when the process dies is redelivered.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

from penstock.core.clock import SYSTEM_CLOCK, SystemClock
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import (
    InvalidOption,
    Malformed,
    NotFound,
    PositionError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.position import Position, PositionLike
from penstock.core.retry import Backoff, RetryPolicy, retry
from penstock.protocols.lrose.ldata_format import decode_body
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.cursor_file import CursorFile
from penstock.registry.latest_files import DEFAULT_NAME, InfoFiles, data_path, expected_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.interfaces import Reader
    from penstock.core.message import Message
    from penstock.protocols.lrose.ldata_format import LatestInfo

__all__ = [
    "DEFAULT_RETRY",
    "DeadLetters",
    "Happening",
    "NewData",
    "Stopped",
    "Trigger",
    "TriggerStatistics",
    "on_new_data",
]

log = logging.getLogger(__name__)

# --- triggers -----------------------------------------------------------------------------------

#: Three attempts in a few seconds, whatever the error; then the file is a dead letter.
DEFAULT_RETRY: Final = RetryPolicy(
    retry_on=(Exception,), backoff=Backoff(initial=1.0, maximum=30.0), max_attempts=3
)
#: Seconds between two checks for a stop.
_LOOK: Final = 0.2
_WAIT_FOR_QUEUE: Final = 0.05
#: Most seconds between the first writer's first file and its queue.
_MAKING_A_QUEUE: Final = 2.0


class Stopped(BaseException):
    """The work was aborted because the trigger stops; the file is redelivered."""


@dataclass(frozen=True, slots=True)
class NewData:
    """A new file."""

    info: LatestInfo
    #: The directory of the latest_data_info.
    directory: str
    #: The number of its entry in the queue.
    seq: int

    @property
    def path(self) -> str:
        """The path of the file.

        :raises NotFound: the file does not exist (any more).
        """
        found = data_path(self.info, self.directory)
        if found is None:
            raise NotFound(
                f"there is no file {self.expected_path}",
                hint="it was removed, or its entry was written before the file",
            )
        return found

    @property
    def expected_path(self) -> str:
        """Where the file should be."""
        return expected_path(self.info, self.directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event of a trigger."""

    #: `done`; `failed`, to be tried again; `dead`, given up; `lost`, overwritten before it was
    #: read; `unreadable`, not an entry; `restarted`: the queue was recreated.
    what: Literal["done", "failed", "dead", "lost", "unreadable", "restarted"]
    new: NewData | None = None
    seq: int | None = None
    #: Attempts so far; for `lost`, the number of entries.
    count: int = 1
    #: Seconds of the work; for `failed`, until the next attempt.
    seconds: float = 0.0
    error: Exception | None = field(default=None, compare=False)


class TriggerStatistics(NamedTuple):
    """Counters of a trigger. Each entry before its position is done, dead, lost or unreadable."""

    #: Files whose work is done.
    done: int
    #: Files given up, which are kept as dead letters.
    dead: int
    #: Attempts that failed.
    failures: int
    #: Entries overwritten before they were read.
    lost: int
    #: Messages that are not valid entries.
    unreadable: int
    #: How often the queue was recreated.
    restarts: int


Work: TypeAlias = Callable[[NewData], object]
Tell: TypeAlias = Callable[[Happening], object]
StopAsked: TypeAlias = Callable[[], bool]


class Trigger:
    """Does work for every new file of a directory. One process at a time can use a name.

    `start` is where a trigger of a new name starts: `last` with the newest file, as LROSE's readers
    do; `start` with the oldest one in the queue; `end` with the next new one. Its position and its
    dead letters are stored in the directory, or in `state`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        work: Work,
        *,
        name: str = "on",
        start: PositionLike = Position.LAST,
        policy: RetryPolicy = DEFAULT_RETRY,
        state: str | os.PathLike[str] | None = None,
        info_name: str = DEFAULT_NAME,
        tell: Tell = lambda _: None,
    ) -> None:
        self.name = _check_name(name)
        self.directory = os.fspath(directory)
        self._files = InfoFiles(directory, info_name)
        self._work = work
        self._start = Position.of(start)
        self._policy = policy
        self._state = self.directory if state is None else os.fspath(state)
        self._tell = tell
        self._letters = DeadLetters(self._state, name)
        self._done = self._dead = self._failures = self._unreadable = 0
        self._lost = self._restarts = 0
        self._stop: StopAsked = lambda: False

    def __call__(self, new: NewData) -> object:
        """Do the work for one file, independent of the position."""
        return self._work(new)

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters: files given up."""
        return self._letters

    def statistics(self) -> TriggerStatistics:
        """Return the counters of files done, given up and lost."""
        return TriggerStatistics(
            self._done, self._dead, self._failures, self._lost, self._unreadable, self._restarts
        )

    # --- following --------------------------------------------------------------------------

    def run(
        self, stop: StopAsked = lambda: False, *, idle: float | None = None
    ) -> TriggerStatistics:
        """Work until `stop`, or until no file came for `idle` seconds; return the counters.

        :raises NotFound: the directory does not exist.
        :raises CursorInUse: another process runs this trigger.
        :raises StorageError: the operating system refuses.
        """
        if not self._files.folder.is_dir():
            raise NotFound(
                f"there is no directory {self.directory}",
                hint="check its name, or make it; the first file may come later",
            )
        self._stop = stop
        place = _TriggerPlace(self._state, self.name)
        try:
            place.claim(self._files.queue, self._start, is_there=self._files.has_whole_queue())
            if self._wait_for_queue(idle):
                with _open_entries(self._files.queue) as reader:
                    if not place.stand(reader, self._files.queue):
                        self._restarts += 1
                        self._tell(Happening(what="restarted"))
                    self._follow(reader, place, idle)
        except Stopped:
            pass
        finally:
            place.close()
        return self.statistics()

    def _wait_for_queue(self, idle: float | None) -> bool:
        until = None if idle is None else time.monotonic() + idle
        alone_since: float | None = None
        while not self._files.has_whole_queue():
            # The writer of the first entry creates the queue after the file.
            has_file = self._files.xml.exists() or self._files.ascii.exists()
            is_alone = has_file and not self._files.stat.exists()
            alone_since = (alone_since or time.monotonic()) if is_alone else None
            if alone_since is not None and time.monotonic() - alone_since > _MAKING_A_QUEUE:
                raise Unsupported(
                    f"{self.directory}: its latest_data_info has no queue, and files alone do not "
                    "tell of every update",
                    hint="do not set LDATA_FMQ_ACTIVE=false where it is written",
                )
            if self._stop() or (until is not None and time.monotonic() > until):
                return False
            time.sleep(_WAIT_FOR_QUEUE)
        return True

    def _follow(self, reader: ClassicReader, place: _TriggerPlace, idle: float | None) -> None:
        heard = time.monotonic()
        before = (self._lost, self._restarts)
        while not self._stop():
            message = reader.read(timeout=_LOOK if idle is None else min(_LOOK, idle))
            self._take_over_books(reader, before)
            if message is not None:
                self._handle(message)
                place.move_past(message)
                heard = time.monotonic()
            elif idle is not None and time.monotonic() - heard >= idle:
                return

    def _take_over_books(self, reader: ClassicReader, before: tuple[int, int]) -> None:
        books = reader.statistics()
        lost, restarts = before[0] + books.lost, before[1] + books.restarts
        if restarts > self._restarts:
            self._restarts = restarts
            self._tell(Happening(what="restarted"))
        if lost > self._lost:
            first = books.losses[-1].first if books.losses else None
            self._tell(Happening(what="lost", seq=first, count=lost - self._lost))
            self._lost = lost

    # --- one file ---------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        try:
            new = NewData(decode_body(message.payload), self.directory, message.seq)
        except Malformed as fault:
            self._unreadable += 1
            self._tell(Happening(what="unreadable", seq=message.seq, error=fault))
            return
        began, first_ns = time.monotonic(), SYSTEM_CLOCK.now_ns()
        error, attempts = self._attempt(new)
        seconds = time.monotonic() - began
        if error is None:
            self._done += 1
            self._tell(
                Happening(what="done", new=new, seq=new.seq, count=attempts, seconds=seconds)
            )
            return
        self._letters.add(message, error, attempts, first_ns)
        self._dead += 1
        self._tell(
            Happening(
                what="dead", new=new, seq=new.seq, count=attempts, seconds=seconds, error=error
            )
        )

    def _attempt(self, new: NewData) -> tuple[Exception | None, int]:
        """Do the work with retries; return the last error, or None, and the number of attempts."""
        attempts = 1

        def failed(attempt: int, error: Exception, delay: float) -> None:
            nonlocal attempts
            attempts = attempt + 1
            self._failures += 1
            self._tell(
                Happening(
                    what="failed", new=new, seq=new.seq, count=attempt, seconds=delay, error=error
                )
            )

        try:
            retry(lambda: self._work(new), self._policy, _StoppableClock(self._stop), failed)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is kept with the file
            self._failures += 1
            return error, attempts
        return None, attempts

    # --- dead letters -----------------------------------------------------------------------

    def told_by(self, letter: DeadLetter) -> NewData:
        """Return the file of a dead letter.

        :raises Malformed: it holds no entry.
        """
        info = decode_body(letter.original.payload)
        return NewData(info, self.directory, letter.original.seq)

    def retry_dead(self, stop: StopAsked = lambda: False) -> tuple[int, int]:
        """Retry the dead letters; return how many are done, and how many still dead.

        :raises CursorInUse: another process retries them.
        """
        self._stop = stop
        done = dead = 0

        def work(letter: DeadLetter) -> tuple[Exception | None, int]:
            nonlocal done, dead
            if stop():
                raise Stopped
            new = self.told_by(letter)
            began = time.monotonic()
            error, attempts = self._attempt(new)
            seconds = time.monotonic() - began
            done, dead = done + (error is None), dead + (error is not None)
            what: Literal["done", "dead"] = "done" if error is None else "dead"
            self._tell(
                Happening(
                    what=what, new=new, seq=new.seq, count=attempts, seconds=seconds, error=error
                )
            )
            return error, attempts

        with contextlib.suppress(Stopped):
            self._letters.retry(work)
        return done, dead


class _StoppableClock(SystemClock):
    """A clock whose sleeps end when the trigger stops."""

    def __init__(self, stop: StopAsked) -> None:
        self._stop = stop

    def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while not self._stop():
            left = until - self.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK))
        raise Stopped


def on_new_data(
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    start: PositionLike = Position.LAST,
    policy: RetryPolicy = DEFAULT_RETRY,
    state: str | os.PathLike[str] | None = None,
    tell: Tell = lambda _: None,
) -> Callable[[Work], Trigger]:
    """Turn a function into a `Trigger` for the new files of a directory: `@on_new_data(dir)`.

    The trigger has the function's name, unless another is given. Its `run` does the work.
    """

    def made(work: Work) -> Trigger:
        called = name or str(getattr(work, "__name__", "on"))
        return Trigger(
            directory, work, name=called, start=start, policy=policy, state=state, tell=tell
        )

    return made


# --- the position of a trigger ------------------------------------------------------------------
# A named cursor holds the number of the next entry. The queue of latest_data_info has no epoch that
# shows that it was recreated; so the cursor's epoch is a fingerprint of the entry before it.


_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
#: The fingerprint of nothing.
_NOBODY: Final = 0


def _check_name(name: str) -> str:
    """Check that a name is valid in file names.

    :raises InvalidOption: it is not.
    """
    if not _NAME.fullmatch(name):
        raise InvalidOption("name", name, "is up to 64 letters, digits, dots and dashes")
    return name


def _cursors_path(state: str) -> str:
    """Return the file with the positions of all triggers of a directory."""
    return str(Path(state) / "_penstock_on.cursors")


def _open_entries(queue: str) -> ClassicReader:
    """Open the queue of latest_data_info at its start."""
    return ClassicReader(
        f"fmq:{queue}", queue, Position.START, ClassicOptions(damaged="skip", wait=0.0)
    )


class _TriggerPlace:
    """The position of a trigger, owned by one process at a time."""

    def __init__(self, state: str, name: str) -> None:
        self._path = _cursors_path(state)
        self._name = name
        self._open = ExitStack()
        self._file: int | None = None

    def claim(self, queue: str, start: Position, *, is_there: bool) -> None:
        """Take ownership; a new position is at `start`, or at 0 if there is no queue yet.

        :raises CursorInUse: another process runs this trigger.
        """
        self._claim(*(self._first(queue, start) if is_there else (0, _NOBODY)))

    def _claim(self, seq: int, fingerprint: int = _NOBODY) -> None:
        cursors = self._open.enter_context(CursorFile(self._path))
        cursor = cursors.claim(self._name, epoch=fingerprint, seq=seq)
        self._cursor = self._open.enter_context(cursor)
        self._file = _inode(self._path)

    @staticmethod
    def _first(queue: str, start: Position) -> tuple[int, int]:
        """Return the first position, and the fingerprint of the entry before it."""
        with _open_entries(queue) as reader:
            reader.seek(start)
            seq = reader.statistics().next_seq or 0
            if seq > reader.bounds().oldest:
                reader.seek(seq - 1)
                message = reader.read(timeout=0)
                if message is not None and message.seq == seq - 1:
                    return seq, _fingerprint(message)
            return seq, _NOBODY

    def stand(self, reader: ClassicReader, queue: str) -> bool:
        """Move a reader to the position; False: the queue was recreated, and it is at its start.

        The reader counts overwritten entries as lost.
        """
        seq = self._cursor.seq
        try:
            reader.seek(Position.sequence(seq))
            is_same = self._is_same(queue, seq, self._cursor.epoch)
        except PositionError:
            is_same = False
        if not is_same:
            log.warning("%s was made anew since %s read it", reader.url, self._name)
            reader.seek(Position.START)
        return is_same

    @staticmethod
    def _is_same(queue: str, seq: int, fingerprint: int) -> bool:
        """Tell whether the entry before a position is the last one done."""
        if fingerprint == _NOBODY:
            return True
        # A cursor is moved by two stores. A kill between them leaves the fingerprint one behind.
        with _open_entries(queue) as reader:
            bounds = reader.bounds()
            known = [at for at in (seq - 1, seq - 2) if bounds.oldest <= at < bounds.end]
            for at in known:
                reader.seek(at)
                message = reader.read(timeout=0)
                if message is not None and _fingerprint(message) == fingerprint:
                    return True
        return not known

    def move_past(self, message: Message) -> None:
        """Record that this entry, and all before it, are done."""
        if _inode(self._path) != self._file:
            # The directory was cleaned up. A position in a removed file is lost.
            log.warning("%s is gone; it is made anew", self._path)
            self._open.close()
            self._claim(message.seq)
        self._cursor.move(message.seq + 1, _fingerprint(message))

    def close(self) -> None:
        self._open.close()


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None


def _fingerprint(message: Message) -> int:
    what = b"%d %d %b" % (message.seq, message.created_ns, message.payload)
    number = int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")
    return number or 1


# --- dead letters -------------------------------------------------------------------------------
# Entries that a trigger gave up are stored as dead letters in a log beside its cursor, until they
# are retried.

#: Entries are small, and dead letters are few.
_OPTIONS: Final = {"segment": "1M", "segment_slots": 1024, "sync": "batch"}


def _code_of(error: Exception) -> Code:
    """Return the numeric code of a failure."""
    if isinstance(error, TimeoutError | WriteTimeout):
        return Code.DEADLINE_EXCEEDED
    if isinstance(error, FileNotFoundError):
        return Code.NOT_FOUND
    return Code.PERMISSION_DENIED if isinstance(error, PermissionError) else Code.UNKNOWN


class DeadLetters:
    """The dead letters of one trigger."""

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        self._state = os.fspath(directory)
        self._name = _check_name(name)
        self.folder = Path(directory) / f"_penstock_on.{name}.dead"
        self._url = f"log:{quote(os.path.abspath(self.folder))}"  # noqa: PTH100
        #: The position up to which they were retried.
        self._cursor_name = f"{name}.dead"

    def add(self, message: Message, error: Exception, attempts: int, first_ns: int) -> None:
        """Store an entry that was given up, and the reason.

        :raises StorageError: the operating system refuses; then the entry must not be skipped.
        """
        now = SYSTEM_CLOCK.now_ns()
        reason = str(error) or type(error).__name__
        code = _code_of(error)
        self._append(DeadLetter(message, code, reason, self._name, attempts, first_ns, now, now))

    def _append(self, letter: DeadLetter) -> None:
        m = letter.to_message()
        with open_writer(self._url, **_OPTIONS) as writer:
            writer.write(m.payload, m.type, m.subtype, m.time_ns, None, m.stream, m.attributes)

    def __iter__(self) -> Iterator[DeadLetter]:
        """Yield the pending dead letters, the oldest first."""
        if not self.folder.exists():
            return
        with closing(CursorFile(_cursors_path(self._state))) as cursors:
            done = cursors.find(self._cursor_name)
        epoch, seq = (_NOBODY, 0) if done is None else (done.epoch, done.seq)
        for _, message in self._waiting(epoch, seq):
            yield DeadLetter.from_message(message)

    def _waiting(self, epoch: int, seq: int) -> Iterator[tuple[int, Message]]:
        """Yield the letters from a position of the log on, each with the log's epoch."""
        try:
            reader: Reader = open_reader(self._url)
        except NotFound:
            return
        with reader:
            bounds = reader.bounds()
            # A position of an earlier release has no epoch.
            place = seq if epoch == _NOBODY else bounds.successor(epoch, seq)
            if place is None or place > bounds.end:
                log.warning("%s was made anew since its letters were tried again", reader.url)
                place = bounds.oldest
            reader.seek(max(place, bounds.oldest))
            for message in reader.available():
                yield bounds.epoch, message

    def retry(self, work: Callable[[DeadLetter], tuple[Exception | None, int]]) -> None:
        """Retry each dead letter.

        `work` returns the error, or None, and the number of attempts. An entry that fails again is
        stored as a new letter.

        :raises CursorInUse: another process retries them.
        """
        if not self.folder.exists():
            return
        with (
            closing(CursorFile(_cursors_path(self._state))) as cursors,
            cursors.claim(self._cursor_name) as cursor,
        ):
            for epoch, message in self._waiting(cursor.epoch, cursor.seq):
                letter = DeadLetter.from_message(message)
                error, attempts = work(letter)
                if error is not None:
                    now = SYSTEM_CLOCK.now_ns()
                    again = replace(
                        letter,
                        code=_code_of(error),
                        reason=str(error) or type(error).__name__,
                        attempts=letter.attempts + attempts,
                        last_attempt_ns=now,
                        dead_ns=now,
                    )
                    self._append(again)
                cursor.move(message.seq + 1, epoch)
