"""Which threads of this process are ours, and not those of a library that tests before left?"""

from __future__ import annotations

import threading

__all__ = ["own_threads"]


def own_threads() -> set[threading.Thread]:
    """Return the threads that have a name: ours all have one.

    Those without are of libraries. The one that talks to Java starts and ends some whenever
    garbage is collected, long after the test that used it.
    """
    return {thread for thread in threading.enumerate() if not thread.name.startswith("Thread-")}
