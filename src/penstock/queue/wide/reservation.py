"""How is a message made in place, in the queue's own memory?"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self

from penstock.core.errors import Closed

if TYPE_CHECKING:
    from types import TracebackType

    from penstock.queue.wide.writer import WideWriter

__all__ = ["Reservation"]


class Reservation:
    """Memory of a queue for one payload. Nobody sees it before it is committed.

    As a context manager it commits at the end, and aborts when an error ends it.
    """

    __slots__ = ("__weakref__", "_is_open", "_writer", "buffer")

    def __init__(self, buffer: memoryview, writer: WideWriter) -> None:
        #: The payload's place, to be written to.
        self.buffer = buffer
        self._writer = writer
        self._is_open = True

    def commit(self, size: int | None = None) -> int:
        """Append the message, with all of the buffer or its first `size` bytes; return its number.

        :raises ValueError: it was committed or aborted before, or has not that many bytes.
        """
        if not self._is_open:
            raise ValueError("this reservation was committed or aborted before")
        if size is not None and not 0 <= size <= self.buffer.nbytes:
            raise ValueError(f"{size} bytes of a reservation of {self.buffer.nbytes}")
        size = self.buffer.nbytes if size is None else size
        self._is_open = False  # it is over, also if what follows the append meets an error
        self.buffer.release()
        seq = self._writer._commit(size)  # noqa: SLF001 - a part of it
        assert seq is not None
        return seq

    def abort(self) -> None:
        """Give it up; there is no message then. Again, or after commit: nothing."""
        if self._is_open:
            self._is_open = False
            self.buffer.release()
            with suppress(Closed):  # the writer gave it up then
                self._writer._abort()  # noqa: SLF001

    def give_up(self) -> None:
        """Let go of the memory: the writer was closed."""
        self._is_open = False
        with suppress(BufferError):  # somebody has taken a part of it
            self.buffer.release()

    def __del__(self) -> None:
        self.abort()  # a writer with a reservation writes nothing else

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._is_open:
            self.commit()
