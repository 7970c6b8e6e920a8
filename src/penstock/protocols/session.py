"""What does a protocol implement for a server, and which limits do its clients have?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.connection import Connection

__all__ = [
    "REFUSALS",
    "Conversation",
    "End",
    "Limits",
    "Refused",
    "ServerStatistics",
    "Session",
]


class Session(ABC):
    """A protocol's service for one client. Called by one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    def serve(self) -> bool:
        """Serve the received data; True: call again on more data, False: the session is over.

        Call `connection.welcome()` after the first message, which has a deadline. After that,
        the session may wait for more as long as it likes. When it returns True, it must not hold
        unprocessed bytes.

        :raises Malformed: the client does not follow the protocol.
        :raises Refused: the client may not do this.
        :raises OSError: the connection broke, or timed out.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Release all resources: the client has left, or is cut off."""


class Conversation(Session):
    """A session that is served by one call from start to end."""

    def __init__(self, connection: Connection, serve: Callable[[Connection], None]) -> None:
        super().__init__(connection)
        self._serve = serve

    def serve(self) -> bool:
        self._serve(self.connection)
        return False


class End(StrEnum):
    """Why a connection ended, or why it was refused."""

    #: It was served completely, or left.
    LEFT = "left"
    #: It sent nothing, or too little, or accepted nothing, for too long.
    TIMED_OUT = "timed out"
    #: It violated the protocol.
    MALFORMED = "malformed"
    #: It had too many unsent replies.
    BEHIND = "behind"
    #: It had sent no complete message when there were too many such clients, or no descriptor was
    #: left.
    CROWDED_OUT = "crowded out"
    #: The server failed; its log has the error.
    FAILED = "failed"
    #: The server stopped.
    STOPPED = "stopped"
    #: Refused: there are too many clients.
    CLIENTS = "clients"
    #: Refused: the system has no thread for it.
    THREADS = "threads"
    #: Refused: its token or key is wrong.
    TOKEN = "token"  # noqa: S105 - a reason


#: The reasons of refused connections.
REFUSALS: Final = (End.CLIENTS, End.THREADS, End.TOKEN)


class Refused(PenstockError):
    """A client is refused; the server counts it by its reason."""

    def __init__(self, reason: End, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a server's clients. The session limits the size of messages."""

    #: Clients that are served at the same time.
    max_clients: int = 256
    #: Seconds that a client has for its first message.
    first_message: float = 30.0
    #: Seconds that a client may be silent between two; None: until keep-alive probes fail.
    idle: float | None = None
    #: Seconds that a client may accept no data.
    stalled: float = 30.0
    #: The most connections that have sent nothing; beyond it, the oldest are closed.
    max_newcomers: int = 1024
    #: The most unsent bytes of all clients together; beyond it, the clients with the most are cut
    #: off. None: no limit.
    max_unsent: int | None = None


class ServerStatistics(NamedTuple):
    """Counters of a server: accepted = open + refused + ended."""

    #: Connections so far.
    accepted: int
    #: Connections now.
    open: int
    #: Refused connections, by reason.
    refused: dict[End, int]
    #: Other connections that ended, by reason.
    ended: dict[End, int]
    #: Bytes received and sent.
    bytes_in: int
    bytes_out: int
    #: Unsent bytes of the current sends.
    unsent: int
