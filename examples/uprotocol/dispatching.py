"""How do the examples run their dispatcher, and wait?"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.retry import RetryPolicy, retry
from penstock.dispatch.control import find_place
from penstock.protocols.uprotocol import UCode, UStatusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["dispatcher", "is_delivered", "until_heard", "wait_until"]

_FOLDER = Path(__file__).parent


@contextlib.contextmanager
def dispatcher(file: str, **variables: str) -> Iterator[None]:
    """Run `penstock dispatch run FILE` until the block ends; the variables are the file's."""
    penstock = Path(sys.executable).with_name("penstock")
    process = subprocess.Popen(
        [penstock, "dispatch", "run", _FOLDER / file, "--progress", "none"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    try:
        print(process.stdout.readline(), end="")
        yield
    finally:
        process.terminate()
        print(process.stdout.read(), end="")
        process.wait(30)
        process.stdout.close()


def is_delivered(state: Path) -> bool:
    """Ask the dispatcher that keeps its state there whether nothing waits any more."""
    return bool(find_place(state).status()["books"]["copies"]["queued"] == 0)


def until_heard(send: Callable[[], object]) -> None:
    """Send something, again while it is UNAVAILABLE: zenoh needs a moment to know who listens."""

    def may_pass(error: Exception) -> bool:
        return isinstance(error, UStatusError) and error.code == UCode.UNAVAILABLE

    retry(send, RetryPolicy(retry_on=may_pass, max_attempts=None, max_elapsed=20.0))


def wait_until(is_so: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Wait for something that others do."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            sys.exit(f"{what} did not happen within {seconds:g} seconds")
        time.sleep(0.01)
