"""Which receivers does a dispatcher have messages for, also from before a restart?"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import Closed, Malformed
from penstock.core.whole_files import sync_names
from penstock.dispatch.books import NO_COPIES, added
from penstock.dispatch.delivering import Outlet
from penstock.dispatch.outbox import CommonLog, Outbox, OutboxBooks
from penstock.dispatch.outbox.lanes import LABEL, restore
from penstock.dispatch.outbox.sidecar import save_notes
from penstock.dispatch.plans import NoRoom
from penstock.dispatch.receivers import Receiver
from penstock.protocols.uprotocol import UCode, UStatus, UUri
from penstock.protocols.uprotocol.transports import Leg, not_tried_after
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from penstock.dispatch.giving_up import Failure
    from penstock.dispatch.outbox import Columns, Entry, FirstMessages
    from penstock.dispatch.storing import Keys
    from penstock.dispatch.surroundings import Surroundings
    from penstock.protocols.uprotocol import UMessage
    from penstock.protocols.uprotocol.transports import Ingest
    from penstock.queue.options import Sync

__all__ = ["Outlets", "ReceiverInfo"]

log = logging.getLogger(__name__)

_NEW: Final = "new"
#: Bytes of a segment of each log, if the largest message fits.
_SEGMENT: Final = 16 << 20
_RETIRED: Final = "retired"
_GONE: Final = ".gone"


class ReceiverInfo(NamedTuple):
    """A receiver, for people."""

    receiver: Receiver
    books: OutboxBooks
    bytes: int
    order: str
    #: How often messages that still wait were tried, and why the last delivery failed.
    attempts: int
    trouble: str
    #: Seconds until it is tried again; None while nothing waits for that.
    due_in: float | None
    #: What was found to be wrong with its files.
    findings: Sequence[str]


class Outlets:
    """All outlets, each with an outbox in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        legs: Mapping[str, Leg],
        around: Surroundings,
        sync: Sync,
        retired: Callable[[Outlet], None],
    ) -> None:
        """Open the outboxes that are there.

        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: an outbox cannot be read.
        """
        self._folder = folder
        self._legs = legs
        self._around = around
        self._sync = sync
        self._on_retired = retired
        self._lock = threading.Lock()
        self._outlets: dict[Receiver, Outlet] = {}
        self._segment = max(_SEGMENT, 2 * around.limits.message)
        self._common = CommonLog(folder / _NEW, self._segment, sync)
        self._is_closed = False
        with storage_errors("creating", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        self._retired, counted = _read_retired(folder / _RETIRED)
        self._retired_before = self._retired
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
        """Return the receivers that have no files yet; where there are some, make the rest."""
        found: dict[Receiver, FirstMessages] = {}
        for first in self._common.open():
            label = json.loads(first.label)
            receiver = _receiver(label, self._folder / _NEW)
            folder = self._folder / receiver.folder
            if folder.exists():
                self._make_rest(folder, label, first)
                continue
            if receiver in found:  # which had to go when it was empty
                found[receiver].end()
            found[receiver] = first
        return found

    def _make_rest(self, folder: Path, label: Mapping[str, Any], first: FirstMessages) -> None:
        """Bring messages into a folder that is there: a crash came before all of them were."""
        known = _read_label(folder / LABEL)
        if known is None:
            save_notes(folder / LABEL, first.label, sync=True)
        # With another label, it was there before: a crash came as it had to go.
        is_begun = known is None or known == label
        restore(folder, first, self._segment, self._sync, is_begun=is_begun)
        with storage_errors("syncing", str(folder)):
            sync_names(folder)
            sync_names(folder.parent)
        first.end()

    def _open(self, receiver: Receiver, first: FirstMessages | None = None) -> Outlet:
        limits = self._around.limits
        outbox = Outbox(
            self._folder / receiver.folder,
            max_messages=limits.queue_messages,
            max_bytes=limits.queue_bytes,
            segment=self._segment,
            sync=self._sync,
            clock=self._around.clock,
            first=first,
        )
        leg = self._legs.get(receiver.leg) or _Missing(receiver.leg)
        return Outlet(receiver, leg, outbox, self._around)

    def outlet(self, receiver: Receiver) -> Outlet:
        """Return the outlet of a receiver; make it if there is none, its files later.

        :raises NoRoom: there are too many receivers that messages wait for.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: its outbox cannot be read.
        """
        outlet = self._outlets.get(receiver)
        if outlet is not None:
            return outlet
        with self._lock:
            outlet = self._outlets.get(receiver)
            if outlet is None:
                if len(self._outlets) >= self._around.limits.receivers:
                    self._retire_one()
                outlet = self._open(receiver, self._first_messages(receiver))
                self._outlets = {**self._outlets, receiver: outlet}
            return outlet

    def _first_messages(self, receiver: Receiver) -> FirstMessages | None:
        label = {"leg": receiver.leg, "address": str(receiver.address)}
        folder = self._folder / receiver.folder
        if not folder.exists():
            return self._common.begin(label)
        # A crash left it so; what is in it is opened.
        save_notes(folder / LABEL, json.dumps(label).encode(), sync=True)
        return None

    def store(
        self,
        outlet: Outlet,
        entries: Sequence[Entry] | Columns,
        latest: Keys | None = None,
        came_by: str = "",
    ) -> list[Failure]:
        """Store messages for a receiver, also if its outlet had to go a moment ago.

        :returns: what could not be delivered because of it.
        :raises StorageError: there is no space; some may be stored.
        """
        while True:
            try:
                return outlet.store(entries, latest, came_by)
            except Closed:
                if self._is_closed:
                    raise
                try:
                    outlet = self.outlet(outlet.receiver)
                except NoRoom:
                    return outlet.refuse(entries, came_by)

    def _retire_one(self) -> None:
        """Make room: let one go that nothing waits for.

        :raises NoRoom: messages wait for all of them.
        """
        # Closed at once: what somebody stores between a look and that would go with the folder.
        outlet = next((it for it in self._outlets.values() if it.outbox.close_if_empty()), None)
        if outlet is None:
            limit = self._around.limits.receivers
            raise NoRoom(f"messages wait for {limit:,} receivers, and there may not be more")
        receiver = outlet.receiver
        self._outlets = {key: each for key, each in self._outlets.items() if key != receiver}
        self._on_retired(outlet)
        self._retired = added([self._retired, outlet.outbox.books()])
        self._retired_before = added([self._retired_before, outlet.before])
        # Whatever a crash leaves of this, its messages are counted once.
        folder = self._folder / receiver.folder
        gone = folder.with_name(f"{folder.name}{_GONE}")
        with storage_errors("removing", str(folder)), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)  # if there is one by now
        notes = {**self._retired._asdict(), "last_folder": folder.name}
        text = json.dumps(notes).encode()
        save_notes(self._folder / _RETIRED, text, sync=self._sync != "none")
        outlet.outbox.discard()
        shutil.rmtree(gone, ignore_errors=True)

    def _tidy_up(self, counted: str) -> None:
        """Do what a crash left of making room; the books have the outbox of this folder."""
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
        now = self._around.clock.monotonic()
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
        """Return the sums of all outboxes, and what they were when they were opened."""
        outlets = self.all()
        return (
            added([self._retired, *(outlet.outbox.books() for outlet in outlets)]),
            added([self._retired_before, *(outlet.before for outlet in outlets)]),
        )

    def close(self) -> None:
        """Close all outboxes.

        :raises StorageError: the device refuses; the others are closed all the same.
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
    """The leg of receivers from before, which the configuration does not have any more."""

    scope = "entity"

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        """Receive nothing."""

    def listen(self, topic: UUri) -> None:
        """Receive nothing."""

    def unlisten(self, topic: UUri) -> None:
        """Receive nothing."""

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        del address
        status = UStatus(UCode.UNAVAILABLE, f"there is no leg {self.name} any more")
        return not_tried_after(status, len(messages) - 1)

    def stop(self) -> None:
        """Receive nothing."""

    def close(self) -> None:
        """Nothing is open."""

    def statistics(self) -> Mapping[str, int]:
        return {}


def _read_label(path: Path) -> dict[str, Any] | None:
    """Return what is known of whose folder it is."""
    with storage_errors("reading", str(path)):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None  # of somebody else, or a crash was quicker than its first message
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
    """Return the books of outboxes that are gone, and the folder of the last of them."""
    with storage_errors("reading", str(path)):
        try:
            fields = json.loads(path.read_bytes())
            books = {name: int(fields.get(name, 0)) for name in OutboxBooks._fields}
            return OutboxBooks(**books), str(fields.get("last_folder", ""))
        except FileNotFoundError:
            return NO_COPIES, ""
        except (ValueError, AttributeError, TypeError) as error:
            raise Malformed(str(path), "the books", "JSON of this program", error) from error
