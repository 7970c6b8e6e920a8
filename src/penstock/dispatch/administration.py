"""What can a person do with a dispatcher, whether it runs or not?"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import LockTimeout, Malformed, NotFound, Unsupported
from penstock.dispatch.config import load_bus
from penstock.dispatch.control import ask
from penstock.dispatch.dead_letters import DeadLetters
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.quarantine import QUARANTINE, strays
from penstock.dispatch.reports import described
from penstock.dispatch.routing import Routes
from penstock.dispatch.running import (
    NAME_FILE,
    letters_to_retry,
    save_letters_to_retry,
    state_lock,
)
from penstock.dispatch.settings import Limits
from penstock.dispatch.switches import Stop, Switches
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.dispatch.letters import Letter
    from penstock.dispatch.quarantine import Stray
    from penstock.protocols.uprotocol import UUri

__all__ = ["Place", "find_place"]

#: Who only looks removes nothing.
_ALL = Limits(dead=1 << 60)
#: Dead letters that a dispatcher is asked about at a time: a question has its limits, and its time.
_AT_ONCE: Final = 5000


def find_place(path: Path) -> Place:
    """Return the dispatcher of a bus.yaml or of a state folder.

    :raises NotFound: none ran there yet.
    :raises ConfigError: the file is not right.
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
    """The state of a dispatcher. One that runs is asked; otherwise the files are used."""

    state: Path
    dispatcher: str
    authority: str

    def _either(self, question: dict[str, Any], alone: Callable[[], Any]) -> tuple[Any, bool]:
        """Ask the one that runs, or do it alone; tell which it was."""
        try:
            with state_lock(self.state):
                return alone(), False
        except LockTimeout:
            return ask(self.state, question), True

    def status(self) -> dict[str, Any]:
        """Return all there is to know, ready for JSON.

        :raises PenstockError: it does not answer, or its files are not right.
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

    def stop_topic(self, topic: UUri, receiver: UUri, *, queue: bool) -> bool:
        """Stop a topic; return whether the dispatcher runs.

        :raises PenstockError: it does not answer, or the file cannot be written.
        """
        question = {
            "command": "stop",
            "topic": str(topic),
            "receiver": str(receiver),
            "queue": queue,
        }
        stop = Stop(topic, receiver, queue)
        return self._either(question, lambda: self._switches().stop(stop))[1]

    def start_topic(self, topic: UUri, receiver: UUri) -> tuple[bool, bool]:
        """Start a topic again; return whether it was stopped, and whether the dispatcher runs.

        :raises PenstockError: it does not answer, or the file cannot be written.
        """
        question = {"command": "start", "topic": str(topic), "receiver": str(receiver)}
        was, runs = self._either(question, lambda: self._switches().start(topic, receiver))
        return bool(was), runs

    def _switches(self) -> Switches:
        return Switches(self.state / "switches")

    # --- dead letters -----------------------------------------------------------------------------

    def letters(self) -> DeadLetters:
        """Return the dead letters, to look at.

        :raises NotFound: there are none.
        """
        return DeadLetters(self.state / "dead", writable=False)

    def strays(self) -> Iterator[Stray]:
        """Yield the bytes that came and could not be decoded, the oldest first."""
        return strays(self.state / QUARANTINE)

    def retry(self, letters: Sequence[Letter]) -> bool:
        """Deliver the messages of dead letters again, or at the next start; return whether it runs.

        :raises Unsupported: of one only the header was kept; then none is tried.
        :raises PenstockError: the dispatcher does not take one; those before it are on their way.
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
        """Let dead letters be gone; return whether the dispatcher runs.

        :raises PenstockError: it does not answer, or the file cannot be written.
        """
        return self._each("drop", letters, lambda some: self.letters().drop(some))

    def _each(
        self, command: str, letters: Sequence[Letter], alone: Callable[[Sequence[Letter]], None]
    ) -> bool:
        """Have something done with letters, some at a time; return whether the dispatcher runs."""
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
