"""How do messages get into a receiver's outbox, and what becomes of those that do not fit?"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from penstock.dispatch.giving_up import Failure, Stored
from penstock.dispatch.outbox import Columns, Reason
from penstock.protocols.uprotocol import DeadLetterReason, UCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.dispatch.books import Ledger
    from penstock.dispatch.outbox import Appended, Entry, Item, Outbox
    from penstock.dispatch.receivers import Receiver

__all__ = ["Keys", "Storing"]

#: Of some messages, by their index: the key, and how many of it may wait.
Keys: TypeAlias = "Mapping[int, tuple[bytes, int]]"


class Storing:
    """What comes in for one receiver, each copy counted once. Safe to share between threads."""

    def __init__(self, receiver: Receiver, outbox: Outbox, stored: int, ledger: Ledger) -> None:
        self._receiver = receiver
        self._outbox = outbox
        self._ledger = ledger
        self._lock = threading.Lock()
        #: Messages that the ledger knows to be in the outbox, with those from before.
        self._counted = stored

    def store(
        self,
        entries: Sequence[Entry] | Columns,
        latest: Keys | None = None,
        came_by: str = "",
    ) -> list[Failure]:
        """Store messages; return those that there was no room for, and those that made it.

        :param latest: which of them take the place of others
        :raises StorageError: there is no space; some may be stored.
        """
        outbox, ledger = self._outbox, self._ledger
        found: list[Appended] = []
        with self._lock:
            try:
                if isinstance(entries, Columns) or not latest:
                    found.append(outbox.append(entries, settle=False))
                else:
                    self._append_latest(entries, latest, found)
            except BaseException:
                stored = outbox.books().stored - self._counted
                self._counted += stored
                ledger.add(copies=stored, copies_stored=stored)
                for appended in found:
                    outbox.give_back(appended.evicted)
                raise
            stored = sum([appended.stored for appended in found])
            self._counted += stored
        failures: list[Failure] = []
        refused = 0
        for appended in found:
            refused += len(appended.refused)
            failures += [self._evicted(item) for item in appended.evicted]
            failures += [self._refused(entry.raw, came_by) for entry in appended.refused]
        ledger.add(copies=stored + refused, copies_stored=stored, copies_refused=refused)
        return failures

    def _append_latest(
        self,
        entries: Sequence[Entry],
        latest: Keys,
        found: list[Appended],
    ) -> None:
        outbox = self._outbox
        at = 0
        for index in sorted(latest):
            if at < index:
                found.append(outbox.append(entries[at:index], settle=False))
            key, most = latest[index]
            found.append(outbox.append_latest(key, entries[index], most, settle=False))
            at = index + 1
        if at < len(entries):
            found.append(outbox.append(entries[at:], settle=False))

    def refuse(self, entries: Sequence[Entry] | Columns, came_by: str) -> list[Failure]:
        """Count messages that there is no outbox for; return what they are."""
        raws = entries.raws if isinstance(entries, Columns) else [each.raw for each in entries]
        self._ledger.add(copies=len(raws), copies_refused=len(raws))
        return [self._refused(raw, came_by) for raw in raws]

    def _evicted(self, item: Item) -> Failure:
        return Failure(
            item.raw,
            UCode.RESOURCE_EXHAUSTED,
            DeadLetterReason.QUEUE_FULL,
            f"it made room for one of a higher class in the queue to {self._receiver}",
            receiver=self._receiver,
            stored=Stored(self._outbox, item, Reason.QUEUE_FULL),
        )

    def _refused(self, raw: bytes, came_by: str) -> Failure:
        return Failure(
            raw,
            UCode.RESOURCE_EXHAUSTED,
            DeadLetterReason.QUEUE_FULL,
            f"the queue to {self._receiver} is full",
            came_by=came_by,
            receiver=self._receiver,
        )
