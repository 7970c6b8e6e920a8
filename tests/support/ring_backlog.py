"""The processes around a dispatcher whose receiver is down: `python -m support.ring_backlog ROLE`.

All of them talk by rings.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

from penstock.core.message import Message
from penstock.core.retry import Backoff
from penstock.dispatch import Dispatcher, Limits, Retry, Routes
from penstock.protocols.uprotocol import UMessage, UUri, notification
from penstock.protocols.uprotocol.transports.ring import RingLeg
from penstock.protocols.uprotocol.transports.ring_files import RingReceiver, RingSender
from support.peer import say
from support.streamer_roles import answer
from support.streamer_traffic import number_of

_SOURCE, _SINK = UUri("bus", 0x10, 1, 0x8001), UUri("bus", 0x20, 1, 0)
#: Small, so that what the memory grows by is not the rings, which every process has mapped.
_RING = "slots=4096&size=4M"
_BATCH = 256


def dispatch(state: str, rings: str, count: int) -> None:
    leg = RingLeg("local", receive=f"fmq:{rings}/in?{_RING}", send=f"fmq:{rings}/{{ue_id}}")
    dispatcher = Dispatcher(
        "bus",
        state,
        [leg],
        routes=Routes(authorities={"local": ["bus"]}),
        limits=Limits(queue_messages=2 * count, queue_bytes=1 << 40),
        retry=Retry(backoff=Backoff(initial=0.01, maximum=0.2), max_attempts=1 << 30),
    )
    dispatcher.start()
    say(is_ready=True)
    answer(dispatcher)


def send(rings: str, count: int, size: int) -> None:
    sender = RingSender(f"fmq:{rings}/in")
    say(is_ready=True)
    for first in range(0, count, _BATCH):
        rest = [
            notification(_SOURCE, _SINK, b"%d " % number + bytes(size)).to_bytes()
            for number in range(first, min(first + _BATCH, count))
        ]
        while rest:
            done, _ = sender.send(UUri(), rest)
            rest = rest[done:]
            if rest:
                time.sleep(0.005)
    sender.close()
    say(sent=count)


def receive(rings: str, count: int) -> None:
    """Tell when everything has come: in order, and how much of it again."""
    found = {"next": 0, "repeated": 0, "missed": 0}

    def take(messages: Sequence[Message]) -> None:
        for message in messages:
            number = number_of(UMessage.from_bytes(message.payload))
            if number < found["next"]:
                found["repeated"] += 1
                continue
            found["missed"] += number - found["next"]
            found["next"] = number + 1

    receiver = RingReceiver("receiver", f"fmq:{rings}/20?{_RING}", take)
    say(is_ready=True)
    while found["next"] < count:
        time.sleep(0.02)
    receiver.stop()
    say(**found)


ROLES: dict[str, Callable[..., None]] = {"dispatch": dispatch, "send": send, "receive": receive}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
