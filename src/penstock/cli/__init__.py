"""The command `penstock`: parses arguments, calls the library."""

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command. Ctrl-C while it is imported, or ends, is silent, as for a program in C."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from penstock.cli.main import main as run  # noqa: PLC0415 - interrupts are silent by now

    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
