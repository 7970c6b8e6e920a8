"""What became of all messages that a dispatcher was given, and of all copies?"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields

from penstock.dispatch.outbox import OutboxBooks

__all__ = ["NO_COPIES", "Books", "Counts", "Ledger", "added"]

NO_COPIES = OutboxBooks(*[0] * len(OutboxBooks._fields))


def added(books: list[OutboxBooks]) -> OutboxBooks:
    """Return the sum of the books of several outboxes."""
    if not books:
        return NO_COPIES
    return OutboxBooks(*(sum(column) for column in zip(*books, strict=True)))


@dataclass(slots=True)
class Counts:
    """Messages since this dispatcher was opened, each counted once below `received`."""

    #: Given to `ingest`, in calls that returned.
    received: int = 0
    #: Went to at least one receiver, or should have.
    routed: int = 0
    #: Publishes that nobody subscribed to.
    no_subscriber: int = 0
    #: Came before by the same leg, or by another, or with other contents.
    duplicates: int = 0
    loops: int = 0
    conflicts: int = 0
    #: Not messages of uProtocol, and how many of these were kept to be looked at.
    undecodable: int = 0
    quarantined: int = 0
    #: Refused when they came, each with a dead letter.
    too_large: int = 0
    invalid: int = 0
    unauthenticated: int = 0
    forbidden: int = 0
    expired_on_arrival: int = 0
    no_route: int = 0
    rate_limited: int = 0
    unsupported: int = 0
    internal: int = 0

    #: Made here: error responses, and dead letters that were published or tried again.
    responses: int = 0
    letters_published: int = 0
    letters_retried: int = 0
    #: Failed requests that got no response: they cannot be answered, or were already.
    unanswered: int = 0

    #: One for each receiver of a message that was routed or made here.
    copies: int = 0
    #: Copies that did not get into an outbox, each with a dead letter.
    copies_refused: int = 0
    #: Copies that are in an outbox.
    copies_stored: int = 0

    #: Dead letters that were written; those that were there already; those about dead letters.
    letters: int = 0
    letters_known: int = 0
    letters_withheld: int = 0
    #: Copies of dead letters that there was no room for.
    letters_unpublished: int = 0
    #: Calls of `ingest` that raised, after which the messages come again, and those of them that
    #: were refused with a dead letter before it did.
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
    """The counts of messages, and those of the copies in all outboxes.

    `copies` counts from the day the outboxes were made, `before` is what it was when this
    dispatcher was opened.
    """

    counts: Counts
    copies: OutboxBooks
    before: OutboxBooks = field(default=NO_COPIES)

    @property
    def refused(self) -> int:
        """Messages that were refused when they came."""
        return sum(getattr(self.counts, name) for name in _REFUSED)

    @property
    def dead(self) -> int:
        """Copies that were given up."""
        return self.copies.expired + self.copies.queue_full + self.copies.permanent

    def problems(self) -> list[str]:
        """Return the sums that are not right; none in a quiet moment."""
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
    """The counts as they grow. Safe to share between threads."""

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
