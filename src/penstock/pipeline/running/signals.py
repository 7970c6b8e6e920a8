"""How does Java stay when a signal that is for us goes to the whole process group?"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["java_ignores"]

_ignored: set[signal.Signals] = set()


@contextmanager
def java_ignores(*signals: signal.Signals) -> Iterator[None]:
    """Let Java, if it is started meanwhile, ignore these signals.

    PySpark does that for Ctrl-C. `timeout` and other programs send SIGTERM to the group as well,
    and Java would end while the batches under way are finished. It still ends when we do.
    """
    _ignored.update(signals)
    try:
        yield
    finally:
        _ignored.difference_update(signals)


def _ignore() -> None:
    for one in _ignored:
        signal.signal(one, signal.SIG_IGN)


# What a process ignores, the program that it becomes ignores as well.
os.register_at_fork(after_in_child=_ignore)
