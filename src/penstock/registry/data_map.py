"""Which data sets does a site have, and how fresh are they?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption, PenstockError
from penstock.protocols.lrose.datamapper_info import DataSetInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ALL", "DEFAULT_MAX_ENTRIES", "DataMap", "MapFull", "guess_datatype"]

#: Deletes by it match every value of a field.
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
    """The map holds as many data sets as it may."""

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

    Who registers what changes only the fields that are said below; LROSE's programs rely on it.
    """

    def __init__(
        self, *, max_entries: int = DEFAULT_MAX_ENTRIES, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if max_entries < 1:
            raise InvalidOption("max_entries", max_entries, "must be at least 1")
        self.max_entries = max_entries
        #: Grows with every change, so that who saves the map knows whether there is need.
        self.version = 0
        self._clock = clock
        self._entries: dict[tuple[str, str, str], DataSetInfo] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # --- registering ------------------------------------------------------------------------

    def register_latest(self, info: DataSetInfo) -> None:
        """Note the time and the forecast lead of the latest data.

        :raises MapFull: there is no room for another data set.
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
        """Note the status text.

        :raises MapFull: there is no room for another data set.
        """
        self._put(replace(self._entry(info), status=info.status, last_reg_time=self._now()))

    def register_data_set(self, info: DataSetInfo) -> None:
        """Note what is in store: its first and last time, files and bytes.

        :raises MapFull: there is no room for another data set.
        """
        # LROSE leaves the time of registration alone here: this comes from a scout, not from the
        # writer of the data.
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
        """Take whole entries as they are, in place of those that are there.

        :raises MapFull: there is no room for all of them; none was taken.
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
        """Remove the entries not heard of for more than `age` seconds; return how many."""
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
        """Return every entry as it is kept, sorted as LROSE sorts them."""
        return sorted(self._entries.values(), key=lambda entry: entry.sort_key)

    def selected(self, datatype: str = "", directory: str = "") -> list[DataSetInfo]:
        """Return those of a type and of a directory; an empty text matches any."""
        return [
            entry
            for entry in self.all()
            if datatype in {"", entry.datatype} and directory in {"", entry.dir}
        ]

    # --- parts of these ---------------------------------------------------------------------

    def _entry(self, info: DataSetInfo) -> DataSetInfo:
        """Return the entry that is meant, or a new one."""
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
    """Return the time that an entry's age counts from: the first of these that is known."""
    return entry.last_reg_time or entry.end_time or entry.start_time or entry.latest_time
