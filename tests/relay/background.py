"""A relay on a thread of the test, and messages that can be told apart."""

from __future__ import annotations

import threading

from penstock import open_reader, open_writer
from penstock.relay import Relay, RelayStatistics, relay_options
from penstock.relay.outages import connection_options

__all__ = ["Background", "fill", "numbers"]


def fill(url: str, count: int, first: int = 0) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"message %d" % i for i in range(first, first + count)], type=3)


def numbers(url: str) -> list[int]:
    with open_reader(url) as reader:
        return [int(message.payload.split()[1]) for message in reader.available()]


class Background:
    """A relay on a thread of this process."""

    def __init__(self, source: str, target: str, **given: object) -> None:
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._options = relay_options(source=source, target=target, follow=True, **given)
        self.relay: Relay | None = None
        self.books: RelayStatistics | None = None
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        options = self._options
        more = connection_options(options.source)
        with (
            open_reader(options.source, options.start, **more) as reader,
            open_writer(options.target) as writer,
        ):
            self.relay = Relay(reader, writer, options, should_stop=self._stop.is_set)
            self._ready.set()
            try:
                self.books = self.relay.run()
            except Exception as error:  # noqa: BLE001 - for the thread of the test
                self.failure = error

    def copied(self) -> int:
        assert self.relay is not None
        if self.failure is not None:
            raise self.failure
        return self.relay.statistics().copied

    def end(self) -> RelayStatistics:
        self._stop.set()
        self._thread.join(30)
        assert self.books is not None
        return self.books
