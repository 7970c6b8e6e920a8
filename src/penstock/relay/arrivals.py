"""How much of a batch is in the target, when nobody was told?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.capabilities import AppendOnce, Replayable
from penstock.core.closing import Closable
from penstock.core.errors import NotFound, PenstockError
from penstock.core.url import URL
from penstock.relay.patience import side

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader

__all__ = ["Tail", "TargetCut", "arrived", "bounds_of", "check_end"]

#: What of a message has to be the same.
_COMPARED: Final = ("payload", "type", "subtype", "time_ns", "stream", "attributes")
_AT_ONCE: Final = 1000


class Tail(NamedTuple):
    """Where a target ends: the number that its next message gets, in this life of it."""

    epoch: int
    seq: int


class TargetCut(PenstockError):
    """A target has lost messages with its power that were copied to it before."""

    def __init__(self, url: str, missing: int) -> None:
        hint = "with --state they are copied again; otherwise copy them by --from"
        super().__init__(
            f"{url} lost its last {missing:,} messages, which were copied, with the power",
            hint=hint,
        )
        self.url = url
        #: How many it had, and has no more.
        self.missing = missing


def check_end(url: str, bounds: Bounds, tail: Tail) -> int | None:
    """Return the number of `tail` in a target as it is now; None: it was created anew.

    :raises TargetCut: what was before it is not all there.
    """
    start = bounds.successor(tail.epoch, tail.seq)
    if start is None or not bounds.epoch:  # a classic queue does not tell whether it is another
        return start
    if min(start, bounds.end) < tail.seq:
        raise TargetCut(url, tail.seq - min(start, bounds.end))
    return start


def bounds_of(url: str, options: dict[str, str]) -> Bounds | None:
    """Return what a target holds; None where that cannot be told.

    :raises ConnectionLost: its server cannot be reached.
    """
    with _Target(url, options) as target:
        return target.bounds


def arrived(
    url: str,
    options: dict[str, str],
    tail: Tail,
    batch: Batch,
    lacking: Collection[str] = (),
) -> tuple[int, Tail | None]:
    """Return how many messages of a batch are in the target behind `tail`, and where it ends now.

    They are looked for one by one, in order, so that it does not matter who else wrote there.
    `lacking` are the fields that the target does not keep.

    :raises ConnectionLost: its server cannot be reached.
    :raises TargetCut: it has lost what was before `tail`.
    """
    with _Target(url, options) as target:
        bounds = target.bounds
        if bounds is None:
            return 0, None
        now = Tail(bounds.epoch, bounds.end)
        start = check_end(url, bounds, tail)
        if start is None or bounds.end <= start:
            return 0, now
        # What is overwritten by now was there.
        found = min(max(0, bounds.oldest - start), batch.num_rows)
        fields = [name for name in _COMPARED if name not in lacking]
        wanted = list(_rows(batch, fields))
        for row in target.rows(max(start, bounds.oldest), bounds.end, fields):
            if found == len(wanted):
                break
            if row == wanted[found]:
                found += 1
        return found, now


class _Target(Closable):
    """The target, opened for reading for a moment."""

    def __init__(self, url: str, options: dict[str, str]) -> None:
        self._reader: Reader | None = None
        self.bounds: Bounds | None = None
        endpoint = side(url)
        if not isinstance(endpoint, AppendOnce):  # its end cannot be looked at
            return
        try:
            self._reader = endpoint.reread(URL.parse(url, options))
        except NotFound:
            return
        if isinstance(self._reader, Replayable):
            self.bounds = self._reader.bounds()

    def rows(self, start: int, end: int, fields: list[str]) -> Iterator[tuple[object, ...]]:
        assert self._reader is not None
        self._reader.seek(start)
        while batch := self._reader.read_batch(_AT_ONCE, timeout=0):
            yield from _rows(batch, fields)
            if batch.column("seq")[-1].as_py() >= end - 1:
                return

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _rows(batch: Batch, fields: list[str]) -> Iterator[tuple[object, ...]]:
    return zip(*(batch.column(name).to_pylist() for name in fields), strict=True)
