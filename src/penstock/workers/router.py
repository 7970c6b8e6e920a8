"""How do apps find the streams of a machine, and the streams their apps?

The router is no process. A stream is a queue in shared memory; the router is the directory of a
machine's streams and the list of apps that read them. When an app dies, the kernel releases its
lock, and its subscriptions end.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import Closed, InvalidOption, PenstockError
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import StreamId
from penstock.core.whole_files import write_whole
from penstock.queue.ownership import Owner, Ownership
from penstock.queue.storage import storage_errors
from penstock.queue.stream_directory import (
    StreamKind,
    StreamPlace,
    StreamState,
    list_streams,
    make_streams_directory,
    streams_directory,
)
from penstock.queue.streams import InputStream, OutputStream
from penstock.queue.subscription import Subscription

if TYPE_CHECKING:
    from penstock.core.interfaces import BytesLike
    from penstock.queue.wide.writer import WideWriter

__all__ = ["AppState", "RegisteredApp", "Router", "check_app_name"]

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
#: The folder of registrations, beside the streams.
_APPS: Final = "apps"


def check_app_name(name: str) -> str:
    """Check and return the name of an app.

    :raises InvalidOption: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise InvalidOption(
            "app",
            name,
            "is not a name of an app",
            hint="use up to 64 letters, digits, '_', '-' and '.'",
        )
    return name


class AppState(NamedTuple):
    """A registered app."""

    name: str
    pid: int
    #: What it subscribed to.
    requests: tuple[StreamId, ...]
    policy: OverflowPolicy
    queue_size: int | None


class Router:
    """The apps and streams of one directory; by default, of the machine.

    with Router().register("monitor") as app:
        app.add(*requests_for(device=5))
        with app.receive(timeout=1.0) as message:
            ...
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = os.fspath(directory or streams_directory())

    def register(
        self,
        name: str,
        *,
        queue_size: int | None = None,
        policy: OverflowPolicy = OverflowPolicy.DROP_OLDEST,
    ) -> RegisteredApp:
        """Register an app until it is closed or its process ends.

        `Subscription` says what the policy means.

        :raises AlreadyOwned: an app of this name is registered.
        :raises InvalidOption: the name or the policy is invalid.
        """
        return RegisteredApp(
            check_app_name(name), directory=self.directory, queue_size=queue_size, policy=policy
        )

    def apps(self) -> list[AppState]:
        """Return the registered apps by name."""
        folder = Path(self.directory, _APPS)
        states = []
        for file in sorted(folder.glob("*.owner")):
            owner = Owner.of(str(file))
            if owner is not None and owner.alive:
                states.append(_state(folder, owner))
        return states

    def streams(self) -> list[StreamState]:
        """Return the streams that exist, by id."""
        return list_streams(self.directory)


class RegisteredApp(Subscription):
    """A registered app: its subscriptions, its channels, and sending.

    Closing it closes everything that it opened. Its streams stay until it removes them, so that
    it can come back to them.
    """

    def __init__(
        self, name: str, *, directory: str, queue_size: int | None, policy: OverflowPolicy
    ) -> None:
        make_streams_directory(directory)
        self._record = Path(directory, _APPS, name)
        with storage_errors("creating", str(self._record.parent)):
            self._record.parent.mkdir(exist_ok=True)
        self._ownership = Ownership.claim(f"{self._record}.owner", name, f"the app {name}")
        try:
            super().__init__(name, directory=directory, queue_size=queue_size, policy=policy)
        except BaseException:
            self._ownership.release(remove=True)
            raise
        self._outputs: dict[StreamId, OutputStream] = {}
        self._targets: dict[StreamId, WideWriter] = {}
        self._queue = (policy, queue_size)
        self._write_record()

    def add(self, *requests: StreamId) -> None:
        super().add(*requests)
        self._write_record()

    def discard(self, *requests: StreamId) -> None:
        super().discard(*requests)
        self._write_record()

    def _write_record(self) -> None:
        policy, queue_size = self._queue
        record = {
            "requests": [request.hex() for request in self.requests],
            "policy": policy.value,
            "queue_size": queue_size,
        }
        with storage_errors("writing", str(self._record)):
            write_whole(
                self._record.with_name(f"{self.name}.json"), json.dumps(record).encode(), sync=False
            )

    # --- channels and sending -------------------------------------------------------------------

    def create_output(self, stream: StreamId, **options: int) -> OutputStream:
        """Create an output stream; `slots` and `size` as in `OutputStream.create`.

        :raises AlreadyOwned: the stream has another creator.
        :raises InvalidStreamId: a field of the id is ANY.
        """
        self._check_open()
        output = OutputStream.create(stream, owner=self.name, directory=self.directory, **options)
        self._outputs[stream] = output
        return output

    def create_input(self, stream: StreamId, **options: int) -> InputStream:
        """Create an input stream; messages that others send to it are received, too.

        :raises AlreadyOwned: the stream has another creator.
        :raises InvalidStreamId: a field of the id is ANY.
        """
        self._check_open()
        created = InputStream.create(stream, owner=self.name, directory=self.directory, **options)
        self.add_input(created)
        return created

    def has_input(self, stream: StreamId) -> bool:
        """Tell whether an input stream with exactly this id exists."""
        return (
            stream.is_concrete and StreamPlace.of(stream, StreamKind.INPUT, self.directory).exists()
        )

    def send(
        self, stream: StreamId, payload: BytesLike, type: int = 0, time_ns: int | None = None
    ) -> int:
        """Send a message to an input stream under the app's name; return its seq there.

        :raises NotFound: there is no such stream.
        :raises InvalidStreamId: a field of the id is ANY.
        :raises QueueFull: its consumer is too far behind; the message was not stored.
        :raises MessageTooLarge: it is larger than the stream allows.
        """
        self._check_open()
        writer = self._targets.get(stream)
        if writer is not None:
            try:
                return self._write(writer, payload, type, time_ns)
            except Closed:  # it was removed; there may be a new one
                self._targets.pop(stream).close()
        writer = InputStream.open(stream, directory=self.directory, policy="fail")
        self._targets[stream] = writer
        return self._write(writer, payload, type, time_ns)

    def _write(self, writer: WideWriter, payload: BytesLike, type: int, time_ns: int | None) -> int:
        return writer.write(payload, type, time_ns=time_ns, attributes=self.name.encode())

    def close(self) -> None:
        if self._is_closed:
            return
        super().close()
        for endpoint in (*self._outputs.values(), *self._targets.values()):
            endpoint.close()
        self._record.with_name(f"{self.name}.json").unlink(missing_ok=True)
        self._ownership.release(remove=True)


def _state(folder: Path, owner: Owner) -> AppState:
    requests: tuple[StreamId, ...] = ()
    policy, queue_size = OverflowPolicy.DROP_OLDEST, None
    try:
        record = json.loads((folder / f"{owner.name}.json").read_bytes())
        requests = tuple(map(StreamId.parse, record["requests"]))
        policy, queue_size = OverflowPolicy(record["policy"]), record["queue_size"]
    except (OSError, ValueError, KeyError, TypeError, PenstockError):
        pass  # it has just come, or just left
    return AppState(owner.name, owner.pid, requests, policy, queue_size)
