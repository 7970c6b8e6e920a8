"""Which receivers does a dispatcher have messages for, also from before a restart?"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import Closed, Malformed
from penstock.core.whole_files import sync_names
from penstock.dispatch.books import NO_COPIES, added
from penstock.dispatch.delivery import Outlet, Traffic
from penstock.dispatch.outbox import CommonLog, Outbox, OutboxBooks
from penstock.dispatch.outbox.state import save_notes
from penstock.dispatch.outbox.store import LABEL, restore
from penstock.dispatch.redelivery import Attempts
from penstock.dispatch.routes import Receiver
from penstock.protocols.uprotocol import UCode, UStatus, UUri
from penstock.protocols.uprotocol.transports import Leg, not_tried_after
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from penstock.core.clock import Clock
    from penstock.dispatch.books import Ledger
    from penstock.dispatch.dead_letters import Failure
    from penstock.dispatch.outbox import FirstMessages, Part
    from penstock.dispatch.routes import Routing
    from penstock.dispatch.scheduler import Scheduler
    from penstock.dispatch.settings import Limits, Policies, Retry
    from penstock.dispatch.switches import Switches
    from penstock.dispatch.ttl import ExpiryTimer
    from penstock.protocols.uprotocol import UMessage
    from penstock.protocols.uprotocol.transports import Ingest
    from penstock.queue.options import Sync

__all__ = ["NoRoom", "Outlets", "ReceiverInfo"]

log = logging.getLogger(__name__)

_NEW: Final = "new"
#: Bytes of a segment, unless the largest message needs more.
_SEGMENT: Final = 16 << 20
_RETIRED: Final = "retired"
_GONE: Final = ".gone"


class NoRoom(Exception):
    """The limit of receivers is reached."""


class ReceiverInfo(NamedTuple):
    """Status of a receiver, for people."""

    receiver: Receiver
    books: OutboxBooks
    bytes: int
    order: str
    #: Failed attempts of queued messages, and why the last delivery failed.
    attempts: int
    trouble: str
    #: Seconds until the next attempt; None if none is scheduled.
    due_in: float | None
    #: Faults found in its files.
    findings: Sequence[str]


class Outlets:
    """All outlets, each with an outbox in its own folder."""

    def __init__(
        self,
        folder: Path,
        *,
        routing: Routing,
        switches: Switches,
        policies: Policies,
        limits: Limits,
        retry: Retry,
        scheduler: Scheduler,
        timer: ExpiryTimer,
        ledger: Ledger,
        clock: Clock,
        rng: random.Random,
        sync: Sync,
    ) -> None:
        """Open the existing outboxes.

        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: an outbox cannot be read.
        """
        self._folder = folder
        self._routing = routing
        self._switches = switches
        self._policies = policies
        self._limits = limits
        self._retry = retry
        self._scheduler = scheduler
        self._timer = timer
        self._ledger = ledger
        self._clock = clock
        self._rng = rng
        self._sync = sync
        #: Incremented when an outlet is closed, to invalidate plans.
        self.generation = 0
        self._lock = threading.Lock()
        self._outlets: dict[Receiver, Outlet] = {}
        self._segment = max(_SEGMENT, 2 * limits.message)
        self._common = CommonLog(folder / _NEW, self._segment, sync)
        self._is_closed = False
        with storage_errors("creating", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        self._retired, counted = _read_retired(folder / _RETIRED)
        self._retired_before = self._retired
        #: Held while an outlet is removed and counted as retired.
        self._counting = threading.Lock()
        with storage_errors("opening", str(folder)):
            self._tidy_up(counted)
        try:
            unmade = self._unmade()
            for path in sorted(folder.iterdir()):
                label = _read_label(path / LABEL) if path.is_dir() else None
                if label is not None:
                    receiver = _receiver(label, path)
                    self._outlets[receiver] = self._open(receiver)
            for receiver, first in unmade.items():
                self._outlets[receiver] = self._open(receiver, first)
        except BaseException:
            self.close()
            raise

    def _unmade(self) -> dict[Receiver, FirstMessages]:
        """Return the receivers in the common log; complete those whose folder exists."""
        found: dict[Receiver, FirstMessages] = {}
        for first in self._common.open():
            label = json.loads(first.label)
            receiver = _receiver(label, self._folder / _NEW)
            folder = self._folder / receiver.folder
            if folder.exists():
                self._make_rest(folder, label, first)
                continue
            if receiver in found:  # the earlier outbox was retired
                found[receiver].end()
            found[receiver] = first
        return found

    def _make_rest(self, folder: Path, label: Mapping[str, Any], first: FirstMessages) -> None:
        """Move messages to an existing folder, after a crash interrupted that."""
        known = _read_label(folder / LABEL)
        if known is None:
            save_notes(folder / LABEL, first.label, sync=True)
        # With another label, it is of an earlier outbox: a crash interrupted its removal.
        is_begun = known is None or known == label
        restore(folder, first, self._segment, self._sync, is_begun=is_begun)
        with storage_errors("syncing", str(folder)):
            sync_names(folder)
            sync_names(folder.parent)
        first.end()

    def _open(self, receiver: Receiver, first: FirstMessages | None = None) -> Outlet:
        outbox = Outbox(
            self._folder / receiver.folder,
            max_messages=self._limits.queue_messages,
            max_bytes=self._limits.queue_bytes,
            segment=self._segment,
            sync=self._sync,
            clock=self._clock,
            first=first,
        )
        return Outlet(
            receiver,
            self._routing.legs.get(receiver.leg) or _Missing(receiver.leg),
            outbox,
            # Messages from before a restart follow the policy of all topics.
            self._policies.of(UUri.ANY).order,
            attempts=Attempts(self._policies, self._retry, self._clock, self._rng),
            traffic=Traffic(receiver, self._routing, self._switches),
            limits=self._limits,
            longest_pause=self._retry.backoff.maximum,
            ledger=self._ledger,
            clock=self._clock,
            scheduler=self._scheduler,
            timer=self._timer,
        )

    def outlet(self, receiver: Receiver) -> Outlet:
        """Return the outlet of a receiver; create it if it is missing (its files later).

        :raises NoRoom: messages are queued for too many receivers.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: its outbox cannot be read.
        """
        outlet = self._outlets.get(receiver)
        if outlet is not None:
            return outlet
        with self._lock:
            outlet = self._outlets.get(receiver)
            if outlet is None:
                if len(self._outlets) >= self._limits.receivers:
                    self._retire_one()
                outlet = self._open(receiver, self._first_messages(receiver))
                self._outlets = {**self._outlets, receiver: outlet}
            return outlet

    def _first_messages(self, receiver: Receiver) -> FirstMessages | None:
        label = {"leg": receiver.leg, "address": str(receiver.address)}
        folder = self._folder / receiver.folder
        if not folder.exists():
            return self._common.begin(label)
        # Left by a crash without a label: open what is in it.
        save_notes(folder / LABEL, json.dumps(label).encode(), sync=True)
        return None

    def store(
        self,
        outlet: Outlet,
        parts: Sequence[Part],
        came_by: str = "",
    ) -> list[Failure]:
        """Store messages for a receiver, even if its outlet was just retired.

        :returns: the resulting failures.
        :raises StorageError: the disk is full; some may be stored.
        """
        while True:
            try:
                return outlet.store(parts, came_by)
            except Closed:
                if self._is_closed:
                    raise
                try:
                    outlet = self.outlet(outlet.receiver)
                except NoRoom:
                    raws = [raw for part in parts for raw in part.columns.raws]
                    return outlet.refuse(raws, came_by)

    def _retire_one(self) -> None:
        """Retire an outlet with an empty queue, to make room.

        :raises NoRoom: messages are queued for all of them.
        """
        # Check and close atomically: a message stored in between would be lost with the folder.
        outlet = next(
            (it for it in self._outlets.values() if it.retire(partial(self._put_aside, it))), None
        )
        if outlet is None:
            limit = self._limits.receivers
            raise NoRoom(f"messages wait for {limit:,} receivers, and there may not be more")
        receiver = outlet.receiver
        others = {key: each for key, each in self._outlets.items() if key != receiver}
        retired = added([self._retired, outlet.outbox.books()])
        before = added([self._retired_before, outlet.before])
        with self._counting:
            self._outlets, self._retired, self._retired_before = others, retired, before
        self.generation += 1
        self._scheduler.forget(outlet)
        self._timer.forget(outlet)
        outlet.outbox.discard()
        shutil.rmtree(self._gone(receiver), ignore_errors=True)

    def _put_aside(self, outlet: Outlet, books: OutboxBooks) -> None:
        """Rename the folder of an outbox, and save that its messages count as retired.

        This order counts them once, wherever a crash interrupts it.

        :raises StorageError: the operating system refuses; nothing is changed.
        """
        folder = self._folder / outlet.receiver.folder
        gone = self._gone(outlet.receiver)
        is_renamed = False
        with storage_errors("removing", str(folder)), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)  # if it exists
            is_renamed = True
        retired = added([self._retired, books])
        text = json.dumps({**retired._asdict(), "last_folder": folder.name}).encode()
        try:
            save_notes(self._folder / _RETIRED, text, sync=self._sync != "none")
        except BaseException:
            if is_renamed:
                with contextlib.suppress(OSError):
                    gone.rename(folder)
            raise

    def _gone(self, receiver: Receiver) -> Path:
        return self._folder / f"{receiver.folder}{_GONE}"

    def _tidy_up(self, counted: str) -> None:
        """Complete or undo an interrupted retirement; `counted` is in the counters already."""
        for gone in self._folder.glob(f"*{_GONE}"):
            folder = gone.with_name(gone.name.removesuffix(_GONE))
            if folder.name == counted or folder.exists():
                shutil.rmtree(gone, ignore_errors=True)
            else:
                gone.rename(folder)

    def all(self) -> list[Outlet]:
        return list(self._outlets.values())

    def get(self, receiver: Receiver) -> Outlet | None:
        return self._outlets.get(receiver)

    def infos(self) -> list[ReceiverInfo]:
        now = self._clock.monotonic()
        found = []
        for outlet in self.all():
            due, outbox = outlet.next_due(), outlet.outbox
            wait = None if due is None else max(due - now, 0.0)
            found.append(
                ReceiverInfo(
                    outlet.receiver,
                    outbox.books(),
                    outbox.size,
                    outlet.order,
                    outlet.failed_attempts,
                    outlet.trouble,
                    wait,
                    outbox.findings,
                )
            )
        return found

    def books(self) -> tuple[OutboxBooks, OutboxBooks]:
        """Return the sums of the counters of all outboxes, now and when they were opened."""
        # One snapshot. The books of an outbox are read outside the lock, as its own lock is held
        # while it is retired.
        with self._counting:
            outlets, retired, before = self.all(), self._retired, self._retired_before
        damaged = self._common.damaged
        lost = NO_COPIES._replace(stored=damaged, damaged=damaged)
        return (
            added([lost, retired, *(outlet.outbox.books() for outlet in outlets)]),
            added([lost, before, *(outlet.before for outlet in outlets)]),
        )

    def close(self) -> None:
        """Close all outboxes.

        :raises StorageError: the device refuses; the others are closed nevertheless.
        """
        self._is_closed = True
        failure: BaseException | None = None
        for outlet in self.all():
            try:
                outlet.outbox.close()
            except Exception as error:
                log.exception("%s", outlet.receiver)
                failure = failure or error
        self._common.close()
        if failure is not None:
            raise failure


class _Missing(Leg):
    """Stands for a leg that is no longer in the configuration."""

    scope = "entity"

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        """Do nothing."""

    def listen(self, topic: UUri) -> None:
        """Do nothing."""

    def unlisten(self, topic: UUri) -> None:
        """Do nothing."""

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        del address
        status = UStatus(UCode.UNAVAILABLE, f"there is no leg {self.name} any more")
        return not_tried_after(status, len(messages) - 1)

    def stop(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def statistics(self) -> Mapping[str, int]:
        return {}


def _read_label(path: Path) -> dict[str, Any] | None:
    """Return the label of a folder, or None."""
    with storage_errors("reading", str(path)):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None  # not an outbox, or a crash came before its label was written
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise Malformed(str(path), "the receiver's name", "JSON of this program", error) from error


def _receiver(label: Mapping[str, Any], path: Path) -> Receiver:
    try:
        return Receiver(str(label["leg"]), UUri.parse(label["address"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Malformed(str(path), "the receiver's name", "JSON of this program", error) from error


def _read_retired(path: Path) -> tuple[OutboxBooks, str]:
    """Return the counters of retired outboxes, and the folder of the last one."""
    with storage_errors("reading", str(path)):
        try:
            fields = json.loads(path.read_bytes())
            books = {name: int(fields.get(name, 0)) for name in OutboxBooks._fields}
            return OutboxBooks(**books), str(fields.get("last_folder", ""))
        except FileNotFoundError:
            return NO_COPIES, ""
        except (ValueError, AttributeError, TypeError) as error:
            raise Malformed(str(path), "the books", "JSON of this program", error) from error
