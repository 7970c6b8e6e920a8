"""How are the queues of one machine served to LROSE's clients, and to ours?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.core.options import Directory, Duration, Size  # noqa: TC001 - pydantic reads them
from penstock.protocols.lrose.addresses import default_port
from penstock.protocols.lrose.fmq_session import FmqSession
from penstock.protocols.lrose.fmq_shared import Shared
from penstock.protocols.lrose.serving import DsServer
from penstock.protocols.lrose.sessions import ServingOptions
from penstock.queue.classic.layout import MAX_SLOTS

__all__ = ["FmqServer", "FmqServerOptions"]


class FmqServerOptions(ServingOptions):
    """What the server of queues serves, and how much of it."""

    #: The directory that all queues are below.
    root: Directory
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default_factory=lambda: default_port("fmqp")
    )
    #: The layout of queues that clients create. LROSE's programs on this machine know classic.
    layout: Literal["classic", "wide"] = "classic"
    #: Bytes of a queue that a client may create, and its slots.
    max_queue: Annotated[Size, Field(ge=4096)] = 1 << 30
    max_slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] = 1_000_000
    #: How long a write waits for another writer's lock.
    lock_timeout: Duration = 30.0
    #: Nothing may be written or created.
    read_only: bool = False
    #: Serve queues in shared memory, too: any whose key a client can guess.
    shared_memory: bool = False


class FmqServer(DsServer):
    """The server. It serves as soon as it is made."""

    def __init__(self, options: FmqServerOptions) -> None:
        self._shared = Shared(options)
        super().__init__(
            options,
            lambda connection: FmqSession(self._shared, connection),
            grants=f"{'read' if options.read_only else 'read, write and create'} its queues",
        )

    @property
    def url(self) -> str:
        """What the URLs of its queues begin with."""
        return f"fmqp://{self.address}"

    def close(self) -> None:
        super().close()
        self._shared.close()
