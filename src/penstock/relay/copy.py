"""How is everything from one endpoint copied to another?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.core.capabilities import AllOrNone, Grouped, Held, KeepsOrigin
from penstock.core.endpoints import are_same_stream
from penstock.core.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.interfaces import Reader, Writer

__all__ = ["CopyStatistics", "check_apart", "check_kept", "copy", "fields_lost"]

#: Messages per batch.
_BATCH = 1000
#: While following, check this often (seconds) whether to stop.
_PATIENCE = 0.5


class CopyStatistics(NamedTuple):
    """Counters of a copy: every message was copied, or lost before it was read."""

    #: Messages written to the target.
    copied: int
    #: Their payload bytes.
    bytes: int
    #: Messages that were gone before they could be read.
    lost: int


def fields_lost(reader: Reader, writer: Writer) -> dict[str, str]:
    """Return the fields that the source may have and the target cannot store, and their fate."""
    return {
        field: fate
        for field, fate in writer.cannot_carry.items()
        if field not in reader.cannot_carry
    }


def check_apart(source: str, target: str) -> None:
    """Check that a stream is not copied to itself; call it before opening the target.

    :raises InvalidOption: both URLs name one stream.
    :raises ConnectionLost: a server cannot be reached.
    """
    if are_same_stream(source, target):
        raise InvalidOption(
            "target",
            target,
            f"is the stream that would be copied, {source}",
            hint="copy it to another one",
        )


def check_kept(reader: Reader, writer: Writer, state: str | None = None) -> None:
    """Refuse to acknowledge messages that are lost if the target is never finished.

    :raises InvalidOption: the target is `AllOrNone`, and the source's position would advance.
    """
    if not isinstance(writer, AllOrNone):
        return
    option, value = "state", state
    if isinstance(reader, Grouped):
        option, value = "group", reader.url
    elif isinstance(reader, Held) and reader.hold is not None:
        option, value = "hold", reader.hold
    if value is not None:
        raise InvalidOption(
            option,
            value,
            f"{writer.url} keeps nothing until it is finished",
            hint="copy to a log: first, or leave it out",
        )


def copy(
    reader: Reader,
    writer: Writer,
    *,
    follow: bool = False,
    on_progress: Callable[[CopyStatistics], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CopyStatistics:
    """Copy the existing messages, and with `follow` also new ones, until told to stop.

    The target assigns its own `seq` and `created_ns`; payload, type, subtype, time, stream,
    attributes and `origin_ns` are kept as far as it can store them.

    :raises InvalidOption: both are one stream, or the source would be acknowledged before the
        target is finished; nothing was copied.
    :raises PenstockError: the reader or writer failed; copied messages stay.
    """
    check_apart(reader.url, writer.url)
    check_kept(reader, writer)
    newest = None if follow else reader.newest_seq()
    lost_before = reader.statistics().lost
    written_before = writer.statistics()

    def so_far() -> CopyStatistics:
        written = writer.statistics()
        return CopyStatistics(
            copied=written.messages - written_before.messages,
            bytes=written.bytes - written_before.bytes,
            lost=reader.statistics().lost - lost_before,
        )

    keeps_origin = isinstance(writer, KeepsOrigin)
    read_batch = reader.read_batch_with_origins if keeps_origin else reader.read_batch
    while not should_stop():
        batch = read_batch(_BATCH, timeout=_PATIENCE if follow else 0)
        if batch.num_rows:
            writer.write_batch(batch)
            if isinstance(reader, Grouped):
                writer.flush()
                reader.ack(batch)
            if on_progress is not None:
                on_progress(so_far())
            if newest is not None and batch.column("seq")[-1].as_py() >= newest:
                break
        elif not follow:
            break
    writer.flush()
    return so_far()
