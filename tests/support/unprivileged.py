"""How does a test find out what a user without rights would see?"""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_without_rights"]

_NOBODY = 65534


def run_without_rights(check: Callable[[], None]) -> None:
    """Run a check in a child process that is not root; fail with what it raised."""
    if os.geteuid() != 0:
        check()
        return
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = b""
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            check()
        except BaseException:  # noqa: BLE001 - whatever it is, the parent has to hear of it
            outcome = traceback.format_exc().encode()
        finally:
            os.write(write_end, outcome[-60_000:])
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as report:
        said = report.read()
    os.waitpid(child, 0)
    assert not said, said
