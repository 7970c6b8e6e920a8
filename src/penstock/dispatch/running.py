"""How does the dispatcher of a bus.yaml run, alone with its state, until it is told to stop?"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any, Final

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.closing import Closable
from penstock.core.errors import InvalidOption, LockTimeout, NotFound, StorageError
from penstock.core.units import format_time
from penstock.dispatch.building import build
from penstock.dispatch.control import ControlServer
from penstock.dispatch.outbox.sidecar import save_notes
from penstock.dispatch.reports import described
from penstock.protocols.uprotocol import UUID7, UUri
from penstock.queue.liveness import LockFile
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.core.clock import Clock
    from penstock.dispatch.building import Bus
    from penstock.dispatch.config import BusConfig
    from penstock.dispatch.letters import Letter

__all__ = ["Running", "letters_to_retry", "save_letters_to_retry", "state_lock"]

log = logging.getLogger(__name__)

_LOCK: Final = "lock"
_LOCKED_BYTE: Final = 1 << 40
_AGAIN: Final = "again"
#: Letters that are not there, of which an error tells the ids.
_NAMED: Final = 10
#: Who uses the state, for those who have only the folder.
NAME_FILE: Final = "dispatcher"


@contextlib.contextmanager
def state_lock(state: Path) -> Iterator[None]:
    """Be the only one who uses a state.

    :raises LockTimeout: somebody does.
    :raises StorageError: the operating system refuses.
    """
    path = state / _LOCK
    with storage_errors("creating", str(path)):
        state.mkdir(parents=True, exist_ok=True)
        path.touch()
    lock = LockFile(str(path))
    try:
        if not lock.try_lock(_LOCKED_BYTE):
            raise LockTimeout(
                f"another process runs the dispatcher of {state}",
                hint="stop it first, or give this one a state of its own",
            )
        yield
    finally:
        lock.close()


def letters_to_retry(state: Path) -> list[str]:
    """Return the ids of the dead letters that are tried again at the next start."""
    with storage_errors("reading", str(state / _AGAIN)):
        try:
            return [str(id) for id in json.loads((state / _AGAIN).read_bytes())]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            log.warning("%s is damaged, and left out: %s", state / _AGAIN, error)
            return []


def save_letters_to_retry(state: Path, ids: list[str]) -> None:
    """Have dead letters tried again at the next start.

    :raises StorageError: the operating system refuses.
    """
    save_notes(state / _AGAIN, json.dumps(ids).encode(), sync=True)


def _save_name(config: BusConfig) -> None:
    """Note down whose state this is, for people; a disk that is full is no reason not to start."""
    name = json.dumps({"dispatcher": config.dispatcher, "authority": config.authority}).encode()
    path = config.state / NAME_FILE
    with contextlib.suppress(OSError):
        if path.read_bytes() == name:
            return
    try:
        save_notes(path, name, sync=False)
    except StorageError as error:
        log.warning("the name of the state is not noted down: %s", error)


class Running(Closable):
    """A dispatcher with threads, a lock on its state, and a socket to ask it by."""

    def __init__(self, config: BusConfig, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Open everything; nothing is received or delivered yet.

        :raises LockTimeout: another process uses the state.
        :raises PenstockError: something cannot be made.
        """
        self.config = config
        self._clock = clock
        self._started_ns = clock.now_ns()
        self._is_stopped = False
        self._control: ControlServer | None = None
        with contextlib.ExitStack() as opened:
            opened.enter_context(state_lock(config.state))
            _save_name(config)
            self.bus: Bus = build(config, clock=clock)
            opened.callback(self.bus.close)
            self._opened = opened.pop_all()

    def start(self) -> None:
        """Begin to receive and to deliver.

        :raises PenstockError: a leg cannot receive.
        """
        self.bus.start()
        self._try_letters_again()
        try:
            self._control = ControlServer(self.config.state, self._answer)
        except StorageError as error:
            # It delivers, and so gives back room; but nobody can ask it.
            log.warning("%s; the dispatcher runs without it until the next start", error)

    def _try_letters_again(self) -> None:
        ids = letters_to_retry(self.config.state)
        if not ids:
            return
        wanted = set(ids)
        dispatcher = self.bus.dispatcher
        letters = [letter for letter in dispatcher.dead_letters if str(letter.id) in wanted]
        dispatcher.retry_dead_letters(
            letters,
            lambda letter, error: log.warning("%s stays a dead letter: %s", letter.id, error),
        )
        save_letters_to_retry(self.config.state, [])

    def status(self) -> dict[str, Any]:
        """Return all there is to know, ready for JSON."""
        return {
            "dispatcher": self.config.dispatcher,
            "authority": self.config.authority,
            "is_running": True,
            "pid": os.getpid(),
            "since": format_time(self._started_ns // 1_000_000_000 * 1_000_000_000),
            "legs": {
                name: {
                    "kind": self.config.legs[name].kind,
                    "authorities": self.config.legs[name].authorities,
                    "is_up": leg.is_up,
                    "counts": dict(leg.statistics()),
                }
                for name, leg in self.bus.legs.items()
            },
            "subscriptions": self.bus.table.count,
            **described(self.bus.dispatcher),
        }

    # --- from outside -----------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> Any:
        dispatcher = self.bus.dispatcher
        commands: dict[str, Callable[[], Any]] = {
            "status": self.status,
            "stop": lambda: dispatcher.stop_topic(
                _address(question, "topic"),
                _address(question, "receiver"),
                queue=bool(question.get("queue", True)),
            ),
            "start": lambda: dispatcher.start_topic(
                _address(question, "topic"), _address(question, "receiver")
            ),
            "retry": lambda: dispatcher.retry_dead_letters(self._letters(question)),
            "drop": lambda: dispatcher.dead_letters.drop(self._letters(question)),
        }
        command = str(question.get("command"))
        if command not in commands:
            raise InvalidOption("command", command, f"should be one of {', '.join(commands)}")
        return commands[command]()

    def _letters(self, question: dict[str, Any]) -> list[Letter]:
        missing = set(_ids(question))
        found: list[Letter] = []
        for letter in self.bus.dispatcher.dead_letters.since(int(question.get("from", 0))):
            if letter.id in missing:
                missing.discard(letter.id)
                found.append(letter)
                if not missing:
                    break
        if missing:
            names = sorted(map(str, missing))[:_NAMED]
            raise NotFound(f"there is no dead letter {', '.join(names)}")
        return found

    # --- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Receive no more, deliver for the seconds of grace, keep the rest."""
        if not self._is_stopped:
            self._is_stopped = True
            if self._control is not None:
                self._control.close()
            self.bus.dispatcher.stop(self.config.grace)

    def close(self) -> None:
        """Stop, and give everything back.

        :raises StorageError: the device refuses.
        """
        self.stop()
        self._opened.close()


def _address(question: dict[str, Any], name: str) -> UUri:
    return UUri.parse(str(question[name])) if name in question else UUri.ANY


def _ids(question: dict[str, Any]) -> list[UUID7]:
    ids = question.get("ids")
    if not isinstance(ids, list):
        raise InvalidOption("ids", ids, "should be a list")
    return [UUID7.parse(str(id)) for id in ids]
