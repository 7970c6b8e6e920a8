"""A UDP queue behind a network that loses a fifth of all datagrams: no message is lost.

python examples/udp_queue.py
"""

from __future__ import annotations

import penstock
from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions
from penstock.relay.faults import FaultRouter, Faults

COUNT = 200


def main() -> None:
    """Serve a queue, put a bad network before it, and pass messages through both."""
    with (
        LhhtttServer(ServerOptions(port=0)) as server,
        FaultRouter.udp(("127.0.0.1", server.port), Faults(drop=0.2), seed=3) as router,
    ):
        url = f"lhhttt://127.0.0.1:{router.address[1]}?mode=reliable"
        with penstock.open_writer(url) as writer:
            for number in range(0, COUNT, 50):
                writer.write_many(b"job %d" % each for each in range(number, number + 50))
        seen: dict[int, bytes] = {}
        with penstock.open_reader(url) as reader:
            while len(seen) < COUNT:
                for message in reader.read_many(50, timeout=1):
                    seen[message.seq] = message.payload
                reader.acknowledge()
        counters = router.counters()
        print(f"{counters.up.dropped + counters.down.dropped} datagrams were lost on the way")
        books = server.statistics().queue
        print(f"{books.queued} messages stored, {books.repeated} of them asked for again")
        assert list(seen.values()) == [b"job %d" % number for number in range(COUNT)]
        print(f"{len(seen)} messages arrived, in their order, each once")


if __name__ == "__main__":
    main()
