"""What can be asked of a group in a URL?"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from penstock.core.errors import InvalidOption
from penstock.core.options import Duration, Options
from penstock.queue.options import SyncOption  # noqa: TC001 - pydantic reads it

__all__ = ["GROUP_OPTIONS", "GroupOptions"]

#: Options that a reader has with `group=` only.
GROUP_OPTIONS: Final = frozenset({"lease", "key", "deliveries", "dead"})


class GroupOptions(Options):
    """Options of a stream whose readers may share its messages."""

    #: Reader: the group that it is a member of.
    group: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None
    ) = None
    #: Group: how long a member may keep a message before another gets it.
    lease: Annotated[Duration, Field(gt=0)] = 30.0
    #: Group: messages with the same value of this field are delivered in order.
    key: Literal["type", "subtype", "stream", "attributes"] | None = None
    #: Group: so many times a message is delivered, and then it goes to `dead`.
    deliveries: Annotated[int, Field(ge=1)] | None = None
    #: Group: the URL of the dead-letter stream.
    dead: str | None = None
    #: What is settled is brought to the disk as messages are: `none`, `batch`, or a time between.
    sync: SyncOption = "none"

    def check_group(self, *refused: str) -> None:
        """Make sure that the options of a reader fit each other.

        :raises InvalidOption: they do not.
        """
        given = self.model_fields_set
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
        """Make sure that a group keeps the order that this member asks for.

        :raises InvalidOption: it keeps another.
        """
        if self.key != key:
            raise InvalidOption(
                "key",
                self.key,
                f"the group {self.group} has key={key}" if key else f"{self.group} has none",
                hint="all members of a group give the same key=",
            )
