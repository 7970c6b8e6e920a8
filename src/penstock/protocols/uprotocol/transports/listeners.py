"""Who is called for which message, and what waits for those who ask? (spec uprotocol 4)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import BuiltinMethodType, MethodType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption
from penstock.protocols.uprotocol.codes import UCode, UStatus, UStatusError
from penstock.protocols.uprotocol.expiry import is_expired
from penstock.protocols.uprotocol.filters import check_filter
from penstock.protocols.uprotocol.transports.counts import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Listener
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["ListenerLimits", "ListenerRegistry", "Outcome", "Pattern"]

log = logging.getLogger(__name__)

#: A source filter, and a sink filter or None.
Pattern: TypeAlias = "tuple[UUri, UUri | None]"
#: What tells a listener from all others.
_Key: TypeAlias = "tuple[int, int | str | None]"

#: Whoever unregisters waits this long (seconds) for calls under way, then for none.
_LONGEST_CALL = 10.0
_BETWEEN_WARNINGS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """How many listeners there may be, and how many messages wait for none of them.

    :raises InvalidOption: a number is out of its range.
    """

    #: Listeners of one transport.
    listeners: int = 10_000
    #: Listeners with the same pair of filters.
    per_pattern: int = 1_000
    #: Messages that no listener took, kept for `receive`. With 0 there is no `receive`.
    waiting: int = 1_024
    #: Take all pairs of filters that other implementations take, not just those of the table.
    loose: bool = False

    def __post_init__(self) -> None:
        for name in ("listeners", "per_pattern", "waiting"):
            if getattr(self, name) < 0:
                raise InvalidOption(name, getattr(self, name), "must not be negative")


class Outcome(NamedTuple):
    """What became of one message."""

    #: Listeners called.
    called: int
    #: Whether it waits for `receive`.
    is_kept: bool
    #: Why the first listener failed, or why nobody got it; None if all went well.
    status: UStatus | None


_COUNTED = (
    *("arrived", "delivered", "received", "expired", "unheard", "overflowed", "cleared"),
    "repeated",
    *("listener_calls", "listener_failures"),
)
_EXPIRED = Outcome(0, False, UStatus(UCode.DEADLINE_EXCEEDED, "the message is expired"))
_NOBODY = Outcome(0, False, UStatus(UCode.UNAVAILABLE, "nobody listens to it"))
_FULL = Outcome(0, False, UStatus(UCode.UNAVAILABLE, "too many messages wait to be received"))
_DONE = Outcome(1, False, None)
_KEPT = Outcome(0, True, None)
_REPEATED = Outcome(0, False, None)


@dataclass(eq=False, slots=True)
class _Registration:
    call: Callable[[UMessage], None]
    is_active: bool = True
    #: Calls that began and did not end.
    calls: int = 0
    idle: threading.Condition = field(default_factory=threading.Condition)


class _Inside(threading.local):
    """How deep this thread is in listeners' calls."""

    depth = 0


_inside = _Inside()


class ListenerRegistry:
    """The listeners of one transport. Safe to share between threads."""

    def __init__(
        self,
        authority: str,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._authority = authority
        self._limits = limits or ListenerLimits()
        self._clock = clock
        self._lock = threading.Lock()
        self._exact: dict[Pattern, dict[_Key, _Registration]] = {}
        self._wild: dict[Pattern, dict[_Key, _Registration]] = {}
        # Of each registered listener the object itself, so that no other gets its id.
        self._objects: dict[_Key, tuple[Listener, int]] = {}
        self._count = 0
        self._waiting: deque[UMessage] = deque()
        self._silent_until = 0.0
        self._counts = Counts(*_COUNTED)

    # --- who listens ----------------------------------------------------------------------------

    def pattern(self, source: UUri, sink: UUri | None) -> Pattern:
        """Check a pair of filters, and name the authority where it is left out.

        :raises UStatusError: INVALID_ARGUMENT, no message can match them.
        """
        check_filter(source, sink, loose=self._limits.loose)
        return (
            source.resolved(self._authority),
            None if sink is None else sink.resolved(self._authority),
        )

    def patterns(self) -> list[Pattern]:
        """Return all pairs of filters that somebody listens to."""
        with self._lock:
            return [*self._exact, *self._wild]

    def add(self, pattern: Pattern, listener: Listener) -> bool:
        """Register a listener; tell whether it is the first of its pattern.

        :raises UStatusError: RESOURCE_EXHAUSTED, there would be too many.
        """
        key, call = _identity(listener)
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
            # Another dictionary each time: a message on its way goes through the one it found.
            table[pattern] = {**(there or {}), key: _Registration(call)}
            _, uses = self._objects.get(key, (listener, 0))
            self._objects[key] = listener, uses + 1
            self._count += 1
            return there is None

    def remove(self, pattern: Pattern, listener: Listener) -> tuple[bool, Callable[[], None]]:
        """Forget a listener; tell whether it was the last of its pattern.

        :returns: that, and a function that waits for calls of it that are under way, which does
            nothing if a listener asks for it.
        :raises UStatusError: NOT_FOUND, it is not registered.
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

    def clear(self) -> None:
        """Forget everybody, and what waits."""
        with self._lock:
            for table in (self._exact, self._wild):
                for there in table.values():
                    for registration in there.values():
                        registration.is_active = False
                table.clear()
            self._objects.clear()
            self._count = 0
            self._counts.add("cleared", len(self._waiting))
            self._waiting.clear()

    def _table(self, pattern: Pattern) -> dict[Pattern, dict[_Key, _Registration]]:
        source, sink = pattern
        is_wild = source.has_wildcard or (sink is not None and sink.has_wildcard)
        return self._wild if is_wild else self._exact

    # --- what comes -----------------------------------------------------------------------------

    def dispatch(self, message: UMessage, only: Collection[Pattern] | None = None) -> Outcome:
        """Call all who listen to a message; keep it for `take` if there is nobody.

        A listener that raises is counted and stops nobody.

        :param only: the patterns that it came for, where it comes once for each that it matches.
        """
        self._counts.add("arrived")
        attributes = message.attributes
        if is_expired(attributes, self._clock.now_ns() // 1_000_000):
            self._counts.add("expired")
            return _EXPIRED
        source, sink = attributes.source, attributes.sink
        if source is None:
            self._counts.add("unheard")
            return _NOBODY
        source = source.resolved(self._authority)
        if sink is not None:
            sink = sink.resolved(self._authority)
        with self._lock:
            found: list[_Registration] = []
            others = 0
            for pattern, there in self._covering(source, sink):
                if only is None or pattern in only:
                    found += there.values()
                else:
                    others += 1
        if others and not found:
            self._counts.add("repeated")
            return _REPEATED
        called, status = 0, None
        for registration in found:
            if not _begin(registration):
                continue
            called += 1
            failure = self._call(registration, message)
            status = status or failure
        self._counts.add("listener_calls", called)
        if called:
            self._counts.add("delivered")
            return Outcome(called, False, status) if status or called > 1 else _DONE
        return self._keep(message, is_repeated=only is not None)

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
            self._warn(error)
            if isinstance(error, UStatusError):
                return error.status
            return UStatus(UCode.INTERNAL, f"the listener failed: {type(error).__name__}: {error}")
        finally:
            _inside.depth -= 1
            with registration.idle:
                registration.calls -= 1
                registration.idle.notify_all()
        return None

    def _warn(self, error: Exception) -> None:
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _BETWEEN_WARNINGS
            log.warning(
                "a listener failed, %s in all",
                f"{self._counts['listener_failures']:,}",
                exc_info=error,
            )

    # --- what waits -----------------------------------------------------------------------------

    def _keep(self, message: UMessage, *, is_repeated: bool) -> Outcome:
        if not self._limits.waiting:
            self._counts.add("unheard")
            return _NOBODY
        with self._lock:
            if len(self._waiting) >= self._limits.waiting:
                self._drop_expired()
            if len(self._waiting) >= self._limits.waiting:
                self._counts.add("overflowed")
                return _FULL
            if is_repeated and any(
                it.attributes.id == message.attributes.id for it in self._waiting
            ):
                self._counts.add("repeated")
                return _REPEATED
            self._waiting.append(message)
        return _KEPT

    def take(self, pattern: Pattern) -> UMessage:
        """Take the oldest message that waits, matches and is not expired.

        :raises UStatusError: NOT_FOUND, there is none; UNIMPLEMENTED, none are kept.
        """
        if not self._limits.waiting:
            raise UStatusError(
                UCode.UNIMPLEMENTED, "messages are given to listeners only", hint="register one"
            )
        with self._lock:
            self._drop_expired()
            for at, message in enumerate(self._waiting):
                source, sink = message.attributes.source, message.attributes.sink
                assert source is not None  # one without is not kept
                resolved = None if sink is None else sink.resolved(self._authority)
                if _covers(*pattern, source.resolved(self._authority), resolved):
                    del self._waiting[at]
                    self._counts.add("received")
                    return message
        raise UStatusError(UCode.NOT_FOUND, "no message that matches waits")

    def _drop_expired(self) -> None:
        now = self._clock.now_ns() // 1_000_000
        alive = [it for it in self._waiting if not is_expired(it.attributes, now)]
        self._counts.add("expired", len(self._waiting) - len(alive))
        self._waiting = deque(alive)

    def statistics(self) -> Mapping[str, int]:
        """Return the books: arrived is delivered, received, waiting, or dropped for a reason."""
        waiting, listeners = len(self._waiting), self._count
        return {**self._counts.snapshot(), "waiting": waiting, "listeners": listeners}


def _identity(listener: Listener) -> tuple[_Key, Callable[[UMessage], None]]:
    """Tell a listener from all others, and find what to call.

    A method of an object is made anew each time that it is asked for: two of these are the same.
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
