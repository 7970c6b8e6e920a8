"""How does a message get from a leg to all of its receivers, or to the dead letters?"""

from __future__ import annotations

import functools
import logging
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.closing import Closable
from penstock.core.errors import Closed, InvalidOption, PenstockError, Unsupported
from penstock.dispatch.access import Access
from penstock.dispatch.admission import Admission, Intake
from penstock.dispatch.books import Books, Ledger
from penstock.dispatch.dead_letters import DeadLetters
from penstock.dispatch.deadlines import Deadlines
from penstock.dispatch.duplicates import Window
from penstock.dispatch.expiring import Expiring
from penstock.dispatch.giving_up import Failure, GivingUp
from penstock.dispatch.letters import dead_letter_topic
from penstock.dispatch.outlets import Outlets, ReceiverInfo
from penstock.dispatch.plans import Planner
from penstock.dispatch.policies import Policies
from penstock.dispatch.posting import Posting
from penstock.dispatch.quarantine import QUARANTINE, Quarantine
from penstock.dispatch.rates import Rates
from penstock.dispatch.receivers import Receiver
from penstock.dispatch.routing import Nobody, Routes, Routing
from penstock.dispatch.settings import Limits, Retry
from penstock.dispatch.surroundings import Surroundings
from penstock.dispatch.switches import Stop, Switches
from penstock.dispatch.threads import Threads
from penstock.protocols.uprotocol import UMessage, UStatusError, UUri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.delivering import Outlet
    from penstock.dispatch.letters import Letter
    from penstock.dispatch.policies import Policy
    from penstock.dispatch.routing import Subscriptions
    from penstock.dispatch.tokens import Tokens
    from penstock.protocols.uprotocol import UUID7
    from penstock.protocols.uprotocol.transports import Leg, Unreadable
    from penstock.queue.options import Sync

__all__ = ["Dispatcher"]

log = logging.getLogger(__name__)

_MOST_LEGS: Final = 1024
_LOOK: Final = 0.01


class Dispatcher(Closable):
    """Takes messages from legs, keeps them, and delivers them: at least once, or says why not.

    With `threads=False` nothing happens by itself: `step` does all that is due at this moment of
    the clock, and says when there is more.
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
        """Open everything that is kept; nothing is received or delivered yet.

        :param state: the folder of all that outlives this process
        :param topic: of the dead letters; None: `//authority/4/1/8001`
        :param on_publish: told of the last publish of each topic in a batch that is stored
        :raises InvalidOption: the routes and the legs do not fit.
        :raises StorageError: the operating system refuses.
        :raises LockTimeout: another process has this state.
        """
        if not authority:
            raise InvalidOption("authority", authority, "a dispatcher has a name of its own")
        self.authority = authority
        self._state = Path(state)
        self._legs = {leg.name: leg for leg in legs}
        if len(self._legs) != len(legs) or len(legs) > _MOST_LEGS:
            raise InvalidOption("legs", len(legs), f"have names of their own, at most {_MOST_LEGS}")
        self._limits = limits or Limits()
        self._clock = clock
        self._has_threads = threads
        self._on_publish = on_publish
        self._ledger = Ledger()
        self._is_started = self._is_stopped = self._is_closed = False
        self._routing = Routing(
            authority, self._legs, routes, Nobody() if subscriptions is None else subscriptions
        )
        self._state.mkdir(parents=True, exist_ok=True)
        self.switches = Switches(self._state / "switches")
        self.dead_letters = DeadLetters(self._state / "dead", self._limits.dead, sync=sync)
        #: The topic of dead letters.
        self.topic = (topic or dead_letter_topic(authority)).resolved(authority)
        self._routing.dispatcher = self.topic.with_resource(0)
        self._threads = Threads(clock)
        self._expiring = Expiring(self._all_outlets, clock)
        all_policies = Policies(policies)
        self._posting = Posting(self._routing, self.switches, self._ledger)
        giving_up = GivingUp(self.topic, self.dead_letters, self._posting, self._ledger, clock)
        self._giving_up = giving_up
        around = Surroundings(
            routing=self._routing,
            policies=all_policies,
            switches=self.switches,
            retry=retry or Retry(),
            limits=self._limits,
            giving_up=giving_up,
            ledger=self._ledger,
            clock=clock,
            rng=rng or random.Random(),  # noqa: S311 - spreads load, keeps no secret
            expires=self._expiring.sooner,
            wake=self._wake,
        )
        try:
            self._outlets = Outlets(
                self._state / "outbox", self._legs, around, sync, self._outlet_goes
            )
        except BaseException:
            self.dead_letters.close()
            raise
        self._posting.outlets = self._outlets

        others = all_policies, self.switches, self._limits, self._outlets
        deadlines = Deadlines()
        self._planner = Planner(
            self._routing, access or Access(), *others, tokens=tokens, deadlines=deadlines
        )
        rates = Rates(self._limits.leg_rates, clock)
        window = Window(self._limits.dedupe)
        self._admission = Admission(self._planner, window, self._limits, rates, deadlines)
        self._quarantine = Quarantine(self._state / QUARANTINE, self._limits.quarantine)
        self._keeping = threading.Lock()
        # For dead letters that a person lets go again: they were here before, and may.
        trusting = Planner(self._routing, Access(), *others, is_trusted=True)
        self._readmission = Admission(trusting, Window(0), self._limits)
        self._intakes = {name: Intake(name, i) for i, name in enumerate(self._legs)}
        self._listening: dict[str, set[UUri]] = {name: set() for name in self._legs}
        self._listening_generation = -1

    # --- in -------------------------------------------------------------------------------------

    def ingest(self, leg: str, messages: Sequence[bytes | UMessage]) -> None:
        """Take messages in; return when each is stored for all of its receivers, or a dead letter.

        :raises StorageError: there is no space: the leg must not acknowledge them.
        :raises Closed: the dispatcher takes no more.
        """
        if self._is_stopped:
            raise Closed("the dispatcher takes no more messages")
        self._take(self._admission, self._intakes[leg], messages)

    def _take_unreadable(self, leg: str, what: Sequence[Unreadable]) -> None:
        if self._is_stopped:
            raise Closed("the dispatcher takes no more messages")
        self._take(self._admission, self._intakes[leg], what)

    def _take(
        self,
        admission: Admission,
        intake: Intake,
        messages: Sequence[bytes | UMessage] | Sequence[Unreadable],
    ) -> None:
        now_ms = self._clock.now_ns() // 1_000_000
        admitted = admission.admit(intake, messages, now_ms)
        failures = admitted.failures
        refused = sum([failure.receiver is not None for failure in failures])
        self._ledger.add(copies=refused, copies_refused=refused)
        done: list[Failure] = []
        try:
            for outlet, columns in admitted.columns.items():
                failures += self._outlets.store(outlet, columns, None, intake.leg)
            for outlet, entries in admitted.entries.items():
                own = admitted.latest.get(outlet)
                failures += self._outlets.store(outlet, entries, own, intake.leg)
            if failures:
                self._giving_up.give_up(failures, done)
        except BaseException:
            admission.forget(admitted)
            self._undo(failures[len(done) :], done[: len(failures)])
            raise
        if admitted.strays:
            with self._keeping:
                kept = self._quarantine.keep(intake.leg, admitted.strays, now_ms)
            self._ledger.add(quarantined=kept)
        self._ledger.add(received=len(messages), **admitted.counts)
        if self._on_publish is not None and admitted.published:
            try:
                self._on_publish(admitted.published)
            except Exception:  # the messages are stored, whatever others make of them
                log.exception("somebody could not hear of publishes")

    def _undo(self, undone: Sequence[Failure], done: Sequence[Failure]) -> None:
        """Let a batch be as if it had not come; what is stored of it will be there twice."""
        for failure in undone:
            if failure.stored is not None:
                failure.stored.outbox.give_back([failure.stored.item])
        # Refused copies are counted when they are; those without a letter come again.
        refused = sum(each.stored is None and each.receiver is not None for each in undone)
        in_vain = sum(each.stored is None and each.receiver is None for each in done)
        self._ledger.add(
            ingest_failures=1,
            copies=-refused,
            copies_refused=-refused,
            refused_in_vain=in_vain,
        )

    # --- running --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to deliver what is there, and to receive.

        :raises PenstockError: a leg cannot receive.
        """
        self._is_started = True
        if self._has_threads:
            self._expiring.start()
        for outlet in self._all_outlets():
            self._wake(outlet)
        self.subscriptions_changed()
        for leg in self._legs.values():
            ingest = functools.partial(self.ingest, leg.name)
            leg.on_unreadable = functools.partial(self._take_unreadable, leg.name)
            leg.start(ingest, self._routing.received_by(leg))

    def _wake(self, outlet: Outlet) -> None:
        if self._has_threads and self._is_started:
            self._threads.wake(outlet)

    def _all_outlets(self) -> list[Outlet]:
        return self._outlets.all()

    def _outlet_goes(self, outlet: Outlet) -> None:
        self._planner.outlets_closed += 1
        self._threads.forget(outlet)
        self._expiring.forget(outlet)

    def subscriptions_changed(self) -> None:
        """Let the legs listen to what is subscribed to now; whoever has the table calls this."""
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
        for outlet in self._all_outlets():
            self._wake(outlet)

    def step(self) -> float | None:
        """Do all that is due now; return when there is more (monotonic seconds), None: never."""
        if self._routing.subscriptions.generation != self._listening_generation:
            self.subscriptions_changed()
        is_busy = True
        while is_busy:
            is_busy = self._expiring.work()
            for outlet in self._all_outlets():
                while outlet.work():
                    is_busy = True
        now = self._clock.monotonic()
        dues = [due for outlet in self._all_outlets() if (due := outlet.next_due()) is not None]
        next_ms = self._expiring.next_ms
        if next_ms is not None:
            dues.append(now + max(next_ms * 1_000_000 - self._clock.now_ns(), 0) / 1e9)
        return min(dues, default=None)

    def stop(self, grace: float = 0.0) -> None:
        """Receive no more, deliver for some seconds what is left, and keep the rest (E17).

        What is on its way then is waited for, as long as its leg asks for.
        """
        if self._is_stopped:
            return
        for leg in self._legs.values():
            leg.stop()
        self._is_stopped = True
        self._work_for(grace, self._queued)
        if grace:
            longest = max((leg.settle_after for leg in self._legs.values()), default=0.0)
            self._work_for(longest, self._unsure)
        self._threads.stop()
        self._expiring.stop()

    def _work_for(self, seconds: float, left: Callable[[], int]) -> None:
        """Go on for some seconds, or until there is nothing left."""
        end = self._clock.monotonic() + seconds
        while left() and (now := self._clock.monotonic()) < end:
            due = None if self._has_threads else self.step()
            wait = _LOOK if due is None else max(due - now, 1e-6)
            self._clock.sleep(min(wait, end - now))

    def _unsure(self) -> int:
        return sum(outlet.is_unsure for outlet in self._all_outlets())

    def _queued(self) -> int:
        return sum(outlet.outbox.queued for outlet in self._all_outlets())

    def close(self) -> None:
        """Stop, if that was not done, and give everything back. What is queued stays.

        :raises StorageError: the device refuses.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.stop()
        for leg in self._legs.values():
            leg.close()
        self._posting.close()
        try:
            self._outlets.close()
        finally:
            self._quarantine.close()
            self.dead_letters.close()

    # --- for people -----------------------------------------------------------------------------

    def stop_topic(
        self, topic: UUri, receiver: UUri = UUri.ANY, *, queue: bool = True, timeout: float = 5.0
    ) -> None:
        """Deliver a topic, or all that match, no more: also after a restart, until it is started.

        When this returns no delivery of it begins, and none is under way, unless a leg takes
        longer than `timeout`.

        :param queue: whether messages wait meanwhile; those that do not are dead letters
        """
        self.switches.stop(Stop(topic, receiver, queue))
        for outlet in self._all_outlets():
            if receiver.matches(outlet.receiver.address):
                outlet.settle_down(timeout)

    def receiver_of(self, entity: UUri) -> UUri | None:
        """Return the address of the queue that an entity gets its messages from."""
        leg = self._routing.leg_to(entity)
        return None if leg is None else Receiver.behind(leg, entity).address

    def start_topic(self, topic: UUri, receiver: UUri = UUri.ANY) -> bool:
        """Deliver again what `stop_topic` with the same arguments stopped; tell whether it was."""
        was_stopped = self.switches.start(topic, receiver)
        for outlet in self._all_outlets():
            self._wake(outlet)
        return was_stopped

    def retry_dead_letter(self, id: UUID7 | int) -> None:
        """Deliver a dead letter's message again: to its receiver, or if there was none to all.

        :raises NotFound: there is no such letter.
        :raises Unsupported: only its header was kept.
        :raises StorageError: there is no space; the letter stays.
        """
        self.retry_dead_letters([self.dead_letters.show(id)])

    def retry_dead_letters(
        self,
        letters: Iterable[Letter],
        on_failure: Callable[[Letter, PenstockError], None] | None = None,
    ) -> None:
        """Do the same with several; when it raises, those before are on their way.

        :param on_failure: told of one that cannot be tried again, which stays; then it is the
            others' turn
        :raises Unsupported: of one only the header was kept.
        :raises StorageError: there is no space.
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
            self._giving_up.give_up(self._posting.post_again(letter))
        else:
            self._take(self._readmission, Intake("", 0), [letter.original])
        self._ledger.add(letters_retried=1)

    def drop_dead_letter(self, id: UUID7 | int) -> None:
        """Let a dead letter be gone.

        :raises NotFound: there is no such letter.
        """
        self.dead_letters.drop([self.dead_letters.show(id)])

    def drop_queued(self, receiver: Receiver, topic: UUri = UUri.ANY) -> int:
        """Let messages that wait for a receiver be gone, without dead letters; return how many."""
        outlet = self._outlets.get(receiver)
        return 0 if outlet is None else outlet.drop(topic)

    def books(self) -> Books:
        """Return what became of everything."""
        now, before = self._outlets.books()
        return Books(self._ledger.copy(), now, before)

    def receivers(self) -> list[ReceiverInfo]:
        """Return all receivers, and what waits for them."""
        return self._outlets.infos()

    def statistics(self) -> dict[str, Mapping[str, int]]:
        """Return what each leg counted."""
        return {name: leg.statistics() for name, leg in self._legs.items()}
