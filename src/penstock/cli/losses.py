"""Which messages did a command lose, and when does it say so?"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from penstock.cli.output import note
from penstock.core.statistics import Loss

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.interfaces import Reader
    from penstock.core.statistics import ReaderStatistics

__all__ = ["losses_named", "name_losses"]

#: Ranges named one by one; a person reads no more.
_NAMED = 20


@contextlib.contextmanager
def losses_named(reader: Reader, *, live: bool) -> Iterator[None]:
    """Name what a reader lost when the block ends, however it ends.

    `live`: leave the reader's own warnings, which come at once but not for every loss.
    """
    handlers = [] if live else logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(_names_no_loss)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_names_no_loss)
        name_losses(reader.statistics())


def name_losses(statistics: ReaderStatistics) -> None:
    """Say on stderr which messages were lost, and how many in all; nothing if none were."""
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
