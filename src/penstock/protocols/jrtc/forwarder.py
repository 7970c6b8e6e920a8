"""How do streams reach collectors and other systems?

A stream's `fwd_dst` names its destination. The forwarder subscribes to the streams of each
destination, serialises structs to protobuf, and sends batches. Destinations are independent.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.dead_letter import Code
from penstock.core.errors import InvalidStreamId, Overrun, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import ForwardDestination
from penstock.core.worker import Worker
from penstock.protocols.jrtc.dead_letters import DeadLetters
from penstock.protocols.jrtc.destinations import Destination, Rejected
from penstock.protocols.jrtc.wire import ID_SIZE, payload_bytes
from penstock.queue.stream_directory import StreamKind, StreamPlace
from penstock.queue.subscription import Subscription, requests_for

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.core.stream_id import StreamId
    from penstock.protocols.jrtc.schemas import Schemas

__all__ = ["Forwarder", "ForwarderStatistics", "RouteStatistics"]

log = logging.getLogger(__name__)

#: Messages that are sent at once.
_BATCH: Final = 4096
#: Seconds between two looks whether to end.
_LOOK: Final = 0.2
#: Seconds after which the books of streams are looked at again.
_BETWEEN_BOOKS: Final = 0.05
#: Seconds that what is there at the end has to leave.
_DRAINING: Final = 2.0
#: Seconds that `close` waits for a destination that is inside `send`; an HTTP request may take 10.
_LEAVING: Final = 15.0


class RouteStatistics(NamedTuple):
    """Counters of one destination: taken = forwarded + rejected + undelivered + waiting."""

    #: Messages taken from streams.
    taken: int
    #: Messages that the destination has, and their bytes as protobuf.
    forwarded: int
    bytes: int
    #: Messages that cannot be sent, by the reason; each is a dead letter where there is a place.
    rejected: dict[Code, int]
    #: Messages that the destination had not taken when the forwarder was closed; dead letters, too.
    undelivered: int
    #: Messages that wait for the destination.
    waiting: int
    #: Messages that were overwritten before they were taken, or still in their streams when the
    #: forwarder was closed. Under `BLOCK` the next forwarder of this name takes the latter, and
    #: what was taken, but not by the destination, unless the stream was removed.
    lost: int
    #: How often the destination could take nothing.
    outages: int
    #: Streams that are read.
    streams: int


class ForwarderStatistics(NamedTuple):
    """Counters of a forwarder."""

    #: Of each destination, by its `fwd_dst`.
    routes: dict[int, RouteStatistics]
    #: Dead letters that were written, and that could not be.
    dead: int
    unwritten: int

    @property
    def taken(self) -> int:
        return sum(each.taken for each in self.routes.values())

    @property
    def forwarded(self) -> int:
        return sum(each.forwarded for each in self.routes.values())

    @property
    def rejected(self) -> int:
        return sum(sum(each.rejected.values()) for each in self.routes.values())

    @property
    def lost(self) -> int:
        """Messages that are nowhere.

        Overwritten or left in their streams, or rejected or undelivered without a dead letter.
        """
        gone = sum(each.lost for each in self.routes.values())
        return gone + self.unwritten


class Forwarder(Closable):
    """Forwards streams, from `start` on until it is closed.

        with Forwarder({2: UdpDestination("127.0.0.1", 20788)}, schemas) as forwarder:
            forwarder.start()
            ...

    Existing streams are read from their end, later ones from their start.
    """

    def __init__(
        self,
        destinations: Mapping[int, Destination],
        schemas: Schemas,
        *,
        name: str = "forwarder",
        directory: str | os.PathLike[str] | None = None,
        policy: OverflowPolicy = OverflowPolicy.DROP_OLDEST,
        dead: Writer | None = None,
    ) -> None:
        """Take over the destinations, by their `fwd_dst`, and `dead`.

        :param directory: where streams are; by default that of this user
        :param policy: `BLOCK`: creators of streams that name us (`hold=NAME-DST`) wait for us
        :param dead: takes messages that cannot be sent
        :raises InvalidStreamId: a `fwd_dst` is out of range.
        """
        for number in destinations:
            if not 0 < number < ForwardDestination.ANY:
                raise InvalidStreamId("fwd_dst", number, "should be from 1 to 126")
        self._letters = DeadLetters(dead)
        self._routes: dict[int, _Route] = {}
        try:
            for number, destination in destinations.items():
                subscription = _Streams(f"{name}-{number}", directory=directory, policy=policy)
                subscription.add(*requests_for(destinations=number))
                self._routes[number] = _Route(
                    *(destination, subscription, schemas, self._letters),
                    goes_on=policy is OverflowPolicy.BLOCK,
                )
        except BaseException:
            self.close()
            raise

    def start(self) -> Forwarder:
        """Start forwarding."""
        for route in self._routes.values():
            route.start()
        return self

    def statistics(self) -> ForwarderStatistics:
        routes = {number: route.statistics() for number, route in self._routes.items()}
        return ForwarderStatistics(routes, self._letters.written, self._letters.unwritten)

    def close(self) -> None:
        """Send what is left, for a moment, and stop. Idempotent.

        A destination that does not return from `send` is not closed.
        """
        for route in self._routes.values():
            route.ask_to_stop()
        deadline = time.monotonic() + _LEAVING
        for route in self._routes.values():
            route.close(max(0.0, deadline - time.monotonic()))
        self._letters.close()


class _Streams(Subscription):
    """The streams of one destination, which can be given back what was read of them."""

    def give_back(self, stream: StreamId, seq: int) -> bool:
        """Go back in a stream: message `seq` is the next again, and not acknowledged.

        False: the stream was removed, so that no later reader gets its messages.
        """
        place = StreamPlace.of(stream, StreamKind.OUTPUT, self.directory)
        reader = self._sources[place].reader
        if not reader.is_named():
            return False
        reader.seek(seq)
        return True

    def backlog_of_removed(self) -> int:
        """Return how many messages wait in streams that were removed."""
        readers = [source.reader for source in self._sources.values()]
        return sum(reader.backlog for reader in readers if not reader.is_named())


class _Route:
    """One destination: its subscription, and the thread that sends."""

    def __init__(
        self,
        destination: Destination,
        subscription: _Streams,
        schemas: Schemas,
        letters: DeadLetters,
        *,
        goes_on: bool,
    ) -> None:
        """Take over the destination and the subscription.

        :param goes_on: what is in the streams at the end is for the next forwarder
        """
        self._goes_on = goes_on
        self._destination = destination
        self._subscription = subscription
        self._schemas = schemas
        self._letters = letters
        self._taken = self._forwarded = self._bytes = 0
        self._undelivered = self._outages = self._waiting = 0
        self._rejected: Counter[Code] = Counter()
        #: What the subscription said last: it is for one thread.
        self._lost = self._streams = 0
        self._asked_at = 0.0
        #: When it ends, whatever is left.
        self._ends_at = math.inf
        self._is_closed = False
        #: Its destination was still sending when it was closed.
        self._is_stuck = False
        self._worker = Worker(
            f"forward-{destination.name}",
            self._run,
            log=log,
            restart=True,
            rouse=subscription.interrupt,
        )

    def start(self) -> None:
        self._worker.start()

    def ask_to_stop(self) -> None:
        self._ends_at = min(self._ends_at, time.monotonic() + _DRAINING)
        self._worker.ask_to_stop()

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            self._forward(worker, _LOOK)
            if time.monotonic() > self._asked_at + _BETWEEN_BOOKS:
                self._ask_books()
        while time.monotonic() < self._ends_at and self._forward(worker, 0):
            pass

    def _forward(self, worker: Worker, timeout: float) -> bool:
        """Send the next batch; False if there is none."""
        try:
            with self._subscription.receive_batch(_BATCH, timeout) as lent:
                if lent is None:
                    return False
                stream, batch = lent.stream, _copied(lent.batch, lent.stream)
        except Overrun:  # it is counted as lost
            return True
        self._taken += len(batch)
        self._waiting = len(batch)
        serialised, rejected = self._serialised(stream, batch)
        rest = self._deliver(worker, serialised)
        done = self._leave(stream, batch, rest) if len(rest) else len(batch)
        self._reject(batch, [each for each in rejected if each.row < done])
        self._waiting = 0
        return True

    def _leave(self, stream: StreamId, batch: Batch, rest: Batch) -> int:
        """Give what was not sent back to its stream, for the next forwarder, or give it up.

        Returns how many messages of the batch the next forwarder does not get.
        """
        first = rest["seq"][0]
        if not self._goes_on or not self._subscription.give_back(stream, first.as_py()):
            self._give_up(rest)
            return len(batch)
        done: int = batch["seq"].index(first).as_py()
        self._taken -= len(batch) - done
        self._ends_at = 0.0  # or the same would be taken again
        return done

    def _serialised(self, stream: StreamId, batch: Batch) -> tuple[Batch, list[Rejected]]:
        """Return the messages that can be serialised, as protobuf, and the others."""
        schema = self._schemas.find(stream)
        if schema is None and self._schemas.has_structs(stream):  # nobody knows what these mean
            reason = "the package of its schema does not have its message"
            every = range(len(batch))
            return batch.slice(len(batch)), [
                Rejected(row, Code.FAILED_PRECONDITION, reason) for row in every
            ]
        if schema is None or schema.codec is None:
            return batch, []
        payloads, failures = schema.codec.serialise(batch.column("payload"))
        index = BATCH_SCHEMA.get_field_index("payload")
        batch = batch.set_column(index, BATCH_SCHEMA.field(index), payloads)
        if failures:
            bad = {each.row for each in failures}
            batch = batch.take(pa.array([i for i in range(len(batch)) if i not in bad], pa.int64()))
        return batch, [Rejected(each.row, Code.INVALID_ARGUMENT, each.reason) for each in failures]

    def _deliver(self, worker: Worker, batch: Batch) -> Batch:
        """Send a batch, again and again; return what is left of it when it is time to end."""
        while len(batch):
            try:
                done, rejected = self._destination.send(batch)
            except (OSError, PenstockError) as error:
                done, rejected = 0, ()
                log.warning("%s takes nothing: %s", self._destination.name, error)
            except Exception as error:
                log.exception("%s fails", self._destination.name)
                reason = f"{type(error).__name__}: {error}"
                done = len(batch)
                rejected = [Rejected(row, Code.INTERNAL, reason) for row in range(done)]
            good = done - len(rejected)
            self._forwarded += good
            self._bytes += payload_bytes(batch.slice(0, done)) - sum(
                len(batch.column("payload")[each.row].as_buffer()) for each in rejected
            )
            self._reject(batch, rejected)
            batch = batch.slice(done)
            self._waiting -= done
            if done:
                worker.note_success()
            if not done:
                self._outages += 1
            if time.monotonic() > self._ends_at or (not done and worker.back_off()):
                break
        return batch

    def _give_up(self, batch: Batch) -> None:
        self._undelivered += len(batch)
        reason = "the forwarder was stopped"
        self._letters.write(
            batch,
            [Rejected(row, Code.UNAVAILABLE, reason) for row in range(len(batch))],
            self._destination.name,
        )

    def _reject(self, batch: Batch, rejected: Sequence[Rejected]) -> None:
        if rejected:
            self._rejected.update(each.code for each in rejected)
            self._letters.write(batch, rejected, self._destination.name)

    def _ask_books(self, *, at_the_end: bool = False) -> None:
        books = self._subscription.statistics()
        self._lost, self._streams = books.lost, len(books.streams)
        if at_the_end:
            streams = self._subscription
            self._lost += streams.backlog_of_removed() if self._goes_on else books.backlog
        self._asked_at = time.monotonic()

    def statistics(self) -> RouteStatistics:
        waiting = self._waiting
        stuck = waiting if self._is_stuck else 0
        return RouteStatistics(
            self._taken,
            self._forwarded,
            self._bytes,
            dict(self._rejected),
            self._undelivered + stuck,
            waiting - stuck,
            self._lost + (0 if self._goes_on else stuck),
            self._outages,
            self._streams,
        )

    def close(self, timeout: float) -> None:
        """Stop. What the thread uses stays open if it does not end within `timeout` seconds."""
        has_ended = self._worker.stop(timeout)
        if self._is_closed:
            return
        self._is_closed = True
        self._ask_books(at_the_end=True)
        if has_ended:
            self._subscription.close()
            self._destination.close()
        else:
            self._is_stuck = True
            name = self._destination.name
            log.warning("%s is left while it takes %d messages", name, self._waiting)


def _copied(batch: Batch, stream: StreamId) -> Batch:
    """Copy messages that lie in the stream's memory into a batch with their streams."""
    count = len(batch)
    streams = pa.Array.from_buffers(pa.binary(ID_SIZE), count, [None, pa.py_buffer(stream * count)])
    columns = {name: batch.column(name) for name in BATCH_SCHEMA.names}
    columns["stream"] = streams
    columns["payload"] = columns["payload"].cast(pa.binary())
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=BATCH_SCHEMA)
