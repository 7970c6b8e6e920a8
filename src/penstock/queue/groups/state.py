"""What does a group know, and which records change it?"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss, LossLedger
from penstock.queue.groups.settled import NOBODY, SettledMap, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Ending",
    "GroupState",
    "Join",
    "Leave",
    "Member",
    "Put",
    "Record",
    "Renumber",
    "Restart",
    "Settle",
]

#: Kind; then by kind: member and until, ending, member with pid and time, epoch and number.
_PUT: Final = struct.Struct("<BiQ")
_SETTLE: Final = struct.Struct("<BB")
_JOIN: Final = struct.Struct("<BiIQ")
_LEAVE: Final = struct.Struct("<Bi")
_EPOCH: Final = struct.Struct("<BQQ")
#: First, end, deliveries and key of a span; first and end of a range.
_SPAN: Final = struct.Struct("<QQIQ")
_RANGE: Final = struct.Struct("<QQ")


class Ending(enum.IntEnum):
    """How a message was settled."""

    ACKED = 1
    #: It is in the dead-letter stream.
    DEAD = 2
    #: The stream no longer has it.
    OVERRUN = 3
    RETENTION = 4
    RECREATED = 5
    #: Its bytes fail their check.
    DAMAGED = 6

    @property
    def loss(self) -> DropReason | None:
        """The reason of the loss; None: not a loss."""
        return _LOSSES.get(self)

    @classmethod
    def of(cls, reason: DropReason) -> Ending:
        """Return the ending of a message that is lost for this reason."""
        return next((ending for ending, loss in _LOSSES.items() if loss is reason), cls.OVERRUN)


_LOSSES: Final = {
    Ending.OVERRUN: DropReason.OVERRUN,
    Ending.RETENTION: DropReason.RETENTION,
    Ending.RECREATED: DropReason.RECREATED,
    Ending.DAMAGED: DropReason.DAMAGED,
}

#: By number: faster than `Ending(…)`.
_ENDINGS: Final = {int(ending): ending for ending in Ending}


class Member(NamedTuple):
    """A reader of a group: its process, and when it joined."""

    pid: int
    joined_ns: int


# --- records that change the state -----------------------------------------------------------
#
# A record is applied from its bytes, by the member that made it as by all others.


class Put(NamedTuple):
    """Spans are leased to `member`, or wait (`NOBODY`), until the time `until`."""

    member: int
    until: int
    #: First, end, deliveries and key of each.
    spans: Sequence[tuple[int, int, int, int]]

    def encode(self) -> bytes:
        spans = b"".join([_SPAN.pack(*span) for span in self.spans])
        return _PUT.pack(_PUT_KIND, self.member, self.until) + spans

    @staticmethod
    def apply(body: bytes, state: GroupState) -> None:
        _, member, until = _PUT.unpack_from(body)
        for first, end, deliveries, key in _SPAN.iter_unpack(body[_PUT.size :]):
            if deliveries > 1 or member == NOBODY:
                # `more` is negative for a lease that was returned undelivered.
                for part in state.map.within(first, end):
                    more = max(deliveries, 1) - max(part.deliveries, 1)
                    state.redelivered += part.size * more
            state.map.put(Span(first, end, deliveries, member, until, key))


class Settle(NamedTuple):
    """Ranges (first, end) are settled."""

    ending: Ending
    ranges: Sequence[tuple[int, int]]

    def encode(self) -> bytes:
        ranges = b"".join([_RANGE.pack(*pair) for pair in self.ranges])
        return _SETTLE.pack(_SETTLE_KIND, self.ending) + ranges

    @staticmethod
    def apply(body: bytes, state: GroupState) -> None:
        ending = _ENDINGS[body[1]]
        loss = ending.loss
        for first, end in _RANGE.iter_unpack(body[_SETTLE.size :]):
            state.map.settle(first, end)
            state.settled[ending] += end - first
            if loss is not None:
                state.losses.add(Loss(first, end - 1, loss))


class Join(NamedTuple):
    """A process opened a reader of the group."""

    member: int
    pid: int
    joined_ns: int

    def encode(self) -> bytes:
        return _JOIN.pack(_JOIN_KIND, *self)

    @staticmethod
    def apply(body: bytes, state: GroupState) -> None:
        _, member, pid, joined_ns = _JOIN.unpack(body)
        state.members[member] = Member(pid, joined_ns)


class Leave(NamedTuple):
    """A member closed its reader, or its process died. It holds no leases any more."""

    member: int

    def encode(self) -> bytes:
        return _LEAVE.pack(_LEAVE_KIND, *self)

    @staticmethod
    def apply(body: bytes, state: GroupState) -> None:
        _, member = _LEAVE.unpack(body)
        state.members.pop(member, None)


class Renumber(NamedTuple):
    """The stream continues in a new epoch, which reuses numbers from `cut` on."""

    epoch: int
    cut: int

    def encode(self) -> bytes:
        return _EPOCH.pack(_RENUMBER_KIND, *self)

    @staticmethod
    def apply(body: bytes, state: GroupState) -> None:
        _, state.epoch, cut = _EPOCH.unpack(body)
        state.reverted += state.map.cut(cut)


class Restart(NamedTuple):
    """The stream was recreated, and starts at `first`."""

    epoch: int
    first: int

    def encode(self) -> bytes:
        return _EPOCH.pack(_RESTART_KIND, *self)

    @staticmethod
    def apply(body: bytes, state: GroupState) -> None:
        _, state.epoch, first = _EPOCH.unpack(body)
        state.map = SettledMap(first)
        state.restarts += 1


Record: TypeAlias = Put | Settle | Join | Leave | Renumber | Restart
#: Indexed by kind, the first byte of a record.
_RECORDS: Final[tuple[type[Record], ...]] = (Put, Settle, Join, Leave, Renumber, Restart)
_PUT_KIND, _SETTLE_KIND, _JOIN_KIND, _LEAVE_KIND, _RENUMBER_KIND, _RESTART_KIND = range(6)


# --- the state -------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupState:
    """The state that the members of a group share."""

    #: The epoch of the stream that the sequence numbers belong to.
    epoch: int
    map: SettledMap
    #: The message field that orders delivery; None: no order by key.
    key: str | None = None
    members: dict[int, Member] = field(default_factory=dict)
    #: Count of settled messages by ending.
    settled: dict[Ending, int] = field(default_factory=lambda: dict.fromkeys(Ending, 0))
    redelivered: int = 0
    reverted: int = 0
    restarts: int = 0
    losses: LossLedger = field(default_factory=LossLedger)

    def apply(self, body: bytes) -> None:
        """Apply a record.

        :raises ValueError: the bytes are no record.
        """
        try:
            _RECORDS[body[0]].apply(body, self)
        except (struct.error, LookupError) as error:
            raise ValueError(f"no record of a group: {error}") from None

    def to_json(self) -> bytes:
        """Encode the state for a checkpoint."""
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "next": self.map.next,
            "spans": self.map.spans,
            "key": self.key,
            "members": {str(index): member for index, member in self.members.items()},
            "settled": {ending.name.lower(): count for ending, count in self.settled.items()},
            "redelivered": self.redelivered,
            "reverted": self.reverted,
            "restarts": self.restarts,
            "lost": self.losses.total,
            "losses": [(loss.first, loss.last, loss.reason) for loss in self.losses.ranges()],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> GroupState:
        """Decode the output of `to_json`.

        :raises ValueError: the text is no state of a group.
        """
        try:
            fields = json.loads(text)
            losses = LossLedger()
            for first, last, reason in fields["losses"]:
                losses.add(Loss(first, last, DropReason(reason)))
            losses.total = fields["lost"]
            return cls(
                epoch=fields["epoch"],
                map=SettledMap(fields["next"], (Span(*span) for span in fields["spans"])),
                key=fields["key"],
                members={int(i): Member(*member) for i, member in fields["members"].items()},
                settled={ending: fields["settled"][ending.name.lower()] for ending in Ending},
                redelivered=fields["redelivered"],
                reverted=fields["reverted"],
                restarts=fields["restarts"],
                losses=losses,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no state of a group: {error!r}") from None
