"""Which queue does a client of the server mean, and may it?"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from penstock.core.errors import InvalidURL
from penstock.protocols.lrose.addresses import path_of
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.log.segments import is_log
from penstock.queue.wide.queue_file import SUFFIX

__all__ = ["QueueRoot"]

_LONGEST: Final = 1024
_LONGEST_PART: Final = 240
_DEEPEST: Final = 32
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
#: Where the bytes of a queue may be, by the ending of its name.
_FILES: Final = ("", SUFFIX, ".stat", ".buf", ".lock")


class QueueRoot:
    """The directory that a server serves, and nothing beside it."""

    def __init__(self, folder: Path, *, shared_memory: bool = False) -> None:
        self.folder = folder.resolve()
        self._told = folder.absolute()
        self._shared_memory = shared_memory

    def path(self, said: str) -> str:
        """Return the path of the queue that a client named, in LROSE's spelling or without it.

        :raises InvalidURL: it leads out of the root, or no queue can have that name.
        """
        name = path_of(said)
        if len(os.fsencode(name)) > _LONGEST or _CONTROL.search(name):
            raise InvalidURL(name[:100], "no queue has such a name")
        if name.startswith("/"):
            try:
                name = str(Path(os.path.normpath(name)).relative_to(self.folder))
            except ValueError:
                raise InvalidURL(name, "it is not below the directory that is served") from None
        parts = [part for part in name.split("/") if part not in {"", "."}]
        if not parts or ".." in parts or len(parts) > _DEEPEST:
            raise InvalidURL(name, "it is not below the directory that is served")
        if any(len(os.fsencode(part)) > _LONGEST_PART for part in parts):
            raise InvalidURL(name, "a part of it is longer than the name of a file can be")
        path = str(self.folder.joinpath(*parts))
        # No link on the way, or at its end, may lead out.
        for ending in _FILES:
            if not Path(os.path.realpath(path + ending)).is_relative_to(self.folder):
                raise InvalidURL(name, "it leads out of the directory that is served")
        # A log's segments look like queues, and belong to the log.
        if any(map(is_log, (self.folder.joinpath(*parts[:depth]) for depth in range(len(parts))))):
            raise InvalidURL(
                name, "it is inside of a log", hint="penstock serve flight serves the log itself"
            )
        if shared_memory_key(path) is not None and not self._shared_memory:
            raise InvalidURL(
                name,
                "a queue in shared memory is not below the directory that is served",
                hint="start the server with --shared-memory",
            )
        return path

    def as_told(self, path: str) -> str:
        """Return the path of a queue below the root as the server was told it, links and all."""
        return str(self._told / Path(path).relative_to(self.folder))

    def hide(self, text: str) -> str:
        """Return a text without the path of the root, which is no client's business."""
        return text.replace(f"{self.folder}/", "")
