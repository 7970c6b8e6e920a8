"""How are new files, and the stream of a writer, registered with the data map of a site?

As by LROSE's `DsLdataInfo`: every entry written is registered with the map of this machine, and a
map that is down does not disturb the writer (docs/specs/lrose.md 3.6).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.capabilities import AllOrNone, InPlaceWriter, KeepsOrigin, Reservation
from penstock.core.endpoints import identity
from penstock.core.interfaces import Writer
from penstock.core.url import URL
from penstock.protocols.lrose.datamapper_client import DEFAULT_INTERVAL, Registrar, below_data_dir
from penstock.protocols.lrose.datamapper_wire import NO_LEAD
from penstock.protocols.lrose.ldata_format import UNKNOWN, LatestInfo, guess_data_type

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.statistics import WriterStatistics
    from penstock.core.stream_id import StreamId
    from penstock.protocols.lrose.datamapper_client import DataMapClient, RegistrarStatistics

__all__ = ["MapRegistrar", "Register", "RegisteredWriter", "data_set_of", "registered"]

# --- entries of latest_data_info ----------------------------------------------------------------

#: Called with each entry written, and its directory.
Register: TypeAlias = Callable[[LatestInfo, str], object]

#: Most data sets of one registrar: each has a thread.
_MOST = 64
#: Seconds for the last registrations of all of them at `close`.
_PATIENCE = 2.0


class MapRegistrar:
    """Registers entries with the DataMapper. It never fails, and only `close` waits for it.

    A slow map gets only the latest of several entries.
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
        """Register the last entries, if the map answers soon enough."""
        until = time.monotonic() + _PATIENCE
        while self._known:
            self._known.popitem()[1].close(patience=max(0.0, until - time.monotonic()))


# --- streams ------------------------------------------------------------------------------------


def registered(
    writer: Writer,
    *,
    directory: str | None = None,
    datatype: str | None = None,
    interval: float = DEFAULT_INTERVAL,
    client: DataMapClient | None = None,
) -> RegisteredWriter:
    """Wrap a writer so that it registers its stream with the DataMapper.

    After a write, at most once in `interval` seconds, new data are registered with the DataMapper
    of this machine, or that of `client`. A DataMapper that is down does not affect the writer.
    `DATA_MAPPER_ACTIVE=false` in the environment turns it off.

    `directory` and `datatype` name the stream in the map; see `data_set_of`.

    :raises InvalidOption: the interval is negative.
    """
    own_type, own_directory = data_set_of(writer.url)
    registrar = Registrar(
        own_directory if directory is None else directory,
        own_type if datatype is None else datatype,
        interval=interval,
        client=client,
    )
    kind: type[RegisteredWriter] = RegisteredWriter
    if isinstance(writer, InPlaceWriter):  # all of these keep origins
        kind = _InPlace
    elif isinstance(writer, KeepsOrigin):
        kind = _Keeping
    elif isinstance(writer, AllOrNone):
        kind = _File
    return kind(writer, registrar)


def data_set_of(url: str) -> tuple[str, str]:
    """Return the data type and the directory that a stream has on the map.

    For a local stream: its kind and its path without `$DATA_DIR`, as LROSE's own queues register
    (`fmq`). For a remote stream: its kind, and the URL without options.
    """
    kind, parsed = identity(url).kind, URL.parse(url)
    if parsed.host is not None:
        return kind, parsed.text.partition("?")[0]
    return kind, below_data_dir(parsed.path.removesuffix(".fmq"))


class RegisteredWriter(Writer):
    """A writer whose stream is registered; has all attributes of the wrapped writer."""

    def __init__(self, writer: Writer, registrar: Registrar) -> None:
        super().__init__(writer.url)
        self._writer = writer
        self._registrar = registrar
        # A class variable elsewhere; what it says depends on the writer here.
        self.cannot_carry = writer.cannot_carry  # type: ignore[misc]

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        seq = self._writer.write(payload, type, subtype, time_ns, created_ns, stream, attributes)
        self._registrar.note()
        return seq

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        return self._noted(self._writer.write_many(payloads, type, subtype))

    def write_split(
        self, data: bytes, ending: bytes, type: int = 0, subtype: int = 0
    ) -> int | None:
        return self._noted(self._writer.write_split(data, ending, type, subtype))

    def write_batch(self, batch: Batch) -> int | None:
        return self._noted(self._writer.write_batch(batch))

    def _noted(self, last: int | None) -> int | None:
        if last is not None:
            self._registrar.note()
        return last

    def flush(self) -> None:
        self._writer.flush()

    @property
    def syncs(self) -> bool:
        return self._writer.syncs

    def statistics(self) -> WriterStatistics:
        return self._writer.statistics()

    def registrations(self) -> RegistrarStatistics:
        """Return the numbers of successful and failed registrations."""
        return self._registrar.statistics()

    def close(self) -> None:
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._writer.__exit__(kind, error, trace)
        finally:
            self._registrar.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while this is being made, or unpickled
            raise AttributeError(name)
        return getattr(self._writer, name)


class _Keeping(RegisteredWriter, KeepsOrigin):
    """A wrapped writer that preserves the creation times of copied messages."""


class _File(RegisteredWriter, AllOrNone):
    """A wrapped writer of a file, which is there when it is closed."""


class _InPlace(_Keeping, InPlaceWriter):
    """A wrapped writer in whose queue messages can be built in place."""

    def reserve(self, *args: Any, **options: Any) -> Reservation:
        assert isinstance(self._writer, InPlaceWriter)
        reservation = self._writer.reserve(*args, **options)
        self._registrar.note()
        return reservation
