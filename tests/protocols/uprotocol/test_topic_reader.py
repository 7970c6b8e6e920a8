"""A leg whose messages are in this process: those to brokers and zenoh have their own tests."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.core.errors import Closed
from penstock.protocols.uprotocol.endpoint import TopicOptions
from penstock.protocols.uprotocol.message import publish
from penstock.protocols.uprotocol.topic_reader import TopicReader
from penstock.protocols.uprotocol.transports.interface import Pump
from support.interruption import Interrupted, interrupted_at_call
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Callable

TOPIC = "up://v/100D/2/8001"
PAYLOADS = [b"%d" % number for number in range(8)]


class LocalLeg:
    """Brings four messages at a time, the next ones once these are acknowledged, as legs do."""

    links_lost = 0
    is_lasting = True

    def __init__(self, options: TopicOptions) -> None:
        self._topic = options.topic
        self.acknowledged: list[bytes] = []

    def start(self, ingest: Callable[[list[bytes]], None], _: object) -> None:
        def bring() -> None:
            with suppress(Closed):
                for at in range(0, len(PAYLOADS), 4):
                    part = PAYLOADS[at : at + 4]
                    ingest([publish(self._topic, payload).to_bytes() for payload in part])
                    self.acknowledged += part

        self._thread = threading.Thread(target=bring, daemon=True)
        self._thread.start()

    def listen(self, _: object) -> None: ...

    def await_connection(self, _: float) -> None: ...

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class PumpLeg(LocalLeg):
    """Brings what is put to it by a pump, as a leg of zenoh does."""

    is_lasting = False

    def start(self, ingest: Callable[[list[bytes]], None], _: object) -> None:
        self.pump: Pump[bytes] = Pump("leg", cast("Any", ingest), batch=4)

    def statistics(self) -> dict[str, int]:
        return {"abandoned": self.pump.abandoned}

    def close(self) -> None:
        self.pump.stop()


@pytest.mark.parametrize("by", ["many", "batch"])
def test_a_read_that_is_interrupted_at_any_call_takes_and_acknowledges_nothing(by: str) -> None:
    def read(reader: TopicReader, timeout: float = 0) -> list[bytes]:
        if by == "many":
            return [message.payload for message in reader.read_many(4, timeout)]
        return cast("list[bytes]", reader.read_batch(4, timeout).column("payload").to_pylist())

    options = TopicOptions(topic=TOPIC, quiet="10ms")  # type: ignore[arg-type]
    for call in itertools.count(1, 3):
        leg = LocalLeg(options)
        got: list[bytes] = []
        where = ""
        with TopicReader("up", cast("Any", leg), options) as reader:
            until(lambda reader=reader: reader.statistics().backlog == 4)  # type: ignore[misc]
            try:
                with interrupted_at_call(call, "penstock"):
                    got += read(reader)
            except Interrupted as place:
                where = f"at {place}"
            assert leg.acknowledged == [], where
            while messages := read(reader, 0.5 if len(got) < len(PAYLOADS) else 0):
                got += messages
            books = reader.statistics()
        assert got == PAYLOADS, where
        assert (books.messages, books.bytes, books.backlog) == (8, 8, 0), where
        assert books.next_seq == 8, where
        if not where:
            return


@pytest.mark.parametrize("read", [0, 3, 4, 5])
def test_what_a_leg_still_had_at_the_end_was_not_reached_and_counts_once(read: int) -> None:
    options = TopicOptions(topic=TOPIC, quiet="10ms")  # type: ignore[arg-type]
    leg = PumpLeg(options)
    with TopicReader("up", cast("Any", leg), options) as reader:
        for payload in PAYLOADS * 3:
            leg.pump.put(publish(options.topic, payload).to_bytes())
        got = 0
        while got < read:
            got += len(reader.read_many(read - got, 0.5))
    books = reader.statistics()
    assert (books.messages, books.backlog, books.lost) == (read, 24 - read, 0)
