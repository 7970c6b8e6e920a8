"""What became of all messages that a dispatcher was given, and of all copies?"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields

from penstock.dispatch.outbox import OutboxBooks

__all__ = ["NO_COPIES", "Books", "Counts", "Ledger", "added"]

NO_COPIES = OutboxBooks(*[0] * len(OutboxBooks._fields))


def added(books: list[OutboxBooks]) -> OutboxBooks:
    """Return the sum of the counters of several outboxes."""
    if not books:
        return NO_COPIES
    return OutboxBooks(*(sum(column) for column in zip(*books, strict=True)))


@dataclass(slots=True)
class Counts:
    """Counters since this dispatcher was opened; `received` is the sum of the outcomes."""

    #: Messages passed to `ingest`, in calls that returned.
    received: int = 0
    #: Messages with at least one receiver.
    routed: int = 0
    #: Publishes without a subscriber.
    no_subscriber: int = 0
    #: Repeated ids: by the same leg, by another leg, or with other contents.
    duplicates: int = 0
    loops: int = 0
    conflicts: int = 0
    #: Input that is no uProtocol message, and how many of those are in quarantine.
    undecodable: int = 0
    quarantined: int = 0
    #: Rejected on arrival, each with a dead letter.
    too_large: int = 0
    invalid: int = 0
    unauthenticated: int = 0
    forbidden: int = 0
    expired_on_arrival: int = 0
    no_route: int = 0
    rate_limited: int = 0
    unsupported: int = 0
    internal: int = 0

    #: Created here: error responses, and dead letters published or retried.
    responses: int = 0
    letters_published: int = 0
    letters_retried: int = 0
    #: Failed requests without a response: not answerable, or answered already.
    unanswered: int = 0

    #: One for each receiver of a message routed or created here.
    copies: int = 0
    #: Copies rejected by an outbox, each with a dead letter.
    copies_refused: int = 0
    #: Copies stored in an outbox.
    copies_stored: int = 0

    #: Dead letters written; those written before; those withheld because they concern dead letters.
    letters: int = 0
    letters_known: int = 0
    letters_withheld: int = 0
    #: Copies of dead letters dropped for lack of room.
    letters_unpublished: int = 0
    #: Calls of `ingest` that raised, so that their messages are redelivered, and the messages
    #: rejected with a dead letter before that.
    ingest_failures: int = 0
    refused_in_vain: int = 0


_REFUSED = (
    *("too_large", "invalid", "unauthenticated", "forbidden", "expired_on_arrival", "no_route"),
    *("rate_limited", "unsupported", "internal"),
)
_ENDED = (
    *("routed", "no_subscriber", "duplicates", "loops", "conflicts", "undecodable"),
    *_REFUSED,
)


@dataclass(frozen=True, slots=True)
class Books:
    """The counters of messages, and of the copies in all outboxes.

    `copies` counts from the creation of the outboxes; `before` is its value when this dispatcher
    was opened.
    """

    counts: Counts
    copies: OutboxBooks
    before: OutboxBooks = field(default=NO_COPIES)

    @property
    def refused(self) -> int:
        """Number of messages rejected on arrival."""
        return sum(getattr(self.counts, name) for name in _REFUSED)

    @property
    def dead(self) -> int:
        """Number of copies that became dead letters."""
        return self.copies.expired + self.copies.queue_full + self.copies.permanent

    def problems(self) -> list[str]:
        """Return the sums that do not match; there is none while the dispatcher is idle."""
        counts, now, before = self.counts, self.copies, self.before
        ended = sum(getattr(counts, name) for name in _ENDED)
        settled = sum(now[1:])
        died = self.dead - before.expired - before.queue_full - before.permanent
        letters = counts.letters + counts.letters_known + counts.letters_withheld
        pairs = {
            "received = routed + no_subscriber + ... + refused": (counts.received, ended),
            "copies = stored + refused": (
                counts.copies,
                counts.copies_stored + counts.copies_refused,
            ),
            "copies stored = stored in the outboxes": (
                counts.copies_stored,
                now.stored - before.stored,
            ),
            "stored = acked + dead + gone + superseded + admin + queued": (now.stored, settled),
            "dead letters = refused + dead": (
                letters,
                self.refused + counts.refused_in_vain + counts.copies_refused + died,
            ),
        }
        return [f"{name}: {a} is not {b}" for name, (a, b) in pairs.items() if a != b]


class Ledger:
    """The running counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)

    def copy(self) -> Counts:
        with self._lock:
            names = [each.name for each in fields(Counts)]
            return Counts(**{name: getattr(self._counts, name) for name in names})
