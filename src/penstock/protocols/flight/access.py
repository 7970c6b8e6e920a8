"""Who may come in, with which token, and how many at once?"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pyarrow import flight

from penstock.core.errors import InvalidOption
from penstock.protocols.flight.errors import ServerBusy
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Clients", "TokenGate", "load_token"]

log = logging.getLogger(__name__)

_LONGEST_TOKEN: Final = 4096
#: Connections remembered, to log each of them once.
_REMEMBERED: Final = 1000


def load_token(file: Path) -> bytes:
    """Read a token from a file: one line.

    :raises InvalidOption: there is none in it, or it cannot be one.
    :raises StorageError: the file cannot be read.
    """
    with storage_errors("reading", str(file)), file.open("rb") as stream:
        token = stream.read(_LONGEST_TOKEN + 1).strip()
    return check_token(token, "token_file", file)


def check_token(token: bytes, option: str, where: object) -> bytes:
    """Make sure that a token can go into a header. The token itself is never shown."""
    if not 0 < len(token) <= _LONGEST_TOKEN or not all(0x21 <= byte <= 0x7E for byte in token):  # noqa: PLR2004
        raise InvalidOption(
            option, str(where), f"a token is 1 to {_LONGEST_TOKEN} visible ASCII characters"
        )
    return token


class TokenGate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets in who knows the token."""

    def __init__(self, token: bytes) -> None:
        super().__init__()
        self._expected = b"Bearer " + token

    def __repr__(self) -> str:
        return "<TokenGate>"

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        del info
        given = [value for key, values in headers.items() if key.lower() == "authorization"
                 for value in values]  # fmt: skip
        found = given[0] if len(given) == 1 else b""
        found = found.encode(errors="replace") if isinstance(found, str) else bytes(found)
        # In constant time: how long it takes must not tell how much of it is right.
        if not hmac.compare_digest(found, self._expected):
            reason = "the token is wrong" if given else "a token is needed"
            log.warning("a client was refused: %s", reason)
            raise flight.FlightUnauthenticatedError(reason)


class Clients:
    """The connections with a call under way, up to a limit. Safe to share between threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._known: OrderedDict[str, None] = OrderedDict()
        #: Connections seen so far, and calls made and refused.
        self.seen = 0
        self.calls = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """Count a call of a connection for as long as it takes.

        :raises ServerBusy: there are as many clients as allowed.
        """
        with self._lock:
            if peer not in self._calls and len(self._calls) >= self._limit:
                self.refused += 1
                log.warning("%s was refused: %d clients are here", peer, self._limit)
                raise ServerBusy(self._limit, hint="try again later, or raise --max-clients")
            self._calls[peer] += 1
            self.calls += 1
            is_new = peer not in self._known
            self._known[peer] = None
            self._known.move_to_end(peer)
            if is_new:
                self.seen += 1
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        if is_new:
            log.info("%s connected", peer)
        try:
            yield
        finally:
            with self._lock:
                self._calls[peer] -= 1
                if not self._calls[peer]:
                    del self._calls[peer]
