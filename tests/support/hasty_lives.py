"""A dispatcher that dies as soon as zenoh has what it sends: `python -m support.hasty_lives ROLE`.

zenoh's put returns before the bytes have left the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from penstock.core.retry import Backoff
from penstock.dispatch import Dispatcher, Retry, Routes
from penstock.protocols.uprotocol import UMessage, UStatus, UUri
from penstock.protocols.uprotocol.transports import InProcessBus, InProcessLeg
from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink
from support.peer import say
from support.streamer_roles import answer
from support.streamer_traffic import BUS, Fate, fate, made

__all__ = ["numbers"]

#: After this time (seconds) it does not matter what the books say.
_PATIENCE = 0.002


def numbers(life: int, count: int) -> list[int]:
    """Return the messages that are taken in in a life."""
    return [n for n in range(life * count, (life + 1) * count) if fate(n) is Fate.ARRIVES]


class NotingZenohLeg(ZenohLeg):
    """Tells when so many messages of this life were put."""

    def __init__(self, name: str, link: ZenohLink) -> None:
        super().__init__(name, link)
        self.missing: set[bytes | None] = set()
        self.is_done = threading.Event()

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        found = super().deliver(address, messages)
        if self.missing:
            for message, status in zip(messages, found, strict=True):
                if status is None:
                    self.missing.discard(message.payload)
            if not self.missing:
                self.is_done.set()
        return found


def make(state: str, place: str) -> tuple[Dispatcher, NotingZenohLeg]:
    leg = NotingZenohLeg("device", ZenohLink(BUS, connect=[place]))
    dispatcher = Dispatcher(
        BUS,
        state,
        [leg, InProcessLeg("cloud", InProcessBus())],
        routes=Routes(authorities={"device": ["device"], "cloud": ["cloud"]}),
        retry=Retry(backoff=Backoff(initial=0.001, maximum=0.1), max_attempts=1 << 30),
    )
    return dispatcher, leg


def live_and_die(state: str, place: str, life: int, count: int, size: int) -> None:
    """Take messages in, and die when all of them were put."""
    dispatcher, leg = make(state, place)
    dispatcher.start()
    batch = [made(number, "cloud", size) for number in numbers(life, count)]
    leg.missing = {message.payload for message in batch}
    dispatcher.ingest("cloud", [message.to_bytes() for message in batch])
    assert leg.is_done.wait(30)
    end = time.monotonic() + _PATIENCE
    while dispatcher.books().copies.queued and time.monotonic() < end:
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)


def live_on(state: str, place: str) -> None:
    """Deliver what is left."""
    dispatcher, _ = make(state, place)
    dispatcher.start()
    say(is_ready=True)
    answer(dispatcher)


ROLES: dict[str, Callable[..., None]] = {"live_and_die": live_and_die, "live_on": live_on}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
