"""How does Spark write to streams? `writeStream.format("penstock")` and `df.write`.

Tasks convert rows to messages and stage them by stream: at the stream if its endpoint supports
`Stages`, else in a shared folder. Then the driver has all staged messages appended.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.core.batch import BATCH_SCHEMA, same_integers
from penstock.core.capabilities import AppendOnce, Stages
from penstock.core.endpoints import Identity, endpoint_of, identity, open_writer
from penstock.core.errors import InvalidOption, Malformed, PenstockError, Unsupported
from penstock.core.provenance import Commit, Staged
from penstock.core.url import URL
from penstock.core.worker import Worker
from penstock.pipeline.source.checkpoint import origin_of
from penstock.pipeline.source.options import check_target
from penstock.pipeline.spark_process import (
    BATCH,
    QUERY,
    RUN,
    explained,
    freeze_modules,
    private_folder,
)
from penstock.queue.append_once import (
    Staging,
    append_once,
    check_letters,
    check_taken,
    known_of,
    remove_batch,
    remove_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.core.capabilities import StagedPart
    from penstock.pipeline.source.options import SinkOptions

__all__ = ["COLUMNS", "BatchSink", "StreamSink", "Targets"]

log = logging.getLogger(__name__)


@dataclass
class _Message(WriterCommitMessage):
    """What a task reports to the driver."""

    query: str
    staged: list[Staged]
    #: Spark's run id of the query.
    run: str | None = None


class _Task:
    """Messages staged by a task: at the stream if it supports that, else in shared files."""

    def __init__(
        self, files: Staging, query: str, batch: int, partition: int, may_be_there: bool
    ) -> None:
        self._files = files
        self._query = query
        self._batch = batch
        self._partition = partition
        self._may_be_there = may_be_there
        self._there: dict[str, StagedPart | None] = {}

    def add(self, urls: Sequence[str], messages: Batch) -> None:
        """Stage messages for all of these streams."""
        for url in urls:
            if url not in self._there:
                self._there[url] = self._begin(url)
            part = self._there[url]
            if part is not None:
                part.add(messages)
        if by_file := [url for url in urls if self._there[url] is None]:
            self._files.add(by_file, messages)

    def _begin(self, url: str) -> StagedPart | None:
        endpoint = endpoint_of(url)
        if self._may_be_there and isinstance(endpoint, Stages):
            with suppress(Unsupported):
                return endpoint.stage(URL.parse(url), self._query, self._batch, self._partition)
        return None

    def finish(self) -> list[Staged]:
        there = [part.finish() for part in self._there.values() if part is not None]
        return [*there, *self._files.finish()]

    def discard(self) -> None:
        """Remove the staged messages of a failed task."""
        for part in self._there.values():
            if part is not None:
                part.discard()
        self._files.discard()


class _Sink:
    """Base of the batch and the stream sink: tasks stage, the driver appends."""

    def __init__(self, options: SinkOptions, names: list[str]) -> None:
        self._options = options
        self._targets = Targets(options.url, options.outputs, names)

    def _stage(self, rows: Iterator[pa.RecordBatch], query: str, batch: str) -> WriterCommitMessage:
        freeze_modules()
        context = TaskContext.get()
        assert context is not None
        files = Staging(self._folder_of(query) / batch, context.partitionId())
        # With an explicit folder, all messages are staged there.
        task = _Task(files, query, int(batch), context.partitionId(), self._options.staging is None)
        try:
            for some in rows:
                if some.num_rows:
                    for urls, messages in self._targets.messages(some):
                        task.add(urls, messages)
            return _Message(query, task.finish(), context.getLocalProperty(RUN))
        except BaseException:
            task.discard()
            raise

    def _append_once(
        self, messages: Sequence[WriterCommitMessage | None], query: str, batch: int
    ) -> None:
        folder, found = self._folder(), _by_url(messages)
        origin = origin_of(self._options.checkpointLocation, batch, _run_of(messages))
        # Finish what an earlier attempt has started, even if it has no rows any more.
        known = {url: known_of(url, query, batch, folder, origin) for url in self._urls()}
        begun = [url for url, noted in known.items() if noted is not None and not noted.is_done]
        streams: dict[Identity, tuple[str, list[Staged]]] = {}
        for url in dict.fromkeys((*found, *begun)):
            # One stream may have two URLs, but has one note for the batch.
            streams.setdefault(identity(url), (url, []))[1].extend(found.get(url, []))
        _side_by_side(
            [
                partial(append_once, url, parts, query, batch, folder, origin)
                for url, parts in streams.values()
            ]
        )
        self._clean(streams.values(), query, batch)

    def _clean(self, done: Iterable[tuple[str, list[Staged]]], query: str, batch: int) -> None:
        """Remove staged messages of an appended batch, and leftovers of earlier ones."""
        for url, parts in done:
            endpoint = endpoint_of(url)
            if isinstance(endpoint, Stages) and any(part.is_there for part in parts):
                try:
                    endpoint.unstage(URL.parse(url), Commit(query, batch), is_done=True)
                except PenstockError as error:
                    log.warning("%s: what was staged goes with the next batch: %s", url, error)
        remove_batch(self._folder_of(query), batch)

    def _discard(
        self, messages: Sequence[WriterCommitMessage | None], query: str, batch: int
    ) -> None:
        by_file: set[str] = set()
        needed: set[str] = set()
        for url, parts in _by_url(messages).items():
            endpoint = endpoint_of(url)
            there = [part for part in parts if part.is_there]
            if there and isinstance(endpoint, Stages):
                endpoint.unstage(URL.parse(url), Commit(query, batch, there), is_done=False)
                continue
            by_file.update(part.path for part in parts)
            # The replay of a started append needs its files; other streams may share them.
            noted = known_of(url, query, batch, self._folder())
            if noted is not None and not noted.is_done:
                needed.update(noted.files)
        remove_files(sorted(by_file - needed))

    def _folder_of(self, query: str) -> Path:
        # Quoted: the name may be any text, and must not escape the folder.
        return self._folder() / f"query-{quote(query, safe='')}"

    def _folder(self) -> Path:
        """Return a folder that the driver and the tasks share."""
        if self._options.staging is not None:
            return Path(self._options.staging)
        for url in self._urls():
            beside = identity(url).path
            if beside is not None and isinstance(endpoint_of(url), AppendOnce):
                return beside.parent / ".penstock-staging"
        return private_folder("staging")

    def _urls(self) -> list[str]:
        """Return the target URLs that are known from the options."""
        named = [one for urls in self._options.outputs.values() for one in urls]
        return [*self._options.url, *named]


def _side_by_side(jobs: Sequence[Callable[[], object]]) -> None:
    """Run jobs beside each other, as many at a time as there are cores, and wait for all.

    :raises PenstockError: a job failed; the others were run all the same.
    """
    waiting = deque(jobs)
    failures: list[Exception] = []

    def work(_: object) -> None:
        with suppress(IndexError):
            while True:
                job = waiting.popleft()
                try:
                    job()
                except Exception as error:  # noqa: BLE001 - raised below
                    failures.append(error)

    count = min(len(jobs), os.cpu_count() or 1)
    workers = [Worker(f"append {number}", work, log=log).start() for number in range(1, count)]
    work(None)
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def _by_url(messages: Sequence[WriterCommitMessage | None]) -> dict[str, list[Staged]]:
    found: dict[str, list[Staged]] = defaultdict(list)
    for message in messages:
        if isinstance(message, _Message):
            for part in message.staged:
                found[part.url].append(part)
    return dict(sorted(found.items()))


def _run_of(messages: Sequence[WriterCommitMessage | None]) -> str | None:
    return next((m.run for m in messages if isinstance(m, _Message)), None)


def _query_of(messages: Sequence[WriterCommitMessage | None]) -> str | None:
    return next((m.query for m in messages if isinstance(m, _Message)), None)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """Appends every batch of a query exactly once to streams."""

    def __init__(self, options: SinkOptions, names: list[str]) -> None:
        options.refuse({"query", "batch"}, "is for df.write only; Spark says it here")
        super().__init__(options, names)

    @explained()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty(QUERY)
        batch = context.getLocalProperty(BATCH)
        if not query or not batch:  # without them a batch could not be told from its replay
            raise Unsupported("Spark does not say which query and batch a task belongs to")
        return self._stage(iterator, query, batch)

    @explained()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        query = _query_of(messages)
        if query is not None:
            self._append_once(messages, query, batchId)

    @explained()
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        query = _query_of(messages)
        if query is not None:
            self._discard(messages, query, batchId)


class BatchSink(_Sink, DataSourceArrowWriter):
    """`df.write.format("penstock")`: appends when all tasks have succeeded.

    With `query` and `batch`, as in foreachBatch, the same batch is appended only once.
    """

    def __init__(self, options: SinkOptions, names: list[str]) -> None:
        super().__init__(options, names)
        options.check_part()
        # Unique also within foreachBatch, where one batch may have several writes.
        self._query = options.query or f"write-{uuid.uuid4().hex}"
        self._batch = options.batch or 0

    @explained()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._stage(iterator, self._query, str(self._batch))

    @explained()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if self._options.query is not None:
            self._append_once(messages, self._query, self._batch)
            return
        found = _by_url(messages)
        try:
            for url, parts in found.items():
                _append(url, Commit(self._query, 0, parts))
        finally:  # also after a failure: Spark neither retries nor reports it
            self._clean(found.items(), self._query, 0)

    @explained()
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages, self._query, self._batch)


def _append(url: str, commit: Commit) -> None:
    """Append staged messages without a note, as nothing replays them."""
    endpoint = endpoint_of(url)
    if isinstance(endpoint, Stages) and all(file.is_there for file in commit.files):
        endpoint.append_once(URL.parse(url), commit)
        endpoint.forget(URL.parse(url), commit.writer)
        return
    with open_writer(url) as writer:
        check_letters(writer, commit.batches())
        for batch in commit.batches():
            writer.write_batch(batch)
        writer.flush()
    check_taken(writer)


#: Columns that a sink accepts; others are refused, so that nothing is dropped silently.
COLUMNS: Final = frozenset(
    {
        *("payload", "type", "subtype", "time", "time_ns", "stream", "attributes", "url", "output"),
        *("seq", "created_ns"),  # of a source; the target gives its own
    }
)


class Targets:
    """Target streams of rows: the same for all, or those of the name or URL in a column."""

    def __init__(
        self, urls: Sequence[str], outputs: Mapping[str, Sequence[str]], names: list[str]
    ) -> None:
        """Check the columns of the rows.

        :raises InvalidOption: the payload or the target is missing, or a column has no use.
        """
        _check_columns(names)
        self._urls = urls
        self._outputs = {name: _groups(outputs, name) for name in outputs}
        self._column: str | None = None
        if outputs or "output" in names:
            self._column = "output"
            _check_outputs(urls, outputs, names)
        elif not urls:
            self._column = "url"
            if "url" not in names:
                raise InvalidOption(
                    "url",
                    None,
                    "is missing",
                    hint='.option("url", "log:/path/name"), or a column url',
                )

    def messages(self, rows: pa.RecordBatch) -> Iterator[tuple[Sequence[str], Batch]]:
        """Yield the rows as batches of messages, each with target URLs.

        :raises Malformed: a column has the wrong type, or a row has no target.
        """
        if self._column is None:
            yield self._urls, _batch_of(rows)
            return
        where = rows.column(rows.schema.get_field_index(self._column))
        names = pc.unique(where).to_pylist()
        for name in names:
            if name is None:
                raise _bad(self._column, "a value in every row", "null")
            if len(names) == 1:
                messages = _batch_of(rows)
            else:
                messages = _batch_of(rows.filter(pc.equal(where, pa.scalar(name, where.type))))
            for urls in self._groups_of(name):
                yield urls, messages

    def _groups_of(self, name: str) -> Sequence[Sequence[str]]:
        if self._column == "url":
            check_target(name)  # an option is checked before, and a column has just come
            return ((name,),)
        if name not in self._outputs:
            raise _bad("output", f"one of {', '.join(sorted(self._outputs))}", name)
        return self._outputs[name]


def _groups(outputs: Mapping[str, Sequence[str]], name: str) -> list[Sequence[str]]:
    """Return the URLs of an output, those together that get its messages and no others.

    A stream of several outputs stands alone, so that it gets their messages as they come.
    """
    others = {url for other, urls in outputs.items() if other != name for url in urls}
    together = [url for url in outputs[name] if url not in others]
    alone = [[url] for url in outputs[name] if url in others]
    return [*([together] if together else []), *alone]


def _check_columns(names: list[str]) -> None:
    if "payload" not in names:
        raise InvalidOption(
            "columns",
            ", ".join(names),
            "a sink needs the column payload",
            hint='.withColumn("payload", …)',
        )
    unknown = sorted(set(names) - COLUMNS)
    if unknown:
        raise InvalidOption(
            "columns",
            ", ".join(unknown),
            "have no place in a message",
            hint="select the columns that are to be kept, or put them into payload",
        )


def _check_outputs(
    urls: Sequence[str], outputs: Mapping[str, Sequence[str]], names: list[str]
) -> None:
    example = '.option("outputs", \'{"name": "log:/path/name"}\')'
    if not outputs:
        raise InvalidOption("outputs", None, "the column output names what it says", hint=example)
    if "output" not in names:
        raise InvalidOption("outputs", sorted(outputs), "there is no column output to choose by")
    if urls:
        said = ", ".join(urls)
        raise InvalidOption("url", said, "outputs is given as well", hint="leave one of them out")


def _batch_of(rows: pa.RecordBatch) -> Batch:
    count = rows.num_rows
    given = {name: rows.column(i) for i, name in enumerate(rows.schema.names)}
    columns = []
    for field in BATCH_SCHEMA:
        name, column = field.name, given.get(field.name)
        if name in {"seq", "created_ns"}:
            column = same_integers(0, count, field.type)
        elif name == "time_ns" and column is None:
            name, column = "time", _times(given.get("time"), count)
        elif column is None and field.nullable:
            column = pa.nulls(count, field.type)
        elif column is None:
            column = same_integers(0, count, field.type)
        if not field.nullable and column.null_count:
            raise _bad(name, "a value in every row", "null")
        if column.type != field.type:
            column = _cast(field, column)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA)


def _times(given: pa.Array | None, count: int) -> pa.Array:
    if given is None:
        return same_integers(time.time_ns(), count, pa.int64())
    try:
        micros = given.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        return pc.multiply_checked(micros, pa.scalar(1000, pa.int64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _bad("time", "a timestamp from 1677 to 2262", f"{given.type}: {error}") from None


def _cast(field: pa.Field, column: pa.Array) -> pa.Array:
    try:
        if field.type == pa.binary(16):  # Spark has no binary of a fixed length
            column = column.cast(pa.binary())
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _bad(field.name, str(field.type), f"{column.type}: {error}") from None


def _bad(column: str, expected: str, found: str) -> Malformed:
    return Malformed("rows for the sink", f"column {column}", expected, found)
