"""A dispatcher in a process of its own, to be killed: `python -m support.dispatch_lives STATE OUT`.

It takes one message after the other in, in batches, says how many are stored, and notes down what
its leg delivered. The leg fails now and then.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from penstock.core.retry import Backoff
from penstock.dispatch import Dispatcher, Retry, Routes
from penstock.protocols.uprotocol import (
    UUID7,
    UMessage,
    UPayloadFormat,
    UStatus,
    UUri,
    notification,
    publish,
)
from support.dispatching import BOB, CAROL, TOPIC, FaultyLeg, Table, status

__all__ = ["NotingLeg", "make"]

BATCH = 16


class NotingLeg(FaultyLeg):
    """Notes down what it delivers, before it says so."""

    def __init__(self, name: str, path: Path, failing: float) -> None:
        super().__init__(name)
        self._file = path.open("ab", buffering=0)
        self._rng = random.Random()
        self._failing = failing

    def deliver(self, address: UUri, messages: list[UMessage]) -> list[UStatus | None]:  # type: ignore[override]
        found: list[UStatus | None] = []
        for message in messages:
            if self._rng.random() < self._failing:
                return [*found, status("UNAVAILABLE")]
            self._file.write(b"%s %s\n" % (address.without_scheme.encode(), message.payload))
            found.append(None)
        return found

    def close(self) -> None:
        self._file.close()


def make(state: Path, out: Path, *, failing: float = 0.1) -> Dispatcher:
    """Make a dispatcher whose topic goes to two entities."""
    table = Table()
    table.add(TOPIC, BOB)
    table.add(TOPIC, CAROL.with_authority("here"))
    retry = Retry(backoff=Backoff(initial=0.001, maximum=0.01), max_attempts=1000)
    return Dispatcher(
        "here",
        state,
        [NotingLeg("local", out, failing)],
        routes=Routes(authorities={"local": ["here"]}),
        retry=retry,
        subscriptions=table,
        sync="none",
    )


def main(state: str, out: str, first: str, failing: str) -> None:
    dispatcher = make(Path(state), Path(out), failing=float(failing))
    dispatcher.start()
    raw = UPayloadFormat.RAW
    number = int(first)
    while True:
        batch = []
        for _ in range(BATCH):
            payload = b"%d" % number
            if number % 2:
                message = publish(TOPIC, payload, payload_format=raw, id=UUID7.new())
            else:
                message = notification(TOPIC, BOB, payload, payload_format=raw, ttl=None)
            batch.append(message.to_bytes())
            number += 1
        dispatcher.ingest("local", batch)
        print(number, flush=True)  # noqa: T201 - it is what the test reads


if __name__ == "__main__":
    main(*sys.argv[1:])
