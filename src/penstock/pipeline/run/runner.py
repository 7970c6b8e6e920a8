"""How does a plan run: which query starts when, and how does all of it end?"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Tended
from penstock.core.dead_letter import KEEPS_REASONS, NO_REASONS
from penstock.core.endpoints import describe, endpoint_of, identity, open_writer, remove
from penstock.core.errors import NotFound, PenstockError, Unsupported
from penstock.core.units import format_duration
from penstock.core.url import URL, is_loopback
from penstock.pipeline.graph.check import check_functions, python_folders
from penstock.pipeline.graph.fields import AVAILABLE_NOW
from penstock.pipeline.graph.model import streams_between
from penstock.pipeline.run.checkpoints import Checkpoints, checkpoint_for, used_before
from penstock.pipeline.run.errors import (
    NotStarted,
    QueryFailed,
    SparkDied,
    is_outage,
    reason_of,
)
from penstock.pipeline.run.loss_book import LossBook
from penstock.pipeline.run.modules import is_remote, ship
from penstock.pipeline.run.progress import Progress, Watch
from penstock.pipeline.run.queries import Prepared
from penstock.pipeline.run.spark import CONNECT, java_ignores, spark_session
from penstock.pipeline.source.checkpoint import check_whole, is_local
from penstock.pipeline.source.inputs import Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.pipeline.graph.fields import Trigger
    from penstock.pipeline.graph.model import Source
    from penstock.pipeline.graph.plan import Plan, Query
    from penstock.pipeline.run.backfill import Backfill

__all__ = ["Outcome", "run", "session_for"]

_MASTER: Final = re.compile(r"local($|\[|-cluster\[)|spark://|k8s://|yarn$|sc://")
#: The host in the URL of a Spark Connect server.
_SERVER: Final = re.compile(r"sc://(\[[^\]]*\]|[^:/;]*)")
_LOOK_EVERY: Final = 0.2
_TEND_EVERY: Final = 2.0
#: Seconds for batches in progress to finish when the run ends.
_GRACE: Final = 30.0
#: Spark fails a query if a Python process does not start within ten seconds, which happens on a
#: busy machine; such a query is restarted up to `_MOST_RESTARTS` times.
_STARTED_TOO_SLOWLY: Final = re.compile(
    "Python worker failed to connect back|waiting for the Python worker to connect back"
)
_MOST_RESTARTS: Final = 3
#: Seconds to wait for the end of Java after an error.
_LAST_WORDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    queries: tuple[Progress, ...]
    #: Whether `should_stop` ended the run.
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
    backfill: Backfill | None = None,
    ui: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    show: Callable[[str, DataFrame], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run pipelines until they end; with `once`, until all available messages are processed.

    `on_progress` is called for each batch of each query. When `should_stop` returns true, the
    batches in progress are finished, and the queries end; the next run resumes them.

    With `ui`, Spark's web UI is served to this machine, unless the settings of the file say
    otherwise; `say` gets its address.

    With `backfill`, only that range is processed, beside a live run; messages that the live run
    processes are left out.

    :raises NothingToDo: a backfill has no messages to process.
    :raises Unfinished: an earlier backfill has messages of the range, and is not finished.
    :raises SparkDied: Java has ended, or the Spark Connect server does not answer.
    :raises ConfigError: a pipeline does not work.
    :raises QueryFailed: a query failed. The others are stopped first.
    :raises NotStarted: Spark does not start: the master or a setting is wrong.
    :raises MissingSpark: PySpark is not installed.
    :raises MissingJava: the Java that Spark needs is not installed.
    """
    check_functions(plan.pipelines)
    is_near = _is_near(master or plan.session.master or "")
    if is_near:
        _make_streams_between(plan)
        _check_sources(plan)
        _check_dead_letters(plan)
    with ExitStack() as owned:
        checkpoints = Checkpoints(plan, checkpoint, backfill, owned, say, is_near=is_near)
        session = spark or session_for(plan, master, checkpoint, ui=ui)
        if ui and not is_remote(session) and session.sparkContext.uiWebUrl:
            say(f"Spark's pages are at {session.sparkContext.uiWebUrl}")
        try:
            ship(session, plan.pipelines)
            running = _Run(plan, session, checkpoints, once, on_progress, show or _show, say)
            return running.run(should_stop)
        except PenstockError:
            raise
        except Exception as error:
            death = _death_of(session, error)
            if death is None:
                raise
            raise SparkDied(death) from error


def _is_near(master: str) -> bool:
    """Tell whether Spark's driver runs on this machine, and so has the same files."""
    found = _SERVER.match(master)
    return found is None or is_loopback(found[1])


def _death_of(spark: SparkSession, error: Exception, patience: float = _LAST_WORDS) -> str | None:
    """Return how Spark has ended; None: it still runs `patience` seconds after an error."""
    if is_remote(spark):
        said = reason_of(error)
        is_gone = "UNAVAILABLE" in str(error) or "Connection refused" in str(error)
        return f"the server of Spark Connect does not answer: {said}" if is_gone else None
    java = getattr(getattr(spark.sparkContext, "_gateway", None), "proc", None)
    if java is None:
        return None
    with suppress(subprocess.TimeoutExpired):
        java.wait(patience)
    code = java.returncode
    if code is None:
        return None
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"Java, in which Spark runs, has ended: {how}"


class _Run:
    """A run of all queries of a plan."""

    def __init__(
        self,
        plan: Plan,
        spark: SparkSession,
        checkpoints: Checkpoints,
        once: bool,
        on_progress: Callable[[Progress], None],
        show: Callable[[str, DataFrame], None],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._checkpoints = checkpoints
        self._spark = spark
        self._once = once or checkpoints.is_bounded
        self._on_progress = on_progress
        self._books = {
            query.name: book
            for query in checkpoints.queries
            if checkpoints.is_near
            and (book := LossBook.of(checkpoints.of(query), self._sources(query))) is not None
        }
        self._waiting = [
            Prepared(
                query,
                plan.pipeline(query.pipeline),
                spark,
                show,
                self._losses(query),
                checkpoints.options[query.name],
            )
            for query in checkpoints.queries
        ]
        self._say = say
        for prepared in self._waiting:
            for note in prepared.notes:
                say(note)
        self._watches = {query.name: Watch(query.name) for query in checkpoints.queries}
        self._queries: dict[str, StreamingQuery] = {}
        self._prepared = {prepared.query.name: prepared for prepared in self._waiting}
        self._restarts: Counter[str] = Counter()
        #: Queries after an outage: when each is restarted; its restarts since the last batch; and
        #: its batches at that time.
        self._due: dict[str, float] = {}
        self._attempts: Counter[str] = Counter()
        self._batches: Counter[str] = Counter()
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._urls = [
            sink.stream
            for pipeline in plan.pipelines
            for sink in pipeline.sinks.values()
            if sink.stream is not None and checkpoints.is_near
        ]
        self._tended = 0.0

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
                self._tend()
                time.sleep(_LOOK_EVERY)
            if was_stopped:
                self._drain()
        finally:
            self._stop()
        self._settle()
        return Outcome(tuple(watch.now for watch in self._watches.values()), was_stopped)

    def _tend(self) -> None:
        """Let streams do periodic work, such as closing open files, also without a batch."""
        if time.monotonic() < self._tended + _TEND_EVERY:
            return
        self._tended = time.monotonic()
        for url in self._urls:
            endpoint = endpoint_of(url)
            if isinstance(endpoint, Tended):
                try:
                    endpoint.tend(URL.parse(url))
                except PenstockError as error:
                    self._say(f"{url}: {error}")

    def _start_one(self) -> None:
        """Start the next query; the caller checks the running ones between two starts.

        With `available now`, a query starts when the queries that write its input are done.
        """
        for prepared in self._waiting:
            if all(map(self._is_done, self._to_wait_for(prepared.query))):
                self._waiting.remove(prepared)
                self._start(prepared)
                return

    def _start(self, prepared: Prepared) -> None:
        name = prepared.query.name
        where = self._checkpoints.of(prepared.query)
        self._watches[name].say("starting")
        try:
            if self._checkpoints.is_near:
                check_whole(where)
            if name in self._books:
                self._watches[name].begin(*self._books[name].begin(prepared.sinks))
            for target in self._used_before(where, prepared):
                self._say(
                    f"{name} begins anew, and {target} has batches of an earlier query: "
                    "the same rows may be there twice"
                )
            self._queries[name] = self._begun(prepared)
        except PenstockError:
            raise
        except Exception as error:
            if _death_of(self._spark, error) is not None:
                raise
            raise QueryFailed.of(name, error, "mend its stages or sinks, then try again") from error
        self._tell(name)

    def _used_before(self, where: str, prepared: Prepared) -> list[str]:
        if self._checkpoints.is_bounded or not self._checkpoints.is_near:
            return []  # a backfill expects batches of the live query
        return used_before(where, prepared.sinks)

    def _trigger(self, query: Query) -> Trigger:
        settings = self._plan.pipeline(query.pipeline).settings
        return AVAILABLE_NOW if self._once else settings.trigger

    def _to_wait_for(self, query: Query) -> list[str]:
        """Return the queries that write this one's input, if they and it run `available now`."""
        if self._trigger(query) != AVAILABLE_NOW:
            return []
        before = [other for other in self._checkpoints.queries if other.name in query.after]
        return [other.name for other in before if self._trigger(other) == AVAILABLE_NOW]

    def _is_done(self, name: str) -> bool:
        return self._watches[name].now.state == "done"

    def _look(self) -> bool:
        """Update the progress of the queries, and tell whether any is still running."""
        is_any = False
        for name, query in list(self._queries.items()):
            watch = self._watches[name]
            if watch.now.state in {"done", "failed"}:
                continue
            if name in self._due:
                is_any = True
                self._start_when_due(name)
                continue
            is_active = query.isActive  # asked first: what it reports afterwards is all of it
            if watch.look(query):
                self._tell(name)
            if is_active:
                is_any = True
                continue
            failure = query.exception()
            if failure is not None and self._starts_again(name, failure):
                is_any = True
                continue
            watch.say("done" if failure is None else "failed")
            self._tell(name)
            if failure is not None:
                raise QueryFailed.of(name, failure) from failure
        return is_any

    def _starts_again(self, name: str, failure: Exception) -> bool:
        """Restart a query that failed for a temporary reason; tell whether it will run again."""
        if not self._was_too_slow(name, failure):
            return self._waits_for(name, failure)
        self._start_again(name)
        return True

    def _was_too_slow(self, name: str, failure: Exception) -> bool:
        """Tell whether a Python process was slow to start, and a restart is left."""
        if not _STARTED_TOO_SLOWLY.search(str(failure)) or self._restarts[name] == _MOST_RESTARTS:
            return False
        self._restarts[name] += 1
        self._say(
            f"{name}: a Python process of Spark did not start in 10 s; it goes on where it was"
        )
        return True

    def _begun(self, prepared: Prepared) -> StreamingQuery:
        book = self._books.get(prepared.query.name)
        while True:
            if book is not None:
                book.note_delivered_attempt(prepared.sinks)
            try:
                return prepared.start(
                    self._checkpoints.of(prepared.query), self._trigger(prepared.query)
                )
            except Exception as error:
                if not self._was_too_slow(prepared.query.name, error):
                    raise

    def _waits_for(self, name: str, failure: Exception) -> bool:
        """Schedule the restart of a query after an outage, if its settings ask for that."""
        policy = self._prepared[name].pipeline.settings.restart
        if policy is None or not is_outage(failure):
            return False
        now = self._watches[name].now
        if now.batches > self._batches[name]:  # it went on meanwhile: another outage
            self._batches[name], self._attempts[name] = now.batches, 0
        self._attempts[name] += 1
        attempt, most = self._attempts[name], policy.max_attempts
        if most is not None and attempt > most:
            return False
        delay = policy.backoff().delay(attempt, self._rng)
        of = "" if most is None else f" of {most}"
        self._say(
            f"{name}: {reason_of(failure)}; it is started again in {format_duration(delay)} "
            f"(attempt {attempt}{of})"
        )
        self._watches[name].say("waiting")
        self._due[name] = time.monotonic() + delay
        self._tell(name)
        return True

    def _start_when_due(self, name: str) -> None:
        if time.monotonic() < self._due[name]:
            return
        del self._due[name]
        self._watches[name].start_again()
        self._tell(name)
        self._start_again(name)

    def _start_again(self, name: str) -> None:
        """Start a query that had failed; if an outage prevents that, it waits for the next try."""
        try:
            self._queries[name] = self._begun(self._prepared[name])
        except Exception as error:
            if self._waits_for(name, error):
                return
            if isinstance(error, PenstockError) or _death_of(self._spark, error) is not None:
                raise
            raise QueryFailed.of(name, error) from error

    def _tell(self, name: str) -> None:
        self._on_progress(self._watches[name].now)

    def _drain(self) -> None:
        """Let each query finish its current batch, for up to `_GRACE` seconds."""
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
            for name in self._queries:
                all_.callback(self._end, name)

    def _settle(self) -> None:
        """Add losses that tasks found in the last batch, and record all losses as reported."""
        for name, book in self._books.items():
            if name in self._queries:
                total = book.total()
                if self._watches[name].settle(*total):
                    self._tell(name)
                book.tell(total)
                book.clean()

    def _end(self, name: str) -> None:
        query, watch = self._queries[name], self._watches[name]
        is_failing = sys.exception() is not None
        if is_failing and _death_of(self._spark, ConnectionError(), 0) is not None:
            return
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


def session_for(
    plan: Plan, master: str | None = None, checkpoint: str | None = None, *, ui: bool = False
) -> SparkSession:
    """Return a Spark session with the settings of a plan; `ui`: with the web UI.

    :raises NotStarted: Spark does not start: the master or a setting is wrong.
    :raises MissingSpark: PySpark is not installed.
    :raises MissingJava: the Java that Spark needs is not installed.
    """
    wanted = plan.session
    folders = python_folders(plan.pipelines)
    checkpoints = [
        checkpoint_for(pipeline.settings.checkpoint, checkpoint) for pipeline in plan.pipelines
    ]
    elsewhere = [place for place in checkpoints if not is_local(place)]
    settings = dict(wanted.spark)
    if wanted.shuffle_partitions is not None:
        settings["spark.sql.shuffle.partitions"] = str(wanted.shuffle_partitions)
    name = "+".join(pipeline.name for pipeline in plan.pipelines)
    where = master or wanted.master or "local[*]"
    place = (elsewhere or checkpoints)[0]
    if ui and where.startswith("local"):
        # On a cluster the driver, and so its web UI, is reachable from other machines.
        settings = {"spark.ui.enabled": "true", **settings}
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if not _MASTER.match(where):  # Spark would say so in a page
        kinds = "as in local[4], spark://host:7077, sc://host:15002, yarn"
        raise NotStarted(where, "there is no such kind", kinds)
    try:
        with java_ignores(signal.SIGTERM):  # it is for us to end it, when the batches are done
            return spark_session(name, where, place, settings, python_path=folders)
    except PenstockError:
        raise
    except Exception as error:
        hint = "is there a master, and are the settings of Spark right?"
        if where.startswith(CONNECT):
            hint = "is there a Spark Connect server, and are the settings of SQL right?"
        raise NotStarted(where, reason_of(error), hint) from error


def _make_streams_between(plan: Plan) -> None:
    """Create the streams between queries: they may be read before the first write."""
    for sink, _ in streams_between(plan.pipelines):
        url = plan.pipeline(sink.pipeline).sinks[sink.name].stream
        if url is not None:
            open_writer(url).close()


def _check_sources(plan: Plan) -> None:
    """Check every source before the slow start of Spark.

    :raises ConfigError: a stream does not exist, or cannot be read.
    """
    for query in plan.queries:
        pipeline = plan.pipeline(query.pipeline)
        for name in query.sources:
            source = pipeline.sources[name]
            if source.stage is not None or source.format is not None:
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


def _check_dead_letters(plan: Plan) -> None:
    """Check that streams of dead letters keep the reasons, before the slow start of Spark.

    :raises ConfigError: one does not.
    """
    for pipeline in plan.pipelines:
        for name, sink in pipeline.sinks.items():
            if sink.dead_letter is not None and _drops_reasons(sink.dead_letter):
                raise pipeline.error(("sinks", name, "dead_letter"), NO_REASONS, hint=KEEPS_REASONS)


class _OnlyAsked(Exception):
    """Ends the `with` of a writer, so that a file is not finished, empty as it is."""


def _drops_reasons(url: str) -> bool:
    """Tell whether a stream does not store attributes; False, too, if that cannot be asked now.

    Another run may be writing to it, or its server be away: the query ends when it writes. A
    stream that does not exist is created for the question, and removed again if it drops them.
    """
    is_new, drops = _is_missing(url), False
    with suppress(PenstockError, _OnlyAsked), open_writer(url) as writer:
        drops = "attributes" in writer.cannot_carry
        raise _OnlyAsked
    if drops and is_new:
        try:
            remove(url)
        except Unsupported:  # such as files of pulses, of which there is only a folder yet
            with suppress(OSError):
                Path(str(identity(url).path)).rmdir()
        except PenstockError:
            pass
    return drops


def _is_missing(url: str) -> bool:
    """Tell whether a stream of this machine does not exist."""
    try:
        if identity(url).path is not None:
            describe(url)
    except NotFound:
        return True
    except PenstockError:
        pass
    return False
