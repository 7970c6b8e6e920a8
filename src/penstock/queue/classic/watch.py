"""How does a reader sleep until there are messages?"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENTRIES", "FileWatch", "Sleeper"]

log = logging.getLogger(__name__)

#: Longest poll interval (seconds) if nothing can be watched.
_LONGEST_POLL = 0.02
#: Below this pause (seconds), sleeping is cheaper than watching.
_SHORT_PAUSE = 0.0002
#: Poll interval (seconds) despite the watch: inotify does not see writes to mapped memory.
_LONGEST_WATCH = 0.05

_IN_MODIFY: Final = 0x2
#: Events of a directory: a name appears, disappears, or gets another file.
ENTRIES: Final = 0x40 | 0x80 | 0x100 | 0x200
_IN_NONBLOCK: Final = os.O_NONBLOCK
_IN_CLOEXEC: Final = os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]


class FileWatch:
    """Waits for writes to a file, by inotify. It sees `write`, not stores to mapped memory."""

    def __init__(self, events: int = _IN_MODIFY) -> None:
        """Create an inotify instance, without a watch; `ENTRIES` are events of a directory.

        :raises OSError: the limit of inotify instances is reached.
        """
        self._events = events
        self._fd = _checked(_libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))
        self._watch: int | None = None
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def is_armed(self) -> bool:
        """Whether it watches a file."""
        return self._watch is not None

    def arm(self, file: int) -> None:
        """Start to watch an open file. Check it once more after this, before `wait`.

        :raises OSError: the limit of watches is reached.
        """
        own = f"/proc/self/fd/{file}".encode()
        self._watch = _checked(_libc.inotify_add_watch(self._fd, own, self._events))

    def fileno(self) -> int:
        """Return the descriptor, readable after an event."""
        return self._fd

    def wait(self, seconds: float) -> None:
        """Sleep until the file is written to, up to `seconds`."""
        self._poll.poll(seconds * 1000)

    def disarm(self) -> None:
        """Stop watching, which slows every write a little."""
        if self._watch is not None:
            _libc.inotify_rm_watch(self._fd, self._watch)
            self._watch = None
            self.drain()

    def drain(self) -> bool:
        """Discard pending events; tell whether there were any."""
        has_news = False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, 4096):
                has_news = True
        return has_news

    def close(self) -> None:
        os.close(self._fd)


class Sleeper:
    """Sleeps for a reader: short pauses plainly, long ones until its file is written to."""

    def __init__(self) -> None:
        # Without inotify (other programs may have used it up), poll.
        self._watch: FileWatch | None = None
        with contextlib.suppress(OSError):
            self._watch = FileWatch()

    @property
    def longest_pause(self) -> float:
        """Longest pause (seconds) that does not delay messages too much."""
        return _LONGEST_POLL if self._watch is None else _LONGEST_WATCH

    def sleep(self, file: int | None, seconds: float, is_idle: Callable[[], bool]) -> None:
        """Sleep up to `seconds`, or until a write to `file` (None: it cannot be watched)."""
        if self._watch is None or file is None or seconds < _SHORT_PAUSE:
            time.sleep(min(seconds, _LONGEST_POLL))
            return
        try:
            if not self._watch.is_armed:
                self._watch.arm(file)
                if not is_idle():
                    return
            self._watch.wait(seconds)
        except OSError as error:
            log.info("polling, because inotify says: %s", error.strerror)
            self.close()

    def stop_watching(self) -> None:
        """Stop watching until the next long pause."""
        if self._watch is not None:
            self._watch.disarm()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
