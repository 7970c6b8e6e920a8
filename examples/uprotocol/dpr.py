"""A device proxy router: two devices that cannot reach each other, and one is off for a while.

python examples/uprotocol/dpr.py
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path

from dispatching import dispatcher, is_delivered, until_heard, wait_until

from penstock.core.retry import Backoff
from penstock.protocols.uprotocol import UUID7, UMessage, UUri
from penstock.protocols.uprotocol.communication import (
    CallOptions,
    LocalUriProvider,
    Publisher,
    RpcClient,
    Subscriber,
)
from penstock.protocols.uprotocol.transports.zenoh import ZenohLink, ZenohTransport

LEFT = os.environ.get("LEFT", "tcp/127.0.0.1:7447")
RIGHT = os.environ.get("RIGHT", "tcp/127.0.0.1:7448")
TOPIC = UUri("device1", 0x10, 1, 0x8001)
USUBSCRIPTION = UUri("router", 0, 4, 0)


def main() -> None:
    """Let one device subscribe to the other, go away, and come back."""
    with (
        tempfile.TemporaryDirectory() as name,
        dispatcher("dpr.yaml", DPR=name, LEFT=LEFT, RIGHT=RIGHT),
        ZenohTransport(ZenohLink("device1", connect=[LEFT]), must_be_heard=True) as left,
    ):
        state = Path(name) / "state"
        heard: list[bytes] = []
        known: set[UUID7 | None] = set()

        def listener(message: UMessage) -> None:
            # At least once: what was on its way when the device went comes again, with its id.
            if message.attributes.id not in known:
                known.add(message.attributes.id)
                heard.append(message.payload or b"")

        with ZenohTransport(ZenohLink("device2", connect=[RIGHT]), must_be_heard=True) as right:
            # The link of zenoh may need a moment; until then it is UNAVAILABLE, and tried again.
            uris = LocalUriProvider("device2", 0x20, 1)
            client = RpcClient(right, uris, backoff=Backoff(initial=0.1, maximum=1.0))
            subscriber = Subscriber(right, client, service=USUBSCRIPTION)
            status = subscriber.subscribe(TOPIC, listener, options=CallOptions(ttl=20_000))
            print(f"device2: {status.result(20).name}")

            publisher = Publisher(left, LocalUriProvider("device1", 0x10, 1))
            for number in range(3):
                until_heard(partial(publisher.publish, 0x8001, b"%d" % number))
            wait_until(lambda: len(heard) == 3, "that device2 heard of it")
            print(f"device2 heard {b' '.join(heard).decode()}")
            # zenoh acknowledges nothing: whoever goes at once gets its last messages again. The
            # client is what hears of the subscription's change; without it that would wait here.
            wait_until(lambda: is_delivered(state), "that the router knows it")
            client.close()

        # Now it is off. What is published meanwhile waits in the router, once that has noticed:
        # zenoh acknowledges nothing.
        time.sleep(0.5)
        for number in range(3, 6):
            until_heard(partial(publisher.publish, 0x8001, b"%d" % number))
        print("device2 is off, and 3 more are published")
        with ZenohTransport(ZenohLink("device2", connect=[RIGHT])) as right:
            right.register_listener(TOPIC, listener)
            wait_until(lambda: len(heard) == 6, "that device2 heard of the rest")
            wait_until(lambda: is_delivered(state), "that the router knows it")
        print(f"device2 is on again, and heard {b' '.join(heard).decode()}")


if __name__ == "__main__":
    main()
