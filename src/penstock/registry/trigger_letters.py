"""What became of the files that a trigger gave up?

They are kept whole, as dead letters in a log beside the trigger's place, until somebody lets them
be tried again.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import NotFound, WriteTimeout
from penstock.queue.cursor_file import CursorFile
from penstock.registry.trigger_place import check_name, cursors_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.interfaces import Reader
    from penstock.core.message import Message

__all__ = ["DeadLetters", "code_of"]

#: Entries are small, and few are dead.
_OPTIONS: Final = {"segment": "1M", "segment_slots": 1024, "sync": "batch"}


def code_of(error: Exception) -> Code:
    """Return the number for programs that says why work failed."""
    if isinstance(error, TimeoutError | WriteTimeout):
        return Code.DEADLINE_EXCEEDED
    if isinstance(error, FileNotFoundError):
        return Code.NOT_FOUND
    return Code.PERMISSION_DENIED if isinstance(error, PermissionError) else Code.UNKNOWN


class DeadLetters:
    """The dead letters of one trigger."""

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        self._state = os.fspath(directory)
        self._name = check_name(name)
        self.folder = Path(directory) / f"_penstock_on.{name}.dead"
        self._url = f"log:{quote(os.path.abspath(self.folder))}"  # noqa: PTH100
        #: The place up to which they were tried again.
        self._cursor_name = f"{name}.dead"

    def add(self, message: Message, error: Exception, attempts: int, first_ns: int) -> None:
        """Keep an entry that was given up, and why.

        :raises StorageError: the operating system refuses; then it must not be passed over.
        """
        now = SYSTEM_CLOCK.now_ns()
        reason = str(error) or type(error).__name__
        code = code_of(error)
        self._append(DeadLetter(message, code, reason, self._name, attempts, first_ns, now, now))

    def _append(self, letter: DeadLetter) -> None:
        m = letter.to_message()
        with open_writer(self._url, **_OPTIONS) as writer:
            writer.write(m.payload, m.type, m.subtype, m.time_ns, None, m.stream, m.attributes)

    def __iter__(self) -> Iterator[DeadLetter]:
        """Yield those that wait, the oldest first."""
        if not self.folder.exists():
            return
        with closing(CursorFile(cursors_path(self._state))) as cursors:
            done = cursors.find(self._cursor_name)
        for message in self._waiting(0 if done is None else done.seq):
            yield DeadLetter.from_message(message)

    def _waiting(self, seq: int) -> Iterator[Message]:
        try:
            reader: Reader = open_reader(self._url)
        except NotFound:
            return
        with reader:
            bounds = reader.bounds()
            if seq < bounds.end:
                reader.seek(max(seq, bounds.oldest))
                yield from reader.available()

    def retry(self, work: Callable[[DeadLetter], tuple[Exception | None, int]]) -> None:
        """Let each of them be tried again.

        `work` returns what went wrong, or None, and how often it was tried. What fails again is
        kept as a new letter.

        :raises CursorInUse: somebody else is at it.
        """
        if not self.folder.exists():
            return
        with (
            closing(CursorFile(cursors_path(self._state))) as cursors,
            cursors.claim(self._cursor_name) as cursor,
        ):
            for message in self._waiting(cursor.seq):
                letter = DeadLetter.from_message(message)
                error, attempts = work(letter)
                if error is not None:
                    now = SYSTEM_CLOCK.now_ns()
                    again = replace(
                        letter,
                        code=code_of(error),
                        reason=str(error) or type(error).__name__,
                        attempts=letter.attempts + attempts,
                        last_attempt_ns=now,
                        dead_ns=now,
                    )
                    self._append(again)
                cursor.move(message.seq + 1)
