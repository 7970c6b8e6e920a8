"""How does a reader of latest_data_info remember its place, as LROSE's readers do?

`setSaveLatestReadInfo`: an XML file of the same form in a directory for temporary files, whose
`user_info1` names the last entry that was read (spec lrose 3.5).
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, Malformed, PositionError, StorageError
from penstock.protocols.lrose.ldata_body import decode_body
from penstock.protocols.lrose.ldata_info import LatestInfo
from penstock.protocols.lrose.ldata_xml import decode_xml
from penstock.queue.classic.layout import ID_COUNT
from penstock.registry.latest_files import write_state
from penstock.registry.latest_settings import InfoFiles

if TYPE_CHECKING:
    from penstock.core.clock import Clock
    from penstock.queue.classic.reader import ClassicReader

__all__ = ["SavedPlace", "stands_behind"]

log = logging.getLogger(__name__)

_ID: Final = re.compile(r"FMQ_id:([0-9]{1,10})")


class SavedPlace:
    """The file in which one reader of one directory keeps its place."""

    def __init__(
        self, label: str, directory: str, place: str | os.PathLike[str] | None = None
    ) -> None:
        """Name the file, in `$TMP_DIR` or /var/tmp unless another place is given.

        :raises InvalidOption: the label cannot be part of a file's name.
        """
        if not label or "/" in label or "\0" in label:
            raise InvalidOption("label", label, "is a part of a file's name")
        name = f"latest_read_info.{label}.{directory}".replace("/", "_")
        if place is None:
            place = os.environ.get("TMP_DIR") or "/var/tmp"  # noqa: S108 - where LROSE has it
        self._files = InfoFiles(place, name)
        self._max_time = 0

    @property
    def path(self) -> str:
        """Where it is."""
        return str(self._files.xml)

    def load(self, clock: Clock, max_age: float | None = None) -> tuple[int, int] | None:
        """Return the id and the valid time of the entry read last; None: none, or too old."""
        try:
            status = self._files.xml.stat()
            age = clock.now_ns() // 1_000_000_000 - int(status.st_mtime)
            if max_age is not None and 0 < max_age < age:
                return None
            kept = decode_xml(self._files.xml.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, Malformed) as error:
            # Not ours to remove: somebody may want to see what became of it.
            log.warning("the place kept in %s is not readable: %s", self.path, error)
            return None
        found = _ID.match(kept.user_info1)
        return (int(found[1]), kept.latest_time) if found else None

    def save(self, id: int, info: LatestInfo, rel_data_path: str) -> None:
        """Keep the id of an entry that was read. A failure is told of, and reading goes on."""
        self._max_time = max(self._max_time, info.valid_time)
        kept = LatestInfo(
            latest_time=info.valid_time,
            rel_data_path=rel_data_path,
            user_info1=f"FMQ_id:{id}",
            max_time=self._max_time,
        )
        try:
            write_state(self._files, kept)
        except StorageError as error:
            log.warning("cannot keep the place of this reader: %s", error)


def stands_behind(queue: ClassicReader, id: int, valid_time: int) -> bool:
    """Stand behind an entry; False: it is gone, or another one has its id by now."""
    try:
        queue.seek_after_id(id)
    except PositionError:
        return False
    queue.seek_back()
    message = queue.read(timeout=0)
    if message is None or message.seq % ID_COUNT != id:
        return False
    try:
        return decode_body(message.payload).valid_time == valid_time
    except Malformed:
        return False
