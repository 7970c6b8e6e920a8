"""How do people and programs ask a dispatcher, and tell it what to do, whether it runs or not?"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import (
    ConnectionLost,
    LockTimeout,
    Malformed,
    NotFound,
    PenstockError,
    Unsupported,
)
from penstock.dispatch.config import load_bus
from penstock.dispatch.dead_letters import QUARANTINE, DeadLetters, strays
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.outbox.state import save_notes
from penstock.dispatch.routes import Routes
from penstock.dispatch.settings import Limits
from penstock.dispatch.switches import Stop, Switches
from penstock.protocols import server
from penstock.queue.storage import LockFile, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.dispatch.dead_letters import Letter, Stray
    from penstock.dispatch.outlets import ReceiverInfo
    from penstock.protocols.connection import Connection
    from penstock.protocols.uprotocol import UUri

__all__ = [
    "NAME_FILE",
    "ControlServer",
    "Place",
    "ask",
    "described",
    "described_letter",
    "described_stray",
    "find_place",
    "letters_to_retry",
    "save_letters_to_retry",
    "state_lock",
]

log = logging.getLogger(__name__)


def described(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return the receivers, the counters and the stopped topics, ready for JSON."""
    books = dispatcher.books()
    copies = books.copies._asdict()
    return {
        "receivers": [_receiver(info) for info in dispatcher.receivers()],
        "stopped": [
            {"topic": str(stop.topic), "receiver": str(stop.receiver), "queue": stop.queue}
            for stop in dispatcher.switches
        ],
        "books": {
            "messages": asdict(books.counts),
            "copies": copies,
            "refused": books.refused,
            "dead": books.dead,
            "problems": books.problems(),
        },
        "dead_letters": str(dispatcher.topic),
    }


def _receiver(info: ReceiverInfo) -> dict[str, Any]:
    books = info.books
    return {
        "leg": info.receiver.leg,
        "address": str(info.receiver.address),
        "queued": books.queued,
        "bytes": info.bytes,
        "acked": books.acked,
        "dead": books.expired + books.queue_full + books.permanent,
        "books": books._asdict(),
        "order": info.order,
        "attempts": info.attempts,
        "trouble": info.trouble,
        "due_in": info.due_in,
        "findings": [str(finding) for finding in info.findings],
    }


def described_letter(letter: Letter, *, payload: bool = False) -> dict[str, Any]:
    """Return a dead letter, ready for JSON.

    :param payload: include the payload, in hexadecimal
    """
    header = letter.header
    found = {
        "number": letter.number,
        "id": str(letter.id),
        "dead_ms": letter.dead_ms,
        "first_failure_ms": letter.first_failure_ms,
        "code": letter.code.name,
        "reason": letter.reason.name,
        "message": letter.message,
        "receiver": None if letter.receiver is None else str(letter.receiver),
        "leg": letter.leg,
        "attempts": letter.attempts,
        "dispatcher": str(letter.dispatcher),
        "is_whole": letter.original is not None,
        "original": {
            "id": None if header.id is None else str(header.id),
            "type": header.type.name,
            "source": None if header.source is None else str(header.source),
            "sink": None if header.sink is None else str(header.sink),
            "priority": header.effective_priority.name,
            "ttl": header.ttl,
            "payload_format": header.payload_format.name,
        },
    }
    if letter.original is not None:
        content = letter.original.payload or b""
        found["payload_bytes"] = len(content)
        if payload:
            found["payload"] = content.hex()
    return found


def described_stray(stray: Stray, *, data: bool = False) -> dict[str, Any]:
    """Return an undecodable message, ready for JSON.

    :param data: include the bytes that are kept, in hexadecimal
    """
    found = {
        "number": stray.number,
        "came_ms": stray.came_ms,
        "leg": stray.leg,
        "bytes": stray.size,
        "is_whole": stray.size == len(stray.data),
    }
    return {**found, "data": stray.data.hex()} if data else found


_NAME: Final = "control"
_LARGEST_QUESTION: Final = 1 << 20
#: Pending requests at most; they are answered one after the other.
_MOST_AT_ONCE: Final = 32
_LARGEST_ANSWER: Final = 64 << 20
#: Seconds within which a client must send its request.
_PATIENCE: Final = 5.0


class ControlServer:
    """Answers control requests from construction until `close`."""

    def __init__(self, state: Path, answer: Callable[[dict[str, Any]], Any]) -> None:
        """Start answering.

        :param answer: returns the answer to a request; its errors are sent to the client
        :raises StorageError: the operating system refuses.
        """
        self._path = state / _NAME
        self._answer = answer
        self._answering = threading.Lock()
        with storage_errors("opening", str(self._path)):
            # This process holds the state's lock, so the socket is a leftover of a dead process.
            self._path.unlink(missing_ok=True)
        self._server = server.Server(
            "dispatch control",
            server.listen_unix(self._path),
            lambda connection: server.Conversation(connection, self._serve),
            server.Limits(max_clients=_MOST_AT_ONCE, first_message=_PATIENCE, stalled=_PATIENCE),
            log=log,
        ).start()

    def _serve(self, connection: Connection) -> None:
        try:
            question = json.loads(_question(connection))
            connection.welcome()
            if not isinstance(question, dict):
                raise PenstockError("a question is a JSON object")  # noqa: TRY301 - told as all are
            with self._answering:
                answer = {"answer": self._answer(question)}
        except PenstockError as error:
            is_missing = isinstance(error, NotFound)
            answer = {"error": str(error), "hint": error.hint, "is_missing": is_missing}
        except ValueError as error:
            answer = {"error": f"it is not a question: {error}", "hint": None}
        except OSError:
            raise
        except Exception as error:
            log.exception("a question could not be answered")
            answer = {"error": f"{type(error).__name__}: {error}", "hint": None}
        connection.send(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """Stop answering."""
        self._server.stop()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _question(connection: Connection) -> bytes:
    """Receive a request line within the time limit."""
    said = bytearray()
    view = memoryview(bytearray(1 << 16))
    while not said.endswith(b"\n"):
        count = connection.receive(view)
        said += view[:count]
        if not count or len(said) > _LARGEST_QUESTION:
            raise ValueError("the line has no end")
    return bytes(said)


def ask(state: Path, question: dict[str, Any], timeout: float = 30.0) -> Any:
    """Send a request to the dispatcher that uses a state folder, and return its answer.

    :raises NotFound: the requested object does not exist.
    :raises ConnectionLost: no dispatcher answers.
    :raises PenstockError: the dispatcher refuses; the error says why.
    """
    name = str(state / _NAME)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            with _reachable(state) as path:
                connection.connect(path)
            connection.sendall(json.dumps(question).encode() + b"\n")
            answer = json.loads(_line(connection, _LARGEST_ANSWER, timeout))
        except (OSError, ValueError) as error:
            raise ConnectionLost(
                name, str(error), hint="is it about to start or to stop? try again"
            ) from error
    if "error" in answer:
        kind = NotFound if answer.get("is_missing") else PenstockError
        raise kind(answer["error"], hint=answer.get("hint"))
    return answer["answer"]


def _line(connection: socket.socket, largest: int, allowed: float) -> bytes:
    """Receive a complete line within a timeout (seconds)."""
    deadline = time.monotonic() + allowed
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(1 << 16)
        size += len(part)
        if not part or size > largest:
            raise ValueError("the line has no end")
        parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def _reachable(state: Path) -> Iterator[str]:
    """Return a short path to the socket, for any folder: a socket path has at most 107 bytes."""
    folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{_NAME}"
    finally:
        os.close(folder)


_LOCK: Final = "lock"
_LOCKED_BYTE: Final = 1 << 40
#: Seconds between attempts to get the lock.
_LOOK: Final = 0.05
_AGAIN: Final = "again"
#: The file with the dispatcher's name, for clients that know only the folder.
NAME_FILE: Final = "dispatcher"


@contextlib.contextmanager
def state_lock(state: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a state folder against other processes.

    :param patience: seconds to wait for another process that uses it
    :raises LockTimeout: another process uses it.
    :raises StorageError: the operating system refuses.
    """
    path = state / _LOCK
    with storage_errors("creating", str(path)):
        state.mkdir(parents=True, exist_ok=True)
        path.touch()
    lock = LockFile(str(path))
    deadline = time.monotonic() + patience
    try:
        while not lock.try_lock(_LOCKED_BYTE):
            if time.monotonic() >= deadline:
                raise LockTimeout(
                    f"another process runs the dispatcher of {state}, or a command uses its state",
                    hint="stop it first, or give this one a state of its own",
                )
            time.sleep(_LOOK)
        yield
    finally:
        lock.close()


def letters_to_retry(state: Path) -> list[str]:
    """Return the ids of the dead letters to be retried at the next start."""
    with storage_errors("reading", str(state / _AGAIN)):
        try:
            return [str(id) for id in json.loads((state / _AGAIN).read_bytes())]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            log.warning("%s is damaged, and left out: %s", state / _AGAIN, error)
            return []


def save_letters_to_retry(state: Path, ids: list[str]) -> None:
    """Schedule dead letters to be retried at the next start.

    :raises StorageError: the operating system refuses.
    """
    save_notes(state / _AGAIN, json.dumps(ids).encode(), sync=True)


#: Readers remove nothing.
_ALL = Limits(dead=1 << 60)
#: Dead letters per request: a request is limited in size and time.
_AT_ONCE: Final = 5000


def find_place(path: Path) -> Place:
    """Return the dispatcher of a bus.yaml or of a state folder.

    :raises NotFound: no dispatcher has run there yet.
    :raises ConfigError: the file is invalid.
    """
    state = path if path.is_dir() else load_bus(path).state
    name = state / NAME_FILE
    with storage_errors("reading", str(name)):
        try:
            said = json.loads(name.read_bytes())
            return Place(state, str(said["dispatcher"]), str(said["authority"]))
        except FileNotFoundError:
            raise NotFound(
                f"no dispatcher has run with the state {state} yet",
                hint="give its bus.yaml or the folder of its state",
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise Malformed(str(name), "the name", "JSON of this program", error) from error


@dataclass(frozen=True, slots=True)
class Place:
    """The state of a dispatcher, through its socket while it runs, else through its files."""

    state: Path
    dispatcher: str
    authority: str

    def _either(self, question: dict[str, Any], alone: Callable[[], Any]) -> tuple[Any, bool]:
        """Ask the running dispatcher, or use the files; return the result and which it was."""
        try:
            with state_lock(self.state):
                return alone(), False
        except LockTimeout:
            return ask(self.state, question), True

    def status(self) -> dict[str, Any]:
        """Return the full status, ready for JSON.

        :raises PenstockError: it does not answer, or its files are invalid.
        """
        found: dict[str, Any]
        found, _ = self._either({"command": "status"}, self._look)
        return found

    def _look(self) -> dict[str, Any]:
        with Dispatcher(
            self.authority, self.state, [], routes=Routes(), limits=_ALL, threads=False
        ) as dispatcher:
            return {
                "dispatcher": self.dispatcher,
                "authority": self.authority,
                "is_running": False,
                "legs": {},
                **described(dispatcher),
            }

    # --- topics -----------------------------------------------------------------------------------

    def stop_topic(self, topic: UUri, receiver: UUri, *, queue: bool) -> tuple[bool, bool]:
        """Stop a topic; return whether its deliveries ended, and whether the dispatcher runs.

        :raises PenstockError: it does not answer, or the file cannot be written.
        """
        question = {
            "command": "stop",
            "topic": str(topic),
            "receiver": str(receiver),
            "queue": queue,
        }
        stop = Stop(topic, receiver, queue)
        ended, runs = self._either(question, lambda: self._switches().stop(stop))
        return ended is not False, runs

    def start_topic(self, topic: UUri, receiver: UUri) -> tuple[bool, bool]:
        """Resume a topic; return whether it was stopped, and whether the dispatcher runs.

        :raises PenstockError: it does not answer, or the file cannot be written.
        """
        question = {"command": "start", "topic": str(topic), "receiver": str(receiver)}
        was, runs = self._either(question, lambda: self._switches().start(topic, receiver))
        return bool(was), runs

    def _switches(self) -> Switches:
        return Switches(self.state / "switches")

    # --- dead letters -----------------------------------------------------------------------------

    def letters(self) -> DeadLetters:
        """Return the dead letters, read-only.

        :raises NotFound: the log of dead letters does not exist.
        """
        return DeadLetters(self.state / "dead", writable=False)

    def strays(self) -> Iterator[Stray]:
        """Yield the undecodable messages, the oldest first."""
        return strays(self.state / QUARANTINE)

    def retry(self, letters: Sequence[Letter]) -> bool:
        """Retry dead letters, now or at the next start; return whether the dispatcher runs.

        :raises Unsupported: only the header of a letter was kept; none is retried.
        :raises PenstockError: the dispatcher rejects a letter; those before it are retried.
        """
        for letter in letters:
            if letter.original is None:
                raise Unsupported(
                    f"only the header of the dead letter {letter.id} was kept",
                    hint="its sender has to send it again",
                )

        def later(some: Sequence[Letter]) -> None:
            waiting = letters_to_retry(self.state)
            ids = [str(letter.id) for letter in some]
            save_letters_to_retry(self.state, [*dict.fromkeys([*waiting, *ids])])

        return self._each("retry", letters, later)

    def drop(self, letters: Sequence[Letter]) -> bool:
        """Delete dead letters; return whether the dispatcher runs.

        :raises PenstockError: it does not answer, or the file cannot be written.
        """
        return self._each("drop", letters, lambda some: self.letters().drop(some))

    def _each(
        self, command: str, letters: Sequence[Letter], alone: Callable[[Sequence[Letter]], None]
    ) -> bool:
        """Apply a request to letters in batches; return whether the dispatcher runs."""
        runs = False
        for at in range(0, len(letters), _AT_ONCE):
            some = letters[at : at + _AT_ONCE]
            question = {
                "command": command,
                "ids": [str(letter.id) for letter in some],
                "from": min(letter.number for letter in some),
            }
            _, runs = self._either(question, functools.partial(alone, some))
        return runs
