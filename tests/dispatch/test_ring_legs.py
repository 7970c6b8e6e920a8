"""Do messages get from ring to ring, whoever reads slowly or comes late?"""

from __future__ import annotations

import time
from pathlib import Path

from penstock.core.endpoints import open_writer
from penstock.core.retry import Backoff
from penstock.dispatch import Dispatcher, Retry, Routes
from penstock.protocols.uprotocol import UMessage, UPayloadFormat, publish
from penstock.protocols.uprotocol.transports.ring import RingLeg
from penstock.protocols.uprotocol.transports.ring_files import RingReceiver
from support.dispatching import BOB, TOPIC, Table


def test_what_is_appended_to_one_ring_comes_out_of_another_byte_by_byte(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    table = Table()
    table.add(TOPIC, BOB)
    leg = RingLeg("local", receive=f"fmq:{rings}/in", send=f"fmq:{rings}/{{ue_id}}")
    sent = [
        publish(TOPIC, b"%d" % i, payload_format=UPayloadFormat.RAW).to_bytes() for i in range(3000)
    ]
    with Dispatcher(
        "here",
        tmp_path / "state",
        [leg],
        routes=Routes(authorities={"local": ["here"]}),
        subscriptions=table,
        retry=Retry(backoff=Backoff(initial=0.01, maximum=0.1), max_attempts=1000),
    ) as dispatcher:
        dispatcher.start()
        with open_writer(f"fmq:{rings}/in", create="never", hold="uprotocol", keep="true") as ring:
            ring.write_many(sent)
        deadline = time.monotonic() + 30
        while dispatcher.books().counts.received < 3000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert dispatcher.books().copies.queued == 3000  # nobody has made the receiver's ring
        got: list[bytes] = []
        receiver = RingReceiver(
            "test",
            f"fmq:{rings}/20?slots=1024",
            lambda messages: got.extend(message.payload for message in messages),
        )
        while len(got) < 3000 and time.monotonic() < deadline:
            time.sleep(0.01)
        receiver.stop()
        dispatcher.stop(grace=10)
        assert list(dict.fromkeys(got)) == sent
        assert [UMessage.from_bytes(raw).payload for raw in got[:2]] == [b"0", b"1"]
        assert dispatcher.books().problems() == []
        assert dispatcher.dead_letters.list() == []
