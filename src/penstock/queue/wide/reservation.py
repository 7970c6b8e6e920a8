"""How is a message made in place, in the queue's own memory?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Reservation"]


class Reservation:
    """Memory of a queue for one payload. Nobody sees it before it is committed.

    As a context manager it commits at the end, and aborts when an error ends it.
    """

    __slots__ = ("_finish", "buffer")

    def __init__(self, buffer: memoryview, finish: Callable[[int], int | None]) -> None:
        #: The payload's place, to be written to.
        self.buffer = buffer
        self._finish: Callable[[int], int | None] | None = finish

    def commit(self, size: int | None = None) -> int:
        """Append the message, with all of the buffer or its first `size` bytes; return its number.

        :raises ValueError: it was committed or aborted before, or has not that many bytes.
        """
        finish = self._finish
        if finish is None:
            raise ValueError("this reservation was committed or aborted before")
        if size is not None and not 0 <= size <= self.buffer.nbytes:
            raise ValueError(f"{size} bytes of a reservation of {self.buffer.nbytes}")
        seq = finish(self.buffer.nbytes if size is None else size)
        assert seq is not None
        self._finish = None
        self.buffer.release()
        return seq

    def abort(self) -> None:
        """Give it up; there is no message then. Again, or after commit: nothing."""
        if self._finish is not None:
            self._finish(-1)
            self._finish = None
            self.buffer.release()

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
        elif self._finish is not None:
            self.commit()
