"""What have clients asked for, so that a repeated request is done once, and what do they hold?"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.protocols.lhhttt.runs import RunMap, count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.lhhttt.commands import Lease
    from penstock.protocols.lhhttt.runs import Range, Run

__all__ = ["WINDOW", "Client", "Clients", "Loan", "Loans", "Window", "chosen_by"]

#: Numbers that are remembered of each, below its latest.
WINDOW: Final = 1024
#: Clients that are remembered, and for how long (seconds) after their last word.
_MOST_CLIENTS: Final = 10_000
_REMEMBERED: Final = 600.0
#: What may be leased at once: it is kept in memory, to be given again.
_MOST_LEASED: Final = 100_000
_MOST_LEASED_BYTES: Final = 256 << 20


# --- what they have asked for -------------------------------------------------------------------


class Window:
    """The latest store requests of a client, as a bit map of their numbers."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        #: A bit for each number, the highest first.
        self._seen = 0

    def __contains__(self, seq: int) -> bool:
        below = self._highest - seq
        return below >= 0 and bool(self._seen >> below & 1)

    def is_past(self, seq: int) -> bool:
        """Tell whether a number is too old to know if it was used."""
        return seq <= self._highest - WINDOW

    def add(self, seq: int) -> None:
        if seq > self._highest:
            more = seq - self._highest
            self._seen = 1 if more >= WINDOW else (self._seen << more | 1) & ((1 << WINDOW) - 1)
            self._highest = seq
        elif not self.is_past(seq):
            self._seen |= 1 << self._highest - seq


@dataclass(slots=True)
class Client:
    """What the queue remembers of one client."""

    heard: float = 0.0
    stored: Window = field(default_factory=Window)
    #: The number of its latest lease request: it waits for the answer to this one alone.
    latest: int = -1
    #: Messages of a request that are to come yet, where others of it are stored: the server
    #: failed, or died.
    begun: dict[int, int] = field(default_factory=dict)

    def note_stored(self, seq: int, left: int) -> None:
        """Note that a request is stored, except for its last `left` messages."""
        if left:
            self.begun[seq] = left
        else:
            self.begun.pop(seq, None)
            self.stored.add(seq)


class Clients:
    """The clients that were active recently."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: OrderedDict[bytes, Client] = OrderedDict()
        #: What those chose as their names that are gone, and until when that is remembered.
        self._gone: dict[bytes, float] = {}
        #: Clients that were forgotten before their time, to make room for others.
        self.forgotten = 0

    def hear(self, name: bytes) -> Client:
        """Return the record of a client, and note that it is active."""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client()
            if len(self._clients) > _MOST_CLIENTS:
                self._clients.popitem(last=False)
                self.forgotten += 1
        else:
            self._clients.move_to_end(name)
        client.heard = self._clock()
        return client

    def leave(self, chosen: bytes) -> None:
        """Note that the client with this name has left."""
        self._gone[chosen] = self._clock() + _REMEMBERED

    def is_gone(self, name: bytes) -> bool:
        return bool(self._gone) and chosen_by(name) in self._gone

    def forget(self, now: float) -> None:
        """Forget the clients that were inactive for too long."""
        while self._clients:
            name, client = next(iter(self._clients.items()))
            if client.heard + _REMEMBERED > now:
                break
            del self._clients[name]
        for name in [name for name, until in self._gone.items() if until <= now]:
            del self._gone[name]


def chosen_by(client: bytes) -> bytes:
    """Return the prefix of a client's name, without its random suffix; see `QueueClient`."""
    return client.rpartition(b".")[0]


# --- what they have -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Loan:
    """The messages leased to a client by one request."""

    request: Lease
    ranges: Sequence[Range]
    until: float
    #: Messages of it that the client still has.
    left: int


class Loans:
    """All leases of a queue."""

    def __init__(self, lease: float) -> None:
        """Leases end after `lease` seconds."""
        self._lease = lease
        self._runs = RunMap()
        #: By the client and the number of its request, the earliest to end first.
        self._loans: OrderedDict[tuple[bytes, int], Loan] = OrderedDict()

    @property
    def count(self) -> int:
        """Number of leased messages."""
        return self._runs.count

    @property
    def size(self) -> int:
        """Bytes of the leased messages."""
        return self._runs.size

    @property
    def is_full(self) -> bool:
        return self._runs.count >= _MOST_LEASED or self._runs.size >= _MOST_LEASED_BYTES

    @property
    def ends_at(self) -> float | None:
        """When the next lease ends."""
        return next((loan.until for loan in self._loans.values()), None)

    def lend(self, request: Lease, runs: Sequence[Run], now: float) -> Loan:
        """Lease messages to a client."""
        ranges = [run.range for run in runs]
        loan = Loan(request, ranges, now + self._lease, count_of(ranges))
        self._loans[request.client, request.seq] = loan
        for run in runs:
            self._runs.add(run.part(*run.range, loan))
        return loan

    def find(self, client: bytes, seq: int) -> Loan | None:
        """Return the lease of one request of a client."""
        return self._loans.get((client, seq))

    def of(self, loan: Loan) -> list[Run]:
        """Return the messages of a lease that are not settled."""
        parts = [part for range in loan.ranges for part in self._runs.within(*range)]
        return [part for part in parts if part.loan is loan]

    def lent(self, first: int, end: int) -> list[Range]:
        """Return which of these messages are leased."""
        return [part.range for part in self._runs.within(first, end)]

    def give_back(self, client: bytes, first: int, end: int) -> list[Run]:
        """End a client's leases of these messages; return those that it held."""
        return self._end(
            [
                part
                for part in self._runs.within(first, end)
                if part.loan is not None and part.loan.request.client == client
            ]
        )

    def expire(self, now: float) -> list[Run]:
        """End expired leases; return their messages."""
        ended: list[Run] = []
        while self._loans and (loan := next(iter(self._loans.values()))).until <= now:
            ended += self._end(self.of(loan))
        return ended

    def release(self, is_gone: Callable[[bytes], bool]) -> list[Run]:
        """End all leases of the chosen clients; return their messages."""
        loans = [loan for (client, _), loan in self._loans.items() if is_gone(client)]
        return [part for loan in loans for part in self._end(self.of(loan))]

    def _end(self, parts: list[Run]) -> list[Run]:
        for part in parts:
            self._runs.remove(part)
            loan = part.loan
            assert loan is not None
            loan.left -= part.count
            if not loan.left:
                del self._loans[loan.request.client, loan.request.seq]
        return parts
