"""How many messages a second pass the transports of uProtocol, 1 KiB each?

    python benches/uprotocol_transports.py [messages]

Ring: a dispatcher's leg, from the ring that entities append to into the ring of a receiver, with
the messages decoded on the way. MQTT: `deliver` to a mosquitto of its own, acknowledged with QoS
1, and received by another leg in another process. zenoh: `deliver` over TCP on the loopback to a
leg in another process.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from penstock.core.endpoints import create, open_writer
from penstock.protocols.uprotocol import UMessage, UUri, notification
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg
from penstock.protocols.uprotocol.transports.ring import RingLeg
from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink
from support.mosquitto import free_port, mosquitto
from support.until import until

SOURCE, SINK = UUri("device1", 0x10AB, 1, 0x8001), UUri("device2", 0x20AB, 1, 0)
BATCH = 256


def made(count: int) -> list[UMessage]:
    return [
        UMessage.from_bytes(notification(SOURCE, SINK, bytes(1024)).to_bytes())
        for _ in range(count)
    ]


def shown(what: str, count: int, seconds: float, cpu: float) -> None:
    print(f"{what:42} {count / seconds:10,.0f} msg/s {cpu / count * 1e6:8.2f} us CPU each")


def ring(count: int) -> None:
    messages = [message.to_bytes() for message in made(1000)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        size = f"slots={1 << (count - 1).bit_length()}&size={count * 1400 + (1 << 20)}"
        create(f"fmq:{directory}/20AB?{size}&writers=many")
        leg = RingLeg(
            "bench", receive=f"fmq:{directory}/in?{size}", send=f"fmq:{directory}/{{ue_id}}"
        )
        create(f"fmq:{directory}/in?{size}&writers=many")
        with open_writer(f"fmq:{directory}/in", hold="uprotocol", keep=True) as writer:
            for _ in range(count // 1000):
                writer.write_many(messages)
        done, total = threading.Event(), 0

        def ingest(batch: Any) -> None:
            nonlocal total
            assert leg.deliver(SINK, [UMessage.from_bytes(it) for it in batch])[-1] is None
            total += len(batch)
            if total >= count:
                done.set()

        began, cpu = time.perf_counter(), time.process_time()
        leg.start(ingest, [])
        assert done.wait(120)
        ended = time.perf_counter() - began
        shown("ring: ingest, decode, deliver", total, ended, time.process_time() - cpu)
        leg.close()


def _receive(kind: str, place: str, count: int, pipe: Any) -> None:
    leg: Any
    if kind == "mqtt":
        leg = MqttLeg("in", "device2", MqttBroker.parse(place))
    else:
        leg = ZenohLeg("in", ZenohLink("device2", listen=[place]))
    done, total = threading.Event(), 0

    def ingest(batch: Any) -> None:
        nonlocal total
        total += len(batch)
        if total >= count:
            done.set()

    leg.start(ingest, ["device2"])
    if kind == "mqtt":
        assert leg.await_connection(10) is None
        time.sleep(0.5)
    pipe.send("ready")
    assert done.wait(300)
    pipe.send("done")
    leg.close()


def network(kind: str, count: int) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        broker = None
        if kind == "mqtt":
            manager = mosquitto(Path(directory))
            broker = manager.__enter__()
            place = broker.url
            leg: Any = MqttLeg("out", "device1", MqttBroker.parse(place))
        else:
            place = f"tcp/127.0.0.1:{free_port()}"
        mine, theirs = context.Pipe()
        receiver = context.Process(target=_receive, args=(kind, place, count, theirs))
        receiver.start()
        assert mine.recv() == "ready"
        if kind == "zenoh":
            leg = ZenohLeg("out", ZenohLink("device1", connect=[place]))
        leg.start(lambda _: None, ["device1"])
        messages = made(BATCH)
        until(lambda: leg.deliver(SINK, messages[:1]) == [None])
        sent = 1
        began, cpu = time.perf_counter(), time.process_time()
        while sent < count:
            batch = messages[: count - sent]
            assert leg.deliver(SINK, batch) == [None] * len(batch)
            sent += len(batch)
        shown(f"{kind}: deliver", count, time.perf_counter() - began, time.process_time() - cpu)
        assert mine.recv() == "done"
        shown(f"{kind}: until all are ingested", count, time.perf_counter() - began, 0)
        leg.close()
        receiver.join(20)
        if broker is not None:
            manager.__exit__(None, None, None)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    ring(count)
    network("zenoh", count)
    network("mqtt", max(1000, count // 5))


if __name__ == "__main__":
    main()
