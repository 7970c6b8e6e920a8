"""What does a stream remember of those that append to it batch by batch?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StreamNotes"]


class StreamNotes(ABC):
    """Small notes that a stream keeps, one for each writer by its name; any JSON object.

    They are where the stream is, so that a writer on another machine finds them, too.
    """

    @abstractmethod
    def read(self) -> dict[str, dict[str, Any]]:
        """Return all notes, that of the writer who was there last at the end.

        :raises DamagedQueue: they are not what `write` wrote.
        :raises StorageError: they cannot be read.
        """

    @abstractmethod
    def write(self, name: str, note: Mapping[str, Any] | None, *, sync: bool) -> None:
        """Keep the note of a writer, or (None) forget it.

        :param sync: return when it is on the disk
        :raises StorageError: there is no space, or no permission.
        """
