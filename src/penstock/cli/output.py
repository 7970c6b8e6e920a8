"""How does the command show things to a person?"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from penstock.core.config import ConfigErrors
from penstock.core.errors import ConfigError, PenstockError, StorageError
from penstock.core.redaction import shown
from penstock.core.units import format_time

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from penstock.core.message import Message

__all__ = [
    "bar",
    "console",
    "drop_output",
    "error_console",
    "message_line",
    "note",
    "one_line",
    "standard_output",
]

console = Console(highlight=False)
error_console = Console(highlight=False, stderr=True)

_PREVIEW = 48


def note(text: str) -> None:
    """Say something beside the output."""
    with contextlib.suppress(OSError):  # there is no other place to say it
        typer.echo(shown(text), err=True)


def one_line(error: Exception) -> str:
    """Say on one line what went wrong, how far it came, and what to do next."""
    text, hint = str(error), None
    if isinstance(error, PenstockError):
        hint = error.hint
        if isinstance(error, ConfigErrors):  # which has a line for each fault
            text, hint = (
                "; ".join(text.splitlines()),
                f"{len(error.errors)} things are to be mended",
            )
        elif isinstance(error, ConfigError):
            hint = hint or "mend it in the file, then try again"
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
    """Give standard output for bytes, and hand all of them over at the end.

    :raises StorageError: it does not take them.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")  # noqa: TRY301 - as a write to it would
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        drop_output()  # it may be what held us up
        raise
    except OSError as error:
        if isinstance(error, PenstockError):
            raise
        drop_output()
        raise StorageError(
            "writing to", "standard output", error, hint="look where the output goes"
        ) from error


def drop_output() -> None:
    """Forget what standard output did not take: Python would try again at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def bar(share: float, width: int = 30) -> str:
    """Draw a share of 0 to 1."""
    full = round(min(max(share, 0), 1) * width)
    return "█" * full + "░" * (width - full)


def message_line(message: Message) -> str:
    """Show one message on one line."""
    kind = f"{message.type}/{message.subtype}"
    return (
        f"{message.seq:>10}  {format_time(message.time_ns):<20}  {kind:>9}  "
        f"{message.size:>9,} B  {_preview(message.payload)}"
    )


def _preview(payload: bytes) -> str:
    head = payload[:_PREVIEW]
    is_cut = len(payload) > _PREVIEW
    try:
        # A character that the cut goes through is left out.
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=not is_cut)
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and (text or not payload):
        return text + ("…" if is_cut else "")
    return head[: _PREVIEW // 3].hex(" ") + ("…" if len(payload) > _PREVIEW // 3 else "")
