"""Which files of latest_data_info are used, and where are they?

LROSE's names, and the environment variables that its programs obey (spec lrose 3.1 and 3.4).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from penstock.core.errors import InvalidOption, InvalidURL
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.classic.layout import MAX_BUFFER, STATUS_SIZE

__all__ = ["DEFAULT_NAME", "InfoFiles", "LatestSettings", "writing_is_off"]

#: What the files are called, behind an underscore, unless a program uses them for its own ends.
DEFAULT_NAME: Final = "latest_data_info"
_DEFAULT_SLOTS: Final = 2500
_BYTES_A_SLOT: Final = 500
_MOST_SLOTS: Final = MAX_BUFFER // _BYTES_A_SLOT
_LONGEST_NAME: Final = 200


def writing_is_off() -> bool:
    """Tell whether the person asked that no latest_data_info be written, as for old data."""
    return os.environ.get("LDATA_NO_WRITE") == "true"


def _is_on(variable: str) -> bool:
    return os.environ.get(variable) != "false"


def _slots() -> int:
    number = re.match(r"\s*\+?([0-9]{1,9})", os.environ.get("LDATA_FMQ_NSLOTS", ""))
    return int(number[1]) if number else _DEFAULT_SLOTS


def _is_in_shared_memory(name: str) -> bool:
    try:
        return shared_memory_key(name) is not None
    except InvalidURL:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestSettings:
    """Which forms are written and looked at. Defaults are LROSE's, or as the environment says."""

    name: str = DEFAULT_NAME
    use_ascii: bool = field(default_factory=lambda: _is_on("LDATA_AS_ASCII"))
    use_xml: bool = field(default_factory=lambda: _is_on("LDATA_AS_XML"))
    use_fmq: bool = field(default_factory=lambda: _is_on("LDATA_FMQ_ACTIVE"))
    #: Slots of a queue that is made: entries that a reader may be late by.
    fmq_slots: int = field(default_factory=_slots)
    #: Seconds to wait for another writer.
    lock_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or "\0" in self.name:
            raise InvalidOption("name", self.name, "is the name of a file, without a directory")
        if len(os.fsencode(self.name)) > _LONGEST_NAME:
            raise InvalidOption("name", self.name, f"is longer than {_LONGEST_NAME} bytes")
        if _is_in_shared_memory(f"_{self.name}"):
            raise InvalidOption("name", self.name, "is the name of a queue in shared memory")
        if not 1 <= self.fmq_slots <= _MOST_SLOTS:
            raise InvalidOption("fmq_slots", self.fmq_slots, f"must be from 1 to {_MOST_SLOTS:,}")

    @property
    def fmq_size(self) -> int:
        """Bytes of the buffer of a queue that is made."""
        return self.fmq_slots * _BYTES_A_SLOT

    def only(self, *, ascii: bool = False, xml: bool = False, fmq: bool = False) -> LatestSettings:
        """Return the same with these forms on and the others off."""
        return replace(self, use_ascii=ascii, use_xml=xml, use_fmq=fmq)


class InfoFiles:
    """The paths of one set of files."""

    def __init__(self, directory: str | os.PathLike[str], name: str = DEFAULT_NAME) -> None:
        #: As the person wrote it: what LROSE guesses the kind of data from.
        self.directory = os.fspath(directory)
        self.folder = Path(directory)
        self.ascii = self.folder / f"_{name}"
        self.xml = self.folder / f"_{name}.xml"
        #: The queue, for those who open one; its status file, for those who look for it.
        self.queue = str(self.ascii)
        self.stat = self.folder / f"_{name}.stat"
        self.buf = self.folder / f"_{name}.buf"
        self.temporary = self.folder / f"_{name}.tmp.{os.getpid()}"
        #: A catalog is kept for as long as this exists.
        self.catalog_wanted = self.folder / "_ldata_write_catalog"

    def has_queue(self) -> bool:
        """Tell whether both files of the queue are there."""
        return self.stat.exists() and self.buf.exists()

    def has_whole_queue(self) -> bool:
        """Tell whether they were also made to their end: the status comes last."""
        try:
            with self.stat.open("rb") as file:
                return bool(file.read(STATUS_SIZE).strip(b"\0")) and self.buf.exists()
        except OSError:
            return False
