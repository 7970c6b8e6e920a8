"""For which rows of a batch does a stage raise, and what becomes of the others?

A stage is a lazy function of data frames: it raises only when Spark executes it. So the rows of a
batch are cached, and the stage runs on all of them. If it raises, it runs on each half, and so on,
until the rows for which it raises are found. One bad row among 100,000 takes some 35 small jobs; a
batch without bad rows needs no search.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from penstock.core.errors import PenstockError
from penstock.pipeline.run.errors import raised_in, reason_of, without_tracebacks
from penstock.pipeline.sink.row_messages import LETTER, for_output, letters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame

__all__ = ["Isolated", "TooManyErrors", "is_of_a_row", "is_of_stage", "isolate"]

#: The number of a row in its batch.
_NUMBER: Final = "penstock_row_number"
#: The most bad rows of a batch. With more, the rows are not the cause.
_MOST: Final = 1000


#: The form of errors of Python functions and of SQL.
_RAISED: Final = re.compile(r"Traceback \(most recent call last\)|\[[A-Z][A-Z0-9_.]+\]")
#: Spark's own messages when a process, a machine or the disk fails, or a file of another input is
#: gone. Errors of rows may have any words, so these are whole phrases.
_OF_SPARK: Final = re.compile(
    r"Python worker (failed to connect back|to connect back|exited unexpectedly)"
    r"|ExecutorLost|FetchFailed"
    r"|Job \d+ cancelled|Stage cancelled|Stage \d+ was cancelled"
    r"|SparkContext (was|has been) shut ?down|CANNOT_OPEN_SOCKET|OutOfMemoryError"
    r"|(IO|FileSystem|RocksDB)Exception: .*No space left|\[INTERNAL_ERROR|\[FAILED_READ_FILE",
)
#: Errors at the end of a Python traceback that no row causes: a full disk, or no memory.
_OF_MACHINE: Final = re.compile(
    r"OSError: \[Errno 28\]|(\w+\.)+StorageError: .*No space left on device"
    r"|(\w+\.)*\w*OutOfMemoryError: |pyspark\.\S+: \[CANNOT_OPEN_SOCKET\]"
)
#: Errors of the code of a stage, or of what is installed where the tasks run.
_OF_CODE: Final = re.compile(
    r"(ModuleNotFound|Import|Name|Syntax|Indentation)Error: |the package penstock is not installed"
)
#: Errors of the code of a stage, if they are the same for several rows; a row may name a file, too.
_OF_FILES: Final = re.compile(r"(FileNotFound|Permission|IsADirectory|NotADirectory)Error: ")


class TooManyErrors(PenstockError):
    """A stage raises for too many rows of a batch."""


class Isolated:
    """The output of a stage for a batch, and the rows for which it raised."""

    def __init__(self, good: DataFrame, bad: DataFrame) -> None:
        self.good = good
        #: As dead letters.
        self.bad = bad

    def forget(self) -> None:
        """Release the cached output."""
        self.good.unpersist()


def isolate(
    rows: DataFrame, work: Callable[[DataFrame], DataFrame], stage: str, receiver: str
) -> Isolated:
    """Run a stage on the rows of a batch, and separate the rows for which it raises.

    :raises TooManyErrors: it raises for more than `_MOST` rows.
    """
    # Each attempt needs the same rows under the same numbers. `persist` is not enough: Spark
    # computes the rows again when a view over them is replaced, as SQL stages do.
    numbered = rows.withColumn(_NUMBER, f.monotonically_increasing_id()).localCheckpoint()
    good, bad = _tried(numbered, work, stage)
    try:
        found = [letters(_message(numbered, one, receiver), receiver, why) for one, why in bad]
        return Isolated(good, _letters_of(rows, found))
    except BaseException:
        good.unpersist()
        raise


def _tried(
    numbered: DataFrame, work: Callable[[DataFrame], DataFrame], stage: str
) -> tuple[DataFrame, list[tuple[int, str]]]:
    """Return the output for the good rows, and the numbers and reasons of the bad rows."""
    whole = work(numbered.drop(_NUMBER)).persist()
    try:
        error = _error(whole)
    except BaseException:
        whole.unpersist()
        raise
    if error is None:
        return whole, []
    whole.unpersist()
    if _error(work(numbered.where(f.lit(False)).drop(_NUMBER))) is not None:
        raise error  # no row is the cause
    search = _Search(numbered, work, stage)
    numbers = sorted(row[0] for row in numbered.select(_NUMBER).collect())
    search.look(numbers)
    if len(search.found) == len(numbers) and is_of_stage([why for _, why in search.found]):
        raise error
    bad = [number for number, _ in search.found]
    return work(numbered.where(~f.col(_NUMBER).isin(bad)).drop(_NUMBER)).persist(), search.found


class _Search:
    """A binary search for the rows for which a stage raises."""

    def __init__(
        self, numbered: DataFrame, work: Callable[[DataFrame], DataFrame], stage: str
    ) -> None:
        self._numbered = numbered
        self._work = work
        self._stage = stage
        #: Number and reason of each bad row.
        self.found: list[tuple[int, str]] = []

    def look(self, numbers: list[int]) -> None:
        """Find the bad rows among `numbers`, of which at least one is bad."""
        if len(numbers) == 1:
            error = self._try(numbers)
            if error is not None:  # a row that raises only together with others is not bad
                self._add(numbers[0], error)
            return
        middle = len(numbers) // 2
        for half in (numbers[:middle], numbers[middle:]):
            error = self._try(half)
            if error is not None and len(half) == 1:
                self._add(half[0], error)
            elif error is not None:
                self.look(half)

    def _add(self, number: int, error: Exception) -> None:
        self.found.append((number, reason_of(error)))
        if len(self.found) > _MOST:
            raise TooManyErrors(
                f"{self._stage} raises for more than {_MOST:,} rows of a batch, the last with: "
                f"{reason_of(error)}",
                hint="mend it; the batch is done again",
            ) from error

    def _try(self, numbers: list[int]) -> Exception | None:
        number = f.col(_NUMBER)
        some = self._numbered.where(number.between(numbers[0], numbers[-1])).drop(_NUMBER)
        return _error(self._work(some))


def _error(frame: DataFrame) -> Exception | None:
    """Compute all rows, and return the error that a row raises.

    Errors that no row causes are raised.
    """
    try:
        if frame.is_cached:
            frame.count()
        else:
            frame.write.format("noop").mode("overwrite").save()
    except Exception as error:
        if not is_of_a_row(error):
            raise
        return error
    return None


def is_of_a_row(error: Exception) -> bool:
    """Tell whether a function or SQL raised an error, and not Spark's infrastructure.

    A process that does not start is no fault of a row: the batch fails, and is retried.
    """
    said = str(error)
    if isinstance(error, AnalysisException) or _OF_SPARK.search(without_tracebacks(said)):
        return False
    if any(_OF_MACHINE.match(f"{one.type}: {one.said}") for one in raised_in(said)):
        return False
    return _RAISED.search(said) is not None


def is_of_stage(reasons: Sequence[str]) -> bool:
    """Tell whether the stage, and no row, causes the errors of all rows of a batch.

    The attempt without rows does not show such errors: Spark may run no task for it, and a function
    may import a module or open a file only when it has a row.
    """
    if all(map(_OF_CODE.match, reasons)):
        return True
    return len(reasons) > 1 and len(set(reasons)) == 1 and _OF_FILES.match(reasons[0]) is not None


def _message(numbered: DataFrame, number: int, receiver: str) -> pa.RecordBatch:
    row = numbered.where(f.col(_NUMBER) == number).drop(_NUMBER)
    table: Any = for_output(row, receiver).drop("output").toArrow()
    return table.combine_chunks().to_batches()[0]


def _letters_of(rows: DataFrame, found: list[pa.RecordBatch]) -> DataFrame:
    if not found:
        return rows.sparkSession.createDataFrame([], LETTER)
    table = pa.Table.from_batches(found)
    return rows.sparkSession.createDataFrame(table, LETTER)
