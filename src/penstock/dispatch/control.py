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
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import ConnectionLost, NotFound, PenstockError
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["ControlServer", "ask"]

log = logging.getLogger(__name__)

_NAME: Final = "control"
_LARGEST_QUESTION: Final = 1 << 20
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
        self._state = state
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with storage_errors("opening", str(state / _NAME)), _reachable(state) as path:
            # Whoever has the state's lock is the only one: this is of somebody who died.
            (state / _NAME).unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                self._socket.bind(path)
            finally:
                os.umask(before)
            self._socket.listen(8)
        self._thread = threading.Thread(target=self._run, name="dispatch control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # it is closed
            with connection:
                try:
                    self._serve(connection)
                except OSError as error:
                    log.debug("somebody went away: %s", error)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        try:
            question = json.loads(_line(connection, _LARGEST_QUESTION))
            if not isinstance(question, dict):
                raise PenstockError("a question is a JSON object")  # noqa: TRY301 - told as all are
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
        connection.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # accept returns only then
        self._socket.close()
        self._thread.join()
        with contextlib.suppress(OSError):
            (self._state / _NAME).unlink()


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
            answer = json.loads(_line(connection, _LARGEST_ANSWER))
        except (OSError, ValueError) as error:
            raise ConnectionLost(
                name, str(error), hint="is it about to start or to stop? try again"
            ) from error
    if "error" in answer:
        kind = NotFound if answer.get("is_missing") else PenstockError
        raise kind(answer["error"], hint=answer.get("hint"))
    return answer["answer"]


def _line(connection: socket.socket, largest: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
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
