"""How does a reader sleep until there is something to read?"""

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

__all__ = ["FileWatch", "Sleeper"]

log = logging.getLogger(__name__)

#: Where nothing can be watched, look at least this often (seconds).
_LONGEST_POLL = 0.02
#: Up to this pause sleeping is cheaper than watching.
_SHORT_PAUSE = 0.0002
#: A writer that maps the file wakes nobody who watches it: look for its messages this often.
_LONGEST_WATCH = 0.05

_IN_MODIFY: Final = 0x2
_IN_NONBLOCK: Final = os.O_NONBLOCK
_IN_CLOEXEC: Final = os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]


class FileWatch:
    """Waits for writes to a file, by inotify. It sees `write`, not stores into mapped memory."""

    def __init__(self) -> None:
        """Make a watch on nothing yet.

        :raises OSError: the system has no more of them to give.
        """
        self._fd = _checked(_libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))
        self._watch: int | None = None
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def is_armed(self) -> bool:
        """Whether it watches a file."""
        return self._watch is not None

    def arm(self, file: int) -> None:
        """Watch an open file from now on; look at it once more after this, before `wait`.

        :raises OSError: the system has no more watches to give.
        """
        own = f"/proc/self/fd/{file}".encode()
        self._watch = _checked(_libc.inotify_add_watch(self._fd, own, _IN_MODIFY))

    def wait(self, seconds: float) -> None:
        """Sleep until the file is written to, at most so long."""
        self._poll.poll(seconds * 1000)

    def disarm(self) -> None:
        """Watch no more: it costs the writer a little for every write."""
        if self._watch is not None:
            _libc.inotify_rm_watch(self._fd, self._watch)
            self._watch = None
            with contextlib.suppress(BlockingIOError):
                while os.read(self._fd, 4096):  # what it had to say is of no more interest
                    pass

    def close(self) -> None:
        os.close(self._fd)


class Sleeper:
    """Sleeps for a reader: short pauses as they are, long ones until its file is written to."""

    def __init__(self) -> None:
        # Without a watch (other programs may have used them up) polling will do.
        self._watch: FileWatch | None = None
        with contextlib.suppress(OSError):
            self._watch = FileWatch()

    @property
    def longest_pause(self) -> float:
        """Seconds that a pause may last without a message being seen too late."""
        return _LONGEST_POLL if self._watch is None else _LONGEST_WATCH

    def sleep(self, file: int | None, seconds: float, is_idle: Callable[[], bool]) -> None:
        """Pause, as long as nothing happens; `file` is None where there is none to watch."""
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
        """Leave the file alone until the next long pause."""
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
