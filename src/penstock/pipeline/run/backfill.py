"""How is a range of the past processed beside the live run, so that each message counts once?

A new query notes in its checkpoint where it starts in each stream: it owns all messages from there
on. A backfill processes the part of its range before that start, without the ranges of earlier
backfills of the same query. The backfills are noted beside the checkpoint, and each leaves out the
ranges noted before its own. Ranges are sequence numbers, so no message is in two of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from penstock.core.endpoints import identity, open_reader
from penstock.core.errors import (
    InvalidOption,
    Malformed,
    Overrun,
    PenstockError,
    PositionError,
    Unsupported,
)
from penstock.core.position import Position
from penstock.core.units import format_time, parse_moment
from penstock.core.whole_files import sync_names, write_whole
from penstock.pipeline.source.checkpoint import (
    folder_of,
    last_batch,
    last_offsets,
    offsets_at,
    offsets_from_json,
)
from penstock.pipeline.source.inputs import Streams
from penstock.pipeline.source.options import SourceOptions, parse_spark_options
from penstock.pipeline.source.ranges import Slice, Times, slices_to_json, why_gone
from penstock.queue.notes import NoteFile
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.interfaces import Bounds
    from penstock.pipeline.graph.model import Pipeline, Source

__all__ = ["Backfill", "NothingToDo", "Part", "Share", "Unfinished", "beginning", "pin"]

#: File in the checkpoint of a query: where it starts in each stream.
_BEGINNING: Final = "_beginning.json"
#: Options for the start of a source, and those for the live query only.
_STARTS: Final = frozenset(
    {
        *("startingoffsets", "startingtime", "startingseq", "startingtimestamp"),
        "startingoffsetsbytimestamp",
    }
)
_LIVE: Final = frozenset({"hold", "minoffsetspertrigger", "maxtriggerdelay"})


class NothingToDo(PenstockError):
    """A backfill has no messages to process, or cannot tell which."""


class Unfinished(PenstockError):
    """An earlier backfill of the query has messages of the range, and is not finished."""

    def __init__(self, query: str, earlier: Backfill) -> None:
        start, end = format_time(earlier.start), format_time(earlier.end)
        by = " --by source" if earlier.by == "source" else ""
        super().__init__(
            f"{query}: the backfill of the messages {earlier} is not finished, and has messages of "
            "this range",
            hint=f"the same command with --from {start} --to {end}{by} resumes it; try this range "
            "again when it is done",
        )
        self.query = query
        self.earlier = earlier


@dataclass(frozen=True, slots=True)
class Backfill:
    """A range of the past: from `start` up to, but not including, `end`, in nanoseconds."""

    start: int
    end: int
    #: Which time counts: when messages were appended, or their source time.
    by: Literal["append", "source"] = "append"

    @classmethod
    def parse(cls, start: str, end: str, by: Literal["append", "source"], now_ns: int) -> Backfill:
        """Parse the times of a range: ISO 8601, `-10m`, `yesterday 12:00`, `now`.

        :raises InvalidOption: a time cannot be parsed, the range is empty, or it ends in the
            future: what comes after the first run would never be processed.
        """
        moments = []
        for option, text in (("--from", start), ("--to", end)):
            try:
                moments.append(parse_moment(text, now_ns))
            except InvalidOption as error:
                raise InvalidOption(option, text, error.reason, hint=error.hint) from None
        if moments[0] >= moments[1]:
            raise InvalidOption(
                "--to", end, f"the range is empty: it begins at {format_time(moments[0])}"
            )
        if moments[1] > now_ns:
            raise InvalidOption(
                "--to", end, f"{format_time(moments[1])} is in the future", hint="--to now"
            )
        return cls(moments[0], moments[1], by)

    @classmethod
    def of(cls, note: Mapping[str, Any]) -> Backfill:
        """Return the range of a noted backfill."""
        return cls(note["from"], note["to"], note["by"])

    @property
    def name(self) -> str:
        """Suffix of its checkpoint: running the same range again resumes it."""
        times = (format_time(at).replace("-", "").replace(":", "") for at in (self.start, self.end))
        return f"from-{'-to-'.join(times)}{'-by-source' if self.by == 'source' else ''}"

    @property
    def times(self) -> Times | None:
        return (self.start, self.end) if self.by == "source" else None

    def __str__(self) -> str:
        what = "that happened " if self.by == "source" else ""
        return f"{what}from {format_time(self.start)} to {format_time(self.end)}"


# --- where a query begins -------------------------------------------------------------------------


def pin(checkpoint: str, sources: Mapping[str, Source]) -> dict[str, dict[str, str]]:
    """Fix the start of a query that has no batch yet.

    Store it in the checkpoint and return it as `startingOffsets` by source. A stored start is
    reused once Spark or a backfill has seen it. So `latest` stays where it was, and a backfill
    knows where the query starts even before its first batch is planned.

    :raises StorageError: the note cannot be written.
    """
    folder = folder_of(checkpoint)
    if folder is None or last_batch(folder / "offsets") is not None:
        return {}
    noted = _noted(folder)
    has_begun = (folder / "metadata").exists() or _backfills(checkpoint).path.exists()
    if noted is None or not has_begun:  # it never ran, and no backfill relies on it
        noted = {name: _initial(one) for name, one in sources.items() if _is_followed(one)}
        _save_beginning(folder, noted)
    known = {
        name: starts
        for name, starts in noted.items()
        if starts and name in sources and _is_followed(sources[name])
    }
    now = {name: _starts_now(sources[name], starts) for name, starts in known.items()}
    current = noted | {name: _with(known[name], now[name]) for name in known}
    if current != noted:  # a stream was created anew: backfills must know, too
        _save_beginning(folder, current)
    return {
        name: {
            **_without(sources[name], _STARTS),
            "startingOffsets": json.dumps({url: number for url, (_, number) in starts.items()}),
        }
        for name, starts in now.items()
    }


def _save_beginning(folder: Path, starts: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
    """Store where a query starts, as epoch and number by source and URL."""
    fields = {
        name: {url: (str(epoch), number) for url, (epoch, number) in each.items()}
        for name, each in starts.items()
    }
    with storage_errors("writing", str(folder / _BEGINNING)):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _BEGINNING, json.dumps(fields, sort_keys=True).encode(), sync=True)
        sync_names(folder)


def _starts_now(
    source: Source, starts: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Translate noted starts to the present epochs.

    A stream that was recreated starts at its oldest message; one that is gone is left out.
    """
    noted = {identity(url): at for url, at in starts.items()}
    streams = Streams(source.urls)
    try:
        found = streams.look()
    finally:
        streams.close()
    now = {}
    for url, bounds in found.items():
        if (start := noted.get(identity(url))) is not None:
            at = bounds.successor(*start)
            # A classic queue has no epoch: beyond its end, it is another one, too.
            now[url] = (bounds.epoch, bounds.oldest if at is None or at > bounds.end else at)
    return now


def _with(
    noted: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return the noted starts with those of now; streams that are gone keep theirs."""
    there = {identity(url) for url in now}
    return {url: at for url, at in noted.items() if identity(url) not in there} | dict(now)


def _is_followed(source: Source) -> bool:
    """Tell whether a source streams from streams that can be re-read."""
    return source.format is None and source.stage is None and not source.static


def _without(source: Source, names: frozenset[str]) -> dict[str, str]:
    return {key: v for key, v in source.spark_options().items() if key.lower() not in names}


def _initial(source: Source) -> dict[str, tuple[int, int]]:
    """Return where a source starts in each stream: epoch and sequence number."""
    from penstock.pipeline.source.stream import StreamReader  # noqa: PLC0415 - loads Spark

    reader = StreamReader(parse_spark_options(_without(source, _LIVE), SourceOptions))
    try:
        offsets = offsets_from_json(reader.initialOffset())
    finally:
        reader.stop()
    return {url: (at.epoch, at.start) for url, at in offsets.items()}


def _noted(folder: Path) -> dict[str, dict[str, tuple[int, int]]] | None:
    """Return where a query starts, as epoch and number by source and URL; None: no note.

    :raises Malformed: the note is damaged.
    """
    path = folder / _BEGINNING
    with storage_errors("reading", str(path)):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        return {
            str(name): {str(url): (int(epoch), int(start)) for url, (epoch, start) in each.items()}
            for name, each in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise Malformed(
            f"{path} is damaged",
            "where the query starts",
            "JSON with an epoch and a number for each stream",
            repr(text[:80]),
            hint="put it back from a copy; or, if the query has never run, remove it",
        ) from error


def beginning(checkpoint: str) -> dict[str, tuple[int, int]] | None:
    """Return where a query started in each stream, as epoch and number; None: it never ran.

    :raises NothingToDo: its checkpoint does not tell any more.
    """
    folder = folder_of(checkpoint)
    assert folder is not None
    noted, starts = _noted(folder), []
    if noted is not None:
        starts = [(url, at) for streams in noted.values() for url, at in streams.items()]
    elif (planned := last_batch(folder / "offsets")) is None:
        return None
    else:
        first = offsets_at(folder, 0)
        if first is None:
            raise NothingToDo(
                f"it is not known where {folder.name} began: that was with an earlier release, "
                f"and {planned} batches ago",
                hint="give the pipeline another --checkpoint and startingOffsets: latest, or write "
                "what is to be made anew to other sinks",
            )
        starts = [
            (url, (at.epoch, at.start))
            for source in first
            if isinstance(source, dict)
            for url, at in source.items()
        ]
    found: dict[str, tuple[int, int]] = {}
    for url, at in starts:  # a stream may be read twice
        found[url] = min(at, found.get(url, at))
    return found


# --- what is left for a backfill ------------------------------------------------------------------


class Part(NamedTuple):
    """The share of a query in a backfill."""

    #: Where it keeps its progress.
    checkpoint: str
    #: Options by source.
    options: dict[str, dict[str, str]]


class _Stream(NamedTuple):
    """A stream of a source, in its current state."""

    url: str
    bounds: Bounds
    #: The messages in the range: `start` to `end` - 1.
    start: int
    end: int


class Share:
    """The messages of a query in a backfill, before and when they are noted as taken."""

    def __init__(
        self,
        backfill: Backfill,
        query: str,
        pipeline: Pipeline,
        sources: Sequence[str],
        checkpoint: str,
        say: Callable[[str], None],
    ) -> None:
        """Find the messages that are left for a backfill.

        :param checkpoint: the checkpoint of the live query
        :raises NothingToDo: no message is left, or that cannot be told.
        :raises Unfinished: an earlier backfill has messages of the range, and is not finished.
        """
        if folder_of(checkpoint) is None:
            raise NothingToDo(
                f"{query}: its checkpoint is not on this machine's disk, so nobody knows where it "
                "began"
            )
        self._backfill = backfill
        self._query = query
        self._pipeline = pipeline
        self._checkpoint = checkpoint
        self._notes = _backfills(checkpoint)
        followed = [name for name in sources if not pipeline.sources[name].static]  # no tables
        named = {name: _named(pipeline, name) for name in followed}
        streams = {name: Streams(urls) for name, urls in named.items()}
        try:
            self._found = {
                name: _found(backfill, pipeline, name, one, say) for name, one in streams.items()
            }
        finally:
            for one in streams.values():
                one.close()
        self._mine = [one for each in self._found.values() for one in each]
        noted = self._notes.read()
        self._own = noted.get(backfill.name)
        if self._own is None:
            left = _before_live(backfill, query, checkpoint, self._mine)
            self._own = {
                "by": backfill.by,
                "from": backfill.start,
                "to": backfill.end,
                "streams": left,
            }
        self._slices(noted)

    def take(self) -> Part:
        """Note the range as taken, and return what the query has to read.

        :raises NothingToDo: another backfill has taken all of it meanwhile.
        :raises Unfinished: another backfill has taken some of it meanwhile.
        """
        name, noted = self._backfill.name, self._notes.read()
        if name not in noted:
            assert self._own is not None
            self._notes.write(name, self._own, sync=True)
            noted = self._notes.read()
        slices = self._slices(noted)
        return Part(
            f"{self._checkpoint}.{name}",
            {one: _options(self._pipeline.sources[one], each) for one, each in slices.items()},
        )

    def _slices(self, noted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Slice]]:
        """Return the slices to read by source and URL, without the ranges noted before."""
        assert self._own is not None
        earlier: list[Mapping[str, Any]] = []
        for name, note in noted.items():
            if name == self._backfill.name:
                break
            if self._waits_for(name, note, earlier):
                raise Unfinished(self._query, Backfill.of(note))
            earlier.append(note)
        slices = {
            name: {one.url: _slice(self._own, one, earlier) for one in each}
            for name, each in self._found.items()
        }
        if not any(_is_left(one) for each in slices.values() for one in each.values()):
            raise NothingToDo(
                f"{self._query}: earlier backfills have all messages {self._backfill}"
            )
        return slices

    def _waits_for(
        self, name: str, note: Mapping[str, Any], before: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Tell whether an earlier backfill is not finished, and has messages of this range."""
        assert self._own is not None
        have_common = any(
            _is_left(theirs := _slice(note, one, before))
            and _meet(theirs, _slice(self._own, one, ()))
            for one in self._mine
        )
        folder = Path(f"{folder_of(self._checkpoint)}.{name}")
        return have_common and not _is_done(folder, note, self._mine)


def _backfills(checkpoint: str) -> NoteFile:
    """Return the file with the noted backfills of a query."""
    return NoteFile(Path(f"{folder_of(checkpoint)}.backfills.json"))


def _named(pipeline: Pipeline, name: str) -> tuple[str, ...]:
    source = pipeline.sources[name]
    if source.format is not None:
        raise pipeline.error(
            ("sources", name, "format"),
            f"nobody knows where in {source.format} the range is",
            hint="a backfill needs sources with url",
        )
    if source.stage is not None:
        raise pipeline.error(
            ("sources", name, "stage"),
            "a stream that cannot be read again has no past",
            hint=f"make a pipeline of the log that it is kept in: url: {source.stage}",
        )
    return source.urls


def _found(
    backfill: Backfill, pipeline: Pipeline, name: str, streams: Streams, say: Callable[[str], None]
) -> list[_Stream]:
    found = []
    for url, bounds in streams.look().items():
        start, end = bounds.oldest, bounds.end
        if backfill.by == "append" and start < end:
            start = max(start, min(end, streams.first_at(url, backfill.start)))
            end = max(start, min(end, streams.first_at(url, backfill.end)))
        _check_gone(backfill, pipeline, name, url, bounds, start, end, say)
        found.append(_Stream(url, bounds, start, end))
    return found


def _check_gone(
    backfill: Backfill,
    pipeline: Pipeline,
    name: str,
    url: str,
    bounds: Bounds,
    start: int,
    end: int,
    say: Callable[[str], None],
) -> None:
    """Check that a stream still has the messages appended in the range.

    :raises ConfigError: messages are gone, and `failOnDataLoss` is set or none are left.
    """
    if start > bounds.oldest or not bounds.oldest:  # nothing in the range is gone
        return
    oldest = _appended(url, bounds.oldest)
    if isinstance(oldest, str):
        before = f"before message {bounds.oldest:,}"
        say(f"{url}: whether messages of the range were {before} cannot be told: {oldest}")
        return
    if oldest <= backfill.start:
        return
    why = why_gone(url)
    if start >= end:
        raise pipeline.error(
            ("sources", name, "url"),
            f"{url} has nothing any more {backfill}: its oldest message is of "
            f"{format_time(oldest)}, and those before are gone ({why})",
            hint=f"--from {format_time(oldest)} begins with it",
        )
    said = f"{url}: what was appended before {format_time(oldest)} is gone ({why})"
    if backfill.by == "source" or pipeline.sources[name].goes_on_after_loss:
        say(said)
        return
    raise pipeline.error(
        ("sources", name, "url"),
        said,
        hint=f"--from {format_time(oldest)}, or failOnDataLoss: false takes what is there",
    )


def _appended(url: str, seq: int) -> int | str:
    """Return when a message was appended, or why that cannot be told."""
    try:
        with open_reader(url, start=Position.START) as reader:
            reader.seek(seq)
            messages = reader.read_many(1)
    except (Overrun, PositionError, Unsupported) as error:
        return str(error)
    return messages[0].created_ns if messages else f"message {seq:,} cannot be read"


def _before_live(
    backfill: Backfill, query: str, checkpoint: str, streams: Iterable[_Stream]
) -> dict[str, list[Any]]:
    """Return the part of the range before the start of the live query, by URL."""
    streams = list(streams)
    if all(one.start >= one.end for one in streams):
        urls = ", ".join(one.url for one in streams) or "its sources"
        raise NothingToDo(
            f"{query}: there is no message {backfill} in {urls}",
            hint="penstock info URL shows what there is",
        )
    begins = beginning(checkpoint)
    live = None if begins is None else {identity(url): at for url, at in begins.items()}
    left: dict[str, list[Any]] = {}
    for one in streams:
        end = one.end
        if live is not None:
            began = live.get(identity(one.url))  # it reads newer streams from their start
            at = None if began is None else one.bounds.successor(*began)
            end = min(end, one.bounds.oldest if at is None else at)
        left[one.url] = [str(one.bounds.epoch), one.start, max(one.start, end)]
    if all(start >= end for _, start, end in left.values()):
        raise NothingToDo(
            f"{query}: all messages {backfill} are the live run's, which began before them",
            hint="to make it anew, write to other sinks, with another --checkpoint",
        )
    return left


def _slice(note: Mapping[str, Any], stream: _Stream, others: Sequence[Mapping[str, Any]]) -> Slice:
    """Return the slice of a stream that a noted backfill reads, without those of `others`.

    Numbers are those of the stream as it is now: a power failure may have cut it since.
    """
    bounds = stream.bounds
    own = _noted_slice(note, stream)
    if own.epoch != bounds.epoch:  # the stream was created anew: reading it raises the error
        return own
    start = max(bounds.oldest, own.start)  # what is gone was said, or was an error
    own = own._replace(start=start, end=max(start, own.end))
    theirs = (_noted_slice(other, stream) for other in others)
    common = (one for one in theirs if one.epoch == own.epoch)
    return own._replace(
        others=tuple(
            (one.start, one.end, one.times)
            for one in common
            if max(one.start, own.start) < min(one.end, own.end)
        )
    )


def _noted_slice(note: Mapping[str, Any], stream: _Stream) -> Slice:
    """Return the messages that a noted backfill has of a stream, by its numbers now if it can."""
    bounds, times = stream.bounds, Backfill.of(note).times
    for url, (epoch, first, last) in note["streams"].items():
        if identity(url) == identity(stream.url):
            low, high = (bounds.successor(int(epoch), at) for at in (first, last))
            if low is None or high is None:
                return Slice(int(epoch), first, last, times)
            return Slice(bounds.epoch, low, high, times)
    return Slice(bounds.epoch, bounds.oldest, bounds.oldest, times)


def _is_left(one: Slice) -> bool:
    """Tell whether a slice has messages that no other backfill has."""
    return one.start < one.end and not any(
        low <= one.start
        and one.end <= high
        and (times is None or (one.times is not None and _within(one.times, times)))
        for low, high, times in one.others
    )


def _meet(one: Slice, other: Slice) -> bool:
    """Tell whether two slices of a stream may have messages in common."""
    if one.epoch != other.epoch or max(one.start, other.start) >= min(one.end, other.end):
        return False
    if one.times is None or other.times is None:
        return True
    return max(one.times[0], other.times[0]) < min(one.times[1], other.times[1])


def _within(inner: Times, outer: Times) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _options(source: Source, slices: Mapping[str, Slice]) -> dict[str, str]:
    """Return the options of a source that reads only these slices."""
    return {
        **_without(source, _STARTS | _LIVE),
        "url": json.dumps(list(slices)),
        "slices": slices_to_json(slices),
    }


def _is_done(folder: Path, note: Mapping[str, Any], streams: Iterable[_Stream]) -> bool:
    """Tell whether a backfill has reached the end of its range."""
    batch, sources = last_offsets(folder) or (None, [])
    if batch is None or last_batch(folder / "commits") != batch:
        return False
    ends = {
        identity(url): at.end for one in sources if isinstance(one, dict) for url, at in one.items()
    }
    bounds = {identity(one.url): one.bounds for one in streams}
    for url, (epoch, start, end) in note["streams"].items():
        key, last = identity(url), end
        if key in bounds:  # a power failure may have cut it since
            last = bounds[key].successor(int(epoch), end) or 0
        if start < last and ends.get(key, 0) < last:
            return False
    return True
