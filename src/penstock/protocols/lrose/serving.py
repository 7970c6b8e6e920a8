"""How does one process serve many of LROSE's clients, whatever the service?"""

from __future__ import annotations

import ipaddress
import logging
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from penstock.core.closing import Closable
from penstock.protocols.lrose.ds_session import DsSession
from penstock.protocols.lrose.sessions import (
    Answer,
    Counts,
    ServerStatistics,
    Service,
    ServingOptions,
)
from penstock.protocols.lrose.sku import keep_memory
from penstock.protocols.server import End, Limits, Server, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.connection import Connection

__all__ = ["Answer", "DsServer", "ServerStatistics", "Service", "ServingOptions"]

log = logging.getLogger(__name__)

#: Who does not take a reply for so long (seconds) is cut off.
_STALLED: Final = 30.0


class DsServer(Closable):
    """A server of one service. It serves as soon as it is made."""

    def __init__(
        self,
        options: ServingOptions,
        new_service: Callable[[Connection], Service],
        *,
        grants: str = "read and write",
    ) -> None:
        """Listen.

        :param new_service: makes what serves a client
        :param grants: what anybody who can reach it can do, for a warning.
        :raises StorageError: the address cannot be had.
        """
        self.options = options
        self.new_service = new_service
        #: Set when a client that may do so asks for the end.
        self.stop_requested = threading.Event()
        self._grants = grants
        self._lock = threading.Lock()
        self._sessions: set[DsSession] = set()
        self._past = Counts()
        #: Bytes of requests that have not come to their end.
        self.held = 0
        keep_memory()
        self._server = Server(
            "lrose",
            listen_tcp(options.host, options.port),
            lambda connection: DsSession(connection, self),
            Limits(
                max_clients=options.max_clients,
                first_message=min(options.first_message, options.idle),
                idle=options.idle,
                stalled=min(_STALLED, options.idle),
                max_unsent=options.max_unsent,
            ),
            log=log,
            turn_away=lambda connection: DsSession(connection, self, is_one_too_many=True),
        )
        self._warn_if_open()
        self._server.start()

    def _warn_if_open(self) -> None:
        """Say that other machines are let in: the protocol has no passwords."""
        addresses = [str(each.getsockname()[0]).partition("%")[0] for each in self._server.sockets]
        if not all(ipaddress.ip_address(each).is_loopback for each in addresses):
            log.warning(
                "%s is open to other machines: anybody who can reach it can %s, "
                "because the protocol has no passwords; a firewall can say who",
                self.address,
                self._grants,
            )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port`, for people."""
        host = self.options.host.strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def client_count(self) -> int:
        return self._server.statistics().open

    @property
    def unsent(self) -> int:
        """Bytes of replies that clients have not taken yet."""
        return self._server.statistics().unsent

    def enter(self, session: DsSession) -> None:
        """Count what a session counts."""
        with self._lock:
            self._sessions.add(session)

    def leave(self, session: DsSession) -> None:
        """Keep the counts of a session that is over."""
        with self._lock:
            if session in self._sessions:
                self._sessions.remove(session)
                self._past.add(session.counts)

    def hold(self, change: int) -> int:
        """Note that so many bytes more of half requests are held; return how many there are."""
        with self._lock:
            self.held += change
            return self.held

    def statistics(self) -> ServerStatistics:
        counts = Counts()
        books = self._server.statistics()
        with self._lock:
            counts.add(self._past)
            for session in self._sessions:
                counts.add(session.counts)
        return ServerStatistics(
            clients=books.open,
            clients_seen=books.accepted - sum(books.refused.values()),
            clients_denied=sum(books.refused.values()),
            clients_timed_out=books.ended[End.TIMED_OUT] + books.ended[End.CROWDED_OUT],
            clients_malformed=books.ended[End.MALFORMED],
            clients_behind=books.ended[End.BEHIND],
            **asdict(counts),
        )

    def close(self) -> None:
        """Stop: no more clients; what is under way is answered, for a while. Twice is fine."""
        self._server.stop()
