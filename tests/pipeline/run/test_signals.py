from __future__ import annotations

import signal
import subprocess
import sys

from penstock.pipeline.run.spark import java_ignores

ASK = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)"


def asked() -> bool:
    """Start a program as PySpark starts Java, and return whether it ignores SIGTERM."""
    child = subprocess.run(
        [sys.executable, "-c", ASK],
        preexec_fn=lambda: None,  # as PySpark does: hooks run then
        stdout=subprocess.PIPE,
        check=True,
    )
    return child.stdout == b"True\n"


def test_what_is_started_meanwhile_ignores_the_signal_and_we_do_not() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with java_ignores(signal.SIGTERM):
        assert asked()
        assert signal.getsignal(signal.SIGTERM) is before
    assert not asked()
