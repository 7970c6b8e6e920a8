"""A checkpoint falls back, and no row is lost or doubled: or the query says which it had."""

from __future__ import annotations

import random
import re
import shutil
from typing import TYPE_CHECKING

import pytest

from penstock.core.errors import PenstockError
from penstock.protocols.flight import FlightServer, ServerOptions
from support.fallen import SINKS, History
from support.micro_batches import Refused, deliver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # on a busy machine a batch takes seconds


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    root = tmp_path / "remote"
    root.mkdir()
    with FlightServer(ServerOptions(root=root, port=0)) as served:
        yield served.url


@pytest.mark.parametrize(
    "sink",
    ["log", "flight", *(pytest.param(one, marks=pytest.mark.full) for one in ("ring", "parquet"))],
)
def test_a_batch_that_is_planned_again_with_more_is_completed(
    spark: SparkSession, tmp_path: Path, server: str, sink: str
) -> None:
    history = History(spark, tmp_path, sink, server)
    history.write(98)
    assert history.run() is None
    history.write(100)
    assert history.run() is None
    assert history.found() == list(range(200))
    history.fall_back(1)
    history.write(100)
    assert history.run() is None
    assert history.found() == list(range(300))


#: What Spark itself says of a checkpoint that it cannot use.
_BY_SPARK = re.compile(
    r"Incomplete log file|[Ll]og file was malformed|doesn't exist|does not exist"
    r"|lost its file metadata"
    r"|Malformed|CONCURRENT|Concurrent|Unexpected|JsonParse|JsonEOF|No content|MappingException"
    r"|STREAMING|Failed to read|IllegalState|NumberFormat|not found|cannot be"
)
#: What we say: both ranges, or which files do not fit together.
_BOTH_RANGES = re.compile(
    r"batch \d+ is made of .* but delivered was .*\d+|commits of batch \d+, (no )?offsets"
    r"|checkpoint: \S+ should be as Spark wrote it|_beginning.json is damaged: .* should be JSON"
)


#: Spark gives a process of Python ten seconds to start, which a busy machine may not keep.
_NOT_BEGUN = "Python worker failed to connect back"


def check(history: History, seed: int) -> str:
    """Let things happen; return how it ended."""
    chance = random.Random(seed)
    events: list[str] = []
    for _ in range(chance.randint(3, 6)):
        history.write(chance.randint(1, 30))
        refused = history.run()
        if refused is not None and _NOT_BEGUN in refused:
            refused = history.run()
        found = history.found()
        told = f"{history.sink} {seed}: {events} {refused}"
        assert len(found) == len(set(found)), f"doubled: {told}"
        if refused is not None:
            if _BOTH_RANGES.search(refused):
                return "refused by us"
            return "refused by Spark" if _BY_SPARK.search(refused) else f"unclear: {told}"
        assert found == list(range(history.written)), f"lost: {told}"
        if chance.random() < 0.7:
            history.keep()
        if chance.random() < 0.8:
            events.append(history.damage(chance))
    return "all there"


_FULL = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("sink", "histories"),
    [
        ("log", 1),
        ("parquet", 1),  # the others are below
        *(pytest.param(sink, 50, marks=_FULL) for sink in SINKS),
    ],
)
def test_whatever_happens_to_a_file_of_a_checkpoint_no_row_is_lost_or_doubled(
    spark: SparkSession, tmp_path: Path, server: str, sink: str, histories: int
) -> None:
    ends: dict[str, int] = {}
    first = 1000 * SINKS.index(sink)
    for seed in range(first, first + histories):
        folder = tmp_path / str(seed)
        folder.mkdir()
        history = History(spark, folder, sink, server, per_batch=seed % 3 * 7)
        end = check(history, seed)
        ends[end] = ends.get(end, 0) + 1
    print(sink, ends)  # noqa: T201 - how often each
    assert not [end for end in ends if end.startswith("unclear")]
    assert histories < 10 or ends.get("all there", 0) > histories // 8


class QuickHistory(History):
    """The same without a JVM: hundreds in a few seconds."""

    def run(self) -> str | None:
        """Deliver all that is there; return why that was refused."""
        urls = ",".join(f"log:{self.folder}/{name}" for name in "ab")
        try:
            deliver(
                urls,
                self.target()["url"],
                self.checkpoint,
                self.folder / "staging",
                self.per_batch or 10**9,
            )
        except Refused as error:
            return f"Malformed: {error}"
        except PenstockError as error:
            return str(error)
        return None


@pytest.mark.parametrize(
    "histories", [8, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("sink", ["log", "ring", "flight"])
def test_so_it_is_in_many_more_histories(
    tmp_path: Path, server: str, sink: str, histories: int
) -> None:
    ends: dict[str, int] = {}
    first = 10_000 * len(sink)  # others for each
    for seed in range(first, first + histories):
        folder = tmp_path / str(seed)
        folder.mkdir()
        end = check(QuickHistory(None, folder, sink, server, per_batch=seed % 3 * 7), seed)
        ends[end] = ends.get(end, 0) + 1
        shutil.rmtree(folder)
    print(sink, ends)  # noqa: T201 - how often each
    assert not [end for end in ends if end.startswith("unclear")]
    assert ends.get("all there", 0) >= histories // 8
