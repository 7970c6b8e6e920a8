"""What can be asked of an exporter, an importer and a `psi://` URL?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.core.options import Duration, Options, Size
from penstock.protocols.psi.envelope import MAX_PAYLOAD_BYTES
from penstock.protocols.psi.handshake import DEFAULT_PORT

__all__ = ["ExporterOptions", "ImporterOptions", "PsiReaderOptions", "PsiWriterOptions"]


class ExporterOptions(Options):
    """Where an exporter listens, and its limits."""

    host: str = "127.0.0.1"
    #: Of the meta connection; 0: any that is free.
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    #: How messages travel.
    transport: Literal["tcp", "udp", "pipe"] = "tcp"
    #: Of the data connections; 0: any that is free. A fixed one can be let through a firewall.
    data_port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: The data port that clients are told, where a router stands before ours.
    told_data_port: Annotated[int | None, Field(ge=1, le=65535)] = None
    max_clients: Annotated[int, Field(ge=1, le=1000)] = 64
    #: The hello, or the session id, has to be there by then.
    first_message: Annotated[Duration, Field(gt=0)] = 10.0
    #: A client that takes nothing for so long is cut off.
    stalled: Annotated[Duration, Field(gt=0)] = 60.0
    #: End connections by a reset: psi's own importers notice no other end, and come again then.
    reset: bool = True
    #: Seconds between signs of life on the meta connection; 0: none.
    keep_alive: Duration = 5.0
    #: Writers wait while a client is so many messages behind; None: half of a ring, never a log.
    max_lag: Annotated[int | None, Field(ge=1)] = None
    #: Writers do not wait for a client that takes nothing for so long.
    patience: Duration = 2.0


class ImporterOptions(Options):
    """How patient an importer is, and its limits."""

    #: Seconds for a connection, and for each answer in the handshake.
    connect_timeout: Annotated[Duration, Field(gt=0)] = 5.0
    #: An exporter that gives signs of life, and then none for so long, is given up.
    silence: Annotated[Duration, Field(gt=0)] = 15.0
    #: Waits between attempts grow up to this.
    longest_wait: Annotated[Duration, Field(gt=0)] = 5.0
    #: A larger message is refused.
    max_message: Annotated[Size, Field(ge=1, le=MAX_PAYLOAD_BYTES)] = MAX_PAYLOAD_BYTES
    #: Where .NET has its pipes outside of Windows.
    pipe_folder: str = "/tmp"  # noqa: S108 - .NET's own


class PsiReaderOptions(Options):
    """Options of `psi://host:port/Stream` as a reader."""

    #: Fail when the stream does not appear within this time.
    wait: Duration = 10.0
    #: `content`: of a byte[] its bytes; `psi`: always in psi's encoding.
    payload: Literal["content", "psi"] = "content"
    #: Messages and bytes that are held for the reader.
    slots: Annotated[int, Field(ge=2)] = 16384
    size: Annotated[Size, Field(ge=4096)] = 16 << 20
    silence: Annotated[Duration, Field(gt=0)] = 15.0
    #: What the exporter has is all here when nothing came for so long: psi does not tell.
    quiet: Duration = 1.0


class PsiWriterOptions(ExporterOptions):
    """Options of `psi://host:port/Stream` as a writer: an exporter on that port."""

    #: Of .NET or C#: of a byte[] the payloads are the content, of others in psi's encoding.
    type: str = "byte[]"
    #: Bytes per second, such as 1MB/s.
    quota: str | None = None
    #: Keep messages in a log at this path instead of in memory.
    store: str | None = None
    slots: Annotated[int, Field(ge=2)] = 16384
    size: Annotated[Size, Field(ge=4096)] = 16 << 20
    #: When it is closed, give clients so long to get what is left.
    linger: Duration = 5.0
