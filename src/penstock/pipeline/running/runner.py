"""How does a plan run: which query starts when, and how does all of it end?"""

from __future__ import annotations

import re
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.endpoints import open_writer
from penstock.core.errors import NotFound, PenstockError
from penstock.pipeline.links import streams_between
from penstock.pipeline.running.checkpoints import check_whole, own, used_before
from penstock.pipeline.running.faults import NotStarted, QueryFailed, reason_of
from penstock.pipeline.running.loss_book import LossBook
from penstock.pipeline.running.progress import Progress, Watch
from penstock.pipeline.running.queries import Prepared
from penstock.pipeline.running.signals import java_ignores
from penstock.pipeline.session import is_local, spark_session
from penstock.pipeline.streams import Streams
from penstock.pipeline.timing import AVAILABLE_NOW

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.pipeline.model import Source
    from penstock.pipeline.plan import Plan, Query
    from penstock.pipeline.timing import Trigger
    from penstock.queue.ownership import Ownership

__all__ = ["CHECKPOINTS", "Outcome", "run"]

#: Where a pipeline that does not say it keeps what it has done, below the working directory.
CHECKPOINTS: Final = ".penstock/checkpoints"

_MASTER: Final = re.compile(r"local($|\[|-cluster\[)|spark://|k8s://|yarn$")
_LOOK_EVERY: Final = 0.2
#: Seconds that a batch under way has to get done when all is to end.
_GRACE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    queries: tuple[Progress, ...]
    #: Whether somebody asked it to stop, and it did not come to an end by itself.
    was_stopped: bool

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.queries)

    @property
    def lost(self) -> int:
        return sum(one.lost_in_all for one in self.queries)

    @property
    def lost_unknown(self) -> int:
        return sum(one.lost_unknown for one in self.queries)

    @property
    def skipped(self) -> int:
        return sum(one.skipped_in_all for one in self.queries)


def run(
    plan: Plan,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
    checkpoint: str | None = None,
    once: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    show: Callable[[str, DataFrame], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run pipelines until they end, which with `once` is when all that is there now is done.

    `on_progress` is called for each batch of each query. When `should_stop` says so, the batches
    under way are finished, and the queries end; they go on from there when they run again.

    :raises ConfigError: something that a pipeline says does not work.
    :raises QueryFailed: a query ended by an error. The others are ended first.
    :raises NotStarted: Spark does not start: there is no such master, or a setting does not fit.
    :raises MissingSpark: PySpark is not installed.
    :raises MissingJava: Spark needs a Java that is not there.
    """
    _make_streams_between(plan)
    _check_sources(plan)
    folders = _python_folders(plan)
    session = spark or _session(plan, master, checkpoint, folders)
    running = _Run(plan, session, checkpoint, once, on_progress, show or _show, say)
    return running.run(should_stop)


class _Run:
    """All queries of a plan, from the first to the last."""

    def __init__(
        self,
        plan: Plan,
        spark: SparkSession,
        checkpoint: str | None,
        once: bool,
        on_progress: Callable[[Progress], None],
        show: Callable[[str, DataFrame], None],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._once = once
        self._on_progress = on_progress
        self._books = {
            query.name: book
            for query in plan.queries
            if (book := LossBook.of(self._where(query), self._sources(query))) is not None
        }
        self._waiting = [
            Prepared(query, plan.pipeline(query.pipeline), spark, show, self._losses(query))
            for query in plan.queries
        ]
        self._say = say
        for prepared in self._waiting:
            for note in prepared.notes:
                say(note)
        self._watches = {query.name: Watch(query.name) for query in plan.queries}
        self._queries: dict[str, StreamingQuery] = {}
        self._owned: list[Ownership] = []

    def _where(self, query: Query) -> str:
        setting = self._plan.pipeline(query.pipeline).settings.checkpoint
        return f"{_checkpoint(setting, self._checkpoint)}/{query.name}"

    def _sources(self, query: Query) -> list[Source]:
        sources = self._plan.pipeline(query.pipeline).sources
        return [sources[name] for name in query.sources]

    def _losses(self, query: Query) -> str | None:
        book = self._books.get(query.name)
        return None if book is None else str(book.folder)

    def run(self, should_stop: Callable[[], bool]) -> Outcome:
        try:
            while not (was_stopped := should_stop()):
                self._start_one()
                if not self._look() and not self._waiting:
                    break
                time.sleep(_LOOK_EVERY)
            if was_stopped:
                self._drain()
        finally:
            self._stop()
        self._settle()
        return Outcome(tuple(watch.now for watch in self._watches.values()), was_stopped)

    def _start_one(self) -> None:
        """Start the next query, so that the others are looked at between two.

        One that takes what is there now starts when those are done that write it.
        """
        for prepared in self._waiting:
            if all(map(self._is_done, self._to_wait_for(prepared.query))):
                self._waiting.remove(prepared)
                self._start(prepared)
                return

    def _start(self, prepared: Prepared) -> None:
        name = prepared.query.name
        where = self._where(prepared.query)
        self._watches[name].say("starting")
        try:
            self._owned += own(where)
            check_whole(where)
            if name in self._books:
                self._watches[name].begin(*self._books[name].begin(prepared.sinks))
            for target in used_before(where, prepared.sinks):
                self._say(
                    f"{name} begins anew, and {target} has batches of an earlier query: "
                    "the same rows may be there twice"
                )
            self._queries[name] = prepared.start(where, self._trigger(prepared.query))
        except PenstockError:
            raise
        except Exception as error:
            raise QueryFailed.of(name, error, "mend its stages or sinks, then try again") from error
        self._tell(name)

    def _trigger(self, query: Query) -> Trigger:
        settings = self._plan.pipeline(query.pipeline).settings
        return AVAILABLE_NOW if self._once else settings.trigger

    def _to_wait_for(self, query: Query) -> list[str]:
        """Return the queries that write what this one reads, if they and it come to an end."""
        if self._trigger(query) != AVAILABLE_NOW:
            return []
        before = [other for other in self._plan.queries if other.name in query.after]
        return [other.name for other in before if self._trigger(other) == AVAILABLE_NOW]

    def _is_done(self, name: str) -> bool:
        return self._watches[name].now.state == "done"

    def _look(self) -> bool:
        """Take in how far the queries are, and tell whether any is still at it."""
        is_any = False
        for name, query in self._queries.items():
            watch = self._watches[name]
            if watch.now.state in {"done", "failed"}:
                continue
            is_active = query.isActive  # asked first: what it reports afterwards is all of it
            if watch.look(query):
                self._tell(name)
            if is_active:
                is_any = True
                continue
            failure = query.exception()
            watch.say("done" if failure is None else "failed")
            self._tell(name)
            if failure is not None:
                raise QueryFailed.of(name, failure) from failure
        return is_any

    def _tell(self, name: str) -> None:
        self._on_progress(self._watches[name].now)

    def _drain(self) -> None:
        """Let each query finish the batch that it is at."""
        until = time.monotonic() + _GRACE
        at = {name: self._watches[name].now.batch for name in self._queries}
        while time.monotonic() < until and self._look():
            if not any(
                query.isActive
                and query.status["isTriggerActive"]
                and self._watches[name].now.batch == at[name]
                for name, query in self._queries.items()
            ):
                break
            time.sleep(_LOOK_EVERY / 4)

    def _stop(self) -> None:
        with ExitStack() as all_:  # each of them, whatever becomes of the others
            for owned in self._owned:
                all_.callback(owned.release, remove=True)
            for name in self._queries:
                all_.callback(self._end, name)

    def _settle(self) -> None:
        """Count what tasks did not find and no later batch has counted, and note it as told."""
        for name, book in self._books.items():
            if name in self._queries:
                total = book.total()
                if self._watches[name].settle(*total):
                    self._tell(name)
                book.tell(total)
                book.clean()

    def _end(self, name: str) -> None:
        query, watch = self._queries[name], self._watches[name]
        has_failed = not query.isActive and query.exception() is not None
        if query.isActive:
            query.stop()
        watch.look(query)
        if watch.now.state not in {"done", "failed"}:
            watch.say("failed" if has_failed else "done")
            self._tell(name)


def _show(name: str, rows: DataFrame) -> None:
    sys.stdout.write(f"{name}:\n")
    rows.show(truncate=False)


def _checkpoint(setting: str | None, given: str | None) -> str:
    where = given or setting or CHECKPOINTS
    return where if ":" in where else str(Path(where).absolute())


def _session(
    plan: Plan, master: str | None, checkpoint: str | None, folders: list[str]
) -> SparkSession:
    wanted = plan.session
    places = [_checkpoint(pipeline.settings.checkpoint, checkpoint) for pipeline in plan.pipelines]
    elsewhere = [place for place in places if not is_local(place)]
    settings = dict(wanted.spark)
    if wanted.shuffle_partitions is not None:
        settings["spark.sql.shuffle.partitions"] = str(wanted.shuffle_partitions)
    name = "+".join(pipeline.name for pipeline in plan.pipelines)
    where = master or wanted.master or "local[*]"
    place = (elsewhere or places)[0]
    if not _MASTER.match(where):  # Spark would say so in a page
        raise NotStarted(where, "there is no such kind", "as in local[4], spark://host:7077, yarn")
    try:
        with java_ignores(signal.SIGTERM):  # it is for us to end it, when the batches are done
            return spark_session(name, where, place, settings, python_path=folders)
    except PenstockError:
        raise
    except Exception as error:
        hint = "is there a master, and are the settings of Spark right?"
        raise NotStarted(where, reason_of(error), hint) from error


def _python_folders(plan: Plan) -> list[str]:
    """Return where functions of stages are looked for: beside the file, and where we are."""
    files = {Path(p.lines.file).absolute().parent for p in plan.pipelines if p.lines is not None}
    folders = [str(folder) for folder in (*sorted(files), Path.cwd()) if folder.is_dir()]
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return folders


def _make_streams_between(plan: Plan) -> None:
    """Create the streams by which one query feeds another: it may be read before it is written."""
    for sink, _ in streams_between(plan.pipelines):
        url = plan.pipeline(sink.pipeline).sinks[sink.name].stream
        if url is not None:
            open_writer(url).close()


def _check_sources(plan: Plan) -> None:
    """Look at every source before Spark is started, which takes a while.

    :raises ConfigError: there is no such stream, or it cannot be read.
    """
    for query in plan.queries:
        pipeline = plan.pipeline(query.pipeline)
        for name in query.sources:
            source = pipeline.sources[name]
            if source.stage is not None:
                continue
            streams = Streams(source.urls)
            try:
                streams.look()
            except PenstockError as error:
                hint = error.hint
                if isinstance(error, NotFound):
                    hint = f"start what writes it, or create it: penstock create {source.urls[0]}"
                raise pipeline.error(("sources", name, "url"), str(error), hint=hint) from error
            finally:
                streams.close()
