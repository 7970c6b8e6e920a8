"""An app: it adds up what a codelet tells, and asks it to tell more often."""

from __future__ import annotations

import struct

import numpy as np

from penstock.workers.apps import (
    App,
    AppContext,
    AppStream,
    Output,
    Receive,
    StreamMessage,
    Target,
)

CODELET = "LoadExample://jbpf_agent/load_set/load"
#: The struct that the codelet writes.
TELEMETRY = np.dtype([("count", "<u4"), ("interval_us", "<u4"), ("load", "<f8")])


class Aggregator(App):
    """Tells the mean of every ten samples; after the first ten it wants them more often."""

    telemetry = Receive(device=1, path=CODELET, name="telemetry")
    commands = Target(device=1, path=CODELET, name="commands")
    means = Output(path="LoadExample://intraapp", name="mean load")
    streams = (telemetry, commands, means)

    def __init__(self, context: AppContext | None = None) -> None:
        super().__init__(context)
        self._loads: list[float] = []
        self._interval_us = int(self.context.params.get("interval_us", "2000"))

    def on_message(self, stream: AppStream, message: StreamMessage) -> None:
        del stream  # there is one that it receives
        sample = message.cast(TELEMETRY)[0]
        self._loads.append(float(sample["load"]))
        if len(self._loads) < 10:
            return
        self.send(self.means, struct.pack("<d", sum(self._loads) / len(self._loads)))
        self._loads.clear()
        if sample["interval_us"] != self._interval_us:
            print(f"{message.sender} gets a command", flush=True)
            self.send(self.commands, struct.pack("<I", self._interval_us))
