"""How does a data map outlive the process that keeps it?

The file is the one that LROSE's DataMapper keeps: its entries, 864 bytes each, one after another.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed, StorageError
from penstock.core.whole_files import write_whole
from penstock.protocols.lrose.datamapper_info import INFO_SIZE, DataSetInfo
from penstock.queue.storage import storage_errors
from penstock.registry.data_map import MapFull

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from penstock.registry.data_map import DataMap

__all__ = ["load_state", "save_state", "state_bytes"]

log = logging.getLogger(__name__)

_DAMAGED: Final = ".damaged"


def state_bytes(infos: Iterable[DataSetInfo]) -> bytes:
    """Return what the file holds for these entries."""
    return b"".join(info.write() for info in infos)


def save_state(path: Path, content: bytes) -> None:
    """Write the file, whole at any moment, also when this process or the machine dies.

    The caller is the only one who writes it.

    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", str(path)):
        write_whole(path, content, sync=True)


def load_state(path: Path, into: DataMap) -> int:
    """Read a file that is there into the map, and return how many entries came.

    What is damaged is left out with a warning; the file as it was is kept beside.

    :raises StorageError: the operating system refuses.
    :raises MapFull: it holds more entries than the map may.
    """
    largest = into.max_entries * INFO_SIZE
    with storage_errors("reading", str(path)):
        try:
            with path.open("rb") as file:
                content = file.read(largest + 1)
        except FileNotFoundError:
            return 0
    if len(content) > largest:
        raise MapFull(into.max_entries)
    infos, faults = _entries(content)
    if faults:
        kept = _put_aside(path)
        log.warning(
            "the state file %s is damaged (%s): %d data sets of it are used; %s",
            path,
            "; ".join(faults),
            len(infos),
            kept,
        )
    into.register_full(infos)
    return len(infos)


def _entries(content: bytes) -> tuple[list[DataSetInfo], list[str]]:
    """Return the entries that are whole, and what is wrong with the others."""
    infos: list[DataSetInfo] = []
    faults: list[str] = []
    whole, rest = divmod(len(content), INFO_SIZE)
    unreadable = 0
    for at in range(0, whole * INFO_SIZE, INFO_SIZE):
        try:
            infos.append(DataSetInfo.read(content[at : at + INFO_SIZE], f"entry at byte {at}"))
        except Malformed as fault:
            unreadable += 1
            if unreadable == 1:  # one says enough: a file of another kind has nothing but faults
                faults.append(str(fault))
    if unreadable > 1:
        faults.append(f"{unreadable - 1:,} more entries like it")
    if rest:
        faults.append(f"it ends with {rest} bytes of an entry of {INFO_SIZE}")
    return infos, faults


def _put_aside(path: Path) -> str:
    """Keep a damaged file for a person to look at; say where."""
    aside = path.with_name(f"{path.name}{_DAMAGED}")
    try:
        with storage_errors("renaming", str(path)):
            path.replace(aside)
    except StorageError as error:
        return f"it could not be kept: {error}"
    return f"it is kept as {aside}"
