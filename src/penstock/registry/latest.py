"""How do programs tell each other of new files? `LatestDataInfo`.

LROSE's latest_data_info: the writer of a file announces it in the directory, and programs that
process the files wait for that.
"""

from __future__ import annotations

import logging
import os
import time as clock_time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import Closed, InvalidOption
from penstock.core.interfaces import Closable
from penstock.protocols.lrose.ldata_format import NONE, UNKNOWN, LatestInfo
from penstock.registry.latest_files import (
    InfoFiles,
    LatestSettings,
    SavedPlace,
    data_path,
    write_files,
    writing_is_off,
)
from penstock.registry.latest_reader import InfoReader, LatestStatistics
from penstock.registry.registration import MapRegistrar, Register

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator

__all__ = ["LatestDataInfo", "info_about"]

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000_000


class LatestDataInfo(Closable):
    """The latest_data_info of one directory, to be written or read. For one thread at a time.

    `settings` selects LROSE's forms. With a `label` the read position is saved, as LROSE saves it,
    and the next process with that label resumes there; with `saves_at_once=False` only
    `save_place` saves it. Every entry written is registered with the
    DataMapper of this machine, if one runs; your own `register` is called instead, and None
    registers nothing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        settings: LatestSettings | None = None,
        label: str | None = None,
        label_max_age: float | None = None,
        label_place: str | os.PathLike[str] | None = None,
        saves_at_once: bool = True,
        register: Register | Literal["map"] | None = "map",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = LatestSettings() if settings is None else settings
        self._files = InfoFiles(directory, self.settings.name)
        saved = None if label is None else SavedPlace(label, self._files.directory, label_place)
        self._reader = InfoReader(
            self._files,
            self.settings,
            saved,
            saved_max_age=label_max_age,
            saves_at_once=saves_at_once,
            clock=clock,
        )
        self._map = MapRegistrar() if register == "map" else None
        self._register: Register | None = self._map if register == "map" else register
        self._clock = clock
        self._max_time = 0
        #: The number of the last entry written to the queue.
        self.last_seq: int | None = None
        self._closed = False

    def use(self, settings: LatestSettings) -> None:
        """Use other forms from now on; the read position stays.

        :raises InvalidOption: the settings are for files of another name.
        """
        if settings.name != self.settings.name:
            raise InvalidOption("name", settings.name, f"the files are called {self.settings.name}")
        self.settings = settings
        self._reader.use(settings)

    @property
    def directory(self) -> str:
        """The directory, as it was given."""
        return self._files.directory

    # --- writing ----------------------------------------------------------------------------

    def write(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        time: int | dt.datetime | None = None,
        info: LatestInfo | None = None,
        fmq_only: bool = False,
        **fields: Any,
    ) -> LatestInfo:
        """Announce a new file, and return the entry.

        `path` is the file, below the directory; `time` when its data is valid (or, of a forecast,
        when it was made), in seconds since 1970 or as an aware datetime; now by default. Other
        fields are those of `LatestInfo`: `writer="Dsr2Vol"`, `data_type="mdv"`, … A
        `forecast_lead_secs` makes it a forecast. Or give a whole `info`, which is written as it is.

        :raises InvalidOption: a field does not fit LROSE's formats.
        :raises LockTimeout: another writer held the lock for the time allowed.
        :raises StorageError: the operating system refuses.
        """
        self._check_open()
        if info is None:
            seconds = _seconds(time, self._clock)
            info = info_about(self._files.directory, path, latest_time=seconds, **fields)
            self._max_time = max(self._max_time, info.latest_time)
            info = replace(info, max_time=self._max_time, prev_mod_time=self._reader.prev_mod_time)
        if writing_is_off():
            return info
        self.last_seq = write_files(
            self._files, self.settings, info, self._clock, queue_only=fmq_only
        )
        if self._register is not None:
            self._register(info, self._files.directory)
        return info

    # --- reading ----------------------------------------------------------------------------

    def read(
        self,
        max_valid_age: float | None = None,
        *,
        from_start: bool = False,
        forced: bool = False,
    ) -> LatestInfo | None:
        """Return what is new since the last read, in order, or None.

        The first read returns the newest entry; with `from_start` the oldest one in the queue, with
        a label the one after the last that was read. Entries that exist at first and were written
        more than `max_valid_age` seconds ago are skipped. `forced` returns the last entry again.

        :raises StorageError: the operating system refuses.
        """
        self._check_open()
        return self._reader.read(max_valid_age, from_start=from_start, forced=forced)

    def follow(
        self,
        max_valid_age: float | None = None,
        *,
        from_start: bool = False,
        timeout: float | None = None,
    ) -> Iterator[LatestInfo]:
        """Yield entries as they arrive; end when none arrived for `timeout` seconds."""
        while True:
            info = self.wait(max_valid_age, from_start=from_start, timeout=timeout)
            if info is None:
                return
            yield info

    def wait(
        self,
        max_valid_age: float | None = None,
        *,
        from_start: bool = False,
        timeout: float | None = None,
    ) -> LatestInfo | None:
        """Wait for the next entry, and return it; None: timeout."""
        until = None if timeout is None else clock_time.monotonic() + timeout
        while True:
            self._check_open()
            left = 1.0 if until is None else until - clock_time.monotonic()
            info = self._reader.read(max_valid_age, from_start=from_start, wait=max(left, 0.0))
            if info is not None or left <= 0:
                return info
            if not self._reader.is_open:
                self._reader.wait(left)

    def save_place(self) -> None:
        """Save the position behind the last entry read, if there is a label."""
        self._check_open()
        self._reader.save_place()

    def data_path(self, info: LatestInfo) -> str | None:
        """Return the path of an entry's file; None: it does not exist (any more)."""
        return data_path(info, self._files.directory)

    def statistics(self) -> LatestStatistics:
        """Return the counters of delivered, lost and unreadable entries."""
        return self._reader.statistics()

    # --- the rest ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the latest_data_info of {self.directory} was closed")

    def close(self) -> None:
        """Release all resources. Idempotent."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            if self._map is not None:
                self._map.close()


def info_about(
    directory: str,
    path: str | os.PathLike[str] | None,
    *,
    latest_time: int,
    forecast_lead_secs: int | None = None,
    **fields: Any,
) -> LatestInfo:
    """Return the entry for a file, with the fields that its name implies.

    :raises InvalidOption: the file is not below the directory, or a field does not fit.
    """
    unknown = fields.keys() - LatestInfo.__slots__
    if unknown:
        raise InvalidOption(
            min(unknown), fields[min(unknown)], "latest_data_info has no such field"
        )
    if path is not None:
        rel = _below(os.fspath(path), fields.get("displaced_dir_path") or directory)
        fields.setdefault("rel_data_path", rel)
        ext = os.path.splitext(rel)[1].removeprefix(".")  # noqa: PTH122
        fields.setdefault("file_ext", ext or NONE)
    if forecast_lead_secs is not None:
        fields["forecast_lead_secs"] = forecast_lead_secs
        fields.setdefault("is_forecast", True)
    return LatestInfo(latest_time=latest_time, **fields)


def _below(path: str, directory: str) -> str:
    """Return the path relative to the directory."""
    below = path
    if os.path.isabs(path):  # noqa: PTH117
        below = os.path.relpath(path, os.path.abspath(directory))  # noqa: PTH100
    below = os.path.normpath(below)
    if below.split("/")[0] == ".." or below == UNKNOWN:
        raise InvalidOption("path", path, f"is not below {directory}")
    return below


def _seconds(moment: int | dt.datetime | None, clock: Clock) -> int:
    if moment is None:
        return clock.now_ns() // _SECOND
    if isinstance(moment, int):
        return moment
    if moment.utcoffset() is None:
        raise InvalidOption("time", moment, "has no time zone", hint="datetime(…, tzinfo=UTC)")
    return int(moment.timestamp() // 1)
