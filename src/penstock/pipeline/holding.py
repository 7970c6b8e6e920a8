"""How does a writer hear what a query has finished?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Held
from penstock.core.endpoints import open_reader
from penstock.core.errors import CursorInUse, Unsupported
from penstock.core.retry import Backoff, RetryPolicy, retry

if TYPE_CHECKING:
    from penstock.core.interfaces import Reader

__all__ = ["Holders"]

#: After a restart the process that planned the query before may still be about to end.
_LEAVING: Final = RetryPolicy(
    retry_on=(CursorInUse,), backoff=Backoff(initial=0.1, maximum=0.5), max_elapsed=10.0
)


class Holders:
    """Named readers that read nothing: each stands where the query is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._readers: dict[str, Reader] = {}

    def done(self, url: str, epoch: int, seq: int) -> None:
        """Let the writer of a stream go on up to this message.

        :raises CursorInUse: another query has this name.
        """
        reader = self._readers.get(url)
        if reader is not None and reader.bounds().epoch != epoch:
            # It was created anew. One that reads nothing never gets to the end of the old one.
            self._readers.pop(url).close()
            reader = None
        if reader is None:
            reader = self._readers[url] = retry(lambda: self._open(url), _LEAVING)
        if reader.bounds().epoch == epoch:
            reader.seek(seq)

    def _open(self, url: str) -> Reader:
        reader = open_reader(url, hold=self._name)
        if not isinstance(reader, Held):
            reader.close()
            raise Unsupported(f"{url} keeps no place of a reader: its writer waits for nobody")
        return reader

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
