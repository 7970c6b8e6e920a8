"""The Fast Message Queue: wide and classic queues, logs, streams, cursors."""

from penstock.queue.cursors import Cursor, CursorFile, CursorTable
from penstock.queue.streams import InputStream, OutputStream
from penstock.queue.waiting import Waiter, wait_any
from penstock.queue.wide.creation import MemoryQueue

__all__ = [
    "Cursor",
    "CursorFile",
    "CursorTable",
    "InputStream",
    "MemoryQueue",
    "OutputStream",
    "Waiter",
    "wait_any",
]
