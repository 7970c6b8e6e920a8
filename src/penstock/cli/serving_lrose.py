"""How does a command serve one of LROSE's services, until it is told to stop?"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, TypeVar

import typer

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
    return asyncio.run(_serve(make, hello))


async def _serve(make: Callable[[], _Server], hello: Callable[[_Server], str]) -> _Server:
    server = make()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop_requested.set)
    await server.start()
    typer.echo(hello(server))
    sys.stdout.flush()
    try:
        await server.stop_requested.wait()
    finally:
        await server.close()
    return server
