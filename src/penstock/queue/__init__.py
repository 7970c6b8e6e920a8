"""The Fast Message Queue: wide and classic queues, logs, streams, cursors."""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names

if TYPE_CHECKING:
    from penstock.queue.cursor_file import CursorFile
    from penstock.queue.cursors import Cursor, CursorTable
    from penstock.queue.ownership import AlreadyOwned
    from penstock.queue.stream_directory import StreamKind, StreamState, list_streams, remove_stream
    from penstock.queue.streams import InputStream, OutputStream
    from penstock.queue.waiting import Waiter, wait_any
    from penstock.queue.wide.creation import MemoryQueue

__getattr__ = late_names(__name__)

__all__ = [
    "AlreadyOwned",
    "Cursor",
    "CursorFile",
    "CursorTable",
    "InputStream",
    "MemoryQueue",
    "OutputStream",
    "StreamKind",
    "StreamState",
    "Waiter",
    "list_streams",
    "remove_stream",
    "wait_any",
]
