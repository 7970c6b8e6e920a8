"""How does another process of this machine ask a running dispatcher something?

Through a socket in its state folder, which only its own user can open: one line of JSON, and one
line back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import ConnectionLost, NotFound, PenstockError
from penstock.protocols.server import Conversation, Limits, Server, listen_unix
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.protocols.connection import Connection

__all__ = ["ControlServer", "ask"]

log = logging.getLogger(__name__)

_NAME: Final = "control"
_LARGEST_QUESTION: Final = 1 << 20
#: Questions at the same time; they are answered one after the other.
_MOST_AT_ONCE: Final = 32
_LARGEST_ANSWER: Final = 64 << 20
#: Seconds that somebody has to say what he wants.
_PATIENCE: Final = 5.0


class ControlServer:
    """Answers others for as long as it is open."""

    def __init__(self, state: Path, answer: Callable[[dict[str, Any]], Any]) -> None:
        """Begin to answer.

        :param answer: makes the answer to a question; what it raises is told
        :raises StorageError: the operating system refuses.
        """
        self._path = state / _NAME
        self._answer = answer
        self._answering = threading.Lock()
        with storage_errors("opening", str(self._path)):
            # Whoever has the state's lock is the only one: this is of somebody who died.
            self._path.unlink(missing_ok=True)
        self._server = Server(
            "dispatch control",
            listen_unix(self._path),
            lambda connection: Conversation(connection, self._serve),
            Limits(max_clients=_MOST_AT_ONCE, first_message=_PATIENCE, stalled=_PATIENCE),
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
        """Answer no more."""
        self._server.stop()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _question(connection: Connection) -> bytes:
    """Receive a line, all of it in the time for a first message."""
    said = bytearray()
    view = memoryview(bytearray(1 << 16))
    while not said.endswith(b"\n"):
        count = connection.receive(view)
        said += view[:count]
        if not count or len(said) > _LARGEST_QUESTION:
            raise ValueError("the line has no end")
    return bytes(said)


def ask(state: Path, question: dict[str, Any], timeout: float = 30.0) -> Any:
    """Ask the dispatcher whose state this is, and return its answer.

    :raises NotFound: what was asked for is not there.
    :raises ConnectionLost: nobody answers.
    :raises PenstockError: it says no, and why.
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
    """Receive a line, all of it within so many seconds."""
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
    """Give a path to the socket that is short, however long the folder's is: 107 bytes at most."""
    folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{_NAME}"
    finally:
        os.close(folder)
