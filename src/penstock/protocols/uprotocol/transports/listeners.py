"""Who is called for which message, and what waits for those who ask?

(docs/specs/uprotocol.md 4)
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from types import BuiltinMethodType, MethodType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption
from penstock.core.worker import Worker
from penstock.protocols.uprotocol.codes import UCode, UStatus, UStatusError
from penstock.protocols.uprotocol.message import is_expired
from penstock.protocols.uprotocol.transports.interface import Counts
from penstock.protocols.uprotocol.transports.pending_messages import (
    Acknowledging,
    CameFor,
    Pattern,
    PendingMessage,
    PendingMessages,
)
from penstock.protocols.uprotocol.validation import TOLERATED, check_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Listener
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["Acknowledging", "ListenerLimits", "ListenerRegistry", "Outcome", "Pattern"]

log = logging.getLogger(__name__)

#: The identity of a listener.
_Key: TypeAlias = "tuple[int, int | str | None]"

#: How long (seconds) unregistering waits for calls in progress.
_LONGEST_CALL: Final = 10.0
_BETWEEN_WARNINGS: Final = 1.0
#: Unregistered patterns remembered, at most.
_MOST_UNWANTED: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """Limits of listeners, and of messages that wait without a listener.

    :raises InvalidOption: a number is out of range.
    """

    #: Listeners of one transport.
    listeners: int = 10_000
    #: Listeners with the same pair of filters.
    per_pattern: int = 1_000
    #: Messages without a listener, kept for a later listener or for `receive`. 0 disables
    #: `receive`.
    waiting: int = 1_024
    #: Accept all pairs of filters that other implementations accept, not only those of the table.
    loose: bool = False

    def __post_init__(self) -> None:
        for name in ("listeners", "per_pattern", "waiting"):
            if getattr(self, name) < 0:
                raise InvalidOption(name, getattr(self, name), "must not be negative")


class Outcome(NamedTuple):
    """The outcome of one message."""

    #: Number of listeners called.
    called: int
    #: Whether it waits for a listener, or for `receive`: it must not be acknowledged yet.
    is_kept: bool
    #: Why the first listener failed, or why no listener got it; None: success.
    status: UStatus | None


_COUNTED = (
    *("arrived", "delivered", "received", "expired", "invalid", "unheard", "overflowed", "cleared"),
    *("repeated", "displaced"),
    *("listener_calls", "listener_failures", "stalls"),
)
_EXPIRED = Outcome(0, False, UStatus(UCode.DEADLINE_EXCEEDED, "the message is expired"))
_INVALID = Outcome(0, False, UStatus(UCode.INVALID_ARGUMENT, "the message violates a rule"))
_NOBODY = Outcome(0, False, UStatus(UCode.UNAVAILABLE, "nobody listens to it"))
_FULL = Outcome(0, False, UStatus(UCode.UNAVAILABLE, "too many messages wait to be received"))
_DONE = Outcome(1, False, None)
_KEPT = Outcome(0, True, None)
_REPEATED = Outcome(0, False, None)


@dataclass(eq=False, slots=True)
class _Registration:
    call: Callable[[UMessage], None]
    #: Whether the listener accepts a matching message; None: it accepts all.
    accepts: Callable[[UMessage], bool] | None = None
    is_active: bool = True
    #: Calls in progress.
    calls: int = 0
    idle: threading.Condition = field(default_factory=threading.Condition)

    def takes(self, message: UMessage) -> bool:
        return self.accepts is None or self.accepts(message)


#: Registrations, each with its pattern.
_Found: TypeAlias = "list[tuple[Pattern, _Registration]]"


class _Inside(threading.local):
    """The depth of listener calls in this thread."""

    depth = 0


_inside = _Inside()


class ListenerRegistry:
    """The listeners of one transport. Thread-safe.

    A message without a listener waits for one. With `acknowledging` it is not acknowledged
    meanwhile, and when too many wait the transport is blocked; otherwise excess messages are
    dropped and counted.
    """

    def __init__(
        self,
        authority: str,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
        acknowledging: Acknowledging | None = None,
    ) -> None:
        self._authority = authority
        self._limits = limits or ListenerLimits()
        self._clock = clock
        self._lock = threading.Lock()
        self._exact: dict[Pattern, dict[_Key, _Registration]] = {}
        self._wild: dict[Pattern, dict[_Key, _Registration]] = {}
        # Keep a reference to each registered listener, so that its id() is not reused.
        self._objects: dict[_Key, tuple[Listener, int]] = {}
        self._count = 0
        self._silent_until = 0.0
        self._counts = Counts(*_COUNTED)
        self._acknowledging = acknowledging
        self._unheard = PendingMessages(
            self._limits.waiting, clock, self._counts, self._lock, acknowledging
        )
        #: The thread that delivers waiting messages; new messages queue behind them.
        self._serving: Worker | None = None
        #: Unregistered patterns and their registrations: later messages for them are dropped.
        self._unwanted: dict[Pattern, _Registration] = {}
        self._pulled: set[Pattern] = set()
        #: The tokens of dropped messages, to be acknowledged without the lock.
        self._dropped: list[object] = []
        self._is_over = False

    # --- who listens ----------------------------------------------------------------------------

    def pattern(self, source: UUri, sink: UUri | None) -> Pattern:
        """Check a pair of filters, and fill in a missing authority.

        :raises UStatusError: INVALID_ARGUMENT, no message can match them.
        """
        check_filter(source, sink, loose=self._limits.loose)
        return (
            source.resolved(self._authority),
            None if sink is None else sink.resolved(self._authority),
        )

    def patterns(self) -> list[Pattern]:
        """Return all pairs of filters with listeners."""
        with self._lock:
            return [*self._exact, *self._wild]

    def add(self, pattern: Pattern, listener: Listener) -> bool:
        """Register a listener; tell whether it is the first of its pattern.

        :raises UStatusError: RESOURCE_EXHAUSTED, there are too many listeners.
        """
        key, call = _identity(listener)
        accepts = getattr(listener, "accepts", None)
        with self._lock:
            table = self._table(pattern)
            there = table.get(pattern)
            if there is not None and key in there:
                return False
            if self._count >= self._limits.listeners:
                raise UStatusError(
                    UCode.RESOURCE_EXHAUSTED,
                    f"there are {self._count:,} listeners already",
                    hint="unregister some, or raise the limit `listeners`",
                )
            if len(there or ()) >= self._limits.per_pattern:
                raise UStatusError(
                    UCode.RESOURCE_EXHAUSTED,
                    f"there are {len(there or ()):,} listeners with these filters already",
                    hint="unregister some, or raise the limit `per_pattern`",
                )
            # Copy on write: a call in progress iterates over the old dictionary.
            table[pattern] = {**(there or {}), key: _Registration(call, accepts)}
            self._unwanted.pop(pattern, None)
            _, uses = self._objects.get(key, (listener, 0))
            self._objects[key] = listener, uses + 1
            self._count += 1
            self._begin_to_serve()  # with the lock: what comes now is behind what waits
            return there is None

    def remove(
        self, pattern: Pattern, listener: Listener, *, is_wanted: bool = False
    ) -> tuple[bool, Callable[[], None]]:
        """Remove a listener; tell whether it was the last of its pattern.

        :param is_wanted: whether its later messages wait for another listener.
        :returns: that, and a function that waits for its calls in progress; called by a listener,
            it does nothing.
        :raises UStatusError: NOT_FOUND, the listener is not registered.
        """
        key, _ = _identity(listener)
        with self._lock:
            table = self._table(pattern)
            there = table.get(pattern, {})
            registration = there.get(key)
            if registration is None:
                raise UStatusError(UCode.NOT_FOUND, "this listener has no such registration")
            rest = {other: it for other, it in there.items() if other != key}
            if rest:
                table[pattern] = rest
            else:
                del table[pattern]
                if self._acknowledging is not None and not is_wanted:
                    self._unwanted[pattern] = registration
                    if len(self._unwanted) > _MOST_UNWANTED:
                        del self._unwanted[next(iter(self._unwanted))]
                    self._unheard.wake()
            known, uses = self._objects.pop(key)
            if uses > 1:
                self._objects[key] = known, uses - 1
            self._count -= 1
        with registration.idle:
            registration.is_active = False

        def await_calls() -> None:
            with registration.idle:
                if not _inside.depth:
                    registration.idle.wait_for(lambda: not registration.calls, _LONGEST_CALL)

        return not rest, await_calls

    def end(self) -> None:
        """Accept no more messages; unblock the transport. Waiting ones stay unacknowledged."""
        with self._lock:
            self._is_over = True
            self._unheard.wake()
            serving = self._serving
        if serving is not None:
            serving.join(_LONGEST_CALL)

    def clear(self) -> None:
        """Remove all listeners and waiting messages."""
        self.end()
        with self._lock:
            for table in (self._exact, self._wild):
                for there in table.values():
                    for registration in there.values():
                        registration.is_active = False
                table.clear()
            self._objects.clear()
            self._count = 0
            self._counts.add("cleared", self._unheard.clear())

    def _table(self, pattern: Pattern) -> dict[Pattern, dict[_Key, _Registration]]:
        source, sink = pattern
        is_wild = source.has_wildcard or (sink is not None and sink.has_wildcard)
        return self._wild if is_wild else self._exact

    # --- what comes -----------------------------------------------------------------------------

    def dispatch(
        self,
        message: UMessage,
        only: Collection[Pattern] | None = None,
        *,
        token: object = None,
        came_for: CameFor | None = None,
        keep: bool = True,
    ) -> Outcome:
        """Call all listeners of a message, or let it wait if there is none.

        An invalid message is dropped and counted. A listener that raises is counted, and the others
        are still called.

        :param only: the patterns it came for, if the transport sends a copy for each pattern.
        :param token: identifies it to the transport when it is taken later.
        :param came_for: like `only`, if patterns may not be registered yet.
        :param keep: whether it may wait for a listener; it may always wait for `receive`.
        """
        self._counts.add("arrived")
        if is_expired(message.attributes, self._clock.now_ns() // 1_000_000):
            self._counts.add("expired")
            return _EXPIRED
        rules = message.validate()
        if rules and not TOLERATED.issuperset(rules):
            self._counts.add("invalid")
            self._warn(f"a message violates {', '.join(rules)}", self._counts["invalid"])
            return _INVALID
        entry = PendingMessage(
            message, token, came_for or _anybody, is_copy=only is not None or came_for is not None
        )
        while True:
            over: list[object] = []
            with self._lock:
                found, outcome = self._judge(entry, only, came_for, keep=keep)
                if not found and outcome is None:
                    self._unheard.await_change()
                    over = self._unheard.drop_expired(at_once=True)
                else:
                    self._unheard.went_on()
                    over = self._unheard.drop_expired()
                over, self._dropped = over + self._dropped, []
            self._acknowledge(over)
            called, status = self._call_all(found, message) if found else (0, None)
            if outcome is not None:
                return outcome
            if called:
                self._counts.add("delivered")
                return Outcome(called, False, status) if status or called > 1 else _DONE
            # There was no room, or its listener has just been unregistered.

    def _judge(
        self,
        entry: PendingMessage,
        only: Collection[Pattern] | None,
        came_for: CameFor | None,
        *,
        keep: bool,
    ) -> tuple[_Found, Outcome | None]:
        """Return the listeners to call for a message, or its outcome without a call.

        If it returns neither, call it again after a change.
        """
        message = entry.message
        found: _Found = []
        others, is_whole = 0, True
        if came_for is not None:
            only, is_whole = came_for()
        if self._serving is None or _inside.depth:
            found, others = self._found(message, only)
        if found and is_whole:
            return found, None
        if others and is_whole:
            self._counts.add("repeated")
            return [], _REPEATED
        entry.served = frozenset(pattern for pattern, _ in found)
        outcome = self._keep(entry, keep=keep, is_whole=is_whole)
        return (found if outcome is not None else []), outcome

    def _found(
        self,
        message: UMessage,
        only: Collection[Pattern] | None,
        served: Collection[Pattern] = (),
    ) -> tuple[_Found, int]:
        """Return the listeners of a message, and for how many other patterns copies follow."""
        found: _Found = []
        others = 0
        for pattern, there in self._covering(*self._addresses(message)):
            if only is None or pattern in only:
                if pattern not in served:
                    found += [(pattern, it) for it in there.values() if it.takes(message)]
            else:
                others += 1
        return found, others

    def _addresses(self, message: UMessage) -> tuple[UUri, UUri | None]:
        source, sink = message.attributes.source, message.attributes.sink
        assert source is not None  # one without is for nobody
        return (
            source.resolved(self._authority),
            None if sink is None else sink.resolved(self._authority),
        )

    def _call_all(self, found: _Found, message: UMessage) -> tuple[int, UStatus | None]:
        """Call listeners; return how many were called, and the first error."""
        called, status = 0, None
        for _, registration in found:
            if _begin(registration):
                called += 1
                failure = self._call(registration, message)
                status = status or failure
        self._counts.add("listener_calls", called)
        return called, status

    def _covering(
        self, source: UUri, sink: UUri | None
    ) -> Iterator[tuple[Pattern, dict[_Key, _Registration]]]:
        """Yield all patterns that cover the addresses of a message."""
        exact = source, sink
        if exact in self._exact:
            yield exact, self._exact[exact]
        for pattern, there in self._wild.items():
            if _covers(*pattern, source, sink):
                yield pattern, there

    def _call(self, registration: _Registration, message: UMessage) -> UStatus | None:
        _inside.depth += 1
        try:
            registration.call(message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            self._counts.add("listener_failures")
            self._warn("a listener failed", self._counts["listener_failures"], error)
            if isinstance(error, UStatusError):
                return error.status
            return UStatus(UCode.INTERNAL, f"the listener failed: {type(error).__name__}: {error}")
        finally:
            _inside.depth -= 1
            with registration.idle:
                registration.calls -= 1
                registration.idle.notify_all()
        return None

    def _warn(self, what: str, count: int, error: Exception | None = None) -> None:
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _BETWEEN_WARNINGS
            log.warning("%s, %s in all", what, f"{count:,}", exc_info=error)

    # --- what waits -----------------------------------------------------------------------------

    def _keep(self, entry: PendingMessage, *, keep: bool, is_whole: bool) -> Outcome | None:
        """Let a message wait, or return why it does not; None: wait for room."""
        waits = self._acknowledging is not None or self._serving is not None
        if self._is_over:
            self._counts.add("cleared")
            return _KEPT  # by whoever brought it, who is not told that it was taken
        is_unwanted = self._serving is None and self._is_unwanted(entry)
        is_refused = not keep and not self._is_pulled(entry)
        if is_refused or is_unwanted or (not self._limits.waiting and not waits):
            self._counts.add("unheard")
            return _NOBODY
        if entry.is_copy and is_whole and self._unheard.has_copy(entry.message):
            self._counts.add("repeated")
            return _REPEATED
        if self._unheard.renew(entry):
            self._counts.add("repeated")
            return _KEPT
        most = None if self._acknowledging is None else self._acknowledging.most
        is_crowded = most is not None and len(self._unheard) >= most
        if is_crowded and (at := self._displaceable()) is not None:
            self._dropped.append(self._unheard.pop(at).token)
            self._unheard.generation += 1
            self._counts.add("displaced")
        elif self._unheard.is_full and not _inside.depth:
            if waits:
                return None
            self._acknowledge(self._unheard.drop_expired(at_once=True))
            if self._unheard.is_full:
                self._counts.add("overflowed")
                return _FULL
        self._unheard.add(entry)
        return _KEPT

    def _displaceable(self) -> int | None:
        """Return the oldest waiting message that nobody here listens to, or will be told of.

        Not one for a listener that has yet to work through what waited before it, nor one that came
        for a subscription of an earlier process: that is registered again in a moment.
        """
        for at, it in enumerate(self._unheard):
            if it.came_for()[1] and not self._is_pulled(it):
                found, _ = self._found(it.message, None, it.served)
                if not found:
                    return at
        return None

    def _is_unwanted(self, entry: PendingMessage) -> bool:
        """Tell whether all listeners of such a message were unregistered."""
        if not self._unwanted:
            return False
        addresses = self._addresses(entry.message)
        return not self._is_pulled(entry) and any(
            _covers(*pattern, *addresses) and it.takes(entry.message)
            for pattern, it in self._unwanted.items()
        )

    def _is_pulled(self, entry: PendingMessage) -> bool:
        """Tell whether `take` was called for such messages."""
        addresses = self._addresses(entry.message) if self._pulled else ()
        return any(_covers(*pattern, *addresses) for pattern in self._pulled)

    def serve(self) -> None:
        """Deliver waiting messages to new listeners, in a separate thread."""
        with self._lock:
            self._begin_to_serve()

    def _begin_to_serve(self) -> None:
        self._unheard.generation += 1
        self._unheard.wake()
        if self._serving is None and len(self._unheard) and not self._is_over:
            self._serving = Worker(
                f"up-waiting-{self._authority}", self._serve, log=log, restart=True
            ).start()

    def _serve(self, worker: Worker) -> None:
        del worker  # it ends when nothing is left to do
        at, generation = 0, -1
        while True:
            with self._lock:
                if generation != self._unheard.generation:
                    at, generation = 0, self._unheard.generation
                found: _Found = []
                is_unwanted = False
                while at < len(self._unheard) and not self._is_over:
                    entry = self._unheard[at]
                    only, is_whole = entry.came_for()
                    found, _ = self._found(entry.message, only, entry.served)
                    if is_whole and only is not None and not found:
                        # The listeners it came for do not accept it.
                        found, _ = self._found(entry.message, None, entry.served)
                    is_unwanted = not found and is_whole and self._is_unwanted(entry)
                    if found or is_unwanted:
                        break
                    at += 1
                if not found and not is_unwanted:
                    self._serving = None
                    self._unheard.wake()
                    return
                if is_whole:
                    self._unheard.pop(at)
                else:
                    entry.served |= {pattern for pattern, _ in found}
            if is_unwanted:
                self._counts.add("unheard")
                self._acknowledge([entry.token])
            elif not self._serve_one(entry, found, is_whole=is_whole):
                with self._lock:  # those who were found have gone
                    self._unheard.insert(at, entry)

    def _serve_one(self, entry: PendingMessage, found: _Found, *, is_whole: bool) -> bool:
        """Call listeners for a waiting message; return False if it must wait on."""
        if is_expired(entry.message.attributes, self._clock.now_ns() // 1_000_000):
            if is_whole:
                self._counts.add("expired")
                self._acknowledge([entry.token])
            return True
        called, _ = self._call_all(found, entry.message)
        if not is_whole:
            return True
        if not called:
            return False
        self._counts.add("delivered")
        self._acknowledge([entry.token])
        return True

    def _acknowledge(self, tokens: Iterable[object]) -> None:
        if self._acknowledging is not None:
            for token in tokens:
                self._acknowledging.taken(token)

    def take(self, pattern: Pattern) -> UMessage:
        """Remove and return the oldest waiting message that matches and is not expired.

        :raises UStatusError: NOT_FOUND, no message matches; UNIMPLEMENTED, none are kept.
        """
        if not self._limits.waiting:
            raise UStatusError(
                UCode.UNIMPLEMENTED, "messages are given to listeners only", hint="register one"
            )
        with self._lock:
            self._pulled.add(pattern)
            done = self._unheard.drop_expired(at_once=True)
            at = next(
                (
                    at
                    for at, it in enumerate(self._unheard)
                    if _covers(*pattern, *self._addresses(it.message))
                ),
                None,
            )
            if at is not None:
                entry = self._unheard.pop(at)
                self._unheard.generation += 1
                done.append(entry.token)
                self._counts.add("received")
        self._acknowledge(done)
        if at is None:
            raise UStatusError(UCode.NOT_FOUND, "no message that matches waits")
        return entry.message

    def waiting(self) -> list[PendingMessage]:
        """Return the waiting messages, the oldest first."""
        with self._lock:
            return list(self._unheard)

    def statistics(self) -> Mapping[str, int]:
        """Return the counters: arrived = delivered + received + waiting + dropped, by reason."""
        waiting, listeners = len(self._unheard), self._count
        return {**self._counts.snapshot(), "waiting": waiting, "listeners": listeners}


def _anybody() -> tuple[None, bool]:
    """Tell that a message is for any listener."""
    return None, True


def _identity(listener: Listener) -> tuple[_Key, Callable[[UMessage], None]]:
    """Return the identity of a listener, and the function to call.

    A bound method is a new object on each access: two of the same method are the same listener.
    """
    call = getattr(listener, "on_receive", listener)
    if not callable(call):
        raise UStatusError(
            UCode.INVALID_ARGUMENT, "a listener is a function, or has a method on_receive"
        )
    if isinstance(listener, MethodType):
        return (id(listener.__self__), id(listener.__func__)), call
    if isinstance(listener, BuiltinMethodType):
        return (id(listener.__self__), listener.__name__), call
    return (id(listener), None), call


def _begin(registration: _Registration) -> bool:
    with registration.idle:
        if not registration.is_active:
            return False
        registration.calls += 1
        return True


def _covers(from_: UUri, to: UUri | None, source: UUri, sink: UUri | None) -> bool:
    if to is None or sink is None:
        return to is sink and from_.matches(source)
    return to.matches(sink) and from_.matches(source)
