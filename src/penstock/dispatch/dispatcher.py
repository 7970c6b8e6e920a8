"""How does a message get from a leg to all of its receivers, or to the dead letters?"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import InvalidOption, PenstockError, Unsupported
from penstock.core.interfaces import Closable
from penstock.dispatch.access import Access
from penstock.dispatch.books import Books, Ledger
from penstock.dispatch.dead_letters import (
    QUARANTINE,
    DeadLetters,
    Quarantine,
    dead_letter_topic,
)
from penstock.dispatch.failures import FailureHandler
from penstock.dispatch.intake import DuplicateWindow, Intake
from penstock.dispatch.outlets import Outlets, ReceiverInfo
from penstock.dispatch.plan import Deadlines, Planner
from penstock.dispatch.routes import Nobody, Receiver, Routes, Routing
from penstock.dispatch.scheduler import Deliveries, Scheduler
from penstock.dispatch.settings import Limits, Policies, Retry
from penstock.dispatch.switches import Stop, Switches
from penstock.dispatch.ttl import ExpiryTimer
from penstock.protocols.uprotocol import UMessage, UStatusError, UUri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.access import Tokens
    from penstock.dispatch.dead_letters import Letter
    from penstock.dispatch.routes import Subscriptions
    from penstock.dispatch.settings import Policy
    from penstock.protocols.uprotocol import UUID7
    from penstock.protocols.uprotocol.transports import Leg
    from penstock.queue.options import Sync

__all__ = ["Dispatcher"]

log = logging.getLogger(__name__)

_MOST_LEGS: Final = 1024
_LOOK: Final = 0.01


class Dispatcher(Closable):
    """Takes messages from legs, stores them, and delivers each at least once or as a dead letter.

    With `threads=False` nothing runs in the background: `step` does all work that is due by the
    clock, and returns when more is due.
    """

    def __init__(
        self,
        authority: str,
        state: str | Path,
        legs: Sequence[Leg],
        *,
        routes: Routes,
        policies: Sequence[Policy] = (),
        access: Access | None = None,
        tokens: Tokens | None = None,
        limits: Limits | None = None,
        retry: Retry | None = None,
        subscriptions: Subscriptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
        threads: bool = True,
        sync: Sync = 1.0,
        topic: UUri | None = None,
        on_publish: Callable[[Mapping[UUri, bytes]], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Open the state, without receiving or delivering yet.

        :param state: the folder of the persistent state
        :param topic: the topic of dead letters; None: `//authority/4/1/8001`
        :param on_publish: called with the last publish of each topic in a stored batch
        :raises InvalidOption: the routes do not match the legs.
        :raises StorageError: the operating system refuses.
        :raises LockTimeout: another process uses this state.
        """
        if not authority:
            raise InvalidOption("authority", authority, "a dispatcher has a name of its own")
        self.authority = authority
        self._state = Path(state)
        self._legs = {leg.name: leg for leg in legs}
        if len(self._legs) != len(legs) or len(legs) > _MOST_LEGS:
            raise InvalidOption("legs", len(legs), f"have names of their own, at most {_MOST_LEGS}")
        self._clock = clock
        self._has_threads = threads
        self._is_started = self._is_stopped = self._is_closed = False
        #: The topic of dead letters.
        self.topic = (topic or dead_letter_topic(authority)).resolved(authority)
        self._routing = Routing(
            authority,
            self._legs,
            routes,
            Nobody() if subscriptions is None else subscriptions,
            dispatcher=self.topic.with_resource(0),
        )
        self._listening: dict[str, set[UUri]] = {name: set() for name in self._legs}
        self._listening_generation = -1
        limits = limits or Limits()
        self._state.mkdir(parents=True, exist_ok=True)
        self.switches = Switches(self._state / "switches")
        self._ledger = ledger = Ledger()
        with contextlib.ExitStack() as undo:
            self.dead_letters = DeadLetters(self._state / "dead", limits.dead, sync=sync)
            undo.callback(self.dead_letters.close)
            scheduler, timer = Scheduler(clock), ExpiryTimer(clock)
            all_policies = Policies(policies)
            self._outlets = Outlets(
                self._state / "outbox",
                routing=self._routing,
                switches=self.switches,
                policies=all_policies,
                limits=limits,
                retry=retry or Retry(),
                scheduler=scheduler,
                timer=timer,
                ledger=ledger,
                clock=clock,
                rng=rng or random.Random(),  # noqa: S311 - spreads load, keeps no secret
                sync=sync,
            )
            undo.pop_all()
        self._failures = FailureHandler(
            self.topic,
            self.dead_letters,
            self._outlets,
            self._routing,
            self.switches,
            ledger,
            clock,
        )
        self._deliveries = Deliveries(self._outlets, self._failures, scheduler, timer, clock)
        self._quarantine = Quarantine(self._state / QUARANTINE, limits.quarantine)
        deadlines = Deadlines()
        planned_by = all_policies, self.switches, limits, self._outlets
        taken_by = limits, self._outlets, self._failures, self._quarantine, ledger, clock
        self._intake = Intake(
            [*self._legs],
            Planner(
                self._routing,
                access or Access(),
                *planned_by,
                tokens=tokens,
                deadlines=deadlines,
            ),
            DuplicateWindow(limits.dedupe),
            deadlines,
            *taken_by,
            on_publish=on_publish,
        )
        # For retried dead letters: skip the duplicate check and the access check.
        self._second_intake = Intake(
            [""],
            Planner(self._routing, Access(), *planned_by, is_trusted=True),
            DuplicateWindow(0),
            Deadlines(),
            *taken_by,
            on_publish=on_publish,
        )

    # --- in -------------------------------------------------------------------------------------

    def ingest(self, leg: str, messages: Sequence[bytes | UMessage]) -> None:
        """Accept messages; return when each is stored for all receivers, or is a dead letter.

        :raises StorageError: the disk is full: the leg must not acknowledge them.
        :raises Closed: the dispatcher was stopped.
        """
        self._intake.take(leg, messages)

    # --- running --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start receiving, and delivering queued messages.

        :raises PenstockError: a leg cannot receive.
        """
        self._is_started = True
        if self._has_threads:
            self._deliveries.start()
        self.subscriptions_changed()
        for leg in self._legs.values():
            ingest = functools.partial(self._intake.take, leg.name)
            leg.on_unreadable = functools.partial(self._intake.take_unreadable, leg.name)
            leg.start(ingest, self._routing.received_by(leg))

    def subscriptions_changed(self) -> None:
        """Make the legs listen to the subscribed topics. The owner of the table calls this."""
        self._listening_generation = self._routing.subscriptions.generation
        wanted = self._routing.listening()
        for name, leg in self._legs.items():
            old, new = self._listening[name], wanted[name]
            for topic in new - old:
                try:
                    leg.listen(topic)
                    old.add(topic)
                except UStatusError as error:
                    log.warning("%s does not listen to %s: %s", name, topic, error)
            for topic in old - new:
                leg.unlisten(topic)
                old.discard(topic)
        self._deliveries.wake_all()

    def step(self) -> float | None:
        """Do all due work; return when more is due (monotonic seconds), or None."""
        if self._routing.subscriptions.generation != self._listening_generation:
            self.subscriptions_changed()
        return self._deliveries.step()

    def stop(self, grace: float = 0.0) -> None:
        """Stop receiving, deliver during the grace period, and keep the rest.

        Then wait for handed-over messages, as long as their leg requires.
        """
        if self._is_stopped:
            return
        for leg in self._legs.values():
            leg.stop()
        self._is_stopped = True
        self._intake.close()
        self._work_for(grace, self._queued)
        if grace:
            longest = max((leg.settle_after for leg in self._legs.values()), default=0.0)
            self._work_for(longest, self._unsure)
        self._deliveries.stop()

    def _work_for(self, seconds: float, left: Callable[[], int]) -> None:
        """Deliver for a number of seconds, or until nothing is left."""
        end = self._clock.monotonic() + seconds
        while left() and (now := self._clock.monotonic()) < end:
            due = None if self._has_threads else self.step()
            wait = _LOOK if due is None else max(due - now, 1e-6)
            self._clock.sleep(min(wait, end - now))

    def _unsure(self) -> int:
        return sum(outlet.is_unsure for outlet in self._outlets.all())

    def _queued(self) -> int:
        return sum(outlet.outbox.queued for outlet in self._outlets.all())

    def close(self) -> None:
        """Stop, if running, and release all resources. Queued messages are kept.

        :raises StorageError: the device refuses.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.stop()
        for leg in self._legs.values():
            leg.close()
        self._failures.close()
        try:
            self._outlets.close()
        finally:
            self._quarantine.close()
            self.dead_letters.close()

    # --- for people -----------------------------------------------------------------------------

    def stop_topic(
        self, topic: UUri, receiver: UUri = UUri.ANY, *, queue: bool = True, timeout: float = 5.0
    ) -> bool:
        """Stop delivering matching topics until `start_topic`, across restarts.

        When this returns, no delivery of them starts, and none is in progress, unless a leg takes
        longer than `timeout`.

        :param queue: whether messages are queued meanwhile; otherwise they are dead letters
        :returns: whether all deliveries in progress have ended
        """
        self.switches.stop(Stop(topic, receiver, queue))
        deadline = self._clock.monotonic() + timeout
        return all(
            outlet.settle_down(max(0.0, deadline - self._clock.monotonic()))
            for outlet in self._outlets.all()
            if receiver.matches(outlet.receiver.address)
        )

    def receiver_of(self, entity: UUri) -> UUri | None:
        """Return the address of the queue of an entity."""
        leg = self._routing.leg_to(entity)
        return None if leg is None else Receiver.behind(leg, entity).address

    def start_topic(self, topic: UUri, receiver: UUri = UUri.ANY) -> bool:
        """Undo `stop_topic` with the same arguments; tell whether it was stopped."""
        was_stopped = self.switches.start(topic, receiver)
        self._deliveries.wake_all()
        return was_stopped

    def retry_dead_letter(self, id: UUID7 | int) -> None:
        """Retry a dead letter: for its receiver, or if it has none, for all receivers.

        :raises NotFound: no such letter exists.
        :raises Unsupported: only its header was kept.
        :raises StorageError: the disk is full; the letter stays.
        """
        self.retry_dead_letters([self.dead_letters.show(id)])

    def retry_dead_letters(
        self,
        letters: Iterable[Letter],
        on_failure: Callable[[Letter, PenstockError], None] | None = None,
    ) -> None:
        """Retry several dead letters; when it raises, those before the failed one are stored.

        :param on_failure: called for a letter that cannot be retried; it is kept, and the others
            are retried
        :raises Unsupported: only the header of a letter was kept.
        :raises StorageError: the disk is full.
        """
        done: list[Letter] = []
        try:
            for letter in letters:
                try:
                    self._retry(letter)
                    done.append(letter)
                except PenstockError as error:
                    if on_failure is None:
                        raise
                    on_failure(letter, error)
        finally:
            if done:
                self.dead_letters.drop(done)

    def _retry(self, letter: Letter) -> None:
        if letter.original is None:
            raise Unsupported(
                f"only the header of the dead letter {letter.id} was kept",
                hint="its sender has to send it again",
            )
        if letter.receiver is not None:
            self._failures.retry(letter)
        else:
            self._second_intake.take("", [letter.original])
        self._ledger.add(letters_retried=1)

    def drop_dead_letter(self, id: UUID7 | int) -> None:
        """Delete a dead letter.

        :raises NotFound: no such letter exists.
        """
        self.dead_letters.drop([self.dead_letters.show(id)])

    def drop_queued(self, receiver: Receiver, topic: UUri = UUri.ANY) -> int:
        """Drop queued messages of a receiver, without dead letters; return how many."""
        outlet = self._outlets.get(receiver)
        return 0 if outlet is None else outlet.drop(topic)

    def books(self) -> Books:
        """Return the counters of all messages and copies."""
        now, before = self._outlets.books()
        return Books(self._ledger.copy(), now, before)

    def receivers(self) -> list[ReceiverInfo]:
        """Return all receivers and their queues."""
        return self._outlets.infos()

    def statistics(self) -> dict[str, Mapping[str, int]]:
        """Return the counters of each leg."""
        return {name: leg.statistics() for name, leg in self._legs.items()}
