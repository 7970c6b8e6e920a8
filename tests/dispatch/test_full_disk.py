"""Does a dispatcher that was killed on a full disk start again, and deliver what it has?"""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.protocols.uprotocol import UMessage, UUri, notification
from penstock.protocols.uprotocol.transports.ring import RingTransport
from support.bus_processes import bus_process
from support.small_disks import small_disk_at
from support.until import until

TOPIC = UUri("here", 0x10, 1, 0x8001)
ENTITY = UUri("here", 0x20, 1, 0)


def _use_up(disk: Path) -> None:
    with (disk / "others").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_killed_on_a_full_disk_it_starts_again_and_delivers(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "64M") as disk:
        file = tmp_path / "bus.yaml"
        rings = f'{{receive: "fmq:{tmp_path}/in", send: "fmq:{tmp_path}/{{ue_id}}"}}'
        file.write_text(
            f"dispatcher: bus\nauthority: here\nstate: {disk}/state\n"
            f"legs: {{local: {{ring: {rings}, authorities: [here]}}}}\n"
        )
        with bus_process(file) as bus:
            with RingTransport("here", send=f"fmq:{tmp_path}/in") as sender:
                for number in range(10):
                    sender.send(notification(TOPIC, ENTITY, b"%d" % number))
            until(lambda: list((disk / "state" / "outbox").glob("new/*.fmq")))
            _use_up(disk)
            bus.kill()
            _use_up(disk)
            bus.start()
            heard: list[UMessage] = []
            with RingTransport("here", receive=f"fmq:{tmp_path}/20") as receiver:
                receiver.register_listener(TOPIC, heard.append, ENTITY)
                until(lambda: len(heard) >= 10, 30)
            payloads = list(dict.fromkeys(message.payload for message in heard))
            assert payloads == [b"%d" % number for number in range(10)]
            bus.kill()
