"""How is a command run for a new file, and ended when it takes too long?

No shell is involved: each word of the command is one argument, in which fields are replaced by the
file's path and times.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, PenstockError
from penstock.core.supervision import NotStarted, Process, describe_status
from penstock.core.units import format_duration, format_time
from penstock.registry.latest_files import relative_path
from penstock.registry.triggers import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.registry.triggers import NewData

__all__ = ["FIELDS", "Command", "CommandFailed", "CommandTimeout"]

#: The fields of words, and their values.
FIELDS: Final[dict[str, Callable[[NewData], str]]] = {
    "path": lambda new: new.path,
    "rel": lambda new: relative_path(new.info, new.directory),
    "dir": lambda new: new.directory,
    "ext": lambda new: new.info.file_ext,
    "time": lambda new: format_time(new.info.latest_time * 1_000_000_000),
    "unix": lambda new: str(new.info.latest_time),
    "valid": lambda new: format_time(new.info.time_ns),
    "lead": lambda new: str(new.info.forecast_lead_secs),
    "type": lambda new: new.info.data_type,
    "writer": lambda new: new.info.writer_name,
    "user1": lambda new: new.info.first_info,
    "user2": lambda new: new.info.second_info,
    "seq": lambda new: str(new.seq),
}

_FIELD: Final = re.compile(r"\{\{|\}\}|\{([a-z0-9]*)\}|[{}]")
#: Seconds between two checks for a stop.
_LOOK: Final = 0.2


class CommandFailed(PenstockError):
    """A command ended with a status other than 0, or could not be started."""

    def __init__(self, command: str, status: int | str, *, hint: str | None = None) -> None:
        how = f"ended with status {status}" if isinstance(status, int) else status
        super().__init__(f"{command} {how}", hint=hint)
        self.command = command
        self.status = status


class CommandTimeout(CommandFailed, TimeoutError):
    """A command took longer than allowed, and was ended."""


class Command:
    """A command to run for each new file.

    A run that takes longer than `timeout` seconds is ended, with all processes it started. When
    the trigger stops, the current run has `grace` seconds to finish.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        timeout: float | None = None,
        grace: float = 5.0,
        stop: Callable[[], bool] = lambda: False,
        output: int | None = None,
    ) -> None:
        """Check the words.

        :raises InvalidOption: there are no words, or one has an unknown field.
        """
        if not words:
            raise InvalidOption("command", "", "is empty", hint="penstock on DIR -- COMMAND {path}")
        for word in words:
            _filled(word, dict.fromkeys(FIELDS, ""))
        self._words = tuple(words)
        self._timeout = timeout
        self._grace = grace
        self._stop = stop
        self._output = output

    def arguments(self, new: NewData) -> list[str]:
        """Return the arguments for one file.

        :raises NotFound: the path is used, and the file does not exist.
        """
        return [_filled(word, new) for word in self._words]

    def __call__(self, new: NewData) -> None:
        """Run the command for one file.

        :raises CommandFailed: it ended with a status other than 0, or took too long.
        :raises Stopped: it was ended because the trigger stops.
        """
        arguments = self.arguments(new)
        name = os.path.basename(arguments[0])  # noqa: PTH119 - for people
        try:
            process = Process(arguments, stdout=self._output)
        except NotStarted as error:
            raise CommandFailed(name, error.reason, hint=error.hint) from error
        try:
            status = self._wait(process, name)
        except BaseException:
            process.end(self._grace)
            raise
        finally:
            process.close()
        if status:
            raise CommandFailed(name, status if status > 0 else describe_status(status))

    def _wait(self, process: Process, name: str) -> int:
        began = time.monotonic()
        stopping: float | None = None
        look = _LOOK if self._timeout is None else min(_LOOK, self._timeout)
        while (status := process.wait(look)) is None:
            now = time.monotonic()
            if self._timeout is not None and now - began > self._timeout:
                allowed = format_duration(self._timeout)
                raise CommandTimeout(name, f"took longer than {allowed}, and was ended")
            if stopping is None and self._stop():
                stopping = now
            if stopping is not None and now - stopping > self._grace:
                raise Stopped
        return status


def _filled(word: str, values: NewData | dict[str, str]) -> str:
    def fill(found: re.Match[str]) -> str:
        if found[0] in {"{{", "}}"}:
            return found[0][0]
        field = found[1]
        if field not in FIELDS:
            known = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise InvalidOption(
                "command", word, f"{found[0]} is no field", hint=f"{known}; {{{{ for a brace"
            )
        return values[field] if isinstance(values, dict) else FIELDS[field](values)

    return _FIELD.sub(fill, word)
