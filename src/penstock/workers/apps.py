"""How is an app written that takes messages of streams and sends messages?

class Alarm(App):
    temperature = Receive(path="rig://sensors", name="temperature")
    heater = Target(path="rig://heater", name="commands", device=3)
    streams = (temperature, heater)

    def on_message(self, stream, message):
        if message.cast("<f8")[0] > 80:
            self.send(self.heater, b"off")

Alarm().run()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from penstock.aio.watcher import call_in
from penstock.core.errors import InvalidOption, NotFound, Overrun
from penstock.core.interfaces import Closable
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import CONTROLLER_DEVICE, ForwardDestination, StreamId
from penstock.core.worker import Worker
from penstock.queue.stream_directory import StreamKind
from penstock.queue.subscription import StreamMessage, requests_for
from penstock.workers.router import Router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from penstock.core.interfaces import BytesLike
    from penstock.queue.streams import OutputStream
    from penstock.queue.subscription import Subscription, SubscriptionStatistics
    from penstock.workers.router import RegisteredApp

__all__ = [
    "App",
    "AppContext",
    "AppStream",
    "Input",
    "Output",
    "Receive",
    "StreamMessage",
    "Target",
]

log = logging.getLogger(__name__)

#: An input stream that an app sends to may be made after it: look for it this often (seconds).
_LOOK: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """The streams that an app subscribes to; a field that is not given is ANY."""

    #: One destination, a set of several, or any.
    destinations: int | frozenset[int] | None = None
    device: int | None = None
    path: str | None = None
    name: str | None = None

    def requests(self) -> tuple[StreamId, ...]:
        return requests_for(self.destinations, self.device, self.path, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """One stream."""

    path: str
    name: str
    device: int = CONTROLLER_DEVICE
    destination: int = ForwardDestination.NONE

    @property
    def stream(self) -> StreamId:
        return StreamId.generate(self.destination, self.device, self.path, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Channel(_Named):
    """One stream that the app creates."""

    slots: int = 4096
    size: int = 4 << 20


class Output(_Channel):
    """An output stream that the app creates and sends to."""

    __slots__ = ()


class Input(_Channel):
    """An input stream that the app creates and receives from; others send to it."""

    __slots__ = ()


class Target(_Named):
    """Another app's input stream that this app sends to. The app waits for it at the start."""

    __slots__ = ()


AppStream: TypeAlias = Receive | Output | Input | Target


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    """The settings that a deployment gives an app."""

    #: The app's name there; empty: that of its class.
    name: str = ""
    deployment: str = ""
    #: Its own parameters.
    params: Mapping[str, str] = field(default_factory=dict)
    #: Addresses of the devices, by their ids.
    devices: Mapping[int, str] = field(default_factory=dict)
    queue_size: int | None = None


class App:
    """Receives messages of streams, one at a time, and sends messages.

    A subclass declares its `streams` and overrides the handlers. An exception in `on_message` ends
    the app; a supervised app is restarted.
    """

    #: What it takes part in. A subclass that has to compute them sets them in `__init__`.
    streams: Sequence[AppStream] = ()
    #: See `Subscription`.
    policy: ClassVar[OverflowPolicy] = OverflowPolicy.DROP_OLDEST
    #: `on_timeout` is called after so many seconds without a message, again and again.
    inactivity: float | None = None
    #: Seconds that it waits at the start for streams that it sends to; None: for ever.
    patience: float | None = None

    def __init__(self, context: AppContext | None = None) -> None:
        self.context = context or AppContext()
        self.name = self.context.name or type(self).__name__
        self._queue: RegisteredApp | None = None
        self._outputs: dict[StreamId, OutputStream] = {}
        self._is_stopping = False

    # --- what a subclass does -------------------------------------------------------------------

    def on_start(self) -> None:
        """Prepare: called once at the start, when all streams are open."""

    def on_message(self, stream: AppStream, message: StreamMessage) -> None:
        """Handle a message; `stream` is the declaration in `streams` that it matches.

        `message.payload` is memory of the stream, valid until this returns: `message.copy()` keeps
        it.
        """
        raise NotImplementedError

    def on_timeout(self) -> None:
        """Handle silence: called each time `inactivity` seconds pass without a message."""

    def on_stop(self) -> None:
        """Clean up: called once at the end, while the streams are still open."""

    # --- what it can do -------------------------------------------------------------------------

    def send(
        self,
        stream: Output | Target | StreamId,
        payload: BytesLike,
        type: int = 0,
        time_ns: int | None = None,
    ) -> int:
        """Send a message to one of the app's streams or to any input stream; return its seq there.

        :raises NotFound: there is no such input stream.
        :raises QueueFull: its consumer is too far behind; the message was not stored.
        :raises MessageTooLarge: it is larger than the stream allows.
        """
        if isinstance(stream, Output):
            return self._outputs[stream.stream].write(payload, type, time_ns=time_ns)
        target = stream.stream if isinstance(stream, Target) else stream
        return self._registered.send(target, payload, type, time_ns)

    def stop(self) -> None:
        """End `run` or the iteration. Safe in any thread and in signal handlers."""
        self._is_stopping = True
        if self._queue is not None:
            self._queue.interrupt()

    def statistics(self) -> SubscriptionStatistics:
        """Return what the running app received and lost."""
        return self._registered.statistics()

    def run(self, router: Router | None = None) -> None:
        """Register with the router and handle messages until `stop`.

        :raises AlreadyOwned: an app of this name runs, or one of its streams has another creator.
        :raises NotFound: a stream that it sends to did not appear in time.
        """
        with self._connected(router) as queue:
            self.on_start()
            heard = time.monotonic()
            while not self._is_stopping:
                left = None
                if self.inactivity is not None:
                    left = heard + self.inactivity - time.monotonic()
                    if left <= 0:
                        self.on_timeout()
                        heard = time.monotonic()
                        continue
                # What is overwritten while it is worked on is counted as lost, and logged.
                with contextlib.suppress(Overrun), queue.receive(left) as message:
                    if message is not None:
                        self.on_message(self._declared(message), message)
                        heard = time.monotonic()
            self.on_stop()

    async def messages(
        self, router: Router | None = None
    ) -> AsyncIterator[tuple[AppStream, StreamMessage]]:
        """Register with the router, and yield each message with its stream until `stop`.

        A message's memory is released when the next one is requested.
        """
        with self._connected(router) as queue, _AsyncWait(queue) as wait:
            while not self._is_stopping:
                with contextlib.suppress(Overrun), queue.receive(0) as message:
                    if message is not None:
                        yield self._declared(message), message
                        continue
                await wait.wait()

    def __aiter__(self) -> AsyncIterator[tuple[AppStream, StreamMessage]]:
        return self.messages()

    # --- taking part ----------------------------------------------------------------------------

    @property
    def _registered(self) -> RegisteredApp:
        if self._queue is None:
            raise NotFound(f"the app {self.name} does not run", hint="call run() first")
        return self._queue

    @contextlib.contextmanager
    def _connected(self, router: Router | None) -> Iterator[RegisteredApp]:
        router = router or Router()
        # Where senders wait, there is nothing to limit.
        limit = None if self.policy is OverflowPolicy.BLOCK else self.context.queue_size
        with router.register(self.name, queue_size=limit, policy=self.policy) as queue:
            self._known: dict[tuple[StreamKind, StreamId], AppStream] = {}
            # Own channels first: two apps that send to each other both find the other's.
            for stream in self.streams:
                if isinstance(stream, Output):
                    self._outputs[stream.stream] = queue.create_output(
                        stream.stream, slots=stream.slots, size=stream.size
                    )
                elif isinstance(stream, Input):
                    queue.create_input(stream.stream, slots=stream.slots, size=stream.size)
                    self._known[StreamKind.INPUT, stream.stream] = stream
            for stream in self.streams:
                if isinstance(stream, Receive):
                    queue.add(*stream.requests())
            for stream in self.streams:
                if isinstance(stream, Target):
                    self._wait_for(stream, queue)
            self._queue = queue
            try:
                yield queue
            finally:
                self._queue = None
                self._outputs.clear()

    def _wait_for(self, target: Target, queue: RegisteredApp) -> None:
        if not target.stream.is_concrete:
            raise InvalidOption("streams", target, "a target is one stream: no field may be ANY")
        deadline = None if self.patience is None else time.monotonic() + self.patience
        while not queue.has_input(target.stream) and not self._is_stopping:
            if deadline is not None and time.monotonic() > deadline:
                raise NotFound(
                    f"{self.name} sends to {target}, which did not appear in {self.patience:g} s",
                    hint="is its creator loaded, and are path, name and device right?",
                )
            time.sleep(_LOOK)

    def _declared(self, message: StreamMessage) -> AppStream:
        """Return the first of `streams` that a message matches, by the router's rule."""
        stream = message.stream
        assert stream is not None
        known = self._known.get((message.kind, stream))
        if known is None:
            known = next(
                each
                for each in self.streams
                if isinstance(each, Receive) and any(map(stream.matches, each.requests()))
            )
            self._known[message.kind, stream] = known
        return known


class _AsyncWait(Closable):
    """Waits for a subscription in a thread, so that the event loop stays free."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._over: asyncio.Future[None] | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._worker = Worker(
            "penstock-app", self._run, log=log, rouse=subscription.interrupt
        ).start()

    async def wait(self) -> None:
        """Return when a message may have arrived.

        :raises PenstockError: the subscription failed.
        """
        loop = asyncio.get_running_loop()
        self._over = over = loop.create_future()
        self._is_idle.clear()
        self._worker.wake()
        try:
            await over
        finally:
            # A wait that is cancelled has to end before anybody else uses the subscription.
            if not self._is_idle.is_set():
                self._subscription.interrupt()
                self._is_idle.wait()

    def _run(self, worker: Worker) -> None:
        while not worker.wait():
            over = self._over
            if over is None:
                continue
            self._over = None
            fault: Exception | None = None
            try:
                self._subscription.wait()
            except Exception as error:  # noqa: BLE001 - raised where the app waits
                fault = error
            self._is_idle.set()
            call_in(over.get_loop(), partial(_conclude, over, fault))

    def close(self) -> None:
        self._worker.stop()


def _conclude(over: asyncio.Future[None], fault: Exception | None) -> None:
    if over.done():
        return
    if fault is None:
        over.set_result(None)
    else:
        over.set_exception(fault)
