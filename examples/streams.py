"""A sensor that many watch and many command, each in a process of its own.

The sensor creates both of its streams: an output stream (1:N) of measurements, and an input stream
(N:1) of commands. Then it is killed, and its successor goes on where it was.

    python examples/streams.py
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from typing import TYPE_CHECKING

from penstock.core.errors import AlreadyExists
from penstock.core.stream_id import id_for_app
from penstock.queue.streams import InputStream, OutputStream

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

MEASUREMENTS = id_for_app("thermometer", "measurements")
COMMANDS = id_for_app("thermometer", "commands")
END = 1


def sensor(name: str, count: int) -> None:
    """Measure what it is told to; the last one says that it was the last."""
    with (
        InputStream.create(COMMANDS, owner=name) as commands,
        OutputStream.create(MEASUREMENTS, owner=name) as measurements,
    ):
        for number in range(count):
            command = commands.read()
            assert command is not None
            seq = measurements.write(b"%s for %s" % (name.encode(), command.payload))
            if number == count - 1 and name == "the first":
                os.kill(os.getpid(), 9)
        measurements.write(b"", type=END)
        print(f"{name}: {seq + 1} measurements are out")


def operator(name: str, ready: Barrier) -> None:
    """Ask for five measurements."""
    with InputStream.open(COMMANDS, wait=True) as commands:
        ready.wait()
        for number in range(5):
            commands.write(f"{name}, command {number}".encode())


def display(name: str) -> None:
    """Show what is measured."""
    with OutputStream.open(MEASUREMENTS, wait=True) as measurements:
        for message in measurements:
            if message.type == END:
                break
            print(f"{name}: {message.seq} {bytes(message.payload).decode()}")


def main() -> None:
    """Start them all; then see that the second sensor lost nothing."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PENSTOCK_STREAMS"] = directory
        ready = mp.Barrier(3, timeout=30)
        first = mp.Process(target=sensor, args=("the first", 4))
        others = [
            first,
            *(mp.Process(target=operator, args=(name, ready)) for name in ("Ann", "Bob")),
            *(mp.Process(target=display, args=(name,)) for name in ("left", "right")),
        ]
        for process in others:
            process.start()
        OutputStream.open(MEASUREMENTS, wait=True).close()  # the sensor is there
        try:
            OutputStream.create(MEASUREMENTS, owner="another")
        except AlreadyExists as refusal:
            print(refusal)
        ready.wait()
        first.join()
        # The command that the first was at when it was killed comes again: seven of ten are left.
        sensor("the second", 7)
        for process in others:
            process.join()


if __name__ == "__main__":
    main()
