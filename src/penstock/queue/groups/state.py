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
    "decode",
    "encode",
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
    #: The stream has it no more.
    OVERRUN = 3
    RETENTION = 4
    RECREATED = 5
    #: Its bytes are not those that were written.
    DAMAGED = 6

    @property
    def loss(self) -> DropReason | None:
        """The reason of a loss; None: it was none."""
        return _LOSSES.get(self)

    @classmethod
    def of(cls, reason: DropReason) -> Ending:
        """Return how a message ends that is lost for this reason."""
        return next((ending for ending, loss in _LOSSES.items() if loss is reason), cls.OVERRUN)


_LOSSES: Final = {
    Ending.OVERRUN: DropReason.OVERRUN,
    Ending.RETENTION: DropReason.RETENTION,
    Ending.RECREATED: DropReason.RECREATED,
    Ending.DAMAGED: DropReason.DAMAGED,
}


class Member(NamedTuple):
    """A reader of a group: a process and when it joined."""

    pid: int
    joined_ns: int


# --- what changes it -------------------------------------------------------------------------


class Put(NamedTuple):
    """Spans are leased to a member until a moment, or wait until then (`NOBODY`)."""

    member: int
    until: int
    #: First, end, deliveries and key of each.
    spans: Sequence[tuple[int, int, int, int]]


class Settle(NamedTuple):
    """Ranges (first, end) are settled."""

    ending: Ending
    ranges: Sequence[tuple[int, int]]


class Join(NamedTuple):
    """A process opened a reader of the group."""

    member: int
    pid: int
    joined_ns: int


class Leave(NamedTuple):
    """A member closed its reader, or its process is gone. It has nothing leased by then."""

    member: int


class Renumber(NamedTuple):
    """The stream goes on in a new epoch: numbers from `cut` on are given again."""

    epoch: int
    cut: int


class Restart(NamedTuple):
    """The stream was created anew, and begins with `first`."""

    epoch: int
    first: int


Record: TypeAlias = Put | Settle | Join | Leave | Renumber | Restart
_KINDS: Final[tuple[type[Record], ...]] = (Put, Settle, Join, Leave, Renumber, Restart)


def encode(record: Record) -> bytes:
    """Return the bytes of a record."""
    kind = _KINDS.index(type(record))
    match record:
        case Put(member, until, spans):
            return _PUT.pack(kind, member, until) + b"".join([_SPAN.pack(*s) for s in spans])
        case Settle(ending, ranges):
            return _SETTLE.pack(kind, ending) + b"".join([_RANGE.pack(*r) for r in ranges])
        case Join():
            return _JOIN.pack(kind, *record)
        case Leave():
            return _LEAVE.pack(kind, *record)
        case _:
            return _EPOCH.pack(kind, *record)


def decode(body: bytes) -> Record:
    """Return the record that these bytes are.

    :raises ValueError: they are none.
    """
    try:
        match _KINDS[body[0]]:
            case kind if kind is Put:
                _, member, until = _PUT.unpack_from(body)
                return Put(member, until, list(_SPAN.iter_unpack(body[_PUT.size :])))
            case kind if kind is Settle:
                ending = Ending(_SETTLE.unpack_from(body)[1])
                return Settle(ending, list(_RANGE.iter_unpack(body[_SETTLE.size :])))
            case kind if kind is Join:
                return Join(*_JOIN.unpack(body)[1:])
            case kind if kind is Leave:
                return Leave(*_LEAVE.unpack(body)[1:])
            case kind:
                return kind(*_EPOCH.unpack(body)[1:])
    except (struct.error, IndexError) as error:
        raise ValueError(f"no record of a group: {error}") from None


# --- what it is ------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupState:
    """All that the members of a group share."""

    #: The epoch of the stream that the numbers count in.
    epoch: int
    map: SettledMap
    #: The field of a message that orders it; None: none does.
    key: str | None = None
    members: dict[int, Member] = field(default_factory=dict)
    #: How many messages were settled how.
    settled: dict[Ending, int] = field(default_factory=lambda: dict.fromkeys(Ending, 0))
    redelivered: int = 0
    reverted: int = 0
    restarts: int = 0
    losses: LossLedger = field(default_factory=LossLedger)

    def apply(self, record: Record) -> None:
        """Change it as a record says."""
        match record:
            case Put():
                self._put(record)
            case Settle():
                self._settle(record)
            case Join(index, pid, joined_ns):
                self.members[index] = Member(pid, joined_ns)
            case Leave(index):
                self.members.pop(index, None)
            case Renumber(epoch, cut):
                self.epoch = epoch
                self.reverted += self.map.cut(cut)
            case Restart(epoch, first):
                self.epoch = epoch
                self.map = SettledMap(first)
                self.restarts += 1

    def _put(self, record: Put) -> None:
        member, until, spans = record
        for first, end, deliveries, key in spans:
            if deliveries > 1 or member == NOBODY:
                # What was leased again, and not delivered after all, is taken back.
                for part in self.map.within(first, end):
                    more = max(deliveries, 1) - max(part.deliveries, 1)
                    self.redelivered += part.size * more
            self.map.put(Span(first, end, deliveries, member, until, key))

    def _settle(self, record: Settle) -> None:
        for first, end in record.ranges:
            self.map.settle(first, end)
            self.settled[record.ending] += end - first
            if record.ending.loss is not None:
                self.losses.add(Loss(first, end - 1, record.ending.loss))

    def to_json(self) -> bytes:
        """Return it as the content of a checkpoint."""
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
        """Return what `to_json` wrote.

        :raises ValueError: it is not that.
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
