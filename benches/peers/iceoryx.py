"""How does iceoryx2 pass messages?"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peers.contract import (
    MEMORY,
    PATIENCE,
    Case,
    Receiver,
    Scratch,
    Sender,
    Way,
    library,
    not_installed,
    send_each,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peers.tally import Payload, Taker

__all__ = ["IceoryxWay"]

#: A poller that did not see the end after so long (seconds) gives up.
_LONGEST = 4 * PATIENCE


@dataclass(frozen=True)
class IceoryxWay(Way):
    """Publish-subscribe in shared memory; a full subscriber makes the publisher wait."""

    name: str = "iceoryx2"
    storage: str = MEMORY
    #: The reader touches the message where it is, or copies it out as bytes.
    in_place: bool = False
    #: The reader sleeps until it is notified, or polls.
    event: bool = False

    def missing(self) -> str | None:
        return not_installed("iceoryx2", "iceoryx2")

    def version(self) -> str:
        return version_of("iceoryx2")

    def address(self, scratch: Scratch) -> str:
        return scratch.name()

    def open_writer(self, address: str, case: Case) -> Sender:
        return _Publisher(address, case, event=self.event)

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        del number
        if self.event:
            return _Listener(address, case)
        return _Subscriber(address, case, in_place=self.in_place)


class _Service:
    """The node and the service, which must live as long as what they made."""

    def __init__(self, address: str, case: Case) -> None:
        self.iox = library("iceoryx2")
        self.iox.set_log_level(self.iox.LogLevel.Error)
        self.node = self.iox.NodeBuilder.new().create(self.iox.ServiceType.Ipc)
        self.name = self.iox.ServiceName.new(address)
        self.messages = (
            self.node.service_builder(self.name)
            .publish_subscribe(self.iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(case.depth)
            .history_size(0)
            .max_publishers(1)
            .max_subscribers(case.readers)
            .open_or_create()
        )

    def events(self) -> Any:
        return self.node.service_builder(self.name).event().open_or_create()


class _Publisher(Sender):
    def __init__(self, address: str, case: Case, *, event: bool) -> None:
        self._service = _Service(address, case)
        self._publisher = (
            self._service.messages.publisher_builder()
            .initial_max_slice_len(case.size)
            .backpressure_strategy(self._service.iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = None
        if event:
            self._events = self._service.events()
            self._notifier = self._events.notifier_builder().create()

    def wait_for_readers(self, readers: int) -> None:
        while self._service.messages.dynamic_config.number_of_subscribers < readers:
            time.sleep(0.001)
        self._publisher.update_connections()

    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        return send_each(self._sending(), payloads, seconds)

    def send(self, payload: bytes) -> None:
        self._sending()(payload)
        if self._notifier is not None:
            self._notifier.notify()

    def _sending(self) -> Callable[[bytes], None]:
        # As its own `send_copy` does it: memmove to the loaned address is the quickest way from
        # Python into a slice.
        loan, memmove = self._publisher.loan_slice_uninit, ctypes.memmove

        def send(payload: bytes) -> None:
            size = len(payload)
            sample = loan(size)
            memmove(sample.payload_ptr, payload, size)
            sample.assume_init().send()

        return send


class _Subscriber(Receiver):
    """Polls, which is how it is quickest; with more readers than cores it lets others run."""

    def __init__(self, address: str, case: Case, *, in_place: bool = False) -> None:
        self._size = case.size
        self._in_place = in_place
        self._service = _Service(address, case)
        self._subscriber = (
            self._service.messages.subscriber_builder().buffer_size(case.depth).create()
        )
        self._let_others_run: Callable[[], None] = os.sched_yield if case.readers > 1 else _spin

    def take_all(self, taker: Taker) -> None:
        taker.each(self._in_place_payloads() if self._in_place else self._payloads())

    def _payloads(self) -> Iterator[Payload]:
        receive, string_at, size = self._subscriber.receive, ctypes.string_at, self._size
        deadline = time.monotonic() + _LONGEST
        while True:
            sample = receive()
            if sample is not None:
                yield string_at(sample.payload_ptr, size)
            elif time.monotonic() > deadline:
                return
            else:
                self._let_others_run()

    def _in_place_payloads(self) -> Iterator[Payload]:
        receive = self._subscriber.receive
        at_address = (ctypes.c_uint8 * self._size).from_address
        deadline = time.monotonic() + _LONGEST
        while True:
            sample = receive()
            if sample is not None:
                yield at_address(sample.payload_ptr)
            elif time.monotonic() > deadline:
                return
            else:
                self._let_others_run()


class _Listener(_Subscriber):
    """Sleeps until it is notified, then takes what is there."""

    def __init__(self, address: str, case: Case) -> None:
        super().__init__(address, case)
        self._events = self._service.events()
        self._listener = self._events.listener_builder().create()
        self._patience = self._service.iox.Duration.from_secs(round(PATIENCE))

    def take_all(self, taker: Taker) -> None:
        receive = self._subscriber.receive
        while True:
            while (sample := receive()) is not None:
                if taker.one(ctypes.string_at(sample.payload_ptr, self._size)):
                    return
            if not self._listener.timed_wait(self._patience):
                return


def _spin() -> None:
    """Look again at once."""
