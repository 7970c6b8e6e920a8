"""Which messages of which sources is a batch made of, and was that delivered before?

The number of a batch does not identify it: after its writer falls back (a checkpoint is restored
from a backup, or loses a file in a power failure), other messages get the same number. So the note
of a batch records where its messages came from.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.core.errors import NotFound, PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.core.batch import Batch

__all__ = [
    "COMPARED",
    "AnotherBatch",
    "Commit",
    "Ends",
    "Known",
    "Noted",
    "Origin",
    "Ranges",
    "Span",
    "Staged",
    "Verdict",
    "ends_after",
    "in_words",
    "judge",
    "ranges_from_json",
    "ranges_to_json",
    "room_for",
    "staged_batches",
]

#: Bytes of a note about earlier batches: some hundred of them, as Spark keeps a hundred.
_MOST_KEPT: Final = 32 << 10
#: A key in ends: there were also batches of unknown ranges.
_UNKNOWN: Final = ""
#: Streams that an error names.
_NAMED: Final = 8


class Span(NamedTuple):
    """Messages `start` to `end` - 1 of one epoch of a stream."""

    epoch: int
    start: int
    end: int
    #: The stream restarted its numbering; classic queues have no epoch.
    is_anew: bool = False


#: By the number of the source in its query and the URL: the same stream may be read twice. Of a
#: source that is not ours, by its number: what it calls the end of the batch.
Ranges = dict[str, Span | str]
#: How far a query has delivered each stream: epoch and end.
Ends = dict[str, tuple[int, int]]


class Origin(NamedTuple):
    """The provenance of a batch."""

    #: None: unknown; then its messages identify the batch.
    ranges: Ranges | None = None
    #: The writer's checkpoint.
    checkpoint: str | None = None
    #: The name of one run of the writer.
    run: str | None = None
    #: The writer lost its name and has a new one: its checkpoint identifies it.
    is_renamed: bool = False


# --- as it is kept --------------------------------------------------------------------------------


def ranges_to_json(ranges: Ranges | None) -> dict[str, Any] | None:
    """Convert ranges to JSON for a note."""
    if ranges is None:
        return None
    return {
        key: span
        if isinstance(span, str)
        else [str(span.epoch), span.start, span.end, *([True] if span.is_anew else [])]
        for key, span in ranges.items()
    }


def ranges_from_json(stored: Mapping[str, Any] | None) -> Ranges | None:
    """Convert the JSON of `ranges_to_json` back to ranges."""
    if stored is None:
        return None
    return {
        key: said
        if isinstance(said, str)
        else Span(int(said[0]), int(said[1]), int(said[2]), len(said) > 3)  # noqa: PLR2004
        for key, said in stored.items()
    }


def ends_after(ends: Ends, ranges: Ranges | None) -> Ends:
    """Return the end of each stream after delivery of a batch with these ranges."""
    if ranges is None:
        return ends | {_UNKNOWN: (0, 0)}
    spans = {key: span for key, span in ranges.items() if isinstance(span, Span)}
    return ends | {key: (span.epoch, span.end) for key, span in spans.items()}


def room_for(notes: Sequence[Any]) -> int:
    """Return how many of the oldest notes must be dropped so that the rest fits."""
    room = _MOST_KEPT
    for i in range(len(notes) - 1, -1, -1):
        room -= len(json.dumps(notes[i]))
        if room < 0:
            return i + 1
    return 0


def in_words(ranges: Ranges | None) -> str:
    """Format ranges for people."""
    if ranges is None:
        return "messages that nobody knows"
    if not ranges:
        return "no messages"
    said = [_in_words(key, span) for key, span in list(ranges.items())[:_NAMED]]
    more = len(ranges) - len(said)
    return ", ".join(said) + (f" and {more} more streams" if more else "")


def _in_words(key: str, span: Span | str) -> str:
    if isinstance(span, str):
        return f"source {key} up to {span[:80]}"
    return f"{key.partition(' ')[2]} {span.start} to {span.end - 1}"


# --- a batch on its way ---------------------------------------------------------------------------

#: Fields that must be equal when a message is appended again. Its times may differ.
COMPARED: Final = ("payload", "type", "subtype", "stream", "attributes")


class Staged(NamedTuple):
    """Messages for one stream in a file of Arrow batches, written by one task of a batch."""

    url: str
    path: str
    partition: int
    messages: int
    #: It is staged with the stream, under that name; see `Stages`.
    is_there: bool = False


class Commit(NamedTuple):
    """A batch to be appended to a stream exactly once, however often its writer tries."""

    #: The writer's name, the same after every restart.
    writer: str
    #: The number that the writer gives it. After a mistake, another batch may have it.
    batch: int
    #: The messages. The files stay until the batch is in the stream.
    files: Sequence[Staged] = ()
    #: Its provenance.
    origin: Origin = Origin()
    #: A file for notes about a stream that keeps none itself, as in earlier releases.
    notes: Path | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield the messages, in the order of the tasks.

        :raises NotFound: a file is not visible from this machine.
        """
        return staged_batches(self.files)

    def digest(self) -> str:
        """Return a digest of the messages in order, independent of batch boundaries."""
        import pyarrow as pa  # noqa: PLC0415 - not needed to query capabilities

        from penstock.core.batch import integers_in  # noqa: PLC0415 - as above

        hashes = {name: (blake2b(digest_size=16), blake2b(digest_size=16)) for name in COMPARED}
        for batch in self.batches():
            for name, (sizes, data) in hashes.items():
                column = batch.column(name)
                if pa.types.is_integer(column.type):
                    data.update(integers_in(column).tobytes())
                    continue
                values = column.cast(pa.large_binary()).to_pylist()
                lengths = [None if value is None else len(value) for value in values]
                sizes.update(json.dumps(lengths).encode())
                data.update(b"".join(value for value in values if value is not None))
        whole = blake2b(digest_size=16)
        for sizes, data in hashes.values():
            whole.update(sizes.digest() + data.digest())
        return whole.hexdigest()

    def made_of(self) -> str:
        """Return its provenance as text, for streams that keep only this about a batch.

        That is the ranges of its sources, or a digest if these are unknown.
        """
        ranges = ranges_to_json(self.origin.ranges)
        return self.digest() if ranges is None else json.dumps(ranges, sort_keys=True)


def staged_batches(files: Sequence[Staged]) -> Iterator[Batch]:
    """Yield the messages of staged files, in the order of the tasks.

    :raises NotFound: a file is not visible from this machine.
    """
    import pyarrow as pa  # noqa: PLC0415 - as above

    for file in sorted(files, key=lambda file: (file.partition, file.path)):
        try:
            with pa.OSFile(file.path, "rb") as opened:
                reader = pa.ipc.open_file(opened)
                for i in range(reader.num_record_batches):
                    yield reader.get_batch(i)
        except FileNotFoundError:
            raise NotFound(
                f"what a task staged in {file.path} is not to be seen from the driver",
                hint='.option("staging", …): a folder that driver and executors share',
            ) from None
        except OSError as error:
            raise StorageError("reading", file.path, error) from error


class Noted(NamedTuple):
    """A stream's note about a batch."""

    is_done: bool
    #: The files that an unfinished append needs to be completed.
    files: Sequence[str] = ()
    #: The run of its writer that appended it; see `Origin`.
    run: str | None = None


# --- whether it was delivered ---------------------------------------------------------------------


class AnotherBatch(PenstockError):
    """A planned batch overlaps a delivered one, and is not the same."""

    def __init__(self, target: str, batch: int, planned: str, delivered: str, why: str) -> None:
        super().__init__(
            f"{target}: batch {batch} is made of {planned}, but delivered was {delivered}: {why}",
            hint="the checkpoint has fallen back, or another one was put in its place. Put back "
            "the one that belongs to it; or give the query a new checkpointLocation, and "
            "startingOffsets behind what is delivered",
        )
        self.target = target
        self.batch = batch
        self.planned = planned
        self.delivered = delivered


class Known(Protocol):
    """A delivered batch."""

    @property
    def batch(self) -> int: ...

    @property
    def ranges(self) -> Ranges | None: ...

    @property
    def digest(self) -> str | None: ...


class Verdict(Enum):
    """How a batch relates to those delivered before."""

    NEW = auto()
    SAME = auto()
    #: It contains the delivered messages, and more.
    GROWN = auto()
    #: A batch with this number was delivered, and its provenance is unknown.
    UNSURE = auto()


def judge(
    target: str,
    known: Sequence[Known],
    base: Ends,
    batch: int,
    ranges: Ranges | None,
    digest: str | None = None,
) -> tuple[Verdict, int]:
    """Compare a batch with the known ones; return a verdict and the first index that overlaps.

    `base` is the end of each stream before the known batches.

    :raises AnotherBatch: the batch overlaps delivered ones, and it is unknown in which part.
    """
    at = next((i for i, one in enumerate(known) if one.batch >= batch), len(known))
    before, rest = base, known[at:]
    for one in known[:at]:
        before = ends_after(before, one.ranges)
    if not rest:
        _check_behind(target, before, batch, ranges)
        return Verdict.NEW, at
    first = rest[0]
    if first.batch == batch:
        if ranges is not None and first.ranges == ranges:
            return Verdict.SAME, at
        if digest is not None and first.digest == digest:
            return Verdict.SAME, at
        if len(rest) == 1 and (ranges is None or first.ranges is None):
            return Verdict.UNSURE, at
    delivered = _together([one.ranges for one in rest])
    # A batch without rows for this target left no note, and belongs to the planned batch; but only
    # if everything before it is known.
    is_exact = _UNKNOWN in before
    if (
        ranges is None
        or delivered is None
        or (is_exact and first.batch != batch)
        or not _covers(ranges, delivered, is_exact=is_exact)
    ):
        raise AnotherBatch(target, batch, in_words(ranges), _told(rest, delivered), "not the same")
    _check_behind(target, before, batch, ranges)
    return Verdict.GROWN, at


def _told(rest: Sequence[Known], delivered: Ranges | None) -> str:
    first, last = rest[0].batch, rest[-1].batch
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    if delivered is None:
        delivered = next((one.ranges for one in reversed(rest) if one.ranges is not None), None)
    return f"{in_words(delivered)} ({numbers})"


def _check_behind(target: str, ends: Ends, batch: int, ranges: Ranges | None) -> None:
    """Check that a batch starts after everything delivered."""
    for key, span in (ranges or {}).items():
        if isinstance(span, str) or span.is_anew or key not in ends:
            continue
        epoch, end = ends[key]
        if span.epoch == epoch and span.start < end:
            url = key.partition(" ")[2]
            raise AnotherBatch(
                target, batch, in_words(ranges), f"{url} up to {end - 1}", "they overlap"
            )


def _together(parts: Sequence[Ranges | None]) -> Ranges | None:
    """Return the joint ranges of consecutive batches; None: not consecutive, or unknown."""
    whole: Ranges = {}
    for part in parts:
        if part is None:
            return None
        for key, span in part.items():
            before = whole.get(key)
            if before is None or isinstance(span, str):
                whole[key] = span
            elif isinstance(before, str) or before.epoch != span.epoch or span.start < before.end:
                return None
            else:
                whole[key] = before._replace(end=span.end)
    return whole


def _covers(ranges: Ranges, delivered: Ranges, *, is_exact: bool) -> bool:
    for key, span in delivered.items():
        mine = ranges.get(key)
        if isinstance(span, str) or not isinstance(mine, Span):
            if mine != span:
                return False
        elif (
            mine.epoch != span.epoch
            or mine.start > span.start
            or mine.end < span.end
            or (is_exact and mine.start != span.start)
        ):
            return False
    return True
