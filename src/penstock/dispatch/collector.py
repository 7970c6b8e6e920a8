"""How is Python's garbage collector kept from looking at every message?"""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["collect_seldom"]

#: New objects until the collector looks at these, and then at older ones. Messages are no garbage
#: that needs it: they go when nobody holds them. The default of 700 is a few messages.
_THRESHOLDS: Final = (100_000, 50, 50)


def collect_seldom() -> None:
    """For a process that is a dispatcher and nothing else; call it when all is started."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
