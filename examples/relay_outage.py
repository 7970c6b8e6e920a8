"""A relay keeps an archive in step with a live queue, while the archive's server is away.

The archive is behind a Flight server, as it would be on another machine.

    python examples/relay_outage.py
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import penstock
from penstock.protocols.flight import FlightServer, ServerOptions
from penstock.relay import Relays, relay_options

COUNT = 3000
#: Below those that the system gives to connections: free when the server comes back.
PORT = 18815


def main() -> None:
    """Relay a log that is being written, and take the target away for two seconds."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "archive"
        root.mkdir()
        server = FlightServer(ServerOptions(root=root, port=PORT))
        source = f"log:{folder}/beams"
        relay = relay_options(
            source=source,
            target=f"flight://127.0.0.1:{PORT}/beams?kind=log",
            state=Path(folder) / "beams.relay",
        )
        with penstock.open_writer(source) as writer, Relays({"beams": relay}) as relays:
            measuring = threading.Thread(target=measure, args=(writer,))
            measuring.start()
            time.sleep(0.5)
            server.close()
            time.sleep(2)
            print(f"the archive is away: the relay is {relays.statuses()[0].state}")
            server = FlightServer(ServerOptions(root=root, port=PORT))
            measuring.join()
            while (books := relays.statuses()[0].books).copied < COUNT:
                time.sleep(0.05)
        server.close()
        with penstock.open_reader(f"log:{root}/beams") as reader:
            numbers = [int(message.payload) for message in reader.available()]
        assert numbers == list(range(COUNT))
        print(f"{books.copied:,} messages copied, each of them once, {books.outages} outages")


def measure(writer: penstock.Writer) -> None:
    """Write a message a millisecond."""
    for number in range(COUNT):
        writer.write(b"%d" % number)
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
