"""Which topics are stopped, for which receivers, also over a restart?"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import InvalidOption, Malformed
from penstock.dispatch.outbox.state import save_notes
from penstock.protocols.uprotocol import InvalidUUri, UUri
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


__all__ = ["Stop", "Switches"]

_MOST = 10_000


class Stop(NamedTuple):
    """Topics that are not delivered to some receivers.

    It applies to publishes and notifications of a topic, and to requests of a method. Responses
    are delivered: a caller waits for each.
    """

    topic: UUri
    receiver: UUri
    #: Whether their messages are queued; otherwise they become dead letters, UNAVAILABLE.
    queue: bool = True


class Switches:
    """All stops, persisted in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists.

        :raises Malformed: the file is invalid.
        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._lock = threading.Lock()
        self._stops: dict[tuple[UUri, UUri], Stop] = _read(path)
        #: Incremented with every change.
        self.generation = 0

    def __bool__(self) -> bool:
        return bool(self._stops)

    def __iter__(self) -> Iterator[Stop]:
        return iter(list(self._stops.values()))

    def stop(self, stop: Stop) -> None:
        """Add a stop. Idempotent.

        :raises InvalidOption: there are too many stops.
        """
        with self._lock:
            key = (stop.topic, stop.receiver)
            if self._stops.get(key) == stop:
                return
            if len(self._stops) >= _MOST:
                raise InvalidOption("topic", str(stop.topic), f"{_MOST:,} are stopped already")
            self._save({**self._stops, key: stop})

    def start(self, topic: UUri, receiver: UUri) -> bool:
        """Remove a stop with exactly these arguments; tell whether it existed."""
        with self._lock:
            left = dict(self._stops)
            if left.pop((topic, receiver), None) is None:
                return False
            self._save(left)
            return True

    def find(self, topic: UUri, receiver: UUri) -> Stop | None:
        """Return the stop of a topic for a receiver, first one that does not queue, or None."""
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
