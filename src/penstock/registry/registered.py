"""How does a writer's stream come onto the map of a site's data?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.capabilities import InPlaceWriter, Reservation
from penstock.core.endpoints import identity
from penstock.core.interfaces import Writer
from penstock.core.url import URL
from penstock.protocols.lrose.datamapper_client import below_data_dir
from penstock.protocols.lrose.datamapper_registrar import DEFAULT_INTERVAL, Registrar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.statistics import WriterStatistics
    from penstock.core.stream_id import StreamId
    from penstock.protocols.lrose.datamapper_client import DataMapClient
    from penstock.protocols.lrose.datamapper_registrar import RegistrarStatistics

__all__ = ["RegisteredWriter", "data_set_of", "registered"]


def registered(
    writer: Writer,
    *,
    directory: str | None = None,
    datatype: str | None = None,
    interval: float = DEFAULT_INTERVAL,
    client: DataMapClient | None = None,
) -> RegisteredWriter:
    """Return a writer that does what the given one does, and registers its stream as it goes.

    After a write, at most once in `interval` seconds, the DataMapper of this machine (or the one
    that `client` talks to) hears that there are new data. Whether it is there makes no difference
    to the writer. `DATA_MAPPER_ACTIVE=false` in the environment turns it off.

    `directory` and `datatype` are what the map calls it; see `data_set_of`.

    :raises InvalidOption: the interval is negative.
    """
    own_type, own_directory = data_set_of(writer.url)
    registrar = Registrar(
        own_directory if directory is None else directory,
        own_type if datatype is None else datatype,
        interval=interval,
        client=client,
    )
    kind = _InPlace if isinstance(writer, InPlaceWriter) else RegisteredWriter
    return kind(writer, registrar)


def data_set_of(url: str) -> tuple[str, str]:
    """Return the data type and the directory that a stream has on the map.

    That is `fmq` and the path of a queue, without `$DATA_DIR`, as LROSE's own queues register
    themselves; the scheme and the URL without its options for what is not on this machine.
    """
    kind, parsed = identity(url).kind, URL.parse(url)
    if parsed.host is not None:
        return kind, parsed.text.partition("?")[0]
    return kind, below_data_dir(parsed.path.removesuffix(".fmq"))


class RegisteredWriter(Writer):
    """A writer whose stream is registered. What only that kind of writer has, it has as well."""

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

    def write_batch(self, batch: Batch) -> int | None:
        return self._noted(self._writer.write_batch(batch))

    def _noted(self, last: int | None) -> int | None:
        if last is not None:
            self._registrar.note()
        return last

    def flush(self) -> None:
        self._writer.flush()

    def statistics(self) -> WriterStatistics:
        return self._writer.statistics()

    def registrations(self) -> RegistrarStatistics:
        """Return how often the map was told, and how often it could not be."""
        return self._registrar.statistics()

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._registrar.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while this is being made, or unpickled
            raise AttributeError(name)
        return getattr(self._writer, name)


class _InPlace(RegisteredWriter, InPlaceWriter):
    """A writer in whose queue messages can be made."""

    def reserve(self, *args: Any, **options: Any) -> Reservation:
        assert isinstance(self._writer, InPlaceWriter)
        reservation = self._writer.reserve(*args, **options)
        self._registrar.note()
        return reservation
