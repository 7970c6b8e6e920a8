"""A rig sends its streams as psi does, and a desk reads them through a broken connection.

Both speak the protocol of psi's RemoteExporter and RemoteImporter, so that either may be a psi
program. A router between the two cuts all connections now and then; nothing is lost.

    python examples/psi_remoting.py
"""

from __future__ import annotations

import math
import socket
import tempfile
import threading
import time

from penstock.protocols.psi import REPLAY_ALL, RemoteExporter, RemoteImporter
from penstock.relay.faults import FaultRouter

HOST = "127.0.0.1"
COUNT = 2000


def measure(rig: RemoteExporter, routers: tuple[FaultRouter, ...]) -> None:
    """Post a curve and a remark now and then; a storm cuts the cables meanwhile."""
    curve = rig.exporter.write(None, "Curve", "double")
    remarks = rig.exporter.write(None, "Remarks", "string", policy="queue-size:100")
    for number in range(COUNT):
        curve.post(math.sin(number / 50))
        if number % 500 == 0:
            remarks.post(f"{number} values so far")
            for router in routers:
                router.cut_all()
        time.sleep(0.0005)
    curve.close()
    remarks.close()


def main() -> None:
    """Let the rig send and the desk read, with the routers between them."""
    with socket.create_server((HOST, 0)) as free:
        data_port = free.getsockname()[1]
    with (
        tempfile.TemporaryDirectory() as folder,
        FaultRouter.tcp((HOST, data_port)) as data,
        # On disk, so that what a desk missed is still there when it comes again.
        RemoteExporter(
            f"{folder}/rig", 0, data_port=data_port, told_data_port=data.address[1]
        ) as rig,
        FaultRouter.tcp((HOST, rig.port)) as meta,
        RemoteImporter(HOST, meta.address[1], REPLAY_ALL, longest_wait=0.2) as desk,
    ):
        measuring = threading.Thread(target=measure, args=(rig, (meta, data)))
        measuring.start()
        with desk.open_stream("Curve", "double") as curve, desk.open_stream("Remarks") as remarks:
            values = [received.value for received in curve]
            texts = [received.value for received in remarks]
        measuring.join()
        books = desk.statistics()
        assert len(values) == COUNT
        assert books.lost == 0
        print(f"{len(values):,} values, the last is {values[-1]:.3f}; remarks: {texts}")
        print(f"{books.connections} connections, {books.repeated} repeated, {books.lost} lost")


if __name__ == "__main__":
    main()
