"""Which data sets does a site have, how fresh are they, and how is that kept over a restart?

The file is the one that LROSE's DataMapper keeps: its entries, 864 bytes each, one after another.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption, Malformed, PenstockError, StorageError
from penstock.core.whole_files import write_whole
from penstock.protocols.lrose.datamapper_wire import INFO_SIZE, DataSetInfo
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = [
    "ALL",
    "DEFAULT_MAX_ENTRIES",
    "DataMap",
    "LoadedState",
    "MapFull",
    "guess_datatype",
    "load_state",
    "save_state",
    "state_bytes",
]

#: In a delete, matches every value of a field.
ALL: Final = "all"

DEFAULT_MAX_ENTRIES: Final = 10_000

_UNKNOWN: Final = "unknown"
_NS_PER_SECOND: Final = 1_000_000_000
_LATEST_SECOND: Final = 2**31 - 1

#: Types that a directory may name, in LROSE's order: the first that fits is taken.
_DATATYPES: Final = (
    "gif", "grib", "html", "jpg", "md", "mdv", "nc", "other", "png", "rapic", "raw", "sim",
    "simulate", "spdb", "titan", "www", "www_content", "xml",
)  # fmt: skip


class MapFull(PenstockError):
    """The map has reached its limit of data sets."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the data map is full: it may hold {limit:,} data sets",
            hint="purge old ones with --purge-age, or allow more with --max-entries",
        )
        self.limit = limit


def guess_datatype(directory: str) -> str:
    """Return the type that a directory's path names, or `unknown`."""
    for datatype in _DATATYPES:
        if f"/{datatype}/" in directory or directory.startswith(f"{datatype}/"):
            return datatype
    return _UNKNOWN


class DataMap:
    """The table of a DataMapper: one entry for each data type, directory and host.

    Each kind of registration changes only the fields named below; LROSE's programs rely on it.
    """

    def __init__(
        self, *, max_entries: int = DEFAULT_MAX_ENTRIES, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if max_entries < 1:
            raise InvalidOption("max_entries", max_entries, "must be at least 1")
        self.max_entries = max_entries
        #: Grows with every change: tells whether the map has to be saved.
        self.version = 0
        self._clock = clock
        self._entries: dict[tuple[str, str, str], DataSetInfo] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # --- registering ------------------------------------------------------------------------

    def register_latest(self, info: DataSetInfo) -> None:
        """Set the time and the forecast lead of the latest data.

        :raises MapFull: the map has no room for another data set.
        """
        entry = self._entry(info)
        self._put(
            replace(
                entry,
                latest_time=info.latest_time,
                forecast_lead_time=info.forecast_lead_time,
                last_reg_time=self._now(),
            )
        )

    def register_status(self, info: DataSetInfo) -> None:
        """Set the status text.

        :raises MapFull: the map has no room for another data set.
        """
        self._put(replace(self._entry(info), status=info.status, last_reg_time=self._now()))

    def register_data_set(self, info: DataSetInfo) -> None:
        """Set what is stored: first and last time, files and bytes.

        :raises MapFull: the map has no room for another data set.
        """
        # LROSE keeps the time of registration here: this comes from a scout, not from the writer
        # of the data.
        self._put(
            replace(
                self._entry(info),
                start_time=info.start_time,
                end_time=info.end_time,
                nfiles=info.nfiles,
                total_bytes=info.total_bytes,
            )
        )

    def register_full(self, infos: Iterable[DataSetInfo]) -> None:
        """Store complete entries unchanged; they replace existing ones.

        :raises MapFull: the map has no room for all of them; none was stored.
        """
        given = {info.key: info for info in infos}
        if len(self._entries.keys() | given.keys()) > self.max_entries:
            raise MapFull(self.max_entries)
        if given:
            self._entries |= given
            self.version += 1

    # --- removing ---------------------------------------------------------------------------

    def delete(self, datatype: str, directory: str, hostname: str) -> int:
        """Remove the entries that match, where `all` matches anything; return how many."""
        wanted = (datatype, directory, hostname)
        return self._remove(
            key
            for key in self._entries
            if all(want in {ALL, have} for want, have in zip(wanted, key, strict=True))
        )

    def purge(self, age: float) -> int:
        """Remove the entries without an update for more than `age` seconds; return how many."""
        now = self._now()
        return self._remove(
            key for key, entry in self._entries.items() if now - _last_heard(entry) > age
        )

    def _remove(self, keys: Iterable[tuple[str, str, str]]) -> int:
        doomed = list(keys)
        for key in doomed:
            del self._entries[key]
        if doomed:
            self.version += 1
        return len(doomed)

    # --- looking ----------------------------------------------------------------------------

    def all(self) -> list[DataSetInfo]:
        """Return all entries, in LROSE's order."""
        return sorted(self._entries.values(), key=lambda entry: entry.sort_key)

    def selected(self, datatype: str = "", directory: str = "") -> list[DataSetInfo]:
        """Return the entries of a type and of a directory; an empty text matches any."""
        return [
            entry
            for entry in self.all()
            if datatype in {"", entry.datatype} and directory in {"", entry.dir}
        ]

    # --- parts of these ---------------------------------------------------------------------

    def _entry(self, info: DataSetInfo) -> DataSetInfo:
        """Return the entry of this key, or a new one."""
        if info.datatype in {"", _UNKNOWN}:
            info = replace(info, datatype=guess_datatype(info.dir))
        there = self._entries.get(info.key)
        if there is not None:
            return there
        if len(self._entries) >= self.max_entries:
            raise MapFull(self.max_entries)
        return DataSetInfo(
            hostname=info.hostname,
            ipaddr=info.ipaddr,
            datatype=info.datatype,
            dir=info.dir,
            status=info.status,
        )

    def _put(self, entry: DataSetInfo) -> None:
        self._entries[entry.key] = entry
        self.version += 1

    def _now(self) -> int:
        return min(self._clock.now_ns() // _NS_PER_SECOND, _LATEST_SECOND)


def _last_heard(entry: DataSetInfo) -> int:
    """Return the time from which an entry's age counts: the first of these that is known."""
    return entry.last_reg_time or entry.end_time or entry.start_time or entry.latest_time


# --- the file -----------------------------------------------------------------------------------

log = logging.getLogger(__name__)

_DAMAGED: Final = ".damaged"


def state_bytes(infos: Iterable[DataSetInfo]) -> bytes:
    """Return the content of the file for these entries."""
    return b"".join(info.write() for info in infos)


def save_state(path: Path, content: bytes) -> None:
    """Write the file atomically, also if this process or the machine dies.

    The caller must be the only writer.

    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", str(path)):
        write_whole(path, content, sync=True)


class LoadedState(NamedTuple):
    """What was found in the file."""

    entries: int
    #: Entries of it were skipped: it has to be saved again.
    is_damaged: bool


def load_state(path: Path, into: DataMap) -> LoadedState:
    """Load an existing file into the map.

    Damaged entries are skipped with a warning; the damaged file is copied. It stays itself until
    the next save, as a process that ends before that leaves nothing else.

    :raises StorageError: the operating system refuses.
    :raises MapFull: the file holds more entries than the map allows.
    """
    largest = into.max_entries * INFO_SIZE
    with storage_errors("reading", str(path)):
        try:
            with path.open("rb") as file:
                content = file.read(largest + 1)
        except FileNotFoundError:
            return LoadedState(0, is_damaged=False)
    if len(content) > largest:
        raise MapFull(into.max_entries)
    infos, faults = _entries(content)
    if faults:
        kept = _put_aside(path, content)
        log.warning(
            "the state file %s is damaged (%s): %d data sets of it are used; %s",
            path,
            "; ".join(faults),
            len(infos),
            kept,
        )
    into.register_full(infos)
    return LoadedState(len(infos), is_damaged=bool(faults))


def _entries(content: bytes) -> tuple[list[DataSetInfo], list[str]]:
    """Return the valid entries, and what is wrong with the others."""
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


def _put_aside(path: Path, content: bytes) -> str:
    """Copy a damaged file for inspection; return where."""
    aside = path.with_name(f"{path.name}{_DAMAGED}")
    try:
        with storage_errors("copying", str(path)):
            write_whole(aside, content, sync=True)
    except StorageError as error:
        return f"it could not be kept: {error}"
    return f"it is kept as {aside}"
