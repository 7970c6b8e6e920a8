"""How is a fault router run beside a program, and steered from it?"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from penstock.core.closing import Closable
from penstock.core.errors import Closed, InvalidOption, StorageError
from penstock.core.worker import Worker
from penstock.relay.faults.addresses import Place, is_loopback, resolve, shown
from penstock.relay.faults.connections import ConnectionRouter
from penstock.relay.faults.datagrams import DatagramRouter
from penstock.relay.faults.model import NO_FAULTS
from penstock.relay.faults.sockets import tcp_socket, udp_socket

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
#: Seconds after which a UDP client that is quiet is forgotten.
_IDLE: Final = 60.0
#: The router's thread has so long (seconds) to answer; it never does anything long.
_ANSWER: Final = 30.0

_Answer = TypeVar("_Answer")


class _Transport(Protocol):
    """What both kinds of router can do, within their event loop."""

    def start(self) -> None: ...
    def set(self, faults: Faults) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    async def cut_all(self) -> int: ...
    def snapshot(self) -> Counters: ...
    async def close(self) -> Counters: ...


class FaultRouter(Closable):
    """Stands between clients and a target, and does harm as it is told.

    Use `FaultRouter.tcp` or `FaultRouter.udp`. It works in a thread of its own, from when it is
    made until it is closed. All methods may be called from any thread, and have taken effect
    when they return.
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
        if not is_loopback(Place(listener.family, self.address)):
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
        """Start a router for datagrams; port 0 takes any that is free.

        :raises InvalidOption: the faults are not for UDP, or a limit does not fit
        :raises StorageError: the address cannot be used
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
        """Start a router for connections; port 0 takes any that is free.

        :raises InvalidOption: the faults are not for TCP, or a limit does not fit
        :raises StorageError: the address cannot be used
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
        """Have other faults from now on, also for those who are connected.

        :raises InvalidOption: the faults are not for this transport
        :raises Closed: the router is closed
        """
        faults.refuse_for(self.transport)
        self._call(lambda: self._router.set(faults))
        self._faults = faults

    def pause(self) -> None:
        """Let nothing pass until `resume`; whoever sends TCP has to wait, and UDP piles up.

        :raises Closed: the router is closed
        """
        self._call(self._router.pause)

    def resume(self) -> None:
        """Let everything pass again, first of all what has piled up.

        :raises Closed: the router is closed
        """
        self._call(self._router.resume)

    def cut_all(self) -> int:
        """Cut off all clients now, and return how many; they may come again.

        :raises Closed: the router is closed
        """
        return self._wait(self._router.cut_all())

    def counters(self) -> Counters:
        """Return the books as they are now, or as they were at the end."""
        with self._lock:
            if self._last is not None:
                return self._last
        return self._call(self._router.snapshot)

    def close(self) -> None:
        """Cut off all clients and end. A second time it does nothing."""
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
    """Log what went wrong in a callback: nobody waits for it who could be told."""
    del loop
    log.error("fault router: %s", context["message"], exc_info=context.get("exception"))
