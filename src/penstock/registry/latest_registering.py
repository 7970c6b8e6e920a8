"""How does the DataMapper hear of a new file?

As from LROSE's `DsLdataInfo`: every entry written is registered with the map of this machine, and a
map that is down, or was never started, stops nobody (spec lrose 3.6).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from penstock.protocols.lrose.datamapper_client import below_data_dir
from penstock.protocols.lrose.datamapper_info import NO_LEAD
from penstock.protocols.lrose.datamapper_registrar import Registrar
from penstock.protocols.lrose.ldata_info import UNKNOWN, LatestInfo, guess_data_type

if TYPE_CHECKING:
    from penstock.protocols.lrose.datamapper_client import DataMapClient

__all__ = ["MapRegistrar", "Register"]

#: Is told of each entry written, and of the directory it was written to.
Register: TypeAlias = Callable[[LatestInfo, str], object]

#: Data sets that one registrar knows at a time: each has a thread.
_MOST = 64
#: Seconds that all of them together have at the end.
_PATIENCE = 2.0


class MapRegistrar:
    """Tells the DataMapper of entries. It never fails, and nobody waits for it but who closes it.

    When the map is slow, it hears of the latest of several entries.
    """

    def __init__(self, client: DataMapClient | None = None) -> None:
        self._client = client
        self._known: dict[tuple[str, str], Registrar] = {}

    def __call__(self, info: LatestInfo, directory: str) -> None:
        kind = info.data_type if info.data_type != UNKNOWN else guess_data_type(directory)
        key = below_data_dir(directory), kind
        registrar = self._known.pop(key, None)
        if registrar is None:
            if len(self._known) >= _MOST:
                self._known.pop(next(iter(self._known))).close(patience=0)
            registrar = Registrar(*key, interval=0, client=self._client, level=logging.DEBUG)
        self._known[key] = registrar  # behind those that were not heard of for longer
        registrar.note(info.latest_time, info.forecast_lead_secs if info.is_forecast else NO_LEAD)

    def close(self) -> None:
        """Let the map hear of the last entries, if it takes all of them soon."""
        until = time.monotonic() + _PATIENCE
        while self._known:
            self._known.popitem()[1].close(patience=max(0.0, until - time.monotonic()))
