"""How does a command serve one of LROSE's services, until it is told to stop?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

import typer

from penstock.cli.stopping import Ending

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.lrose.serving import DsServer

__all__ = ["serve_until_stopped"]

_Server = TypeVar("_Server", bound="DsServer")


def serve_until_stopped(make: Callable[[], _Server], hello: Callable[[_Server], str]) -> _Server:
    """Serve until Ctrl-C, SIGTERM, or a client that may do so ends it; return the server then.

    :param hello: what to say once it serves
    :raises StorageError: the address cannot be had.
    """
    ending = Ending()
    with make() as server:
        typer.echo(hello(server))
        sys.stdout.flush()
        ending.wait(server.stop_requested.is_set)
    return server
