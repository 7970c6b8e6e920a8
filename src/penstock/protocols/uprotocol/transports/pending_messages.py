"""Which messages wait for a listener, and for which one?"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.protocols.uprotocol.message import is_expired

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.core.clock import Clock
    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Counts
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["Acknowledging", "CameFor", "Pattern", "PendingMessage", "PendingMessages"]

log = logging.getLogger(__name__)

#: A source filter, and a sink filter or None.
Pattern: TypeAlias = "tuple[UUri, UUri | None]"
#: Returns the registered patterns that a message came for, and whether all of its patterns are
#: registered.
CameFor: TypeAlias = "Callable[[], tuple[Collection[Pattern] | None, bool]]"
#: Interval of the check for expired messages (seconds).
_BETWEEN_LOOKS: Final = 1.0
#: A blocked transport logs a warning after the first time, and then at the second (seconds).
_BEFORE_STALL: Final = 1.0
_BETWEEN_STALLS: Final = 60.0


class Acknowledging(NamedTuple):
    """Callbacks of a transport for messages that waited, identified by tokens."""

    #: Called when a message was taken or expired: it may be acknowledged.
    taken: Callable[[object], None]
    #: Whether the transport redelivers a message, so that this copy is void.
    is_void: Callable[[object], bool]
    #: Number of waiting messages from which the oldest that nobody here listens to is dropped, if
    #: the transport also brings messages for others; None: it is blocked when there is no room.
    most: int | None = None


@dataclass(eq=False, slots=True)
class PendingMessage:
    """A message that no listener took."""

    message: UMessage
    token: object
    came_for: CameFor
    #: Patterns whose listeners have got it, while it waits for others.
    served: frozenset[Pattern] = frozenset()
    #: Whether it is one of several copies, one for each pattern.
    is_copy: bool = False


class PendingMessages:
    """Waiting messages, in order of arrival. The caller holds the lock."""

    def __init__(
        self,
        most: int,
        clock: Clock,
        counts: Counts,
        lock: threading.Lock,
        acknowledging: Acknowledging | None,
    ) -> None:
        self.most = most
        self._clock = clock
        self._counts = counts
        self._acknowledging = acknowledging
        self._entries: list[PendingMessage] = []
        self._changed = threading.Condition(lock)
        #: Incremented by every change that moves entries or lets a listener take one.
        self.generation = 0
        self._looked = 0.0
        self._stalled_since: float | None = None
        self._silent_until = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PendingMessage]:
        return iter(self._entries)

    def __getitem__(self, at: int) -> PendingMessage:
        return self._entries[at]

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self.most

    def add(self, entry: PendingMessage) -> None:
        self._entries.append(entry)

    def insert(self, at: int, entry: PendingMessage) -> None:
        self._entries.insert(at, entry)

    def pop(self, at: int) -> PendingMessage:
        """Remove and return an entry."""
        entry = self._entries.pop(at)
        self._changed.notify_all()
        return entry

    def clear(self) -> int:
        """Remove all entries; return how many."""
        count = len(self._entries)
        self._entries.clear()
        self._changed.notify_all()
        return count

    def has_copy(self, message: UMessage) -> bool:
        """Tell whether the same message waits already, for all of its patterns."""
        id = message.attributes.id
        return any(it.message.attributes.id == id and it.came_for()[1] for it in self._entries)

    def renew(self, entry: PendingMessage) -> bool:
        """Update a waiting message that the transport redelivers; tell whether one matched."""
        if self._acknowledging is None:
            return False
        attributes = entry.message.attributes
        for there in self._entries:
            known = there.message.attributes
            if (
                known.id == attributes.id
                and known.source == attributes.source
                and self._acknowledging.is_void(there.token)
            ):
                there.token, there.came_for = entry.token, entry.came_for
                return True
        return False

    def drop_expired(self, *, at_once: bool = False) -> list[object]:
        """Remove expired messages, at intervals or `at_once`; return their tokens."""
        now = time.monotonic()
        if not self._entries or (now - self._looked < _BETWEEN_LOOKS and not at_once):
            return []
        self._looked = now
        now_ms = self._clock.now_ns() // 1_000_000
        over = [it for it in self._entries if is_expired(it.message.attributes, now_ms)]
        if over:
            self._entries = [it for it in self._entries if it not in over]
            self._counts.add("expired", len(over))
            self.generation += 1
            self._changed.notify_all()
        return [it.token for it in over]

    def await_change(self) -> None:
        """Wait for room or a new listener; log a warning if that takes long."""
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since >= _BEFORE_STALL and now >= self._silent_until:
            self._silent_until = now + _BETWEEN_STALLS
            self._counts.add("stalls")
            if self._entries:
                attributes = self._entries[0].message.attributes
                log.warning(
                    "%s messages wait, and nobody listens to them; no more are received until "
                    "somebody does. The first is from %s to %s: register a listener for it, "
                    "receive it, or raise the limit `waiting`",
                    f"{len(self._entries):,}",
                    attributes.source,
                    attributes.sink or "all",
                )
        self._changed.wait(_BEFORE_STALL)

    def went_on(self) -> None:
        """Note that the transport is not blocked."""
        self._stalled_since = None

    def wake(self) -> None:
        """Wake blocked threads."""
        self._changed.notify_all()
