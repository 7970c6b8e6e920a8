"""Which options has a group in a URL?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from penstock.core.errors import InvalidOption
from penstock.core.units import parse_duration
from penstock.queue.options import (
    QueueOptions,
    Sync,
    choice,
    matching,
    option,
    sync_policy,
    whole,
)

__all__ = ["GROUP_OPTIONS", "GroupOptions"]

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
                "deliveries=N and dead=URL belong together: when, and where to",
            )

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
