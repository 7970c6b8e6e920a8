"""How do many relays run in one process, independently?"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import PenstockError, Unsupported
from penstock.core.worker import Worker
from penstock.relay.copy import check_apart, fields_lost
from penstock.relay.outages import (
    StopAsked,
    StoppableClock,
    connection_options,
    outage_policy,
    retried,
)
from penstock.relay.relay import Relay, RelayStatistics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.interfaces import Reader, Writer
    from penstock.relay.config import RelayOptions

__all__ = ["RelayStatus", "Relays"]

log = logging.getLogger(__name__)

_NOTHING = RelayStatistics(0, 0, 0, {}, 0, 0, 0, 0, 0)


class RelayStatus(NamedTuple):
    """A snapshot of one relay."""

    name: str
    #: `starting`, `running`, `waiting` (an outage), `done`, `stopped` or `failed`.
    state: str
    #: Why it waits or failed.
    trouble: str | None
    books: RelayStatistics

    def as_dict(self) -> dict[str, object]:
        """Return the fields for JSON."""
        books = self.books._asdict()
        books["dropped"] = {reason.value: n for reason, n in self.books.dropped.items()}
        return {"relay": self.name, "state": self.state, "trouble": self.trouble, **books}


class Relays:
    """Running relays, each in a thread of its own. A failure does not affect the others."""

    def __init__(self, relays: Mapping[str, RelayOptions]) -> None:
        self._stop = threading.Event()
        self._all = [_Running(name, options, self._stop) for name, options in relays.items()]

    def start(self) -> None:
        for one in self._all:
            one.worker.start()

    def statuses(self) -> list[RelayStatus]:
        return [one.status() for one in self._all]

    @property
    def are_over(self) -> bool:
        """Whether all of them have ended."""
        return not any(one.worker.is_alive for one in self._all)

    def stop(self, timeout: float) -> bool:
        """Let each finish its current batch; tell whether all ended within `timeout` seconds."""
        self._stop.set()
        deadline = time.monotonic() + timeout
        for one in self._all:
            one.worker.join(max(0.0, deadline - time.monotonic()))
        return self.are_over

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(5.0)


class _Running:
    def __init__(self, name: str, options: RelayOptions, stop: threading.Event) -> None:
        self._name = name
        self._options = options
        self._stop = stop
        self._relay: Relay | None = None
        self._state = "starting"
        self._trouble: str | None = None
        self.worker = Worker(f"relay-{name}", self._run, log=log)

    def status(self) -> RelayStatus:
        relay = self._relay
        state, trouble = self._state, self._trouble
        if relay is not None and state == "running" and relay.trouble is not None:
            state, trouble = "waiting", relay.trouble
        books = _NOTHING if relay is None else relay.statistics()
        return RelayStatus(self._name, state, trouble, books)

    def _run(self, _: Worker) -> None:
        try:
            with contextlib.ExitStack() as stack:
                reader, writer = self._open(stack)
                self._relay = Relay(reader, writer, self._options, should_stop=self._stop.is_set)
                self._state, self._trouble = "running", None
                self._relay.run()
            self._state = "stopped" if self._stop.is_set() else "done"
        except StopAsked:
            self._state = "stopped"
        except Exception as error:
            self._trouble = "; ".join([str(error), *getattr(error, "__notes__", ())])
            self._state = "failed"
            known = isinstance(error, PenstockError)
            log.warning("relay %s failed: %s", self._name, error, exc_info=not known)

    def _open(self, stack: contextlib.ExitStack) -> tuple[Reader, Writer]:
        """Open both sides, and wait until they are available."""
        options = self._options
        policy = outage_policy(options.longest_outage, until_created=options.follow)
        clock = StoppableClock(self._stop.is_set)

        def wait(attempt: int, error: Exception, delay: float) -> None:
            del delay
            self._trouble = str(error)
            if attempt == 1:
                log.warning("relay %s waits: %s", self._name, error)

        def open_source() -> Reader:
            more = connection_options(options.source)
            return open_reader(options.source, options.start, **more)

        def open_target() -> Writer:
            check_apart(options.source, options.target)
            return open_writer(options.target, **connection_options(options.target))

        reader = stack.enter_context(retried(open_source, policy, clock, wait))
        writer = stack.enter_context(retried(open_target, policy, clock, wait))
        lacking = fields_lost(reader, writer)
        if lacking:
            what = ", ".join(f"{field} is {fate}" for field, fate in lacking.items())
            if options.strict:
                raise Unsupported(f"{writer.url} cannot carry every field: {what}")
            log.warning("%s: %s", writer.url, what)
        return reader, writer
