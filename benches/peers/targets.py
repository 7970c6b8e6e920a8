"""Which of the targets are reached?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from peers.contract import FILE, MEMORY
from peers.lineup import (
    ICEORYX,
    ICEORYX_EVENT,
    ICEORYX_IN_PLACE,
    JETSTREAM_PULL,
    JETSTREAM_PUSH,
    LOG,
    REDIS_XREAD,
    RING,
)
from peers.queues import Form
from peers.results import FAN_OUT, LATENCY, REPLAY, SIZES, arrow_case
from peers.wording import measured, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.results import Figure, Results

__all__ = ["Target", "targets"]

SMALL = (SIZES[64], SIZES[1024])

#: The two forms of the batch API, of a ring and of a log, and all forms of a ring.
_BATCH = (RING[Form.LISTS], RING[Form.ARROW])
_LOG = (LOG[Form.LISTS], LOG[Form.ARROW])
_ICEORYX = (ICEORYX, ICEORYX_IN_PLACE)
_ALL = (RING[Form.SINGLE], *_BATCH, RING[Form.IN_PLACE])


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio that is wanted, and the one that was found."""

    what: str
    against: str
    wanted: float
    #: The two figures, ours first; None if it was not measured.
    found: tuple[Figure, Figure] | None
    #: Latency: smaller is better.
    at_most: bool = False

    @property
    def ratio(self) -> float | None:
        if self.found is None:
            return None
        ours, theirs = (figure.value for figure in self.found)
        return None if ours is None or theirs is None else ours / theirs

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        reached = self.ratio <= self.wanted if self.at_most else self.ratio >= self.wanted
        return "reached" if reached else "not reached"

    @property
    def limit(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {times(self.wanted)}"

    @property
    def figures(self) -> str:
        """Say what both sides reached, and which form was ours."""
        if self.found is None or self.ratio is None:
            return ""
        ours, theirs = self.found
        _, _, form = ours.name.partition(": ")
        named = not form or ours.name in self.what
        return f"{measured(ours)}{'' if named else f' ({form})'} / {measured(theirs)}"


def targets(results: Results) -> list[Target]:
    """Hold what was measured against what is wanted, from one run."""
    judge = _Judge(results)
    single, in_place = (RING[Form.SINGLE],), (RING[Form.IN_PLACE],)
    return [
        *(judge.rate(case, single, [ICEORYX], MEMORY, 8) for case in SMALL),
        *(judge.rate(case, single, ["pyzmq"], "ipc", 3) for case in SMALL),
        *(judge.rate(case, _BATCH, [ICEORYX], MEMORY, 12) for case in SMALL),
        # Where ours may be in place, so may theirs, and the better of theirs counts.
        judge.rate(SIZES[64 << 10], in_place, _ICEORYX, MEMORY, 1.5),
        judge.rate(SIZES[1 << 20], in_place, _ICEORYX, MEMORY, 1.0),
        judge.rate(FAN_OUT, _ALL, _ICEORYX, MEMORY, 6),
        judge.delay(Form.POLLED, ICEORYX, 0.7),
        judge.delay(Form.SLEEPING, ICEORYX_EVENT, 0.6),
        *(judge.file(form, 0.9) for form in (Form.SINGLE, Form.LISTS, Form.ARROW)),
        *(judge.arrow(size, 0.7) for size in (1 << 10, 64 << 10)),
        *(judge.replay(ours, (REDIS_XREAD,), 5) for ours in (_BATCH, _LOG)),
        *(judge.replay(ours, (JETSTREAM_PUSH, JETSTREAM_PULL), 20) for ours in (_BATCH, _LOG)),
    ]


class _Judge:
    """Finds the figures that a target is about. Where several count, the best does."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def rate(
        self, case: str, ours: Sequence[str], theirs: Sequence[str], storage: str, wanted: float
    ) -> Target:
        name = {1: ours[0], len(_BATCH): "wide ring, batches"}.get(len(ours), "wide ring")
        found = self._pair(self._best(case, ours, MEMORY), self._best(case, theirs, storage))
        return Target(f"{name}, {case}", f"{theirs[0]}, {storage}", wanted, found)

    def delay(self, form: Form, theirs: str, wanted: float) -> Target:
        found = self._pair(
            self._best(LATENCY, [RING[form]], MEMORY), self._best(LATENCY, [theirs], MEMORY)
        )
        return Target(f"{RING[form]}, one-way p50", theirs, wanted, found, at_most=True)

    def file(self, form: Form, wanted: float) -> Target:
        case = SIZES[1024]
        found = self._pair(
            self._best(case, [RING[form]], FILE), self._best(case, [RING[form]], MEMORY)
        )
        return Target(f"{RING[form]} in a file, {case}", MEMORY, wanted, found)

    def arrow(self, size: int, wanted: float) -> Target:
        case = arrow_case(size)
        found = self._pair(
            self._best(case, ["read_batch"], MEMORY), self._best(case, ["memcpy"], MEMORY)
        )
        return Target(f"wide ring {case}", "memcpy", wanted, found)

    def replay(self, ours: Sequence[str], theirs: Sequence[str], wanted: float) -> Target:
        found = self._pair(self._best(REPLAY, ours, FILE), self._best(REPLAY, theirs, None))
        name = theirs[0] if len(theirs) == 1 else "JetStream"
        kind = ours[0].partition(":")[0]
        return Target(f"{kind}, replay of 1 KiB", name, wanted, found)

    def _best(self, case: str, names: Sequence[str], storage: str | None) -> Figure | None:
        found = [
            figure
            for figure in self._results.of(case)
            if figure.name in names and figure.value and storage in {None, figure.storage}
        ]
        return max(found, key=lambda figure: figure.value or 0.0, default=None)

    @staticmethod
    def _pair(ours: Figure | None, theirs: Figure | None) -> tuple[Figure, Figure] | None:
        return None if ours is None or theirs is None else (ours, theirs)
