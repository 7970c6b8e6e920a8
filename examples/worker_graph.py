"""A graph of workers, in Python and in a shell; one is killed, and no message is lost.

python examples/worker_graph.py
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import penstock
from penstock.core.worker_graph import load_graph
from penstock.workers.graph_run import GraphRun

FILE = Path(__file__).parent / "graphs" / "words.yaml"
LINES = 60


def main() -> None:
    """Run the graph, put lines into it, and kill a worker meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OUT": folder, "LINES_PORT": "0"}
        with GraphRun(load_graph(FILE)) as run:
            with penstock.open_writer(f"lhhttt://{run.address('lines')}") as writer:
                writer.write_many(b"no message is lost %d" % number for number in range(LINES))
            while not run.statistics().edges["words"].done:
                time.sleep(0.05)
            os.kill(run.pids()["shout"][0], signal.SIGKILL)
            assert run.wait_until_done(40)
            vertices = run.statistics().vertices
        for name, vertex in vertices.items():
            assert vertex.work is not None
            print(f"{name}: {vertex.work.done} messages done, {vertex.restarts} restarts")
        with penstock.open_reader(f"log:{folder}/counts") as reader:
            found = {message.payload.split()[0] for message in reader.available()}
        print(f"found {b', '.join(sorted(found)).decode()}")
        assert found == {b"NO", b"MESSAGE", b"IS", b"LOST", b"sum"}


if __name__ == "__main__":
    main()
