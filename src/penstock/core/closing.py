"""What does everything have that is opened, and given back at the end of a `with`?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Closable", "Concluding"]


class Closable(ABC):
    """Is closed at the end of a `with`."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Concluding(Closable):
    """Says when it is closed that its work is done, but not at the end of a `with` that failed.

    What was being worked on then is not done, and comes again.
    """

    __slots__ = ()

    @abstractmethod
    def _close(self, *, finished: bool) -> None:
        """Give everything back. Again: nothing."""

    def close(self) -> None:
        """Say that everything so far is done, and give everything back. Closing twice is fine."""
        self._close(finished=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(finished=kind is None)
