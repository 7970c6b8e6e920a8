"""How does Spark write to streams? `writeStream.format("penstock")` and `df.write`."""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.core.capabilities import AppendOnce, Commit, Staged
from penstock.core.endpoints import Identity, endpoint_of, identity, open_writer
from penstock.core.errors import Unsupported
from penstock.pipeline.commits import append_once, known_of
from penstock.pipeline.explaining import explained
from penstock.pipeline.outgoing import Targets
from penstock.pipeline.private_folder import private_folder
from penstock.pipeline.provenance import origin_of
from penstock.pipeline.task_process import BATCH, QUERY, RUN, settle_in
from penstock.queue.staging import Staging, remove_batch, remove_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from penstock.pipeline.options import SinkOptions

__all__ = ["BatchSink", "StreamSink"]


@dataclass
class _Message(WriterCommitMessage):
    """What a task tells the driver."""

    query: str
    staged: list[Staged]
    #: The name of the query from its start to its end.
    run: str | None = None


class _Sink:
    """What the batch and the stream sink share: tasks stage, the driver appends."""

    def __init__(self, options: SinkOptions, names: list[str]) -> None:
        self._options = options
        self._targets = Targets(options.url, options.outputs, names)

    def _stage(self, rows: Iterator[pa.RecordBatch], query: str, batch: str) -> WriterCommitMessage:
        settle_in()
        context = TaskContext.get()
        assert context is not None
        staging = Staging(self._folder_of(query) / batch, context.partitionId())
        try:
            for some in rows:
                if some.num_rows:
                    for url, messages in self._targets.messages(some):
                        staging.add(url, messages)
            return _Message(query, staging.finish(), context.getLocalProperty(RUN))
        except BaseException:
            staging.discard()
            raise

    def _append_once(
        self, messages: Sequence[WriterCommitMessage | None], query: str, batch: int
    ) -> None:
        folder, found = self._folder(), _by_url(messages)
        origin = origin_of(self._options.checkpointLocation, batch, _run_of(messages))
        # What an attempt has begun is brought to its end, also if it has no rows any more.
        known = {url: known_of(url, query, batch, folder, origin) for url in self._urls()}
        begun = [url for url, noted in known.items() if noted is not None and not noted.is_done]
        streams: dict[Identity, tuple[str, list[Staged]]] = {}
        for url in dict.fromkeys((*found, *begun)):
            # One stream may be written in two ways, and has one note for the batch.
            streams.setdefault(identity(url), (url, []))[1].extend(found.get(url, []))
        for url, parts in streams.values():
            append_once(url, parts, query, batch, folder, origin)
        remove_batch(self._folder_of(query), batch)

    def _discard(
        self, messages: Sequence[WriterCommitMessage | None], query: str, batch: int
    ) -> None:
        for url, parts in _by_url(messages).items():
            # Those of an attempt that was begun are what its replay goes on with.
            noted = known_of(url, query, batch, self._folder())
            needed = set() if noted is None or noted.is_done else set(noted.files)
            remove_files([part.path for part in parts if part.path not in needed])

    def _folder_of(self, query: str) -> Path:
        # It may be any text, and must not lead elsewhere.
        return self._folder() / f"query-{quote(query, safe='')}"

    def _folder(self) -> Path:
        """Return a place that the driver and the tasks have in common."""
        if self._options.staging is not None:
            return Path(self._options.staging)
        for url in self._urls():
            beside = identity(url).path
            if beside is not None and isinstance(endpoint_of(url), AppendOnce):
                return beside.parent / ".penstock-staging"
        return private_folder("staging")

    def _urls(self) -> list[str]:
        """Return where rows may go, as far as that is known before they come."""
        url = self._options.url
        return [*([] if url is None else [url]), *self._options.outputs.values()]


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
    """Appends every batch of a query exactly once to streams of ours."""

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

    With `query` and `batch`, as foreachBatch has them, it appends the same batch once.
    """

    def __init__(self, options: SinkOptions, names: list[str]) -> None:
        super().__init__(options, names)
        options.check_part()
        # Of its own also within foreachBatch, where several may write in one batch of a query.
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
        try:
            for url, parts in _by_url(messages).items():
                with open_writer(url) as writer:
                    for batch in Commit(self._query, 0, parts).batches():
                        writer.write_batch(batch)
                    writer.flush()
        finally:  # also if it failed: nobody asks for them again, and Spark does not say so
            remove_batch(self._folder_of(self._query), 0)

    @explained()
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages, self._query, self._batch)
