"""What does everything have that is opened, and given back at the end of a `with`?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Closable"]


class Closable(ABC):
    """Is closed at the end of a `with`."""

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
