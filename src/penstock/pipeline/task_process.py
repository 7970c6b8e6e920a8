"""What keeps the Python processes that run Spark's tasks quick?"""

from __future__ import annotations

import gc

__all__ = ["settle_in"]

_is_settled = False


def settle_in() -> None:
    """Take what is loaded by now out of the garbage collector's sight. Call it in every task.

    Between two tasks Spark collects garbage, and looks at every object of every module for that:
    longer than a small batch takes. Modules are not garbage; what comes after them is looked at.
    """
    global _is_settled  # noqa: PLW0603 - of this process
    if not _is_settled:  # gc.get_freeze_count() would count them one by one
        gc.freeze()
        _is_settled = True
