"""What can be asked of a Flight client in its URL, and of a Flight server?"""

from __future__ import annotations

import ipaddress
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import Annotated, Literal

from pydantic import Field

from penstock.core.options import Directory, Duration, Options, Size
from penstock.protocols.flight.wire import Kind  # noqa: TC001 - pydantic reads it
from penstock.queue.options import Patience  # noqa: TC001 - pydantic reads it

__all__ = ["DEFAULT_PORT", "ClientOptions", "ServerOptions", "is_loopback"]

DEFAULT_PORT = 8815


class ClientOptions(Options):
    """Options of `flight://host:port/stream`; all others go to the stream's own endpoint there."""

    #: What the stream is, or shall be when it is made; without it, what is there, or else a queue.
    kind: Kind | None = None
    #: Encrypt. `flight+tls://` says the same.
    tls: bool = False
    #: A file with the certificates to trust, PEM; without it, those that the system trusts.
    ca: Path | None = None
    #: A file with the token. Without it, the environment's PENSTOCK_FLIGHT_TOKEN, if it is set.
    token_file: Path | None = None
    #: How long a broken connection is tried again before it is an error.
    retry: Duration = 30.0
    #: How long one question may take.
    call_timeout: Annotated[Duration, Field(gt=0)] = 20.0
    #: Bytes of one record batch.
    chunk: Annotated[Size, Field(ge=1024, le=1 << 30)] = 1 << 20
    #: Send much by a connection of its own, past gRPC, where the server has a port for that.
    bulk: bool = True
    #: Wait for the server and the stream to appear: `true`, or for how long.
    wait: Patience = 0.0
    #: Reader: be the one of that name, which the writer waits for. `cursor` is the same.
    hold: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cursor: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @property
    def name(self) -> str | None:
        """The name that a reader's place is kept under."""
        return self.hold or self.cursor


class ServerOptions(Options):
    """What a server serves, to whom, and how much of it."""

    #: The directory that all streams are below.
    root: Directory
    host: str = "127.0.0.1"
    #: 0: any that is free.
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    #: Where writers of much may come, too; 0: any that is free; `off`: nowhere. Without it: any
    #: that is free if only this machine can reach it, and otherwise nowhere.
    bulk_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: A file with the token that clients have to give.
    token_file: Path | None = None
    #: Clients with a call under way at the same time.
    max_clients: Annotated[int, Field(ge=1, le=100_000)] = 64
    #: Bytes of one batch that a client may send.
    max_message: Annotated[Size, Field(ge=1024, le=1 << 30)] = 64 << 20
    #: Bytes of a queue, or of a segment of a log, that a client may create.
    max_queue: Annotated[Size, Field(ge=4096)] = 1 << 30
    #: Readers and writers that make no call for so long are forgotten, and let go of their holds.
    idle: Annotated[Duration, Field(gt=0)] = 600.0
    #: Nothing may be written, created or held.
    read_only: bool = False
    #: Let everybody in who can reach the port, from other machines too.
    insecure: bool = False


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach that address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
