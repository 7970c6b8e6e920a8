"""How does the command print notes, errors and losses?"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from typing import TYPE_CHECKING, Final

import typer

from penstock.core.errors import (
    ConfigError,
    ConfigErrors,
    InvalidOption,
    InvalidURL,
    PenstockError,
    PositionError,
    StorageError,
)
from penstock.core.redaction import shown
from penstock.core.statistics import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO, TextIO

    from penstock.core.statistics import ReaderStatistics

__all__ = [
    "bar",
    "drop_output",
    "is_coloured",
    "is_terminal",
    "losses_named",
    "name_losses",
    "note",
    "one_line",
    "output_refused",
    "standard_output",
]


def note(text: str) -> None:
    """Print a line on standard error."""
    with contextlib.suppress(OSError):  # there is no other place to say it
        typer.echo(shown(text), err=True)


#: What to do about an error of the operating system.
_ADVICE: Final = {
    errno.ENOENT: "look at the path",
    errno.ENOTDIR: "look at the path",
    errno.EISDIR: "give a file, not a folder",
    errno.EEXIST: "something else has this name: choose another",
    errno.EFBIG: "make it smaller",
    errno.EACCES: "check who owns the files and their permissions",
    errno.EPERM: "check who owns the files and their permissions",
    errno.EROFS: "write to another place",
    errno.ENOSPC: "free some space, or write to another place",
    errno.EDQUOT: "free some space, or write to another place",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.EADDRINUSE: "choose another port, or end the program that has it",
}


def one_line(error: Exception) -> str:
    """Return an error as one line: the reason, the progress, and a hint."""
    text, hint = str(error), None
    if isinstance(error, OSError) and error.errno is not None:
        hint = _ADVICE.get(error.errno)
    if isinstance(error, PenstockError):
        hint = error.hint or hint
        if isinstance(error, ConfigErrors):  # which has a line for each fault
            text, hint = (
                "; ".join(text.splitlines()),
                f"{len(error.errors)} things are to be mended",
            )
        elif isinstance(error, ConfigError):
            hint = hint or "mend it in the file, then try again"
        elif isinstance(error, InvalidOption | InvalidURL | PositionError):
            hint = hint or "change it, then try again"
    elif isinstance(error, OSError):
        reason = error.strerror or str(error)
        text = f"{error.filename}: {reason}" if error.filename else reason
    elif isinstance(error, MemoryError):
        text = "there is not enough memory"
    else:
        text = f"{type(error).__name__}: {error}"
    said = "; ".join([text, *getattr(error, "__notes__", ())])
    said = f"{said} (hint: {hint or '--debug shows where it comes from'})"
    return shown(" ".join(said.splitlines()))


@contextlib.contextmanager
def standard_output() -> Iterator[BinaryIO]:
    """Yield standard output for bytes, and flush it at the end.

    :raises typer.Exit: the reader of the pipe has closed it, as in `cat … | head`.
    :raises StorageError: it cannot be written.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")  # noqa: TRY301 - as a write to it would
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        drop_output()  # it may be what blocked
        raise
    except BrokenPipeError:
        drop_output()
        raise typer.Exit from None  # the reader has enough
    except OSError as error:
        if isinstance(error, PenstockError):
            raise
        drop_output()
        raise output_refused(error) from error


def output_refused(error: OSError) -> StorageError:
    """Return the error of a command that cannot write its output, with the notes of `error`."""
    refused = StorageError(
        "writing to", "standard output", error, hint="look where the output goes"
    )
    for each in getattr(error, "__notes__", ()):
        refused.add_note(each)
    return refused


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a stream is a terminal; None is a closed stream."""
    return stream is not None and stream.isatty()


def is_coloured() -> bool:
    """Tell whether standard output takes colours: a terminal whose user has not said no."""
    return (
        is_terminal(sys.stdout)
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def drop_output() -> None:
    """Discard unwritten standard output: Python would retry at exit, and print an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def bar(share: float, width: int = 30) -> str:
    """Draw a share from 0 to 1 as a bar."""
    full = round(min(max(share, 0), 1) * width)
    return "█" * full + "░" * (width - full)


# --- losses -------------------------------------------------------------------------------------

#: The most ranges listed one by one.
_NAMED = 20


@contextlib.contextmanager
def losses_named(statistics: Callable[[], ReaderStatistics], *, live: bool) -> Iterator[None]:
    """Print the losses of a reader at the end of the block, also after an error.

    `live`: keep the reader's own warnings, which come at once but not for every loss.
    """
    handlers = [] if live else logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(_names_no_loss)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_names_no_loss)
        name_losses(statistics())


def name_losses(statistics: ReaderStatistics) -> None:
    """Print lost ranges and their total on stderr; nothing without losses."""
    if not statistics.lost:
        return
    losses = statistics.losses
    forgotten = statistics.lost - sum(loss.count for loss in losses)
    if forgotten:
        note(
            f"penstock: {forgotten:,} messages lost early on: "
            f"only the last {len(losses):,} ranges are remembered"
        )
    for loss in losses[:_NAMED]:
        note(f"penstock: {loss}")
    if more := len(losses[_NAMED:]):
        note(f"penstock: and {more:,} more range{'' if more == 1 else 's'}")
    note(f"penstock: {statistics.lost:,} message{'' if statistics.lost == 1 else 's'} lost in all")


def _names_no_loss(record: logging.LogRecord) -> bool:
    return not any(isinstance(argument, Loss) for argument in record.args or ())
