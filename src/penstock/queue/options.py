"""How are the options of queues and logs read from a URL?

Without pydantic, unlike other endpoints: its import would delay short commands.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypeVar

from penstock.core.endpoints import cannot_carry
from penstock.core.errors import InvalidOption
from penstock.core.stream_id import StreamId
from penstock.core.units import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.url import URL

__all__ = [
    "GROUP_OPTIONS",
    "Creation",
    "GroupOptions",
    "QueueOptions",
    "Sync",
    "byte_size",
    "choice",
    "file_mode",
    "flag",
    "held_readers",
    "matching",
    "option",
    "or_none",
    "own_stream",
    "sync_policy",
    "whole",
]

_T = TypeVar("_T")


def option(parse: Callable[[Any], object], default: _T) -> _T:
    """Declare an option: its parser and its default."""
    declared: _T = field(default=default, metadata={"parse": parse})
    return declared


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """Base of the options of a queue or log: one field per option; unknown ones are refused."""

    #: Names of the options that were given.
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def of(cls, url: URL) -> Self:
        """Read the options of a URL.

        :raises InvalidOption: an option is unknown, or its value does not fit.
        """
        known = {one.name: one.metadata["parse"] for one in fields(cls) if one.metadata}
        values = {}
        for name, text in url.options.items():
            if name not in known:
                raise _unknown(url.scheme, name, text, known)
            try:
                values[name] = known[name](text)
            except InvalidOption as error:  # by a unit's parser, which knows its unit only
                raise InvalidOption(name, text, error.reason, hint=error.hint) from None
            except ValueError as error:
                raise InvalidOption(name, text, str(error)) from None
        return cls(given=frozenset(values), **values)


def _unknown(scheme: str, name: str, text: str, known: Mapping[str, object]) -> InvalidOption:
    from penstock.core.options import nearest  # noqa: PLC0415 - loads pydantic

    hint = nearest(name, sorted(known), "known options")
    return InvalidOption(name, text, f"{scheme}: has no such option", hint=hint)


# --- parsers of values ----------------------------------------------------------------------------
# Each parser takes the text of a URL, or the value itself, and raises ValueError.


def whole(least: int | None = None, most: int | None = None) -> Callable[[str | int], int]:
    """Return a parser of a whole number within a range."""

    def parse(value: str | int) -> int:
        try:
            number = int(value) if isinstance(value, str) else operator.index(value)
        except (TypeError, ValueError):
            raise ValueError("should be a whole number") from None
        return _within(number, least, most)

    return parse


def byte_size(least: int, most: int) -> Callable[[str | int], int]:
    """Return a parser of a size in bytes: `4096`, `64k`, `10M` or `1G`."""
    return lambda value: _within(parse_size(value), least, most)


def _within(number: int, least: int | None, most: int | None) -> int:
    if least is not None and number < least:
        raise ValueError(f"should be {least} or more" if most is None else _range(least, most))
    if most is not None and number > most:
        raise ValueError(_range(least, most))
    return number


def _range(least: int | None, most: int) -> str:
    return f"should be from {least} to {most}"


_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def flag(value: str | bool) -> bool:
    """Parse `true` or `false`."""
    try:
        return _FLAGS[str(value).lower()]
    except KeyError:
        raise ValueError("should be true or false") from None


def choice(*values: str) -> Callable[[str], str]:
    """Return a parser of one of these words or members of a StrEnum."""
    known = {str(value): value for value in values}

    def parse(value: str) -> str:
        try:
            return known[value]
        except KeyError:
            raise ValueError(f"should be {_or(list(known))}") from None

    return parse


def _or(words: list[str]) -> str:
    *others, last = (f"'{word}'" for word in words)
    return f"{', '.join(others)} or {last}" if others else last


def matching(pattern: str, reason: str) -> Callable[[str], str]:
    """Return a parser of a text that fully matches a pattern."""

    def parse(value: str) -> str:
        import re  # noqa: PLC0415 - of the few that give it

        if not re.fullmatch(pattern, value):
            raise ValueError(reason)
        return value

    return parse


def or_none(parse: Callable[[Any], _T]) -> Callable[[Any], _T | None]:
    """Return a parser that also accepts `none`: no limit."""
    return lambda value: None if value is None or value == "none" else parse(value)


def held_readers(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Parse the names of readers that a writer waits for."""
    if not isinstance(value, str):
        return value
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise ValueError("is a list of names, as in hold=archive,display")
    return names


def own_stream(value: str | StreamId) -> StreamId:
    """Parse the stream id of messages without one of their own."""
    return StreamId.parse(value) if isinstance(value, str) else value


_MOST_RIGHTS = 0o777


def file_mode(value: str | int) -> int:
    """Parse the permissions of new files: an octal number as of `chmod`."""
    try:
        mode = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        mode = -1
    if not 0 <= mode <= _MOST_RIGHTS:
        raise ValueError("is a number of chmod, as in mode=0640")
    return mode


#: When messages are synced to disk: `none`, `batch` (after every call), or every N seconds.
Sync: TypeAlias = Literal["none", "batch"] | float


def sync_policy(value: str | float) -> Sync:
    """Parse when messages are synced to disk: `none`, `batch`, or an interval."""
    match value:
        case "none" | "batch":
            return value
        case _:
            return parse_duration(value) or "batch"  # no time between is: after every call


class Creation(StrEnum):
    """When a writer creates the queue."""

    #: If it is missing (LROSE's READ_WRITE).
    MISSING = "missing"
    #: Always; an existing queue is emptied (LROSE's CREATE).
    ALWAYS = "always"
    #: Never (LROSE's BLOCKING_READ_WRITE, with `wait`).
    NEVER = "never"


# --- of groups ------------------------------------------------------------------------------------

#: Reader options that require `group=`.
GROUP_OPTIONS: Final = frozenset({"lease", "key", "deliveries", "dead"})


def _lease(value: str | float) -> float:
    seconds = parse_duration(value)
    if seconds == 0:
        raise ValueError("should be more than 0")
    return seconds


_name = matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "should be up to 64 letters, digits and any of ._-"
)


@dataclass(frozen=True, kw_only=True)
class GroupOptions(QueueOptions):
    """Options of a stream whose readers may share its messages."""

    #: Reader: the group to join.
    group: str | None = option(_name, None)
    #: Group: seconds until an unsettled message is redelivered to another member.
    lease: float = option(_lease, 30.0)
    #: Group: messages with the same value of this field are delivered in order.
    key: Literal["type", "subtype", "stream", "attributes"] | None = option(
        choice("type", "subtype", "stream", "attributes"), None
    )
    #: Group: most deliveries of a message, which then moves to `dead`.
    deliveries: int | None = option(whole(1), None)
    #: Group: the URL of the dead-letter stream.
    dead: str | None = option(str, None)
    #: When settled state is synced to disk: `none`, `batch`, or an interval.
    sync: Sync = option(sync_policy, "none")

    def check_group(self, *refused: str) -> None:
        """Check that the options of a reader are consistent.

        :param refused: options that a member of a group cannot have
        :raises InvalidOption: they are not.
        """
        given = self.given
        if self.group is None:
            for option in sorted(GROUP_OPTIONS & given):
                raise InvalidOption(option, getattr(self, option), "is for a group: group=NAME")
            return
        for option in sorted(given.intersection(refused)):
            raise InvalidOption(
                option,
                getattr(self, option),
                "is for readers that are alone: those of a group share all messages",
            )
        if (self.deliveries is None) != (self.dead is None):
            raise InvalidOption(
                "deliveries" if self.dead is None else "dead",
                self.deliveries or self.dead,
                "deliveries=N and dead=URL belong together: how many attempts, and where to then",
            )
        if self.dead is not None and "attributes" in cannot_carry(self.dead):
            from penstock.core.dead_letter import KEEPS_REASONS, NO_REASONS  # noqa: PLC0415 - pydantic

            raise InvalidOption("dead", self.dead, NO_REASONS, hint=KEEPS_REASONS)

    def check_key(self, key: str | None) -> None:
        """Check that this member and its group are ordered by the same `key`.

        :raises InvalidOption: the group has another key.
        """
        if self.key != key:
            raise InvalidOption(
                "key",
                self.key,
                f"the group {self.group} has key={key}" if key else f"{self.group} has none",
                hint="all members of a group give the same key=",
            )
