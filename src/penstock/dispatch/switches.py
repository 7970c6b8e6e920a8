"""Which topics are stopped, for whom, also after a restart? (spec uprotocol 10.1, R11)."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import InvalidOption, Malformed
from penstock.dispatch.outbox.sidecar import save_notes
from penstock.protocols.uprotocol import InvalidUUri, UUri
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Stop", "Switches"]

_MOST = 10_000


class Stop(NamedTuple):
    """Topics that are not delivered to some receivers.

    That are publishes and notifications of a topic, and requests of a method. Responses pass:
    somebody waits for each.
    """

    topic: UUri
    receiver: UUri
    #: Whether their messages wait; those that do not are dead letters, UNAVAILABLE.
    queue: bool = True


class Switches:
    """All that is stopped, kept in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one.

        :raises Malformed: it is not such a file.
        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._lock = threading.Lock()
        self._stops: dict[tuple[UUri, UUri], Stop] = _read(path)
        #: Grows with every change.
        self.generation = 0

    def __bool__(self) -> bool:
        return bool(self._stops)

    def __iter__(self) -> Iterator[Stop]:
        return iter(list(self._stops.values()))

    def stop(self, stop: Stop) -> None:
        """Stop; again with the same changes nothing.

        :raises InvalidOption: there are too many.
        """
        with self._lock:
            key = (stop.topic, stop.receiver)
            if self._stops.get(key) == stop:
                return
            if len(self._stops) >= _MOST:
                raise InvalidOption("topic", str(stop.topic), f"{_MOST:,} are stopped already")
            self._save({**self._stops, key: stop})

    def start(self, topic: UUri, receiver: UUri) -> bool:
        """Undo a stop of exactly these; tell whether there was one."""
        with self._lock:
            left = dict(self._stops)
            if left.pop((topic, receiver), None) is None:
                return False
            self._save(left)
            return True

    def find(self, topic: UUri, receiver: UUri) -> Stop | None:
        """Return what stops this topic for this receiver; one that does not queue comes first."""
        found = None
        for stop in list(self._stops.values()):
            if stop.topic.matches(topic) and stop.receiver.matches(receiver):
                if not stop.queue:
                    return stop
                found = stop
        return found

    def _save(self, stops: dict[tuple[UUri, UUri], Stop]) -> None:
        rows = [
            {"topic": str(stop.topic), "receiver": str(stop.receiver), "queue": stop.queue}
            for stop in stops.values()
        ]
        save_notes(self._path, json.dumps({"stopped": rows}, indent=1).encode(), sync=True)
        self._stops = stops
        self.generation += 1


def _read(path: Path) -> dict[tuple[UUri, UUri], Stop]:
    with storage_errors("reading", str(path)):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return {}
    try:
        stops = [
            Stop(UUri.parse(row["topic"]), UUri.parse(row["receiver"]), bool(row["queue"]))
            for row in json.loads(text)["stopped"][:_MOST]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.rule if isinstance(error, InvalidUUri) else str(error)
        raise Malformed(
            str(path),
            "the list of what is stopped",
            "JSON of this program",
            reason,
            hint="remove the file; then nothing is stopped",
        ) from error
    return {(stop.topic, stop.receiver): stop for stop in stops}
