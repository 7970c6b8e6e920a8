"""How does what a server sent become messages that wait for the caller?"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import Malformed
from penstock.core.message import Message
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss
from penstock.queue.classic._rows import make_messages
from penstock.queue.classic.compression import decompress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.lrose.fmq_messages import Messages
    from penstock.protocols.lrose.fmq_options import FmqOptions

__all__ = ["Arrivals", "Delivered", "Proof"]

_SECOND: Final = 1_000_000_000
#: Replies that are remembered: a server goes back by some messages at most.
_REMEMBERED: Final = 4


class Proof(NamedTuple):
    """What a message was, to know it again."""

    seq: int
    #: type, subtype, length and time.
    kind: tuple[int, int, int, int]
    payload: bytes

    @classmethod
    def of(cls, messages: Messages, row: int, seq: int) -> Proof:
        kind = (
            messages.types[row],
            messages.subtypes[row],
            messages.uncompressed_lens[row],
            messages.times[row],
        )
        return cls(seq, kind, messages.payloads[row])


class Delivered:
    """What came last, to know it again."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[Sequence[int], Messages]] = deque(maxlen=_REMEMBERED)

    def add(self, messages: Messages, seqs: Sequence[int]) -> None:
        self._blocks.append((seqs, messages))

    def is_same(self, messages: Messages, row: int, seq: int) -> bool | None:
        """Tell whether a message is what came under its number; None: that is not known."""
        for seqs, known in reversed(self._blocks):
            if seqs[0] <= seq <= seqs[-1]:
                place = bisect_left(seqs, seq)
                if seqs[place] == seq:
                    return Proof.of(known, place, seq) == Proof.of(messages, row, seq)
        return None

    def clear(self) -> None:
        self._blocks.clear()


class Arrivals:
    """Messages that came and were not read yet: decompressed, and of the wanted type only."""

    def __init__(self, options: FmqOptions, lose: Callable[[Loss], None]) -> None:
        self._options = options
        self._lose = lose
        self.ready: deque[Message] = deque()
        #: A damaged message behind those that are ready; nothing after it can be read.
        self.failure: Malformed | None = None
        #: Messages of other types that were left out.
        self.filtered = 0

    def clear(self) -> None:
        """Forget what is ready."""
        self.ready.clear()
        self.failure = None

    def hold(self, messages: Messages, seqs: Sequence[int]) -> None:
        """Make messages of what came, and keep them ready."""
        payloads = messages.payloads
        if any(messages.pre_compressed):
            payloads, seqs, messages = self._unpacked(messages, seqs)
        moments, count = messages.times, len(payloads)
        if moments and moments.count(moments[0]) == count:
            times = [moments[0] * _SECOND] * count  # one number for all of them
        else:
            times = [moment * _SECOND for moment in moments]
        made = make_messages(
            Message, list(seqs), times, messages.types, messages.subtypes, payloads
        )
        wanted = self._options.type
        if wanted is None or self._options.filter == "server":
            self.ready.extend(made)
            return
        chosen = [message for message in made if message.type == wanted]
        self.filtered += len(payloads) - len(chosen)
        self.ready.extend(chosen)

    def _unpacked(
        self, messages: Messages, seqs: Sequence[int]
    ) -> tuple[list[bytes], Sequence[int], Messages]:
        """Decompress what is compressed; end before one that is damaged, or leave it out."""
        payloads = list(messages.payloads)
        good: list[int] = []
        for row, is_compressed in enumerate(messages.pre_compressed):
            if is_compressed and payloads[row]:
                try:
                    payloads[row] = self._decompressed(messages, row)
                except Malformed as fault:
                    if self._options.damaged == "fail":
                        fault.hint = "damaged=skip counts it as lost and goes on"
                        self.failure = fault
                        break
                    self._lose(Loss(seqs[row], seqs[row], DropReason.DAMAGED))
                    continue
            good.append(row)
        if len(good) == len(payloads):
            return payloads, seqs, messages
        return [payloads[row] for row in good], [seqs[row] for row in good], messages.chosen(good)

    def _decompressed(self, messages: Messages, row: int) -> bytes:
        said = messages.uncompressed_lens[row]
        payload = decompress(messages.payloads[row], self._options.max_message)
        if len(payload) != said:
            raise Malformed("DsFmq message", "uncompressedLen", len(payload), said)
        return payload
