"""How is work done for every new file, in order and at least once? `on_new_data` and `Trigger`.

A trigger follows the queue of a directory's latest_data_info. Its place is saved after each file
that is done; a file that was being worked on when the process died comes again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from penstock.core.clock import SYSTEM_CLOCK, SystemClock
from penstock.core.errors import Malformed, NotFound, Unsupported
from penstock.core.position import Position, PositionLike
from penstock.core.retry import Backoff, RetryPolicy, retry
from penstock.protocols.lrose.ldata_body import decode_body
from penstock.registry.latest_paths import data_path, expected_path
from penstock.registry.latest_settings import DEFAULT_NAME, InfoFiles
from penstock.registry.trigger_letters import DeadLetters
from penstock.registry.trigger_place import TriggerPlace, check_name, open_entries

if TYPE_CHECKING:
    from penstock.core.dead_letter import DeadLetter
    from penstock.core.message import Message
    from penstock.protocols.lrose.ldata_info import LatestInfo
    from penstock.queue.classic.reader import ClassicReader

__all__ = [
    "DEFAULT_RETRY",
    "Happening",
    "NewData",
    "Stopped",
    "Trigger",
    "TriggerStatistics",
    "on_new_data",
]

#: Three attempts in a few seconds, whatever the error: then a person has to look at it.
DEFAULT_RETRY: Final = RetryPolicy(
    retry_on=(Exception,), backoff=Backoff(initial=1.0, maximum=30.0), max_attempts=3
)
#: Seconds between two looks at whether to stop.
_LOOK: Final = 0.2
_WAIT_FOR_QUEUE: Final = 0.05
#: Seconds that the first writer may take between its first file and its queue.
_MAKING_A_QUEUE: Final = 2.0


class Stopped(BaseException):
    """The work was broken off because the trigger is to stop; the file comes again."""


@dataclass(frozen=True, slots=True)
class NewData:
    """A new file."""

    info: LatestInfo
    #: The directory whose latest_data_info told of it.
    directory: str
    #: The number of its entry in the queue.
    seq: int

    @property
    def path(self) -> str:
        """The path of the file.

        :raises NotFound: it is not there (any more).
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
    """What a trigger tells of, as it goes."""

    #: `done`; `failed`, to be tried again; `dead`, given up; `lost`, overwritten before it was
    #: read; `unreadable`, no entry; `restarted`: the queue was made anew.
    what: Literal["done", "failed", "dead", "lost", "unreadable", "restarted"]
    new: NewData | None = None
    seq: int | None = None
    #: How often it was tried so far; how many, of those lost.
    count: int = 1
    #: Seconds it took; until it is tried again, of one that failed.
    seconds: float = 0.0
    error: Exception | None = field(default=None, compare=False)


class TriggerStatistics(NamedTuple):
    """Books of a trigger. Every entry up to its place is done, dead, lost or unreadable."""

    #: Files whose work is done.
    done: int
    #: Files given up, which are kept as dead letters.
    dead: int
    #: Attempts that failed.
    failures: int
    #: Entries overwritten before they were read.
    lost: int
    #: Entries that are none.
    unreadable: int
    #: How often the queue was made anew.
    restarts: int


Work: TypeAlias = Callable[[NewData], object]
Tell: TypeAlias = Callable[[Happening], object]
StopAsked: TypeAlias = Callable[[], bool]


class Trigger:
    """Does work for every new file of a directory. One process at a time has a trigger's name.

    `start` is where a trigger of a new name begins: `last`, as LROSE's readers do, with the newest
    file that is there; `start` with the oldest that the queue knows; `end` with the next to come.
    Its place and its dead letters are in the directory, or in `state`.
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
        self.name = check_name(name)
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
        """Do the work for one file, outside of any order."""
        return self._work(new)

    @property
    def dead_letters(self) -> DeadLetters:
        """The files given up."""
        return self._letters

    def statistics(self) -> TriggerStatistics:
        """Return what was done, given up and lost so far."""
        return TriggerStatistics(
            self._done, self._dead, self._failures, self._lost, self._unreadable, self._restarts
        )

    # --- following --------------------------------------------------------------------------

    def run(
        self, stop: StopAsked = lambda: False, *, idle: float | None = None
    ) -> TriggerStatistics:
        """Work until `stop` says so, or until nothing came for `idle` seconds; return the books.

        :raises NotFound: there is no such directory.
        :raises CursorInUse: another process has this trigger.
        :raises StorageError: the operating system refuses.
        """
        if not self._files.folder.is_dir():
            raise NotFound(
                f"there is no directory {self.directory}",
                hint="check its name, or make it; the first file may come later",
            )
        self._stop = stop
        place = TriggerPlace(self._state, self.name)
        try:
            place.claim(self._files.queue, self._start, is_there=self._files.has_whole_queue())
            if self._wait_for_queue(idle):
                with open_entries(self._files.queue) as reader:
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
            # Whoever writes the first entry makes the queue after the file.
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

    def _follow(self, reader: ClassicReader, place: TriggerPlace, idle: float | None) -> None:
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
        """Do the work, as often as the policy says; return what is wrong in the end, and tries."""
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
        """Return the file that a dead letter is about.

        :raises Malformed: it is about none.
        """
        info = decode_body(letter.original.payload)
        return NewData(info, self.directory, letter.original.seq)

    def retry_dead(self, stop: StopAsked = lambda: False) -> tuple[int, int]:
        """Try those given up again; return how many are done, and how many still dead.

        :raises CursorInUse: somebody else is at it.
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
    """A clock on which nobody sleeps longer than until the trigger is to stop."""

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
    """Make a function the work for every new file of a directory: `@on_new_data(dir)`.

    What becomes of it is a `Trigger`, by the function's name unless it is given another. Its `run`
    does the work.
    """

    def made(work: Work) -> Trigger:
        called = name or str(getattr(work, "__name__", "on"))
        return Trigger(
            directory, work, name=called, start=start, policy=policy, state=state, tell=tell
        )

    return made
