"""How does Python serve a process that is a dispatcher and nothing else?"""

from __future__ import annotations

import gc
import sys
from typing import Final

__all__ = ["devote"]

#: New objects until the collector looks at these, and then at older ones. Messages are no garbage
#: that needs it: they go when nobody holds them. The default of 700 is a few messages.
_THRESHOLDS: Final = (100_000, 50, 50)
#: After so long (seconds) a thread that works lets another. The default of 5 ms, with a thread for
#: what comes in and one for each receiver, is longer than the timer of expiries may wait.
_TURN: Final = 0.0005


def devote() -> None:
    """Let the collector leave messages alone, and threads take short turns.

    Call it when all is started.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    sys.setswitchinterval(_TURN)
