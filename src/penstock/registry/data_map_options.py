"""What can be asked of a server of a data map?"""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import Annotated, Final, NamedTuple

from pydantic import BeforeValidator, Field

from penstock.core.errors import InvalidOption
from penstock.core.options import Duration, Size  # noqa: TC001 - pydantic reads it
from penstock.protocols.lrose.addresses import default_port
from penstock.protocols.lrose.datamapper_client import SCHEME
from penstock.protocols.lrose.serving import ServingOptions
from penstock.registry.data_map import DEFAULT_MAX_ENTRIES

__all__ = ["MapServerOptions", "RelayHost", "server_port"]

_LAST_PORT: Final = 0xFFFF


def server_port() -> int:
    """Return the port that a server takes: `DMAP_PORT`, or the one that its clients expect.

    :raises InvalidOption: the environment says what is no port.
    """
    said = os.environ.get("DMAP_PORT", "").strip()
    if not said:
        return default_port(SCHEME)
    if not (said.isascii() and said.isdigit() and int(said) <= _LAST_PORT):
        raise InvalidOption("DMAP_PORT", said, "the environment should name a port")
    return int(said)


class RelayHost(NamedTuple):
    """A host that questions may go on to."""

    #: What requests call it.
    name: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> RelayHost:
        """Take `inner`, or `inner=10.0.0.7:5434`, apart.

        :raises InvalidOption: it is neither.
        """
        name, _, address = text.strip().partition("=")
        host, _, port = (address or name).partition(":")
        is_port = not port or (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT)
        if not name or not host or not is_port or ":" in name:
            raise InvalidOption("relay", text, "should be NAME or NAME=HOST:PORT")
        return cls(name, host, int(port) if port else default_port(SCHEME))


def _relays(said: object) -> object:
    if isinstance(said, str):
        return tuple(RelayHost.parse(each) for each in said.split(",") if each.strip())
    return said


class MapServerOptions(ServingOptions):
    """What a server of a data map may be told."""

    port: Annotated[int, Field(ge=0, le=65535)] = Field(default_factory=server_port)
    #: Keep the map in this file, in LROSE's own form.
    state: Path | None = None
    #: Save it so often, if it has changed.
    save_every: Annotated[Duration, Field(gt=0)] = 10.0
    #: Forget data sets not heard of for so long; None: never.
    purge_age: Annotated[Duration, Field(gt=0)] | None = None
    #: Data sets in the map, at most; all of them go into one reply.
    max_entries: Annotated[int, Field(ge=1, le=50_000)] = DEFAULT_MAX_ENTRIES
    #: Hosts that questions may go on to, with commas between; none others: who could name any
    #: host would see this machine's whole network.
    relay: Annotated[tuple[RelayHost, ...], BeforeValidator(_relays)] = ()
    #: Enough for all the entries that a map may hold by default.
    max_message: Annotated[Size, Field(ge=1024, le=1 << 31)] = 16 << 20
    max_held: Annotated[Size, Field(ge=1024)] = 64 << 20
    #: The one request of a connection comes at once.
    idle: Annotated[Duration, Field(gt=0)] = 60.0
