"""The DataMapper hears of new files, and nobody waits for it."""

from __future__ import annotations

import socket
import time

from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.ldata_info import LatestInfo
from penstock.registry.latest_registering import MapRegistrar


def test_many_directories_and_a_map_that_hangs_hold_up_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as hanging:
        port = hanging.getsockname()[1]
        register = MapRegistrar(DataMapClient("127.0.0.1", port, timeout=20))
        began = time.monotonic()
        for number in range(70):
            register(LatestInfo(latest_time=number), f"/data/{number}")
        assert time.monotonic() - began < 3
        register.close()
        assert time.monotonic() - began < 8
