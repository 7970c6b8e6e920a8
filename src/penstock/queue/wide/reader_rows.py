"""How does a reader take a row in the reader table, and how do writers hear of it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import CursorTableFull, Unsupported
from penstock.queue.wide import _ring
from penstock.queue.wide.layout import HEADER
from penstock.queue.wide.queue_file import reader_table

if TYPE_CHECKING:
    from penstock.queue.cursors import Cursor, CursorTable
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["claim_row", "tell_writers"]


def claim_row(
    url: str, file: QueueFile, hold: tuple[str, ...]
) -> tuple[CursorTable | None, Cursor | None]:
    """Take a row, by the name that the reader holds; return it and its table, as far as there are.

    :raises Unsupported: it is to hold its place, and there is no table that it could write to.
    :raises CursorInUse: another reader has that name.
    """
    if not file.writable or not file.geometry.readers:
        if hold:
            raise Unsupported(
                f"{url}: a held reader keeps its place in the queue's reader table, "
                "which is not there or may not be written to",
                hint="check the file's permissions, or create it with readers=…",
            )
        return None, None
    table = reader_table(file)
    try:
        return table, table.claim(hold[0] if hold else None, epoch=file.field("epoch"))
    except BaseException as error:
        if isinstance(error, CursorTableFull) and not hold:
            return table, None  # it is not shown among the readers then; that is all
        table.close()
        raise


def tell_writers(file: QueueFile) -> None:
    """Let writers see at once that a held reader came, left or moved back."""
    assert HEADER.fields is not None
    for field in ("holders", "room_wakes"):
        _ring.wake(file.mapping, HEADER.fields[field][1])
