"""How is a fault router run beside a program, and controlled by it?"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from penstock.core.errors import Closed, InvalidOption, StorageError
from penstock.core.interfaces import Closable
from penstock.core.url import is_loopback
from penstock.core.worker import Worker
from penstock.relay.faults.connections import ConnectionRouter
from penstock.relay.faults.datagrams import DatagramRouter
from penstock.relay.faults.model import NO_FAULTS
from penstock.relay.faults.sockets import Place, resolve, shown, tcp_socket, udp_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.relay.faults.counters import Counters
    from penstock.relay.faults.model import Faults

__all__ = ["FaultRouter"]

log = logging.getLogger(__name__)

_LOOPBACK: Final = ("127.0.0.1", 0)
#: Each UDP client takes one file, each TCP connection two; processes often have 1024.
_CLIENTS: Final = 256
_MOST_CLIENTS: Final = 100_000
#: Seconds after which an idle UDP client is forgotten.
_IDLE: Final = 60.0
#: Timeout (seconds) of a call to the router's thread.
_ANSWER: Final = 30.0

_Answer = TypeVar("_Answer")


class _Transport(Protocol):
    """The interface of both routers, within their event loop."""

    def start(self) -> None: ...
    def set(self, faults: Faults) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    async def cut_all(self) -> int: ...
    def snapshot(self) -> Counters: ...
    async def close(self) -> Counters: ...


class FaultRouter(Closable):
    """Forwards between clients and a target, and injects faults.

    Use `FaultRouter.tcp` or `FaultRouter.udp`. It runs in a thread of its own, from construction
    until `close`. All methods are thread-safe, and have taken effect when they return.
    """

    def __init__(
        self,
        transport: Literal["udp", "tcp"],
        listener: socket.socket,
        target: Place,
        make: Callable[[asyncio.AbstractEventLoop], _Transport],
        *,
        faults: Faults,
        seed: int,
    ) -> None:
        self.transport = transport
        #: Where clients connect to: (host, port).
        self.address: tuple[str, int] = listener.getsockname()[:2]
        #: Where the target is.
        self.target: tuple[str, int] = target.address[:2]
        self._faults = faults
        self._seed = seed
        self._lock = threading.Lock()
        self._last: Counters | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_tell)
        self._router = make(self._loop)
        self._worker = Worker(
            f"fault-router-{self.address[1]}",
            lambda _: self._loop.run_forever(),
            log=log,
            rouse=self._end_loop,
        ).start()
        try:
            self._call(self._router.start)
        except BaseException:
            self.close()
            raise
        if not is_loopback(str(self.address[0])):
            log.warning(
                "the fault router listens at %s: other machines can reach %s through it",
                shown(self.address),
                shown(self.target),
            )

    @classmethod
    def udp(
        cls,
        to: tuple[str, int],
        faults: Faults = NO_FAULTS,
        *,
        seed: int = 0,
        listen: tuple[str, int] = _LOOPBACK,
        max_clients: int = _CLIENTS,
        idle: float = _IDLE,
    ) -> FaultRouter:
        """Start a router for datagrams; port 0 picks a free one.

        :raises InvalidOption: the faults are not for UDP, or a limit is out of range
        :raises StorageError: the address is in use or not available
        """
        if not 0 < idle <= 86_400:  # noqa: PLR2004 - a day
            raise InvalidOption("idle", idle, "must be above 0 and at most a day")
        faults.refuse_for("udp")
        target, listener = _places(to, listen, max_clients, "udp")
        return cls(
            "udp",
            listener,
            target,
            lambda loop: DatagramRouter(
                loop,
                listener,
                target,
                faults=faults,
                seed=seed,
                max_clients=max_clients,
                idle=idle,
            ),
            faults=faults,
            seed=seed,
        )

    @classmethod
    def tcp(
        cls,
        to: tuple[str, int],
        faults: Faults = NO_FAULTS,
        *,
        seed: int = 0,
        listen: tuple[str, int] = _LOOPBACK,
        max_clients: int = _CLIENTS,
    ) -> FaultRouter:
        """Start a router for connections; port 0 picks a free one.

        :raises InvalidOption: the faults are not for TCP, or a limit is out of range
        :raises StorageError: the address is in use or not available
        """
        faults.refuse_for("tcp")
        target, listener = _places(to, listen, max_clients, "tcp")
        return cls(
            "tcp",
            listener,
            target,
            lambda loop: ConnectionRouter(
                loop, listener, target, faults=faults, seed=seed, max_clients=max_clients
            ),
            faults=faults,
            seed=seed,
        )

    @property
    def faults(self) -> Faults:
        """The faults in force."""
        return self._faults

    def set(self, faults: Faults) -> None:
        """Set the faults, also for connected clients.

        :raises InvalidOption: the faults are not for this transport
        :raises Closed: the router is closed
        """
        faults.refuse_for(self.transport)
        self._call(lambda: self._router.set(faults))
        self._faults = faults

    def pause(self) -> None:
        """Forward nothing until `resume`; TCP senders wait, and UDP is buffered by the kernel.

        :raises Closed: the router is closed
        """
        self._call(self._router.pause)

    def resume(self) -> None:
        """Forward again, starting with what was buffered.

        :raises Closed: the router is closed
        """
        self._call(self._router.resume)

    def cut_all(self) -> int:
        """Cut off all clients now, and return how many; they may reconnect.

        :raises Closed: the router is closed
        """
        return self._wait(self._router.cut_all())

    def counters(self) -> Counters:
        """Return the current counters, or the final ones after `close`."""
        with self._lock:
            if self._last is not None:
                return self._last
        return self._call(self._router.snapshot)

    def close(self) -> None:
        """Cut off all clients and end. Idempotent."""
        with self._lock:
            if self._last is not None:
                return
            self._last = self._ask(self._router.close())
        self._worker.stop(_ANSWER)
        self._loop.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def __str__(self) -> str:
        return (
            f"{self.transport} {shown(self.address)} -> {shown(self.target)}, "
            f"seed {self._seed}: {self._faults}"
        )

    def __repr__(self) -> str:
        return f"<FaultRouter {self}>"

    def _call(self, function: Callable[[], _Answer]) -> _Answer:
        async def call() -> _Answer:
            return function()

        return self._wait(call())

    def _wait(self, doing: Coroutine[Any, Any, _Answer]) -> _Answer:
        with self._lock:
            if self._last is not None:
                doing.close()
                raise Closed("the fault router is closed", hint="start another one")
            return self._ask(doing)

    def _ask(self, doing: Coroutine[Any, Any, _Answer]) -> _Answer:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(_ANSWER)


def _places(
    to: tuple[str, int], listen: tuple[str, int], max_clients: int, transport: Literal["udp", "tcp"]
) -> tuple[Place, socket.socket]:
    if not 1 <= max_clients <= _MOST_CLIENTS:
        raise InvalidOption("max_clients", max_clients, f"must be from 1 to {_MOST_CLIENTS:,}")
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    target = resolve(to, "to", kind)
    here = resolve(listen, "listen", kind)
    make = tcp_socket if transport == "tcp" else udp_socket
    try:
        return target, make(here.family, here.address)
    except OSError as error:
        hint = "another program has that port: port 0 takes any that is free"
        raise StorageError(
            "listening at",
            str(here),
            error,
            hint=hint if error.errno == errno.EADDRINUSE else None,
        ) from error


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error in a callback, which has no caller to raise it to."""
    del loop
    log.error("fault router: %s", context["message"], exc_info=context.get("exception"))
